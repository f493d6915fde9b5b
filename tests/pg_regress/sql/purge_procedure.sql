-- CALL purge(...): everything expired, in batches with a commit after each.
\set VERBOSITY sqlstate
SET client_min_messages = warning;
SET TimeZone = 'UTC';
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
INSERT INTO account VALUES (1, 1000);
-- 25 debits and 10 messages that are expired, one minute after the other, and some that never will be.
CREATE PROCEDURE fill() LANGUAGE sql SET session_replication_role = replica AS $$
    DELETE FROM request_result;
    DELETE FROM processed_message;
    INSERT INTO request_result (account_id, operation, request_key, request, response, created_at)
    SELECT 1, 'debit:v1', 'old ' || i, '{"amount": 1}', '{"balance": 0}', '2020-01-01 00:00+00'::timestamptz + i * interval '1 minute' FROM generate_series(1, 25) AS i
    UNION ALL VALUES (1, 'debit:v1', 'young', jsonb '{"amount": 1}', jsonb '{"balance": 0}', '2500-01-01 00:00+00'::timestamptz),
                     (1, 'debit:v1', 'younger', '{"amount": 1}', '{"balance": 0}', '2500-01-02 00:00+00');
    INSERT INTO processed_message (subscriber, message_id, account_id, created_at)
    SELECT 's', md5(i::text)::uuid, 1, '2020-01-01 00:00+00'::timestamptz + i * interval '1 hour' FROM generate_series(1, 10) AS i
    UNION ALL VALUES ('s', md5('young')::uuid, 1, '2499-01-01 00:00+00'::timestamptz);
$$;
-- As after CREATE EXTENSION.
CREATE PROCEDURE forget() LANGUAGE sql AS $$
    DELETE FROM purge_progress;
    DELETE FROM retention_fence;
$$;
CREATE VIEW books AS
    SELECT (SELECT count(*) FROM request_result WHERE created_at < now()) AS old_records, (SELECT count(*) FROM request_result WHERE created_at > now()) AS young_records,
           (SELECT count(*) FROM processed_message WHERE created_at < now()) AS old_messages, (SELECT count(*) FROM processed_message WHERE created_at > now()) AS young_messages;

-- Nothing to do.
CALL purge();
-- What it did, what it left, and when the oldest that is left was made.
CALL fill();
CALL purge();
TABLE books;
CALL purge();

-- Whatever the size of a batch.
CALL fill();
CALL purge(1);
CALL fill();
CALL purge(7);
CALL fill();
CALL purge(25);
CALL fill();
CALL purge(26);
CALL fill();
CALL purge(1000000, '1 hour');
CALL fill();
CALL purge(p_time_budget => '1 day', p_batch_size => 3);
TABLE books;
-- Records of one time, more than a batch.
CALL fill();
CALL tamper($t$UPDATE request_result SET created_at = '2020-01-01 00:00+00' WHERE created_at < now()$t$);
CALL tamper($t$UPDATE processed_message SET created_at = '-infinity' WHERE created_at < now()$t$);
CALL purge(3);
TABLE books;

-- No batch, one too large, no time and less are refused, with nothing done.
CALL fill();
CALL purge(NULL);
CALL purge(0);
CALL purge(-1);
CALL purge(1000001);
CALL purge(9223372036854775807);
CALL purge(-9223372036854775808);
CALL purge(10, '-1 microsecond');
CALL purge(10, '-1 day');
CALL purge(10, '-100 years');
CALL purge(10, '1 month -31 days');
TABLE books;
-- A time that never ends is no limit.
CALL purge(10, '178000000 years');
CALL fill();

-- Progress is told as NOTICE: a line for each operation and subscriber of which something was deleted.
\set VERBOSITY terse
SET client_min_messages = notice;
CALL purge(10);
CALL purge(10);
SET client_min_messages = warning;
\set VERBOSITY sqlstate

-- It commits, hence it does not run where that is not its own to do: in a transaction block, also one of several statements
-- in one message; in a function; in a block with an exception handler; in a procedure with rights or settings of its own.
CALL fill();
BEGIN;
CALL purge();
ROLLBACK;
DO 'BEGIN END' \; CALL purge();
BEGIN;
SAVEPOINT s;
CALL purge();
ROLLBACK;
\x on
SELECT * FROM refusal('CALL purge()');
\x off
CREATE FUNCTION in_a_function() RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
    deleted bigint;
    remaining bigint;
    oldest timestamptz;
