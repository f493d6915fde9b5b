-- 0.2.0 to 0.3.0: retention by policy, purge in batches, the fence for dated keys, the worker; EXECUTE is all that a caller
-- needs, and records are kept as they are.

-- The strongest lock at once: taken step by step it would deadlock with calls that are running.
LOCK TABLE request_result IN ACCESS EXCLUSIVE MODE;
LOCK TABLE processed_message IN ACCESS EXCLUSIVE MODE;

CREATE INDEX request_result_operation_created_at_idx ON request_result (operation, created_at);
DROP INDEX request_result_created_at_idx;
COMMENT ON INDEX request_result_operation_created_at_idx IS
    'Makes a purge cost what it deletes, not what the table holds, whatever the others'' retention is.';

CREATE INDEX processed_message_subscriber_created_at_idx ON processed_message (subscriber, created_at);
DROP INDEX processed_message_created_at_idx;
COMMENT ON INDEX processed_message_subscriber_created_at_idx IS
    'Makes a purge cost what it deletes, not what the table holds, whatever the others'' retention is.';

COMMENT ON TABLE request_result IS
    'One idempotency record for each executed request: the key, the request and the response, stored in the same transaction as the effect. Written by debit_once, credit_once, run_once and cancel_request, deleted by purge; a row that is deleted by hand makes its key executable again.';

COMMENT ON COLUMN operation_policy.retention IS
    'How long a record of the operation is kept, hence a repeat''s answer; NULL: as long as idempotency_record.retention says.';

CREATE TABLE subscriber_policy (
    subscriber text COLLATE "C" NOT NULL,
    retention  interval NOT NULL,
    CONSTRAINT subscriber_policy_pkey PRIMARY KEY (subscriber),
    CONSTRAINT subscriber_policy_subscriber_check CHECK (octet_length(subscriber) BETWEEN 1 AND 255),
    -- As for operation_policy.
    CONSTRAINT subscriber_policy_retention_check
        CHECK (timestamp '2001-03-01' - retention < timestamp '2001-03-01' AND retention <= interval '1000 years')
);

COMMENT ON TABLE subscriber_policy IS
    'How long the messages of a subscriber are remembered; a subscriber without a row has idempotency_record.message_retention. Change it by INSERT, UPDATE and DELETE: it counts from the next purge on.';
COMMENT ON COLUMN subscriber_policy.subscriber IS
    'The subscriber, as in processed_message.';
COMMENT ON COLUMN subscriber_policy.retention IS
    'How long a message is remembered: longer than the broker may redeliver it.';
COMMENT ON CONSTRAINT subscriber_policy_pkey ON subscriber_policy IS
    'One policy a subscriber.';
COMMENT ON CONSTRAINT subscriber_policy_subscriber_check ON subscriber_policy IS
    'A policy under any other name would have no effect.';
COMMENT ON CONSTRAINT subscriber_policy_retention_check ON subscriber_policy IS
    'A retention is longer than nothing, in every month, and at most 1000 years.';

SELECT pg_catalog.pg_extension_config_dump('subscriber_policy', '');

CREATE TABLE retention_fence (
    kind          text COLLATE "C" NOT NULL,
    name          text COLLATE "C" NOT NULL,
    purged_before timestamptz NOT NULL,
    CONSTRAINT retention_fence_pkey PRIMARY KEY (kind, name),
    CONSTRAINT retention_fence_kind_check CHECK (kind IN ('operation', 'subscriber'))
);

COMMENT ON TABLE retention_fence IS
    'Up to when the records of each operation and subscriber were purged. A dated key from before that, of which there is no record, is refused: it may have been executed. Written by each purge, in the same transaction; deleting or lowering a row lets such keys be executed again.';
COMMENT ON COLUMN retention_fence.kind IS
    'operation or subscriber.';
COMMENT ON COLUMN retention_fence.name IS
    'The operation, such as debit:v1, or the subscriber.';
COMMENT ON COLUMN retention_fence.purged_before IS
    'Records that were made before this, by the database''s clock, may have been purged. It never goes back.';
