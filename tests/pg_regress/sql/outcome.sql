-- The outcome functions: the answer of the same core, and whether, when, and until when.
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

CREATE TABLE run (what text);
CREATE FUNCTION note(bigint, p_request jsonb) RETURNS jsonb LANGUAGE sql AS
    'INSERT INTO run VALUES (p_request ->> ''what'') RETURNING jsonb_build_object(''noted'', what)';
INSERT INTO account VALUES (1, 1000);

-- The columns are the same for all three, with and without a date.
SELECT proname, pg_get_function_result(oid), count(*) FROM pg_proc WHERE proname LIKE '%\_once\_outcome' GROUP BY 1, 2 ORDER BY 1;

-- One row; replayed says whether this call found the record, from this and from another session. Without a policy a record is
-- kept for 48 hours.
SELECT response, replayed, expires_at - executed_at AS retention FROM debit_once_outcome(1, 'k', 100);
SELECT response, replayed, expires_at - executed_at AS retention FROM debit_once_outcome(1, 'k', 100);
SELECT response, replayed, expires_at - executed_at AS retention FROM credit_once_outcome(1, 'k', 30);
SELECT response, replayed, expires_at - executed_at AS retention FROM credit_once_outcome(1, 'k', 30);
SELECT response, replayed, expires_at - executed_at AS retention FROM run_once_outcome(1, 'note:v1', 'k', '{"what": "a"}', 'note(bigint, jsonb)');
SELECT response, replayed, expires_at - executed_at AS retention FROM run_once_outcome(1, 'note:v1', 'k', '{"what": "a"}', 'note(bigint, jsonb)');
\c -
\set VERBOSITY sqlstate
SET client_min_messages = warning;
SELECT replayed FROM debit_once_outcome(1, 'k', 100);

-- It is the same core: with and without _outcome they replay each other.
SELECT debit_once(1, 'k', 100), credit_once(1, 'k', 30), run_once(1, 'note:v1', 'k', '{"what": "a"}', 'note(bigint, jsonb)');
SELECT debit_once(1, 'plain', 1), credit_once(1, 'plain', 1), run_once(1, 'note:v1', 'plain', '{"what": "b"}', 'note(bigint, jsonb)');
SELECT d.response, d.replayed, c.response, c.replayed, r.response, r.replayed
  FROM debit_once_outcome(1, 'plain', 1) AS d, credit_once_outcome(1, 'plain', 1) AS c,
       run_once_outcome(1, 'note:v1', 'plain', '{"what": "b"}', 'note(bigint, jsonb)') AS r;
SELECT string_agg(what, ' ' ORDER BY what) FROM run;
SELECT balance FROM account;

-- executed_at is what the record says, the first time and every other time; it is the time of the call and not of its
-- transaction.
SELECT o.executed_at = r.created_at AS same FROM debit_once_outcome(1, 'k', 100) AS o, find_request(1, 'debit:v1', 'k') AS r;
SELECT o.executed_at = r.created_at AS same FROM run_once_outcome(1, 'note:v1', 'k', '{"what": "a"}', 'note(bigint, jsonb)') AS o,
       find_request(1, 'note:v1', 'k') AS r;
BEGIN;
SELECT pg_sleep(0.01);
SELECT executed_at AS debited, replayed, executed_at > now() + interval '10 milliseconds' AND executed_at <= clock_timestamp() AS time_of_the_call
  FROM debit_once_outcome(1, 'timed', 1) \gset first_
SELECT executed_at AS ran FROM run_once_outcome(1, 'note:v1', 'timed', '{"what": "c"}', 'note(bigint, jsonb)') \gset first_
SELECT executed_at AS credited FROM credit_once_outcome(1, 'timed', 1) \gset first_
COMMIT;
SELECT :'first_replayed' AS replayed, :'first_time_of_the_call' AS time_of_the_call;
SELECT operation, created_at = CASE operation WHEN 'debit:v1' THEN :'first_debited' WHEN 'credit:v1' THEN :'first_credited' ELSE :'first_ran' END::timestamptz AS same
  FROM request_result WHERE request_key = 'timed' ORDER BY operation;
