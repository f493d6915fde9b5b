//! Cancel: makes sure that a request never runs, or tells what it answered.

use pgrx::spi::SpiClient;

use crate::account;
use crate::error::Error;
use crate::fence::{FirstSent, Subject};
use crate::once::{self, Once};
use crate::raw::{Jsonb, Text};
use crate::request::{self, Identity};
use crate::statement;

struct Cancellation<'a> {
    identity: Identity<'a>,
}

/// See [`crate::api`].
pub fn cancel(account: Option<i64>, operation: Option<Text>, key: Option<Text>) -> Result<Option<Jsonb>, Error> {
    let account = account.ok_or(Error::Required("account"))?;
    let operation = request::accept_operation(operation)?;
    let key = request::accept_name("key", key.ok_or(Error::Required("key"))?, Error::Required("key"))?;
    let identity = Identity { account, operation: &operation, key };
    identity.check_not_in_flight()?;
    once::once(&Cancellation { identity })
}

impl Once for Cancellation<'_> {
    type Answer = Option<Jsonb>;

    fn find(&self, connected: &SpiClient<'_>) -> Result<Option<Self::Answer>, Error> {
        let saved = statement::FIND_SAVED.run(connected, &self.identity.arguments())?;
        if saved.is_empty() {
            return Ok(None);
        }
        if saved.first::<bool>(2)? == Some(true) { Ok(Some(None)) } else { Ok(Some(saved.first::<Jsonb>(1)?)) }
    }

    /// Waits for an execution in flight at the lock of its account.
    fn claim(&self, connected: &SpiClient<'_>) -> Result<Option<Self::Answer>, Error> {
        let cancelled = statement::CANCEL.run(connected, &self.identity.arguments())?;
        match cancelled.first::<bool>(1)? {
            None => Ok(None),
            Some(true) => Ok(Some(None)),
            Some(false) => Err(Error::WriteSuppressed(request::TABLE)),
        }
    }

    fn refuse(&self, connected: &SpiClient<'_>) -> Result<Option<Self::Answer>, Error> {
        account::check_exists(connected, self.identity.account)?;
        Ok(None)
    }

    /// To say "it never ran" of a request whose record may have been purged would be a guess.
    fn check_age(&self) -> Result<(), Error> {
        FirstSent::of_key(self.identity.key, None)
            .map_or(Ok(()), |date| date.check(Subject::Operation(self.identity.operation)))
    }

    fn is_repeat(answer: &Self::Answer) -> bool {
        answer.is_some()
    }

    fn place(&self) -> (i64, &'static str) {
        (self.identity.account, request::TABLE)
    }
}
