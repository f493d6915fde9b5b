//! What a background worker asks of the server, and where the server enters one.

use core::ffi::{CStr, c_int};
use std::ffi::CString;

use pgrx::bgworkers::{BackgroundWorker, SignalWakeFlags};
use pgrx::prelude::*;

use super::scan::find_database;
use crate::error::Error;
use crate::worker;

/// The server's entry into the launcher.
#[pg_guard]
#[unsafe(no_mangle)]
pub extern "C-unwind" fn idempotency_record_launcher(_argument: pg_sys::Datum) {
    attach_signal_handlers();
    worker::launch();
}

/// The server's entry into a purge worker; the argument is the database's oid.
#[pg_guard]
#[unsafe(no_mangle)]
pub extern "C-unwind" fn idempotency_record_purge_worker(argument: pg_sys::Datum) {
    attach_signal_handlers();
    BackgroundWorker::connect_worker_to_spi_by_oid(Some(pg_sys::Oid::from(argument.value() as u32)), None);
    worker::purge();
}

/// SIGTERM ends the process as it ends a session, at the next occasion; with exit code 1, so that the server starts a launcher
/// anew that somebody terminated.
fn attach_signal_handlers() {
    unsafe extern "C-unwind" {
        fn die(signal: c_int);
    }
    // SAFETY: the server's own handler for this signal, put in place before signals are let through.
    unsafe {
        #[cfg(not(feature = "pg18"))]
        pg_sys::pqsignal(pg_sys::SIGTERM as c_int, Some(die));
        #[cfg(feature = "pg18")]
        pg_sys::pqsignal_be(pg_sys::SIGTERM as c_int, Some(die));
    }
    BackgroundWorker::attach_signal_handlers(SignalWakeFlags::SIGHUP);
}

/// Whether the server is loading the libraries of shared_preload_libraries, for real use and not for pg_upgrade.
pub fn is_preloading() -> bool {
    // SAFETY: two flags of the server.
    unsafe { pg_sys::process_shared_preload_libraries_in_progress && !pg_sys::IsBinaryUpgrade }
}

/// Whether the server is a standby, or has not yet recovered.
pub fn is_in_recovery() -> bool {
    // SAFETY: asks the shared state of the server.
    unsafe { pg_sys::RecoveryInProgress() }
}

/// Reads the configuration anew after a SIGHUP.
pub fn reload_configuration() {
    // SAFETY: what every process of the server does after SIGHUP.
    unsafe { pg_sys::ProcessConfigFile(pg_sys::GucContext::PGC_SIGHUP) };
}

/// Has a worker's transactions write, and see what others commit, whatever its database's settings say for sessions.
pub fn set_transaction_defaults() {
    for (name, value) in
        [(c"default_transaction_read_only", c"off"), (c"default_transaction_isolation", c"read committed")]
    {
        // SAFETY: two settings of the server's own with values that they take; the server copies both.
        unsafe {
            pg_sys::SetConfigOption(
                name.as_ptr(),
                value.as_ptr(),
                pg_sys::GucContext::PGC_SUSET,
                pg_sys::GucSource::PGC_S_OVERRIDE,
            );
        }
    }
}

/// What the process does, or waits for if it is idle, for pg_stat_activity.
pub fn report_activity(idle: bool, activity: &CStr) {
    let state = if idle { pg_sys::BackendState::STATE_IDLE } else { pg_sys::BackendState::STATE_RUNNING };
    // SAFETY: the server copies the text.
    unsafe {
        pg_sys::SetCurrentStatementStartTimestamp();
        pg_sys::pgstat_report_activity(state, activity.as_ptr());
    }
}

/// A transaction of a worker, which has none of its own accord. An error ends it, with the worker.
pub fn in_transaction<T>(work: impl FnOnce() -> T) -> T {
    begin_transaction();
    let result = work();
    commit_transaction();
    result
}

/// Within [`in_transaction`]: commits, and begins the next one.
pub fn next_transaction() {
    commit_transaction();
    pgrx::check_for_interrupts!();
    begin_transaction();
}

fn begin_transaction() {
    // SAFETY: the worker is connected and outside a transaction. SPI wants a snapshot around what it runs.
    unsafe {
        pg_sys::StartTransactionCommand();
        pg_sys::PushActiveSnapshot(pg_sys::GetTransactionSnapshot());
    }
}

fn commit_transaction() {
    // SAFETY: ends what `begin_transaction` began.
    unsafe {
        pg_sys::PopActiveSnapshot();
        pg_sys::CommitTransactionCommand();
    }
}

/// The databases in a list of names as in the server's own settings, `None` if it is no such list. One that does not exist
/// is its name alone.
pub fn find_databases(list: &CStr) -> Option<Vec<(CString, Option<pg_sys::Oid>)>> {
    // SAFETY: the server splits a copy that is its own; the names that it finds lie in that copy.
    unsafe {
        let copy = pg_sys::pstrdup(list.as_ptr());
        let mut names: *mut pg_sys::List = core::ptr::null_mut();
        if !pg_sys::SplitIdentifierString(copy, b',' as core::ffi::c_char, &mut names) {
            return None;
        }
        let names = pgrx::PgList::<core::ffi::c_char>::from_pg(names);
        let find = |name: *mut core::ffi::c_char| {
            let name = CStr::from_ptr(name);
            (name.to_owned(), find_database(name))
        };
        Some(names.iter_ptr().map(find).collect())
    }
}

/// The database that this process is connected to.
pub fn current_database() -> pg_sys::Oid {
    // SAFETY: a variable of the server, set once.
    unsafe { pg_sys::MyDatabaseId }
}

/// Raises an error as the server does: it ends a worker.
pub fn raise(error: Error) -> ! {
    pgrx::pg_sys::panic::ErrorReport::from(error).report(PgLogLevel::ERROR);
    unreachable!("an error does not return")
}
