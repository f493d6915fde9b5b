//! Reading a row by its table's oid, past the executor: with a snapshot of this very moment, with no permission asked, and
//! with no name looked up and no code of anybody's run. So nobody can put another relation in the place of the one meant.

use core::ffi::CStr;

use pgrx::datum::Interval;
use pgrx::prelude::*;

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
    /// The extension's own `operation_policy`, if its version has one.
    pub policy_table: Option<pg_sys::Oid>,
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
    let key = pg_sys::Datum::from(name.as_ptr());
    let index = pg_sys::Oid::from(pg_sys::ExtensionNameIndexId);
    let attribute = pg_sys::Anum_pg_extension_extname as i16;
    let (oid, namespace, version, tables) =
        first_row(pg_sys::ExtensionRelationId, index, attribute, pg_sys::F_NAMEEQ, key, |row| {
            let namespace = row.get::<pg_sys::Oid>(pg_sys::Anum_pg_extension_extnamespace as i16)?;
            let version = row.get::<Vec<u8>>(pg_sys::Anum_pg_extension_extversion as i16)?;
            let tables = row.get::<Vec<pg_sys::Oid>>(pg_sys::Anum_pg_extension_extconfig as i16).unwrap_or_default();
            Some((row.get::<pg_sys::Oid>(pg_sys::Anum_pg_extension_oid as i16)?, namespace, version, tables))
        })???;
    // Who may write pg_extension.extconfig is who creates the extension, so that its tables are the extension's own.
    let policy_table = tables.into_iter().find(|&table| relation_name(table).as_deref() == Some(c"operation_policy"));
    Some(Extension { oid, version, schema: quoted_schema(namespace)?, policy_table })
}

/// The row of an operation in the extension's `operation_policy`; an error if that is not the table that it was created as.
/// A policy that could not be read must not be taken for none.
pub fn find_policy(table: pg_sys::Oid, operation: &str) -> Result<Option<PolicyRow>, Error> {
    let operation_column = column(table, c"operation", pg_sys::TEXTOID)?;
    let refusals = column(table, c"refusals", pg_sys::TEXTOID)?;
    let stored_request = column(table, c"stored_request", pg_sys::TEXTOID)?;
    let retention = column(table, c"retention", pg_sys::INTERVALOID)?;
    let key = operation.into_datum().ok_or(Error::Operation)?;
    // No index: there are few operations, and which index the table's owner has is not for sure.
    let found = first_row(table, pg_sys::InvalidOid, operation_column, pg_sys::F_TEXTEQ, key, |row| {
        Some(PolicyRow {
            refusals: row.get(refusals)?,
            stored_request: row.get(stored_request)?,
            retention: row.get(retention),
        })
    })
    .ok_or(Error::ForeignTable)?;
    match found {
        Some(None) => Err(Error::ForeignTable),
        Some(row) => Ok(row),
        None => Ok(None),
    }
}

/// The number of a column of this name and type.
fn column(table: pg_sys::Oid, name: &CStr, of_type: pg_sys::Oid) -> Result<i16, Error> {
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

struct Row {
    tuple: pg_sys::HeapTuple,
    description: pg_sys::TupleDesc,
}

impl Row {
    /// The column, copied; `None` for NULL, and where the table has no column of this number or it has another type.
    fn get<T: FromDatum + IntoDatum>(&self, attribute: i16) -> Option<T> {
        let mut is_null = true;
        // SAFETY: tuple and description are of one open relation. The types asked for are passed by value or copied into
        // Rust's memory, and a text may be taken as bytes.
        unsafe {
            let columns = (*self.description).natts;
            if i32::from(attribute) < 1 || i32::from(attribute) > columns {
                return None;
            }
            let found = pg_sys::SPI_gettypeid(self.description, attribute.into());
            if found != T::type_oid() && !(found == pg_sys::TEXTOID && T::type_oid() == pg_sys::BYTEAOID) {
                return None;
            }
            let datum = pg_sys::heap_getattr(self.tuple, attribute.into(), self.description, &mut is_null);
            T::from_datum(datum, is_null)
        }
    }
}

/// Reads the first row whose attribute, of the type that `equals` compares, equals the key in the collation "C". `None` if
/// there is no such table any more, or it has been altered since its columns were looked up; else the row, if there is one.
fn first_row<T>(
    table: pg_sys::Oid,
    index: pg_sys::Oid,
    attribute: i16,
    equals: u32,
    key: pg_sys::Datum,
    read: impl FnOnce(&Row) -> T,
) -> Option<Option<T>> {
    let key_type = if equals == pg_sys::F_NAMEEQ { pg_sys::NAMEOID } else { pg_sys::TEXTOID };
    // SAFETY: the order of calls is the server's own for a scan of a catalogue. The relation stays open and locked until
    // the row has been read, so that the type of its key column, which is checked under the lock, is the one that is
    // compared; after an error the server closes all.
    unsafe {
        let relation = pg_sys::try_relation_open(table, pg_sys::AccessShareLock as i32);
        if relation.is_null() {
            return None;
        }
        let mut result = None;
        if pg_sys::SPI_gettypeid((*relation).rd_att, attribute.into()) == key_type {
            let mut scan_key = core::mem::zeroed::<pg_sys::ScanKeyData>();
            pg_sys::ScanKeyEntryInitialize(
                &mut scan_key,
                0,
                attribute,
                pg_sys::BTEqualStrategyNumber as _,
                pg_sys::InvalidOid,
                pg_sys::C_COLLATION_OID,
                equals.into(),
                key,
            );
            let by_index = index != pg_sys::InvalidOid;
            let scan = pg_sys::systable_beginscan(relation, index, by_index, core::ptr::null_mut(), 1, &mut scan_key);
            let tuple = pg_sys::systable_getnext(scan);
            result = Some((!tuple.is_null()).then(|| read(&Row { tuple, description: (*relation).rd_att })));
            pg_sys::systable_endscan(scan);
        }
        pg_sys::relation_close(relation, pg_sys::AccessShareLock as i32);
        result
    }
}
