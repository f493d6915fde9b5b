-- 0.1.0 to 0.2.0: any operation once, policies, fingerprints, cancellations, messages, versions.

ALTER TABLE request_result ADD COLUMN request_fingerprint bytea;
ALTER TABLE request_result ADD COLUMN cancelled boolean NOT NULL DEFAULT false;
COMMENT ON TABLE request_result IS
    'One idempotency record for each executed request: the key, the request and the response, stored in the same transaction as the effect. Written by debit_once, credit_once, run_once and cancel_request, deleted by purge_expired_keys; a row that is deleted by hand makes its key executable again.';
COMMENT ON COLUMN request_result.request_fingerprint IS
    'The digest of the request where the operation''s policy keeps no more than that, and request is null; else NULL.';
COMMENT ON COLUMN request_result.cancelled IS
    'Whether cancel_request took the key before the request ran. It never will; request and response are null.';

ALTER TABLE processed_message ADD COLUMN delta bigint;
COMMENT ON COLUMN processed_message.delta IS
    'What apply_message_once added to the balance, in integer units; NULL where the caller made the effect.';

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

CREATE TABLE operation_policy (
    operation      text COLLATE "C" NOT NULL,
    refusals       text NOT NULL DEFAULT 'raise',
    stored_request text NOT NULL DEFAULT 'full',
    retention      interval,
    CONSTRAINT operation_policy_pkey PRIMARY KEY (operation),
    CONSTRAINT operation_policy_operation_check
        CHECK (operation ~ '^[A-Za-z0-9_.-]+:v[1-9][0-9]*$' AND octet_length(operation) <= 63),
    CONSTRAINT operation_policy_refusals_check CHECK (refusals IN ('raise', 'save')),
    CONSTRAINT operation_policy_stored_request_check CHECK (stored_request IN ('full', 'fingerprint')),
    -- A month without its 29th day would make '1 month -29 days' negative.
    CONSTRAINT operation_policy_retention_check
        CHECK (timestamp '2001-03-01' - retention < timestamp '2001-03-01' AND retention <= interval '1000 years')
);

COMMENT ON TABLE operation_policy IS
    'What is declared for an operation; an operation without a row has the defaults. Change it by INSERT, UPDATE and DELETE: it counts from the next call on, and records that exist stay comparable.';
COMMENT ON COLUMN operation_policy.operation IS
    'The operation, such as debit:v1.';
COMMENT ON COLUMN operation_policy.refusals IS
    'raise: an insufficient balance raises P0001 and keeps nothing, so that the same key may succeed after a top-up. save: the refusal becomes the stored response, and a repeat gets it also after a top-up.';
COMMENT ON COLUMN operation_policy.stored_request IS
    'full: the request is stored as it is. fingerprint: only a digest is stored, for requests that must not be kept.';
COMMENT ON COLUMN operation_policy.retention IS
    'How long a record of the operation is a repeat''s answer; NULL where none is declared.';
COMMENT ON CONSTRAINT operation_policy_pkey ON operation_policy IS
    'One policy an operation.';
COMMENT ON CONSTRAINT operation_policy_operation_check ON operation_policy IS
    'A policy under any other name would have no effect.';
COMMENT ON CONSTRAINT operation_policy_refusals_check ON operation_policy IS
    'raise or save.';
COMMENT ON CONSTRAINT operation_policy_stored_request_check ON operation_policy IS
    'full or fingerprint.';
COMMENT ON CONSTRAINT operation_policy_retention_check ON operation_policy IS
    'A retention is longer than nothing, in every month, and at most 1000 years.';

SELECT pg_catalog.pg_extension_config_dump('operation_policy', '');

CREATE FUNCTION accept_message(
    p_subscriber text,
    p_message_id uuid,
    p_account bigint,
    p_payload jsonb DEFAULT NULL
) RETURNS bool
VOLATILE PARALLEL UNSAFE
LANGUAGE c
AS 'MODULE_PATHNAME', 'accept_message_wrapper';

CREATE FUNCTION accept_messages(
    p_subscriber text,
    p_message_ids uuid[],
    p_account_ids bigint[],
    p_payloads jsonb[] DEFAULT NULL
) RETURNS SETOF uuid
VOLATILE PARALLEL UNSAFE
LANGUAGE c
AS 'MODULE_PATHNAME', 'accept_messages_wrapper';

