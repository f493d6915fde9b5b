-- Whatever a caller puts in front of pg_catalog or into pg_temp has no effect on what the extension does.
\set VERBOSITY sqlstate
SET client_min_messages = warning;

-- Each hostile object draws from a sequence, which no rollback undoes, and gives a wrong answer.
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
    -- Every comparison, of every type that occurs in the tables, in the arguments, or in a catalogue that is read.
    FOREACH operator IN ARRAY ARRAY['=', '<>', '<', '<=', '>', '>='] LOOP
        FOREACH type IN ARRAY ARRAY['bigint', 'integer', 'numeric', 'text', 'jsonb', 'interval', 'timestamptz', 'name', 'oid',
                                    'tid', 'boolean', 'uuid', 'bytea'] LOOP
            CALL hostile.make_operator(operator, type, type, 'boolean');
        END LOOP;
        CALL hostile.make_operator(operator, 'bigint', 'integer', 'boolean');
        CALL hostile.make_operator(operator, 'name', 'text', 'boolean');
    END LOOP;
    CALL hostile.make_operator('+', 'bigint', 'bigint', 'bigint');
    CALL hostile.make_operator('-', 'bigint', 'bigint', 'bigint');
    CALL hostile.make_operator('+', 'bigint', 'integer', 'bigint');
    CALL hostile.make_operator('-', 'bigint', 'integer', 'bigint');
    CALL hostile.make_operator('-', 'timestamptz', 'interval', 'timestamptz');
    CALL hostile.make_operator('+', 'timestamptz', 'interval', 'timestamptz');
    CALL hostile.make_operator('||', 'jsonb', 'jsonb', 'jsonb');
    CALL hostile.make_operator('||', 'text', 'text', 'text');
    CALL hostile.make_operator('-', 'jsonb', 'text', 'jsonb');
    CALL hostile.make_operator('->', 'jsonb', 'text', 'jsonb');
    CALL hostile.make_operator('->>', 'jsonb', 'text', 'text');
    CALL hostile.make_operator('@>', 'jsonb', 'jsonb', 'boolean');
    CALL hostile.make_function('now', '', 'timestamptz');
    CALL hostile.make_function('clock_timestamp', '', 'timestamptz');
    CALL hostile.make_function('statement_timestamp', '', 'timestamptz');
    CALL hostile.make_function('make_interval', 'integer DEFAULT 0', 'interval');
    CALL hostile.make_function('jsonb_build_object', 'text, bigint', 'jsonb');
    CALL hostile.make_function('to_jsonb', 'bigint', 'jsonb');
    CALL hostile.make_function('to_jsonb', 'text', 'jsonb');
    CALL hostile.make_function('jsonb_object_keys', 'jsonb', 'SETOF text');
    CALL hostile.make_function('jsonb_each', 'jsonb', 'SETOF record');
    CALL hostile.make_function('string_agg_step', 'text, text, text', 'text');
    CALL hostile.make_function('quote_ident', 'text', 'text');
    CALL hostile.make_function('octet_length', 'text', 'integer');
    CALL hostile.make_function('length', 'text', 'integer');
    CALL hostile.make_function('pg_extension_config_dump', 'regclass, text', 'text');
    CALL hostile.make_function('debit_once', 'bigint, text, bigint', 'jsonb');
    CALL hostile.make_function('purge_expired_keys', 'interval', 'bigint');
END $$;
CREATE AGGREGATE hostile.string_agg(text, text) (SFUNC = hostile.string_agg_step, STYPE = text);
CREATE TABLE hostile.account (account_id bigint PRIMARY KEY, balance bigint);
CREATE TABLE hostile.request_result (account_id bigint, operation text, request_key text, request jsonb, response jsonb,
                                     created_at timestamptz, PRIMARY KEY (account_id, operation, request_key));
CREATE TABLE hostile.processed_message (subscriber text, message_id uuid);
CREATE TABLE hostile.pg_extension (oid oid, extname name, extnamespace oid);
CREATE TABLE hostile.pg_namespace (oid oid, nspname name);
INSERT INTO hostile.account VALUES (1, 5);
INSERT INTO hostile.pg_extension SELECT 4711, 'idempotency_record', oid FROM pg_namespace WHERE nspname = 'hostile';
INSERT INTO hostile.pg_namespace SELECT oid, nspname FROM pg_namespace;

