//! PgBouncer in transaction mode: clients share server connections and get another one for each transaction, so nothing
//! of a call may outlive its transaction, and nothing may count on what came before.

use std::path::PathBuf;
use std::sync::LazyLock;
use std::thread;
use std::time::{Duration, Instant};

use client_tests::{
    Cluster, DEADLINE, Program, environment, in_background, outcome, sqlstate, value, wait_until, wait_until_blocked,
    wait_until_gone,
};
use postgres::types::Type;
use postgres::{Client, Config, Error, NoTls};

static CLUSTER: LazyLock<Cluster> = LazyLock::new(|| Cluster::start(&[]));

/// A pooler in front of the cluster, with a database where accounts 1 and 2 hold 1000 each.
struct Pooler {
    _program: Program,
    directory: PathBuf,
    database: String,
}

impl Pooler {
    fn start(server_connections: usize) -> Self {
        let database = CLUSTER.database();
        CLUSTER
            .connect_to(&database)
            .batch_execute(
                "INSERT INTO account VALUES (1, 1000), (2, 1000);
                 CREATE FUNCTION echo(bigint, jsonb) RETURNS jsonb LANGUAGE sql AS 'SELECT $2';
                 CREATE FUNCTION failing(bigint, jsonb) RETURNS jsonb LANGUAGE plpgsql AS
                     $$BEGIN RAISE 'no' USING ERRCODE = 'ZZ001'; END$$",
            )
            .unwrap();
        CLUSTER.run("mkdir", &[&database]);
        let directory = CLUSTER.directory().join(&database);
        // No listen_addr: a socket and nothing else.
        let settings = format!(
            "[databases]
             * = host={1} port=5432 user=postgres
             [pgbouncer]
             unix_socket_dir = {0}
             listen_port = 6432
             auth_type = any
             admin_users = postgres
             pool_mode = transaction
             default_pool_size = {server_connections}
             logfile = {0}/log\n",
            directory.display(),
            CLUSTER.directory().display()
        );
        let file = directory.join("pooler.ini");
        std::fs::write(&file, settings.replace("             ", "")).unwrap();
        let program = CLUSTER.start_program(&environment("PGBOUNCER"), &["-q", file.to_str().unwrap()]);
        let pooler = Self { _program: program, directory, database };
        let start = Instant::now();
        while let Err(error) = pooler.try_connect(&pooler.database) {
            assert!(start.elapsed() < DEADLINE, "{error:?}");
            thread::sleep(Duration::from_millis(20));
        }
        pooler
    }

    fn try_connect(&self, database: &str) -> Result<Client, Error> {
        Config::new().host_path(&self.directory).port(6432).user("postgres").dbname(database).connect(NoTls)
    }

    /// A client of the pooler's.
    fn connect(&self) -> Client {
        self.try_connect(&self.database).expect("a session")
    }

    /// A session past the pooler.
    fn observer(&self) -> Client {
        CLUSTER.connect_to(&self.database)
    }

    /// Waits until so many clients wait for a server connection.
    fn wait_until_queued(&self, count: usize) {
        let mut console = self.try_connect("pgbouncer").expect("the console");
        let start = Instant::now();
        loop {
            let pools = console.simple_query("SHOW POOLS").unwrap();
            let waiting: usize = pools
                .iter()
                .filter_map(|message| match message {
                    postgres::SimpleQueryMessage::Row(row) => row.get("cl_waiting")?.parse::<usize>().ok(),
                    _ => None,
                })
                .sum();
            if waiting == count {
                return;
            }
            assert!(start.elapsed() < DEADLINE, "{waiting} clients wait");
            thread::sleep(Duration::from_millis(5));
        }
    }
}

/// As an unnamed statement, whose messages all go to one server connection.
fn debit(client: &mut Client, account: i64, key: Option<&str>, amount: i64) -> Result<String, Error> {
    let sql = "SELECT debit_once($1, $2, $3)::text";
    let parameters: [(&(dyn postgres::types::ToSql + Sync), Type); 3] =
        [(&account, Type::INT8), (&key, Type::TEXT), (&amount, Type::INT8)];
    client.query_typed(sql, &parameters)?[0].try_get(0)
}

