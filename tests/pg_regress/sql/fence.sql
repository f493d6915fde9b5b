-- The fence: a dated key of which there is no record, and whose record may have been purged, is refused and not executed.
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
-- What a call does: "done", and then it is taken back, or SQLSTATE and, where that is ours, the message.
CREATE FUNCTION outcome(call text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
    result text;
BEGIN
    EXECUTE 'SELECT ' || call INTO result;
    RAISE EXCEPTION USING ERRCODE = 'ZZ000';
EXCEPTION WHEN OTHERS THEN
    RETURN CASE SQLSTATE WHEN 'ZZ000' THEN 'done' WHEN '22023' THEN SQLERRM ELSE SQLSTATE END;
END $$;
-- A UUID of version 7 that was made then, and one that begins like it and says of itself what it likes.
CREATE FUNCTION uuid_like(made timestamptz, version text, variant text DEFAULT 'b') RETURNS text IMMUTABLE LANGUAGE sql AS $$
    SELECT regexp_replace(lpad(to_hex(floor(extract(epoch FROM made) * 1000)::bigint), 12, '0') || version || 'abc' || variant || 'def0123456789ab',
                          '^(.{8})(.{4})(.{4})(.{4})(.{12})$', '\1-\2-\3-\4-\5')
$$;
CREATE FUNCTION v7(made timestamptz) RETURNS text IMMUTABLE LANGUAGE sql AS $$SELECT uuid_like(made, '7')$$;
SELECT v7('2022-02-22 19:22:22+00'), uuid_like('2022-02-22 19:22:22+00', '4', '8');
CREATE VIEW books AS
    SELECT (SELECT string_agg(account_id || ':' || balance, ' ' ORDER BY account_id) FROM account) AS balances,
           (SELECT string_agg(operation || ' ' || request_key, ', ' ORDER BY operation, request_key) FROM request_result) AS records,
           (SELECT string_agg(subscriber || ' ' || message_id, ', ' ORDER BY subscriber, message_id) FROM processed_message) AS messages;
-- A handler whose runs are seen, whatever is rolled back.
CREATE SEQUENCE runs;
CREATE FUNCTION handler(bigint, jsonb) RETURNS jsonb LANGUAGE sql AS $$SELECT jsonb_build_object('run', nextval('runs') > 0)$$;
INSERT INTO account VALUES (1, 1000), (2, 1000);

-- Before any purge there is no fence, and a key of any age executes; one from the future is refused from the first day on.
SELECT debit_once(1, 'a', 1, '-infinity'), debit_once(1, 'b', 1, '1970-01-01 00:00+00'), debit_once(1, v7('2001-01-01 00:00+00'), 1),
       credit_once(1, 'a', 1, '-infinity'), run_once(1, 'run:v1', 'a', '{}', 'handler(bigint, jsonb)', '-infinity'),
       accept_message('s', v7('2001-01-01 00:00+00')::uuid, 1), apply_message_once('s', v7('2001-01-02 00:00+00')::uuid, 1, 1);
SELECT outcome($$debit_once(1, 'c', 1, 'infinity')$$) AS said, outcome($$debit_once(1, v7(now() + interval '1 day'), 1)$$) AS key,
       outcome($$accept_message('s', v7(now() + interval '1 day')::uuid, 1)$$) AS message;
CALL tamper($t$DELETE FROM request_result$t$);
CALL tamper($t$DELETE FROM processed_message$t$);
UPDATE account SET balance = 1000;
SELECT setval('runs', 1, false);

-- A fence in 2022, with a skew of five minutes.
INSERT INTO retention_fence VALUES ('operation', 'debit:v1', '2022-02-22 19:22:22+00'), ('operation', 'credit:v1', '2022-02-22 19:22:22+00'),
    ('operation', 'run:v1', '2022-02-22 19:22:22+00'), ('subscriber', 's', '2022-02-22 19:22:22+00');

-- Every field of the refusal, of a key and of a message, and of one that is too early.
\x on
SELECT * FROM refusal($$SELECT debit_once(1, 'k', 1, '2022-02-22 19:22:22+00')$$);
SELECT * FROM refusal($$SELECT accept_message('s', v7('2022-02-22 19:22:22+00')::uuid, 1)$$);
SELECT * FROM refusal($$SELECT debit_once(1, 'k', 1, now() + interval '1 hour')$$);
SELECT * FROM refusal($$SELECT accept_message('s', v7(now() + interval '1 hour')::uuid, 1)$$);
\x off

-- To the microsecond: at the fence and the skew it is refused, after that it executes. A UUID counts milliseconds, and one that is
-- ahead by more than a hundred years is random, and dates nothing.
SELECT first_sent, outcome(format('debit_once(1, %L, 1, %L)', 'k', first_sent)) AS debit
  FROM unnest(ARRAY['-infinity', '1970-01-01 00:00+00', '2022-02-22 19:22:22+00', '2022-02-22 19:27:22+00', '2022-02-22 19:27:22.000001+00', '2023-01-01 00:00+00',
                    'infinity']::timestamptz[]) AS first_sent;
SELECT made, outcome(format('debit_once(1, %L, 1)', v7(made))) AS debit, outcome(format('accept_message(%L, %L, 1)', 's', v7(made))) AS message
  FROM unnest(ARRAY['1970-01-01 00:00+00', '2022-02-22 19:22:22+00', '2022-02-22 19:27:21.999+00', '2022-02-22 19:27:22+00', '2022-02-22 19:27:22.001+00',
                    '2023-01-01 00:00+00', '9999-01-01 00:00+00']::timestamptz[]) AS made;
SELECT outcome($$debit_once(1, v7(now() + interval '99 years'), 1)$$) AS in_99_years, outcome($$debit_once(1, v7(now() + interval '101 years'), 1)$$) AS in_101_years,
       outcome($$debit_once(1, 'ffffffff-ffff-7abc-bdef-0123456789ab', 1)$$) AS latest, outcome($$debit_once(1, '00000000-0000-7abc-bdef-0123456789ab', 1)$$) AS earliest;
-- With another skew, with none, and with the longest.
SET idempotency_record.clock_skew = 0;
SELECT first_sent, outcome(format('debit_once(1, %L, 1, %L)', 'k', first_sent)) AS debit
  FROM unnest(ARRAY['2022-02-22 19:22:21.999999+00', '2022-02-22 19:22:22+00', '2022-02-22 19:22:22.000001+00']::timestamptz[]) AS first_sent;
SELECT outcome($$debit_once(1, 'k', 1, clock_timestamp())$$) AS now, outcome($$debit_once(1, 'k', 1, clock_timestamp() + interval '1 minute')$$) AS in_a_minute;
SET idempotency_record.clock_skew = '1d';
SELECT first_sent, outcome(format('debit_once(1, %L, 1, %L)', 'k', first_sent)) AS debit
  FROM unnest(ARRAY['2022-02-23 19:22:22+00', '2022-02-23 19:22:22.000001+00']::timestamptz[]) AS first_sent;
SELECT outcome($$debit_once(1, 'k', 1, clock_timestamp() + interval '23 hours')$$) AS in_23_hours, outcome($$debit_once(1, 'k', 1, clock_timestamp() + interval '25 hours')$$) AS in_25_hours;
SET idempotency_record.clock_skew = 2147483647;
SELECT outcome($$debit_once(1, 'k', 1, '2022-02-22 19:22:23+00')$$) AS past, outcome($$debit_once(1, 'k', 1, clock_timestamp() + interval '60 years')$$) AS in_60_years,
       outcome($$debit_once(1, 'k', 1, 'infinity')$$) AS never, outcome($$debit_once(1, 'k', 1, '-infinity')$$) AS always;
RESET idempotency_record.clock_skew;
-- A fence that somebody set to the end or to the beginning of time.
BEGIN;
UPDATE retention_fence SET purged_before = 'infinity';
SELECT outcome($$debit_once(1, 'k', 1, now())$$) AS dated, outcome($$debit_once(1, 'k', 1)$$) AS undated;
UPDATE retention_fence SET purged_before = '-infinity';
SELECT outcome($$debit_once(1, 'k', 1, '-infinity')$$) AS always, outcome($$debit_once(1, 'k', 1, '0001-01-01 00:00+00 BC')$$) AS ancient;
ROLLBACK;

-- Every way to write a UUID of version 7 is dated.
SELECT key, outcome(format('debit_once(1, %L, 1)', key)) AS debit, outcome(format('run_once(1, %L, %L, %L, %L)', 'run:v1', key, '{}', 'handler(bigint, jsonb)')) AS run
  FROM (SELECT v7('2022-01-01 00:00+00') AS v7) AS made, unnest(ARRAY[v7, upper(v7), replace(v7, '-', ''), upper(replace(v7, '-', '')), '{' || v7 || '}', '{' || upper(v7) || '}',
                                             'urn:uuid:' || v7, 'urn:uuid:' || upper(v7), overlay(v7 PLACING upper(substr(v7, 20, 8)) FROM 20)]) AS key;
-- Of no other version or variant.
SELECT version, variant, outcome(format('debit_once(1, %L, 1)', uuid_like('2022-01-01 00:00+00', version, variant))) AS debit
  FROM (VALUES ('0', 'b'), ('1', 'b'), ('2', 'b'), ('3', 'b'), ('4', '8'), ('4', 'b'), ('5', 'b'), ('6', 'b'), ('8', 'b'), ('f', 'b'),
               ('7', '0'), ('7', '7'), ('7', 'c'), ('7', 'd'), ('7', 'e'), ('7', 'f'), ('7', '8'), ('7', '9'), ('7', 'a'), ('7', 'b')) AS given (version, variant);
-- What only resembles one is opaque, as any other key.
SELECT key, outcome(format('debit_once(1, %L, 1)', key)) AS debit
  FROM (SELECT v7('2022-01-01 00:00+00') AS v7) AS made, unnest(ARRAY[v7 || ' ', ' ' || v7, left(v7, -1), v7 || '0', left(v7, -1) || 'g', replace(v7, '-', '_'),
           '{' || v7, v7 || '}', '[' || v7 || ']', 'uuid:' || v7, 'order-' || v7, replace(v7, '-', '') || '-', overlay(v7 PLACING '--' FROM 1), translate(v7, '0', 'O'),
           '2022-01-01 00:00:00+00', '2022-01-01T00:00:00Z-1', repeat('7', 31), 'é' || substr(v7, 3)]) AS key;
-- A message's id is one in whatever way it is written.
SELECT id, outcome(format('accept_message(%L, %L, 1)', 's', id)) AS message
  FROM (SELECT v7('2022-01-01 00:00+00') AS v7) AS made, unnest(ARRAY[v7, upper(v7), '{' || v7 || '}', replace(v7, '-', '')]) AS id;

-- Each function has a date, which works by place and by name, and from any type that becomes one.
SELECT call, outcome(replace(call, '$', quote_literal('2022-01-01 00:00+00'))) AS before, outcome(replace(call, '$', quote_literal('2023-01-01 00:00+00'))) AS after,
       outcome(replace(call, '$', quote_literal('2999-01-01 00:00+00'))) AS future, outcome(replace(call, '$', 'NULL')) AS undated
  FROM unnest(ARRAY['debit_once(1, ''k'', 1, $)', 'credit_once(1, ''k'', 1, $)', 'run_once(1, ''run:v1'', ''k'', ''{}'', ''handler(bigint, jsonb)'', $)',
                    'debit_once_outcome(1, ''k'', 1, $)', 'credit_once_outcome(1, ''k'', 1, $)', 'run_once_outcome(1, ''run:v1'', ''k'', ''{}'', ''handler(bigint, jsonb)'', $)',
                    'debit_once(p_first_sent => $, p_account => 1, p_key => ''k'', p_amount => 1)', 'debit_once(1, ''k'', 1, p_first_sent => $)',
                    'debit_once(1, ''k'', 1, $::timestamp)', 'debit_once(1, ''k'', 1, $::timestamptz)', 'debit_once(1, ''k'', 1, $::date)']) AS call;
-- The handlers of refused requests never ran: those of the undated and of the late enough ones did, by both functions.
SELECT last_value AS runs FROM runs;
-- The functions of messages have none: the id says it all.
SELECT proname, pg_get_function_arguments(oid) FROM pg_proc WHERE proname IN ('accept_message', 'apply_message_once', 'accept_messages', 'cancel_request') ORDER BY proname;

-- No call becomes ambiguous, and what was made for the functions without a date is theirs as before.
SELECT debit_once(1, 'plain', 1), debit_once(1, 'unknown', 1, NULL), debit_once(1, 'literal', 1, '2023-01-01 00:00+00'), debit_once(p_key => 'named', p_account => 1, p_amount => 1);
SELECT credit_once(1, 'plain', 1), run_once(1, 'run:v1', 'plain', '{}', 'handler(bigint, jsonb)'), run_once(p_account => 1, p_operation => 'run:v1', p_key => 'named', p_request => '{}', p_handler => 'handler(bigint, jsonb)');
CREATE VIEW a_view AS SELECT debit_once(1, 'view', 1) AS debit, response FROM credit_once_outcome(1, 'view', 1);
TABLE a_view;
SELECT pg_get_viewdef('a_view') NOT LIKE '%first_sent%' AND pg_get_viewdef('a_view') NOT LIKE '%NULL%' AS as_it_was_written;
CREATE FUNCTION caller(bigint) RETURNS jsonb LANGUAGE sql BEGIN ATOMIC SELECT debit_once($1, 'caller', 1); END;
SELECT caller(1);
ALTER FUNCTION debit_once(bigint, text, bigint) SET lock_timeout = '1min';
ALTER FUNCTION debit_once(bigint, text, bigint) RESET ALL;
ALTER FUNCTION run_once_outcome(bigint, text, text, jsonb, regprocedure) COST 100;
SELECT 'debit_once(bigint, text, bigint)'::regprocedure AS plain, 'debit_once(bigint, text, bigint, timestamptz)'::regprocedure AS dated;
PREPARE plain(text) AS SELECT debit_once(1, $1, 1);
EXECUTE plain('prepared');
DEALLOCATE plain;
DROP VIEW a_view;
DROP FUNCTION caller;

-- With two dates the earlier counts for the fence, the later for the future, in whatever order they come.
SELECT outcome($$debit_once(1, v7('2022-01-01 00:00+00'), 1, '2023-01-01 00:00+00')$$) AS old_key, outcome($$debit_once(1, v7('2023-01-01 00:00+00'), 1, '2022-01-01 00:00+00')$$) AS old_date,
       outcome($$debit_once(1, v7('2023-01-01 00:00+00'), 1, '2024-01-01 00:00+00')$$) AS neither, outcome($$debit_once(1, v7('2023-01-01 00:00+00'), 1, '2999-01-01 00:00+00')$$) AS future_date,
       outcome($$debit_once(1, v7(now() + interval '50 years'), 1, '2023-01-01 00:00+00')$$) AS future_key, outcome($$debit_once(1, v7('2022-01-01 00:00+00'), 1, NULL)$$) AS old_key_no_date,
       outcome($$debit_once(1, v7('2023-01-01 00:00+00'), 1, NULL)$$) AS key_no_date, outcome($$debit_once(1, v7('2022-01-01 00:00+00'), 1, '2999-01-01 00:00+00')$$) AS both_wrong;

-- A fence is that of one operation or subscriber, and of nobody else.
DELETE FROM retention_fence;
INSERT INTO retention_fence VALUES ('operation', 'debit:v1', '2022-02-22 19:22:22+00'), ('subscriber', 'r', '2022-02-22 19:22:22+00'), ('operation', 's', '2022-02-22 19:22:22+00'),
    ('subscriber', 'credit:v1', '2022-02-22 19:22:22+00'), ('operation', 'run:v10', '2022-02-22 19:22:22+00'), ('operation', 'RUN:v1', '2022-02-22 19:22:22+00');
SELECT outcome($$debit_once(1, 'k', 1, '2022-01-01 00:00+00')$$) AS debit, outcome($$credit_once(1, 'k', 1, '2022-01-01 00:00+00')$$) AS credit,
       outcome($$run_once(1, 'run:v1', 'k', '{}', 'handler(bigint, jsonb)', '2022-01-01 00:00+00')$$) AS run,
       outcome($$run_once(1, 'run:v10', 'k', '{}', 'handler(bigint, jsonb)', '2022-01-01 00:00+00')$$) AS run_10,
       outcome($$accept_message('s', v7('2022-01-01 00:00+00')::uuid, 1)$$) AS s, outcome($$accept_message('r', v7('2022-01-01 00:00+00')::uuid, 1)$$) AS r,
       outcome($$accept_message('R', v7('2022-01-01 00:00+00')::uuid, 1)$$) AS other_r, outcome($$debit_once(2, 'k', 1, '2022-01-01 00:00+00')$$) AS another_account;
DELETE FROM retention_fence;
INSERT INTO retention_fence VALUES ('table', 'debit:v1', now());
INSERT INTO retention_fence VALUES ('operation', 'debit:v1', '2022-02-22 19:22:22+00'), ('operation', 'credit:v1', '2022-02-22 19:22:22+00'),
    ('operation', 'run:v1', '2022-02-22 19:22:22+00'), ('subscriber', 's', '2022-02-22 19:22:22+00');
INSERT INTO retention_fence VALUES ('operation', 'debit:v1', now());

-- What is recorded is replayed, whatever date comes with it, and is told a mismatch from an expired key.
CALL tamper($t$DELETE FROM request_result$t$);
INSERT INTO request_result (account_id, operation, request_key, request, response)
VALUES (1, 'debit:v1', v7('2022-01-01 00:00+00'), '{"amount": 100}', '{"balance": 4711}');
INSERT INTO processed_message (subscriber, message_id, account_id) VALUES ('s', v7('2022-01-01 00:00+00')::uuid, 1);
SELECT debit_once(1, 'k', 100) AS first;
BEGIN READ ONLY;
SELECT debit_once(1, 'k', 100, '2022-01-01 00:00+00'), debit_once(1, 'k', 100, '-infinity'), debit_once(1, 'k', 100, 'infinity'), debit_once(1, v7('2022-01-01 00:00+00'), 100);
SELECT response, replayed FROM debit_once_outcome(1, 'k', 100, '2022-01-01 00:00+00');
SELECT accept_message('s', v7('2022-01-01 00:00+00')::uuid, 1), apply_message_once('s', v7('2022-01-01 00:00+00')::uuid, 1, 5),
       (SELECT count(*) FROM accept_messages('s', ARRAY[v7('2022-01-01 00:00+00')::uuid], '{1}')) AS new;
SELECT cancel_request(1, 'debit:v1', v7('2022-01-01 00:00+00'));
SELECT pg_current_xact_id_if_assigned() IS NULL AS no_transaction_id;
COMMIT;
SELECT outcome($$debit_once(1, 'k', 101, '2022-01-01 00:00+00')$$) AS amount, outcome($$accept_message('s', v7('2022-01-01 00:00+00')::uuid, 2)$$) AS account;

-- An expired key is refused as that before anything else is looked at: account, balance, handler. A call that is wrong in
-- itself is told so.
SELECT outcome($$debit_once(404, 'k', 1, '2022-01-01 00:00+00')$$) AS unknown_account, outcome($$debit_once(1, 'poor', 100000, '2022-01-01 00:00+00')$$) AS insufficient,
       outcome($$apply_message_once('s', v7('2022-01-02 00:00+00')::uuid, 1, -100000)$$) AS insufficient_message, outcome($$accept_message('s', v7('2022-01-02 00:00+00')::uuid, 404)$$) AS unknown_message,
       outcome($$run_once(404, 'run:v1', 'k', '{}', 'handler(bigint, jsonb)', '2022-01-01 00:00+00')$$) AS unknown_run;
SELECT outcome($$debit_once(1, 'k2', 0, '2022-01-01 00:00+00')$$) AS amount, outcome($$debit_once(1, '', 1, '2022-01-01 00:00+00')$$) AS key, outcome($$debit_once(1, NULL, 1, '2022-01-01 00:00+00')$$) AS no_key,
       outcome($$debit_once(NULL, 'k2', 1, '2022-01-01 00:00+00')$$) AS account, outcome($$run_once(1, 'run', 'k', '{}', 'handler(bigint, jsonb)', '2022-01-01 00:00+00')$$) AS operation,
       outcome($$run_once(1, 'run:v1', 'k', '{}', 'refusal(text)', '2022-01-01 00:00+00')$$) AS handler;
-- Refusals that are saved are none for an expired key: nobody knows whether it was debited.
INSERT INTO operation_policy (operation, refusals) VALUES ('debit:v1', 'save');
SELECT outcome($$debit_once(1, 'poor', 100000, '2022-01-01 00:00+00')$$) AS expired, outcome($$debit_once(1, 'poor', 100000, '2023-01-01 00:00+00')$$) AS young;
SELECT debit_once(1, 'poor', 100000, '2023-01-01 00:00+00'), debit_once(1, 'poor', 100000, '2022-01-01 00:00+00');
DELETE FROM operation_policy;
-- To cancel it would be to say that it never ran.
SELECT outcome($$cancel_request(1, 'debit:v1', v7('2022-01-02 00:00+00'))$$) AS expired, outcome($$cancel_request(1, 'debit:v1', v7('2023-01-02 00:00+00'))$$) AS young,
       outcome($$cancel_request(1, 'debit:v1', v7(now() + interval '50 years'))$$) AS future, outcome($$cancel_request(1, 'debit:v1', 'undated')$$) AS undated,
       outcome($$cancel_request(1, 'other:v1', v7('2022-01-02 00:00+00'))$$) AS another_operation, outcome($$cancel_request(404, 'debit:v1', v7('2022-01-02 00:00+00'))$$) AS unknown_account;
-- One that is cancelled stays that.
SELECT cancel_request(1, 'debit:v1', v7('2023-01-02 00:00+00')) IS NULL AS never_ran;
UPDATE retention_fence SET purged_before = '2024-01-01 00:00+00';
SELECT cancel_request(1, 'debit:v1', v7('2023-01-02 00:00+00')) IS NULL AS never_ran, outcome($$debit_once(1, v7('2023-01-02 00:00+00'), 1)$$) AS debit;
UPDATE retention_fence SET purged_before = '2022-02-22 19:22:22+00';

-- Of a batch of messages all are refused where one is expired and not recorded, or from the future.
CREATE FUNCTION accepted(VARIADIC made timestamptz[]) RETURNS text LANGUAGE plpgsql AS $$
BEGIN
    RETURN (SELECT count(*) || ' new' FROM accept_messages('s', ARRAY(SELECT v7(m)::uuid FROM unnest(made) WITH ORDINALITY AS given (m, n) ORDER BY n), array_fill(1::bigint, ARRAY[cardinality(made)])));
EXCEPTION WHEN invalid_parameter_value THEN
    RETURN SQLERRM;
END $$;
SELECT accepted('2023-01-01 00:00+00', '2022-01-02 00:00+00') AS expired, accepted('2022-01-02 00:00+00') AS alone, accepted('2023-01-01 00:00+00', now() + interval '50 years') AS future;
SELECT accepted('2022-01-01 00:00+00') AS recorded, accepted('2023-01-01 00:00+00', '2022-01-01 00:00+00', '2023-01-01 00:00+00') AS recorded_and_new, accepted('2023-01-01 00:00+00', '2022-01-01 00:00+00') AS all_recorded;
SELECT count(*) FROM accept_messages('s', ARRAY[uuid_like('2022-01-02 00:00+00', '4')::uuid, v7('2023-01-03 00:00+00')::uuid], '{1, 2}');
-- Nothing of the refused ones is left.
TABLE books;

-- Without a key there is nothing to be known by, and the date means nothing.
SET idempotency_record.require_key = off;
SET client_min_messages = error;
SELECT debit_once(2, NULL, 1, '2022-01-01 00:00+00'), debit_once(2, NULL, 1, NULL), run_once(2, 'run:v1', NULL, '{}', 'handler(bigint, jsonb)', '2022-01-01 00:00+00');
SELECT response, replayed, expires_at FROM credit_once_outcome(2, NULL, 2, '2022-01-01 00:00+00');
SET client_min_messages = warning;
RESET idempotency_record.require_key;

-- The whole of a dated key's life. It executes once and replays; after the purge of its record it is refused, for ever; so is
-- any key as old as that, and a new one of now executes.
SET idempotency_record.clock_skew = 0;
CALL tamper($t$DELETE FROM request_result$t$);
CALL tamper($t$DELETE FROM processed_message$t$);
DELETE FROM retention_fence;
UPDATE account SET balance = 1000;
SELECT clock_timestamp() AS then \gset
SELECT debit_once(1, 'life', 1, :'then'), debit_once(1, 'life', 1, :'then'), debit_once(1, v7(:'then'), 1) IS NOT NULL AS by_key, accept_message('s', v7(:'then')::uuid, 1);
SELECT purge_expired_keys('0'), purge_processed_messages('0');
SELECT outcome(format($$debit_once(1, 'life', 1, %L)$$, :'then')) AS dated, outcome(format($$debit_once(1, v7(%L), 1)$$, :'then')) AS by_key, outcome(format($$accept_message('s', v7(%L)::uuid, 1)$$, :'then')) AS message,
       outcome(format($$debit_once(1, 'another', 1, %L)$$, :'then')) AS another, outcome($$debit_once(1, 'another', 1, clock_timestamp())$$) AS of_now, outcome($$debit_once(1, 'life', 1)$$) AS undated,
       outcome(format($$debit_once(1, 'life', 1, %L)$$, now() - interval '50 years')) AS ancient;
SELECT purge_expired_keys('0'), purge_expired_keys('50 years'), purge_processed_messages('50 years');
SELECT outcome(format($$debit_once(1, 'life', 1, %L)$$, :'then')) AS dated, outcome(format($$accept_message('s', v7(%L)::uuid, 1)$$, :'then')) AS message;
-- A purge never moves the fence back, by whatever function, and moves it on also where there was nothing to delete.
SELECT max(purged_before) AS fence FROM retention_fence WHERE name = 'debit:v1' \gset
INSERT INTO operation_policy (operation, retention) VALUES ('debit:v1', '10 years');
SELECT purge_expired_keys('10 days'), purge_expired_keys();
CALL purge();
SELECT purged_before = :'fence' AS same FROM retention_fence WHERE name = 'debit:v1';
DELETE FROM operation_policy;
SELECT purge_expired_keys('0');
SELECT purged_before > :'fence' AS further FROM retention_fence WHERE name = 'debit:v1';
-- One that is rolled back does not move it.
SELECT purged_before AS fence FROM retention_fence WHERE name = 'debit:v1' \gset
BEGIN;
SAVEPOINT s;
SELECT purge_expired_keys('0');
ROLLBACK TO s;
SELECT purged_before = :'fence' AS same FROM retention_fence WHERE name = 'debit:v1';
COMMIT;
-- In the transaction that purges, too, the key is refused from then on.
BEGIN;
SELECT debit_once(1, 'own', 1, clock_timestamp()) IS NOT NULL AS executed, clock_timestamp() AS then \gset own_
SELECT purge_expired_keys('0');
SELECT outcome(format($$debit_once(1, 'own', 1, %L)$$, :'own_then')) AS dated;
ROLLBACK;
RESET idempotency_record.clock_skew;

-- A table of fences that is not what it was created as is not taken for one without: whoever cannot read it executes nothing.
BEGIN;
ALTER EXTENSION idempotency_record DROP VIEW retention_status;
DROP VIEW retention_status;
ALTER TABLE retention_fence ALTER COLUMN purged_before TYPE timestamp;
SELECT outcome($$debit_once(1, 'altered', 1, now())$$) AS dated, outcome($$debit_once(1, 'altered', 1)$$) AS undated, outcome($$accept_message('s', v7(now())::uuid, 1)$$) AS message;
ROLLBACK;
BEGIN;
ALTER TABLE retention_fence RENAME TO fence_of_retention;
SELECT outcome($$debit_once(1, 'altered', 1, now())$$) AS dated;
ROLLBACK;

DROP EXTENSION idempotency_record CASCADE;
