//! The consumer side: a message is applied once for each subscriber, and a version is accepted in order.

use pgrx::Uuid;
use pgrx::spi::{Spi, SpiClient};

use crate::error::Error;
use crate::fence::{FirstSent, Subject};
use crate::once::{self, Once};
use crate::raw::{Int8Array, Jsonb, JsonbArray, Text, UuidArray};
use crate::{account, fingerprint, request, statement};

/// Where messages are recorded.
const TABLE: &str = "processed_message";

/// A message as a subscriber got it.
struct Message {
    subscriber: Text,
    id: Uuid,
    account: i64,
    payload: Option<Jsonb>,
    /// What applying it adds to the balance; `None` where the caller makes the effect.
    delta: Option<i64>,
}

/// What became of a message.
enum Delivery {
    Accepted,
    /// With the balance afterwards.
    Applied(i64),
    Repeated,
}

/// See [`crate::api`].
pub fn accept_message(
    subscriber: Option<Text>,
    id: Option<Uuid>,
    account: Option<i64>,
    payload: Option<Jsonb>,
) -> Result<bool, Error> {
    let delivery = once::once(&Message::new(subscriber, id, account, payload, None)?)?;
    Ok(!matches!(delivery, Delivery::Repeated))
}

/// See [`crate::api`].
pub fn apply_message_once(
    subscriber: Option<Text>,
    id: Option<Uuid>,
    account: Option<i64>,
    delta: Option<i64>,
    payload: Option<Jsonb>,
) -> Result<Option<i64>, Error> {
    let delta = delta.filter(|&delta| delta != 0).ok_or(Error::Required("delta other than zero"))?;
    match once::once(&Message::new(subscriber, id, account, payload, Some(delta))?)? {
        Delivery::Applied(balance) => Ok(Some(balance)),
        Delivery::Accepted | Delivery::Repeated => Ok(None),
    }
}

/// See [`crate::api`].
pub fn accept_messages(
    subscriber: Option<Text>,
    ids: Option<UuidArray>,
    accounts: Option<Int8Array>,
    payloads: Option<JsonbArray>,
) -> Result<Vec<Uuid>, Error> {
    let subscriber = accept_subscriber(subscriber)?;
    let (Some(ids), Some(accounts)) = (ids, accounts) else {
        return Err(Error::Arrays);
    };
    Spi::connect(|connected| {
        let arrays = [ids.into(), accounts.into(), payloads.into()];
        if statement::CHECK_MESSAGES.run(connected, &arrays)?.first::<bool>(1)? != Some(true) {
            return Err(Error::Arrays);
        }
        account::check_all_visible(connected, accounts)?;
        let fingerprints: Option<Vec<Option<Vec<u8>>>> = payloads
            .map(|payloads| payloads.elements().into_iter().map(|payload| payload.map(fingerprint::of).transpose()))
            .map(Iterator::collect::<Result<_, _>>)
            .transpose()?;
        let arguments = [subscriber.into(), ids.into(), accounts.into(), fingerprints.into()];
        let mut accepted = None;
        // Repeats alone write nothing and wait for nobody.
        if !statement::FIND_NEW_MESSAGE.run(connected, &[subscriber.into(), ids.into()])?.is_empty() {
            let wanted = [subscriber.into(), ids.into(), accounts.into()];
            if let Some(account) = statement::LOCK_ACCOUNTS.run(connected, &wanted)?.first::<i64>(1)? {
                // One that can be locked now was created since: the foreign key will find it.
                account::lock(connected, account)?;
            }
            let recorded = statement::ACCEPT_MESSAGES.run(connected, &arguments)?;
            if recorded.first::<bool>(2)? != Some(true) {
                return Err(Error::WriteSuppressed(TABLE));
            }
            accepted = recorded.first::<Vec<Uuid>>(1)?;
            // As in `once`: what has just been recorded anew may have been recorded before, and purged.
            let name = subscriber.to_bytes();
            for date in accepted.iter().flatten().filter_map(FirstSent::of_message) {
                date.check(Subject::Subscriber(&name))?;
            }
        }
        let found = statement::FIND_MESSAGES_REUSED.run(connected, &arguments)?;
        if found.is_empty() {
            return Ok(accepted.unwrap_or_default());
        }
        Err(match (found.first::<bool>(1)?, found.first::<bool>(2)?) {
            (Some(true), _) => Error::MessageReused("account"),
            (Some(false), Some(true)) => Error::MessageReused("payload"),
            _ => Error::WriteSuppressed(TABLE),
        })
    })
}

