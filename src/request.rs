//! A client's request: its identity, its record, and the one comparison. A stored response that answers a request leaves
//! through [`replay`] alone.

use std::cell::RefCell;

use pgrx::datetime::clock_timestamp;
use pgrx::datum::{DatumWithOid, TimestampWithTimeZone};
use pgrx::prelude::*;
use pgrx::spi::{Spi, SpiClient};

use crate::error::Error;
use crate::fence::{FirstSent, Subject};
use crate::fingerprint;
use crate::policy::Policy;
use crate::raw::{self, Claimed, Jsonb, Lookup, Rows, Saved, Text};
use crate::{account, once, setting, statement};

/// Where requests are recorded.
pub const TABLE: &str = "request_result";
/// The longest operation, in bytes: as long as an identifier of PostgreSQL.
const OPERATION_BYTES: usize = 63;
/// The longest key, in bytes: every index entry stays far below a B-tree's limit, also for incompressible text.
pub const KEY_BYTES: usize = 255;

/// Account, operation and key: what identifies one intention.
#[derive(Clone, Copy)]
pub struct Identity<'a> {
    /// The account, first part of the scope.
    pub account: i64,
    /// The named and versioned contract, such as `debit:v1`, second part of the scope.
    pub operation: &'a str,
    /// The client's key.
    pub key: Text,
}

/// An identity and what is asked for.
#[derive(Clone, Copy)]
pub struct Request<'a> {
    /// Under which name it is recorded.
    pub identity: Identity<'a>,
    /// The normalized business parameters.
    pub parameters: Jsonb,
}

/// What a record keeps of a request: the request, or its fingerprint and the JSON null.
pub struct Stored {
    /// The request, or null.
    pub request: Jsonb,
    /// The fingerprint of the request, if that is stored instead.
    pub fingerprint: Option<Vec<u8>>,
}

/// An answer, and whether it was stored before.
pub struct Outcome {
    /// What the first execution answered.
    pub response: Jsonb,
    /// Whether this call found it stored.
    pub replayed: bool,
    /// When it was executed, by the database's clock.
    pub executed_at: TimestampWithTimeZone,
    /// Whether there is a record, which a call without a key does not leave.
    recorded: bool,
}

/// What is particular to an operation.
pub trait Operation {
    /// As [`once::Once::claim`]. May find the request answered meanwhile, and then replays.
    fn execute(&self, connected: &SpiClient<'_>, request: &Request<'_>) -> Result<Option<Outcome>, Error>;

    /// As [`once::Once::claim_first`].
    fn execute_first(&self, _request: &Request<'_>) -> Result<Option<Outcome>, Error> {
        Ok(None)
    }

    /// As [`once::Once::refuse`].
    fn refuse(&self, connected: &SpiClient<'_>, request: &Request<'_>) -> Result<Option<Outcome>, Error>;