SELECT d.executed_at = :'first_debited' AND c.executed_at = :'first_credited' AND r.executed_at = :'first_ran' AS same_in_a_replay
  FROM debit_once_outcome(1, 'timed', 1) AS d, credit_once_outcome(1, 'timed', 1) AS c,
       run_once_outcome(1, 'note:v1', 'timed', '{"what": "c"}', 'note(bigint, jsonb)') AS r;
-- Also where the record is old.
CALL tamper($t$UPDATE request_result SET created_at = '2001-02-03 04:05:06+00' WHERE request_key = 'timed' AND operation = 'debit:v1'$t$);
SELECT replayed, executed_at = '2001-02-03 04:05:06+00' AS saved FROM debit_once_outcome(1, 'timed', 1);

-- expires_at is executed_at plus the declared retention, of this operation alone, for old and new records; without one, plus
-- the setting's.
INSERT INTO operation_policy (operation, retention) VALUES ('debit:v1', '48 hours'), ('note:v1', '1 month');
INSERT INTO operation_policy (operation) VALUES ('credit:v1');
SELECT replayed, expires_at - executed_at AS retention FROM debit_once_outcome(1, 'k', 100);
SELECT replayed, expires_at - executed_at AS retention FROM debit_once_outcome(1, 'declared', 1);
SELECT replayed, expires_at - executed_at AS retention FROM debit_once_outcome(1, 'timed', 1);
SELECT replayed, expires_at - executed_at AS retention FROM credit_once_outcome(1, 'declared', 1);
SELECT replayed, expires_at = executed_at + interval '1 month' AS a_month_later FROM run_once_outcome(1, 'note:v1', 'declared', '{"what": "d"}', 'note(bigint, jsonb)');
UPDATE operation_policy SET retention = '1 hour' WHERE operation = 'debit:v1';
SELECT replayed, expires_at - executed_at AS retention FROM debit_once_outcome(1, 'declared', 1);
DELETE FROM operation_policy;
SELECT replayed, expires_at - executed_at AS retention FROM debit_once_outcome(1, 'declared', 1);
SET idempotency_record.retention = '30d';
SELECT replayed, expires_at - executed_at AS retention FROM debit_once_outcome(1, 'declared', 1);
RESET idempotency_record.retention;
-- In one transaction, the second call is the replay of the first.
BEGIN;
SELECT a.replayed AS first, b.replayed AS second, a.executed_at = b.executed_at AS same
  FROM debit_once_outcome(1, 'twice', 1) AS a, LATERAL (SELECT * FROM debit_once_outcome(1, 'twice', 1) WHERE a.response IS NOT NULL) AS b;
ROLLBACK;

-- Every refusal (22003 is the server's, in its language) is that of the function without _outcome, field by field, and no row comes with it.
SELECT call, plain.code, CASE WHEN plain.code <> '22003' THEN plain.message END AS message, plain = outcome AS same
  FROM (VALUES ('debit_once', $$(1, 'k', 101)$$), ('debit_once', $$(1, NULL, 1)$$), ('debit_once', $$(1, 'new', 0)$$), ('debit_once', $$(NULL, 'new', 1)$$),
               ('debit_once', $$(1, 'new', 100000)$$), ('debit_once', $$(404, 'new', 1)$$), ('debit_once', $$(1, repeat('k', 256), 1)$$),
               ('credit_once', $$(1, 'k', 31)$$), ('credit_once', $$(1, 'new', 9223372036854775807)$$),
               ('run_once', $$(1, 'note:v1', 'k', '{"what": "z"}', 'note(bigint, jsonb)')$$), ('run_once', $$(1, 'note', 'new', '{}', 'note(bigint, jsonb)')$$),
               ('run_once', $$(1, 'note:v1', 'new', NULL, 'note(bigint, jsonb)')$$), ('run_once', $$(1, 'note:v1', 'new', '{}', NULL)$$),
               ('run_once', $$(1, 'note:v1', 'new', '{}', 'refusal(text)')$$)) AS given (function, call),
       refusal('SELECT ' || function || call) AS plain, refusal('SELECT * FROM ' || function || '_outcome' || call) AS outcome;
SELECT count(*) FROM request_result WHERE request_key NOT IN ('k', 'plain', 'timed', 'declared');

-- A replay works in a READ ONLY transaction.
BEGIN READ ONLY;
SELECT response, replayed FROM debit_once_outcome(1, 'k', 100);
ROLLBACK;

DROP EXTENSION idempotency_record;
