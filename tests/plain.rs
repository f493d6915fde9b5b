//! A fresh debit or credit of plain tables is written past the executor: it must do what the statements would do, and leave to
//! them whatever is not plain.

use std::sync::LazyLock;

use client_tests::{
    Cluster, balance, contents, debit, debit_in_background, in_background, major, outcome, pid, simple, value,
    wait_until_blocked,
};
use postgres::Client;
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};

static CLUSTER: LazyLock<Cluster> = LazyLock::new(|| Cluster::start(&[]));

/// How often a fresh debit looks into the index of `account`: once itself, and once for the foreign key.
const PAST_THE_EXECUTOR: u64 = 2;
/// And by statements: the claim, the foreign key, and the update.
const BY_STATEMENTS: u64 = 3;

/// A trigger that does nothing, for which the statements are needed.
const NOT_PLAIN: &str = "CREATE FUNCTION nothing() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END';
    CREATE TRIGGER nothing AFTER UPDATE ON account EXECUTE FUNCTION nothing()";

/// A session in a database of its own, with accounts 1 to 3 that hold 1000 each, and what else is wanted. There is a record
/// already: an empty table might be distributed, and is looked at by statements.
fn session(more: &str) -> (String, Client) {
    let database = CLUSTER.database();
    let mut client = CLUSTER.connect_to(&database);
    client
        .batch_execute(
            "SET enable_seqscan = off;
             INSERT INTO account SELECT i, 1000 FROM generate_series(1, 3) AS i;
             SELECT debit_once(3, 'first', 1000)",
        )
        .expect("accounts");
    client.batch_execute(more).expect("what else is wanted");
    (database, client)
}

/// How a fresh debit is executed in this session. It is rolled back.
fn way(client: &mut Client) -> u64 {
    let scans = "SELECT idx_scan FROM pg_stat_xact_user_tables WHERE relname = 'account'";
    client.batch_execute("BEGIN").expect("BEGIN");
    let [before, after] = [1, 2].map(|time| {
        if time == 2 {
            client.batch_execute("SELECT debit_once(1, 'which way', 1)").expect("a debit");
        }
        value(client, scans).parse::<u64>().expect("a number")
    });
    client.batch_execute("ROLLBACK").expect("ROLLBACK");
    after - before
}

/// What the tables hold, but for the times.
fn timeless(client: &mut Client) -> String {
    value(
        client,
        "SELECT (SELECT string_agg(a::text, ' ' ORDER BY account_id) FROM account AS a)
             || (SELECT coalesce(string_agg(format('%s %s %s %s %s %s %s', account_id, operation, request_key, request,
                                                   response, request_fingerprint, cancelled), E'\\n'
                                            ORDER BY account_id, operation, request_key), '') FROM request_result)",
    )
}

#[test]
fn both_ways_answer_and_leave_the_same() {
    let seed = rand::rng().random::<u64>();
    println!("seed {seed}");
    let mut random = StdRng::seed_from_u64(seed);
    let policy = "INSERT INTO operation_policy (operation, refusals, stored_request) VALUES ('credit:v1', 'save', 'fingerprint')";
    let (_, mut plain) = session(policy);
    let (_, mut other) = session(&format!("{policy}; {NOT_PLAIN}"));
    assert_eq!(way(&mut plain), PAST_THE_EXECUTOR);
    assert_eq!(way(&mut other), BY_STATEMENTS);
    for _ in 0..1_000 {
        if random.random_bool(0.2) {
            let command = ["COMMIT; BEGIN", "ROLLBACK; BEGIN", "ROLLBACK"][random.random_range(0..3)];
            for client in [&mut plain, &mut other] {
                client.batch_execute(command).expect(command);
            }
        }
        let call = format!(
            "SELECT {}_once({}, 'key {}', {})",
            ["debit", "credit"][random.random_range(0..2)],
            random.random_range(1..5),
            random.random_range(0..300),
            [1, 2, 400, 0, i64::MAX][random.random_range(0..5)],
        );
        let [expected, found] = [&mut other, &mut plain].map(|client| outcome(simple(client, &call)));
        assert_eq!(found, expected, "{call}");
    }
    for client in [&mut plain, &mut other] {
        client.batch_execute("ROLLBACK").expect("ROLLBACK");
    }
    assert_eq!(timeless(&mut plain), timeless(&mut other));
}

