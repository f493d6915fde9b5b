-- What purge_expired_keys promises.
\set VERBOSITY sqlstate
SET client_min_messages = warning;
CREATE EXTENSION idempotency_record;
-- Records are changed by hand as a superuser can who means it: the triggers that keep them as they are do not fire.
CREATE PROCEDURE tamper(statement text) LANGUAGE plpgsql SET session_replication_role = replica AS 'BEGIN EXECUTE statement; END';

CREATE FUNCTION refusal(call text, OUT code text, OUT message text, OUT detail text, OUT hint text) LANGUAGE plpgsql AS $$
BEGIN
    EXECUTE call;
    code := '00000';
EXCEPTION WHEN OTHERS THEN
    GET STACKED DIAGNOSTICS code = RETURNED_SQLSTATE, message = MESSAGE_TEXT, detail = PG_EXCEPTION_DETAIL,
        hint = PG_EXCEPTION_HINT;
END $$;

-- An empty table is purged of nothing.
SELECT purge_expired_keys('1 day');
SELECT purge_expired_keys('0');

INSERT INTO account VALUES (1, 100000);
CREATE PROCEDURE fill() LANGUAGE sql SET session_replication_role = replica AS $$
    DELETE FROM request_result;
    INSERT INTO request_result (account_id, operation, request_key, request, response, created_at)
    SELECT 1, 'debit:v1', name, '{"amount": 1}', '{"balance": 0}', clock_timestamp() - age::interval
      FROM (VALUES ('ten days', '10 days'), ('two days', '2 days'), ('25 hours', '25 hours'), ('23 hours', '23 hours'),
                   ('new', '0'), ('from the future', '-1 day')) AS record (name, age);
$$;
CREATE VIEW kept AS
    SELECT string_agg(request_key, ', ' ORDER BY created_at) AS kept FROM request_result;

-- What is older than the retention is deleted and counted, and what is younger is kept.
CALL fill();
SELECT purge_expired_keys('24 hours');
TABLE kept;
SELECT purge_expired_keys('24 hours');
TABLE kept;
SELECT purge_expired_keys('22 hours');
TABLE kept;

-- A retention of zero deletes whatever is not younger than the call.
SELECT purge_expired_keys('0');
TABLE kept;

-- A long retention keeps everything. One that reaches back before the calendar begins is refused, and by no SQLSTATE
-- that asks for a retry.
CALL fill();
SELECT purge_expired_keys('5000 years');
SELECT purge_expired_keys('100000 years');
SELECT purge_expired_keys('178000000 years');
TABLE kept;

-- A NULL or negative retention is refused, in whatever unit, and deletes nothing.
\x on
SELECT * FROM refusal('SELECT purge_expired_keys(NULL)');
\x off
SELECT retention, code, message
  FROM unnest(ARRAY['-1 microsecond', '-1 day', '-1 month', '1 month -31 days', '1 day -25 hours', '-1 month 29 days',
                    '12 months -365 days', '-178000000 years']) AS retention,
       refusal(format('SELECT purge_expired_keys(%L)', retention));
TABLE kept;

-- Where intervals can be infinite (17 and later), an infinite retention keeps everything and a negative one is refused.
DO $$
DECLARE
    code text;
BEGIN
    IF current_setting('server_version_num')::int >= 170000 THEN
        IF purge_expired_keys('infinity') <> 0 THEN
            RAISE EXCEPTION USING ERRCODE = 'assert_failure';
        END IF;
        SELECT r.code INTO code FROM refusal($q$SELECT purge_expired_keys('-infinity')$q$) AS r;
        IF code <> '22023' THEN
            RAISE EXCEPTION USING ERRCODE = 'assert_failure';
        END IF;
    END IF;
END $$;
TABLE kept;

-- A record with an infinite age is deleted, and one that never ages is kept.
INSERT INTO request_result (account_id, operation, request_key, request, response, created_at) VALUES
    (1, 'debit:v1', 'always', '{}', '{}', '-infinity'), (1, 'debit:v1', 'never', '{}', '{}', 'infinity');
SELECT purge_expired_keys('5000 years');
TABLE kept;

-- The records of every account and operation are purged.
INSERT INTO account VALUES (2, 0);
INSERT INTO request_result (account_id, operation, request_key, request, response, created_at) VALUES
    (2, 'debit:v1', 'a', '{}', '{}', now() - interval '1 year'), (2, 'other:v1', 'b', '{}', '{}', now() - interval '1 year');
SELECT purge_expired_keys('300 days');
TABLE kept;

-- Messages have a retention of their own.
INSERT INTO processed_message (subscriber, message_id, account_id, created_at)
VALUES ('s', 'a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11', 1, now() - interval '1 year');
SELECT purge_expired_keys('0');
SELECT count(*) FROM processed_message;

