//! The proof: from what the clients wrote down and what the tables hold, that every intention was executed once or,
//! where its client was told so, not at all. Reads nothing and knows no server, so that it can be tested itself.

use std::collections::HashMap;

use crate::client::REPEAT;
use crate::intention::{Intention, Kind};
use crate::journal::{Entry, Got};

/// What the tables hold after the run.
#[derive(Clone, Debug, Default)]
pub struct Tables {
    /// Account and balance before the run.
    pub initial: HashMap<i64, i64>,
    /// Account and balance after the run.
    pub balances: HashMap<i64, i64>,
    /// `request_result`: account, operation and key; the response as text, or none where the key was cancelled.
    pub requests: HashMap<(i64, String, String), Option<String>>,
    /// `processed_message`: subscriber and id; the account, and the delta where the extension made the effect.
    pub messages: HashMap<(String, String), (i64, Option<i64>)>,
    /// Each change of a balance that was committed: the account, and by how much. A trigger on `account` wrote them
    /// down, so that they do not depend on any record.
    pub effects: HashMap<(i64, i64), usize>,
    /// How many records are left that are older than the retention of a purge that met nobody.
    pub not_purged: u64,
}

/// What must not be.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Violation {
    /// A balance changed more often than the records say; the keys are those of the intentions that change it so.
    ExecutedTwice { account: i64, delta: i64, expected: usize, found: usize, keys: Vec<String> },
    /// A balance changed, and no record says why.
    EffectWithoutRecord { account: i64, delta: i64, found: usize },
    /// A record says that a balance changed, and it did not.
    RecordWithoutEffect { account: i64, delta: i64, expected: usize, found: usize },
    /// The client was told that it was executed, and there is no record.
    AcknowledgedAndLost { key: String },
    /// The client was told that it was not and would not be executed, and it was.
    ExecutedThoughRefused { key: String },
    /// The client was told that its key is cancelled, and it is not.
    CancelledAndLost { key: String },
    /// The client never got a definite answer.
    Unanswered { key: String },
    /// The first definite answer is another than the one that is stored.
    AnswerIsNotTheStored { key: String, answer: String, stored: String },
    /// A repeat got something else than the first answer.
    ReplayDiffers { key: String, first: String, got: Got },
    /// Another request with the same key was not refused.
    MismatchAccepted { key: String, got: Got },
    /// A refusal for which there is no reason.
    UnexpectedRefusal { key: String, sqlstate: String },
    /// A record that belongs to no intention.
    UnknownRecord { scope: String, key: String },
    /// A message's record names another account or delta.
    WrongRecord { key: String },
    /// A balance is not the first one and what was executed since.
    WrongBalance { account: i64, expected: i64, found: i64 },
    /// Records are left that a purge should have taken.
    NotPurged { records: u64 },
}

