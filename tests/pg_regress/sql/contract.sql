-- What debit_once promises to one session. Plain statements print the SQLSTATE alone, since the server's messages
-- come in many languages; refusal() prints every field of the errors whose texts are ours.
\set VERBOSITY sqlstate
SET client_min_messages = warning;
CREATE EXTENSION idempotency_record;
-- Records are changed by hand as a superuser can who means it: the triggers that keep them as they are do not fire.
CREATE PROCEDURE tamper(statement text) LANGUAGE plpgsql SET session_replication_role = replica AS 'BEGIN EXECUTE statement; END';

CREATE FUNCTION refusal(call text, OUT code text, OUT message text, OUT detail text, OUT hint text,
                        OUT constraint_name text) LANGUAGE plpgsql AS $$
BEGIN
    EXECUTE call;
    code := '00000';
EXCEPTION WHEN OTHERS THEN
    GET STACKED DIAGNOSTICS code = RETURNED_SQLSTATE, message = MESSAGE_TEXT, detail = PG_EXCEPTION_DETAIL,
        hint = PG_EXCEPTION_HINT, constraint_name = CONSTRAINT_NAME;
END $$;

CREATE FUNCTION code_of(call text, OUT code text, OUT constraint_name text) LANGUAGE sql AS
    'SELECT code, constraint_name FROM refusal(call)';

-- The WAL records that a statement of this session writes, whatever other processes write meanwhile.
CREATE FUNCTION wal_records(statement text) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
    plan json;
BEGIN
    EXECUTE 'EXPLAIN (ANALYZE, WAL, FORMAT JSON) ' || statement INTO plan;
    RETURN plan #>> '{0,Plan,WAL Records}';
END $$;

CREATE VIEW books AS
    SELECT (SELECT string_agg(account_id || ':' || balance, ' ' ORDER BY account_id) FROM account) AS balances,
           (SELECT string_agg(account_id || ':' || request_key, ' ' ORDER BY account_id, request_key)
              FROM request_result) AS records;

INSERT INTO account VALUES (1, 1000), (2, 100);

-- The first call debits and answers with the new balance.
SELECT debit_once(1, 'checkout-42', 100);
TABLE books;

-- A repeat answers the same and changes nothing, however often it comes.
SELECT debit_once(1, 'checkout-42', 100);
SELECT debit_once(1, 'checkout-42', 100) FROM generate_series(1, 3);
TABLE books;

-- A repeat from another session answers the same.
\c -
\set VERBOSITY sqlstate
SET client_min_messages = warning;
SELECT debit_once(1, 'checkout-42', 100);

-- The answer is the saved one and never today's balance.
SELECT debit_once(1, 'between', 50);
SELECT debit_once(1, 'checkout-42', 100);
SELECT debit_once(1, 'between', 50);
TABLE books;

-- The record holds scope, request and response, and the time of the call rather than of its transaction.
SELECT account_id, operation, request_key, request, response FROM request_result ORDER BY request_key;
BEGIN;
SELECT pg_sleep(0.01);
SELECT debit_once(2, 'clock', 1);
SELECT created_at > now() + interval '10 milliseconds' AND created_at <= clock_timestamp() AS time_of_the_call
  FROM request_result WHERE request_key = 'clock';
ROLLBACK;

-- A repeat is answered byte for byte with what is stored, whatever that is.
INSERT INTO request_result (account_id, operation, request_key, request, response)
VALUES (2, 'debit:v1', 'stored', '{"amount": 7}',
        '{"balance": 12345678901234567890.10, "note": "a \"b\" \\", "list": [1, null, {"a": 1e3}]}');
SELECT debit_once(2, 'stored', 7)::text = response::text AS same, debit_once(2, 'stored', 7)
  FROM request_result WHERE request_key = 'stored';
CALL tamper($t$DELETE FROM request_result WHERE request_key = 'stored'$t$);

-- A repeat with another amount is refused, names the field, shows no saved value, and changes nothing.
\x on
SELECT * FROM refusal($$SELECT debit_once(1, 'checkout-42', 101)$$);
SELECT * FROM refusal($$SELECT debit_once(1, 'checkout-42', 99)$$);
\x off
TABLE books;

