-- The story that `make try` tells. psql prints what it sends, so this reads like a session.
\set ECHO queries
\pset footer off

\echo '=== An account with 1000.'
CREATE EXTENSION idempotency_record;
INSERT INTO account VALUES (1, 1000);

\echo '=== A debit of 100. The key names this one intention of the client.'
SELECT debit_once(1, 'checkout-42', 100);

\echo '=== The answer got lost, so the client asks again, with the same key: the first answer, and no second debit.'
SELECT debit_once(1, 'checkout-42', 100);
SELECT balance FROM account WHERE account_id = 1;

\echo '=== The same key with another amount is a mistake of the client, and is refused.'
\set ON_ERROR_STOP off
SELECT debit_once(1, 'checkout-42', 101);
\echo 'SQLSTATE:' :SQLSTATE
\echo
\if :ERROR
\else
    \warn 'error: the mismatch was not refused'
    \quit
\endif
\set ON_ERROR_STOP on

\echo '=== Two sessions with one new key, at the same time: one debits, the other waits for it and repeats its answer.'
\! "$RACE" race
SELECT balance FROM account WHERE account_id = 1;

\echo '=== What is stored: one row a key.'
SELECT request_key, request, response FROM request_result ORDER BY created_at;

\echo '=== Records are kept as long as a client may retry, here 7 days. Nothing is that old yet.'
SELECT purge_expired_keys('7 days');
\echo '=== With no retention at all, everything goes, and the key is a new key: this debits again.'
SELECT purge_expired_keys('0 seconds');
SELECT debit_once(1, 'checkout-42', 100);
\echo '=== The end.'
