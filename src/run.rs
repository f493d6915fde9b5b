//! An operation of the user's own: its handler runs once for each key.

use pgrx::datum::TimestampWithTimeZone;
use pgrx::spi::SpiClient;

use crate::account;
use crate::error::Error;
use crate::policy::Policy;
use crate::raw::{Jsonb, Procedure, Text};
use crate::request::{self, InFlight, Operation, Outcome, Request};
use crate::{balance, statement};

struct Handler {
    function: Procedure,
    parameters: Jsonb,
}

/// The operation as accepted, and what became of the request. See [`crate::api`].
pub fn run(
    account: Option<i64>,
    operation: Option<Text>,
    key: Option<Text>,
    parameters: Option<Jsonb>,
    handler: Option<Procedure>,
    first_sent: Option<TimestampWithTimeZone>,
) -> Result<(String, Outcome), Error> {
    let account = account.ok_or(Error::Required("account"))?;
    let operation = request::accept_operation(operation)?;
    if [balance::DEBIT, balance::CREDIT].contains(&operation.as_str()) {
        return Err(Error::BuiltIn(operation));
    }
    let key = request::accept_key(key, Error::Required("key"))?;
    let parameters = parameters.ok_or(Error::Required("request"))?;
    let function = handler.ok_or(Error::Required("handler"))?;
    pgrx::Spi::connect(|connected| check_handler(connected, function))?;
    let handler = Handler { function, parameters };
    let outcome = request::execute_once(account, &operation, key, first_sent, parameters, &handler)?;
    Ok((operation, outcome))
}

/// Refuses a handler that does not exist, has another signature, or that the caller may not execute.
fn check_handler(connected: &SpiClient<'_>, handler: Procedure) -> Result<(), Error> {
    let found = statement::FIND_HANDLER.run(connected, &[handler.into()])?;
    let name = || Ok::<_, Error>(found.first::<Text>(1)?.map(Text::to_message));
    match (found.first::<bool>(2)?, found.first::<bool>(3)?) {
        (Some(true), Some(true)) => Ok(()),
        (Some(true), Some(false)) => Err(Error::HandlerDenied(name()?.unwrap_or_default())),
        _ => Err(Error::HandlerSignature(name()?)),
    }
}

impl Handler {
    /// Runs the handler with the caller's rights. Checked once more, since it may have been dropped, or the right revoked,
    /// while the account's lock was waited for.
    fn call(&self, connected: &SpiClient<'_>, account: i64) -> Result<Jsonb, Error> {
        check_handler(connected, self.function)?;
        self.function.call(connected, account, self.parameters).ok_or(Error::NullResponse)
    }
}

impl Operation for Handler {
    /// Locks the account first. Whoever executes or cancels a request of the account does so, hence the request is either
    /// answered when the lock is there, or nobody else executes it; the handler runs, and its result is inserted as a
    /// finished record. So there is no unfinished record that could be committed.
    fn execute(&self, connected: &SpiClient<'_>, request: &Request<'_>) -> Result<Option<Outcome>, Error> {
        let account = request.identity.account;
        account::lock(connected, account)?;
        if let Some(outcome) = request.find(connected)? {
            return Ok(Some(outcome));
        }
        // Before the handler runs, as everything else that can refuse the request.
        let stored = request.stored(&Policy::of(request.identity.operation)?)?;
        let response = {
            let _in_flight = InFlight::begin(request.identity);
            self.call(connected, account)?
        };
        let saved = statement::SAVE_RESPONSE.run(connected, &request.claim(stored, response))?;
        match Outcome::of_claim(&saved)? {
            Some(outcome) => Ok(Some(outcome)),
            // What the handler did must not stay.
            None => Err(request.identity.not_saved(connected)?),
        }
    }

    fn refuse(&self, connected: &SpiClient<'_>, request: &Request<'_>) -> Result<Option<Outcome>, Error> {
        account::check_exists(connected, request.identity.account)?;
        Ok(None)
    }

    fn execute_unprotected(&self, connected: &SpiClient<'_>, account: i64) -> Result<Jsonb, Error> {
        account::lock(connected, account)?;
        self.call(connected, account)
    }
}
