//! Random programs: more than a hundred thousand calls of every function, in any nesting of savepoints, exceptions,
//! cursors and DO blocks, answered as a small model answers them, by one session whose memory stays flat.
//!
//! The seed is printed; `IDEMPOTENCY_RECORD_SEED=...` runs the same programs again, `IDEMPOTENCY_RECORD_CALLS=...` more of
//! them. (Odd arguments one by one, all policies, and handlers that misbehave are in no_internal_error.rs.)

use std::collections::{BTreeMap, HashMap};
use std::fmt::Write as _;
use std::sync::LazyLock;

use client_tests::{Cluster, pid, query, value};
use postgres::Client;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom as _;
use rand::{RngExt as _, SeedableRng as _};

// Nothing but the programs shall take the time of the machine.
static CLUSTER: LazyLock<Cluster> = LazyLock::new(|| Cluster::start(&["autovacuum=off", "synchronous_commit=off"]));

/// Calls before the memory is measured for the first time, and then.
const WARM: usize = 10_000;
const CALLS: usize = 100_000;
/// What the session may grow by meanwhile: less than two cache lines for each call. (malloc keeps what the largest program so far
/// needed, hence the first is the largest. A run of 500,000 calls grew by 7.5, 2.1 and 0.6 MB in the first three hundred thousand,
/// and by nothing in the rest.)
const BOUND: u64 = 12 << 20;
/// And what the server's memory contexts may: less than one small chunk for each call.
const BOUND_OF_CONTEXTS: u64 = 1 << 20;

/// The answer of a call as text, or its SQLSTATE.
type Answer = Result<String, &'static str>;

const INVALID: Answer = Err("22023");

// ---- the model -------------------------------------------------------------------------------------------------

/// A record of a request.
#[derive(Clone)]
struct Record {
    /// What identifies the request among those of its operation.
    request: String,
    /// None where it was cancelled.
    response: Option<String>,
}

/// A record of a message.
#[derive(Clone)]
struct Delivered {
    account: i64,
    delta: Option<i64>,
    payload: Option<usize>,
}

