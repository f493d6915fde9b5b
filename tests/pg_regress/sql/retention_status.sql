-- The view retention_status: whether the purge works, in one SELECT.
\set VERBOSITY sqlstate
SET client_min_messages = warning;
SET TimeZone = 'UTC';
CREATE EXTENSION idempotency_record;
-- Records are changed by hand as a superuser can who means it: the triggers that keep them as they are do not fire.
CREATE PROCEDURE tamper(statement text) LANGUAGE plpgsql SET session_replication_role = replica AS 'BEGIN EXECUTE statement; END';

SELECT relname, obj_description(oid) IS NOT NULL AS commented FROM pg_class WHERE relname = 'retention_status';
-- Nothing is there to purge.
SELECT count(*) FROM retention_status;

-- What it shows of a time is when that was, or is true for a time that is told.
CREATE VIEW status AS
    SELECT kind, name, estimated_records AS records, oldest, retention, expired, purged_before IS NOT NULL AS fence,
           last_purge <= clock_timestamp() AND last_purge > clock_timestamp() - interval '1 hour' AS purged, last_duration >= interval '0' AND last_duration < interval '1 hour' AS timed,
           last_deleted AS deleted
      FROM retention_status;

-- Records without a policy, policies without a record, and both.
INSERT INTO account VALUES (1, 1000);
INSERT INTO operation_policy (operation, retention) VALUES ('debit:v1', '1 hour'), ('unused:v1', '3 days'), ('null:v1', NULL);
INSERT INTO subscriber_policy VALUES ('a', '1 month'), ('unused', '1 year');
TABLE status;
INSERT INTO request_result (account_id, operation, request_key, request, response, created_at)
SELECT 1, operation, made, '{}', '{}', made::timestamptz
  FROM unnest(ARRAY['debit:v1', 'credit:v1', 'by hand']) AS operation,
       unnest(ARRAY['2020-01-01 00:00+00', '2020-01-02 00:00+00', '2500-01-01 00:00+00', '2501-01-01 00:00+00']) AS made;
INSERT INTO processed_message (subscriber, message_id, account_id, created_at)
SELECT subscriber, md5(made)::uuid, 1, made::timestamptz
  FROM unnest(ARRAY['a', 'b', 'B']) AS subscriber, unnest(ARRAY['2021-01-01 00:00+00', '2021-01-02 00:00+00', '2021-01-03 00:00+00', '2502-01-01 00:00+00']) AS made;
TABLE status;
-- A debit of now has not expired, and the setting counts for those without a policy.
SELECT debit_once(1, 'now', 1), credit_once(1, 'now', 1);
CALL tamper($t$UPDATE request_result SET created_at = clock_timestamp() - interval '50 minutes' WHERE request_key = 'now'$t$);
SELECT name, records, oldest, retention, expired FROM status WHERE kind = 'operation';
SET idempotency_record.retention = '40min';
SET idempotency_record.message_retention = '30d';
SELECT kind, name, records, retention, expired FROM status;
RESET idempotency_record.retention;
RESET idempotency_record.message_retention;

-- After a purge.
CALL tamper($t$UPDATE request_result SET created_at = '2400-01-01 00:00+00' WHERE request_key = 'now'$t$);
SELECT purge_expired_keys('1000 days');
TABLE status;
CALL purge();
TABLE status;
SELECT purge_expired_keys('0'), purge_processed_messages();
SELECT kind, name, records, oldest, expired, fence, deleted FROM status;
-- The fence is the fence, and stays where everything else is gone.
SELECT count(*) FROM retention_status JOIN retention_fence USING (kind, name) WHERE retention_status.purged_before = retention_fence.purged_before;
CALL tamper($t$DELETE FROM request_result$t$);
CALL tamper($t$DELETE FROM processed_message$t$);
DELETE FROM operation_policy;
DELETE FROM subscriber_policy;
DELETE FROM purge_progress;
TABLE status;
DELETE FROM retention_fence;
INSERT INTO retention_fence VALUES ('operation', 'x', '2022-01-01 00:00+00'), ('subscriber', 'x', '2023-01-01 00:00+00');
SELECT kind, name, purged_before, last_purge, last_duration, last_deleted FROM retention_status;
DELETE FROM retention_fence;

-- What waits is counted up to 100,000. How many records there are is an estimate for a table of more than 300 pages.
INSERT INTO request_result (account_id, operation, request_key, request, response, created_at)
SELECT 1, 'debit:v1', i, '{}', '{}', '2020-01-01 00:00+00'::timestamptz + i * interval '1 second' FROM generate_series(1, 100002) AS i;
SELECT name, records BETWEEN 50000 AND 150000 AS records, oldest, expired FROM status;
CALL tamper($t$DELETE FROM request_result WHERE request_key::int > 99999$t$);
SELECT name, records BETWEEN 50000 AND 150000 AS records, oldest, expired FROM status;
CALL tamper($t$TRUNCATE request_result$t$);

