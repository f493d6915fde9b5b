//! Processes killed in every phase of a call. Afterwards a request that was answered is there once; one that was not is
//! there once or not at all, and there once after a retry with the same key.

use std::thread;
use std::time::Duration;

use client_tests::calls::{self, CALLS};
use client_tests::traffic::{APPLICATION, Traffic};
use client_tests::{
    Background, Cluster, RudeClient, assert_sound, balance, contents, debit, in_background, outcome, pid, simple,
    value, wait_until, wait_until_blocked,
};
use postgres::Client;

/// How a server comes down.
#[derive(Clone, Copy, Debug)]
enum Crash {
    /// A backend is killed, and the postmaster takes all others down and starts again.
    Backend,
    Postmaster,
    /// `pg_ctl stop -m immediate`
    Immediate,
}

const CRASHES: [Crash; 3] = [Crash::Backend, Crash::Postmaster, Crash::Immediate];

impl Crash {
    /// Makes it happen, and comes back with a session after the recovery.
    fn happen(self, cluster: &Cluster, database: &str, backend: i32) -> Client {
        match self {
            Self::Backend => cluster.kill(backend),
            Self::Postmaster => cluster.kill_postmaster(),
            Self::Immediate => cluster.stop("immediate"),
        }
        if !matches!(self, Self::Backend) {
            cluster.resume(&[]);
        }
        cluster.connect_after_crash(database, backend)
    }
}

/// Runs a test with a cluster of its own for each way to crash.
fn for_each_crash(settings: &[&str], test: impl Fn(&Cluster, &str, Crash)) {
    let cluster = Cluster::start(settings);
    for crash in CRASHES {
        println!("{crash:?}");
        let database = cluster.database();
        calls::prepare(&mut cluster.connect_to(&database));
        test(&cluster, &database, crash);
    }
}

/// Makes a call that another session keeps waiting, and comes back when it waits: its backend, and the call.
fn call_that_waits(cluster: &Cluster, database: &str, observer: &mut Client, sql: &str) -> (i32, Background) {
    let mut client = cluster.connect_to(database);
    let backend = pid(&mut client);
    let call = in_background(client, sql.into());
    wait_until_blocked(observer, backend);
    (backend, call)
}

/// That a call ended with its connection, and not with an answer.
fn assert_cut_off(call: Background) {
    let got = outcome(call.join().expect("no panic").1);
    assert!(["closed", "57P01", "57P02"].contains(&got.as_str()), "{got}");
}

/// Nothing is there, the keys are free at once, and each request is executed once.
fn assert_nothing_kept(client: &mut Client, before: &str) {
    assert_eq!(calls::contents(client), before);
    assert_eq!(calls::balances(client), calls::BEFORE);
    // No lease has to run out first.
    client.batch_execute("SET statement_timeout = '5s'").unwrap();
    calls::assert_execute(client);
    calls::assert_replay(client);
    assert_sound(client);
}

#[test]
fn calls_that_were_waiting_for_another_session_leave_nothing_behind() {
    for_each_crash(&[], |cluster, database, crash| {
        let mut observer = cluster.connect_to(database);
        let before = calls::contents(&mut observer);
        let mut gate = cluster.connect_to(database);
        gate.batch_execute("BEGIN; SELECT FROM account FOR UPDATE; SELECT accept_version('a', 'order', 5)").unwrap();
        let waiting: Vec<_> =
            CALLS.iter().map(|call| call_that_waits(cluster, database, &mut observer, call.sql)).collect();
        let mut client = crash.happen(cluster, database, waiting[waiting.len() - 1].0);
        waiting.into_iter().for_each(|(_, call)| assert_cut_off(call));
        assert_nothing_kept(&mut client, &before);
    });
}

