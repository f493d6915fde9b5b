//! The account that a request or message is about: its lock, and whether its balance allows a change.

use std::collections::{BTreeMap, HashSet};

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
    Ok(matches!(after(find_balance(connected, account)?, change), Ok(None)))
}

/// The balance after a change; `None` if it does not suffice.
pub fn after(balance: i64, change: i64) -> Result<Option<i64>, Error> {
    let after = balance.checked_add(change).ok_or(Error::OutOfRange)?;
    Ok((after >= 0).then_some(after))
}

/// The balance of a locked account.
pub struct Balance {
    /// When it was locked.
    before: i64,
    /// With what was decided since.
    pub now: i64,
}

/// Those of the accounts that the caller may use, as [`check_visible`].
pub fn find_visible(connected: &SpiClient<'_>, accounts: Vec<i64>) -> Result<HashSet<i64>, Error> {
    let found = statement::FIND_ACCOUNTS.run(connected, &[accounts.into()])?;
    found.numbers().filter_map(|row| found.get(row, 1).transpose()).collect()
}

/// Locks the accounts until the end of the transaction, in ascending order, so that two callers do not deadlock. Those that
/// do not exist, or cannot be locked, are not in the result; one that is created meanwhile does not exist yet.
pub fn lock_all(connected: &SpiClient<'_>, accounts: Vec<i64>) -> Result<BTreeMap<i64, Balance>, Error> {
    // The first one by itself: where batches use the same accounts this is where they wait, and the statement that locks the
    // others begins afterwards and finds them as they are, instead of as they were and then each once more as it is.
    if let Some(&first) = accounts.first() {
        statement::LOCK_ACCOUNT.run(connected, &[first.into()])?;
    }
    let locked = statement::LOCK_BALANCES.run(connected, &[accounts.into()])?;
    let mut balances = BTreeMap::new();
    for row in locked.numbers() {
        if let (Some(account), Some(balance)) = (locked.get(row, 1)?, locked.get(row, 2)?) {
            balances.insert(account, Balance { before: balance, now: balance });
        }
    }
    Ok(balances)
}

/// Writes the new balances of locked accounts, one version of a row each.
pub fn change_all(connected: &SpiClient<'_>, balances: &BTreeMap<i64, Balance>) -> Result<(), Error> {
    let changed: Vec<(i64, i64)> = balances
        .iter()
        .filter(|(_, balance)| balance.now != balance.before)
        .map(|(&account, balance)| Ok((account, balance.now.checked_sub(balance.before).ok_or(Error::OutOfRange)?)))
        .collect::<Result<_, Error>>()?;
    if changed.is_empty() {
        return Ok(());
    }
    let expected = changed.len();
    let (accounts, deltas): (Vec<i64>, Vec<i64>) = changed.into_iter().unzip();
    let written = statement::CHANGE_BALANCES.run(connected, &[accounts.into(), deltas.into()])?;
    let as_decided = |row| {
        let written: Option<(i64, i64)> = written.get(row, 1)?.zip(written.get(row, 2)?);
        let decided = written.and_then(|(account, balance)| Some((balances.get(&account)?, balance)));
        Ok::<_, Error>(decided.is_some_and(|(decided, balance)| decided.now == balance))
    };
    if usize::try_from(written.len()) != Ok(expected) {
        return Err(Error::WriteSuppressed("account"));
    }
    for row in 0..expected {
        if !as_decided(row)? {
            return Err(Error::WriteSuppressed("account"));
        }
    }
    Ok(())
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
