//! Prepared transactions: what they hold outlives their session, a restart and a failover, and is resolved by whoever
//! resolves them. (How each function waits for one is told in concurrency.rs.)

use client_tests::calls::{self, CALLS};
use client_tests::{
    Cluster, assert_sound, balance, debit, debit_in_background, in_background, outcome, pid, simple, value,
    wait_until_blocked,
};
use postgres::Client;

const SETTINGS: &[&str] = &["max_prepared_transactions=20"];

/// Makes every call in a prepared transaction of its own, named by its number.
fn prepare_each(cluster: &Cluster, database: &str) {
    for (i, call) in CALLS.iter().enumerate() {
        let mut client = cluster.connect_to(database);
        client.batch_execute("BEGIN").unwrap();
        assert_eq!(outcome(simple(&mut client, call.sql)), call.first, "{}", call.sql);
        client.batch_execute(&format!("PREPARE TRANSACTION '{i}'")).unwrap();
    }
}

/// Proves that every identity is held, and that nothing of what holds it can be seen.
fn assert_held(client: &mut Client, before: &str) {
    client.batch_execute("SET lock_timeout = '50ms'").unwrap();
    for call in &CALLS {
        assert_eq!(outcome(simple(client, call.sql)), "55P03", "{}", call.sql);
    }
    client.batch_execute("RESET lock_timeout").unwrap();
    assert_eq!(calls::contents(client), before);
}

/// Resolves every other one with COMMIT PREPARED, the rest with ROLLBACK PREPARED, each while a retry waits for it.
fn assert_resolvable(cluster: &Cluster, database: &str) {
    let mut observer = cluster.connect_to(database);
    for (i, call) in CALLS.iter().enumerate() {
        let mut waiter = cluster.connect_to(database);
        let backend = pid(&mut waiter);
        let waiting = in_background(waiter, call.sql.into());
        wait_until_blocked(&mut observer, backend);
        let (end, expected) = if i % 2 == 0 { ("COMMIT", call.then) } else { ("ROLLBACK", call.first) };
        observer.batch_execute(&format!("{end} PREPARED '{i}'")).unwrap();
        assert_eq!(outcome(waiting.join().expect("no panic").1), expected, "{} after {end}", call.sql);
    }
    calls::assert_replay(&mut observer);
    assert_sound(&mut observer);
}

#[test]
fn a_prepared_transaction_holds_its_keys_over_an_immediate_restart_and_the_end_of_the_postmaster() {
    let cluster = Cluster::start(SETTINGS);
    let database = cluster.database();
    let mut client = cluster.connect_to(&database);
    calls::prepare(&mut client);
    let before = calls::contents(&mut client);
    prepare_each(&cluster, &database);
    assert_held(&mut client, &before);

    cluster.stop("immediate");
    cluster.resume(&[]);
    assert_held(&mut cluster.connect_to(&database), &before);
    // This time from the file that a checkpoint makes of it.
    cluster.connect().batch_execute("CHECKPOINT").unwrap();
    cluster.kill_postmaster();
    cluster.resume(&[]);
    assert_held(&mut cluster.connect_to(&database), &before);
    assert_resolvable(&cluster, &database);

    cluster.stop("immediate");
    cluster.resume(&[]);
    calls::assert_replay(&mut cluster.connect_to(&database));
}

#[test]
fn a_prepared_transaction_holds_its_keys_after_a_failover() {
    let primary = Cluster::start(SETTINGS);
    let standby = primary.standby("replica", &[]);
    let database = primary.database();
    let mut client = primary.connect_to(&database);
    calls::prepare(&mut client);
    let before = calls::contents(&mut client);
    prepare_each(&primary, &database);
    standby.catch_up(&mut client);
    let mut reader = standby.connect_to(&database);
    for call in &CALLS {
        assert_eq!(outcome(simple(&mut reader, call.sql)), "25006", "{}", call.sql);
    }
    primary.kill_postmaster();
    assert_eq!(value(&mut reader, "SELECT pg_promote()"), "t");
    assert_held(&mut reader, &before);
    assert_resolvable(&standby, &database);
}

/// A database with account 1 and 2, which hold 1000 each, where a prepared transaction holds the key of account 1; it
/// also debited account 2 and undid that.
fn held(cluster: &Cluster) -> (String, Client) {
    let database = cluster.database();
    let mut client = cluster.connect_to(&database);
    client.batch_execute("INSERT INTO account VALUES (1, 1000), (2, 1000)").unwrap();
    let mut holder = cluster.connect_to(&database);
    holder.batch_execute("BEGIN").unwrap();
    assert_eq!(debit(&mut holder, 1, "key", 100).unwrap(), r#"{"balance": 900}"#);
    holder.batch_execute("SAVEPOINT s").unwrap();
    assert_eq!(debit(&mut holder, 2, "key", 100).unwrap(), r#"{"balance": 900}"#);
    holder.batch_execute("ROLLBACK TO SAVEPOINT s").unwrap();
    holder.batch_execute(&format!("PREPARE TRANSACTION '{database}'")).unwrap();
    (database, client)
}

#[test]
fn a_prepared_transaction_resolves_for_snapshots_and_leaves_alone_what_it_does_not_hold() {
    let cluster = Cluster::start(SETTINGS);
    for isolation in ["REPEATABLE READ", "SERIALIZABLE"] {
        for (end, expected) in [("COMMIT", "40001"), ("ROLLBACK", r#"done: {"balance": 900}"#)] {
            let (database, mut observer) = held(&cluster);
            // What was undone before it was prepared, a mismatch that is none yet, and a purge wait for nobody.
            observer.batch_execute("SET lock_timeout = '1s'").unwrap();
            assert_eq!(debit(&mut observer, 2, "key", 7).unwrap(), r#"{"balance": 993}"#);
            assert_eq!(value(&mut observer, "SELECT purge_expired_keys('1 day')"), "0");
            assert_eq!(outcome(debit(&mut observer, 1, "", 1)), "22023");
            let mut waiter = cluster.connect_to(&database);
            waiter.batch_execute(&format!("BEGIN ISOLATION LEVEL {isolation}")).unwrap();
            let backend = pid(&mut waiter);
            let waiting = debit_in_background(waiter, 1, "key", 100);
            wait_until_blocked(&mut observer, backend);
            observer.batch_execute(&format!("{end} PREPARED '{database}'")).unwrap();
            let (mut waiter, got) = waiting.join().expect("no panic");
            assert_eq!(outcome(got), expected, "{isolation}, {end}");
            waiter.batch_execute("COMMIT").unwrap();
            assert_eq!(debit(&mut waiter, 1, "key", 100).unwrap(), r#"{"balance": 900}"#);
            assert_eq!(outcome(debit(&mut waiter, 1, "key", 101)), "22023");
            assert_eq!((balance(&mut waiter, 1), balance(&mut waiter, 2)), (900, 993));
        }
    }
}
