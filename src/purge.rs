//! Purge: deletes what is older than its retention, in batches, and moves the fence in the same transactions.

use std::ffi::CStr;
use std::time::{Duration, Instant};

use pgrx::datetime::clock_timestamp;
use pgrx::datum::{Interval, TimestampWithTimeZone};
use pgrx::prelude::*;
use pgrx::spi::{Spi, SpiClient};

use crate::error::Error;
use crate::fence::{self, OPERATION, SUBSCRIBER};
use crate::keep::Purging;
use crate::policy::{self, Policy};
use crate::raw::{ActingAs, Call, RecordTable, Text};
use crate::setting;
use crate::statement::{self, Statement};

/// How many records a batch deletes where nobody says. Measured, see `docs/design.md`.
pub const BATCH_SIZE: i64 = 1_000;
/// The same within the caller's transaction, where no debit gets a turn between two batches.
const BATCH_SIZE_WITHIN: i64 = 10_000;
/// How many times as long as a batch took [`everything`] waits before the next one. Measured, see `docs/design.md`.
const PAUSE: u32 = 2;
/// The longest pause.
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
/// More than anybody gains from.
const MAXIMUM_BATCH_SIZE: i64 = 1_000_000;
/// What is left over is counted up to this many.
const COUNTED: i64 = 1_000_000;
/// The first time after -infinity.
const EARLIEST: i64 = -211_813_488_000_000_000;
/// How often a purge says how far it is.
const REPORTED: Duration = Duration::from_secs(2);

/// The records that a purge may delete: requests by operation, or messages by subscriber.
pub struct Kind {
    name: &'static str,
    table: &'static CStr,
    column: &'static CStr,
    find: &'static Statement,
    delete: &'static Statement,
    count: &'static Statement,
    retention: fn(&[u8]) -> Result<Interval, Error>,
}

static REQUESTS: Kind = Kind {
    name: OPERATION,
    table: c"request_result",
    column: c"operation",
    find: &statement::FIND_OPERATIONS,
    delete: &statement::DELETE_REQUESTS,
    count: &statement::COUNT_REQUESTS,
    // A name that the check of operations does not let through was inserted by hand, and has no policy.
    retention: |operation| match std::str::from_utf8(operation) {
        Ok(operation) => Ok(Policy::of(operation)?.retention()),
        Err(_) => Ok(setting::retention()),
    },
};

static MESSAGES: Kind = Kind {
    name: SUBSCRIBER,
    table: c"processed_message",
    column: c"subscriber",
    find: &statement::FIND_SUBSCRIBERS,
    delete: &statement::DELETE_MESSAGES,
    count: &statement::COUNT_MESSAGES,
    retention: policy::message_retention,
};

impl Kind {
    /// The kind of records that this table holds.
    pub fn of_table(table: pg_sys::Oid) -> Result<&'static Self, Error> {
        for kind in [&REQUESTS, &MESSAGES] {
            if statement::own_table(kind.table)? == Some(table) {
                return Ok(kind);
            }
        }
        Err(Error::ForeignTable)
    }

    /// The fence of an operation or subscriber, if it has one.
    pub fn find_fence(&self, name: &[u8]) -> Result<Option<TimestampWithTimeZone>, Error> {
        fence::find(self.name, name)
    }

    /// Its table, as the trigger knows it.
    pub fn table(&self) -> Result<RecordTable, Error> {
        RecordTable::of(statement::own_table(self.table)?.ok_or(Error::ForeignTable)?, self.column)
    }
}

/// Up to when the records of this operation or subscriber are expired now.
pub fn expired_before(
    connected: &SpiClient<'_>,
    kind: &'static Kind,
    name: &[u8],
) -> Result<TimestampWithTimeZone, Error> {
    find_cutoff(connected, (kind.retention)(name)?, || None)
}

