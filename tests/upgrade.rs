//! Upgrades: a released script is frozen, its keys stay alive, and whoever upgrades has what a fresh install has.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use client_tests::{
    Cluster, DEADLINE, balance, contents, debit, environment, in_background, outcome, pid, query, simple, tamper,
    value, wait_until_blocked,
};
use postgres::Client;

static CLUSTER: LazyLock<Cluster> = LazyLock::new(|| Cluster::start(&[]));

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the root of the repository")
}

/// The version that this source is, such as `0.1.0`.
fn current() -> String {
    let manifest = std::fs::read_to_string(root().join("Cargo.toml")).expect("Cargo.toml");
    let version = manifest.lines().find_map(|line| line.strip_prefix("version = \"")).expect("a version");
    version.trim_end_matches('"').to_owned()
}

fn parsed(version: &str) -> Vec<u32> {
    version.split('.').map(|part| part.parse().unwrap_or_else(|_| panic!("not X.Y.Z: {version}"))).collect()
}

/// The released versions with their frozen scripts.
fn released() -> Vec<(String, PathBuf)> {
    let directory = root().join("sql/released");
    let entries = std::fs::read_dir(&directory).into_iter().flatten();
    let mut released: Vec<_> = entries
        .map(|entry| entry.expect("an entry").path())
        .filter_map(|path| {
            let name = path.file_name()?.to_str()?;
            let version = name.strip_prefix("idempotency_record--")?.strip_suffix(".sql")?;
            Some((version.to_owned(), path.clone()))
        })
        .collect();
    released.sort_by_key(|(version, _)| parsed(version));
    assert!(!released.is_empty(), "sql/released/ holds no script: freeze the generated one of each released version");
    released
}

/// A script in the server's extension directory, gone at the end; what lay there before is put back.
struct Installed {
    path: PathBuf,
    before: Option<Vec<u8>>,
}

