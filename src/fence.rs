//! The fence: a dated key whose record may have been purged is refused, not executed. `docs/design.md` says why this holds.

use pgrx::Uuid;
use pgrx::datetime::clock_timestamp;
use pgrx::datum::TimestampWithTimeZone;

use crate::error::Error;
use crate::raw::{self, Text};
use crate::{setting, statement};

/// Microseconds from 1970, where UUIDs count from, to 2000, where PostgreSQL does.
const UNIX_EPOCH: i64 = 946_684_800_000_000;
/// No clock is ahead by so many microseconds, a hundred years: such a date is none. One in 64 of all random values, and of
/// what `md5(...)::uuid` makes, has the form of a UUID of version 7; nearly all of them are ahead by thousands of years.
const NO_CLOCK: i64 = 100 * 365 * 24 * 60 * 60 * 1_000_000;
/// The lengths, in bytes, of the ways to write a UUID: plain, with hyphens, in braces, as a URN.
const UUID_LENGTHS: [usize; 4] = [32, 36, 38, 45];

/// Whose records a purge deletes up to a time: those of one operation, or of one subscriber.
#[derive(Clone, Copy)]
pub enum Subject<'a> {
    /// An operation's requests.
    Operation(&'a str),
    /// A subscriber's messages.
    Subscriber(&'a [u8]),
}

impl Subject<'_> {
    /// The subject's name in the tables of the purge.
    fn kind_and_name(&self) -> (&'static str, &[u8]) {
        match self {
            Self::Operation(name) => (OPERATION, name.as_bytes()),
            Self::Subscriber(name) => (SUBSCRIBER, name),
        }
    }
}

/// The kind of an operation.
pub const OPERATION: &str = "operation";
/// The kind of a subscriber.
pub const SUBSCRIBER: &str = "subscriber";

/// When the client first sent a request, by its own clock, in microseconds as PostgreSQL counts them. Where it says so twice
/// the earlier date counts for the fence, which errs on the safe side.
#[derive(Clone, Copy)]
pub struct FirstSent {
    earliest: i64,
    latest: i64,
}

impl FirstSent {
    /// From what the caller says and from a key that is a UUID of version 7; `None` if neither tells.
    pub fn of_key(key: Text, said: Option<TimestampWithTimeZone>) -> Option<Self> {
        let uuid = if UUID_LENGTHS.contains(&key.octet_length()) {
            uuid::Uuid::try_parse_ascii(&key.to_bytes()).ok()
        } else {
            None
        };
        let (of_key, said) = (uuid.and_then(plausible_creation), said.map(i64::from));
        Some(Self { earliest: of_key.into_iter().chain(said).min()?, latest: of_key.into_iter().chain(said).max()? })
    }

    /// From a message's id, if it is a UUID of version 7.
    pub fn of_message(id: &Uuid) -> Option<Self> {
        plausible_creation(uuid::Uuid::from_bytes(*id.as_bytes())).map(|date| Self { earliest: date, latest: date })
    }

    /// Refuses what may have been recorded and purged, and what is dated in the future.
    pub fn check(self, subject: Subject<'_>) -> Result<(), Error> {
        Bounds::of(subject)?.check(self)
    }
}

/// Between which dates a key is neither too old nor in the future, at one moment.
pub struct Bounds {
    what: &'static str,
    after: Option<i64>,
    up_to: i64,
}

impl Bounds {
    /// As they are now.
    pub fn of(subject: Subject<'_>) -> Result<Self, Error> {
        let skew = setting::clock_skew();
        let (kind, name) = subject.kind_and_name();
        Ok(Self {
            what: what(kind),
            after: find(kind, name)?.map(|fence| i64::from(fence).saturating_add(skew)),
            up_to: i64::from(clock_timestamp()).saturating_add(skew),
        })
    }

    /// As [`FirstSent::check`].
    pub fn check(&self, date: FirstSent) -> Result<(), Error> {
        if date.latest > self.up_to {
            return Err(Error::FromTheFuture(self.what));
        }
        match self.after {
            Some(after) if date.earliest <= after => Err(Error::Expired(self.what)),
            _ => Ok(()),
        }
    }
}

/// Up to when records of this kind and name were purged; `None` where none were, and for a version without fences.
pub fn find(kind: &str, name: &[u8]) -> Result<Option<TimestampWithTimeZone>, Error> {
    match statement::own_table(c"retention_fence")? {
        Some(table) => raw::find_fence(table, kind, name),
        None => Ok(None),
    }
}

/// What a client knows the record by.
fn what(kind: &str) -> &'static str {
    if kind == OPERATION { "idempotency key" } else { "message id" }
}

/// When a UUID of version 7 was made, if that may be what it says.
fn plausible_creation(uuid: uuid::Uuid) -> Option<i64> {
    creation(uuid).filter(|&date| date < i64::from(clock_timestamp()).saturating_add(NO_CLOCK))
}

/// What a UUID of version 7 says of when it was made.
fn creation(uuid: uuid::Uuid) -> Option<i64> {
    if uuid.get_version_num() != 7 || uuid.get_variant() != uuid::Variant::RFC4122 {
        return None;
    }
    // The first 48 bits are milliseconds (RFC 9562, section 5.7).
    let milliseconds = i64::try_from(uuid.as_u128() >> 80).ok()?;
    Some(milliseconds * 1_000 - UNIX_EPOCH)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_uuid_of_version_7_says_when_it_was_made() {
        // The example of RFC 9562, appendix A.6: Tuesday, February 22, 2022 2:22:22.00 PM GMT-05:00.
        let example = uuid::Uuid::try_parse("017F22E2-79B0-7CC3-98C4-DC0C0C07398F").expect("a uuid");
        assert_eq!(creation(example), Some(1_645_557_742_000_000 - UNIX_EPOCH));
    }

    #[test]
    fn no_other_uuid_does() {
        for other in [
            "919108f7-52d1-4320-9bac-f847db4148a8", // version 4
            "017f22e2-79b0-7cc3-18c4-dc0c0c07398f", // another variant
            "00000000-0000-0000-0000-000000000000",
            "ffffffff-ffff-ffff-ffff-ffffffffffff",
        ] {
            assert_eq!(creation(uuid::Uuid::try_parse(other).expect("a uuid")), None, "{other}");
        }
    }
}
