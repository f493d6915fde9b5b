//! A client as it should be: it writes an intention down, sends it with the same key until there is a definite answer,
//! backs off in between, and carries on from its file when it was killed.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::error::Error as _;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use backon::{BackoffBuilder, ExponentialBuilder};
use tokio::net::UnixStream;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{Config, Error, NoTls, Row, Statement};

use crate::intention::{Intention, Kind};
use crate::journal::{Entry, Got, Journal};
use crate::line::{Line, Scissors};

/// What a repeat of `apply_message_once`, which answers NULL, is written down as.
pub const REPEAT: &str = "repeat";

/// What all clients, the gremlin and whoever reports share.
pub struct Shared {
    /// Says which intentions there are.
    pub seed: u64,
    /// Where the server's socket is.
    pub directory: PathBuf,
    /// Where the clients' journals are.
    pub journals: PathBuf,
    /// The database.
    pub database: String,
    /// The function that debits; another one than the extension's in the test of the checker.
    pub debit_function: String,
    /// How many intentions each client has.
    pub quotas: Vec<u64>,
    /// Whether a journal is flushed to the disk before the request is sent.
    pub fsync: bool,
    /// The [`crate::line::Moment`] at which the client's next request is to be cut off, or 0.
    pub wanted_cuts: Vec<AtomicU8>,
    /// How many connections were cut.
    pub cuts: Arc<AtomicU64>,
    /// How many intentions have a definite answer.
    pub answered: AtomicU64,
    /// Up to how many may have one before the next fault has happened.
    pub allowed: watch::Receiver<u64>,
    /// How many requests were sent: first attempts, retries, replays, probes and cancels.
    pub sent: AtomicU64,
    /// How many retries found that an attempt had been executed whose answer was lost.
    pub recovered: AtomicU64,
    /// Why requests were sent again: SQLSTATE or `connection lost`, and how often.
    pub retries: Mutex<BTreeMap<String, u64>>,
}

/// What to do after an error.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum After {
    /// Nothing is known: retry with the same key.
    Unknown(String),
    /// The server says that nothing was kept: retry with the same key.
    Retry(String),
    /// Retrying changes nothing.
    Definite(String),
}

/// Why an attempt failed.
#[derive(Debug)]
pub enum Failure {
    /// Nobody listens, so that nothing was sent.
    NoServer,
    /// What the driver says.
    Driver(Error),
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::Driver(error)
    }
}

/// Sorts a failure by its SQLSTATE alone.
pub fn after(failure: &Failure) -> After {
    let Failure::Driver(error) = failure else { return After::Retry("no server".to_owned()) };
    let Some(state) = error.code() else {
        let lost = error.is_closed() || error.source().is_some_and(|source| source.is::<std::io::Error>());
        assert!(lost, "neither from the server nor a lost connection: {error:?}");
        return After::Unknown("connection lost".to_owned());
    };
    after_sqlstate(state.code())
}

/// The table of docs/clients.md.
pub fn after_sqlstate(state: &str) -> After {
    let kind: fn(String) -> After = match state {
        // The session ended, perhaps after a commit; or whether it committed is what the server says it cannot tell.
        "40003" | "57P01" | "57P02" | "57P05" => After::Unknown,
        // 57P03: not yet, or no longer, ready for a session.
        "57014" | "55P03" | "57P03" => After::Retry,
        _ => match &state[..2] {
            "08" => After::Unknown,
            "40" | "53" => After::Retry,
            _ => After::Definite,
        },
    };
    kind(state.to_owned())
}

struct Connection {
    client: tokio_postgres::Client,
    driver: JoinHandle<()>,
    scissors: Scissors,
    prepared: HashMap<String, Statement>,
}

impl Drop for Connection {
    fn drop(&mut self) {
        // Without a farewell: whatever the server is doing, it does not learn that nobody waits for it.
        self.driver.abort();
    }
}

impl Connection {
    /// One statement, with all parameters as text; the answer's first value. Cut at this moment, if it is one.
    async fn value(&mut self, sql: &str, parameters: &[&str], cut: u8) -> Result<Option<String>, Failure> {
        let row = self.row(sql, parameters, cut).await?;
        Ok(row.map_or(Ok(None), |row| row.try_get(0))?)
    }

    async fn row(&mut self, sql: &str, parameters: &[&str], cut: u8) -> Result<Option<Row>, Failure> {
        let statement = match self.prepared.get(sql) {
            Some(statement) => statement.clone(),
            None => {
                let types = vec![Type::TEXT; parameters.len()];
                let statement = self.client.prepare_typed(sql, &types).await?;
                self.prepared.insert(sql.to_owned(), statement.clone());
                statement
            }
        };
        let parameters: Vec<_> = parameters.iter().map(|value| value as &(dyn ToSql + Sync)).collect();
        self.scissors.arm(cut);
        Ok(self.client.query_opt(&statement, &parameters).await?)
    }
}

