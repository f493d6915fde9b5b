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
