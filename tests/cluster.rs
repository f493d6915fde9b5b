//! The harness of the client tests: throw-away clusters, and a few questions that most tests ask.
//!
//! `tools/test.sh` says through the environment which server to test and how to start it; [`Cluster`] does the rest.
//! The tests of one file share a cluster (a `static LazyLock<Cluster>`), each in a database of its own.

pub mod calls;
pub mod traffic;

use std::error::Error as _;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use postgres::error::DbError;
use postgres::types::ToSql;
use postgres::{Client, Config, Error, NoTls, SimpleQueryMessage};

/// How long anything may take that normally takes milliseconds. Only a failing test ever waits so long.
pub const DEADLINE: Duration = Duration::from_secs(30);

/// A throw-away cluster, reachable through a socket in a directory of its own and by nothing else.
///
/// It is stopped and removed when dropped, and also when the test process ends without dropping it: a static is never
/// dropped, and neither is anything after Ctrl-C. So the stopping is left to a child that waits for the end of its
/// input, which is the end of this process however it comes.
pub struct Cluster {
    directory: PathBuf,
    /// The directory of the server's programs.
    bin: PathBuf,
    /// What the server and its programs get of an environment besides.
    environment: Vec<(String, String)>,
    undertaker: Child,
    databases: AtomicU32,
}

impl Cluster {
    /// Starts a cluster with these settings, each `name=value`, on top of the defaults.
    pub fn start(settings: &[&str]) -> Self {
        Self::start_with(environment("PGBIN").into(), &[], settings)
    }

    /// As [`Self::start`], with the server whose programs lie in this directory, and this for their environment.
    pub fn start_with(bin: PathBuf, environment: &[(&str, &str)], settings: &[&str]) -> Self {
        let directory = tempfile::Builder::new().prefix("ir.").tempdir().expect("a directory for the cluster").keep();
        let cluster = Self::in_directory(directory, bin, environment);
        cluster.resume(settings);
        cluster
    }

    /// A hot standby that streams from this cluster and is called `name` in `synchronous_standby_names`; its settings are
    /// those of this cluster and these. It lives inside this cluster's directory, hence goes with it.
    pub fn standby(&self, name: &str, settings: &[&str]) -> Self {
        let standby = self.sibling(name, self.bin.clone());
        let data = standby.data();
        self.run("pg_basebackup", &["-D", &data, "-X", "stream", "-c", "fast"]);
        // By hand, since what `-R` writes may be more than the libpq understands that the server finds.
        self.run("touch", &[&format!("{data}/standby.signal")]);
        let primary =
            format!("primary_conninfo=user=postgres application_name={name} host='{}'", self.directory.display());
        standby.resume(&[&[primary.as_str()], settings].concat());
        standby
    }

    /// Waits until this standby has replayed what has been committed on the primary so far.
    pub fn catch_up(&self, primary: &mut Client) {
        let written = value(primary, "SELECT pg_current_wal_flush_lsn()");
        wait_until(&mut self.connect(), &format!("SELECT pg_last_wal_replay_lsn() >= '{written}'"));
    }

    /// A cluster that does not exist yet, in a directory of its own inside this one's.
    pub fn sibling(&self, name: &str, bin: PathBuf) -> Self {
        let directory = self.directory.join(name);
        // Made by the server's user, who has to own it.
        self.run("mkdir", &["-m", "700", name]);
        Self::in_directory(directory, bin, &[])
    }

    fn in_directory(directory: PathBuf, bin: PathBuf, environment: &[(&str, &str)]) -> Self {
        let undertaker = Command::new("sh")
            .args(["-c", "cat; exec \"$0\" stop \"$1\" immediate"])
            .arg(self::environment("CLUSTER_SH"))
            .arg(&directory)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            // Ctrl-C goes to the whole foreground group, which this child has to survive.
            .process_group(0)
            .spawn()
            .expect("sh");
        let environment = environment.iter().map(|&(name, is)| (name.to_owned(), is.to_owned())).collect();
        Self { directory, bin, environment, undertaker, databases: AtomicU32::new(0) }
    }

