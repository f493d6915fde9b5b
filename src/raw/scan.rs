//! Reading a row by its table's oid, past the executor: with a snapshot of this very moment, with no permission asked, and
//! with no name looked up and no code of anybody's run. So nobody can put another relation in the place of the one meant.

use core::ffi::CStr;

use pgrx::datum::{Interval, TimestampWithTimeZone};
use pgrx::prelude::*;

use super::Jsonb;
use super::claim::AccountColumns;
use super::lookup::Columns;
use crate::error::Error;

/// What the server's catalogue says of the extension.
#[derive(PartialEq, Eq)]
pub struct Extension {
    /// Changes with each CREATE EXTENSION.
    pub oid: pg_sys::Oid,
    /// The installed version.
    pub version: Vec<u8>,
    /// The schema's name, quoted, in the database's encoding.
    pub schema: Vec<u8>,
    /// The extension's own tables, those that pg_dump knows as its configuration.
    tables: Vec<pg_sys::Oid>,
    /// Their names.
    names: Vec<std::ffi::CString>,
    /// The columns of `request_result`, if its version has all of them.
    pub request_columns: Option<Columns>,
    /// The columns of `account`.
    pub account_columns: Option<AccountColumns>,
}

impl Extension {
    /// The extension's own table of this name, if its version has one.
    pub fn table(&self, name: &CStr) -> Option<pg_sys::Oid> {
        let position = self.names.iter().position(|known| known.as_c_str() == name)?;
        self.tables.get(position).copied()
    }

    /// All tables of the extension.
    pub fn tables(&self) -> &[pg_sys::Oid] {
        &self.tables
    }
}

/// A row of `operation_policy`.
pub struct PolicyRow {
    /// `raise` or `save`.
    pub refusals: Vec<u8>,
    /// `full` or `fingerprint`.
    pub stored_request: Vec<u8>,
    /// The declared retention.
    pub retention: Option<Interval>,
}

/// The extension as it is now, whatever snapshot the transaction has: a saved plan outlives the transaction.
pub fn find_extension() -> Option<Extension> {
    let name = c"idempotency_record";
    let key = Key::of_type(
        pg_sys::Anum_pg_extension_extname as i16,
        pg_sys::NAMEOID,
        pg_sys::F_NAMEEQ,
        pg_sys::Datum::from(name.as_ptr()),
    );
    let index = pg_sys::Oid::from(pg_sys::ExtensionNameIndexId);
    let (oid, namespace, version, tables) =
        first_row(pg_sys::ExtensionRelationId, &Index::Of(index), &[key], |row| {
            let namespace = row.get::<pg_sys::Oid>(pg_sys::Anum_pg_extension_extnamespace as i16)?;
            let version = row.get::<Vec<u8>>(pg_sys::Anum_pg_extension_extversion as i16)?;
            let tables = row.get::<Vec<pg_sys::Oid>>(pg_sys::Anum_pg_extension_extconfig as i16).unwrap_or_default();
            Some((row.get::<pg_sys::Oid>(pg_sys::Anum_pg_extension_oid as i16)?, namespace, version, tables))
        })???;
    // Who may write pg_extension.extconfig is who creates the extension, so that its tables are the extension's own.
    let (tables, names) = tables.into_iter().filter_map(|table| Some((table, relation_name(table)?))).unzip();
    let schema = quoted_schema(namespace)?;
    let mut extension = Extension { oid, version, schema, tables, names, request_columns: None, account_columns: None };
    extension.request_columns = extension.table(c"request_result").and_then(Columns::of);
    extension.account_columns = extension.table(c"account").and_then(AccountColumns::of);
    Some(extension)
}

/// Who owns a table; `None` if it is gone.
pub fn find_owner(table: pg_sys::Oid) -> Option<pg_sys::Oid> {
    // SAFETY: the row lives as long as it is held, and the catalogue's rows have this structure.
    unsafe {
        let row = pg_sys::SearchSysCache1(pg_sys::SysCacheIdentifier::RELOID as i32, table.into());
        if row.is_null() {
            return None;
        }
        let owner = (*pgrx::pg_sys::GETSTRUCT(row).cast::<pg_sys::FormData_pg_class>()).relowner;
        pg_sys::ReleaseSysCache(row);
        Some(owner)
    }
}