CREATE FUNCTION accept_version(
    p_subscriber text,
    p_entity text,
    p_version bigint
) RETURNS bool
VOLATILE PARALLEL UNSAFE
LANGUAGE c
AS 'MODULE_PATHNAME', 'accept_version_wrapper';

CREATE FUNCTION apply_message_once(
    p_subscriber text,
    p_message_id uuid,
    p_account bigint,
    p_delta bigint,
    p_payload jsonb DEFAULT NULL
) RETURNS bigint
VOLATILE PARALLEL UNSAFE
LANGUAGE c
AS 'MODULE_PATHNAME', 'apply_message_once_wrapper';

CREATE FUNCTION cancel_request(
    p_account bigint,
    p_operation text,
    p_key text
) RETURNS jsonb
VOLATILE PARALLEL UNSAFE
LANGUAGE c
AS 'MODULE_PATHNAME', 'cancel_request_wrapper';

CREATE FUNCTION credit_once(
    p_account bigint,
    p_key text,
    p_amount bigint
) RETURNS jsonb
VOLATILE PARALLEL UNSAFE
LANGUAGE c
AS 'MODULE_PATHNAME', 'credit_once_wrapper';

CREATE FUNCTION credit_once_outcome(
    p_account bigint,
    p_key text,
    p_amount bigint
) RETURNS TABLE (
    response jsonb,
    replayed bool,
    executed_at timestamp with time zone,
    expires_at timestamp with time zone
)
VOLATILE PARALLEL UNSAFE
LANGUAGE c
AS 'MODULE_PATHNAME', 'credit_once_outcome_wrapper';

CREATE FUNCTION debit_once_outcome(
    p_account bigint,
    p_key text,
    p_amount bigint
) RETURNS TABLE (
    response jsonb,
    replayed bool,
    executed_at timestamp with time zone,
    expires_at timestamp with time zone
)
VOLATILE PARALLEL UNSAFE
LANGUAGE c
AS 'MODULE_PATHNAME', 'debit_once_outcome_wrapper';

CREATE FUNCTION request_fingerprint(
    p_request jsonb
) RETURNS bytea
IMMUTABLE STRICT PARALLEL SAFE
LANGUAGE c
AS 'MODULE_PATHNAME', 'request_fingerprint_wrapper';

CREATE FUNCTION run_once(
    p_account bigint,
    p_operation text,
    p_key text,
    p_request jsonb,
    p_handler regprocedure
) RETURNS jsonb
VOLATILE PARALLEL UNSAFE
LANGUAGE c
AS 'MODULE_PATHNAME', 'run_once_wrapper';

CREATE FUNCTION run_once_outcome(
    p_account bigint,
    p_operation text,
    p_key text,
    p_request jsonb,
    p_handler regprocedure
) RETURNS TABLE (
    response jsonb,
    replayed bool,
    executed_at timestamp with time zone,
    expires_at timestamp with time zone
)
VOLATILE PARALLEL UNSAFE
LANGUAGE c
AS 'MODULE_PATHNAME', 'run_once_outcome_wrapper';

CREATE FUNCTION find_request(p_account bigint, p_operation text, p_key text) RETURNS TABLE (
    account_id          bigint,
    operation           text,
    request_key         text,
    request             jsonb,
    response            jsonb,
    created_at          timestamptz,
    request_fingerprint bytea,
    cancelled           boolean
)
LANGUAGE sql STABLE PARALLEL SAFE ROWS 1
BEGIN ATOMIC
    SELECT r.account_id, r.operation, r.request_key, r.request, r.response, r.created_at, r.request_fingerprint, r.cancelled
      FROM request_result AS r
     WHERE r.account_id = p_account AND r.operation = p_operation AND r.request_key = p_key;
END;

REVOKE ALL ON TABLE accepted_version, operation_policy FROM PUBLIC;

-- Whoever executes it moves money.
COMMENT ON FUNCTION debit_once(bigint, text, bigint) IS
    'Debits p_account by p_amount integer units once for each p_key, and returns {"balance": n}; a repeat returns the first answer and writes nothing. The caller needs EXECUTE, SELECT and UPDATE on account, SELECT and INSERT on request_result.';