    /// Starts the server again after it ended, with these settings on top of those that it had.
    pub fn resume(&self, settings: &[&str]) {
        let started = self.script("start").args(settings).output().expect("CLUSTER_SH");
        assert!(started.status.success(), "{}", String::from_utf8_lossy(&started.stderr));
    }

    /// Stops the server by `pg_ctl -m`: `smart`, `fast` or `immediate`.
    pub fn stop(&self, mode: &str) {
        self.pg_ctl(&["stop", "-m", mode]);
    }

    /// Kills the postmaster, which has no chance to tell anybody, and waits for its children to notice.
    pub fn kill_postmaster(&self) {
        let postmaster = self.postmaster();
        let children = children(postmaster);
        self.kill(postmaster);
        let start = Instant::now();
        // Until then they hold the shared memory, and a new postmaster refuses to start.
        for process in children.into_iter().chain([postmaster]) {
            while is_running(process) {
                assert!(start.elapsed() < DEADLINE, "process {process} does not end");
                thread::sleep(Duration::from_millis(5));
            }
        }
        // A process that nobody reaps, as in a container, looks alive to a new postmaster.
        self.run("rm", &["-f", "data/postmaster.pid", ".s.PGSQL.5432.lock"]);
    }

    /// Kills a process of the server's by SIGKILL.
    pub fn kill(&self, pid: i32) {
        self.run("sh", &["-c", &format!("kill -KILL {pid}")]);
    }

    /// The process id of the postmaster.
    pub fn postmaster(&self) -> i32 {
        let file = std::fs::read_to_string(Path::new(&self.data()).join("postmaster.pid")).expect("postmaster.pid");
        file.lines().next().and_then(|line| line.parse().ok()).expect("a pid")
    }

    /// A session as soon as the server lets anybody in, after a crash in which this backend ended.
    pub fn connect_after_crash(&self, database: &str, backend: i32) -> Client {
        let start = Instant::now();
        // The old server may still accept a session before it notices, hence the session that knows who is there.
        loop {
            let gone = format!("SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE pid = {backend})");
            if let Ok(mut client) = self.try_connect_to(database)
                && simple(&mut client, &gone).is_ok_and(|gone| gone == "t")
            {
                return client;
            }
            assert!(start.elapsed() < DEADLINE, "the cluster did not come back");
            thread::sleep(Duration::from_millis(20));
        }
    }

    /// The data directory.
    pub fn data(&self) -> String {
        self.directory.join("data").into_os_string().into_string().expect("UTF-8")
    }

    /// The directory of the cluster; the server's user owns it, so that programs under [`Self::run`] may write here.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Makes a database of its own for a test, with the extension in it, and returns the name.
    pub fn database(&self) -> String {
        let name = self.empty_database("");
        self.connect_to(&name).batch_execute("CREATE EXTENSION idempotency_record").expect("CREATE EXTENSION");
        name
    }

    /// Makes a database of its own for a test, with these options of CREATE DATABASE, and returns the name.
    pub fn empty_database(&self, options: &str) -> String {
        self.try_database(options).expect("CREATE DATABASE")
    }

    /// As [`Self::empty_database`], where this server may not support the options.
    pub fn try_database(&self, options: &str) -> Result<String, Error> {
        let name = format!("test_{}", self.databases.fetch_add(1, Ordering::Relaxed));
        self.connect().batch_execute(&format!("CREATE DATABASE {name} {options}"))?;
        Ok(name)
    }

    /// A superuser's session in the database `postgres`.
    pub fn connect(&self) -> Client {
        self.connect_to("postgres")
    }

    /// A superuser's session in this database.
    pub fn connect_to(&self, database: &str) -> Client {
        self.try_connect_to(database).expect("a session")
    }

    /// As [`Self::connect_to`], where the server may not be ready.
    pub fn try_connect_to(&self, database: &str) -> Result<Client, Error> {
        try_connect(&self.directory, database)
    }

    /// `pg_ctl` with these arguments, such as `restart -m immediate`, on this cluster.
    pub fn pg_ctl(&self, arguments: &[&str]) {
        let log = self.directory.join("log");
        let options = ["-s", "-w", "-D", &self.data(), "-l", log.to_str().expect("UTF-8")];
        self.run("pg_ctl", &[arguments, &options].concat());
    }

