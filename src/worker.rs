//! The launcher, which the server starts where the library is preloaded, and the purge workers that it starts: one for each
//! database that is named in `idempotency_record.databases`, every `idempotency_record.purge_interval`.
//!
//! A purge worker ends when it is done. So a database can be dropped or copied between two purges, which a session that
//! stays connected would prevent; each purge reads the settings of its database; and no state can go stale. Neither
//! swallows an error: it ends the process with one line in the log, and the next interval brings the next worker.

use std::collections::HashMap;
use std::ffi::CString;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use pgrx::bgworkers::{
    BackgroundWorker, BackgroundWorkerBuilder, BackgroundWorkerStatus, BgWorkerStartTime, DynamicBackgroundWorker,
};
use pgrx::prelude::*;

use crate::error::Error;
use crate::purge::Purger;
use crate::raw::ActingAs;
use crate::{purge, raw, setting, statement};

/// The library's name, as in shared_preload_libraries.
const LIBRARY: &str = "idempotency_record";
/// How soon the server starts a launcher again that failed.
const RESTART: Duration = Duration::from_secs(10);
/// How long the launcher sleeps when nothing is to be done; a reload wakes it.
const SLEEP: Duration = Duration::from_secs(600);
/// How soon it tries again where the server has no room for a worker.
const RETRY: Duration = Duration::from_secs(10);
/// How many workers run at a time: the server has few, which parallel queries and replication want too.
const AT_ONCE: usize = 2;
/// How soon the launcher looks whether one of them is done, if another database waits for it.
const LOOK: Duration = Duration::from_secs(1);

/// Whether this server preloaded the library; each process inherits it.
static PRELOADED: AtomicBool = AtomicBool::new(false);

/// Has the server start the launcher, if the library is being preloaded. It starts when the server takes writes: on a standby,
/// at its promotion.
pub fn init() {
    if !raw::is_preloading() {
        return;
    }
    PRELOADED.store(true, Ordering::Relaxed);
    BackgroundWorkerBuilder::new("idempotency_record launcher")
        .set_type("idempotency_record launcher")
        .set_library(LIBRARY)
        .set_function("idempotency_record_launcher")
        .enable_spi_access()
        .set_start_time(BgWorkerStartTime::RecoveryFinished)
        .set_restart_time(Some(RESTART))
        .load();
}

/// Why no worker purges this database, or `on`.
pub fn state() -> &'static str {
    let named = || {
        let databases = raw::find_databases(&setting::databases()).unwrap_or_default();
        databases.iter().any(|(_, oid)| *oid == Some(raw::current_database()))
    };
    if !PRELOADED.load(Ordering::Relaxed) {
        "off: idempotency_record is not in shared_preload_libraries"
    } else if raw::is_in_recovery() {
        "off: the server is a standby"
    } else if setting::purge_interval().is_none() {
        "off: idempotency_record.purge_interval is 0"
    } else if !named() {
        "off: the database is not in idempotency_record.databases"
    } else {
        "on"
    }
}

/// A database that is purged.
#[derive(Default)]
struct Database {
    /// When its last worker was started.
    started: Option<Instant>,
    worker: Option<DynamicBackgroundWorker>,
    /// Whether the log says already that it does not exist.
    missed: bool,
    /// Whether the log says already that there is no room for its worker.
    crowded: bool,
}

impl Database {
    /// Whether its last purge is still going on, or about to begin.
    fn is_being_purged(&self) -> bool {
        let pid = self.worker.as_ref().map(DynamicBackgroundWorker::pid);
        matches!(pid, Some(Ok(_) | Err(BackgroundWorkerStatus::NotYetStarted)))
    }
}

/// The launcher's loop.
pub fn launch() {
    // No database: the list of databases is all that it reads.
    BackgroundWorker::connect_worker_to_spi(None, None);
    let mut databases = HashMap::new();
    loop {
        if BackgroundWorker::sighup_received() {
            raw::reload_configuration();
        }
        let sleep = match setting::purge_interval() {
            Some(interval) => start_workers(&mut databases, interval),
            None => SLEEP,
        };
        raw::report_activity(true, c"waiting for the next purge");
        if !BackgroundWorker::wait_latch(Some(sleep.clamp(Duration::from_millis(100), SLEEP))) {
            return;
        }
    }
}