/// Whether the caller is subject to row security on the table.
pub fn has_row_security(table: pg_sys::Oid) -> bool {
    // SAFETY: a look-up by oid, which raises nothing when told so.
    let applies = unsafe { pg_sys::check_enable_rls(table, pg_sys::InvalidOid, true) };
    applies == pg_sys::CheckEnableRlsResult::RLS_ENABLED as i32
}

/// A database by its name; `None` if there is none. Without an index, whose description a process that is connected to no
/// database may not find.
pub(super) fn find_database(name: &CStr) -> Option<pg_sys::Oid> {
    let name = pg_sys::Datum::from(name.as_ptr());
    let key = Key::of_type(pg_sys::Anum_pg_database_datname as i16, pg_sys::NAMEOID, pg_sys::F_NAMEEQ, name);
    first_row(pg_sys::DatabaseRelationId, &Index::None, &[key], |row| row.get(pg_sys::Anum_pg_database_oid as i16))??
}

/// The row of an operation in the extension's `operation_policy`; an error if that is not the table that it was created as.
/// A policy that could not be read must not be taken for none.
pub fn find_policy(table: pg_sys::Oid, operation: &str) -> Result<Option<PolicyRow>, Error> {
    let columns =
        [(c"refusals", pg_sys::TEXTOID), (c"stored_request", pg_sys::TEXTOID), (c"retention", pg_sys::INTERVALOID)];
    own_row(table, &[(c"operation", operation.as_bytes())], columns, |row, [refusals, stored_request, retention]| {
        Some(PolicyRow {
            refusals: row.get(refusals)?,
            stored_request: row.get(stored_request)?,
            retention: row.get(retention),
        })
    })
}

/// The retention of a subscriber in the extension's `subscriber_policy`, as [`find_policy`].
pub fn find_subscriber_retention(table: pg_sys::Oid, subscriber: &[u8]) -> Result<Option<Interval>, Error> {
    let retention = [(c"retention", pg_sys::INTERVALOID)];
    own_row(table, &[(c"subscriber", subscriber)], retention, |row, [retention]| row.get(retention))
}

/// Up to when the records of an operation or subscriber were purged, from the extension's `retention_fence`, as
/// [`find_policy`].
pub fn find_fence(table: pg_sys::Oid, kind: &str, name: &[u8]) -> Result<Option<TimestampWithTimeZone>, Error> {
    let (key, purged_before) =
        ([(c"kind", kind.as_bytes()), (c"name", name)], [(c"purged_before", pg_sys::TIMESTAMPTZOID)]);
    own_row(table, &key, purged_before, |row, [purged_before]| row.get(purged_before))
}

/// A table of records, and the columns by which a purge knows what it may delete.
pub struct RecordTable {
    table: pg_sys::Oid,
    name: i16,
    created_at: i16,
}

impl RecordTable {
    /// The table, whose records are named by this column.
    pub fn of(table: pg_sys::Oid, named_by: &CStr) -> Result<Self, Error> {
        Ok(Self {
            table,
            name: column(table, named_by, pg_sys::TEXTOID)?,
            created_at: column(table, c"created_at", pg_sys::TIMESTAMPTZOID)?,
        })
    }

    /// Whether the record that a trigger is to delete is one of this table and name, and older than the cutoff.
    pub fn is_of(&self, trigger: &PgTrigger<'_>, name: &[u8], cutoff: i64) -> bool {
        self.record(trigger).is_ok_and(|(of, made)| of == name && made < cutoff)
    }

    /// The name and the time of the record that a trigger is to delete, if it is one of this table.
    pub fn record(&self, trigger: &PgTrigger<'_>) -> Result<(Vec<u8>, i64), Error> {
        let (table, row) = deleted_row(trigger)?;
        if table != self.table {
            return Err(Error::ForeignTable);
        }
        let made = row.get::<TimestampWithTimeZone>(self.created_at).ok_or(Error::ForeignTable)?;
        Ok((row.get(self.name).ok_or(Error::ForeignTable)?, made.into()))
    }
}

/// The record that a trigger is to delete, as it tells the server that it may.
pub fn deleted_record(trigger: &PgTrigger<'_>) -> Result<super::Row, Error> {
    let (_, row) = deleted_row(trigger)?;
    Ok(super::Row(pg_sys::Datum::from(row.tuple)))
}

