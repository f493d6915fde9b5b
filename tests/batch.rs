//! Batches: each element answered as the single call would answer it, in one transaction, by statements for the whole set.
//!
//! The seed of the random batches is printed; `IDEMPOTENCY_RECORD_SEED=...` runs the same ones again,
//! `IDEMPOTENCY_RECORD_BATCHES=...` more of them.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use client_tests::{Cluster, contents, outcome, pid, query, simple, value};
use postgres::{Client, SimpleQueryMessage};
use rand::rngs::StdRng;
use rand::seq::IndexedRandom as _;
use rand::{RngExt as _, SeedableRng as _};

// Autovacuum takes transaction ids and writes WAL of its own accord.
static CLUSTER: LazyLock<Cluster> = LazyLock::new(|| Cluster::start(&["autovacuum=off", "checkpoint_timeout=1h"]));

fn session() -> Client {
    let database = CLUSTER.database();
    CLUSTER.connect_to(&database)
}

fn setting<T: std::str::FromStr>(name: &str) -> Option<T> {
    std::env::var(name).ok().map(|value| value.parse().unwrap_or_else(|_| panic!("{name} is not a number")))
}

// ---- random batches against single calls ------------------------------------------------------------------------

/// The single calls, one after the other, each in a savepoint of its own, as rows of a batch.
const SINGLES: &str = "
    CREATE FUNCTION singles(operation text, accounts bigint[], keys text[], amounts bigint[])
    RETURNS TABLE (ordinal bigint, response jsonb, replayed boolean, code text, message text) LANGUAGE plpgsql AS $$
    DECLARE
        a bigint; k text; m bigint;
    BEGIN
        FOR i IN 1 .. coalesce(cardinality(accounts), 0) LOOP
            a := accounts[i]; k := keys[i]; m := amounts[i];
            ordinal := i; response := NULL; replayed := false; code := NULL; message := NULL;
            BEGIN
                IF operation = 'debit' THEN
                    SELECT o.response, o.replayed INTO response, replayed FROM debit_once_outcome(a, k, m) AS o;
                ELSE
                    SELECT o.response, o.replayed INTO response, replayed FROM credit_once_outcome(a, k, m) AS o;
                END IF;
            EXCEPTION WHEN OTHERS THEN
                GET STACKED DIAGNOSTICS code = RETURNED_SQLSTATE, message = MESSAGE_TEXT;
            END;
            RETURN NEXT;
        END LOOP;
    END $$";

/// What a batch wrote, without the times.
const BOOKS: &str = "
    SELECT concat((SELECT string_agg(account_id || ':' || balance, ' ' ORDER BY account_id) FROM account), '--',
                  (SELECT string_agg(concat_ws(':', account_id, operation, request_key, request, response, cancelled, request_fingerprint),
                                     ' ' ORDER BY account_id, operation, request_key) FROM request_result))";

struct Batch {
    operation: &'static str,
    accounts: Vec<Option<i64>>,
    keys: Vec<Option<String>>,
    amounts: Vec<Option<i64>>,
}

/// A UUID of version 7 that was made so many seconds after 1970.
fn dated_key(seconds: u64, n: u32) -> String {
    let made = format!("{:012x}", seconds * 1_000);
    format!("{}-{}-7abc-bdef-{n:012x}", &made[..8], &made[8..])
}

struct Generator {
    random: StdRng,
    keys: Vec<Option<String>>,
}

