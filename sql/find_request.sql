CREATE FUNCTION find_request(p_account bigint, p_operation text, p_key text) RETURNS SETOF request_result
LANGUAGE sql STABLE PARALLEL SAFE ROWS 1
BEGIN ATOMIC
    SELECT r.*
      FROM request_result AS r
     WHERE r.account_id = p_account AND r.operation = p_operation AND r.request_key = p_key;
END;
