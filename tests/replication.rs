//! Logical replication to a cluster that has the extension too: effect and record arrive together, and after the switch-over
//! old keys replay.

use client_tests::calls;
use client_tests::traffic::{ACCOUNTS, Traffic};
use client_tests::{Cluster, assert_sound, balance, debit, outcome, tamper, value, wait_until};
use postgres::Client;

/// A publisher's database with the extension, which publishes its tables, and the subscriber's, which has it too.
struct Pair {
    publisher: Cluster,
    subscriber: Cluster,
    published: String,
    subscribed: String,
}

/// The tables whose rows are the promise; the other two go along.
const TABLES: &str = "account, request_result, processed_message, accepted_version, operation_policy";

impl Pair {
    fn start() -> Self {
        let publisher = Cluster::start(&["wal_level=logical"]);
        let subscriber = Cluster::start(&[]);
        let (published, subscribed) = (publisher.database(), subscriber.database());
        publisher
            .connect_to(&published)
            .batch_execute(&format!("CREATE PUBLICATION everything FOR TABLE {TABLES}"))
            .unwrap();
        Self { publisher, subscriber, published, subscribed }
    }

    fn source(&self) -> Client {
        self.publisher.connect_to(&self.published)
    }

    fn target(&self) -> Client {
        self.subscriber.connect_to(&self.subscribed)
    }

    /// Subscribes, and waits until what is there was copied.
    fn subscribe(&self) {
        let mut target = self.target();
        target
            .batch_execute(&format!(
                "CREATE SUBSCRIPTION everything CONNECTION 'host=''{}'' user=postgres dbname={}' PUBLICATION everything",
                self.publisher.directory().display(),
                self.published
            ))
            .unwrap();
        wait_until(&mut target, "SELECT count(*) = 5 AND bool_and(srsubstate = 'r') FROM pg_subscription_rel");
    }

    /// Waits until the subscriber has applied what has been committed so far.
    fn catch_up(&self) {
        let mut source = self.source();
        let written = value(&mut source, "SELECT pg_current_wal_flush_lsn()");
        wait_until(
            &mut source,
            &format!(
                "SELECT count(*) = 1 AND bool_and(replay_lsn >= '{written}') FROM pg_stat_replication
                  WHERE application_name = 'everything'"
            ),
        );
    }

    /// Ends the publisher, and makes the subscriber independent of it.
    fn switch_over(&self) -> Client {
        self.publisher.stop("immediate");
        let mut target = self.target();
        for sql in [
            "ALTER SUBSCRIPTION everything DISABLE",
            "ALTER SUBSCRIPTION everything SET (slot_name = NONE)",
            "DROP SUBSCRIPTION everything",
        ] {
            target.batch_execute(sql).unwrap();
        }
        target
    }
}

#[test]
fn what_was_executed_before_and_after_the_subscription_replays_after_the_switch_over() {
    let pair = Pair::start();
    let mut source = pair.source();
    calls::prepare(&mut source);
    for i in 0..300 {
        debit(&mut source, 8, &format!("before {i}"), 1).unwrap();
    }
    pair.subscribe();
    let mut target = pair.target();
    target.batch_execute("CREATE FUNCTION echo(bigint, jsonb) RETURNS jsonb LANGUAGE sql AS 'SELECT $2'").unwrap();

    for i in 0..300 {
        debit(&mut source, 8, &format!("after {i}"), 1).unwrap();
    }
    // Neither what was rolled back nor what was purged is to be seen there.
    source.batch_execute("BEGIN").unwrap();
    debit(&mut source, 8, "undone", 1).unwrap();
    source.batch_execute("SAVEPOINT s").unwrap();
    debit(&mut source, 8, "undone as well", 1).unwrap();
    source.batch_execute("ROLLBACK TO SAVEPOINT s; ROLLBACK").unwrap();
    source.batch_execute("BEGIN").unwrap();
    debit(&mut source, 8, "kept", 1).unwrap();
    source.batch_execute("SAVEPOINT s").unwrap();
    debit(&mut source, 8, "undone", 1).unwrap();
    source.batch_execute("ROLLBACK TO SAVEPOINT s; COMMIT").unwrap();
    tamper(&mut source, "UPDATE request_result SET created_at = '2001-01-01' WHERE request_key = 'before 7'");
    assert_eq!(value(&mut source, "SELECT purge_expired_keys('1 year')"), "1");
    source.batch_execute("UPDATE account SET balance = 1000 WHERE account_id = 8").unwrap();
    calls::assert_execute(&mut source);
    let before = calls::contents(&mut source);
    pair.catch_up();

    assert_eq!(calls::contents(&mut target), before);
    // A replay writes nothing, hence is no conflict for the subscription.
    calls::assert_replay(&mut target);
    let mut target = pair.switch_over();
    assert_eq!(calls::contents(&mut target), before);
    calls::assert_replay(&mut target);
    for (key, left) in [("before 0", 999), ("before 299", 700), ("after 0", 699), ("after 299", 400), ("kept", 399)] {
        assert_eq!(debit(&mut target, 8, key, 1).unwrap(), format!(r#"{{"balance": {left}}}"#), "{key}");
        assert_eq!(outcome(debit(&mut target, 8, key, 2)), "22023", "{key}");
    }
    assert_eq!(balance(&mut target, 8), 1000);
    for (key, left) in [("undone", 999), ("undone as well", 998), ("before 7", 997), ("new", 996)] {
        assert_eq!(debit(&mut target, 8, key, 1).unwrap(), format!(r#"{{"balance": {left}}}"#), "{key}");
    }
    assert_eq!(value(&mut target, "SELECT purge_expired_keys('1 day')"), "0");
    assert_sound(&mut target);
}

#[test]
fn effect_and_record_arrive_together_under_traffic() {
    let pair = Pair::start();
    pair.subscribe();
    let mut target = pair.target();
    let traffic = Traffic::start(4, pair.publisher.directory(), &pair.published);
    wait_until(&mut target, "SELECT count(*) > 0 FROM request_result");
    let seen = |target: &mut Client| {
        let (records, taken): (i64, i64) = {
            let sql = "SELECT (SELECT count(*) FROM request_result), (SELECT $1 - sum(balance)::bigint FROM account)";
            let row = target.query_one(sql, &[&(ACCOUNTS as i64 * 1_000_000)]).unwrap();
            (row.get(0), row.get(1))
        };
        assert_eq!(records, taken);
        records
    };
    let first = seen(&mut target);
    for _ in 0..50 {
        traffic.wait_for_answers(10);
        seen(&mut target);
    }
    assert!(seen(&mut target) > first, "nothing arrived meanwhile");
    traffic.finish();
    pair.catch_up();
    let contents = calls::contents(&mut pair.source());
    let mut target = pair.switch_over();
    assert_eq!(calls::contents(&mut target), contents);
    let known = value(&mut target, "SELECT request_key FROM request_result WHERE account_id = 1 LIMIT 1");
    let replayed = format!("SELECT replayed FROM debit_once_outcome(1, '{known}', 1)");
    assert_eq!(value(&mut target, &replayed), "t");
    assert_sound(&mut target);
}