-- A purged key that is not dated is a new key: it executes again, also with another request. Until then it replays.
CALL tamper($t$DELETE FROM request_result$t$);
SELECT debit_once(1, 'k', 1);
SELECT purge_expired_keys('1 hour');
SELECT debit_once(1, 'k', 1);
CALL tamper($t$UPDATE request_result SET created_at = created_at - interval '2 hours'$t$);
SELECT debit_once(1, 'k', 1);
SELECT debit_once(1, 'k', 2);
SELECT purge_expired_keys('1 hour');
SELECT debit_once(1, 'k', 2);
SELECT debit_once(1, 'k', 2);
SELECT balance FROM account WHERE account_id = 1;

-- Age counts from the call: a purge of what is as old as the transaction deletes the earlier key (k) and not the one
-- that was executed late in that transaction. A whole second lies between them, more than a busy machine pauses.
BEGIN;
SELECT pg_sleep(1);
SELECT debit_once(1, 'in a long transaction', 1);
SELECT purge_expired_keys(clock_timestamp() - now() - interval '10 milliseconds');
SELECT debit_once(1, 'in a long transaction', 1);
ROLLBACK;

-- A purge that is rolled back deleted nothing.
CALL fill();
BEGIN;
SELECT purge_expired_keys('24 hours');
TABLE kept;
ROLLBACK;
TABLE kept;

-- The balance is not touched by a purge, and a READ ONLY transaction refuses it with 25006.
SELECT balance FROM account WHERE account_id = 1;
BEGIN READ ONLY;
SELECT purge_expired_keys('24 hours');
ROLLBACK;
TABLE kept;

-- More than one purge can run in one transaction and in one statement.
SELECT purge_expired_keys('24 hours'), purge_expired_keys('24 hours');

-- Each operation's records are found by their age: an index begins with operation and created_at, and nothing limits which
-- rows it holds.
SELECT count(*) > 0 AS indexed
  FROM pg_index JOIN pg_attribute AS first ON first.attrelid = indrelid AND first.attnum = indkey[0]
       JOIN pg_attribute AS second ON second.attrelid = indrelid AND second.attnum = indkey[1]
 WHERE indrelid = 'request_result'::regclass AND first.attname = 'operation' AND second.attname = 'created_at'
   AND indisvalid AND indpred IS NULL;

-- A purge of little or nothing out of many records reads that index and not the table, whatever was purged before in
-- this session. The statistics of the running transaction count, within one statement, since they are reported and reset
-- between statements.
CREATE FUNCTION purge_counting_scans(retention interval, OUT deleted bigint, OUT table_scans bigint, OUT index_scanned boolean)
LANGUAGE plpgsql AS $$
DECLARE
    heap CONSTANT oid := 'request_result'::regclass;
    index CONSTANT oid := 'request_result_operation_created_at_idx'::regclass;
    index_scans bigint;
BEGIN
    table_scans := pg_stat_get_xact_numscans(heap);
    index_scans := pg_stat_get_xact_numscans(index);
    deleted := purge_expired_keys(retention);
    table_scans := pg_stat_get_xact_numscans(heap) - table_scans;
    index_scanned := pg_stat_get_xact_numscans(index) > index_scans;
END $$;
CREATE PROCEDURE fill_many(name text) LANGUAGE sql AS $$
    INSERT INTO request_result (account_id, operation, request_key, request, response, created_at)
    SELECT 1, 'debit:v1', name || i, '{"amount": 1}', '{"balance": 0}', clock_timestamp() - i * interval '1 minute'
      FROM generate_series(1, 20000) AS i;
$$;
CALL tamper($t$DELETE FROM request_result$t$);
-- Also where the planner knows nothing of the table yet.
CALL fill_many('first ');
SELECT * FROM purge_counting_scans('20001 minutes');
SELECT * FROM purge_counting_scans('19990 minutes');
SELECT purge_expired_keys('1000 minutes');
CALL fill_many('second ');
ANALYZE request_result;
SELECT * FROM purge_counting_scans('19990 minutes');
SELECT * FROM purge_counting_scans('19990 minutes');
-- The same measurement sees a scan of the table.
CREATE FUNCTION a_scan_is_seen() RETURNS boolean LANGUAGE plpgsql AS $$
DECLARE
    before CONSTANT bigint := pg_stat_get_xact_numscans('request_result'::regclass);
BEGIN
    PERFORM count(*) FROM request_result WHERE request::text <> '';
    RETURN pg_stat_get_xact_numscans('request_result'::regclass) > before;
END $$;
SELECT a_scan_is_seen();

DROP FUNCTION purge_counting_scans, a_scan_is_seen;
DROP PROCEDURE fill_many;
DROP VIEW kept;
DROP PROCEDURE fill;
DROP FUNCTION refusal;
DROP EXTENSION idempotency_record;