type Identity = (i64, &'static str, String);

/// What was there before a change.
enum Undo {
    Balance(i64, i64),
    Record(Identity, Option<Record>),
    Message((String, u8), Option<Delivered>),
    Version((String, String), Option<i64>),
}

/// What docs/reference.md says, as far as these programs go, with a journal to undo it.
#[derive(Default)]
struct Model {
    saves_refusals: bool,
    balances: HashMap<i64, i64>,
    records: HashMap<Identity, Record>,
    messages: HashMap<(String, u8), Delivered>,
    versions: HashMap<(String, String), i64>,
    journal: Vec<Undo>,
}

fn restore<K: std::hash::Hash + Eq, V>(map: &mut HashMap<K, V>, key: K, before: Option<V>) {
    match before {
        Some(before) => map.insert(key, before),
        None => map.remove(&key),
    };
}

/// A key, subscriber or entity that is accepted.
fn name(text: &Option<String>) -> Option<&String> {
    text.as_ref().filter(|text| !text.is_empty() && text.len() <= 255)
}

impl Model {
    fn undo_to(&mut self, mark: usize) {
        while self.journal.len() > mark {
            match self.journal.pop().expect("more than the mark") {
                Undo::Balance(account, before) => restore(&mut self.balances, account, Some(before)),
                Undo::Record(key, before) => restore(&mut self.records, key, before),
                Undo::Message(key, before) => restore(&mut self.messages, key, before),
                Undo::Version(key, before) => restore(&mut self.versions, key, before),
            }
        }
    }

    /// What a call answers, and its effect unless it is refused.
    fn answer(&mut self, call: &Call) -> Answer {
        let mark = self.journal.len();
        let answer = self.call(call);
        if answer.is_err() {
            self.undo_to(mark);
        }
        answer
    }

    fn set_balance(&mut self, account: i64, balance: i64) {
        let before = self.balances.insert(account, balance).expect("an account");
        self.journal.push(Undo::Balance(account, before));
    }

    fn keep(&mut self, identity: Identity, request: &str, response: Option<String>) {
        let record = Record { request: request.to_owned(), response };
        let before = self.records.insert(identity.clone(), record);
        self.journal.push(Undo::Record(identity, before));
    }

    /// The saved answer, if there is one.
    fn find(&self, identity: &Identity, request: &str) -> Result<Option<String>, &'static str> {
        match self.records.get(identity) {
            None => Ok(None),
            Some(Record { request: saved, response: Some(response) }) if saved == request => Ok(Some(response.clone())),
            Some(_) => Err("22023"),
        }
    }

    fn change(
        &mut self,
        operation: &'static str,
        account: Option<i64>,
        key: &Option<String>,
        amount: Option<i64>,
    ) -> Result<(String, bool), &'static str> {
        let (Some(account), Some(key), Some(amount @ 1..)) = (account, name(key), amount) else { return Err("22023") };
        let identity = (account, operation, key.clone());
        let request = amount.to_string();
        if let Some(response) = self.find(&identity, &request)? {
            return Ok((response, true));
        }
        let balance = *self.balances.get(&account).ok_or("23503")?;
        let after = balance.checked_add(if operation == "debit:v1" { -amount } else { amount }).ok_or("22003")?;
        let response = if after >= 0 {
            self.set_balance(account, after);
            format!(r#"{{"balance": {after}}}"#)
        } else if self.saves_refusals {
            format!(r#"{{"balance": {balance}, "refused": "insufficient balance"}}"#)
        } else {
            return Err("P0001");
        };
        self.keep(identity, &request, Some(response.clone()));
        Ok((response, false))
    }

    fn run(&mut self, account: Option<i64>, key: &Option<String>, request: &Option<Json>, handler: Handler) -> Answer {
        let (Some(account), Some(key), Some(request)) = (account, name(key), request) else { return INVALID };
        let identity = (account, "pay:v1", key.clone());
        let compared = request.group.to_string();
        if let Some(response) = self.find(&identity, &compared)? {
            return Ok(response);
        }
        self.balances.get(&account).ok_or("23503")?;
        let response = match handler {
            Handler::Echo => request.normal.clone(),
            Handler::Raising => return Err("ZZ001"),
            Handler::Nothing => return Err("22004"),
            Handler::Nesting => self.change("debit:v1", Some(account), &Some("nested".into()), Some(1))?.0,
            Handler::Reentering => return INVALID,
            Handler::Catching => {
                let mark = self.journal.len();
                if self.change("debit:v1", Some(account), &Some("caught".into()), Some(i64::MAX)).is_err() {
                    self.undo_to(mark);
                }
                r#"["caught"]"#.into()
            }
        };
        self.keep(identity, &compared, Some(response.clone()));
        Ok(response)
    }

    fn deliver(
        &mut self,
        subscriber: &Option<String>,
        id: u8,
        account: Option<i64>,
        delta: Option<i64>,
        payload: &Option<Json>,
    ) -> Result<Option<i64>, &'static str> {
        let (Some(subscriber), Some(account)) = (name(subscriber), account) else { return Err("22023") };
        let payload = payload.as_ref().map(|payload| payload.group);
        let identity = (subscriber.clone(), id);
        if let Some(known) = self.messages.get(&identity) {
            let differs = known.account != account
                || known.delta.zip(delta).is_some_and(|(known, given)| known != given)
                || known.payload.zip(payload).is_some_and(|(known, given)| known != given);
            return if differs { Err("22023") } else { Ok(None) };
        }
        let balance = *self.balances.get(&account).ok_or("23503")?;
        let after = balance.checked_add(delta.unwrap_or(0)).ok_or("22003")?;
        if after < 0 {
            return Err("P0001");
        }
        self.set_balance(account, after);
        let before = self.messages.insert(identity.clone(), Delivered { account, delta, payload });
        self.journal.push(Undo::Message(identity, before));
        Ok(Some(after))
    }

    fn call(&mut self, call: &Call) -> Answer {
        match call {
            Call::Change { operation, account, key, amount } => {
                self.change(operation, *account, key, *amount).map(|(response, _)| response)
            }
            Call::Outcome { operation, account, key, amount } => self
                .change(operation, *account, key, *amount)
                .map(|(response, replayed)| format!("{response} {}", if replayed { 't' } else { 'f' })),
            Call::Run { account, key, request, handler } => self.run(*account, key, request, *handler),
            Call::Cancel { account, operation, key } => {
                let (Some(account), Some(key)) = (account, name(key)) else { return INVALID };
                let identity = (*account, *operation, key.clone());
                if let Some(record) = self.records.get(&identity) {
                    return Ok(record.response.clone().unwrap_or("NULL".into()));
                }
                self.balances.get(account).ok_or("23503")?;
                self.keep(identity, "", None);
                Ok("NULL".into())
            }
            Call::Find { account, operation, key } => {
                let (Some(account), Some(key)) = (account, key) else { return Ok("NULL".into()) };
                Ok(match self.records.get(&(*account, *operation, key.clone())) {
                    None => "NULL".into(),
                    Some(record) => record.response.clone().unwrap_or("null".into()),
                })
            }
            Call::Accept { subscriber, id, account, payload } => {
                self.deliver(subscriber, *id, *account, None, payload).map(|fresh| fresh.is_some().to_string())
            }
            Call::Apply { subscriber, id, account, delta, payload } => match delta {
                None | Some(0) => INVALID,
                Some(_) => self
                    .deliver(subscriber, *id, *account, *delta, payload)
                    .map(|balance| balance.map_or("NULL".into(), |balance| balance.to_string())),
            },
            Call::AcceptMany { subscriber, messages } => {
                let Some(known) = name(subscriber) else { return INVALID };
                let unknown = |(id, account): &(u8, i64)| {
                    !self.messages.contains_key(&(known.clone(), *id)) && !self.balances.contains_key(account)
                };
                if messages.iter().any(unknown) {
                    return Err("23503");
                }
                let mut fresh = 0;
                for (id, account) in messages {
                    fresh += usize::from(self.deliver(subscriber, *id, Some(*account), None, &None)?.is_some());
                }
                Ok(fresh.to_string())
            }
            Call::Version { subscriber, entity, version } => {
                let (Some(subscriber), Some(entity), Some(version)) = (name(subscriber), name(entity), version) else {
                    return INVALID;
                };
                let key = (subscriber.clone(), entity.clone());
                if self.versions.get(&key).is_some_and(|highest| highest >= version) {
                    return Ok("false".into());
                }
                let before = self.versions.insert(key.clone(), *version);
                self.journal.push(Undo::Version(key, before));
                Ok("true".into())
            }
            Call::Fingerprint { request } => {
                Ok(request.as_ref().map_or("NULL".into(), |json| json.fingerprint.clone()))
            }
            Call::Purge { retention } => match *retention {
                None | Some("-1 day") => INVALID,
                Some("0") => {
                    let deleted = self.records.len();
                    for (identity, record) in self.records.drain() {
                        self.journal.push(Undo::Record(identity, Some(record)));
                    }
                    Ok(deleted.to_string())
                }
                Some(_) => Ok("0".into()),
            },
        }
    }
}