-- The worker: none here, and it says what is missing.
SELECT DISTINCT worker FROM retention_setting();
INSERT INTO operation_policy (operation, retention) VALUES ('debit:v1', '1 hour');
SELECT worker FROM retention_status;

-- It reads with its owner's rights, who lets others see it, and not the tables: SELECT on the view and EXECUTE on the function.
INSERT INTO request_result (account_id, operation, request_key, request, response, created_at) VALUES (1, 'debit:v1', 'k', '{}', '{}', '2020-01-01 00:00+00');
CREATE ROLE regress_ir_status;
SET ROLE regress_ir_status;
SELECT count(*) FROM retention_status;
RESET ROLE;
GRANT SELECT ON retention_status TO regress_ir_status;
SET ROLE regress_ir_status;
SELECT count(*) FROM retention_status;
RESET ROLE;
GRANT EXECUTE ON FUNCTION retention_setting() TO regress_ir_status;
SET ROLE regress_ir_status;
SELECT kind, name, estimated_records, oldest, retention, expired, worker FROM retention_status;
SELECT * FROM retention_setting();
TABLE request_result;
TABLE retention_fence;
TABLE purge_progress;
DELETE FROM retention_status;
UPDATE retention_status SET expired = 0;
INSERT INTO retention_status (kind) VALUES ('operation');
RESET ROLE;
-- Nobody can write to it.
DELETE FROM retention_status;
REVOKE SELECT ON retention_status FROM regress_ir_status;
SET ROLE regress_ir_status;
SELECT count(*) FROM retention_status;
RESET ROLE;
GRANT SELECT ON retention_status TO regress_ir_status;

-- It writes nothing, and needs no transaction that does; also in an old snapshot it shows that snapshot's.
BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY;
SELECT kind, name, estimated_records, expired FROM retention_status;
SELECT pg_current_xact_id_if_assigned() IS NULL AS no_transaction_id;
COMMIT;

-- Temporary tables and functions, whatever the search path, and a setting of the planner, change nothing.
CREATE SCHEMA hostile;
CREATE FUNCTION hostile.retention_setting(OUT retention interval, OUT message_retention interval, OUT worker text) RETURNS SETOF record LANGUAGE sql AS $$SELECT interval '1 second', interval '1 second', 'on'$$;
CREATE TEMPORARY TABLE request_result (LIKE public.request_result);
CREATE TEMPORARY TABLE processed_message (LIKE public.processed_message);
CREATE TEMPORARY TABLE operation_policy (LIKE public.operation_policy);
CREATE TEMPORARY TABLE purge_progress (LIKE public.purge_progress);
CREATE TEMPORARY TABLE retention_fence (LIKE public.retention_fence);
INSERT INTO pg_temp.operation_policy VALUES ('hostile:v1', 'raise', 'full', '1 day');
SET search_path = pg_temp, hostile, public, pg_catalog;
SELECT kind, name, estimated_records, oldest, retention, expired, worker FROM public.retention_status;
SET search_path = '';
SELECT kind, name, estimated_records, oldest, retention, expired, worker FROM public.retention_status;
SET search_path = public;
SET enable_indexscan = off;
SET enable_indexonlyscan = off;
SET enable_bitmapscan = off;
SELECT kind, name, estimated_records, oldest, retention, expired FROM retention_status;
RESET enable_indexscan;
RESET enable_indexonlyscan;
RESET enable_bitmapscan;
DROP TABLE pg_temp.request_result, pg_temp.processed_message, pg_temp.operation_policy, pg_temp.purge_progress, pg_temp.retention_fence;
DROP SCHEMA hostile CASCADE;

-- It follows its tables to another schema's name, and goes with the extension.
CREATE SCHEMA app;
DROP VIEW status;
DROP EXTENSION idempotency_record;
CREATE EXTENSION idempotency_record SCHEMA app;
INSERT INTO app.account VALUES (1, 10);
SELECT app.debit_once(1, 'k', 1);
ALTER SCHEMA app RENAME TO "moved App";
SELECT kind, name, estimated_records, expired FROM "moved App".retention_status;
DROP EXTENSION idempotency_record;
SELECT to_regclass('"moved App".retention_status');
DROP SCHEMA "moved App";
DROP OWNED BY regress_ir_status;
DROP ROLE regress_ir_status;
