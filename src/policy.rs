//! What is declared for an operation in `operation_policy`, and for a subscriber in `subscriber_policy`.

use pgrx::datum::{Interval, TimestampWithTimeZone};

use crate::error::Error;
use crate::raw::{self, PolicyRow};
use crate::{setting, statement};

/// The policy of an operation; the default is that of an operation without a row.
///
/// It is read as it is at this moment, and without a privilege of the caller, who is subject to it and need not see it.
pub struct Policy(Option<PolicyRow>);

impl Policy {
    /// What is declared for the operation now.
    pub fn of(operation: &str) -> Result<Self, Error> {
        match statement::own_table(c"operation_policy")? {
            Some(table) => Ok(Self(raw::find_policy(table, operation)?)),
            None => Ok(Self(None)),
        }
    }

    /// Whether a refusal becomes the stored response.
    pub fn saves_refusals(&self) -> bool {
        self.0.as_ref().is_some_and(|row| row.refusals == b"save")
    }

    /// Whether no more than a fingerprint of the request is stored.
    pub fn stores_fingerprint(&self) -> bool {
        self.0.as_ref().is_some_and(|row| row.stored_request == b"fingerprint")
    }

    /// How long a record of the operation is kept.
    pub fn retention(&self) -> Interval {
        self.0.as_ref().and_then(|row| row.retention).unwrap_or_else(setting::retention)
    }

    /// When a record of this time may be purged.
    pub fn expiry(&self, executed_at: TimestampWithTimeZone) -> TimestampWithTimeZone {
        executed_at + self.retention()
    }
}

/// How long a subscriber's records of messages are kept.
pub fn message_retention(subscriber: &[u8]) -> Result<Interval, Error> {
    let declared = match statement::own_table(c"subscriber_policy")? {
        Some(table) => raw::find_subscriber_retention(table, subscriber)?,
        None => None,
    };
    Ok(declared.unwrap_or_else(setting::message_retention))
}
