-- Many debits or credits in one call: each element answered as the single call would answer it.
\set VERBOSITY sqlstate
SET client_min_messages = warning;
SET TimeZone = 'UTC';
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
           (SELECT string_agg(concat_ws(':', account_id, operation, left(request_key, 10), request ->> 'amount'), ' ' ORDER BY account_id, operation, request_key)
              FROM request_result) AS records;
INSERT INTO account VALUES (1, 1000), (2, 100), (3, 9223372036854775800);

-- In the order of the input; several debits of one account see one another; again, all of it is a replay.
SELECT * FROM debit_batch_once('{2, 1, 1, 2}', '{a, b, c, b}', '{30, 100, 1, 70}');
TABLE books;
SELECT * FROM debit_batch_once('{1, 2, 1, 2}', '{c, b, b, a}', '{1, 70, 100, 30}');
-- The single call and the batch know each other's records.
SELECT debit_once(1, 'b', 100) AS of_the_batch, debit_once(1, 'd', 9) AS single;
SELECT * FROM debit_batch_once('{1, 1}', '{d, e}', '{9, 90}');
SELECT response, replayed FROM debit_once_outcome(1, 'e', 90);

-- The order of the input decides who gets the money, and not the order of accounts and keys.
SELECT * FROM debit_batch_once('{1, 1, 1}', '{z, y, x}', '{700, 200, 100}');
-- A key twice executes once and replays once; with another amount it is a mismatch; a key that was refused is free.
SELECT * FROM credit_batch_once('{2, 2, 2, 1}', '{k, k, k, k}', '{5, 5, 6, 5}');
SELECT * FROM debit_batch_once('{2, 2, 2, 2}', '{l, l, l, l}', '{6, 5, 5, 6}');
TABLE books;

-- Each refusal with its SQLSTATE; what can be executed is.
SELECT cancel_request(1, 'debit:v1', 'cancelled') IS NULL AS cancelled;
SELECT * FROM debit_batch_once(
    ARRAY[1, 1, 1, NULL, 1, 1, 1, 404, 1, 1, 1, 1],
    ARRAY['n1', NULL, '', 'n2', 'n3', 'n4', repeat('k', 256), 'n5', 'cancelled', 'b', 'n6', repeat('k', 255)],
    ARRAY[1, 1, 1, 1, 0, NULL, 1, 1, 1, 101, 100000, 2]);
SELECT * FROM credit_batch_once('{3, 3, 3, NULL}', '{a, b, a, NULL}', '{7, 1, 7, -1}');
-- The checks of an element come in the order of the single call.
SELECT d.ordinal, d.sqlstate AS batch, (refusal(format('SELECT debit_once(%L::bigint, %L, %L::bigint)', account, key, amount))).code AS single,
       d.message = (refusal(format('SELECT debit_once(%L::bigint, %L, %L::bigint)', account, key, amount))).message AS same
  FROM (VALUES (1, NULL::bigint, ''::text, 0::bigint), (2, NULL, NULL, 1), (3, NULL, repeat('k', 256), 1), (4, 404, 'k', NULL), (5, 404, repeat('k', 300), 1), (6, 404, '', 1)) AS given (n, account, key, amount),
       LATERAL debit_batch_once(ARRAY[account], ARRAY[key], ARRAY[amount]) AS d ORDER BY n;
-- An unknown account alone, many times; nothing is kept.
SELECT * FROM debit_batch_once('{404, 405, 404}', '{a, b, a}', '{1, 2, 3}');
TABLE books;

-- Saved refusals: the first answer stays, also within the batch.
INSERT INTO operation_policy (operation, refusals) VALUES ('debit:v1', 'save');
SELECT * FROM debit_batch_once('{2, 2, 2, 2}', '{s, t, s, s}', '{10, 1, 10, 1}');
SELECT * FROM debit_batch_once('{2, 2}', '{s, t}', '{10, 1}');
SELECT debit_once(2, 's', 10), (refusal('SELECT debit_once(2, ''s'', 1)')).message;
UPDATE account SET balance = 1000 WHERE account_id IN (1, 2);
-- Fingerprints: the request is not stored, and is compared all the same, also after the policy changed.
UPDATE operation_policy SET refusals = 'raise', stored_request = 'fingerprint';
SELECT * FROM debit_batch_once('{2, 2, 2}', '{f, f, f}', '{1, 1, 2}');
SELECT request, response, request_fingerprint = request_fingerprint('{"amount": 1}') AS digest FROM request_result WHERE request_key = 'f';
SELECT debit_once(2, 'f', 1), debit_once(2, 'g', 1);
DELETE FROM operation_policy;
SELECT * FROM debit_batch_once('{2, 2, 2, 2}', '{f, f, g, g}', '{1, 2, 1, 2}');
-- What is stored is what the single call stores.
SELECT debit_once(1, 'by single', 1) - 'balance' AS single, response - 'balance' AS batch FROM debit_batch_once('{1}', '{by batch}', '{1}');
SELECT count(DISTINCT request::text) AS requests, count(DISTINCT pg_column_size(request)) AS sizes, count(DISTINCT pg_column_size(response)) AS of_responses
  FROM request_result WHERE request_key LIKE 'by %';

