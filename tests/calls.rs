//! One call of each function that takes an identity, for tests of what has to survive whatever happens to a server.

use postgres::Client;

use crate::{outcome, simple, value};

/// A call as SQL for [`simple`], on an account of its own.
pub struct Call {
    /// What is executed, and repeated.
    pub sql: &'static str,
    /// What it answers the first time.
    pub first: &'static str,
    /// What it answers every other time.
    pub then: &'static str,
    /// The same identity with something else.
    pub changed: &'static str,
    /// What that gets.
    pub refused: &'static str,
}

/// All of them; each works where [`prepare`] ran.
pub const CALLS: [Call; 9] = [
    Call {
        sql: "SELECT debit_once(1, 'key', 100)",
        first: r#"done: {"balance": 900}"#,
        then: r#"done: {"balance": 900}"#,
        changed: "SELECT debit_once(1, 'key', 101)",
        refused: "22023",
    },
    // Its policy keeps no more than a fingerprint.
    Call {
        sql: "SELECT credit_once(2, 'key', 100)",
        first: r#"done: {"balance": 1100}"#,
        then: r#"done: {"balance": 1100}"#,
        changed: "SELECT credit_once(2, 'key', 101)",
        refused: "22023",
    },
    Call {
        sql: r#"SELECT format('%s %s', response, replayed)
                  FROM run_once_outcome(3, 'echo:v1', 'key', '{"a": [1.0]}', 'echo(bigint, jsonb)')"#,
        first: r#"done: {"a": [1.0]} f"#,
        then: r#"done: {"a": [1.0]} t"#,
        changed: r#"SELECT run_once(3, 'echo:v1', 'key', '{"a": [2]}', 'echo(bigint, jsonb)')"#,
        refused: "22023",
    },
    Call {
        sql: "SELECT cancel_request(4, 'debit:v1', 'key')",
        first: "done: NULL",
        then: "done: NULL",
        changed: "SELECT debit_once(4, 'key', 1)",
        refused: "22023",
    },
    Call {
        sql: r#"SELECT accept_message('a', md5('1')::uuid, 5, '{"n": 1}')"#,
        first: "done: t",
        then: "done: f",
        changed: r#"SELECT accept_message('a', md5('1')::uuid, 5, '{"n": 2}')"#,
        refused: "22023",
    },
    Call {
        sql: "SELECT apply_message_once('b', md5('1')::uuid, 6, -100)",
        first: "done: 900",
        then: "done: NULL",
        changed: "SELECT apply_message_once('b', md5('1')::uuid, 6, -101)",
        refused: "22023",
    },
    Call {
        sql: "SELECT count(*) FROM accept_messages('c', ARRAY[md5('1'), md5('2')]::uuid[], '{7, 7}')",
        first: "done: 2",
        then: "done: 0",
        changed: "SELECT count(*) FROM accept_messages('c', ARRAY[md5('1'), md5('2')]::uuid[], '{7, 8}')",
        refused: "22023",
    },
    Call {
        sql: "SELECT accept_version('a', 'order', 7)",
        first: "done: t",
        then: "done: f",
        changed: "SELECT accept_version('a', 'order', 6)",
        refused: "done: f",
    },
    Call {
        sql: "SELECT string_agg(concat_ws(' ', response ->> 'balance', replayed), ', ' ORDER BY ordinal)
                FROM debit_batch_once('{9, 9}', '{key, other}', '{100, 1}')",
        first: "done: 900 f, 899 f",
        then: "done: 900 t, 899 t",
        changed: "SELECT string_agg(sqlstate, ', ') FROM debit_batch_once('{9, 9}', '{key, other}', '{101, 2}')",
        refused: "done: 22023, 22023",
    },
];

/// Makes accounts 1 to 9 with 1000 each, the handler, and a policy.
pub fn prepare(client: &mut Client) {
    client
        .batch_execute(
            "INSERT INTO account SELECT i, 1000 FROM generate_series(1, 9) AS i;
             CREATE FUNCTION echo(bigint, jsonb) RETURNS jsonb LANGUAGE sql AS 'SELECT $2';
             INSERT INTO operation_policy (operation, stored_request) VALUES ('credit:v1', 'fingerprint')",
        )
        .expect("accounts, a handler and a policy");
}

/// The balances of accounts 1 to 9 after [`prepare`].
pub const BEFORE: &str = "1000 1000 1000 1000 1000 1000 1000 1000 1000";
/// And after each of [`CALLS`] was executed once.
pub const AFTER: &str = "900 1100 1000 1000 1000 900 1000 1000 899";

/// The balances of accounts 1 to 9.
pub fn balances(client: &mut Client) -> String {
    value(client, "SELECT string_agg(balance::text, ' ' ORDER BY account_id) FROM account WHERE account_id <= 9")
}

/// Makes every call for the first time.
pub fn assert_execute(client: &mut Client) {
    for call in &CALLS {
        assert_eq!(outcome(simple(client, call.sql)), call.first, "{}", call.sql);
    }
}

/// Makes every call once more, and refuses what is different; nothing changes.
pub fn assert_replay(client: &mut Client) {
    let before = contents(client);
    for call in &CALLS {
        assert_eq!(outcome(simple(client, call.sql)), call.then, "{}", call.sql);
        assert_eq!(outcome(simple(client, call.changed)), call.refused, "{}", call.changed);
    }
    assert_eq!(contents(client), before);
    assert_eq!(balances(client), AFTER);
}

/// What the extension's tables hold, all five of them.
pub fn contents(client: &mut Client) -> String {
    let others = value(
        client,
        "SELECT (SELECT coalesce(string_agg(p::text, E'\\n' ORDER BY p.operation), '') FROM operation_policy AS p)
             || E'\\n--\\n'
             || (SELECT coalesce(string_agg(v::text, E'\\n' ORDER BY v.subscriber, v.entity), '')
                   FROM accepted_version AS v)",
    );
    format!("{}\n--\n{others}", crate::contents(client))
}
