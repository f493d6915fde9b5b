//! Clients that debit all the time and behave as clients should: who gets no answer asks again, with the same key.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use postgres::{Client, Error};

use crate::{DEADLINE, sqlstate, try_connect, value};

/// The name of the clients' sessions.
pub const APPLICATION: &str = "traffic";
/// Accounts 1 to this are debited, one unit a call.
pub const ACCOUNTS: usize = 3;

/// Clients that debit until they are told to stop.
pub struct Traffic {
    clients: Vec<JoinHandle<Vec<Debit>>>,
    shared: Arc<Shared>,
}

struct Shared {
    stop: AtomicBool,
    answered: AtomicUsize,
    /// Where the server is at present.
    directory: Mutex<PathBuf>,
    database: String,
}

/// A debit that has its answer.
struct Debit {
    account: i64,
    key: String,
    answer: String,
    /// What a repeat told whose first attempt had no answer: whether that one had been executed.
    retried: Option<bool>,
}

/// What became of the debits whose first attempt had no answer.
#[derive(Debug)]
pub struct Retried {
    /// It had been executed, and the retry got its answer.
    pub replayed: usize,
    /// Nothing had been kept, and the retry executed it.
    pub executed: usize,
}

impl Traffic {
    /// Makes the accounts, and lets so many clients loose on the server with its socket in this directory.
    pub fn start(clients: usize, directory: &Path, database: &str) -> Self {
        let mut client = try_connect(directory, database).expect("a session");
        client
            .batch_execute(&format!("INSERT INTO account SELECT i, 1000000 FROM generate_series(1, {ACCOUNTS}) AS i"))
            .expect("accounts");
        let shared = Arc::new(Shared {
            stop: AtomicBool::new(false),
            answered: AtomicUsize::new(0),
            directory: Mutex::new(directory.to_owned()),
            database: database.to_owned(),
        });
        let clients = (0..clients)
            .map(|number| {
                let shared = Arc::clone(&shared);
                thread::spawn(move || shared.debit_until_stopped(number))
            })
            .collect();
        Self { clients, shared }
    }

    /// Waits until so many more debits have got their answer.
    pub fn wait_for_answers(&self, count: usize) {
        let target = self.shared.answered.load(Ordering::SeqCst) + count;
        let start = Instant::now();
        while self.shared.answered.load(Ordering::SeqCst) < target {
            let ended = self.clients.iter().any(JoinHandle::is_finished);
            assert!(start.elapsed() < DEADLINE && !ended, "no progress");
            thread::sleep(Duration::from_millis(2));
        }
    }

    /// Leads the clients to another server.
    pub fn redirect(&self, directory: &Path) {
        directory.clone_into(&mut self.shared.directory.lock().expect("a path"));
    }

    /// Stops the clients as soon as each has its answer, and proves that every debit is there, and there once.
    pub fn finish(self) -> Retried {
        self.shared.stop.store(true, Ordering::SeqCst);
        let debits: Vec<_> = self.clients.into_iter().flat_map(|client| client.join().expect("no panic")).collect();
        let mut client = self.shared.connect().expect("a session");
        for debit in &debits {
            let (answer, replayed) = call(&mut client, debit.account, &debit.key).expect("a replay");
            assert!(replayed, "lost: {} {}", debit.account, debit.key);
            assert_eq!(answer, debit.answer, "{} {}", debit.account, debit.key);
        }
        assert_eq!(value(&mut client, "SELECT count(*) FROM request_result"), debits.len().to_string());
        let taken = format!("SELECT {ACCOUNTS} * 1000000 - sum(balance) FROM account");
        assert_eq!(value(&mut client, &taken), debits.len().to_string());
        // Each account went down one by one, hence no two debits got the same answer.
        let distinct = "SELECT count(DISTINCT (account_id, response)) FROM request_result";
        assert_eq!(value(&mut client, distinct), debits.len().to_string());
        let count = |replayed| debits.iter().filter(|debit| debit.retried == Some(replayed)).count();
        Retried { replayed: count(true), executed: count(false) }
    }
}

impl Shared {
    fn connect(&self) -> Result<Client, Error> {
        let directory = self.directory.lock().expect("a path").clone();
        let mut client = try_connect(&directory, &self.database)?;
        client.batch_execute(&format!("SET application_name = {APPLICATION}"))?;
        Ok(client)
    }

    fn debit_until_stopped(&self, number: usize) -> Vec<Debit> {
        let mut client = None;
        let mut debits = Vec::new();
        while !self.stop.load(Ordering::SeqCst) {
            let account = i64::try_from((number + debits.len()) % ACCOUNTS + 1).expect("few accounts");
            let key = format!("{number} {}", debits.len());
            debits.push(self.debit(&mut client, account, key));
            self.answered.fetch_add(1, Ordering::SeqCst);
        }
        debits
    }

    /// Asks until there is an answer.
    fn debit(&self, session: &mut Option<Client>, account: i64, key: String) -> Debit {
        let start = Instant::now();
        let mut sent = false;
        loop {
            assert!(start.elapsed() < DEADLINE, "no answer: {account} {key}");
            let client = match session {
                Some(client) => client,
                None => match self.connect() {
                    Ok(client) => session.insert(client),
                    Err(error) => {
                        assert_connection_lost(&error);
                        thread::sleep(Duration::from_millis(10));
                        continue;
                    }
                },
            };
            match call(client, account, &key) {
                Ok((answer, replayed)) => {
                    assert!(sent || !replayed, "never sent, and there: {account} {key}");
                    return Debit { account, key, answer, retried: sent.then_some(replayed) };
                }
                Err(error) => {
                    assert_connection_lost(&error);
                    *session = None;
                    sent = true;
                }
            }
        }
    }
}

/// The answer, and whether it was a replay.
fn call(client: &mut Client, account: i64, key: &str) -> Result<(String, bool), Error> {
    let sql = "SELECT response::text, replayed FROM debit_once_outcome($1, $2, 1)";
    let row = client.query_one(sql, &[&account, &key])?;
    Ok((row.try_get(0)?, row.try_get(1)?))
}

/// A client whose server goes away gets this and nothing else.
fn assert_connection_lost(error: &Error) {
    if error.code().is_some() {
        assert!(["57P01", "57P02", "57P03"].contains(&sqlstate(error)), "{error:?}");
    }
}