BEGIN
    CALL purge(10, NULL, deleted, remaining, oldest);
    RETURN deleted;
END $$;
SELECT in_a_function();
DO $$
DECLARE
    deleted bigint;
    remaining bigint;
    oldest timestamptz;
BEGIN
    BEGIN
        CALL purge(10, NULL, deleted, remaining, oldest);
    EXCEPTION WHEN division_by_zero THEN
        RETURN;
    END;
END $$;
CREATE PROCEDURE in_a_procedure(INOUT deleted bigint DEFAULT NULL, INOUT remaining bigint DEFAULT NULL, INOUT oldest timestamptz DEFAULT NULL) LANGUAGE plpgsql AS $$
BEGIN
    CALL purge(10, NULL, deleted, remaining, oldest);
END $$;
ALTER PROCEDURE in_a_procedure SET work_mem = '4MB';
CALL in_a_procedure();
ALTER PROCEDURE in_a_procedure RESET ALL;
ALTER PROCEDURE in_a_procedure SECURITY DEFINER;
CALL in_a_procedure();
ALTER PROCEDURE in_a_procedure SECURITY INVOKER;
BEGIN;
DO $$
DECLARE
    deleted bigint;
    remaining bigint;
    oldest timestamptz;
BEGIN
    CALL purge(10, NULL, deleted, remaining, oldest);
END $$;
ROLLBACK;
TABLE books;

-- It runs in a DO block and in a procedure that may commit, and commits what they did before it, too. Work after it is theirs.
CREATE TABLE note (what text);
DO $$
DECLARE
    n_deleted bigint;
    n_remaining bigint;
    since timestamptz;
BEGIN
    INSERT INTO note VALUES ('before');
    CALL purge(10, NULL, n_deleted, n_remaining, since);
    INSERT INTO note VALUES (concat_ws(' ', n_deleted, n_remaining, since));
    COMMIT;
    INSERT INTO note VALUES ('undone');
    RAISE division_by_zero;
END $$;
TABLE note;
TABLE books;
CALL fill();
CALL in_a_procedure();
TABLE books;
-- Also from within a loop over a query.
CALL fill();
TRUNCATE note;
DO $$
DECLARE
    i bigint;
    n_deleted bigint;
    n_remaining bigint;
    since timestamptz;
BEGIN
    FOR i IN SELECT * FROM generate_series(1, 3) LOOP
        CALL purge(100, NULL, n_deleted, n_remaining, since);
        INSERT INTO note VALUES (concat_ws(' ', i, n_deleted, n_remaining, since));
    END LOOP;
END $$;
TABLE note;
-- At each isolation level, where a READ ONLY session is refused with 25006.
CALL fill();
SET default_transaction_isolation = 'repeatable read';
CALL purge(10);
CALL fill();
SET default_transaction_isolation = 'serializable';
CALL purge(10);
RESET default_transaction_isolation;
CALL fill();
SET default_transaction_read_only = on;
CALL purge(10);
RESET default_transaction_read_only;
TABLE books;

-- The budget ends it after a batch, the first in any case; what is left is counted, and the next call goes on.
CALL fill();
CALL forget();
CALL purge(10, '0');
TABLE books;
CALL purge(10, '0');
TABLE books;
CALL purge(10, '0');
TABLE books;
-- Calls with no time at all come to the end of everything: whose purge is the longest ago is next.
DO $$
DECLARE
    n_deleted bigint;
    n_remaining bigint;
    since timestamptz;
BEGIN
    FOR i IN 1..10 LOOP
        CALL purge(10, '0', n_deleted, n_remaining, since);
    END LOOP;
END $$;
TABLE books;

-- An error in the midst leaves the batches before it purged, with fence and progress.
CALL fill();
CALL forget();
CREATE FUNCTION poison() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF OLD.request_key = 'old 13' THEN
        RAISE EXCEPTION USING ERRCODE = 'ZZ013';
    END IF;
    RETURN OLD;