-- Key and positive amount are required: every combination, before anything is looked up.
\x on
SELECT * FROM refusal($$SELECT debit_once(1, NULL, 100)$$);
\x off
SELECT account, quote_nullable(key) AS key, amount, code, message
  FROM unnest(ARRAY[1, 404, NULL]) AS account,
       unnest(ARRAY['checkout-42', 'new', '', NULL]) AS key,
       unnest(ARRAY[100, 0, -1, NULL]) AS amount,
       refusal(format('SELECT debit_once(%L, %L, %L)', account, key, amount))
 WHERE coalesce(key, '') = '' OR coalesce(amount, 0) <= 0
 ORDER BY account, key, amount;
TABLE books;

-- An account is required.
\x on
SELECT * FROM refusal($$SELECT debit_once(NULL, 'k', 100)$$);
\x off
TABLE books;

-- An amount above the balance is refused and the key is not kept: after a top-up the same key succeeds.
\x on
SELECT * FROM refusal($$SELECT debit_once(2, 'poor', 101)$$);
\x off
TABLE books;
UPDATE account SET balance = balance + 1 WHERE account_id = 2;
SELECT debit_once(2, 'poor', 101);
SELECT debit_once(2, 'poor', 101);
-- The other amount is now a mismatch, and no longer an insufficient balance.
SELECT debit_once(2, 'poor', 102);
TABLE books;

-- A refused key may come back with another amount, since nothing was kept.
SELECT debit_once(2, 'changes', 5);
UPDATE account SET balance = 4 WHERE account_id = 2;
SELECT debit_once(2, 'changes', 4);

-- A repeat is answered also when the balance no longer suffices for it.
SELECT debit_once(2, 'poor', 101);
TABLE books;

-- An unknown account is refused by name and nothing is kept: once it exists, the same key executes.
\x on
SELECT * FROM refusal($$SELECT debit_once(404, 'early', 1)$$);
SELECT * FROM refusal($$SELECT debit_once(-9223372036854775808, 'early', 1)$$);
\x off
TABLE books;
INSERT INTO account VALUES (404, 1);
SELECT debit_once(404, 'early', 1);
CALL tamper($t$DELETE FROM request_result WHERE account_id = 404$t$);
DELETE FROM account WHERE account_id = 404;

-- A key of more than 255 bytes is refused with the limit and its length, and nothing is kept.
\x on
SELECT * FROM refusal($$SELECT debit_once(1, repeat('k', 256), 1)$$);
\x off
TABLE books;

-- Effect and record vanish together when the caller rolls back; the key is free.
BEGIN;
SELECT debit_once(1, 'rolled-back', 100);
ROLLBACK;
TABLE books;
SELECT debit_once(1, 'rolled-back', 10);

-- They vanish together with a savepoint; the key is free in the same transaction, also for another amount.
BEGIN;
SELECT debit_once(1, 'kept', 1);
SAVEPOINT s;
SELECT debit_once(1, 'savepoint', 100);
SELECT debit_once(1, 'kept', 1);
ROLLBACK TO SAVEPOINT s;
TABLE books;
SELECT debit_once(1, 'savepoint', 9);
COMMIT;
TABLE books;

-- They stay together with a released savepoint.
BEGIN;
SAVEPOINT s;
SELECT debit_once(1, 'released', 10);
RELEASE SAVEPOINT s;
COMMIT;
SELECT debit_once(1, 'released', 10);

-- Once in one transaction: the second call replays, another amount is refused.
BEGIN;
SELECT debit_once(1, 'twice', 10);
SELECT debit_once(1, 'twice', 10);
SELECT debit_once(1, 'twice', 11);
ROLLBACK;

-- Once in one statement.
SELECT debit_once(1, 'statement', 10), debit_once(1, 'statement', 10);
SELECT debit_once(1, 'rows', 10) FROM generate_series(1, 3);
WITH a AS MATERIALIZED (SELECT debit_once(1, 'cte', 10) AS x),
     b AS MATERIALIZED (SELECT debit_once(1, 'cte', 10) AS x)
