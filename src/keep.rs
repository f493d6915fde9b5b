//! What keeps records as they are: the triggers on `request_result` and `processed_message`.

use std::cell::RefCell;

use pgrx::datum::TimestampWithTimeZone;
use pgrx::prelude::*;
use pgrx::spi::Spi;

use crate::error::Error;
use crate::purge::{self, Kind};
use crate::raw::{self, RecordTable, Row};

thread_local! {
    /// What the purge that this session is running may delete.
    static PURGING: RefCell<Option<Purge>> = const { RefCell::new(None) };
}

/// The records of one operation or subscriber that are older than the cutoff.
struct Purge {
    table: RecordTable,
    name: Vec<u8>,
    cutoff: i64,
}

/// While it lives, a purge may delete what it is to delete.
pub struct Purging {
    before: Option<Purge>,
}

impl Purging {
    /// Begins a batch of a purge.
    pub fn begin(kind: &'static Kind, name: &[u8], cutoff: TimestampWithTimeZone) -> Result<Self, Error> {
        let purge = Purge { table: kind.table()?, name: name.to_vec(), cutoff: cutoff.into() };
        Ok(Self { before: PURGING.with_borrow_mut(|purging| purging.replace(purge)) })
    }
}

impl Drop for Purging {
    fn drop(&mut self) {
        let before = self.before.take();
        PURGING.with_borrow_mut(|purging| *purging = before);
    }
}

/// The trigger function: refuses an UPDATE, a TRUNCATE, and a DELETE of a record whose retention has not passed. A DELETE by
/// hand of one that has expired moves the fence as a purge does.
pub fn keep(trigger: &PgTrigger<'_>) -> Result<Row, Error> {
    match trigger.op() {
        Ok(PgTriggerOperation::Delete) => {}
        Ok(PgTriggerOperation::Truncate) => return Err(Error::RecordKept("truncated away")),
        _ => return Err(Error::RecordKept("updated")),
    }
    let purged = PURGING.with_borrow(|purging| {
        purging.as_ref().is_some_and(|purge| purge.table.is_of(trigger, &purge.name, purge.cutoff))
    });
    if !purged {
        let kind = Kind::of_table(trigger.relid().map_err(|_| Error::ForeignTable)?)?;
        let (name, made) = kind.table()?.record(trigger)?;
        Spi::connect(|connected| {
            let cutoff = purge::expired_before(connected, kind, &name)?;
            if made >= i64::from(cutoff) {
                return Err(Error::RecordKept("deleted before its retention has passed"));
            }
            // The fence moves once for many records.
            match kind.find_fence(&name)? {
                Some(fence) if i64::from(fence) > made => Ok(()),
                _ => purge::move_fence(connected, kind, &name, cutoff),
            }
        })?;
    }
    raw::deleted_record(trigger)
}
