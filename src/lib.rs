//! `idempotency_record`: a retried database operation happens once, and a repeat gets the answer of the first.
//!
//! Read in this order: [`api`] is what SQL sees, [`once`] is the rule that every operation obeys, one file a subject
//! holds what is particular to it, and [`statement`] holds every SQL text.
#![deny(unsafe_code)]

use pgrx::prelude::*;

mod account;
pub mod api;
mod balance;
mod batch;
mod cancel;
mod error;
mod fence;
mod fingerprint;
mod keep;
mod message;
mod once;
mod policy;
mod purge;
#[allow(unsafe_code)]
mod raw;
mod request;
mod run;
mod setting;
mod statement;
mod worker;

pg_module_magic!();

extension_sql_file!("../sql/account.sql", name = "account", bootstrap);
extension_sql_file!("../sql/request_result.sql", name = "request_result", requires = ["account"]);
extension_sql_file!("../sql/processed_message.sql", name = "processed_message", requires = ["account"]);
extension_sql_file!("../sql/accepted_version.sql", name = "accepted_version");
extension_sql_file!("../sql/operation_policy.sql", name = "operation_policy");
extension_sql_file!("../sql/subscriber_policy.sql", name = "subscriber_policy");
extension_sql_file!("../sql/retention_fence.sql", name = "retention_fence");
extension_sql_file!("../sql/purge.sql", name = "purge");
extension_sql_file!(
    "../sql/retention_status.sql",
    name = "retention_status",
    requires = [
        "request_result",
        "processed_message",
        "operation_policy",
        "subscriber_policy",
        "retention_fence",
        "purge",
        api::retention_setting
    ]
);
extension_sql_file!(
    "../sql/keep.sql",
    name = "keep",
    requires = ["request_result", "processed_message", api::keep_record]
);
extension_sql_file!("../sql/privileges.sql", name = "privileges", finalize);

/// Called by the server when it loads the library.
#[allow(non_snake_case)]
#[pg_guard]
pub extern "C-unwind" fn _PG_init() {
    setting::init();
    worker::init();
}

#[cfg(any(test, feature = "pg_test"))]
mod pg_tests;

/// What `cargo pgrx test` asks of a crate.
#[cfg(test)]
pub mod pg_test {
    /// Called once before the tests.
    pub fn setup(_options: Vec<&str>) {}

    /// Lines for the test server's postgresql.conf.
    #[must_use]
    pub fn postgresql_conf_options() -> Vec<&'static str> {
        vec![]
    }
}
