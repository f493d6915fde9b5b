-- Who needs what for each function, and that nothing a caller puts in the way has an effect on what they do.
\set VERBOSITY sqlstate
SET client_min_messages = warning;
CREATE EXTENSION idempotency_record;
-- Records are changed by hand as a superuser can who means it: the triggers that keep them as they are do not fire.
CREATE PROCEDURE tamper(statement text) LANGUAGE plpgsql SET session_replication_role = replica AS 'BEGIN EXECUTE statement; END';

CREATE ROLE regress_ir_grants;
CREATE FUNCTION handler(bigint, jsonb) RETURNS jsonb LANGUAGE sql AS $$SELECT jsonb '{"handled": true}'$$;
CREATE FUNCTION m(n integer) RETURNS uuid IMMUTABLE LANGUAGE sql AS $$SELECT lpad(n::text, 32, '0')::uuid$$;
INSERT INTO account VALUES (1, 1000), (2, 1000);

-- PUBLIC may execute no function, and none of the tables is its.
SELECT p.oid::regprocedure AS public_executes
  FROM pg_depend JOIN pg_extension AS e ON refclassid = 'pg_extension'::regclass AND refobjid = e.oid JOIN pg_proc AS p ON classid = 'pg_proc'::regclass AND objid = p.oid
 WHERE deptype = 'e' AND extname = 'idempotency_record' AND has_function_privilege('regress_ir_grants', p.oid, 'EXECUTE');
SELECT count(*) > 13 AS functions FROM pg_depend JOIN pg_extension AS e ON refclassid = 'pg_extension'::regclass AND refobjid = e.oid
 WHERE deptype = 'e' AND extname = 'idempotency_record' AND classid = 'pg_proc'::regclass;
SELECT t AS public_has FROM pg_extension, unnest(extconfig::regclass[]) AS t
 WHERE extname = 'idempotency_record' AND has_table_privilege('regress_ir_grants', t, 'SELECT, INSERT, UPDATE, DELETE, TRUNCATE, REFERENCES, TRIGGER');
SELECT cardinality(extconfig) AS tables FROM pg_extension WHERE extname = 'idempotency_record';
-- None runs with the owner's rights, or with settings of its own.
SELECT p.oid::regprocedure FROM pg_depend JOIN pg_extension AS e ON refclassid = 'pg_extension'::regclass AND refobjid = e.oid JOIN pg_proc AS p ON classid = 'pg_proc'::regclass AND objid = p.oid
 WHERE deptype = 'e' AND extname = 'idempotency_record' AND (prosecdef OR proconfig IS NOT NULL);

-- What becomes of a call by a role with these grants and no others. Grants and effects are taken back.
CREATE FUNCTION outcome(call text, grants text[]) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
    given text;
BEGIN
    FOREACH given IN ARRAY grants LOOP
        EXECUTE 'GRANT ' || given || ' TO regress_ir_grants';
    END LOOP;
    SET LOCAL ROLE regress_ir_grants;
    EXECUTE 'SELECT ' || call;
    RAISE EXCEPTION USING ERRCODE = 'ZZ000';
EXCEPTION WHEN OTHERS THEN
    RETURN CASE SQLSTATE WHEN 'ZZ000' THEN 'done' ELSE SQLSTATE END;
END $$;
SELECT outcome('1', '{}') AS works, outcome($$debit_once(1, 'k', 1)$$, '{}') AS refuses, current_user = session_user AS role_is_back;

