//! What is declared for an operation in `operation_policy`.

use pgrx::datum::TimestampWithTimeZone;

use crate::error::Error;
use crate::raw::{self, PolicyRow};
use crate::statement;

/// The policy of an operation; the default is that of an operation without a row.
///
/// It is read as it is at this moment, and without a privilege of the caller, who is subject to it and need not see it.
pub struct Policy(Option<PolicyRow>);

impl Policy {
    /// What is declared for the operation now.
    pub fn of(operation: &str) -> Result<Self, Error> {
        match statement::policy_table()? {
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

    /// When a record of this time may be purged; `None` while no retention is declared.
    pub fn expiry(&self, executed_at: TimestampWithTimeZone) -> Option<TimestampWithTimeZone> {
        self.0.as_ref()?.retention.map(|retention| executed_at + retention)
    }
}