/// Records that records of this operation or subscriber may have been deleted up to the cutoff.
pub fn move_fence(
    connected: &SpiClient<'_>,
    kind: &'static Kind,
    name: &[u8],
    cutoff: TimestampWithTimeZone,
) -> Result<(), Error> {
    let arguments = [kind.name.into(), Text::from_bytes(name)?.into(), cutoff.into()];
    statement::MOVE_FENCE.run(connected, &arguments)?;
    Ok(())
}

/// What a purge did, and what it left.
pub struct Purged {
    /// How many records were deleted.
    pub deleted: i64,
    /// How many expired records are still there; at most [`COUNTED`] are counted for each operation and subscriber.
    pub remaining: i64,
    /// When the oldest record that is left was made.
    pub oldest: Option<TimestampWithTimeZone>,
}

/// See [`crate::api`]. Without a retention the policies say.
pub fn purge_expired_keys(retention: Option<Interval>) -> Result<i64, Error> {
    if statement::own_table(c"retention_fence")?.is_none() {
        return purge_before_fences(retention.unwrap_or_else(setting::retention));
    }
    purge_kind(&REQUESTS, retention)
}

/// See [`crate::api`]. Without a retention the policies say.
pub fn purge_processed_messages(retention: Option<Interval>) -> Result<i64, Error> {
    purge_kind(&MESSAGES, retention)
}

/// The purge of an extension whose objects are still those of a version before 0.3.0.
fn purge_before_fences(retention: Interval) -> Result<i64, Error> {
    Spi::connect(|connected| {
        let cutoff = find_cutoff(connected, retention, || None)?;
        let deleted = statement::DELETE_EXPIRED_KEYS.run(connected, &[cutoff.into()])?;
        Ok(i64::try_from(deleted.len()).unwrap_or(i64::MAX))
    })
}

/// Purges within the caller's transaction.
fn purge_kind(kind: &'static Kind, retention: Option<Interval>) -> Result<i64, Error> {
    let subjects = Spi::connect(|connected| {
        let given = retention.map(|retention| find_cutoff(connected, retention, || None)).transpose()?;
        find_subjects(connected, kind, given)
    })?;
    let mut deleted = 0;
    for subject in subjects {
        let mut work = Work::begin(subject, BATCH_SIZE_WITHIN, true);
        while Spi::connect(|connected| work.step(connected))? == Step::Batch {}
        if work.state == State::Denied {
            return Ok(deleted);
        }
        deleted += work.deleted;
    }
    Ok(deleted)
}

/// Who purges everything.
pub trait Purger {
    /// Commits what was done, and begins the next transaction.
    fn commit(&self) -> Result<(), Error>;

    /// The rights that it takes on for a piece of work, if not its own.
    fn act(&self) -> Result<Option<ActingAs>, Error>;

    /// A piece of work within a transaction.
    fn run<T>(&self, work: impl FnOnce(&SpiClient<'_>) -> Result<T, Error>) -> Result<T, Error> {
        let _acting = self.act()?;
        Spi::connect(|connected| work(connected))
    }
}

/// Whoever calls the procedure, with its own rights.
impl Purger for Call {
    fn commit(&self) -> Result<(), Error> {
        Self::commit(self)
    }

