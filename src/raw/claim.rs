//! Taking a key and making its effect past the executor: what `CLAIM` and `CHANGE_CLAIMED_BALANCE` in `src/statement.rs` do, for
//! tables to which nobody has added what only the executor knows.
//!
//! Measured on PostgreSQL 18 (see `docs/performance.md`): of the time of a fresh call a third was the start and the end of two
//! statements. What is called here is what the server's own logical replication applies changes with: it takes care of
//! constraints, indexes, foreign keys and generated columns. Whatever else can be asked of a table ([`is_plain`]), and whatever
//! would have to wait, is left to the statements.

use core::ptr;

use pgrx::datum::TimestampWithTimeZone;
use pgrx::prelude::*;

use super::lookup::Columns;
use super::scan::{Index, Key, PrimaryKey, Row, are_as_known, column, has_row_security, place, read_first};
use super::{Jsonb, Text};
use crate::error::Error;

/// How many columns `request_result` has.
const COLUMNS: i32 = 8;

/// The columns of `account` that we know; it may have others.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct AccountColumns {
    account_id: i16,
    balance: i16,
}

impl AccountColumns {
    /// Whether these are still the columns of the relation.
    ///
    /// # Safety
    /// The relation is open and locked.
    unsafe fn are_of(&self, relation: pg_sys::Relation) -> bool {
        let columns = [(self.account_id, c"account_id", pg_sys::INT8OID), (self.balance, c"balance", pg_sys::INT8OID)];
        // SAFETY: our caller promises the relation.
        unsafe { are_as_known((*relation).rd_att, &columns) }
    }

    /// Of this table.
    pub(super) fn of(table: pg_sys::Oid) -> Option<Self> {
        let find = |name| column(table, name, pg_sys::INT8OID).ok();
        Some(Self { account_id: find(c"account_id")?, balance: find(c"balance")? })
    }
}

/// Where a claim is made.
#[derive(Clone, Copy)]
pub struct ClaimTables {
    /// `account`.
    pub account: (pg_sys::Oid, AccountColumns),
    /// `request_result`.
    pub requests: (pg_sys::Oid, Columns),
}

/// What is claimed.
pub struct Claim<'a> {
    /// The account.
    pub account: i64,
    /// The operation.
    pub operation: &'a str,
    /// The key.
    pub key: Text,
    /// The request as it is stored.
    pub request: Jsonb,
    /// Its fingerprint, if that is stored instead.
    pub fingerprint: Option<Vec<u8>>,
    /// What is added to the balance.
    pub change: i64,
}

/// A record that was made.
pub struct Claimed {
    /// The response, in the memory of the caller.
    pub response: Jsonb,
    /// When it was executed.
    pub created_at: TimestampWithTimeZone,
}

/// What became of a claim.
pub enum Claiming {
    /// The record was made, and the balance changed.
    Done(Claimed),
    /// The key is taken. Nothing was done but lock the account.
    Taken,
    /// The statements have to be asked: the balance does not suffice, there is no such account, or a table is not plain.
    /// Nothing was done but perhaps lock the account.
    Unable,
}

