-- What credit_once promises to one session: what debit_once promises, in a scope of its own, and an upper bound.
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

-- The WAL records that a statement of this session writes, whatever other processes write meanwhile.
CREATE FUNCTION wal_records(statement text) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
    plan json;
BEGIN
    EXECUTE 'EXPLAIN (ANALYZE, WAL, FORMAT JSON) ' || statement INTO plan;
    RETURN plan #>> '{0,Plan,WAL Records}';
END $$;

INSERT INTO account VALUES (1, 1000), (2, 0);

-- The first call credits; a repeat answers the same and changes nothing, also from another session.
SELECT credit_once(1, 'k', 100);
SELECT credit_once(1, 'k', 100);
SELECT credit_once(1, 'k', 100) FROM generate_series(1, 3);
\c -
\set VERBOSITY sqlstate
SET client_min_messages = warning;
SELECT credit_once(1, 'k', 100);
TABLE books;

-- The answer is the saved one and never today's balance.
SELECT credit_once(1, 'between', 50);
SELECT credit_once(1, 'k', 100);
TABLE books;

-- The record.
SELECT account_id, operation, request_key, request, response, request_fingerprint, cancelled FROM request_result
 WHERE request_key = 'k';

-- A replay writes nothing, takes no transaction id, and works in a READ ONLY transaction, where a new key is 25006.
SELECT wal_records($$SELECT credit_once(1, 'measured', 1)$$) > 0 AS measures;
SELECT wal_records($$SELECT credit_once(1, 'measured', 1)$$);
BEGIN READ ONLY;
SELECT credit_once(1, 'k', 100);
SELECT pg_current_xact_id_if_assigned() IS NULL AS no_transaction_id;
SELECT credit_once(1, 'read-only', 1);
ROLLBACK;

-- Scopes: a key that was used for a debit is free for a credit and the other way round, and for another account. Each
-- replays its own answer and has its own mismatch.
SELECT debit_once(1, 'scope', 10), credit_once(1, 'scope', 30), credit_once(2, 'scope', 7);
SELECT debit_once(1, 'scope', 10), credit_once(1, 'scope', 30), credit_once(2, 'scope', 7);
SELECT credit_once(1, 'later', 1), debit_once(1, 'later', 1);
SELECT debit_once(1, 'scope', 30);
SELECT credit_once(1, 'scope', 10);
TABLE books;

-- A repeat with another amount names the field, shows no saved value, and changes nothing.
\x on
SELECT * FROM refusal($$SELECT credit_once(1, 'k', 101)$$);
\x off
-- Key and positive amount are required, whatever else is wrong.
SELECT account, quote_nullable(key) AS key, amount, code, message
  FROM unnest(ARRAY[1, 404, NULL]) AS account,
       unnest(ARRAY['k', 'new', '', NULL]) AS key,
       unnest(ARRAY[100, 0, -1, NULL]) AS amount,
       refusal(format('SELECT credit_once(%L, %L, %L)', account, key, amount))
 WHERE coalesce(key, '') = '' OR coalesce(amount, 0) <= 0
 ORDER BY account, key, amount;
SELECT * FROM refusal($$SELECT credit_once(NULL, 'k', 1)$$);
SELECT * FROM refusal(format('SELECT credit_once(1, %L, 1)', repeat('é', 128)));
SELECT credit_once(1, repeat('é', 127) || 'e', 1) = credit_once(1, repeat('é', 127) || 'e', 1) AS longest;
CALL tamper($t$DELETE FROM request_result WHERE length(request_key) = 128$t$);

-- An unknown account is refused by name; once it exists, the same key executes.
\x on
SELECT * FROM refusal($$SELECT credit_once(404, 'early', 1)$$);
\x off
INSERT INTO account VALUES (404, 0);
SELECT credit_once(404, 'early', 1);
TABLE books;

-- The balance may become the largest bigint. One more is 22003, and nothing is kept: with room, the same key executes.
INSERT INTO account VALUES (3, 9223372036854775800);
SELECT credit_once(3, 'fits', 7);
SELECT credit_once(3, 'over', 1);
SELECT credit_once(3, 'over', 9223372036854775807);
SELECT code FROM refusal($$SELECT credit_once(3, 'over', 1)$$);
SELECT balance, (SELECT string_agg(request_key, ' ') FROM request_result WHERE account_id = 3) AS records
  FROM account WHERE account_id = 3;
-- A known key replays although its amount would no longer fit, and with another amount it is a mismatch.
SELECT credit_once(3, 'fits', 7);
SELECT credit_once(3, 'fits', 8);
SELECT debit_once(3, 'room', 1), credit_once(3, 'over', 1);
-- 22003 leaves the caller's transaction usable behind a savepoint.
BEGIN;
SAVEPOINT s;
SELECT credit_once(3, 'over again', 1);
ROLLBACK TO SAVEPOINT s;
SELECT credit_once(2, 'after', 1);
COMMIT;
SELECT credit_once(2, 'after', 1);

-- Effect and record vanish together, also with a savepoint; once in one statement.
BEGIN;
SELECT credit_once(2, 'rolled back', 100);
SAVEPOINT s;
SELECT credit_once(2, 'savepoint', 100);
ROLLBACK TO SAVEPOINT s;
SELECT credit_once(2, 'savepoint', 1);
ROLLBACK;
SELECT credit_once(2, 'statement', 10), credit_once(2, 'statement', 10);
SELECT credit_once(2, 'mixed', 10), credit_once(2, 'mixed', 11);
TABLE books;

DROP VIEW books;
DROP EXTENSION idempotency_record;
