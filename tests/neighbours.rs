//! Beside other extensions and inside parallel queries: what watches every statement works with ours, learns no key, and no
//! worker executes what may not run in one.

use std::sync::LazyLock;

use client_tests::calls::{self, CALLS};
use client_tests::{Cluster, balance, debit, major, outcome, simple, value};
use postgres::Client;

static CLUSTER: LazyLock<Cluster> = LazyLock::new(|| {
    Cluster::start(&[
        "shared_preload_libraries=pg_stat_statements, auto_explain",
        "compute_query_id=on",
        "pg_stat_statements.track=all",
        "auto_explain.log_min_duration=0",
        "auto_explain.log_nested_statements=on",
        "auto_explain.log_analyze=on",
        "auto_explain.log_buffers=on",
        "auto_explain.log_wal=on",
        "auto_explain.log_triggers=on",
        "auto_explain.log_settings=on",
        "auto_explain.log_verbose=on",
    ])
});

fn session() -> Client {
    let database = CLUSTER.database();
    let mut client = CLUSTER.connect_to(&database);
    calls::prepare(&mut client);
    client
}

#[test]
fn calls_work_where_every_statement_is_explained_and_ours_are_too() {
    let mut client = session();
    client.batch_execute("SET application_name = 'explained'").unwrap();
    calls::assert_execute(&mut client);
    calls::assert_replay(&mut client);
    assert_eq!(value(&mut client, "SELECT purge_expired_keys('1 day')"), "0");
    let log = std::fs::read_to_string(CLUSTER.directory().join("log")).unwrap();
    for nested in ["Insert on public.request_result", "Update on public.account", "Insert on public.processed_message"]
    {
        assert!(log.contains(nested), "{nested}");
    }
}