/// Locks the account, takes the key with the final response, and changes the balance.
pub fn claim(tables: &ClaimTables, claim: &Claim<'_>) -> Result<Claiming, Error> {
    let (account, account_columns) = tables.account;
    let (requests, columns) = &tables.requests;
    // SAFETY: reading variables of this single-threaded process, the hook by copying it. With an older snapshot the executor alone knows when to raise
    // 40001; and it refuses writes where none are allowed. Who watches what statements touch has to see them.
    let unsuitable = unsafe {
        pg_sys::XactIsoLevel >= pg_sys::XACT_REPEATABLE_READ as i32
            || pg_sys::XactReadOnly
            || pg_sys::IsInParallelMode()
            || (&raw const pg_sys::ExecutorCheckPerms_hook).read().is_some()
    };
    if unsuitable {
        return Ok(Claiming::Unable);
    }
    // Row security, owners and triggers are looked at when both are locked, since they may change while that is waited for.
    // SAFETY: the order of calls is the server's own for a statement. Both relations are open and locked to the end of the
    // transaction, as after a statement; after an error the server closes and lets go all.
    unsafe {
        let Some(account) = Open::table(account) else {
            return Ok(Claiming::Unable);
        };
        let Some(requests) = Open::table(*requests) else {
            return Ok(Claiming::Unable);
        };
        let plain = is_plain(account.0, pg_sys::TRIGGER_TYPE_UPDATE)
            && is_plain(requests.0, pg_sys::TRIGGER_TYPE_INSERT)
            && account_columns.are_of(account.0)
            && columns.are_of(requests.0)
            && has_nothing_else(requests.0)
            && owners_may_write(account.0, requests.0);
        if !plain {
            return Ok(Claiming::Unable);
        }
        pg_sys::CommandCounterIncrement();
        let mut locked = LockedAccount::lock(account.0, account_columns, claim, pg_sys::LockWaitPolicy::LockWaitSkip);
        if matches!(locked, Locking::Held) {
            // Repeats of a request in flight wait for its record and not for the account: then they need not lock it one
            // after the other, and write nothing.
            let Some(insertion) = Insertion::begin(requests.0, columns, claim, 0)? else {
                return Ok(Claiming::Unable);
            };
            let free = insertion.is_free();
            insertion.end();
            if !free {
                return Ok(Claiming::Taken);
            }
            locked = LockedAccount::lock(account.0, account_columns, claim, pg_sys::LockWaitPolicy::LockWaitBlock);
        }
        let Locking::Done(locked) = locked else {
            return Ok(Claiming::Unable);
        };
        let Some(insertion) = Insertion::begin(requests.0, columns, claim, locked.balance_after)? else {
            return Ok(Claiming::Unable);
        };
        let free = insertion.is_free();
        if free {
            write(&insertion, account.0, account_columns, &locked)?;
        }
        let claimed = insertion.end();
        pg_sys::CommandCounterIncrement();
        Ok(if free { Claiming::Done(claimed) } else { Claiming::Taken })
    }
}

/// A relation that is closed when it is not used any more, and stays locked.
struct Open(pg_sys::Relation);

impl Open {
    fn table(table: pg_sys::Oid) -> Option<Self> {
        // SAFETY: opens a relation by its oid, with the lock of a write.
        let relation = unsafe { pg_sys::try_relation_open(table, pg_sys::RowExclusiveLock as i32) };
        (!relation.is_null()).then_some(Self(relation))
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        // After an error the server has closed it, or will.
        if !std::thread::panicking() {
            // SAFETY: opened by us, and closed once.
            unsafe { pg_sys::relation_close(self.0, pg_sys::NoLock as i32) };
        }
    }
}

/// Whether the owners, whose privileges we use, have not revoked their own.
///
/// # Safety
/// Both relations are open.
unsafe fn owners_may_write(account: pg_sys::Relation, requests: pg_sys::Relation) -> bool {
    // SAFETY: our caller promises the relations.
    let may = |relation: pg_sys::Relation, mode: u32| unsafe {
        let owner = (*(*relation).rd_rel).relowner;
        pg_sys::pg_class_aclcheck((*relation).rd_id, owner, mode.into()) == pg_sys::AclResult::ACLCHECK_OK
    };
    [pg_sys::ACL_SELECT, pg_sys::ACL_UPDATE].into_iter().all(|mode| may(account, mode))
        && [pg_sys::ACL_SELECT, pg_sys::ACL_INSERT].into_iter().all(|mode| may(requests, mode))
}

/// Whether the table of records has no columns but those that are known, and no CHECK, whose functions could raise whatever an
/// index can.
///
/// # Safety
/// The relation is open and locked, and has the known columns.
unsafe fn has_nothing_else(requests: pg_sys::Relation) -> bool {
    // SAFETY: our caller promises the relation.
    unsafe {
        let description = &*(*requests).rd_att;
        description.natts == COLUMNS && (description.constr.is_null() || (*description.constr).num_check == 0)
    }
}

/// Whether nothing has been added to the table that a write past the executor would miss: a trigger of somebody's own for the
/// event, row security, a rule, another kind of storage, partitions or children.
///
/// # Safety
/// The relation is open and locked.
unsafe fn is_plain(relation: pg_sys::Relation, event: u32) -> bool {
    // SAFETY: our caller promises the relation; the triggers are as many as their list says.
    unsafe {
        let class = &*(*relation).rd_rel;
        let of_somebody = || {
            let triggers = (*relation).trigdesc;
            let count = if triggers.is_null() { 0 } else { usize::try_from((*triggers).numtriggers).unwrap_or(0) };
            (0..count).any(|at| {
                let trigger = &*(*triggers).triggers.add(at);
                !trigger.tgisinternal && u32::from(trigger.tgtype as u16) & event != 0
            })
        };
        // Before 14.7 and 15.2 the server computed no generated column for an update that it was not told the columns of.
        #[cfg(any(feature = "pg14", feature = "pg15"))]
        if !(*(*relation).rd_att).constr.is_null() && (*(*(*relation).rd_att).constr).has_generated_stored {
            return false;
        }
        class.relkind as u8 == pg_sys::RELKIND_RELATION
            && class.relam == pg_sys::HEAP_TABLE_AM_OID
            && !has_row_security((*relation).rd_id)
            && !(class.relhasrules || class.relhassubclass || class.relispartition)
            && !of_somebody()
    }
}

