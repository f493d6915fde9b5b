//! The one core: look up, compare, claim, look again. Requests and messages both go through [`once`].

use pgrx::spi::{Spi, SpiClient};

use crate::account;
use crate::error::Error;

/// Something that happens once, and is known by its record.
pub trait Once {
    /// What the caller is told, the first time and every other time.
    type Answer;

    /// The answer of the record, if there is one and it came from the same request; a mismatch is an error. Takes no
    /// lock and writes nothing.
    fn find(&self, connected: &SpiClient<'_>) -> Result<Option<Self::Answer>, Error>;

    /// As [`Self::find`], without a connection to SPI, where that is quicker; `None` where [`Self::find`] has to be asked.
    fn find_first(&self) -> Result<Option<Option<Self::Answer>>, Error> {
        Ok(None)
    }

    /// Takes the record's identity, together with the final answer, and makes the effect. `None` if nothing was done:
    /// the identity is taken, or [`Self::refuse`] knows the reason.
    fn claim(&self, connected: &SpiClient<'_>) -> Result<Option<Self::Answer>, Error>;

    /// As [`Self::claim`], without a connection to SPI, where that is quicker; `None` if nothing was done.
    fn claim_first(&self) -> Result<Option<Self::Answer>, Error> {
        Ok(None)
    }

    /// Refuses for the reason for which [`Self::claim`] did nothing although the identity is free: an error, or an answer
    /// where refusals are saved. `None` if there is no such reason any more, as after a top-up.
    fn refuse(&self, connected: &SpiClient<'_>) -> Result<Option<Self::Answer>, Error>;

    /// Refuses what is too old to say whether it happened: its record may have been purged. Asked where there is no record.
    fn check_age(&self) -> Result<(), Error>;

    /// Whether the answer is one that was recorded before.
    fn is_repeat(answer: &Self::Answer) -> bool;

    /// The account, whose lock every claim takes, and the table of the record.
    fn place(&self) -> (i64, &'static str);
}

/// How often a claim is tried with the account locked. Only a purge can come in between then, and remove the record that a
/// claim ran into; once it has, the next one succeeds.
const ATTEMPTS: usize = 2;

/// Executes the first time, and answers from the record every other time.
///
/// The look-up alone decides nothing: the unique index does, in [`Once::claim`]. Whoever loses there looks again, with a
/// fresh snapshot, and finds the winner's record. Who finds none may be refused, but not before the account is locked:
/// whoever executes or cancels a request of the account locks it, and one in flight may yet make the refusal wrong.
///
/// The age is asked for before anything is done, and again when something was, or is refused: a purge may have deleted the
/// record in between, but then it has moved the fence in the same transaction. A record that is there answers whatever its age.
pub fn once<O: Once>(what: &O) -> Result<O::Answer, Error> {
    let in_time = |answer: Result<Option<O::Answer>, Error>| {
        let recorded = matches!(&answer, Ok(Some(answer)) if O::is_repeat(answer));
        if !recorded && !matches!(answer, Ok(None)) {
            what.check_age()?;
        }
        answer
    };
    let (account, table) = what.place();
    let mut found = Ok(None);
    if !account::is_secured()? {
        found = what.find_first();
        // It may have become so while the look-up waited for a lock.
        if account::is_secured()? {
            found = Ok(None);
        }
    }
    let found = found?;
    match found {
        Some(Some(answer)) => return Ok(answer),
        Some(None) => {
            what.check_age()?;
            // An error there leaves nothing that could be asked.
            if let Some(answer) = in_time(Ok(what.claim_first()?))? {
                return Ok(answer);
            }
        }
        None => {}
    }
    Spi::connect(|connected| {
        if found.is_none() {
            account::check_visible(connected, account)?;
            if let Some(answer) = what.find(connected)? {
                return Ok(answer);
            }
        }
        what.check_age()?;
        if let Some(answer) = in_time(what.claim(connected))? {
            return Ok(answer);
        }
        if let Some(answer) = what.find(connected)? {
            return Ok(answer);
        }
        account::lock(connected, account)?;
        for _ in 0..ATTEMPTS {
            if let Some(answer) = in_time(what.claim(connected))? {
                return Ok(answer);
            }
            if let Some(answer) = what.find(connected)? {
                return Ok(answer);
            }
            if let Some(answer) = in_time(what.refuse(connected))? {
                return Ok(answer);
            }
        }
        Err(Error::WriteSuppressed(table))
    })
}
