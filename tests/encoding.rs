//! Databases whose encoding or collation is not what the developer had: a key is bytes everywhere.

use std::sync::LazyLock;

use client_tests::{Cluster, balance, debit, outcome, query, report, tamper, value};
use postgres::Client;
use postgres::types::{IsNull, ToSql, Type, private::BytesMut, to_sql_checked};

static CLUSTER: LazyLock<Cluster> = LazyLock::new(|| Cluster::start(&[]));

fn database(options: &str) -> String {
    let database = CLUSTER.empty_database(&format!("TEMPLATE template0 {options}"));
    CLUSTER
        .connect_to(&database)
        .batch_execute(
            "CREATE EXTENSION idempotency_record; INSERT INTO account SELECT i, 1000 FROM generate_series(1, 9) AS i",
        )
        .expect("the extension");
    database
}

fn latin1() -> String {
    database("ENCODING 'LATIN1' LC_COLLATE 'C' LC_CTYPE 'C'")
}

fn sql_ascii() -> String {
    database("ENCODING 'SQL_ASCII' LC_COLLATE 'C' LC_CTYPE 'C'")
}

/// A text parameter that goes to the server as these bytes.
#[derive(Debug)]
struct Bytes<'a>(&'a [u8]);

impl ToSql for Bytes<'_> {
    fn to_sql(&self, _: &Type, out: &mut BytesMut) -> Result<IsNull, Box<dyn std::error::Error + Sync + Send>> {
        out.extend_from_slice(self.0);
        Ok(IsNull::No)
    }

    fn accepts(ty: &Type) -> bool {
        *ty == Type::TEXT
    }

    to_sql_checked!();
}

fn debit_bytes(client: &mut Client, account: i64, key: &[u8], amount: i64) -> Result<String, postgres::Error> {
    query(client, "SELECT debit_once($1, $2, $3)::text", &[&account, &Bytes(key), &amount])
}

/// The keys of an account as they lie in the table.
fn stored(client: &mut Client, account: i64) -> Vec<Vec<u8>> {
    let sql = "SELECT convert_to(request_key, getdatabaseencoding()) FROM request_result
                WHERE account_id = $1 ORDER BY created_at";
    client.query(sql, &[&account]).expect("keys").iter().map(|row| row.get(0)).collect()
}