    fn act(&self) -> Result<Option<ActingAs>, Error> {
        Ok(None)
    }
}

/// Purges everything that is expired, in transactions of its own. Stops after the batch in which the budget ends.
pub fn everything(batch_size: Option<i64>, budget: Option<Interval>, purger: &impl Purger) -> Result<Purged, Error> {
    let batch_size = batch_size.filter(|size| (1..=MAXIMUM_BATCH_SIZE).contains(size)).ok_or(Error::BatchSize)?;
    let budget = match budget {
        None => None,
        Some(budget) if budget.as_micros() < 0 => return Err(Error::TimeBudget),
        Some(budget) => Some(Duration::from_micros(u64::try_from(budget.as_micros()).unwrap_or(u64::MAX))),
    };
    let began = Instant::now();
    let in_budget = || budget.is_none_or(|budget| began.elapsed() < budget);
    let subjects = purger.run(|connected| {
        let mut subjects = find_subjects(connected, &REQUESTS, None)?;
        subjects.extend(find_subjects(connected, &MESSAGES, None)?);
        // Where the budget ends before the last one, each has its turn.
        subjects.sort_by_key(|subject| subject.purged_at.map(i64::from));
        Ok(subjects)
    })?;
    let mut purged = Purged { deleted: 0, remaining: 0, oldest: None };
    let mut reported = Instant::now();
    let mut works: Vec<Work> = Vec::new();
    let mut denied = false;
    for subject in subjects {
        let mut work = Work::begin(subject, batch_size, false);
        let first = works.is_empty();
        while !denied
            && (first && work.batches == 0 || in_budget())
            && purger.run(|connected| work.step(connected))? == Step::Batch
        {
            purger.commit()?;
            if work.deleted > 0 && reported.elapsed() > REPORTED {
                reported = Instant::now();
                work.report();
            }
        }
        purger.commit()?;
        if work.deleted > 0 {
            work.report();
        }
        denied |= work.state == State::Denied;
        purged.deleted += work.deleted;
        works.push(work);
    }
    for work in works {
        let (remaining, oldest) = purger.run(|connected| work.count(connected))?;
        purged.remaining += remaining;
        purged.oldest = match (purged.oldest, oldest) {
            (Some(a), Some(b)) if i64::from(b) > i64::from(a) => Some(a),
            (a, b) => b.or(a),
        };
    }
    Ok(purged)
}

/// An operation or subscriber, and up to when its records are expired.
struct Subject {
    kind: &'static Kind,
    name: Vec<u8>,
    cutoff: TimestampWithTimeZone,
    /// When its last purge began.
    purged_at: Option<TimestampWithTimeZone>,
}

/// Every operation or subscriber with its cutoff: the one given, or that of its retention. All are known before anything is
/// deleted, so that a retention that is too short is refused in time.
fn find_subjects(
    connected: &SpiClient<'_>,
    kind: &'static Kind,
    given: Option<TimestampWithTimeZone>,
) -> Result<Vec<Subject>, Error> {
    let found = kind.find.run(connected, &[])?;
    let mut subjects = Vec::new();
    for row in found.numbers() {
        let Some(text) = found.get::<Text>(row, 1)? else { continue };
        let name = text.to_bytes();
        let cutoff = match given {
            Some(cutoff) => cutoff,
            None => {
                let of = || Some(format!("{} \"{}\"", kind.name, text.to_message()));
                find_cutoff(connected, (kind.retention)(&name)?, of)?
            }
        };
        subjects.push(Subject { kind, name, cutoff, purged_at: found.get(row, 2)? });
    }
    Ok(subjects)
}

/// Up to when records are expired now.
fn find_cutoff(
    connected: &SpiClient<'_>,
    retention: Interval,
    of: impl FnOnce() -> Option<String>,
) -> Result<TimestampWithTimeZone, Error> {
    let found = statement::FIND_CUTOFF.run(connected, &[retention.into(), setting::minimum_retention().into()])?;
    let cutoff = found.first(1)?.ok_or(Error::RetentionRequired)?;
    if found.first::<bool>(2)? == Some(true) {
        return Err(Error::RetentionTooShort(of()));
    }
    Ok(cutoff)
}

/// What a [`Work::step`] was.
#[derive(PartialEq, Eq)]
enum Step {
    /// A batch; there may be more.
    Batch,
    /// The last one, or none at all.
    Last,
}

/// Where a purge of one subject is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    /// Deleting from where the last purge came to, in the order of time.
    Main,
    /// Deleting what is older than that: records that another session held, that a long transaction committed late, or that
    /// were restored. Where an old snapshot keeps the deleted ones in the index, this has to step over them, hence apart.
    Sweep,
    /// Nothing left to do.
    Done,
    /// Another session purges.
    Denied,
}