-- The privileges that docs/reference.md names suffice, and without any one of them the call is 42501.
CREATE TABLE needs (id int GENERATED ALWAYS AS IDENTITY, what text, call text, grants text[]);
INSERT INTO needs (what, call, grants)
SELECT what, call, ARRAY['EXECUTE ON FUNCTION ' || function]
  FROM (VALUES ('debit', $$debit_once(1, 'new', 1)$$, 'debit_once(bigint, text, bigint)'),
               ('debit, outcome', $$count(*) FROM debit_once_outcome(1, 'new', 1)$$, 'debit_once_outcome(bigint, text, bigint)'),
               ('credit', $$credit_once(1, 'new', 1)$$, 'credit_once(bigint, text, bigint)'),
               ('credit, outcome', $$count(*) FROM credit_once_outcome(1, 'new', 1)$$, 'credit_once_outcome(bigint, text, bigint)'),
               ('run', $$run_once(1, 'run:v1', 'new', '{}', 'handler(bigint, jsonb)')$$, 'run_once(bigint, text, text, jsonb, regprocedure)'),
               ('run, outcome', $$count(*) FROM run_once_outcome(1, 'run:v1', 'new', '{}', 'handler(bigint, jsonb)')$$,
                'run_once_outcome(bigint, text, text, jsonb, regprocedure)'),
               ('debit, dated', $$debit_once(1, 'new', 1, now())$$, 'debit_once(bigint, text, bigint, timestamptz)'),
               ('debit, outcome, dated', $$count(*) FROM debit_once_outcome(1, 'new', 1, now())$$, 'debit_once_outcome(bigint, text, bigint, timestamptz)'),
               ('credit, dated', $$credit_once(1, 'new', 1, now())$$, 'credit_once(bigint, text, bigint, timestamptz)'),
               ('credit, outcome, dated', $$count(*) FROM credit_once_outcome(1, 'new', 1, now())$$, 'credit_once_outcome(bigint, text, bigint, timestamptz)'),
               ('run, dated', $$run_once(1, 'run:v1', 'new', '{}', 'handler(bigint, jsonb)', now())$$, 'run_once(bigint, text, text, jsonb, regprocedure, timestamptz)'),
               ('run, outcome, dated', $$count(*) FROM run_once_outcome(1, 'run:v1', 'new', '{}', 'handler(bigint, jsonb)', now())$$,
                'run_once_outcome(bigint, text, text, jsonb, regprocedure, timestamptz)'),
               ('debit, many', $$count(response) / 2 FROM debit_batch_once('{1, 2}', '{new, new}', '{1, 1}')$$, 'debit_batch_once'),
               ('credit, many', $$count(response) / 2 FROM credit_batch_once('{1, 2}', '{new, new}', '{1, 1}')$$, 'credit_batch_once'),
               ('cancel', $$cancel_request(1, 'run:v1', 'new')$$, 'cancel_request')) AS given (what, call, function);
INSERT INTO needs (what, call, grants)
SELECT what, call, ARRAY['EXECUTE ON FUNCTION ' || function]
  FROM (VALUES ('accept', $$accept_message('s', m(1), 1)$$, 'accept_message'),
               ('accept with payload', $$accept_message('s', m(1), 1, '{}')$$, 'accept_message'),
               ('apply', $$apply_message_once('s', m(1), 1, 1)$$, 'apply_message_once'),
               ('apply with payload', $$apply_message_once('s', m(1), 1, -1, '{}')$$, 'apply_message_once'),
               ('accept many', $$count(*) FROM accept_messages('s', ARRAY[m(1), m(2)], '{1, 2}')$$, 'accept_messages'),
               ('accept many with payloads', $$count(*) FROM accept_messages('s', ARRAY[m(1), m(2)], '{1, 2}', '{1, 2}')$$, 'accept_messages')) AS given (what, call, function);
INSERT INTO needs (what, call, grants) VALUES
    ('version', $$accept_version('s', 'e', 1)$$, '{EXECUTE ON FUNCTION accept_version}'),
    ('purge', $$purge_expired_keys('1 day')$$, '{EXECUTE ON FUNCTION purge_expired_keys(interval)}'),
    ('purge by policy', $$purge_expired_keys()$$, '{EXECUTE ON FUNCTION purge_expired_keys()}'),
    ('purge messages', $$purge_processed_messages('1 day')$$, '{EXECUTE ON FUNCTION purge_processed_messages(interval)}'),
    ('purge messages by policy', $$purge_processed_messages()$$, '{EXECUTE ON FUNCTION purge_processed_messages()}'),
    ('retention settings', $$count(*) FROM retention_setting()$$, '{EXECUTE ON FUNCTION retention_setting}'),
    ('retention status', $$count(*) FROM retention_status$$, '{EXECUTE ON FUNCTION retention_setting, SELECT ON retention_status}'),
    ('fingerprint', $$request_fingerprint('{}')$$, '{EXECUTE ON FUNCTION request_fingerprint}'),
    ('find', $$count(*) FROM find_request(1, 'debit:v1', 'new')$$, '{EXECUTE ON FUNCTION find_request}');
