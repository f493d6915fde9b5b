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
const RESIDENT_BYTES: u64 = 64;

/// Proves that the calls from the 2,000th to the 20,000th leave nothing behind in the backend. `calls` makes the SQL that
/// makes the calls from one number to another.
fn assert_flat(client: &mut Client, calls: impl Fn(u64, u64) -> String) {
    assert_flat_over(client, WARM, CALLS, calls);
}

/// As [`assert_flat`], with other numbers.
fn assert_flat_over(client: &mut Client, warm: u64, count: u64, calls: impl Fn(u64, u64) -> String) {
    let run = |client: &mut Client, from, to| client.batch_execute(&calls(from, to)).expect("the calls");
    run(client, 1, warm);
    // Once more, so that whatever the measuring itself keeps is there.
    memory(client);
    let before = memory(client);
    run(client, warm + 1, warm + count);
    let after = memory(client);
    let grown = after.contexts.saturating_sub(before.contexts);
    assert!(grown < CONTEXT_BOUND, "{grown} bytes in memory contexts after {count} calls");
    let grown = after.resident.saturating_sub(before.resident);
    assert!(grown < count * RESIDENT_BYTES, "{grown} bytes of the process after {count} calls");
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
        // What is used, since the blocks that hold it double in size.
        let used = value(&mut client, "SELECT sum(used_bytes) FROM pg_backend_memory_contexts");
        (used.parse::<i64>().unwrap(), plans)
    };
    let before = cycle(20);
    let after = cycle(80);
    (after.0 - before.0, after.1 - before.1)
}

#[test]
fn a_session_that_sees_the_extension_dropped_and_created_many_times_lets_its_plans_go() {
    let account = "INSERT INTO account VALUES (1, 1000)";
    // The server's caches grow by themselves with every object that comes and goes and was touched; what counts is what we
    // add.
    let (control, _) = growth_over_cycles(&format!(
        "{account}; INSERT INTO request_result VALUES (1, 'debit:v1', 'key', '{{}}', '{{}}');
         UPDATE account SET balance = 999;
         TABLE operation_policy; TABLE subscriber_policy; SELECT FROM purge_lock FOR UPDATE;
         INSERT INTO retention_fence VALUES ('operation', 'debit:v1', now()) ON CONFLICT DO NOTHING;
         INSERT INTO purge_progress VALUES ('operation', 'debit:v1', now(), now(), '0', 0, now(), '0') ON CONFLICT DO NOTHING;
         ALTER TABLE request_result DISABLE TRIGGER USER; DELETE FROM request_result"
    ));
    let (grown, plans) = growth_over_cycles(&format!(
        "{account}; SELECT debit_once(1, 'key', 1); SELECT debit_once(1, 'key', 1); SELECT purge_expired_keys('0')"
    ));
    assert_eq!(plans, 0, "plans of the extension that is gone");
    // Less than one context for each cycle, the smallest of which takes 1 kB.
    assert!(grown - control < 80 * 1024, "{} bytes more than without us", grown - control);
}

/// [`with_account`], and a handler. What `full:v1` stores is the default, of the others a fingerprint.
fn with_handler() -> Client {
    let mut client = with_account();
    client
        .batch_execute(
            "CREATE FUNCTION echo(bigint, jsonb) RETURNS jsonb LANGUAGE plpgsql AS 'BEGIN RETURN $2; END';
             INSERT INTO operation_policy (operation, refusals, stored_request, retention)
             SELECT operation, 'save', 'fingerprint', '1 day'
               FROM unnest('{echo:v1,debit:v1,credit:v1}'::text[]) AS operation",
        )
        .unwrap();
    client
}

#[test]
fn ten_thousand_keys_of_run_once_in_one_transaction_run_and_then_replay() {
    let mut client = with_handler();
    client
        .batch_execute(
            "CREATE FUNCTION withdraw(p_account bigint, p_request jsonb) RETURNS jsonb LANGUAGE sql AS
                 'UPDATE account SET balance = balance - 1 WHERE account_id = p_account
                  RETURNING jsonb_build_object(''n'', p_request)'",
        )
        .unwrap();
    // Half of them with a fingerprint.
    let call = "SELECT sum((run_once(1, CASE i % 2 WHEN 0 THEN 'echo:v1' ELSE 'full:v1' END, 'key-' || i, to_jsonb(i),
                                     'withdraw(bigint, jsonb)') ->> 'n')::bigint)
                  FROM generate_series(1, 10000) AS i";
    let left = "SELECT balance FROM account";
    client.batch_execute("BEGIN").unwrap();
    assert_eq!(value(&mut client, call), "50005000");
    client.batch_execute("COMMIT").unwrap();
    assert_eq!(value(&mut client, left), "999990000");
    client.batch_execute("BEGIN READ ONLY").unwrap();
    assert_eq!(value(&mut client, call), "50005000");
    client.batch_execute("COMMIT").unwrap();
    assert_eq!(value(&mut client, left), "999990000");
    assert_eq!(
        value(&mut client, "SELECT count(*) || ' ' || count(request_fingerprint) FROM request_result"),
        "10000 5000"
    );
}