#[test]
fn in_latin1_a_key_beyond_ascii_executes_once_whatever_the_clients_encoding() {
    let database = latin1();
    let mut client = CLUSTER.connect_to(&database);
    assert_eq!(debit(&mut client, 1, "Stra\u{df}e \u{e9}", 100).unwrap(), r#"{"balance": 900}"#);
    assert_eq!(debit(&mut client, 1, "Stra\u{df}e \u{e9}", 100).unwrap(), r#"{"balance": 900}"#);
    client.batch_execute("SET client_encoding = 'LATIN1'").unwrap();
    assert_eq!(debit_bytes(&mut client, 1, b"Stra\xdfe \xe9", 100).unwrap(), r#"{"balance": 900}"#);
    assert_eq!(outcome(debit_bytes(&mut client, 1, b"Stra\xdfe \xe9", 101)), "22023");
    assert_eq!(debit_bytes(&mut client, 1, b"Stra\xdfe e", 100).unwrap(), r#"{"balance": 800}"#);
    assert_eq!(stored(&mut client, 1), [b"Stra\xdfe \xe9", b"Stra\xdfe e"]);
    assert_eq!(balance(&mut client, 1), 800);
}

#[test]
fn in_latin1_every_byte_but_zero_makes_a_key_of_its_own() {
    let database = latin1();
    let mut client = CLUSTER.connect_to(&database);
    client.batch_execute("SET client_encoding = 'LATIN1'").unwrap();
    for round in 0..2 {
        for byte in 1..=255_u8 {
            let answer = debit_bytes(&mut client, 1, &[byte], 1).unwrap();
            assert_eq!(answer, format!(r#"{{"balance": {}}}"#, 1000 - i64::from(byte)), "{byte} {round}");
        }
    }
    assert_eq!(balance(&mut client, 1), 745);
}

#[test]
fn in_latin1_the_limit_counts_bytes_of_the_servers_encoding() {
    let database = latin1();
    let mut client = CLUSTER.connect_to(&database);
    // 510 bytes on the way, 255 in the database.
    debit(&mut client, 1, &"\u{e9}".repeat(255), 1).unwrap();
    let report = report(debit(&mut client, 1, &"\u{e9}".repeat(256), 1));
    assert_eq!(report.code().code(), "22023");
    assert!(report.message().contains("255") && report.message().contains("256"), "{}", report.message());
}

#[test]
fn in_sql_ascii_a_key_is_whatever_bytes_the_client_sends() {
    let database = sql_ascii();
    let mut client = CLUSTER.connect_to(&database);
    client.batch_execute("SET client_encoding = 'SQL_ASCII'").unwrap();
    // The same letter in two encodings, cut-off and overlong UTF-8, a surrogate, bytes that no encoding knows.
    let keys: [&[u8]; 8] =
        [b"\xe9", "\u{e9}".as_bytes(), b"\xe2\x82", b"\xc0\x80", b"\xed\xa0\x80", b"\xff\xfe", b"\x80", b"a\xf8b"];
    for _ in 0..2 {
        for (done, key) in (1..).zip(keys) {
            let answer = debit_bytes(&mut client, 1, key, 1).unwrap();
            assert_eq!(answer, format!(r#"{{"balance": {}}}"#, 1000 - done), "{key:?}");
        }
    }
    assert_eq!(stored(&mut client, 1), keys);
    for key in keys {
        assert_eq!(outcome(debit_bytes(&mut client, 1, key, 2)), "22023");
        assert_eq!(outcome(debit_bytes(&mut client, 77, key, 1)), "23503");
        assert_eq!(outcome(debit_bytes(&mut client, 2, key, 1001)), "P0001");
    }
    assert_eq!(outcome(debit_bytes(&mut client, 1, &[0xff; 256], 1)), "22023");
    debit_bytes(&mut client, 1, &[0xff; 255], 1).unwrap();
    assert_eq!(balance(&mut client, 1), 991);
}

/// Proves that the extension works in a schema, and after its renaming to one, whose name is these bytes.
fn works_in_schema_named(database: &str, hex: &str) {
    let mut client = CLUSTER.connect_to(database);
    // The driver cannot read such a name, and some majors report search_path to the client. So neither is used here.
    client
        .batch_execute(&format!(
            "DROP EXTENSION idempotency_record;
             CREATE FUNCTION run(sql text) RETURNS text LANGUAGE plpgsql AS $$
             DECLARE
                 result text;
             BEGIN
                 sql := format(sql, convert_from('\\x{hex}', getdatabaseencoding()));
                 IF sql LIKE 'SELECT%' THEN
                     EXECUTE sql INTO result;
                 ELSE
                     EXECUTE sql;
                 END IF;
                 RETURN result;
             -- Not to the client: an error's context quotes the statement, which may be unreadable there.
             EXCEPTION WHEN OTHERS THEN
                 RETURN SQLSTATE;
             END $$;
             DO $$ BEGIN
                 PERFORM run('CREATE SCHEMA %1$I; CREATE EXTENSION idempotency_record SCHEMA %1$I;
                              INSERT INTO %1$I.account VALUES (1, 1000)');
             END $$"
        ))
        .expect("the extension");
    let run = |client: &mut Client, sql: &str| outcome(query(client, "SELECT run($1)", &[&sql]));
    assert_eq!(run(&mut client, "SELECT balance FROM %1$I.account"), "done: 1000");
    let call = "SELECT %1$I.debit_once(1, 'key', 100)";
    assert_eq!(run(&mut client, call), r#"done: {"balance": 900}"#);
    assert_eq!(run(&mut client, call), r#"done: {"balance": 900}"#);
    assert_eq!(run(&mut client, "SELECT %1$I.debit_once(1, 'key', 101)"), "done: 22023");
    assert_eq!(run(&mut client, "SELECT %1$I.debit_once(9, 'key', 100)"), "done: 23503");
    client.batch_execute("SELECT run('ALTER SCHEMA %1$I RENAME TO plain')").unwrap();
    assert_eq!(run(&mut client, "SELECT plain.debit_once(1, 'key', 100)"), r#"done: {"balance": 900}"#);
    client.batch_execute("SELECT run('ALTER SCHEMA plain RENAME TO %1$I')").unwrap();
    assert_eq!(run(&mut client, call), r#"done: {"balance": 900}"#);
    assert_eq!(run(&mut client, "SELECT %1$I.purge_expired_keys('0')"), "done: 1");
    assert_eq!(run(&mut client, call), r#"done: {"balance": 800}"#);
}

#[test]
fn in_utf8_the_extension_works_in_a_schema_named_beyond_ascii() {
    works_in_schema_named(&database("ENCODING 'UTF8'"), "c39c62657220e282ac");
}

#[test]
fn in_latin1_the_extension_works_in_a_schema_named_beyond_ascii() {
    works_in_schema_named(&latin1(), "dc62657220e9");
}

#[test]
fn in_sql_ascii_the_extension_works_in_a_schema_named_by_invalid_utf8() {
    works_in_schema_named(&sql_ascii(), "ff22e9c0");
}

#[test]
fn a_mismatch_in_a_field_named_beyond_ascii_is_refused_as_a_mismatch() {
    for (database, encoding) in [(latin1(), "LATIN1"), (sql_ascii(), "SQL_ASCII")] {
        let mut client = CLUSTER.connect_to(&database);
        debit(&mut client, 1, "key", 100).unwrap();
        // A field that no version of the operation has, as after a repair by hand.
        client.batch_execute(&format!("SET client_encoding = '{encoding}'")).unwrap();
        tamper(
            &mut client,
            "UPDATE request_result
                SET request = jsonb_build_object(convert_from('\\xe9', getdatabaseencoding()), 1, 'amount', 100)",
        );
        let error = debit(&mut client, 1, "key", 100).expect_err("a mismatch");
        assert_eq!(error.code().map(|code| code.code()), Some("22023"), "{encoding}: {error}");
    }
}

#[test]
fn under_a_collation_with_other_ideas_of_equality_and_order_a_key_is_bytes() {
    // Not every server is built with ICU. Its loosest collation cannot be a database's own in every major either.
    let icu = "ENCODING 'UTF8' LOCALE_PROVIDER icu ICU_LOCALE 'und-u-ks-level1' LOCALE 'C'";
    let database = match CLUSTER.try_database(&format!("TEMPLATE template0 {icu}")) {
        Ok(database) => database,
        Err(_) => CLUSTER.empty_database("TEMPLATE template0 ENCODING 'UTF8' LC_COLLATE 'C.UTF-8' LC_CTYPE 'C.UTF-8'"),
    };
    let mut client = CLUSTER.connect_to(&database);
    client.batch_execute("CREATE EXTENSION idempotency_record; INSERT INTO account VALUES (1, 1000)").unwrap();
    let keys =
        ["resume", "r\u{e9}sum\u{e9}", "re\u{301}sume\u{301}", "RESUME", "re-sume", "resume\u{ad}", "\u{ff52}esume"];
    for _ in 0..2 {
        for (done, key) in (1..).zip(keys) {
            let answer = format!(r#"{{"balance": {}}}"#, 1000 - done);
            assert_eq!(debit(&mut client, 1, key, 1).unwrap(), answer, "{key:?}");
        }
    }
    let collations = "SELECT string_agg(DISTINCT collation_name, ',') FROM information_schema.columns
                       WHERE table_name IN ('request_result', 'processed_message') AND data_type = 'text'";
    assert_eq!(value(&mut client, collations), "C");
}
