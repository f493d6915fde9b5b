//! The checker finds each kind of violation in journals and tables that are right but for one thing.

use chaos::check::{Tables, Violation, check};
use chaos::client::REPEAT;
use chaos::intention::{Intention, Kind, UNKNOWN_ACCOUNT};
use chaos::journal::{Entry, Got};

fn done(answer: &str) -> Got {
    Got::Done(answer.to_owned())
}

fn refused(sqlstate: &str) -> Got {
    Got::Refused(sqlstate.to_owned())
}

fn identity(intention: &Intention) -> (i64, String, String) {
    (intention.account, intention.kind.scope().to_owned(), intention.key.clone())
}

/// Five intentions, one of each kind, that were executed, and three that were refused; with repeats and probes.
fn right() -> (Vec<Entry>, Tables) {
    let intend =
        |n: u64, kind, account, to, amount| Intention { n, key: format!("key-{n}"), kind, account, to, amount };
    let intentions = [
        intend(0, Kind::Debit, 1, 0, 100),
        intend(1, Kind::Credit, 1, 0, 30),
        intend(2, Kind::Transfer, 1, 2, 7),
        intend(3, Kind::Apply, 2, 0, 5),
        intend(4, Kind::Accept, 2, 0, 6),
        intend(5, Kind::Debit, 2, 0, 1_000_000),
        intend(6, Kind::Debit, 2, 0, 2_000_000),
        intend(7, Kind::Debit, UNKNOWN_ACCOUNT, 0, 1),
    ];
    let answers = [
        done(r#"{"balance": 900}"#),
        done(r#"{"balance": 930}"#),
        done(r#"{"paid": 923, "received": 1007}"#),
        done("1012"),
        done("true"),
        refused("P0001"),
        Got::Cancelled,
        refused("23503"),
    ];
    let mut journal = Vec::new();
    for (intention, answer) in intentions.iter().zip(&answers) {
        journal.push(Entry::Intend(intention.clone()));
        journal.push(Entry::Answer { n: intention.n, got: answer.clone() });
    }
    journal.push(Entry::Again { n: 0, got: answers[0].clone() });
    journal.push(Entry::Again { n: 3, got: done(REPEAT) });
    journal.push(Entry::Again { n: 4, got: done("false") });
    journal.push(Entry::Probe { n: 1, got: refused("22023") });
    let mut tables =
        Tables { initial: [(1, 1000), (2, 1000)].into(), balances: [(1, 923), (2, 1018)].into(), ..Tables::default() };
    for (intention, answer) in intentions.iter().zip(&answers).take(3) {
        let Got::Done(answer) = answer else { unreachable!() };
        tables.requests.insert(identity(intention), Some(answer.clone()));
    }
    tables.requests.insert(identity(&intentions[6]), None);
    tables.messages.insert(("apply".to_owned(), "key-3".to_owned()), (2, Some(5)));
    tables.messages.insert(("accept".to_owned(), "key-4".to_owned()), (2, None));
    for intention in &intentions[..5] {
        for effect in intention.effects() {
            *tables.effects.entry(effect).or_default() += 1;
        }
    }
    (journal, tables)
}

/// What the checker says after this change.
fn after(change: impl FnOnce(&mut Vec<Entry>, &mut Tables)) -> Vec<Violation> {
    let (mut journal, mut tables) = right();
    change(&mut journal, &mut tables);
    check(&[journal], &tables)
}

fn answer(journal: &mut [Entry], n: u64) -> &mut Got {
    let answers = journal.iter_mut().find_map(|entry| match entry {
        Entry::Answer { n: number, got } if *number == n => Some(got),
        _ => None,
    });
    answers.expect("an answer")
}

fn key(n: u64) -> String {
    format!("key-{n}")
}

#[test]
fn what_is_right_passes() {
    assert_eq!(after(|_, _| ()), []);
    // Several clients' intentions are told apart.
    let (journal, tables) = right();
    assert_eq!(check(&[Vec::new(), journal], &tables), []);
}

#[test]
fn a_second_execution_is_found_and_named() {
    let twice =
        |account, delta, n| Violation::ExecutedTwice { account, delta, expected: 1, found: 2, keys: vec![key(n)] };
    let found = after(|_, tables| {
        *tables.effects.get_mut(&(1, -100)).unwrap() += 1;
        *tables.balances.get_mut(&1).unwrap() -= 100;
    });
    assert_eq!(found, [twice(1, -100, 0), Violation::WrongBalance { account: 1, expected: 923, found: 823 }]);
    // A message, and half of a transfer.
    for (account, delta, n) in [(2, 5, 3), (2, 6, 4), (2, 7, 2)] {
        let found = after(|_, tables| {
            *tables.effects.get_mut(&(account, delta)).unwrap() += 1;
            *tables.balances.get_mut(&account).unwrap() += delta;
        });
        assert_eq!(found[0], twice(account, delta, n));
    }
    // Two executions that cancel each other out leave the balances alone.
    let found = after(|_, tables| {
        *tables.effects.entry((1, 30)).or_default() += 1;
        *tables.effects.entry((1, -30)).or_default() += 1;
    });
    assert_eq!(found, [twice(1, 30, 1), Violation::EffectWithoutRecord { account: 1, delta: -30, found: 1 }]);
}

#[test]
fn an_execution_that_was_acknowledged_and_is_lost_is_found() {
    // All of it, as after a crash that forgot the transaction.
    let found = after(|_, tables| {
        tables.requests.remove(&(1, "debit:v1".to_owned(), key(0)));
        tables.effects.remove(&(1, -100));
        *tables.balances.get_mut(&1).unwrap() += 100;
    });
    assert_eq!(found, [Violation::AcknowledgedAndLost { key: key(0) }]);
    let found = after(|_, tables| {
        tables.messages.remove(&("apply".to_owned(), key(3)));
        tables.effects.remove(&(2, 5));
        *tables.balances.get_mut(&2).unwrap() -= 5;
    });
    assert_eq!(found, [Violation::AcknowledgedAndLost { key: key(3) }]);
    // The record alone, as after a purge that went too far.
    let found = after(|_, tables| {
        tables.requests.remove(&(1, "credit:v1".to_owned(), key(1)));
    });
    assert!(found.contains(&Violation::AcknowledgedAndLost { key: key(1) }));
    assert!(found.contains(&Violation::EffectWithoutRecord { account: 1, delta: 30, found: 1 }));
    // The effect alone.
    let found = after(|_, tables| {
        tables.effects.remove(&(2, 6));
        *tables.balances.get_mut(&2).unwrap() -= 6;
    });
    assert!(found.contains(&Violation::RecordWithoutEffect { account: 2, delta: 6, expected: 1, found: 0 }));
}

#[test]
fn an_execution_of_what_was_refused_is_found() {
    for n in [5, 6] {
        let found = after(|_, tables| {
            let amount = 1_000_000 * (n as i64 - 4);
            tables.requests.insert((2, "debit:v1".to_owned(), key(n)), Some("{}".to_owned()));
            tables.effects.insert((2, -amount), 1);
            *tables.balances.get_mut(&2).unwrap() -= amount;
        });
        assert_eq!(found, [Violation::ExecutedThoughRefused { key: key(n) }]);
    }
    let found = after(|_, tables| {
        tables.requests.remove(&(2, "debit:v1".to_owned(), key(6)));
    });
    assert_eq!(found, [Violation::CancelledAndLost { key: key(6) }]);
}

#[test]
fn an_answer_that_is_missing_or_differs_is_found() {
    let found = after(|journal, _| {
        journal.retain(|entry| !matches!(entry, Entry::Answer { n: 2, .. }));
    });
    assert_eq!(found, [Violation::Unanswered { key: key(2) }]);
    let found = after(|journal, _| *answer(journal, 2) = done("{}"));
    let stored = r#"{"paid": 923, "received": 1007}"#.to_owned();
    assert_eq!(found, [Violation::AnswerIsNotTheStored { key: key(2), answer: "{}".to_owned(), stored }]);
    for (n, first, wrong) in [
        // Today's balance, another spelling, a refusal; a message that was applied or accepted once more.
        (0, r#"{"balance": 900}"#, done(r#"{"balance": 923}"#)),
        (0, r#"{"balance": 900}"#, done(r#"{"balance":900}"#)),
        (0, r#"{"balance": 900}"#, refused("P0001")),
        (3, REPEAT, done("1017")),
        (4, "false", done("true")),
    ] {
        let found = after(|journal, _| journal.push(Entry::Again { n, got: wrong.clone() }));
        assert_eq!(found, [Violation::ReplayDiffers { key: key(n), first: first.to_owned(), got: wrong }]);
    }
}

#[test]
fn a_mismatch_that_was_accepted_is_found() {
    for got in [done(r#"{"balance": 900}"#), refused("P0001")] {
        let found = after(|journal, _| journal.push(Entry::Probe { n: 0, got: got.clone() }));
        assert_eq!(found, [Violation::MismatchAccepted { key: key(0), got }]);
    }
}

#[test]
fn a_refusal_without_a_reason_is_found() {
    for (n, sqlstate) in [(5, "22023"), (5, "XX000"), (5, "23503"), (7, "42501")] {
        let found = after(|journal, _| *answer(journal, n) = refused(sqlstate));
        assert_eq!(found, [Violation::UnexpectedRefusal { key: key(n), sqlstate: sqlstate.to_owned() }]);
    }
}

#[test]
fn records_that_do_not_fit_are_found() {
    let found = after(|_, tables| {
        tables.requests.insert((1, "debit:v1".to_owned(), "nobody's".to_owned()), Some("{}".to_owned()));
        tables.messages.insert(("apply".to_owned(), "nobody's".to_owned()), (1, Some(1)));
    });
    let unknown = |scope: &str| Violation::UnknownRecord { scope: scope.to_owned(), key: "nobody's".to_owned() };
    assert_eq!(found, [unknown("apply"), unknown("debit:v1")]);
    for wrong in [(1, Some(5)), (2, Some(6))] {
        let found = after(|_, tables| {
            tables.messages.insert(("apply".to_owned(), key(3)), wrong);
        });
        assert_eq!(found, [Violation::WrongRecord { key: key(3) }]);
    }
    assert_eq!(after(|_, tables| tables.not_purged = 3), [Violation::NotPurged { records: 3 }]);
}

#[test]
fn a_balance_that_changed_in_no_way_that_was_noted_is_found() {
    let found = after(|_, tables| *tables.balances.get_mut(&2).unwrap() += 1);
    assert_eq!(found, [Violation::WrongBalance { account: 2, expected: 1018, found: 1019 }]);
    let found = after(|_, tables| {
        tables.balances.remove(&2);
    });
    assert_eq!(found, [Violation::WrongBalance { account: 2, expected: 1018, found: 0 }]);
}
