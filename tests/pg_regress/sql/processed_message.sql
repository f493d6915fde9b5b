-- The consumer side, as users write it: one statement that accepts the message and makes its effect.
\set VERBOSITY sqlstate
SET client_min_messages = warning;
CREATE EXTENSION idempotency_record;

CREATE FUNCTION apply(subscriber text, message uuid, account bigint, amount bigint) RETURNS bigint LANGUAGE sql AS $$
    WITH accepted AS (
        INSERT INTO processed_message (subscriber, message_id, account_id) VALUES (subscriber, message, account)
        ON CONFLICT DO NOTHING RETURNING account_id
    ), applied AS (
        UPDATE account SET balance = balance + amount FROM accepted WHERE account.account_id = accepted.account_id
        RETURNING 1
    )
    SELECT count(*) FROM applied
$$;
CREATE VIEW books AS
    SELECT (SELECT string_agg(account_id || ':' || balance, ' ' ORDER BY account_id) FROM account) AS balances,
           (SELECT count(*) FROM processed_message) AS messages;

INSERT INTO account VALUES (1, 0), (2, 0);

-- A message is applied once, a repeat changes nothing, and says so.
SELECT apply('billing', '00000000-0000-0000-0000-000000000001', 1, 100);
TABLE books;
SELECT apply('billing', '00000000-0000-0000-0000-000000000001', 1, 100) FROM generate_series(1, 3);
TABLE books;

-- Twice in one transaction is once.
BEGIN;
SELECT apply('billing', '00000000-0000-0000-0000-000000000002', 1, 10);
SELECT apply('billing', '00000000-0000-0000-0000-000000000002', 1, 10);
COMMIT;
TABLE books;

-- Another subscriber applies the same message for itself.
SELECT apply('statistics', '00000000-0000-0000-0000-000000000001', 2, 1);
SELECT apply('statistics', '00000000-0000-0000-0000-000000000001', 2, 1);
SELECT apply('Billing', '00000000-0000-0000-0000-000000000001', 2, 1);
SELECT apply('billing ', '00000000-0000-0000-0000-000000000001', 2, 1);
TABLE books;

-- The spelling of a UUID makes no other message.
SELECT apply('billing', '{0000000000000000000000000000000A}', 1, 5);
SELECT apply('billing', '00000000-0000-0000-0000-00000000000a', 1, 5);
TABLE books;

-- Rolled back, also to a savepoint, message and effect vanish together and the message can be applied.
BEGIN;
SELECT apply('billing', '00000000-0000-0000-0000-000000000003', 1, 1000);
ROLLBACK;
BEGIN;
SAVEPOINT s;
SELECT apply('billing', '00000000-0000-0000-0000-000000000003', 1, 1000);
ROLLBACK TO SAVEPOINT s;
SELECT apply('billing', '00000000-0000-0000-0000-000000000003', 1, 1000);
COMMIT;
SELECT apply('billing', '00000000-0000-0000-0000-000000000003', 1, 1000);
TABLE books;

-- An effect that fails keeps no message: after a top-up it can be applied.
SELECT apply('billing', '00000000-0000-0000-0000-000000000004', 2, -100);
UPDATE account SET balance = balance + 100 WHERE account_id = 2;
SELECT apply('billing', '00000000-0000-0000-0000-000000000004', 2, -100);
TABLE books;

-- An unknown account is refused and keeps no message.
SELECT apply('billing', '00000000-0000-0000-0000-000000000005', 404, 1);
TABLE books;

-- A stored identity cannot be inserted by hand, also not for another account.
INSERT INTO processed_message (subscriber, message_id, account_id) VALUES ('billing', '00000000-0000-0000-0000-000000000001', 2);

-- No part of a message but the fingerprint may be missing, and an account with messages cannot be deleted.
INSERT INTO processed_message (subscriber, message_id, account_id) VALUES (NULL, '00000000-0000-0000-0000-000000000006', 1);
INSERT INTO processed_message (subscriber, message_id, account_id) VALUES ('billing', NULL, 1);
INSERT INTO processed_message (subscriber, message_id, account_id) VALUES ('billing', '00000000-0000-0000-0000-000000000006', NULL);
INSERT INTO processed_message (subscriber, message_id, account_id, created_at)
VALUES ('billing', '00000000-0000-0000-0000-000000000006', 1, NULL);
DELETE FROM account WHERE account_id = 1;
TABLE books;

-- A message and a debit of the same account live in one transaction.
BEGIN;
SELECT apply('billing', '00000000-0000-0000-0000-000000000007', 1, 1);
SELECT debit_once(1, 'k', 1);
SELECT apply('billing', '00000000-0000-0000-0000-000000000007', 1, 1);
SELECT debit_once(1, 'k', 1);
COMMIT;
TABLE books;

-- The time of the call is recorded, and rows can be found by it.
BEGIN;
SELECT pg_sleep(0.01);
SELECT apply('billing', '00000000-0000-0000-0000-000000000008', 1, 1);
SELECT created_at > now() + interval '10 milliseconds' AND created_at <= clock_timestamp() AS time_of_the_call, payload_fingerprint
  FROM processed_message WHERE message_id = '00000000-0000-0000-0000-000000000008';
ROLLBACK;
SELECT count(*) > 0 AS indexed
  FROM pg_index JOIN pg_attribute AS first ON first.attrelid = indrelid AND first.attnum = indkey[0]
       JOIN pg_attribute AS second ON second.attrelid = indrelid AND second.attnum = indkey[1]
 WHERE indrelid = 'processed_message'::regclass AND first.attname = 'subscriber' AND second.attname = 'created_at'
   AND indisvalid AND indpred IS NULL;

DROP VIEW books;
DROP FUNCTION apply;
DROP EXTENSION idempotency_record;
