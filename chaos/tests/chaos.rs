//! A short run of the harness, and one against a function that makes the mistake which the harness is there to find.

use std::collections::BTreeSet;

use chaos::check::Violation;
use chaos::client::{After, after_sqlstate};
use chaos::gremlin::{Fault, schedule};
use chaos::intention::{ACCOUNTS, Intention, Kind, UNKNOWN_ACCOUNT};
use chaos::{Settings, run};

const SHORT: Settings = Settings {
    requests: 8000,
    faults: 80,
    clients: 16,
    seed: 1,
    fsync: false,
    progress: false,
    naive: false,
    keep: None,
};

#[test]
fn every_intention_is_executed_once_while_everything_breaks() {
    let report = run(&SHORT);
    println!("{report}");
    assert!(report.holds(), "{report}");
    assert_eq!(report.faults.values().sum::<u64>(), 80);
    assert_eq!(report.faults.len(), 12, "each kind");
    for count in [report.cuts, report.recovered, report.replays, report.probes, report.retries.values().sum()] {
        assert!(count > 0, "{report}");
    }
}

#[test]
fn a_debit_that_does_not_claim_its_key_is_found_out() {
    let report = run(&Settings { requests: 2000, naive: true, ..SHORT });
    assert!(report.finished, "{report}");
    assert!(!report.holds());
    let twice = |violation: &Violation| matches!(violation, Violation::ExecutedTwice { .. });
    assert!(report.violations.iter().any(twice), "{report}");
}

#[test]
fn what_is_worth_a_retry_is_told_by_the_sqlstate() {
    for state in ["08006", "08003", "40003", "57P01", "57P02", "57P05"] {
        assert_eq!(after_sqlstate(state), After::Unknown(state.to_owned()));
    }
    for state in ["40001", "40P01", "53100", "53200", "53300", "55P03", "57014", "57P03"] {
        assert_eq!(after_sqlstate(state), After::Retry(state.to_owned()));
    }
    for state in ["22023", "P0001", "23503", "23505", "25P02", "27000", "42501", "55000", "XX000"] {
        assert_eq!(after_sqlstate(state), After::Definite(state.to_owned()));
    }
}

#[test]
fn a_seed_decides_intentions_and_faults() {
    assert_eq!(schedule(7, 100, 10_000, 16), schedule(7, 100, 10_000, 16));
    assert_ne!(schedule(7, 100, 10_000, 16), schedule(8, 100, 10_000, 16));
    let intentions = |seed| (0..1000).map(|n| Intention::generate(seed, 3, n)).collect::<Vec<_>>();
    assert_eq!(intentions(7), intentions(7));
    assert_ne!(intentions(7), intentions(8));
    let kinds: BTreeSet<Fault> = schedule(7, 12, 1000, 1).iter().map(|planned| planned.fault).collect();
    assert_eq!(kinds.len(), 12, "each kind, if there is room");
    for intention in intentions(7) {
        assert!((1..=ACCOUNTS).contains(&intention.account) || intention.account == UNKNOWN_ACCOUNT);
        if intention.kind == Kind::Transfer {
            assert!((1..=ACCOUNTS).contains(&intention.to) && intention.to != intention.account);
        }
    }
}
