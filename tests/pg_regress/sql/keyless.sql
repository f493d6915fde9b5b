-- The keyless period: who may allow it, and what a call without a key then does.
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
           (SELECT string_agg(concat_ws(':', account_id, operation, request_key), ' ' ORDER BY account_id, operation, request_key)
              FROM request_result) AS records;

CREATE TABLE run (what text);
CREATE FUNCTION note(bigint, p_request jsonb) RETURNS jsonb LANGUAGE sql AS
    'INSERT INTO run VALUES (p_request ->> ''what'') RETURNING p_request -> ''answer''';
INSERT INTO account VALUES (1, 1000);

-- On by default, a NULL key is refused.
LOAD 'idempotency_record';
SHOW idempotency_record.require_key;
SELECT context, vartype, boot_val FROM pg_settings WHERE name = 'idempotency_record.require_key';
SELECT debit_once(1, NULL, 1);

-- Off: each call with a NULL key executes, with a WARNING that comes before anything else can go wrong, and without a record.
SET idempotency_record.require_key = off;
SELECT debit_once(1, NULL, 100);
SELECT debit_once(1, NULL, 100);
SELECT credit_once(1, NULL, 50);
SELECT response, replayed, executed_at <= clock_timestamp() AS dated, expires_at FROM debit_once_outcome(1, NULL, 1);
SELECT run_once(1, 'note:v1', NULL, '{"what": "a", "answer": {"noted": 1}}', 'note(bigint, jsonb)');
SELECT run_once(1, 'note:v1', NULL, '{"what": "a", "answer": {"noted": 1}}', 'note(bigint, jsonb)');
SELECT count(*) AS runs FROM run;
TABLE books;
-- Each call of a statement answers for itself.
SELECT debit_once(1, NULL, 1), credit_once(1, NULL, 2), debit_once(1, NULL, 3), run_once(1, 'note:v1', NULL, '{"what": "b", "answer": 2}', 'note(bigint, jsonb)'), credit_once(1, NULL, 2);
SELECT response FROM generate_series(1, 3) AS i, LATERAL debit_once_outcome(1, CASE WHEN i = 0 THEN 'k' END, 1);
UPDATE account SET balance = balance + 3 WHERE account_id = 1;
-- The WARNING says what it is about; the text is ours.
\set VERBOSITY terse
SELECT debit_once(1, NULL, 1);
\set VERBOSITY sqlstate
-- An empty key is refused as ever, and a key protects as ever, without a WARNING.
SELECT debit_once(1, '', 1);
SELECT run_once(1, 'note:v1', '', '{}', 'note(bigint, jsonb)');
SELECT debit_once(1, 'k', 1), debit_once(1, 'k', 1);
SELECT debit_once(1, 'k', 2);
-- Everything else is refused as ever, and nothing is left.
SELECT code, message FROM refusal($$SELECT debit_once(1, NULL, 0)$$)
UNION ALL SELECT code, message FROM refusal($$SELECT debit_once(1, NULL, NULL)$$)
UNION ALL SELECT code, message FROM refusal($$SELECT debit_once(NULL, NULL, 1)$$)
UNION ALL SELECT code, message FROM refusal($$SELECT run_once(1, 'note', NULL, '{}', 'note(bigint, jsonb)')$$)
UNION ALL SELECT code, message FROM refusal($$SELECT run_once(1, 'debit:v1', NULL, '{}', 'note(bigint, jsonb)')$$)
UNION ALL SELECT code, message FROM refusal($$SELECT run_once(1, 'note:v1', NULL, NULL, 'note(bigint, jsonb)')$$)
UNION ALL SELECT code, message FROM refusal($$SELECT run_once(1, 'note:v1', NULL, '{}', 'refusal(text)')$$);
SELECT debit_once(1, NULL, 100000);
SELECT debit_once(404, NULL, 1);
SELECT run_once(404, 'note:v1', NULL, '{"what": "b", "answer": 1}', 'note(bigint, jsonb)');
SELECT run_once(1, 'note:v1', NULL, '{"what": "b"}', 'note(bigint, jsonb)');
INSERT INTO account VALUES (2, 9223372036854775807);
SELECT credit_once(2, NULL, 1);
SELECT count(*) AS runs FROM run;
-- Without a record a refusal cannot be saved: it raises.
INSERT INTO operation_policy (operation, refusals) VALUES ('debit:v1', 'save');
SELECT debit_once(1, NULL, 100000);
-- In a READ ONLY transaction there is nothing to replay.
BEGIN READ ONLY;
SELECT debit_once(1, NULL, 1);
ROLLBACK;
TABLE books;
-- On again.
RESET idempotency_record.require_key;
SELECT debit_once(1, NULL, 1);

