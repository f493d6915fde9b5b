//! Every function that SQL can call, each handing over to the file of its subject in a line. Who may call a function, and
//! its comment in SQL, stands in `sql/privileges.sql`; all errors are in [`crate::error`].
#![allow(clippy::result_large_err, reason = "pgrx keeps SQLSTATE, DETAIL and HINT of an unboxed ErrorReport alone")]
#![allow(clippy::type_complexity, reason = "the macro reads the columns of a row out of the signature")]

use pgrx::Uuid;
use pgrx::datum::{Interval, TimestampWithTimeZone};
use pgrx::iter::{SetOfIterator, TableIterator};
use pgrx::pg_sys::panic::ErrorReport;
use pgrx::prelude::*;

use crate::error::Error;
use crate::raw::{self, Call, Int8Array, Jsonb, JsonbArray, Procedure, Row, Text, TextArray, UuidArray};
use crate::request::Outcome;
use crate::{balance, batch, cancel, fingerprint, keep, message, purge, request, run, setting, worker};

/// Debits an account once for each key.
///
/// Takes the account, the client's key (1 to 255 bytes, compared byte for byte) and the amount in integer units of
/// money. Returns `{"balance": n}`, the balance after this debit; a repeat returns the same bytes and writes nothing.
///
/// # Errors
/// 22023 for a NULL account, a NULL, empty or too long key, a NULL or non-positive amount, or a key that was cancelled or
/// used with another amount; 23503 for an unknown account; P0001 for an insufficient balance; 40001 when only a new
/// transaction can tell. None of them leaves anything behind.
#[pg_extern(volatile, parallel_unsafe)]
fn debit_once(p_account: Option<i64>, p_key: Option<Text>, p_amount: Option<i64>) -> Result<Jsonb, ErrorReport> {
    Ok(balance::debit(p_account, p_key, p_amount, None)?.response)
}

/// Credits an account once for each key; as [`debit_once`], and 22003 for a balance that does not fit a bigint.
#[pg_extern(volatile, parallel_unsafe)]
fn credit_once(p_account: Option<i64>, p_key: Option<Text>, p_amount: Option<i64>) -> Result<Jsonb, ErrorReport> {
    Ok(balance::credit(p_account, p_key, p_amount, None)?.response)
}

