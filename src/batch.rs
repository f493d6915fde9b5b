//! Debits or credits of many in one call: each element answered as the single call would answer it, in their order, by
//! statements that are each for the whole set. What an element is refused for, and what is compared, is the code of the
//! single call: [`balance::accept`], [`request::replay`], [`account::after`], [`Bounds::check`].

use std::collections::{BTreeMap, HashMap};

use pgrx::spi::{Spi, SpiClient};

use crate::account::{self, Balance};
use crate::balance::{self, Direction};
use crate::error::Error;
use crate::fence::{Bounds, FirstSent, Subject};
use crate::fingerprint;
use crate::policy::Policy;
use crate::raw::{Bytes, Int8Array, Jsonb, Rows, Text, TextArray};
use crate::request::{self, Identity};
use crate::statement;

/// The most elements of a batch, which bounds the memory that it takes.
pub const ELEMENTS: usize = 100_000;

/// The row of an element: its number, response, whether it is a replay, or else SQLSTATE and message of its refusal.
pub type Row = (i64, Option<Jsonb>, bool, Option<String>, Option<String>);

/// See [`crate::api`].
pub fn debit(
    accounts: Option<Int8Array>,
    keys: Option<TextArray>,
    amounts: Option<Int8Array>,
) -> Result<impl Iterator<Item = Row>, Error> {
    change(Direction::Debit, accounts, keys, amounts)
}

/// See [`crate::api`].
pub fn credit(
    accounts: Option<Int8Array>,
    keys: Option<TextArray>,
    amounts: Option<Int8Array>,
) -> Result<impl Iterator<Item = Row>, Error> {
    change(Direction::Credit, accounts, keys, amounts)
}

fn change(
    direction: Direction,
    accounts: Option<Int8Array>,
    keys: Option<TextArray>,
    amounts: Option<Int8Array>,
) -> Result<impl Iterator<Item = Row>, Error> {
    let mut batch = Batch::accept(direction, accounts, keys, amounts)?;
    if !batch.open.is_empty() {
        Spi::connect(|connected| batch.answer(connected))?;
    }
    Ok(batch.answers.into_iter().enumerate().map(|(at, answer)| row(at, answer)))
}

fn row(at: usize, answer: Answer) -> Row {
    let ordinal = i64::try_from(at + 1).unwrap_or(i64::MAX);
    match answer {
        Answer::Response { response, replayed } => (ordinal, Some(response), replayed, None, None),
        Answer::Refusal(error) => {
            let (code, message) = error.code_and_message();
            (ordinal, None, false, Some(code), Some(message))
        }
    }
}

/// What became of an element.
enum Answer {
    Response { response: Jsonb, replayed: bool },
    Refusal(Error),
}

/// An element that is not answered yet.
struct Element {
    /// Its place in the batch.
    at: usize,
    account: i64,
    amount: i64,
    /// `None` where it is executed without a record.
    key: Option<Key>,
}

/// A client's key, as it came and as bytes that can be compared.
struct Key {
    text: Text,
    bytes: Vec<u8>,
    first_sent: Option<FirstSent>,
}

struct Batch {
    direction: Direction,
    /// In the order of the input.
    open: Vec<Element>,
    /// One for each element; what an open one has means nothing.
    answers: Vec<Answer>,
}

/// A record that is to be inserted.
struct Record {
    account: i64,
    key: Text,
    amount: i64,
    fingerprint: Option<Vec<u8>>,
    /// The balance that the response names.
    balance: i64,
    /// Whether the response is a refusal.
    refused: bool,
}

/// What was decided with the accounts locked, and has to be written.
#[derive(Default)]
struct Decided {
    records: Vec<Record>,
    /// The records by account and key.
    by_key: HashMap<(i64, Vec<u8>), usize>,
    /// Places of elements, and the record that answers them; whether as a replay.
    answered: Vec<(usize, usize, bool)>,
    /// Places of elements without a key, and the balance after them.
    unprotected: Vec<(usize, i64)>,
    /// The dates of executed keys.
    executed_dates: Vec<FirstSent>,
    /// Places of refused elements, and the dates of their keys.
    refused_dates: Vec<(usize, FirstSent)>,
}

