//! pg_upgrade from older majors with live keys: a key that was lost would be a debit made twice.
//!
//! `tools/test.sh upgrade` says through the environment which older servers there are.

use std::path::{Path, PathBuf};
use std::process::Command;

use client_tests::calls;
use client_tests::{Cluster, assert_sound, balance, contents, debit, environment, major, outcome, value};
use postgres::Client;

/// An older server that carries the same build of the extension.
struct Older {
    major: String,
    bin: PathBuf,
}

fn older() -> Vec<Older> {
    let servers = environment("OLDER_SERVERS");
    let older: Vec<_> = servers
        .split_whitespace()
        .map(|server| {
            let (major, bin) = server.split_once('=').expect("major=bin");
            Older { major: major.to_owned(), bin: bin.into() }
        })
        .collect();
    assert!(!older.is_empty(), "there is nothing to upgrade from");
    older
}

/// The versions of the extension that were released before this one, with their frozen scripts.
fn released(client: &mut Client) -> Vec<(String, PathBuf)> {
    let current =
        value(client, "SELECT default_version FROM pg_available_extensions WHERE name = 'idempotency_record'");
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../sql/released");
    let mut released: Vec<_> = std::fs::read_dir(directory)
        .expect("sql/released")
        .map(|entry| entry.expect("an entry").path())
        .filter_map(|path| {
            let version = path.file_name()?.to_str()?.strip_prefix("idempotency_record--")?.strip_suffix(".sql")?;
            Some((version.to_owned(), path.clone())).filter(|(version, _)| *version != current)
        })
        .collect();
    released.sort();
    assert!(!released.is_empty());
    released
}

/// Creates the extension as it was released, by a script that lies where the server looks for it no longer than that.
fn create_released(client: &mut Client, bin: &Path, version: &str, script: &Path) {
    let output = Command::new(bin.join("pg_config")).arg("--sharedir").output().expect("pg_config");
    let share = String::from_utf8(output.stdout).expect("UTF-8");
    let installed = Path::new(share.trim()).join(format!("extension/idempotency_record--{version}.sql"));
    assert!(!installed.exists(), "{} is there already", installed.display());
    std::fs::copy(script, &installed).expect("a copy");
    let created = client.batch_execute(&format!("CREATE EXTENSION idempotency_record VERSION '{version}'"));
    std::fs::remove_file(&installed).expect("the copy");
    created.expect("CREATE EXTENSION");
}