/// An account's newest version, locked by us.
struct LockedAccount {
    slot: Slot,
    balance_after: i64,
}

/// What became of locking an account.
enum Locking {
    Done(LockedAccount),
    /// Somebody else holds it.
    Held,
    /// The statements have to be asked.
    Unable,
}

/// A place for a row, which is let go when it is not used any more.
struct Slot(*mut pg_sys::TupleTableSlot);

impl Drop for Slot {
    fn drop(&mut self) {
        // After an error the server lets go the page.
        if !std::thread::panicking() {
            // SAFETY: made by us, and dropped once.
            unsafe { pg_sys::ExecDropSingleTupleTableSlot(self.0) };
        }
    }
}

impl LockedAccount {
    /// Locks the account if it is there and its balance allows the change, as SELECT FOR NO KEY UPDATE does: if it waits for
    /// who holds it, it goes on with the newest version then.
    ///
    /// # Safety
    /// The relation is `account`, open and locked, and the transaction is one of READ COMMITTED.
    unsafe fn lock(
        account: pg_sys::Relation,
        columns: AccountColumns,
        claim: &Claim<'_>,
        wait: pg_sys::LockWaitPolicy::Type,
    ) -> Locking {
        // SAFETY: our caller promises the relation. The snapshot is registered while a version is looked for and locked, which
        // has a slot of the relation's own kind.
        unsafe {
            let key =
                Key::of_type(columns.account_id, pg_sys::INT8OID, pg_sys::F_INT8EQ, pg_sys::Datum::from(claim.account));
            let index = PrimaryKey::open(account, core::slice::from_ref(&key));
            let Some((index, lock)) = index.zip((*(*account).rd_tableam).tuple_lock) else {
                return Locking::Unable;
            };
            let balance_after = |row: &Row| {
                let same = row.get::<i64>(columns.account_id) == Some(claim.account);
                let after = row.get::<i64>(columns.balance)?.checked_add(claim.change)?;
                (same && after >= 0).then_some(after)
            };
            let snapshot = pg_sys::RegisterSnapshot(pg_sys::GetTransactionSnapshot());
            let found = read_first(account, &Index::Opened(&index), snapshot, &[key], |row| {
                balance_after(row).map(|after| (row.place(), after))
            });
            let locked = found.flatten().flatten().map_or(Locking::Unable, |(mut place, balance)| {
                let slot = Slot(pg_sys::MakeSingleTupleTableSlot((*account).rd_att, &pg_sys::TTSOpsBufferHeapTuple));
                let (to, command) = (slot.0, pg_sys::GetCurrentCommandId(true));
                let mut failure = pg_sys::TM_FailureData::default();
                let outcome = pg_sys::ffi::pg_guard_ffi_boundary(|| {
                    lock(
                        account,
                        &mut place,
                        snapshot,
                        to,
                        command,
                        pg_sys::LockTupleMode::LockTupleNoKeyExclusive,
                        wait,
                        (pg_sys::TUPLE_LOCK_FLAG_LOCK_UPDATE_IN_PROGRESS | pg_sys::TUPLE_LOCK_FLAG_FIND_LAST_VERSION)
                            as u8,
                        &mut failure,
                    )
                });
                match outcome {
                    pg_sys::TM_Result::TM_Ok if !failure.traversed => {
                        Locking::Done(Self { slot, balance_after: balance })
                    }
                    pg_sys::TM_Result::TM_Ok => balance_after(&Row::in_slot(to))
                        .map_or(Locking::Unable, |balance_after| Locking::Done(Self { slot, balance_after })),
                    pg_sys::TM_Result::TM_WouldBlock => Locking::Held,
                    _ => Locking::Unable,
                }
            });
            pg_sys::UnregisterSnapshot(snapshot);
            locked
        }
    }
}