fn backend(client: &mut Client) -> i32 {
    value(client, "SELECT pg_backend_pid()").parse().unwrap()
}

const POOLED: &str = "datname = current_database() AND backend_type = 'client backend' AND pid <> pg_backend_pid()";

/// Proves that no server connection of the pool keeps anything of what came before.
fn assert_nothing_stays(pooler: &Pooler, client: &mut Client) {
    let mut observer = pooler.observer();
    wait_until(&mut observer, &format!("SELECT count(*) = 0 FROM pg_stat_activity WHERE {POOLED} AND state <> 'idle'"));
    let locks = format!("SELECT count(*) FROM pg_locks JOIN pg_stat_activity USING (pid) WHERE {POOLED}");
    assert_eq!(value(&mut observer, &locks), "0");
    let prepared = "SELECT count(*) FROM pg_prepared_xacts WHERE database = current_database()";
    assert_eq!(value(&mut observer, prepared), "0");
    for sql in [
        "SELECT count(*) FROM pg_prepared_statements",
        "SELECT count(*) FROM pg_cursors WHERE is_holdable",
        "SELECT count(*) FROM pg_class WHERE pg_is_other_temp_schema(relnamespace) OR relnamespace = pg_my_temp_schema()",
    ] {
        assert_eq!(value(client, sql), "0", "{sql}");
    }
    assert_eq!(value(client, "SHOW idempotency_record.require_key"), "on");
}

