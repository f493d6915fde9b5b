//! Saved plans, run through SPI with datums as they are.
//!
//! pgrx's own prepared statements leave the choice between a plan for any arguments and one for these arguments to the
//! server, and the scan to the size of the table on the day. A plan made while a table had one page reads the whole
//! table, and stays until the next ANALYZE: measured on PostgreSQL 18 with 300,000 rows added meanwhile, 18 ms a call
//! instead of 0.1 ms. Hence [`Planning::ByIndex`].

use std::ffi::CString;
use std::marker::PhantomData;
use std::ptr::NonNull;

use pgrx::datum::{DatumWithOid, Interval, TimestampWithTimeZone, Uuid};
use pgrx::prelude::*;
use pgrx::spi::SpiClient;

use super::scan::find_owner;
use super::transaction::is_acting;
use super::{Jsonb, Text};
use crate::error::Error;

/// How often a plan is asked for that other sessions' changes make invalid each time.
const ATTEMPTS: usize = 1_000;
/// More parameters than any statement has.
const PARAMETERS: usize = 8;

/// How a statement is planned.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Planning {
    /// Never by reading a whole table: for a statement that finds its rows by a key.
    ByIndex,
    /// As [`Self::ByIndex`], and in the order of the index: for a statement that takes the first rows of many.
    InOrder,
}

/// A plan that lives until it is dropped, and follows DDL by itself.
pub struct Plan {
    plan: NonNull<pg_sys::_SPI_plan>,
    planning: Planning,
    parameters: usize,
}

impl Plan {
    /// Parses and saves a statement, whose text is in the database's encoding. It is planned once for any arguments.
    pub fn prepare(
        connected: &SpiClient<'_>,
        text: Vec<u8>,
        parameters: &[PgBuiltInOids],
        planning: Planning,
    ) -> Result<Self, Error> {
        let text = CString::new(text).map_err(|_| Error::Spi(pg_sys::SPI_ERROR_ARGUMENT))?;
        let mut types: Vec<pg_sys::Oid> = parameters.iter().map(|&builtin| builtin.into()).collect();
        let options = pg_sys::CURSOR_OPT_GENERIC_PLAN;
        // Parsing may want a snapshot, which a worker and a procedure after a commit do not have.
        let _snapshot = Snapshot::ensure(connected);
        // SAFETY: `connected` proves that SPI is connected, text and types outlive the call, and the server copies them.
        let plan = unsafe {
            pg_sys::SPI_prepare_cursor(text.as_ptr(), types.len() as i32, types.as_mut_ptr(), options as i32)
        };
        // SAFETY: SPI_result is the server's word on the call above.
        let plan = NonNull::new(plan).ok_or(Error::Spi(unsafe { pg_sys::SPI_result }))?;
        // SAFETY: the plan comes from SPI_prepare_cursor and has not been kept before.
        match unsafe { pg_sys::SPI_keepplan(plan.as_ptr()) } {
            0 => Ok(Self { plan, planning, parameters: types.len() }),
            code => Err(Error::Spi(code)),
        }
    }

