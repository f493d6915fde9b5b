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
