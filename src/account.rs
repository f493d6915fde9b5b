//! The account that a request or message is about: its lock, and whether its balance allows a change.

use pgrx::spi::SpiClient;

use crate::error::Error;
use crate::raw::{self, Int8Array};
use crate::statement;

/// Refuses an account that the caller may not use: one that row security does not let it see. Whether the account exists,
/// and what is recorded of it, must not be told before.
pub fn check_visible(connected: &SpiClient<'_>, account: i64) -> Result<(), Error> {
    if is_secured()? && statement::FIND_BALANCE.run(connected, &[account.into()])?.is_empty() {
        return Err(Error::AccountDenied(account));
    }
    Ok(())
}

/// As [`check_visible`], for several accounts.
pub fn check_all_visible(connected: &SpiClient<'_>, accounts: Int8Array) -> Result<(), Error> {
    if !is_secured()? {
        return Ok(());
    }
    match statement::FIND_INVISIBLE.run(connected, &[accounts.into()])?.first::<i64>(1)? {
        Some(account) => Err(Error::AccountDenied(account)),
        None => Ok(()),
    }
}

/// Whether row security says which accounts the caller may use.
pub fn is_secured() -> Result<bool, Error> {
    let table = statement::own_table(c"account")?.ok_or(Error::ForeignTable)?;
    Ok(raw::has_row_security(table))
}

/// Locks the account until the end of the transaction, or says why that is not possible.
pub fn lock(connected: &SpiClient<'_>, account: i64) -> Result<(), Error> {
    // Twice, since the account may have been created between the first try and the look.
    for _ in 0..2 {
        if !statement::LOCK_ACCOUNT.run(connected, &[account.into()])?.is_empty() {
            return Ok(());
        }
        check_exists(connected, account)?;
    }
    Err(Error::AccountDenied(account))
}

/// Refuses an account that does not exist.
pub fn check_exists(connected: &SpiClient<'_>, account: i64) -> Result<(), Error> {
    find_balance(connected, account).map(drop)
}

/// Whether the balance does not allow the change. Where it does not fit a bigint, the claim raises 22003.
pub fn is_insufficient(connected: &SpiClient<'_>, account: i64, change: i64) -> Result<bool, Error> {
    Ok(find_balance(connected, account)?.checked_add(change).is_some_and(|after| after < 0))
}

/// Changes the balance of an account that is locked. `None` if it does not suffice.
pub fn change_balance(connected: &SpiClient<'_>, account: i64, change: i64) -> Result<Option<i64>, Error> {
    let changed = statement::CHANGE_BALANCE.run(connected, &[account.into(), change.into()])?;
    if changed.is_empty() {
        return if is_insufficient(connected, account, change)? {
            Ok(None)
        } else {
            Err(Error::WriteSuppressed("account"))
        };
    }
    if changed.first::<bool>(2)? != Some(true) {
        return Err(Error::WriteSuppressed("account"));
    }
    changed.first(1)
}

fn find_balance(connected: &SpiClient<'_>, account: i64) -> Result<i64, Error> {
    let found = statement::FIND_BALANCE.run(connected, &[account.into()])?;
    found.first(1)?.ok_or(Error::UnknownAccount(account))
}