    /// Runs the statement with a fresh snapshot at READ COMMITTED, with the owners' privileges on these tables.
    ///
    /// Assigns no transaction id of its own accord, so that a SELECT costs none, and a write in a read-only transaction
    /// or on a standby is refused by the server with 25006.
    ///
    /// Planning may wait for a lock, and then look up names again. `None`, and nothing was run, if `names_are_ours` denies
    /// afterwards that they mean what they meant: the owners' privileges are not for a view of somebody else's.
    pub fn run<'conn>(
        &self,
        connected: &SpiClient<'conn>,
        arguments: &[DatumWithOid<'_>],
        tables: &[pg_sys::Oid],
        names_are_ours: impl Fn() -> bool,
    ) -> Result<Option<Rows<'conn>>, Error> {
        if arguments.len() != self.parameters || self.parameters > PARAMETERS {
            return Err(Error::Spi(pg_sys::SPI_ERROR_ARGUMENT));
        }
        let mut datums = [pg_sys::Datum::null(); PARAMETERS];
        let mut nulls = [b'n' as core::ffi::c_char; PARAMETERS];
        for (at, argument) in arguments.iter().enumerate() {
            if let Some(datum) = argument.datum() {
                datums[at] = datum.sans_lifetime();
                nulls[at] = b' ' as core::ffi::c_char;
            }
        }
        let _snapshot = Snapshot::ensure(connected);
        if !self.plan_for_caller(connected, tables, names_are_ours)? {
            return Ok(None);
        }
        let _generic = GenericPlan::begin();
        // SAFETY: `connected` proves that SPI is connected, the plan is ours until dropped, and both arrays are longer
        // than the plan has parameters.
        let code =
            unsafe { pg_sys::SPI_execute_plan(self.plan.as_ptr(), datums.as_mut_ptr(), nulls.as_ptr(), false, 0) };
        if code < 0 {
            return Err(Error::Spi(code));
        }
        // SAFETY: both are the server's word on the call above.
        let (table, processed) = unsafe { (pg_sys::SPI_tuptable, pg_sys::SPI_processed) };
        Ok(Some(Rows { table: NonNull::new(table), processed, connected: PhantomData }))
    }

    /// The relations that the plan touches, those that row policies bring in included.
    fn relations(&self) -> Vec<pg_sys::Oid> {
        // SAFETY: the plan is ours until dropped. Its sources, and the lists of the relations that the server found in them,
        // belong to the server and are read here alone.
        unsafe {
            let sources = pg_sys::SPI_plan_get_plan_sources(self.plan.as_ptr());
            let mut relations = Vec::new();
            for source in pgrx::PgList::<pg_sys::CachedPlanSource>::from_pg(sources).iter_ptr() {
                relations.extend(pgrx::PgList::<pg_sys::Oid>::from_pg((*source).relationOids).iter_oid());
            }
            relations
        }
    }

    /// Whether the plan touches these tables alone.
    fn touches_only(&self, tables: &[pg_sys::Oid]) -> bool {
        self.relations().iter().all(|relation| tables.contains(relation))
    }

    /// Has the server make or renew the plan that [`Self::run`] will then find valid, while it may not scan a whole table, and
    /// has it ask for the privileges of the tables' owners, not of the caller, on these tables. On a valid plan this is a
    /// check; the server alone knows whether search_path, the role or a change of a table made it invalid.
    ///
    /// So a caller may do through us what our statements do, and nothing else changes: functions, triggers and row policies
    /// run as the caller, as they do through a view. Tables are told by oid, so that a relation that somebody put in the place
    /// of one of ours is used with the caller's own privileges.
    ///
    /// What other sessions changed may make the plan invalid while it is made or looked at, and the server would then make one
    /// of its own. So it is asked for again until it is valid; from then on until it runs nothing looks at a catalogue, and the
    /// tables are locked.
    fn plan_for_caller(
        &self,
        _connected: &SpiClient<'_>,
        tables: &[pg_sys::Oid],
        names_are_ours: impl Fn() -> bool,
    ) -> Result<bool, Error> {
        for _ in 0..ATTEMPTS {
            // A worker has all rights of the tables' owner, by whose grace others may make schemas: what it runs has to be
            // ours, also while it is planned, which runs functions that are declared immutable.
            if is_acting() && !self.touches_only(tables) {
                return Err(Error::ForeignTable);
            }
            let owners = self.owners(tables);
            // SAFETY: SPI is connected; the plan is kept, as both functions ask, and the reference that the first takes is
            // given back to the same owner. The plan belongs to this backend alone, and nobody runs it while it is changed.
            let ready = unsafe {
                let cached = {
                    let _by_index = ByIndex::begin(self.planning == Planning::InOrder);
                    pg_sys::SPI_plan_get_cached_plan(self.plan.as_ptr())
                };
                if cached.is_null() {
                    return Err(Error::Spi(pg_sys::SPI_ERROR_ARGUMENT));
                }
                if !names_are_ours() {
                    pg_sys::ReleaseCachedPlan(cached, pg_sys::CurrentResourceOwner);
                    return Ok(false);
                }
                let checked = pgrx::PgList::<pg_sys::PlannedStmt>::from_pg((*cached).stmt_list)
                    .iter_ptr()
                    .all(|statement| check_as_owner(statement, tables, &owners));
                let valid = (*cached).is_valid && pg_sys::SPI_plan_is_valid(self.plan.as_ptr());
                pg_sys::ReleaseCachedPlan(cached, pg_sys::CurrentResourceOwner);
                checked && valid
            };
            if ready {
                return if is_acting() && !self.touches_only(tables) { Err(Error::ForeignTable) } else { Ok(true) };
            }
        }
        Err(Error::Unsettled)
    }

    /// The tables of these that the plan is known to touch, and who owns them.
    fn owners(&self, tables: &[pg_sys::Oid]) -> Vec<(pg_sys::Oid, pg_sys::Oid)> {
        let ours = self.relations().into_iter().filter(|relation| tables.contains(relation));
        ours.filter_map(|relation| Some((relation, find_owner(relation)?))).collect()
    }
}