CREATE VIEW needed AS
    SELECT id, what, outcome(call, grants) AS with_all, count(*) AS privileges,
           string_agg(missing || ': ' || without, ', ') FILTER (WHERE without <> '42501') AS otherwise_than_42501
      FROM needs, unnest(grants) AS missing, LATERAL outcome(call, array_remove(grants, missing)) AS without
     GROUP BY id, what, call, grants ORDER BY id;
TABLE needed;
-- The same where the request is stored as a fingerprint, and where a refusal is saved: a caller is subject to a policy that it
-- may not see.
INSERT INTO operation_policy (operation, stored_request, refusals) SELECT unnest(ARRAY['debit:v1', 'credit:v1', 'run:v1']), 'fingerprint', 'save';
SELECT * FROM needed WHERE what LIKE 'debit%' OR what LIKE 'credit%' OR what LIKE 'run%';
UPDATE needs SET call = $$debit_once(1, 'new', 5000)$$ WHERE what = 'debit';
UPDATE needs SET call = $$debit_once(1, 'new', 5000, now())$$ WHERE what = 'debit, dated';
SELECT * FROM needed WHERE what IN ('debit', 'debit, dated');
UPDATE operation_policy SET retention = '1 hour';
GRANT EXECUTE ON FUNCTION run_once_outcome(bigint, text, text, jsonb, regprocedure), debit_once(bigint, text, bigint) TO regress_ir_grants;
SET ROLE regress_ir_grants;
TABLE operation_policy;
SELECT response, replayed, expires_at - executed_at AS retention FROM run_once_outcome(1, 'run:v1', 'as told', '{"secret": 1}', 'handler(bigint, jsonb)');
SELECT debit_once(1, 'as told', 5000);
-- No rights are left behind by that, also not after an error.
TABLE operation_policy;
SELECT debit_once(1, 'as told', 5001);
TABLE operation_policy;
SELECT current_user;
RESET ROLE;
SELECT request_key, request, request_fingerprint IS NOT NULL AS digest FROM request_result ORDER BY operation;
DROP OWNED BY regress_ir_grants;
CALL tamper('DELETE FROM request_result');
DELETE FROM operation_policy;

-- A repeat needs the same.
SELECT debit_once(1, 'old', 1), credit_once(1, 'old', 1), run_once(1, 'run:v1', 'old', '{}', 'handler(bigint, jsonb)');
SELECT cancel_request(1, 'run:v1', 'cancelled') IS NULL AS never_ran;
SELECT accept_message('s', m(8), 1, '{}'), apply_message_once('s', m(9), 1, 1), accept_version('s', 'old', 5);
TRUNCATE needs;
INSERT INTO needs (what, call, grants) VALUES
    ('debit', $$debit_once(1, 'old', 1)$$, '{"EXECUTE ON FUNCTION debit_once(bigint, text, bigint)"}'),
    ('debit, dated', $$debit_once(1, 'old', 1, '-infinity')$$, '{"EXECUTE ON FUNCTION debit_once(bigint, text, bigint, timestamptz)"}'),
    ('credit', $$credit_once(1, 'old', 1)$$, '{"EXECUTE ON FUNCTION credit_once(bigint, text, bigint)"}'),
    ('run', $$run_once(1, 'run:v1', 'old', '{}', 'handler(bigint, jsonb)')$$, '{"EXECUTE ON FUNCTION run_once(bigint, text, text, jsonb, regprocedure)"}'),
    ('debit, outcome', $$count(*) FROM debit_once_outcome(1, 'old', 1)$$, '{"EXECUTE ON FUNCTION debit_once_outcome(bigint, text, bigint)"}'),
    ('credit, outcome', $$count(*) FROM credit_once_outcome(1, 'old', 1)$$, '{"EXECUTE ON FUNCTION credit_once_outcome(bigint, text, bigint)"}'),
    ('run, outcome', $$count(*) FROM run_once_outcome(1, 'run:v1', 'old', '{}', 'handler(bigint, jsonb)')$$, '{"EXECUTE ON FUNCTION run_once_outcome(bigint, text, text, jsonb, regprocedure)"}'),
    ('debit, many', $$count(response) FROM debit_batch_once('{1, 1}', '{old, old}', '{1, 1}')$$, '{EXECUTE ON FUNCTION debit_batch_once}'),
    ('cancel what ran', $$cancel_request(1, 'debit:v1', 'old')$$, '{EXECUTE ON FUNCTION cancel_request}'),
    ('cancel again', $$cancel_request(1, 'run:v1', 'cancelled')$$, '{EXECUTE ON FUNCTION cancel_request}'),
    ('accept', $$accept_message('s', m(8), 1, '{}')$$, '{EXECUTE ON FUNCTION accept_message}'),
    ('apply', $$apply_message_once('s', m(9), 1, 1)$$, '{EXECUTE ON FUNCTION apply_message_once}'),
    ('version', $$accept_version('s', 'old', 5)$$, '{EXECUTE ON FUNCTION accept_version}');
