//! What can be seen from one session inside the server: the happy paths. SQLSTATEs, privileges and everything that
//! needs two sessions are tested from outside, under `tests/`.

use pgrx::prelude::*;

// The test framework looks for this schema.
#[pg_schema]
mod tests {
    use pgrx::prelude::*;

    fn balance_of(account: i64) -> Option<i64> {
        Spi::get_one_with_args("SELECT balance FROM account WHERE account_id = $1", &[account.into()]).unwrap()
    }

    fn text_of(query: &str) -> Option<String> {
        Spi::get_one(query).unwrap()
    }

    #[pg_test]
    fn a_debit_executes_once_and_replays() {
        Spi::run("INSERT INTO account VALUES (1, 1000)").unwrap();
        for _ in 0..3 {
            assert_eq!(
                text_of("SELECT debit_once(1, 'checkout-42', 100)::text").as_deref(),
                Some(r#"{"balance": 900}"#)
            );
            assert_eq!(balance_of(1), Some(900));
        }
    }

    #[pg_test]
    fn a_replay_is_the_first_answer_and_not_the_present_state() {
        Spi::run("INSERT INTO account VALUES (1, 1000)").unwrap();
        Spi::run("SELECT debit_once(1, 'a', 100), debit_once(1, 'b', 50)").unwrap();
        assert_eq!(text_of("SELECT debit_once(1, 'a', 100)::text").as_deref(), Some(r#"{"balance": 900}"#));
        assert_eq!(balance_of(1), Some(850));
    }

    #[pg_test]
    fn a_batch_answers_each_of_its_elements() {
        Spi::run("INSERT INTO account VALUES (1, 1000)").unwrap();
        let batch = "SELECT string_agg(concat_ws(' ', response, replayed, sqlstate), ', ' ORDER BY ordinal)
                       FROM debit_batch_once('{1, 1, 1, 2}', '{a, b, a, a}', '{100, 50, 100, 1}')";
        let first = r#"{"balance": 900} f, {"balance": 850} f, {"balance": 900} t, f 23503"#;
        assert_eq!(text_of(batch).as_deref(), Some(first));
        let again = r#"{"balance": 900} t, {"balance": 850} t, {"balance": 900} t, f 23503"#;
        assert_eq!(text_of(batch).as_deref(), Some(again));
        assert_eq!(balance_of(1), Some(850));
    }

    #[pg_test]
    fn a_purge_deletes_what_is_old_and_keeps_what_is_young() {
        Spi::run("INSERT INTO account VALUES (1, 1000)").unwrap();
        Spi::run("SELECT debit_once(1, 'young', 1)").unwrap();
        Spi::run(
            "INSERT INTO request_result (account_id, operation, request_key, request, response, created_at)
             VALUES (1, 'debit:v1', 'old', '{}', '{}', now() - interval '2 days')",
        )
        .unwrap();
        assert_eq!(Spi::get_one("SELECT purge_expired_keys('1 day')").unwrap(), Some(1_i64));
        assert_eq!(text_of("SELECT string_agg(request_key, ',') FROM request_result").as_deref(), Some("young"));
    }
}
