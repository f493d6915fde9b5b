-- Who may do what: PUBLIC nothing, and a role exactly what it was granted.
\set VERBOSITY sqlstate
SET client_min_messages = warning;
CREATE ROLE regress_ir_nobody;
CREATE ROLE regress_ir_debit;
CREATE ROLE regress_ir_purge;

-- A database whose owner gives new objects to PUBLIC does not give these.
ALTER DEFAULT PRIVILEGES GRANT ALL ON TABLES TO PUBLIC;
ALTER DEFAULT PRIVILEGES GRANT ALL ON FUNCTIONS TO PUBLIC;
ALTER DEFAULT PRIVILEGES GRANT ALL ON SEQUENCES TO PUBLIC;
CREATE TABLE given_away ();
SELECT has_table_privilege('regress_ir_nobody', 'given_away', 'INSERT') AS the_default_works;
CREATE EXTENSION idempotency_record;
ALTER DEFAULT PRIVILEGES REVOKE ALL ON TABLES FROM PUBLIC;
ALTER DEFAULT PRIVILEGES REVOKE ALL ON FUNCTIONS FROM PUBLIC;
ALTER DEFAULT PRIVILEGES GRANT EXECUTE ON FUNCTIONS TO PUBLIC;
ALTER DEFAULT PRIVILEGES REVOKE ALL ON SEQUENCES FROM PUBLIC;
DROP TABLE given_away;

-- PUBLIC has no privilege on any object that the extension owns, whatever comes to be among them.
CREATE VIEW owned AS
    SELECT classid, objid FROM pg_depend JOIN pg_extension AS e ON refclassid = 'pg_extension'::regclass AND refobjid = e.oid
     WHERE deptype = 'e' AND extname = 'idempotency_record';
SELECT count(*) FILTER (WHERE classid = 'pg_proc'::regclass) > 1 AS functions,
       count(*) FILTER (WHERE classid = 'pg_class'::regclass) > 2 AS relations FROM owned;
SELECT objid::regprocedure FROM owned
 WHERE classid = 'pg_proc'::regclass AND has_function_privilege('regress_ir_nobody', objid, 'EXECUTE');
SELECT objid::regclass, privilege
  FROM owned, unnest(ARRAY['SELECT', 'INSERT', 'UPDATE', 'DELETE', 'TRUNCATE', 'REFERENCES', 'TRIGGER']) AS privilege
 WHERE classid = 'pg_class'::regclass AND objid IN (SELECT oid FROM pg_class WHERE relkind IN ('r', 'p', 'v', 'm'))
   AND has_table_privilege('regress_ir_nobody', objid, privilege);
SELECT objid::regclass, privilege FROM owned, unnest(ARRAY['SELECT', 'INSERT', 'UPDATE', 'REFERENCES']) AS privilege
 WHERE classid = 'pg_class'::regclass AND objid IN (SELECT oid FROM pg_class WHERE relkind IN ('r', 'p', 'v', 'm'))
   AND has_any_column_privilege('regress_ir_nobody', objid, privilege);
DROP VIEW owned;

-- The functions run with the caller's rights and without settings that would change them.
SELECT oid::regprocedure, prosecdef AS security_definer, proconfig FROM pg_proc
 WHERE proname IN ('debit_once', 'purge_expired_keys', 'purge_processed_messages', 'purge') ORDER BY oid::regprocedure::text;

-- Records are changed by hand as a superuser can who means it: the triggers that keep them as they are do not fire.
CREATE PROCEDURE tamper(statement text) LANGUAGE plpgsql SET session_replication_role = replica AS 'BEGIN EXECUTE statement; END';
INSERT INTO account VALUES (1, 1000);
GRANT EXECUTE ON FUNCTION debit_once(bigint, text, bigint) TO regress_ir_debit;
GRANT EXECUTE ON FUNCTION purge_expired_keys(interval), purge_expired_keys(), purge_processed_messages(interval), purge_processed_messages()
   TO regress_ir_purge;
