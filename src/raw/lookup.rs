//! Looking up the record of a request by its key, past the executor: the commonest thing that the extension does, and all
//! that a replay does.
//!
//! Measured on PostgreSQL 18 (see `docs/design.md`): most of a replay's time was the executor's start and end. Where row
//! security is on for the table, or the table or its primary key is not as it was created, [`Lookup::Unable`] sends the
//! caller to the statement.

use std::ffi::CStr;

use pgrx::datum::TimestampWithTimeZone;
use pgrx::prelude::*;

use super::scan::{Index, Key, PrimaryKey, Row, are_as_known, column, read_first};
use super::{Jsonb, Text};
use crate::error::Error;

/// The columns of `request_result`.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Columns {
    /// Account, operation and key, in the order of the primary key.
    pub(super) identity: [i16; 3],
    pub(super) request: i16,
    pub(super) response: i16,
    pub(super) created_at: i16,
    pub(super) fingerprint: i16,
    pub(super) cancelled: i16,
}

impl Columns {
    /// Of this table; `None` for one of a version that lacks some.
    pub(super) fn of(table: pg_sys::Oid) -> Option<Self> {
        let find = |name: &CStr, of_type| column(table, name, of_type).ok();
        Some(Self {
            identity: [
                find(c"account_id", pg_sys::INT8OID)?,
                find(c"operation", pg_sys::TEXTOID)?,
                find(c"request_key", pg_sys::TEXTOID)?,
            ],
            request: find(c"request", pg_sys::JSONBOID)?,
            response: find(c"response", pg_sys::JSONBOID)?,
            created_at: find(c"created_at", pg_sys::TIMESTAMPTZOID)?,
            fingerprint: find(c"request_fingerprint", pg_sys::BYTEAOID)?,
            cancelled: find(c"cancelled", pg_sys::BOOLOID)?,
        })
    }
}

impl Columns {
    /// Whether these are still the columns of the relation.
    ///
    /// # Safety
    /// The relation is open and locked.
    pub(super) unsafe fn are_of(&self, relation: pg_sys::Relation) -> bool {
        let [account_id, operation, request_key] = self.identity;
        let columns = [
            (account_id, c"account_id", pg_sys::INT8OID),
            (operation, c"operation", pg_sys::TEXTOID),
            (request_key, c"request_key", pg_sys::TEXTOID),
            (self.request, c"request", pg_sys::JSONBOID),
            (self.response, c"response", pg_sys::JSONBOID),
            (self.created_at, c"created_at", pg_sys::TIMESTAMPTZOID),
            (self.fingerprint, c"request_fingerprint", pg_sys::BYTEAOID),
            (self.cancelled, c"cancelled", pg_sys::BOOLOID),
        ];
        // SAFETY: our caller promises the relation.
        unsafe { are_as_known((*relation).rd_att, &columns) }
    }
}

/// What is saved of a request.
pub struct Saved {
    /// The saved response, in the memory of the caller.
    pub response: Jsonb,
    /// When it was executed.
    pub created_at: TimestampWithTimeZone,
    /// Whether the saved request is the one that is asked for.
    pub same: bool,
    /// The fingerprint, where that is all that was saved of the request.
    pub fingerprint: Option<Vec<u8>>,
    /// Whether it was cancelled.
    pub cancelled: bool,
}

/// What a look-up found.
pub enum Lookup {
    /// The record.
    Found(Saved),
    /// That there is none.
    Nothing,
    /// That the statement has to be asked.
    Unable,
}

/// Looks up the record with a fresh snapshot at READ COMMITTED, as a statement would. SPI must not be connected, whose memory
/// the response would go with.
pub fn find_saved(
    table: pg_sys::Oid,
    columns: &Columns,
    account: i64,
    operation: &str,
    key: Text,
    request: Jsonb,
) -> Result<Lookup, Error> {
    let [account_id, operation_column, request_key] = columns.identity;
    let keys = [
        Key::of_type(account_id, pg_sys::INT8OID, pg_sys::F_INT8EQ, account.into()),
        Key::text(operation_column, operation.as_bytes())?,
        Key::of_type(request_key, pg_sys::TEXTOID, pg_sys::F_TEXTEQ, key.0),
    ];
    // SAFETY: the order of calls is the server's own for a snapshot of a statement within a transaction: what this transaction
    // did so far becomes visible, and at READ COMMITTED what others committed. The relation is open and locked meanwhile, and
    // whatever is taken from the row is copied. After an error the server closes and lets go all.
    unsafe {
        let relation = pg_sys::try_relation_open(table, pg_sys::AccessShareLock as i32);
        if relation.is_null() {
            return Ok(Lookup::Unable);
        }
        let mut found = Lookup::Unable;
        if let Some(index) = usable_index(relation, &keys).filter(|_| columns.are_of(relation)) {
            pg_sys::CommandCounterIncrement();
            let snapshot = pg_sys::RegisterSnapshot(pg_sys::GetTransactionSnapshot());
            found = match read_first(relation, &Index::Opened(&index), snapshot, &keys, |row| {
                read(row, columns, request)
            }) {
                Some(Some(found)) => found,
                // A table that holds nothing may be distributed, as Citus does it: its rows are elsewhere then.
                Some(None) if has_pages(relation) => Lookup::Nothing,
                Some(None) | None => Lookup::Unable,
            };
            pg_sys::UnregisterSnapshot(snapshot);
        }
        pg_sys::relation_close(relation, pg_sys::AccessShareLock as i32);
        Ok(found)
    }
}

/// Whether the table has room for a row at all.
///
/// # Safety
/// The relation is open.
unsafe fn has_pages(relation: pg_sys::Relation) -> bool {
    // SAFETY: our caller promises the relation.
    unsafe { pg_sys::RelationGetNumberOfBlocksInFork(relation, pg_sys::ForkNumber::MAIN_FORKNUM) > 0 }
}

/// The primary key, if the table and it are what they were created as, and nobody asked for row security.
///
/// # Safety
/// The relation is open and locked.
unsafe fn usable_index(relation: pg_sys::Relation, keys: &[Key]) -> Option<PrimaryKey> {
    // SAFETY: our caller promises the relation.
    unsafe {
        let class = &*(*relation).rd_rel;
        if class.relrowsecurity || class.relkind as u8 != pg_sys::RELKIND_RELATION {
            return None;
        }
        PrimaryKey::open(relation, keys)
    }
}

/// The record in a row, or [`Lookup::Unable`] if a column has another type.
fn read(row: &Row, columns: &Columns, request: Jsonb) -> Lookup {
    let saved = || {
        let saved_request = row.jsonb(columns.request)?;
        // SAFETY: two jsonb, neither NULL.
        let same = unsafe {
            pgrx::direct_function_call(pg_sys::jsonb_eq, &[Some(saved_request), Some(request.0)]).unwrap_or(false)
        };
        Some(Saved {
            response: row.copied_jsonb(columns.response)?,
            created_at: row.get(columns.created_at)?,
            same,
            fingerprint: row.get(columns.fingerprint),
            cancelled: row.get(columns.cancelled)?,
        })
    };
    saved().map_or(Lookup::Unable, Lookup::Found)
}
