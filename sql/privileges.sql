-- Who may do what. PUBLIC may do nothing, also where ALTER DEFAULT PRIVILEGES of the installing role says otherwise;
-- the DBA grants.

REVOKE ALL ON TABLE account, request_result, processed_message, accepted_version, operation_policy FROM PUBLIC;

-- Whoever executes it moves money.
REVOKE ALL ON FUNCTION debit_once(bigint, text, bigint) FROM PUBLIC;
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

-- Whoever executes it with a short retention makes old keys executable again.
REVOKE ALL ON FUNCTION purge_expired_keys(interval) FROM PUBLIC;
COMMENT ON FUNCTION purge_expired_keys(interval) IS
    'Deletes the records of request_result older than p_retention and returns how many. Afterwards those keys are new keys: p_retention is what was promised to the slowest client. The caller needs EXECUTE, and SELECT, UPDATE and DELETE on request_result.';
