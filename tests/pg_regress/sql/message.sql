-- One message: accept_message and apply_message_once.
\set VERBOSITY sqlstate
SET client_min_messages = warning;
CREATE EXTENSION idempotency_record;

-- Every field of an error of ours; of the server's errors the tests look at the SQLSTATE alone.
CREATE FUNCTION refusal(call text, OUT code text, OUT message text, OUT detail text, OUT hint text) LANGUAGE plpgsql AS $$
BEGIN
    EXECUTE call;
    code := '00000';
EXCEPTION WHEN OTHERS THEN
    GET STACKED DIAGNOSTICS code = RETURNED_SQLSTATE, message = MESSAGE_TEXT, detail = PG_EXCEPTION_DETAIL,
        hint = PG_EXCEPTION_HINT;
END $$;

CREATE VIEW books AS
    SELECT (SELECT string_agg(account_id || ':' || balance, ' ' ORDER BY account_id) FROM account) AS balances,
           (SELECT string_agg(concat_ws(':', subscriber, right(message_id::text, 2), account_id), ' ' ORDER BY subscriber, message_id)
              FROM processed_message) AS messages;
-- Message number n.
CREATE FUNCTION m(n integer) RETURNS uuid IMMUTABLE LANGUAGE sql AS $$SELECT lpad(n::text, 32, '0')::uuid$$;
INSERT INTO account VALUES (1, 1000), (2, 1000);

-- accept_message: true the first time, false on every repeat, in this and in another session. It changes no balance.
SELECT accept_message('billing', m(1), 1), accept_message('billing', m(1), 1);
SELECT accept_message('billing', m(1), 1) FROM generate_series(1, 2);
\c -
\set VERBOSITY sqlstate
SET client_min_messages = warning;
SELECT accept_message('billing', m(1), 1);
TABLE books;
SELECT subscriber, message_id, account_id, payload_fingerprint, created_at <= clock_timestamp() AS dated FROM processed_message;
-- created_at is the time of the call, not of its transaction.
BEGIN;
SELECT pg_sleep(0.01);
SELECT accept_message('billing', m(99), 1);
SELECT created_at > now() + interval '10 milliseconds' AS time_of_the_call FROM processed_message WHERE message_id = m(99);
ROLLBACK;
-- Another subscriber takes it for itself; subscribers are compared byte for byte.
SELECT accept_message('shipping', m(1), 1), accept_message('Billing', m(1), 2), accept_message('billing ', m(1), 2), accept_message('shipping', m(1), 1);
TABLE books;

-- The payload is kept as a fingerprint, and compared as jsonb is.
SELECT accept_message('billing', m(2), 1, '{"total": 30, "to": "x"}'), accept_message('billing', m(2), 1, '{"to": "x", "total": 30.0}');
SELECT payload_fingerprint = request_fingerprint('{"total": 30, "to": "x"}') AS digest FROM processed_message WHERE message_id = m(2);
SELECT count(*) AS rows_with_the_payload FROM processed_message AS p WHERE p::text LIKE '%total%';
-- The same id with another payload or account is refused, says which, shows nothing that is saved, and changes nothing.
\x on
SELECT * FROM refusal($$SELECT accept_message('billing', m(2), 1, '{"total": 31, "to": "x"}')$$);
SELECT * FROM refusal($$SELECT accept_message('billing', m(2), 2, '{"total": 30, "to": "x"}')$$);
\x off
SELECT code, message FROM refusal($$SELECT accept_message('billing', m(2), 2, '{"total": 31}')$$)
UNION ALL SELECT code, message FROM refusal($$SELECT accept_message('billing', m(2), 404, '{"total": 30, "to": "x"}')$$)
UNION ALL SELECT code, message FROM refusal($$SELECT accept_message('billing', m(2), 1, 'null')$$)
UNION ALL SELECT code, message FROM refusal($$SELECT accept_message('billing', m(1), 2)$$);
-- Where the record or the delivery has no payload there is nothing to compare. The JSON null is a payload.
SELECT accept_message('billing', m(2), 1), accept_message('billing', m(1), 1, '{"any": "thing"}');
SELECT accept_message('billing', m(3), 1, 'null'), accept_message('billing', m(3), 1, 'null'), accept_message('billing', m(3), 1);
SELECT code, message FROM refusal($$SELECT accept_message('billing', m(3), 1, '0')$$);
-- A refused repeat leaves the caller's transaction usable, and so does a repeat.
BEGIN;
SELECT code FROM refusal($$SELECT accept_message('billing', m(2), 2)$$);
SELECT accept_message('billing', m(2), 1), accept_message('billing', m(4), 1);
ROLLBACK;
-- It vanishes with its transaction or savepoint.
BEGIN;
SELECT accept_message('billing', m(4), 1);
SAVEPOINT s;
SELECT accept_message('billing', m(5), 1);
ROLLBACK TO SAVEPOINT s;
SELECT accept_message('billing', m(5), 2), accept_message('billing', m(4), 1);
ROLLBACK;
SELECT accept_message('billing', m(4), 2);
TABLE books;
-- A repeat writes nothing and works in a READ ONLY transaction; a first time is 25006 there.
BEGIN READ ONLY;
SELECT accept_message('billing', m(2), 1, '{"total": 30, "to": "x"}');
SELECT pg_current_xact_id_if_assigned() IS NULL AS no_transaction_id;
SELECT accept_message('billing', m(6), 1);
ROLLBACK;

