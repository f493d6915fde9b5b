CREATE TABLE request_result (
    account_id  bigint NOT NULL,
    operation   text COLLATE "C" NOT NULL,
    request_key text COLLATE "C" NOT NULL,
    request     jsonb NOT NULL,
    response    jsonb NOT NULL,
    created_at  timestamptz NOT NULL DEFAULT clock_timestamp(),
    request_fingerprint bytea,
    cancelled   boolean NOT NULL DEFAULT false,
    CONSTRAINT request_result_pkey PRIMARY KEY (account_id, operation, request_key),
    CONSTRAINT request_result_account_id_fkey FOREIGN KEY (account_id) REFERENCES account
);

CREATE INDEX request_result_operation_created_at_idx ON request_result (operation, created_at);

COMMENT ON TABLE request_result IS
    'One idempotency record for each executed request: the key, the request and the response, stored in the same transaction as the effect. Written by debit_once, credit_once, run_once and cancel_request, deleted by purge; a row that is deleted by hand makes its key executable again.';
COMMENT ON COLUMN request_result.account_id IS
    'The account, first part of the scope of the key.';
COMMENT ON COLUMN request_result.operation IS
    'The named and versioned contract, such as debit:v1, second part of the scope of the key.';
COMMENT ON COLUMN request_result.request_key IS
    'The client''s key, 1 to 255 bytes, compared byte for byte whatever the database''s collation.';
COMMENT ON COLUMN request_result.request IS
    'The normalized request, such as {"amount": 100}. A repeat with another request is refused.';
COMMENT ON COLUMN request_result.response IS
    'What the first execution answered, such as {"balance": 900}. A repeat gets exactly this.';
COMMENT ON COLUMN request_result.created_at IS
    'When the request was executed, by the database''s clock; retention counts from here. Not the start of the transaction, which would make a key look old that a long transaction has just committed.';
COMMENT ON COLUMN request_result.request_fingerprint IS
    'The digest of the request where the operation''s policy keeps no more than that, and request is null; else NULL.';
COMMENT ON COLUMN request_result.cancelled IS
    'Whether cancel_request took the key before the request ran. It never will; request and response are null.';
COMMENT ON CONSTRAINT request_result_pkey ON request_result IS
    'Decides which of two sessions executes. Dropping it switches idempotency off.';
COMMENT ON CONSTRAINT request_result_account_id_fkey ON request_result IS
    'An account with live records cannot be deleted.';
COMMENT ON INDEX request_result_operation_created_at_idx IS
    'Makes a purge cost what it deletes, not what the table holds, whatever the others'' retention is.';

SELECT pg_catalog.pg_extension_config_dump('request_result', '');
