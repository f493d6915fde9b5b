//! `CALL purge` from the client's side: beside an old snapshot, interrupted, and twice at once.

use std::sync::{Arc, LazyLock, Mutex};

use client_tests::{
    Cluster, balance, debit, in_background, make_purges_stop, outcome, pid, simple, value, wait_until,
    wait_until_blocked,
};
use postgres::{Client, Config, NoTls};

static CLUSTER: LazyLock<Cluster> = LazyLock::new(|| Cluster::start(&[]));

/// A database where account 1 holds 1000, with so many records that are three days old, `old 1` and so on, beside the
/// debit `new` of 100; and a session in it.
fn database(old: u32) -> (String, Client) {
    let database = CLUSTER.database();
    let mut client = CLUSTER.connect_to(&database);
    client.batch_execute("INSERT INTO account VALUES (1, 1000)").unwrap();
    debit(&mut client, 1, "new", 100).unwrap();
    expire(&mut client, "old", old);
    (database, client)
}

fn expire(client: &mut Client, name: &str, records: u32) {
    client
        .batch_execute(&format!(
            "INSERT INTO request_result (account_id, operation, request_key, request, response, created_at)
             SELECT 1, 'debit:v1', '{name} ' || i, '{{\"amount\": 1}}', '{{\"balance\": 7}}', now() - interval '3 days'
               FROM generate_series(1, {records}) AS i"
        ))
        .unwrap();
}

/// Makes purges stop after so many deleted records, in the middle of the next batch, while a session holds advisory lock 7;
/// and such a session.
fn stop_after(database: &str, records: u64) -> Client {
    let mut holder = CLUSTER.connect_to(database);
    make_purges_stop(&mut holder, records);
    value(&mut holder, "SELECT pg_advisory_lock(7)");
    holder
}

/// `CALL purge`, and what it answers: deleted, remaining, and whether there is an oldest.
fn purge(client: &mut Client, batch_size: u32) -> String {
    let row = client.query_one(&format!("CALL purge({batch_size})"), &[]).expect("a row");
    let oldest = row.get::<_, Option<std::time::SystemTime>>(2);
    format!("{} {} {}", row.get::<_, i64>(0), row.get::<_, i64>(1), oldest.is_some())
}

const RECORDS: &str = "SELECT count(*) FROM request_result";