    /// Makes the effect without a record, for a client that sends no key yet.
    fn execute_unprotected(&self, connected: &SpiClient<'_>, account: i64) -> Result<Jsonb, Error>;
}

/// Executes an operation once for its key, or, with no key, every time.
pub fn execute_once(
    account: i64,
    operation_name: &str,
    key: Option<Text>,
    first_sent: Option<TimestampWithTimeZone>,
    parameters: Jsonb,
    operation: &impl Operation,
) -> Result<Outcome, Error> {
    let Some(key) = key else {
        return execute_unprotected(account, operation);
    };
    let identity = Identity { account, operation: operation_name, key };
    identity.check_not_in_flight()?;
    let first_sent = FirstSent::of_key(key, first_sent);
    once::once(&Requested { request: Request { identity, parameters }, first_sent, operation })
}

/// Tells a client that sent no key what it does without.
pub fn warn_unprotected() {
    ereport!(
        PgLogLevel::WARNING,
        PgSqlErrorCode::ERRCODE_WARNING,
        "no key: this call has no retry protection",
        "A repeat of this call is executed again."
    );
}

fn execute_unprotected(account: i64, operation: &impl Operation) -> Result<Outcome, Error> {
    warn_unprotected();
    let response = Spi::connect(|connected| {
        account::check_visible(connected, account)?;
        operation.execute_unprotected(connected, account)
    })?;
    Ok(Outcome { response, replayed: false, executed_at: clock_timestamp(), recorded: false })
}

/// The columns of a record, in their order.
pub type Record = (i64, Text, Text, Jsonb, Jsonb, TimestampWithTimeZone, Option<Vec<u8>>, bool);

/// The record of a request, for whoever may see records. See [`crate::api`].
pub fn find_record(account: Option<i64>, operation: Option<Text>, key: Option<Text>) -> Result<Option<Record>, Error> {
    let (Some(account), Some(operation), Some(key)) = (account, operation, key) else {
        return Ok(None);
    };
    Spi::connect(|connected| {
        account::check_visible(connected, account)?;
        let found = statement::FIND_RECORD.run(connected, &[account.into(), operation.into(), key.into()])?;
        let (Some(request), Some(response), Some(created_at)) = (found.first(1)?, found.first(2)?, found.first(3)?)
        else {
            return Ok(None);
        };
        let cancelled = found.first::<bool>(5)? == Some(true);
        Ok(Some((account, operation, key, request, response, created_at, found.first(4)?, cancelled)))
    })
}

/// What the first five columns of a row say of a record; `None` without such a row.
pub fn saved(found: &Rows<'_>, row: usize) -> Result<Option<Saved>, Error> {
    let (Some(response), Some(created_at)) = (found.get(row, 1)?, found.get(row, 2)?) else {
        return Ok(None);
    };
    Ok(Some(Saved {
        response,
        created_at,
        same: found.get::<bool>(row, 3)? == Some(true),
        cancelled: found.get::<bool>(row, 4)? == Some(true),
        fingerprint: found.get(row, 5)?,
    }))
}

/// The stored response, if the request, whose parameters can be had as JSON, was not cancelled and is the same.
pub fn replay(saved: Saved, parameters: impl FnOnce() -> Result<String, Error>) -> Result<Outcome, Error> {
    if saved.cancelled {
        return Err(Error::Cancelled);
    }
    check_same(match saved.fingerprint {
        None => saved.same,
        Some(fingerprint) => fingerprint::matches_json(&fingerprint, &parameters()?)?,
    })?;
    Ok(Outcome { response: saved.response, replayed: true, executed_at: saved.created_at, recorded: true })
}

/// Refuses a known key with another request.
pub fn check_same(same: bool) -> Result<(), Error> {
    if same { Ok(()) } else { Err(Error::KeyReused(String::new())) }
}

struct Requested<'a, O> {
    request: Request<'a>,
    first_sent: Option<FirstSent>,
    operation: &'a O,
}

impl<O: Operation> once::Once for Requested<'_, O> {
    type Answer = Outcome;

    fn find(&self, connected: &SpiClient<'_>) -> Result<Option<Outcome>, Error> {
        self.request.find(connected)
    }

    fn find_first(&self) -> Result<Option<Option<Outcome>>, Error> {
        self.request.find_first()
    }

    fn claim(&self, connected: &SpiClient<'_>) -> Result<Option<Outcome>, Error> {
        self.operation.execute(connected, &self.request)
    }

    fn claim_first(&self) -> Result<Option<Outcome>, Error> {
        self.operation.execute_first(&self.request)
    }

    fn refuse(&self, connected: &SpiClient<'_>) -> Result<Option<Outcome>, Error> {
        self.operation.refuse(connected, &self.request)
    }

    fn check_age(&self) -> Result<(), Error> {
        self.first_sent.map_or(Ok(()), |date| date.check(Subject::Operation(self.request.identity.operation)))
    }

    fn is_repeat(answer: &Outcome) -> bool {
        answer.replayed
    }

    fn place(&self) -> (i64, &'static str) {
        (self.request.identity.account, TABLE)
    }
}