/// Runs a client to the end of its quota, from wherever its journal says that it is.
pub async fn run(shared: Arc<Shared>, number: usize) {
    let (journal, past) = Journal::open(&shared.journals.join(format!("client-{number}")), shared.fsync);
    let mut next = 0;
    let mut unanswered = None;
    for entry in past {
        match entry {
            Entry::Intend(intention) => {
                next = intention.n + 1;
                unanswered = Some(intention);
            }
            Entry::Answer { .. } => unanswered = None,
            Entry::Again { .. } | Entry::Probe { .. } => {}
        }
    }
    let mut client = Client { shared, number, journal, connection: None, recent: VecDeque::new() };
    if let Some(intention) = unanswered {
        client.carry_out(intention, true).await;
    }
    let mut allowed = client.shared.allowed.clone();
    for n in next..client.shared.quotas[number] {
        let answered = client.shared.answered.load(Ordering::Relaxed);
        // The run is over when the sender is gone, and nothing is held back any more.
        let _ = allowed.wait_for(|&allowed| answered < allowed).await;
        let intention = Intention::generate(client.shared.seed, number, n);
        client.journal.write(&Entry::Intend(intention.clone()));
        client.carry_out(intention, false).await;
        if n % 8 == 0 {
            client.ask_again(n).await;
        }
    }
}

struct Client {
    shared: Arc<Shared>,
    number: usize,
    journal: Journal,
    connection: Option<Connection>,
    /// Intentions that were executed, to be repeated.
    recent: VecDeque<Intention>,
}

impl Client {
    /// Gets the definite answer and writes it down.
    async fn carry_out(&mut self, intention: Intention, sent_before: bool) {
        let got = self.persist(&intention, sent_before, true).await;
        self.journal.write(&Entry::Answer { n: intention.n, got: got.clone() });
        self.shared.answered.fetch_add(1, Ordering::Relaxed);
        if matches!(got, Got::Done(_)) {
            self.recent.push_back(intention);
            if self.recent.len() > 100 {
                self.recent.pop_front();
            }
        }
    }

    /// Repeats an earlier request, or sends another one with its key.
    async fn ask_again(&mut self, n: u64) {
        let Some(intention) = self.recent.get(n as usize % self.recent.len().max(1)).cloned() else { return };
        let n = intention.n;
        let entry = if intention.amount % 3 == 0 {
            Entry::Probe { n, got: self.persist(&intention.altered(), false, false).await }
        } else {
            Entry::Again { n, got: self.persist(&intention, false, false).await }
        };
        self.journal.write(&entry);
    }

    /// Sends a request until there is a definite answer. `sent_before`: an earlier attempt may be under way. `cancel`:
    /// where one is, a refusal that a change of the balance could lift is not definite before the key is cancelled.
    async fn persist(&mut self, intention: &Intention, sent_before: bool, cancel: bool) -> Got {
        let mut unknown = sent_before;
        let mut cancelling = false;
        let mut pauses = ExponentialBuilder::new()
            .with_min_delay(Duration::from_millis(2))
            .with_max_delay(Duration::from_millis(250))
            .with_jitter()
            .with_jitter_seed(intention.n)
            .without_max_times()
            .build();
        loop {
            let result = if cancelling { self.cancel(intention).await } else { self.attempt(intention, unknown).await };
            let reason = match result {
                Ok(Some(answer)) => return Got::Done(answer),
                Ok(None) if cancelling => return Got::Cancelled,
                Ok(None) => return Got::Done(REPEAT.to_owned()),
                Err(failure) => match after(&failure) {
                    After::Unknown(reason) => {
                        self.connection = None;
                        unknown = true;
                        reason
                    }
                    After::Retry(reason) => {
                        self.roll_back(intention).await;
                        reason
                    }
                    After::Definite(state) if state == "P0001" && unknown && cancel && !cancelling => {
                        self.roll_back(intention).await;
                        cancelling = true;
                        continue;
                    }
                    After::Definite(state) => {
                        self.roll_back(intention).await;
                        return Got::Refused(state);
                    }
                },
            };
            *self.shared.retries.lock().expect("no panic").entry(reason).or_default() += 1;
            tokio::time::sleep(pauses.next().expect("pauses without end")).await;
        }
    }