// ---- calls -----------------------------------------------------------------------------------------------------

/// A jsonb value, in one of its spellings.
#[derive(Clone)]
struct Json {
    text: String,
    /// As the server writes it.
    normal: String,
    fingerprint: String,
    /// The same for equal values.
    group: usize,
}

#[derive(Clone, Copy)]
enum Handler {
    Echo,
    Raising,
    Nothing,
    Nesting,
    Catching,
    Reentering,
}

const HANDLERS: [(Handler, &str); 6] = [
    (Handler::Echo, "echo"),
    (Handler::Raising, "raising"),
    (Handler::Nothing, "nothing"),
    (Handler::Nesting, "nesting"),
    (Handler::Catching, "catching"),
    (Handler::Reentering, "reentering"),
];

const HANDLERS_SQL: &str = r#"
    CREATE FUNCTION echo(bigint, jsonb) RETURNS jsonb LANGUAGE sql AS 'SELECT $2';
    CREATE FUNCTION raising(bigint, jsonb) RETURNS jsonb LANGUAGE plpgsql AS
        $$BEGIN UPDATE account SET balance = 7 WHERE account_id = $1; RAISE 'no' USING ERRCODE = 'ZZ001'; END$$;
    CREATE FUNCTION nothing(bigint, jsonb) RETURNS jsonb LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END';
    CREATE FUNCTION nesting(bigint, jsonb) RETURNS jsonb LANGUAGE sql AS $$SELECT debit_once($1, 'nested', 1)$$;
    CREATE FUNCTION catching(bigint, jsonb) RETURNS jsonb LANGUAGE plpgsql AS
        $$BEGIN
             BEGIN PERFORM debit_once($1, 'caught', 9223372036854775807); EXCEPTION WHEN OTHERS THEN NULL; END;
             RETURN '["caught"]';
         END$$;
    CREATE FUNCTION reentering(bigint, jsonb) RETURNS jsonb LANGUAGE sql AS
        $$SELECT run_once($1, 'pay:v1', current_setting('test.key'), $2, 'echo(bigint, jsonb)')$$"#;