impl Batch {
    /// Checks each element as the single call checks its arguments.
    fn accept(
        direction: Direction,
        accounts: Option<Int8Array>,
        keys: Option<TextArray>,
        amounts: Option<Int8Array>,
    ) -> Result<Self, Error> {
        let (Some(accounts), Some(keys), Some(amounts)) = (accounts, keys, amounts) else {
            return Err(Error::BatchArrays);
        };
        let (Some(elements), of_keys, of_amounts) = (accounts.len(), keys.len(), amounts.len()) else {
            return Err(Error::BatchArrays);
        };
        if of_keys != Some(elements) || of_amounts != Some(elements) {
            return Err(Error::BatchArrays);
        }
        if elements > ELEMENTS {
            return Err(Error::BatchTooLarge(elements));
        }
        let mut batch = Self { direction, open: Vec::new(), answers: Vec::with_capacity(elements) };
        let arguments = accounts.elements().into_iter().zip(keys.elements()).zip(amounts.elements());
        for (at, ((account, key), amount)) in arguments.enumerate() {
            match batch.element(at, account, key, amount) {
                Ok(element) => {
                    batch.open.push(element);
                    batch.answers.push(Answer::Refusal(Error::WriteSuppressed(request::TABLE)));
                }
                Err(error) => batch.answers.push(Answer::Refusal(error)),
            }
        }
        Ok(batch)
    }

    fn element(
        &self,
        at: usize,
        account: Option<i64>,
        key: Option<Text>,
        amount: Option<i64>,
    ) -> Result<Element, Error> {
        let change = balance::accept(account, key, amount)?;
        let key = match change.key {
            Some(text) => {
                let identity = Identity { account: change.account, operation: self.direction.operation(), key: text };
                identity.check_not_in_flight()?;
                Some(Key { text, bytes: text.to_bytes(), first_sent: FirstSent::of_key(text, None) })
            }
            None => {
                request::warn_unprotected();
                None
            }
        };
        Ok(Element { at, account: change.account, amount: change.amount, key })
    }

    /// Answers the open elements. In the order of [`crate::once::once`]: who may be told of the account; the look-up; the age;
    /// then, with the accounts locked, the look-up again, and what is to be done; and the age again.
    fn answer(&mut self, connected: &SpiClient<'_>) -> Result<(), Error> {
        let mut secured = account::is_secured()?;
        if secured {
            self.refuse_invisible(connected)?;
        }
        self.replay(connected, &mut secured)?;
        if let Some(bounds) = self.bounds()? {
            self.refuse(|element| {
                element.key.as_ref().and_then(|key| key.first_sent).map_or(Ok(()), |date| bounds.check(date))
            });
        }
        // Repeats alone write nothing and wait for nobody.
        if self.open.is_empty() {
            return Ok(());
        }
        let mut balances = account::lock_all(connected, self.accounts())?;
        self.replay(connected, &mut secured)?;
        let mut decided = self.decide(&mut balances, secured)?;
        if !decided.records.is_empty() {
            self.record(connected, &mut decided)?;
        }
        account::change_all(connected, &balances)?;
        self.answer_unprotected(connected, decided.unprotected)?;
        self.check_age_again(&decided.executed_dates, &decided.refused_dates)
    }

    /// The accounts of the open elements, in ascending order.
    fn accounts(&self) -> Vec<i64> {
        let mut accounts: Vec<i64> = self.open.iter().map(|element| element.account).collect();
        accounts.sort_unstable();
        accounts.dedup();
        accounts
    }

    /// Answers the open elements that this refuses.
    fn refuse(&mut self, check: impl Fn(&Element) -> Result<(), Error>) {
        let answers = &mut self.answers;
        self.open.retain(|element| match check(element) {
            Ok(()) => true,
            Err(error) => {
                answers[element.at] = Answer::Refusal(error);
                false
            }
        });
    }

    /// Refuses the open elements whose accounts row security does not let the caller see.
    fn refuse_invisible(&mut self, connected: &SpiClient<'_>) -> Result<(), Error> {
        let visible = account::find_visible(connected, self.accounts())?;
        self.refuse(|element| {
            if visible.contains(&element.account) { Ok(()) } else { Err(Error::AccountDenied(element.account)) }
        });
        Ok(())
    }

