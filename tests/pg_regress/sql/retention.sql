-- How long records are kept: as the policies of operations and subscribers say, else the settings, and never less than the
-- operator's minimum.
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

-- The settings, with what they are without anybody's doing.
SELECT name, setting, unit, context, vartype, min_val, source FROM pg_settings WHERE name LIKE 'idempotency\_record.%' ORDER BY name COLLATE "C";
SELECT name FROM pg_settings WHERE name LIKE 'idempotency\_record.%' AND coalesce(short_desc, '') = '';
SELECT current_setting('idempotency_record.retention') AS retention, current_setting('idempotency_record.message_retention') AS message_retention,
       current_setting('idempotency_record.minimum_retention') AS minimum_retention, current_setting('idempotency_record.clock_skew') AS clock_skew,
       current_setting('idempotency_record.purge_interval') AS purge_interval;
SELECT retention, message_retention, worker FROM retention_setting();

-- Units: seconds where none is given, and whatever the server knows.
SET idempotency_record.retention = 90;
SELECT retention, current_setting('idempotency_record.retention') AS shown FROM retention_setting();
SET idempotency_record.retention = '36h';
SELECT retention, current_setting('idempotency_record.retention') AS shown FROM retention_setting();
SET idempotency_record.retention = '30d';
SELECT retention, current_setting('idempotency_record.retention') AS shown FROM retention_setting();
SET idempotency_record.retention = '7200000ms';
SELECT retention, current_setting('idempotency_record.retention') AS shown FROM retention_setting();
SET idempotency_record.message_retention = 2147483647;
SELECT message_retention, current_setting('idempotency_record.message_retention') AS shown FROM retention_setting();
SET idempotency_record.retention = '1s';
SELECT retention FROM retention_setting();
RESET idempotency_record.retention;
RESET idempotency_record.message_retention;
SELECT retention, message_retention FROM retention_setting();

-- A retention that is no time, negative, too long for the setting or nothing that the server understands is refused, and what
-- was set stays; no minimum, no skew and no interval is zero, and never negative. Where the worker's settings come from is the
-- server's configuration alone.
SELECT name, value, (refusal(format('SET idempotency_record.%s = %L', name, value))).code
  FROM unnest(ARRAY['retention', 'message_retention', 'minimum_retention', 'clock_skew']) AS name,
       unnest(ARRAY['0', '-1', '-1d', '1ms', '2147483648', '25000d', 'two days', '1 fortnight', '']) AS value ORDER BY name, value COLLATE "C";
SELECT name, (refusal(format('SET idempotency_record.%s = %L', name, '1'))).code FROM unnest(ARRAY['purge_interval', 'databases']) AS name;
RESET idempotency_record.minimum_retention;
RESET idempotency_record.clock_skew;
SELECT retention, message_retention FROM retention_setting();

-- Only a superuser sets them, in whatever way, and everybody may know them.
CREATE ROLE regress_ir_retention;
SET ROLE regress_ir_retention;
SELECT name, (refusal(format('SET idempotency_record.%s = %L', name, '1d'))).code AS set,
       (refusal(format('SELECT set_config(%L, %L, true)', 'idempotency_record.' || name, '1d'))).code AS set_config,
       (refusal(format('ALTER ROLE regress_ir_retention SET idempotency_record.%s = %L', name, '1d'))).code AS alter_role,
       (refusal(format('CREATE FUNCTION pg_temp.f() RETURNS int SET idempotency_record.%s = %L LANGUAGE sql AS %L', name, '1d', 'SELECT 1'))).code AS function
  FROM unnest(ARRAY['retention', 'message_retention', 'minimum_retention', 'clock_skew', 'require_key']) AS name;
SHOW idempotency_record.retention;
SHOW idempotency_record.minimum_retention;
RESET ROLE;
DROP ROLE regress_ir_retention;

-- A policy's retention: nothing, less than nothing, in any month, and for ever are refused where they are written.
INSERT INTO subscriber_policy VALUES ('s', NULL);
SELECT retention, (refusal(format('INSERT INTO operation_policy (operation, retention) VALUES (%L, %L)', 'r:v' || n, retention))).code AS operation,
       (refusal(format('INSERT INTO subscriber_policy VALUES (%L, %L)', n, retention))).code AS subscriber
  FROM unnest(ARRAY['0', '-1 microsecond', '-1 day', '-1 month', '1 month -29 days', '1 day -24 hours', '12 months -365 days', '1000 years 1 day',
                    '178000000 years', 'two', '1 month -27 days', '1 microsecond', '1000 years']) WITH ORDINALITY AS given (retention, n) ORDER BY n;