impl Generator {
    fn batch(&mut self) -> Batch {
        let random = &mut self.random;
        let operation = *["debit", "debit", "credit"].choose(random).expect("some");
        let length = match random.random_range(0..20) {
            0 => 0,
            1 => 400,
            2..=5 => 1,
            _ => random.random_range(2..50),
        };
        // Where the order counts few accounts are used often, where it does not all are.
        let (accounts, keys) = (random.random_range(1..=8), random.random_range(1..=self.keys.len()));
        let odd = random.random_range(0..4) == 0;
        let mut batch = Batch { operation, accounts: Vec::new(), keys: Vec::new(), amounts: Vec::new() };
        for _ in 0..length {
            batch.accounts.push(match random.random_range(0..30) {
                0 if odd => None,
                1 => Some(404),
                _ => Some(random.random_range(0..accounts)),
            });
            let key = match random.random_range(0..40) {
                0 if odd => Some(String::new()),
                1 if odd => Some("é".repeat(128)),
                2 | 3 if odd => None,
                4 => Some("é".repeat(127)),
                5..=12 => Some(format!("new {}", random.random_range(0..1_000_000))),
                13 => Some(dated_key(1_893_456_000, random.random_range(0..9))),
                14 => Some(dated_key(978_307_200, random.random_range(0..9))),
                15 => Some(dated_key(1_700_000_000, random.random_range(0..9))),
                _ => self.keys[random.random_range(0..keys)].clone(),
            };
            batch.keys.push(key);
            batch.amounts.push(match random.random_range(0..30) {
                0 if odd => None,
                1 if odd => Some(0),
                2 if odd => Some(i64::MIN),
                3 => Some(i64::MAX),
                4 | 5 => Some(random.random_range(1..5_000)),
                6..=9 => Some(random.random_range(1..4)),
                _ => Some(7),
            });
        }
        batch
    }
}

type Answer = (i64, Option<String>, bool, Option<String>, Option<String>);

fn answers(client: &mut Client, function: &str, batch: &Batch) -> Vec<Answer> {
    let sql = format!(
        "SELECT ordinal, response::text, replayed, code, message FROM {function} AS answer (ordinal, response, replayed, code, message)"
    );
    let rows = client
        .query(&sql, &[&batch.accounts, &batch.keys, &batch.amounts])
        .unwrap_or_else(|error| panic!("{function}: {error:?}"));
    rows.iter().map(|row| (row.get(0), row.get(1), row.get(2), row.get(3), row.get(4))).collect()
}