/// A key of 1 to [`KEY_BYTES`] bytes. `None` for a NULL key where `idempotency_record.require_key` is off; else a NULL or
/// empty key is the error `required`.
pub fn accept_key(key: Option<Text>, required: Error) -> Result<Option<Text>, Error> {
    match key {
        None if setting::require_key() => Err(required),
        None => Ok(None),
        Some(key) => accept_name("key", key, required).map(Some),
    }
}

/// A text of 1 to [`KEY_BYTES`] bytes, such as a key or a subscriber.
pub fn accept_name(what: &'static str, name: Text, required: Error) -> Result<Text, Error> {
    match name.octet_length() {
        0 => Err(required),
        bytes if bytes > KEY_BYTES => Err(Error::TooLong(what, bytes)),
        _ => Ok(name),
    }
}

/// The name of an operation, `name:vN` of at most [`OPERATION_BYTES`] bytes.
pub fn accept_operation(operation: Option<Text>) -> Result<String, Error> {
    let operation =
        operation.filter(|operation| operation.octet_length() <= OPERATION_BYTES).ok_or(Error::Operation)?;
    let name = String::from_utf8(operation.to_bytes()).map_err(|_| Error::Operation)?;
    if is_operation(&name) { Ok(name) } else { Err(Error::Operation) }
}

fn is_operation(name: &str) -> bool {
    let Some((name, version)) = name.rsplit_once(":v") else {
        return false;
    };
    let of_name = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
    !name.is_empty()
        && name.chars().all(of_name)
        && version.starts_with(|c: char| matches!(c, '1'..='9'))
        && version.chars().all(|c| c.is_ascii_digit())
}

impl Identity<'_> {
    /// The three values that every statement on the record begins with.
    pub fn arguments<'d>(&self) -> [DatumWithOid<'d>; 3] {
        [self.account.into(), self.operation.into(), self.key.into()]
    }

    /// Refuses a request whose own execution calls it again: waiting for oneself would never end.
    pub fn check_not_in_flight(&self) -> Result<(), Error> {
        IN_FLIGHT.with_borrow(|executing| {
            if !executing.is_empty() && executing.contains(&self.owned()) { Err(Error::Reentered) } else { Ok(()) }
        })
    }

    /// Why a record could not be saved although the account was locked and the key free.
    pub fn not_saved(&self, connected: &SpiClient<'_>) -> Result<Error, Error> {
        let writer = statement::FIND_WRITER.run(connected, &self.arguments())?;
        Ok(match writer.first::<pg_sys::TransactionId>(1)? {
            None => Error::WriteSuppressed(TABLE),
            Some(writer) if raw::is_current_transaction(writer) => Error::Reentered,
            Some(_) => Error::RecordedMeanwhile,
        })
    }

    fn owned(&self) -> (i64, String, Vec<u8>) {
        (self.account, self.operation.to_owned(), self.key.to_bytes())
    }
}

thread_local! {
    /// The requests whose handlers this session is running, innermost last.
    static IN_FLIGHT: RefCell<Vec<(i64, String, Vec<u8>)>> = const { RefCell::new(Vec::new()) };
}

/// While it lives, the request counts as in flight in this session.
pub struct InFlight;

impl InFlight {
    /// Begins the execution of a request whose handler may call us.
    pub fn begin(identity: Identity<'_>) -> Self {
        IN_FLIGHT.with_borrow_mut(|executing| executing.push(identity.owned()));
        Self
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        IN_FLIGHT.with_borrow_mut(|executing| executing.pop());
    }
}