COMMENT ON CONSTRAINT retention_fence_pkey ON retention_fence IS
    'One fence for each operation and each subscriber.';
COMMENT ON CONSTRAINT retention_fence_kind_check ON retention_fence IS
    'operation or subscriber.';

SELECT pg_catalog.pg_extension_config_dump('retention_fence', '');

CREATE TABLE purge_progress (
    kind           text COLLATE "C" NOT NULL,
    name           text COLLATE "C" NOT NULL,
    deleted_before timestamptz NOT NULL,
    purged_at      timestamptz NOT NULL,
    duration       interval NOT NULL,
    deleted        bigint NOT NULL,
    swept_at       timestamptz NOT NULL,
    sweep_duration interval NOT NULL,
    CONSTRAINT purge_progress_pkey PRIMARY KEY (kind, name)
);

COMMENT ON TABLE purge_progress IS
    'The last purge of each operation and subscriber, and where the next one begins. Not dumped: without a row a purge begins at the oldest record.';
COMMENT ON COLUMN purge_progress.kind IS
    'operation or subscriber.';
COMMENT ON COLUMN purge_progress.name IS
    'The operation, such as debit:v1, or the subscriber.';
COMMENT ON COLUMN purge_progress.deleted_before IS
    'Up to when records were deleted, in the order of time: the next purge begins here, rather than at index entries of rows that are deleted already.';
COMMENT ON COLUMN purge_progress.purged_at IS
    'When the last purge of it began.';
COMMENT ON COLUMN purge_progress.duration IS
    'How long that took.';
COMMENT ON COLUMN purge_progress.deleted IS
    'How many records it deleted.';
COMMENT ON COLUMN purge_progress.swept_at IS
    'When a purge last looked for older records too, which another session held, or which were committed late or restored.';
COMMENT ON COLUMN purge_progress.sweep_duration IS
    'How long that took. It is done again when a hundred times as long has passed, or at once where it was short.';
COMMENT ON CONSTRAINT purge_progress_pkey ON purge_progress IS
    'One row for each operation and each subscriber.';

CREATE TABLE purge_lock (
    only_row boolean NOT NULL DEFAULT true,
    CONSTRAINT purge_lock_pkey PRIMARY KEY (only_row),
    CONSTRAINT purge_lock_only_row_check CHECK (only_row)
);
INSERT INTO purge_lock DEFAULT VALUES;

COMMENT ON TABLE purge_lock IS
    'One row, which a purge locks while it runs, so that there is one at a time.';
COMMENT ON COLUMN purge_lock.only_row IS
    'true. Without the row no purge runs.';
COMMENT ON CONSTRAINT purge_lock_pkey ON purge_lock IS
    'One row.';
COMMENT ON CONSTRAINT purge_lock_only_row_check ON purge_lock IS
    'One row.';

-- Configuration of the extension, so that the library finds them by oid, of which pg_dump takes no row.
SELECT pg_catalog.pg_extension_config_dump('purge_progress', 'WHERE false');
SELECT pg_catalog.pg_extension_config_dump('purge_lock', 'WHERE false');

CREATE  FUNCTION "credit_once"(
	"p_account" bigint,
	"p_key" text,
	"p_amount" bigint,
	"p_first_sent" timestamp with time zone
) RETURNS jsonb
VOLATILE PARALLEL UNSAFE
LANGUAGE c
AS 'MODULE_PATHNAME', 'credit_dated_once_wrapper';

CREATE  FUNCTION "credit_once_outcome"(
	"p_account" bigint,
	"p_key" text,
	"p_amount" bigint,
	"p_first_sent" timestamp with time zone
) RETURNS TABLE (
	"response" jsonb,
	"replayed" bool,
	"executed_at" timestamp with time zone,
	"expires_at" timestamp with time zone
)
VOLATILE PARALLEL UNSAFE
LANGUAGE c
AS 'MODULE_PATHNAME', 'credit_dated_once_outcome_wrapper';

