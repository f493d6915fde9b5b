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
    'How long a record of the operation is kept, hence a repeat''s answer; NULL: as long as idempotency_record.retention says.';
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
