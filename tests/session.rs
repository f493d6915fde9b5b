//! Long-lived sessions, as a connection pool keeps them, while others change the schema under their saved plans.

use std::sync::LazyLock;

use client_tests::{Cluster, balance, debit, outcome, query, simple, sqlstate, value};
use postgres::{Client, SimpleQueryMessage};

static CLUSTER: LazyLock<Cluster> = LazyLock::new(|| Cluster::start(&[]));

/// Two sessions in a database where account 1 holds 1000. The first has every plan of the extension saved, and has run
/// each often enough for a generic one.
fn sessions() -> (Client, Client) {
    let database = CLUSTER.database();
    let mut client = CLUSTER.connect_to(&database);
    client.batch_execute("INSERT INTO account VALUES (1, 1000), (99, 1000)").unwrap();
    client.batch_execute(HANDLER).unwrap();
    warm_up(&mut client);
    (client, CLUSTER.connect_to(&database))
}

/// A handler for `run_once`, which is no part of the extension and outlives it.
const HANDLER: &str = "CREATE FUNCTION public.echo(bigint, jsonb) RETURNS jsonb LANGUAGE sql AS 'SELECT $2'";

/// Calls of the functions besides `debit_once` and `purge_expired_keys`, and what they answer where account 99 has none of
/// the identities yet, and then. `@` stands for a number.
const CALLS: [(&str, &str, &str); 13] = [
    ("credit_once(99, 'credit @', 1)->'balance' > '0'", "t", "t"),
    ("(SELECT replayed FROM credit_once_outcome(99, 'outcome @', 1))", "f", "t"),
    ("(SELECT replayed FROM debit_once_outcome(99, 'outcome @', 1))", "f", "t"),
    ("run_once(99, 'echo:v1', 'run @', '[1]', 'public.echo(bigint, jsonb)')", "[1]", "[1]"),
    (
        "(SELECT replayed FROM run_once_outcome(99, 'echo:v1', 'outcome @', '{}', 'public.echo(bigint, jsonb)'))",
        "f",
        "t",
    ),
    ("cancel_request(99, 'debit:v1', 'cancelled @')", "NULL", "NULL"),
    ("(SELECT response FROM find_request(99, 'echo:v1', 'run @'))", "[1]", "[1]"),
    ("accept_message('a', md5('@')::uuid, 99, '{}')", "t", "f"),
    ("apply_message_once('b', md5('@')::uuid, 99, 1) IS NULL", "f", "t"),
    (
        "(SELECT count(*) FROM accept_messages('c', ARRAY[md5('@')::uuid, md5('x@')::uuid], '{99, 99}', '{1, 2}'))",
        "2",
        "0",
    ),
    ("accept_version('a', 'entity @', 1)", "t", "f"),
    (
        "(SELECT string_agg(concat(replayed, sqlstate), ' ') FROM debit_batch_once('{99, 99, 404}', '{batch @, other @, batch @}', '{1, 1, 1}'))",
        "f f f23503",
        "t t f23503",
    ),
    ("(SELECT replayed FROM credit_batch_once('{99}', '{batch @}', '{2}'))", "f", "t"),
];

/// Refusals after [`CALLS`], in which saved plans have a part too.
const REFUSALS: [(&str, &str); 10] = [
    ("credit_once(99, 'credit @', 2)", "22023"),
    ("debit_once(99, 'cancelled @', 1)", "22023"),
    ("run_once(99, 'echo:v1', 'run @', '[2]', 'public.echo(bigint, jsonb)')", "22023"),
    ("run_once(99, 'echo:v1', 'run @', '[1]', 'pg_catalog.abs(bigint)')", "42883"),
    ("accept_message('a', md5('@')::uuid, 1, '{}')", "22023"),
    ("apply_message_once('b', md5('@')::uuid, 99, 2)", "22023"),
    ("(SELECT count(*) FROM accept_messages('c', ARRAY[md5('@')::uuid], '{99}', '{3}'))", "22023"),
    ("cancel_request(404, 'debit:v1', 'key')", "23503"),
    ("(SELECT sqlstate FROM credit_batch_once('{99}', '{batch @}', '{3}'))", "22023"),
    ("(SELECT count(*) FROM debit_batch_once('{99, 99}', '{batch @}', '{3}'))", "22023"),
];

