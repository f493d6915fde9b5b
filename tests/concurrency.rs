//! Several sessions at once. Each test proves that its sessions met: it goes on only once the server says that one
//! waits for the other.

use std::collections::BTreeSet;
use std::sync::LazyLock;

use client_tests::{
    Background, Cluster, RudeClient, balance, contents, debit, debit_in_background, in_background, outcome, pid,
    report, simple, tamper, value, wait_until, wait_until_blocked, wait_until_blocked_count, wait_until_gone,
};
use postgres::Client;

// Two tests with 50 sessions each may run at the same time.
static CLUSTER: LazyLock<Cluster> =
    LazyLock::new(|| Cluster::start(&["max_connections=200", "max_prepared_transactions=20"]));

const CROWD: usize = 50;

/// A database with account 1, which holds 1000, and a session that watches the others. A debit was tried and rolled back, since
/// as long as `request_result` has no page debits go by statements (as those of most isolation specs do).
fn database() -> (String, Client) {
    let database = CLUSTER.database();
    let mut observer = CLUSTER.connect_to(&database);
    observer.batch_execute("INSERT INTO account VALUES (1, 1000)").unwrap();
    observer.batch_execute("BEGIN; SELECT debit_once(1, 'tried', 1); ROLLBACK").unwrap();
    (database, observer)
}

