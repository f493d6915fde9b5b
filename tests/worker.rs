//! The launcher and the purge workers that it starts, where the library is preloaded.
//!
//! What the log says is told by the kind of process, its pid, the SQLSTATE and the severity, never by a message's text.

use std::sync::LazyLock;
use std::time::Duration;
use std::{path::Path, thread};

use client_tests::{
    Cluster, DEADLINE, balance, debit, make_purges_stop, outcome, simple, value, wait_until, wait_until_gone,
};
use postgres::{Client, Config, NoTls};

const LAUNCHER: &str = "idempotency_record launcher";
const WORKER: &str = "idempotency_record purge worker";

/// The databases of [`CLUSTER`], none of which exists before its test makes it.
const DATABASES: &str = r#"named, "Odd ""Name""", lives, dropped, copied, copy, retained, owned, slow"#;

/// Where everything goes well.
static CLUSTER: LazyLock<Cluster> = LazyLock::new(|| start(DATABASES, &[]));

/// A cluster that purges these databases every second.
fn start(databases: &str, settings: &[&str]) -> Cluster {
    let databases = format!("idempotency_record.databases={databases}");
    let own = [
        "shared_preload_libraries=idempotency_record",
        "idempotency_record.purge_interval=1",
        "max_worker_processes=30",
        "log_line_prefix=%b|%p|%e|",
        "lc_messages=C",
        &databases,
    ];
    Cluster::start(&[&own, settings].concat())
}

/// What a process reported in the log.
#[derive(Debug, PartialEq, Eq)]
struct Report {
    process: String,
    pid: String,
    sqlstate: String,
    severity: String,
}

/// What the launcher and the workers reported, but for what they were asked to do and did.
fn reports(cluster: &Cluster) -> Vec<Report> {
    let log = cluster.run("cat", &["log"]);
    let report = |line: &str| {
        let [process, pid, sqlstate, text] = line.splitn(4, '|').collect::<Vec<_>>().try_into().ok()?;
        let severity = text.split(':').next()?;
        let own = [LAUNCHER, WORKER].contains(&process) && ["WARNING", "ERROR", "FATAL", "PANIC"].contains(&severity);
        own.then(|| Report {
            process: process.into(),
            pid: pid.into(),
            sqlstate: sqlstate.into(),
            severity: severity.into(),
        })
    };
    log.lines().filter_map(report).collect()
}

/// How often processes of this kind reported this.
fn reported(cluster: &Cluster, process: &str, severity: &str, sqlstate: &str) -> Vec<String> {
    reports(cluster)
        .into_iter()
        .filter(|report| report.process == process && report.severity == severity && report.sqlstate == sqlstate)
        .map(|report| report.pid)
        .collect()
}

/// Waits until processes of this kind have reported this so often.
fn wait_until_reported(cluster: &Cluster, process: &str, severity: &str, sqlstate: &str, times: usize) -> Vec<String> {
    let start = std::time::Instant::now();
    loop {
        let pids = reported(cluster, process, severity, sqlstate);
        if pids.len() >= times {
            return pids;
        }
        assert!(start.elapsed() < DEADLINE, "never reported: {process} {severity} {sqlstate}");
        thread::sleep(Duration::from_millis(50));
    }
}

/// Gives the launcher the time of two intervals and more, in which it should do nothing.
fn two_intervals() {
    thread::sleep(Duration::from_millis(2500));
}

/// Makes this database, with the extension and an account of 1000 in it, and returns a session.
fn create(cluster: &Cluster, name: &str) -> Client {
    cluster.connect().batch_execute(&format!("CREATE DATABASE {}", quoted(name))).unwrap();
    let mut client = cluster.connect_to(name);
    client.batch_execute("CREATE EXTENSION idempotency_record; INSERT INTO account VALUES (1, 1000)").unwrap();
    client
}

fn quoted(name: &str) -> String {
    format!("\"{}\"", name.replace('"', "\"\""))
}

