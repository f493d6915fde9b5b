-- Who may do what. PUBLIC may do nothing, also where ALTER DEFAULT PRIVILEGES of the installing role says otherwise;
-- the DBA grants. EXECUTE is all that a function asks of its caller: on the tables it uses the privileges of their owner.

REVOKE ALL ON TABLE account, request_result, processed_message, accepted_version, operation_policy, subscriber_policy,
    retention_fence, purge_progress, purge_lock, retention_status FROM PUBLIC;

-- Whoever executes it moves money.
REVOKE ALL ON FUNCTION debit_once(bigint, text, bigint) FROM PUBLIC;
COMMENT ON FUNCTION debit_once(bigint, text, bigint) IS
    'Debits p_account by p_amount integer units once for each p_key, and returns {"balance": n}; a repeat returns the first answer and writes nothing. The caller needs EXECUTE.';
REVOKE ALL ON FUNCTION debit_once(bigint, text, bigint, timestamptz) FROM PUBLIC;
COMMENT ON FUNCTION debit_once(bigint, text, bigint, timestamptz) IS
    'As debit_once without a date; p_first_sent is when the client first sent the request, by its own clock. If there is no record, and records as old as that were purged, the call is refused: it may have been executed.';
REVOKE ALL ON FUNCTION debit_once_outcome(bigint, text, bigint) FROM PUBLIC;
COMMENT ON FUNCTION debit_once_outcome(bigint, text, bigint) IS
    'As debit_once, and says whether it was a replay, when it was executed, and when the record may be purged (NULL where a call without a key left no record).';
REVOKE ALL ON FUNCTION debit_once_outcome(bigint, text, bigint, timestamptz) FROM PUBLIC;
COMMENT ON FUNCTION debit_once_outcome(bigint, text, bigint, timestamptz) IS
    'As debit_once_outcome without a date; p_first_sent is when the client first sent the request, by its own clock. If there is no record, and records as old as that were purged, the call is refused: it may have been executed.';
REVOKE ALL ON FUNCTION credit_once(bigint, text, bigint) FROM PUBLIC;
COMMENT ON FUNCTION credit_once(bigint, text, bigint) IS
    'Credits p_account by p_amount integer units once for each p_key, and returns {"balance": n}; a repeat returns the first answer and writes nothing. The caller needs EXECUTE.';
REVOKE ALL ON FUNCTION credit_once(bigint, text, bigint, timestamptz) FROM PUBLIC;
COMMENT ON FUNCTION credit_once(bigint, text, bigint, timestamptz) IS
    'As credit_once without a date; p_first_sent is when the client first sent the request, by its own clock. If there is no record, and records as old as that were purged, the call is refused: it may have been executed.';
REVOKE ALL ON FUNCTION credit_once_outcome(bigint, text, bigint) FROM PUBLIC;
COMMENT ON FUNCTION credit_once_outcome(bigint, text, bigint) IS
    'As credit_once, and says whether it was a replay, when it was executed, and when the record may be purged (NULL where a call without a key left no record).';
REVOKE ALL ON FUNCTION credit_once_outcome(bigint, text, bigint, timestamptz) FROM PUBLIC;
COMMENT ON FUNCTION credit_once_outcome(bigint, text, bigint, timestamptz) IS
    'As credit_once_outcome without a date; p_first_sent is when the client first sent the request, by its own clock. If there is no record, and records as old as that were purged, the call is refused: it may have been executed.';
REVOKE ALL ON FUNCTION debit_batch_once(bigint[], text[], bigint[]) FROM PUBLIC;
COMMENT ON FUNCTION debit_batch_once(bigint[], text[], bigint[]) IS
    'Debits once for each key, as debit_once would one after the other, and returns a row for each element, in their order: the response and whether it is a replay, or SQLSTATE and message of its refusal. The caller needs EXECUTE.';
REVOKE ALL ON FUNCTION credit_batch_once(bigint[], text[], bigint[]) FROM PUBLIC;
COMMENT ON FUNCTION credit_batch_once(bigint[], text[], bigint[]) IS
    'Credits once for each key, as credit_once would one after the other, and returns a row for each element, in their order: the response and whether it is a replay, or SQLSTATE and message of its refusal. The caller needs EXECUTE.';
-- Whoever executes it chooses what becomes the record of any operation that is not built in.
REVOKE ALL ON FUNCTION run_once(bigint, text, text, jsonb, regprocedure) FROM PUBLIC;
COMMENT ON FUNCTION run_once(bigint, text, text, jsonb, regprocedure) IS
    'Runs p_handler(p_account, p_request) once for each p_key and returns its result; a repeat returns the first result and runs nothing. The handler runs with the caller''s rights. The caller needs EXECUTE on both.';
REVOKE ALL ON FUNCTION run_once(bigint, text, text, jsonb, regprocedure, timestamptz) FROM PUBLIC;
COMMENT ON FUNCTION run_once(bigint, text, text, jsonb, regprocedure, timestamptz) IS
    'As run_once without a date; p_first_sent as for debit_once.';
REVOKE ALL ON FUNCTION run_once_outcome(bigint, text, text, jsonb, regprocedure) FROM PUBLIC;
COMMENT ON FUNCTION run_once_outcome(bigint, text, text, jsonb, regprocedure) IS
    'As run_once, and says whether it was a replay, when it was executed, and when the record may be purged (NULL where a call without a key left no record).';
