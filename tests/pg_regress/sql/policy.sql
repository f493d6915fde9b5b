-- The policy of an operation: whether refusals are saved, and whether the request is stored or its fingerprint alone.
\set VERBOSITY sqlstate
SET client_min_messages = warning;
CREATE EXTENSION idempotency_record;
-- Records are changed by hand as a superuser can who means it: the triggers that keep them as they are do not fire.
CREATE PROCEDURE tamper(statement text) LANGUAGE plpgsql SET session_replication_role = replica AS 'BEGIN EXECUTE statement; END';

-- Every field of an error of ours; of the server's errors the tests look at the SQLSTATE alone.
CREATE FUNCTION refusal(call text, OUT code text, OUT message text, OUT detail text, OUT hint text) LANGUAGE plpgsql AS $$
BEGIN
    EXECUTE call;
    code := '00000';
EXCEPTION WHEN OTHERS THEN
    GET STACKED DIAGNOSTICS code = RETURNED_SQLSTATE, message = MESSAGE_TEXT, detail = PG_EXCEPTION_DETAIL,
        hint = PG_EXCEPTION_HINT;
END $$;

CREATE VIEW books AS
    SELECT (SELECT string_agg(account_id || ':' || balance, ' ' ORDER BY account_id) FROM account) AS balances,
           (SELECT string_agg(concat_ws(':', account_id, operation, request_key), ' ' ORDER BY account_id, operation, request_key)
              FROM request_result) AS records;

CREATE TABLE run (what text);
CREATE FUNCTION note(bigint, p_request jsonb) RETURNS jsonb LANGUAGE sql AS
    'INSERT INTO run VALUES (''note'') RETURNING ''{"noted": true}''::jsonb';
INSERT INTO account VALUES (1, 1000), (2, 1000);

-- Defaults and checks.
INSERT INTO operation_policy (operation) VALUES ('debit:v1');
TABLE operation_policy;
INSERT INTO operation_policy (operation) VALUES ('debit:v1');
INSERT INTO operation_policy (operation) VALUES (NULL);
UPDATE operation_policy SET refusals = 'forget';
UPDATE operation_policy SET refusals = 'Save';
UPDATE operation_policy SET refusals = NULL;
UPDATE operation_policy SET stored_request = 'digest';
UPDATE operation_policy SET stored_request = NULL;
UPDATE operation_policy SET retention = '0';
UPDATE operation_policy SET retention = '-1 day';
UPDATE operation_policy SET refusals = 'save', stored_request = 'fingerprint', retention = '1 day';
UPDATE operation_policy SET refusals = 'raise', stored_request = 'full', retention = NULL;
TABLE operation_policy;
-- Table, columns and constraints are commented.
SELECT obj_description('operation_policy'::regclass) IS NOT NULL AS commented;
SELECT attname FROM pg_attribute WHERE attrelid = 'operation_policy'::regclass AND attnum > 0 AND col_description(attrelid, attnum) IS NULL;
SELECT conname FROM pg_constraint WHERE conrelid = 'operation_policy'::regclass AND contype <> 'n' AND obj_description(oid, 'pg_constraint') IS NULL;
-- pg_dump writes it.
SELECT 'operation_policy'::regclass = ANY (extconfig) AS dumped FROM pg_extension WHERE extname = 'idempotency_record';

-- refusals: raise, whether declared or by default, keeps nothing.
SELECT debit_once(1, 'raise', 2000);
DELETE FROM operation_policy;
SELECT debit_once(1, 'raise', 2000);
SELECT count(*) FROM request_result;

-- refusals: save. The refusal is the response, nothing is debited, and a repeat gets it also after a top-up, with the balance
-- of then; the policy of another operation does not count.
INSERT INTO operation_policy (operation, refusals) VALUES ('credit:v1', 'save'), ('debit:v2', 'save');
SELECT debit_once(1, 'raise', 2000);
UPDATE operation_policy SET operation = 'debit:v1' WHERE operation = 'debit:v2';
SELECT debit_once(1, 'save', 2000);
SELECT debit_once(1, 'save', 2000);
SELECT account_id, operation, request_key, request, response, cancelled FROM request_result;
UPDATE account SET balance = 5000 WHERE account_id = 1;
SELECT debit_once(1, 'save', 2000);
SELECT response, replayed FROM debit_once_outcome(1, 'save', 2000);
SELECT response, replayed, executed_at <= clock_timestamp() AS dated FROM debit_once_outcome(1, 'save outcome', 6000);
-- Another amount is a mismatch, also one that the balance allows.
\x on
SELECT * FROM refusal($$SELECT debit_once(1, 'save', 1)$$);
\x off
-- An amount that the balance allows is executed as ever; one that takes everything, too.
SELECT debit_once(1, 'enough', 4999), debit_once(1, 'all of it', 1), debit_once(1, 'one more', 1);
-- Only the insufficient balance is saved. Everything else raises and keeps nothing.
SELECT debit_once(404, 'unknown', 1);
SELECT debit_once(1, 'zero', 0);
INSERT INTO account VALUES (3, 9223372036854775807);
SELECT credit_once(3, 'overflow', 1);
TABLE books;
-- A saved refusal vanishes with its transaction.
BEGIN;
SELECT debit_once(1, 'rolled back', 5);
ROLLBACK;
UPDATE account SET balance = 5 WHERE account_id = 1;
SELECT debit_once(1, 'rolled back', 5);
-- A replay of it writes nothing.
BEGIN READ ONLY;
SELECT debit_once(1, 'save', 2000);
SELECT pg_current_xact_id_if_assigned() IS NULL AS no_transaction_id;
COMMIT;
-- Back to raise: what was saved stays saved, new refusals raise.
UPDATE operation_policy SET refusals = 'raise' WHERE operation = 'debit:v1';
SELECT debit_once(1, 'save', 2000);
SELECT debit_once(1, 'raise again', 2000);
-- What was raised before may be saved later, since nothing was kept.
UPDATE operation_policy SET refusals = 'save' WHERE operation = 'debit:v1';
SELECT debit_once(1, 'raise again', 2000);
-- Inside a handler the saved refusal is an answer, and the handler decides.
CREATE FUNCTION tries(p_account bigint, p_request jsonb) RETURNS jsonb LANGUAGE sql AS $$SELECT jsonb_build_array(debit_once(p_account, 'tried', 100000))$$;
SELECT run_once(1, 'try:v1', 't', '{}', 'tries(bigint, jsonb)');
DELETE FROM operation_policy;
CALL tamper($t$DELETE FROM request_result$t$);
UPDATE account SET balance = 1000;

