CREATE TABLE processed_message (
    subscriber          text COLLATE "C" NOT NULL,
    message_id          uuid NOT NULL,
    account_id          bigint NOT NULL,
    payload_fingerprint bytea,
    created_at          timestamptz NOT NULL DEFAULT clock_timestamp(),
    delta               bigint,
    CONSTRAINT processed_message_pkey PRIMARY KEY (subscriber, message_id),
    CONSTRAINT processed_message_account_id_fkey FOREIGN KEY (account_id) REFERENCES account
);

CREATE INDEX processed_message_subscriber_created_at_idx ON processed_message (subscriber, created_at);

COMMENT ON TABLE processed_message IS
    'One row for each message that a subscriber has applied, stored in the same transaction as its effect on the account. INSERT ... ON CONFLICT DO NOTHING; no row inserted means that the message was applied before.';
COMMENT ON COLUMN processed_message.subscriber IS
    'Who applied the message. Each subscriber applies each message for itself.';
COMMENT ON COLUMN processed_message.message_id IS
    'The identifier that the publisher gave the message. It names an external event, hence no foreign key.';
COMMENT ON COLUMN processed_message.account_id IS
    'The account that the message had its effect on.';
COMMENT ON COLUMN processed_message.payload_fingerprint IS
    'A digest of the payload, to recognize a message id that returns with another payload; NULL where none was recorded.';
COMMENT ON COLUMN processed_message.created_at IS
    'When the message was applied, by the database''s clock; retention counts from here.';
COMMENT ON COLUMN processed_message.delta IS
    'What apply_message_once added to the balance, in integer units; NULL where the caller made the effect.';
COMMENT ON CONSTRAINT processed_message_pkey ON processed_message IS
    'Decides which of two deliveries is applied. Dropping it lets messages be applied twice.';
COMMENT ON CONSTRAINT processed_message_account_id_fkey ON processed_message IS
    'An account with live records cannot be deleted.';
COMMENT ON INDEX processed_message_subscriber_created_at_idx IS
    'Makes a purge cost what it deletes, not what the table holds, whatever the others'' retention is.';

SELECT pg_catalog.pg_extension_config_dump('processed_message', '');
