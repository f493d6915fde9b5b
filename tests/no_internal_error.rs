//! Whatever the arguments: the answer is the one that a small model predicts, and never an internal error.

use std::cell::Cell;
use std::collections::{BTreeMap, HashMap};
use std::rc::Rc;
use std::sync::LazyLock;

use client_tests::{Cluster, balance, major, outcome, query, simple, value};
use postgres::Client;

static CLUSTER: LazyLock<Cluster> = LazyLock::new(|| Cluster::start(&[]));

const SEED: u64 = 0x5eed_1de3_9073_c0de;

/// xorshift64*: enough to shuffle, and the same on every machine.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        ((self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) as usize) % limit
    }

    fn of<'a, T>(&mut self, choices: &'a [T]) -> &'a T {
        &choices[self.below(choices.len())]
    }
}

fn session() -> Client {
    let database = CLUSTER.database();
    CLUSTER.connect_to(&database)
}

fn odd_texts() -> Vec<Option<String>> {
    let mut texts: Vec<_> = [
        "",
        " ",
        "key",
        "KEY",
        "key ",
        "\t\n\r",
        "'",
        "''; DROP TABLE account; --",
        "\\",
        "\\x00",
        "$1",
        "$$",
        "%s%n",
        "{}",
        "{\"amount\": 1}",
        "NULL",
        "null",
        "0",
        "-1",
        "\u{1}",
        "\u{7f}",
        "\u{e9}",
        "e\u{301}",
        "\u{feff}",
        "\u{202e}abc",
        "\u{fffd}",
        "\u{10ffff}",
        "\u{1f600}",
        "\u{200d}",
        "\u{5d0}\u{5d1}",
        "debit:v1",
    ]
    .map(str::to_owned)
    .into();
    for length in [254, 255, 256, 1_000, 10_000] {
        texts.push("x".repeat(length));
        texts.push("\u{1f600}".repeat(length / 4));
    }
    texts.push("\u{e9}".repeat(127) + "x");
    texts.push("\u{e9}".repeat(128));
    texts.into_iter().map(Some).chain([None, None]).collect()
}

/// What the contract says, in a few lines.
#[derive(Default)]
struct Model {
    balances: HashMap<i64, i64>,
    records: HashMap<(i64, String), (i64, i64)>,
}

