-- Where the extension lives, and what happens to a session with cached plans when that, or a table, changes.
\set VERBOSITY sqlstate
SET client_min_messages = warning;

-- It can be created in a schema with any name.
CREATE SCHEMA "Odd ""Name";
CREATE EXTENSION idempotency_record SCHEMA "Odd ""Name";
INSERT INTO "Odd ""Name".account VALUES (1, 1000);
SELECT "Odd ""Name".debit_once(1, 'k', 100);
SELECT "Odd ""Name".debit_once(1, 'k', 100);
SELECT "Odd ""Name".debit_once(1, 'k', 101);
SELECT "Odd ""Name".purge_expired_keys('1 day');
DROP EXTENSION idempotency_record;
DROP SCHEMA "Odd ""Name";

-- A schema's name is no SQL.
CREATE SCHEMA "a.request_result; DROP TABLE x; --$1 @extschema@ 'q' \";
CREATE EXTENSION idempotency_record SCHEMA "a.request_result; DROP TABLE x; --$1 @extschema@ 'q' \";
SET search_path = "a.request_result; DROP TABLE x; --$1 @extschema@ 'q' \";
INSERT INTO account VALUES (1, 1000);
SELECT debit_once(1, 'k', 100), debit_once(1, 'k', 100);
SELECT purge_expired_keys('0');
DROP EXTENSION idempotency_record;
DROP SCHEMA "a.request_result; DROP TABLE x; --$1 @extschema@ 'q' \";

-- Without SCHEMA it is created in the first schema of the search path.
CREATE SCHEMA first;
CREATE SCHEMA second;
SET search_path = first, second, public;
CREATE EXTENSION idempotency_record;
SELECT nspname FROM pg_extension JOIN pg_namespace AS n ON n.oid = extnamespace WHERE extname = 'idempotency_record';
SELECT relnamespace::regnamespace AS schema, relname FROM pg_class WHERE relname IN ('account', 'request_result', 'processed_message')
 ORDER BY 2;
INSERT INTO account VALUES (1, 1000);
SELECT debit_once(1, 'k', 100);

-- A session with cached plans is not confused by another search path, where tables have the same names.
CREATE TABLE second.account (account_id bigint PRIMARY KEY, balance bigint);
CREATE TABLE second.request_result (LIKE first.request_result INCLUDING ALL);
INSERT INTO second.account VALUES (1, 1);
SET search_path = second, first;
SELECT debit_once(1, 'k', 100), debit_once(1, 'k2', 100);
SET search_path = '';
SELECT first.debit_once(1, 'k', 100), first.debit_once(1, 'k3', 100);
SELECT (SELECT balance FROM first.account), (SELECT count(*) FROM first.request_result) AS records,
       (SELECT balance FROM second.account) AS other, (SELECT count(*) FROM second.request_result) AS other_records;
SET search_path = public;
DROP TABLE second.account, second.request_result;

-- Dropped and created in another schema in the same session, the old keys are gone and the new tables are used.
DROP EXTENSION idempotency_record;
CREATE EXTENSION idempotency_record SCHEMA second;
INSERT INTO second.account VALUES (1, 500);
SELECT second.debit_once(1, 'k', 100);
SELECT second.debit_once(1, 'k', 100);
SELECT first.debit_once(1, 'k', 100);

-- And in the same schema.
DROP EXTENSION idempotency_record;
CREATE EXTENSION idempotency_record SCHEMA second;
SELECT second.debit_once(1, 'k', 100);
INSERT INTO second.account VALUES (1, 300);
SELECT second.debit_once(1, 'k', 100);

-- A renamed schema is followed, also when another one takes the old name.
ALTER SCHEMA second RENAME TO renamed;
SELECT renamed.debit_once(1, 'k', 100), renamed.debit_once(1, 'k2', 100);
CREATE SCHEMA second;
CREATE TABLE second.account (account_id bigint, balance bigint);
CREATE TABLE second.request_result (LIKE renamed.request_result INCLUDING ALL);
SELECT renamed.debit_once(1, 'k', 100), renamed.debit_once(1, 'k3', 100);
SELECT renamed.purge_expired_keys('1 hour');
SELECT (SELECT count(*) FROM renamed.request_result) AS records, (SELECT count(*) FROM second.request_result) AS other_records;
DROP SCHEMA second CASCADE;

-- A rename that is rolled back is followed back.
BEGIN;
ALTER SCHEMA renamed RENAME TO second;
SELECT second.debit_once(1, 'k', 100);
ROLLBACK;
SELECT renamed.debit_once(1, 'k', 100);