#[test]
fn calls_that_were_waiting_for_the_unique_index_leave_nothing_behind() {
    for_each_crash(&[], |cluster, database, crash| {
        let mut observer = cluster.connect_to(database);
        let before = calls::contents(&mut observer);
        // By hand, so that the account's row is free and only the index is left to wait for.
        let mut gate = cluster.connect_to(database);
        gate.batch_execute(
            "BEGIN;
             INSERT INTO request_result (account_id, operation, request_key, request, response)
             VALUES (1, 'debit:v1', 'key', '{}', '{}');
             INSERT INTO processed_message (subscriber, message_id, account_id) VALUES ('b', md5('1')::uuid, 6)",
        )
        .unwrap();
        let waiting = [&CALLS[0], &CALLS[5]].map(|call| call_that_waits(cluster, database, &mut observer, call.sql));
        let mut client = crash.happen(cluster, database, waiting[1].0);
        waiting.into_iter().for_each(|(_, call)| assert_cut_off(call));
        assert_nothing_kept(&mut client, &before);
    });
}

#[test]
fn calls_that_were_executed_and_not_committed_leave_nothing_behind() {
    for_each_crash(&[], |cluster, database, crash| {
        let mut observer = cluster.connect_to(database);
        let before = calls::contents(&mut observer);
        let mut sessions: Vec<_> = CALLS
            .iter()
            .enumerate()
            .map(|(i, call)| {
                let mut client = cluster.connect_to(database);
                // Half of them inside a subtransaction, which has a transaction id of its own.
                client.batch_execute(if i % 2 == 0 { "BEGIN" } else { "BEGIN; SAVEPOINT s" }).unwrap();
                assert_eq!(outcome(simple(&mut client, call.sql)), call.first, "{}", call.sql);
                client
            })
            .collect();
        // What they wrote reaches the disk, and must be taken for what it is.
        observer.batch_execute("CHECKPOINT").unwrap();
        let backend = pid(&mut sessions[0]);
        let mut client = crash.happen(cluster, database, backend);
        for session in &mut sessions {
            let got = outcome(simple(session, "COMMIT; SELECT 1"));
            assert!(["closed", "57P01", "57P02"].contains(&got.as_str()), "{got}");
        }
        assert_nothing_kept(&mut client, &before);
    });
}

#[test]
fn a_handler_that_was_running_leaves_nothing_behind() {
    for_each_crash(&[], |cluster, database, crash| {
        let mut observer = cluster.connect_to(database);
        observer
            .batch_execute(
                "CREATE FUNCTION slow(p_account bigint, p_request jsonb) RETURNS jsonb LANGUAGE plpgsql AS $$
                 BEGIN
                     UPDATE account SET balance = balance - 1 WHERE account_id = p_account;
                     PERFORM debit_once(p_account, 'inner', 10);
                     PERFORM pg_advisory_xact_lock_shared(1);
                     RETURN p_request;
                 END $$",
            )
            .unwrap();
        let before = calls::contents(&mut observer);
        let mut gate = cluster.connect_to(database);
        gate.batch_execute("BEGIN; SELECT pg_advisory_xact_lock(1)").unwrap();
        let mut victim = cluster.connect_to(database);
        let backend = pid(&mut victim);
        let sql = "SELECT run_once(1, 'slow:v1', 'key', '[1]', 'slow(bigint, jsonb)')";
        let running = in_background(victim, sql.into());
        wait_until_blocked(&mut observer, backend);
        let mut client = crash.happen(cluster, database, backend);
        assert_cut_off(running);
        assert_eq!(calls::contents(&mut client), before);
        assert_eq!(value(&mut client, sql), "[1]");
        assert_eq!(value(&mut client, sql), "[1]");
        assert_eq!(balance(&mut client, 1), 989);
        assert_sound(&mut client);
    });
}