/// The purge of one subject, a batch at a time. Each batch begins where the one before ended, so that it costs the same
/// whatever has been deleted before it.
struct Work {
    subject: Subject,
    batch_size: i64,
    state: State,
    began: TimestampWithTimeZone,
    /// Where the whole of it began; `None` for the beginning of time.
    from: Option<TimestampWithTimeZone>,
    /// Everything older was deleted: what the fence and the next purge go by.
    deleted_before: Option<TimestampWithTimeZone>,
    /// Where the sweep is.
    swept: Option<TimestampWithTimeZone>,
    sweep_due: bool,
    sweep_began: Instant,
    /// When the last batch began, where there is a pause after it.
    batch_began: Option<Instant>,
    batches: u64,
    deleted: i64,
}

/// What became of a batch.
struct Batch {
    /// Where the next one begins.
    reached: Option<TimestampWithTimeZone>,
    /// Whether there is nothing left for it.
    all: bool,
}

/// The beginning of time, for a bound.
fn bound(time: Option<TimestampWithTimeZone>) -> Result<TimestampWithTimeZone, Error> {
    match time {
        Some(time) => Ok(time),
        None => TimestampWithTimeZone::try_from(i64::MIN).map_err(|_| Error::RetentionRequired),
    }
}

impl Work {
    /// `all`: from the beginning of time in one go, rather than from where the last purge came to.
    fn begin(subject: Subject, batch_size: i64, all: bool) -> Self {
        Self {
            subject,
            batch_size,
            state: State::Main,
            began: clock_timestamp(),
            from: None,
            deleted_before: None,
            swept: None,
            sweep_due: !all,
            sweep_began: Instant::now(),
            batch_began: (!all).then(Instant::now),
            batches: 0,
            deleted: 0,
        }
    }