-- The extension does not move to another schema: its functions say where its tables are.
ALTER EXTENSION idempotency_record SET SCHEMA first;
-- Neither is a table of it moved without the session noticing: that is refused and keeps nothing.
ALTER TABLE renamed.request_result SET SCHEMA first;
SELECT renamed.debit_once(1, 'k4', 1);
ALTER TABLE first.request_result SET SCHEMA renamed;
SELECT renamed.debit_once(1, 'k', 100);
SELECT balance FROM renamed.account;

-- A DROP that is rolled back leaves everything in place: keys replay.
BEGIN;
DROP EXTENSION idempotency_record;
SELECT renamed.debit_once(1, 'k', 100);
ROLLBACK;
SELECT renamed.debit_once(1, 'k', 100);

-- So does a DROP and CREATE elsewhere, although the session has used the other one in between.
BEGIN;
DROP EXTENSION idempotency_record;
CREATE EXTENSION idempotency_record SCHEMA first;
INSERT INTO first.account VALUES (1, 50);
SELECT first.debit_once(1, 'k', 1);
SELECT first.debit_once(1, 'k', 1);
ROLLBACK;
SELECT renamed.debit_once(1, 'k', 100);
SELECT first.debit_once(1, 'k', 1);
BEGIN;
SAVEPOINT s;
DROP EXTENSION idempotency_record;
CREATE EXTENSION idempotency_record SCHEMA first;
INSERT INTO first.account VALUES (1, 50);
SELECT first.debit_once(1, 'k', 1);
ROLLBACK TO SAVEPOINT s;
SELECT renamed.debit_once(1, 'k', 100);
COMMIT;
SELECT balance FROM renamed.account;

-- DISCARD and RESET change nothing.
UPDATE renamed.account SET balance = 100;
DISCARD PLANS;
SELECT renamed.debit_once(1, 'k', 100), renamed.debit_once(1, 'discard', 1);
DISCARD ALL;
SELECT renamed.debit_once(1, 'k', 100), renamed.debit_once(1, 'discard', 1);
RESET ALL;
SET client_min_messages = warning;
DEALLOCATE ALL;
SELECT renamed.debit_once(1, 'k', 100);
DROP EXTENSION idempotency_record;
DROP SCHEMA first, renamed;

-- Where a table of that name exists, CREATE EXTENSION fails, leaves nothing of its own and the table as it was.
CREATE TABLE account (mine text);
INSERT INTO account VALUES ('mine');
CREATE EXTENSION idempotency_record;
TABLE account;
SELECT count(*) FROM pg_extension WHERE extname = 'idempotency_record';
SELECT to_regclass('request_result'), to_regclass('processed_message'), to_regprocedure('debit_once(bigint,text,bigint)');
DROP TABLE account;
CREATE TABLE processed_message (mine text);
CREATE EXTENSION idempotency_record;
SELECT to_regclass('account'), to_regclass('request_result'), to_regprocedure('debit_once(bigint,text,bigint)');
DROP TABLE processed_message;
-- So with a function: nobody's earlier function becomes the extension's.
CREATE FUNCTION debit_once(bigint, text, bigint) RETURNS jsonb LANGUAGE sql AS $$SELECT '"mine"'::jsonb$$;
CREATE EXTENSION idempotency_record;
SELECT debit_once(1, 'k', 1), to_regclass('account');
DROP FUNCTION debit_once;
-- A second one in another schema is refused as well.
CREATE EXTENSION idempotency_record;
CREATE SCHEMA other;
CREATE EXTENSION idempotency_record SCHEMA other;
DROP SCHEMA other;

-- Its objects cannot be dropped one by one, and DROP EXTENSION leaves nothing.
DROP TABLE processed_message;
DROP FUNCTION debit_once(bigint, text, bigint);
CREATE VIEW user_view AS SELECT * FROM account;
DROP EXTENSION idempotency_record;
DROP VIEW user_view;
DROP EXTENSION idempotency_record;
SELECT to_regclass('account'), to_regclass('request_result'), to_regclass('processed_message'), to_regprocedure('debit_once(bigint,text,bigint)'),
       to_regprocedure('purge_expired_keys(interval)');

-- DDL on the tables between calls of one session: every key still replays, and new keys execute.
CREATE EXTENSION idempotency_record;
INSERT INTO account VALUES (1, 1000);
CREATE FUNCTION works(step text, OUT known jsonb, OUT new jsonb) LANGUAGE sql AS
    'SELECT debit_once(1, ''known'', 10), debit_once(1, step, 1)';