// In the following tests each round of the loop calls several functions, hence fewer rounds: still enough that the smallest
// chunk that one of the functions left behind each time would exceed the bound.
const ROUNDS: u64 = 3_700;
const WARM_ROUNDS: u64 = 1_300;
const _: () = assert!(ROUNDS * 16 > CONTEXT_BOUND);

/// Executions of every kind, for as many keys.
const FRESH: &str = r#"
    PERFORM run_once(1, 'echo:v1', 'run ' || i, '{"a": [1, {"b": null}]}', 'echo(bigint, jsonb)');
    PERFORM run_once_outcome(1, 'full:v1', 'outcome ' || i, '{"a": 1.50}', 'echo(bigint, jsonb)');
    PERFORM debit_once_outcome(1, 'outcome ' || i, 1);
    PERFORM credit_once_outcome(1, 'outcome ' || i, 1);
    PERFORM cancel_request(1, 'debit:v1', 'cancelled ' || i);"#;

/// Messages of every kind.
const MESSAGES: &str = r#"
    PERFORM accept_message('a', md5(i::text)::uuid, 1, '{"a": [1, {"b": null}]}');
    PERFORM apply_message_once('b', md5(i::text)::uuid, 1, 1, '{"a": 1.50}');
    PERFORM accept_messages('c', ARRAY[overlay(md5(i::text) placing '4' from 13)::uuid, overlay(md5('x' || i) placing '4' from 13)::uuid], '{1, 1}', '{1, "[]"}');
    PERFORM accept_version('d', 'entity', i);"#;

#[test]
fn memory_stays_flat_over_executions_cancellations_and_messages_in_transactions_of_their_own() {
    let mut client = with_handler();
    assert_flat_over(&mut client, WARM_ROUNDS, ROUNDS, |from, to| in_loop(from, to, &format!("{FRESH} COMMIT;")));
    let records = (5 * (WARM_ROUNDS + ROUNDS)).to_string();
    assert_eq!(value(&mut client, "SELECT count(*) FROM request_result"), records);
    assert_flat_over(&mut client, WARM_ROUNDS, ROUNDS, |from, to| in_loop(from, to, &format!("{MESSAGES} COMMIT;")));
    let messages = (4 * (WARM_ROUNDS + ROUNDS)).to_string();
    assert_eq!(value(&mut client, "SELECT count(*) FROM processed_message"), messages);
}

#[test]
fn memory_stays_flat_over_replays_and_repeats_of_every_function_in_one_transaction() {
    let mut client = with_handler();
    let bodies = [FRESH, MESSAGES].concat().replace("|| i", "|| 1").replace("i::text", "'1'").replace("i)", "1)");
    let lookups =
        r#"PERFORM find_request(1, 'echo:v1', 'run 1'); PERFORM request_fingerprint('{"a": [1.0, "\u20ac"]}');"#;
    let repeat = |from, to| in_loop(from, to, &format!("{bodies} {lookups}"));
    client.batch_execute(&repeat(1, 1)).unwrap();
    let before = contents(&mut client);
    client.batch_execute("BEGIN READ ONLY").unwrap();
    assert_flat_over(&mut client, WARM_ROUNDS, ROUNDS, repeat);
    client.batch_execute("COMMIT").unwrap();
    assert!(contents(&mut client) == before, "a repeat changed something");
}