/// What the server tells a trigger; an error if the function was called otherwise.
pub fn trigger<'a>(frame: pg_sys::FunctionCallInfo) -> Result<PgTrigger<'a>, Error> {
    // SAFETY: the server's frame for this call, which lives as long as the call.
    unsafe { PgTrigger::from_fcinfo(&*frame) }.map_err(|_| Error::NotATrigger)
}

fn deleted_row(trigger: &PgTrigger<'_>) -> Result<(pg_sys::Oid, Row), Error> {
    let data = trigger.trigger_data();
    // Whoever may execute the function can make a trigger of a table of his own with it, and one for each statement.
    if data.tg_trigtuple.is_null() {
        return Err(Error::ForeignTable);
    }
    // SAFETY: the server hands a trigger for each row of a DELETE the row and the relation that it is of.
    unsafe { Ok(((*data.tg_relation).rd_id, Row::of(data.tg_trigtuple, (*data.tg_relation).rd_att))) }
}

/// The row of one of our tables whose texts of these names are these, which `read` cannot do without. An error if the table
/// does not have these columns, whether or not there is a row.
fn own_row<T, const N: usize>(
    table: pg_sys::Oid,
    key: &[(&CStr, &[u8])],
    columns: [(&CStr, pg_sys::Oid); N],
    read: impl FnOnce(&Row, [i16; N]) -> Option<T>,
) -> Result<Option<T>, Error> {
    // SAFETY: the relation stays open and locked until the row has been read; after an error the server closes it.
    unsafe {
        let relation = pg_sys::try_relation_open(table, pg_sys::AccessShareLock as i32);
        if relation.is_null() {
            return Err(Error::ForeignTable);
        }
        let found = (|| {
            let find = |name: &CStr, of_type| column_of((*relation).rd_att, name, of_type);
            let of_key = |(name, value): &(&CStr, &[u8])| Key::text(find(name, pg_sys::TEXTOID)?, value).ok();
            let keys = key.iter().map(of_key).collect::<Option<Vec<_>>>()?;
            let mut numbers = [0; N];
            for (number, (name, of_type)) in numbers.iter_mut().zip(columns) {
                *number = find(name, of_type)?;
            }
            let index = PrimaryKey::open(relation, &keys);
            let index = index.as_ref().map_or(Index::None, Index::Opened);
            read_first(relation, &index, core::ptr::null_mut(), &keys, |row| read(row, numbers))
        })();
        pg_sys::relation_close(relation, pg_sys::AccessShareLock as i32);
        match found.ok_or(Error::ForeignTable)? {
            Some(None) => Err(Error::ForeignTable),
            Some(row) => Ok(row),
            None => Ok(None),
        }
    }
}

/// The number of a column of this name and type.
pub(super) fn column(table: pg_sys::Oid, name: &CStr, of_type: pg_sys::Oid) -> Result<i16, Error> {
    // SAFETY: look-ups by oid, name and number, which answer 0 where there is nothing.
    unsafe {
        let attribute = pg_sys::get_attnum(table, name.as_ptr());
        if attribute > 0 && pg_sys::get_atttype(table, attribute) == of_type {
            Ok(attribute)
        } else {
            Err(Error::ForeignTable)
        }
    }
}

/// A column as it is described; `None` if there is none of this number. Reads what the server's own macro does, since a call of
/// the server for each column is felt.
///
/// # Safety
/// The description is of an open relation, and not used longer than that is open.
unsafe fn attribute<'a>(description: pg_sys::TupleDesc, number: i16) -> Option<&'a pg_sys::FormData_pg_attribute> {
    // SAFETY: our caller promises the description, which ends with as many attributes as it says.
    unsafe {
        let count = usize::try_from((*description).natts).ok()?;
        #[cfg(not(feature = "pg18"))]
        let attributes = (*description).attrs.as_slice(count);
        #[cfg(feature = "pg18")]
        let attributes = {
            let first = (*description).compact_attrs.as_ptr().add(count).cast::<pg_sys::FormData_pg_attribute>();
            core::slice::from_raw_parts(first, count)
        };
        attributes.get(usize::try_from(number).ok()?.checked_sub(1)?).filter(|attribute| !attribute.attisdropped)
    }
}

