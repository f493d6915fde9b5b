//! What is declared for an operation in `operation_policy`.

use pgrx::spi::SpiClient;

use crate::error::Error;
use crate::statement;

/// The policy of an operation; the default is that of an operation without a row.
#[derive(Default)]
pub struct Policy {
    /// Whether a refusal becomes the stored response.
    pub saves_refusals: bool,
    /// Whether no more than a fingerprint of the request is stored.
    pub stores_fingerprint: bool,
}

impl Policy {
    /// Read with the rights of the extension's owner, since every caller is subject to it and none needs to see it.
    pub fn of(connected: &SpiClient<'_>, operation: &str) -> Result<Self, Error> {
        let declared = statement::FIND_POLICY.run_as_owner(connected, &[operation.into()])?;
        let is = |column| Ok(declared.first::<bool>(column)? == Some(true));
        Ok(Self { saves_refusals: is(1)?, stores_fingerprint: is(2)? })
    }
}
