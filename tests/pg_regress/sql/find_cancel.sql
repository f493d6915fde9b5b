-- find_request tells what is recorded; cancel_request makes sure that a request never runs, or tells what it answered.
\set VERBOSITY sqlstate
SET client_min_messages = warning;
CREATE EXTENSION idempotency_record;
-- Records are changed by hand as a superuser can who means it: the triggers that keep them as they are do not fire.
CREATE PROCEDURE tamper(statement text) LANGUAGE plpgsql SET session_replication_role = replica AS 'BEGIN EXECUTE statement; END';

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
           (SELECT string_agg(concat_ws(':', account_id, operation, request_key), ' ' ORDER BY account_id, operation, request_key)
              FROM request_result) AS records;

CREATE TABLE run (what text);
CREATE FUNCTION note(bigint, p_request jsonb) RETURNS jsonb LANGUAGE sql AS
    'INSERT INTO run VALUES (p_request ->> ''what'') RETURNING p_request -> ''answer''';
INSERT INTO account VALUES (1, 1000), (2, 1000);
SELECT debit_once(1, 'k', 100), run_once(1, 'note:v1', 'k', '{"what": "a", "answer": {"noted": true}}', 'note(bigint, jsonb)');

-- find_request: the row of this account, operation and key, or none.
SELECT account_id, operation, request_key, request, response, request_fingerprint, cancelled FROM find_request(1, 'debit:v1', 'k');
SELECT to_jsonb(f) = to_jsonb(r) AS the_whole_row FROM find_request(1, 'debit:v1', 'k') AS f, request_result AS r WHERE r.operation = 'debit:v1';
SELECT count(*) FROM find_request(2, 'debit:v1', 'k');
SELECT count(*) FROM find_request(1, 'credit:v1', 'k');
SELECT count(*) FROM find_request(1, 'debit:v1', 'K');
SELECT count(*) FROM find_request(404, 'nonsense', '');
SELECT (SELECT count(*) FROM find_request(NULL, 'debit:v1', 'k')) AS account, (SELECT count(*) FROM find_request(1, NULL, 'k')) AS operation,
       (SELECT count(*) FROM find_request(1, 'debit:v1', NULL)) AS key;
-- It reads only: it may run in a READ ONLY transaction, takes no transaction id and no row lock, and says STABLE.
BEGIN READ ONLY;
SELECT response FROM find_request(1, 'debit:v1', 'k');
SELECT pg_current_xact_id_if_assigned() IS NULL AS no_transaction_id;
COMMIT;
SELECT provolatile, prosecdef, proretset FROM pg_proc WHERE proname = 'find_request';

-- Never ran: NULL, and the key is taken for good. Again: NULL again.
SELECT cancel_request(1, 'debit:v1', 'cancelled') IS NULL AS never_ran;
SELECT cancel_request(1, 'debit:v1', 'cancelled') IS NULL AS never_ran;
SELECT request, response, request_fingerprint, cancelled, created_at <= clock_timestamp() AS dated FROM find_request(1, 'debit:v1', 'cancelled');
-- Any later call is refused with a message of its own, whatever its request, also by the outcome function and in a READ ONLY
-- transaction, and changes nothing.
\x on
SELECT * FROM refusal($$SELECT debit_once(1, 'cancelled', 10)$$);
\x off
SELECT code, message FROM refusal($$SELECT debit_once(1, 'cancelled', 100000)$$);
SELECT code, message FROM refusal($$SELECT * FROM debit_once_outcome(1, 'cancelled', 10)$$);
BEGIN READ ONLY;
SELECT code, message FROM refusal($$SELECT debit_once(1, 'cancelled', 10)$$);
COMMIT;
-- Also from another session.
\c -
\set VERBOSITY sqlstate
SET client_min_messages = warning;
SELECT code, message FROM refusal($$SELECT debit_once(1, 'cancelled', 10)$$);
SELECT cancel_request(1, 'debit:v1', 'cancelled') IS NULL AS never_ran;
TABLE books;
-- The refusal leaves the caller's transaction usable.
BEGIN;
SELECT code FROM refusal($$SELECT debit_once(1, 'cancelled', 10)$$);
SELECT debit_once(1, 'after', 1);
COMMIT;
-- For a handler: it never runs. JSON null as a request is no way around it, although the record says JSON null.
SELECT cancel_request(1, 'note:v1', 'cancelled') IS NULL AS never_ran;
SELECT code, message FROM unnest(ARRAY['{"what": "b", "answer": 1}', 'null']) AS request,
       refusal(format($$SELECT run_once(1, 'note:v1', 'cancelled', %L, 'note(bigint, jsonb)')$$, request));