CREATE  FUNCTION "debit_once"(
	"p_account" bigint,
	"p_key" text,
	"p_amount" bigint,
	"p_first_sent" timestamp with time zone
) RETURNS jsonb
VOLATILE PARALLEL UNSAFE
LANGUAGE c
AS 'MODULE_PATHNAME', 'debit_dated_once_wrapper';

CREATE  FUNCTION "debit_once_outcome"(
	"p_account" bigint,
	"p_key" text,
	"p_amount" bigint,
	"p_first_sent" timestamp with time zone
) RETURNS TABLE (
	"response" jsonb,
	"replayed" bool,
	"executed_at" timestamp with time zone,
	"expires_at" timestamp with time zone
)
VOLATILE PARALLEL UNSAFE
LANGUAGE c
AS 'MODULE_PATHNAME', 'debit_dated_once_outcome_wrapper';

CREATE OR REPLACE FUNCTION "find_request"(
	"p_account" bigint,
	"p_operation" text,
	"p_key" text
) RETURNS TABLE (
	"account_id" bigint,
	"operation" text,
	"request_key" text,
	"request" jsonb,
	"response" jsonb,
	"created_at" timestamp with time zone,
	"request_fingerprint" bytea,
	"cancelled" bool
)
STABLE PARALLEL UNSAFE
LANGUAGE c
AS 'MODULE_PATHNAME', 'find_request_wrapper';

CREATE FUNCTION keep_record() RETURNS trigger LANGUAGE c AS 'MODULE_PATHNAME', 'keep_record_wrapper';

CREATE PROCEDURE purge(
    p_batch_size bigint DEFAULT 1000,
    p_time_budget interval DEFAULT NULL,
    INOUT deleted bigint DEFAULT NULL,
    INOUT remaining bigint DEFAULT NULL,
    INOUT oldest timestamptz DEFAULT NULL
) LANGUAGE c AS 'MODULE_PATHNAME', 'purge_wrapper';

CREATE  FUNCTION "purge_expired_keys"() RETURNS bigint
STRICT VOLATILE PARALLEL UNSAFE
LANGUAGE c
AS 'MODULE_PATHNAME', 'purge_expired_keys_by_policy_wrapper';

CREATE  FUNCTION "purge_processed_messages"(
	"p_retention" interval
) RETURNS bigint
VOLATILE PARALLEL UNSAFE
LANGUAGE c
AS 'MODULE_PATHNAME', 'purge_processed_messages_wrapper';

CREATE  FUNCTION "purge_processed_messages"() RETURNS bigint
STRICT VOLATILE PARALLEL UNSAFE
LANGUAGE c
AS 'MODULE_PATHNAME', 'purge_processed_messages_by_policy_wrapper';

CREATE  FUNCTION "retention_setting"() RETURNS TABLE (
	"retention" interval,
	"message_retention" interval,
	"worker" TEXT
)
STRICT STABLE PARALLEL SAFE
LANGUAGE c
AS 'MODULE_PATHNAME', 'retention_setting_wrapper';

CREATE  FUNCTION "run_once"(
	"p_account" bigint,
	"p_operation" text,
	"p_key" text,
	"p_request" jsonb,
	"p_handler" regprocedure,
	"p_first_sent" timestamp with time zone
) RETURNS jsonb
VOLATILE PARALLEL UNSAFE
LANGUAGE c
AS 'MODULE_PATHNAME', 'run_dated_once_wrapper';

CREATE  FUNCTION "run_once_outcome"(
	"p_account" bigint,
	"p_operation" text,
	"p_key" text,
	"p_request" jsonb,
	"p_handler" regprocedure,
	"p_first_sent" timestamp with time zone
) RETURNS TABLE (
	"response" jsonb,
	"replayed" bool,
	"executed_at" timestamp with time zone,
	"expires_at" timestamp with time zone
)
VOLATILE PARALLEL UNSAFE
LANGUAGE c
AS 'MODULE_PATHNAME', 'run_dated_once_outcome_wrapper';