#[test]
fn a_purge_beside_an_old_snapshot_completes_and_the_snapshot_still_replays() {
    let (database, mut client) = database(18_000);
    client
        .batch_execute(
            "INSERT INTO request_result (account_id, operation, request_key, request, response, created_at)
             SELECT 1, 'debit:v1', 'young ' || i, '{\"amount\": 1}', '{\"balance\": 8}', now() - interval '1 day'
               FROM generate_series(1, 1999) AS i",
        )
        .unwrap();
    let mut old = CLUSTER.connect_to(&database);
    old.batch_execute("BEGIN ISOLATION LEVEL REPEATABLE READ").unwrap();
    assert_eq!(value(&mut old, RECORDS), "20000");

    assert_eq!(purge(&mut client, 1000), "18000 0 true");
    assert_eq!(value(&mut client, RECORDS), "2000");
    // What the snapshot sees it replays, dated or not, and compares.
    assert_eq!(value(&mut old, RECORDS), "20000");
    for key in ["old 1", "old 9000", "old 18000"] {
        assert_eq!(debit(&mut old, 1, key, 1).unwrap(), r#"{"balance": 7}"#);
    }
    let dated = "SELECT debit_once(1, 'old 2', 1, now() - interval '3 days')";
    assert_eq!(value(&mut old, dated), r#"{"balance": 7}"#);

    // Beside it, everybody else goes on: replays, executions, refusals, and the next purges.
    assert_eq!(debit(&mut client, 1, "new", 100).unwrap(), r#"{"balance": 900}"#);
    assert_eq!(debit(&mut client, 1, "young 5", 1).unwrap(), r#"{"balance": 8}"#);
    assert_eq!(outcome(simple(&mut client, dated)), "22023");
    assert_eq!(debit(&mut client, 1, "old 1", 1).unwrap(), r#"{"balance": 899}"#);
    assert_eq!(purge(&mut client, 1000), "0 0 true");
    expire(&mut client, "older", 500);
    assert_eq!(purge(&mut client, 100), "500 0 true");

    // The snapshot's own write of a key that was executed meanwhile is refused in the retryable way; a new transaction
    // sees what is.
    assert_eq!(debit(&mut old, 1, "old 1", 1).unwrap(), r#"{"balance": 7}"#);
    assert_eq!(outcome(debit(&mut old, 1, "other", 1)), "40001");
    old.batch_execute("ROLLBACK").unwrap();
    assert_eq!(debit(&mut old, 1, "old 1", 1).unwrap(), r#"{"balance": 899}"#);
    assert_eq!(outcome(simple(&mut old, dated)), "22023");
    assert_eq!(balance(&mut client, 1), 899);
}

#[test]
fn a_purge_that_is_interrupted_keeps_what_it_committed_and_leaves_nothing_behind() {
    for terminate in [false, true] {
        let (database, mut client) = database(10_000);
        let mut holder = stop_after(&database, 4_000);
        let mut session = CLUSTER.connect_to(&database);
        let backend = pid(&mut session);
        let call = in_background(session, "CALL purge(1000)".into());
        wait_until_blocked(&mut client, backend);
        let interrupt = if terminate { "pg_terminate_backend" } else { "pg_cancel_backend" };
        assert_eq!(value(&mut holder, &format!("SELECT {interrupt}({backend})")), "t");
        let (mut session, result) = call.join().expect("no panic");
        let expected: &[_] = if terminate { &["57P01", "closed"] } else { &["57014"] };
        let got = outcome(result);
        assert!(expected.contains(&got.as_str()), "{got}");
        wait_until(&mut client, &format!("SELECT NOT EXISTS (SELECT FROM pg_locks WHERE pid = {backend})"));
        assert_eq!(value(&mut client, RECORDS), "6001");
        let progress = "SELECT format('%s %s', deleted, purged_before > now() - interval '49 hours')
                          FROM purge_progress JOIN retention_fence USING (kind, name)";
        assert_eq!(value(&mut client, progress), "4000 t");
        if !terminate {
            // The session is usable.
            assert_eq!(debit(&mut session, 1, "after", 100).unwrap(), r#"{"balance": 800}"#);
        }
        drop(holder);
        assert_eq!(purge(&mut client, 1000), "6000 0 true");
        assert_eq!(debit(&mut client, 1, "new", 100).unwrap(), r#"{"balance": 900}"#);
    }
}

#[test]
fn a_second_purge_returns_at_once_with_a_notice_and_so_do_the_functions() {
    let (database, mut client) = database(5_000);
    let holder = stop_after(&database, 2_000);
    let mut session = CLUSTER.connect_to(&database);
    let backend = pid(&mut session);
    let call = in_background(session, "CALL purge(1000)".into());
    wait_until_blocked(&mut client, backend);

    let notices = Arc::new(Mutex::new(Vec::new()));
    let heard = Arc::clone(&notices);
    let mut second = Config::new()
        .host_path(CLUSTER.directory())
        .user("postgres")
        .dbname(&database)
        .options("-c statement_timeout=20s")
        .notice_callback(move |notice| heard.lock().unwrap().push(notice.severity().to_owned()))
        .connect(NoTls)
        .unwrap();
    assert_eq!(purge(&mut second, 1000), "0 3000 true");
    assert_eq!(value(&mut second, "SELECT purge_expired_keys()"), "0");
    assert_eq!(value(&mut second, "SELECT purge_expired_keys('1 day')"), "0");
    assert_eq!(*notices.lock().unwrap(), ["NOTICE"; 3]);
    // It is the purge alone that there is one of.
    assert_eq!(debit(&mut second, 1, "new", 100).unwrap(), r#"{"balance": 900}"#);
    assert_eq!(debit(&mut second, 1, "old 1", 100).unwrap(), r#"{"balance": 800}"#);

    drop(holder);
    let (_, result) = call.join().expect("no panic");
    assert_eq!(outcome(result), "done: 5000");
    assert_eq!(purge(&mut second, 1000), "0 0 true");
}

#[test]
fn with_a_time_budget_everything_has_its_turn() {
    let database = CLUSTER.database();
    let mut client = CLUSTER.connect_to(&database);
    client
        .batch_execute(
            "INSERT INTO account VALUES (1, 1000);
             INSERT INTO request_result (account_id, operation, request_key, request, response, created_at)
             SELECT 1, operation, i::text, '{}', '{}', now() - interval '3 days'
               FROM unnest('{a:v1, b:v1}'::text[]) AS operation, generate_series(1, 100) AS i;
             INSERT INTO processed_message (subscriber, message_id, account_id, created_at)
             SELECT 's', gen_random_uuid(), 1, now() - interval '8 days' FROM generate_series(1, 100)",
        )
        .unwrap();
    // A budget that is over at once leaves one batch of the first one, and there is more of it than these take.
    for _ in 0..6 {
        client.batch_execute("CALL purge(10, '0')").unwrap();
    }
    let left = "SELECT string_agg(format('%s %s', name, estimated_records), ', ' ORDER BY name) FROM retention_status";
    assert_eq!(value(&mut client, left), "a:v1 80, b:v1 80, s 80");
}

#[test]
fn without_preloading_all_but_the_worker_is_there() {
    let (_, mut client) = database(3);
    let state = value(&mut client, "SELECT worker FROM retention_setting()");
    assert!(state.starts_with("off: ") && state.contains("shared_preload_libraries"), "{state}");
    assert_eq!(value(&mut client, "SELECT expired FROM retention_status"), "3");
    assert_eq!(purge(&mut client, 10_000), "3 0 true");
    let status = "SELECT format('%s %s %s %s', expired, last_deleted, last_purge > now() - interval '1 minute', worker)
                    FROM retention_status";
    assert_eq!(value(&mut client, status), format!("0 3 t {state}"));
}