/// The type of a column; `None` if there is none of this number.
///
/// # Safety
/// The description is of an open relation.
pub(super) unsafe fn type_of(description: pg_sys::TupleDesc, number: i16) -> Option<pg_sys::Oid> {
    // SAFETY: our caller promises the description.
    unsafe { attribute(description, number).map(|attribute| attribute.atttypid) }
}

/// Whether each column is still the one of this name and type, and nothing but a statement gives it its value. Numbers are
/// remembered; a column may have been renamed since, and another one taken its name.
///
/// # Safety
/// The description is of an open relation.
pub(super) unsafe fn are_as_known(description: pg_sys::TupleDesc, columns: &[(i16, &CStr, pg_sys::Oid)]) -> bool {
    columns.iter().all(|&(number, name, of_type)| {
        // SAFETY: our caller promises the description; a name ends with a zero.
        unsafe {
            attribute(description, number).is_some_and(|attribute| {
                attribute.atttypid == of_type
                    && CStr::from_ptr(attribute.attname.data.as_ptr()) == name
                    && attribute.attgenerated == 0
                    && attribute.attidentity == 0
            })
        }
    })
}

/// The number of a column of this name and type.
///
/// # Safety
/// The description is of an open relation.
unsafe fn column_of(description: pg_sys::TupleDesc, name: &CStr, of_type: pg_sys::Oid) -> Option<i16> {
    // SAFETY: our caller promises the description; the server answers a number that is not positive where there is no such
    // column.
    unsafe {
        let number = i16::try_from(pg_sys::SPI_fnumber(description, name.as_ptr())).ok()?;
        (type_of(description, number) == Some(of_type)).then_some(number)
    }
}

fn relation_name(relation: pg_sys::Oid) -> Option<std::ffi::CString> {
    // SAFETY: a look-up by oid that answers a null pointer where there is nothing, and a C string of its own otherwise.
    unsafe {
        let name = pg_sys::get_rel_name(relation);
        if name.is_null() { None } else { Some(CStr::from_ptr(name).to_owned()) }
    }
}

fn quoted_schema(namespace: pg_sys::Oid) -> Option<Vec<u8>> {
    // SAFETY: as in `relation_name`; quote_identifier returns its argument or a C string of its own.
    unsafe {
        let name = pg_sys::get_namespace_name(namespace);
        if name.is_null() { None } else { Some(CStr::from_ptr(pg_sys::quote_identifier(name)).to_bytes().to_vec()) }
    }
}

/// Where the column of a number, which counts from 1, lies in a list of all columns.
pub(super) fn place(column: i16) -> usize {
    usize::from(column.unsigned_abs()) - 1
}

/// More columns than our tables have; of a table with more, each column is looked for by itself.
const COLUMNS: usize = 16;

/// A row of an open relation.
pub(super) struct Row {
    tuple: pg_sys::HeapTuple,
    description: pg_sys::TupleDesc,
    /// Its columns; `None` where there are more than [`COLUMNS`].
    columns: Option<[Option<pg_sys::Datum>; COLUMNS]>,
}

impl Row {
    /// # Safety
    /// Tuple and description are of one open relation, and live as long as the row.
    unsafe fn of(tuple: pg_sys::HeapTuple, description: pg_sys::TupleDesc) -> Self {
        let mut values = [pg_sys::Datum::null(); COLUMNS];
        let mut nulls = [true; COLUMNS];
        // SAFETY: our caller promises both; there is a place for each column.
        let columns = unsafe {
            usize::try_from((*description).natts).is_ok_and(|count| count <= COLUMNS).then(|| {
                pg_sys::heap_deform_tuple(tuple, description, values.as_mut_ptr(), nulls.as_mut_ptr());
                core::array::from_fn(|at| (!nulls[at]).then_some(values[at]))
            })
        };
        Self { tuple, description, columns }
    }

    /// The column as it lies in the row; `None` for NULL, and where the table has no column of this number or it is not of
    /// one of these types.
    fn datum(&self, attribute: i16, of_types: &[pg_sys::Oid]) -> Option<pg_sys::Datum> {
        let mut is_null = true;
        // SAFETY: tuple and description are of one open relation, and the number of the column is checked.
        unsafe {
            if !type_of(self.description, attribute).is_some_and(|found| of_types.contains(&found)) {
                return None;
            }
            if let Some(columns) = &self.columns {
                return columns[place(attribute)];
            }
            let datum = pg_sys::heap_getattr(self.tuple, attribute.into(), self.description, &mut is_null);
            (!is_null).then_some(datum)
        }
    }