CREATE TRIGGER request_result_keep BEFORE UPDATE OR DELETE ON request_result
    FOR EACH ROW EXECUTE FUNCTION keep_record();
CREATE TRIGGER request_result_keep_all BEFORE TRUNCATE ON request_result
    FOR EACH STATEMENT EXECUTE FUNCTION keep_record();
CREATE TRIGGER processed_message_keep BEFORE UPDATE OR DELETE ON processed_message
    FOR EACH ROW EXECUTE FUNCTION keep_record();
CREATE TRIGGER processed_message_keep_all BEFORE TRUNCATE ON processed_message
    FOR EACH STATEMENT EXECUTE FUNCTION keep_record();

COMMENT ON TRIGGER request_result_keep ON request_result IS
    'A record is never changed, and deleted only when its retention has passed. Logical replication and pg_restore do not fire it; a superuser or the owner can disable it.';
COMMENT ON TRIGGER request_result_keep_all ON request_result IS
    'Records are not truncated away.';
COMMENT ON TRIGGER processed_message_keep ON processed_message IS
    'A record is never changed, and deleted only when its retention has passed. Logical replication and pg_restore do not fire it; a superuser or the owner can disable it.';
COMMENT ON TRIGGER processed_message_keep_all ON processed_message IS
    'Records are not truncated away.';