TABLE needed;
-- A mismatch is told to who may call, and to nobody else.
SELECT outcome($$debit_once(1, 'old', 2)$$, '{"EXECUTE ON FUNCTION debit_once(bigint, text, bigint)"}') AS with_execute,
       outcome($$debit_once(1, 'old', 2)$$, '{SELECT ON account, UPDATE ON account, SELECT ON request_result, INSERT ON request_result}') AS without;
-- Nothing was left by all of that.
SELECT string_agg(account_id || ':' || balance, ' ' ORDER BY account_id) AS balances, (SELECT count(*) FROM request_result) AS records,
       (SELECT count(*) FROM processed_message) AS messages, (SELECT count(*) FROM accepted_version) AS versions FROM account;
-- Row security that shows an account but does not let it be updated: 42501 from every function that would write, and for an
-- account that it does not show, or that does not exist.
CREATE ROLE regress_ir_sees;
GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA public TO regress_ir_sees;
INSERT INTO account VALUES (8001, 10);
ALTER TABLE account ENABLE ROW LEVEL SECURITY;
CREATE POLICY sees ON account FOR SELECT TO regress_ir_sees USING (true);
CREATE FUNCTION public.seen(bigint, jsonb) RETURNS jsonb LANGUAGE sql AS 'SELECT $2';
SET ROLE regress_ir_sees;
SELECT debit_once(8001, 'sees', 1);
SELECT credit_once(8001, 'sees', 1);
SELECT sqlstate, message FROM debit_batch_once('{8001, 8002}', '{sees, sees}', '{1, 1}');
SELECT run_once(8001, 'sees:v1', 'sees', '{}', 'public.seen(bigint, jsonb)');
SELECT cancel_request(8001, 'sees:v1', 'sees');
SELECT accept_message('sees', '00000000-0000-0000-0000-000000000001', 8001);
SELECT apply_message_once('sees', '00000000-0000-0000-0000-000000000001', 8001, 1);
SELECT accept_messages('sees', '{00000000-0000-0000-0000-000000000001}', '{8001}');
SELECT run_once(8002, 'sees:v1', 'sees', '{}', 'public.seen(bigint, jsonb)');
RESET ROLE;
DROP POLICY sees ON account;
ALTER TABLE account DISABLE ROW LEVEL SECURITY;
DROP FUNCTION public.seen;
DROP OWNED BY regress_ir_sees;
DROP ROLE regress_ir_sees;

DROP VIEW needed;
DROP EXTENSION idempotency_record;
DROP ROLE regress_ir_grants;

-- Hostile objects: each draws from a sequence, which no rollback undoes, and gives a wrong answer.
CREATE SCHEMA hostile;
CREATE SEQUENCE hostile.used;
CREATE PROCEDURE hostile.make_function(name text, arguments text, result text) LANGUAGE plpgsql AS $$
BEGIN
    EXECUTE pg_catalog.format('CREATE FUNCTION hostile.%s(%s) RETURNS %s LANGUAGE plpgsql AS '
        '$f$BEGIN PERFORM pg_catalog.nextval(''hostile.used''); RETURN %s; END$f$',
        name, arguments, result, CASE WHEN result LIKE 'SETOF %' THEN '' ELSE 'NULL' END);
END $$;
CREATE PROCEDURE hostile.make_operator(operator text, l text, r text, result text) LANGUAGE plpgsql AS $$
DECLARE
    function CONSTANT text := 'wrong_' || md5(operator || ',' || l || ',' || r);
BEGIN
    CALL hostile.make_function(function, l || ',' || r, result);
    EXECUTE pg_catalog.format('CREATE OPERATOR hostile.%s (FUNCTION = hostile.%s, LEFTARG = %s, RIGHTARG = %s)',
        operator, function, l, r);