SELECT (refusal($$INSERT INTO operation_policy (operation, retention) VALUES ('r:v100', 'infinity')$$)).code <> '00000' AS operation,
       (refusal($$INSERT INTO subscriber_policy VALUES ('t', 'infinity')$$)).code <> '00000' AS subscriber;
DELETE FROM operation_policy;
DELETE FROM subscriber_policy;
-- A subscriber is any text of 1 to 255 bytes, as in a message, and has one policy.
INSERT INTO subscriber_policy VALUES (NULL, '1 day');
INSERT INTO subscriber_policy VALUES ('', '1 day');
INSERT INTO subscriber_policy VALUES (repeat('s', 256), '1 day');
INSERT INTO subscriber_policy VALUES (repeat('é', 128), '1 day');
INSERT INTO subscriber_policy VALUES (repeat('s', 255), '1 day'), ('a subscriber, of whatever name', '1 day'), ('S', '1 day'), ('s', '1 day');
INSERT INTO subscriber_policy VALUES ('s', '2 days');
DELETE FROM subscriber_policy;

-- Records of several operations and of each age. Those of the future are from a clock that was set back.
INSERT INTO account VALUES (1, 1000);
CREATE TABLE age (age interval PRIMARY KEY, name text);
INSERT INTO age VALUES ('-1 day', 'future'), ('0', 'new'), ('50 minutes', '50m'), ('70 minutes', '70m'), ('47 hours', '47h'), ('49 hours', '49h'),
                       ('167 hours', '167h'), ('169 hours', '169h'), ('31 days', '31d');
CREATE PROCEDURE fill() LANGUAGE sql SET session_replication_role = replica AS $$
    DELETE FROM request_result;
    DELETE FROM processed_message;
    INSERT INTO request_result (account_id, operation, request_key, request, response, created_at)
    SELECT 1, operation, name, '{"amount": 1}', '{"balance": 0}', clock_timestamp() - age
      FROM age, unnest(ARRAY['debit:v1', 'long:v1', 'null:v1', 'short:v1', 'no operation']) AS operation;
    INSERT INTO processed_message (subscriber, message_id, account_id, created_at)
    SELECT subscriber, md5(name)::uuid, 1, clock_timestamp() - age FROM age, unnest(ARRAY['default', 'long', 'short']) AS subscriber;
$$;
CREATE VIEW kept_keys AS
    SELECT operation, string_agg(request_key, ' ' ORDER BY created_at DESC) AS kept FROM request_result GROUP BY operation ORDER BY operation;
CREATE VIEW kept_messages AS
    SELECT subscriber, string_agg(age.name, ' ' ORDER BY created_at DESC) AS kept
      FROM processed_message JOIN age ON message_id = md5(age.name)::uuid GROUP BY subscriber ORDER BY subscriber;
-- How long before now each fence is; it lies a little further back, by the time that has passed since the purge.
CREATE VIEW fences AS
    SELECT kind, fence.name, (SELECT max(retention) FROM unnest(ARRAY[interval '0', '1 hour', '90 minutes', '2 hours', '48 hours', '100 hours', '7 days', '30 days']) AS retention
                         WHERE retention <= clock_timestamp() - purged_before) AS purged_up_to
      FROM retention_fence AS fence ORDER BY kind, fence.name;

-- Each operation by its own policy, the others by the setting: what is older goes, what is younger stays.
CALL fill();
INSERT INTO operation_policy (operation, retention) VALUES ('short:v1', '1 hour'), ('long:v1', '30 days'), ('null:v1', NULL), ('unused:v1', '2 hours');
SELECT purge_expired_keys();
TABLE kept_keys;
TABLE fences;
SELECT purge_expired_keys();
-- The messages are untouched by that, and have their own.
TABLE kept_messages;
INSERT INTO subscriber_policy VALUES ('short', '1 hour'), ('long', '30 days'), ('unused', '2 hours');
SELECT purge_processed_messages();
TABLE kept_messages;
TABLE fences;
SELECT purge_processed_messages();
TABLE kept_keys;

