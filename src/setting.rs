//! The settings. Their names begin with `idempotency_record.`, a prefix that is reserved.

use std::time::Duration;

use pgrx::datum::Interval;
use pgrx::guc::{GucContext, GucFlags, GucRegistry, GucSetting};

use crate::raw::reserve_settings;

const HOUR: i32 = 60 * 60;

/// On, because a call without a key has no retry protection, and a client that loses its keys should learn it at once.
static REQUIRE_KEY: GucSetting<bool> = GucSetting::<bool>::new(true);
/// A client that was cut off on Friday evening and goes on at Sunday noon still gets its answer.
static RETENTION: GucSetting<i32> = GucSetting::<i32>::new(48 * HOUR);
/// Brokers redeliver after days: their usual longest retention is a week.
static MESSAGE_RETENTION: GucSetting<i32> = GucSetting::<i32>::new(7 * 24 * HOUR);
/// None, because only the operator knows what was promised to the slowest client.
static MINIMUM_RETENTION: GucSetting<i32> = GucSetting::<i32>::new(0);
/// What a client without a synchronized clock is typically off by within a day; one with NTP is off by far less.
static CLOCK_SKEW: GucSetting<i32> = GucSetting::<i32>::new(5 * 60);
/// Often enough for a purge to be short, seldom enough not to be seen.
static PURGE_INTERVAL: GucSetting<i32> = GucSetting::<i32>::new(10 * 60);
/// None: nobody's records are deleted because a library was loaded.
static DATABASES: GucSetting<Option<std::ffi::CString>> = GucSetting::<Option<std::ffi::CString>>::new(Some(c""));

/// Defines the settings, once a process.
pub fn init() {
    GucRegistry::define_bool_guc(
        c"idempotency_record.require_key",
        c"Refuses calls whose key is NULL.",
        c"Off: a NULL key executes without a record and with a WARNING, for clients that do not send keys yet. \
          An empty key is always refused. Superusers can set it, also for a role or a database.",
        &REQUIRE_KEY,
        GucContext::Suset,
        GucFlags::default(),
    );
    define_seconds(
        c"idempotency_record.retention",
        c"How long a record of a request is kept, for operations that declare no retention in operation_policy.",
        c"A purge deletes what is older. Promise no client more. Superusers can set it, also for a database.",
        &RETENTION,
        1,
        GucContext::Suset,
    );
    define_seconds(
        c"idempotency_record.message_retention",
        c"How long the record of a message is kept, for subscribers that declare no retention in subscriber_policy.",
        c"Longer than the broker may redeliver. Superusers can set it, also for a database.",
        &MESSAGE_RETENTION,
        1,
        GucContext::Suset,
    );
    define_seconds(
        c"idempotency_record.minimum_retention",
        c"Refuses a purge of anything younger than this.",
        c"The seat belt against a typo: a purge with a shorter retention is refused with 22023, whether the retention was \
          given, declared or set. 0: none. Superusers can set it, also for a database.",
        &MINIMUM_RETENTION,
        0,
        GucContext::Suset,
    );
    define_seconds(
        c"idempotency_record.clock_skew",
        c"How wrong a client's clock may be when it dates a key.",
        c"A dated key is refused as expired if its date is not later than the last purge's cutoff by more than this, and as \
          one from the future if it is ahead of the server's clock by more. Superusers can set it, also for a database.",
        &CLOCK_SKEW,
        0,
        GucContext::Suset,
    );
    define_seconds(
        c"idempotency_record.purge_interval",
        c"How often the worker purges each database that is named in idempotency_record.databases.",
        c"0: never. The library has to be in shared_preload_libraries.",
        &PURGE_INTERVAL,
        0,
        GucContext::Sighup,
    );
    GucRegistry::define_string_guc(
        c"idempotency_record.databases",
        c"The databases that the worker purges, separated by commas.",
        c"A name with capitals or other signs is written in double quotes. The library has to be in \
          shared_preload_libraries.",
        &DATABASES,
        GucContext::Sighup,
        GucFlags::default(),
    );
    reserve_settings(c"idempotency_record");
}

fn define_seconds(
    name: &'static core::ffi::CStr,
    short: &'static core::ffi::CStr,
    long: &'static core::ffi::CStr,
    setting: &'static GucSetting<i32>,
    least: i32,
    context: GucContext,
) {
    GucRegistry::define_int_guc(name, short, long, setting, least, i32::MAX, context, GucFlags::UNIT_S);
}

/// Whether a NULL key is refused.
pub fn require_key() -> bool {
    REQUIRE_KEY.get()
}

/// The retention of requests where the operation's policy declares none.
pub fn retention() -> Interval {
    seconds(&RETENTION)
}

/// The retention of messages where the subscriber's policy declares none.
pub fn message_retention() -> Interval {
    seconds(&MESSAGE_RETENTION)
}

/// The shortest retention that a purge may be given.
pub fn minimum_retention() -> Interval {
    seconds(&MINIMUM_RETENTION)
}

/// By how much a client's clock may be wrong, in microseconds.
pub fn clock_skew() -> i64 {
    seconds(&CLOCK_SKEW).micros()
}

/// How often the worker purges; `None` for never.
pub fn purge_interval() -> Option<Duration> {
    u64::try_from(PURGE_INTERVAL.get()).ok().filter(|&seconds| seconds > 0).map(Duration::from_secs)
}

/// The databases that the worker purges, as written.
pub fn databases() -> std::ffi::CString {
    DATABASES.get().unwrap_or_default()
}

fn seconds(setting: &GucSetting<i32>) -> Interval {
    Interval::from_micros(i64::from(setting.get()) * 1_000_000)
}