END $$;
CREATE TRIGGER poison BEFORE DELETE ON request_result FOR EACH ROW EXECUTE FUNCTION poison();
CALL purge(5);
TABLE books;
SELECT kind, name, deleted_before, deleted FROM purge_progress;
SELECT kind, name, purged_before < now() AS past FROM retention_fence;
SELECT purge_expired_keys();
TABLE books;
DROP TRIGGER poison ON request_result;
CALL purge(5);
TABLE books;

-- A record that another session holds, here a prepared transaction, is left and counted, and found by the next purge.
CALL fill();
CALL forget();
BEGIN;
SELECT request_key FROM request_result WHERE request_key IN ('old 3', 'old 25') FOR UPDATE;
SELECT count(*) FROM (SELECT FROM processed_message WHERE created_at = '2020-01-01 05:00+00' FOR UPDATE) AS held;
PREPARE TRANSACTION 'holds';
CALL purge(4);
TABLE books;
CALL purge(4);
SELECT purge_expired_keys(), purge_processed_messages();
COMMIT PREPARED 'holds';
CALL purge(4);
TABLE books;
-- So by a purge within a transaction.
CALL fill();
BEGIN;
SELECT request_key FROM request_result WHERE request_key IN ('old 3', 'old 25') FOR UPDATE;
PREPARE TRANSACTION 'holds';
SELECT purge_expired_keys();
SELECT purge_expired_keys();
COMMIT PREPARED 'holds';
SELECT purge_expired_keys();

-- While another purge runs, here in a prepared transaction, a second one returns at once, does nothing, and says so.
CALL fill();
CALL forget();
BEGIN;
SELECT purge_expired_keys('5000 years');
PREPARE TRANSACTION 'purges';
\set VERBOSITY terse
SET client_min_messages = notice;
SELECT purge_expired_keys();
SELECT purge_expired_keys('0');
SELECT purge_processed_messages();
SELECT purge_processed_messages('0');
CALL purge();
SET client_min_messages = warning;
\set VERBOSITY sqlstate
TABLE books;
SELECT count(*) AS fences FROM retention_fence;
COMMIT PREPARED 'purges';
CALL purge();
TABLE books;
-- A purge that was rolled back runs no more.
CALL fill();
BEGIN;
SELECT purge_expired_keys();
PREPARE TRANSACTION 'purges';
ROLLBACK PREPARED 'purges';
CALL purge();

-- What comes to lie below where the last purge came to is found: records that a long transaction committed late, that were
-- restored, or whose clock was set back.
INSERT INTO request_result (account_id, operation, request_key, request, response, created_at) VALUES
    (1, 'debit:v1', 'late', '{}', '{}', '2019-01-01 00:00+00'), (1, 'debit:v1', 'always', '{}', '{}', '-infinity'), (1, 'debit:v1', 'between', '{}', '{}', '2020-01-01 00:10+00');
INSERT INTO processed_message (subscriber, message_id, account_id, created_at) VALUES ('s', md5('late')::uuid, 1, '2018-01-01 00:00+00');
CALL purge(2);
TABLE books;
-- A look that took long is repeated when a hundred times as long has passed, and not before, but for the functions.
INSERT INTO request_result (account_id, operation, request_key, request, response, created_at) VALUES (1, 'debit:v1', 'late', '{}', '{}', '2019-01-01 00:00+00');
UPDATE purge_progress SET sweep_duration = '1 hour', swept_at = clock_timestamp() - interval '98 hours';
CALL purge();
TABLE books;
UPDATE purge_progress SET swept_at = clock_timestamp() - interval '101 hours';
CALL purge();
TABLE books;
INSERT INTO request_result (account_id, operation, request_key, request, response, created_at) VALUES (1, 'debit:v1', 'late', '{}', '{}', '2019-01-01 00:00+00');
UPDATE purge_progress SET sweep_duration = '1 hour', swept_at = clock_timestamp();
CALL purge();
SELECT purge_expired_keys();
-- A longer retention than at the last purge does not move what was reached back; a shorter one goes on from there.
CALL fill();
CALL forget();
TRUNCATE note;
CALL tamper($t$UPDATE request_result SET created_at = clock_timestamp() - interval '10 days' WHERE request_key = 'old 1'$t$);
INSERT INTO operation_policy (operation, retention) VALUES ('debit:v1', '11 days');
SELECT purge_processed_messages() AS deleted;
DO $$
DECLARE
    n_deleted bigint;
    n_remaining bigint;
    since timestamptz;