    fn names<'d>(&self) -> Result<[pgrx::datum::DatumWithOid<'d>; 2], Error> {
        Ok([self.subject.kind.name.into(), Text::from_bytes(&self.subject.name)?.into()])
    }

    /// One batch, and what is to be remembered of it, in one transaction.
    fn step(&mut self, connected: &SpiClient<'_>) -> Result<Step, Error> {
        if statement::LOCK_PURGE.run(connected, &[])?.is_empty() {
            notice!("another purge is running: nothing is purged by this one");
            self.state = State::Denied;
            return Ok(Step::Last);
        }
        if self.batches == 0 {
            self.find_progress(connected)?;
        } else if let Some(began) = self.batch_began {
            // With the lock, so that no other purge takes a pause for the end; and after the commit, so that a deleted key is
            // not waited for.
            pause((began.elapsed() * PAUSE).min(LONGEST_PAUSE));
        }
        self.batch_began = self.batch_began.map(|_| Instant::now());
        self.batches += 1;
        if !self.lock_fence(connected)? {
            self.state = State::Done;
            return Ok(Step::Last);
        }
        move_fence(connected, self.subject.kind, &self.subject.name, self.subject.cutoff)?;
        let sweep = match self.state {
            State::Main => {
                let batch = self.delete(connected, self.deleted_before, self.subject.cutoff)?;
                self.deleted_before = batch.reached;
                if batch.all {
                    self.state = if self.sweep_due && self.from.is_some() { State::Sweep } else { State::Done };
                    self.sweep_began = Instant::now();
                }
                // The first purge of all has looked everywhere.
                self.from.is_none().then(|| Interval::from_micros(0))
            }
            State::Sweep => {
                let to = earlier(bound(self.from)?, self.subject.cutoff);
                let batch = self.delete(connected, self.swept, to)?;
                self.swept = batch.reached;
                if batch.all {
                    self.state = State::Done;
                }
                let took = i64::try_from(self.sweep_began.elapsed().as_micros()).unwrap_or(i64::MAX);
                (self.state == State::Done).then(|| Interval::from_micros(took))
            }
            State::Done | State::Denied => return Ok(Step::Last),
        };
        let [kind, name] = self.names()?;
        let progress =
            [kind, name, bound(self.deleted_before)?.into(), self.began.into(), self.deleted.into(), sweep.into()];
        statement::SAVE_PROGRESS.run(connected, &progress)?;
        Ok(if self.state == State::Done { Step::Last } else { Step::Batch })
    }

    /// Whether the fence can be moved without a wait. Somebody who deletes expired records by hand holds it until he commits;
    /// the next purge comes.
    fn lock_fence(&self, connected: &SpiClient<'_>) -> Result<bool, Error> {
        let locked = !statement::LOCK_FENCE.run(connected, &self.names()?)?.is_empty();
        Ok(locked || self.subject.kind.find_fence(&self.subject.name)?.is_none())
    }

    fn find_progress(&mut self, connected: &SpiClient<'_>) -> Result<(), Error> {
        if !self.sweep_due {
            return Ok(());
        }
        let progress = statement::FIND_PROGRESS.run(connected, &self.names()?)?;
        self.from = progress.first(1)?;
        self.deleted_before = self.from;
        self.sweep_due = progress.first::<bool>(2)? == Some(true);
        Ok(())
    }

    /// Deletes a batch of the time between.
    fn delete(
        &mut self,
        connected: &SpiClient<'_>,
        from: Option<TimestampWithTimeZone>,
        to: TimestampWithTimeZone,
    ) -> Result<Batch, Error> {
        let [_, name] = self.names()?;
        let arguments = [name, bound(from)?.into(), to.into(), self.batch_size.into()];
        let _purging = Purging::begin(self.subject.kind, &self.subject.name, self.subject.cutoff)?;
        let batch = self.subject.kind.delete.run(connected, &arguments)?;
        let found = batch.first::<i64>(1)?.unwrap_or(0);
        let deleted = batch.first::<i64>(3)?.unwrap_or(0);
        self.deleted += deleted;
        let last = batch.first::<TimestampWithTimeZone>(2)?;
        // Where a trigger keeps what it finds, and all of it has one time, the next batch would find the same.
        let stuck = deleted == 0 && last.map(i64::from) == from.map(i64::from);
        let all = found < self.batch_size;
        let reached = match last {
            _ if all => Some(later(to, from)),
            Some(last) if stuck => Some(just_after(last)?),
            last => last,
        };
        Ok(Batch { reached, all })
    }

    /// How many expired records are left, and when the oldest of all was made. What a sweep would have looked at is counted
    /// if there was one.
    fn count(&self, connected: &SpiClient<'_>) -> Result<(i64, Option<TimestampWithTimeZone>), Error> {
        let from = if self.sweep_due { None } else { self.from };
        let [_, name] = self.names()?;
        let arguments = [name, bound(from)?.into(), self.subject.cutoff.into(), COUNTED.into()];
        let left = self.subject.kind.count.run(connected, &arguments)?;
        Ok((left.first(1)?.unwrap_or(0), left.first(2)?))
    }

    /// Tells the client how far the purge is.
    fn report(&self) {
        let name = Text::from_bytes(&self.subject.name).map(Text::to_message).unwrap_or_default();
        notice!("purged {} records of {} \"{name}\"", self.deleted, self.subject.kind.name);
    }
}

/// Sleeps for so long, and can be interrupted.
fn pause(duration: Duration) {
    const SLICE: Duration = Duration::from_millis(10);
    let began = Instant::now();
    while let Some(rest) = duration.checked_sub(began.elapsed()).filter(|rest| !rest.is_zero()) {
        pgrx::check_for_interrupts!();
        std::thread::sleep(rest.min(SLICE));
    }
}

/// The next time that there is.
fn just_after(time: TimestampWithTimeZone) -> Result<TimestampWithTimeZone, Error> {
    let next = i64::from(time).saturating_add(1).max(EARLIEST);
    TimestampWithTimeZone::try_from(next).map_err(|_| Error::RetentionRequired)
}

fn earlier(a: TimestampWithTimeZone, b: TimestampWithTimeZone) -> TimestampWithTimeZone {
    if i64::from(a) < i64::from(b) { a } else { b }
}

fn later(a: TimestampWithTimeZone, b: Option<TimestampWithTimeZone>) -> TimestampWithTimeZone {
    match b {
        Some(b) if i64::from(b) > i64::from(a) => b,
        _ => a,
    }
}