GRANT EXECUTE ON PROCEDURE purge TO regress_ir_purge;

-- A role without any grant can do nothing.
SET ROLE regress_ir_nobody;
SELECT debit_once(1, 'k', 1);
SELECT purge_expired_keys('1 day');
SELECT purge_expired_keys();
SELECT purge_processed_messages('1 day');
SELECT purge_processed_messages();
CALL purge();
TABLE account;
TABLE request_result;
TABLE processed_message;
TABLE retention_fence;
TABLE purge_progress;
TABLE purge_lock;
TABLE subscriber_policy;
TABLE retention_status;
SELECT retention_setting();
RESET ROLE;

-- A role with the grants that the function's comment names can debit, replay, and is told each refusal. It cannot
-- purge, delete or change a record, or create or delete an account.
SELECT obj_description('debit_once(bigint,text,bigint)'::regprocedure) LIKE
       '% The caller needs EXECUTE.' AS commented;
SET ROLE regress_ir_debit;
SELECT debit_once(1, 'k', 100);
SELECT debit_once(1, 'k', 100);
SELECT debit_once(1, 'k', 101);
SELECT debit_once(1, 'poor', 901);
SELECT debit_once(404, 'unknown', 1);
SELECT purge_expired_keys('0');
SELECT purge_expired_keys();
CALL purge();
DELETE FROM request_result;
UPDATE request_result SET response = '{}';
INSERT INTO request_result (account_id, operation, request_key, request, response) VALUES (1, 'debit:v1', 'forged', '{"amount": 1}', '{}');
TABLE account;
TABLE request_result;
UPDATE account SET balance = 1000000;
INSERT INTO account VALUES (2, 1000);
DELETE FROM account;
RESET ROLE;

-- A role with EXECUTE alone, which is what the comments name, can purge, whatever else it may not: see or delete a record, say
-- how long records are kept, move the fence, debit. It works with the owner's rights in the purge and no longer.
SELECT oid::regprocedure AS purge, obj_description(oid) LIKE '%. The caller needs EXECUTE.' AS commented
  FROM pg_proc WHERE proname LIKE 'purge%' ORDER BY oid::regprocedure::text;
CALL tamper($t$UPDATE request_result SET created_at = now() - interval '2 days'$t$);
INSERT INTO processed_message (subscriber, message_id, account_id, created_at)
SELECT 's', md5(i::text)::uuid, 1, now() - i * interval '5 days' FROM generate_series(1, 3) AS i;
SET ROLE regress_ir_purge;
SELECT purge_expired_keys('3 days');
SELECT purge_expired_keys('1 day');
SELECT purge_expired_keys('0');
SELECT purge_expired_keys();
SELECT purge_processed_messages('12 days');
SELECT purge_processed_messages();
SELECT purge_expired_keys('-1 day');
SELECT current_user = 'regress_ir_purge' AS himself;
CALL purge(p_time_budget => '-1 second');
SELECT debit_once(1, 'k', 1);
TABLE account;
TABLE request_result;
TABLE processed_message;
TABLE retention_fence;
TABLE purge_progress;
TABLE purge_lock;
DELETE FROM request_result;
DELETE FROM retention_fence;
INSERT INTO operation_policy (operation, retention) VALUES ('debit:v1', '1 second');
RESET ROLE;
SELECT count(*) AS messages FROM processed_message;
INSERT INTO request_result (account_id, operation, request_key, request, response, created_at)
VALUES (1, 'debit:v1', 'old', '{"amount": 1}', '{"balance": 0}', now() - interval '3 days');
CALL tamper($t$UPDATE processed_message SET created_at = now() - interval '8 days'$t$);
SET ROLE regress_ir_purge;
CALL purge();
SELECT current_user = 'regress_ir_purge' AS himself;
TABLE request_result;
RESET ROLE;
-- The tables' owner needs no rights that he does not have as their owner, and nobody else's count: not those of the role that
-- created the functions, nor of the one that may execute them.
CREATE ROLE regress_ir_owner;
GRANT CREATE ON SCHEMA public TO regress_ir_owner;
DO $$
DECLARE
    own regclass;
