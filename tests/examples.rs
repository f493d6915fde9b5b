//! The examples under examples/ are run while their sessions, their server and they themselves are killed; each has to get
//! its debit executed once, and to say what became of it.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus};
use std::thread;
use std::time::{Duration, Instant};

use client_tests::{Cluster, DEADLINE, balance, environment, value, wait_until};
use postgres::Client;
use tempfile::TempDir;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the root of the repository")
}

/// An example, which knows how to be started.
#[derive(Clone, Copy)]
enum Example {
    Python,
    JavaScript,
    Rust,
    Shell,
}

impl Example {
    fn command(self) -> Command {
        let program = |interpreter: &str, file: &str| {
            let mut command = Command::new(interpreter);
            command.arg(root().join("examples").join(file));
            command
        };
        match self {
            Self::Python => {
                let mut command = program("python3", "python/debit_once.py");
                command.env("PYTHONPATH", environment("EXAMPLE_PYTHONPATH")).env("PYTHONDONTWRITEBYTECODE", "1");
                command
            }
            Self::JavaScript => {
                let mut command = program("node", "javascript/debit_once.js");
                command.env("NODE_PATH", environment("EXAMPLE_NODE_PATH"));
                command
            }
            Self::Rust => {
                let build = ["build", "--quiet", "-p", "debit_once_example"];
                let built = Command::new(env!("CARGO")).args(build).current_dir(root()).status().expect("cargo");
                assert!(built.success());
                let this = std::env::current_exe().expect("this program");
                Command::new(this.ancestors().nth(2).expect("target/debug").join("debit_once_example"))
            }
            Self::Shell => {
                let path = format!("{}:{}", environment("PGBIN"), environment("PATH"));
                let mut command = program("bash", "shell/debit_once.sh");
                command.env("PATH", path);
                command
            }
        }
    }
}

/// A cluster with account 1, which holds 1000, and a place for the example's files.
struct Stage {
    example: Example,
    cluster: Cluster,
    database: String,
    directory: TempDir,
}

/// An example that was started.
struct Running {
    child: Child,
    files: PathBuf,
}

impl Stage {
    fn new(example: Example) -> Self {
        let cluster = Cluster::start(&[]);
        let database = cluster.database();
        cluster.connect_to(&database).batch_execute("INSERT INTO account VALUES (1, 1000)").expect("an account");
        Self { example, cluster, database, directory: tempfile::tempdir().expect("a directory") }
    }

    fn session(&self) -> Client {
        self.cluster.connect_to(&self.database)
    }

    fn intention(&self) -> PathBuf {
        self.directory.path().join("intention")
    }

    fn start(&self, account: i64, amount: i64) -> Running {
        let files = self.directory.path().to_owned();
        let output = |name: &str| File::create(files.join(name)).expect("a file");
        let (host, database) = (self.cluster.directory().to_str().expect("UTF-8"), self.database.as_str());
        let child = self
            .example
            .command()
            .arg(self.intention())
            .args([account.to_string(), amount.to_string()])
            .envs([("PGHOST", host), ("PGDATABASE", database), ("PGUSER", "postgres")])
            .env("DATABASE_URL", format!("host={host} dbname={database} user=postgres"))
            .stdout(output("stdout"))
            .stderr(output("stderr"))
            .spawn()
            .expect("the example's interpreter");
        Running { child, files }
    }

    /// Starts it and waits until it is done.
    fn run(&self, account: i64, amount: i64) -> (bool, String) {
        self.start(account, amount).finish()
    }

    /// A session that holds the account's row, so that a debit waits.
    fn gate(&self) -> Client {
        let mut gate = self.session();
        gate.batch_execute("BEGIN; SELECT FROM account WHERE account_id = 1 FOR UPDATE").expect("the row");
        gate
    }

    /// Waits until a debit waits for the gate.
    fn wait_until_blocked(&self) {
        let blocked = "SELECT count(*) = 1 FROM pg_stat_activity
                        WHERE datname = current_database() AND wait_event_type = 'Lock'";
        wait_until(&mut self.session(), blocked);
    }

    /// Ends the session of the debit that waits.
    fn terminate_blocked(&self) {
        self.wait_until_blocked();
        let terminate = "SELECT bool_and(pg_terminate_backend(pid, 30000)) FROM pg_stat_activity
                          WHERE datname = current_database() AND wait_event_type = 'Lock'";
        assert_eq!(value(&mut self.session(), terminate), "t");
    }

    fn records(&self) -> i64 {
        self.session().query_one("SELECT count(*) FROM request_result", &[]).expect("a count").get(0)
    }
}

impl Running {
    fn errors(&self) -> String {
        std::fs::read_to_string(self.files.join("stderr")).expect("UTF-8")
    }

