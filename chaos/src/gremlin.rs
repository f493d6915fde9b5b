//! What goes wrong, and when: a schedule that the seed decides, by the count of intentions that are answered rather than
//! by the clock, so that the same seed breaks the same things at the same point of the clients' work.

use std::collections::BTreeMap;
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rand::rngs::ChaCha8Rng;
use rand::seq::SliceRandom as _;
use rand::{RngExt, SeedableRng};
use tokio::sync::watch;
use tokio::task::{JoinHandle, JoinSet};
use tokio_postgres::{Client, Config, Error, NoTls};

use crate::client::{self, Shared, application_name};
use crate::intention::{ACCOUNTS, HOT};
use crate::line::Moment;

/// A kind of fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Fault {
    /// A client's connection is cut after half of a request.
    CutMidRequest,
    /// A client's connection is cut as soon as a request is sent.
    CutAfterRequest,
    /// A client's connection is cut when the answer is there, before it is read.
    CutBeforeAnswer,
    /// A client dies, and another one starts from its file.
    ClientKilled,
    /// `pg_terminate_backend`
    Terminate,
    /// `pg_cancel_backend`
    Cancel,
    /// kill -9 of a backend: the server ends every session and recovers.
    CrashBackend,
    /// `pg_ctl restart -m immediate`
    RestartImmediate,
    /// `LOCK TABLE`, held for a while
    LockTable,
    /// `SELECT ... FOR UPDATE` of accounts, held for a while
    LockRows,
    /// `purge_expired_keys`, after old records were put in
    Purge,
    /// DDL and maintenance
    Ddl,
}

/// How often each comes, of 100.
const WEIGHTS: [(Fault, u32); 12] = [
    (Fault::CutMidRequest, 6),
    (Fault::CutAfterRequest, 14),
    (Fault::CutBeforeAnswer, 16),
    (Fault::ClientKilled, 8),
    (Fault::Terminate, 14),
    (Fault::Cancel, 12),
    (Fault::CrashBackend, 4),
    (Fault::RestartImmediate, 3),
    (Fault::LockTable, 5),
    (Fault::LockRows, 6),
    (Fault::Purge, 5),
    (Fault::Ddl, 7),
];

/// What DDL and maintenance there is. Index builds are rather long than wide: CONCURRENTLY waits for everybody.
const DDL: [&str; 9] = [
    "DROP INDEX CONCURRENTLY IF EXISTS chaos_index",
    "CREATE INDEX CONCURRENTLY IF NOT EXISTS chaos_index ON public.request_result (account_id, created_at)",
    "REINDEX INDEX CONCURRENTLY public.request_result_created_at_idx",
    "ALTER TABLE public.account SET (fillfactor = 70)",
    "ALTER TABLE public.request_result SET (autovacuum_vacuum_scale_factor = 0.01)",
    "ANALYZE",
    "VACUUM",
    "VACUUM (FREEZE) public.account, public.request_result",
    "ALTER TABLE public.processed_message ALTER COLUMN subscriber SET STATISTICS 50",
];

/// A fault with its time and its victim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Planned {
    /// After so many answers.
    pub at: u64,
    /// What happens.
    pub fault: Fault,
    /// To which client, if to one.
    pub client: usize,
    /// A number to choose accounts, tables or statements by.
    pub choice: u32,
    /// How long a lock is held.
    pub held: Duration,
}

/// The schedule: each kind at least once if there is room, the rest by weight.
pub fn schedule(seed: u64, faults: usize, requests: u64, clients: usize) -> Vec<Planned> {
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    let mut kinds: Vec<_> = WEIGHTS.iter().map(|&(fault, _)| fault).collect();
    kinds.shuffle(&mut random);
    while kinds.len() < faults {
        let mut ticket = random.random_range(0..WEIGHTS.iter().map(|(_, weight)| weight).sum());
        let (fault, _) =
            WEIGHTS.iter().find(|(_, weight)| ticket < *weight || (ticket -= weight, false).1).expect("one");
        kinds.push(*fault);
    }
    kinds.truncate(faults);
    kinds.shuffle(&mut random);
    let mut times: Vec<_> = kinds.iter().map(|_| random.random_range(requests / 100..=requests * 97 / 100)).collect();
    times.sort_unstable();
    let planned = |(at, fault)| Planned {
        at,
        fault,
        client: random.random_range(0..clients),
        choice: random.random_range(0..1000),
        held: Duration::from_millis(random.random_range(20..400)),
    };
    times.into_iter().zip(kinds).map(planned).collect()
}