-- apply_message_once: the balance the first time, NULL on a repeat, in this and in another session.
SELECT apply_message_once('billing', m(10), 1, 50) AS first, apply_message_once('billing', m(10), 1, 50) AS repeat;
SELECT apply_message_once('billing', m(11), 1, -50, '{"n": 1}') AS first, apply_message_once('billing', m(11), 1, -50, '{"n": 1.0}') AS repeat;
\c -
\set VERBOSITY sqlstate
SET client_min_messages = warning;
SELECT apply_message_once('billing', m(10), 1, 50);
SELECT apply_message_once('shipping', m(10), 1, 50);
TABLE books;
-- The same id with another account, delta or payload.
\x on
SELECT * FROM refusal($$SELECT apply_message_once('billing', m(10), 2, 50)$$);
SELECT * FROM refusal($$SELECT apply_message_once('billing', m(10), 1, 51)$$);
SELECT * FROM refusal($$SELECT apply_message_once('billing', m(11), 1, -50, '{"n": 2}')$$);
\x off
SELECT code FROM refusal($$SELECT apply_message_once('billing', m(10), 1, -50)$$);
TABLE books;
-- Below zero is P0001 and nothing is recorded: after a top-up the same message applies. To zero is allowed.
\x on
SELECT * FROM refusal($$SELECT apply_message_once('billing', m(12), 2, -1001)$$);
\x off
SELECT count(*) FROM processed_message WHERE message_id = m(12);
UPDATE account SET balance = 1001 WHERE account_id = 2;
SELECT apply_message_once('billing', m(12), 2, -1001) AS first, apply_message_once('billing', m(12), 2, -1001) AS repeat;
SELECT apply_message_once('billing', m(13), 2, -9223372036854775808);
-- A balance beyond bigint is 22003, and nothing is recorded; up to there is allowed.
SELECT apply_message_once('billing', m(13), 2, 9223372036854775807);
SELECT apply_message_once('billing', m(14), 2, 1);
SELECT count(*) FROM processed_message WHERE message_id = m(14);
SELECT apply_message_once('billing', m(15), 2, -9223372036854775807), apply_message_once('billing', m(14), 2, 1);
-- Once in one statement, and never without its record.
SELECT apply_message_once('billing', m(16), 2, 1), apply_message_once('billing', m(16), 2, 1);
BEGIN;
SELECT apply_message_once('billing', m(17), 2, 1);
SAVEPOINT s;
SELECT apply_message_once('billing', m(18), 2, 1);
ROLLBACK TO SAVEPOINT s;
SELECT apply_message_once('billing', m(18), 2, 5);
ROLLBACK;
BEGIN READ ONLY;
SELECT apply_message_once('billing', m(16), 2, 1);
SELECT apply_message_once('billing', m(17), 2, 1);
ROLLBACK;
TABLE books;
-- A message that was accepted is not applied afterwards, and the other way round.
SELECT apply_message_once('billing', m(1), 1, 5), accept_message('billing', m(10), 1);
-- The payload is the same message's to both functions.
BEGIN;
SELECT apply_message_once('mixed', m(1), 1, 5, '{"n": 1}') IS NOT NULL AS applied, accept_message('mixed', m(1), 1, '{"n": 1}') AS accepted;
SELECT accept_message('mixed', m(2), 1, '{"n": 1}') AS accepted, apply_message_once('mixed', m(2), 1, 5, '{"n": 1}') AS applied;
SELECT delta FROM processed_message WHERE subscriber = 'mixed' ORDER BY message_id;
SELECT code, message FROM refusal($$SELECT accept_message('mixed', m(1), 1, '{"n": 2}')$$);
ROLLBACK;
TABLE books;