-- A policy that changes counts from the next purge on: a longer one brings nothing back, and a shorter one takes more.
UPDATE operation_policy SET retention = '100 hours' WHERE operation = 'short:v1';
UPDATE operation_policy SET retention = '90 minutes' WHERE operation = 'long:v1';
SELECT purge_expired_keys();
TABLE kept_keys;
DELETE FROM operation_policy;
UPDATE subscriber_policy SET retention = '48 hours' WHERE subscriber = 'long';
DELETE FROM subscriber_policy WHERE subscriber = 'short';
SELECT purge_processed_messages();
TABLE kept_messages;
-- The settings of the moment count, for those that declare nothing.
SET idempotency_record.retention = '1h';
SET idempotency_record.message_retention = '100h';
SELECT purge_expired_keys(), purge_processed_messages();
TABLE kept_keys;
TABLE kept_messages;
RESET idempotency_record.retention;
RESET idempotency_record.message_retention;
-- No fence has gone back.
TABLE fences;

-- A retention that is given counts for all, whatever their policies say.
CALL fill();
INSERT INTO operation_policy (operation, retention) VALUES ('short:v1', '1 hour'), ('long:v1', '30 days');
SELECT purge_expired_keys('168 hours'), purge_processed_messages('30 days');
TABLE kept_keys;
TABLE kept_messages;
SELECT purge_expired_keys('0'), purge_processed_messages('0');
TABLE kept_keys;
TABLE kept_messages;
SELECT retention, (refusal(format('SELECT purge_processed_messages(%L)', retention))).code, (refusal(format('SELECT purge_processed_messages(%L)', retention))).message
  FROM unnest(ARRAY[NULL, '-1 microsecond', '-1 day', '1 month -31 days', '-178000000 years']) AS retention;

-- What becomes of a record does not depend on what it is: a cancelled request, a saved refusal and one that is kept as its
-- fingerprint are purged like any other, and a version, which does not expire, is not.
CALL tamper($t$DELETE FROM request_result$t$);
CALL tamper($t$DELETE FROM processed_message$t$);
DELETE FROM operation_policy;
INSERT INTO operation_policy (operation, refusals, stored_request) VALUES ('debit:v1', 'save', 'fingerprint');
SELECT debit_once(1, 'refused', 5000), debit_once(1, 'digest', 1), cancel_request(1, 'credit:v1', 'cancelled') IS NULL AS cancelled, accept_version('s', 'e', 1);
SELECT purge_expired_keys();
CALL tamper($t$UPDATE request_result SET created_at = created_at - interval '49 hours'$t$);
UPDATE accepted_version SET accepted_at = accepted_at - interval '10 years';
SELECT purge_expired_keys();
SELECT count(*) FROM accepted_version;
DELETE FROM operation_policy;

-- The minimum: a purge with less is refused, and nothing is deleted, neither of those that are kept for longer; no fence is
-- moved.
DELETE FROM subscriber_policy;
DELETE FROM retention_fence;
DELETE FROM purge_progress;
CALL fill();
SET idempotency_record.minimum_retention = '2h';
\x on
SELECT * FROM refusal($$SELECT purge_expired_keys('119 minutes')$$);
SELECT * FROM refusal($$SELECT purge_processed_messages('119 minutes')$$);
INSERT INTO operation_policy (operation, retention) VALUES ('short:v1', '1 hour');
SELECT * FROM refusal($$SELECT purge_expired_keys()$$);
INSERT INTO subscriber_policy VALUES ('short', '1 hour');
SELECT * FROM refusal($$SELECT purge_processed_messages()$$);
\x off
SELECT retention, (refusal(format('SELECT purge_expired_keys(%L)', retention))).code AS keys, (refusal(format('SELECT purge_processed_messages(%L)', retention))).code AS messages
  FROM unnest(ARRAY['0', '-1 day', '1 microsecond', '2 hours -1 microsecond']) AS retention;
CALL purge();
-- Also where it is the subscriber's retention alone that is too short, after all operations, or one that has no records at all.
DELETE FROM operation_policy;
CALL purge();
DELETE FROM subscriber_policy;
INSERT INTO operation_policy (operation, retention) VALUES ('unused:v1', '1 hour');
SELECT purge_expired_keys();
CALL purge();
DELETE FROM operation_policy;
-- And where it is the setting's.
SET idempotency_record.message_retention = '1h';
SELECT purge_processed_messages();
CALL purge();
RESET idempotency_record.message_retention;
SET idempotency_record.retention = '1h';
SELECT purge_expired_keys();
CALL purge();
RESET idempotency_record.retention;
SELECT (SELECT count(*) FROM request_result) AS records, (SELECT count(*) FROM processed_message) AS messages,
       (SELECT count(*) FROM retention_fence) AS fences, (SELECT count(*) FROM purge_progress) AS progress;