-- stored_request: fingerprint. The request is nowhere; the digest is that of request_fingerprint.
INSERT INTO operation_policy (operation, stored_request) VALUES ('debit:v1', 'fingerprint'), ('note:v1', 'fingerprint');
SELECT debit_once(1, 'digest', 765);
SELECT debit_once(1, 'digest', 765), credit_once(1, 'in full', 765);
SELECT run_once(1, 'note:v1', 'n', '{"card": "4000-0000-0000-0002", "cvc": 737}', 'note(bigint, jsonb)');
SELECT run_once(1, 'note:v1', 'n', '{"cvc": 737.0, "card": "4000-0000-0000-0002"}', 'note(bigint, jsonb)');
SELECT operation, request_key, request, request_fingerprint = request_fingerprint(CASE operation
           WHEN 'note:v1' THEN jsonb '{"card": "4000-0000-0000-0002", "cvc": 737}' ELSE '{"amount": 765}' END) AS digest, response, cancelled
  FROM request_result ORDER BY operation, request_key;
SELECT count(*) AS rows_with_the_request FROM request_result AS r WHERE (to_jsonb(r) - 'created_at')::text SIMILAR TO '%(0002|737)%';
-- No row of any table of the extension has it.
CREATE FUNCTION tables_with(what text) RETURNS SETOF regclass LANGUAGE plpgsql AS $$
DECLARE
    t regclass;
    found_one boolean;
BEGIN
    FOR t IN SELECT unnest(extconfig) FROM pg_extension WHERE extname = 'idempotency_record' LOOP
        EXECUTE format('SELECT EXISTS (SELECT FROM %s AS r WHERE strpos(r::text, $1) > 0)', t) INTO found_one USING what;
        IF found_one THEN
            RETURN NEXT t;
        END IF;
    END LOOP;
END $$;
SELECT tables_with('noted');
SELECT tables_with('4000-0000-0000-0002');
SELECT tables_with('cvc');
-- A mismatch is one, on every path, and its DETAIL shows nothing that is saved.
SELECT code, message, strpos(concat(detail, hint), '765') AS shown FROM refusal($$SELECT debit_once(1, 'digest', 766)$$);
SELECT code, message, strpos(concat(detail, hint), '4000') AS shown
  FROM refusal($$SELECT run_once(1, 'note:v1', 'n', '{"card": "4000-0000-0000-0003", "cvc": 737}', 'note(bigint, jsonb)')$$);
SELECT code, message FROM refusal($$SELECT run_once(1, 'note:v1', 'n', 'null', 'note(bigint, jsonb)')$$);
SELECT code, message FROM refusal($$SELECT * FROM debit_once_outcome(1, 'digest', 766)$$);
-- A saved refusal has its digest, too.
UPDATE operation_policy SET refusals = 'save' WHERE operation = 'debit:v1';
SELECT debit_once(1, 'poor', 54321), debit_once(1, 'poor', 54321);
SELECT debit_once(1, 'poor', 54322);
SELECT request, request_fingerprint = request_fingerprint('{"amount": 54321}') AS digest FROM request_result WHERE request_key = 'poor';
SELECT count(*) AS runs FROM run;

-- Changing the policy keeps old records comparable, both ways.
SELECT run_once(1, 'note:v1', 'null', 'null', 'note(bigint, jsonb)');
UPDATE operation_policy SET stored_request = 'full';
SELECT debit_once(1, 'digest', 765), run_once(1, 'note:v1', 'n', '{"card": "4000-0000-0000-0002", "cvc": 737}', 'note(bigint, jsonb)'),
       run_once(1, 'note:v1', 'null', 'null', 'note(bigint, jsonb)');
