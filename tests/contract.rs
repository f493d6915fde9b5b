//! The contract's table, row by row, as a client sees it: by every protocol, judged by SQLSTATE.

use std::sync::LazyLock;

use client_tests::{Cluster, balance, contents, debit, outcome, query, report, simple, sqlstate, tamper, value};
use postgres::types::ToSql;
use postgres::{Client, Error, Statement};

static CLUSTER: LazyLock<Cluster> = LazyLock::new(|| Cluster::start(&[]));

/// A way of calling `debit_once`.
enum Caller {
    /// Literals in a query string.
    Simple,
    /// Parameters, parsed for this call alone.
    Extended,
    /// Parameters of a statement that this session has prepared.
    Prepared(Statement),
    /// PREPARE and EXECUTE in SQL, with a generic plan.
    PreparedInSql,
}

impl Caller {
    /// Each of them, with the number of the account that belongs to it.
    fn each(client: &mut Client) -> Vec<(i64, Self)> {
        let prepared = client.prepare("SELECT debit_once($1, $2, $3)::text").expect("a prepared statement");
        client
            .batch_execute(
                "PREPARE debit(bigint, text, bigint) AS SELECT debit_once($1, $2, $3)::text;
                 SET plan_cache_mode = force_generic_plan",
            )
            .expect("PREPARE");
        vec![(1, Self::Simple), (2, Self::Extended), (3, Self::Prepared(prepared)), (4, Self::PreparedInSql)]
    }

    fn debit<'a>(
        &self,
        client: &mut Client,
        account: i64,
        key: impl Into<Option<&'a str>>,
        amount: impl Into<Option<i64>>,
    ) -> Result<String, Error> {
        let (key, amount) = (key.into(), amount.into());
        let literals = || {
            let key = key.map_or("NULL".to_owned(), |key| format!("'{}'", key.replace('\'', "''")));
            let amount = amount.map_or("NULL".to_owned(), |amount| amount.to_string());
            format!("{account}, {key}, {amount}")
        };
        let parameters: [&(dyn ToSql + Sync); 3] = [&account, &key, &amount];
        match self {
            Self::Simple => simple(client, &format!("SELECT debit_once({})::text", literals())),
            Self::Extended => query(client, "SELECT debit_once($1, $2, $3)::text", &parameters),
            Self::Prepared(statement) => client.query_one(statement, &parameters)?.try_get(0),
            Self::PreparedInSql => simple(client, &format!("EXECUTE debit({})", literals())),
        }
    }
}

/// A session in a database of its own, with accounts 1 to 4 that hold 1000 each.
fn session() -> (String, Client) {
    let database = CLUSTER.database();
    let mut client = CLUSTER.connect_to(&database);
    client.batch_execute("INSERT INTO account SELECT i, 1000 FROM generate_series(1, 4) AS i").expect("accounts");
    (database, client)
}