END $$;
DO $$
DECLARE
    operator text;
    type text;
BEGIN
    FOREACH operator IN ARRAY ARRAY['=', '<>', '<', '<=', '>', '>='] LOOP
        FOREACH type IN ARRAY ARRAY['bigint', 'integer', 'text', 'jsonb', 'interval', 'timestamptz', 'name', 'oid', 'boolean', 'uuid', 'bytea', '"char"',
                                    'regtype', 'oidvector'] LOOP
            CALL hostile.make_operator(operator, type, type, 'boolean');
        END LOOP;
        CALL hostile.make_operator(operator, 'bigint', 'integer', 'boolean');
        CALL hostile.make_operator(operator, 'oid', 'regtype', 'boolean');
        CALL hostile.make_operator(operator, 'oid', 'regprocedure', 'boolean');
    END LOOP;
    CALL hostile.make_operator('+', 'bigint', 'bigint', 'bigint');
    CALL hostile.make_operator('+', 'timestamptz', 'interval', 'timestamptz');
    CALL hostile.make_operator('||', 'text', 'text', 'text');
    CALL hostile.make_operator('||', 'jsonb', 'jsonb', 'jsonb');
    CALL hostile.make_operator('->', 'jsonb', 'text', 'jsonb');
    CALL hostile.make_function('clock_timestamp', '', 'timestamptz');
    CALL hostile.make_function('jsonb_build_object', 'text, bigint', 'jsonb');
    CALL hostile.make_function('jsonb_build_object', 'text, text, text, bigint', 'jsonb');
    CALL hostile.make_function('jsonb_object_keys', 'jsonb', 'SETOF text');
    CALL hostile.make_function('jsonb_typeof', 'jsonb', 'text');
    CALL hostile.make_function('request_fingerprint', 'jsonb', 'bytea');
    CALL hostile.make_function('oidvectortypes', 'oidvector', 'text');
    CALL hostile.make_function('format_type', 'oid, integer', 'text');
    CALL hostile.make_function('quote_ident', 'text', 'text');
    CALL hostile.make_function('has_function_privilege', 'oid, text', 'boolean');
    CALL hostile.make_function('has_schema_privilege', 'oid, text', 'boolean');
    CALL hostile.make_function('array_ndims', 'anyarray', 'integer');
    CALL hostile.make_function('cardinality', 'anyarray', 'integer');
    CALL hostile.make_function('array_position', 'anyarray, anyelement', 'integer');
    CALL hostile.make_function('unnest', 'anyarray', 'SETOF anyelement');
    CALL hostile.make_function('count_step', 'bigint, bigint', 'bigint');
    CALL hostile.make_function('agg_step', 'uuid[], uuid', 'uuid[]');
END $$;
CREATE AGGREGATE hostile.count(bigint) (SFUNC = hostile.count_step, STYPE = bigint);
CREATE AGGREGATE hostile.array_agg(uuid) (SFUNC = hostile.agg_step, STYPE = uuid[]);
CREATE TABLE hostile.account (account_id bigint PRIMARY KEY, balance bigint);
INSERT INTO hostile.account VALUES (1, 5);
CREATE TABLE hostile.request_result (account_id bigint, operation text, request_key text, request jsonb, response jsonb, created_at timestamptz,
                                     request_fingerprint bytea, cancelled boolean, PRIMARY KEY (account_id, operation, request_key));
CREATE TABLE hostile.processed_message (subscriber text, message_id uuid, account_id bigint, payload_fingerprint bytea, created_at timestamptz,
                                        PRIMARY KEY (subscriber, message_id));