/// A function that returns a row for each element of a batch, as `outcome` below.
macro_rules! batch {
    ($(#[$attribute:meta])* fn $function:ident $arguments:tt -> $body:expr) => {
        $(#[$attribute])*
        fn $function $arguments -> Result<
            TableIterator<
                'static,
                (
                    name!(ordinal, i64),
                    name!(response, Option<Jsonb>),
                    name!(replayed, bool),
                    name!(sqlstate, Option<String>),
                    name!(message, Option<String>),
                ),
            >,
            ErrorReport,
        > {
            Ok(TableIterator::new($body?))
        }
    };
}

batch! {
    /// Debits once for each key, as [`debit_once`] would one after the other: a row for each element, in their order, with the
    /// response, or with SQLSTATE and message of what it alone is refused for.
    ///
    /// # Errors
    /// 22023 for arrays that are NULL, of unequal length or of more than one dimension; 54000 for more than 100,000 elements;
    /// 40001 when only a new transaction can tell; what the server raises. None of them leaves anything behind.
    #[pg_extern(volatile, parallel_unsafe)]
    fn debit_batch_once(
        p_accounts: Option<Int8Array>,
        p_keys: Option<TextArray>,
        p_amounts: Option<Int8Array>,
    ) -> batch::debit(p_accounts, p_keys, p_amounts)
}

batch! {
    /// Credits once for each key, as [`debit_batch_once`] debits.
    #[pg_extern(volatile, parallel_unsafe)]
    fn credit_batch_once(
        p_accounts: Option<Int8Array>,
        p_keys: Option<TextArray>,
        p_amounts: Option<Int8Array>,
    ) -> batch::credit(p_accounts, p_keys, p_amounts)
}

/// Runs a handler `(bigint, jsonb) RETURNS jsonb` once for each key, with the caller's own rights, and returns what it
/// returned; a repeat gets the same and does not run it.
///
/// # Errors
/// 22023 as [`debit_once`], for a NULL request or handler, an operation that is not `name:vN` or is built in, and a request
/// that is executed inside its own handler; 42883 for a handler with another signature; 42501 for one that the caller may
/// not execute; 22004 for one that returns NULL; 23503 for an unknown account. None of them leaves anything behind.
#[pg_extern(volatile, parallel_unsafe)]
fn run_once(
    p_account: Option<i64>,
    p_operation: Option<Text>,
    p_key: Option<Text>,
    p_request: Option<Jsonb>,
    p_handler: Option<Procedure>,
) -> Result<Jsonb, ErrorReport> {
    Ok(run::run(p_account, p_operation, p_key, p_request, p_handler, None)?.1.response)
}

/// A function that returns the one row of an outcome: the macro `pg_extern` reads the columns out of its signature. The
/// arguments pass as one token, since `pg_extern` does not recognize an `Option` that was matched as a type.
macro_rules! outcome {
    ($(#[$attribute:meta])* fn $function:ident $arguments:tt -> $body:expr) => {
        $(#[$attribute])*
        fn $function $arguments -> Result<
            TableIterator<
                'static,
                (
                    name!(response, Jsonb),
                    name!(replayed, bool),
                    name!(executed_at, TimestampWithTimeZone),
                    name!(expires_at, Option<TimestampWithTimeZone>),
                ),
            >,
            ErrorReport,
        > {
            let (operation, outcome) = $body;
            row(operation.as_ref(), outcome)
        }
    };
}

outcome! {
    /// As [`debit_once`], and says whether it was a replay, when it was executed and when the record may be purged.
    #[pg_extern(volatile, parallel_unsafe)]
    fn debit_once_outcome(p_account: Option<i64>, p_key: Option<Text>, p_amount: Option<i64>) ->
        (balance::DEBIT, balance::debit(p_account, p_key, p_amount, None)?)
}

outcome! {
    /// As [`credit_once`], and says whether it was a replay, when it was executed and when the record may be purged.
    #[pg_extern(volatile, parallel_unsafe)]
    fn credit_once_outcome(p_account: Option<i64>, p_key: Option<Text>, p_amount: Option<i64>) ->
        (balance::CREDIT, balance::credit(p_account, p_key, p_amount, None)?)
}

outcome! {
    /// As [`run_once`], and says whether it was a replay, when it was executed and when the record may be purged.
    #[pg_extern(volatile, parallel_unsafe)]
    fn run_once_outcome(
        p_account: Option<i64>,
        p_operation: Option<Text>,
        p_key: Option<Text>,
        p_request: Option<Jsonb>,
        p_handler: Option<Procedure>,
    ) -> run::run(p_account, p_operation, p_key, p_request, p_handler, None)?
}

/// As [`debit_once`], for a client that says when, by its own clock, it sent the request for the first time: if there is no
/// record, and records as old as that have been purged, the call is refused.
///
/// # Errors
/// As [`debit_once`]; 22023 for a date at or before the last purge's cutoff, or in the future, in either case by
/// `idempotency_record.clock_skew`. NULL is no date.
#[pg_extern(name = "debit_once", volatile, parallel_unsafe)]
fn debit_dated_once(
    p_account: Option<i64>,
    p_key: Option<Text>,
    p_amount: Option<i64>,
    p_first_sent: Option<TimestampWithTimeZone>,
) -> Result<Jsonb, ErrorReport> {
    Ok(balance::debit(p_account, p_key, p_amount, p_first_sent)?.response)
}

/// As [`credit_once`], with a date as in [`debit_dated_once`].
#[pg_extern(name = "credit_once", volatile, parallel_unsafe)]
fn credit_dated_once(
    p_account: Option<i64>,
    p_key: Option<Text>,
    p_amount: Option<i64>,
    p_first_sent: Option<TimestampWithTimeZone>,
) -> Result<Jsonb, ErrorReport> {
    Ok(balance::credit(p_account, p_key, p_amount, p_first_sent)?.response)
}

/// As [`run_once`], with a date as in [`debit_dated_once`].
#[pg_extern(name = "run_once", volatile, parallel_unsafe)]
fn run_dated_once(
    p_account: Option<i64>,
    p_operation: Option<Text>,
    p_key: Option<Text>,
    p_request: Option<Jsonb>,
    p_handler: Option<Procedure>,
    p_first_sent: Option<TimestampWithTimeZone>,
) -> Result<Jsonb, ErrorReport> {
    Ok(run::run(p_account, p_operation, p_key, p_request, p_handler, p_first_sent)?.1.response)
}

outcome! {
    /// As [`debit_once_outcome`], with a date as in [`debit_dated_once`].
    #[pg_extern(name = "debit_once_outcome", volatile, parallel_unsafe)]
    fn debit_dated_once_outcome(
        p_account: Option<i64>,
        p_key: Option<Text>,
        p_amount: Option<i64>,
        p_first_sent: Option<TimestampWithTimeZone>,
    ) -> (balance::DEBIT, balance::debit(p_account, p_key, p_amount, p_first_sent)?)
}

outcome! {
    /// As [`credit_once_outcome`], with a date as in [`debit_dated_once`].
    #[pg_extern(name = "credit_once_outcome", volatile, parallel_unsafe)]
    fn credit_dated_once_outcome(
        p_account: Option<i64>,
        p_key: Option<Text>,
        p_amount: Option<i64>,
        p_first_sent: Option<TimestampWithTimeZone>,
    ) -> (balance::CREDIT, balance::credit(p_account, p_key, p_amount, p_first_sent)?)
}

outcome! {
    /// As [`run_once_outcome`], with a date as in [`debit_dated_once`].
    #[pg_extern(name = "run_once_outcome", volatile, parallel_unsafe)]
    fn run_dated_once_outcome(
        p_account: Option<i64>,
        p_operation: Option<Text>,
        p_key: Option<Text>,
        p_request: Option<Jsonb>,
        p_handler: Option<Procedure>,
        p_first_sent: Option<TimestampWithTimeZone>,
    ) -> run::run(p_account, p_operation, p_key, p_request, p_handler, p_first_sent)?
}

/// The one row of an outcome function.
fn row<'a>(operation: &str, outcome: Outcome) -> Result<TableIterator<'a, OutcomeRow>, ErrorReport> {
    let expires_at = outcome.expires_at(operation)?;
    Ok(TableIterator::once((outcome.response, outcome.replayed, outcome.executed_at, expires_at)))
}

type OutcomeRow = (Jsonb, bool, TimestampWithTimeZone, Option<TimestampWithTimeZone>);

/// The record of a request, or no row. Reads only; a NULL argument finds nothing.
///
/// # Errors
/// 42501 for an account that row security does not let the caller see.
#[pg_extern(stable, parallel_unsafe)]
fn find_request(
    p_account: Option<i64>,
    p_operation: Option<Text>,
    p_key: Option<Text>,
) -> Result<
    TableIterator<
        'static,
        (
            name!(account_id, i64),
            name!(operation, Text),
            name!(request_key, Text),
            name!(request, Jsonb),
            name!(response, Jsonb),
            name!(created_at, TimestampWithTimeZone),
            name!(request_fingerprint, Option<Vec<u8>>),
            name!(cancelled, bool),
        ),
    >,
    ErrorReport,
> {
    Ok(TableIterator::new(request::find_record(p_account, p_operation, p_key)?))
}

/// Makes sure that a request never runs, and returns NULL; or returns the saved response if it ran. Waits for an execution
/// in flight.
///
/// # Errors
/// 22023 for a NULL account, a NULL, empty or too long key, or an operation that is not `name:vN`; 23503 for an unknown
/// account.
#[pg_extern(volatile, parallel_unsafe)]
fn cancel_request(
    p_account: Option<i64>,
    p_operation: Option<Text>,
    p_key: Option<Text>,
) -> Result<Option<Jsonb>, ErrorReport> {
    Ok(cancel::cancel(p_account, p_operation, p_key)?)
}

/// The fingerprint of a request or payload: a version byte, and the SHA-256 of its canonical form.
///
/// # Errors
/// 54001 for a value that is nested more than 127 levels deep.
#[pg_extern(immutable, parallel_safe, strict)]
fn request_fingerprint(p_request: Jsonb) -> Result<Vec<u8>, ErrorReport> {
    Ok(fingerprint::of(p_request)?)
}

/// Records a message for a subscriber: true the first time, when the caller makes its effect in the same transaction, and
/// false on a repeat.
///
/// # Errors
/// 22023 for a NULL or empty subscriber, a NULL id or account, and an id that was recorded with another account or payload;
/// 23503 for an unknown account.
#[pg_extern(volatile, parallel_unsafe)]
fn accept_message(
    p_subscriber: Option<Text>,
    p_message_id: Option<Uuid>,
    p_account: Option<i64>,
    p_payload: default!(Option<Jsonb>, "NULL"),
) -> Result<bool, ErrorReport> {
    Ok(message::accept_message(p_subscriber, p_message_id, p_account, p_payload)?)
}

/// Adds `p_delta` integer units to the account once for each message and subscriber, and returns the balance; NULL on a
/// repeat.
///
/// # Errors
/// As [`accept_message`]; 22023 for a NULL or zero delta; P0001 for an insufficient balance; 22003 for a balance that does
/// not fit a bigint.
#[pg_extern(volatile, parallel_unsafe)]
fn apply_message_once(
    p_subscriber: Option<Text>,
    p_message_id: Option<Uuid>,
    p_account: Option<i64>,
    p_delta: Option<i64>,
    p_payload: default!(Option<Jsonb>, "NULL"),
) -> Result<Option<i64>, ErrorReport> {
    Ok(message::apply_message_once(p_subscriber, p_message_id, p_account, p_delta, p_payload)?)
}

/// Records many messages for a subscriber and returns the ids that are new, in the order given; a copy counts once.
///
/// # Errors
/// As [`accept_message`]; 22023 for arrays of unequal length, with more than one dimension, or with NULL.
#[pg_extern(volatile, parallel_unsafe)]
fn accept_messages(
    p_subscriber: Option<Text>,
    p_message_ids: Option<UuidArray>,
    p_account_ids: Option<Int8Array>,
    p_payloads: default!(Option<JsonbArray>, "NULL"),
) -> Result<SetOfIterator<'static, Uuid>, ErrorReport> {
    Ok(SetOfIterator::new(message::accept_messages(p_subscriber, p_message_ids, p_account_ids, p_payloads)?))
}

/// Whether a version is above the highest that the subscriber accepted for the entity; accepts it if so.
///
/// # Errors
/// 22023 for a NULL argument, and an empty or too long subscriber or entity.
#[pg_extern(volatile, parallel_unsafe)]
fn accept_version(
    p_subscriber: Option<Text>,
    p_entity: Option<Text>,
    p_version: Option<i64>,
) -> Result<bool, ErrorReport> {
    Ok(message::accept_version(p_subscriber, p_entity, p_version)?)
}

/// Deletes the records of `request_result` that are older than `p_retention` and returns how many it deleted; 0, with a
/// NOTICE, while another session purges.
///
/// # Errors
/// 22023 for a NULL or negative retention, and one below `idempotency_record.minimum_retention`.
#[pg_extern(volatile, parallel_unsafe)]
fn purge_expired_keys(p_retention: Option<Interval>) -> Result<i64, ErrorReport> {
    Ok(purge::purge_expired_keys(Some(p_retention.ok_or(Error::RetentionRequired)?))?)
}

/// As [`purge_expired_keys`], with the retention of each operation's policy.
#[pg_extern(name = "purge_expired_keys", volatile, parallel_unsafe)]
fn purge_expired_keys_by_policy() -> Result<i64, ErrorReport> {
    Ok(purge::purge_expired_keys(None)?)
}

/// Deletes the records of `processed_message` that are older than `p_retention`, as [`purge_expired_keys`] does.
#[pg_extern(volatile, parallel_unsafe)]
fn purge_processed_messages(p_retention: Option<Interval>) -> Result<i64, ErrorReport> {
    Ok(purge::purge_processed_messages(Some(p_retention.ok_or(Error::RetentionRequired)?))?)
}

/// As [`purge_processed_messages`], with the retention of each subscriber's policy.
#[pg_extern(name = "purge_processed_messages", volatile, parallel_unsafe)]
fn purge_processed_messages_by_policy() -> Result<i64, ErrorReport> {
    Ok(purge::purge_processed_messages(None)?)
}

/// Purges all requests and messages that are older than their retention, in batches of `p_batch_size` records with a commit
/// after each, until `p_time_budget` has passed. Returns how many it deleted, how many expired ones are left, and when the
/// oldest record that is left was made.
///
/// # Errors
/// 22023 for a batch size that is NULL or not from 1 to 1,000,000, a negative budget, and a retention below
/// `idempotency_record.minimum_retention`; 2D000 within a transaction block.
#[pg_extern(sql = r#"
CREATE PROCEDURE purge(
    p_batch_size bigint DEFAULT 1000,
    p_time_budget interval DEFAULT NULL,
    INOUT deleted bigint DEFAULT NULL,
    INOUT remaining bigint DEFAULT NULL,
    INOUT oldest timestamptz DEFAULT NULL
) LANGUAGE c AS 'MODULE_PATHNAME', '@FUNCTION_NAME@';
"#)]
fn purge(
    p_batch_size: Option<i64>,
    p_time_budget: Option<Interval>,
    _deleted: Option<i64>,
    _remaining: Option<i64>,
    _oldest: Option<TimestampWithTimeZone>,
    frame: pg_sys::FunctionCallInfo,
) -> Result<Row, ErrorReport> {
    let call = Call::of(frame);
    if call.is_atomic() {
        return Err(Error::WithinTransaction.into());
    }
    let purged = purge::everything(p_batch_size, p_time_budget, &call)?;
    Ok(call.row([purged.deleted.into_datum(), purged.remaining.into_datum(), purged.oldest.into_datum()])?)
}

/// What is set for the purge of this database: the retention of requests and of messages where no policy declares one, and
/// whether a worker purges it: `on`, or what is missing for that.
#[pg_extern(stable, parallel_safe)]
fn retention_setting()
-> TableIterator<'static, (name!(retention, Interval), name!(message_retention, Interval), name!(worker, &'static str))>
{
    TableIterator::once((setting::retention(), setting::message_retention(), worker::state()))
}

/// The trigger on `request_result` and `processed_message` that keeps records as they are.
///
/// # Errors
/// 23001 for an UPDATE, a TRUNCATE, and a DELETE of a record whose retention has not passed; 0A000 where it is called otherwise.
// Not by the macro for triggers, which makes an internal error of every error.
#[pg_extern(sql = r#"
CREATE FUNCTION keep_record() RETURNS trigger LANGUAGE c AS 'MODULE_PATHNAME', '@FUNCTION_NAME@';
"#)]
fn keep_record(frame: pg_sys::FunctionCallInfo) -> Result<Row, ErrorReport> {
    Ok(keep::keep(&raw::trigger(frame)?)?)
}
