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
