//! Debits an account once, whatever breaks: debit_once_example INTENTION ACCOUNT AMOUNT
//!
//! INTENTION is a file. It holds the intention from before the first attempt until the answer is known, so that whoever
//! starts this again with the same file carries on, with the same key. The connection is DATABASE_URL's. Prints the answer;
//! where the debit is refused, the status is 1 and the SQLSTATE the last line on standard error.

use std::cell::Cell;
use std::error::Error as _;
use std::fs::{self, File};
use std::io::Write as _;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use backon::{ExponentialBuilder, Retryable as _};
use serde::{Deserialize, Serialize};
use tokio_postgres::{Config, Error, NoTls};

#[derive(Serialize, Deserialize)]
struct Intention {
    key: String,
    account: i64,
    amount: i64,
}

impl Intention {
    /// The intention, and whether an earlier process may have sent it.
    fn load_or_create(file: &Path, account: i64, amount: i64) -> Result<(Self, bool), Box<dyn std::error::Error>> {
        if file.exists() {
            return Ok((serde_json::from_slice(&fs::read(file)?)?, true));
        }
        let intention = Self { key: uuid::Uuid::new_v4().to_string(), account, amount };
        let unfinished = file.with_added_extension("new");
        let mut out = File::create(&unfinished)?;
        out.write_all(&serde_json::to_vec(&intention)?)?;
        out.sync_all()?;
        fs::rename(&unfinished, file)?;
        // The name, too, has to survive.
        File::open(file.canonicalize()?.parent().expect("a file is in a directory"))?.sync_all()?;
        Ok((intention, false))
    }
}

/// Each attempt has a connection and a transaction of its own, committed when the row is here.
async fn attempt(intention: &Intention, cancel: bool) -> Result<Option<String>, Error> {
    let config: Config = std::env::var("DATABASE_URL").unwrap_or_default().parse()?;
    let (client, connection) = config.connect(NoTls).await?;
    tokio::spawn(connection);
    let row = if cancel {
        let sql = "SELECT cancel_request($1, 'debit:v1', $2)::text";
        client.query_one(sql, &[&intention.account, &intention.key]).await?
    } else {
        let sql = "SELECT debit_once($1, $2, $3)::text";
        client.query_one(sql, &[&intention.account, &intention.key, &intention.amount]).await?
    };
    row.try_get(0)
}

fn worth_a_retry(error: &Error) -> bool {
    match error.code().map(|state| state.code()) {
        Some("55P03" | "57014" | "57P01" | "57P02" | "57P03" | "25006") => true,
        Some(state) => matches!(&state[..2], "08" | "40" | "53"),
        // Not from the server: no connection, or none any more. See docs/clients.md.
        None => error.is_closed() || error.source().is_some_and(|source| source.is::<std::io::Error>()),
    }
}

async fn until_definite(intention: &Intention, cancel: bool, retries: &Cell<u32>) -> Result<Option<String>, Error> {
    let pauses = ExponentialBuilder::new()
        .with_min_delay(Duration::from_millis(50))
        .with_max_delay(Duration::from_secs(5))
        .with_jitter()
        .without_max_times();
    (|| attempt(intention, cancel))
        .retry(pauses)
        .when(worth_a_retry)
        .notify(|error, _| {
            retries.set(retries.get() + 1);
            eprintln!("retry: {error}");
        })
        .await
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<ExitCode, Box<dyn std::error::Error>> {
    let arguments: Vec<_> = std::env::args().collect();
    let [_, file, account, amount] = arguments.as_slice() else { return Err("INTENTION ACCOUNT AMOUNT".into()) };
    let file = Path::new(file);
    let (intention, sent_before) = Intention::load_or_create(file, account.parse()?, amount.parse()?)?;
    let retries = Cell::new(0);
    let answer = match until_definite(&intention, false, &retries).await {
        // An attempt that was not answered may still be under way, and execute once there is money. Now it cannot.
        Err(error)
            if error.code().is_some_and(|state| state.code() == "P0001") && (sent_before || retries.get() > 0) =>
        {
            until_definite(&intention, true, &retries).await?.ok_or("P0001".to_owned())
        }
        Err(error) => match error.code().map(|state| state.code()) {
            Some(state @ ("P0001" | "22023" | "23503")) => Err(state.to_owned()),
            // Not an answer: the intention stays, for when the fault is mended.
            _ => return Err(error.into()),
        },
        Ok(answer) => Ok(answer.expect("debit_once answers")),
    };
    match &answer {
        Ok(answer) => println!("{answer}"),
        Err(refusal) => eprintln!("{refusal}"),
    }
    // Only now, when the answer is where it belongs.
    fs::remove_file(file)?;
    Ok(ExitCode::from(u8::from(answer.is_err())))
}