-- A trigger that suppresses the change of the account is refused as what it is, not as an insufficient balance.
SET idempotency_record.require_key = off;
CREATE FUNCTION suppress() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END';
CREATE TRIGGER t BEFORE UPDATE ON account FOR EACH ROW EXECUTE FUNCTION suppress();
SELECT debit_once(1, NULL, 1);
DROP TRIGGER t ON account;
RESET idempotency_record.require_key;

-- Superusers set it for a role or a database; a new session of that role goes without keys.
CREATE ROLE regress_ir_keyless LOGIN;
CREATE ROLE regress_ir_other LOGIN;
GRANT ALL ON account, request_result, operation_policy TO regress_ir_keyless, regress_ir_other;
GRANT EXECUTE ON FUNCTION debit_once(bigint, text, bigint) TO regress_ir_keyless, regress_ir_other;
ALTER ROLE regress_ir_keyless SET idempotency_record.require_key = off;
\c - regress_ir_keyless
\set VERBOSITY sqlstate
SELECT debit_once(1, NULL, 1);
\c - regress_ir_other
\set VERBOSITY sqlstate
SELECT debit_once(1, NULL, 1);
-- An ordinary role cannot: not in its session, once the library is there,
SET idempotency_record.require_key = off;
SET LOCAL idempotency_record.require_key = off;
SELECT set_config('idempotency_record.require_key', 'off', false);
-- not for itself,
ALTER ROLE regress_ir_other SET idempotency_record.require_key = off;
-- not by a function that carries the setting,
CREATE FUNCTION pg_temp.sneaks() RETURNS jsonb SET idempotency_record.require_key = off LANGUAGE sql AS 'SELECT debit_once(1, NULL, 1)';
SELECT debit_once(1, NULL, 1);
-- and not in a new session before the library is there. What it set is ignored with a WARNING of the server's.
\c - regress_ir_other
\set VERBOSITY sqlstate
SET idempotency_record.require_key = off;
SELECT debit_once(1, NULL, 1);
SHOW idempotency_record.require_key;
-- The same by ALTER ROLE before the library is there: whether the server refuses the command or ignores the value, the
-- next session needs a key.
\c - regress_ir_other
\set VERBOSITY sqlstate
SET client_min_messages = error;
DO $$
BEGIN
    ALTER ROLE regress_ir_other SET idempotency_record.require_key = off;
EXCEPTION WHEN insufficient_privilege THEN
    NULL;
END $$;
\c - regress_ir_other
\set VERBOSITY sqlstate
SET client_min_messages = error;
SELECT debit_once(1, NULL, 1);
-- SET ROLE does not take the other role's setting along.
\c - postgres
\set VERBOSITY sqlstate
SET client_min_messages = warning;
SET ROLE regress_ir_keyless;
SELECT debit_once(1, NULL, 1);
RESET ROLE;
-- For a database.
SELECT current_database() AS db \gset
ALTER DATABASE :"db" SET idempotency_record.require_key = off;
\c - regress_ir_other
\set VERBOSITY sqlstate
SELECT debit_once(1, NULL, 1);
\c - postgres
\set VERBOSITY sqlstate
SET client_min_messages = warning;
ALTER DATABASE :"db" RESET idempotency_record.require_key;
SELECT count(*) FROM request_result;
SELECT balance FROM account WHERE account_id = 1;

-- The prefix is reserved, so that a typo is noticed; PostgreSQL 14 notices only what was set before the library came.
LOAD 'idempotency_record';
DO $$
BEGIN
    SET idempotency_record.requires_key = off;
    RAISE EXCEPTION USING ERRCODE = CASE WHEN current_setting('server_version_num')::int < 150000 THEN 'ZZ000' ELSE 'ZZ001' END;
EXCEPTION
    WHEN invalid_name OR SQLSTATE 'ZZ000' THEN
        NULL;
END $$;
SET idempotency_record.require_key = 'perhaps';

DROP VIEW books;
DROP EXTENSION idempotency_record;
DROP OWNED BY regress_ir_keyless, regress_ir_other;
DROP ROLE regress_ir_keyless, regress_ir_other;