enum Call {
    Change { operation: &'static str, account: Option<i64>, key: Option<String>, amount: Option<i64> },
    Outcome { operation: &'static str, account: Option<i64>, key: Option<String>, amount: Option<i64> },
    Run { account: Option<i64>, key: Option<String>, request: Option<Json>, handler: Handler },
    Cancel { account: Option<i64>, operation: &'static str, key: Option<String> },
    Find { account: Option<i64>, operation: &'static str, key: Option<String> },
    Accept { subscriber: Option<String>, id: u8, account: Option<i64>, payload: Option<Json> },
    Apply { subscriber: Option<String>, id: u8, account: Option<i64>, delta: Option<i64>, payload: Option<Json> },
    AcceptMany { subscriber: Option<String>, messages: Vec<(u8, i64)> },
    Version { subscriber: Option<String>, entity: Option<String>, version: Option<i64> },
    Fingerprint { request: Option<Json> },
    Purge { retention: Option<&'static str> },
}

fn literal(text: &str) -> String {
    format!("'{}'", text.replace('\'', "''"))
}

fn text(text: &Option<String>) -> String {
    text.as_ref().map_or("NULL".into(), |text| literal(text))
}

fn number(number: Option<i64>) -> String {
    // The smallest one cannot be written as a negated constant.
    number.map_or("NULL".into(), |number| format!("'{number}'::bigint"))
}

fn json(json: &Option<Json>) -> String {
    json.as_ref().map_or("NULL".into(), |json| format!("{}::jsonb", literal(&json.text)))
}

fn uuid(id: u8) -> String {
    format!("'{id:08x}-0000-4000-8000-00000000000f'::uuid")
}

/// `debit` of `debit:v1`.
fn verb(operation: &str) -> &str {
    operation.split(':').next().expect("a name")
}

impl Call {
    /// An expression with the answer as text.
    fn sql(&self) -> String {
        let call = match self {
            Self::Change { operation, account, key, amount } => {
                format!("{}_once({}, {}, {})", verb(operation), number(*account), text(key), number(*amount))
            }
            Self::Outcome { operation, account, key, amount } => format!(
                "(SELECT format('%s %s', response, replayed) FROM {}_once_outcome({}, {}, {}))",
                verb(operation),
                number(*account),
                text(key),
                number(*amount)
            ),
            Self::Run { account, key, request, handler } => {
                let name = HANDLERS[*handler as usize].1;
                // The reentering one reads it.
                format!(
                    "CASE WHEN set_config('test.key', coalesce({key}, ''), false) IS NOT NULL
                          THEN run_once({}, 'pay:v1', {key}, {}, '{name}(bigint, jsonb)') END",
                    number(*account),
                    json(request),
                    key = text(key),
                )
            }
            Self::Cancel { account, operation, key } => {
                format!("cancel_request({}, '{operation}', {})", number(*account), text(key))
            }
            Self::Find { account, operation, key } => {
                format!("(SELECT response FROM find_request({}, '{operation}', {}))", number(*account), text(key))
            }
            Self::Accept { subscriber, id, account, payload } => {
                format!("accept_message({}, {}, {}, {})", text(subscriber), uuid(*id), number(*account), json(payload))
            }
            Self::Apply { subscriber, id, account, delta, payload } => format!(
                "apply_message_once({}, {}, {}, {}, {})",
                text(subscriber),
                uuid(*id),
                number(*account),
                number(*delta),
                json(payload)
            ),
            Self::AcceptMany { subscriber, messages } => {
                let ids: Vec<_> = messages.iter().map(|(id, _)| uuid(*id)).collect();
                let accounts: Vec<_> = messages.iter().map(|(_, account)| account.to_string()).collect();
                format!(
                    "(SELECT count(*) FROM accept_messages({}, ARRAY[{}]::uuid[], ARRAY[{}]::bigint[]))",
                    text(subscriber),
                    ids.join(", "),
                    accounts.join(", ")
                )
            }
            Self::Version { subscriber, entity, version } => {
                format!("accept_version({}, {}, {})", text(subscriber), text(entity), number(*version))
            }
            Self::Fingerprint { request } => format!("encode(request_fingerprint({}), 'hex')", json(request)),
            Self::Purge { retention } => {
                format!("purge_expired_keys({})", retention.map_or("NULL".into(), literal))
            }
        };
        format!("coalesce(({call})::text, 'NULL')")
    }

    fn function(&self) -> &'static str {
        match self {
            Self::Change { operation, .. } => operation,
            Self::Outcome { .. } => "outcome",
            Self::Run { .. } => "run",
            Self::Cancel { .. } => "cancel",
            Self::Find { .. } => "find",
            Self::Accept { .. } => "accept",
            Self::Apply { .. } => "apply",
            Self::AcceptMany { .. } => "accept many",
            Self::Version { .. } => "version",
            Self::Fingerprint { .. } => "fingerprint",
            Self::Purge { .. } => "purge",
        }
    }
}

/// Makes arguments up.
struct Generator {
    random: StdRng,
    json: Vec<Json>,
    /// Keys, subscribers and entities that come back.
    names: Vec<String>,
}

/// A value, as a text that says what is equal, and a spelling of it.
fn random_json(random: &mut StdRng, depth: usize) -> (String, String) {
    let space = |random: &mut StdRng| *["", " ", "\n\t"].choose(random).expect("some");
    match random.random_range(0..if depth < 4 { 7 } else { 4 }) {
        0 => {
            let constant = *["null", "true", "false"].choose(random).expect("some");
            (constant.into(), constant.into())
        }
        1 | 2 => {
            let digits = random.random_range(-9_999_i64..10_000);
            let zeros = random.random_range(0..4_usize);
            let spelling = match random.random_range(0..3) {
                0 => format!("{digits}"),
                1 => format!("{digits}.{}", "0".repeat(zeros + 1)),
                _ => format!("{digits}{}e-{zeros}", "0".repeat(zeros)),
            };
            (format!("{digits}"), spelling)
        }
        3 => {
            let text: String = (0..random.random_range(0..8)).map(|_| any_char(random)).collect();
            let mut spelling = String::from("\"");
            for char in text.chars() {
                match char {
                    '"' | '\\' => spelling.extend(['\\', char]),
                    char if u32::from(char) < 32 || (random.random_bool(0.3) && u32::from(char) < 0xd800) => {
                        write!(spelling, "\\u{:04x}", u32::from(char)).expect("a string");
                    }
                    char => spelling.push(char),
                }
            }
            spelling.push('"');
            (format!("{text:?}"), spelling)
        }
        4 => {
            let parts: Vec<_> = (0..random.random_range(0..4)).map(|_| random_json(random, depth + 1)).collect();
            let same: Vec<_> = parts.iter().map(|part| part.0.clone()).collect();
            let spelt: Vec<_> = parts.iter().map(|part| part.1.clone()).collect();
            let comma = format!("{},{}", space(random), space(random));
            (format!("[{}]", same.join(",")), format!("[{}]", spelt.join(&comma)))
        }
        _ => {
            let mut members = BTreeMap::new();
            for _ in 0..random.random_range(0..4) {
                let name = format!("{}{}", any_name(random), random.random_range(0..9));
                members.insert(name, random_json(random, depth + 1));
            }
            let same: Vec<_> = members.iter().map(|(name, value)| format!("{name}:{}", value.0)).collect();
            let mut spelt: Vec<_> =
                members.iter().map(|(name, value)| format!("\"{name}\"{}:{}", space(random), value.1)).collect();
            if random.random_bool(0.5) {
                spelt.reverse();
            }
            (format!("{{{}}}", same.join(",")), format!("{{{}{}}}", space(random), spelt.join(",")))
        }
    }
}

fn any_name(random: &mut StdRng) -> &'static str {
    ["a", "amount", "", "\u{e9}", "zz z", "'"].choose(random).expect("some")
}

fn any_char(random: &mut StdRng) -> char {
    match random.random_range(0..6) {
        0 => *['\'', '"', '\\', '$', '%', '{', '\u{1}', '\n', '\u{7f}', ';'].choose(random).expect("some"),
        1 => *['\u{301}', '\u{200d}', '\u{202e}', '\u{feff}', '\u{1f600}', '\u{10ffff}'].choose(random).expect("some"),
        2 => char::from_u32(random.random_range(0xa1..0xd800)).expect("not a surrogate"),
        _ => random.random_range('!'..='~'),
    }
}

fn any_text(random: &mut StdRng) -> String {
    let length = match random.random_range(0..12) {
        0 => 0,
        1 => random.random_range(60..300),
        _ => random.random_range(1..20),
    };
    (0..length).map(|_| any_char(random)).collect()
}

impl Generator {
    fn new(seed: u64, client: &mut Client) -> Self {
        let mut random = StdRng::seed_from_u64(seed);
        let mut groups = HashMap::new();
        let json = (0..150)
            .map(|_| {
                let (same, text) = random_json(&mut random, 0);
                let next = groups.len();
                let group = *groups.entry(same).or_insert(next);
                let normal = query(client, "SELECT $1::text::jsonb::text", &[&text]).expect("jsonb");
                let sql = "SELECT encode(request_fingerprint($1::text::jsonb), 'hex')";
                let fingerprint = query(client, sql, &[&text]).expect("a fingerprint");
                Json { text, normal, fingerprint, group }
            })
            .collect::<Vec<_>>();
        // Equal values have equal fingerprints, and no others.
        let mut fingerprints = HashMap::new();
        for json in &json {
            assert_eq!(*fingerprints.entry(&json.fingerprint).or_insert(json.group), json.group, "{}", json.text);
        }
        assert_eq!(fingerprints.len(), groups.len());
        let names = (0..40).map(|_| any_text(&mut random)).collect();
        Self { random, json, names }
    }

    fn name(&mut self) -> Option<String> {
        match self.random.random_range(0..20) {
            0 => None,
            1 => Some(any_text(&mut self.random)),
            _ => self.names.choose(&mut self.random).cloned(),
        }
    }

    fn account(&mut self) -> Option<i64> {
        match self.random.random_range(0..30) {
            0 => None,
            1 => Some(404),
            2 => Some(i64::MIN),
            _ => Some(self.random.random_range(1..=40)),
        }
    }

    fn amount(&mut self) -> Option<i64> {
        match self.random.random_range(0..16) {
            0 => None,
            1 => [0, -1, i64::MIN, i64::MAX, 1 << 32].choose(&mut self.random).copied(),
            _ => Some(self.random.random_range(1..=3)),
        }
    }

    fn json(&mut self) -> Option<Json> {
        // Few at a time, so that equal ones meet in different spellings.
        let few = self.random.random_bool(0.6);
        let choice = self.random.random_range(0..if few { 8 } else { self.json.len() });
        self.random.random_bool(0.9).then(|| self.json[choice].clone())
    }

    fn call(&mut self) -> Call {
        let operation = *["debit:v1", "credit:v1"].choose(&mut self.random).expect("some");
        let any_operation = *["debit:v1", "credit:v1", "pay:v1"].choose(&mut self.random).expect("some");
        let id = self.random.random_range(0..30);
        match self.random.random_range(0..40) {
            0..=9 => Call::Change { operation, account: self.account(), key: self.name(), amount: self.amount() },
            10..=13 => Call::Outcome { operation, account: self.account(), key: self.name(), amount: self.amount() },
            14..=20 => {
                let handler = HANDLERS.choose(&mut self.random).expect("some").0;
                Call::Run { account: self.account(), key: self.name(), request: self.json(), handler }
            }
            21 | 22 => Call::Cancel { account: self.account(), operation: any_operation, key: self.name() },
            23..=25 => Call::Find { account: self.account(), operation: any_operation, key: self.name() },
            26..=28 => Call::Accept { subscriber: self.name(), id, account: self.account(), payload: self.json() },
            29..=32 => {
                let delta = self.amount().map(|amount| if id % 2 == 0 { amount } else { amount.wrapping_neg() });
                Call::Apply { subscriber: self.name(), id, account: self.account(), delta, payload: self.json() }
            }
            33 | 34 => {
                let count = self.random.random_range(0..6);
                let messages = (0..count)
                    .map(|_| {
                        let id = self.random.random_range(0..30);
                        // Mostly one account an id, so that it is not always a mismatch.
                        let other = self.random.random_range(0..12) == 0;
                        (id, i64::from(id) + 1 + if other { 400 } else { 0 })
                    })
                    .collect();
                Call::AcceptMany { subscriber: self.name(), messages }
            }
            35..=37 => {
                let version = self.random.random_range(0..20).ne(&0).then(|| self.random.random_range(-50..1_000));
                Call::Version { subscriber: self.name(), entity: self.name(), version }
            }
            38 => Call::Fingerprint { request: self.json() },
            _ => {
                let retention = match self.random.random_range(0..30) {
                    0 => Some("0"),
                    1..=9 => None,
                    10..=19 => Some("-1 day"),
                    _ => Some("1 day"),
                };
                Call::Purge { retention }
            }
        }
    }
}

// ---- programs --------------------------------------------------------------------------------------------------

/// The end of a PL/pgSQL block that notes with what it was refused.
const CAUGHT: &str = "EXCEPTION WHEN OTHERS THEN a := array_append(a, SQLSTATE::text); END;";

/// How often each function answered what: `done` or a SQLSTATE.
type Seen = BTreeMap<(&'static str, &'static str), usize>;

/// A PL/pgSQL program that notes each answer in the array `a`, and what the model says will be in it.
struct Program<'a> {
    generator: &'a mut Generator,
    model: &'a mut Model,
    body: String,
    expected: Vec<(String, String)>,
    seen: &'a mut Seen,
}

impl Program<'_> {
    fn expect(&mut self, call: &Call, sql: &str, answer: &Answer) {
        let kind = answer.as_ref().map_or_else(|code| *code, |_| "done");
        *self.seen.entry((call.function(), kind)).or_default() += 1;
        self.expected.push((sql.to_owned(), answer.clone().unwrap_or_else(str::to_owned)));
    }

    /// A call whose refusal is caught at once.
    fn guarded(&mut self) {
        let call = self.generator.call();
        let sql = call.sql();
        let answer = self.model.answer(&call);
        self.expect(&call, &sql, &answer);
        writeln!(self.body, "BEGIN a := array_append(a, {sql}); {CAUGHT}").expect("a string");
    }

    /// Calls of which the first that is refused undoes those before it.
    fn all_or_nothing(&mut self) {
        let mark = self.model.journal.len();
        self.body.push_str("BEGIN\n");
        for _ in 0..self.generator.random.random_range(1..6) {
            let call = self.generator.call();
            let sql = call.sql();
            let answer = self.model.answer(&call);
            self.expect(&call, &sql, &answer);
            writeln!(self.body, "a := array_append(a, {sql});").expect("a string");
            if answer.is_err() {
                self.model.undo_to(mark);
                break;
            }
        }
        writeln!(self.body, "{CAUGHT}").expect("a string");
    }

    /// One call in each row of a cursor that is not read to its end: what is fetched is executed, once.
    fn cursor(&mut self) {
        let (call, sql) = loop {
            let call = self.generator.call();
            let sql = call.sql();
            // A subquery would be evaluated once for all rows.
            if !sql.contains("(SELECT") {
                break (call, sql);
            }
        };
        let rows = self.generator.random.random_range(1..4);
        let mark = self.model.journal.len();
        write!(self.body, "BEGIN\nOPEN c FOR SELECT {sql} FROM generate_series(1, 9) AS i OFFSET 0;\n")
            .expect("a string");
        let mut refused = false;
        for _ in 0..rows {
            self.body.push_str("FETCH c INTO t; a := array_append(a, t);\n");
            if !refused {
                let answer = self.model.answer(&call);
                self.expect(&call, &sql, &answer);
                refused = answer.is_err();
            }
        }
        if refused {
            // With it goes what was fetched before.
            self.model.undo_to(mark);
        }
        writeln!(self.body, "CLOSE c; {CAUGHT}").expect("a string");
    }

    /// Twice in one statement.
    fn twice(&mut self) {
        let call = self.generator.call();
        let sql = call.sql();
        let first = self.model.answer(&call);
        self.expect(&call, &sql, &first);
        writeln!(self.body, "BEGIN SELECT {sql}, {sql} INTO t, u; a := a || ARRAY[t, u]; {CAUGHT}").expect("a string");
        if first.is_ok() {
            let then = self.model.answer(&call);
            assert!(then.is_ok(), "a repeat is refused: {sql}");
            self.expect(&call, &sql, &then);
        }
    }

    /// In a DO block of its own, whose answers come back through a setting.
    fn nested_do(&mut self, depth: usize) {
        let outer = std::mem::take(&mut self.body);
        self.block(depth + 1, 3);
        let inner = std::mem::replace(&mut self.body, outer);
        let block = literal(&do_block(&inner, &format!("test.answers_{depth}")));
        let answers = format!("json_array_elements_text(current_setting('test.answers_{depth}')::json)");
        writeln!(self.body, "EXECUTE {block}; a := a || ARRAY(SELECT {answers});").expect("a string");
    }

    fn block(&mut self, depth: usize, length: usize) {
        for _ in 0..length {
            match self.generator.random.random_range(0..20) {
                0 | 1 if depth < 5 => {
                    // Undone to the savepoint, whatever was answered.
                    let mark = self.model.journal.len();
                    self.body.push_str("BEGIN\n");
                    self.block(depth + 1, 4);
                    self.body.push_str(
                        "RAISE 'undone' USING ERRCODE = 'ZZ999'; EXCEPTION WHEN SQLSTATE 'ZZ999' THEN NULL; END;\n",
                    );
                    self.model.undo_to(mark);
                }
                2 | 3 if depth < 5 => {
                    self.body.push_str("BEGIN\n");
                    self.block(depth + 1, 4);
                    self.body.push_str("EXCEPTION WHEN SQLSTATE 'ZZ999' THEN NULL; END;\n");
                }
                4 if depth < 3 => self.nested_do(depth),
                5 | 6 => self.all_or_nothing(),
                7 | 8 => self.cursor(),
                9 => self.twice(),
                _ => self.guarded(),
            }
        }
    }
}

fn do_block(body: &str, setting: &str) -> String {
    format!(
        "DO {}",
        literal(&format!(
            "DECLARE a text[] := '{{}}'; t text; u text; c refcursor; BEGIN\n{body}\nPERFORM set_config('{setting}', to_json(a)::text, false); END"
        ))
    )
}

/// What the backend occupies besides shared memory, and what of it the server's own accounts say.
fn memory(client: &mut Client) -> (u64, u64) {
    let contexts = value(client, "SELECT sum(total_bytes)::bigint FROM pg_backend_memory_contexts");
    let status = std::fs::read_to_string(format!("/proc/{}/status", pid(client))).expect("the backend's status");
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).expect("RssAnon");
    let kilobytes: u64 = line.trim().trim_end_matches(" kB").parse().expect("a number");
    (kilobytes * 1024, contexts.parse().expect("a number"))
}

