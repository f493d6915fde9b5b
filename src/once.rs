//! The one core: look up, compare, claim, look again. Requests and messages both go through [`once`].

use pgrx::spi::{Spi, SpiClient};

use crate::error::Error;
use crate::statement;

/// Something that happens once, and is known by its record.
pub trait Once {
    /// What the caller is told, the first time and every other time.
    type Answer;

    /// The answer of the record, if there is one and it came from the same request; a mismatch is an error. Takes no
    /// lock and writes nothing.
    fn find(&self, connected: &SpiClient<'_>) -> Result<Option<Self::Answer>, Error>;

    /// Takes the record's identity, together with the final answer, and makes the effect. `None` if nothing was done:
    /// the identity is taken, or [`Self::refuse`] knows the reason.
    fn claim(&self, connected: &SpiClient<'_>) -> Result<Option<Self::Answer>, Error>;

    /// Refuses for the reason for which [`Self::claim`] did nothing although the identity is free: an error, or an answer
    /// where refusals are saved. `None` if there is no such reason any more, as after a top-up.
    fn refuse(&self, connected: &SpiClient<'_>) -> Result<Option<Self::Answer>, Error>;

    /// The account, whose lock every claim takes, and the table of the record.
    fn place(&self) -> (i64, &'static str);
}

/// Executes the first time, and answers from the record every other time.
///
/// The look-up alone decides nothing: the unique index does, in [`Once::claim`]. Whoever loses there looks again, with a
/// fresh snapshot, and finds either the winner's record or the reason for a refusal. If it finds neither, a purge removed
/// the record or a top-up arrived in between; once the account is locked nothing can come in between any more.
pub fn once<O: Once>(what: &O) -> Result<O::Answer, Error> {
    Spi::connect(|connected| {
        if let Some(answer) = what.find(connected)? {
            return Ok(answer);
        }
        if let Some(answer) = attempt(what, connected)? {
            return Ok(answer);
        }
        let (account, table) = what.place();
        if statement::LOCK_ACCOUNT.run(connected, &[account.into()])?.is_empty() {
            what.refuse(connected)?;
            return Err(Error::AccountDenied(account));
        }
        attempt(what, connected)?.ok_or(Error::WriteSuppressed(table))
    })
}

fn attempt<O: Once>(what: &O, connected: &SpiClient<'_>) -> Result<Option<O::Answer>, Error> {
    for step in [O::claim, O::find, O::refuse] {
        if let Some(answer) = step(what, connected)? {
            return Ok(Some(answer));
        }
    }
    Ok(None)
}