#[test]
fn a_debit_answers_the_new_balance_and_takes_the_amount() {
    let (_, mut client) = session();
    for (account, caller) in Caller::each(&mut client) {
        assert_eq!(caller.debit(&mut client, account, "checkout-42", 100).unwrap(), r#"{"balance": 900}"#);
        assert_eq!(balance(&mut client, account), 900);
    }
    assert_eq!(
        value(&mut client, "SELECT string_agg(r.request::text || r.response::text, ',') FROM request_result AS r"),
        [r#"{"amount": 100}{"balance": 900}"#; 4].join(",")
    );
}

#[test]
fn a_repeat_answers_the_same_bytes_from_any_session_and_takes_nothing() {
    let (database, mut client) = session();
    for (account, caller) in Caller::each(&mut client) {
        caller.debit(&mut client, account, "checkout-42", 100).unwrap();
        assert_eq!(caller.debit(&mut client, account, "checkout-42", 100).unwrap(), r#"{"balance": 900}"#);
    }
    let before = contents(&mut client);
    for mut client in [CLUSTER.connect_to(&database), CLUSTER.connect_to(&database)] {
        for (account, caller) in Caller::each(&mut client) {
            // More often than the five executions after which a plan may become a generic one.
            for _ in 0..7 {
                assert_eq!(caller.debit(&mut client, account, "checkout-42", 100).unwrap(), r#"{"balance": 900}"#);
            }
        }
        assert_eq!(contents(&mut client), before);
    }
}

#[test]
fn a_repeat_answers_the_saved_response_and_never_the_present_balance() {
    let (_, mut client) = session();
    for (account, caller) in Caller::each(&mut client) {
        caller.debit(&mut client, account, "first", 100).unwrap();
        assert_eq!(caller.debit(&mut client, account, "second", 50).unwrap(), r#"{"balance": 850}"#);
        assert_eq!(caller.debit(&mut client, account, "first", 100).unwrap(), r#"{"balance": 900}"#);
        client.execute("UPDATE account SET balance = 5 WHERE account_id = $1", &[&account]).unwrap();
        assert_eq!(caller.debit(&mut client, account, "first", 100).unwrap(), r#"{"balance": 900}"#);
        assert_eq!(balance(&mut client, account), 5);
    }
}

#[test]
fn a_known_key_with_another_amount_is_refused_and_changes_nothing() {
    let (_, mut client) = session();
    for (account, caller) in Caller::each(&mut client) {
        caller.debit(&mut client, account, "checkout-42", 100).unwrap();
        let before = contents(&mut client);
        for amount in [101, 99, 1, i64::MAX] {
            let result = caller.debit(&mut client, account, "checkout-42", amount);
            assert_eq!(sqlstate(&result.unwrap_err()), "22023");
        }
        assert_eq!(contents(&mut client), before);
        assert_eq!(caller.debit(&mut client, account, "checkout-42", 100).unwrap(), r#"{"balance": 900}"#);
    }
}

#[test]
fn a_mismatch_names_the_field_and_shows_no_saved_value_in_any_part_of_the_report() {
    let (_, mut client) = session();
    // Digits that occur in no line number, no SQLSTATE and no limit.
    client.batch_execute("UPDATE account SET balance = 777700000 + 31415926").unwrap();
    for (account, caller) in Caller::each(&mut client) {
        caller.debit(&mut client, account, "checkout-42", 31_415_926).unwrap();
        let report = report(caller.debit(&mut client, account, "checkout-42", 5));
        assert_eq!(report.code().code(), "22023");
        assert!(report.detail().expect("a detail").contains("amount"));
        let everything = format!("{report:?}");
        assert!(!everything.contains("31415926") && !everything.contains("7777"), "{everything}");
    }
}

#[test]
fn a_missing_key_or_a_missing_or_non_positive_amount_is_refused_and_keeps_nothing() {
    let (_, mut client) = session();
    let before = contents(&mut client);
    for (account, caller) in Caller::each(&mut client) {
        for (key, amount) in [
            (None, Some(1)),
            (Some(""), Some(1)),
            (Some("key"), None),
            (Some("key"), Some(0)),
            (Some("key"), Some(-1)),
            (Some("key"), Some(i64::MIN)),
            (None, None),
            (Some(""), Some(0)),
        ] {
            let result = caller.debit(&mut client, account, key, amount);
            assert_eq!(outcome(result), "22023", "{key:?} {amount:?}");
            assert_eq!(contents(&mut client), before);
        }
        // A known key earns no other answer than an unknown one.
        caller.debit(&mut client, account, "key", 1).unwrap();
        assert_eq!(outcome(caller.debit(&mut client, account, "key", 0)), "22023");
        tamper(&mut client, "DELETE FROM request_result; UPDATE account SET balance = 1000");
    }
}

#[test]
fn a_missing_account_is_refused_and_keeps_nothing() {
    let (_, mut client) = session();
    let before = contents(&mut client);
    let result = query(&mut client, "SELECT debit_once($1, 'key', 1)::text", &[&None::<i64>]);
    assert_eq!(outcome(result), "22023");
    assert_eq!(contents(&mut client), before);
}

#[test]
fn an_insufficient_balance_is_refused_and_the_same_key_succeeds_after_a_top_up() {
    let (_, mut client) = session();
    for (account, caller) in Caller::each(&mut client) {
        let before = contents(&mut client);
        assert_eq!(outcome(caller.debit(&mut client, account, "key", 1001)), "P0001");
        assert_eq!(contents(&mut client), before);
        client.execute("UPDATE account SET balance = 1001 WHERE account_id = $1", &[&account]).unwrap();
        assert_eq!(caller.debit(&mut client, account, "key", 1001).unwrap(), r#"{"balance": 0}"#);
        assert_eq!(balance(&mut client, account), 0);
        // The record outlives the balance that it took.
        assert_eq!(caller.debit(&mut client, account, "key", 1001).unwrap(), r#"{"balance": 0}"#);
        assert_eq!(outcome(caller.debit(&mut client, account, "other", 1)), "P0001");
    }
}

#[test]
fn a_refused_key_is_free_for_another_amount() {
    let (_, mut client) = session();
    for (account, caller) in Caller::each(&mut client) {
        assert_eq!(outcome(caller.debit(&mut client, account, "key", 1001)), "P0001");
        assert_eq!(caller.debit(&mut client, account, "key", 1).unwrap(), r#"{"balance": 999}"#);
    }
}

#[test]
fn an_unknown_account_is_refused_by_name_and_the_same_key_succeeds_once_it_exists() {
    let (_, mut client) = session();
    for (account, caller) in Caller::each(&mut client) {
        let unknown = 271_828_180 + account;
        let before = contents(&mut client);
        let report = report(caller.debit(&mut client, unknown, "key", 1));
        assert_eq!(report.code().code(), "23503");
        assert!(report.message().contains(&unknown.to_string()), "{}", report.message());
        assert_eq!(contents(&mut client), before);
        client.execute("INSERT INTO account VALUES ($1, 10)", &[&unknown]).unwrap();
        assert_eq!(caller.debit(&mut client, unknown, "key", 1).unwrap(), r#"{"balance": 9}"#);
    }
}

#[test]
fn a_key_of_255_bytes_is_accepted_and_one_of_256_refused_with_limit_and_length() {
    let (_, mut client) = session();
    for (account, caller) in Caller::each(&mut client) {
        for key in ["k".repeat(255), "\u{20ac}".repeat(85)] {
            let first = caller.debit(&mut client, account, key.as_str(), 1).unwrap();
            assert_eq!(caller.debit(&mut client, account, key.as_str(), 1).unwrap(), first);
        }
        let before = contents(&mut client);
        for key in ["k".repeat(256), "\u{e9}".repeat(128)] {
            let report = report(caller.debit(&mut client, account, key.as_str(), 1));
            assert_eq!(report.code().code(), "22023");
            assert!(report.message().contains("255") && report.message().contains("256"), "{}", report.message());
        }
        // Long enough to be compressed, or to be moved out of line, on its way.
        let result = caller.debit(&mut client, account, "k".repeat(1_000_000).as_str(), 1);
        assert_eq!(outcome(result), "22023");
        assert_eq!(contents(&mut client), before);
    }
}

#[test]
fn a_rollback_takes_effect_and_record_together_and_frees_the_key() {
    let (_, mut client) = session();
    let before = contents(&mut client);
    for (account, caller) in Caller::each(&mut client) {
        client.batch_execute("BEGIN").unwrap();
        assert_eq!(caller.debit(&mut client, account, "key", 100).unwrap(), r#"{"balance": 900}"#);
        client.batch_execute("ROLLBACK").unwrap();
        assert_eq!(contents(&mut client), before);
        // Another amount would be a mismatch if anything had been kept, in a table or in this session.
        assert_eq!(caller.debit(&mut client, account, "key", 1).unwrap(), r#"{"balance": 999}"#);
        tamper(&mut client, "DELETE FROM request_result; UPDATE account SET balance = 1000");
    }
}

#[test]
fn a_rollback_to_a_savepoint_takes_effect_and_record_together_and_frees_the_key() {
    let (_, mut client) = session();
    for (account, caller) in Caller::each(&mut client) {
        client.batch_execute("BEGIN").unwrap();
        caller.debit(&mut client, account, "kept", 100).unwrap();
        let before = contents(&mut client);
        client.batch_execute("SAVEPOINT s").unwrap();
        caller.debit(&mut client, account, "key", 100).unwrap();
        client.batch_execute("ROLLBACK TO SAVEPOINT s").unwrap();
        assert_eq!(contents(&mut client), before);
        assert_eq!(caller.debit(&mut client, account, "key", 1).unwrap(), r#"{"balance": 899}"#);
        client.batch_execute("COMMIT").unwrap();
        assert_eq!(caller.debit(&mut client, account, "kept", 100).unwrap(), r#"{"balance": 900}"#);
        assert_eq!(caller.debit(&mut client, account, "key", 1).unwrap(), r#"{"balance": 899}"#);
        assert_eq!(balance(&mut client, account), 899);
    }
}

#[test]
fn a_refusal_under_a_savepoint_leaves_the_callers_transaction_usable() {
    let (_, mut client) = session();
    for (account, caller) in Caller::each(&mut client) {
        client.batch_execute("BEGIN").unwrap();
        caller.debit(&mut client, account, "key", 100).unwrap();
        for (other, key, amount, code) in [
            (account, "key", 101, "22023"),
            (account, "poor", 901, "P0001"),
            (99, "key", 1, "23503"),
            (account, "", 1, "22023"),
        ] {
            client.batch_execute("SAVEPOINT s").unwrap();
            assert_eq!(outcome(caller.debit(&mut client, other, key, amount)), code);
            client.batch_execute("ROLLBACK TO SAVEPOINT s").unwrap();
        }
        caller.debit(&mut client, account, "next", 1).unwrap();
        client.batch_execute("COMMIT").unwrap();
        assert_eq!(balance(&mut client, account), 899);
    }
}

#[test]
fn the_same_key_twice_in_one_transaction_executes_once_and_replays() {
    let (_, mut client) = session();
    for (account, caller) in Caller::each(&mut client) {
        client.batch_execute("BEGIN").unwrap();
        for _ in 0..3 {
            assert_eq!(caller.debit(&mut client, account, "key", 100).unwrap(), r#"{"balance": 900}"#);
        }
        assert_eq!(balance(&mut client, account), 900);
        assert_eq!(outcome(caller.debit(&mut client, account, "key", 101)), "22023");
        client.batch_execute("ROLLBACK").unwrap();
    }
}

#[test]
fn the_same_key_twice_in_one_statement_executes_once_and_replays() {
    let (_, mut client) = session();
    let both = r#"{"balance": 900}{"balance": 900}"#;
    for (account, sql) in [
        (1, "SELECT debit_once(1, 'key', 100)::text || debit_once(1, 'key', 100)::text"),
        (2, "SELECT string_agg(debit_once(2, 'key', 100)::text, '') FROM generate_series(1, 2)"),
        (
            3,
            "WITH a AS MATERIALIZED (SELECT debit_once(3, 'key', 100)::text AS r),
                  b AS MATERIALIZED (SELECT debit_once(3, 'key', 100)::text AS r)
             SELECT a.r || b.r FROM a, b",
        ),
    ] {
        assert_eq!(value(&mut client, sql), both);
        assert_eq!(balance(&mut client, account), 900);
        assert_eq!(value(&mut client, sql), both);
        assert_eq!(balance(&mut client, account), 900);
    }
    let result = simple(&mut client, "SELECT debit_once(4, 'key', 100)::text || debit_once(4, 'key', 101)::text");
    assert_eq!(outcome(result), "22023");
    assert_eq!(balance(&mut client, 4), 1000);
}

#[test]
fn the_same_key_twice_in_one_query_string_executes_once_and_replays() {
    let (_, mut client) = session();
    // One string is one implicit transaction.
    let sql = "SELECT debit_once(1, 'key', 100); SELECT debit_once(1, 'key', 100)::text";
    client.batch_execute(sql).unwrap();
    assert_eq!(balance(&mut client, 1), 900);
    let report = report(client.batch_execute("SELECT debit_once(2, 'key', 100); SELECT debit_once(2, 'key', 101)"));
    assert_eq!(report.code().code(), "22023");
    assert_eq!(balance(&mut client, 2), 1000);
    assert_eq!(debit(&mut client, 2, "key", 101).unwrap(), r#"{"balance": 899}"#);
}

#[test]
fn a_stored_identity_cannot_be_inserted_by_hand() {
    let (_, mut client) = session();
    debit(&mut client, 1, "key", 100).unwrap();
    let before = contents(&mut client);
    let insert = "INSERT INTO request_result (account_id, operation, request_key, request, response)
                  SELECT account_id, operation, request_key, request, response FROM request_result";
    let report = report(client.execute(insert, &[]));
    assert_eq!((report.code().code(), report.constraint()), ("23505", Some("request_result_pkey")));
    assert_eq!(contents(&mut client), before);
}

#[test]
fn equal_keys_of_other_accounts_and_other_operations_are_independent() {
    let (_, mut client) = session();
    client
        .batch_execute(
            r#"INSERT INTO request_result (account_id, operation, request_key, request, response)
               SELECT 1, operation, 'key', '{"amount": 7}', '{"balance": 12345}'
                 FROM unnest('{debit:v2,debit:v,DEBIT:V1,credit:v1}'::text[]) AS operation"#,
        )
        .unwrap();
    assert_eq!(debit(&mut client, 1, "key", 100).unwrap(), r#"{"balance": 900}"#);
    assert_eq!(debit(&mut client, 2, "key", 200).unwrap(), r#"{"balance": 800}"#);
    assert_eq!(debit(&mut client, 1, "key", 100).unwrap(), r#"{"balance": 900}"#);
    assert_eq!(balance(&mut client, 1), 900);
}

#[test]
fn keys_are_compared_byte_for_byte() {
    let (_, mut client) = session();
    // What case folding, trimming, Unicode normalization or a reading as a number would take for equal.
    let keys = [
        "a",
        "A",
        "a ",
        " a",
        "a\n",
        "\u{e4}",
        "a\u{308}",
        "\u{c4}",
        "\u{ff41}",
        "a\u{200b}",
        "1",
        "01",
        "1.0",
        "null",
        "NULL",
        "\\x61",
        "\\",
        "''",
        "\"a\"",
        "%",
        "_",
    ];
    for (account, caller) in Caller::each(&mut client) {
        for (done, key) in (1..).zip(keys) {
            let answer = format!(r#"{{"balance": {}}}"#, 1000 - done);
            assert_eq!(caller.debit(&mut client, account, key, 1).unwrap(), answer, "{key:?}");
        }
        for (done, key) in (1..).zip(keys) {
            let answer = format!(r#"{{"balance": {}}}"#, 1000 - done);
            assert_eq!(caller.debit(&mut client, account, key, 1).unwrap(), answer, "{key:?}");
        }
    }
}

#[test]
fn the_largest_amount_can_be_debited_and_replayed() {
    let (_, mut client) = session();
    for (account, caller) in Caller::each(&mut client) {
        client.execute("UPDATE account SET balance = $2 WHERE account_id = $1", &[&account, &i64::MAX]).unwrap();
        let rest = i64::MAX - 1;
        assert_eq!(caller.debit(&mut client, account, "one", 1).unwrap(), format!(r#"{{"balance": {rest}}}"#));
        assert_eq!(caller.debit(&mut client, account, "rest", rest).unwrap(), r#"{"balance": 0}"#);
        assert_eq!(caller.debit(&mut client, account, "one", 1).unwrap(), format!(r#"{{"balance": {rest}}}"#));
        assert_eq!(outcome(caller.debit(&mut client, account, "rest", i64::MAX)), "22023");
    }
}

#[test]
fn a_record_is_as_old_as_its_execution_and_not_as_its_transaction() {
    let (_, mut client) = session();
    client.batch_execute("BEGIN; SELECT pg_sleep(0.2)").unwrap();
    debit(&mut client, 1, "key", 1).unwrap();
    let age = "SELECT created_at > now() + interval '0.1 s' AND created_at <= clock_timestamp() FROM request_result";
    assert_eq!(value(&mut client, age), "t");
}

#[test]
fn a_purge_deletes_what_is_older_than_the_retention_and_says_how_many() {
    let (_, mut client) = session();
    for key in ["0", "1", "2", "3"] {
        debit(&mut client, 1, key, 1).unwrap();
    }
    tamper(
        &mut client,
        "UPDATE request_result SET created_at = clock_timestamp() - request_key::int * interval '1 day'",
    );
    for (retention, deleted, left) in [
        ("4 days", "0", "0,1,2,3"),
        ("80 hours", "0", "0,1,2,3"),
        ("60 hours", "1", "0,1,2"),
        ("0.5 days", "2", "0"),
        ("1 year", "0", "0"),
        ("0", "1", "NULL"),
        ("0", "0", "NULL"),
    ] {
        assert_eq!(value(&mut client, &format!("SELECT purge_expired_keys('{retention}')")), deleted, "{retention}");
        let keys = "SELECT string_agg(request_key, ',' ORDER BY request_key) FROM request_result";
        assert_eq!(value(&mut client, keys), left, "{retention}");
    }
    // After its retention, a key is a new key; what it once took stays taken.
    assert_eq!(debit(&mut client, 1, "3", 500).unwrap(), r#"{"balance": 496}"#);
}

#[test]
fn a_purge_with_a_missing_or_negative_retention_is_refused_and_deletes_nothing() {
    let (_, mut client) = session();
    debit(&mut client, 1, "key", 1).unwrap();
    tamper(&mut client, "UPDATE request_result SET created_at = '2001-01-01'");
    let before = contents(&mut client);
    for retention in ["NULL", "'-1 microsecond'", "'-1 day'", "'-100 years'", "'1 day -25 hours'", "'-1 month 29 days'"]
    {
        let result = simple(&mut client, &format!("SELECT purge_expired_keys({retention})"));
        assert_eq!(outcome(result), "22023", "{retention}");
        assert_eq!(contents(&mut client), before);
    }
}

#[test]
fn a_purge_that_is_rolled_back_keeps_the_keys() {
    let (_, mut client) = session();
    debit(&mut client, 1, "key", 100).unwrap();
    client.batch_execute("BEGIN").unwrap();
    assert_eq!(value(&mut client, "SELECT purge_expired_keys('0')"), "1");
    client.batch_execute("ROLLBACK").unwrap();
    assert_eq!(debit(&mut client, 1, "key", 100).unwrap(), r#"{"balance": 900}"#);
    assert_eq!(balance(&mut client, 1), 900);
}
