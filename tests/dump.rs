//! Dump and restore: a key that was lost would be a debit made twice.

use std::sync::LazyLock;

use client_tests::{Cluster, balance, calls, debit, outcome, simple, tamper, value};
use postgres::Client;

static CLUSTER: LazyLock<Cluster> = LazyLock::new(|| Cluster::start(&[]));

/// A schema whose name has to be quoted by whoever repeats it, and survives no attempt without.
const ODD_SCHEMA: &str = r#"odd "Schema".x; --'"#;

fn quoted(name: &str) -> String {
    format!("\"{}\"", name.replace('"', "\"\""))
}

fn session(database: &str, schema: &str) -> Client {
    let mut client = CLUSTER.connect_to(database);
    client.batch_execute(&format!("SET search_path = {}", quoted(schema))).unwrap();
    client
}

/// A handler for `run_once`, which is not in the dump: a session makes it for itself.
const HANDLER: &str = "CREATE FUNCTION pg_temp.echo(bigint, jsonb) RETURNS jsonb LANGUAGE sql AS 'SELECT $2'";

/// Calls that the source has made, each with what it answers ever after.
const CALLS: [(&str, &str); 14] = [
    // The payload is only a fingerprint, and its number is written in another way.
    ("apply_message_once('shipping', md5('delta')::uuid, 4, -7, '{\"n\": 1.50}')", "NULL"),
    ("apply_message_once('shipping', md5('delta')::uuid, 4, -7, '{\"n\": 1.5}')", "NULL"),
    ("apply_message_once('shipping', md5('delta')::uuid, 4, -8, '{\"n\": 1.5}')", "22023"),
    ("apply_message_once('shipping', md5('delta')::uuid, 4, -7, '{\"n\": 1.6}')", "22023"),
    ("accept_message('shipping', md5('delta')::uuid, 5)", "22023"),
    ("accept_version('billing', E'order\\t7', 9)", "f"),
    ("debit_once(3, 'cancelled', 1)", "22023"),
    ("cancel_request(3, 'debit:v1', 'cancelled')", "NULL"),
    ("debit_once(5, 'poor', 5000)", r#"{"balance": 900, "refused": "insufficient balance"}"#),
    ("credit_once(2, 'digest', 50)", r#"{"balance": 950}"#),
    ("credit_once(2, 'digest', 51)", "22023"),
    (
        r#"run_once(6, 'echo:v1', 'digest', '{"b": [1.0, null], "a": "\u20ac"}', 'pg_temp.echo(bigint, jsonb)')"#,
        r#"{"a": "€", "b": [1.0, null]}"#,
    ),
    (
        r#"run_once(6, 'echo:v1', 'digest', '{"a": "€", "b": [1, null]}', 'pg_temp.echo(bigint, jsonb)')"#,
        r#"{"a": "€", "b": [1.0, null]}"#,
    ),
    (r#"run_once(6, 'echo:v1', 'digest', '{"b": [1, null]}', 'pg_temp.echo(bigint, jsonb)')"#, "22023"),
];

/// Makes [`CALLS`] as repeats, and proves what they answer.
fn assert_calls_are_repeats(client: &mut Client) {
    for (call, expected) in CALLS {
        let got = outcome(simple(client, &format!("SELECT {call}")));
        assert_eq!(got.strip_prefix("done: ").unwrap_or(&got), expected, "{call}");
    }
}

/// A database with the extension in this schema, and rows in each of its tables; with what they hold.
fn source(schema: &str) -> (String, String) {
    let database = CLUSTER.empty_database("");
    let schema_sql = quoted(schema);
    CLUSTER
        .connect_to(&database)
        .batch_execute(&format!(
            "CREATE SCHEMA IF NOT EXISTS {schema_sql}; CREATE EXTENSION idempotency_record SCHEMA {schema_sql}"
        ))
        .unwrap();
    let mut client = session(&database, schema);
    // More accounts and keys than fit into one page, dumped in an order in which foreign keys could fail.
    client
        .batch_execute(
            "INSERT INTO account SELECT i, 1000 FROM generate_series(1, 500) AS i;
             SELECT count(debit_once(i, E'key\\t\\\\N''\u{20ac}', 100)) FROM generate_series(1, 500) AS i;
             SET session_replication_role = replica; -- lets a record be changed by hand
             UPDATE request_result SET created_at = '2001-02-03 04:05:06.789012+00' WHERE account_id = 1;
             RESET session_replication_role;
             INSERT INTO processed_message (subscriber, message_id, account_id)
             SELECT 'billing', md5(i::text)::uuid, i FROM generate_series(1, 500) AS i;
             INSERT INTO operation_policy VALUES
                 ('debit:v1', 'save', 'full', NULL), ('credit:v1', 'raise', 'fingerprint', '2 mons 1 day 03:04:05.678901'),
                 ('echo:v1', 'raise', 'fingerprint', NULL)",
        )
        .unwrap();
    client.batch_execute(HANDLER).unwrap();
    value(&mut client, "SELECT cancel_request(3, 'debit:v1', 'cancelled')");
    for (call, _) in CALLS {
        let _ = outcome(simple(&mut client, &format!("SELECT {call}")));
    }
    assert_calls_are_repeats(&mut client);
    let everything = calls::contents(&mut client);
    (database, everything)
}

/// Proves that the restored database holds what the source held, and still obeys the contract.
fn assert_restored(database: &str, schema: &str, expected: &str) {
    let mut client = session(database, schema);
    assert!(calls::contents(&mut client) == expected, "the rows differ");
    for account in [1, 250, 500] {
        let key = "key\t\\N'\u{20ac}";
        assert_eq!(debit(&mut client, account, key, 100).unwrap(), r#"{"balance": 900}"#);
        assert_eq!(outcome(debit(&mut client, account, key, 101)), "22023");
    }
    client.batch_execute(HANDLER).unwrap();
    assert_calls_are_repeats(&mut client);
    assert!(calls::contents(&mut client) == expected, "a replay changed the rows");
    let created = "SELECT created_at = '2001-02-03 04:05:06.789012+00' FROM request_result WHERE account_id = 1";
    assert_eq!(value(&mut client, created), "t");

    assert_eq!(debit(&mut client, 1, "new", 1).unwrap(), r#"{"balance": 899}"#);
    let again = simple(
        &mut client,
        "INSERT INTO processed_message (subscriber, message_id, account_id) VALUES ('billing', md5('1')::uuid, 1)
         RETURNING 'applied'",
    );
    assert_eq!(outcome(again), "23505");
    let orphan = simple(
        &mut client,
        "INSERT INTO request_result (account_id, operation, request_key, request, response)
         VALUES (501, 'debit:v1', 'key', '{}', '{}') RETURNING 'kept'",
    );
    assert_eq!(outcome(orphan), "23503");
    // The policies are in force: a new record has no more than a digest, and the retention that was declared.
    let credit = "SELECT format('%s %s %s', response, replayed,
                                expires_at = executed_at + interval '2 mons 1 day 03:04:05.678901')
                    FROM credit_once_outcome(7, 'new', 1)";
    assert_eq!(value(&mut client, credit), r#"{"balance": 901} f t"#);
    let stored = "SELECT format('%s %s', request, encode(request_fingerprint, 'hex')) FROM request_result
                   WHERE (account_id, operation, request_key) = (7, 'credit:v1', 'new')";
    let digest = value(&mut client, r#"SELECT encode(request_fingerprint('{"amount": 1}'), 'hex')"#);
    assert_eq!(value(&mut client, stored), format!("null {digest}"));
    assert_eq!(
        value(&mut client, "SELECT debit_once(8, 'poor', 901)"),
        r#"{"balance": 900, "refused": "insufficient balance"}"#
    );
    assert_eq!(value(&mut client, "SELECT accept_version('billing', E'order\\t7', 10)"), "t");
    // And without them the records stay comparable.
    client.batch_execute("DELETE FROM operation_policy").unwrap();
    assert_calls_are_repeats(&mut client);
    // The age survives, and with it the retention that the client was promised.
    assert_eq!(value(&mut client, "SELECT purge_expired_keys('1 day')"), "1");
}

/// Dumps with these options, restores into a new database, prepared with this SQL, and proves that all is there.
fn round_trip(schema: &str, dump: &[&str], prepare: &str, restore: Restore) {
    let (source, expected) = source(schema);
    let target = CLUSTER.empty_database("");
    CLUSTER.connect_to(&target).batch_execute(prepare).unwrap();
    let file = CLUSTER.directory().join(format!("{target}.dump")).into_os_string().into_string().unwrap();
    CLUSTER.run("pg_dump", &[dump, &["--file", &file, &source]].concat());
    match restore {
        Restore::Psql => CLUSTER.run("psql", &["-Xq", "-v", "ON_ERROR_STOP=1", "-f", &file, &target]),
        Restore::PgRestore(options) => {
            CLUSTER.run("pg_restore", &[options, &["--exit-on-error", "--dbname", &target, &file]].concat())
        }
    };
    assert_restored(&target, schema, &expected);
}

enum Restore {
    Psql,
    PgRestore(&'static [&'static str]),
}

#[test]
fn a_plain_dump_keeps_every_key() {
    round_trip("public", &[], "", Restore::Psql);
}

#[test]
fn a_plain_dump_with_inserts_keeps_every_key() {
    round_trip("public", &["--inserts"], "", Restore::Psql);
}

#[test]
fn a_plain_dump_from_an_oddly_named_schema_keeps_every_key() {
    round_trip(ODD_SCHEMA, &[], "", Restore::Psql);
}

#[test]
fn a_custom_dump_keeps_every_key() {
    round_trip("public", &["--format=custom"], "", Restore::PgRestore(&[]));
}

#[test]
fn a_custom_dump_from_an_oddly_named_schema_keeps_every_key() {
    round_trip(ODD_SCHEMA, &["--format=custom"], "", Restore::PgRestore(&[]));
}

#[test]
fn a_parallel_dump_keeps_every_key() {
    round_trip("public", &["--format=directory", "--jobs=3"], "", Restore::PgRestore(&[]));
}

// pg_dump orders the data of an extension's tables by their foreign keys, but does not write these dependencies into the
// archive, so that `pg_restore --jobs` loads records before the accounts that they refer to.
#[test]
fn a_restore_with_parallel_jobs_keeps_every_key_or_fails() {
    let (source, expected) = source("public");
    let target = CLUSTER.empty_database("");
    let file = CLUSTER.directory().join(format!("{target}.parallel")).into_os_string().into_string().unwrap();
    CLUSTER.run("pg_dump", &["--format=custom", "--file", &file, &source]);
    let restored = CLUSTER.run_with_input("pg_restore", &["--jobs=3", "--dbname", &target, &file], "");
    let mut client = session(&target, "public");
    assert!(!restored.status.success() || calls::contents(&mut client) == expected, "keys were lost without a word");
}

#[test]
fn a_restore_with_parallel_jobs_for_everything_but_the_data_keeps_every_key() {
    let (source, expected) = source("public");
    let target = CLUSTER.empty_database("");
    let file = CLUSTER.directory().join(format!("{target}.sections")).into_os_string().into_string().unwrap();
    CLUSTER.run("pg_dump", &["--format=custom", "--file", &file, &source]);
    for options in [&["--section=pre-data"][..], &["--section=data"], &["--section=post-data", "--jobs=3"]] {
        CLUSTER.run("pg_restore", &[options, &["--exit-on-error", "--dbname", &target, &file]].concat());
    }
    assert_restored(&target, "public", &expected);
}

#[test]
fn a_data_only_dump_keeps_every_key_where_the_extension_exists() {
    let create = "CREATE EXTENSION idempotency_record";
    round_trip("public", &["--data-only"], create, Restore::Psql);
    round_trip("public", &["--data-only", "--format=custom"], create, Restore::PgRestore(&["--data-only"]));
}

#[test]
fn a_data_only_dump_from_an_oddly_named_schema_keeps_every_key() {
    let schema = quoted(ODD_SCHEMA);
    let create = format!("CREATE SCHEMA {schema}; CREATE EXTENSION idempotency_record SCHEMA {schema}");
    round_trip(ODD_SCHEMA, &["--data-only"], &create, Restore::Psql);
}

#[test]
fn a_schema_only_dump_restores_an_extension_that_works_and_holds_nothing() {
    let (source, _) = source(ODD_SCHEMA);
    let target = CLUSTER.empty_database("");
    let dump = CLUSTER.run("pg_dump", &["--schema-only", &source]);
    let restored = CLUSTER.run_with_input("psql", &["-Xq", "-v", "ON_ERROR_STOP=1", &target], &dump);
    assert!(restored.status.success(), "{}", String::from_utf8_lossy(&restored.stderr));
    let mut client = session(&target, ODD_SCHEMA);
    assert_eq!(calls::contents(&mut client), "\n--\n\n--\n\n--\n\n--\n");
    client.batch_execute("INSERT INTO account VALUES (1, 1000)").unwrap();
    assert_eq!(debit(&mut client, 1, "key", 100).unwrap(), r#"{"balance": 900}"#);
    assert_eq!(debit(&mut client, 1, "key", 100).unwrap(), r#"{"balance": 900}"#);
    assert_eq!(balance(&mut client, 1), 900);
}

#[test]
fn a_dump_of_a_restored_database_keeps_every_key_again() {
    let (source, expected) = source("public");
    let mut database = source;
    for _ in 0..2 {
        let target = CLUSTER.empty_database("");
        let dump = CLUSTER.directory().join(format!("{target}.again")).into_os_string().into_string().unwrap();
        CLUSTER.run("pg_dump", &["--file", &dump, &database]);
        CLUSTER.run("psql", &["-Xq", "-v", "ON_ERROR_STOP=1", "-f", &dump, &target]);
        database = target;
    }
    assert_restored(&database, "public", &expected);
}

#[test]
fn a_restored_dump_refuses_what_was_purged_before_it_and_executes_again_what_came_after_it() {
    let source = CLUSTER.database();
    let mut client = CLUSTER.connect_to(&source);
    client
        .batch_execute(
            "INSERT INTO account VALUES (1, 1000);
             INSERT INTO operation_policy (operation, retention) VALUES ('debit:v1', '1 day');
             INSERT INTO subscriber_policy (subscriber, retention) VALUES ('billing', '3 days')",
        )
        .unwrap();
    // A message id of version 7, four days old.
    let message_id = "SELECT (substr(h, 1, 8) || '-' || substr(h, 9, 4) || '-7000-8000-000000000001')::uuid
                        FROM lpad(to_hex((extract(epoch FROM now() - interval '4 days') * 1000)::bigint), 12, '0') AS h";
    let purged = "SELECT debit_once(1, 'purged', 100, now() - interval '2 days')";
    let kept = "SELECT debit_once(1, 'kept', 100, now() - interval '2 days')";
    let late = "SELECT debit_once(1, 'late', 100, now())";
    let late_undated = "SELECT debit_once(1, 'late, without a date', 100)";
    assert_eq!(value(&mut client, purged), r#"{"balance": 900}"#);
    let message_id = value(&mut client, message_id);
    let applied = format!("SELECT apply_message_once('billing', '{message_id}', 1, -100)");
    assert_eq!(value(&mut client, &applied), "800");
    tamper(
        &mut client,
        "UPDATE request_result SET created_at = created_at - interval '2 days';
         UPDATE processed_message SET created_at = created_at - interval '4 days'",
    );
    assert_eq!(value(&mut client, "CALL purge()"), "2");
    assert_eq!(value(&mut client, "SELECT debit_once(1, 'kept', 100)"), r#"{"balance": 700}"#);
    let state = "SELECT string_agg(format('%s %s %s', kind, name, purged_before), ', ' ORDER BY kind, name)
                        || (SELECT string_agg(format(' %s', retention), '') FROM operation_policy)
                        || (SELECT string_agg(format(' %s', retention), '') FROM subscriber_policy)
                   FROM retention_fence";
    let expected = value(&mut client, state);

    let plain = CLUSTER.run("pg_dump", &[&source]);
    let file = CLUSTER.directory().join(format!("{source}.custom")).into_os_string().into_string().unwrap();
    CLUSTER.run("pg_dump", &["--format=custom", "--file", &file, &source]);
    // After the dump, and so lost with the source.
    assert_eq!(value(&mut client, late), r#"{"balance": 600}"#);
    assert_eq!(value(&mut client, late_undated), r#"{"balance": 500}"#);

    for custom in [false, true] {
        let target = CLUSTER.empty_database("");
        if custom {
            CLUSTER.run("pg_restore", &["--exit-on-error", "--dbname", &target, &file]);
        } else {
            let restored = CLUSTER.run_with_input("psql", &["-Xq", "-v", "ON_ERROR_STOP=1", &target], &plain);
            assert!(restored.status.success(), "{}", String::from_utf8_lossy(&restored.stderr));
        }
        let mut client = CLUSTER.connect_to(&target);
        assert_eq!(value(&mut client, state), expected);
        assert_eq!(outcome(simple(&mut client, purged)), "22023");
        assert_eq!(outcome(simple(&mut client, &applied)), "22023");
        assert_eq!(value(&mut client, kept), r#"{"balance": 700}"#);
        assert_eq!(balance(&mut client, 1), 700);
        // The balance does not know them either, so that to execute them is right.
        assert_eq!(value(&mut client, late), r#"{"balance": 600}"#);
        assert_eq!(value(&mut client, late_undated), r#"{"balance": 500}"#);
        assert_eq!(value(&mut client, late), r#"{"balance": 600}"#);
        // The next purge begins at the beginning, and leaves the fence where it was or later.
        tamper(
            &mut client,
            "UPDATE request_result SET created_at = created_at - interval '2 days' WHERE request_key = 'kept'",
        );
        assert_eq!(value(&mut client, "CALL purge()"), "1");
        assert_eq!(outcome(simple(&mut client, kept)), "22023");
        assert_eq!(outcome(simple(&mut client, purged)), "22023");
        assert_eq!(value(&mut client, late), r#"{"balance": 600}"#);
    }
}

#[test]
fn a_parallel_dump_restored_in_three_sections_keeps_every_key() {
    let (source, expected) = source(ODD_SCHEMA);
    let target = CLUSTER.empty_database("");
    let file = CLUSTER.directory().join(format!("{target}.directory")).into_os_string().into_string().unwrap();
    CLUSTER.run("pg_dump", &["--format=directory", "--jobs=3", "--file", &file, &source]);
    for options in [&["--section=pre-data", "--jobs=3"][..], &["--section=data"], &["--section=post-data", "--jobs=3"]]
    {
        CLUSTER.run("pg_restore", &[options, &["--exit-on-error", "--dbname", &target, &file]].concat());
    }
    assert_restored(&target, ODD_SCHEMA, &expected);
}

/// A database with the extension in the schema `other`, and nothing in it.
fn other_schema() -> String {
    let target = CLUSTER.empty_database("");
    CLUSTER
        .connect_to(&target)
        .batch_execute("CREATE SCHEMA other; CREATE EXTENSION idempotency_record SCHEMA other")
        .unwrap();
    target
}

fn dump(source: &str, options: &[&str]) -> String {
    let file = CLUSTER.directory().join(format!("{source}.other")).into_os_string().into_string().unwrap();
    CLUSTER.run("pg_dump", &[options, &["--file", &file, source]].concat());
    file
}

const NOTHING: &str = "\n--\n\n--\n\n--\n\n--\n";

// The dump says CREATE EXTENSION IF NOT EXISTS, which does nothing there, and then names the schema of the source.
#[test]
fn a_full_dump_does_not_restore_where_the_extension_is_in_another_schema_and_says_so() {
    let (source, _) = source("public");
    let plain = dump(&source, &[]);
    let target = other_schema();
    let restored = CLUSTER.run_with_input("psql", &["-Xq", "-v", "ON_ERROR_STOP=1", "-f", &plain, &target], "");
    assert!(!restored.status.success());
    assert_eq!(calls::contents(&mut session(&target, "other")), NOTHING);

    let custom = dump(&source, &["--format=custom"]);
    let target = other_schema();
    let restored = CLUSTER.run_with_input("pg_restore", &["--dbname", &target, &custom], "");
    assert!(!restored.status.success());
    assert_eq!(calls::contents(&mut session(&target, "other")), NOTHING);
}

#[test]
fn a_data_only_dump_keeps_every_key_in_another_schema_that_has_the_name_of_the_old_one_meanwhile() {
    let (source, expected) = source("public");
    for options in [&["--data-only"][..], &["--data-only", "--format=custom"]] {
        let file = dump(&source, options);
        let target = other_schema();
        let mut client = CLUSTER.connect_to(&target);
        // A session that knows the old name goes on with the new one.
        client.batch_execute("SELECT other.purge_expired_keys('1 day')").unwrap();
        client.batch_execute("ALTER SCHEMA public RENAME TO aside; ALTER SCHEMA other RENAME TO public").unwrap();
        if options.len() == 1 {
            CLUSTER.run("psql", &["-Xq", "-v", "ON_ERROR_STOP=1", "-f", &file, &target]);
        } else {
            CLUSTER.run("pg_restore", &["--exit-on-error", "--dbname", &target, &file]);
        }
        client.batch_execute("ALTER SCHEMA public RENAME TO other; ALTER SCHEMA aside RENAME TO public").unwrap();
        assert_eq!(value(&mut client, "SELECT other.purge_expired_keys('1000 years')"), "0");
        let key = "SELECT other.debit_once(2, E'key\\t\\\\N''\u{20ac}', 100)";
        assert_eq!(value(&mut client, key), r#"{"balance": 900}"#);
        assert_restored(&target, "other", &expected);
    }
}

#[test]
fn a_data_only_dump_whose_schema_was_rewritten_keeps_every_key() {
    let (source, expected) = source("public");
    let sql = CLUSTER.run("pg_dump", &["--data-only", &source]);
    // Data begins with a number, or with the name of a subscriber or an operation, of which none looks like this.
    let rewritten = sql.replace("\nCOPY public.", "\nCOPY other.");
    assert_ne!(rewritten, sql);
    let target = other_schema();
    let file = CLUSTER.directory().join(format!("{target}.rewritten"));
    std::fs::write(&file, rewritten).unwrap();
    CLUSTER.run("psql", &["-Xq", "-v", "ON_ERROR_STOP=1", "-f", file.to_str().unwrap(), &target]);
    assert_restored(&target, "other", &expected);
}

#[test]
fn a_restored_extension_moves_by_renaming_its_schema_and_in_no_other_way() {
    let (source, expected) = source("once");
    let target = CLUSTER.empty_database("");
    let file = dump(&source, &[]);
    CLUSTER.run("psql", &["-Xq", "-v", "ON_ERROR_STOP=1", "-f", &file, &target]);
    let mut client = session(&target, "once");
    let moved = simple(&mut client, "ALTER EXTENSION idempotency_record SET SCHEMA public; SELECT 'moved'");
    assert_eq!(outcome(moved), "0A000");
    assert_eq!(calls::contents(&mut client), expected);
    client.batch_execute("ALTER SCHEMA once RENAME TO other").unwrap();
    assert_restored(&target, "other", &expected);
}