impl Request<'_> {
    fn arguments<'d>(&self) -> [DatumWithOid<'d>; 4] {
        let [account, operation, key] = self.identity.arguments();
        [account, operation, key, self.parameters.into()]
    }

    /// What is stored of the request, which is for its policy to say.
    pub fn stored(&self, policy: &Policy) -> Result<Stored, Error> {
        Ok(if policy.stores_fingerprint() {
            Stored { request: Jsonb::from_serialize(&())?, fingerprint: Some(fingerprint::of(self.parameters)?) }
        } else {
            Stored { request: self.parameters, fingerprint: None }
        })
    }

    /// The six values of a claim; the last is the statement's own.
    pub fn claim<'d>(&self, stored: Stored, last: impl Into<DatumWithOid<'d>>) -> [DatumWithOid<'d>; 6] {
        let [account, operation, key] = self.identity.arguments();
        [account, operation, key, stored.request.into(), stored.fingerprint.into(), last.into()]
    }

    /// The stored response, if the key is known, was not cancelled, and came with the same request.
    pub fn find(&self, connected: &SpiClient<'_>) -> Result<Option<Outcome>, Error> {
        let found = statement::FIND.run(connected, &self.arguments())?;
        saved(&found, 0)?.map(|saved| self.replay(saved)).transpose()
    }

    /// As [`Self::find`], without a connection to SPI; `None` where that has to be asked.
    pub fn find_first(&self) -> Result<Option<Option<Outcome>>, Error> {
        let Identity { account, operation, key } = self.identity;
        let Some((table, columns)) = statement::request_table()? else {
            return Ok(None);
        };
        Ok(match raw::find_saved(table, &columns, account, operation, key, self.parameters)? {
            Lookup::Found(saved) => Some(Some(self.replay(saved)?)),
            Lookup::Nothing => Some(None),
            Lookup::Unable => None,
        })
    }

    /// As [`replay`], and a mismatch tells what differs.
    fn replay(&self, saved: Saved) -> Result<Outcome, Error> {
        match replay(saved, || fingerprint::json(self.parameters)) {
            Err(Error::KeyReused(_)) => Err(Spi::connect(|connected| self.mismatch(connected))?),
            outcome => outcome,
        }
    }

    /// The refusal of a known key with another request.
    fn mismatch(&self, connected: &SpiClient<'_>) -> Result<Error, Error> {
        let difference = statement::FIND_DIFFERENCE.run(connected, &self.arguments())?;
        let mut fields: Vec<String> = difference.first::<Text>(1)?.map(Text::to_message).into_iter().collect();
        if difference.first::<bool>(2)? == Some(true) {
            fields.push("fields that were not sent".into());
        }
        Ok(Error::KeyReused(fields.join(", ")))
    }
}

impl Outcome {
    /// From what was claimed past the executor.
    pub fn of_record(claimed: Claimed) -> Self {
        Self { response: claimed.response, replayed: false, executed_at: claimed.created_at, recorded: true }
    }

    /// From what a claim returned; `None` without a row. Its third column says whether the record is the one that was
    /// claimed: under a key that a trigger rewrote, a repeat would not be found.
    pub fn of_claim(claimed: &Rows<'_>) -> Result<Option<Self>, Error> {
        if !claimed.is_empty() && claimed.first::<bool>(3)? != Some(true) {
            return Err(Error::WriteSuppressed(TABLE));
        }
        let (Some(response), Some(executed_at)) = (claimed.first(1)?, claimed.first(2)?) else {
            return Ok(None);
        };
        Ok(Some(Self { response, replayed: false, executed_at, recorded: true }))
    }

    /// When the record may be purged; `None` without one.
    pub fn expires_at(&self, operation: &str) -> Result<Option<TimestampWithTimeZone>, Error> {
        if !self.recorded {
            return Ok(None);
        }
        Ok(Some(Policy::of(operation)?.expiry(self.executed_at)))
    }
}

#[cfg(test)]
mod tests {
    use super::is_operation;

    #[test]
    fn an_operation_is_a_name_and_a_version() {
        for good in ["debit:v1", "a:v10", "Order-Paid_2.x:v3", "a.b:v9"] {
            assert!(is_operation(good), "{good}");
        }
        for bad in
            ["", "debit", ":v1", "debit:v", "debit:v0", "debit:v01", "debit:1", "a b:v1", "a:v1:v2", "é:v1", "a:v1 "]
        {
            assert!(!is_operation(bad), "{bad}");
        }
    }
}