    /// The row in a slot that holds one of a heap.
    ///
    /// # Safety
    /// The slot holds a row, and lives as long.
    pub(super) unsafe fn in_slot(slot: *mut pg_sys::TupleTableSlot) -> Self {
        // SAFETY: our caller promises the slot.
        unsafe {
            let tuple = pg_sys::ExecFetchSlotHeapTuple(slot, false, core::ptr::null_mut());
            Self::of(tuple, (*slot).tts_tupleDescriptor)
        }
    }

    /// Where the row lies.
    pub(super) fn place(&self) -> pg_sys::ItemPointerData {
        // SAFETY: the tuple lives as long as the row is held.
        unsafe { (*self.tuple).t_self }
    }

    /// A `jsonb` as it lies in the row; `None` as in [`Self::get`].
    pub(super) fn jsonb(&self, attribute: i16) -> Option<pg_sys::Datum> {
        self.datum(attribute, &[pg_sys::JSONBOID])
    }

    /// The same, copied into the memory of the caller.
    pub(super) fn copied_jsonb(&self, attribute: i16) -> Option<Jsonb> {
        let datum = self.jsonb(attribute)?;
        // SAFETY: a varlena; where it is stored elsewhere it is fetched, under the snapshot that it was found with.
        let copy = unsafe { pg_sys::pg_detoast_datum_copy(datum.cast_mut_ptr()) };
        Some(Jsonb(pg_sys::Datum::from(copy)))
    }

    /// The column, copied; `None` for NULL, and where the table has no column of this number or it has another type.
    pub(super) fn get<T: FromDatum + IntoDatum>(&self, attribute: i16) -> Option<T> {
        // A text may be taken as bytes.
        let text = if T::type_oid() == pg_sys::BYTEAOID { pg_sys::TEXTOID } else { T::type_oid() };
        let datum = self.datum(attribute, &[T::type_oid(), text])?;
        // SAFETY: not NULL and of this type; the types asked for are passed by value or copied into Rust's memory.
        unsafe { T::from_datum(datum, false) }
    }
}

/// What a column of the row that is looked for equals.
pub(super) struct Key {
    attribute: i16,
    of_type: pg_sys::Oid,
    equals: u32,
    value: pg_sys::Datum,
}

impl Key {
    pub(super) fn of_type(attribute: i16, of_type: pg_sys::Oid, equals: u32, value: pg_sys::Datum) -> Self {
        Self { attribute, of_type, equals, value }
    }

    /// A text in the database's encoding.
    pub(super) fn text(attribute: i16, value: &[u8]) -> Result<Self, Error> {
        // The bytes of a text and of a bytea lie in memory in the same way.
        let value = value.into_datum().ok_or(Error::ForeignTable)?;
        Ok(Self::of_type(attribute, pg_sys::TEXTOID, pg_sys::F_TEXTEQ, value))
    }

    /// The comparison as the server's scans want it, texts in the collation "C".
    fn scan_key(&self) -> pg_sys::ScanKeyData {
        let mut scan_key = pg_sys::ScanKeyData::default();
        // SAFETY: fills the whole of it; the comparison is one of the server's own for this type.
        unsafe {
            pg_sys::ScanKeyEntryInitialize(
                &mut scan_key,
                0,
                self.attribute,
                pg_sys::BTEqualStrategyNumber as _,
                pg_sys::InvalidOid,
                pg_sys::C_COLLATION_OID,
                self.equals.into(),
                self.value,
            );
        }
        scan_key
    }
}

/// By which index a row is looked up.
pub(super) enum Index<'a> {
    /// By none.
    None,
    /// By this one, of a catalogue.
    Of(pg_sys::Oid),
    /// By a primary key.
    Opened(&'a PrimaryKey),
}

/// The primary key of a relation, which is closed when it is not used any more.
pub(super) struct PrimaryKey(pg_sys::Relation);