    /// Runs a program of the server's (or of the system's) as the server's user, connected to this cluster, and returns
    /// what it wrote; a failure is the test's failure.
    pub fn run(&self, program: &str, arguments: &[&str]) -> String {
        let output = self.run_with_input(program, arguments, "");
        assert!(
            output.status.success(),
            "{program} {arguments:?}: {}\n{}",
            output.status,
            String::from_utf8_lossy(&output.stderr)
        );
        String::from_utf8(output.stdout).expect("UTF-8")
    }

    /// As [`Self::run`], with something to read, and the result as it is.
    pub fn run_with_input(&self, program: &str, arguments: &[&str], input: &str) -> Output {
        let mut child = self
            .script("run")
            .arg(program)
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("CLUSTER_SH");
        // Inputs are far smaller than a pipe holds, so that writing first cannot block; a program that does not read
        // its input closes the pipe.
        let _ = child.stdin.take().expect("a pipe").write_all(input.as_bytes());
        child.wait_with_output().expect("output")
    }

    /// Starts a program as the server's user, which ends when the value is dropped, or with this process.
    pub fn start_program(&self, program: &str, arguments: &[&str]) -> Program {
        let child = self
            .script("run")
            .args(["sh", "-c", "\"$@\" & cat >/dev/null; kill $!; wait", "sh", program])
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .process_group(0)
            .spawn()
            .expect("CLUSTER_SH");
        Program(child)
    }

    fn script(&self, command: &str) -> Command {
        let mut script = Command::new(environment("CLUSTER_SH"));
        script.arg(command).arg(&self.directory).env("PGBIN", &self.bin);
        script.envs(self.environment.iter().map(|(name, is)| (name, is)));
        script
    }
}

/// A superuser's session in this database of the cluster with its socket in this directory.
pub fn try_connect(directory: &Path, database: &str) -> Result<Client, Error> {
    Config::new()
        .host_path(directory)
        .user("postgres")
        .dbname(database)
        // Sessions that wait for each other for good become a failure instead of a test that never ends.
        .options("-c statement_timeout=60s")
        .connect(NoTls)
}

impl Drop for Cluster {
    fn drop(&mut self) {
        drop(self.undertaker.stdin.take());
        let _ = self.undertaker.wait();
    }
}

/// State and parent of a process, if there is one.
fn process(pid: i32) -> Option<(char, i32)> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name before it may contain anything.
    let mut fields = stat.rsplit_once(") ")?.1.split(' ');
    Some((fields.next()?.chars().next()?, fields.next()?.parse().ok()?))
}

/// Whether this process is there and not merely waiting to be reaped.
fn is_running(pid: i32) -> bool {
    process(pid).is_some_and(|(state, _)| !['Z', 'X'].contains(&state))
}

/// The processes whose parent is this one.
fn children(parent: i32) -> Vec<i32> {
    let entries = std::fs::read_dir("/proc").expect("/proc");
    let pids = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    pids.filter(|&pid| process(pid).is_some_and(|(_, of)| of == parent)).collect()
}

/// A program that runs beside a cluster.
pub struct Program(Child);

impl Drop for Program {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        let _ = self.0.wait();
    }
}

/// What `tools/test.sh` passes to the tests.
pub fn environment(name: &str) -> String {
    std::env::var(name).unwrap_or_else(|_| panic!("{name} is not set: run these tests with `make test-client`."))
}

/// The major version of the server under test.
pub fn major() -> u32 {
    environment("PG_MAJOR").parse().expect("PG_MAJOR is a number")
}

/// `debit_once` by the extended protocol; the response as text.
pub fn debit(client: &mut Client, account: i64, key: &str, amount: i64) -> Result<String, Error> {
    query(client, "SELECT debit_once($1, $2, $3)::text", &[&account, &key, &amount])
}

/// The one text value that this query answers.
pub fn query(client: &mut Client, sql: &str, parameters: &[&(dyn ToSql + Sync)]) -> Result<String, Error> {
    client.query_one(sql, parameters)?.try_get(0)
}