    /// One attempt, in one transaction. `unknown`: an earlier one may have been executed.
    async fn attempt(&mut self, intention: &Intention, unknown: bool) -> Result<Option<String>, Failure> {
        let number = self.number;
        let shared = self.shared.clone();
        let connection = self.connect().await?;
        let cut = shared.wanted_cuts[number].swap(0, Ordering::Relaxed);
        shared.sent.fetch_add(1, Ordering::Relaxed);
        let account = &intention.account.to_string();
        let amount = &intention.amount.to_string();
        let key = &intention.key;
        let payload = &format!(r#"{{"amount": {amount}}}"#);
        // The functions whose answer says that it is a replay have the same core.
        let once = |function: &str, parameters: &str| match unknown && !function.starts_with("chaos.") {
            true => format!("SELECT response::text, replayed FROM {function}_outcome({parameters})"),
            false => format!("SELECT {function}({parameters})::text, false"),
        };
        let (answer, replayed) = match intention.kind {
            Kind::Apply => {
                let sql =
                    "SELECT public.apply_message_once('apply', $2::uuid, $1::bigint, $3::bigint, $4::jsonb)::text";
                let balance = connection.value(sql, &[account, key, amount, payload], cut).await?;
                let repeat = balance.is_none();
                (balance, repeat)
            }
            Kind::Accept => {
                connection.client.batch_execute("BEGIN").await?;
                let sql = "SELECT public.accept_message('accept', $2::uuid, $1::bigint, $3::jsonb)::text";
                let first = connection.value(sql, &[account, key, payload], 0).await?;
                let repeat = first.as_deref() != Some("true");
                if !repeat {
                    let sql = "UPDATE public.account SET balance = balance + $2::bigint WHERE account_id = $1::bigint";
                    connection.value(sql, &[account, amount], 0).await?;
                }
                connection.scissors.arm(cut);
                connection.client.batch_execute("COMMIT").await?;
                (first, repeat)
            }
            Kind::Debit | Kind::Credit | Kind::Transfer => {
                let request = &format!(r#"{{"to": {}, "amount": {amount}}}"#, intention.to);
                let (sql, last) = match intention.kind {
                    Kind::Debit => (once(&shared.debit_function, "$1::bigint, $2, $3::bigint"), amount),
                    Kind::Credit => (once("public.credit_once", "$1::bigint, $2, $3::bigint"), amount),
                    _ => {
                        let handler = "'chaos.transfer(bigint, jsonb)'";
                        (
                            once("public.run_once", &format!("$1::bigint, 'transfer:v1', $2, $3::jsonb, {handler}")),
                            request,
                        )
                    }
                };
                match connection.row(&sql, &[account, key, last], cut).await? {
                    Some(row) => (row.try_get(0)?, row.try_get(1)?),
                    None => (None, false),
                }
            }
        };
        if unknown && replayed {
            shared.recovered.fetch_add(1, Ordering::Relaxed);
        }
        Ok(answer)
    }

    async fn cancel(&mut self, intention: &Intention) -> Result<Option<String>, Failure> {
        self.shared.sent.fetch_add(1, Ordering::Relaxed);
        let connection = self.connect().await?;
        let sql = "SELECT public.cancel_request($1::bigint, $2, $3)::text";
        connection.value(sql, &[&intention.account.to_string(), intention.kind.scope(), &intention.key], 0).await
    }

    /// Ends the transaction that an error has aborted.
    async fn roll_back(&mut self, intention: &Intention) {
        if intention.kind == Kind::Accept
            && let Some(connection) = &mut self.connection
            && connection.client.batch_execute("ROLLBACK").await.is_err()
        {
            self.connection = None;
        }
    }

    async fn connect(&mut self) -> Result<&mut Connection, Failure> {
        if self.connection.as_ref().is_some_and(|connection| connection.client.is_closed()) {
            self.connection = None;
        }
        if self.connection.is_none() {
            self.connection = Some(connect(&self.shared, self.number).await?);
        }
        Ok(self.connection.as_mut().expect("a connection"))
    }
}

async fn connect(shared: &Shared, number: usize) -> Result<Connection, Failure> {
    let scissors = Scissors::new(shared.cuts.clone());
    // Clients differ in how long they wait and in what they see.
    let settings = match number % 8 {
        1 | 5 => "-c lock_timeout=100ms",
        2 | 6 => "-c statement_timeout=200ms",
        3 => "-c default_transaction_isolation=repeatable\\ read",
        7 => "-c default_transaction_isolation=serializable",
        _ => "",
    };
    let mut config = Config::new();
    config.user("postgres").dbname(&shared.database).application_name(application_name(number)).options(settings);
    let stream = match UnixStream::connect(shared.directory.join(".s.PGSQL.5432")).await {
        Ok(stream) => stream,
        Err(_) => return Err(Failure::NoServer),
    };
    let (client, connection) = config.connect_raw(Line { stream, scissors: scissors.clone() }, NoTls).await?;
    let driver = tokio::spawn(async move {
        let _ = connection.await;
    });
    Ok(Connection { client, driver, scissors, prepared: HashMap::new() })
}

/// How the gremlin finds a client's backend.
pub fn application_name(number: usize) -> String {
    format!("chaos-{number}")
}