CREATE TABLE hostile.accepted_version (subscriber text, entity text, version bigint, accepted_at timestamptz, PRIMARY KEY (subscriber, entity));
CREATE TABLE hostile.operation_policy (operation text PRIMARY KEY, refusals text, stored_request text, retention interval);
INSERT INTO hostile.operation_policy VALUES ('debit:v1', 'save', 'fingerprint', '1 day'), ('run:v1', 'save', 'fingerprint', '1 day');
CREATE TABLE hostile.pg_proc (oid oid, proname name, pronamespace oid, prokind "char", proretset boolean, prorettype oid, proargtypes oidvector);
CREATE TABLE hostile.pg_namespace (oid oid, nspname name);
CREATE TABLE hostile.pg_extension (oid oid, extname name, extnamespace oid, extversion text);
INSERT INTO hostile.pg_extension SELECT 4711, 'idempotency_record', oid, '0.1.0' FROM pg_namespace WHERE nspname = 'hostile';
INSERT INTO hostile.pg_namespace SELECT oid, nspname FROM pg_namespace;
-- They are within reach: this is what happens to unqualified SQL.
SET search_path = hostile, pg_catalog;
SELECT (1::bigint = 1::bigint) IS NULL AS operator, quote_ident('a'::text) IS NULL AS function, array_agg('00000000000000000000000000000001'::uuid) IS NULL AS aggregate,
       (SELECT balance FROM account) AS balance;
SET search_path = public;
SELECT last_value >= 3 AS used FROM hostile.used;
ALTER SEQUENCE hostile.used RESTART;

CREATE SCHEMA kept;
CREATE FUNCTION kept.handler(bigint, jsonb) RETURNS jsonb LANGUAGE sql AS $$SELECT pg_catalog.jsonb_build_object('account', $1, 'request', $2)$$;
CREATE FUNCTION kept.m(n integer) RETURNS uuid IMMUTABLE LANGUAGE sql AS $$SELECT pg_catalog.lpad(n::text, 32, '0')::uuid$$;
SET search_path = hostile, pg_catalog, public;
CREATE EXTENSION idempotency_record SCHEMA kept;
INSERT INTO kept.account VALUES (1, 1000), (2, 1000);
-- A new session, which has no plans yet: everything is as it should be.
\c -
\set VERBOSITY sqlstate
SET client_min_messages = warning;
SET search_path = hostile, pg_catalog, kept;
SELECT kept.debit_once(1, 'k', 100), kept.debit_once(1, 'k', 100), kept.credit_once(1, 'k', 10), kept.credit_once(1, 'k', 10);
SELECT kept.debit_once(1, 'k', 101);
SELECT kept.debit_once(1, 'poor', 100000);
SELECT kept.run_once(1, 'run:v1', 'k', '{"a": 1}', 'kept.handler(bigint, jsonb)'), kept.run_once(1, 'run:v1', 'k', '{"a": 1}', 'kept.handler(bigint, jsonb)');
SELECT kept.run_once(1, 'run:v1', 'k', '{"a": 2}', 'kept.handler(bigint, jsonb)');
SELECT kept.run_once(1, 'run:v1', 'k', '{"a": 1}', 'kept.m(integer)');
SELECT response, replayed, expires_at OPERATOR(pg_catalog.-) executed_at AS retention FROM kept.debit_once_outcome(1, 'k', 100);
SELECT request, response, request_fingerprint FROM kept.find_request(1, 'debit:v1', 'k');
SELECT kept.cancel_request(1, 'debit:v1', 'k'), kept.cancel_request(1, 'debit:v1', 'never') IS NULL AS never_ran;
SELECT kept.debit_once(1, 'never', 1);
SELECT kept.accept_message('s', kept.m(1), 1, '{"a": 1}'), kept.accept_message('s', kept.m(1), 1, '{"a": 1}');
SELECT kept.accept_message('s', kept.m(1), 1, '{"a": 2}');
SELECT kept.apply_message_once('s', kept.m(2), 1, 5), kept.apply_message_once('s', kept.m(2), 1, 5);
SELECT pg_catalog.right(id::text, 1) AS id FROM kept.accept_messages('s', ARRAY[kept.m(4), kept.m(3), kept.m(1)], '{1, 2, 1}', ARRAY['4', '3', '{"a": 1}']::jsonb[]) AS id;
SELECT kept.accept_messages('s', ARRAY[kept.m(3)], '{2}', '{5}');
SELECT kept.accept_messages('s', ARRAY[kept.m(3), NULL], '{2, 2}');
SELECT kept.accept_version('s', 'e', 2), kept.accept_version('s', 'e', 2), kept.accept_version('s', 'e', 1), kept.accept_version('s', 'e', 3);
INSERT INTO kept.operation_policy (operation, stored_request, refusals, retention) VALUES ('debit:v1', 'fingerprint', 'save', '1 hour'), ('run:v1', 'fingerprint', 'raise', NULL);
SELECT kept.debit_once(1, 'digest', 1), kept.debit_once(1, 'digest', 1), kept.debit_once(1, 'poor', 100000);
SELECT kept.debit_once(1, 'digest', 2);
SELECT kept.run_once(1, 'run:v1', 'digest', '{}', 'kept.handler(bigint, jsonb)'), kept.run_once(1, 'run:v1', 'digest', '{}', 'kept.handler(bigint, jsonb)');
SELECT expires_at OPERATOR(pg_catalog.-) executed_at AS retention FROM kept.debit_once_outcome(1, 'digest', 1);
DELETE FROM kept.operation_policy;

