//! The exactly-once harness: clients that retry as they should, a gremlin that breaks whatever it can, and a checker.
//!
//! [`intention`] says what the clients want and [`gremlin`] what goes wrong, both from a seed; [`client`] is the durable
//! retry loop, [`journal`] its memory, [`line`] a connection that can be cut; [`check`] proves the result.

pub mod check;
pub mod client;
pub mod gremlin;
pub mod intention;
pub mod journal;
pub mod line;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use client_tests::{Cluster, value, wait_until};
use postgres::fallible_iterator::FallibleIterator as _;
use tokio::sync::watch;

use check::{Tables, Violation};
use client::Shared;
use gremlin::{Fault, Gremlin};
use intention::{ACCOUNTS, initial_balance};
use journal::{Entry, Got};

/// A run.
#[derive(Clone, Debug)]
pub struct Settings {
    /// How many intentions.
    pub requests: u64,
    /// How many faults.
    pub faults: usize,
    /// How many clients.
    pub clients: usize,
    /// Decides intentions and faults.
    pub seed: u64,
    /// Whether a client flushes its journal to the disk before it sends.
    pub fsync: bool,
    /// Whether to say what is going on.
    pub progress: bool,
    /// Replaces `debit_once` by a function that debits without claiming the key, to see the checker find it.
    pub naive: bool,
    /// Where the clients' journals and the server's log are left, replacing those of the last run.
    pub keep: Option<PathBuf>,
}

/// What came out.
#[derive(Debug)]
pub struct Report {
    /// How it was run.
    pub settings: Settings,
    /// How long the clients and the gremlin took.
    pub duration: Duration,
    /// How many intentions have a definite answer, by the kind of answer.
    pub answers: BTreeMap<String, u64>,
    /// Faults by kind.
    pub faults: BTreeMap<Fault, u64>,
    /// Requests that were sent, of all kinds.
    pub sent: u64,
    /// Retries by reason.
    pub retries: BTreeMap<String, u64>,
    /// Retries that found their request executed.
    pub recovered: u64,
    /// Connections that were cut.
    pub cuts: u64,
    /// Repeats of answered requests.
    pub replays: u64,
    /// Other requests with a known key.
    pub probes: u64,
    /// Old records that were put in for the purges.
    pub purged: u64,
    /// What must not be.
    pub violations: Vec<Violation>,
    /// Whether the clients came to the end.
    pub finished: bool,
}

/// What the run needs in its database: accounts, the transfers' handler, and a note of each change of a balance.
const SCHEMA: &str = "
CREATE SCHEMA chaos;
CREATE FUNCTION chaos.transfer(p_account bigint, p_request jsonb) RETURNS jsonb LANGUAGE plpgsql AS $$
DECLARE
    paid     bigint;
    received bigint;
BEGIN
    UPDATE public.account SET balance = balance - (p_request ->> 'amount')::bigint
     WHERE account_id = p_account AND balance >= (p_request ->> 'amount')::bigint RETURNING balance INTO paid;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'insufficient balance';
    END IF;
    UPDATE public.account SET balance = balance + (p_request ->> 'amount')::bigint
     WHERE account_id = (p_request ->> 'to')::bigint RETURNING balance INTO STRICT received;
    RETURN jsonb_build_object('paid', paid, 'received', received);
END
$$;
CREATE TABLE chaos.effect (account_id bigint NOT NULL, delta bigint NOT NULL);
CREATE FUNCTION chaos.note_effect() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO chaos.effect VALUES (NEW.account_id, NEW.balance - OLD.balance);
    RETURN NULL;
END
$$;
CREATE TRIGGER note_effect AFTER UPDATE ON public.account FOR EACH ROW EXECUTE FUNCTION chaos.note_effect();
-- The mistake that the extension exists to prevent: the key is kept, but nothing depends on it.
CREATE FUNCTION chaos.naive_debit_once(p_account bigint, p_key text, p_amount bigint) RETURNS jsonb LANGUAGE plpgsql AS $$
DECLARE
    left_over bigint;
BEGIN
    UPDATE public.account SET balance = balance - p_amount WHERE account_id = p_account RETURNING balance INTO left_over;
    INSERT INTO public.request_result (account_id, operation, request_key, request, response)
    VALUES (p_account, 'debit:v1', p_key, jsonb_build_object('amount', p_amount), jsonb_build_object('balance', left_over))
    ON CONFLICT DO NOTHING;
    RETURN jsonb_build_object('balance', left_over);