-- Dated keys: neither too old nor in the future.
INSERT INTO retention_fence VALUES ('operation', 'debit:v1', '2022-02-22 19:22:22+00');
SELECT * FROM debit_batch_once('{1, 1, 1, 1, 1}', ARRAY['017f22e2-79b0-7cc3-98c4-dc0c0c07398f', '0190a5c4-8f5e-7cc0-b1b0-0d8c1d6f3a01', 'undated',
                                                       'e0000000-0000-7000-8000-000000000000', '03e871b5-b800-7abc-bdef-000000000000'], '{1, 2, 3, 4, 5}');
SELECT * FROM debit_batch_once('{1}', ARRAY['0190a5c4-8f5e-7cc0-b1b0-0d8c1d6f3a01'], '{2}');
-- Also one of an account that does not exist, or cannot pay: as the single call, the age comes first.
SELECT * FROM debit_batch_once('{404, 2}', ARRAY['017f22e2-79b0-7cc3-98c4-dc0c0c07398f', '017f22e2-79b0-7cc3-98c4-dc0c0c07398f'], '{1, 100000}');
DELETE FROM retention_fence;

-- No keys yet.
SET idempotency_record.require_key = off;
SELECT * FROM debit_batch_once('{1, 1, 1, 404, 2}', ARRAY[NULL, 'o', NULL, NULL, ''], '{1, 1, 1, 1, 1}');
SELECT * FROM credit_batch_once('{3, 3}', ARRAY[NULL, NULL], '{100, 1}');
RESET idempotency_record.require_key;

-- The call itself.
SELECT count(*) FROM debit_batch_once('{}', '{}', '{}');
SELECT count(*) FROM credit_batch_once(ARRAY[]::bigint[], '{}', '{}');
\x on
SELECT * FROM refusal($$SELECT debit_batch_once('{1, 2}', '{a}', '{1}')$$);
SELECT * FROM refusal($$SELECT credit_batch_once(array_fill(1::bigint, ARRAY[100001]), array_fill('k'::text, ARRAY[100001]), array_fill(1::bigint, ARRAY[100001]))$$);
\x off
SELECT code, message FROM (VALUES (1, $$NULL, '{a}', '{1}'$$), (2, $$'{1}', NULL, '{1}'$$), (3, $$'{1}', '{a}', NULL$$), (4, $$'{1}', '{a, b}', '{1}'$$),
    (5, $$'{1}', '{a}', '{1, 1}'$$), (6, $$'{{1}}', '{a}', '{1}'$$), (7, $$'{1}', '{{a}}', '{1}'$$), (8, $$'{1}', '{a}', '{{1}}'$$)) AS given (n, arrays),
    LATERAL refusal(format('SELECT debit_batch_once(%s)', arrays)) ORDER BY n;
TABLE books;

-- In a transaction that goes on, and to a savepoint.
BEGIN;
SELECT response FROM debit_batch_once('{1}', '{t1}', '{1}');
SAVEPOINT s;
SELECT response FROM debit_batch_once('{1, 1}', '{t1, t2}', '{1, 1}');
ROLLBACK TO s;
SELECT response, replayed FROM debit_batch_once('{1, 1}', '{t1, t3}', '{1, 1}');
COMMIT;
SELECT count(*) FROM request_result WHERE request_key IN ('t1', 't2', 't3');

-- A trigger of the account's sees one change of it in a batch.
CREATE TABLE seen (account_id bigint, before bigint, after bigint);
CREATE FUNCTION see() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN INSERT INTO seen VALUES (NEW.account_id, OLD.balance, NEW.balance); RETURN NULL; END';
CREATE TRIGGER see AFTER UPDATE ON account FOR EACH ROW EXECUTE FUNCTION see();
UPDATE account SET balance = 100 WHERE account_id IN (1, 2);
DELETE FROM seen;
SELECT response FROM debit_batch_once('{1, 2, 1, 1}', '{u1, u2, u3, u4}', '{1, 2, 3, 1000}');
SELECT * FROM seen ORDER BY account_id;
