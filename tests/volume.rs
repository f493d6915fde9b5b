//! Many keys, many calls, one backend: nothing runs out and nothing piles up.

use std::sync::LazyLock;

use client_tests::{Cluster, contents, debit, pid, value};
use postgres::Client;

// Otherwise the server's defaults, whose 64 locks a transaction matter here. Autovacuum would remove what is counted.
static CLUSTER: LazyLock<Cluster> = LazyLock::new(|| Cluster::start(&["autovacuum=off"]));

fn session() -> Client {
    let database = CLUSTER.database();
    CLUSTER.connect_to(&database)
}

#[test]
fn a_hundred_thousand_keys_in_one_transaction_execute_and_then_replay() {
    let mut client = session();
    assert_eq!(value(&mut client, "SHOW max_locks_per_transaction"), "64");
    client.batch_execute("INSERT INTO account SELECT i, 1000 FROM generate_series(0, 999) AS i").unwrap();
    // Each account is debited 100 times by 1; the sum of the answers is the sum of 999, 998, ... 900 for each.
    let call = "SELECT sum((debit_once(i % 1000, 'key-' || i, 1) ->> 'balance')::bigint)
                  FROM generate_series(0, 99999) AS i";
    let sum = (1000 * (900..=999).sum::<u64>()).to_string();
    client.batch_execute("BEGIN").unwrap();
    assert_eq!(value(&mut client, call), sum);
    client.batch_execute("COMMIT").unwrap();
    assert_eq!(value(&mut client, "SELECT count(*) FROM request_result"), "100000");
    assert_eq!(value(&mut client, "SELECT count(*) FROM account WHERE balance = 900"), "1000");

    client.batch_execute("BEGIN READ ONLY").unwrap();
    assert_eq!(value(&mut client, call), sum);
    client.batch_execute("COMMIT").unwrap();
    assert_eq!(value(&mut client, "SELECT count(*) FROM account WHERE balance = 900"), "1000");
}

#[test]
fn a_fresh_debit_leaves_one_dead_row_the_accounts_old_version_and_a_replay_leaves_none() {
    let mut client = session();
    client.batch_execute("CREATE EXTENSION pgstattuple; INSERT INTO account VALUES (1, 1000)").unwrap();
    let rows = "SELECT string_agg(format('%s: %s live %s dead', t, s.tuple_count, s.dead_tuple_count), ', ')
                  FROM unnest('{account,request_result}'::text[]) AS t, pgstattuple(t) AS s";
    assert_eq!(value(&mut client, rows), "account: 1 live 0 dead, request_result: 0 live 0 dead");
    debit(&mut client, 1, "one", 1).unwrap();
    assert_eq!(value(&mut client, rows), "account: 1 live 1 dead, request_result: 1 live 0 dead");
    debit(&mut client, 1, "two", 1).unwrap();
    assert_eq!(value(&mut client, rows), "account: 1 live 2 dead, request_result: 2 live 0 dead");
    debit(&mut client, 1, "one", 1).unwrap();
    debit(&mut client, 1, "poor", 10_000).unwrap_err();
    debit(&mut client, 1, "one", 2).unwrap_err();
    assert_eq!(value(&mut client, rows), "account: 1 live 2 dead, request_result: 2 live 0 dead");
}

/// What the backend holds: by the server's own account, and anonymous memory by the kernel's, which also covers what
/// Rust allocates.
struct Memory {
    contexts: u64,
    resident: u64,
}

fn memory(client: &mut Client) -> Memory {
    let contexts = value(client, "SELECT sum(total_bytes)::bigint FROM pg_backend_memory_contexts").parse().unwrap();
    let status = std::fs::read_to_string(format!("/proc/{}/status", pid(client))).expect("the backend's status");
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).expect("RssAnon");
    let kilobytes: u64 = line.trim().trim_end_matches(" kB").parse().unwrap();
    Memory { contexts, resident: kilobytes * 1024 }
}

const WARM: u64 = 2_000;
const CALLS: u64 = 18_000;

// Less than what one call of five would leave behind if it left the smallest thing there is: a chunk of palloc has a
// header of 8 bytes and at least as many of content.
const CONTEXT_BOUND: u64 = CALLS / 5 * 16;

// The kernel counts pages, and malloc keeps some, hence a wider bound: a cache line for each call.
const RESIDENT_BOUND: u64 = CALLS * 64;

/// Proves that the calls from the 2,000th to the 20,000th leave nothing behind in the backend. `calls` makes the SQL that
/// makes the calls from one number to another.
fn assert_flat(client: &mut Client, calls: impl Fn(u64, u64) -> String) {
    let run = |client: &mut Client, from, to| client.batch_execute(&calls(from, to)).expect("the calls");
    run(client, 1, WARM);
    // Once more, so that whatever the measuring itself keeps is there.
    memory(client);
    let before = memory(client);
    run(client, WARM + 1, WARM + CALLS);
    let after = memory(client);
    let grown = after.contexts.saturating_sub(before.contexts);
    assert!(grown < CONTEXT_BOUND, "{grown} bytes in memory contexts after {CALLS} calls");
    let grown = after.resident.saturating_sub(before.resident);
    assert!(grown < RESIDENT_BOUND, "{grown} bytes of the process after {CALLS} calls");
}

fn with_account() -> Client {
    let mut client = session();
    client.batch_execute("INSERT INTO account VALUES (1, 1000000000)").unwrap();
    client
}

