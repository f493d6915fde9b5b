//! What a replay costs: nothing that is written, nothing that is locked.

use std::sync::LazyLock;

use client_tests::{Cluster, balance, contents, debit, outcome, pid, simple, value};
use postgres::Client;

// Autovacuum and checkpoints write WAL of their own accord, also on behalf of whoever reads a page next.
static CLUSTER: LazyLock<Cluster> =
    LazyLock::new(|| Cluster::start(&["autovacuum=off", "checkpoint_timeout=1h", "track_functions=all"]));

const REPLAY: &str = "SELECT debit_once(1, 'known', 100)::text";
const ANSWER: &str = r#"{"balance": 900}"#;

/// A session in a database of its own, where account 1 has executed the key `known`, and all hint bits are set.
fn session() -> (String, Client) {
    let database = CLUSTER.database();
    let mut client = CLUSTER.connect_to(&database);
    client.batch_execute("INSERT INTO account VALUES (1, 1000)").unwrap();
    assert_eq!(debit(&mut client, 1, "known", 100).unwrap(), ANSWER);
    client.batch_execute("VACUUM account, request_result").unwrap();
    assert_eq!(debit(&mut client, 1, "known", 100).unwrap(), ANSWER);
    (database, client)
}

#[test]
fn a_replay_works_in_a_read_only_transaction_and_a_fresh_debit_is_refused_with_25006() {
    let (_, mut client) = session();
    let before = contents(&mut client);
    for isolation in ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE", "SERIALIZABLE DEFERRABLE"] {
        client.batch_execute(&format!("BEGIN ISOLATION LEVEL {isolation}, READ ONLY")).unwrap();
        assert_eq!(value(&mut client, REPLAY), ANSWER, "{isolation}");
        client.batch_execute("SAVEPOINT s").unwrap();
        assert_eq!(outcome(debit(&mut client, 1, "known", 101)), "22023", "{isolation}");
        client.batch_execute("ROLLBACK TO SAVEPOINT s").unwrap();
        assert_eq!(outcome(debit(&mut client, 1, "new", 100)), "25006", "{isolation}");
        client.batch_execute("ROLLBACK").unwrap();
    }
    assert_eq!(contents(&mut client), before);
}

#[test]
fn a_replay_costs_no_transaction_id_and_a_fresh_debit_does() {
    let (_, mut client) = session();
    let unassigned = "SELECT pg_current_xact_id_if_assigned() IS NULL";
    for mode in ["READ WRITE", "READ ONLY", "ISOLATION LEVEL SERIALIZABLE"] {
        client.batch_execute(&format!("BEGIN {mode}")).unwrap();
        for _ in 0..7 {
            assert_eq!(value(&mut client, REPLAY), ANSWER);
        }
        assert_eq!(debit(&mut client, 1, "known", 100).unwrap(), ANSWER);
        assert_eq!(value(&mut client, unassigned), "t", "{mode}");
        client.batch_execute("COMMIT").unwrap();
    }
    client.batch_execute("BEGIN").unwrap();
    debit(&mut client, 1, "new", 1).unwrap();
    assert_eq!(value(&mut client, unassigned), "f");
    client.batch_execute("ROLLBACK").unwrap();
}

#[test]
fn replays_by_themselves_do_not_move_the_servers_next_transaction_id() {
    // A cluster where nobody else takes one.
    let cluster = Cluster::start(&["autovacuum=off"]);
    let database = cluster.database();
    let mut client = cluster.connect_to(&database);
    client.batch_execute("INSERT INTO account VALUES (1, 1000)").unwrap();
    debit(&mut client, 1, "known", 100).unwrap();
    let next = "SELECT pg_snapshot_xmax(pg_current_snapshot())";
    let before = value(&mut client, next);
    for _ in 0..100 {
        assert_eq!(debit(&mut client, 1, "known", 100).unwrap(), ANSWER);
        assert_eq!(outcome(debit(&mut client, 1, "known", 101)), "22023");
    }
    assert_eq!(value(&mut client, next), before);
    debit(&mut client, 1, "new", 100).unwrap();
    assert_ne!(value(&mut client, next), before);
}

/// The number of WAL records that this query wrote.
fn wal_records(client: &mut Client, query: &str) -> u64 {
    let plan = simple(client, &format!("EXPLAIN (ANALYZE, WAL, FORMAT JSON) {query}")).expect("a plan");
    let (_, rest) = plan.split_once("\"WAL Records\": ").expect("a plan with its WAL");
    rest.split(|c: char| !c.is_ascii_digit()).next().unwrap().parse().expect("a number")
}

#[test]
fn a_replay_writes_no_wal_and_a_fresh_debit_does() {
    let (_, mut client) = session();
    for _ in 0..3 {
        assert_eq!(wal_records(&mut client, REPLAY), 0);
    }
    assert!(wal_records(&mut client, "SELECT debit_once(1, 'new', 1)") > 0);
}