-- The hostile objects are within reach: this is what happens to unqualified SQL.
SET search_path = hostile, pg_catalog;
SELECT (1::bigint = 1::bigint) IS NULL AS operator, clock_timestamp() IS NULL AS function, string_agg('a'::text, ','::text) IS NULL
    AS aggregate, (SELECT balance FROM account) AS balance;
SET search_path = public;
SELECT last_value AS used FROM hostile.used;
ALTER SEQUENCE hostile.used RESTART;

-- The extension is created with all that in the way, and its default and constraint are the server's.
CREATE SCHEMA kept;
SET search_path = hostile, pg_catalog, public;
CREATE EXTENSION idempotency_record SCHEMA kept;
SET search_path = pg_catalog;
SELECT pg_get_expr(adbin, adrelid) FROM pg_attrdef WHERE adrelid = 'kept.request_result'::regclass;
INSERT INTO kept.account VALUES (1, 1000);

-- Debit, replay, mismatch, each refusal and purge are what they should be, in a session that has no plans yet.
\c -
\set VERBOSITY sqlstate
SET client_min_messages = warning;
SET search_path = hostile, pg_catalog, kept;
SELECT kept.debit_once(1, 'k', 100);
SELECT kept.debit_once(1, 'k', 100);
SELECT kept.debit_once(1, 'k', 101);
SELECT kept.debit_once(1, 'poor', 1000000);
SELECT kept.debit_once(404, 'unknown', 1);
SELECT kept.debit_once(1, 'k2', 1);
SELECT kept.purge_expired_keys('1 day');
SELECT kept.purge_expired_keys('-1 day');
SELECT kept.purge_expired_keys('0');
SELECT kept.debit_once(1, 'k', 101);

-- Temporary tables and functions with our names, and with those of the catalogues, change nothing.
CREATE TEMPORARY TABLE account (account_id bigint PRIMARY KEY, balance bigint);
CREATE TEMPORARY TABLE request_result (LIKE kept.request_result INCLUDING ALL);
CREATE TEMPORARY TABLE processed_message (LIKE kept.processed_message INCLUDING ALL);
CREATE TEMPORARY TABLE pg_extension (LIKE hostile.pg_extension);
CREATE TEMPORARY TABLE pg_namespace (LIKE hostile.pg_namespace);
CREATE FUNCTION pg_temp.debit_once(bigint, text, bigint) RETURNS jsonb LANGUAGE sql AS 'SELECT NULL::jsonb';
CREATE FUNCTION pg_temp.clock_timestamp() RETURNS timestamptz LANGUAGE sql AS 'SELECT NULL::timestamptz';
CREATE DOMAIN pg_temp.jsonb AS text;
CREATE DOMAIN pg_temp.bigint AS text;
SET search_path = kept;
SELECT debit_once(1, 'k', 101), debit_once(1, 'temporary', 1);
SET search_path = pg_temp, hostile, kept, pg_catalog;
SELECT kept.debit_once(1, 'temporary', 1), kept.debit_once(1, 'temporary-2', 1);
SELECT kept.debit_once(1, 'temporary', 2);
SELECT kept.debit_once(1, 'poor', 1000000);
SELECT kept.purge_expired_keys('1 day');
\c -
\set VERBOSITY sqlstate
SET client_min_messages = warning;
CREATE TEMPORARY TABLE account (account_id bigint PRIMARY KEY, balance bigint);
CREATE TEMPORARY TABLE request_result (LIKE kept.request_result INCLUDING ALL);
CREATE TEMPORARY TABLE pg_extension (LIKE hostile.pg_extension);
SET search_path = pg_temp, hostile, kept, pg_catalog;
SELECT kept.debit_once(1, 'temporary', 1), kept.debit_once(1, 'temporary-3', 1);
SELECT kept.purge_expired_keys('0');

-- Nothing hostile was used, and its tables are as they were.
SET search_path = pg_catalog;
SELECT is_called AS used FROM hostile.used;
SELECT account_id, balance FROM kept.account;
TABLE hostile.account;
SELECT count(*) FROM hostile.request_result;
SELECT count(*) FROM pg_temp.request_result;

DROP EXTENSION idempotency_record;
DROP SCHEMA hostile CASCADE;
DROP SCHEMA kept;