    /// Answers the open elements of which there is a record.
    fn replay(&mut self, connected: &SpiClient<'_>, secured: &mut bool) -> Result<(), Error> {
        let keyed: Vec<&Element> = self.open.iter().filter(|element| element.key.is_some()).collect();
        if keyed.is_empty() {
            return Ok(());
        }
        let accounts: Vec<i64> = keyed.iter().map(|element| element.account).collect();
        let keys: Vec<Text> = keyed.iter().filter_map(|element| element.key.as_ref().map(|key| key.text)).collect();
        let amounts: Vec<i64> = keyed.iter().map(|element| element.amount).collect();
        let arguments = [accounts.into(), self.direction.operation().into(), keys.into(), amounts.into()];
        let found = statement::FIND_MANY.run(connected, &arguments)?;
        // It may have become so while the look-up waited for a lock.
        if !*secured && account::is_secured()? {
            *secured = true;
            self.refuse_invisible(connected)?;
            return self.replay(connected, secured);
        }
        let mut answered = vec![false; self.answers.len()];
        for at in found.numbers() {
            let ordinal = found.get::<i64>(at, 6)?.and_then(|ordinal| usize::try_from(ordinal - 1).ok());
            let Some((element, saved)) =
                ordinal.and_then(|ordinal| keyed.get(ordinal)).zip(request::saved(&found, at)?)
            else {
                return Err(Error::ForeignTable);
            };
            self.answers[element.at] = match request::replay(saved, || balance::json(element.amount)) {
                Ok(outcome) => Answer::Response { response: outcome.response, replayed: true },
                Err(error) => Answer::Refusal(error),
            };
            answered[element.at] = true;
        }
        self.open.retain(|element| !answered[element.at]);
        Ok(())
    }

    /// What the date of a key is compared with, if any key is dated.
    fn bounds(&self) -> Result<Option<Bounds>, Error> {
        let dated = self.open.iter().any(|element| element.key.as_ref().is_some_and(|key| key.first_sent.is_some()));
        dated.then(|| Bounds::of(Subject::Operation(self.direction.operation()))).transpose()
    }

    /// Goes through the open elements in their order, as the single calls would one after the other.
    fn decide(&mut self, balances: &mut BTreeMap<i64, Balance>, secured: bool) -> Result<Decided, Error> {
        let policy = Policy::of(self.direction.operation())?;
        let mut decided = Decided::default();
        for element in std::mem::take(&mut self.open) {
            let date = element.key.as_ref().and_then(|key| key.first_sent);
            let at = element.at;
            match decided.element(element, self.direction, balances, &policy, secured) {
                Ok(()) => {}
                Err(error) => {
                    if let Some(date) = date.filter(|_| is_refusal_of_an_account_at_hand(&error)) {
                        decided.refused_dates.push((at, date));
                    }
                    self.answers[at] = Answer::Refusal(error);
                }
            }
        }
        Ok(decided)
    }

    /// Inserts the records and takes their responses. Nobody else executes or cancels a request of these accounts, so that
    /// each record has to be there afterwards, as it was claimed.
    fn record(&mut self, connected: &SpiClient<'_>, decided: &mut Decided) -> Result<(), Error> {
        let operation = self.direction.operation();
        let by_key = std::mem::take(&mut decided.by_key);
        // In the order of the primary key, where neighbours are together.
        let mut order: Vec<(&(i64, Vec<u8>), &Record)> =
            by_key.iter().filter_map(|(key, &at)| Some((key, decided.records.get(at)?))).collect();
        order.sort_unstable_by_key(|(key, _)| *key);
        let records = order.iter().map(|(_, record)| *record);
        let fingerprints: Option<Vec<Option<Vec<u8>>>> = records
            .clone()
            .any(|record| record.fingerprint.is_some())
            .then(|| records.clone().map(|record| record.fingerprint.clone()).collect());
        let arguments = [
            records.clone().map(|record| record.account).collect::<Vec<_>>().into(),
            operation.into(),
            records.clone().map(|record| record.key).collect::<Vec<_>>().into(),
            records.clone().map(|record| record.amount).collect::<Vec<_>>().into(),
            fingerprints.into(),
            records.clone().map(|record| record.balance).collect::<Vec<_>>().into(),
            records.clone().map(|record| record.refused).collect::<Vec<_>>().into(),
        ];
        let recorded = statement::CLAIM_MANY.run(connected, &arguments)?;
        let mut responses: Vec<Option<Jsonb>> = vec![None; decided.records.len()];
        for row in recorded.numbers() {
            let identity = recorded.get::<i64>(row, 2)?.zip(recorded.get::<Bytes>(row, 3)?.map(|key| key.0));
            let claimed = identity.and_then(|identity| by_key.get(&identity)).copied();
            let (Some(claimed), Some(response)) = (claimed, recorded.get::<Jsonb>(row, 1)?) else {
                return Err(Error::WriteSuppressed(request::TABLE));
            };
            let as_claimed = match decided.records.get(claimed) {
                Some(record) => record.is_in(&recorded, row)?,
                None => false,
            };
            if !as_claimed {
                return Err(Error::WriteSuppressed(request::TABLE));
            }
            responses[claimed] = Some(response);
        }
        for &(at, record, replayed) in &decided.answered {
            let Some(response) = responses.get(record).copied().flatten() else {
                return Err(decided
                    .records
                    .get(record)
                    .map_or(Ok(Error::WriteSuppressed(request::TABLE)), |record| {
                        Identity { account: record.account, operation, key: record.key }.not_saved(connected)
                    })?);
            };
            self.answers[at] = Answer::Response { response, replayed };
        }
        Ok(())
    }