/// What this session has written so far into the extension's tables; to be asked in a transaction and in a session that
/// has not reported to the statistics yet, as what was reported is no longer counted.
const WRITTEN: &str =
    "SELECT string_agg(format('%s %s+ %s~ %s-', relname, n_tup_ins, n_tup_upd, n_tup_del), ', ' ORDER BY relname)
      FROM pg_stat_xact_user_tables WHERE relname IN ('account', 'request_result')";

#[test]
fn a_replay_writes_no_row_version_and_a_fresh_debit_writes_one_record_and_one_balance() {
    let (database, _) = session();
    let mut client = CLUSTER.connect_to(&database);
    let versions = "SELECT (SELECT string_agg(format('%s %s %s', ctid, xmin, xmax), ',') FROM account)
                        || (SELECT string_agg(format('%s %s %s', ctid, xmin, xmax), ',') FROM request_result)";
    let before = value(&mut client, versions);
    client.batch_execute("BEGIN").unwrap();
    assert_eq!(value(&mut client, REPLAY), ANSWER);
    assert_eq!(value(&mut client, WRITTEN), "account 0+ 0~ 0-, request_result 0+ 0~ 0-");
    client.batch_execute("COMMIT").unwrap();
    assert_eq!(value(&mut client, versions), before);

    let mut client = CLUSTER.connect_to(&database);
    client.batch_execute("BEGIN").unwrap();
    debit(&mut client, 1, "new", 1).unwrap();
    assert_eq!(value(&mut client, WRITTEN), "account 0+ 1~ 0-, request_result 1+ 0~ 0-");
    client.batch_execute("COMMIT").unwrap();
    assert_ne!(value(&mut client, versions), before);
}

#[test]
fn a_replay_waits_for_no_row_lock_and_no_writer() {
    let (database, mut client) = session();
    client.batch_execute("SET lock_timeout = '1s'").unwrap();
    let mut third = CLUSTER.connect_to(&database);
    for lock in [
        "SELECT FROM account FOR UPDATE",
        "SELECT FROM request_result FOR UPDATE",
        "UPDATE account SET balance = 0; SET LOCAL session_replication_role = replica; DELETE FROM request_result",
        // Everything but DDL.
        "LOCK TABLE account, request_result IN EXCLUSIVE MODE",
    ] {
        third.batch_execute(&format!("BEGIN; {lock}")).unwrap();
        assert_eq!(debit(&mut client, 1, "known", 100).unwrap(), ANSWER, "{lock}");
        assert_eq!(outcome(debit(&mut client, 1, "known", 101)), "22023", "{lock}");
        third.batch_execute("ROLLBACK").unwrap();
    }
    // The control: what a fresh debit needs is locked indeed.
    third.batch_execute("BEGIN; SELECT FROM account FOR UPDATE").unwrap();
    assert_eq!(outcome(debit(&mut client, 1, "new", 100)), "55P03");
    third.batch_execute("ROLLBACK").unwrap();
}

#[test]
fn a_replay_holds_no_lock() {
    let (database, mut client) = session();
    let mut observer = CLUSTER.connect_to(&database);
    let backend = pid(&mut client);
    let modes = format!(
        "SELECT string_agg(DISTINCT mode, ',' ORDER BY mode) FROM pg_locks
          WHERE pid = {backend} AND locktype <> 'virtualxid'"
    );
    client.batch_execute("BEGIN").unwrap();
    assert_eq!(value(&mut client, REPLAY), ANSWER);
    assert_eq!(value(&mut observer, &modes), "NULL");
    debit(&mut client, 1, "new", 1).unwrap();
    assert_ne!(value(&mut observer, &modes), "NULL");
    client.batch_execute("ROLLBACK").unwrap();

    // A reader's row lock would stand in the row itself and nowhere else.
    client.batch_execute("BEGIN").unwrap();
    assert_eq!(value(&mut client, REPLAY), ANSWER);
    let mut third = CLUSTER.connect_to(&database);
    third.batch_execute("SELECT FROM account FOR UPDATE NOWAIT; SELECT FROM request_result FOR UPDATE NOWAIT").unwrap();
    client.batch_execute("COMMIT").unwrap();
}

#[test]
fn a_refusal_writes_no_row_version() {
    let (database, _) = session();
    for (account, key, amount, code) in
        [(1, "known", 101, "22023"), (1, "poor", 10_000, "P0001"), (9, "key", 1, "23503"), (1, "", 1, "22023")]
    {
        let mut client = CLUSTER.connect_to(&database);
        client.batch_execute("BEGIN; SAVEPOINT s").unwrap();
        assert_eq!(outcome(debit(&mut client, account, key, amount)), code);
        client.batch_execute("ROLLBACK TO SAVEPOINT s").unwrap();
        let written = "SELECT coalesce(sum(n_tup_ins + n_tup_upd + n_tup_del), 0) FROM pg_stat_xact_user_tables";
        assert_eq!(value(&mut client, written), "0", "{code}");
        client.batch_execute("COMMIT").unwrap();
        assert_eq!(balance(&mut client, 1), 900);
    }
}
