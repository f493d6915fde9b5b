//! Whatever the arguments: the answer is the one that a small model predicts, and never an internal error.

use std::collections::HashMap;
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
                "TRUNCATE request_result;
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