SELECT a.x, b.x FROM a, b;
SELECT debit_once(1, 'mixed', 10), debit_once(1, 'mixed', 11);
TABLE books;

-- Under REPEATABLE READ and SERIALIZABLE one session executes and replays like under READ COMMITTED.
BEGIN ISOLATION LEVEL REPEATABLE READ;
SELECT debit_once(1, 'repeatable', 10);
SELECT debit_once(1, 'repeatable', 10), debit_once(1, 'twice-repeatable', 10);
COMMIT;
BEGIN ISOLATION LEVEL SERIALIZABLE;
SELECT debit_once(1, 'repeatable', 10);
SELECT debit_once(1, 'repeatable', 11);
ROLLBACK;

-- A replay works in a READ ONLY transaction; there, a mismatch is a mismatch and a new key is refused with 25006.
BEGIN READ ONLY;
SELECT debit_once(1, 'checkout-42', 100);
SAVEPOINT s;
SELECT debit_once(1, 'checkout-42', 101);
ROLLBACK TO SAVEPOINT s;
SELECT debit_once(1, 'read-only', 1);
ROLLBACK TO SAVEPOINT s;
SELECT debit_once(1, 'checkout-42', 100);
COMMIT;
BEGIN ISOLATION LEVEL SERIALIZABLE READ ONLY DEFERRABLE;
SELECT debit_once(1, 'checkout-42', 100);
COMMIT;
TABLE books;

-- A replay and a mismatch take no transaction id; a new key does.
BEGIN;
SELECT debit_once(1, 'checkout-42', 100);
SELECT debit_once(1, 'checkout-42', 100);
SELECT pg_current_xact_id_if_assigned() IS NULL AS no_transaction_id;
SAVEPOINT s;
SELECT debit_once(1, 'checkout-42', 101);
ROLLBACK TO SAVEPOINT s;
SELECT pg_current_xact_id_if_assigned() IS NULL AS no_transaction_id;
SELECT debit_once(1, 'takes-one', 1);
SELECT pg_current_xact_id_if_assigned() IS NULL AS no_transaction_id;
ROLLBACK;

-- A replay takes no lock but a reader's.
BEGIN;
SELECT debit_once(1, 'checkout-42', 100);
SELECT DISTINCT mode FROM pg_locks WHERE pid = pg_backend_pid() AND locktype IN ('relation', 'tuple', 'advisory')
   AND database = (SELECT oid FROM pg_database WHERE datname = current_database());
COMMIT;

-- A replay writes no row version and no WAL. The first one may set hint bits, which is why the second one counts.
CREATE VIEW versions AS
    SELECT 'account' AS name, ctid AS place, xmin AS born, xmax AS locked FROM account UNION ALL
    SELECT 'request_result', ctid, xmin, xmax FROM request_result;
CREATE TEMPORARY TABLE before AS TABLE versions;
SELECT debit_once(1, 'checkout-42', 100);
SELECT wal_records($$SELECT debit_once(1, 'checkout-42', 100)$$);
SELECT count(*) AS changed FROM (TABLE versions EXCEPT TABLE before) AS changes;
-- The same measurement sees a new key.
SELECT wal_records($$SELECT debit_once(1, 'fresh', 1)$$) > 0 AS written;
SELECT count(*) AS changed FROM (TABLE versions EXCEPT TABLE before) AS changes;
DROP TABLE before;
DROP VIEW versions;

-- Inserting a stored identity by hand hits the primary key.
SELECT * FROM code_of($$INSERT INTO request_result (account_id, operation, request_key, request, response)
    VALUES (1, 'debit:v1', 'checkout-42', '{"amount": 100}', '{"balance": 900}')$$);
-- Nor is another record changed into it: a record is never changed.
SELECT * FROM code_of($$UPDATE request_result SET request_key = 'checkout-42' WHERE request_key = 'between'$$);