/// What the gremlin needs to know.
pub struct Gremlin<'a> {
    /// The clients' world.
    pub shared: Arc<Shared>,
    /// The cluster, for the restart.
    pub cluster: &'a client_tests::Cluster,
    /// The clients.
    pub clients: Vec<JoinHandle<()>>,
    /// Up to how many intentions may be answered.
    pub allowed: watch::Sender<u64>,
    /// How many old records were put in for the purges.
    pub old_records: u64,
    /// Says what is going on, once a second.
    pub progress: bool,
}

/// How long nothing may happen before the run is given up.
const PATIENCE: Duration = Duration::from_secs(120);

impl Gremlin<'_> {
    /// Does all of it, waits for the clients to finish, and returns how often what happened. `None`: the clients make no
    /// progress any more.
    pub async fn run(mut self, schedule: &[Planned]) -> Option<(BTreeMap<Fault, u64>, u64)> {
        let requests: u64 = self.shared.quotas.iter().sum();
        // As many as are answered while a fault takes effect, so that the clients are at work when it does.
        let slack = (requests / (schedule.len() as u64 + 1)).clamp(8, 400);
        let mut done = BTreeMap::new();
        let mut locks = JoinSet::new();
        for planned in schedule {
            let _ = self.allowed.send(planned.at + slack);
            self.wait_for(planned.at, done.values().sum()).await?;
            *done.entry(planned.fault).or_default() += 1;
            self.perform(planned, &mut locks).await;
            while locks.try_join_next().is_some() {}
        }
        let _ = self.allowed.send(u64::MAX);
        self.wait_for(requests, done.values().sum()).await?;
        locks.join_all().await;
        for client in self.clients {
            client.await.expect("a client does not panic");
        }
        Some((done, self.old_records))
    }

    async fn wait_for(&self, answers: u64, faults: u64) -> Option<()> {
        let (mut last, mut since, mut shown) = (0, Instant::now(), Instant::now());
        loop {
            let answered = self.shared.answered.load(Ordering::Relaxed);
            if answered >= answers {
                return Some(());
            }
            // A client that panicked has to end the run, not to hang it.
            if answered != last {
                (last, since) = (answered, Instant::now());
            } else if since.elapsed() > PATIENCE {
                return None;
            }
            if self.progress && shown.elapsed() > Duration::from_secs(1) {
                let requests: u64 = self.shared.quotas.iter().sum();
                eprintln!("{answered} of {requests} intentions answered, {faults} faults");
                shown = Instant::now();
            }
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }

    async fn perform(&mut self, planned: &Planned, locks: &mut JoinSet<()>) {
        let cut = |moment: Moment| self.shared.wanted_cuts[planned.client].store(moment as u8, Ordering::Relaxed);
        match planned.fault {
            Fault::CutMidRequest => cut(Moment::MidRequest),
            Fault::CutAfterRequest => cut(Moment::AfterRequest),
            Fault::CutBeforeAnswer => cut(Moment::BeforeAnswer),
            Fault::ClientKilled => {
                let client = &mut self.clients[planned.client];
                client.abort();
                if let Err(error) = client.await
                    && error.is_panic()
                {
                    std::panic::resume_unwind(error.into_panic());
                }
                self.clients[planned.client] = tokio::spawn(client::run(self.shared.clone(), planned.client));
            }
            Fault::Terminate | Fault::Cancel | Fault::CrashBackend => self.strike(planned).await,
            Fault::RestartImmediate => {
                // Blocks this thread, which has nothing else to do; the clients have others.
                tokio::task::block_in_place(|| self.cluster.pg_ctl(&["restart", "-m", "immediate"]));
            }
            Fault::LockTable => {
                let table = ["account", "request_result", "processed_message"][planned.choice as usize % 3];
                let mode = ["ACCESS EXCLUSIVE", "SHARE ROW EXCLUSIVE"][planned.choice as usize / 3 % 2];
                self.hold(format!("LOCK TABLE public.{table} IN {mode} MODE"), planned.held, locks);
            }
            Fault::LockRows => {
                let from = i64::from(planned.choice) % ACCOUNTS;
                let rows = "SELECT FROM public.account WHERE account_id";
                let lock = format!("{rows} BETWEEN {from} AND {} ORDER BY account_id FOR UPDATE", from + 15);
                self.hold(lock, planned.held, locks);
            }
            Fault::Purge => {
                let purge = async {
                    let session = session(&self.shared).await;
                    // Old ones of the same accounts, so that the purge has work; nothing that a client may still retry.
                    let records = "INSERT INTO public.request_result (account_id, operation, request_key, request, response, created_at)
                        SELECT 1 + i % 64, 'old:v1', gen_random_uuid()::text, '{}', '{}', now() - interval '3 days'
                          FROM generate_series(1, 200) AS i";
                    let inserted = session.execute(records, &[]).await?;
                    session.execute("SELECT public.purge_expired_keys(interval '1 day')", &[]).await?;
                    Ok::<_, Error>(inserted)
                };
                self.old_records += purge.await.unwrap_or(0);
            }
            Fault::Ddl => {
                let statement = DDL[planned.choice as usize % DDL.len()];
                let session = session(&self.shared).await;
                // Gives way where it cannot get in: then there was a lock request in everybody's way at least.
                locks.spawn(async move {
                    let _ = session.batch_execute("SET statement_timeout = '15s'; SET lock_timeout = '5s'").await;
                    let _ = session.batch_execute(statement).await;
                });
            }
        }
    }

    /// Ends, cancels or kills a backend that is executing a client's request, if possible this client's. Half of the time
    /// it is one that waits for a row: a call is short, and few would be hit in the middle by chance.
    async fn strike(&self, planned: &Planned) {
        let waiting = planned.choice.is_multiple_of(2);
        let gate = session(&self.shared).await;
        if waiting {
            let rows = format!("account_id BETWEEN {} AND {}", HOT.start, HOT.end - 1);
            let lock = format!("BEGIN; SELECT FROM public.account WHERE {rows} ORDER BY account_id FOR UPDATE");
            let _ = gate.batch_execute(&lock).await;
        }
        let observer = session(&self.shared).await;
        let find = "SELECT pid FROM pg_stat_activity
                     WHERE application_name LIKE 'chaos-%' AND state = 'active' AND (NOT $1 OR wait_event_type = 'Lock')
                     ORDER BY application_name = $2 DESC LIMIT 1";
        let name = application_name(planned.client);
        for _ in 0..50 {
            if let Ok(Some(row)) = observer.query_opt(find, &[&waiting, &name]).await {
                let pid: i32 = row.get(0);
                let call = match planned.fault {
                    Fault::Terminate => "SELECT pg_terminate_backend($1)",
                    Fault::Cancel => "SELECT pg_cancel_backend($1)",
                    _ => {
                        kill(pid, self.cluster.directory());
                        break;
                    }
                };
                let _ = observer.execute(call, &[&pid]).await;
                break;
            }
            tokio::time::sleep(Duration::from_millis(4)).await;
        }
        let _ = gate.batch_execute("COMMIT").await;
    }

    /// Takes a lock in a session of its own, and comes back while it is held.
    fn hold(&self, sql: String, held: Duration, locks: &mut JoinSet<()>) {
        let shared = self.shared.clone();
        locks.spawn(async move {
            let session = session(&shared).await;
            let _ = session.batch_execute(&format!("BEGIN; {sql}")).await;
            tokio::time::sleep(held).await;
            let _ = session.batch_execute("COMMIT").await;
        });
    }
}

/// A session of the gremlin's own, as soon as the server takes one.
async fn session(shared: &Shared) -> Client {
    let start = Instant::now();
    loop {
        let mut config = Config::new();
        config.host_path(&shared.directory).user("postgres").dbname(&shared.database).application_name("gremlin");
        match config.connect(NoTls).await {
            Ok((client, connection)) => {
                tokio::spawn(connection);
                return client;
            }
            Err(error) => assert!(start.elapsed() < client_tests::DEADLINE, "no session: {error:?}"),
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// kill -9, if the process is one of this cluster's: the pid may be somebody else's by now.
fn kill(pid: i32, cluster: &Path) {
    if std::fs::read_link(format!("/proc/{pid}/cwd")).is_ok_and(|directory| directory == cluster.join("data")) {
        let status = Command::new("sh").args(["-c", &format!("kill -KILL {pid} 2>/dev/null")]).status().expect("sh");
        assert_eq!(status.signal(), None);
    }
}