/// With an account for each call: the server itself remembers every row that one transaction writes twice.
fn with_accounts() -> Client {
    let mut client = session();
    client
        .batch_execute(&format!("INSERT INTO account SELECT i, 1000 FROM generate_series(1, {}) AS i", WARM + CALLS))
        .unwrap();
    client.batch_execute("BEGIN").unwrap();
    client
}

fn in_loop(from: u64, to: u64, body: &str) -> String {
    format!("DO $$ BEGIN FOR i IN {from}..{to} LOOP {body} END LOOP; END $$")
}

#[test]
fn memory_stays_flat_over_fresh_debits_in_transactions_of_their_own() {
    assert_flat(&mut with_account(), |from, to| in_loop(from, to, "PERFORM debit_once(1, 'key-' || i, 1); COMMIT;"));
}

#[test]
fn memory_stays_flat_over_fresh_debits_in_one_transaction() {
    assert_flat(&mut with_accounts(), |from, to| in_loop(from, to, "PERFORM debit_once(i, 'key', 1);"));
}

#[test]
fn memory_stays_flat_over_fresh_debits_and_replays_in_one_statement() {
    let mut client = with_accounts();
    let call =
        |from: u64, to: u64| format!("SELECT count(debit_once(i, 'key', 1)) FROM generate_series({from}, {to}) AS i");
    assert_flat(&mut client, call);
    client.batch_execute("COMMIT").unwrap();
    assert_flat(&mut client, call);
}

#[test]
fn memory_stays_flat_over_replays() {
    let mut client = with_account();
    debit(&mut client, 1, "key", 1).unwrap();
    assert_flat(&mut client, |from, to| in_loop(from, to, "PERFORM debit_once(1, 'key', 1); COMMIT;"));
    client.batch_execute("BEGIN").unwrap();
    assert_flat(&mut client, |from, to| in_loop(from, to, "PERFORM debit_once(1, 'key', 1);"));
}

#[test]
fn memory_stays_flat_over_refusals_that_the_caller_catches() {
    let mut client = with_account();
    debit(&mut client, 1, "key", 1).unwrap();
    client.batch_execute("BEGIN").unwrap();
    // A mismatch, an insufficient balance, an unknown account, a missing key, a key that is too long.
    let body = "BEGIN
                    CASE i % 5
                        WHEN 0 THEN PERFORM debit_once(1, 'key', 2);
                        WHEN 1 THEN PERFORM debit_once(1, 'poor', 2000000000);
                        WHEN 2 THEN PERFORM debit_once(9, 'key', 1);
                        WHEN 3 THEN PERFORM debit_once(1, '', 1);
                        WHEN 4 THEN PERFORM debit_once(1, repeat('k', 256), 1);
                    END CASE;
                    RAISE 'not refused' USING ERRCODE = 'ZZZZZ';
                EXCEPTION WHEN SQLSTATE '22023' OR SQLSTATE '23503' OR SQLSTATE 'P0001' THEN NULL; END;";
    assert_flat(&mut client, |from, to| in_loop(from, to, body));
    client.batch_execute("COMMIT").unwrap();
    assert_eq!(contents(&mut client).matches("debit:v1").count(), 1);
}

#[test]
fn memory_stays_flat_over_purges() {
    let mut client = session();
    assert_flat(&mut client, |from, to| in_loop(from, to, "PERFORM purge_expired_keys('1 day'); COMMIT;"));
}

/// How much a session grows, by its memory contexts and by its saved plans, that sees the extension dropped and created
/// 80 times with this SQL in between.
fn growth_over_cycles(sql: &str) -> (i64, i64) {
    let database = CLUSTER.empty_database("");
    let mut client = CLUSTER.connect_to(&database);
    let mut cycle = |times: usize| {
        for _ in 0..times {
            client
                .batch_execute(&format!(
                    "CREATE EXTENSION idempotency_record; {sql}; DROP EXTENSION idempotency_record"
                ))
                .expect("a cycle");
        }
        // The foreign key's own plan, which the server keeps for good, is not ours.
        let plans = "SELECT count(*) FROM pg_backend_memory_contexts
                      WHERE name = 'CachedPlanSource' AND ident NOT LIKE 'SELECT 1 FROM ONLY %'";
        let plans = value(&mut client, plans).parse::<i64>().unwrap();
        (i64::try_from(memory(&mut client).contexts).unwrap(), plans)
    };
    let before = cycle(20);
    let after = cycle(80);
    (after.0 - before.0, after.1 - before.1)
}

#[test]
fn a_session_that_sees_the_extension_dropped_and_created_many_times_lets_its_plans_go() {
    let account = "INSERT INTO account VALUES (1, 1000)";
    // The server's caches grow by themselves with every object that comes and goes; what counts is what we add.
    let (control, _) = growth_over_cycles(&format!(
        "{account}; INSERT INTO request_result VALUES (1, 'debit:v1', 'key', '{{}}', '{{}}');
         UPDATE account SET balance = 999;
         SELECT pg_sleep(0); SELECT pg_sleep(0); DELETE FROM request_result"
    ));
    let (grown, plans) = growth_over_cycles(&format!(
        "{account}; SELECT debit_once(1, 'key', 1); SELECT debit_once(1, 'key', 1); SELECT purge_expired_keys('0')"
    ));
    assert_eq!(plans, 0, "plans of the extension that is gone");
    // Less than one context for each cycle, the smallest of which takes 1 kB.
    assert!(grown - control < 80 * 1024, "{} bytes more than without us", grown - control);
}
