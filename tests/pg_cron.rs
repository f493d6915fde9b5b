//! pg_cron runs the purge, where the library is not preloaded.
//!
//! Debian has pg_cron for one major alone. `tools/setup.sh` downloads the package; its files go into a copy of the server
//! under test, which is of the same major and so loads it.

use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};
use std::{fs, thread};

use client_tests::{Cluster, environment, value};
use postgres::Client;

/// pg_cron of that age counts in minutes.
const DEADLINE: Duration = Duration::from_secs(150);

#[test]
#[ignore = "there is no pg_cron for this major"]
fn a_job_of_pg_cron_purges_in_batches() {
    let directory = tempfile::tempdir().expect("a directory");
    fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let bin = server_with_pg_cron(directory.path());
    let lib = bin.with_file_name("lib");
    let settings = ["shared_preload_libraries=pg_cron", "cron.database_name=postgres", "max_worker_processes=20"];
    // It either starts a session for each job, or a background worker.
    let ways = [["cron.use_background_workers=off", "cron.host="], ["cron.use_background_workers=on", "cron.host="]];
    let clusters = ways.map(|way| {
        // pg_cron is linked with libpq.
        let environment = [("LD_LIBRARY_PATH", lib.to_str().unwrap())];
        Cluster::start_with(bin.clone(), &environment, &[&settings[..], &way].concat())
    });
    let start = Instant::now();
    for mut client in clusters.iter().map(Cluster::connect) {
        client
            .batch_execute(
                "CREATE EXTENSION pg_cron;
                 CREATE EXTENSION idempotency_record;
                 INSERT INTO account VALUES (1, 1000);
                 INSERT INTO request_result (account_id, operation, request_key, request, response, created_at)
                 SELECT 1, 'debit:v1', i::text, '{}', '{}', now() - interval '1 hour' * i FROM generate_series(1, 20048) AS i",
            )
            .unwrap();
        value(&mut client, "SELECT cron.schedule('purge', '* * * * *', 'CALL purge()')");
    }
    for mut client in clusters.iter().map(Cluster::connect) {
        while runs(&mut client) == "NULL" {
            assert!(start.elapsed() < DEADLINE, "the job never ran");
            thread::sleep(Duration::from_millis(200));
        }
        assert!(runs(&mut client).starts_with("succeeded"), "{}", runs(&mut client));
        // Three batches, with a commit after each.
        let purged =
            "SELECT format('%s %s %s', (SELECT count(*) FROM request_result), deleted, purged_before IS NOT NULL)
                        FROM purge_progress JOIN retention_fence USING (kind, name)";
        assert_eq!(value(&mut client, purged), "47 20001 t");
    }
}

/// How the runs of the job that came to an end ended, with what pg_cron kept of their reports.
fn runs(client: &mut Client) -> String {
    value(
        client,
        "SELECT string_agg(format('%s (%s)', status, return_message), ', ') FROM cron.job_run_details
          WHERE status IN ('succeeded', 'failed')",
    )
}

/// The programs of a server that has pg_cron: the one under test, or else a copy in this directory that gets it.
fn server_with_pg_cron(directory: &Path) -> PathBuf {
    let bin = PathBuf::from(environment("PGBIN"));
    let ask = |what: &str| {
        let output = Command::new(bin.join("pg_config")).arg(what).output().expect("pg_config");
        PathBuf::from(String::from_utf8(output.stdout).expect("UTF-8").trim())
    };
    let (share, lib) = (ask("--sharedir").join("extension"), ask("--pkglibdir"));
    if share.join("pg_cron.control").exists() {
        return bin;
    }
    let files = PathBuf::from(environment("PG_CRON"));
    assert!(files.exists(), "{} is missing: Debian's package could not be downloaded", files.display());
    let root = fs::canonicalize(bin.join("..")).unwrap();
    let copy = directory.join("server");
    let within = |path: &Path| {
        let path = fs::canonicalize(path).expect("a directory of the server");
        copy.join(path.strip_prefix(&root).expect("a server that is one directory and can be copied"))
    };
    let (share, lib) = (within(&share), within(&lib));
    let copied = [&["-al"][..], &["-a"]].iter().any(|options| {
        // Hard links where the file system has them for us.
        let _ = fs::remove_dir_all(&copy);
        Command::new("cp").args(*options).arg(&root).arg(&copy).status().expect("cp").success()
    });
    assert!(copied, "the server could not be copied");
    let of_debian = |path: &str| files.join(path.replace('@', &environment("PG_MAJOR")));
    for (from, to) in [("usr/share/postgresql/@/extension/.", share), ("usr/lib/postgresql/@/lib/pg_cron.so", lib)] {
        let copied = Command::new("cp").arg("-r").arg(of_debian(from)).arg(to).status().expect("cp");
        assert!(copied.success(), "{from}");
    }
    copy.join("bin")
}