#[test]
fn a_commit_that_was_written_and_still_waited_for_a_standby_is_there() {
    // No standby has this name, so that a commit that asks for one waits for ever, after it was flushed.
    for_each_crash(&["synchronous_standby_names=nobody", "synchronous_commit=local"], |cluster, database, crash| {
        let mut observer = cluster.connect_to(database);
        let mut victim = cluster.connect_to(database);
        victim.batch_execute("SET synchronous_commit = on").unwrap();
        let backend = pid(&mut victim);
        let committing = in_background(victim, CALLS[0].sql.into());
        wait_until(
            &mut observer,
            &format!("SELECT wait_event IS NOT DISTINCT FROM 'SyncRep' FROM pg_stat_activity WHERE pid = {backend}"),
        );
        // Nobody sees it before it is over, and whoever asks waits for it.
        let mut retry = cluster.connect_to(database);
        retry.batch_execute("SET lock_timeout = '100ms'").unwrap();
        assert_eq!(outcome(simple(&mut retry, CALLS[0].sql)), "55P03");

        let mut client = crash.happen(cluster, database, backend);
        assert_cut_off(committing);
        assert_eq!(balance(&mut client, 1), 900);
        let written = contents(&mut client);
        assert_eq!(outcome(simple(&mut client, CALLS[0].sql)), CALLS[0].then);
        assert_eq!(outcome(simple(&mut client, CALLS[0].changed)), "22023");
        assert_eq!(contents(&mut client), written);
        assert_sound(&mut client);
    });
}

#[test]
fn a_commit_whose_answer_nobody_read_is_there() {
    for_each_crash(&[], |cluster, database, crash| {
        let mut observer = cluster.connect_to(database);
        let mut victim = RudeClient::connect(cluster.directory(), database);
        victim.send("SET application_name = 'rude'");
        victim.read_until_ready();
        victim.send(CALLS[0].sql);
        wait_until(
            &mut observer,
            "SELECT count(*) = 1 FROM pg_stat_activity, request_result WHERE application_name = 'rude' AND state = 'idle'",
        );
        let backend = value(&mut observer, "SELECT pid FROM pg_stat_activity WHERE application_name = 'rude'");
        let mut client = crash.happen(cluster, database, backend.parse().unwrap());
        drop(victim);
        assert_eq!(outcome(simple(&mut client, CALLS[0].sql)), CALLS[0].then);
        assert_eq!(outcome(simple(&mut client, CALLS[0].changed)), "22023");
        assert_eq!(balance(&mut client, 1), 900);
        assert_sound(&mut client);
    });
}

#[test]
fn answered_calls_replay_after_a_crash_without_a_checkpoint() {
    for_each_crash(&["checkpoint_timeout=1h"], |cluster, database, crash| {
        let mut observer = cluster.connect_to(database);
        calls::assert_execute(&mut observer);
        let before = calls::contents(&mut observer);
        let backend = pid(&mut observer);
        let mut client = crash.happen(cluster, database, backend);
        assert_eq!(calls::contents(&mut client), before);
        calls::assert_replay(&mut client);
        assert_eq!(debit(&mut client, 1, "new", 1).unwrap(), r#"{"balance": 899}"#);
        assert_sound(&mut client);
    });
}

#[test]
fn whatever_a_crash_cuts_off_is_there_once_when_the_client_has_its_answer() {
    // Each commit dwells for a while between its record and the flush, so that most crashes meet some there.
    let cluster = Cluster::start(&["fsync=on", "commit_delay=3000", "commit_siblings=0"]);
    let database = cluster.database();
    let traffic = Traffic::start(6, cluster.directory(), &database);
    for round in 0..9 {
        traffic.wait_for_answers(60);
        let crash = CRASHES[round % CRASHES.len()];
        let mut observer = cluster.connect_to(&database);
        let victim = value(
            &mut observer,
            &format!(
                "SELECT pid FROM pg_stat_activity WHERE application_name = '{APPLICATION}' ORDER BY random() LIMIT 1"
            ),
        );
        thread::sleep(Duration::from_micros(rand::random_range(0..10_000)));
        crash.happen(&cluster, &database, victim.parse().unwrap());
    }
    traffic.wait_for_answers(60);
    let retried = traffic.finish();
    println!("{retried:?}");
    assert_ne!(retried.replayed + retried.executed, 0, "no crash cut a call off");
    assert_sound(&mut cluster.connect_to(&database));
}