-- As long as the minimum is long enough.
SELECT purge_expired_keys('2 hours'), purge_processed_messages('2 hours');
TABLE kept_keys;
TABLE kept_messages;
-- Without one, everything is.
SET idempotency_record.minimum_retention = 0;
SELECT purge_expired_keys('0'), purge_processed_messages('0');
RESET idempotency_record.minimum_retention;

-- In a transaction that is rolled back a purge did nothing, fence and progress included; READ ONLY it is 25006.
CALL fill();
DELETE FROM retention_fence;
DELETE FROM purge_progress;
BEGIN;
SELECT purge_expired_keys(), purge_processed_messages();
SELECT (SELECT count(*) FROM retention_fence) AS fences, (SELECT count(*) FROM purge_progress) AS progress;
ROLLBACK;
SELECT (SELECT count(*) FROM request_result) AS records, (SELECT count(*) FROM processed_message) AS messages,
       (SELECT count(*) FROM retention_fence) AS fences, (SELECT count(*) FROM purge_progress) AS progress;
BEGIN READ ONLY;
SAVEPOINT s;
SELECT purge_expired_keys();
ROLLBACK TO s;
SELECT purge_processed_messages();
ROLLBACK TO s;
SELECT purge_processed_messages('1 day');
ROLLBACK;

-- What a purge remembers.
SELECT purge_expired_keys(), purge_processed_messages();
SELECT kind, name, deleted, purged_at <= clock_timestamp() AND purged_at > clock_timestamp() - interval '1 hour' AS dated,
       duration >= interval '0' AND duration < interval '1 hour' AS timed, deleted_before <= clock_timestamp() AS reached
  FROM purge_progress ORDER BY kind, name;
TABLE fences;

-- A setting of the database counts in a new session. One that was written where nobody knew better is no shorter retention
-- than the default.
CREATE PROCEDURE set_database(setting text, value text) LANGUAGE plpgsql AS $$
BEGIN
    EXECUTE format('ALTER DATABASE %I SET %s = %L', current_database(), setting, value);
END $$;
CALL set_database('idempotency_record.retention', '5d');
CALL set_database('idempotency_record.retention', '0');
\c -
\set VERBOSITY sqlstate
SET client_min_messages = warning;
SELECT expires_at - executed_at AS retention FROM debit_once_outcome(1, 'database', 1);
\c -
SET client_min_messages = error;
CALL set_database('idempotency_record.retention', '0');
CALL set_database('idempotency_record.message_retention', '-1');
\c -
\set VERBOSITY sqlstate
SET client_min_messages = error;
SELECT expires_at - executed_at AS retention FROM debit_once_outcome(1, 'database', 1);
SELECT retention, message_retention FROM retention_setting();
DO $$ BEGIN EXECUTE format('ALTER DATABASE %I RESET ALL', current_database()); END $$;
\c -
\set VERBOSITY sqlstate
SET client_min_messages = warning;

-- A table of policies that is not what it was created as is not taken for one without.
BEGIN;
ALTER EXTENSION idempotency_record DROP VIEW retention_status;
DROP VIEW retention_status;
ALTER TABLE subscriber_policy DROP CONSTRAINT subscriber_policy_retention_check, ALTER COLUMN retention TYPE text;
SELECT code FROM refusal('SELECT purge_processed_messages()');
SELECT code FROM refusal($$SELECT purge_processed_messages('1 day')$$);
ROLLBACK;
BEGIN;
ALTER TABLE purge_lock RENAME TO lock_of_purge;
SELECT code FROM refusal('SELECT purge_expired_keys()');
ROLLBACK;
-- Without the row that it locks no purge runs.
BEGIN;
DELETE FROM purge_lock;
SET LOCAL client_min_messages = error;
SELECT purge_expired_keys('0');
ROLLBACK;
SELECT purge_expired_keys('0') > 0 AS deleted;

DROP VIEW kept_keys, kept_messages, fences;
DROP TABLE age;
DROP PROCEDURE fill;
DROP PROCEDURE set_database;
DROP FUNCTION refusal;
DROP EXTENSION idempotency_record;