-- Every function and operator is qualified, or has an exact match in pg_catalog: whoever may create objects in this schema
-- could else put one of his own in between.
CREATE VIEW retention_status AS
WITH RECURSIVE requested AS (
    (SELECT operation FROM request_result ORDER BY operation DESC, created_at DESC LIMIT 1)
    UNION ALL
    SELECT (SELECT next.operation FROM request_result AS next
             WHERE next.operation OPERATOR(pg_catalog.<) requested.operation
             ORDER BY next.operation DESC, next.created_at DESC LIMIT 1)
      FROM requested WHERE requested.operation IS NOT NULL
), received AS (
    (SELECT subscriber FROM processed_message ORDER BY subscriber DESC, created_at DESC LIMIT 1)
    UNION ALL
    SELECT (SELECT next.subscriber FROM processed_message AS next
             WHERE next.subscriber OPERATOR(pg_catalog.<) received.subscriber
             ORDER BY next.subscriber DESC, next.created_at DESC LIMIT 1)
      FROM received WHERE received.subscriber IS NOT NULL
), subject AS (
    SELECT pg_catalog.text 'operation' AS kind, operation AS name FROM requested WHERE operation IS NOT NULL
    UNION SELECT 'operation', operation FROM operation_policy
    UNION SELECT 'subscriber', subscriber FROM received WHERE subscriber IS NOT NULL
    UNION SELECT 'subscriber', subscriber FROM subscriber_policy
    UNION SELECT kind, name FROM retention_fence
), share AS (
    SELECT least(pg_catalog.float8 '100', pg_catalog.float8 '2.4e8' OPERATOR(pg_catalog./)
               greatest(1, pg_catalog.pg_relation_size('request_result'))::pg_catalog.float8)::pg_catalog.float4 AS of_requests,
           least(pg_catalog.float8 '100', pg_catalog.float8 '2.4e8' OPERATOR(pg_catalog./)
               greatest(1, pg_catalog.pg_relation_size('processed_message'))::pg_catalog.float8)::pg_catalog.float4 AS of_messages
), sample AS (
    SELECT pg_catalog.text 'operation' AS kind, operation AS name,
           (pg_catalog.count(*)::pg_catalog.float8 OPERATOR(pg_catalog.*) pg_catalog.float8 '100'
            OPERATOR(pg_catalog./) (SELECT of_requests::pg_catalog.float8 FROM share))::pg_catalog.int8 AS records
      FROM request_result TABLESAMPLE SYSTEM ((SELECT of_requests FROM share))
     GROUP BY operation
    UNION ALL
    SELECT 'subscriber', subscriber,
           (pg_catalog.count(*)::pg_catalog.float8 OPERATOR(pg_catalog.*) pg_catalog.float8 '100'
            OPERATOR(pg_catalog./) (SELECT of_messages::pg_catalog.float8 FROM share))::pg_catalog.int8
      FROM processed_message TABLESAMPLE SYSTEM ((SELECT of_messages FROM share))
     GROUP BY subscriber
), known AS (
    SELECT subject.kind, subject.name, kept.retention, setting.worker,
           pg_catalog.statement_timestamp() OPERATOR(pg_catalog.-) kept.retention AS cutoff
      FROM subject
     CROSS JOIN retention_setting() AS setting
     CROSS JOIN LATERAL (
           SELECT CASE WHEN subject.kind OPERATOR(pg_catalog.=) 'operation' THEN coalesce((SELECT policy.retention FROM operation_policy AS policy
                                                WHERE policy.operation OPERATOR(pg_catalog.=) subject.name), setting.retention)
                      ELSE coalesce((SELECT policy.retention FROM subscriber_policy AS policy
                                      WHERE policy.subscriber OPERATOR(pg_catalog.=) subject.name), setting.message_retention)
                  END AS retention) AS kept
)
SELECT known.kind,
       known.name,
       coalesce(sample.records, 0) AS estimated_records,
       CASE WHEN known.kind OPERATOR(pg_catalog.=) 'operation'
           THEN (SELECT created_at FROM request_result
                  WHERE operation OPERATOR(pg_catalog.=) known.name ORDER BY created_at LIMIT 1)
           ELSE (SELECT created_at FROM processed_message
                  WHERE subscriber OPERATOR(pg_catalog.=) known.name ORDER BY created_at LIMIT 1)
       END AS oldest,
       known.retention,
       CASE WHEN known.kind OPERATOR(pg_catalog.=) 'operation'
           THEN (SELECT pg_catalog.count(*)
                   FROM (SELECT FROM request_result
                          WHERE operation OPERATOR(pg_catalog.=) known.name
                            AND created_at OPERATOR(pg_catalog.<) known.cutoff
                          LIMIT 100000) AS expired)
           ELSE (SELECT pg_catalog.count(*)
                   FROM (SELECT FROM processed_message
                          WHERE subscriber OPERATOR(pg_catalog.=) known.name
                            AND created_at OPERATOR(pg_catalog.<) known.cutoff
                          LIMIT 100000) AS expired)
       END AS expired,
       fence.purged_before,
       progress.purged_at AS last_purge,
       progress.duration AS last_duration,
       progress.deleted AS last_deleted,
       known.worker
  FROM known
  LEFT JOIN sample
    ON sample.kind OPERATOR(pg_catalog.=) known.kind AND sample.name OPERATOR(pg_catalog.=) known.name
  LEFT JOIN retention_fence AS fence
    ON fence.kind OPERATOR(pg_catalog.=) known.kind AND fence.name OPERATOR(pg_catalog.=) known.name
  LEFT JOIN purge_progress AS progress
    ON progress.kind OPERATOR(pg_catalog.=) known.kind AND progress.name OPERATOR(pg_catalog.=) known.name
 ORDER BY known.kind, known.name;

COMMENT ON VIEW retention_status IS
    'Whether the purge works: a row for each operation and subscriber. It does if expired stays low and last_purge is young. The reader needs EXECUTE on retention_setting.';
COMMENT ON COLUMN retention_status.kind IS
    'operation (request_result) or subscriber (processed_message).';
COMMENT ON COLUMN retention_status.name IS
    'The operation, such as debit:v1, or the subscriber.';
COMMENT ON COLUMN retention_status.estimated_records IS
    'How many records there are, from a sample of about 300 pages: exact for a smaller table, else within some 10 %; of few records in a large table it says little.';
COMMENT ON COLUMN retention_status.oldest IS
    'When the oldest record was made; NULL where there is none.';
COMMENT ON COLUMN retention_status.retention IS
    'How long a record is kept: as operation_policy or subscriber_policy declares, else idempotency_record.retention or message_retention.';