/// The first value of the first row of this SQL, by the simple protocol, as text; `NULL` where it is null.
pub fn simple(client: &mut Client, sql: &str) -> Result<String, Error> {
    let messages = client.simple_query(sql)?;
    let row = messages.iter().find_map(|message| match message {
        SimpleQueryMessage::Row(row) => Some(row),
        _ => None,
    });
    Ok(row.expect("a row").get(0).unwrap_or("NULL").to_owned())
}

/// [`simple`], where an error is the test's failure.
pub fn value(client: &mut Client, sql: &str) -> String {
    simple(client, sql).unwrap_or_else(|error| panic!("{sql}: {error:?}"))
}

/// Makes each purge of this session's database stop once it has committed the deletion of so many records, in the middle of
/// the next batch, for as long as a session holds the advisory lock 7.
pub fn make_purges_stop(client: &mut Client, after: u64) {
    client
        .batch_execute(&format!(
            "CREATE FUNCTION stop() RETURNS trigger LANGUAGE plpgsql AS $$
             BEGIN
                 IF (SELECT coalesce(sum(deleted), 0) FROM public.purge_progress) >= {after} THEN
                     PERFORM pg_advisory_xact_lock(7);
                 END IF;
                 RETURN NULL;
             END $$;
             CREATE TRIGGER stop AFTER DELETE ON request_result FOR EACH STATEMENT EXECUTE FUNCTION stop()"
        ))
        .unwrap();
}

/// Changes or deletes records by hand, which the extension's triggers refuse: as logical replication does, and as a superuser
/// can who means it. For records that have to be old, or gone.
pub fn tamper(client: &mut Client, sql: &str) {
    let sql = format!("SET session_replication_role = replica; {sql}; RESET session_replication_role");
    client.batch_execute(&sql).unwrap_or_else(|error| panic!("{sql}: {error:?}"));
}

/// The balance of an account.
pub fn balance(client: &mut Client, account: i64) -> i64 {
    client.query_one("SELECT balance FROM account WHERE account_id = $1", &[&account]).expect("an account").get(0)
}

/// Everything that the extension's tables hold, to see whether anything changed.
pub fn contents(client: &mut Client) -> String {
    value(
        client,
        "SELECT (SELECT coalesce(string_agg(a::text, E'\\n' ORDER BY a.account_id), '') FROM account AS a)
             || E'\\n--\\n'
             || (SELECT coalesce(string_agg(r::text, E'\\n' ORDER BY r.account_id, r.operation, r.request_key), '')
                   FROM request_result AS r)
             || E'\\n--\\n'
             || (SELECT coalesce(string_agg(m::text, E'\\n' ORDER BY m.subscriber, m.message_id), '')
                   FROM processed_message AS m)",
    )
}

/// Proves that tables and indexes of the extension are sound, and agree with each other.
pub fn assert_sound(client: &mut Client) {
    let available = value(client, "SELECT count(*) FROM pg_available_extensions WHERE name = 'amcheck'");
    assert_eq!(available, "1", "this server was packaged without amcheck");
    client.batch_execute("CREATE EXTENSION IF NOT EXISTS amcheck").expect("amcheck");
    let tables =
        "ARRAY['account', 'request_result', 'processed_message', 'accepted_version', 'operation_policy']::regclass[]";
    // An index that disagrees is an error.
    let indexes = format!(
        "SELECT count(*) > 5 FROM pg_index, bt_index_check(indexrelid, heapallindexed => true)
          WHERE indrelid = ANY ({tables})"
    );
    assert_eq!(value(client, &indexes), "t");
    let heap = format!("SELECT count(*) FROM unnest({tables}) AS t (oid), verify_heapam(oid)");
    assert_eq!(value(client, &heap), "0");
}

/// The error's SQLSTATE; `closed` if it is the end of the connection.
pub fn sqlstate(error: &Error) -> &str {
    match error.code() {
        Some(code) => code.code(),
        None if error.is_closed() || error.source().is_some_and(|source| source.is::<std::io::Error>()) => "closed",
        None => panic!("not from the server: {error:?}"),
    }
}

/// The SQLSTATE with which this was refused, or `done: ` and the answer.
pub fn outcome(result: Result<String, Error>) -> String {
    match result {
        Ok(answer) => format!("done: {answer}"),
        Err(error) => sqlstate(&error).to_owned(),
    }
}