BEGIN
    FOREACH own IN ARRAY (SELECT extconfig::regclass[] FROM pg_extension WHERE extname = 'idempotency_record') LOOP
        EXECUTE format('ALTER TABLE %s OWNER TO regress_ir_owner', own);
    END LOOP;
END $$;
INSERT INTO request_result (account_id, operation, request_key, request, response, created_at)
VALUES (1, 'debit:v1', 'old', '{"amount": 1}', '{"balance": 0}', now() - interval '3 days');
SET ROLE regress_ir_purge;
SELECT purge_expired_keys();
SELECT purge_processed_messages();
CALL purge();
RESET ROLE;
SELECT count(*) FROM request_result;
-- An owner who revoked his own right to delete does not get it from the one who calls.
INSERT INTO request_result (account_id, operation, request_key, request, response, created_at)
VALUES (1, 'debit:v1', 'old', '{"amount": 1}', '{"balance": 0}', now() - interval '3 days');
REVOKE DELETE ON request_result FROM regress_ir_owner;
SET ROLE regress_ir_purge;
SELECT purge_expired_keys();
CALL purge();
SELECT current_user = 'regress_ir_purge' AS himself;
RESET ROLE;
SELECT purge_expired_keys();
GRANT DELETE ON request_result TO regress_ir_owner;
SELECT purge_expired_keys();
DO $$
DECLARE
    own regclass;
BEGIN
    FOREACH own IN ARRAY (SELECT extconfig::regclass[] FROM pg_extension WHERE extname = 'idempotency_record') LOOP
        EXECUTE format('ALTER TABLE %s OWNER TO %I', own, session_user);
    END LOOP;
END $$;
REVOKE CREATE ON SCHEMA public FROM regress_ir_owner;
DROP ROLE regress_ir_owner;

-- That grant is needed: without it, 42501, and nothing is kept.
CREATE PROCEDURE without(grants text, role text, call text) LANGUAGE plpgsql AS $$
DECLARE
    code text := '00000';
BEGIN
    EXECUTE format('REVOKE %s FROM %I', grants, role);
    EXECUTE format('SET ROLE %I', role);
    BEGIN
        EXECUTE 'SELECT ' || call;
    EXCEPTION WHEN OTHERS THEN
        code := SQLSTATE;
    END;
    RESET ROLE;
    EXECUTE format('GRANT %s TO %I', grants, role);
    INSERT INTO outcome VALUES (grants, code);
END $$;
CREATE TABLE outcome (without text, code text);
CALL without('EXECUTE ON FUNCTION debit_once(bigint, text, bigint)', 'regress_ir_debit', $$debit_once(1, 'without', 1)$$);
CALL without('EXECUTE ON FUNCTION purge_expired_keys(interval)', 'regress_ir_purge', $$purge_expired_keys('1 day')$$);
CALL without('EXECUTE ON FUNCTION purge_expired_keys()', 'regress_ir_purge', $$purge_expired_keys()$$);
CALL without('EXECUTE ON FUNCTION purge_processed_messages(interval)', 'regress_ir_purge', $$purge_processed_messages('1 day')$$);
CALL without('EXECUTE ON FUNCTION purge_processed_messages()', 'regress_ir_purge', $$purge_processed_messages()$$);
TABLE outcome;
SELECT balance, (SELECT count(*) FROM request_result) AS records FROM account;

-- And USAGE on the schema is not needed to run what a function runs, but to name the function.
CREATE SCHEMA closed;
SET ROLE regress_ir_debit;
SELECT debit_once(1, 'k', 1);
SELECT closed.debit_once(1, 'k', 1);
RESET ROLE;
DROP SCHEMA closed;