/// Calls every function besides `debit_once` with identities of this number, which nobody has had.
fn assert_calls(client: &mut Client, number: &str) {
    let call = |client: &mut Client, call: &str| {
        let got = outcome(simple(client, &format!("SELECT {}", call.replace('@', number))));
        got.strip_prefix("done: ").unwrap_or(&got).to_owned()
    };
    for (sql, first, then) in CALLS {
        assert_eq!(call(client, sql), first, "{number}: {sql}");
        assert_eq!(call(client, sql), then, "{number}: again {sql}");
    }
    for (sql, expected) in REFUSALS {
        assert_eq!(call(client, sql), expected, "{number}: {sql}");
    }
}

fn warm_up(client: &mut Client) {
    for i in 0..8 {
        assert_calls(client, &i.to_string());
        debit(client, 99, &format!("warm-up {i}"), 1).unwrap();
        debit(client, 99, &format!("warm-up {i}"), 1).unwrap();
        debit(client, 99, &format!("warm-up {i}"), 2).unwrap_err();
        debit(client, 99, "poor", 100_000).unwrap_err();
        value(client, "SELECT purge_expired_keys('1 day')");
    }
}

/// Proves that a session obeys the contract, on account 1 with its 1000 and no key.
fn assert_usable(client: &mut Client) {
    assert_eq!(debit(client, 1, "key", 100).unwrap(), r#"{"balance": 900}"#);
    assert_eq!(debit(client, 1, "key", 100).unwrap(), r#"{"balance": 900}"#);
    assert_eq!(outcome(debit(client, 1, "key", 101)), "22023");
    assert_eq!(outcome(debit(client, 1, "poor", 901)), "P0001");
    assert_eq!(outcome(debit(client, 2, "key", 1)), "23503");
    assert_eq!(balance(client, 1), 900);
    assert_eq!(value(client, "SELECT purge_expired_keys('1 day')"), "0");
    assert_calls(client, "usable");
}

#[test]
fn saved_plans_survive_another_session_that_drops_and_creates_the_extension() {
    let (mut client, mut other) = sessions();
    for _ in 0..3 {
        other
            .batch_execute(
                "DROP EXTENSION idempotency_record; CREATE EXTENSION idempotency_record;
                 INSERT INTO account VALUES (1, 1000), (99, 1000)",
            )
            .unwrap();
        assert_usable(&mut client);
        warm_up(&mut client);
    }
}

#[test]
fn saved_plans_survive_another_session_that_moves_the_extension_to_another_schema() {
    let (mut client, mut other) = sessions();
    client.batch_execute("SET search_path = a, b, public").unwrap();
    for schema in ["a", "b", "public", "a"] {
        other
            .batch_execute(&format!(
                "DROP EXTENSION idempotency_record; CREATE SCHEMA IF NOT EXISTS {schema};
                 CREATE EXTENSION idempotency_record SCHEMA {schema};
                 INSERT INTO {schema}.account VALUES (1, 1000), (99, 1000)"
            ))
            .unwrap();
        assert_usable(&mut client);
        warm_up(&mut client);
    }
}

#[test]
fn saved_plans_survive_another_session_that_renames_the_schema_and_follow_it_past_a_decoy() {
    let (mut client, mut other) = sessions();
    other
        .batch_execute(
            "DROP EXTENSION idempotency_record; CREATE SCHEMA a; CREATE EXTENSION idempotency_record SCHEMA a;
             INSERT INTO a.account VALUES (1, 1000), (99, 1000)",
        )
        .unwrap();
    client.batch_execute("SET search_path = a, b").unwrap();
    warm_up(&mut client);
    other
        .batch_execute(
            "BEGIN; ALTER SCHEMA a RENAME TO b; CREATE SCHEMA a;
             CREATE TABLE a.account AS SELECT 1::bigint AS account_id, 7::bigint AS balance;
             CREATE TABLE a.request_result AS SELECT * FROM b.request_result; COMMIT",
        )
        .unwrap();
    client.batch_execute("SET search_path = b").unwrap();
    assert_usable(&mut client);
    assert_eq!(value(&mut other, "SELECT balance FROM a.account"), "7");
}

#[test]
fn a_schema_renamed_in_the_middle_of_a_transaction_is_followed_and_the_rollback_too() {
    let (mut client, _) = sessions();
    client.batch_execute("CREATE SCHEMA a; DROP EXTENSION idempotency_record").unwrap();
    client.batch_execute("CREATE EXTENSION idempotency_record SCHEMA a; SET search_path = a, b").unwrap();
    client.batch_execute("INSERT INTO account VALUES (1, 1000), (99, 1000)").unwrap();
    warm_up(&mut client);
    client.batch_execute("BEGIN; ALTER SCHEMA a RENAME TO b").unwrap();
    assert_eq!(debit(&mut client, 1, "key", 500).unwrap(), r#"{"balance": 500}"#);
    client.batch_execute("ROLLBACK").unwrap();
    assert_usable(&mut client);
}

#[test]
fn an_extension_dropped_in_a_transaction_that_rolls_back_is_still_there() {
    let (mut client, _) = sessions();
    client.batch_execute("BEGIN; DROP EXTENSION idempotency_record; CREATE EXTENSION idempotency_record").unwrap();
    client.batch_execute("INSERT INTO account VALUES (1, 50)").unwrap();
    assert_eq!(debit(&mut client, 1, "key", 1).unwrap(), r#"{"balance": 49}"#);
    client.batch_execute("ROLLBACK").unwrap();
    assert_usable(&mut client);
}

#[test]
fn a_dropped_extension_gives_an_error_that_a_session_survives() {
    let (mut client, mut other) = sessions();
    other.batch_execute("DROP EXTENSION idempotency_record").unwrap();
    assert_eq!(outcome(debit(&mut client, 1, "key", 1)), "42883");
    other
        .batch_execute("CREATE EXTENSION idempotency_record; INSERT INTO account VALUES (1, 1000), (99, 1000)")
        .unwrap();
    assert_usable(&mut client);
}

#[test]
fn a_prepared_statement_survives_another_session_that_drops_and_creates_the_extension() {
    let (mut client, mut other) = sessions();
    client.batch_execute("PREPARE call(bigint) AS SELECT debit_once(1, 'key', $1)::text").unwrap();
    assert_eq!(value(&mut client, "EXECUTE call(100)"), r#"{"balance": 900}"#);
    other
        .batch_execute(
            "DROP EXTENSION idempotency_record; CREATE EXTENSION idempotency_record;
             INSERT INTO account VALUES (1, 500)",
        )
        .unwrap();
    assert_eq!(value(&mut client, "EXECUTE call(100)"), r#"{"balance": 400}"#);
    assert_eq!(value(&mut client, "EXECUTE call(100)"), r#"{"balance": 400}"#);
}

#[test]
fn discard_all_between_calls_changes_nothing() {
    let (mut client, _) = sessions();
    client.batch_execute("DISCARD ALL").unwrap();
    assert_usable(&mut client);
    client.batch_execute("DISCARD PLANS").unwrap();
    assert_eq!(debit(&mut client, 1, "key", 100).unwrap(), r#"{"balance": 900}"#);
    client.batch_execute("DISCARD ALL").unwrap();
    assert_eq!(debit(&mut client, 1, "key", 100).unwrap(), r#"{"balance": 900}"#);
    assert_eq!(outcome(debit(&mut client, 1, "key", 101)), "22023");
}

#[test]
fn set_role_between_calls_applies_the_roles_own_privileges_to_saved_plans() {
    let (mut client, _) = sessions();
    client
        .batch_execute(
            "CREATE ROLE session_teller; CREATE ROLE session_stranger;
             GRANT EXECUTE ON FUNCTION debit_once(bigint, text, bigint) TO session_teller",
        )
        .unwrap();
    for _ in 0..3 {
        client.batch_execute("SET ROLE session_teller").unwrap();
        assert_eq!(debit(&mut client, 1, "key", 100).unwrap(), r#"{"balance": 900}"#);
        client.batch_execute("SET ROLE session_stranger").unwrap();
        assert_eq!(outcome(debit(&mut client, 1, "key", 100)), "42501");
        assert_eq!(outcome(debit(&mut client, 1, "new", 100)), "42501");
        client.batch_execute("RESET ROLE").unwrap();
    }
    assert_eq!(balance(&mut client, 1), 900);
    client.batch_execute("DROP OWNED BY session_teller, session_stranger").unwrap();
    client.batch_execute("DROP ROLE session_teller, session_stranger").unwrap();
}

#[test]
fn no_search_path_and_no_temporary_object_leads_a_call_astray() {
    let (mut client, _) = sessions();
    client
        .batch_execute(
            "CREATE SCHEMA decoy;
             CREATE TABLE decoy.account AS SELECT 1::bigint AS account_id, 7::bigint AS balance;
             CREATE TABLE decoy.request_result (LIKE public.request_result INCLUDING ALL);
             CREATE TEMPORARY TABLE account AS SELECT 1::bigint AS account_id, 7::bigint AS balance;
             CREATE TEMPORARY TABLE request_result (LIKE public.request_result INCLUDING ALL);
             CREATE FUNCTION decoy.wrong(bigint, bigint) RETURNS boolean LANGUAGE sql AS 'SELECT true';
             CREATE OPERATOR decoy.= (FUNCTION = decoy.wrong, LEFTARG = bigint, RIGHTARG = bigint);
             CREATE FUNCTION decoy.clock_timestamp() RETURNS timestamptz LANGUAGE sql AS $$SELECT 'infinity'::timestamptz$$",
        )
        .unwrap();
    for (path, answer) in
        [("decoy, pg_catalog, public", 900), ("pg_temp, decoy, public", 800), ("''", 700), ("pg_catalog", 600)]
    {
        client.batch_execute(&format!("SET search_path = {path}")).unwrap();
        for _ in 0..2 {
            let sql = format!("SELECT public.debit_once(1, 'key-{answer}', 100)::text");
            assert_eq!(value(&mut client, &sql), format!(r#"{{"balance": {answer}}}"#), "{path}");
        }
        assert_eq!(value(&mut client, "SELECT public.purge_expired_keys('1 day')"), "0");
    }
    assert_eq!(value(&mut client, "SELECT balance FROM decoy.account"), "7");
    assert_eq!(value(&mut client, "SELECT count(*) FROM decoy.request_result"), "0");
    assert_eq!(value(&mut client, "SELECT count(*) FROM pg_temp.request_result"), "0");
    assert_eq!(value(&mut client, "SELECT balance FROM public.account WHERE account_id = 1"), "600");
}

#[test]
fn saved_plans_survive_another_session_that_alters_the_tables() {
    let (mut client, mut other) = sessions();
    for (done, ddl) in (1..).zip([
        "ALTER TABLE account ADD COLUMN note text DEFAULT 'x'",
        "ALTER TABLE request_result ADD COLUMN note text",
        "ALTER TABLE request_result ADD COLUMN at date NOT NULL DEFAULT '2020-01-01'",
        "ALTER TABLE request_result DROP COLUMN note",
        "ALTER TABLE account DROP COLUMN note",
        "CREATE INDEX ON request_result (response)",
        "ALTER TABLE account SET (fillfactor = 50)",
        "ANALYZE account, request_result",
        "REINDEX TABLE request_result",
        "VACUUM FULL account, request_result",
        "CLUSTER request_result USING request_result_pkey",
        "ALTER TABLE account ENABLE ROW LEVEL SECURITY",
        "ALTER TABLE processed_message ADD COLUMN note text DEFAULT 'x'",
        "ALTER TABLE accepted_version ADD COLUMN note text NOT NULL DEFAULT 'x'",
        "ALTER TABLE operation_policy ADD COLUMN note text",
        "ALTER TABLE operation_policy DROP COLUMN note",
        "INSERT INTO operation_policy (operation, stored_request) VALUES ('echo:v1', 'fingerprint')",
    ]) {
        other.batch_execute(ddl).unwrap();
        let answer = format!(r#"{{"balance": {}}}"#, 1000 - done);
        assert_eq!(debit(&mut client, 1, ddl, 1).unwrap(), answer, "{ddl}");
        assert_eq!(debit(&mut client, 1, ddl, 1).unwrap(), answer, "{ddl}");
        assert_eq!(outcome(debit(&mut client, 1, ddl, 2)), "22023", "{ddl}");
        assert_calls(&mut client, &format!("after {done}"));
    }
}

#[test]
fn a_query_string_with_several_calls_answers_each_and_is_one_transaction() {
    let (mut client, _) = sessions();
    let answers = |messages: Vec<SimpleQueryMessage>| -> Vec<String> {
        let rows = messages.into_iter().filter_map(|message| match message {
            SimpleQueryMessage::Row(row) => row.get(0).map(str::to_owned),
            _ => None,
        });
        rows.collect()
    };
    let calls = "SELECT debit_once(1, 'a', 100); SELECT debit_once(1, 'b', 50); SELECT debit_once(1, 'a', 100)";
    let expected = [r#"{"balance": 900}"#, r#"{"balance": 850}"#, r#"{"balance": 900}"#];
    assert_eq!(answers(client.simple_query(calls).unwrap()), expected);
    assert_eq!(answers(client.simple_query(calls).unwrap()), expected);

    let error = client.simple_query("SELECT debit_once(1, 'c', 1); SELECT debit_once(1, 'a', 1)").unwrap_err();
    assert_eq!(sqlstate(&error), "22023");
    assert_eq!(balance(&mut client, 1), 850);

    // COMMIT in between makes it two.
    let calls = "BEGIN; SELECT debit_once(1, 'c', 1); COMMIT; BEGIN; SELECT debit_once(1, 'd', 1); ROLLBACK";
    assert_eq!(answers(client.simple_query(calls).unwrap()), [r#"{"balance": 849}"#, r#"{"balance": 848}"#]);
    assert_eq!(balance(&mut client, 1), 849);
}

#[test]
fn calls_inside_functions_cursors_and_ctes_obey_the_same_rules() {
    let (mut client, _) = sessions();
    client
        .batch_execute(
            "CREATE FUNCTION outer_sql(k text) RETURNS jsonb LANGUAGE sql AS 'SELECT debit_once(1, k, 100)';
             CREATE FUNCTION outer_plpgsql(k text) RETURNS jsonb LANGUAGE plpgsql AS 'BEGIN RETURN outer_sql(k); END'",
        )
        .unwrap();
    for _ in 0..7 {
        assert_eq!(value(&mut client, "SELECT outer_plpgsql('key')"), r#"{"balance": 900}"#);
    }
    client
        .batch_execute("BEGIN; DECLARE c CURSOR FOR SELECT debit_once(1, 'c' || i, 1) FROM generate_series(1, 9) i")
        .unwrap();
    assert_eq!(value(&mut client, "FETCH c"), r#"{"balance": 899}"#);
    assert_eq!(debit(&mut client, 1, "c2", 1).unwrap(), r#"{"balance": 898}"#);
    assert_eq!(value(&mut client, "FETCH c"), r#"{"balance": 898}"#);
    // Two of nine were fetched, hence executed.
    client.batch_execute("CLOSE c; COMMIT").unwrap();
    assert_eq!(balance(&mut client, 1), 898);
    assert_eq!(
        value(&mut client, "WITH r AS (SELECT debit_once(1, 'key', 100) AS x) SELECT x FROM r"),
        r#"{"balance": 900}"#
    );
    let in_check = query(&mut client, "SELECT CASE WHEN debit_once(1, 'key', 101) IS NULL THEN '' END", &[]);
    assert_eq!(outcome(in_check), "22023");
    assert_eq!(outcome(simple(&mut client, "SELECT outer_plpgsql('')")), "22023");
}