/// Starts a worker for each database whose time has come, and returns when the next one's comes.
fn start_workers(databases: &mut HashMap<CString, Database>, interval: Duration) -> Duration {
    raw::report_activity(false, c"starting purge workers");
    let Some(named) = raw::in_transaction(|| raw::find_databases(&setting::databases())) else {
        warning!("idempotency_record.databases is not a list of names");
        return SLEEP;
    };
    databases.retain(|name, _| named.iter().any(|(still, _)| still == name));
    let mut running = databases.values().filter(|database| database.is_being_purged()).count();
    let mut sleep = SLEEP;
    for (name, oid) in named {
        let shown = name.to_string_lossy().into_owned();
        let database = databases.entry(name).or_default();
        let elapsed = database.started.map(|started| started.elapsed());
        if let Some(rest) = elapsed.and_then(|elapsed| interval.checked_sub(elapsed)).filter(|rest| !rest.is_zero()) {
            sleep = sleep.min(rest);
            continue;
        }
        sleep = sleep.min(interval);
        if database.is_being_purged() {
            continue;
        }
        let Some(oid) = oid else {
            if !std::mem::replace(&mut database.missed, true) {
                warning!("database \"{shown}\" of idempotency_record.databases does not exist");
            }
            continue;
        };
        database.missed = false;
        if running >= AT_ONCE {
            sleep = sleep.min(LOOK);
            continue;
        }
        match start_worker(&shown, oid) {
            Some(worker) => {
                database.worker = Some(worker);
                database.started = Some(Instant::now());
                database.crowded = false;
                running += 1;
            }
            None => {
                if !std::mem::replace(&mut database.crowded, true) {
                    warning!(
                        "no purge worker could be started for database \"{shown}\": max_worker_processes is too low"
                    );
                }
                sleep = sleep.min(RETRY);
            }
        }
    }
    sleep
}

fn start_worker(database: &str, oid: pg_sys::Oid) -> Option<DynamicBackgroundWorker> {
    BackgroundWorkerBuilder::new(&format!("idempotency_record purge worker for {database}"))
        .set_type("idempotency_record purge worker")
        .set_library(LIBRARY)
        .set_function("idempotency_record_purge_worker")
        .set_argument(Some(pg_sys::Datum::from(oid)))
        .enable_spi_access()
        .set_start_time(BgWorkerStartTime::RecoveryFinished)
        .set_restart_time(None)
        .load_dynamic()
        .ok()
}

/// A purge worker. It is connected as a superuser, and works as the owner of the records.
struct Worker;

impl Purger for Worker {
    fn commit(&self) -> Result<(), Error> {
        if BackgroundWorker::sighup_received() {
            raw::reload_configuration();
        }
        raw::next_transaction();
        Ok(())
    }

    fn act(&self) -> Result<Option<ActingAs>, Error> {
        let table = statement::own_table(c"request_result")?.ok_or(Error::ForeignTable)?;
        let owner = raw::find_owner(table).ok_or(Error::ForeignTable)?;
        Ok(Some(ActingAs::begin(owner)))
    }
}

/// A purge worker's work, in the database that it is connected to.
pub fn purge() {
    raw::set_transaction_defaults();
    raw::report_activity(false, c"purging expired records");
    let purged = raw::in_transaction(|| {
        raw::find_extension()?; // Not created, or dropped since: then there is nothing to purge.
        match purge::everything(Some(purge::BATCH_SIZE), None, &Worker) {
            Ok(purged) => Some(purged),
            // Within the transaction, which must not be committed after an error.
            Err(error) => raw::raise(error),
        }
    });
    if let Some(purged) = purged.filter(|purged| purged.deleted > 0) {
        log!("idempotency_record purged {} records, {} are left", purged.deleted, purged.remaining);
    }
}