-- Temporary tables and functions with our names, and with those of the catalogues, change nothing either.
CREATE TEMPORARY TABLE account (LIKE kept.account INCLUDING ALL);
CREATE TEMPORARY TABLE request_result (LIKE kept.request_result INCLUDING ALL);
CREATE TEMPORARY TABLE processed_message (LIKE kept.processed_message INCLUDING ALL);
CREATE TEMPORARY TABLE accepted_version (LIKE kept.accepted_version INCLUDING ALL);
CREATE TEMPORARY TABLE operation_policy (LIKE kept.operation_policy INCLUDING ALL);
CREATE TEMPORARY TABLE pg_proc (LIKE hostile.pg_proc);
CREATE TEMPORARY TABLE pg_namespace (LIKE hostile.pg_namespace);
CREATE FUNCTION pg_temp.handler(bigint, jsonb) RETURNS jsonb LANGUAGE sql AS $$SELECT jsonb '"temporary"'$$;
CREATE FUNCTION pg_temp.request_fingerprint(jsonb) RETURNS bytea LANGUAGE sql AS $$SELECT '\x00'::bytea$$;
SET search_path = pg_temp, hostile, kept, pg_catalog;
SELECT kept.debit_once(1, 't', 1), kept.run_once(1, 'run:v1', 't', '{}', 'kept.handler(bigint, jsonb)'), kept.cancel_request(1, 'run:v1', 'digest'),
       kept.accept_message('t', kept.m(1), 1, '{}'), kept.accept_version('t', 'e', 1);
SELECT pg_catalog.right(id::text, 1) AS id FROM kept.accept_messages('t', ARRAY[kept.m(2), kept.m(1)], '{1, 1}') AS id;
SELECT response FROM kept.find_request(1, 'run:v1', 't');
SET search_path = pg_catalog;
SELECT count(*) FROM pg_temp.account, pg_temp.request_result, pg_temp.processed_message, pg_temp.accepted_version;
-- Nor do types: a handler's signature is that of the server's types, by whatever name they would be shown in this session.
CREATE DOMAIN pg_temp.jsonb AS text;
CREATE DOMAIN hostile.jsonb AS text;
CREATE FUNCTION hostile.handler(bigint, hostile.jsonb) RETURNS pg_catalog.jsonb LANGUAGE sql AS $$SELECT pg_catalog.jsonb '"hostile"'$$;
SELECT kept.run_once(1, 'run:v1', 'type', '{"a": 1}', 'kept.handler(bigint, pg_catalog.jsonb)');
SET search_path = hostile, pg_catalog;
SELECT kept.run_once(1, 'run:v1', 'type', '{"a": 1}', 'kept.handler(bigint, pg_catalog.jsonb)');
-- The look-alike is refused before anything runs, also where a replay would do.
DROP DOMAIN pg_temp.jsonb;
SELECT kept.run_once(1, 'run:v1', 'k', '{"a": 1}', 'hostile.handler(bigint, hostile.jsonb)');

-- Nothing hostile was used, and its tables are as they were.
SET search_path = pg_catalog;
SELECT is_called AS used FROM hostile.used;
SELECT balance FROM hostile.account;
SELECT count(*) FROM hostile.request_result, hostile.processed_message, hostile.accepted_version;
SELECT string_agg(account_id || ':' || balance, ' ' ORDER BY account_id) AS balances FROM kept.account;
SELECT string_agg(operation || ':' || request_key, ' ' ORDER BY operation, request_key) AS records FROM kept.request_result;
DROP EXTENSION idempotency_record;
DROP SCHEMA hostile CASCADE;
DROP SCHEMA kept CASCADE;