/// A session that holds the key uncommitted.
fn holder(database: &str) -> Client {
    let mut holder = CLUSTER.connect_to(database);
    holder.batch_execute("BEGIN").unwrap();
    assert_eq!(debit(&mut holder, 1, "key", 100).unwrap(), r#"{"balance": 900}"#);
    holder
}

/// A session that waits for the holder with the same key, after these settings, and its backend.
fn waiter(database: &str, observer: &mut Client, settings: &str, amount: i64) -> (i32, Background) {
    let mut waiter = CLUSTER.connect_to(database);
    waiter.batch_execute(settings).unwrap();
    let backend = pid(&mut waiter);
    let waiting = debit_in_background(waiter, 1, "key", amount);
    wait_until_blocked(observer, backend);
    (backend, waiting)
}

fn finish(call: Background) -> (Client, String) {
    let (client, result) = call.join().expect("no panic");
    (client, outcome(result))
}

/// What 50 sessions got that called at once: all of them were waiting for the account's row when it was let go.
fn crowd(database: &str, observer: &mut Client, call: impl Fn(usize) -> (String, i64)) -> Vec<String> {
    let mut gate = CLUSTER.connect_to(database);
    gate.batch_execute("BEGIN; SELECT FROM account WHERE account_id = 1 FOR UPDATE").unwrap();
    let calls: Vec<_> = (0..CROWD)
        .map(|i| {
            let (key, amount) = call(i);
            debit_in_background(CLUSTER.connect_to(database), 1, &key, amount)
        })
        .collect();
    wait_until_blocked_count(observer, CROWD);
    gate.batch_execute("COMMIT").unwrap();
    calls.into_iter().map(|call| finish(call).1).collect()
}

#[test]
fn fifty_sessions_with_one_new_key_execute_once_and_replay_49_times() {
    let (database, mut observer) = database();
    let answers = crowd(&database, &mut observer, |_| ("key".into(), 100));
    assert_eq!(answers, vec![r#"done: {"balance": 900}"#; CROWD]);
    assert_eq!(balance(&mut observer, 1), 900);
    assert_eq!(value(&mut observer, "SELECT count(*) FROM request_result"), "1");
}

#[test]
fn fifty_sessions_with_one_new_key_replay_also_when_the_balance_sufficed_once() {
    let (database, mut observer) = database();
    let answers = crowd(&database, &mut observer, |_| ("key".into(), 1000));
    assert_eq!(answers, vec![r#"done: {"balance": 0}"#; CROWD]);
    assert_eq!(balance(&mut observer, 1), 0);
}

#[test]
fn fifty_sessions_with_keys_of_their_own_all_execute_without_a_deadlock() {
    let (database, mut observer) = database();
    let answers = crowd(&database, &mut observer, |i| (format!("key-{i}"), 1));
    let expected: BTreeSet<_> = (1..=CROWD).map(|i| format!(r#"done: {{"balance": {}}}"#, 1000 - i)).collect();
    assert_eq!(BTreeSet::from_iter(answers), expected);
    assert_eq!(balance(&mut observer, 1), 950);
}

#[test]
fn fifty_sessions_with_one_new_key_and_two_amounts_execute_one_amount_and_refuse_the_other() {
    let (database, mut observer) = database();
    let answers = crowd(&database, &mut observer, |i| ("key".into(), if i % 2 == 0 { 100 } else { 200 }));
    let left = balance(&mut observer, 1);
    assert!(left == 900 || left == 800, "{left}");
    for (i, answer) in answers.iter().enumerate() {
        let executed = (i % 2 == 0) == (left == 900);
        let expected = if executed { format!(r#"done: {{"balance": {left}}}"#) } else { "22023".into() };
        assert_eq!(*answer, expected);
    }
}

#[test]
fn fifty_sessions_never_overdraw_an_account() {
    let (database, mut observer) = database();
    let answers = crowd(&database, &mut observer, |i| (format!("key-{i}"), 100));
    assert_eq!(answers.iter().filter(|answer| answer.starts_with("done")).count(), 10);
    assert_eq!(answers.iter().filter(|answer| *answer == "P0001").count(), CROWD - 10);
    assert_eq!(balance(&mut observer, 1), 0);
    assert_eq!(value(&mut observer, "SELECT count(*) FROM request_result"), "10");
}

#[test]
fn whoever_waited_replays_after_the_holders_commit() {
    let (database, mut observer) = database();
    let mut holder = holder(&database);
    let (_, waiting) = waiter(&database, &mut observer, "", 100);
    holder.batch_execute("COMMIT").unwrap();
    assert_eq!(finish(waiting).1, r#"done: {"balance": 900}"#);
    assert_eq!(balance(&mut observer, 1), 900);
}

#[test]
fn whoever_waited_with_another_amount_is_refused_after_the_holders_commit() {
    let (database, mut observer) = database();
    let mut holder = holder(&database);
    let (_, waiting) = waiter(&database, &mut observer, "", 101);
    holder.batch_execute("COMMIT").unwrap();
    assert_eq!(finish(waiting).1, "22023");
    assert_eq!(balance(&mut observer, 1), 900);
}

#[test]
fn whoever_waited_executes_after_the_holders_rollback() {
    let (database, mut observer) = database();
    let mut holder = holder(&database);
    let (_, waiting) = waiter(&database, &mut observer, "", 200);
    holder.batch_execute("ROLLBACK").unwrap();
    assert_eq!(finish(waiting).1, r#"done: {"balance": 800}"#);
    assert_eq!(balance(&mut observer, 1), 800);
}

#[test]
fn whoever_waited_executes_after_the_holders_rollback_to_a_savepoint() {
    let (database, mut observer) = database();
    let mut holder = CLUSTER.connect_to(&database);
    holder.batch_execute("BEGIN; SAVEPOINT s").unwrap();
    debit(&mut holder, 1, "key", 100).unwrap();
    let (_, waiting) = waiter(&database, &mut observer, "", 200);
    holder.batch_execute("ROLLBACK TO SAVEPOINT s").unwrap();
    assert_eq!(finish(waiting).1, r#"done: {"balance": 800}"#);
    holder.batch_execute("COMMIT").unwrap();
    assert_eq!(balance(&mut observer, 1), 800);
}

#[test]
fn whoever_waited_executes_after_the_holders_backend_was_terminated() {
    let (database, mut observer) = database();
    let mut holder = holder(&database);
    let (_, waiting) = waiter(&database, &mut observer, "", 100);
    let backend = pid(&mut holder);
    assert_eq!(value(&mut observer, &format!("SELECT pg_terminate_backend({backend})")), "t");
    assert_eq!(finish(waiting).1, r#"done: {"balance": 900}"#);
    assert_eq!(balance(&mut observer, 1), 900);
    assert_eq!(value(&mut observer, "SELECT count(*) FROM request_result"), "1");
}

#[test]
fn whoever_waits_for_the_unique_index_alone_replays_after_the_commit_and_executes_after_the_rollback() {
    // A record inserted by hand leaves the account's row free, so that only the index is left to wait for.
    let insert = r#"BEGIN; INSERT INTO request_result (account_id, operation, request_key, request, response)
                    VALUES (1, 'debit:v1', 'key', '{"amount": 100}', '{"balance": 7}')"#;
    for (end, amount, answer, left) in [
        ("COMMIT", 100, r#"done: {"balance": 7}"#, 1000),
        ("COMMIT", 101, "22023", 1000),
        ("ROLLBACK", 100, r#"done: {"balance": 900}"#, 900),
    ] {
        let (database, mut observer) = database();
        let mut holder = CLUSTER.connect_to(&database);
        holder.batch_execute(insert).unwrap();
        let (_, waiting) = waiter(&database, &mut observer, "", amount);
        holder.batch_execute(end).unwrap();
        assert_eq!(finish(waiting).1, answer, "{end} {amount}");
        assert_eq!(balance(&mut observer, 1), left);
    }
}

#[test]
fn a_wait_for_the_unique_index_alone_obeys_lock_timeout() {
    let (database, mut observer) = database();
    let mut holder = CLUSTER.connect_to(&database);
    holder
        .batch_execute(
            "BEGIN; INSERT INTO request_result (account_id, operation, request_key, request, response)
             VALUES (1, 'debit:v1', 'key', '{}', '{}')",
        )
        .unwrap();
    let (_, waiting) = waiter(&database, &mut observer, "SET lock_timeout = '1s'", 100);
    assert_eq!(finish(waiting).1, "55P03");
    holder.batch_execute("ROLLBACK").unwrap();
    assert_eq!(contents(&mut observer), "(1,1000)\n--\n\n--\n");
}

/// Breaks off a wait, and then proves that nothing was kept and that the key is usable.
fn broken_off(settings: &str, break_off: impl Fn(&mut Client, i32), expected: &[&str]) -> Client {
    let (database, mut observer) = database();
    let mut holder = holder(&database);
    let (backend, waiting) = waiter(&database, &mut observer, settings, 200);
    break_off(&mut observer, backend);
    let (client, got) = finish(waiting);
    assert!(expected.contains(&got.as_str()), "{got}");
    holder.batch_execute("ROLLBACK").unwrap();
    assert_eq!(contents(&mut observer), "(1,1000)\n--\n\n--\n");
    assert_eq!(debit(&mut observer, 1, "key", 300).unwrap(), r#"{"balance": 700}"#);
    client
}

#[test]
fn a_wait_that_exceeds_lock_timeout_ends_in_55p03_and_keeps_nothing() {
    let mut client = broken_off("SET lock_timeout = '1s'", |_, _| (), &["55P03"]);
    assert_eq!(debit(&mut client, 1, "key", 300).unwrap(), r#"{"balance": 700}"#);
}

#[test]
fn a_wait_that_exceeds_statement_timeout_ends_in_57014_and_keeps_nothing() {
    let mut client = broken_off("SET statement_timeout = '1s'", |_, _| (), &["57014"]);
    assert_eq!(debit(&mut client, 1, "key", 300).unwrap(), r#"{"balance": 700}"#);
}

#[test]
fn a_wait_that_is_cancelled_ends_in_57014_and_keeps_nothing() {
    let cancel = |observer: &mut Client, backend: i32| {
        assert_eq!(value(observer, &format!("SELECT pg_cancel_backend({backend})")), "t");
    };
    let mut client = broken_off("", cancel, &["57014"]);
    assert_eq!(debit(&mut client, 1, "key", 300).unwrap(), r#"{"balance": 700}"#);
}

#[test]
fn a_wait_whose_backend_is_terminated_keeps_nothing() {
    let terminate = |observer: &mut Client, backend: i32| {
        assert_eq!(value(observer, &format!("SELECT pg_terminate_backend({backend})")), "t");
        wait_until_gone(observer, backend);
    };
    broken_off("", terminate, &["57P01", "closed"]);
}

#[test]
fn a_key_held_by_a_killed_server_process_is_free_at_once_after_the_restart() {
    // A killed process takes the whole cluster through crash recovery, hence one of its own.
    let cluster = Cluster::start(&["restart_after_crash=on"]);
    let database = cluster.database();
    let mut holder = cluster.connect_to(&database);
    holder.batch_execute("INSERT INTO account VALUES (1, 1000)").unwrap();
    debit(&mut holder, 1, "committed", 100).unwrap();
    holder.batch_execute("BEGIN").unwrap();
    debit(&mut holder, 1, "key", 200).unwrap();
    let backend = pid(&mut holder);
    cluster.run("sh", &["-c", &format!("kill -KILL {backend}")]);
    assert_eq!(outcome(simple(&mut holder, "SELECT 1")), "closed");

    let mut client = cluster.connect_after_crash(&database, backend);
    // No lease has to run out first.
    client.batch_execute("SET statement_timeout = '2s'").unwrap();
    assert_eq!(debit(&mut client, 1, "key", 300).unwrap(), r#"{"balance": 600}"#);
    assert_eq!(debit(&mut client, 1, "committed", 100).unwrap(), r#"{"balance": 900}"#);
    assert_eq!(balance(&mut client, 1), 600);
}

/// A client that debits, says this as its last words, and hangs up without waiting for the answer.
fn hang_up_after(last_words: Option<&str>) -> Client {
    let (database, mut observer) = database();
    let mut client = RudeClient::connect(CLUSTER.directory(), &database);
    client.send("SET application_name = 'rude'; BEGIN; SELECT debit_once(1, 'key', 100)");
    client.read_until_ready();
    if let Some(sql) = last_words {
        client.send(sql);
    }
    drop(client);
    wait_until(
        &mut observer,
        "SELECT NOT EXISTS (SELECT FROM pg_stat_activity
                             WHERE datname = current_database() AND application_name = 'rude')",
    );
    observer
}

#[test]
fn a_commit_whose_answer_was_lost_is_replayed_to_the_retry() {
    let mut observer = hang_up_after(Some("COMMIT"));
    let before = contents(&mut observer);
    assert_eq!(debit(&mut observer, 1, "key", 100).unwrap(), r#"{"balance": 900}"#);
    assert_eq!(contents(&mut observer), before);
    assert_eq!(balance(&mut observer, 1), 900);
}

#[test]
fn a_connection_that_was_lost_before_the_commit_leaves_the_key_free() {
    let mut observer = hang_up_after(None);
    assert_eq!(contents(&mut observer), "(1,1000)\n--\n\n--\n");
    assert_eq!(debit(&mut observer, 1, "key", 300).unwrap(), r#"{"balance": 700}"#);
}

const SNAPSHOTS: [&str; 2] = ["REPEATABLE READ", "SERIALIZABLE"];

/// A retry by the rules: a new transaction at the same isolation level with the same key.
fn retry(client: &mut Client, isolation: &str, amount: i64) -> String {
    client.batch_execute(&format!("ROLLBACK; BEGIN ISOLATION LEVEL {isolation}")).unwrap();
    let answer = outcome(debit(client, 1, "key", amount));
    client.batch_execute("COMMIT").unwrap();
    answer
}

#[test]
fn under_snapshot_isolation_the_one_who_waited_gets_40001_and_replays_in_a_new_transaction() {
    for isolation in SNAPSHOTS {
        let (database, mut observer) = database();
        let mut holder = CLUSTER.connect_to(&database);
        holder.batch_execute(&format!("BEGIN ISOLATION LEVEL {isolation}")).unwrap();
        debit(&mut holder, 1, "key", 100).unwrap();
        let settings = format!("BEGIN ISOLATION LEVEL {isolation}");
        let (_, waiting) = waiter(&database, &mut observer, &settings, 100);
        holder.batch_execute("COMMIT").unwrap();
        let (mut client, got) = finish(waiting);
        assert_eq!(got, "40001", "{isolation}");
        assert_eq!(retry(&mut client, isolation, 100), r#"done: {"balance": 900}"#);
        assert_eq!(retry(&mut client, isolation, 101), "22023");
        assert_eq!(balance(&mut observer, 1), 900);
    }
}

#[test]
fn under_snapshot_isolation_the_one_who_waited_executes_after_the_holders_rollback() {
    for isolation in SNAPSHOTS {
        let (database, mut observer) = database();
        let mut holder = holder(&database);
        let settings = format!("BEGIN ISOLATION LEVEL {isolation}");
        let (_, waiting) = waiter(&database, &mut observer, &settings, 100);
        holder.batch_execute("ROLLBACK").unwrap();
        let (mut client, got) = finish(waiting);
        assert_eq!(got, r#"done: {"balance": 900}"#, "{isolation}");
        client.batch_execute("COMMIT").unwrap();
        assert_eq!(balance(&mut observer, 1), 900);
    }
}

#[test]
fn under_snapshot_isolation_a_key_committed_after_the_snapshot_gives_40001_and_then_replays() {
    for isolation in SNAPSHOTS {
        // The record may be there without a new version of the account, as after a restore: then only the index tells.
        for by_hand in [false, true] {
            let (database, mut observer) = database();
            let mut late = CLUSTER.connect_to(&database);
            late.batch_execute(&format!("BEGIN ISOLATION LEVEL {isolation}; SELECT FROM account")).unwrap();
            if by_hand {
                observer
                    .batch_execute(
                        r#"INSERT INTO request_result (account_id, operation, request_key, request, response)
                           VALUES (1, 'debit:v1', 'key', '{"amount": 100}', '{"balance": 900}')"#,
                    )
                    .unwrap();
            } else {
                debit(&mut observer, 1, "key", 100).unwrap();
            }
            let before = contents(&mut observer);
            assert_eq!(outcome(debit(&mut late, 1, "key", 100)), "40001", "{isolation}, by hand: {by_hand}");
            assert_eq!(retry(&mut late, isolation, 100), r#"done: {"balance": 900}"#);
            assert_eq!(contents(&mut observer), before);
        }
    }
}

#[test]
fn a_deadlock_that_the_caller_makes_passes_through_as_40p01_and_the_victim_can_retry() {
    let (database, mut observer) = database();
    observer.batch_execute("INSERT INTO account VALUES (2, 1000)").unwrap();
    let mut sessions = [CLUSTER.connect_to(&database), CLUSTER.connect_to(&database)];
    for (account, session) in (1..).zip(&mut sessions) {
        session.batch_execute("BEGIN; SET LOCAL deadlock_timeout = '200ms'").unwrap();
        debit(session, account, "own", 100).unwrap();
    }
    let [mut one, two] = sessions;
    let first = pid(&mut one);
    let one = debit_in_background(one, 2, "other", 100);
    wait_until_blocked(&mut observer, first);
    let two = debit_in_background(two, 1, "other", 100);

    let mut ends = [(2, finish(one)), (1, finish(two))];
    // Which of them the server chooses depends on whose deadlock_timeout ends first.
    ends.sort_by_key(|(_, (_, got))| got == "40P01");
    let [(_, (mut survivor, survived)), (account, (mut victim, died))] = ends;
    assert_eq!((survived.as_str(), died.as_str()), (r#"done: {"balance": 900}"#, "40P01"));
    survivor.batch_execute("COMMIT").unwrap();
    victim.batch_execute("ROLLBACK").unwrap();
    assert_eq!((balance(&mut observer, 1), balance(&mut observer, 2)), (900, 900));
    assert_eq!(debit(&mut victim, account, "other", 100).unwrap(), r#"{"balance": 800}"#);
}

#[test]
fn savepoints_of_a_caller_managed_transaction_decide_what_is_kept() {
    let (database, mut observer) = database();
    let mut client = CLUSTER.connect_to(&database);
    let mut transaction = client.transaction().unwrap();
    let call = "SELECT debit_once(1, $1, $2)::text";
    let mut kept = transaction.savepoint("kept").unwrap();
    let answer: String = kept.query_one(call, &[&"a", &100_i64]).unwrap().get(0);
    assert_eq!(answer, r#"{"balance": 900}"#);
    let mut undone = kept.savepoint("undone").unwrap();
    let answer: String = undone.query_one(call, &[&"b", &50_i64]).unwrap().get(0);
    assert_eq!(answer, r#"{"balance": 850}"#);
    undone.rollback().unwrap();
    let mut refused = kept.savepoint("refused").unwrap();
    assert_eq!(report(refused.query_one(call, &[&"a", &101_i64])).code().code(), "22023");
    refused.rollback().unwrap();
    kept.commit().unwrap();
    let answer: String = transaction.query_one(call, &[&"b", &1_i64]).unwrap().get(0);
    assert_eq!(answer, r#"{"balance": 899}"#);
    assert_eq!(contents(&mut observer), "(1,1000)\n--\n\n--\n");
    transaction.commit().unwrap();

    assert_eq!(balance(&mut observer, 1), 899);
    assert_eq!(debit(&mut observer, 1, "a", 100).unwrap(), r#"{"balance": 900}"#);
    assert_eq!(debit(&mut observer, 1, "b", 1).unwrap(), r#"{"balance": 899}"#);
}

#[test]
fn no_lock_outlives_the_transaction_and_none_of_them_is_an_advisory_lock() {
    let (database, mut observer) = database();
    let mut client = CLUSTER.connect_to(&database);
    let backend = pid(&mut client);
    let locks = |observer: &mut Client, condition: &str| {
        value(observer, &format!("SELECT count(*) FROM pg_locks WHERE pid = {backend} AND {condition}"))
    };
    for end in ["COMMIT", "ROLLBACK"] {
        client.batch_execute("BEGIN").unwrap();
        debit(&mut client, 1, end, 100).unwrap();
        assert_ne!(locks(&mut observer, "locktype = 'relation'"), "0");
        assert_eq!(locks(&mut observer, "locktype IN ('advisory', 'userlock', 'object')"), "0");
        client.batch_execute(end).unwrap();
        assert_eq!(locks(&mut observer, "true"), "0");
    }
    // By itself, as a replay, and refused.
    for (key, amount) in [("alone", 1), ("alone", 1), ("alone", 2), ("poor", 10_000)] {
        let _ = outcome(debit(&mut client, 1, key, amount));
        // The server reports an error before it cleans up, and answers the next request after that.
        client.batch_execute("").unwrap();
        assert_eq!(locks(&mut observer, "true"), "0");
    }
}

#[test]
fn a_purge_neither_waits_for_a_running_debit_nor_blocks_debit_and_replay() {
    let (database, mut observer) = database();
    debit(&mut observer, 1, "old", 1).unwrap();
    tamper(&mut observer, "UPDATE request_result SET created_at = '2001-01-01'");

    let mut holder = CLUSTER.connect_to(&database);
    holder.batch_execute("BEGIN").unwrap();
    debit(&mut holder, 1, "key", 1).unwrap();

    // Each would end in 55P03 if it had to wait.
    let mut purge = CLUSTER.connect_to(&database);
    purge.batch_execute("SET lock_timeout = '1s'; BEGIN").unwrap();
    assert_eq!(value(&mut purge, "SELECT purge_expired_keys('0')"), "1");

    // While the purge is not committed yet: its key replays, and a new one executes.
    holder.batch_execute("COMMIT; SET lock_timeout = '1s'").unwrap();
    assert_eq!(debit(&mut holder, 1, "old", 1).unwrap(), r#"{"balance": 999}"#);
    assert_eq!(debit(&mut holder, 1, "new", 1).unwrap(), r#"{"balance": 997}"#);

    // A second purge leaves to the first what the first is deleting.
    assert_eq!(value(&mut holder, "SELECT purge_expired_keys('1 year')"), "0");
    purge.batch_execute("COMMIT").unwrap();
    assert_eq!(debit(&mut observer, 1, "old", 7).unwrap(), r#"{"balance": 990}"#);
}

/// A handler that notes each of its runs in a sequence, which no rollback undoes, fails on as many of the first as
/// `failures` says, and does not end before the advisory lock 1 is free.
fn slow_handler(observer: &mut Client, failures: usize) {
    observer
        .batch_execute(&format!(
            "CREATE SEQUENCE run;
             CREATE FUNCTION slow(p_account bigint, p_request jsonb) RETURNS jsonb LANGUAGE plpgsql AS $$
             DECLARE
                 run bigint := nextval('run');
             BEGIN
                 PERFORM pg_advisory_xact_lock_shared(1);
                 UPDATE account SET balance = balance - (p_request ->> 'amount')::bigint WHERE account_id = p_account;
                 IF run <= {failures} THEN
                     RAISE 'failed' USING ERRCODE = 'ZZ001';
                 END IF;
                 RETURN jsonb_build_object('run', run);
             END $$"
        ))
        .unwrap();
}

/// What 50 sessions got that called `run_once` with one new key while the handler of the first was still running.
fn crowd_at_a_slow_handler(failures: usize) -> (Client, Vec<String>) {
    let (database, mut observer) = database();
    slow_handler(&mut observer, failures);
    let mut gate = CLUSTER.connect_to(&database);
    gate.batch_execute("BEGIN; SELECT pg_advisory_xact_lock(1)").unwrap();
    let call = r#"SELECT format('%s %s', response, replayed)
                    FROM run_once_outcome(1, 'slow:v1', 'key', '{"amount": 100}', 'slow(bigint, jsonb)')"#;
    let calls: Vec<_> = (0..CROWD).map(|_| in_background(CLUSTER.connect_to(&database), call.into())).collect();
    wait_until_blocked_count(&mut observer, CROWD);
    assert_eq!(value(&mut observer, "SELECT last_value FROM run"), "1");
    gate.batch_execute("COMMIT").unwrap();
    let mut answers: Vec<_> = calls.into_iter().map(|call| finish(call).1).collect();
    answers.sort();
    (observer, answers)
}

#[test]
fn fifty_sessions_with_one_new_key_of_a_slow_handler_run_it_once_and_replay_49_times() {
    let (mut observer, answers) = crowd_at_a_slow_handler(0);
    assert_eq!(answers[0], r#"done: {"run": 1} f"#);
    assert_eq!(answers[1..], vec![r#"done: {"run": 1} t"#; CROWD - 1]);
    assert_eq!(value(&mut observer, "SELECT last_value FROM run"), "1");
    assert_eq!(balance(&mut observer, 1), 900);
    assert_eq!(value(&mut observer, "SELECT count(*) FROM request_result"), "1");
}

#[test]
fn fifty_sessions_with_one_new_key_of_a_handler_that_fails_three_times_run_it_until_it_succeeds() {
    let (mut observer, answers) = crowd_at_a_slow_handler(3);
    assert_eq!(answers[..3], ["ZZ001", "ZZ001", "ZZ001"]);
    assert_eq!(answers[3], r#"done: {"run": 4} f"#);
    assert_eq!(answers[4..], vec![r#"done: {"run": 4} t"#; CROWD - 4]);
    assert_eq!(value(&mut observer, "SELECT last_value FROM run"), "4");
    assert_eq!(balance(&mut observer, 1), 900);
}

#[test]
fn twenty_sessions_with_overlapping_messages_in_any_order_apply_each_once_without_a_deadlock() {
    const SESSIONS: usize = 20;
    let (database, mut observer) = database();
    // Message i is for account i % 10; a session delivers about two thirds of the 200, in an order of its own.
    observer
        .batch_execute(
            "DELETE FROM account;
             INSERT INTO account SELECT i, 0 FROM generate_series(0, 9) AS i;
             CREATE FUNCTION id(i int) RETURNS uuid LANGUAGE sql IMMUTABLE AS 'SELECT md5(i::text)::uuid';
             CREATE FUNCTION deliver(session int) RETURNS text LANGUAGE plpgsql AS $$
             DECLARE
                 ids uuid[];
                 accounts bigint[];
                 accepted uuid[];
             BEGIN
                 SELECT array_agg(id(i) ORDER BY md5(format('%s %s', session, i))),
                        array_agg(i % 10 ORDER BY md5(format('%s %s', session, i)))
                   INTO ids, accounts
                   FROM generate_series(0, 199) AS i
                  WHERE i < 10 OR (i + session) % 3 > 0;
                 accepted := ARRAY(SELECT accept_messages('billing', ids, accounts));
                 -- The effect, in an order that is nobody's.
                 FOR i IN 1 .. cardinality(accepted) LOOP
                     UPDATE account SET balance = balance + 1
                      WHERE account_id = accounts[array_position(ids, accepted[i])];
                 END LOOP;
                 RETURN array_to_string(accepted, ',');
             END $$",
        )
        .unwrap();
    let mut gate = CLUSTER.connect_to(&database);
    gate.batch_execute("BEGIN; SELECT FROM account WHERE account_id = 0 FOR UPDATE").unwrap();
    let calls: Vec<_> =
        (0..SESSIONS).map(|i| in_background(CLUSTER.connect_to(&database), format!("SELECT deliver({i})"))).collect();
    wait_until_blocked_count(&mut observer, SESSIONS);
    gate.batch_execute("COMMIT").unwrap();
    let mut accepted = Vec::new();
    for call in calls {
        let answer = finish(call).1;
        let ids = answer.strip_prefix("done: ").unwrap_or_else(|| panic!("{answer}"));
        accepted.extend(ids.split(',').filter(|id| !id.is_empty()).map(str::to_owned));
    }
    accepted.sort();
    let every =
        value(&mut observer, "SELECT string_agg(id(i)::text, ',' ORDER BY id(i)) FROM generate_series(0, 199) i");
    assert_eq!(accepted.join(","), every);
    assert_eq!(value(&mut observer, "SELECT count(*) FROM processed_message"), "200");
    assert_eq!(value(&mut observer, "SELECT count(*) FROM account WHERE balance = 20"), "10");
}

/// What the cancellation and 20 executions of one new key got, all waiting for the account at once, with the cancellation
/// first or second in the queue.
fn cancellation_in_a_crowd(operation: &str, execution: &str, first: bool) -> (Client, String, Vec<String>) {
    let (database, mut observer) = database();
    slow_handler(&mut observer, 0);
    let mut gate = CLUSTER.connect_to(&database);
    gate.batch_execute("BEGIN; SELECT FROM account WHERE account_id = 1 FOR UPDATE").unwrap();
    let mut next = 0;
    let mut call = |observer: &mut Client, sql: &str| {
        let call = in_background(CLUSTER.connect_to(&database), sql.into());
        next += 1;
        wait_until_blocked_count(observer, next);
        call
    };
    let cancel = format!("SELECT cancel_request(1, '{operation}', 'key')");
    let mut executions = Vec::new();
    if !first {
        executions.push(call(&mut observer, execution));
    }
    let cancellation = call(&mut observer, &cancel);
    while executions.len() < 20 {
        executions.push(call(&mut observer, execution));
    }
    gate.batch_execute("COMMIT").unwrap();
    let cancellation = finish(cancellation).1;
    (observer, cancellation, executions.into_iter().map(|call| finish(call).1).collect())
}

#[test]
fn a_cancellation_among_twenty_executions_stops_all_of_them_or_gets_the_one_response_of_all() {
    let run = r#"SELECT run_once(1, 'slow:v1', 'key', '{"amount": 100}', 'slow(bigint, jsonb)')"#;
    for (operation, execution, response) in
        [("debit:v1", "SELECT debit_once(1, 'key', 100)", r#"{"balance": 900}"#), ("slow:v1", run, r#"{"run": 1}"#)]
    {
        let (mut observer, cancellation, executions) = cancellation_in_a_crowd(operation, execution, true);
        assert_eq!(cancellation, "done: NULL", "{operation}");
        assert_eq!(executions, vec!["22023"; 20], "{operation}");
        assert_eq!(balance(&mut observer, 1), 1000, "{operation}");
        assert_eq!(outcome(simple(&mut observer, execution)), "22023");
        assert_eq!(value(&mut observer, "SELECT is_called FROM run"), "f", "the handler ran");

        let (mut observer, cancellation, executions) = cancellation_in_a_crowd(operation, execution, false);
        assert_eq!(cancellation, format!("done: {response}"), "{operation}");
        assert_eq!(executions, vec![format!("done: {response}"); 20], "{operation}");
        assert_eq!(balance(&mut observer, 1), 900, "{operation}");
        assert_eq!(value(&mut observer, execution), response);
    }
}

/// Calls that take an identity, each with an account of its own, what they answer the first time, and then.
const CALLS: [(&str, &str, &str); 6] = [
    ("SELECT debit_once(1, 'key', 100)", r#"{"balance": 900}"#, r#"{"balance": 900}"#),
    ("SELECT credit_once(2, 'key', 100)", r#"{"balance": 1100}"#, r#"{"balance": 1100}"#),
    (
        r#"SELECT format('%s %s', response, replayed)
             FROM run_once_outcome(3, 'echo:v1', 'key', '{"a": [1]}', 'echo(bigint, jsonb)')"#,
        r#"{"a": [1]} f"#,
        r#"{"a": [1]} t"#,
    ),
    ("SELECT accept_message('a', md5('1')::uuid, 4)", "t", "f"),
    ("SELECT apply_message_once('b', md5('1')::uuid, 5, -100)", "900", "NULL"),
    ("SELECT accept_version('a', 'order', 7)", "t", "f"),
];

#[test]
fn a_prepared_transaction_holds_its_keys_until_it_is_committed_or_rolled_back() {
    let (database, mut observer) = database();
    observer
        .batch_execute(
            "INSERT INTO account SELECT i, 1000 FROM generate_series(2, 5) AS i;
             CREATE FUNCTION echo(bigint, jsonb) RETURNS jsonb LANGUAGE sql AS 'SELECT $2'",
        )
        .unwrap();
    for (call, first, then) in CALLS {
        for (end, expected) in [("ROLLBACK PREPARED", first), ("COMMIT PREPARED", then)] {
            let mut holder = CLUSTER.connect_to(&database);
            holder.batch_execute("BEGIN").unwrap();
            assert_eq!(value(&mut holder, call), first, "{call}");
            holder.batch_execute(&format!("PREPARE TRANSACTION '{database}'")).unwrap();
            // The session is gone, and its transaction is not.
            drop(holder);

            let mut waiter = CLUSTER.connect_to(&database);
            waiter.batch_execute("SET lock_timeout = '100ms'").unwrap();
            assert_eq!(outcome(simple(&mut waiter, call)), "55P03", "{call}");
            waiter.batch_execute("RESET lock_timeout; BEGIN").unwrap();
            let backend = pid(&mut waiter);
            let waiting = in_background(waiter, call.into());
            wait_until_blocked(&mut observer, backend);
            observer.batch_execute(&format!("{end} '{database}'")).unwrap();
            let (mut waiter, got) = finish(waiting);
            assert_eq!(got, format!("done: {expected}"), "{call} after {end}");
            assert_eq!(value(&mut waiter, call), then, "{call} after {end}");
            // The identity is free again for the next round.
            waiter.batch_execute("ROLLBACK").unwrap();
        }
        assert_eq!(value(&mut observer, call), then, "{call}");
    }
    let prepared = "SELECT count(*) FROM pg_prepared_xacts WHERE database = current_database()";
    assert_eq!(value(&mut observer, prepared), "0");
    assert_eq!(
        value(&mut observer, "SELECT string_agg(balance::text, ' ' ORDER BY account_id) FROM account"),
        "900 1100 1000 1000 900"
    );
}