/// A record that is to be inserted, with what the executor keeps while it writes.
struct Insertion {
    state: *mut pg_sys::EState,
    records: *mut pg_sys::ResultRelInfo,
    slot: *mut pg_sys::TupleTableSlot,
    claimed: Claimed,
}

impl Insertion {
    /// Begins with what others committed up to now. `None` where an index cannot be asked whether a key is free: one whose
    /// constraint is deferrable, or that calls functions.
    ///
    /// # Safety
    /// The relation is `request_result`, plain, open and locked, which has these columns and no others.
    unsafe fn begin(
        requests: pg_sys::Relation,
        columns: &Columns,
        claim: &Claim<'_>,
        balance_after: i64,
    ) -> Result<Option<Self>, Error> {
        // SAFETY: our caller promises the relation. The order of calls is that of the server's worker for logical replication; all
        // that is made lives in the memory of the state, which goes at the end, or with the transaction.
        unsafe {
            pg_sys::PushActiveSnapshot(pg_sys::GetTransactionSnapshot());
            let state = pg_sys::CreateExecutorState();
            (*state).es_snapshot = pg_sys::GetActiveSnapshot();
            (*state).es_output_cid = pg_sys::GetCurrentCommandId(true);
            let records = target(state, requests);
            let slot = pg_sys::ExecInitExtraTupleSlot(state, (*requests).rd_att, &pg_sys::TTSOpsVirtual);
            let claimed = fill(slot, columns, balance_after, claim)?;
            pg_sys::ExecOpenIndices(records, true);
            let insertion = Self { state, records, slot, claimed };
            if insertion.can_ask() {
                return Ok(Some(insertion));
            }
            insertion.end();
            Ok(None)
        }
    }

    fn can_ask(&self) -> bool {
        // SAFETY: `begin` has opened the indexes, as many as it says.
        unsafe {
            let records = &*self.records;
            (0..usize::try_from(records.ri_NumIndices).unwrap_or(0)).all(|at| {
                let definition = &*(**records.ri_IndexRelationDescs.add(at)).rd_index;
                let index = &**records.ri_IndexRelationInfo.add(at);
                definition.indimmediate && index.ii_Expressions.is_null() && index.ii_Predicate.is_null()
            })
        }
    }

    /// Whether no index has the record's key. Waits for who is just inserting or deleting it.
    fn is_free(&self) -> bool {
        let mut taken_at = pg_sys::ItemPointerData::default();
        let every_index = ptr::null_mut();
        // SAFETY: the slot is filled, and the indexes are open for this question.
        unsafe {
            #[cfg(feature = "pg18")]
            {
                // An invalid place: the record is no other version of a stored one.
                let mut none = pg_sys::ItemPointerData::default();
                pg_sys::ExecCheckIndexConstraints(
                    self.records,
                    self.slot,
                    self.state,
                    &mut taken_at,
                    &mut none,
                    every_index,
                )
            }
            #[cfg(not(feature = "pg18"))]
            pg_sys::ExecCheckIndexConstraints(self.records, self.slot, self.state, &mut taken_at, every_index)
        }
    }

    /// Inserts the record. Its key was free a moment ago, and nobody who locks accounts takes one meanwhile; so who does has
    /// inserted it by hand in this very moment. Nothing else here can find a duplicate: no function is called.
    fn insert(&self) -> Result<(), Error> {
        PgTryBuilder::new(std::panic::AssertUnwindSafe(|| {
            // SAFETY: all of them are what `begin` made.
            unsafe { pg_sys::ExecSimpleRelationInsert(self.records, self.state, self.slot) };
            Ok(())
        }))
        .catch_when(PgSqlErrorCode::ERRCODE_UNIQUE_VIOLATION, |_| Err(Error::RecordedMeanwhile))
        .execute()
    }

    /// Lets go what was begun. Not called after an error, after which the server does so.
    fn end(self) -> Claimed {
        // SAFETY: made by `begin`, and let go once.
        unsafe {
            pg_sys::ExecResetTupleTable((*self.state).es_tupleTable, false);
            pg_sys::ExecCloseResultRelations(self.state);
            pg_sys::FreeExecutorState(self.state);
            pg_sys::PopActiveSnapshot();
        }
        self.claimed
    }
}