#[test]
fn random_batches_answer_element_by_element_as_single_calls_do_and_leave_the_same_books() {
    let seed = setting("IDEMPOTENCY_RECORD_SEED").unwrap_or_else(rand::random);
    println!("IDEMPOTENCY_RECORD_SEED={seed}");
    let mut random = StdRng::seed_from_u64(seed);
    let mut twins = [session(), session()];
    for client in &mut twins {
        client.batch_execute(SINGLES).unwrap();
        client
            .batch_execute(&format!(
                "INSERT INTO account VALUES (0, 40), (1, 1000), (2, 0), (3, 1000000), (4, {max}), (5, {max} - 20), (6, 7), (7, 300);
                 INSERT INTO retention_fence VALUES ('operation', 'debit:v1', '2011-01-01'), ('operation', 'credit:v1', '2011-01-01');
                 SET idempotency_record.require_key = on",
                max = i64::MAX
            ))
            .unwrap();
    }
    let keys = (0..60).map(|_| Some(format!("k{}", random.random_range(0..1_000)))).collect();
    let mut generator = Generator { random, keys };
    let mut seen = BTreeMap::<String, usize>::new();
    for number in 0..setting("IDEMPOTENCY_RECORD_BATCHES").unwrap_or(700) {
        // What is declared changes, keys are cancelled, accounts come and are topped up.
        let change = match generator.random.random_range(0..12) {
            0 => {
                let refusals = *["save", "raise"].choose(&mut generator.random).expect("some");
                let stored = *["full", "fingerprint"].choose(&mut generator.random).expect("some");
                format!(
                    "INSERT INTO operation_policy (operation, refusals, stored_request)
                     SELECT operation, '{refusals}', '{stored}' FROM unnest('{{debit:v1, credit:v1}}'::text[]) AS operation
                     ON CONFLICT (operation) DO UPDATE SET (refusals, stored_request) = ROW (EXCLUDED.refusals, EXCLUDED.stored_request)"
                )
            }
            1 => {
                let key = generator.keys.choose(&mut generator.random).cloned().flatten().expect("some");
                let operation = *["debit:v1", "credit:v1"].choose(&mut generator.random).expect("some");
                format!("SELECT cancel_request({}, '{operation}', '{key}')", generator.random.random_range(0..8))
            }
            2 => {
                let value = *["on", "off"].choose(&mut generator.random).expect("some");
                format!("SET idempotency_record.require_key = {value}")
            }
            3 => {
                "UPDATE account SET balance = balance + 500 WHERE account_id IN (0, 2, 6) AND balance < 1000000".into()
            }
            4 => {
                let fresh = format!("k{}", generator.random.random_range(0..1_000));
                *generator.keys.last_mut().expect("some") = Some(fresh);
                String::new()
            }
            _ => String::new(),
        };
        let batch = generator.batch();
        let isolation =
            *["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"].choose(&mut generator.random).expect("some");
        let end = if generator.random.random_range(0..10) == 0 { "ROLLBACK" } else { "COMMIT" };
        let [single, many] = &mut twins;
        let mut got = Vec::new();
        for (client, function) in [
            (single, format!("singles('{}', $1, $2, $3)", batch.operation)),
            (many, format!("{}_batch_once($1, $2, $3)", batch.operation)),
        ] {
            client.batch_execute(&change).unwrap();
            client.batch_execute(&format!("BEGIN ISOLATION LEVEL {isolation}")).unwrap();
            let answers = answers(client, &function, &batch);
            client.batch_execute(end).unwrap();
            got.push((answers, value(client, BOOKS)));
        }
        let [(singles, single_books), (rows, books)] = &got[..] else { unreachable!() };
        assert_eq!(singles.len(), rows.len(), "batch {number}");
        for (at, (single, row)) in singles.iter().zip(rows).enumerate() {
            let (account, key, amount) = (batch.accounts[at], &batch.keys[at], batch.amounts[at]);
            assert_eq!(
                row, single,
                "batch {number}, {} {isolation}, element {at}: {account:?} {key:?} {amount:?}",
                batch.operation
            );
            let what = row.3.clone().unwrap_or_else(|| if row.2 { "replayed".into() } else { "executed".into() });
            *seen.entry(format!("{} {what}", batch.operation)).or_default() += 1;
            if row.3.as_deref() == Some("22023") {
                *seen.entry(row.4.clone().expect("a message")).or_default() += 1;
            }
            if row.1.as_ref().is_some_and(|response| response.contains("refused")) {
                *seen.entry("saved refusal".into()).or_default() += 1;
            }
        }
        assert_eq!(books, single_books, "batch {number}");
    }
    println!("{seen:?}");
    // Chance has been everywhere.
    for what in [
        "debit executed",
        "debit replayed",
        "debit P0001",
        "debit 23503",
        "credit executed",
        "credit replayed",
        "credit 22003",
        "saved refusal",
        "account required",
        "key and positive amount required",
        "key too long: 256 bytes, the limit is 255 bytes",
        "idempotency key reused with different request",
        "request was cancelled",
        "idempotency key expired",
        "idempotency key is dated in the future",
    ] {
        assert!(seen.get(what).is_some_and(|&count| count > 5), "{what}: {seen:?}");
    }
}

// ---- what a batch costs -----------------------------------------------------------------------------------------

/// A batch of so many debits of 1, spread over 100 accounts.
fn many(elements: u32) -> String {
    format!(
        "debit_batch_once(ARRAY(SELECT i % 100 FROM generate_series(1, {elements}) AS i ORDER BY i)::bigint[],
                          ARRAY(SELECT 'key ' || i FROM generate_series(1, {elements}) AS i ORDER BY i), array_fill(1::bigint, ARRAY[{elements}]))"
    )
}