/// The server's report of a refusal.
pub fn report<T: std::fmt::Debug>(result: Result<T, Error>) -> DbError {
    let error = result.expect_err("a refusal");
    error.as_db_error().unwrap_or_else(|| panic!("not from the server: {error:?}")).clone()
}

/// The process id of the session's backend.
pub fn pid(client: &mut Client) -> i32 {
    client.query_one("SELECT pg_backend_pid()", &[]).expect("a pid").get(0)
}

/// Waits until the backend `pid` waits for another session: what it does and what that session does then overlap.
pub fn wait_until_blocked(observer: &mut Client, pid: i32) {
    wait_until(observer, &format!("SELECT cardinality(pg_blocking_pids({pid})) > 0"));
}

/// Waits until so many sessions of the observer's database wait for a lock.
pub fn wait_until_blocked_count(observer: &mut Client, count: usize) {
    wait_until(
        observer,
        &format!(
            "SELECT count(*) >= {count} FROM pg_stat_activity
              WHERE datname = current_database() AND wait_event_type = 'Lock' AND state = 'active'"
        ),
    );
}

/// Waits until the session with this backend is gone.
pub fn wait_until_gone(observer: &mut Client, pid: i32) {
    wait_until(observer, &format!("SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE pid = {pid})"));
}

/// Polls until this SQL answers true.
pub fn wait_until(observer: &mut Client, sql: &str) {
    let start = Instant::now();
    while value(observer, sql) != "t" {
        assert!(start.elapsed() < DEADLINE, "never became true: {sql}");
        thread::sleep(Duration::from_millis(5));
    }
}

/// A call that another thread makes, with the session that makes it.
pub type Background = thread::JoinHandle<(Client, Result<String, Error>)>;

/// Calls `debit_once` in a thread of its own, and comes back at once.
pub fn debit_in_background(mut client: Client, account: i64, key: &str, amount: i64) -> Background {
    let key = key.to_owned();
    thread::spawn(move || {
        let result = debit(&mut client, account, &key, amount);
        (client, result)
    })
}

/// Makes this call, SQL as for [`simple`], in a thread of its own, and comes back at once.
pub fn in_background(mut client: Client, sql: String) -> Background {
    thread::spawn(move || {
        let result = simple(&mut client, &sql);
        (client, result)
    })
}

/// A client that speaks just enough of the protocol to hang up in mid-sentence, which no driver does on request.
pub struct RudeClient(UnixStream);

impl RudeClient {
    /// A session in this database of the cluster with its socket in this directory.
    pub fn connect(directory: &Path, database: &str) -> Self {
        let mut stream = UnixStream::connect(directory.join(".s.PGSQL.5432")).expect("the socket");
        let parameters = format!("\0\x03\0\0user\0postgres\0database\0{database}\0\0");
        stream
            .write_all(&u32::try_from(parameters.len() + 4).expect("a short message").to_be_bytes())
            .expect("a socket that is open");
        stream.write_all(parameters.as_bytes()).expect("a socket that is open");
        let mut client = Self(stream);
        client.read_until_ready();
        client
    }

    /// Sends a query string.
    pub fn send(&mut self, sql: &str) {
        self.0.write_all(b"Q").expect("a socket that is open");
        self.0
            .write_all(&u32::try_from(sql.len() + 5).expect("a short message").to_be_bytes())
            .expect("a socket that is open");
        self.0.write_all(sql.as_bytes()).expect("a socket that is open");
        self.0.write_all(b"\0").expect("a socket that is open");
    }

    /// Reads until the server waits for the next query; an error is the test's failure.
    pub fn read_until_ready(&mut self) {
        loop {
            let mut header = [0; 5];
            self.0.read_exact(&mut header).expect("a message");
            let length = u32::from_be_bytes(header[1..].try_into().expect("four bytes")) as usize - 4;
            let mut body = vec![0; length];
            self.0.read_exact(&mut body).expect("its body");
            match header[0] {
                b'E' => panic!("{}", String::from_utf8_lossy(&body)),
                b'Z' => return,
                _ => (),
            }
        }
    }
}