fn setting(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|value| value.parse().unwrap_or_else(|_| panic!("{name} is not a number")))
}

/// Runs random programs until so many calls were made, and returns how often each function answered what.
fn run_programs(seed: u64, calls: usize) -> Seen {
    println!("IDEMPOTENCY_RECORD_SEED={seed}");
    let database = CLUSTER.database();
    let mut client = CLUSTER.connect_to(&database);
    client.batch_execute(HANDLERS_SQL).unwrap();
    let mut generator = Generator::new(seed, &mut client);
    let mut model = Model::default();
    for account in 1..=40 {
        let balance = if account == 40 { i64::MAX - 3 } else { account * account * 20 };
        client.execute("INSERT INTO account VALUES ($1, $2)", &[&account, &balance]).unwrap();
        model.balances.insert(account, balance);
    }
    let mut seen = BTreeMap::new();
    let mut made = 0;
    let mut measured = Vec::new();
    while made < WARM + calls {
        if made >= WARM + measured.len() * CALLS {
            measured.push(memory(&mut client));
        }
        if generator.random.random_range(0..8) == 0 {
            model.saves_refusals = !model.saves_refusals;
            let refusals = if model.saves_refusals { "save" } else { "raise" };
            let stored = *["full", "fingerprint"].choose(&mut generator.random).expect("some");
            client
                .batch_execute(&format!(
                    "INSERT INTO operation_policy (operation, refusals, stored_request)
                     SELECT operation, '{refusals}', '{stored}' FROM unnest('{{debit:v1, credit:v1, pay:v1}}'::text[]) AS operation
                     ON CONFLICT (operation) DO UPDATE SET (refusals, stored_request) = ROW (EXCLUDED.refusals, EXCLUDED.stored_request)"
                ))
                .unwrap();
        }
        if generator.random.random_range(0..20) == 0 {
            generator.names = (0..40).map(|_| any_text(&mut generator.random)).collect();
        }
        let isolation =
            *["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"].choose(&mut generator.random).expect("some");
        let mut program = Program {
            generator: &mut generator,
            model: &mut model,
            body: String::new(),
            expected: Vec::new(),
            seen: &mut seen,
        };
        program.block(0, if made == 0 { 300 } else { 150 });
        let (body, expected) = (program.body, program.expected);
        let sql = format!("BEGIN ISOLATION LEVEL {isolation}; {}", do_block(&body, "test.answers"));
        client.batch_execute(&sql).unwrap_or_else(|error| panic!("{error:?}"));
        let rows = client.query("SELECT json_array_elements_text(current_setting('test.answers')::json)", &[]).unwrap();
        let answers: Vec<String> = rows.iter().map(|row| row.get(0)).collect();
        for (step, ((sql, expected), answer)) in expected.iter().zip(&answers).enumerate() {
            assert_eq!(answer, expected, "call {made} + {step}, {isolation}: {sql}");
        }
        assert_eq!(answers.len(), expected.len());
        made += answers.len();
        if generator.random.random_range(0..6) == 0 {
            client.batch_execute("ROLLBACK").unwrap();
            model.undo_to(0);
        } else {
            client.batch_execute("COMMIT").unwrap();
            model.journal.clear();
        }
    }
    measured.push(memory(&mut client));
    println!("{made} calls; bytes after {WARM}, each {CALLS} more, and at the end: {measured:?}");
    for pair in measured.windows(2) {
        assert!(pair[1].0.saturating_sub(pair[0].0) < BOUND, "the session grows: {measured:?}");
        assert!(pair[1].1.saturating_sub(pair[0].1) < BOUND_OF_CONTEXTS, "the session grows: {measured:?}");
    }

    for (account, balance) in &model.balances {
        assert_eq!(client_tests::balance(&mut client, *account), *balance);
    }
    assert_eq!(value(&mut client, "SELECT count(*) FROM request_result"), model.records.len().to_string());
    assert_eq!(value(&mut client, "SELECT count(*) FROM processed_message"), model.messages.len().to_string());
    assert_eq!(value(&mut client, "SELECT count(*) FROM accepted_version"), model.versions.len().to_string());
    seen
}