const SUMMARY: &str = "SELECT concat_ws(' ', count(*), count(response), count(*) FILTER (WHERE replayed), count(sqlstate),
                                        count(*) FILTER (WHERE response = jsonb_build_object('balance', 100000 - (ordinal + 99) / 100)), bool_and(ordinal = position))
                         FROM (SELECT *, row_number() OVER () AS position FROM";

#[test]
fn ten_thousand_elements_work_with_default_settings_and_a_hundred_thousand_are_the_limit() {
    let mut client = session();
    client.batch_execute("INSERT INTO account SELECT i, 100000 FROM generate_series(0, 99) AS i").unwrap();
    // 1 is a debit of account 1 and so on, 100 of account 0: each is the (ordinal + 99) / 100th of its account.
    let batch = format!("{SUMMARY} {}) AS given", many(10_000));
    assert_eq!(value(&mut client, &batch), "10000 10000 0 0 10000 t");
    assert_eq!(value(&mut client, &batch), "10000 10000 10000 0 10000 t");
    // Also where the rows are taken one by one, and not to the end.
    assert_eq!(value(&mut client, &format!("SELECT ({}).response LIMIT 1", many(10_000))), r#"{"balance": 99999}"#);
    assert_eq!(value(&mut client, "SELECT count(*) || ' ' || count(DISTINCT balance) FROM account"), "100 1");
    assert_eq!(value(&mut client, "SELECT count(*) FROM request_result"), "10000");

    let before = contents(&mut client);
    assert_eq!(outcome(simple(&mut client, &format!("SELECT count(*) FROM {}", many(100_001)))), "54000");
    assert_eq!(contents(&mut client), before);
    let batch = format!("{SUMMARY} {}) AS given", many(100_000));
    assert_eq!(value(&mut client, &batch), "100000 100000 10000 0 100000 t");
    assert_eq!(value(&mut client, &batch), "100000 100000 100000 0 100000 t");
    let status = std::fs::read_to_string(format!("/proc/{}/status", pid(&mut client))).expect("the backend's status");
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).expect("VmHWM");
    let kilobytes: u64 = peak.trim().trim_end_matches(" kB").parse().expect("a number");
    println!("the most that the session had: {kilobytes} kB, shared memory included");
    assert!(kilobytes < 600 << 10, "{kilobytes} kB");
}

#[test]
fn a_session_does_not_grow_with_its_batches() {
    let mut client = session();
    client.batch_execute("INSERT INTO account SELECT i, 100000 FROM generate_series(0, 99) AS i").unwrap();
    let memory = "SELECT sum(total_bytes)::bigint FROM pg_backend_memory_contexts";
    let batch = format!("SELECT count(*) FROM {}", many(1_000));
    let mut measured = Vec::new();
    for round in 0..60 {
        value(&mut client, &batch);
        if round % 20 == 19 {
            measured.push(value(&mut client, memory).parse::<u64>().expect("a number"));
        }
    }
    assert!(measured[2] <= measured[0] + (64 << 10), "{measured:?}");
}

#[test]
fn a_batch_of_replays_writes_nothing_and_works_in_a_read_only_transaction() {
    let mut client = session();
    client.batch_execute("INSERT INTO account VALUES (1, 1000), (2, 1000)").unwrap();
    let known = "SELECT string_agg(concat_ws(' ', ordinal, response, replayed, sqlstate), ', ' ORDER BY ordinal)
                   FROM debit_batch_once('{1, 2, 1, 1, NULL}', '{a, b, a, b, c}', '{100, 1, 101, 5, 1}')";
    let answer = r#"1 {"balance": 900} t, 2 {"balance": 999} t, 3 f 22023, 4 {"balance": 895} t, 5 f 22023"#;
    value(&mut client, known);
    client.batch_execute("VACUUM account, request_result").unwrap();
    let before = contents(&mut client);
    for mode in ["READ WRITE", "READ ONLY", "ISOLATION LEVEL SERIALIZABLE, READ ONLY"] {
        client.batch_execute(&format!("BEGIN {mode}")).unwrap();
        for _ in 0..7 {
            assert_eq!(value(&mut client, known), answer, "{mode}");
        }
        assert_eq!(value(&mut client, "SELECT pg_current_xact_id_if_assigned() IS NULL"), "t", "{mode}");
        client.batch_execute("COMMIT").unwrap();
    }
    // Nobody is waited for.
    let mut other = CLUSTER.connect_to(&value(&mut client, "SELECT current_database()"));
    other.batch_execute("BEGIN; LOCK TABLE account, request_result IN EXCLUSIVE MODE").unwrap();
    client.batch_execute("SET lock_timeout = '1s'").unwrap();
    assert_eq!(value(&mut client, known), answer);
    let one_new = "SELECT count(*) FROM debit_batch_once('{1, 1}', '{a, new}', '{100, 1}')";
    assert_eq!(outcome(simple(&mut client, one_new)), "55P03");
    other.batch_execute("ROLLBACK").unwrap();
    client.batch_execute("BEGIN READ ONLY").unwrap();
    assert_eq!(outcome(simple(&mut client, one_new)), "25006");
    client.batch_execute("ROLLBACK").unwrap();
    let plan = simple(&mut client, &format!("EXPLAIN (ANALYZE, WAL, FORMAT JSON) {known}")).expect("a plan");
    assert!(plan.contains("\"WAL Records\": 0"), "{plan}");
    assert_eq!(contents(&mut client), before);
}

/// What the session did with the extension's tables and has not reported to the statistics yet, which it does not within a
/// transaction: whole reads, rows read by an index, inserted and updated, of `account` and then of `request_result`.
fn done_so_far(client: &mut Client) -> Vec<i64> {
    let sql = "SELECT seq_scan, idx_tup_fetch, n_tup_ins, n_tup_upd FROM pg_stat_xact_user_tables
                WHERE relname IN ('account', 'request_result') ORDER BY relname";
    let rows = client.query(sql, &[]).expect("statistics");
    rows.iter().flat_map(|row| (0..4).map(|column| row.get(column)).collect::<Vec<i64>>()).collect()
}

#[test]
fn a_batch_writes_one_version_of_each_account_and_reads_no_whole_table_also_with_a_plan_from_when_it_was_small() {
    assert_reads_little(&["SELECT count(*) FROM debit_batch_once('{1, 2}', '{a, b}', '{1, 1}')"]);
}

#[test]
fn nor_with_a_plan_from_when_the_tables_were_analyzed_empty() {
    assert_reads_little(&[]);
}

/// After these statements the statistics are taken, and then the plans are made, before the tables grow.
fn assert_reads_little(before: &[&str]) {
    let database = CLUSTER.database();
    let mut client = CLUSTER.connect_to(&database);
    // Statistics of a table with one page, for which reading all of it is the cheapest plan.
    client.batch_execute("INSERT INTO account SELECT i, 1000 FROM generate_series(1, 3) AS i").unwrap();
    for sql in before.iter().copied().chain([
        "VACUUM ANALYZE account",
        "VACUUM ANALYZE request_result",
        "SELECT count(*) FROM debit_batch_once('{1, 2, 3}', '{c, d, e}', '{1, 1, 1}')",
    ]) {
        client.batch_execute(sql).unwrap();
    }
    let mut other = CLUSTER.connect_to(&database);
    other
        .batch_execute(
            "INSERT INTO account SELECT i, 1000 FROM generate_series(4, 50000) AS i;
             INSERT INTO request_result SELECT i, 'debit:v1', 'old', '{\"amount\": 1}', '{\"balance\": 1}' FROM generate_series(4, 50000) AS i",
        )
        .unwrap();
    client.batch_execute("BEGIN").unwrap();
    let batch = "SELECT concat_ws(' ', count(response), count(*) FILTER (WHERE replayed))
                   FROM debit_batch_once(ARRAY[1, 2, 1, 1, 4], ARRAY['f', 'g', 'h', 'f', 'old'], ARRAY[1, 2, 3, 1, 1])";
    let before = done_so_far(&mut client);
    assert_eq!(value(&mut client, batch), "5 2");
    let done: Vec<i64> = done_so_far(&mut client).iter().zip(before).map(|(after, before)| after - before).collect();
    let [whole, read, inserted, updated, whole_too, read_too, inserted_too, updated_too] = done[..] else {
        panic!("{done:?}")
    };
    assert_eq!((whole, inserted, updated), (0, 0, 2), "{done:?}");
    assert_eq!((whole_too, inserted_too, updated_too), (0, 3, 0), "{done:?}");
    assert!(read + read_too < 100, "{done:?}");
    client.batch_execute("COMMIT").unwrap();
}

// ---- all or nothing ----------------------------------------------------------------------------------------------

#[test]
fn what_the_server_or_a_trigger_raises_fails_the_whole_batch_and_leaves_nothing() {
    let mut client = session();
    client
        .batch_execute(
            "INSERT INTO account VALUES (1, 1000), (2, 1000);
             CREATE FUNCTION act() RETURNS trigger LANGUAGE plpgsql AS $$
             BEGIN
                 IF TG_TABLE_NAME = 'account' THEN
                     CASE TG_ARGV[0]
                         WHEN 'raise' THEN RAISE 'no' USING ERRCODE = 'ZZ001';
                         WHEN 'suppress' THEN RETURN NULL;
                         ELSE NEW.balance := NEW.balance + 1;
                     END CASE;
                     RETURN NEW;
                 ELSIF NEW.request_key = 'b' THEN
                     CASE TG_ARGV[0]
                         WHEN 'raise' THEN RAISE 'no' USING ERRCODE = 'ZZ001';
                         WHEN 'suppress' THEN RETURN NULL;
                         WHEN 'key' THEN NEW.request_key := 'other';
                         WHEN 'taken' THEN NEW.request_key := 'a';
                         WHEN 'account' THEN NEW.account_id := 2;
                         WHEN 'operation' THEN NEW.operation := 'credit:v1';
                         WHEN 'request' THEN NEW.request := '{\"amount\": 2}';
                         WHEN 'response' THEN NEW.response := '{\"balance\": 2}';
                         WHEN 'fingerprint' THEN NEW.request_fingerprint := '\\x01';
                         WHEN 'cancelled' THEN NEW.cancelled := true;
                         WHEN 'nested' THEN PERFORM debit_once(1, 'nested', 1);
                         WHEN 'same' THEN
                             IF pg_trigger_depth() = 1 THEN PERFORM debit_once(1, 'b', 1); END IF;
                     END CASE;
                 END IF;
                 RETURN NEW;
             END $$",
        )
        .unwrap();
    let before = contents(&mut client);
    let batch = "SELECT count(*) FROM debit_batch_once('{1, 1, 1, 2}', '{a, b, c, d}', '{1, 1, 1, 1}')";
    let timing = [
        ("account", "UPDATE", &["raise", "suppress", "change"][..]),
        (
            "request_result",
            "INSERT",
            &[
                "raise",
                "suppress",
                "key",
                "taken",
                "account",
                "operation",
                "request",
                "response",
                "fingerprint",
                "cancelled",
                "nested",
                "same",
            ],
        ),
    ];
    for (table, event, acts) in timing {
        for act in acts {
            client
                .batch_execute(&format!(
                    "CREATE TRIGGER act BEFORE {event} ON {table} FOR EACH ROW EXECUTE FUNCTION act('{act}')"
                ))
                .unwrap();
            let expected = match *act {
                "raise" => "ZZ001",
                "same" => "22023",
                _ => "27000",
            };
            assert_eq!(outcome(simple(&mut client, batch)), expected, "{table} {act}");
            client.batch_execute(&format!("DROP TRIGGER act ON {table}")).unwrap();
            assert_eq!(contents(&mut client), before, "{table} {act}");
        }
    }
    assert_eq!(value(&mut client, batch), "4");
}

#[test]
fn a_call_without_a_key_warns_as_often_as_single_calls_do() {
    let mut client = session();
    client.batch_execute("INSERT INTO account VALUES (1, 10); SET idempotency_record.require_key = off").unwrap();
    let batch = "SELECT string_agg(concat_ws(' ', ordinal, response, replayed, sqlstate), ', ' ORDER BY ordinal)
                   FROM debit_batch_once('{1, 1, 1, 1, 2}', '{NULL, a, NULL, NULL, NULL}', '{1, 2, 3, 100, 1}')";
    let expected = r#"1 {"balance": 9} f, 2 {"balance": 7} f, 3 {"balance": 4} f, 4 f P0001, 5 f 23503"#;
    assert_eq!(value(&mut client, batch), expected);
    let expected = r#"1 {"balance": 3} f, 2 {"balance": 7} t, 3 {"balance": 0} f, 4 f P0001, 5 f 23503"#;
    assert_eq!(value(&mut client, batch), expected);
}

#[test]
fn arrays_that_do_not_fit_together_are_refused_and_bounds_do_not_matter() {
    let mut client = session();
    client.batch_execute("INSERT INTO account VALUES (1, 1000), (2, 1000)").unwrap();
    let before = contents(&mut client);
    for arrays in [
        "NULL, '{a}', '{1}'",
        "'{1}', NULL, '{1}'",
        "'{1}', '{a}', NULL",
        "'{1, 2}', '{a}', '{1}'",
        "'{1}', '{a, b}', '{1}'",
        "'{1}', '{a}', '{1, 1}'",
        "'{1}', '{}', '{}'",
        "'{}', '{}', '{1}'",
        "'{{1, 2}}', '{a, b}', '{1, 1}'",
        "'{1, 2}', '{{a}, {b}}', '{1, 1}'",
        "'{1, 2}', '{a, b}', '{{1, 1}}'",
        "'{{1, 2}, {1, 2}}', '{{a, b}, {c, d}}', '{{1, 1}, {1, 1}}'",
    ] {
        for function in ["debit_batch_once", "credit_batch_once"] {
            let sql = format!("SELECT count(*) FROM {function}({arrays})");
            assert_eq!(outcome(simple(&mut client, &sql)), "22023", "{arrays}");
        }
    }
    assert_eq!(contents(&mut client), before);
    let bounds = "SELECT string_agg(concat_ws(' ', ordinal, response), ', ') FROM debit_batch_once('[5:6]={1,2}', '[0:1]={a,b}', '[-1:0]={1,2}')";
    assert_eq!(value(&mut client, bounds), r#"1 {"balance": 999}, 2 {"balance": 998}"#);
    let none = client.simple_query("SELECT * FROM credit_batch_once('{}', '{}', '{}')").unwrap();
    assert!(!none.iter().any(|message| matches!(message, SimpleQueryMessage::Row(_))));
    // Arrays that come out of a table, compressed.
    client
        .batch_execute(
            "CREATE TABLE stored AS SELECT array_fill(1::bigint, ARRAY[3000]) AS accounts,
                 array_agg(repeat('k', 200) || i ORDER BY i) AS keys, array_fill(1::bigint, ARRAY[3000]) AS amounts
               FROM generate_series(1, 3000) AS i;
             UPDATE account SET balance = 3000 WHERE account_id = 1",
        )
        .unwrap();
    let stored = "SELECT count(*) FILTER (WHERE response = jsonb_build_object('balance', 3000 - ordinal))
                    FROM stored, debit_batch_once(accounts, keys, amounts)";
    assert_eq!(value(&mut client, stored), "3000");
    assert_eq!(value(&mut client, stored), "3000");
    assert_eq!(outcome(query(&mut client, "SELECT balance::text FROM account WHERE account_id = 1", &[])), "done: 0");
}