/// What a released version can do, on accounts 1 and 2, which hold 1000 each.
fn assert_debits_replay(client: &mut Client) {
    let before = contents(client);
    assert_eq!(debit(client, 1, "key", 100).unwrap(), r#"{"balance": 900}"#);
    assert_eq!(debit(client, 2, "k\u{e9}y\t\\", 1000).unwrap(), r#"{"balance": 0}"#);
    assert_eq!(outcome(debit(client, 1, "key", 101)), "22023");
    assert_eq!(contents(client), before);
}

#[test]
fn an_upgrade_from_every_older_major_keeps_every_key_and_the_extension_works_and_can_be_updated() {
    for older in older() {
        println!("from PostgreSQL {} to {}", older.major, major());
        upgrade_from(&older);
    }
}

fn upgrade_from(older: &Older) {
    let old = Cluster::start_with(older.bin.clone(), &[], &[]);
    assert!(value(&mut old.connect(), "SHOW server_version").starts_with(&older.major));

    // This version, in a schema whose name has to be quoted.
    let database = old.empty_database("");
    let mut client = old.connect_to(&database);
    client
        .batch_execute(
            r#"CREATE SCHEMA "Odd ""x"; CREATE EXTENSION idempotency_record SCHEMA "Odd ""x";
               SET search_path = "Odd ""x", public"#,
        )
        .unwrap();
    calls::prepare(&mut client);
    calls::assert_execute(&mut client);
    client.batch_execute("INSERT INTO operation_policy VALUES ('debit:v1', 'save', 'full', '2 mons 1 day')").unwrap();
    let refused = r#"{"balance": 1000, "refused": "insufficient balance"}"#;
    assert_eq!(debit(&mut client, 8, "poor", 1001).unwrap(), refused);
    let before = calls::contents(&mut client);

    // Every version that was released, each in a database of its own.
    let released: Vec<_> = released(&mut client)
        .into_iter()
        .map(|(version, script)| {
            let database = old.empty_database("");
            let mut client = old.connect_to(&database);
            create_released(&mut client, &older.bin, &version, &script);
            client.batch_execute("INSERT INTO account VALUES (1, 1000), (2, 1000)").unwrap();
            debit(&mut client, 1, "key", 100).unwrap();
            debit(&mut client, 2, "k\u{e9}y\t\\", 1000).unwrap();
            (database, version, contents(&mut client))
        })
        .collect();
    old.stop("fast");

    let bin = environment("PGBIN");
    let new = old.sibling("new", bin.clone().into());
    // As the old one was made; its pages have no checksums, which are on by default since 18.
    let mut options = vec!["-D", "data", "-U", "postgres", "-A", "trust", "-N", "--encoding=UTF8", "--locale=C.UTF-8"];
    if major() >= 18 {
        options.push("--no-data-checksums");
    }
    new.run("initdb", &options);
    let directory = new.directory().to_str().expect("UTF-8");
    let from = older.bin.to_str().expect("UTF-8");
    new.run(
        "pg_upgrade",
        &["-b", from, "-B", &bin, "-d", &old.data(), "-D", &new.data(), "-s", directory, "-U", "postgres"],
    );
    new.resume(&[]);

    let mut client = new.connect_to(&database);
    assert!(value(&mut client, "SHOW server_version").starts_with(&major().to_string()));
    client.batch_execute(r#"SET search_path = "Odd ""x", public"#).unwrap();
    assert_eq!(calls::contents(&mut client), before);
    calls::assert_replay(&mut client);
    // The policies are in force.
    assert_eq!(debit(&mut client, 8, "poor", 1001).unwrap(), refused);
    assert_eq!(debit(&mut client, 8, "poorer", 1002).unwrap(), refused);
    let expires = "SELECT expires_at = executed_at + interval '2 mons 1 day' FROM debit_once_outcome(8, 'fresh', 1)";
    assert_eq!(value(&mut client, expires), "t");
    assert_eq!(balance(&mut client, 8), 999);
    let stored = "SELECT request FROM request_result WHERE operation = 'credit:v1'";
    assert_eq!(value(&mut client, stored), "null");
    client.batch_execute("ALTER EXTENSION idempotency_record UPDATE").unwrap();
    assert_eq!(value(&mut client, "SELECT purge_expired_keys('1 day')"), "0");
    assert_sound(&mut client);

    for (database, version, before) in released {
        println!("with {version} of the extension");
        let mut client = new.connect_to(&database);
        let installed = "SELECT extversion FROM pg_extension WHERE extname = 'idempotency_record'";
        assert_eq!(value(&mut client, installed), version);
        assert_eq!(contents(&mut client), before);
        assert_debits_replay(&mut client);
        assert_eq!(debit(&mut client, 1, "before the update", 1).unwrap(), r#"{"balance": 899}"#);
        client.batch_execute("ALTER EXTENSION idempotency_record UPDATE").unwrap();
        assert_debits_replay(&mut client);
        assert_eq!(debit(&mut client, 1, "before the update", 1).unwrap(), r#"{"balance": 899}"#);
        assert_eq!(debit(&mut client, 1, "after the update", 1).unwrap(), r#"{"balance": 898}"#);
        assert_eq!(value(&mut client, "SELECT credit_once(1, 'after the update', 2)"), r#"{"balance": 900}"#);
        assert_sound(&mut client);
    }
}