/// See [`crate::api`].
pub fn accept_version(subscriber: Option<Text>, entity: Option<Text>, version: Option<i64>) -> Result<bool, Error> {
    let subscriber = accept_subscriber(subscriber)?;
    let entity = request::accept_name("entity", entity.ok_or(Error::Required("entity"))?, Error::Required("entity"))?;
    let version = version.ok_or(Error::Required("version"))?;
    Spi::connect(|connected| {
        let arguments = [subscriber.into(), entity.into(), version.into()];
        // A look first, since an upsert that does nothing still locks its row.
        if !statement::FIND_NEWER_VERSION.run(connected, &arguments)?.is_empty() {
            return Ok(false);
        }
        match statement::ACCEPT_VERSION.run(connected, &arguments)?.first::<bool>(1)? {
            Some(true) => Ok(true),
            None if !statement::FIND_NEWER_VERSION.run(connected, &arguments)?.is_empty() => Ok(false),
            _ => Err(Error::WriteSuppressed("accepted_version")),
        }
    })
}

fn accept_subscriber(subscriber: Option<Text>) -> Result<Text, Error> {
    let required = || Error::Required("subscriber");
    request::accept_name("subscriber", subscriber.ok_or_else(required)?, required())
}

impl Message {
    fn new(
        subscriber: Option<Text>,
        id: Option<Uuid>,
        account: Option<i64>,
        payload: Option<Jsonb>,
        delta: Option<i64>,
    ) -> Result<Self, Error> {
        let subscriber = accept_subscriber(subscriber)?;
        let id = id.ok_or(Error::Required("message id"))?;
        let account = account.ok_or(Error::Required("account"))?;
        Ok(Self { subscriber, id, account, payload, delta })
    }
}

impl Once for Message {
    type Answer = Delivery;

    /// Delta and payload are compared where both the record and this delivery have one.
    fn find(&self, connected: &SpiClient<'_>) -> Result<Option<Delivery>, Error> {
        let arguments = [self.subscriber.into(), self.id.into(), self.account.into(), self.delta.into()];
        let recorded = statement::FIND_MESSAGE.run(connected, &arguments)?;
        if recorded.is_empty() {
            return Ok(None);
        }
        for (column, field) in [(1, "account"), (2, "delta")] {
            if recorded.first::<bool>(column)? == Some(false) {
                return Err(Error::MessageReused(field));
            }
        }
        match (recorded.first::<Vec<u8>>(3)?, self.payload) {
            (Some(saved), Some(given)) if !fingerprint::matches(&saved, given)? => Err(Error::MessageReused("payload")),
            _ => Ok(Some(Delivery::Repeated)),
        }
    }

    fn claim(&self, connected: &SpiClient<'_>) -> Result<Option<Delivery>, Error> {
        let fingerprint = self.payload.map(fingerprint::of).transpose()?;
        let arguments =
            [self.subscriber.into(), self.id.into(), self.account.into(), fingerprint.into(), self.delta.into()];
        match statement::CLAIM_MESSAGE.run(connected, &arguments)?.first::<bool>(1)? {
            None => return Ok(None),
            Some(true) => {}
            Some(false) => return Err(Error::WriteSuppressed(TABLE)),
        }
        let Some(delta) = self.delta else {
            return Ok(Some(Delivery::Accepted));
        };
        match account::change_balance(connected, self.account, delta)? {
            Some(balance) => Ok(Some(Delivery::Applied(balance))),
            None => Err(Error::WriteSuppressed("account")),
        }
    }

    fn refuse(&self, connected: &SpiClient<'_>) -> Result<Option<Delivery>, Error> {
        if account::is_insufficient(connected, self.account, self.delta.unwrap_or(0))? {
            return Err(Error::InsufficientBalance(self.account));
        }
        Ok(None)
    }

    fn check_age(&self) -> Result<(), Error> {
        FirstSent::of_message(&self.id)
            .map_or(Ok(()), |date| date.check(Subject::Subscriber(&self.subscriber.to_bytes())))
    }

    fn is_repeat(answer: &Delivery) -> bool {
        matches!(answer, Delivery::Repeated)
    }

    fn place(&self) -> (i64, &'static str) {
        (self.account, TABLE)
    }
}