END
$$;
";

/// Runs it on a cluster of its own.
pub fn run(settings: &Settings) -> Report {
    let cluster = Cluster::start(&[
        "max_connections=200",
        "synchronous_commit=on",
        // Transfers deadlock now and then; who waits for longer than this looks for it.
        "deadlock_timeout=100ms",
        // Each recovery starts at the last checkpoint, and there are many.
        "max_wal_size=128MB",
        "checkpoint_timeout=30s",
    ]);
    let database = cluster.database();
    let mut superuser = cluster.connect_to(&database);
    superuser.batch_execute(SCHEMA).expect("the schema");
    for account in 1..=ACCOUNTS {
        let insert = "INSERT INTO account VALUES ($1, $2)";
        superuser.execute(insert, &[&account, &initial_balance(account)]).expect("an account");
    }
    drop(superuser);
    let temporary = tempfile::Builder::new().prefix("ir.journals.").tempdir().expect("a directory for the journals");
    let journals = settings.keep.clone().unwrap_or_else(|| temporary.path().to_owned());
    if settings.keep.is_some() {
        let _ = std::fs::remove_dir_all(&journals);
        std::fs::create_dir_all(&journals).expect("a directory for the journals");
    }
    let clients = settings.clients as u64;
    let (sender, allowed) = watch::channel(0);
    let shared = Arc::new(Shared {
        seed: settings.seed,
        directory: cluster.directory().to_owned(),
        journals: journals.clone(),
        database: database.clone(),
        debit_function: if settings.naive { "chaos.naive_debit_once" } else { "public.debit_once" }.to_owned(),
        quotas: (0..clients)
            .map(|i| settings.requests / clients + u64::from(i < settings.requests % clients))
            .collect(),
        fsync: settings.fsync,
        wanted_cuts: (0..clients).map(|_| Default::default()).collect(),
        cuts: Arc::default(),
        answered: Default::default(),
        allowed,
        sent: Default::default(),
        recovered: Default::default(),
        retries: Mutex::default(),
    });
    let schedule = gremlin::schedule(settings.seed, settings.faults, settings.requests, settings.clients);
    let start = Instant::now();
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().expect("a runtime");
    let outcome = runtime.block_on(async {
        let clients = (0..settings.clients).map(|i| tokio::spawn(client::run(shared.clone(), i))).collect();
        let progress = settings.progress;
        let gremlin =
            Gremlin { shared: shared.clone(), cluster: &cluster, clients, allowed: sender, old_records: 0, progress };
        gremlin.run(&schedule).await
    });
    let duration = start.elapsed();
    runtime.shutdown_timeout(Duration::from_secs(5));
    if let Some(keep) = &settings.keep {
        std::fs::copy(cluster.directory().join("log"), keep.join("server-log")).expect("a copy of the server's log");
    }
    let finished = outcome.is_some();
    let (faults, inserted) = outcome.unwrap_or_default();
    let journals: Vec<_> =
        (0..settings.clients).map(|i| journal::read(&journals.join(format!("client-{i}")))).collect();
    let tables = read_tables(&cluster, &database);
    let count = |filter: fn(&Entry) -> bool| journals.iter().flatten().filter(|entry| filter(entry)).count() as u64;
    let mut answers = BTreeMap::new();
    for entry in journals.iter().flatten() {
        if let Entry::Answer { got, .. } = entry {
            let name = match got {
                Got::Done(_) => "executed".to_owned(),
                Got::Refused(sqlstate) => format!("refused with {sqlstate}"),
                Got::Cancelled => "refused and cancelled".to_owned(),
            };
            *answers.entry(name).or_default() += 1;
        }
    }
    Report {
        settings: settings.clone(),
        duration,
        answers,
        faults,
        sent: shared.sent.load(Ordering::Relaxed),
        retries: shared.retries.lock().expect("no panic").clone(),
        recovered: shared.recovered.load(Ordering::Relaxed),
        cuts: shared.cuts.load(Ordering::Relaxed),
        replays: count(|entry| matches!(entry, Entry::Again { .. })),
        probes: count(|entry| matches!(entry, Entry::Probe { .. })),
        purged: inserted,
        violations: check::check(&journals, &tables),
        finished,
    }
}