impl Installed {
    fn new(version: &str, script: &Path) -> Self {
        let config = Path::new(&environment("PGBIN")).join("pg_config");
        let output = Command::new(config).arg("--sharedir").output().expect("pg_config");
        let share = String::from_utf8(output.stdout).expect("UTF-8");
        let path = Path::new(share.trim()).join(format!("extension/idempotency_record--{version}.sql"));
        let before = std::fs::read(&path).ok();
        std::fs::copy(script, &path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        Self { path, before }
    }
}

impl Drop for Installed {
    fn drop(&mut self) {
        let _ = match &self.before {
            Some(before) => std::fs::write(&self.path, before),
            None => std::fs::remove_file(&self.path),
        };
    }
}

/// Every property of every object that the extension owns, one a line, without object ids.
fn inventory(client: &mut Client) -> Vec<String> {
    let unknown = value(client, UNKNOWN);
    assert_eq!(unknown, "NULL", "the inventory does not know how to describe these objects");
    let rows = client.query(INVENTORY, &[]).expect("the inventory");
    rows.iter().map(|row| row.get(0)).collect()
}

const UNKNOWN: &str = "
    SELECT string_agg(pg_describe_object(d.classid, d.objid, 0), ', ')
      FROM pg_depend AS d JOIN pg_extension AS e ON d.refobjid = e.oid
     WHERE d.refclassid = 'pg_extension'::regclass AND d.deptype = 'e' AND e.extname = 'idempotency_record'
       AND d.classid NOT IN ('pg_class'::regclass, 'pg_proc'::regclass, 'pg_type'::regclass)";

const INVENTORY: &str = "
    WITH member AS (
        SELECT d.classid, d.objid
          FROM pg_depend AS d JOIN pg_extension AS e ON d.refobjid = e.oid
         WHERE d.refclassid = 'pg_extension'::regclass AND d.deptype = 'e' AND e.extname = 'idempotency_record'
    ), relation AS (
        SELECT c.* FROM pg_class AS c JOIN member ON member.classid = 'pg_class'::regclass AND member.objid = c.oid
    ), part (classid, objid) AS (
        SELECT classid, objid FROM member
        UNION SELECT 'pg_class'::regclass, indexrelid FROM pg_index JOIN relation ON indrelid = relation.oid
        UNION SELECT 'pg_constraint'::regclass, c.oid FROM pg_constraint AS c JOIN relation ON conrelid = relation.oid
        UNION SELECT 'pg_trigger'::regclass, t.oid FROM pg_trigger AS t JOIN relation ON tgrelid = relation.oid
               WHERE NOT tgisinternal
        UNION SELECT 'pg_rewrite'::regclass, r.oid FROM pg_rewrite AS r JOIN relation ON ev_class = relation.oid
        UNION SELECT 'pg_policy'::regclass, p.oid FROM pg_policy AS p JOIN relation ON polrelid = relation.oid
        UNION SELECT 'pg_extension'::regclass, oid FROM pg_extension WHERE extname = 'idempotency_record'
    )
    SELECT 'object: ' || pg_describe_object(classid, objid, 0) FROM part
    UNION ALL
    SELECT format('comment: %s: %s', pg_describe_object(d.classoid, d.objoid, d.objsubid), d.description)
      FROM pg_description AS d JOIN part ON d.classoid = part.classid AND d.objoid = part.objid
    UNION ALL
    SELECT format('initial privileges: %s: %s %s', pg_describe_object(p.classoid, p.objoid, p.objsubid), p.privtype, p.initprivs)
      FROM pg_init_privs AS p JOIN part ON p.classoid = part.classid AND p.objoid = part.objid
    UNION ALL
    SELECT format('extension: %s %s %s', extnamespace::regnamespace, extrelocatable, extowner::regrole)
      FROM pg_extension WHERE extname = 'idempotency_record'
    UNION ALL
    SELECT format('dumped: %s where %L', config.relation::regclass, config.condition)
      FROM pg_extension, unnest(extconfig, extcondition) AS config (relation, condition)
     WHERE extname = 'idempotency_record'
    UNION ALL
    SELECT format('relation: %s %s %s owner %s acl %s options %s security %s %s replica %s access %s tablespace %s partition %L view %L',
                  oid::regclass, relkind, relpersistence, relowner::regrole, relacl, reloptions, relrowsecurity,
                  relforcerowsecurity, relreplident, (SELECT amname FROM pg_am WHERE pg_am.oid = relam), reltablespace,
                  pg_get_partkeydef(oid), CASE WHEN relkind IN ('v', 'm') THEN pg_get_viewdef(oid) END)
      FROM relation
    UNION ALL
    SELECT format('sequence: %s %s', relation.oid::regclass, (to_jsonb(s) - 'seqrelid'))
      FROM pg_sequence AS s JOIN relation ON s.seqrelid = relation.oid
    UNION ALL
    SELECT format('column: %s %s %I %s collate %s not null %s default %L identity %L generated %L storage %s compression %L acl %s options %s statistics %s inherited %s',
                  relation.oid::regclass, rank() OVER (PARTITION BY relation.oid ORDER BY attnum), attname,
                  format_type(atttypid, atttypmod), attcollation::regcollation, attnotnull,
                  pg_get_expr(adbin, adrelid), attidentity, attgenerated, attstorage, attcompression, attacl, attoptions,
                  attstattarget, attinhcount)
      FROM pg_attribute JOIN relation ON attrelid = relation.oid
      LEFT JOIN pg_attrdef ON adrelid = attrelid AND adnum = attnum
     WHERE attnum > 0 AND NOT attisdropped
    UNION ALL
    SELECT format('constraint: %s %I %s %s validated %s', conrelid::regclass, conname, contype, pg_get_constraintdef(c.oid),
                  convalidated)
      FROM pg_constraint AS c JOIN relation ON conrelid = relation.oid
    UNION ALL
    SELECT format('index: %s valid %s clustered %s replica %s options %s', pg_get_indexdef(indexrelid), indisvalid,
                  indisclustered, indisreplident, (SELECT reloptions FROM pg_class WHERE oid = indexrelid))
      FROM pg_index JOIN relation ON indrelid = relation.oid
    UNION ALL
    SELECT format('trigger: %s enabled %s', pg_get_triggerdef(t.oid), tgenabled)
      FROM pg_trigger AS t JOIN relation ON tgrelid = relation.oid WHERE NOT tgisinternal
    UNION ALL
    SELECT format('rule: %s enabled %s', pg_get_ruledef(r.oid), ev_enabled)
      FROM pg_rewrite AS r JOIN relation ON ev_class = relation.oid
    UNION ALL
    SELECT format('policy: %s %s %s %s %s %L %L', polrelid::regclass, polname, polcmd, polpermissive,
                  polroles::regrole[], pg_get_expr(polqual, polrelid), pg_get_expr(polwithcheck, polrelid))
      FROM pg_policy JOIN relation ON polrelid = relation.oid
    UNION ALL
    SELECT format('function: %s owner %s acl %s kind %s library %s symbol %s %s', p.oid::regprocedure, proowner::regrole,
                  proacl, prokind, probin, prosrc, CASE WHEN prokind <> 'a' THEN pg_get_functiondef(p.oid) END)
      FROM pg_proc AS p JOIN member ON member.classid = 'pg_proc'::regclass AND member.objid = p.oid
    UNION ALL
    SELECT format('type: %s %s owner %s acl %s base %s not null %s default %L collate %s functions %s %s %s %s labels %s checks %s',
                  t.oid::regtype, typtype, typowner::regrole, typacl, typbasetype::regtype, typnotnull, typdefault,
                  typcollation::regcollation, typinput, typoutput, typreceive, typsend,
                  (SELECT array_agg(enumlabel ORDER BY enumsortorder) FROM pg_enum WHERE enumtypid = t.oid),
                  (SELECT array_agg(pg_get_constraintdef(c.oid) ORDER BY conname) FROM pg_constraint AS c
                    WHERE contypid = t.oid))
      FROM pg_type AS t JOIN member ON member.classid = 'pg_type'::regclass AND member.objid = t.oid
    ORDER BY 1";

/// What is in one and not in the other.
fn difference(fresh: &[String], other: &[String]) -> Vec<String> {
    let missing = fresh.iter().filter(|line| !other.contains(line)).map(|line| format!("only fresh: {line}"));
    let extra = other.iter().filter(|line| !fresh.contains(line)).map(|line| format!("not fresh: {line}"));
    missing.chain(extra).collect()
}

fn fresh() -> Client {
    let database = CLUSTER.database();
    CLUSTER.connect_to(&database)
}

fn created(version: &str) -> Client {
    let database = CLUSTER.empty_database("");
    let mut client = CLUSTER.connect_to(&database);
    client
        .batch_execute(&format!("CREATE EXTENSION idempotency_record VERSION '{version}'"))
        .unwrap_or_else(|error| panic!("version {version}: {error:?}"));
    client
}

/// The name of a database with a released version of the extension, in which accounts 1 and 2 hold 1000 each.
fn released_database(version: &str, script: &Path) -> String {
    // The script lies where the server looks for it for no longer than it takes, and for one test at a time.
    static INSTALLING: Mutex<()> = Mutex::new(());
    let database = CLUSTER.empty_database("");
    let mut client = CLUSTER.connect_to(&database);
    let _one_at_a_time = INSTALLING.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let _installed = Installed::new(version, script);
    client
        .batch_execute(&format!(
            "CREATE EXTENSION idempotency_record VERSION '{version}'; INSERT INTO account VALUES (1, 1000), (2, 1000)"
        ))
        .unwrap_or_else(|error| panic!("version {version}: {error:?}"));
    database
}

/// Runs a test in a database of each released version that can be upgraded to this one.
fn for_each_upgrade(test: impl Fn(&str)) {
    let current = current();
    for (version, script) in released().into_iter().filter(|(version, _)| *version != current) {
        println!("upgrading from {version}");
        test(&released_database(&version, &script));
    }
}

const UPDATE: &str = "ALTER EXTENSION idempotency_record UPDATE";

#[test]
fn the_server_has_the_version_that_this_source_is() {
    let installed = "SELECT extversion FROM pg_extension WHERE extname = 'idempotency_record'";
    assert_eq!(value(&mut fresh(), installed), current());
}

#[test]
fn a_released_script_of_this_version_is_what_a_fresh_install_runs() {
    let current = current();
    for (version, script) in released() {
        assert!(parsed(&version) <= parsed(&current), "{version} is released, and this source is {current}");
        if version == current {
            let frozen = format!("{version}.frozen");
            let _installed = Installed::new(&frozen, &script);
            let difference = difference(&inventory(&mut fresh()), &inventory(&mut created(&frozen)));
            assert!(
                difference.is_empty(),
                "{version} is frozen; a change is a new version:\n{}",
                difference.join("\n")
            );
        }
    }
}

#[test]
fn an_upgrade_from_every_released_version_keeps_the_keys_and_gives_what_a_fresh_install_gives() {
    for_each_upgrade(|database| {
        let mut client = CLUSTER.connect_to(database);
        // The new library already serves the old version of the extension.
        assert_eq!(debit(&mut client, 1, "key", 100).unwrap(), r#"{"balance": 900}"#);
        assert_eq!(debit(&mut client, 1, "key", 100).unwrap(), r#"{"balance": 900}"#);
        client.batch_execute(UPDATE).unwrap();
        assert_eq!(debit(&mut client, 1, "key", 100).unwrap(), r#"{"balance": 900}"#);
        assert_eq!(outcome(debit(&mut client, 1, "key", 101)), "22023");
        assert_eq!(balance(&mut client, 1), 900);
        let difference = difference(&inventory(&mut fresh()), &inventory(&mut client));
        assert!(difference.is_empty(), "upgraded:\n{}", difference.join("\n"));
    });
}

/// Uses the functions that every version has often enough for generic plans, on account 2.
fn warm_up(client: &mut Client) {
    for i in 0..8 {
        let left = 999 - i;
        for _ in 0..2 {
            let got = debit(client, 2, &format!("warm-up {i}"), 1);
            assert_eq!(outcome(got), format!(r#"done: {{"balance": {left}}}"#));
        }
        assert_eq!(outcome(debit(client, 2, &format!("warm-up {i}"), 2)), "22023");
        assert_eq!(outcome(debit(client, 2, "poor", 100_000)), "P0001");
        assert_eq!(value(client, "SELECT purge_expired_keys('1 day')"), "0");
    }
}

#[test]
fn the_new_library_keeps_the_contract_on_the_objects_of_every_released_version() {
    for_each_upgrade(|database| {
        let mut client = CLUSTER.connect_to(database);
        warm_up(&mut client);
        assert_eq!(debit(&mut client, 1, "key", 100).unwrap(), r#"{"balance": 900}"#);
        assert_eq!(debit(&mut client, 1, "other", 50).unwrap(), r#"{"balance": 850}"#);
        let before = contents(&mut client);
        client.batch_execute("BEGIN READ ONLY").unwrap();
        assert_eq!(debit(&mut client, 1, "key", 100).unwrap(), r#"{"balance": 900}"#);
        assert_eq!(outcome(debit(&mut client, 1, "new", 1)), "25006");
        client.batch_execute("ROLLBACK").unwrap();
        for (account, key, amount, expected) in [
            (1, "key", 101, "22023"),
            (1, "", 1, "22023"),
            (1, "new", 0, "22023"),
            (1, &"k".repeat(256), 1, "22023"),
            (1, "new", 851, "P0001"),
            (9, "new", 1, "23503"),
        ] {
            assert_eq!(outcome(debit(&mut client, account, key, amount)), expected, "{account} {key} {amount}");
        }
        client.batch_execute("SET idempotency_record.require_key = off").unwrap();
        client.batch_execute("BEGIN").unwrap();
        assert_eq!(value(&mut client, "SELECT debit_once(1, NULL, 50)"), r#"{"balance": 800}"#);
        client.batch_execute("ROLLBACK; RESET idempotency_record.require_key").unwrap();
        assert_eq!(contents(&mut client), before);

        // One session waits for another, by the account's row.
        let mut holder = CLUSTER.connect_to(database);
        holder.batch_execute("BEGIN").unwrap();
        assert_eq!(debit(&mut holder, 1, "held", 50).unwrap(), r#"{"balance": 800}"#);
        let mut waiter = CLUSTER.connect_to(database);
        let backend = pid(&mut waiter);
        let waiting = in_background(waiter, "SELECT debit_once(1, 'held', 50)".into());
        wait_until_blocked(&mut client, backend);
        holder.batch_execute("COMMIT").unwrap();
        assert_eq!(outcome(waiting.join().expect("no panic").1), r#"done: {"balance": 800}"#);

        tamper(&mut client, "UPDATE request_result SET created_at = '2001-01-01' WHERE request_key = 'key'");
        assert_eq!(outcome(query(&mut client, "SELECT purge_expired_keys('-1 day')::text", &[])), "22023");
        assert_eq!(value(&mut client, "SELECT purge_expired_keys('1 year')"), "1");
        assert_eq!(debit(&mut client, 1, "key", 700).unwrap(), r#"{"balance": 100}"#);
        assert_eq!(debit(&mut client, 1, "other", 50).unwrap(), r#"{"balance": 850}"#);
    });
}

/// What another session does after the update: a policy, a cancellation, and a record that only the new version can have.
const NEWS: &str =
    "INSERT INTO operation_policy (operation, refusals, stored_request) VALUES ('debit:v1', 'save', 'fingerprint');
                    SELECT cancel_request(1, 'debit:v1', 'cancelled'), debit_once(1, 'digest', 100)";

/// Proves that a session knows [`NEWS`], where account 1 held 800 before; and that it knows what is older.
fn assert_up_to_date(client: &mut Client) {
    assert_eq!(debit(client, 2, "warm-up 3", 1).unwrap(), r#"{"balance": 996}"#);
    assert_eq!(outcome(debit(client, 2, "warm-up 3", 2)), "22023");
    assert_eq!(outcome(debit(client, 1, "cancelled", 100)), "22023");
    assert_eq!(debit(client, 1, "digest", 100).unwrap(), r#"{"balance": 700}"#);
    assert_eq!(outcome(debit(client, 1, "digest", 101)), "22023");
    let refused = r#"{"balance": 700, "refused": "insufficient balance"}"#;
    assert_eq!(debit(client, 1, "poor", 701).unwrap(), refused);
    assert_eq!(debit(client, 1, "poor", 701).unwrap(), refused);
    let stored = "SELECT count(*) FROM request_result WHERE request = 'null' AND request_fingerprint IS NOT NULL";
    assert_eq!(value(client, stored), "2");
    assert_eq!(value(client, "SELECT credit_once(1, 'poor', 1)"), r#"{"balance": 701}"#);
    assert_eq!(value(client, "SELECT accept_message('billing', md5('1')::uuid, 1)"), "t");
    assert_eq!(value(client, "SELECT purge_expired_keys('1 day')"), "0");
}

#[test]
fn sessions_with_saved_plans_go_on_when_another_session_updates() {
    for_each_upgrade(|database| {
        let mut idle = CLUSTER.connect_to(database);
        warm_up(&mut idle);
        // It comes back without having done anything in between.
        let mut other = CLUSTER.connect_to(database);
        assert_eq!(debit(&mut other, 1, "key", 200).unwrap(), r#"{"balance": 800}"#);
        other.batch_execute(UPDATE).unwrap();
        other.batch_execute(NEWS).unwrap();
        assert_up_to_date(&mut idle);
        assert_eq!(debit(&mut idle, 1, "key", 200).unwrap(), r#"{"balance": 800}"#);
    });
}

#[test]
fn a_prepared_statement_goes_on_when_another_session_updates() {
    for_each_upgrade(|database| {
        let mut client = CLUSTER.connect_to(database);
        let statement = client.prepare("SELECT debit_once($1, $2, $3)::text").unwrap();
        let mut call = |key: &str, amount: i64| {
            outcome(client.query_one(&statement, &[&1_i64, &key, &amount]).and_then(|row| row.try_get(0)))
        };
        for i in 1..=8 {
            let answer = format!(r#"done: {{"balance": {}}}"#, 1000 - i);
            assert_eq!(call(&format!("key {i}"), 1), answer);
            assert_eq!(call(&format!("key {i}"), 1), answer);
        }
        let mut other = CLUSTER.connect_to(database);
        other.batch_execute(UPDATE).unwrap();
        assert_eq!(call("key 8", 1), r#"done: {"balance": 992}"#);
        other.batch_execute(NEWS).unwrap();
        assert_eq!(call("key 8", 1), r#"done: {"balance": 992}"#);
        assert_eq!(call("key 8", 2), "22023");
        assert_eq!(call("cancelled", 1), "22023");
        assert_eq!(call("digest", 100), r#"done: {"balance": 892}"#);
        assert_eq!(call("digest", 1), "22023");
        assert_eq!(call("new", 2), r#"done: {"balance": 890}"#);
    });
}

#[test]
fn a_transaction_with_a_snapshot_from_before_the_update_goes_on_and_the_next_one_knows_what_came_after() {
    for isolation in ["REPEATABLE READ", "SERIALIZABLE"] {
        for_each_upgrade(|database| {
            let mut client = CLUSTER.connect_to(database);
            warm_up(&mut client);
            assert_eq!(debit(&mut client, 1, "key", 200).unwrap(), r#"{"balance": 800}"#);
            client.batch_execute(&format!("BEGIN ISOLATION LEVEL {isolation}; SELECT FROM account")).unwrap();
            let mut other = CLUSTER.connect_to(database);
            other.batch_execute(UPDATE).unwrap();
            // A policy and a cancellation, which change no account.
            other
                .batch_execute(
                    "INSERT INTO operation_policy (operation, refusals, stored_request) VALUES ('debit:v1', 'save', 'fingerprint');
                     SELECT cancel_request(1, 'debit:v1', 'cancelled')",
                )
                .unwrap();
            // What is in the snapshot replays and is compared, what is not there yet can only be found out by a new one.
            assert_eq!(debit(&mut client, 1, "key", 200).unwrap(), r#"{"balance": 800}"#);
            assert_eq!(debit(&mut client, 2, "new", 1).unwrap(), r#"{"balance": 991}"#);
            client.batch_execute("SAVEPOINT s").unwrap();
            assert_eq!(outcome(debit(&mut client, 1, "key", 201)), "22023");
            client.batch_execute("ROLLBACK TO SAVEPOINT s").unwrap();
            assert_eq!(outcome(debit(&mut client, 1, "cancelled", 100)), "40001");
            client.batch_execute("ROLLBACK").unwrap();
            assert_eq!(balance(&mut client, 2), 992);

            other.batch_execute("SELECT debit_once(1, 'digest', 100)").unwrap();
            client.batch_execute(&format!("BEGIN ISOLATION LEVEL {isolation}")).unwrap();
            assert_eq!(debit(&mut client, 1, "digest", 100).unwrap(), r#"{"balance": 700}"#);
            client.batch_execute("COMMIT").unwrap();
            assert_up_to_date(&mut client);
        });
    }
}

#[test]
fn an_update_waits_for_the_debits_of_an_open_transaction_which_go_on_meanwhile() {
    for_each_upgrade(|database| {
        let mut client = CLUSTER.connect_to(database);
        warm_up(&mut client);
        client.batch_execute("BEGIN").unwrap();
        assert_eq!(debit(&mut client, 1, "key", 100).unwrap(), r#"{"balance": 900}"#);
        let mut other = CLUSTER.connect_to(database);
        let mut observer = CLUSTER.connect_to(database);
        let backend = pid(&mut other);
        // 0.3.0 was the last version that changed the tables.
        let changes = "SELECT string_to_array(extversion, '.')::int[] < '{0, 3, 0}' FROM pg_extension
                        WHERE extname = 'idempotency_record'";
        if value(&mut observer, changes) == "f" {
            other
                .batch_execute(&format!("SET lock_timeout = '1s'; {UPDATE}"))
                .expect("an update that waits for nobody");
            assert_eq!(debit(&mut client, 1, "more", 100).unwrap(), r#"{"balance": 800}"#);
            assert_eq!(debit(&mut client, 1, "key", 100).unwrap(), r#"{"balance": 900}"#);
            client.batch_execute("COMMIT").unwrap();
            other.batch_execute(NEWS).unwrap();
            return assert_up_to_date(&mut client);
        }
        let updating = in_background(other, format!("{UPDATE}; SELECT 'updated'"));
        wait_until_blocked(&mut observer, backend);
        // A call of another session waits for the update, and then goes on.
        let mut late = CLUSTER.connect_to(database);
        warm_up_replays(&mut client);
        let backend = pid(&mut late);
        let waiting = in_background(late, "SELECT debit_once(1, 'key', 100)".into());
        wait_until_blocked(&mut observer, backend);

        assert_eq!(debit(&mut client, 1, "more", 100).unwrap(), r#"{"balance": 800}"#);
        assert_eq!(debit(&mut client, 1, "key", 100).unwrap(), r#"{"balance": 900}"#);
        client.batch_execute("COMMIT").unwrap();
        let (mut other, updated) = updating.join().expect("no panic");
        assert_eq!(outcome(updated), "done: updated");
        let (mut late, answer) = waiting.join().expect("no panic");
        assert_eq!(outcome(answer), r#"done: {"balance": 900}"#);
        assert_eq!(debit(&mut client, 1, "key", 100).unwrap(), r#"{"balance": 900}"#);
        other.batch_execute(NEWS).unwrap();
        assert_up_to_date(&mut client);
        assert_eq!(debit(&mut late, 1, "digest", 100).unwrap(), r#"{"balance": 700}"#);
        assert_eq!(outcome(simple(&mut late, "SELECT debit_once(1, 'cancelled', 1)")), "22023");
    });
}

/// Replays of what [`warm_up`] has recorded.
fn warm_up_replays(client: &mut Client) {
    for i in 0..8 {
        let answer = format!(r#"{{"balance": {}}}"#, 999 - i);
        assert_eq!(debit(client, 2, &format!("warm-up {i}"), 1).unwrap(), answer);
    }
}

#[test]
fn clients_that_debit_all_the_time_notice_nothing_of_the_update() {
    const CLIENTS: usize = 4;
    for_each_upgrade(|database| {
        let mut observer = CLUSTER.connect_to(database);
        observer.batch_execute("UPDATE account SET balance = 1000000").unwrap();
        let stop = Arc::new(AtomicBool::new(false));
        let calls: Arc<[AtomicUsize; CLIENTS]> = Arc::default();
        let clients: Vec<_> = (0..CLIENTS)
            .map(|number| {
                let (stop, calls) = (Arc::clone(&stop), Arc::clone(&calls));
                let mut client = CLUSTER.connect_to(database);
                thread::spawn(move || {
                    let mut answers = Vec::new();
                    while !stop.load(Ordering::Relaxed) {
                        let i = answers.len();
                        // Two clients share each account. A fresh one, the same again, an earlier one, a mismatch.
                        let account = i64::try_from(number % 2 + 1).unwrap();
                        let key = |i: usize| format!("{number} {i}");
                        answers.push(debit(&mut client, account, &key(i), 1).expect("a fresh debit"));
                        for earlier in [i, i / 2] {
                            let replay = debit(&mut client, account, &key(earlier), 1).expect("a replay");
                            assert_eq!(replay, answers[earlier]);
                        }
                        assert_eq!(outcome(debit(&mut client, account, &key(i), 2)), "22023");
                        calls[number].fetch_add(1, Ordering::Relaxed);
                    }
                    answers.len()
                })
            })
            .collect();
        // Each client is in the midst of it before and after.
        let each_makes_more = || {
            let before: Vec<_> = calls.iter().map(|calls| calls.load(Ordering::Relaxed)).collect();
            let start = Instant::now();
            while calls.iter().zip(&before).any(|(calls, before)| calls.load(Ordering::Relaxed) < before + 20) {
                assert!(
                    start.elapsed() < DEADLINE && !clients.iter().any(|client| client.is_finished()),
                    "no progress"
                );
                thread::sleep(Duration::from_millis(5));
            }
        };
        each_makes_more();
        observer.batch_execute(UPDATE).unwrap();
        each_makes_more();
        observer
            .batch_execute(
                "INSERT INTO operation_policy (operation, stored_request) VALUES ('debit:v1', 'fingerprint')",
            )
            .unwrap();
        each_makes_more();
        stop.store(true, Ordering::Relaxed);
        let debits: usize = clients.into_iter().map(|client| client.join().expect("no panic")).sum();
        assert_eq!(value(&mut observer, "SELECT count(*) FROM request_result"), debits.to_string());
        assert_eq!(value(&mut observer, "SELECT 2000000 - sum(balance) FROM account"), debits.to_string());
        assert_ne!(value(&mut observer, "SELECT count(request_fingerprint) FROM request_result"), "0");
    });
}

#[test]
fn two_fresh_installs_have_the_same_inventory_and_it_is_not_empty() {
    let one = inventory(&mut fresh());
    assert_eq!(one, inventory(&mut fresh()));
    for kind in [
        "object: ",
        "comment: ",
        "initial privileges: ",
        "extension: ",
        "dumped: ",
        "relation: ",
        "column: ",
        "constraint: ",
        "index: ",
        "function: ",
    ] {
        assert!(one.iter().any(|line| line.starts_with(kind)), "{kind}");
    }
}

#[test]
fn the_inventory_notices_every_kind_of_change() {
    let mut client = fresh();
    let before = inventory(&mut client);
    for ddl in [
        "ALTER TABLE account ADD COLUMN note text",
        "ALTER TABLE request_result ALTER COLUMN created_at DROP DEFAULT",
        "ALTER TABLE request_result ALTER COLUMN created_at DROP NOT NULL",
        "ALTER TABLE accepted_version ALTER COLUMN subscriber TYPE text COLLATE \"POSIX\"",
        "ALTER TABLE processed_message ALTER COLUMN payload_fingerprint TYPE text",
        "ALTER TABLE request_result ALTER COLUMN request SET STORAGE EXTERNAL",
        "ALTER TABLE account DROP CONSTRAINT account_balance_check",
        "ALTER TABLE account ADD CHECK (account_id > 0)",
        "ALTER TABLE request_result DROP CONSTRAINT request_result_account_id_fkey;
         ALTER TABLE request_result ADD CONSTRAINT request_result_account_id_fkey FOREIGN KEY (account_id) REFERENCES account ON DELETE CASCADE",
        "DROP INDEX request_result_operation_created_at_idx",
        "CREATE INDEX ON account (balance)",
        "ALTER TABLE account SET (fillfactor = 50)",
        "ALTER TABLE account ENABLE ROW LEVEL SECURITY",
        "CREATE POLICY p ON account USING (true)",
        "CREATE TRIGGER t BEFORE UPDATE ON account FOR EACH ROW EXECUTE FUNCTION suppress_redundant_updates_trigger()",
        "CREATE RULE r AS ON DELETE TO account DO INSTEAD NOTHING",
        "GRANT SELECT ON account TO PUBLIC",
        "GRANT SELECT (balance) ON account TO PUBLIC",
        "GRANT EXECUTE ON FUNCTION debit_once(bigint, text, bigint) TO PUBLIC",
        "CREATE ROLE upgrade_owner; ALTER FUNCTION debit_once(bigint, text, bigint) OWNER TO upgrade_owner",
        "ALTER FUNCTION debit_once(bigint, text, bigint) STABLE",
        "ALTER FUNCTION debit_once(bigint, text, bigint) STRICT",
        "ALTER FUNCTION debit_once(bigint, text, bigint) PARALLEL SAFE",
        "ALTER FUNCTION debit_once(bigint, text, bigint) SECURITY DEFINER",
        "ALTER FUNCTION debit_once(bigint, text, bigint) SET search_path = ''",
        "ALTER FUNCTION debit_once(bigint, text, bigint) COST 7",
        "UPDATE pg_proc SET prosrc = 'other_wrapper' WHERE proname = 'debit_once'",
        "UPDATE pg_proc SET probin = '$libdir/other' WHERE proname = 'debit_once'",
        "COMMENT ON FUNCTION debit_once(bigint, text, bigint) IS 'other'",
        "COMMENT ON COLUMN account.balance IS 'other'",
        "COMMENT ON CONSTRAINT account_balance_check ON account IS NULL",
        "COMMENT ON INDEX request_result_operation_created_at_idx IS 'other'",
        "COMMENT ON EXTENSION idempotency_record IS 'other'",
        "UPDATE pg_extension SET extconfig = NULL, extcondition = NULL WHERE extname = 'idempotency_record'",
        "UPDATE pg_extension SET extcondition[1] = 'WHERE false' WHERE extname = 'idempotency_record'",
        "DELETE FROM pg_init_privs WHERE objoid = 'account'::regclass",
        "CREATE VIEW v AS SELECT 1; ALTER EXTENSION idempotency_record ADD VIEW v",
        "CREATE TYPE e AS ENUM ('a'); ALTER EXTENSION idempotency_record ADD TYPE e",
        "ALTER EXTENSION idempotency_record DROP TABLE processed_message",
    ] {
        client.batch_execute("BEGIN").unwrap();
        client.batch_execute(ddl).unwrap_or_else(|error| panic!("{ddl}: {error:?}"));
        assert!(!difference(&before, &inventory(&mut client)).is_empty(), "unnoticed: {ddl}");
        client.batch_execute("ROLLBACK").unwrap();
    }
    assert_eq!(inventory(&mut client), before);
}