/// Records so many requests that are three days old, which is a day beyond their retention.
fn expire(client: &mut Client, records: usize) {
    // Foreign keys are checked by triggers, which this does without for speed.
    client
        .batch_execute(&format!(
            "SET session_replication_role = replica;
             INSERT INTO request_result (account_id, operation, request_key, request, response, created_at)
             SELECT 1, 'debit:v1', 'old ' || i, '{{\"amount\": 1}}', '{{\"balance\": 7}}', now() - interval '3 days'
               FROM generate_series(1, {records}) AS i;
             RESET session_replication_role"
        ))
        .unwrap();
}

const LEFT: &str = "SELECT count(*) FROM request_result WHERE request_key LIKE 'old %'";

fn left(client: &mut Client) -> String {
    value(client, LEFT)
}

fn wait_until_purged(client: &mut Client) {
    wait_until(client, &format!("SELECT ({LEFT}) = 0"));
}

/// Why no worker purges this session's database, or `on`.
fn state(client: &mut Client) -> String {
    value(client, "SELECT worker FROM retention_setting()")
}

/// The launcher's process id; waits for one.
fn launcher(client: &mut Client) -> i32 {
    let of = format!("FROM pg_stat_activity WHERE backend_type = '{LAUNCHER}'");
    wait_until(client, &format!("SELECT count(*) = 1 {of}"));
    value(client, &format!("SELECT pid {of}")).parse().unwrap()
}

fn hold(client: &mut Client) {
    value(client, "SELECT pg_advisory_lock(7)");
}

fn let_go(client: &mut Client) {
    assert_eq!(value(client, "SELECT pg_advisory_unlock(7)"), "t");
}

/// The worker of this session's database, once it has stopped in mid-purge.
fn stopped_worker(client: &mut Client) -> i32 {
    let of = format!(
        "FROM pg_stat_activity
          WHERE backend_type = '{WORKER}' AND datname = current_database() AND wait_event = 'advisory'"
    );
    wait_until(client, &format!("SELECT count(*) = 1 {of}"));
    value(client, &format!("SELECT pid {of}")).parse().unwrap()
}

/// Changes a setting of the running cluster; an empty value resets it.
fn set(client: &mut Client, setting: &str, to: &str) {
    let change = if to.is_empty() {
        format!("ALTER SYSTEM RESET idempotency_record.{setting}")
    } else {
        format!("ALTER SYSTEM SET idempotency_record.{setting} = {to}")
    };
    client.batch_execute(&change).unwrap();
    value(client, "SELECT pg_reload_conf()");
}

/// Stops the cluster in this mode and starts it with these options.
fn restart(cluster: &Cluster, mode: &str, options: &str) {
    cluster.run("pg_ctl", &["stop", "-s", "-w", "-m", mode, "-D", "data"]);
    cluster.run("pg_ctl", &["start", "-s", "-w", "-D", "data", "-l", "log", "-o", options]);
}

#[test]
fn each_named_database_is_purged_every_interval_and_no_other() {
    let mut named = create(&CLUSTER, "named");
    let mut odd = create(&CLUSTER, "Odd \"Name\"");
    let other = CLUSTER.database();
    let mut other = CLUSTER.connect_to(&other);
    other.batch_execute("INSERT INTO account VALUES (1, 1000)").unwrap();
    expire(&mut other, 3);
    for i in 0..2 {
        debit(&mut named, 1, &format!("new {i}"), 1).unwrap();
        expire(&mut named, 3);
        expire(&mut odd, 3);
        wait_until_purged(&mut named);
        wait_until_purged(&mut odd);
    }
    assert_eq!(left(&mut other), "3");
    assert_eq!(
        value(&mut named, "SELECT string_agg(request_key, ' ' ORDER BY created_at) FROM request_result"),
        "new 0 new 1"
    );
    assert_eq!(balance(&mut named, 1), 998);
    // Messages have a longer retention.
    named
        .batch_execute(
            "INSERT INTO processed_message (subscriber, message_id, account_id, created_at)
             SELECT 's', md5(days::text)::uuid, 1, now() - make_interval(days => days) FROM unnest('{3, 8}'::int[]) AS days",
        )
        .unwrap();
    wait_until(&mut named, "SELECT count(*) = 1 FROM processed_message");
    // A DBA sees all this in one row each.
    let status =
        "SELECT format('%s %s %s %s %s %s', kind, name, retention, expired, last_purge > now() - interval '1 min',
                                worker)
                    FROM retention_status WHERE kind = $1";
    for (kind, expected) in
        [("operation", "operation debit:v1 48:00:00 0 t on"), ("subscriber", "subscriber s 168:00:00 0 t on")]
    {
        assert_eq!(client_tests::query(&mut named, status, &[&kind]).unwrap(), expected);
    }
    assert_eq!(state(&mut odd), "on");
    let state = state(&mut other);
    assert!(state.starts_with("off: ") && state.contains("idempotency_record.databases"), "{state}");
    // The fence went with the purge.
    let dated = simple(&mut named, "SELECT debit_once(1, 'dated', 1, now() - interval '3 days')");
    assert_eq!(outcome(dated), "22023");
}

