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