/// Everything that is wrong. The journals are the clients', whole.
pub fn check(journals: &[Vec<Entry>], tables: &Tables) -> Vec<Violation> {
    let mut violations = Vec::new();
    let mut unclaimed_requests: HashMap<_, _> = tables.requests.iter().collect();
    let mut unclaimed_messages: HashMap<_, _> = tables.messages.iter().collect();
    // Account and delta, and who changes it so.
    let mut executed = HashMap::<(i64, i64), Vec<&str>>::new();
    for journal in journals {
        for story in stories(journal) {
            let intention = story.intention;
            let kind = intention.kind;
            let key = || intention.key.clone();
            let mut stored = None;
            let mut cancelled = false;
            let happened = if kind.is_message() {
                match unclaimed_messages.remove(&(kind.scope().to_owned(), key())) {
                    Some((account, delta)) => {
                        let right =
                            intention.account == *account && delta.is_none_or(|delta| delta == intention.amount);
                        violations.extend((!right).then(|| Violation::WrongRecord { key: key() }));
                        true
                    }
                    None => false,
                }
            } else {
                match unclaimed_requests.remove(&(intention.account, kind.scope().to_owned(), key())) {
                    Some(Some(response)) => {
                        stored = Some(response.as_str());
                        true
                    }
                    Some(None) => {
                        cancelled = true;
                        false
                    }
                    None => false,
                }
            };
            if happened {
                for effect in intention.effects() {
                    executed.entry(effect).or_default().push(&intention.key);
                }
            }
            match story.answer {
                None => violations.push(Violation::Unanswered { key: key() }),
                Some(Got::Done(_)) if !happened => violations.push(Violation::AcknowledgedAndLost { key: key() }),
                Some(Got::Done(answer)) => {
                    if let Some(stored) = stored.filter(|stored| stored != answer) {
                        let (answer, stored) = (answer.clone(), stored.to_owned());
                        violations.push(Violation::AnswerIsNotTheStored { key: key(), answer, stored });
                    }
                }
                Some(Got::Refused(sqlstate)) if !intention.may_be_refused_with(sqlstate) => {
                    violations.push(Violation::UnexpectedRefusal { key: key(), sqlstate: sqlstate.clone() });
                }
                Some(_) if happened => violations.push(Violation::ExecutedThoughRefused { key: key() }),
                Some(Got::Cancelled) if !cancelled => violations.push(Violation::CancelledAndLost { key: key() }),
                Some(_) => {}
            }
            if let Some(Got::Done(first)) = story.answer {
                // A message's answer is only whether it is a repeat.
                let first = match kind {
                    Kind::Apply => REPEAT,
                    Kind::Accept => "false",
                    _ => first.as_str(),
                };
                for got in story.repeats {
                    if !matches!(got, Got::Done(again) if again == first) {
                        let (first, got) = (first.to_owned(), got.clone());
                        violations.push(Violation::ReplayDiffers { key: key(), first, got });
                    }
                }
            }
            for got in story.probes {
                if !matches!(got, Got::Refused(sqlstate) if sqlstate == "22023") {
                    violations.push(Violation::MismatchAccepted { key: key(), got: got.clone() });
                }
            }
        }
    }
    for (_, scope, key) in unclaimed_requests.into_keys() {
        violations.push(Violation::UnknownRecord { scope: scope.clone(), key: key.clone() });
    }
    for (scope, key) in unclaimed_messages.into_keys() {
        violations.push(Violation::UnknownRecord { scope: scope.clone(), key: key.clone() });
    }
    check_effects(&executed, tables, &mut violations);
    if tables.not_purged > 0 {
        violations.push(Violation::NotPurged { records: tables.not_purged });
    }
    violations.sort();
    violations
}

fn check_effects(executed: &HashMap<(i64, i64), Vec<&str>>, tables: &Tables, violations: &mut Vec<Violation>) {
    for (&(account, delta), &found) in &tables.effects {
        match executed.get(&(account, delta)) {
            None => violations.push(Violation::EffectWithoutRecord { account, delta, found }),
            Some(keys) if keys.len() < found => {
                let keys: Vec<_> = keys.iter().map(|&key| key.to_owned()).collect();
                let expected = keys.len();
                violations.push(Violation::ExecutedTwice { account, delta, expected, found, keys });
            }
            Some(_) => {}
        }
    }
    for (&(account, delta), keys) in executed {
        let found = tables.effects.get(&(account, delta)).copied().unwrap_or(0);
        if found < keys.len() {
            violations.push(Violation::RecordWithoutEffect { account, delta, expected: keys.len(), found });
        }
    }
    // By themselves, not by way of the effects: should the trigger have missed a change, the balance has not.
    let mut expected = tables.initial.clone();
    for (&(account, delta), keys) in executed {
        *expected.entry(account).or_default() += delta * keys.len() as i64;
    }
    for (account, expected) in expected {
        let found = tables.balances.get(&account).copied().unwrap_or(0);
        if found != expected {
            violations.push(Violation::WrongBalance { account, expected, found });
        }
    }
}

/// All that a journal says about one intention.
struct Story<'a> {
    intention: &'a Intention,
    answer: Option<&'a Got>,
    repeats: Vec<&'a Got>,
    probes: Vec<&'a Got>,
}

fn stories(journal: &[Entry]) -> Vec<Story<'_>> {
    let mut stories = Vec::<Story>::new();
    for entry in journal {
        match entry {
            Entry::Intend(intention) => {
                assert_eq!(intention.n, stories.len() as u64, "a journal holds the intentions in order");
                stories.push(Story { intention, answer: None, repeats: Vec::new(), probes: Vec::new() });
            }
            Entry::Answer { n, got } => stories[*n as usize].answer = Some(got),
            Entry::Again { n, got } => stories[*n as usize].repeats.push(got),
            Entry::Probe { n, got } => stories[*n as usize].probes.push(got),
        }
    }
    stories
}