#[test]
fn what_was_added_to_account_is_kept_up() {
    let (_, mut client) = session(
        "ALTER TABLE account ADD COLUMN owner text NOT NULL DEFAULT 'nobody', ADD COLUMN seen date,
                             ADD COLUMN twice bigint GENERATED ALWAYS AS (balance * 2) STORED,
                             ADD CHECK (balance < 5000);
         ALTER TABLE account DROP COLUMN seen;
         CREATE INDEX ON account (balance);
         UPDATE account SET owner = (SELECT string_agg(md5(i::text), '') FROM generate_series(1, 1000) AS i)",
    );
    // The first releases of 14 and 15 would not compute the column past the executor.
    let expected = if major() < 16 { BY_STATEMENTS } else { PAST_THE_EXECUTOR };
    assert_eq!(way(&mut client), expected);
    let owner = value(&mut client, "SELECT md5(owner) FROM account WHERE account_id = 1");
    assert_eq!(debit(&mut client, 1, "key", 100).unwrap(), r#"{"balance": 900}"#);
    assert_eq!(value(&mut client, "SELECT twice FROM account WHERE account_id = 1"), "1800");
    assert_eq!(value(&mut client, "SELECT md5(owner) FROM account WHERE account_id = 1"), owner);
    assert_eq!(value(&mut client, "SELECT string_agg(account_id::text, ' ') FROM account WHERE balance = 900"), "1");
    assert_eq!(value(&mut client, "SELECT count(*) FROM account WHERE balance = 1000"), "1");
    let before = contents(&mut client);
    assert_eq!(outcome(simple(&mut client, "SELECT credit_once(1, 'too much', 4100)")), "23514");
    assert_eq!(contents(&mut client), before);
}

#[test]
fn foreign_keys_and_unique_indexes_of_the_users_own_are_obeyed() {
    let (_, mut client) = session(
        "CREATE TABLE known (operation text PRIMARY KEY);
         INSERT INTO known VALUES ('debit:v1');
         ALTER TABLE request_result ADD FOREIGN KEY (operation) REFERENCES known;
         CREATE UNIQUE INDEX ON request_result (request_key)",
    );
    assert_eq!(way(&mut client), PAST_THE_EXECUTOR);
    assert_eq!(outcome(debit(&mut client, 1, "key", 100)), r#"done: {"balance": 900}"#);
    let before = contents(&mut client);
    assert_eq!(outcome(debit(&mut client, 2, "key", 100)), "23505");
    assert_eq!(outcome(simple(&mut client, "SELECT credit_once(1, 'another', 1)")), "23503");
    assert_eq!(contents(&mut client), before);
}

#[test]
fn what_the_executor_alone_knows_is_left_to_it() {
    let log = "CREATE TABLE log (what text)";
    // (With a rule for inserts on request_result the statements could not do it either: 0A000.)
    for (more, effect, after) in [
        (
            "ALTER TABLE request_result ADD COLUMN note text DEFAULT 'by default'",
            "SELECT note FROM request_result WHERE request_key = 'key'",
            "by default",
        ),
        (
            &format!("{log}; CREATE RULE log AS ON UPDATE TO account DO ALSO INSERT INTO log VALUES (old.balance)"),
            "SELECT count(*) FROM log",
            "1",
        ),
        (
            &format!(
                "{log};
                 CREATE FUNCTION log() RETURNS trigger LANGUAGE plpgsql AS
                     'BEGIN INSERT INTO log SELECT balance FROM account WHERE account_id = 1; RETURN NULL; END';
                 CREATE TRIGGER log AFTER INSERT ON request_result EXECUTE FUNCTION log()"
            ),
            // It sees the account as it is between the record and the effect.
            "SELECT what FROM log",
            "1000",
        ),
        (
            "CREATE TABLE savings () INHERITS (account);
             DELETE FROM account WHERE account_id = 1; INSERT INTO savings VALUES (1, 1000);
             ALTER TABLE request_result DROP CONSTRAINT request_result_account_id_fkey",
            "SELECT balance FROM savings",
            "900",
        ),
    ] {
        let (_, mut client) = session(more);
        let foreign_keys = u64::from(!more.contains("DROP CONSTRAINT"));
        assert_ne!(way(&mut client), PAST_THE_EXECUTOR - 1 + foreign_keys, "{more}");
        assert_eq!(debit(&mut client, 1, "key", 100).unwrap(), r#"{"balance": 900}"#, "{more}");
        assert_eq!(value(&mut client, effect), after, "{more}");
    }
}

#[test]
fn an_owner_who_revoked_a_privilege_from_himself_revoked_it_from_all() {
    let (_, mut client) = session(
        "CREATE ROLE keeper; CREATE ROLE plain_caller; GRANT USAGE ON SCHEMA public TO keeper, plain_caller;
         GRANT EXECUTE ON FUNCTION debit_once(bigint, text, bigint) TO plain_caller;
         ALTER TABLE request_result OWNER TO keeper; ALTER TABLE account OWNER TO keeper;
         SET ROLE plain_caller",
    );
    for (mode, table) in [("INSERT", "request_result"), ("UPDATE", "account")] {
        let change = |client: &mut Client, change: &str| {
            client.batch_execute(&format!("RESET ROLE; {change} keeper; SET ROLE plain_caller")).expect(change);
        };
        change(&mut client, &format!("REVOKE {mode} ON {table} FROM"));
        assert_eq!(outcome(debit(&mut client, 1, mode, 1)), "42501", "{mode}");
        change(&mut client, &format!("GRANT {mode} ON {table} TO"));
        assert!(debit(&mut client, 1, mode, 1).is_ok(), "{mode}");
    }
}

#[test]
fn a_record_that_is_being_inserted_by_hand_is_waited_for() {
    let (database, mut hand) = session("");
    for (end, key, answer) in
        [("COMMIT", "kept", r#"done: {"by": "hand"}"#), ("ROLLBACK", "withdrawn", r#"done: {"balance": 999}"#)]
    {
        hand.batch_execute(&format!(
            r#"BEGIN; INSERT INTO request_result (account_id, operation, request_key, request, response)
                      VALUES (1, 'debit:v1', '{key}', '{{"amount": 1}}', '{{"by": "hand"}}')"#
        ))
        .unwrap();
        let mut caller = CLUSTER.connect_to(&database);
        caller.batch_execute("SET lock_timeout = '50ms'").unwrap();
        assert_eq!(outcome(debit(&mut caller, 1, key, 1)), "55P03");
        caller.batch_execute("RESET lock_timeout").unwrap();
        let waiting = pid(&mut caller);
        let caller = debit_in_background(caller, 1, key, 1);
        let mut observer = CLUSTER.connect_to(&database);
        wait_until_blocked(&mut observer, waiting);
        hand.batch_execute(end).unwrap();
        assert_eq!(outcome(caller.join().expect("no panic").1), answer);
    }
    assert_eq!(balance(&mut hand, 1), 999);
}

#[test]
fn a_repeat_that_waited_for_the_request_in_flight_writes_nothing_and_locks_no_account() {
    let (database, mut first) = session("");
    first.batch_execute("BEGIN; SELECT debit_once(1, 'key', 100)").unwrap();
    let mut repeat = CLUSTER.connect_to(&database);
    repeat.batch_execute("BEGIN").unwrap();
    let waiting = pid(&mut repeat);
    let repeat = debit_in_background(repeat, 1, "key", 100);
    let mut observer = CLUSTER.connect_to(&database);
    wait_until_blocked(&mut observer, waiting);
    first.batch_execute("COMMIT").unwrap();
    let (mut repeat, answer) = repeat.join().expect("no panic");
    assert_eq!(answer.unwrap(), r#"{"balance": 900}"#);
    assert_eq!(value(&mut repeat, "SELECT pg_current_xact_id_if_assigned()"), "NULL");
    // Others are not kept from the account by it.
    observer.batch_execute("SET lock_timeout = '5s'").unwrap();
    assert_eq!(debit(&mut observer, 1, "another", 100).unwrap(), r#"{"balance": 800}"#);
}

/// Begins this in one session, makes the call in another one that waits for it, and commits. The call's answer.
fn call_while_waiting(database: &str, ddl: &str, settings: &str, call: &str) -> String {
    let mut other = CLUSTER.connect_to(database);
    other.batch_execute(&format!("BEGIN; {ddl}")).expect(ddl);
    let mut caller = CLUSTER.connect_to(database);
    caller.batch_execute(settings).expect(settings);
    let waiting = pid(&mut caller);
    let caller = in_background(caller, call.to_owned());
    wait_until_blocked(&mut CLUSTER.connect_to(database), waiting);
    other.batch_execute("COMMIT").expect("COMMIT");
    outcome(caller.join().expect("no panic").1)
}

#[test]
fn row_security_that_is_switched_on_while_a_call_waits_counts() {
    let (database, mut client) = session(
        "CREATE ROLE row_caller; GRANT USAGE ON SCHEMA public TO row_caller;
         GRANT EXECUTE ON FUNCTION debit_once(bigint, text, bigint), debit_batch_once TO row_caller;
         SELECT debit_once(1, 'known', 1)",
    );
    let secure = "ALTER TABLE account ENABLE ROW LEVEL SECURITY";
    for (ddl, call) in [
        (secure.to_owned(), "SELECT debit_once(1, 'new', 1)"),
        (format!("LOCK TABLE request_result; {secure}"), "SELECT debit_once(1, 'known', 1)"),
        (
            format!("LOCK TABLE request_result; {secure}"),
            "SELECT concat(response, sqlstate) FROM debit_batch_once('{1}', '{known}', '{1}')",
        ),
    ] {
        let answer = call_while_waiting(&database, &ddl, "SET ROLE row_caller", call);
        assert!(["42501", "23503", "done: 42501"].contains(&answer.as_str()), "{call}: {answer}");
        client.batch_execute("ALTER TABLE account DISABLE ROW LEVEL SECURITY").unwrap();
        assert_eq!(balance(&mut client, 1), 999);
    }
}

#[test]
fn columns_are_told_by_their_names_in_a_session_that_knew_others() {
    let (database, mut client) = session("SELECT debit_once(1, 'before', 1)");
    let mut other = CLUSTER.connect_to(&database);
    other
        .batch_execute(
            "ALTER TABLE account RENAME balance TO held;
             ALTER TABLE account ADD COLUMN balance bigint NOT NULL DEFAULT 50;
             ALTER TABLE request_result RENAME request TO swapped;
             ALTER TABLE request_result RENAME response TO request;
             ALTER TABLE request_result RENAME swapped TO response",
        )
        .unwrap();
    assert_eq!(outcome(debit(&mut client, 1, "more than there is", 100)), "P0001");
    assert_eq!(debit(&mut client, 1, "key", 5).unwrap(), r#"{"balance": 45}"#);
    assert_eq!(debit(&mut client, 1, "key", 5).unwrap(), r#"{"balance": 45}"#);
    assert_eq!(value(&mut client, "SELECT held || ' ' || balance FROM account WHERE account_id = 1"), "999 45");
    assert_eq!(
        value(&mut client, "SELECT concat(request, response) FROM request_result WHERE request_key = 'key'"),
        r#"{"amount": 5}{"balance": 45}"#
    );
}

#[test]
fn a_balance_that_is_computed_cannot_be_debited() {
    for alter in [
        "ALTER TABLE account DROP CONSTRAINT account_balance_check;
         ALTER TABLE account RENAME balance TO base;
         ALTER TABLE account ADD balance bigint GENERATED ALWAYS AS (base) STORED",
        "ALTER TABLE account ALTER balance ADD GENERATED ALWAYS AS IDENTITY",
    ] {
        let (database, mut client) = session(alter);
        let before = contents(&mut client);
        for mut client in [CLUSTER.connect_to(&database), client] {
            assert_eq!(outcome(debit(&mut client, 1, "key", 100)), "428C9", "{alter}");
            assert_eq!(contents(&mut client), before, "{alter}");
        }
    }
}

#[test]
fn deferrable_constraints_and_checks_that_call_functions_are_left_to_the_statements() {
    let (_, mut client) = session("ALTER TABLE request_result ADD UNIQUE (request_key) DEFERRABLE");
    assert_eq!(debit(&mut client, 1, "key", 100).unwrap(), r#"{"balance": 900}"#);
    assert_eq!(outcome(debit(&mut client, 2, "key", 100)), "23505");

    let (_, mut client) = session(
        "CREATE TABLE list (number int PRIMARY KEY); INSERT INTO list VALUES (1);
         CREATE FUNCTION is_fine(text) RETURNS boolean LANGUAGE plpgsql AS
             $$ BEGIN IF $1 LIKE 'twice%' THEN INSERT INTO list VALUES (1); END IF; RETURN true; END $$;
         ALTER TABLE request_result ADD CHECK (is_fine(request_key))",
    );
    // It is nothing that a retry could mend.
    assert_eq!(outcome(debit(&mut client, 1, "twice", 100)), "23505");
    assert_eq!(balance(&mut client, 1), 1000);
}

#[test]
fn who_waited_for_a_dated_key_gets_its_answer_also_where_a_purge_moved_the_fence_past_it() {
    let echo = "CREATE FUNCTION echo(bigint, jsonb) RETURNS jsonb LANGUAGE sql AS 'SELECT $2'";
    let date = "clock_timestamp() - interval '1 hour'";
    for call in [
        format!("SELECT debit_once(1, 'key', 100, {date})"),
        format!("SELECT run_once(1, 'echo:v1', 'key', '{{}}', 'echo(bigint, jsonb)', {date})"),
    ] {
        let (database, mut client) = session(&format!("{echo}; SET idempotency_record.clock_skew = 0"));
        // Something of the operation has to be there for a purge to purge.
        client
            .batch_execute(
                "SELECT run_once(1, 'echo:v1', 'other', '{}', 'echo(bigint, jsonb)'); SELECT debit_once(1, 'other', 1)",
            )
            .unwrap();
        let mut first = CLUSTER.connect_to(&database);
        first.batch_execute("BEGIN").unwrap();
        let answer = value(&mut first, &call);
        let mut repeat = CLUSTER.connect_to(&database);
        repeat.batch_execute("SET idempotency_record.clock_skew = 0").unwrap();
        let waiting = pid(&mut repeat);
        let repeat = in_background(repeat, call.clone());
        wait_until_blocked(&mut CLUSTER.connect_to(&database), waiting);
        client.batch_execute("SELECT purge_expired_keys('0')").unwrap();
        first.batch_execute("COMMIT").unwrap();
        assert_eq!(outcome(repeat.join().expect("no panic").1), format!("done: {answer}"), "{call}");
        // Whereas one of that age of which there is no record is refused.
        assert_eq!(outcome(simple(&mut client, &call.replace("'key'", "'unknown'"))), "22023");
    }
}