/// Has the privileges on these tables checked for their owners, as for the tables of a view. False if one was not known to be
/// touched.
///
/// # Safety
/// The statement is a plan that nobody runs at this moment.
unsafe fn check_as_owner(
    statement: *mut pg_sys::PlannedStmt,
    tables: &[pg_sys::Oid],
    owners: &[(pg_sys::Oid, pg_sys::Oid)],
) -> bool {
    // SAFETY: our caller promises a plan; the list and what is in it belong to it.
    unsafe {
        #[cfg(any(feature = "pg14", feature = "pg15"))]
        let entries = pgrx::PgList::<pg_sys::RangeTblEntry>::from_pg((*statement).rtable);
        #[cfg(not(any(feature = "pg14", feature = "pg15")))]
        let entries = pgrx::PgList::<pg_sys::RTEPermissionInfo>::from_pg((*statement).permInfos);
        entries.iter_ptr().filter(|&entry| tables.contains(&(*entry).relid)).all(|entry| {
            let owner = owners.iter().find(|(table, _)| *table == (*entry).relid);
            (*entry).checkAsUser = owner.map_or(pg_sys::InvalidOid, |(_, owner)| *owner);
            owner.is_some()
        })
    }
}

/// While it lives, there is a snapshot that keeps plans valid which depend on the oldest one.
struct Snapshot {
    pushed: bool,
}

impl Snapshot {
    fn ensure(_connected: &SpiClient<'_>) -> Self {
        // SAFETY: within a transaction. An error leaves the snapshot to the server's clean-up, and unwinding to `drop`, which
        // looks whether it is still there.
        unsafe {
            let pushed = !pg_sys::ActiveSnapshotSet();
            if pushed {
                pg_sys::PushActiveSnapshot(pg_sys::GetTransactionSnapshot());
            }
            Self { pushed }
        }
    }
}

impl Drop for Snapshot {
    fn drop(&mut self) {
        // SAFETY: as in `ensure`.
        unsafe {
            if self.pushed && !std::thread::panicking() && pg_sys::ActiveSnapshotSet() {
                pg_sys::PopActiveSnapshot();
            }
        }
    }
}

impl Drop for Plan {
    fn drop(&mut self) {
        // SAFETY: the plan is ours, and whoever runs it holds it by an `Rc`.
        unsafe {
            pg_sys::SPI_freeplan(self.plan.as_ptr());
        }
    }
}

/// While it lives, the planner takes an index wherever there is one.
struct ByIndex {
    seqscan: bool,
    bitmapscan: bool,
    sort: bool,
}

impl ByIndex {
    fn begin(in_order: bool) -> Self {
        // SAFETY: plain flags that only the planner of this single-threaded process reads. Nothing but planning happens
        // while we hold them; an immutable function in a row policy may run then, and would see the flags.
        unsafe {
            let before = Self {
                seqscan: pg_sys::enable_seqscan,
                bitmapscan: pg_sys::enable_bitmapscan,
                sort: pg_sys::enable_sort,
            };
            pg_sys::enable_seqscan = false;
            if in_order {
                pg_sys::enable_bitmapscan = false;
                pg_sys::enable_sort = false;
            }
            before
        }
    }
}

impl Drop for ByIndex {
    fn drop(&mut self) {
        // SAFETY: as in `begin`. Runs on errors too, which pgrx turns into unwinding.
        unsafe {
            pg_sys::enable_seqscan = self.seqscan;
            pg_sys::enable_bitmapscan = self.bitmapscan;
            pg_sys::enable_sort = self.sort;
        }
    }
}

/// While it lives, the server runs the plan that was prepared for the caller also where plan_cache_mode asks for a new one for
/// each call. Where it does not ask for that, nothing is changed.
struct GenericPlan {
    changed: bool,
}

impl GenericPlan {
    fn begin() -> Self {
        // SAFETY: a variable of this single-threaded process. Triggers that run meanwhile are planned as by default.
        unsafe {
            let changed = pg_sys::plan_cache_mode == FORCE_CUSTOM_PLAN;
            if changed {
                pg_sys::plan_cache_mode = pg_sys::PlanCacheMode::PLAN_CACHE_MODE_AUTO as i32;
            }
            Self { changed }
        }
    }
}