-- Other scopes are free.
SELECT credit_once(1, 'cancelled', 1), debit_once(2, 'cancelled', 1), debit_once(1, 'Cancelled', 1);

-- Ran: the saved response, byte for byte, as often as one asks, and nothing changes.
SELECT cancel_request(1, 'debit:v1', 'k'), cancel_request(1, 'debit:v1', 'k'), cancel_request(1, 'note:v1', 'k');
SELECT debit_once(1, 'k', 100);
-- A response that is the JSON null is a response: it ran.
SELECT run_once(1, 'note:v1', 'null', '{"what": "c", "answer": null}', 'note(bigint, jsonb)');
SELECT cancel_request(1, 'note:v1', 'null') IS NULL AS never_ran, cancel_request(1, 'note:v1', 'null'),
       run_once(1, 'note:v1', 'null', '{"what": "c", "answer": null}', 'note(bigint, jsonb)');
-- It needs no more than reading then, so that it works in a READ ONLY transaction; a cancellation is 25006 there.
BEGIN READ ONLY;
SELECT cancel_request(1, 'debit:v1', 'k'), cancel_request(1, 'debit:v1', 'cancelled') IS NULL AS never_ran;
SELECT pg_current_xact_id_if_assigned() IS NULL AS no_transaction_id;
SELECT cancel_request(1, 'debit:v1', 'fresh');
ROLLBACK;
-- A saved refusal ran.
INSERT INTO operation_policy (operation, refusals) VALUES ('debit:v1', 'save');
SELECT debit_once(1, 'poor', 100000);
SELECT cancel_request(1, 'debit:v1', 'poor');
DELETE FROM operation_policy;
-- A refusal that was not saved did not.
SELECT debit_once(1, 'poorer', 100000);
SELECT cancel_request(1, 'debit:v1', 'poorer') IS NULL AS never_ran;
-- Under stored_request = 'fingerprint' as well.
INSERT INTO operation_policy (operation, stored_request) VALUES ('debit:v1', 'fingerprint');
SELECT cancel_request(1, 'debit:v1', 'digest') IS NULL AS never_ran, debit_once(1, 'digested', 1), cancel_request(1, 'debit:v1', 'digested');
SELECT code, message FROM refusal($$SELECT debit_once(1, 'digest', 10)$$);
DELETE FROM operation_policy;
SELECT string_agg(what, ' ') FROM run;
TABLE books;

-- A cancellation vanishes with its transaction or savepoint; the key is free then.
BEGIN;
SELECT cancel_request(1, 'debit:v1', 'rolled back') IS NULL AS never_ran;
SELECT code FROM refusal($$SELECT debit_once(1, 'rolled back', 1)$$);
ROLLBACK;
SELECT debit_once(1, 'rolled back', 1);
BEGIN;
SAVEPOINT s;
SELECT cancel_request(1, 'debit:v1', 'savepoint') IS NULL AS never_ran;
ROLLBACK TO SAVEPOINT s;
SELECT debit_once(1, 'savepoint', 1), cancel_request(1, 'debit:v1', 'savepoint');
COMMIT;
-- A purge ends it, as it ends every record.
CALL tamper($t$UPDATE request_result SET created_at = now() - interval '2 days' WHERE request_key = 'cancelled' AND operation = 'debit:v1' AND account_id = 1$t$);
SELECT purge_expired_keys('1 day');
SELECT debit_once(1, 'cancelled', 10);

-- Arguments.
SELECT code, message FROM refusal($$SELECT cancel_request(NULL, 'debit:v1', 'new')$$)
UNION ALL SELECT code, message FROM refusal($$SELECT cancel_request(1, NULL, 'new')$$)
UNION ALL SELECT code, message FROM refusal($$SELECT cancel_request(1, 'debit', 'new')$$)
UNION ALL SELECT code, message FROM refusal($$SELECT cancel_request(1, 'debit:v1', NULL)$$)
UNION ALL SELECT code, message FROM refusal($$SELECT cancel_request(1, 'debit:v1', '')$$)
UNION ALL SELECT code, message FROM refusal($$SELECT cancel_request(1, 'debit:v1', repeat('k', 256))$$)
UNION ALL SELECT code, message FROM refusal($$SELECT cancel_request(404, 'debit:v1', 'new')$$);
SELECT count(*) FROM request_result WHERE request_key = 'new';
-- A key is required also where operations go without one.
SET idempotency_record.require_key = off;
SELECT cancel_request(1, 'debit:v1', NULL);

-- A column that somebody adds to the table is none of find_request's.
ALTER TABLE request_result ADD COLUMN note text;
SELECT count(*) >= 0 AS works FROM find_request(1, 'debit:v1', 'hidden');

DROP VIEW books;
DROP EXTENSION idempotency_record;
