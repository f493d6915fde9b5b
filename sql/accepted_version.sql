CREATE TABLE accepted_version (
    subscriber  text COLLATE "C" NOT NULL,
    entity      text COLLATE "C" NOT NULL,
    version     bigint NOT NULL,
    accepted_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    CONSTRAINT accepted_version_pkey PRIMARY KEY (subscriber, entity)
);

COMMENT ON TABLE accepted_version IS
    'The highest version that each subscriber accepted for each entity. Written by accept_version: order, which idempotency does not give. One row an entity, so nothing expires.';
COMMENT ON COLUMN accepted_version.subscriber IS
    'Who accepted the version.';
COMMENT ON COLUMN accepted_version.entity IS
    'What the version is of, such as an order number; 1 to 255 bytes.';
COMMENT ON COLUMN accepted_version.version IS
    'The highest version accepted. Only a higher one is accepted after it.';
COMMENT ON COLUMN accepted_version.accepted_at IS
    'When it was accepted, by the database''s clock.';
COMMENT ON CONSTRAINT accepted_version_pkey ON accepted_version IS
    'One highest version for each entity of a subscriber.';

SELECT pg_catalog.pg_extension_config_dump('accepted_version', '');