#[test]
fn pg_stat_statements_normalizes_calls_and_learns_no_key_no_request_and_no_response() {
    let mut client = session();
    client.batch_execute("CREATE EXTENSION pg_stat_statements").unwrap();
    // Amounts and keys that nothing else contains.
    for i in 0..20 {
        let amount = 7_340_001 + i;
        client.batch_execute(&format!("UPDATE account SET balance = {amount} WHERE account_id = 1")).unwrap();
        let by_text = format!("SELECT debit_once(1, 'confidential-{i}', {amount})");
        assert_eq!(value(&mut client, &by_text), r#"{"balance": 0}"#);
        assert_eq!(value(&mut client, &by_text), r#"{"balance": 0}"#);
        assert_eq!(outcome(debit(&mut client, 1, &format!("confidential-{i}"), 7_350_001)), "22023");
        assert_eq!(outcome(debit(&mut client, 1, &format!("confidential-poor-{i}"), 7_360_001)), "P0001");
        let request = format!(r#"{{"confidential": {}}}"#, 7_370_001 + i);
        let run = format!("SELECT run_once(2, 'echo:v1', 'confidential-{i}', '{request}', 'echo(bigint, jsonb)')");
        assert_eq!(value(&mut client, &run), request);
        let apply = format!("SELECT apply_message_once('confidential', md5('{i}')::uuid, 3, 1, '{request}')");
        assert_eq!(value(&mut client, &apply), (1001 + i).to_string());
    }
    let learned = "SELECT count(*) FROM pg_stat_statements AS s JOIN pg_database AS d ON s.dbid = d.oid
                    WHERE d.datname = current_database()
                      AND (query LIKE '%confidential%' OR query ~ '73[4-7][0-9]{4}' OR query LIKE '%\"balance\": 0%')
                      AND query NOT LIKE '%pg_stat_statements%'";
    assert_eq!(value(&mut client, learned), "0");
    // One entry for all calls that succeeded, however many keys there were.
    let entries = |client: &mut Client, pattern: &str| {
        value(
            client,
            &format!(
                "SELECT count(*) FROM pg_stat_statements AS s JOIN pg_database AS d ON s.dbid = d.oid
                  WHERE d.datname = current_database() AND toplevel AND query LIKE 'SELECT {pattern}'"
            ),
        )
    };
    assert_eq!(entries(&mut client, "debit_once(%"), "1");
    assert_eq!(entries(&mut client, "run_once(%"), "1");
    assert_eq!(entries(&mut client, "apply_message_once(%"), "1");
    // Ours are counted as nested ones, each text once.
    let nested = "SELECT count(*) > 0 AND bool_and(calls >= 20) FROM pg_stat_statements AS s JOIN pg_database AS d ON s.dbid = d.oid
                   WHERE d.datname = current_database() AND NOT toplevel AND query LIKE 'INSERT INTO%request_result%'";
    assert_eq!(value(&mut client, nested), "t");
}

/// Makes the planner want workers wherever they are allowed; and a table that is worth them.
fn in_parallel(client: &mut Client) {
    let debug = if major() >= 16 { "debug_parallel_query" } else { "force_parallel_mode" };
    client
        .batch_execute(&format!(
            "SET {debug} = on; SET parallel_setup_cost = 0; SET parallel_tuple_cost = 0;
             SET min_parallel_table_scan_size = 0; SET min_parallel_index_scan_size = 0;
             SET max_parallel_workers_per_gather = 4;
             CREATE TABLE big AS SELECT i FROM generate_series(1, 10000) AS i;
             ALTER TABLE big SET (parallel_workers = 2); ANALYZE big"
        ))
        .unwrap();
}

fn plan(client: &mut Client, options: &str, query: &str) -> String {
    simple(client, &format!("EXPLAIN (FORMAT JSON{options}) {query}")).expect("a plan")
}

#[test]
fn calls_work_where_everything_that_may_runs_in_workers() {
    let mut client = session();
    in_parallel(&mut client);
    client.batch_execute("ALTER FUNCTION echo PARALLEL SAFE").unwrap();
    calls::assert_execute(&mut client);
    // Often enough for every kind of plan.
    for _ in 0..7 {
        calls::assert_replay(&mut client);
    }
    assert_eq!(value(&mut client, "SELECT purge_expired_keys('1 day')"), "0");
    assert_eq!(outcome(debit(&mut client, 1, "poor", 901)), "P0001");
    assert_eq!(outcome(debit(&mut client, 404, "key", 1)), "23503");
}

#[test]
fn a_query_that_calls_has_no_workers_and_one_that_only_computes_fingerprints_has() {
    let mut client = session();
    in_parallel(&mut client);
    let query = "SELECT count(DISTINCT debit_once(1, 'key ' || i % 7, 1)) FROM big";
    assert!(!plan(&mut client, "", query).contains("Gather"), "workers would call");
    assert_eq!(value(&mut client, query), "7");
    assert_eq!(balance(&mut client, 1), 993);
    let filter = "SELECT count(*) FROM big WHERE (debit_once(1, 'key ' || i % 7, 1) ->> 'balance')::int = 999";
    assert!(!plan(&mut client, "", filter).contains("Gather"), "workers would call");
    // The first row of all was i = 1, so that key 1 got 999.
    assert_eq!(value(&mut client, filter), "1429");
    assert_eq!(balance(&mut client, 1), 993);
    for call in &CALLS {
        assert!(!plan(&mut client, "", call.sql).contains("Gather"), "{}", call.sql);
    }

    let query = "SELECT count(DISTINCT request_fingerprint(to_jsonb(i % 100))) FROM big";
    let executed = plan(&mut client, ", ANALYZE", "SELECT request_fingerprint(to_jsonb(i % 100)) FROM big");
    assert!(executed.contains("Gather"), "{executed}");
    assert!(!executed.contains("\"Workers Launched\": 0"), "{executed}");
    assert_eq!(value(&mut client, query), "100");
}

#[test]
fn a_call_that_is_smuggled_into_a_worker_is_refused_by_the_server_and_changes_nothing() {
    let mut client = session();
    in_parallel(&mut client);
    client
        .batch_execute(
            "CREATE FUNCTION smuggled(i int) RETURNS jsonb LANGUAGE plpgsql PARALLEL SAFE AS
                 $$BEGIN RETURN debit_once(1, 'key ' || i, 1); END$$",
        )
        .unwrap();
    let before = calls::contents(&mut client);
    assert_eq!(outcome(simple(&mut client, "SELECT count(smuggled(i)) FROM big")), "25000");
    assert_eq!(calls::contents(&mut client), before);
    calls::assert_execute(&mut client);
    calls::assert_replay(&mut client);
}