SELECT * FROM works('before');
ALTER TABLE account ADD COLUMN owner text DEFAULT 'nobody' NOT NULL;
ALTER TABLE request_result ADD COLUMN note text DEFAULT 'none', ADD COLUMN n bigint GENERATED ALWAYS AS IDENTITY;
SELECT * FROM works('columns added');
ALTER TABLE request_result DROP COLUMN note;
ALTER TABLE account DROP COLUMN owner;
SELECT * FROM works('columns dropped');
CREATE INDEX response_index ON request_result USING gin (response);
CREATE INDEX balance_index ON account (balance);
SELECT * FROM works('indexes created');
DROP INDEX response_index, balance_index;
ALTER TABLE account ALTER COLUMN balance TYPE numeric;
ALTER TABLE account ALTER COLUMN balance TYPE bigint;
SELECT * FROM works('type changed to and fro');
ALTER TABLE request_result ADD CHECK (response IS NOT NULL);
CREATE STATISTICS some_statistics ON account_id, operation FROM request_result;
SELECT * FROM works('constraint added');
VACUUM account, request_result;
SELECT * FROM works('vacuum');
VACUUM FULL account, request_result;
SELECT * FROM works('vacuum full');
CLUSTER request_result USING request_result_pkey;
REINDEX TABLE request_result;
ANALYZE account, request_result;
SELECT * FROM works('rewritten');
ALTER TABLE account SET (fillfactor = 50);
ALTER TABLE request_result SET UNLOGGED;
ALTER TABLE request_result SET LOGGED;
SELECT * FROM works('set unlogged and logged');
BEGIN;
ALTER TABLE account ADD COLUMN gone int;
SELECT * FROM works('added and rolled back');
ROLLBACK;
SELECT * FROM works('added and rolled back');
SELECT balance, (SELECT count(*) FROM request_result) AS records FROM account;

-- Settings of the session change neither effect nor answer.
SET enable_indexscan = off;
SET enable_bitmapscan = off;
SET plan_cache_mode = force_generic_plan;
SELECT * FROM works('generic plans');
SET plan_cache_mode = force_custom_plan;
SELECT * FROM works('custom plans');
RESET enable_indexscan;
RESET enable_bitmapscan;
RESET plan_cache_mode;
SET standard_conforming_strings = off;
SET bytea_output = 'escape';
SET extra_float_digits = -15;
SET TimeZone = 'Pacific/Apia';
SET DateStyle = 'German';
SET IntervalStyle = 'sql_standard';
SELECT * FROM works('settings');
SELECT purge_expired_keys('1 day');
RESET standard_conforming_strings;
RESET ALL;
SET client_min_messages = warning;

-- Without the primary key nothing executes: the server refuses the claim rather than let a key be taken twice.
ALTER TABLE request_result DROP CONSTRAINT request_result_pkey;
SELECT debit_once(1, 'unprotected', 1);
SELECT debit_once(1, 'known', 10);
SELECT balance, (SELECT count(*) FROM request_result) AS records FROM account;
ALTER TABLE request_result ADD CONSTRAINT request_result_pkey PRIMARY KEY (account_id, operation, request_key);
SELECT * FROM works('protected again');

-- A response of another type is refused rather than misread, and nothing is kept.
ALTER TABLE request_result ALTER COLUMN response TYPE text;
SELECT debit_once(1, 'as text', 1);
SELECT debit_once(1, 'known', 10);
SELECT balance, (SELECT count(*) FROM request_result) AS records FROM account;
ALTER TABLE request_result ALTER COLUMN response TYPE jsonb USING response::jsonb;
SELECT * FROM works('jsonb again');

-- A balance of another type is refused rather than misread, and nothing is kept. Back again, everything works.
ALTER TABLE account ALTER COLUMN balance TYPE numeric;
SELECT debit_once(1, 'as numeric', 1000000);
SELECT balance, (SELECT count(*) FROM request_result) AS records FROM account;
ALTER TABLE account ALTER COLUMN balance TYPE bigint;
SELECT * FROM works('bigint again');

-- A record that vanished with TRUNCATE makes its key a new one.
-- Records are changed by hand as a superuser can who means it: the triggers that keep them as they are do not fire.
CREATE PROCEDURE tamper(statement text) LANGUAGE plpgsql SET session_replication_role = replica AS 'BEGIN EXECUTE statement; END';
CALL tamper($t$TRUNCATE request_result$t$);
SELECT debit_once(1, 'known', 20);

DROP FUNCTION works;
DROP EXTENSION idempotency_record;