    fn wait(&mut self) -> ExitStatus {
        let start = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().expect("a child") {
                return status;
            }
            if start.elapsed() > DEADLINE {
                let _ = self.child.kill();
                panic!("does not end: {}", self.errors());
            }
            thread::sleep(Duration::from_millis(10));
        }
    }

    /// Waits until it says that it tries again.
    fn wait_until_it_retries(&self) {
        let start = Instant::now();
        while !self.errors().contains("retry:") {
            assert!(start.elapsed() < DEADLINE, "does not try again: {}", self.errors());
            thread::sleep(Duration::from_millis(10));
        }
    }

    /// Whether it succeeded, and its answer or the SQLSTATE of the refusal.
    fn finish(mut self) -> (bool, String) {
        let status = self.wait();
        let output = std::fs::read_to_string(self.files.join("stdout")).expect("UTF-8");
        match status.code() {
            Some(0) => (true, output.trim().to_owned()),
            Some(1) if output.is_empty() => (false, self.errors().trim().lines().last().unwrap_or_default().to_owned()),
            _ => panic!("{status}: {output}\n{}", self.errors()),
        }
    }
}

fn done(balance: i64) -> (bool, String) {
    (true, format!(r#"{{"balance": {balance}}}"#))
}

fn refused(sqlstate: &str) -> (bool, String) {
    (false, sqlstate.to_owned())
}

/// Every step debits 100 or nothing, so that the balance says how many were executed.
fn is_executed_once_whatever_breaks(example: Example) {
    let stage = Stage::new(example);
    assert_eq!(stage.run(1, 100), done(900));
    assert!(!stage.intention().exists(), "an answered intention is done with");

    // Definite refusals, without a retry.
    assert_eq!(stage.run(1, 5000), refused("P0001"));
    assert_eq!(stage.run(2, 100), refused("23503"));
    assert_eq!(stage.run(1, 0), refused("22023"));
    assert!(!stage.intention().exists());
    assert_eq!(stage.records(), 1);

    // The session is ended, and then the server, while the debit is under way.
    let gate = stage.gate();
    let running = stage.start(1, 100);
    stage.terminate_blocked();
    running.wait_until_it_retries();
    stage.wait_until_blocked();
    stage.cluster.pg_ctl(&["restart", "-m", "immediate"]);
    assert_eq!(running.finish(), done(800));
    drop(gate);

    // There is no server at first.
    stage.cluster.pg_ctl(&["stop", "-m", "immediate"]);
    let running = stage.start(1, 100);
    running.wait_until_it_retries();
    stage.cluster.pg_ctl(&["start"]);
    assert_eq!(running.finish(), done(700));

    // A wait that is cut short by the server.
    let lock_timeout = |setting: &str| {
        stage.session().batch_execute(&format!("ALTER DATABASE {} {setting}", stage.database)).expect("ALTER DATABASE");
    };
    lock_timeout("SET lock_timeout = '50ms'");
    let mut gate = stage.gate();
    let running = stage.start(1, 100);
    running.wait_until_it_retries();
    gate.batch_execute("COMMIT").expect("COMMIT");
    assert_eq!(running.finish(), done(600));
    lock_timeout("RESET lock_timeout");

    // The client dies, its debit is executed all the same, and the client's successor gets the answer.
    let mut gate = stage.gate();
    let mut running = stage.start(1, 100);
    stage.wait_until_blocked();
    running.child.kill().expect("a kill");
    running.wait();
    gate.batch_execute("COMMIT").expect("COMMIT");
    wait_until(&mut stage.session(), "SELECT count(*) = 5 FROM request_result");
    assert!(stage.intention().exists(), "written before it was sent");
    stage.session().batch_execute("UPDATE account SET balance = 9000").expect("a top-up");
    assert_eq!(stage.run(1, 100), done(500));
    assert_eq!(balance(&mut stage.session(), 1), 9000);
    assert!(!stage.intention().exists());

    // A refusal while an earlier attempt may be under way: it is cancelled, so that a top-up does not execute it.
    let mut gate = stage.gate();
    let running = stage.start(1, 10_000);
    stage.terminate_blocked();
    running.wait_until_it_retries();
    stage.wait_until_blocked();
    gate.batch_execute("COMMIT").expect("COMMIT");
    assert_eq!(running.finish(), refused("P0001"));
    assert_eq!(value(&mut stage.session(), "SELECT count(*) FROM request_result WHERE cancelled"), "1");

    // What is neither an answer nor worth a retry keeps the intention.
    stage
        .session()
        .batch_execute("ALTER FUNCTION debit_once(bigint, text, bigint) RENAME TO misplaced")
        .expect("ALTER");
    let mut running = stage.start(1, 100);
    assert!(!running.wait().success());
    assert!(stage.intention().exists());
    stage
        .session()
        .batch_execute("ALTER FUNCTION misplaced(bigint, text, bigint) RENAME TO debit_once")
        .expect("ALTER");
    assert_eq!(stage.run(1, 100), done(8900));
    assert_eq!(stage.records(), 7);
}

#[test]
fn the_debit_in_python_is_executed_once_whatever_breaks() {
    is_executed_once_whatever_breaks(Example::Python);
}

#[test]
fn the_debit_in_javascript_is_executed_once_whatever_breaks() {
    is_executed_once_whatever_breaks(Example::JavaScript);
}

#[test]
fn the_debit_in_rust_is_executed_once_whatever_breaks() {
    is_executed_once_whatever_breaks(Example::Rust);
}

#[test]
fn the_debit_in_the_shell_is_executed_once_whatever_breaks() {
    is_executed_once_whatever_breaks(Example::Shell);
}