impl PrimaryKey {
    /// Opens it if it is of the columns of these keys, in their order.
    ///
    /// # Safety
    /// The relation is open and locked.
    pub(super) unsafe fn open(relation: pg_sys::Relation, keys: &[Key]) -> Option<Self> {
        // SAFETY: our caller promises the relation; the index is held open while it is looked at.
        unsafe {
            if !(*relation).rd_indexvalid {
                pg_sys::list_free(pg_sys::RelationGetIndexList(relation));
            }
            let index = (*relation).rd_pkindex;
            if index == pg_sys::InvalidOid {
                return None;
            }
            let opened = Self(pg_sys::index_open(index, pg_sys::AccessShareLock as i32));
            let definition = &*(*opened.0).rd_index;
            let collations = (*opened.0).rd_indcollation;
            let usable = definition.indisvalid
                && usize::try_from(definition.indnkeyatts) == Ok(keys.len())
                && definition.indkey.values.as_slice(keys.len()).iter().eq(keys.iter().map(|key| &key.attribute))
                && (0..keys.len())
                    .all(|at| [pg_sys::InvalidOid, pg_sys::C_COLLATION_OID].contains(&*collations.add(at)));
            usable.then_some(opened)
        }
    }
}

impl Drop for PrimaryKey {
    fn drop(&mut self) {
        // After an error the server closes it.
        if !std::thread::panicking() {
            // SAFETY: opened by us, and closed once.
            unsafe { pg_sys::index_close(self.0, pg_sys::AccessShareLock as i32) };
        }
    }
}

/// The most columns that any look-up compares.
const KEYS: usize = 3;

/// Reads the first row of an open relation whose columns equal the keys, texts in the collation "C"; by the index, if there is
/// one that can be used, and under the snapshot, or one of this moment if that is null. `None` if a key's column has another
/// type by now; else the row, if there is one.
///
/// # Safety
/// The relation is open and locked, and the index is one of its own on columns that begin with those of the keys, in their order.
pub(super) unsafe fn read_first<T>(
    relation: pg_sys::Relation,
    index: &Index<'_>,
    snapshot: pg_sys::Snapshot,
    keys: &[Key],
    read: impl FnOnce(&Row) -> T,
) -> Option<Option<T>> {
    // SAFETY: the order of calls is the server's own for a scan of a catalogue. The types of the key columns, which are
    // checked under the lock, are the ones that are compared; after an error the server closes the scan.
    unsafe {
        let as_known = |key: &Key| type_of((*relation).rd_att, key.attribute) == Some(key.of_type);
        if keys.len() > KEYS || !keys.iter().all(as_known) {
            return None;
        }
        let mut scan_keys = [core::mem::zeroed::<pg_sys::ScanKeyData>(); KEYS];
        for (scan_key, key) in scan_keys.iter_mut().zip(keys) {
            *scan_key = key.scan_key();
        }
        let (count, scan_keys) = (keys.len() as i32, scan_keys.as_mut_ptr());
        let read = |tuple: pg_sys::HeapTuple| (!tuple.is_null()).then(|| read(&Row::of(tuple, (*relation).rd_att)));
        if let Index::Opened(index) = index {
            let scan = pg_sys::systable_beginscan_ordered(relation, index.0, snapshot, count, scan_keys);
            let found = read(pg_sys::systable_getnext_ordered(scan, pg_sys::ScanDirection::ForwardScanDirection));
            pg_sys::systable_endscan_ordered(scan);
            return Some(found);
        }
        let (by_index, index) = match index {
            Index::Of(index) => (true, *index),
            _ => (false, pg_sys::InvalidOid),
        };
        let scan = pg_sys::systable_beginscan(relation, index, by_index, snapshot, count, scan_keys);
        let found = read(pg_sys::systable_getnext(scan));
        pg_sys::systable_endscan(scan);
        Some(found)
    }
}

/// [`read_first`] of a catalogue that is opened for it, with a snapshot of this moment.
fn first_row<T>(
    catalog: pg_sys::Oid,
    index: &Index<'_>,
    keys: &[Key],
    read: impl FnOnce(&Row) -> T,
) -> Option<Option<T>> {
    // SAFETY: the relation stays open and locked until the row has been read; after an error the server closes it.
    unsafe {
        let relation = pg_sys::relation_open(catalog, pg_sys::AccessShareLock as i32);
        let found = read_first(relation, index, core::ptr::null_mut(), keys, read);
        pg_sys::relation_close(relation, pg_sys::AccessShareLock as i32);
        found
    }
}