REVOKE ALL ON FUNCTION debit_once_outcome(bigint, text, bigint) FROM PUBLIC;
COMMENT ON FUNCTION debit_once_outcome(bigint, text, bigint) IS
    'As debit_once, and says whether it was a replay, when it was executed, and when the record may be purged (NULL without a declared retention).';
REVOKE ALL ON FUNCTION credit_once(bigint, text, bigint) FROM PUBLIC;
COMMENT ON FUNCTION credit_once(bigint, text, bigint) IS
    'Credits p_account by p_amount integer units once for each p_key, and returns {"balance": n}; a repeat returns the first answer and writes nothing. The caller needs what debit_once needs.';
REVOKE ALL ON FUNCTION credit_once_outcome(bigint, text, bigint) FROM PUBLIC;
COMMENT ON FUNCTION credit_once_outcome(bigint, text, bigint) IS
    'As credit_once, and says whether it was a replay, when it was executed, and when the record may be purged (NULL without a declared retention).';
REVOKE ALL ON FUNCTION run_once(bigint, text, text, jsonb, regprocedure) FROM PUBLIC;
COMMENT ON FUNCTION run_once(bigint, text, text, jsonb, regprocedure) IS
    'Runs p_handler(p_account, p_request) once for each p_key and returns its result; a repeat returns the first result and runs nothing. The handler runs with the caller''s rights. The caller needs what debit_once needs, and EXECUTE on the handler.';
REVOKE ALL ON FUNCTION run_once_outcome(bigint, text, text, jsonb, regprocedure) FROM PUBLIC;
COMMENT ON FUNCTION run_once_outcome(bigint, text, text, jsonb, regprocedure) IS
    'As run_once, and says whether it was a replay, when it was executed, and when the record may be purged (NULL without a declared retention).';
REVOKE ALL ON FUNCTION cancel_request(bigint, text, text) FROM PUBLIC;
COMMENT ON FUNCTION cancel_request(bigint, text, text) IS
    'Makes sure that the request never runs, and returns NULL; or returns the saved response if it ran. Waits for an execution in flight. The caller needs what debit_once needs.';

-- It shows saved requests and responses.
REVOKE ALL ON FUNCTION find_request(bigint, text, text) FROM PUBLIC;
COMMENT ON FUNCTION find_request(bigint, text, text) IS
    'The record of a request as a row of request_result, or no row; reads only. The caller needs SELECT on request_result.';

-- It reads and writes nothing.
REVOKE ALL ON FUNCTION request_fingerprint(jsonb) FROM PUBLIC;
COMMENT ON FUNCTION request_fingerprint(jsonb) IS
    'The digest that is stored instead of a request or payload: the version byte 01 and the SHA-256 of the canonical form, see docs/reference.md.';

-- Whoever executes them says that a message was applied.
REVOKE ALL ON FUNCTION accept_message(text, uuid, bigint, jsonb) FROM PUBLIC;
COMMENT ON FUNCTION accept_message(text, uuid, bigint, jsonb) IS
    'Records a message for a subscriber: true the first time, when the caller makes its effect in the same transaction; false on a repeat. The caller needs EXECUTE, SELECT and INSERT on processed_message, SELECT and UPDATE on account.';
REVOKE ALL ON FUNCTION apply_message_once(text, uuid, bigint, bigint, jsonb) FROM PUBLIC;
COMMENT ON FUNCTION apply_message_once(text, uuid, bigint, bigint, jsonb) IS
    'Adds p_delta integer units to the account once for each message and subscriber, and returns the balance; NULL on a repeat. The caller needs what accept_message needs.';
REVOKE ALL ON FUNCTION accept_messages(text, uuid[], bigint[], jsonb[]) FROM PUBLIC;
COMMENT ON FUNCTION accept_messages(text, uuid[], bigint[], jsonb[]) IS
    'Records many messages for a subscriber and returns the ids that are new, in the order given; the caller makes their effects in the same transaction. The caller needs what accept_message needs, and EXECUTE on request_fingerprint.';
REVOKE ALL ON FUNCTION accept_version(text, text, bigint) FROM PUBLIC;
COMMENT ON FUNCTION accept_version(text, text, bigint) IS
    'Whether p_version is above the highest that the subscriber accepted for the entity, and accepts it if so: an older event cannot overwrite a newer one. The caller needs EXECUTE, and SELECT, INSERT and UPDATE on accepted_version.';