#[test]
fn memory_stays_flat_over_refusals_of_every_function_that_the_caller_catches() {
    let mut client = with_handler();
    client
        .batch_execute(
            "CREATE FUNCTION failing(bigint, jsonb) RETURNS jsonb LANGUAGE plpgsql AS 'BEGIN RAISE ''x''; END';
             CREATE FUNCTION nothing(bigint, jsonb) RETURNS jsonb LANGUAGE sql AS 'SELECT NULL::jsonb';
             CREATE FUNCTION again(bigint, jsonb) RETURNS jsonb LANGUAGE sql AS
                 $$SELECT run_once($1, 'echo:v1', 'again', $2, 'again(bigint, jsonb)')$$;
             SELECT cancel_request(1, 'echo:v1', 'cancelled'), credit_once(1, 'key', 1),
                    run_once(1, 'echo:v1', 'key', '1', 'echo(bigint, jsonb)'),
                    accept_message('a', md5('1')::uuid, 1, '1'), apply_message_once('b', md5('1')::uuid, 1, 1, '1');
             BEGIN",
        )
        .unwrap();
    // Each is made 900 times: 64 bytes that one of them left behind would be noticed.
    let calls = [
        "run_once(1, 'echo:v1', 'cancelled', '1', 'echo(bigint, jsonb)')",
        "run_once(1, 'echo:v1', 'key', '2', 'echo(bigint, jsonb)')",
        "run_once(1, 'echo:v1', 'new', '1', 'failing(bigint, jsonb)')",
        "run_once(1, 'echo:v1', 'new', '1', 'nothing(bigint, jsonb)')",
        "run_once(1, 'echo:v1', 'again', '1', 'again(bigint, jsonb)')",
        "run_once(1, 'echo:v1', 'new', '1', 4294967295::oid)",
        "run_once(1, 'echo:v1', 'new', '1', 'abs(int)')",
        "run_once(1, 'echo', 'new', '1', 'echo(bigint, jsonb)')",
        "run_once(9, 'echo:v1', 'new', '1', 'echo(bigint, jsonb)')",
        "credit_once_outcome(1, 'key', 2)",
        "credit_once(1, 'much', 9223372036854775807)",
        "cancel_request(9, 'debit:v1', 'key')",
        "accept_message('a', md5('1')::uuid, 1, '2')",
        "apply_message_once('b', md5('1')::uuid, 1, 2)",
        "apply_message_once('b', md5('2')::uuid, 1, -2000000000)",
        "accept_messages('a', ARRAY[md5('1')::uuid], '{9}')",
        "accept_messages('a', ARRAY[md5('1')::uuid], '{1, 1}')",
        "accept_messages('a', ARRAY[md5('1')::uuid, md5('3')::uuid], '{1, 1}', '{2, 2}')",
        "accept_version('a', '', 1)",
        "request_fingerprint((repeat('[', 200) || repeat(']', 200))::jsonb)",
    ];
    let cases: String = calls.iter().enumerate().map(|(at, call)| format!("WHEN {at} THEN PERFORM {call};")).collect();
    let body = format!(
        "BEGIN
             CASE i % {} {cases} END CASE;
             RAISE 'not refused' USING ERRCODE = 'ZZZZZ';
         EXCEPTION WHEN SQLSTATE '22023' OR SQLSTATE '23503' OR SQLSTATE 'P0001' OR SQLSTATE '22003' OR SQLSTATE '22004'
                     OR SQLSTATE '42883' OR SQLSTATE '54001' THEN NULL; END;",
        calls.len()
    );
    assert_flat(&mut client, |from, to| in_loop(from, to, &body));
    client.batch_execute("COMMIT").unwrap();
    assert_eq!(value(&mut client, "SELECT count(*) FROM request_result"), "3");
    assert_eq!(value(&mut client, "SELECT count(*) FROM processed_message"), "2");
}

#[test]
fn a_record_is_found_by_its_key_also_with_a_plan_from_when_its_table_was_analyzed_empty() {
    let database = CLUSTER.database();
    let mut client = CLUSTER.connect_to(&database);
    // With row security a debit looks up by statements.
    client
        .batch_execute(
            "INSERT INTO account SELECT i, 1000 FROM generate_series(1, 1000) AS i;
             CREATE ROLE by_key; GRANT USAGE ON SCHEMA public TO by_key;
             GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA public TO by_key;
             ALTER TABLE account ENABLE ROW LEVEL SECURITY; CREATE POLICY everybody ON account USING (true)",
        )
        .unwrap();
    for table in ["request_result", "processed_message"] {
        client.batch_execute(&format!("VACUUM ANALYZE {table}")).unwrap();
    }
    let calls = [
        ("request_result", "SELECT debit_once(1, 'key', 1) IS NOT NULL"),
        ("request_result", "SELECT response IS NOT NULL FROM find_request(1, 'debit:v1', 'key')"),
        ("request_result", "SELECT cancel_request(1, 'debit:v1', 'key') IS NOT NULL"),
        ("processed_message", "SELECT accept_message('billing', md5('')::uuid, 1) IS NOT NULL"),
        (
            "processed_message",
            "SELECT count(*) >= 0 FROM accept_messages('billing', ARRAY[md5(now()::text)::uuid], '{1}')",
        ),
    ];
    client.batch_execute("SET ROLE by_key").unwrap();
    for (_, call) in calls {
        assert_eq!(value(&mut client, call), "t", "{call}");
    }
    CLUSTER
        .connect_to(&database)
        .batch_execute(
            "INSERT INTO request_result SELECT i % 1000 + 1, 'debit:v1', i::text, '{\"amount\": 1}', '{\"balance\": 1}'
               FROM generate_series(1, 20000) AS i;
             INSERT INTO processed_message (subscriber, message_id, account_id)
             SELECT 'billing', md5(i::text)::uuid, 1 FROM generate_series(1, 20000) AS i",
        )
        .unwrap();
    for (table, call) in calls {
        let read = format!(
            "SELECT coalesce(idx_tup_fetch, 0) + seq_tup_read FROM pg_stat_xact_user_tables WHERE relname = '{table}'"
        );
        client.batch_execute("BEGIN").unwrap();
        let [before, after] = [0, 1].map(|time| {
            if time == 1 {
                assert_eq!(value(&mut client, call), "t", "{call}");
            }
            value(&mut client, &read).parse::<i64>().expect("a number")
        });
        client.batch_execute("COMMIT").unwrap();
        assert!(after - before <= 3, "{call} read {}", after - before);
    }
}