COMMENT ON COLUMN retention_status.expired IS
    'How many records are older than that and wait for a purge; counted up to 100000.';
COMMENT ON COLUMN retention_status.purged_before IS
    'The fence: dated keys from before this, of which there is no record, are refused.';
COMMENT ON COLUMN retention_status.last_purge IS
    'When the last purge of it began; NULL if there was none since the extension was created or restored.';
COMMENT ON COLUMN retention_status.last_duration IS
    'How long that took.';
COMMENT ON COLUMN retention_status.last_deleted IS
    'How many records it deleted.';
COMMENT ON COLUMN retention_status.worker IS
    'on if a worker purges this database, else what is missing for that.';

REVOKE ALL ON TABLE subscriber_policy, retention_fence, purge_progress, purge_lock, retention_status FROM PUBLIC;
COMMENT ON FUNCTION debit_once(bigint, text, bigint) IS
    'Debits p_account by p_amount integer units once for each p_key, and returns {"balance": n}; a repeat returns the first answer and writes nothing. The caller needs EXECUTE.';
REVOKE ALL ON FUNCTION debit_once(bigint, text, bigint, timestamptz) FROM PUBLIC;
COMMENT ON FUNCTION debit_once(bigint, text, bigint, timestamptz) IS
    'As debit_once without a date; p_first_sent is when the client first sent the request, by its own clock. If there is no record, and records as old as that were purged, the call is refused: it may have been executed.';
COMMENT ON FUNCTION debit_once_outcome(bigint, text, bigint) IS
    'As debit_once, and says whether it was a replay, when it was executed, and when the record may be purged (NULL where a call without a key left no record).';
REVOKE ALL ON FUNCTION debit_once_outcome(bigint, text, bigint, timestamptz) FROM PUBLIC;
COMMENT ON FUNCTION debit_once_outcome(bigint, text, bigint, timestamptz) IS
    'As debit_once_outcome without a date; p_first_sent is when the client first sent the request, by its own clock. If there is no record, and records as old as that were purged, the call is refused: it may have been executed.';
COMMENT ON FUNCTION credit_once(bigint, text, bigint) IS
    'Credits p_account by p_amount integer units once for each p_key, and returns {"balance": n}; a repeat returns the first answer and writes nothing. The caller needs EXECUTE.';
REVOKE ALL ON FUNCTION credit_once(bigint, text, bigint, timestamptz) FROM PUBLIC;
COMMENT ON FUNCTION credit_once(bigint, text, bigint, timestamptz) IS
    'As credit_once without a date; p_first_sent is when the client first sent the request, by its own clock. If there is no record, and records as old as that were purged, the call is refused: it may have been executed.';
COMMENT ON FUNCTION credit_once_outcome(bigint, text, bigint) IS
    'As credit_once, and says whether it was a replay, when it was executed, and when the record may be purged (NULL where a call without a key left no record).';
REVOKE ALL ON FUNCTION credit_once_outcome(bigint, text, bigint, timestamptz) FROM PUBLIC;
COMMENT ON FUNCTION credit_once_outcome(bigint, text, bigint, timestamptz) IS
    'As credit_once_outcome without a date; p_first_sent is when the client first sent the request, by its own clock. If there is no record, and records as old as that were purged, the call is refused: it may have been executed.';
COMMENT ON FUNCTION run_once(bigint, text, text, jsonb, regprocedure) IS
    'Runs p_handler(p_account, p_request) once for each p_key and returns its result; a repeat returns the first result and runs nothing. The handler runs with the caller''s rights. The caller needs EXECUTE on both.';
REVOKE ALL ON FUNCTION run_once(bigint, text, text, jsonb, regprocedure, timestamptz) FROM PUBLIC;
COMMENT ON FUNCTION run_once(bigint, text, text, jsonb, regprocedure, timestamptz) IS
    'As run_once without a date; p_first_sent as for debit_once.';
