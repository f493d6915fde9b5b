//! Hot standby and failover: a standby replays what it has and refuses everything else, and whatever a failover loses, it
//! loses effect and record together.

use client_tests::calls::{self, CALLS};
use client_tests::traffic::Traffic;
use client_tests::{
    Cluster, assert_sound, balance, debit, debit_in_background, in_background, outcome, pid, simple, value, wait_until,
};
use postgres::Client;

/// A primary with a standby that streams, and a database in which [`CALLS`] can be made.
fn pair() -> (Cluster, Cluster, String) {
    let primary = Cluster::start(&[]);
    let standby = primary.standby("replica", &[]);
    let database = primary.database();
    let mut client = primary.connect_to(&database);
    calls::prepare(&mut client);
    standby.catch_up(&mut client);
    (primary, standby, database)
}

fn promote(standby: &Cluster) {
    assert_eq!(value(&mut standby.connect(), "SELECT pg_promote()"), "t");
}

/// Proves that a server that was a standby is none any more: fresh calls work, once.
fn assert_works(client: &mut Client) {
    let left = balance(client, 8) - 1;
    for _ in 0..2 {
        assert_eq!(debit(client, 8, "after", 1).unwrap(), format!(r#"{{"balance": {left}}}"#));
    }
    assert_eq!(outcome(debit(client, 8, "after", 2)), "22023");
    assert_eq!(value(client, "SELECT purge_expired_keys('1 day')"), "0");
    assert_sound(client);
}

#[test]
fn a_standby_replays_what_it_has_and_refuses_everything_else_until_it_is_promoted() {
    let (primary, standby, database) = pair();
    let mut client = primary.connect_to(&database);
    let mut reader = standby.connect_to(&database);
    for call in &CALLS {
        assert_eq!(outcome(simple(&mut reader, call.sql)), "25006", "{}", call.sql);
    }
    calls::assert_execute(&mut client);
    standby.catch_up(&mut client);

    for isolation in ["READ COMMITTED", "REPEATABLE READ"] {
        reader.batch_execute(&format!("SET default_transaction_isolation = '{isolation}'")).unwrap();
        // Often enough for every kind of plan.
        for _ in 0..7 {
            calls::assert_replay(&mut reader);
        }
        assert_eq!(outcome(debit(&mut reader, 1, "new", 100)), "25006");
        assert_eq!(outcome(debit(&mut reader, 1, "", 100)), "22023");
        assert_eq!(outcome(simple(&mut reader, "SELECT purge_expired_keys('0')")), "25006");
        let found = "SELECT response FROM find_request(1, 'debit:v1', 'key')";
        assert_eq!(value(&mut reader, found), r#"{"balance": 900}"#);
    }
    reader.batch_execute("RESET default_transaction_isolation").unwrap();

    primary.stop("fast");
    promote(&standby);
    // The session from before, with its plans, and a new one.
    for mut client in [reader, standby.connect_to(&database)] {
        calls::assert_replay(&mut client);
        let fresh = format!("new {}", pid(&mut client));
        let left = balance(&mut client, 3) - 1;
        assert_eq!(debit(&mut client, 3, &fresh, 1).unwrap(), format!(r#"{{"balance": {left}}}"#));
        assert_eq!(debit(&mut client, 3, &fresh, 1).unwrap(), format!(r#"{{"balance": {left}}}"#));
        client.batch_execute("UPDATE account SET balance = 1000 WHERE account_id = 3").unwrap();
    }
    assert_works(&mut standby.connect_to(&database));
}

#[test]
fn a_standby_that_lags_refuses_what_it_does_not_know_yet_and_replays_it_when_it_does() {
    let (primary, standby, database) = pair();
    let mut client = primary.connect_to(&database);
    let mut reader = standby.connect_to(&database);
    reader.batch_execute("SELECT pg_wal_replay_pause()").unwrap();
    wait_until(&mut reader, "SELECT pg_get_wal_replay_pause_state() = 'paused'");
    calls::assert_execute(&mut client);
    for call in &CALLS {
        assert_eq!(outcome(simple(&mut reader, call.sql)), "25006", "{}", call.sql);
    }
    assert_eq!(calls::balances(&mut reader), calls::BEFORE);
    reader.batch_execute("SELECT pg_wal_replay_resume()").unwrap();
    standby.catch_up(&mut client);
    calls::assert_replay(&mut reader);
}

#[test]
fn an_asynchronous_failover_loses_effect_and_record_together_and_the_retry_executes() {
    let (primary, standby, database) = pair();
    let mut client = primary.connect_to(&database);
    assert_eq!(debit(&mut client, 8, "kept", 10).unwrap(), r#"{"balance": 990}"#);
    standby.catch_up(&mut client);
    let mut reader = standby.connect_to(&database);
    let before = calls::contents(&mut reader);
    // From here on it receives nothing, so that there is nothing that it could still replay.
    reader.batch_execute("ALTER SYSTEM SET primary_conninfo = ''").unwrap();
    reader.batch_execute("SELECT pg_reload_conf()").unwrap();
    wait_until(&mut reader, "SELECT NOT EXISTS (SELECT FROM pg_stat_wal_receiver)");
    wait_until(&mut client, "SELECT NOT EXISTS (SELECT FROM pg_stat_replication)");

    calls::assert_execute(&mut client);
    primary.kill_postmaster();
    promote(&standby);

    assert_eq!(calls::contents(&mut reader), before);
    assert_eq!(debit(&mut reader, 8, "kept", 10).unwrap(), r#"{"balance": 990}"#);
    calls::assert_execute(&mut reader);
    assert_eq!(outcome(debit(&mut reader, 8, "kept", 11)), "22023");
    reader.batch_execute("UPDATE account SET balance = 1000 WHERE account_id = 8").unwrap();
    calls::assert_replay(&mut reader);
    assert_works(&mut reader);
}

/// A primary that answers no commit before the standby has it.
fn synchronous_pair() -> (Cluster, Cluster, String) {
    let (primary, standby, database) = pair();
    let mut client = primary.connect();
    client.batch_execute("ALTER SYSTEM SET synchronous_standby_names = 'replica'").unwrap();
    client.batch_execute("SELECT pg_reload_conf()").unwrap();
    wait_until(&mut client, "SELECT count(*) = 1 FROM pg_stat_replication WHERE sync_state = 'sync'");
    (primary, standby, database)
}

#[test]
fn a_synchronous_failover_under_traffic_loses_nothing_that_was_answered() {
    let (primary, standby, _) = synchronous_pair();
    let database = primary.database();
    let traffic = Traffic::start(6, primary.directory(), &database);
    traffic.wait_for_answers(500);
    primary.kill_postmaster();
    promote(&standby);
    traffic.redirect(standby.directory());
    traffic.wait_for_answers(500);
    println!("{:?}", traffic.finish());
    assert_sound(&mut standby.connect_to(&database));
}

#[test]
fn a_commit_that_waits_for_a_synchronous_standby_is_not_answered_and_after_the_failover_the_retry_executes() {
    let (primary, standby, database) = synchronous_pair();
    let mut observer = primary.connect_to(&database);
    let mut reader = standby.connect_to(&database);
    let before = calls::contents(&mut reader);
    reader.batch_execute("ALTER SYSTEM SET primary_conninfo = ''").unwrap();
    reader.batch_execute("SELECT pg_reload_conf()").unwrap();
    wait_until(&mut observer, "SELECT NOT EXISTS (SELECT FROM pg_stat_replication)");

    let mut client = primary.connect_to(&database);
    let backend = pid(&mut client);
    let committing = debit_in_background(client, 1, "key", 100);
    wait_until(
        &mut observer,
        &format!("SELECT wait_event IS NOT DISTINCT FROM 'SyncRep' FROM pg_stat_activity WHERE pid = {backend}"),
    );
    // Meanwhile a retry waits as well, and gets no answer either.
    let mut retry = primary.connect_to(&database);
    let backend = pid(&mut retry);
    let retrying = in_background(retry, CALLS[0].sql.into());
    wait_until(
        &mut observer,
        &format!("SELECT wait_event_type IS NOT DISTINCT FROM 'Lock' FROM pg_stat_activity WHERE pid = {backend}"),
    );
    primary.kill_postmaster();
    for call in [committing, retrying] {
        let got = outcome(call.join().expect("no panic").1);
        assert!(["closed", "57P01"].contains(&got.as_str()), "{got}");
    }
    promote(&standby);
    assert_eq!(calls::contents(&mut reader), before);
    calls::assert_execute(&mut reader);
    calls::assert_replay(&mut reader);
    assert_works(&mut reader);
}
