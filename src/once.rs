//! The one core: look up, compare, claim, replay. A stored response leaves through [`Request::replay`] alone, which
//! compares the request first.

use pgrx::datum::DatumWithOid;
use pgrx::spi::{Spi, SpiClient};

use crate::error::{Error, KEY_BYTES};
use crate::raw::{Jsonb, Text};
use crate::statement;

/// How often a key may be found neither taken nor free before the client is told to come back. A round is lost only if
/// a purge removed the record, or a top-up arrived, between a claim and the look-up after it.
const ATTEMPTS: usize = 8;

/// One client's intention: the identity (account, operation, key), and what is asked for.
#[derive(Clone, Copy)]
pub struct Request {
    /// The account, first part of the scope.
    pub account: i64,
    /// The named and versioned contract, such as `debit:v1`, second part of the scope.
    pub operation: &'static str,
    /// The client's key, as [`accept_key`] let it pass.
    pub key: Text,
    /// The normalized business parameters.
    pub parameters: Jsonb,
}

/// What is particular to an operation.
pub trait Operation {
    /// Takes the key together with the final response, and makes the effect. `None` if that was not possible and
    /// nothing was done: the key is taken, or [`Self::refuse`] knows the reason.
    fn execute(&self, client: &SpiClient<'_>, request: &Request) -> Result<Option<Jsonb>, Error>;

    /// Refuses for the reason for which [`Self::execute`] did nothing although the key is free. `Ok` if there is none
    /// any more, as after a top-up.
    fn refuse(&self, client: &SpiClient<'_>, request: &Request) -> Result<(), Error>;
}

/// A key of 1 to [`KEY_BYTES`] bytes; `None` for NULL and the empty key.
pub fn accept_key(key: Option<Text>) -> Result<Option<Text>, Error> {
    match key.map(|key| (key, key.octet_length())) {
        None | Some((_, 0)) => Ok(None),
        Some((_, length)) if length > KEY_BYTES => Err(Error::KeyTooLong(length)),
        Some((key, _)) => Ok(Some(key)),
    }
}

/// Executes the operation the first time, and answers with the stored response every other time.
///
/// The look-up alone decides nothing: the unique index does, in [`Operation::execute`]. Whoever loses there looks again,
/// with a fresh snapshot, and finds either the winner's record or the reason for a refusal.
pub fn once(request: &Request, operation: &impl Operation) -> Result<Jsonb, Error> {
    Spi::connect(|client| {
        if let Some(response) = request.replay(client)? {
            return Ok(response);
        }
        for _ in 0..ATTEMPTS {
            if let Some(response) = operation.execute(client, request)? {
                return Ok(response);
            }
            if let Some(response) = request.replay(client)? {
                return Ok(response);
            }
            operation.refuse(client, request)?;
        }
        Err(Error::Contended(ATTEMPTS))
    })
}

impl Request {
    /// The four values that every statement on the record begins with.
    pub fn arguments<'a>(&self) -> [DatumWithOid<'a>; 4] {
        [self.account.into(), self.operation.into(), self.key.into(), self.parameters.into()]
    }

    /// The stored response, if the key is known and came with the same request.
    fn replay(&self, client: &SpiClient<'_>) -> Result<Option<Jsonb>, Error> {
        let row = statement::FIND.run(client, &self.arguments())?;
        if row.is_empty() {
            return Ok(None);
        }
        if row.first::<bool>(1)? != Some(true) {
            return Err(self.mismatch(client)?);
        }
        row.first::<Jsonb>(2)
    }

    /// The refusal of a known key with another request.
    fn mismatch(&self, client: &SpiClient<'_>) -> Result<Error, Error> {
        let row = statement::FIND_DIFFERENCE.run(client, &self.arguments())?;
        Ok(Error::KeyReused(row.first::<String>(1)?))
    }
}