-- An account with records cannot be deleted, and no record can name an unknown account.
SELECT * FROM code_of('DELETE FROM account WHERE account_id = 1');
SELECT * FROM code_of($$INSERT INTO request_result (account_id, operation, request_key, request, response)
    VALUES (404, 'debit:v1', 'k', '{}', '{}')$$);

-- No balance can be negative, and none of the columns can be NULL.
SELECT * FROM code_of('UPDATE account SET balance = -1 WHERE account_id = 1');
SELECT column_name, (code_of(format($$INSERT INTO request_result SELECT (jsonb_populate_record(r, '{"request_key": "n", %s: null}')).*
           FROM request_result AS r WHERE request_key = 'between'$$, to_json(column_name)))).code
  FROM unnest(ARRAY['account_id', 'operation', 'request', 'response', 'created_at']) AS column_name;

-- A request is compared as a value: neither the order of its fields nor the spelling of a number matters.
INSERT INTO request_result (account_id, operation, request_key, request, response)
SELECT 2, 'debit:v1', name, request::jsonb, '{"balance": 4711}'
  FROM (VALUES ('spelled', '{"amount": 1.0e1}'), ('more', '{"currency": "EUR", "amount": 10}'), ('other', '{"sum": 10}'),
               ('text', '{"amount": "10"}'), ('null', '{"amount": null}'), ('empty', '{}'), ('array', '[{"amount": 10}]'),
               ('scalar', '10'), ('json-null', 'null')) AS saved (name, request);
SELECT debit_once(2, 'spelled', 10);
-- Another one is a mismatch, and the fields that differ are named.
SELECT name, code, message, detail
  FROM unnest(ARRAY['spelled', 'more', 'other', 'text', 'null', 'empty']) AS name,
       refusal(format('SELECT debit_once(2, %L, %s)', name, CASE name WHEN 'spelled' THEN 11 ELSE 10 END));
-- Also where the saved request is no object, and has no fields.
SELECT name, code, message
  FROM unnest(ARRAY['array', 'scalar', 'json-null']) AS name, refusal(format('SELECT debit_once(2, %L, 10)', name));
CALL tamper($t$DELETE FROM request_result WHERE account_id = 2$t$);

-- Each refusal leaves the caller's transaction usable: in one transaction, between two debits.
BEGIN;
DO $$
DECLARE
    call text;
    codes text[];
BEGIN
    PERFORM debit_once(1, 'block', 1);
    FOREACH call IN ARRAY ARRAY['1, ''block'', 2', '1, ''b'', 1000000', '404, ''b'', 1', '1, '''', 1', 'NULL, ''b'', 1',
                                '1, repeat(''k'', 256), 1']
    LOOP
        BEGIN
            EXECUTE 'SELECT debit_once(' || call || ')';
        EXCEPTION WHEN OTHERS THEN
            codes := codes || SQLSTATE::text;
        END;
    END LOOP;
    PERFORM debit_once(1, 'block', 1), debit_once(1, 'block-2', 1);
    PERFORM set_config('contract.codes', codes::text, false);
END $$;
SELECT current_setting('contract.codes') AS codes;
COMMIT;
SELECT request_key, response FROM request_result WHERE request_key LIKE 'block%' ORDER BY request_key;

-- A thousand refusals in one transaction cost nothing that a later call would miss.
DO $$
BEGIN
    FOR i IN 1..1000 LOOP
        BEGIN
            PERFORM debit_once(1, 'checkout-42', 100 + i);
        EXCEPTION WHEN invalid_parameter_value THEN
            NULL;
        END;
    END LOOP;
    PERFORM debit_once(1, 'after-a-thousand', 1);
END $$;
SELECT response FROM request_result WHERE request_key = 'after-a-thousand';

-- Arguments can be given by name.
SELECT debit_once(p_key => 'named', p_amount => 1, p_account => 1);

-- The two tables agree: what is missing from the account is what the records say.
SELECT 1000 - balance AS missing, (SELECT sum((request ->> 'amount')::bigint) FROM request_result WHERE account_id = 1) AS recorded
  FROM account WHERE account_id = 1;

DROP VIEW books;
DROP FUNCTION refusal, code_of, wal_records;
DROP EXTENSION idempotency_record;