impl Model {
    fn debit(&mut self, account: Option<i64>, key: Option<&str>, amount: Option<i64>) -> String {
        let (Some(account), Some(key), Some(amount)) = (account, key, amount) else { return "22023".into() };
        if key.is_empty() || key.len() > 255 || amount <= 0 {
            return "22023".into();
        }
        if let Some((saved, response)) = self.records.get(&(account, key.to_owned())) {
            return if *saved == amount { format!(r#"done: {{"balance": {response}}}"#) } else { "22023".into() };
        }
        match self.balances.get_mut(&account) {
            None => "23503".into(),
            Some(balance) if *balance < amount => "P0001".into(),
            Some(balance) => {
                *balance -= amount;
                self.records.insert((account, key.to_owned()), (amount, *balance));
                format!(r#"done: {{"balance": {balance}}}"#)
            }
        }
    }
}

#[test]
fn thousands_of_odd_debits_answer_as_the_model_does_and_leave_its_balances() {
    println!("seed {SEED:#x}");
    let mut random = Random(SEED);
    let mut client = session();
    let mut model = Model::default();
    for (account, balance) in [(0, 0), (1, 1), (2, 100_000), (-1, 50), (i64::MIN, i64::MAX), (i64::MAX, i64::MAX)] {
        client.execute("INSERT INTO account VALUES ($1, $2)", &[&account, &balance]).unwrap();
        model.balances.insert(account, balance);
    }
    let accounts =
        [Some(0), Some(1), Some(2), Some(-1), Some(i64::MIN), Some(i64::MAX), Some(3), Some(i64::MIN + 1), None];
    let amounts = [
        Some(1),
        Some(2),
        Some(3),
        Some(7),
        Some(100),
        Some(i64::MAX),
        Some(i64::MAX - 1),
        Some(1 << 32),
        Some(0),
        Some(-1),
        Some(i64::MIN),
        None,
    ];
    let texts = odd_texts();
    let mut seen = HashMap::<String, usize>::new();
    let statement = client.prepare("SELECT debit_once($1, $2, $3)::text").unwrap();
    for step in 0..4_000 {
        // Half of the calls ask for something small of an account that has it, so that keys get to be known.
        let sane = random.below(2) == 0;
        let account = if sane { Some(2) } else { *random.of(&accounts) };
        let key = random.of(&texts).as_deref();
        let amount = if sane { Some(1 + random.below(2) as i64) } else { *random.of(&amounts) };
        // Sometimes within a transaction that the caller gives up.
        let undone = random.below(8) == 0;
        if undone {
            client.batch_execute("BEGIN").unwrap();
        }
        let result = client.query_one(&statement, &[&account, &key, &amount]).and_then(|row| row.try_get(0));
        let got = outcome(result);
        let expected = if undone {
            client.batch_execute("ROLLBACK").unwrap();
            let mut copy = Model { balances: model.balances.clone(), records: model.records.clone() };
            copy.debit(account, key, amount)
        } else {
            model.debit(account, key, amount)
        };
        assert_eq!(got, expected, "step {step}: {account:?} {key:?} {amount:?}");
        *seen.entry(if got.starts_with("done") { "done".into() } else { got }).or_default() += 1;
        if random.below(400) == 0 {
            let purged = value(&mut client, "SELECT purge_expired_keys('0')");
            assert_eq!(purged, model.records.len().to_string(), "step {step}");
            model.records.clear();
        }
    }
    for (account, expected) in &model.balances {
        assert_eq!(balance(&mut client, *account), *expected);
    }
    assert_eq!(value(&mut client, "SELECT count(*) FROM request_result"), model.records.len().to_string());
    // Chance has been everywhere.
    for outcome in ["done", "22023", "23503", "P0001"] {
        assert!(seen.get(outcome).is_some_and(|count| *count > 50), "{seen:?}");
    }
}

#[test]
fn a_key_with_a_zero_byte_is_refused_by_the_server_and_the_session_lives() {
    let mut client = session();
    client.batch_execute("INSERT INTO account VALUES (1, 1000)").unwrap();
    let result = query(&mut client, "SELECT debit_once(1, $1, 1)::text", &[&"a\0b"]);
    assert_eq!(outcome(result), "22021");
    assert_eq!(balance(&mut client, 1), 1000);
}

#[test]
fn odd_retentions_delete_what_is_older_or_are_refused_and_delete_nothing() {
    println!("seed {SEED:#x}");
    let mut random = Random(SEED);
    let mut client = session();
    client.batch_execute("INSERT INTO account VALUES (1, 1000)").unwrap();
    let numbers = [
        "0",
        "1",
        "-1",
        "29",
        "-29",
        "30",
        "-30",
        "31",
        "-31",
        "365",
        "-365",
        "1000000",
        "-1000000",
        "2147483647",
        "-2147483647",
        "-2147483648",
        "0.5",
        "-0.5",
        "1e-6",
    ];
    let units = ["microseconds", "seconds", "minutes", "hours", "days", "weeks", "months", "years", "centuries"];
    let mut refused = 0;
    let mut done = 0;
    for step in 0..1_000 {
        let parts: Vec<_> =
            (0..=random.below(3)).map(|_| format!("{} {}", random.of(&numbers), random.of(&units))).collect();
        let retention = parts.join(" ");
        // What interval input itself refuses never reaches us.
        if simple(&mut client, &format!("SELECT '{retention}'::interval")).is_err() {
            continue;
        }
        client
            .batch_execute(
                "ALTER TABLE request_result DISABLE TRIGGER USER; -- lets the records be deleted
                 TRUNCATE request_result;
                 INSERT INTO request_result (account_id, operation, request_key, request, response, created_at)
                 SELECT 1, 'debit:v1', i::text, '{}', '{}',
                        -- Off every round number, so that none gets old enough just now.
                        clock_timestamp() - i * i * interval '1 hour' + interval '17 minutes 23 seconds'
                   FROM generate_series(1, 100) AS i",
            )
            .unwrap();
        // The server's own opinion, where it has one; the limit of a timestamp may end it.
        let expected = simple(
            &mut client,
            &format!(
                "SELECT CASE WHEN '{retention}'::interval < '0' THEN 'negative'
                             ELSE (SELECT count(*)::text FROM request_result
                                    WHERE created_at < clock_timestamp() - '{retention}'::interval) END"
            ),
        )
        .ok();
        let got = outcome(query(&mut client, &format!("SELECT purge_expired_keys('{retention}')::text"), &[]));
        let left: i64 = value(&mut client, "SELECT count(*) FROM request_result").parse().unwrap();
        if let Some(deleted) = got.strip_prefix("done: ") {
            done += 1;
            assert_eq!(expected.as_deref(), Some(deleted), "step {step}: {retention}");
            assert_eq!(deleted.parse::<i64>().unwrap() + left, 100, "step {step}: {retention}");
        } else {
            refused += 1;
            assert!(["22023", "22008"].contains(&got.as_str()), "step {step}: {retention}: {got}");
            assert_eq!(left, 100, "step {step}: {retention}");
            // 22008 is the server's word for a date that it cannot express, and for nothing else.
            assert!(got != "22008" || expected.is_none(), "step {step}: {retention}: {expected:?}");
        }
    }
    assert!(refused > 100 && done > 100, "{refused} {done}");
    assert_eq!(outcome(simple(&mut client, "SELECT purge_expired_keys(NULL)")), "22023");
    // Infinite intervals came with PostgreSQL 17.
    if major() >= 17 {
        assert_eq!(outcome(simple(&mut client, "SELECT purge_expired_keys('-infinity')")), "22023");
        assert_eq!(outcome(simple(&mut client, "SELECT purge_expired_keys('infinity')")), "done: 0");
    }
}

/// jsonb as it is written, all of one group equal and no two of different groups. The last group is nested too deeply for
/// a fingerprint.
fn odd_requests() -> Vec<Vec<String>> {
    let groups: [&[&str]; 22] = [
        &["{}", " { } "],
        &["null"],
        &["1", "1.0", "1.00", "1e0", "10e-1"],
        &["true"],
        &["\"\""],
        &["[]"],
        &["[[]]"],
        &["[{}]"],
        &["0", "-0", "0.00", "0e5"],
        &["\"1\""],
        &["-1.5", "-1.50", "-15e-1"],
        &["1e400"],
        &["1.7976931348623157e308"],
        &["123456789012345678901234567890.123456789", "123456789012345678901234567890.1234567890"],
        &[r#"{"amount": 1}"#, r#"{"amount":1.0}"#, r#"{"amount": 7, "amount": 1}"#],
        &[r#"{"amount": null}"#],
        &[r#"{"a": 1, "b": [2, {"c": "d"}]}"#, r#"{"b":[2.0,{"c":"d"}],"a":1.000}"#],
        &[r#"{"a": 1, "b": [{"c": "d"}, 2]}"#],
        &[r#"{"": {"": {"": [null, null]}}}"#],
        &["\"\u{e9}\\n\u{1f600}\u{202e}\"", "\"\\u00e9\\u000a\\ud83d\\ude00\\u202e\""],
        &["\"e\u{301}\\n\u{1f600}\u{202e}\""],
        &[r#""'; DROP TABLE account; --\\\"$1%s""#],
    ];
    let mut groups: Vec<Vec<String>> =
        groups.iter().map(|group| group.iter().map(|json| (*json).to_owned()).collect()).collect();
    groups.push(vec![format!("\"{}\"", "\u{20ac}x".repeat(5_000))]);
    groups.push(vec![format!("[{}1]", "1, ".repeat(500)), format!("[{}1.0]", "1.00,".repeat(500))]);
    groups.push(vec![format!("{}1{}", "[".repeat(127), "]".repeat(127))]);
    groups.push(vec![format!("{}1{}", "[".repeat(200), "]".repeat(200))]);
    groups
}

/// A text that may be jsonb, and which group of [`odd_requests`] it belongs to.
#[derive(Clone)]
struct Json {
    text: String,
    /// As the server writes it.
    normal: String,
    group: usize,
    too_deep: bool,
}

fn odd_json(client: &mut Client) -> Vec<Json> {
    let groups = odd_requests();
    let last = groups.len() - 1;
    let members =
        groups.into_iter().enumerate().flat_map(|(group, texts)| texts.into_iter().map(move |text| (group, text)));
    members
        .map(|(group, text)| {
            let normal = query(client, "SELECT $1::text::jsonb::text", &[&text]).expect("jsonb");
            Json { text, normal, group, too_deep: group == last }
        })
        .collect()
}

/// The functions that stand for a handler; the model knows them by name.
const HANDLERS: &str = "
    CREATE SEQUENCE coin;
    CREATE FUNCTION echo(bigint, jsonb) RETURNS jsonb LANGUAGE sql AS 'SELECT $2';
    CREATE FUNCTION json_null(bigint, jsonb) RETURNS jsonb LANGUAGE sql STRICT IMMUTABLE AS $$SELECT jsonb 'null'$$;
    CREATE FUNCTION nothing(bigint, jsonb) RETURNS jsonb LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END';
    CREATE FUNCTION raising(bigint, jsonb) RETURNS jsonb LANGUAGE plpgsql AS
        $$BEGIN UPDATE account SET balance = 7; RAISE 'no' USING ERRCODE = 'ZZ001'; END$$;
    CREATE FUNCTION half(bigint, jsonb) RETURNS jsonb LANGUAGE plpgsql AS
        $$BEGIN
             UPDATE account SET balance = balance / 2 + balance % 2 WHERE account_id = $1;
             IF nextval('coin') % 2 = 0 THEN RAISE 'tails' USING ERRCODE = 'ZZ002'; END IF;
             RETURN $2;
         END$$;
    CREATE FUNCTION catching(bigint, jsonb) RETURNS jsonb LANGUAGE plpgsql AS
        $$BEGIN
             BEGIN PERFORM debit_once($1, 'caught', 9223372036854775807); EXCEPTION WHEN OTHERS THEN NULL; END;
             RETURN '[\"caught\"]';
         END$$;
    CREATE FUNCTION nesting(bigint, jsonb) RETURNS jsonb LANGUAGE sql AS $$SELECT debit_once($1, 'nested', 1)$$;
    CREATE FUNCTION reentering(bigint, jsonb) RETURNS jsonb LANGUAGE sql AS
        $$SELECT run_once($1, current_setting('test.operation'), current_setting('test.key'), $2, 'echo(bigint, jsonb)')$$;
    CREATE FUNCTION cancelling(bigint, jsonb) RETURNS jsonb LANGUAGE sql AS
        $$SELECT cancel_request($1, current_setting('test.operation'), current_setting('test.key'))$$;
    CREATE FUNCTION another_result(bigint, jsonb) RETURNS json LANGUAGE sql AS $$SELECT json '{}'$$;
    CREATE FUNCTION another_order(jsonb, bigint) RETURNS jsonb LANGUAGE sql AS 'SELECT $1';
    CREATE FUNCTION three(bigint, jsonb, int DEFAULT 1) RETURNS jsonb LANGUAGE sql AS 'SELECT $2';
    CREATE FUNCTION set_returning(bigint, jsonb) RETURNS SETOF jsonb LANGUAGE sql AS 'SELECT $2';
    CREATE PROCEDURE procedure(bigint, jsonb) LANGUAGE sql AS 'SELECT $2';
    CREATE AGGREGATE aggregate(jsonb) (SFUNC = jsonb_concat, STYPE = jsonb)";

const GOOD_HANDLERS: [&str; 9] =
    ["echo", "json_null", "nothing", "raising", "half", "catching", "nesting", "reentering", "cancelling"];

const BAD_HANDLERS: [&str; 8] = [
    "another_result(bigint, jsonb)",
    "another_order(jsonb, bigint)",
    "three(bigint, jsonb, int)",
    "set_returning(bigint, jsonb)",
    "procedure(bigint, jsonb)",
    "aggregate(jsonb)",
    "pg_catalog.now()",
    "run_once(bigint, text, text, jsonb, regprocedure)",
];

#[derive(Clone)]
enum Handler {
    Null,
    Good(&'static str),
    Bad,
}

#[derive(Clone)]
struct Record {
    /// The group of the request, or the amount.
    request: i64,
    fingerprint: bool,
    /// None where it was cancelled.
    response: Option<String>,
}

#[derive(Clone)]
struct Delivered {
    account: i64,
    delta: Option<i64>,
    /// The group of the payload.
    payload: Option<usize>,
}

/// What docs/reference.md says of all functions.
#[derive(Clone, Default)]
struct Reference {
    keyless: bool,
    policies: BTreeMap<String, (bool, bool)>,
    balances: HashMap<i64, i64>,
    records: HashMap<(i64, String, String), Record>,
    messages: HashMap<(String, String), Delivered>,
    versions: HashMap<(String, String), i64>,
    /// How often the coin was tossed, which no rollback undoes.
    tosses: Rc<Cell<i64>>,
}

/// The answer and whether it was a replay, or the SQLSTATE.
type Answer = Result<(String, bool), &'static str>;

const INVALID: Answer = Err("22023");

fn name(text: Option<&str>) -> Option<&str> {
    text.filter(|text| !text.is_empty() && text.len() <= 255)
}

impl Reference {
    /// What a call answers, and its effect unless it is refused.
    fn atomically(&mut self, call: impl FnOnce(&mut Self) -> Answer) -> Answer {
        let before = self.clone();
        let answer = call(self);
        if answer.is_err() {
            *self = before;
        }
        answer
    }

    fn policy(&self, operation: &str) -> (bool, bool) {
        self.policies.get(operation).copied().unwrap_or_default()
    }

    /// Whether a key is acceptable.
    fn accepts(&self, key: Option<&str>) -> bool {
        key.map_or(self.keyless, |key| name(Some(key)).is_some())
    }

    fn change(&mut self, operation: &str, account: Option<i64>, key: Option<&str>, amount: Option<i64>) -> Answer {
        let (Some(account), Some(amount @ 1..), true) = (account, amount, self.accepts(key)) else { return INVALID };
        let identity = key.map(|key| (account, operation.to_owned(), key.to_owned()));
        if let Some(record) = identity.as_ref().and_then(|identity| self.records.get(identity)) {
            return match &record.response {
                Some(response) if record.request == amount => Ok((response.clone(), true)),
                _ => INVALID,
            };
        }
        let (save, fingerprint) = self.policy(operation);
        let balance = self.balances.get_mut(&account).ok_or("23503")?;
        let after = balance.checked_add(if operation == "debit:v1" { -amount } else { amount }).ok_or("22003")?;
        let response = if after >= 0 {
            *balance = after;
            format!(r#"{{"balance": {after}}}"#)
        } else if save && key.is_some() {
            format!(r#"{{"balance": {balance}, "refused": "insufficient balance"}}"#)
        } else {
            return Err("P0001");
        };
        if let Some(identity) = identity {
            self.records.insert(identity, Record { request: amount, fingerprint, response: Some(response.clone()) });
        }
        Ok((response, false))
    }

    fn run(
        &mut self,
        account: Option<i64>,
        operation: Option<(&str, bool)>,
        key: Option<&str>,
        request: Option<&Json>,
        handler: &Handler,
    ) -> Answer {
        let (Some(account), Some((operation, true)), true) = (account, operation, self.accepts(key)) else {
            return INVALID;
        };
        let (false, Some(request)) = (["debit:v1", "credit:v1"].contains(&operation), request) else { return INVALID };
        let handler = match handler {
            Handler::Null => return INVALID,
            Handler::Bad => return Err("42883"),
            Handler::Good(handler) => *handler,
        };
        let identity = key.map(|key| (account, operation.to_owned(), key.to_owned()));
        let group = i64::try_from(request.group).expect("few groups");
        if let Some(record) = identity.as_ref().and_then(|identity| self.records.get(identity)) {
            return match &record.response {
                None => INVALID,
                Some(_) if record.fingerprint && request.too_deep => Err("54001"),
                Some(response) if record.request == group => Ok((response.clone(), true)),
                Some(_) => INVALID,
            };
        }
        let (_, fingerprint) = self.policy(operation);
        let balance = self.balances.get_mut(&account).ok_or("23503")?;
        // What cannot be recorded does not run.
        if fingerprint && request.too_deep && identity.is_some() {
            return Err("54001");
        }
        let response = match handler {
            "echo" => request.normal.clone(),
            "json_null" => "null".into(),
            "nothing" => return Err("22004"),
            "raising" => return Err("ZZ001"),
            "half" => {
                *balance = *balance / 2 + *balance % 2;
                self.tosses.set(self.tosses.get() + 1);
                if self.tosses.get() % 2 == 0 {
                    return Err("ZZ002");
                }
                request.normal.clone()
            }
            "catching" => {
                // Where the policy saves refusals, this one is saved.
                let _ =
                    self.atomically(|model| model.change("debit:v1", Some(account), Some("caught"), Some(i64::MAX)));
                r#"["caught"]"#.into()
            }
            "nesting" => self.change("debit:v1", Some(account), Some("nested"), Some(1))?.0,
            // Without a key there is nothing to re-enter, and what they ask for has an empty key.
            "reentering" | "cancelling" => return INVALID,
            _ => unreachable!("{handler}"),
        };
        if let Some(identity) = identity {
            self.records.insert(identity, Record { request: group, fingerprint, response: Some(response.clone()) });
        }
        Ok((response, false))
    }

    fn cancel(&mut self, account: Option<i64>, operation: Option<(&str, bool)>, key: Option<&str>) -> Answer {
        let (Some(account), Some((operation, true)), Some(key)) = (account, operation, name(key)) else {
            return INVALID;
        };
        let identity = (account, operation.to_owned(), key.to_owned());
        if let Some(record) = self.records.get(&identity) {
            return Ok((record.response.clone().unwrap_or("NULL".into()), true));
        }
        self.balances.get(&account).ok_or("23503")?;
        self.records.insert(identity, Record { request: 0, fingerprint: false, response: None });
        Ok(("NULL".into(), false))
    }

    /// The response, whether it was cancelled, and whether no more than a digest of the request is there; or `none`.
    fn find(&self, account: Option<i64>, operation: Option<(&str, bool)>, key: Option<&str>) -> Answer {
        let none = || Ok(("none".into(), false));
        let (Some(account), Some((operation, _)), Some(key)) = (account, operation, key) else { return none() };
        match self.records.get(&(account, operation.to_owned(), key.to_owned())) {
            None => none(),
            Some(Record { response: None, .. }) => Ok(("null true false".into(), true)),
            Some(Record { response: Some(response), fingerprint, .. }) => {
                Ok((format!("{response} false {fingerprint}"), true))
            }
        }
    }

    fn deliver(
        &mut self,
        subscriber: Option<&str>,
        id: Option<&str>,
        account: Option<i64>,
        delta: Option<i64>,
        payload: Option<&Json>,
    ) -> Answer {
        let (Some(subscriber), Some(id), Some(account)) = (name(subscriber), id, account) else { return INVALID };
        let identity = (subscriber.to_owned(), id.to_owned());
        if let Some(known) = self.messages.get(&identity) {
            if known.account != account || delta.is_some_and(|delta| known.delta.is_some_and(|known| known != delta)) {
                return INVALID;
            }
            return match (known.payload, payload) {
                (Some(_), Some(given)) if given.too_deep => Err("54001"),
                (Some(known), Some(given)) if known != given.group => INVALID,
                _ => Ok(("NULL".into(), true)),
            };
        }
        if payload.is_some_and(|payload| payload.too_deep) {
            return Err("54001");
        }
        let balance = self.balances.get_mut(&account).ok_or("23503")?;
        let after = balance.checked_add(delta.unwrap_or(0)).ok_or("22003")?;
        if after < 0 {
            return Err("P0001");
        }
        *balance = after;
        self.messages.insert(identity, Delivered { account, delta, payload: payload.map(|payload| payload.group) });
        Ok((after.to_string(), false))
    }

    fn deliver_many(&mut self, subscriber: Option<&str>, messages: &[(&str, i64, Option<&Json>)]) -> Answer {
        let Some(subscriber) = name(subscriber) else { return INVALID };
        let new = |id: &str| !self.messages.contains_key(&(subscriber.to_owned(), id.to_owned()));
        if messages.iter().any(|(id, account, _)| new(id) && !self.balances.contains_key(account)) {
            return Err("23503");
        }
        let mut accepted = Vec::new();
        for (id, account, payload) in messages {
            let (_, repeated) = self.deliver(Some(subscriber), Some(id), Some(*account), None, *payload)?;
            if !repeated {
                accepted.push(*id);
            }
        }
        Ok((accepted.join(" "), accepted.is_empty()))
    }

    fn accept_version(&mut self, subscriber: Option<&str>, entity: Option<&str>, version: Option<i64>) -> Answer {
        let (Some(subscriber), Some(entity), Some(version)) = (name(subscriber), name(entity), version) else {
            return INVALID;
        };
        let identity = (subscriber.to_owned(), entity.to_owned());
        if self.versions.get(&identity).is_some_and(|highest| *highest >= version) {
            return Ok(("false".into(), true));
        }
        self.versions.insert(identity, version);
        Ok(("true".into(), false))
    }
}

/// An array as text in some shape, and whether it has one dimension and no NULL.
fn array(random: &mut Random, elements: &[String]) -> (String, bool) {
    let quoted: Vec<_> =
        elements.iter().map(|element| format!("\"{}\"", element.replace('\\', "\\\\").replace('"', "\\\""))).collect();
    let list = quoted.join(",");
    match random.below(16) {
        0 if !elements.is_empty() => (format!("{{{{{list}}}}}"), false),
        1 if !elements.is_empty() => (format!("{{{list},NULL}}"), false),
        2 | 3 if !elements.is_empty() => (format!("[-3:{}]={{{list}}}", elements.len() as i64 - 4), true),
        _ => (format!("{{{list}}}"), true),
    }
}

#[test]
fn thousands_of_odd_calls_of_every_function_answer_as_the_model_does() {
    println!("seed {SEED:#x}");
    let mut random = Random(SEED);
    let mut client = session();
    client.batch_execute(HANDLERS).unwrap();
    client.batch_execute("LOAD 'idempotency_record'").unwrap();
    let mut model = Reference::default();
    for (account, balance) in [(0, 0), (1, 1), (2, 100_000), (3, 50_000), (-1, i64::MAX - 5), (i64::MIN, i64::MAX)] {
        client.execute("INSERT INTO account VALUES ($1, $2)", &[&account, &balance]).unwrap();
        model.balances.insert(account, balance);
    }
    let json = odd_json(&mut client);
    // What the model takes for granted: equal values have equal fingerprints, and others have others.
    let mut fingerprints = HashMap::new();
    for value in json.iter().filter(|value| !value.too_deep) {
        let sql = "SELECT encode(request_fingerprint($1::text::jsonb), 'hex')";
        let fingerprint = query(&mut client, sql, &[&value.text]).expect("a fingerprint");
        assert_eq!(*fingerprints.entry(fingerprint).or_insert(value.group), value.group, "{}", value.text);
    }
    assert_eq!(fingerprints.len(), json.last().expect("a group").group);

    let mut oid = |signature: &str| -> u32 {
        client.query_one(&format!("SELECT '{signature}'::regprocedure::oid"), &[]).expect("a function").get(0)
    };
    let mut handlers: Vec<(Option<u32>, Handler)> =
        GOOD_HANDLERS.iter().map(|name| (Some(oid(&format!("{name}(bigint, jsonb)"))), Handler::Good(name))).collect();
    handlers.extend(BAD_HANDLERS.iter().map(|signature| (Some(oid(signature)), Handler::Bad)));
    handlers.extend([(Some(0), Handler::Bad), (Some(u32::MAX), Handler::Bad), (None, Handler::Null)]);

    let long = format!("{}:v1", "o".repeat(60));
    let too_long = format!("{}:v1", "o".repeat(61));
    let operations = [
        Some(("pay:v1", true)),
        Some(("pay:v2", true)),
        Some(("A.b-c_d:v10", true)),
        Some((long.as_str(), true)),
        Some(("debit:v1", true)),
        Some(("credit:v1", true)),
        Some((too_long.as_str(), false)),
        Some(("", false)),
        Some(("pay", false)),
        Some(("pay:v0", false)),
        Some(("pay:v01", false)),
        Some((":v1", false)),
        Some(("pay:v1 ", false)),
        Some(("pay:V1", false)),
        Some(("p\u{e4}y:v1", false)),
        Some(("pay:v\u{661}", false)),
        Some(("'; DROP TABLE account; --:v1", false)),
        None,
    ];
    let accounts = [Some(0), Some(1), Some(2), Some(3), Some(-1), Some(i64::MIN), Some(404), Some(i64::MAX), None];
    let amounts = [Some(1), Some(2), Some(60_000), Some(i64::MAX), Some(0), Some(-1), Some(i64::MIN), None];
    let texts = odd_texts();
    let ids: Vec<String> = (0..40).map(|i| format!("{i:08x}-0000-4000-8000-00000000000f")).collect();

    let mut plain = |call: &str| client.prepare(&format!("SELECT ({call})::text, NULL::boolean")).expect("a call");
    let calls = ["debit_once($1, $2, $3)", "credit_once($1, $2, $3)"].map(&mut plain);
    let run = plain("run_once($1, $2, $3, $4::text::jsonb, $5::oid::regprocedure)");
    let cancel = plain("cancel_request($1, $2, $3)");
    let find = plain(
        "coalesce((SELECT concat_ws(' ', response, cancelled::text, (request_fingerprint IS NOT NULL)::text)
                     FROM find_request($1, $2, $3)), 'none')",
    );
    let accept = plain("accept_message($1, $2::text::uuid, $3, $4::text::jsonb)");
    let apply = plain("apply_message_once($1, $2::text::uuid, $3, $4, $5::text::jsonb)");
    let accept_many = plain(
        "coalesce((SELECT string_agg(id::text, ' ' ORDER BY n)
                     FROM accept_messages($1, $2::text::uuid[], $3::text::bigint[], $4::text::jsonb[])
                          WITH ORDINALITY AS accepted (id, n)), '')",
    );
    let version = plain("accept_version($1, $2, $3)");
    let purge = plain("purge_expired_keys($1::text::interval)");
    let mut outcome_of =
        |call: &str| client.prepare(&format!("SELECT response::text, replayed FROM {call}")).expect("a call");
    let outcomes = ["debit_once_outcome($1, $2, $3)", "credit_once_outcome($1, $2, $3)"].map(&mut outcome_of);
    let run_outcome = outcome_of("run_once_outcome($1, $2, $3, $4::text::jsonb, $5::oid::regprocedure)");

    let mut seen = BTreeMap::<(&str, String), usize>::new();
    for step in 0..6_000 {
        if random.below(40) == 0 {
            model.keyless = !model.keyless;
            let value = if model.keyless { "off" } else { "on" };
            client.batch_execute(&format!("SET idempotency_record.require_key = {value}")).unwrap();
        }
        if random.below(40) == 0 {
            let operation = operations[random.below(6)].expect("a valid one").0;
            let (save, fingerprint) = (random.below(2) == 0, random.below(2) == 0);
            model.policies.insert(operation.to_owned(), (save, fingerprint));
            let (save, fingerprint) =
                (if save { "save" } else { "raise" }, if fingerprint { "fingerprint" } else { "full" });
            client
                .execute(
                    "INSERT INTO operation_policy (operation, refusals, stored_request) VALUES ($1, $2, $3)
                     ON CONFLICT (operation) DO UPDATE SET (refusals, stored_request) = ROW ($2, $3)",
                    &[&operation, &save, &fingerprint],
                )
                .unwrap();
        }
        // Half of the calls have sane arguments of a small choice, so that identities get to be known.
        let sane = random.below(2) == 0;
        let account = if sane { accounts[2 + random.below(2)] } else { *random.of(&accounts) };
        let operation = match random.below(2) {
            _ if sane => operations[random.below(2)],
            0 => operations[random.below(4)],
            _ => *random.of(&operations),
        };
        let text = |random: &mut Random| {
            let choice = if sane { 2 + random.below(5) } else { random.below(texts.len()) };
            texts[choice].as_deref()
        };
        let (key, subscriber) = (text(&mut random), text(&mut random));
        let amount = if sane { Some(1 + random.below(2) as i64) } else { *random.of(&amounts) };
        let request = match random.below(6) {
            _ if sane => Some(&json[random.below(4)]),
            0 => json.last(),
            _ => Some(random.of(&json)),
        };
        let request = request.filter(|_| sane || random.below(8) > 0);
        let id = (sane || random.below(10) > 0).then_some(random.of(&ids).as_str());
        // Sometimes within a transaction that the caller gives up.
        let before = (random.below(8) == 0).then(|| model.clone());
        if before.is_some() {
            client.batch_execute("BEGIN").unwrap();
        }
        let payload = request.map(|request| request.text.as_str());
        let operation_name = operation.map(|operation| operation.0);
        let with_outcome = random.below(2) == 0;
        let (function, result, expected) = match random.below(16) {
            0..=3 => {
                let which = random.below(2);
                let (function, operation) = [("debit", "debit:v1"), ("credit", "credit:v1")][which];
                let statement = if with_outcome { &outcomes[which] } else { &calls[which] };
                let result = client.query_one(statement, &[&account, &key, &amount]);
                (function, result, model.atomically(|model| model.change(operation, account, key, amount)))
            }
            4..=8 => {
                let choice = random.below(if sane { GOOD_HANDLERS.len() } else { handlers.len() });
                let (oid, handler) = &handlers[choice];
                client
                    .execute(
                        "SELECT set_config('test.operation', $1, false), set_config('test.key', $2, false)",
                        &[&operation_name, &key],
                    )
                    .unwrap();
                let statement = if with_outcome { &run_outcome } else { &run };
                let result = client.query_one(statement, &[&account, &operation_name, &key, &payload, oid]);
                ("run", result, model.atomically(|model| model.run(account, operation, key, request, handler)))
            }
            9 => {
                let result = client.query_one(&cancel, &[&account, &operation_name, &key]);
                ("cancel", result, model.atomically(|model| model.cancel(account, operation, key)))
            }
            10 => {
                let result = client.query_one(&find, &[&account, &operation_name, &key]);
                ("find", result, model.find(account, operation, key))
            }
            11 => {
                let result = client.query_one(&accept, &[&subscriber, &id, &account, &payload]);
                let expected = model.atomically(|model| model.deliver(subscriber, id, account, None, request));
                ("accept", result, expected.map(|(_, repeated)| ((!repeated).to_string(), repeated)))
            }
            12 => {
                let delta = amount.map(|amount| if random.below(2) == 0 { amount } else { amount.wrapping_neg() });
                let result = client.query_one(&apply, &[&subscriber, &id, &account, &delta, &payload]);
                let expected = match delta {
                    None | Some(0) => INVALID,
                    Some(_) => model.atomically(|model| model.deliver(subscriber, id, account, delta, request)),
                };
                ("apply", result, expected)
            }
            13 => {
                let with_payloads = random.below(2) == 0;
                let given: Vec<(&str, i64, Option<&Json>)> = (0..random.below(6))
                    .map(|_| {
                        let account = if sane { 2 } else { accounts[random.below(7)].expect("not NULL") };
                        // Among several, one nested too deeply may be refused for any of the reasons, hence none.
                        let payload = &json[random.below(if sane { 2 } else { json.len() - 1 })];
                        (random.of(&ids).as_str(), account, with_payloads.then_some(payload))
                    })
                    .collect();
                let texts = |of: fn(&(&str, i64, Option<&Json>)) -> String| given.iter().map(of).collect::<Vec<_>>();
                let (ids, flat) = array(&mut random, &texts(|given| given.0.to_owned()));
                let (accounts, also_flat) = array(&mut random, &texts(|given| given.1.to_string()));
                let (payloads, flat_too) =
                    array(&mut random, &texts(|given| given.2.map_or(String::new(), |json| json.text.clone())));
                let one_more = "{00000000-0000-4000-8000-000000000000,".to_owned() + &ids[1..];
                let (ids, fitting) = match random.below(20) {
                    0 => (None, false),
                    1 if ids.starts_with("{\"") => (Some(one_more), false),
                    _ => (Some(ids), true),
                };
                let payloads = with_payloads.then_some(payloads);
                let result = client.query_one(&accept_many, &[&subscriber, &ids, &accounts, &payloads]);
                let expected = if flat && also_flat && fitting && (flat_too || !with_payloads) {
                    model.atomically(|model| model.deliver_many(subscriber, &given))
                } else {
                    INVALID
                };
                ("accept many", result, expected)
            }
            14 => {
                let entity = text(&mut random);
                let result = client.query_one(&version, &[&subscriber, &entity, &amount]);
                ("version", result, model.accept_version(subscriber, entity, amount))
            }
            _ => {
                let retentions = [Some("1 day"), Some("1 day"), Some("1 day"), Some("-1 day"), None, Some("0")];
                let retention = *random.of(&retentions);
                // Now and then: a model without records would learn nothing.
                let retention = retention.filter(|retention| *retention != "0" || random.below(8) == 0);
                let result = client.query_one(&purge, &[&retention]);
                let expected = match retention {
                    Some("1 day") => Ok(("0".into(), false)),
                    Some("0") => Ok((std::mem::take(&mut model.records).len().to_string(), false)),
                    _ => INVALID,
                };
                ("purge", result, expected)
            }
        };
        let got = outcome(result.and_then(|row| {
            let answer: Option<String> = row.try_get(0)?;
            let replayed: Option<bool> = row.try_get(1)?;
            Ok(answer.unwrap_or("NULL".into())
                + replayed.map_or("", |replayed| if replayed { " again" } else { " fresh" }))
        }));
        let told = with_outcome && ["debit", "credit", "run"].contains(&function);
        let (expected, kind) = match expected {
            Ok((answer, true)) => (format!("done: {answer}{}", if told { " again" } else { "" }), "repeated"),
            Ok((answer, false)) => (format!("done: {answer}{}", if told { " fresh" } else { "" }), "done"),
            Err(code) => (code.to_owned(), code),
        };
        assert!(
            got == expected,
            "step {step}: {function} {account:?} {operation_name:?} {key:?} {amount:?} {subscriber:?} {id:?} {payload:?}:\n\
             got      {got}\nexpected {expected}"
        );
        if let Some(before) = before {
            client.batch_execute("ROLLBACK").unwrap();
            model = before;
        }
        *seen.entry((function, kind.to_owned())).or_default() += 1;
    }
    for (account, expected) in &model.balances {
        assert_eq!(balance(&mut client, *account), *expected, "{account}");
    }
    for (table, rows) in [
        ("request_result", model.records.len()),
        ("request_result WHERE cancelled", model.records.values().filter(|record| record.response.is_none()).count()),
        ("processed_message", model.messages.len()),
        ("accepted_version", model.versions.len()),
    ] {
        assert_eq!(value(&mut client, &format!("SELECT count(*) FROM {table}")), rows.to_string(), "{table}");
    }
    println!("{seen:?}");
    // Chance has been everywhere.
    for (function, kinds) in [
        ("debit", &["done", "repeated", "22023", "23503", "P0001"][..]),
        ("credit", &["done", "repeated", "22023", "22003", "23503"]),
        ("run", &["done", "repeated", "22023", "22004", "23503", "42883", "54001", "ZZ001", "ZZ002"]),
        ("cancel", &["done", "repeated", "22023", "23503"]),
        ("find", &["done", "repeated"]),
        ("accept", &["done", "repeated", "22023", "23503", "54001"]),
        ("apply", &["done", "repeated", "22023", "22003", "23503", "P0001"]),
        ("accept many", &["done", "repeated", "22023", "23503"]),
        ("version", &["done", "repeated", "22023"]),
        ("purge", &["done", "22023"]),
    ] {
        for kind in kinds {
            assert!(seen.contains_key(&(function, (*kind).to_owned())), "{function} {kind}: {seen:?}");
        }
    }
}

#[test]
fn a_handler_that_calls_run_once_without_end_is_refused_and_leaves_nothing_and_the_session_lives() {
    let mut client = session();
    client
        .batch_execute(
            "INSERT INTO account VALUES (1, 1000000000);
             CREATE SEQUENCE depth;
             CREATE FUNCTION endless(p_account bigint, p_request jsonb) RETURNS jsonb LANGUAGE plpgsql AS $$
             BEGIN
                 UPDATE account SET balance = balance - 1 WHERE account_id = p_account;
                 RETURN run_once(p_account, 'endless:v1', nextval('depth')::text, p_request, 'endless(bigint, jsonb)');
             END $$",
        )
        .unwrap();
    let call = "SELECT run_once(1, 'endless:v1', 'key', '{}', 'endless(bigint, jsonb)')";
    assert_eq!(outcome(simple(&mut client, call)), "54001");
    assert_eq!(value(&mut client, "SELECT last_value > 10 FROM depth"), "t");
    assert_eq!(balance(&mut client, 1), 1_000_000_000);
    assert_eq!(value(&mut client, "SELECT count(*) FROM request_result"), "0");
    // None of the keys counts as in flight any more.
    client
        .batch_execute(
            "CREATE OR REPLACE FUNCTION endless(p_account bigint, p_request jsonb) RETURNS jsonb LANGUAGE sql AS 'SELECT $2'",
        )
        .unwrap();
    assert_eq!(value(&mut client, call), "{}");
    assert_eq!(value(&mut client, "SELECT run_once(1, 'endless:v1', '1', '{}', 'endless(bigint, jsonb)')"), "{}");
}