#[test]
fn a_hundred_thousand_random_calls_answer_as_the_model_does_and_leave_no_memory_behind() {
    let seed = setting("IDEMPOTENCY_RECORD_SEED").unwrap_or_else(rand::random);
    let calls = setting("IDEMPOTENCY_RECORD_CALLS").map_or(CALLS, |calls| usize::try_from(calls).expect("a number"));
    let seen = run_programs(seed, calls);
    println!("{seen:?}");
    // Chance has been everywhere.
    for (function, answers) in [
        ("debit:v1", &["done", "22023", "23503", "P0001"][..]),
        ("credit:v1", &["done", "22023", "23503", "22003"]),
        ("outcome", &["done", "22023", "23503"]),
        ("run", &["done", "22023", "23503", "22004", "ZZ001"]),
        ("cancel", &["done", "22023", "23503"]),
        ("find", &["done"]),
        ("accept", &["done", "22023", "23503"]),
        ("apply", &["done", "22023", "23503", "P0001"]),
        ("accept many", &["done", "22023", "23503"]),
        ("version", &["done", "22023"]),
        ("fingerprint", &["done"]),
        ("purge", &["done", "22023"]),
    ] {
        for answer in answers {
            let count = seen.get(&(function, *answer)).copied().unwrap_or_default();
            assert!(count > 5, "{function} {answer}: {count} of {seen:?}");
        }
    }
}
