//! `make chaos`; see tools/chaos.sh for the parameters.

use std::path::PathBuf;
use std::process::ExitCode;
use std::str::FromStr;
use std::time::{SystemTime, UNIX_EPOCH};

use chaos::{Settings, run};

fn parameter<T: FromStr>(name: &str, default: T) -> T {
    match std::env::var(name).ok().filter(|value| !value.is_empty()) {
        Some(value) => value.parse().unwrap_or_else(|_| panic!("{name}={value} is not a number")),
        None => default,
    }
}

fn main() -> ExitCode {
    let clock = SystemTime::now().duration_since(UNIX_EPOCH).expect("a clock").as_millis() as u64;
    let settings = Settings {
        requests: parameter("REQUESTS", 20_000),
        faults: parameter("FAULTS", 100),
        clients: parameter("CLIENTS", 16),
        seed: parameter("SEED", clock),
        fsync: parameter("FSYNC", 0) != 0,
        progress: true,
        naive: parameter("NAIVE", 0) != 0,
        keep: std::env::var_os("KEEP").map(PathBuf::from),
    };
    eprintln!("{settings:?}");
    let report = run(&settings);
    println!("{report}");
    ExitCode::from(u8::from(!report.holds()))
}