BEGIN
    CALL purge(10, NULL, n_deleted, n_remaining, since);
    INSERT INTO note VALUES (concat_ws(' ', n_deleted, n_remaining, since < now()));
END $$;
TABLE note;
SELECT string_agg(request_key, ', ' ORDER BY created_at) AS kept FROM request_result;
UPDATE operation_policy SET retention = '9 days';
SELECT deleted_before AS reached FROM purge_progress WHERE name = 'debit:v1' \gset
CALL purge();
SELECT deleted_before > :'reached' AS further FROM purge_progress WHERE name = 'debit:v1';
UPDATE operation_policy SET retention = '100 days';
SELECT deleted_before AS reached FROM purge_progress WHERE name = 'debit:v1' \gset
CALL purge();
SELECT deleted_before = :'reached' AS same FROM purge_progress WHERE name = 'debit:v1';
DELETE FROM operation_policy;

-- Triggers that keep records do not keep a purge from its end, nor the other records, whatever the batch.
CREATE FUNCTION keep() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN RETURN NULL; END$$;
CREATE TRIGGER keep_all BEFORE DELETE ON request_result FOR EACH ROW EXECUTE FUNCTION keep();
CREATE TRIGGER keep_all BEFORE DELETE ON processed_message FOR EACH ROW WHEN (OLD.created_at <> '2020-01-01 05:00+00') EXECUTE FUNCTION keep();
CREATE PROCEDURE refill() LANGUAGE sql AS $$
    ALTER TABLE request_result DISABLE TRIGGER USER;
    ALTER TABLE processed_message DISABLE TRIGGER USER;
    CALL fill();
    CALL forget();
    ALTER TABLE request_result ENABLE TRIGGER USER;
    ALTER TABLE processed_message ENABLE TRIGGER USER;
$$;
CALL refill();
CALL purge();
CALL purge(10);
CALL purge(4);
CALL refill();
CALL purge(1);
CALL purge(1);
SELECT purge_expired_keys(), purge_processed_messages();
CALL tamper($t$UPDATE request_result SET created_at = '2020-01-01 00:00+00' WHERE created_at < now()$t$);
CALL tamper($t$UPDATE processed_message SET created_at = '-infinity' WHERE created_at < now()$t$);
CALL purge(3);
CALL purge(3);
SELECT purge_expired_keys(), purge_processed_messages();
DROP TRIGGER keep_all ON request_result;
DROP TRIGGER keep_all ON processed_message;
CREATE TRIGGER keep_some BEFORE DELETE ON request_result FOR EACH ROW WHEN (OLD.request_key IN ('old 2', 'old 3', 'old 17')) EXECUTE FUNCTION keep();
CALL refill();
CALL purge(1);
SELECT string_agg(request_key, ', ' ORDER BY created_at) AS kept FROM request_result;
CALL refill();
CALL purge(4);
SELECT string_agg(request_key, ', ' ORDER BY created_at) AS kept FROM request_result;
DROP TRIGGER keep_some ON request_result;
-- One that deletes more than it is asked to.
CREATE FUNCTION more() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    DELETE FROM request_result WHERE request_key = 'old ' || (substr(OLD.request_key, 5)::int + 1);
    RETURN NULL;
END $$;
CREATE TRIGGER more AFTER DELETE ON request_result FOR EACH ROW WHEN (OLD.request_key LIKE 'old %') EXECUTE FUNCTION more();
CALL refill();
CALL purge(3);
TABLE books;
DROP TRIGGER more ON request_result;
-- And one that purges itself.
CREATE FUNCTION again() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF pg_trigger_depth() = 1 THEN
        PERFORM purge_expired_keys();
    END IF;
    RETURN NULL;
END $$;
CREATE TRIGGER again AFTER DELETE ON request_result FOR EACH STATEMENT EXECUTE FUNCTION again();
CALL refill();
CALL purge(3);
TABLE books;

DROP EXTENSION idempotency_record CASCADE;