REVOKE ALL ON FUNCTION run_once_outcome(bigint, text, text, jsonb, regprocedure, timestamptz) FROM PUBLIC;
COMMENT ON FUNCTION run_once_outcome(bigint, text, text, jsonb, regprocedure, timestamptz) IS
    'As run_once_outcome without a date; p_first_sent as for debit_once.';
REVOKE ALL ON FUNCTION cancel_request(bigint, text, text) FROM PUBLIC;
COMMENT ON FUNCTION cancel_request(bigint, text, text) IS
    'Makes sure that the request never runs, and returns NULL; or returns the saved response if it ran. Waits for an execution in flight. The caller needs EXECUTE.';

-- It shows saved requests and responses.
REVOKE ALL ON FUNCTION find_request(bigint, text, text) FROM PUBLIC;
COMMENT ON FUNCTION find_request(bigint, text, text) IS
    'The record of a request as a row of request_result, or no row; reads only. The caller needs EXECUTE.';

-- It reads and writes nothing.
REVOKE ALL ON FUNCTION request_fingerprint(jsonb) FROM PUBLIC;
COMMENT ON FUNCTION request_fingerprint(jsonb) IS
    'The digest that is stored instead of a request or payload: the version byte 01 and the SHA-256 of the canonical form, see docs/reference.md.';

-- Whoever executes them says that a message was applied.
REVOKE ALL ON FUNCTION accept_message(text, uuid, bigint, jsonb) FROM PUBLIC;
COMMENT ON FUNCTION accept_message(text, uuid, bigint, jsonb) IS
    'Records a message for a subscriber: true the first time, when the caller makes its effect in the same transaction; false on a repeat. The caller needs EXECUTE.';
REVOKE ALL ON FUNCTION apply_message_once(text, uuid, bigint, bigint, jsonb) FROM PUBLIC;
COMMENT ON FUNCTION apply_message_once(text, uuid, bigint, bigint, jsonb) IS
    'Adds p_delta integer units to the account once for each message and subscriber, and returns the balance; NULL on a repeat. The caller needs EXECUTE.';
REVOKE ALL ON FUNCTION accept_messages(text, uuid[], bigint[], jsonb[]) FROM PUBLIC;
COMMENT ON FUNCTION accept_messages(text, uuid[], bigint[], jsonb[]) IS
    'Records many messages for a subscriber and returns the ids that are new, in the order given; the caller makes their effects in the same transaction. The caller needs EXECUTE.';
REVOKE ALL ON FUNCTION accept_version(text, text, bigint) FROM PUBLIC;
COMMENT ON FUNCTION accept_version(text, text, bigint) IS
    'Whether p_version is above the highest that the subscriber accepted for the entity, and accepts it if so: an older event cannot overwrite a newer one. The caller needs EXECUTE.';

-- Whoever executes one with a short retention makes undated keys executable again.
REVOKE ALL ON FUNCTION purge_expired_keys(interval) FROM PUBLIC;
COMMENT ON FUNCTION purge_expired_keys(interval) IS
    'Deletes the records of request_result older than p_retention and returns how many; never waits. Afterwards those keys are new keys, and dated ones are refused: p_retention is what was promised to the slowest client. The caller needs EXECUTE.';
REVOKE ALL ON FUNCTION purge_expired_keys() FROM PUBLIC;
COMMENT ON FUNCTION purge_expired_keys() IS
    'Deletes the records of request_result older than the retention of their operation (operation_policy, else idempotency_record.retention), and returns how many. The caller needs EXECUTE.';
REVOKE ALL ON FUNCTION purge_processed_messages(interval) FROM PUBLIC;
COMMENT ON FUNCTION purge_processed_messages(interval) IS
    'Deletes the records of processed_message older than p_retention and returns how many; never waits. Afterwards a redelivery is a new message, unless its id is dated. The caller needs EXECUTE.';
REVOKE ALL ON FUNCTION purge_processed_messages() FROM PUBLIC;
COMMENT ON FUNCTION purge_processed_messages() IS
    'Deletes the records of processed_message older than the retention of their subscriber (subscriber_policy, else idempotency_record.message_retention), and returns how many. The caller needs EXECUTE.';
REVOKE ALL ON PROCEDURE purge(bigint, interval, bigint, bigint, timestamptz) FROM PUBLIC;
COMMENT ON PROCEDURE purge(bigint, interval, bigint, bigint, timestamptz) IS
    'Deletes everything that is older than its retention, in batches of p_batch_size records with a commit after each, until p_time_budget has passed (NULL: no limit). CALL purge() returns how many records it deleted, how many expired ones remain, and when the oldest that is left was made. The caller needs EXECUTE.';

-- It shows no record.
REVOKE ALL ON FUNCTION retention_setting() FROM PUBLIC;
COMMENT ON FUNCTION retention_setting() IS
    'The retention of requests and of messages where no policy declares one, and whether a worker purges this database: on, or what is missing. Readers of retention_status need EXECUTE.';

REVOKE ALL ON FUNCTION keep_record() FROM PUBLIC;
COMMENT ON FUNCTION keep_record() IS
    'The trigger function that keeps records as they are.';