/// Inserts the record and updates the account.
///
/// # Safety
/// The relation is `account`, plain, open and locked, and the locked row is one of it.
unsafe fn write(
    insertion: &Insertion,
    account: pg_sys::Relation,
    columns: AccountColumns,
    locked: &LockedAccount,
) -> Result<(), Error> {
    let state = insertion.state;
    // SAFETY: our caller promises relation and row; the triggers run while all is open.
    unsafe {
        let accounts = target(state, account);
        pg_sys::ExecOpenIndices(accounts, false);
        let after = new_version(state, account, columns, locked);
        pg_sys::AfterTriggerBeginQuery();
        insertion.insert()?;
        // Nothing is asked of it, as the account is locked and has no triggers that could wait.
        let mut recheck = pg_sys::EPQState::default();
        pg_sys::ExecSimpleRelationUpdate(accounts, state, &mut recheck, locked.slot.0, after);
        // As for the statement: a record must not name another balance than the account has.
        let balance = *(*after).tts_values.add(place(columns.balance));
        if balance != pg_sys::Datum::from(locked.balance_after) {
            return Err(Error::WriteSuppressed("account"));
        }
        pg_sys::AfterTriggerEndQuery(state);
    }
    Ok(())
}

/// A relation as the executor wants it for writing.
///
/// # Safety
/// The relation is open and locked.
unsafe fn target(state: *mut pg_sys::EState, relation: pg_sys::Relation) -> *mut pg_sys::ResultRelInfo {
    // SAFETY: our caller promises the relation; the memory is the state's own, and initialized by the server.
    unsafe {
        let size = size_of::<pg_sys::ResultRelInfo>();
        let target = pg_sys::MemoryContextAllocZero((*state).es_query_cxt, size).cast::<pg_sys::ResultRelInfo>();
        pg_sys::InitResultRelInfo(target, relation, 0, ptr::null_mut(), 0);
        // Where triggers look for it, and what is closed at the end.
        (*state).es_opened_result_relations = pg_sys::lappend((*state).es_opened_result_relations, target.cast());
        target
    }
}

/// Fills in the record with the final response.
///
/// # Safety
/// The slot is one of `request_result`, which has these columns and no others.
unsafe fn fill(
    record: *mut pg_sys::TupleTableSlot,
    columns: &Columns,
    balance_after: i64,
    claim: &Claim<'_>,
) -> Result<Claimed, Error> {
    let response = Jsonb::of_integer("balance", balance_after);
    let operation = Text::from_bytes(claim.operation.as_bytes())?;
    // SAFETY: our caller promises a slot with a place for each column.
    unsafe {
        let created_at = pg_sys::GetCurrentTimestamp();
        let set = |column: i16, value: Option<pg_sys::Datum>| {
            let at = place(column);
            *(*record).tts_isnull.add(at) = value.is_none();
            *(*record).tts_values.add(at) = value.unwrap_or(pg_sys::Datum::null());
        };
        let [account_id, operation_column, request_key] = columns.identity;
        set(account_id, claim.account.into_datum());
        set(operation_column, Some(operation.0));
        set(request_key, Some(claim.key.0));
        set(columns.request, Some(claim.request.0));
        set(columns.response, Some(response.0));
        set(columns.created_at, created_at.into_datum());
        set(columns.fingerprint, claim.fingerprint.as_deref().into_datum());
        set(columns.cancelled, false.into_datum());
        pg_sys::ExecStoreVirtualTuple(record);
        let created_at = TimestampWithTimeZone::try_from(created_at).map_err(|_| Error::ForeignTable)?;
        Ok(Claimed { response, created_at })
    }
}

/// The account with the new balance.
///
/// # Safety
/// The relation is `account`, and the locked row one of it.
unsafe fn new_version(
    state: *mut pg_sys::EState,
    account: pg_sys::Relation,
    columns: AccountColumns,
    locked: &LockedAccount,
) -> *mut pg_sys::TupleTableSlot {
    // SAFETY: our caller promises relation and row, whose page stays pinned by its slot; the slot that is made has a place for
    // each column.
    unsafe {
        let description = (*account).rd_att;
        let after = pg_sys::ExecInitExtraTupleSlot(state, description, &pg_sys::TTSOpsVirtual);
        let row = pg_sys::ExecFetchSlotHeapTuple(locked.slot.0, false, ptr::null_mut());
        pg_sys::heap_deform_tuple(row, description, (*after).tts_values, (*after).tts_isnull);
        *(*after).tts_values.add(place(columns.balance)) = pg_sys::Datum::from(locked.balance_after);
        pg_sys::ExecStoreVirtualTuple(after);
        after
    }
}
