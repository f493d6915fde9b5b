-- Who may do what. PUBLIC may do nothing, also where ALTER DEFAULT PRIVILEGES of the installing role says otherwise;
-- the DBA grants.

REVOKE ALL ON TABLE account, request_result, processed_message FROM PUBLIC;

-- Whoever executes it moves money.
REVOKE ALL ON FUNCTION debit_once(bigint, text, bigint) FROM PUBLIC;
COMMENT ON FUNCTION debit_once(bigint, text, bigint) IS
    'Debits p_account by p_amount integer units once for each p_key, and returns {"balance": n}; a repeat returns the first answer and writes nothing. The caller needs EXECUTE, SELECT and UPDATE on account, SELECT and INSERT on request_result.';

-- Whoever executes it with a short retention makes old keys executable again.
REVOKE ALL ON FUNCTION purge_expired_keys(interval) FROM PUBLIC;
COMMENT ON FUNCTION purge_expired_keys(interval) IS
    'Deletes the records of request_result older than p_retention and returns how many. Afterwards those keys are new keys: p_retention is what was promised to the slowest client. The caller needs EXECUTE, and SELECT, UPDATE and DELETE on request_result.';