#[test]
fn the_launcher_is_seen_and_holds_nothing_while_it_is_idle() {
    let mut client = CLUSTER.connect();
    launcher(&mut client);
    let idle = format!(
        "SELECT state = 'idle' AND query <> '' AND datname IS NULL
            AND backend_xmin IS NULL AND backend_xid IS NULL AND xact_start IS NULL
            AND NOT EXISTS (SELECT FROM pg_locks WHERE pg_locks.pid = pg_stat_activity.pid)
           FROM pg_stat_activity WHERE backend_type = '{LAUNCHER}'"
    );
    for _ in 0..3 {
        wait_until(&mut client, &idle);
        thread::sleep(Duration::from_millis(400));
    }
}

#[test]
fn a_purge_that_takes_longer_than_the_interval_is_seen_and_the_only_one_of_its_database() {
    let mut client = create(&CLUSTER, "slow");
    make_purges_stop(&mut client, 0);
    hold(&mut client);
    expire(&mut client, 3);
    let worker = stopped_worker(&mut client);
    two_intervals();
    let seen = format!(
        "SELECT string_agg(format('%s %s %s %s', pid, datname, state, query <> ''), ',')
           FROM pg_stat_activity WHERE backend_type = '{WORKER}' AND datname = 'slow'"
    );
    assert_eq!(value(&mut client, &seen), format!("{worker} slow active t"));
    let_go(&mut client);
    wait_until_purged(&mut client);
    wait_until_gone(&mut client, worker);
}

#[test]
fn the_extension_is_found_when_it_is_created_dropped_and_created_elsewhere() {
    CLUSTER.connect().batch_execute("CREATE DATABASE lives").unwrap();
    let mut client = CLUSTER.connect_to("lives");
    two_intervals();
    for schema in ["public", "we\"ird Schema", "public"] {
        let schema = quoted(schema);
        client
            .batch_execute(&format!(
                "CREATE SCHEMA IF NOT EXISTS {schema};
                 CREATE EXTENSION idempotency_record SCHEMA {schema};
                 SET search_path = {schema}, pg_temp;
                 INSERT INTO account VALUES (1, 1000)"
            ))
            .unwrap();
        for _ in 0..2 {
            expire(&mut client, 3);
            wait_until_purged(&mut client);
        }
        assert_eq!(state(&mut client), "on");
        client.batch_execute("DROP EXTENSION idempotency_record").unwrap();
        two_intervals();
    }
    assert_no_internal_error(&CLUSTER);
}

#[test]
fn a_named_database_can_be_dropped_and_created_between_two_purges() {
    for _ in 0..3 {
        let mut client = create(&CLUSTER, "dropped");
        expire(&mut client, 3);
        wait_until_purged(&mut client);
        drop(client);
        CLUSTER.connect().batch_execute("DROP DATABASE dropped").unwrap();
    }
    // In the middle of a long purge it takes FORCE, as with any session.
    let mut client = create(&CLUSTER, "dropped");
    make_purges_stop(&mut client, 0);
    hold(&mut client);
    expire(&mut client, 3);
    let worker = stopped_worker(&mut client);
    let mut admin = CLUSTER.connect();
    admin.batch_execute("DROP DATABASE dropped WITH (FORCE)").unwrap();
    wait_until_gone(&mut admin, worker);
    two_intervals();
    assert_no_internal_error(&CLUSTER);
}