COMMENT ON FUNCTION run_once_outcome(bigint, text, text, jsonb, regprocedure) IS
    'As run_once, and says whether it was a replay, when it was executed, and when the record may be purged (NULL where a call without a key left no record).';
REVOKE ALL ON FUNCTION run_once_outcome(bigint, text, text, jsonb, regprocedure, timestamptz) FROM PUBLIC;
COMMENT ON FUNCTION run_once_outcome(bigint, text, text, jsonb, regprocedure, timestamptz) IS
    'As run_once_outcome without a date; p_first_sent as for debit_once.';
COMMENT ON FUNCTION cancel_request(bigint, text, text) IS
    'Makes sure that the request never runs, and returns NULL; or returns the saved response if it ran. Waits for an execution in flight. The caller needs EXECUTE.';
COMMENT ON FUNCTION find_request(bigint, text, text) IS
    'The record of a request as a row of request_result, or no row; reads only. The caller needs EXECUTE.';
COMMENT ON FUNCTION accept_message(text, uuid, bigint, jsonb) IS
    'Records a message for a subscriber: true the first time, when the caller makes its effect in the same transaction; false on a repeat. The caller needs EXECUTE.';
COMMENT ON FUNCTION apply_message_once(text, uuid, bigint, bigint, jsonb) IS
    'Adds p_delta integer units to the account once for each message and subscriber, and returns the balance; NULL on a repeat. The caller needs EXECUTE.';
COMMENT ON FUNCTION accept_messages(text, uuid[], bigint[], jsonb[]) IS
    'Records many messages for a subscriber and returns the ids that are new, in the order given; the caller makes their effects in the same transaction. The caller needs EXECUTE.';
COMMENT ON FUNCTION accept_version(text, text, bigint) IS
    'Whether p_version is above the highest that the subscriber accepted for the entity, and accepts it if so: an older event cannot overwrite a newer one. The caller needs EXECUTE.';
COMMENT ON FUNCTION purge_expired_keys(interval) IS
    'Deletes the records of request_result older than p_retention and returns how many; never waits. Afterwards those keys are new keys, and dated ones are refused: p_retention is what was promised to the slowest client. The caller needs EXECUTE.';
REVOKE ALL ON FUNCTION purge_expired_keys() FROM PUBLIC;
COMMENT ON FUNCTION purge_expired_keys() IS
    'Deletes the records of request_result older than the retention of their operation (operation_policy, else idempotency_record.retention), and returns how many. The caller needs EXECUTE.';
REVOKE ALL ON FUNCTION purge_processed_messages(interval) FROM PUBLIC;
COMMENT ON FUNCTION purge_processed_messages(interval) IS
    'Deletes the records of processed_message older than p_retention and returns how many; never waits. Afterwards a redelivery is a new message, unless its id is dated. The caller needs EXECUTE.';
REVOKE ALL ON FUNCTION purge_processed_messages() FROM PUBLIC;
COMMENT ON FUNCTION purge_processed_messages() IS
    'Deletes the records of processed_message older than the retention of their subscriber (subscriber_policy, else idempotency_record.message_retention), and returns how many. The caller needs EXECUTE.';
REVOKE ALL ON PROCEDURE purge(bigint, interval, bigint, bigint, timestamptz) FROM PUBLIC;
COMMENT ON PROCEDURE purge(bigint, interval, bigint, bigint, timestamptz) IS
    'Deletes everything that is older than its retention, in batches of p_batch_size records with a commit after each, until p_time_budget has passed (NULL: no limit). CALL purge() returns how many records it deleted, how many expired ones remain, and when the oldest that is left was made. The caller needs EXECUTE.';
REVOKE ALL ON FUNCTION retention_setting() FROM PUBLIC;
COMMENT ON FUNCTION retention_setting() IS
    'The retention of requests and of messages where no policy declares one, and whether a worker purges this database: on, or what is missing. Readers of retention_status need EXECUTE.';
REVOKE ALL ON FUNCTION keep_record() FROM PUBLIC;
COMMENT ON FUNCTION keep_record() IS
    'The trigger function that keeps records as they are.';
