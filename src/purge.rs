//! Purge: deletes what is older than its retention.

use pgrx::datum::{Interval, TimestampWithTimeZone};
use pgrx::spi::Spi;

use crate::error::Error;
use crate::statement;

/// See [`crate::api`].
pub fn purge_expired_keys(retention: Option<Interval>) -> Result<i64, Error> {
    let retention = retention.ok_or(Error::RetentionRequired)?;
    Spi::connect(|client| {
        let cutoff = statement::FIND_CUTOFF
            .run(client, &[retention.into()])?
            .first::<TimestampWithTimeZone>(1)?
            .ok_or(Error::RetentionRequired)?;
        let deleted = statement::DELETE_EXPIRED_KEYS.run(client, &[cutoff.into()])?;
        Ok(i64::try_from(deleted.len()).unwrap_or(i64::MAX))
    })
}
