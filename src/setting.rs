//! The settings. Their names begin with `idempotency_record.`, a prefix that is reserved.

use pgrx::guc::{GucContext, GucFlags, GucRegistry, GucSetting};

use crate::raw::reserve_settings;

/// On, because a call without a key has no retry protection, and a client that loses its keys should learn it at once.
static REQUIRE_KEY: GucSetting<bool> = GucSetting::<bool>::new(true);

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
    reserve_settings(c"idempotency_record");
}

/// Whether a NULL key is refused.
pub fn require_key() -> bool {
    REQUIRE_KEY.get()
}
