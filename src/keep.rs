//! What keeps records as they are: the triggers on `request_result` and `processed_message`.

use std::cell::Cell;

use pgrx::datum::TimestampWithTimeZone;
use pgrx::heap_tuple::PgHeapTuple;
use pgrx::pgbox::AllocatedByPostgres;
use pgrx::prelude::*;
use pgrx::spi::Spi;

use crate::error::Error;
use crate::purge::{self, Kind};
use crate::raw;

thread_local! {
    /// Up to when the purge that this session is running may delete.
    static PURGING: Cell<Option<i64>> = const { Cell::new(None) };
}

/// While it lives, records that are older than the cutoff may be deleted.
pub struct Purging {
    before: Option<i64>,
}

impl Purging {
    /// Begins a batch of a purge.
    pub fn begin(cutoff: TimestampWithTimeZone) -> Self {
        Self { before: PURGING.replace(Some(cutoff.into())) }
    }
}

impl Drop for Purging {
    fn drop(&mut self) {
        PURGING.set(self.before);
    }
}

/// The trigger function: refuses an UPDATE, a TRUNCATE, and a DELETE of a record whose retention has not passed. A DELETE by
/// hand of one that has expired moves the fence as a purge does.
pub fn keep<'a>(trigger: &'a PgTrigger<'a>) -> Result<Option<PgHeapTuple<'a, AllocatedByPostgres>>, Error> {
    match trigger.op() {
        Ok(PgTriggerOperation::Delete) => {}
        Ok(PgTriggerOperation::Truncate) => return Err(Error::RecordKept("truncated away")),
        _ => return Err(Error::RecordKept("updated")),
    }
    let made = i64::from(raw::deleted_creation(trigger)?);
    if PURGING.get().is_none_or(|cutoff| made >= cutoff) {
        let kind = Kind::of_table(trigger.relid().map_err(|_| Error::ForeignTable)?)?;
        let name = raw::deleted_text(trigger, kind.column())?;
        Spi::connect(|connected| {
            let cutoff = purge::expired_before(connected, kind, &name)?;
            if made >= i64::from(cutoff) {
                return Err(Error::RecordKept("deleted before its retention has passed"));
            }
            purge::move_fence(connected, kind, &name, cutoff)
        })?;
    }
    Ok(trigger.old())
}