    /// Gives those their responses who leave no record that SQL made one for.
    fn answer_unprotected(&mut self, connected: &SpiClient<'_>, executed: Vec<(usize, i64)>) -> Result<(), Error> {
        if executed.is_empty() {
            return Ok(());
        }
        let balances: Vec<i64> = executed.iter().map(|&(_, balance)| balance).collect();
        let built = statement::BUILD_BALANCES.run(connected, &[balances.into()])?;
        for (row, (at, _)) in executed.into_iter().enumerate() {
            let response = built.get(row, 1)?.ok_or(Error::ForeignTable)?;
            self.answers[at] = Answer::Response { response, replayed: false };
        }
        Ok(())
    }

    /// As [`crate::once::once`] does when something was done or refused. What was executed cannot be taken back alone; a new
    /// transaction refuses it before anything is done.
    fn check_age_again(&mut self, executed: &[FirstSent], refused: &[(usize, FirstSent)]) -> Result<(), Error> {
        if executed.is_empty() && refused.is_empty() {
            return Ok(());
        }
        let bounds = Bounds::of(Subject::Operation(self.direction.operation()))?;
        if executed.iter().any(|&date| bounds.check(date).is_err()) {
            return Err(Error::PurgedMeanwhile);
        }
        for &(at, date) in refused {
            if let Err(error) = bounds.check(date) {
                self.answers[at] = Answer::Refusal(error);
            }
        }
        Ok(())
    }
}

/// Whether a refusal was given for the balance, with the account's lock: then the age is asked for again, as [`crate::once::once`]
/// does.
fn is_refusal_of_an_account_at_hand(error: &Error) -> bool {
    matches!(error, Error::InsufficientBalance(_) | Error::OutOfRange)
}

impl Decided {
    /// Decides what becomes of one element, after all before it.
    fn element(
        &mut self,
        element: Element,
        direction: Direction,
        balances: &mut BTreeMap<i64, Balance>,
        policy: &Policy,
        secured: bool,
    ) -> Result<(), Error> {
        let Element { at, account, amount, key } = element;
        let Some(balance) = balances.get_mut(&account) else {
            // With row security the caller sees the account, and may not lock it.
            return Err(if secured { Error::AccountDenied(account) } else { Error::UnknownAccount(account) });
        };
        let after = |balance: &Balance| account::after(balance.now, direction.signed(amount));
        let Some(Key { text, bytes, first_sent }) = key else {
            balance.now = after(balance)?.ok_or(Error::InsufficientBalance(account))?;
            self.unprotected.push((at, balance.now));
            return Ok(());
        };
        let identity = (account, bytes);
        if let Some(&record) = self.by_key.get(&identity) {
            request::check_same(self.records.get(record).is_some_and(|record| record.amount == amount))?;
            self.answered.push((at, record, true));
            return Ok(());
        }
        let after = after(balance)?;
        if after.is_none() && !policy.saves_refusals() {
            return Err(Error::InsufficientBalance(account));
        }
        let fingerprint =
            if policy.stores_fingerprint() { Some(fingerprint::of_json(&balance::json(amount)?)?) } else { None };
        balance.now = after.unwrap_or(balance.now);
        self.answered.push((at, self.records.len(), false));
        self.by_key.insert(identity, self.records.len());
        self.records.push(Record {
            account,
            key: text,
            amount,
            fingerprint,
            balance: balance.now,
            refused: after.is_none(),
        });
        self.executed_dates.extend(first_sent);
        Ok(())
    }
}

impl Record {
    /// Whether a row that [`statement::CLAIM_MANY`] returned is this record: one that a trigger changed would lie.
    fn is_in(&self, recorded: &Rows<'_>, row: usize) -> Result<bool, Error> {
        let request = match self.fingerprint {
            None => format!(r#"{{"amount": {}}}"#, self.amount),
            Some(_) => "null".into(),
        };
        let response = if self.refused {
            format!(r#"{{"balance": {}, "refused": "insufficient balance"}}"#, self.balance)
        } else {
            format!(r#"{{"balance": {}}}"#, self.balance)
        };
        let is = |column, text: &str| {
            Ok::<_, Error>(recorded.get::<Bytes>(row, column)?.is_some_and(|bytes| bytes.0 == text.as_bytes()))
        };
        Ok(is(4, &request)?
            && is(5, &response)?
            && recorded.get::<Vec<u8>>(row, 6)? == self.fingerprint
            && recorded.get::<bool>(row, 7)? == Some(true))
    }
}