-- A session that changes its role is checked as that role at every call, although its plans are cached.
SELECT debit_once(1, 'role', 1);
SET ROLE regress_ir_debit;
SELECT debit_once(1, 'role', 1), debit_once(1, 'role-2', 1);
SET ROLE regress_ir_nobody;
SELECT debit_once(1, 'role', 1);
SELECT debit_once(1, 'role-3', 1);
RESET ROLE;
REVOKE EXECUTE ON FUNCTION debit_once(bigint, text, bigint) FROM regress_ir_debit;
SET ROLE regress_ir_debit;
SELECT debit_once(1, 'role', 1);
RESET ROLE;
GRANT EXECUTE ON FUNCTION debit_once(bigint, text, bigint) TO regress_ir_debit;
SELECT debit_once(1, 'role-4', 1);

-- SECURITY DEFINER functions of others lend their rights, as usual.
CREATE FUNCTION lend(key text) RETURNS jsonb SECURITY DEFINER LANGUAGE sql AS 'SELECT debit_once(1, key, 1)';
SET ROLE regress_ir_nobody;
SELECT lend('lent'), lend('lent');
RESET ROLE;
DROP FUNCTION lend;

-- Row security applies to the caller: an account that a policy hides is refused, and nothing is kept.
INSERT INTO account VALUES (2, 1000);
ALTER TABLE account ENABLE ROW LEVEL SECURITY;
CREATE POLICY own ON account TO regress_ir_debit USING (account_id = 1);
SET ROLE regress_ir_debit;
SELECT debit_once(2, 'hidden', 1);
SELECT debit_once(1, 'visible', 1), debit_once(1, 'visible', 1);
RESET ROLE;
-- An account that may be read and not changed is refused with a SQLSTATE that asks for no retry.
DROP POLICY own ON account;
CREATE POLICY read ON account FOR SELECT TO regress_ir_debit USING (true);
CREATE POLICY write ON account FOR UPDATE TO regress_ir_debit USING (account_id = 1);
CREATE FUNCTION retryable(call text) RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
    EXECUTE call;
    RETURN NULL;
EXCEPTION WHEN OTHERS THEN
    RETURN SQLSTATE LIKE '40%' OR SQLSTATE LIKE '08%' OR SQLSTATE LIKE '53%' OR SQLSTATE LIKE '57%' OR SQLSTATE = '55P03';
END $$;
SET ROLE regress_ir_debit;
SELECT retryable($$SELECT debit_once(2, 'read only', 1)$$);
SELECT debit_once(1, 'visible', 1), debit_once(1, 'visible-2', 1);
RESET ROLE;
DROP POLICY read ON account;
DROP POLICY write ON account;
ALTER TABLE account DISABLE ROW LEVEL SECURITY;
-- A record that a policy keeps from being written is refused, and no debit is left.
ALTER TABLE request_result ENABLE ROW LEVEL SECURITY;
CREATE POLICY read ON request_result FOR SELECT TO regress_ir_debit USING (account_id = 1);
SET ROLE regress_ir_debit;
SELECT debit_once(1, 'visible', 1);
SELECT debit_once(1, 'not written', 1);
RESET ROLE;
-- A record that a policy hides keeps its key taken: no second debit, and a SQLSTATE that asks for no retry.
CREATE POLICY write ON request_result FOR INSERT TO regress_ir_debit WITH CHECK (true);
INSERT INTO request_result (account_id, operation, request_key, request, response)
VALUES (2, 'debit:v1', 'taken', '{"amount": 1}', '{"balance": 4711}');
SET ROLE regress_ir_debit;
SELECT retryable($$SELECT debit_once(2, 'taken', 1)$$);
RESET ROLE;
SELECT account_id, balance FROM account ORDER BY account_id;
SELECT account_id, request_key FROM request_result ORDER BY account_id, request_key;

DROP FUNCTION retryable;
DROP PROCEDURE without;
DROP TABLE outcome;
DROP EXTENSION idempotency_record;
DROP OWNED BY regress_ir_nobody, regress_ir_debit, regress_ir_purge;
DROP ROLE regress_ir_nobody, regress_ir_debit, regress_ir_purge;
