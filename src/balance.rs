//! Debit and credit: they change the balance of an account by an amount, never below zero.

use pgrx::datum::TimestampWithTimeZone;
use pgrx::spi::SpiClient;
use serde::Serialize;

use crate::account;
use crate::error::Error;
use crate::policy::Policy;
use crate::raw::{self, Claim, Claiming, Jsonb, Text};
use crate::request::{self, Identity, Operation, Outcome, Request, Stored};
use crate::statement;

/// The contract of [`debit`]. A change of its request or response is a new version.
pub const DEBIT: &str = "debit:v1";
/// The contract of [`credit`].
pub const CREDIT: &str = "credit:v1";

/// The request as it is stored and compared, where it is wanted as JSON.
#[derive(Serialize)]
struct Amount {
    amount: i64,
}

/// A change as accepted.
pub struct Accepted {
    /// Whose balance changes.
    pub account: i64,
    /// `None` where the client sends none yet, and need not.
    pub key: Option<Text>,
    /// How much, above zero.
    pub amount: i64,
}

/// Which way the money goes.
#[derive(Clone, Copy)]
pub enum Direction {
    /// From the account.
    Debit,
    /// To the account.
    Credit,
}

struct Change {
    by: i64,
}

/// Debits the account, see [`crate::api`].
pub fn debit(
    account: Option<i64>,
    key: Option<Text>,
    amount: Option<i64>,
    first_sent: Option<TimestampWithTimeZone>,
) -> Result<Outcome, Error> {
    change(Direction::Debit, account, key, amount, first_sent)
}

/// Credits the account, see [`crate::api`].
pub fn credit(
    account: Option<i64>,
    key: Option<Text>,
    amount: Option<i64>,
    first_sent: Option<TimestampWithTimeZone>,
) -> Result<Outcome, Error> {
    change(Direction::Credit, account, key, amount, first_sent)
}

fn change(
    direction: Direction,
    account: Option<i64>,
    key: Option<Text>,
    amount: Option<i64>,
    first_sent: Option<TimestampWithTimeZone>,
) -> Result<Outcome, Error> {
    let Accepted { account, key, amount } = accept(account, key, amount)?;
    let parameters = Jsonb::of_integer("amount", amount);
    let change = Change { by: direction.signed(amount) };
    request::execute_once(account, direction.operation(), key, first_sent, parameters, &change)
}

/// The arguments of a change, checked.
pub fn accept(account: Option<i64>, key: Option<Text>, amount: Option<i64>) -> Result<Accepted, Error> {
    let Some(amount @ 1..) = amount else {
        return Err(Error::KeyAndAmountRequired);
    };
    let key = request::accept_key(key, Error::KeyAndAmountRequired)?;
    let account = account.ok_or(Error::Required("account"))?;
    Ok(Accepted { account, key, amount })
}

/// The request for a change of this amount, as JSON.
pub fn json(amount: i64) -> Result<String, Error> {
    serde_json::to_string(&Amount { amount }).map_err(Error::Json)
}

impl Direction {
    /// Under which operation a change is recorded.
    pub fn operation(self) -> &'static str {
        match self {
            Self::Debit => DEBIT,
            Self::Credit => CREDIT,
        }
    }

    /// What an amount, which is above zero, adds to the balance.
    pub fn signed(self, amount: i64) -> i64 {
        match self {
            Self::Debit => -amount,
            Self::Credit => amount,
        }
    }
}

impl Operation for Change {
    fn execute(&self, connected: &SpiClient<'_>, request: &Request<'_>) -> Result<Option<Outcome>, Error> {
        let policy = Policy::of(request.identity.operation)?;
        let claimed = statement::CLAIM.run(connected, &request.claim(request.stored(&policy)?, self.by))?;
        let Some(outcome) = Outcome::of_claim(&claimed)? else {
            return Ok(None);
        };
        let account = request.identity.account;
        let updated = statement::CHANGE_CLAIMED_BALANCE
            .run(connected, &[account.into(), self.by.into(), outcome.response.into()])?;
        if updated.len() != 1 || updated.first::<bool>(1)? != Some(true) {
            return Err(Error::WriteSuppressed("account"));
        }
        Ok(Some(outcome))
    }

    fn execute_first(&self, request: &Request<'_>) -> Result<Option<Outcome>, Error> {
        let Some(tables) = statement::claim_tables()? else {
            return Ok(None);
        };
        let Identity { account, operation, key } = request.identity;
        let Stored { request: stored, fingerprint } = request.stored(&Policy::of(operation)?)?;
        let claim = Claim { account, operation, key, request: stored, fingerprint, change: self.by };
        match raw::claim(&tables, &claim)? {
            Claiming::Done(claimed) => Ok(Some(Outcome::of_record(claimed))),
            Claiming::Taken => request.find_first().map(Option::flatten),
            Claiming::Unable => Ok(None),
        }
    }

    fn refuse(&self, connected: &SpiClient<'_>, request: &Request<'_>) -> Result<Option<Outcome>, Error> {
        let account = request.identity.account;
        if !account::is_insufficient(connected, account, self.by)? {
            return Ok(None);
        }
        let policy = Policy::of(request.identity.operation)?;
        if !policy.saves_refusals() {
            return Err(Error::InsufficientBalance(account));
        }
        let claimed = statement::CLAIM_REFUSAL.run(connected, &request.claim(request.stored(&policy)?, self.by))?;
        Outcome::of_claim(&claimed)
    }

    fn execute_unprotected(&self, connected: &SpiClient<'_>, account: i64) -> Result<Jsonb, Error> {
        account::lock(connected, account)?;
        let balance = account::change_balance(connected, account, self.by)?;
        let balance = balance.ok_or(Error::InsufficientBalance(account))?;
        Ok(Jsonb::of_integer("balance", balance).outliving(connected))
    }
}