-- A trigger that keeps the balance what it was would lose the message's effect: refused, and not recorded.
CREATE FUNCTION keep_balance() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN NEW.balance := OLD.balance; RETURN NEW; END';
CREATE TRIGGER t BEFORE UPDATE ON account FOR EACH ROW EXECUTE FUNCTION keep_balance();
SELECT code FROM refusal($$SELECT apply_message_once('kept', m(1), 1, 5)$$);
SELECT count(*) FROM processed_message WHERE subscriber = 'kept';
DROP TRIGGER t ON account;
DROP FUNCTION keep_balance;

-- Arguments, before anything is looked up.
SELECT call, code, message
  FROM unnest(ARRAY[
           $$accept_message(NULL, m(1), 1)$$, $$accept_message('', m(1), 1)$$, $$accept_message(repeat('s', 256), m(1), 1)$$, $$accept_message('billing', NULL, 1)$$,
           $$accept_message('billing', m(1), NULL)$$, $$accept_message('billing', m(20), 404)$$, $$accept_message(repeat('s', 255), m(20), 1)$$,
           $$apply_message_once(NULL, m(10), 1, 50)$$, $$apply_message_once('', m(10), 1, 50)$$, $$apply_message_once(repeat('s', 256), m(10), 1, 50)$$,
           $$apply_message_once('billing', NULL, 1, 50)$$, $$apply_message_once('billing', m(10), NULL, 50)$$, $$apply_message_once('billing', m(10), 1, 0)$$,
           $$apply_message_once('billing', m(10), 1, NULL)$$, $$apply_message_once('billing', m(20), 404, 50)$$, $$apply_message_once('billing', m(20), 404, -50)$$]) WITH ORDINALITY AS given (call, ordinal),
       refusal('SELECT ' || call) ORDER BY ordinal;
-- A payload that is nested too deeply for a fingerprint.
SELECT accept_message('billing', m(20), 1, (repeat('[', 128) || repeat(']', 128))::jsonb);
SELECT apply_message_once('billing', m(20), 1, 1, (repeat('[', 128) || repeat(']', 128))::jsonb);
SELECT count(*) FROM processed_message WHERE message_id = m(20) AND subscriber = 'billing';

-- A trigger that suppresses the record or the effect is refused, by no SQLSTATE that asks for a retry, and nothing is left.
CREATE FUNCTION suppress() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END';
CREATE TRIGGER t BEFORE UPDATE ON account FOR EACH ROW EXECUTE FUNCTION suppress();
SELECT code, message FROM refusal($$SELECT apply_message_once('billing', m(21), 1, 1)$$);
DROP TRIGGER t ON account;
CREATE TRIGGER t BEFORE INSERT ON processed_message FOR EACH ROW EXECUTE FUNCTION suppress();
SELECT call, code LIKE '40%' AS retryable, code = '00000' AS accepted
  FROM unnest(ARRAY[$$accept_message('billing', m(21), 1)$$, $$apply_message_once('billing', m(21), 1, 1)$$]) AS call, refusal('SELECT ' || call);
DROP TRIGGER t ON processed_message;
SELECT count(*) FROM processed_message WHERE message_id = m(21);
SELECT balances FROM books;

DROP VIEW books;
DROP EXTENSION idempotency_record;