impl Drop for GenericPlan {
    fn drop(&mut self) {
        if self.changed {
            // SAFETY: as in `begin`. Runs on errors too, which pgrx turns into unwinding.
            unsafe { pg_sys::plan_cache_mode = FORCE_CUSTOM_PLAN };
        }
    }
}

const FORCE_CUSTOM_PLAN: i32 = pg_sys::PlanCacheMode::PLAN_CACHE_MODE_FORCE_CUSTOM_PLAN as i32;

/// What a statement returned; lives while SPI is connected.
pub struct Rows<'conn> {
    table: Option<NonNull<pg_sys::SPITupleTable>>,
    processed: u64,
    connected: PhantomData<&'conn ()>,
}

impl Rows<'_> {
    /// How many rows were returned, or written by a statement that returns none.
    pub fn len(&self) -> u64 {
        self.processed
    }

    /// The numbers of the rows that were returned, for [`Self::get`].
    pub fn numbers(&self) -> core::ops::Range<usize> {
        0..usize::try_from(self.processed).unwrap_or(0)
    }

    /// Whether no row was returned or written.
    pub fn is_empty(&self) -> bool {
        self.processed == 0
    }

    /// Column `ordinal` (from 1) of the first row; `None` for NULL, and where there is no row.
    pub fn first<T: Column>(&self, ordinal: i32) -> Result<Option<T>, Error> {
        self.get(0, ordinal)
    }

    /// Column `ordinal` (from 1) of a row (from 0); `None` for NULL, and where there is no such row.
    pub fn get<T: Column>(&self, row: usize, ordinal: i32) -> Result<Option<T>, Error> {
        let Some(table) = self.table.filter(|_| (row as u64) < self.processed) else {
            return Ok(None);
        };
        // SAFETY: the server made the table, which lives while SPI is connected, and it has more rows than `row`; the two
        // SPI functions check the ordinal and say NULL or the invalid type where there is no such column.
        unsafe {
            let table = table.as_ref();
            if pg_sys::SPI_gettypeid(table.tupdesc, ordinal) != T::type_oid() {
                return Err(Error::ForeignTable);
            }
            let mut is_null = true;
            let datum = pg_sys::SPI_getbinval(*table.vals.add(row), table.tupdesc, ordinal, &mut is_null);
            Ok(if is_null { None } else { T::copied(datum) })
        }
    }
}

/// A type of column that can be taken out of [`Rows`] and outlives them.
pub trait Column: FromDatum + IntoDatum {
    /// The value, copied.
    ///
    /// # Safety
    /// The datum is not NULL and of this type, and SPI is connected.
    unsafe fn copied(datum: pg_sys::Datum) -> Option<Self> {
        // SAFETY: our caller promises it; the types below are passed by value or copied into Rust's memory.
        unsafe { Self::from_datum(datum, false) }
    }
}

impl Column for bool {}
impl Column for i64 {}
impl Column for pg_sys::Oid {}
impl Column for Interval {}
impl Column for TimestampWithTimeZone {}
impl Column for pg_sys::TransactionId {}
impl Column for Vec<u8> {}
impl Column for Vec<Uuid> {}

/// The bytes of a `text`, in the database's encoding.
pub struct Bytes(pub Vec<u8>);

impl FromDatum for Bytes {
    unsafe fn from_polymorphic_datum(datum: pg_sys::Datum, is_null: bool, oid: pg_sys::Oid) -> Option<Self> {
        // SAFETY: our caller promises a text, which lies in memory as a bytea does.
        unsafe { Vec::<u8>::from_polymorphic_datum(datum, is_null, oid) }.map(Self)
    }
}

impl IntoDatum for Bytes {
    fn into_datum(self) -> Option<pg_sys::Datum> {
        self.0.into_datum()
    }

    fn type_oid() -> pg_sys::Oid {
        pg_sys::TEXTOID
    }
}

impl Column for Bytes {}

macro_rules! transferred {
    ($type:ident) => {
        impl Column for $type {
            unsafe fn copied(datum: pg_sys::Datum) -> Option<Self> {
                // SAFETY: our caller promises a varlena of this type and a connected SPI; the copy lives in the memory of
                // the function's caller.
                Some(Self(unsafe { pg_sys::SPI_datumTransfer(datum, false, -1) }))
            }
        }
    };
}

transferred!(Jsonb);
transferred!(Text);
