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