#[test]
fn two_clients_on_one_server_connection_execute_once_replay_and_share_nothing_else() {
    let pooler = Pooler::start(1);
    let (mut one, mut two) = (pooler.connect(), pooler.connect());
    assert_eq!(backend(&mut one), backend(&mut two));
    // Often enough for every kind of plan; by both protocols.
    for i in 1..=8 {
        let (key, left) = (format!("key {i}"), format!(r#"{{"balance": {}}}"#, 1000 - i));
        assert_eq!(debit(&mut one, 1, Some(&key), 1).unwrap(), left);
        assert_eq!(debit(&mut two, 1, Some(&key), 1).unwrap(), left);
        assert_eq!(value(&mut one, &format!("SELECT debit_once(1, '{key}', 1)")), left);
        assert_eq!(outcome(debit(&mut two, 1, Some(&key), 2)), "22023");
    }

    // While one is in a transaction, the other has no connection at all.
    one.batch_execute("BEGIN").unwrap();
    assert_eq!(debit(&mut one, 2, Some("key"), 100).unwrap(), r#"{"balance": 900}"#);
    let waiting = in_background(two, "SELECT debit_once(2, 'key', 100)".into());
    pooler.wait_until_queued(1);
    one.batch_execute("COMMIT").unwrap();
    let (mut two, got) = waiting.join().expect("no panic");
    assert_eq!(outcome(got), r#"done: {"balance": 900}"#);

    // What one sets for its transaction, the other does not have in its own.
    one.batch_execute("BEGIN; SET LOCAL idempotency_record.require_key = off").unwrap();
    assert_eq!(debit(&mut one, 2, None, 100).unwrap(), r#"{"balance": 800}"#);
    one.batch_execute("COMMIT").unwrap();
    assert_eq!(outcome(debit(&mut two, 2, None, 100)), "22023");

    // A handler that failed for one is not in flight for the other.
    let run = |handler: &str| format!("SELECT run_once(2, 'echo:v1', 'key', '[1]', '{handler}(bigint, jsonb)')");
    assert_eq!(sqlstate(&one.simple_query(&run("failing")).unwrap_err()), "ZZ001");
    assert_eq!(value(&mut two, &run("echo")), "[1]");
    assert_eq!(value(&mut one, &run("failing")), "[1]");
    assert_nothing_stays(&pooler, &mut two);
}

#[test]
fn a_retry_on_another_server_connection_waits_for_the_first_attempt_and_replays_or_executes() {
    let pooler = Pooler::start(2);
    let mut observer = pooler.observer();
    for (end, expected) in [("COMMIT", 900), ("ROLLBACK", 800)] {
        let (mut one, mut two) = (pooler.connect(), pooler.connect());
        one.batch_execute("BEGIN").unwrap();
        debit(&mut one, 1, Some(end), 100).unwrap();
        let other = backend(&mut two);
        assert_ne!(backend(&mut one), other);
        let waiting = in_background(two, format!("SELECT debit_once(1, '{end}', 100)"));
        wait_until_blocked(&mut observer, other);
        one.batch_execute(end).unwrap();
        let (mut two, got) = waiting.join().expect("no panic");
        assert_eq!(outcome(got), format!(r#"done: {{"balance": {expected}}}"#), "{end}");
        assert_eq!(outcome(debit(&mut two, 1, Some(end), 101)), "22023");
        assert_nothing_stays(&pooler, &mut one);
    }
}

#[test]
fn a_client_that_hangs_up_in_a_transaction_frees_the_key_for_the_retry_that_waits_for_it() {
    let pooler = Pooler::start(2);
    let mut observer = pooler.observer();
    let (mut one, mut two) = (pooler.connect(), pooler.connect());
    one.batch_execute("BEGIN").unwrap();
    debit(&mut one, 1, Some("key"), 100).unwrap();
    let first = backend(&mut one);
    let other = backend(&mut two);
    let waiting = in_background(two, "SELECT debit_once(1, 'key', 200)".into());
    wait_until_blocked(&mut observer, other);
    drop(one);
    wait_until_gone(&mut observer, first);
    let (mut two, got) = waiting.join().expect("no panic");
    assert_eq!(outcome(got), r#"done: {"balance": 800}"#);
    assert_nothing_stays(&pooler, &mut two);
}

#[test]
fn a_retry_after_the_server_connection_was_lost_goes_through_a_new_one_and_replays() {
    let pooler = Pooler::start(2);
    let mut observer = pooler.observer();
    let (mut one, mut two) = (pooler.connect(), pooler.connect());
    one.batch_execute("BEGIN").unwrap();
    debit(&mut one, 1, Some("key"), 100).unwrap();
    let other = backend(&mut two);
    let waiting = in_background(two, "SELECT debit_once(1, 'key', 100)".into());
    wait_until_blocked(&mut observer, other);
    assert_eq!(value(&mut observer, &format!("SELECT pg_terminate_backend({other})")), "t");
    assert!(waiting.join().expect("no panic").1.is_err());
    wait_until_gone(&mut observer, other);
    one.batch_execute("COMMIT").unwrap();
    // The pooler may have closed the client's connection as well.
    let mut two = pooler.connect();
    assert_eq!(debit(&mut two, 1, Some("key"), 100).unwrap(), r#"{"balance": 900}"#);
    assert_eq!(outcome(debit(&mut two, 1, Some("key"), 101)), "22023");
    assert_nothing_stays(&pooler, &mut two);
}

#[test]
fn plans_of_the_server_connections_follow_an_extension_that_moves() {
    let pooler = Pooler::start(1);
    let mut client = pooler.connect();
    for i in 0..8 {
        debit(&mut client, 1, Some(&format!("warm-up {i}")), 1).unwrap();
    }
    let before = backend(&mut client);
    let mut observer = pooler.observer();
    observer
        .batch_execute(
            "DROP EXTENSION idempotency_record; CREATE EXTENSION idempotency_record; INSERT INTO account VALUES (1, 50)",
        )
        .unwrap();
    assert_eq!(debit(&mut client, 1, Some("warm-up 0"), 1).unwrap(), r#"{"balance": 49}"#);
    assert_eq!(debit(&mut pooler.connect(), 1, Some("warm-up 0"), 1).unwrap(), r#"{"balance": 49}"#);
    assert_eq!(backend(&mut client), before);
    assert_nothing_stays(&pooler, &mut client);
}