#[test]
fn a_named_database_can_be_copied_between_two_purges() {
    let mut client = create(&CLUSTER, "copied");
    expire(&mut client, 3);
    wait_until_purged(&mut client);
    debit(&mut client, 1, "key", 100).unwrap();
    drop(client);
    CLUSTER.connect().batch_execute("CREATE DATABASE copy TEMPLATE copied").unwrap();
    let mut copy = CLUSTER.connect_to("copy");
    assert_eq!(debit(&mut copy, 1, "key", 100).unwrap(), r#"{"balance": 900}"#);
    expire(&mut copy, 3);
    wait_until_purged(&mut copy);
}

#[test]
fn the_worker_obeys_what_is_set_for_its_database_and_declared_in_its_policies() {
    let mut client = create(&CLUSTER, "retained");
    let fill = "INSERT INTO request_result (account_id, operation, request_key, request, response, created_at)
                SELECT 1, operation, format('old %s', days), '{}', '{}', now() - make_interval(days => days)
                  FROM unnest('{3, 6, 11}'::int[]) AS days, unnest('{debit:v1, credit:v1}'::text[]) AS operation";
    let kept =
        "SELECT coalesce(string_agg(format('%s %s', operation, request_key), ', ' ORDER BY operation, created_at), '')
                  FROM request_result";
    client
        .batch_execute(
            "ALTER DATABASE retained SET idempotency_record.retention = '10d';
             INSERT INTO operation_policy (operation, retention) VALUES ('credit:v1', '5 days')",
        )
        .unwrap();
    // A worker that connected before has the setting of then; the second purge from now on is another worker's.
    for _ in 0..2 {
        let now = value(&mut client, "SELECT now()");
        wait_until(&mut client, &format!("SELECT min(last_purge) > '{now}' FROM retention_status"));
    }
    client.batch_execute(fill).unwrap();
    wait_until(&mut client, &format!("SELECT ({kept}) = 'credit:v1 old 3, debit:v1 old 6, debit:v1 old 3'"));
    // Once more, and the same.
    let now = value(&mut client, "SELECT now()");
    wait_until(&mut client, &format!("SELECT min(last_purge) > '{now}' FROM retention_status"));
    assert_eq!(value(&mut client, kept), "credit:v1 old 3, debit:v1 old 6, debit:v1 old 3");
    // A change counts from the next purge.
    client
        .batch_execute("ALTER DATABASE retained RESET idempotency_record.retention; DELETE FROM operation_policy")
        .unwrap();
    wait_until_purged(&mut client);
}

#[test]
fn a_trigger_that_a_purge_fires_has_the_rights_of_the_tables_owner_and_not_of_a_superuser() {
    let mut client = create(&CLUSTER, "owned");
    expire(&mut client, 3);
    wait_until_purged(&mut client);
    client
        .batch_execute(
            "CREATE ROLE keeper;
             DO $$
             DECLARE
                 object regclass;
             BEGIN
                 FOR object IN SELECT objid FROM pg_depend JOIN pg_extension ON refobjid = pg_extension.oid
                                WHERE refclassid = 'pg_extension'::regclass AND extname = 'idempotency_record' AND deptype = 'e'
                                  AND classid = 'pg_class'::regclass
                 LOOP
                     EXECUTE format('ALTER TABLE %s OWNER TO keeper', object);
                 END LOOP;
             END $$;
             CREATE TABLE seen (who text, set_role text, set_session text, reset text);
             GRANT INSERT ON seen TO keeper;
             CREATE FUNCTION attempt(command text) RETURNS text LANGUAGE plpgsql AS $$
             BEGIN
                 EXECUTE command;
                 RETURN 'done';
             EXCEPTION WHEN OTHERS THEN
                 RETURN SQLSTATE;
             END $$;
             CREATE FUNCTION look() RETURNS trigger LANGUAGE plpgsql AS $$
             BEGIN
                 INSERT INTO public.seen VALUES (current_user, public.attempt('SET ROLE postgres'),
                     public.attempt('SET SESSION AUTHORIZATION postgres'), public.attempt('RESET ROLE'));
                 RETURN OLD;
             END $$;
             CREATE TRIGGER look BEFORE DELETE ON request_result FOR EACH ROW EXECUTE FUNCTION look()",
        )
        .unwrap();
    expire(&mut client, 3);
    wait_until_purged(&mut client);
    let seen = "SELECT string_agg(DISTINCT format('%s %s %s %s', who, set_role, set_session, reset), ', ') FROM seen";
    assert_eq!(value(&mut client, seen), "keeper 42501 42501 42501");
    assert_eq!(value(&mut client, "SELECT count(*) FROM seen"), "3");
}

/// Nothing that an operator may do is an internal error of a worker's.
fn assert_no_internal_error(cluster: &Cluster) {
    let internal: Vec<_> = reports(cluster).into_iter().filter(|report| report.sqlstate.starts_with("XX")).collect();
    assert_eq!(internal, []);
}

/// Where things go wrong.
static FAULTS: LazyLock<Cluster> = LazyLock::new(|| start("minimum, tampered, killed", &[]));

/// Waits for three reports of an error, and proves that each ended its process, that the launcher does not mind, and that
/// the purge works once it is mended.
fn assert_reported_until_mended(client: &mut Client, sqlstate: &str, mend: &str) {
    let before = launcher(client);
    let mut pids = wait_until_reported(&FAULTS, WORKER, "ERROR", sqlstate, 3);
    assert_eq!(left(client), "3");
    let reports = pids.len();
    pids.sort();
    pids.dedup();
    assert_eq!(pids.len(), reports, "a process went on after an error");
    for pid in pids {
        wait_until_gone(client, pid.parse().unwrap());
    }
    assert_eq!(value(client, "SELECT count(*) FROM retention_fence"), "0", "the purge failed, and moved the fence");
    client.batch_execute(mend).unwrap();
    wait_until_purged(client);
    assert_eq!(launcher(client), before);
}

#[test]
fn a_retention_below_the_minimum_is_reported_each_interval_until_it_is_mended() {
    let _alone = LAUNCHER_MAY_DIE.read();
    FAULTS.connect().batch_execute("CREATE DATABASE minimum").unwrap();
    let mut client = FAULTS.connect_to("minimum");
    client
        .batch_execute(
            "ALTER DATABASE minimum SET idempotency_record.minimum_retention = '100d';
             BEGIN;
             CREATE EXTENSION idempotency_record;
             INSERT INTO account VALUES (1, 1000)",
        )
        .unwrap();
    expire(&mut client, 3);
    client.batch_execute("COMMIT").unwrap();
    let mend = "ALTER DATABASE minimum RESET idempotency_record.minimum_retention";
    assert_reported_until_mended(&mut client, "22023", mend);
}

#[test]
fn a_table_that_was_altered_is_reported_each_interval_until_it_is_mended() {
    let _alone = LAUNCHER_MAY_DIE.read();
    FAULTS.connect().batch_execute("CREATE DATABASE tampered").unwrap();
    let mut client = FAULTS.connect_to("tampered");
    client
        .batch_execute(
            "BEGIN;
             CREATE EXTENSION idempotency_record;
             ALTER TABLE operation_policy ALTER COLUMN refusals TYPE varchar;
             INSERT INTO account VALUES (1, 1000)",
        )
        .unwrap();
    expire(&mut client, 3);
    client.batch_execute("COMMIT").unwrap();
    let mend = "ALTER TABLE operation_policy ALTER COLUMN refusals TYPE text";
    assert_reported_until_mended(&mut client, "42804", mend);
}

/// Tests of [`FAULTS`] that expect the launcher to live read it, the one that ends it writes.
static LAUNCHER_MAY_DIE: std::sync::RwLock<()> = std::sync::RwLock::new(());

#[test]
fn a_launcher_that_was_terminated_comes_back_and_a_worker_with_the_next_interval() {
    let _alone = LAUNCHER_MAY_DIE.write();
    let mut client = create(&FAULTS, "killed");
    make_purges_stop(&mut client, 0);
    hold(&mut client);
    expire(&mut client, 3);
    let worker = stopped_worker(&mut client);
    assert_eq!(value(&mut client, &format!("SELECT pg_terminate_backend({worker})")), "t");
    wait_until_gone(&mut client, worker);
    assert_eq!(left(&mut client), "3");
    assert_ne!(stopped_worker(&mut client), worker);
    let_go(&mut client);
    wait_until_purged(&mut client);

    let before = launcher(&mut client);
    assert_eq!(value(&mut client, &format!("SELECT pg_terminate_backend({before})")), "t");
    wait_until_gone(&mut client, before);
    assert_ne!(launcher(&mut client), before);
    expire(&mut client, 3);
    wait_until_purged(&mut client);
    assert_eq!(reported(&FAULTS, LAUNCHER, "FATAL", "57P01").len(), 1);
    assert_eq!(reported(&FAULTS, WORKER, "FATAL", "57P01"), [worker.to_string()]);
}

#[test]
fn each_setting_counts_from_the_next_reload() {
    let cluster = start("", &["idempotency_record.purge_interval=0"]);
    let mut admin = cluster.connect();
    let (mut one, mut two) = (create(&cluster, "one"), create(&cluster, "two"));
    let before = launcher(&mut admin);
    for client in [&mut one, &mut two] {
        expire(client, 3);
    }
    two_intervals();
    let off = state(&mut one);
    assert!(off.starts_with("off: ") && off.contains("purge_interval"), "{off}");

    set(&mut admin, "purge_interval", "'1s'");
    two_intervals();
    assert_eq!((left(&mut one), left(&mut two)), ("3".into(), "3".into()));
    wait_until(&mut one, "SELECT worker LIKE 'off: %.databases' FROM retention_setting()");

    set(&mut admin, "databases", "'one'");
    wait_until_purged(&mut one);
    assert_eq!(left(&mut two), "3");
    wait_until(&mut one, "SELECT worker = 'on' FROM retention_setting()");

    set(&mut admin, "databases", "'TWO , none'");
    wait_until_purged(&mut two);
    expire(&mut one, 3);
    two_intervals();
    assert_eq!(left(&mut one), "3");
    assert_eq!(reported(&cluster, LAUNCHER, "WARNING", "01000").len(), 1, "one database does not exist");

    // A list that is none purges nothing, and says so once.
    set(&mut admin, "databases", "'one,,'");
    two_intervals();
    assert_eq!(left(&mut one), "3");
    assert_eq!(reported(&cluster, LAUNCHER, "WARNING", "01000").len(), 2);
    set(&mut admin, "databases", "'one, two'");
    wait_until_purged(&mut one);

    set(&mut admin, "purge_interval", "0");
    wait_until(&mut one, "SELECT worker LIKE 'off: %purge_interval%' FROM retention_setting()");
    thread::sleep(Duration::from_secs(1)); // A worker that was started just before is done by then.
    expire(&mut one, 3);
    two_intervals();
    assert_eq!(left(&mut one), "3");
    set(&mut admin, "purge_interval", "'1h'");
    two_intervals();
    assert_eq!(left(&mut one), "3");
    set(&mut admin, "purge_interval", "1");
    wait_until_purged(&mut one);

    set(&mut admin, "retention", "'10 d'");
    two_intervals();
    expire(&mut one, 3);
    two_intervals();
    assert_eq!(left(&mut one), "3");
    set(&mut admin, "retention", "");
    wait_until_purged(&mut one);

    let message = "INSERT INTO processed_message (subscriber, message_id, account_id, created_at)
                   VALUES ('s', md5('m')::uuid, 1, now() - interval '3 days')";
    one.batch_execute(message).unwrap();
    two_intervals();
    assert_eq!(value(&mut one, "SELECT count(*) FROM processed_message"), "1");
    set(&mut admin, "message_retention", "'2 d'");
    wait_until(&mut one, "SELECT count(*) = 0 FROM processed_message");

    set(&mut admin, "minimum_retention", "'47 h'");
    expire(&mut one, 3);
    wait_until_purged(&mut one);
    set(&mut admin, "minimum_retention", "'49 h'");
    wait_until_reported(&cluster, WORKER, "ERROR", "22023", 2);
    expire(&mut one, 3);
    two_intervals();
    assert_eq!(left(&mut one), "3");
    set(&mut admin, "minimum_retention", "");
    wait_until_purged(&mut one);
    assert_eq!(launcher(&mut admin), before);
    assert_no_internal_error(&cluster);
}

#[test]
fn a_standby_purges_nothing_until_it_is_promoted() {
    let primary = start("standby", &["idempotency_record.purge_interval=0"]);
    let mut there = create(&primary, "standby");
    expire(&mut there, 3);
    primary.run("pg_basebackup", &["--pgdata=standby", "--write-recovery-conf", "--checkpoint=fast"]);
    let options = "-c port=5433 -c idempotency_record.purge_interval=1";
    primary.run("pg_ctl", &["start", "-s", "-w", "-D", "standby", "-l", "standby.log", "-o", options]);
    let mut here = connect(primary.directory(), 5433, "standby");
    two_intervals();
    assert_eq!(value(&mut here, "SELECT pg_is_in_recovery()"), "t");
    let own = format!("SELECT count(*) FROM pg_stat_activity WHERE backend_type IN ('{LAUNCHER}', '{WORKER}')");
    assert_eq!(value(&mut here, &own), "0");
    assert_eq!(left(&mut here), "3");
    let off = state(&mut here);
    assert!(off.starts_with("off: "), "{off}");

    assert_eq!(value(&mut here, "SELECT pg_promote()"), "t");
    wait_until_purged(&mut here);
    wait_until(&mut here, "SELECT worker = 'on' FROM retention_setting()");
    assert_eq!(left(&mut there), "3");
}

fn connect(directory: &Path, port: u16, database: &str) -> Client {
    Config::new().host_path(directory).port(port).user("postgres").dbname(database).connect(NoTls).expect("a session")
}

/// Records in the table, and in a batch of the worker's.
const RECORDS: u64 = 300_000;
const STOP: u64 = 70_000;

#[test]
fn a_crash_or_stop_in_mid_purge_keeps_what_was_committed_and_the_next_purge_does_the_rest() {
    let cluster = start("crashed", &["restart_after_crash=on", "max_wal_size=4GB"]);
    let mut client = create(&cluster, "crashed");
    make_purges_stop(&mut client, STOP);
    hold(&mut client);
    expire(&mut client, usize::try_from(RECORDS).unwrap());
    debit(&mut client, 1, "new", 100).unwrap();
    stopped_worker(&mut client);
    let mut expected = RECORDS;
    for way in ["kill", "immediate", "fast"] {
        let worker = stopped_worker(&mut client);
        // For the time after the crash: it ends with a look at what was left.
        set(&mut client, "purge_interval", "0");
        if way == "kill" {
            cluster.run("sh", &["-c", &format!("kill -KILL {worker}")]);
        } else {
            restart(&cluster, way, "");
        }
        client = reconnect(&cluster, worker);
        expected -= STOP;
        assert_consistent(&mut client, expected);
        client.batch_execute("UPDATE purge_progress SET deleted = 0").unwrap(); // What the trigger goes by.
        hold(&mut client);
        set(&mut client, "purge_interval", "1");
    }
    stopped_worker(&mut client);
    let_go(&mut client);
    wait_until_purged(&mut client);
    assert_consistent(&mut client, 0);
    assert_no_internal_error(&cluster);
}

/// A session in the cluster that lost this process, once it is up again.
fn reconnect(cluster: &Cluster, lost: i32) -> Client {
    let start = std::time::Instant::now();
    loop {
        // The old server may still accept a session before it notices.
        let gone = format!("SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE pid = {lost})");
        let ready = cluster
            .try_connect_to("crashed")
            .ok()
            .and_then(|mut client| simple(&mut client, &gone).is_ok_and(|gone| gone == "t").then_some(client));
        if let Some(client) = ready {
            return client;
        }
        assert!(start.elapsed() < DEADLINE, "the cluster did not come back");
        thread::sleep(Duration::from_millis(20));
    }
}

/// Records and fence agree with each other and with the indexes, and calls with both.
fn assert_consistent(client: &mut Client, expected: u64) {
    assert_eq!(left(client), expected.to_string());
    assert_eq!(balance(client, 1), 900);
    assert_eq!(debit(client, 1, "new", 100).unwrap(), r#"{"balance": 900}"#);
    // The fence lies after all that was deleted, and before all that may not be.
    let fence = "SELECT now() - purged_before BETWEEN interval '48 hours' AND interval '49 hours' FROM retention_fence
                  WHERE (kind, name) = ('operation', 'debit:v1')";
    assert_eq!(value(client, fence), "t");
    if expected > 0 {
        // One that was deleted and one that was not, each dated.
        let kept = value(client, "SELECT request_key FROM request_result WHERE request_key LIKE 'old %' LIMIT 1");
        let deleted = value(
            client,
            "SELECT 'old ' || i FROM generate_series(1, 300000) AS i
              WHERE NOT EXISTS (SELECT FROM request_result WHERE request_key = 'old ' || i AND operation = 'debit:v1'
                                                             AND account_id = 1) LIMIT 1",
        );
        for (key, answer) in [(kept, r#"done: {"balance": 7}"#), (deleted, "22023")] {
            let call = format!("SELECT debit_once(1, '{key}', 1, now() - interval '3 days')");
            assert_eq!(outcome(simple(client, &call)), answer, "{key}");
        }
    }
    client.batch_execute("CREATE EXTENSION IF NOT EXISTS amcheck").unwrap();
    let indexes = "SELECT count(bt_index_check(indexrelid, true)) FROM pg_index
                    WHERE indrelid IN ('request_result'::regclass, 'retention_fence'::regclass, 'purge_progress'::regclass)";
    value(client, indexes);
    assert_eq!(value(client, "SELECT count(*) FROM verify_heapam('request_result')"), "0");
}

#[test]
fn a_server_without_room_for_workers_works_and_says_so_once() {
    let cluster = start("crowded", &[]);
    let mut client = create(&cluster, "crowded");
    expire(&mut client, 3);
    wait_until_purged(&mut client);
    drop(client);
    let before = reported(&cluster, LAUNCHER, "WARNING", "01000").len();

    // The server's own launcher of logical replication has the first place, ours the second, and a purge worker none.
    restart(&cluster, "fast", "-c max_worker_processes=2");
    let mut client = cluster.connect_to("crowded");
    expire(&mut client, 3);
    launcher(&mut client);
    wait_until_reported(&cluster, LAUNCHER, "WARNING", "01000", before + 1);
    two_intervals();
    assert_eq!(reported(&cluster, LAUNCHER, "WARNING", "01000").len(), before + 1);
    assert_eq!(left(&mut client), "3");
    assert_eq!(debit(&mut client, 1, "two", 100).unwrap(), r#"{"balance": 900}"#);
    drop(client);

    // None for the launcher either.
    restart(&cluster, "fast", "-c max_worker_processes=1");
    let mut client = cluster.connect_to("crowded");
    assert_eq!(debit(&mut client, 1, "one", 100).unwrap(), r#"{"balance": 800}"#);
    two_intervals();
    assert_eq!(left(&mut client), "3");
    let launchers = format!("SELECT count(*) FROM pg_stat_activity WHERE backend_type = '{LAUNCHER}'");
    assert_eq!(value(&mut client, &launchers), "0");
    value(&mut client, "SELECT purge_expired_keys()");
    assert_eq!(left(&mut client), "0");
    drop(client);

    // As pg_upgrade starts a server.
    restart(&cluster, "fast", "-b");
    let mut client = cluster.connect_to("crowded");
    expire(&mut client, 3);
    two_intervals();
    assert_eq!(value(&mut client, &launchers), "0");
    assert_eq!(left(&mut client), "3");
    drop(client);

    restart(&cluster, "fast", "");
    let mut client = cluster.connect_to("crowded");
    wait_until_purged(&mut client);
    assert_no_internal_error(&cluster);
}
