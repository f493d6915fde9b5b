//! Every function that SQL can call. Each hands over to the file of its subject in a line or two; the comment on each
//! SQL function stands in `sql/privileges.sql`, beside who may call it.
#![allow(clippy::result_large_err, reason = "pgrx keeps SQLSTATE, DETAIL and HINT of an unboxed ErrorReport alone")]

use pgrx::datum::Interval;
use pgrx::pg_sys::panic::ErrorReport;
use pgrx::prelude::*;

use crate::raw::{Jsonb, Text};
use crate::{debit, purge};

/// Debits an account once for each key.
///
/// Takes the account, the client's key (1 to 255 bytes, compared byte for byte) and the amount in integer units of
/// money. Returns `{"balance": n}`, the balance after this debit; a repeat returns the same bytes and writes nothing.
///
/// # Errors
/// 22023 for a NULL account, a NULL, empty or too long key, a NULL or non-positive amount, or a key that was used with
/// another amount; 23503 for an unknown account; P0001 for an insufficient balance; 40001 when only a new transaction
/// can tell. None of them leaves anything behind.
#[pg_extern(volatile, parallel_unsafe)]
fn debit_once(p_account: Option<i64>, p_key: Option<Text>, p_amount: Option<i64>) -> Result<Jsonb, ErrorReport> {
    Ok(debit::debit_once(p_account, p_key, p_amount)?)
}

/// Deletes the records of `request_result` that are older than `p_retention` and returns how many it deleted.
///
/// # Errors
/// 22023 for a NULL or negative retention.
#[pg_extern(volatile, parallel_unsafe)]
fn purge_expired_keys(p_retention: Option<Interval>) -> Result<i64, ErrorReport> {
    Ok(purge::purge_expired_keys(p_retention)?)
}
