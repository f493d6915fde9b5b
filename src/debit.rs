//! Debit: takes an amount from an account, never below zero.

use pgrx::datum::DatumWithOid;
use pgrx::spi::SpiClient;
use serde::Serialize;

use crate::error::Error;
use crate::once::{self, Operation, Request};
use crate::raw::{Jsonb, Text};
use crate::statement;

/// The contract that the records of this operation name. A change of its request or response is a new version.
const OPERATION: &str = "debit:v1";

/// The request as it is stored and compared.
#[derive(Serialize)]
struct Debit {
    amount: i64,
}

/// See [`crate::api`].
pub fn debit_once(account: Option<i64>, key: Option<Text>, amount: Option<i64>) -> Result<Jsonb, Error> {
    let (Some(key), Some(amount @ 1..)) = (once::accept_key(key)?, amount) else {
        return Err(Error::KeyAndAmountRequired);
    };
    let account = account.ok_or(Error::AccountRequired)?;
    let debit = Debit { amount };
    let request = Request { account, operation: OPERATION, key, parameters: Jsonb::from_serialize(&debit)? };
    once::once(&request, &debit)
}

impl Operation for Debit {
    fn execute(&self, client: &SpiClient<'_>, request: &Request) -> Result<Option<Jsonb>, Error> {
        let [account, operation, key, parameters] = request.arguments();
        let claimed = statement::CLAIM_DEBIT.run(client, &[account, operation, key, parameters, self.amount.into()])?;
        if claimed.is_empty() {
            return Ok(None);
        }
        let response = claimed.first::<Jsonb>(1)?.ok_or(Error::WriteSuppressed("request_result"))?;

        let effect: [DatumWithOid; 3] = [request.account.into(), (-self.amount).into(), response.into()];
        let updated = statement::ADD_TO_BALANCE.run(client, &effect)?;
        if updated.len() != 1 || updated.first::<bool>(1)? != Some(true) {
            return Err(Error::WriteSuppressed("account"));
        }
        Ok(Some(response))
    }

    fn refuse(&self, client: &SpiClient<'_>, request: &Request) -> Result<(), Error> {
        let row = statement::FIND_BALANCE.run(client, &[request.account.into()])?;
        if row.is_empty() {
            return Err(Error::UnknownAccount(request.account));
        }
        match row.first::<i64>(1)? {
            Some(balance) if balance >= self.amount => Ok(()),
            _ => Err(Error::InsufficientBalance(request.account)),
        }
    }
}