SELECT debit_once(1, 'digest', 766);
SELECT run_once(1, 'note:v1', 'n', 'null', 'note(bigint, jsonb)');
SELECT run_once(1, 'note:v1', 'null', '{}', 'note(bigint, jsonb)');
SELECT debit_once(1, 'full', 7), run_once(1, 'note:v1', 'full', 'null', 'note(bigint, jsonb)');
SELECT operation, request, request_fingerprint FROM request_result WHERE request_key = 'full' ORDER BY operation;
DELETE FROM operation_policy;
SELECT debit_once(1, 'digest', 765), debit_once(1, 'full', 7);
INSERT INTO operation_policy (operation, stored_request) VALUES ('debit:v1', 'fingerprint'), ('note:v1', 'fingerprint');
SELECT debit_once(1, 'full', 7), run_once(1, 'note:v1', 'full', 'null', 'note(bigint, jsonb)');
SELECT debit_once(1, 'full', 8);
SELECT run_once(1, 'note:v1', 'full', '{}', 'note(bigint, jsonb)');
SELECT count(*) AS runs FROM run;
-- A fingerprint of a version that a later library left is compared by nobody here: refused, never executed or replayed.
CALL tamper($t$UPDATE request_result SET request_fingerprint = '\xff00' WHERE request_key = 'digest'$t$);
SELECT code, message FROM refusal($$SELECT debit_once(1, 'digest', 765)$$);
-- A request nested too deeply for a fingerprint is refused with nothing kept, and is no trouble in full.
SELECT code, message FROM refusal($$SELECT run_once(1, 'note:v1', 'deep', (repeat('[', 128) || repeat(']', 128))::jsonb, 'note(bigint, jsonb)')$$);
SELECT count(*) AS kept, (SELECT count(*) FROM run) AS runs FROM request_result WHERE request_key = 'deep';
UPDATE operation_policy SET stored_request = 'full';
SELECT run_once(1, 'note:v1', 'deep', (repeat('[', 128) || repeat(']', 128))::jsonb, 'note(bigint, jsonb)'),
       run_once(1, 'note:v1', 'deep', (repeat('[', 128) || repeat(']', 128))::jsonb, 'note(bigint, jsonb)');
TABLE books;

-- A table that is not what it was created as is not taken for one without policies.
BEGIN;
ALTER TABLE operation_policy ALTER COLUMN stored_request TYPE varchar(20);
SELECT code FROM refusal($$SELECT debit_once(1, 'altered', 1)$$);
ROLLBACK;
BEGIN;
-- The view, which needs the column as it is, has to go for that.
ALTER EXTENSION idempotency_record DROP VIEW retention_status;
DROP VIEW retention_status;
ALTER TABLE operation_policy DROP CONSTRAINT operation_policy_pkey, DROP CONSTRAINT operation_policy_operation_check;
DELETE FROM operation_policy;
ALTER TABLE operation_policy ALTER COLUMN operation TYPE bigint USING 7;
INSERT INTO operation_policy (operation) VALUES (7);
SELECT code FROM refusal($$SELECT debit_once(1, 'altered', 1)$$);
ROLLBACK;
BEGIN;
ALTER TABLE operation_policy DROP COLUMN refusals;
SELECT code FROM refusal($$SELECT debit_once(1, 'altered', 1)$$);
ROLLBACK;
ALTER TABLE operation_policy RENAME TO policy_of_operation;
\c -
\set VERBOSITY sqlstate
SELECT code FROM refusal($$SELECT debit_once(1, 'altered', 1)$$);
ALTER TABLE policy_of_operation RENAME TO operation_policy;
\c -
\set VERBOSITY sqlstate
-- In another primary key it is the same table.
BEGIN;
ALTER TABLE operation_policy DROP CONSTRAINT operation_policy_pkey;
DELETE FROM operation_policy;
ALTER TABLE operation_policy ADD PRIMARY KEY (stored_request);
INSERT INTO operation_policy (operation, stored_request) VALUES ('debit:v1', 'fingerprint');
SELECT debit_once(1, 'another key', 1) IS NOT NULL AS executed;
SELECT request, request_fingerprint IS NOT NULL AS fingerprint FROM request_result WHERE request_key = 'another key';
ROLLBACK;

-- A name that no operation can have would have no effect.
INSERT INTO operation_policy (operation) VALUES ('debit');
INSERT INTO operation_policy (operation) VALUES ('debit:v0');
INSERT INTO operation_policy (operation) VALUES (repeat('n', 61) || ':v1');
INSERT INTO operation_policy (operation) VALUES (repeat('n', 60) || ':v1');

-- A retention that is nothing in some months, or too long for the calendar, would be found out too late.
INSERT INTO operation_policy (operation, retention) VALUES ('month:v1', '1 month -29 days');
INSERT INTO operation_policy (operation, retention) VALUES ('ages:v1', '300000 years');
INSERT INTO operation_policy (operation, retention) VALUES ('month:v1', '1 month'), ('ages:v1', '1000 years');

DROP VIEW books;
DROP EXTENSION idempotency_record;