/// The tables, once nothing is under way any more.
fn read_tables(cluster: &Cluster, database: &str) -> Tables {
    let mut session = cluster.connect_to(database);
    // A backend whose client is gone goes on until it notices.
    wait_until(
        &mut session,
        "SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE backend_type = 'client backend' AND pid <> pg_backend_pid())",
    );
    value(&mut session, "SELECT purge_expired_keys(interval '1 day')");
    let old = value(&mut session, "SELECT count(*) FROM request_result WHERE operation = 'old:v1'");
    let mut tables = Tables {
        initial: (1..=ACCOUNTS).map(|account| (account, initial_balance(account))).collect(),
        not_purged: old.parse().expect("a count"),
        ..Tables::default()
    };
    let none = std::iter::empty::<i64>;
    let mut rows = session.query_raw("SELECT account_id, balance FROM account", none()).expect("accounts");
    while let Some(row) = rows.next().expect("an account") {
        tables.balances.insert(row.get(0), row.get(1));
    }
    drop(rows);
    let sql = "SELECT account_id, operation, request_key, CASE WHEN NOT cancelled THEN response::text END
                 FROM request_result WHERE operation <> 'old:v1'";
    let mut rows = session.query_raw(sql, none()).expect("records");
    while let Some(row) = rows.next().expect("a record") {
        tables.requests.insert((row.get(0), row.get(1), row.get(2)), row.get(3));
    }
    drop(rows);
    let sql = "SELECT subscriber, message_id::text, account_id, delta FROM processed_message";
    let mut rows = session.query_raw(sql, none()).expect("messages");
    while let Some(row) = rows.next().expect("a message") {
        tables.messages.insert((row.get(0), row.get(1)), (row.get(2), row.get(3)));
    }
    drop(rows);
    let mut rows = session.query_raw("SELECT account_id, delta FROM chaos.effect", none()).expect("effects");
    while let Some(row) = rows.next().expect("an effect") {
        *tables.effects.entry((row.get(0), row.get(1))).or_default() += 1;
    }
    drop(rows);
    tables
}

impl Report {
    /// Whether every intention was executed exactly once, or not at all where its client was told so.
    pub fn holds(&self) -> bool {
        self.finished && self.violations.is_empty()
    }
}

impl std::fmt::Display for Report {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let list = |counts: &BTreeMap<String, u64>| {
            let mut text = String::new();
            for (name, count) in counts {
                let _ = write!(text, "{}{count} {name}", if text.is_empty() { "" } else { ", " });
            }
            text
        };
        let faults: BTreeMap<_, _> = self.faults.iter().map(|(fault, count)| (format!("{fault:?}"), *count)).collect();
        let answered: u64 = self.answers.values().sum();
        let seconds = self.duration.as_secs_f64();
        writeln!(f, "intentions  {answered} answered of {}: {}", self.settings.requests, list(&self.answers))?;
        writeln!(f, "requests    {} sent in {seconds:.1} s, {:.0} a second", self.sent, self.sent as f64 / seconds)?;
        writeln!(f, "retries     {}: {}", self.retries.values().sum::<u64>(), list(&self.retries))?;
        writeln!(f, "replays     {} of lost answers, {} of answered requests", self.recovered, self.replays)?;
        writeln!(f, "mismatches  {} known keys sent with another request", self.probes)?;
        writeln!(f, "faults      {}: {}", self.faults.values().sum::<u64>(), list(&faults))?;
        writeln!(
            f,
            "            {} connections cut by a client, {} old records for the purges",
            self.cuts, self.purged
        )?;
        writeln!(f, "seed        {} with {} clients", self.settings.seed, self.settings.clients)?;
        const SHOWN: usize = 20;
        for violation in self.violations.iter().take(SHOWN) {
            writeln!(f, "VIOLATION   {violation:?}")?;
        }
        if self.violations.len() > SHOWN {
            writeln!(f, "            and {} more", self.violations.len() - SHOWN)?;
        }
        if self.holds() {
            write!(f, "HOLDS: no intention was executed twice, and none was acknowledged and lost")
        } else if self.finished {
            write!(f, "VIOLATED: {} times", self.violations.len())
        } else {
            write!(f, "VIOLATED: the clients made no progress any more, and {} violations", self.violations.len())
        }
    }
}
