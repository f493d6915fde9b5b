-- run_once: what is checked before anything runs, what the handler may be and do, and what is left of it.
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

-- Each run of a handler leaves a row here, in the transaction of the run; ran() tells them and forgets them.
CREATE TABLE run (id int GENERATED ALWAYS AS IDENTITY, what text);
CREATE FUNCTION ran() RETURNS text LANGUAGE sql AS
    'WITH forgotten AS (DELETE FROM run RETURNING id, what) SELECT string_agg(what, '' '' ORDER BY id) FROM forgotten';
CREATE FUNCTION pay(p_account bigint, p_request jsonb) RETURNS jsonb LANGUAGE plpgsql AS $$
DECLARE
    v_balance bigint;
BEGIN
    INSERT INTO run (what) VALUES (format('pay(%s,%s)', p_account, p_request ->> 'amount'));
    UPDATE account SET balance = balance - (p_request ->> 'amount')::bigint WHERE account_id = p_account
    RETURNING balance INTO v_balance;
    RETURN jsonb_build_object('left', v_balance);
END $$;
INSERT INTO account VALUES (1, 1000), (2, 1000);

-- It runs once, with account and request, and its result is the stored response; a repeat does not run it.
SELECT run_once(1, 'pay:v1', 'k', '{"amount": 100, "to": "x"}', 'pay(bigint, jsonb)');
SELECT run_once(1, 'pay:v1', 'k', '{"to": "x", "amount": 100.0}', 'pay(bigint, jsonb)');
SELECT run_once(1, 'pay:v1', 'k', '{"amount": 100, "to": "x"}', 'pay(bigint, jsonb)') FROM generate_series(1, 3);
\c -
\set VERBOSITY sqlstate
SET client_min_messages = warning;
SELECT run_once(1, 'pay:v1', 'k', '{"amount": 100, "to": "x"}', 'pay(bigint, jsonb)');
SELECT ran();
SELECT operation, request_key, request, response, request_fingerprint, cancelled FROM request_result;
TABLE books;

-- A mismatch names the fields that differ, those that are missing and those that came, and never runs the handler.
\x on
SELECT * FROM refusal($$SELECT run_once(1, 'pay:v1', 'k', '{"amount": 101, "to": "x"}', 'pay(bigint, jsonb)')$$);
SELECT * FROM refusal($$SELECT run_once(1, 'pay:v1', 'k', '{"amount": 101, "note": null}', 'pay(bigint, jsonb)')$$);
-- Where one of the two is no object there is no field to name.
SELECT * FROM refusal($$SELECT run_once(1, 'pay:v1', 'k', '[1]', 'pay(bigint, jsonb)')$$);
\x off
SELECT ran();

-- Scopes: other operation, other version, other account.
SELECT run_once(1, 'pay:v2', 'k', '{"amount": 1}', 'pay(bigint, jsonb)'), run_once(2, 'pay:v1', 'k', '{"amount": 1}', 'pay(bigint, jsonb)'),
       run_once(1, 'Pay:v1', 'k', '{"amount": 1}', 'pay(bigint, jsonb)'), debit_once(1, 'k', 1);
SELECT ran();
TABLE books;

-- Operations: name:vN, at most 63 bytes, and not one that is built in. Nothing runs.
SELECT operation, code, message
  FROM unnest(ARRAY['a:v1', 'Order-paid_2.x:v10', repeat('n', 60) || ':v1', repeat('n', 61) || ':v1', NULL, '', 'pay', 'pay:', 'pay:v',
                    'pay:v0', 'pay:v01', 'pay:1', ':v1', 'pay:v1 ', ' pay:v1', 'pa y:v1', 'a:v1:v2', 'pay:V1', 'é:v1', 'pay:v-1',
                    'pay:v1.0', 'pay:v٣', E'pay:v1\n', 'debit:v1', 'credit:v1', 'debit:v2']) WITH ORDINALITY AS given (operation, ordinal),
       refusal(format($$SELECT run_once(1, %L, 'names', '{"amount": 0}', 'pay(bigint, jsonb)')$$, operation))
 ORDER BY ordinal;
\x on
SELECT * FROM refusal($$SELECT run_once(1, 'pay', 'k', '{}', 'pay(bigint, jsonb)')$$);
SELECT * FROM refusal($$SELECT run_once(1, 'debit:v1', 'k', '{}', 'pay(bigint, jsonb)')$$);
\x off
SELECT ran();
CALL tamper($t$DELETE FROM request_result WHERE request_key = 'names'$t$);

-- NULL and empty arguments, and an unknown account.
SELECT code, message FROM refusal($$SELECT run_once(NULL, 'pay:v1', 'n', '{}', 'pay(bigint, jsonb)')$$)
UNION ALL SELECT code, message FROM refusal($$SELECT run_once(1, 'pay:v1', NULL, '{}', 'pay(bigint, jsonb)')$$)
UNION ALL SELECT code, message FROM refusal($$SELECT run_once(1, 'pay:v1', '', '{}', 'pay(bigint, jsonb)')$$)
UNION ALL SELECT code, message FROM refusal($$SELECT run_once(1, 'pay:v1', repeat('k', 256), '{}', 'pay(bigint, jsonb)')$$)
UNION ALL SELECT code, message FROM refusal($$SELECT run_once(1, 'pay:v1', 'n', NULL, 'pay(bigint, jsonb)')$$)
UNION ALL SELECT code, message FROM refusal($$SELECT run_once(1, 'pay:v1', 'n', '{}', NULL)$$)
UNION ALL SELECT code, message FROM refusal($$SELECT run_once(404, 'pay:v1', 'n', '{"amount": 1}', 'pay(bigint, jsonb)')$$);
-- The same before a replay: a known key does not excuse them.
SELECT code, message FROM refusal($$SELECT run_once(1, 'pay:v1', 'k', NULL, 'pay(bigint, jsonb)')$$)
UNION ALL SELECT code, message FROM refusal($$SELECT run_once(1, 'pay:v1', 'k', '{"amount": 100, "to": "x"}', NULL)$$);
SELECT ran();

-- The signature is (bigint, jsonb) RETURNS jsonb of a plain function, checked before anything runs and before a replay.
CREATE FUNCTION one(bigint) RETURNS jsonb LANGUAGE sql AS 'INSERT INTO run (what) VALUES (''one'') RETURNING to_jsonb(id)';
CREATE FUNCTION swapped(jsonb, bigint) RETURNS jsonb LANGUAGE sql AS 'INSERT INTO run (what) VALUES (''swapped'') RETURNING to_jsonb(id)';
CREATE FUNCTION narrow(integer, jsonb) RETURNS jsonb LANGUAGE sql AS 'INSERT INTO run (what) VALUES (''narrow'') RETURNING to_jsonb(id)';
CREATE FUNCTION plain(bigint, json) RETURNS jsonb LANGUAGE sql AS 'INSERT INTO run (what) VALUES (''plain'') RETURNING to_jsonb(id)';
CREATE FUNCTION three(bigint, jsonb, integer DEFAULT 1) RETURNS jsonb LANGUAGE sql AS 'INSERT INTO run (what) VALUES (''three'') RETURNING to_jsonb(id)';
CREATE FUNCTION as_json(bigint, jsonb) RETURNS json LANGUAGE plpgsql AS 'BEGIN INSERT INTO run (what) VALUES (''as_json''); RETURN ''1''; END';
CREATE FUNCTION nothing(bigint, jsonb) RETURNS void LANGUAGE sql AS 'INSERT INTO run (what) VALUES (''nothing'')';
CREATE FUNCTION many(bigint, jsonb) RETURNS SETOF jsonb LANGUAGE sql AS 'INSERT INTO run (what) VALUES (''many'') RETURNING to_jsonb(id)';
CREATE FUNCTION any_of(bigint, VARIADIC jsonb[]) RETURNS jsonb LANGUAGE sql AS 'INSERT INTO run (what) VALUES (''any_of'') RETURNING to_jsonb(id)';
CREATE PROCEDURE proc(bigint, jsonb) LANGUAGE sql AS 'INSERT INTO run (what) VALUES (''proc'')';
CREATE FUNCTION step(jsonb, bigint, jsonb) RETURNS jsonb LANGUAGE sql AS 'INSERT INTO run (what) VALUES (''step'') RETURNING to_jsonb(id)';
CREATE AGGREGATE gathered(bigint, jsonb) (SFUNC = step, STYPE = jsonb);
SELECT handler, fresh.code, fresh.message, replay.code AS replay
  FROM unnest(ARRAY['one(bigint)', 'swapped(jsonb, bigint)', 'narrow(integer, jsonb)', 'plain(bigint, json)', 'three(bigint, jsonb, integer)',
                    'as_json(bigint, jsonb)', 'nothing(bigint, jsonb)', 'many(bigint, jsonb)', 'any_of(bigint, jsonb[])', 'proc(bigint, jsonb)',
                    'gathered(bigint, jsonb)', '0', '4294967295']) WITH ORDINALITY AS given (handler, ordinal),
       refusal(format($$SELECT run_once(1, 'pay:v1', 'signature', '{}', %L)$$, handler)) AS fresh,
       refusal(format($$SELECT run_once(1, 'pay:v1', 'k', '{"amount": 100, "to": "x"}', %L)$$, handler)) AS replay
 ORDER BY ordinal;
\x on
SELECT * FROM refusal($$SELECT run_once(1, 'pay:v1', 'signature', '{}', 'one(bigint)')$$);
\x off
SELECT run_once(1, 'pay:v1', 'signature', '{}', 'does_not_exist(bigint, jsonb)');
SELECT ran();

-- NULL as a result is 22004, and nothing of the run is left; any other jsonb is a response, and replays as it is.
CREATE FUNCTION answers(p_account bigint, p_request jsonb) RETURNS jsonb LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO run (what) VALUES ('answers');
    UPDATE account SET balance = balance + 1 WHERE account_id = p_account;
    RETURN p_request -> 'answer';
END $$;
\x on
SELECT * FROM refusal($$SELECT run_once(2, 'answer:v1', 'null', '{}', 'answers(bigint, jsonb)')$$);
\x off
SELECT ran();
SELECT answer, run_once(2, 'answer:v1', answer, jsonb_build_object('answer', answer::jsonb), 'answers(bigint, jsonb)'),
       run_once(2, 'answer:v1', answer, jsonb_build_object('answer', answer::jsonb), 'answers(bigint, jsonb)')
  FROM unnest(ARRAY['{}', 'null', '[]', '""', 'false', '0', '12345678901234567890.10', '{"a": [1, null, {"b": "\"\\"}]}']) AS answer;
SELECT ran();
TABLE books;
-- Any jsonb is a request, too.
CREATE FUNCTION echo(bigint, jsonb) RETURNS jsonb LANGUAGE sql AS 'SELECT $2';
SELECT request, run_once(2, 'request:v1', request::text, request, 'echo(bigint, jsonb)'),
       run_once(2, 'request:v1', request::text, request, 'echo(bigint, jsonb)')
  FROM unnest(ARRAY['null', '[]', '1', '"text"']::jsonb[]) AS request;
SELECT run_once(2, 'request:v1', 'null', '{}', 'echo(bigint, jsonb)');
CALL tamper($t$DELETE FROM request_result WHERE operation IN ('answer:v1', 'request:v1')$t$);

-- A handler that raises leaves nothing, its SQLSTATE passes through, and the key is free.
CREATE FUNCTION raises(p_account bigint, p_request jsonb) RETURNS jsonb LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO run (what) VALUES ('raises');
    UPDATE account SET balance = 0 WHERE account_id = p_account;
    PERFORM debit_once(2, 'inside', 10);
    RAISE EXCEPTION USING ERRCODE = p_request ->> 'code', MESSAGE = 'refused';
END $$;
SELECT given, code, message FROM unnest(ARRAY['ZZ001', 'P0001', '40001', '40P01', '22023']) AS given,
       refusal(format($$SELECT run_once(1, 'raise:v1', 'r', '{"code": "%s"}', 'raises(bigint, jsonb)')$$, given));
SELECT ran();
TABLE books;
SELECT run_once(1, 'raise:v1', 'r', '{"amount": 1}', 'pay(bigint, jsonb)');
SELECT ran();

-- A handler may debit and credit with keys of its own, and of the request's own name in another scope.
CREATE FUNCTION transfer(p_account bigint, p_request jsonb) RETURNS jsonb LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO run (what) VALUES ('transfer');
    PERFORM credit_once((p_request ->> 'to')::bigint, p_request ->> 'key', (p_request ->> 'amount')::bigint);
    RETURN debit_once(p_account, p_request ->> 'key', (p_request ->> 'amount')::bigint);
END $$;
SELECT run_once(1, 'transfer:v1', 't', '{"to": 2, "amount": 50, "key": "t"}', 'transfer(bigint, jsonb)'),
       run_once(1, 'transfer:v1', 't', '{"to": 2, "amount": 50, "key": "t"}', 'transfer(bigint, jsonb)');
SELECT ran();
-- The same inner key in another transfer replays inside, so no money moves twice.
SELECT run_once(1, 'transfer:v1', 't-2', '{"to": 2, "amount": 50, "key": "t"}', 'transfer(bigint, jsonb)');
SELECT ran();
-- An inner refusal takes the whole transfer with it, also the credit that was made before.
SELECT run_once(1, 'transfer:v1', 'poor', '{"to": 2, "amount": 5000, "key": "poor"}', 'transfer(bigint, jsonb)');
SELECT ran();
TABLE books;

-- Re-entry: a request that its own handler executes again is refused, and nothing of it is left.
CREATE FUNCTION again(p_account bigint, p_request jsonb) RETURNS jsonb LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO run (what) VALUES ('again');
    RETURN run_once(p_account, 'again:v1', p_request ->> 'key', p_request, 'again(bigint, jsonb)');
END $$;
\x on
SELECT * FROM refusal($$SELECT run_once(1, 'again:v1', 'own', '{"key": "own"}', 'again(bigint, jsonb)')$$);
\x off
-- Also with another request, through the outcome function, through a cancellation, or through another request's handler.
CREATE FUNCTION reenters(p_account bigint, p_request jsonb) RETURNS jsonb LANGUAGE plpgsql AS $$
DECLARE
    answer jsonb;
BEGIN
    INSERT INTO run (what) VALUES ('reenters');
    EXECUTE p_request ->> 'call' INTO answer;
    RETURN coalesce(answer, '"NULL"');
END $$;
SELECT call, code, message
  FROM unnest(ARRAY[
           $$SELECT run_once(1, 'own:v1', 'own', '{"another": "request"}', 'echo(bigint, jsonb)')$$,
           $$SELECT response FROM run_once_outcome(1, 'own:v1', 'own', '{}', 'echo(bigint, jsonb)')$$,
           $$SELECT cancel_request(1, 'own:v1', 'own')$$,
           $$SELECT run_once(1, 'other:v1', 'other', '{"call": "SELECT run_once(1, ''own:v1'', ''own'', ''{}'', ''echo(bigint, jsonb)'')"}', 'reenters(bigint, jsonb)')$$
       ]) WITH ORDINALITY AS given (call, ordinal),
       refusal(format($$SELECT run_once(1, 'own:v1', 'own', %L, 'reenters(bigint, jsonb)')$$, jsonb_build_object('call', call)))
 ORDER BY ordinal;
SELECT ran();
TABLE books;
-- Other keys, operations and accounts are no re-entry.
SELECT run_once(1, 'own:v1', 'outer', jsonb_build_object('call', call), 'reenters(bigint, jsonb)') FROM (VALUES (
    $$SELECT jsonb_build_array(run_once(1, 'own:v1', 'inner', '1', 'echo(bigint, jsonb)'),
                               run_once(1, 'own:v2', 'outer', '2', 'echo(bigint, jsonb)'),
                               run_once(2, 'own:v1', 'outer', '3', 'echo(bigint, jsonb)'),
                               cancel_request(1, 'own:v1', 'never'))$$)) AS given (call);
SELECT ran();
-- A handler that catches the refusal goes on, and its request is executed and replays. So does one that catches the error of
-- an inner handler and runs that request again: what failed does not count as in flight.
CREATE FUNCTION catches(p_account bigint, p_request jsonb) RETURNS jsonb LANGUAGE plpgsql AS $$
DECLARE
    codes text[] := '{}';
BEGIN
    INSERT INTO run (what) VALUES ('catches');
    FOR i IN 1 .. 2 LOOP
        BEGIN
            PERFORM run_once(p_account, 'catch:v1', 'own', p_request, 'catches(bigint, jsonb)');
        EXCEPTION WHEN invalid_parameter_value THEN
            codes := codes || SQLSTATE;
        END;
        BEGIN
            PERFORM run_once(p_account, 'catch:v1', 'inner', '{"code": "ZZ001"}', 'raises(bigint, jsonb)');
        EXCEPTION WHEN OTHERS THEN
            codes := codes || SQLSTATE;
        END;
    END LOOP;
    PERFORM run_once(p_account, 'catch:v1', 'inner', '{"amount": 1}', 'pay(bigint, jsonb)');
    RETURN to_jsonb(codes);
END $$;
SELECT run_once(1, 'catch:v1', 'own', '{}', 'catches(bigint, jsonb)');
SELECT run_once(1, 'catch:v1', 'own', '{}', 'catches(bigint, jsonb)');
SELECT ran();
-- After an error the keys are free in the same session, also in the same transaction.
BEGIN;
SAVEPOINT s;
SELECT run_once(1, 'again:v1', 'own', '{"key": "own"}', 'again(bigint, jsonb)');
ROLLBACK TO SAVEPOINT s;
SELECT run_once(1, 'again:v1', 'own', '{"key": "own"}', 'echo(bigint, jsonb)');
COMMIT;
SELECT ran();
TABLE books;

-- Odd names of schema and handler, and a handler that is not in the search path.
CREATE SCHEMA "odd "" schema; SELECT 'x'";
CREATE FUNCTION "odd "" schema; SELECT 'x'"."Odd "" ($1) --"(bigint, jsonb) RETURNS jsonb LANGUAGE sql AS 'SELECT to_jsonb(''odd''::text)';
SELECT run_once(1, 'odd:v1', 'o', '{}', p.oid::regprocedure) FROM pg_proc AS p WHERE proname LIKE 'Odd%';
-- A handler in the temporary schema.
CREATE FUNCTION pg_temp.short_lived(bigint, jsonb) RETURNS jsonb LANGUAGE sql AS 'SELECT to_jsonb(''temporary''::text)';
SELECT run_once(1, 'temporary:v1', 'o', '{}', 'pg_temp.short_lived(bigint, jsonb)');
-- The name of a handler is no part of the request: a repeat by way of another handler, or a renamed one, replays.
ALTER FUNCTION echo(bigint, jsonb) RENAME TO reverberate;
SELECT run_once(1, 'again:v1', 'own', '{"key": "own"}', 'reverberate(bigint, jsonb)'), run_once(1, 'again:v1', 'own', '{"key": "own"}', 'pay(bigint, jsonb)');
SELECT ran();

-- Of overloaded functions the one that was given runs, whatever else has its name.
CREATE FUNCTION over(bigint, jsonb) RETURNS jsonb LANGUAGE sql AS 'SELECT to_jsonb(''bigint, jsonb''::text)';
CREATE FUNCTION over(integer, jsonb) RETURNS jsonb LANGUAGE sql AS 'SELECT to_jsonb(''integer, jsonb''::text)';
CREATE FUNCTION over(numeric, jsonb) RETURNS jsonb LANGUAGE sql AS 'SELECT to_jsonb(''numeric, jsonb''::text)';
CREATE FUNCTION over(bigint, text) RETURNS jsonb LANGUAGE sql AS 'SELECT to_jsonb(''bigint, text''::text)';
CREATE FUNCTION over(bigint, VARIADIC jsonb[]) RETURNS jsonb LANGUAGE sql AS 'SELECT to_jsonb(''variadic''::text)';
CREATE FUNCTION over(anyelement, anyelement) RETURNS jsonb LANGUAGE sql AS 'SELECT to_jsonb(''polymorphic''::text)';
SELECT run_once(1, 'over:v1', 'one', '{}', 'over(bigint, jsonb)');
CREATE FUNCTION over(bigint, jsonb, integer DEFAULT 1) RETURNS jsonb LANGUAGE sql AS 'SELECT to_jsonb(''default''::text)';
SELECT run_once(1, 'over:v1', 'two', '{}', 'over(bigint, jsonb)');
-- STRICT, with named and OUT parameters, IMMUTABLE, and PL/pgSQL that refers to its schema by search_path.
CREATE FUNCTION strictly(bigint, jsonb) RETURNS jsonb STRICT LANGUAGE sql AS 'SELECT to_jsonb(''strict''::text)';
CREATE FUNCTION strictly_null(bigint, jsonb) RETURNS jsonb STRICT LANGUAGE sql AS 'SELECT NULL::jsonb';
CREATE FUNCTION gives(a bigint, r jsonb, OUT result jsonb) LANGUAGE plpgsql AS 'BEGIN result := to_jsonb(''out''::text); END';
CREATE FUNCTION constantly(bigint, jsonb) RETURNS jsonb IMMUTABLE LANGUAGE sql AS 'SELECT to_jsonb(''immutable''::text)';
SELECT run_once(1, 'kind:v1', 'strict', '{}', 'strictly(bigint, jsonb)'), run_once(1, 'kind:v1', 'out', '{}', 'gives(bigint, jsonb)'),
       run_once(1, 'kind:v1', 'immutable', '{}', 'constantly(bigint, jsonb)');
SELECT run_once(1, 'kind:v1', 'null', '{}', 'strictly_null(bigint, jsonb)');

-- Rights: the handler runs as the caller, and a SECURITY DEFINER handler as its owner, as everywhere.
CREATE ROLE regress_ir_run_caller;
CREATE ROLE regress_ir_run_owner;
GRANT EXECUTE ON FUNCTION run_once(bigint, text, text, jsonb, regprocedure) TO regress_ir_run_caller;
GRANT SELECT, UPDATE ON account TO regress_ir_run_caller;
GRANT SELECT, INSERT ON request_result TO regress_ir_run_caller;
CREATE SCHEMA closed;
CREATE TABLE closed.secret (note text);
CREATE FUNCTION who(bigint, jsonb) RETURNS jsonb LANGUAGE sql AS $$SELECT jsonb_build_array(current_user, session_user)$$;
CREATE FUNCTION who_defined(bigint, jsonb) RETURNS jsonb SECURITY DEFINER LANGUAGE sql AS $$SELECT jsonb_build_array(current_user, session_user)$$;
ALTER FUNCTION who_defined(bigint, jsonb) OWNER TO regress_ir_run_owner;
CREATE FUNCTION steals(bigint, jsonb) RETURNS jsonb LANGUAGE plpgsql AS $$BEGIN INSERT INTO closed.secret VALUES ('stolen'); RETURN '{}'; END$$;
CREATE FUNCTION denied(bigint, jsonb) RETURNS jsonb LANGUAGE sql AS $$SELECT jsonb '{}'$$;
REVOKE EXECUTE ON FUNCTION denied(bigint, jsonb) FROM PUBLIC;
CREATE FUNCTION closed.hidden(bigint, jsonb) RETURNS jsonb LANGUAGE sql AS $$SELECT jsonb '{}'$$;
SELECT 'closed.hidden(bigint, jsonb)'::regprocedure::oid AS hidden \gset
SET ROLE regress_ir_run_caller;
SELECT run_once(2, 'who:v1', 'caller', '{}', 'who(bigint, jsonb)'), run_once(2, 'who:v1', 'owner', '{}', 'who_defined(bigint, jsonb)');
SELECT run_once(2, 'who:v1', 'steals', '{}', 'steals(bigint, jsonb)');
SELECT run_once(2, 'who:v1', 'denied', '{}', 'denied(bigint, jsonb)');
SELECT run_once(2, 'who:v1', 'hidden', '{}', :hidden);
-- The rights on the handler are asked for in a replay, too.
SELECT run_once(2, 'who:v1', 'caller', '{}', 'denied(bigint, jsonb)');
SELECT run_once(2, 'who:v1', 'caller', '{}', :hidden);
SELECT run_once(2, 'who:v1', 'caller', '{}', 'who(bigint, jsonb)');
RESET ROLE;
-- SET ROLE inside a session whose plans are cached is obeyed: the same handler, another caller.
SELECT run_once(2, 'who:v1', 'superuser', '{}', 'who(bigint, jsonb)'), run_once(2, 'who:v1', 'denied', '{}', 'denied(bigint, jsonb)');
SET ROLE regress_ir_run_caller;
\x on
SELECT * FROM refusal($$SELECT run_once(2, 'who:v1', 'caller', '{}', 'denied(bigint, jsonb)')$$);
\x off
RESET ROLE;
SELECT count(*) AS stolen FROM closed.secret;
SELECT request_key FROM request_result WHERE operation = 'who:v1' ORDER BY request_key;

-- No unfinished record can be committed, also not by a privileged writer by hand: request and response are required.
INSERT INTO request_result (account_id, operation, request_key, request) VALUES (1, 'pay:v1', 'by hand', '{}');
INSERT INTO request_result (account_id, operation, request_key, request, response) VALUES (1, 'pay:v1', 'by hand', '{}', NULL);
INSERT INTO request_result (account_id, operation, request_key, response) VALUES (1, 'pay:v1', 'by hand', '{}');
CALL tamper($t$UPDATE request_result SET response = NULL WHERE request_key = 'k'$t$);
-- While the handler runs there is no record, neither for its own session nor, by that, in what a crash would leave.
CREATE FUNCTION looks(bigint, jsonb) RETURNS jsonb LANGUAGE sql AS $$SELECT to_jsonb(count(*)) FROM request_result WHERE operation = 'looks:v1'$$;
SELECT run_once(1, 'looks:v1', 'l', '{}', 'looks(bigint, jsonb)');

-- Run and record vanish together when the caller rolls back.
BEGIN;
SELECT run_once(1, 'pay:v1', 'rolled back', '{"amount": 1}', 'pay(bigint, jsonb)');
SAVEPOINT s;
SELECT run_once(1, 'pay:v1', 'savepoint', '{"amount": 1}', 'pay(bigint, jsonb)');
ROLLBACK TO SAVEPOINT s;
SELECT ran();
SELECT run_once(1, 'pay:v1', 'savepoint', '{"amount": 2}', 'pay(bigint, jsonb)');
ROLLBACK;
SELECT ran();
SELECT count(*) FROM request_result WHERE request_key IN ('rolled back', 'savepoint');
-- Once in one statement; a replay works in a READ ONLY transaction, where a first run is 25006, also of a handler that
-- writes nothing.
SELECT run_once(1, 'pay:v1', 'statement', '{"amount": 1}', 'pay(bigint, jsonb)'), run_once(1, 'pay:v1', 'statement', '{"amount": 1}', 'pay(bigint, jsonb)');
SELECT ran();
BEGIN READ ONLY;
SELECT run_once(1, 'pay:v1', 'statement', '{"amount": 1}', 'pay(bigint, jsonb)');
SELECT run_once(1, 'pay:v1', 'read only', '{}', 'reverberate(bigint, jsonb)');
ROLLBACK;

-- A handler that writes its own record by hand has executed its own request: no retry could help.
CREATE FUNCTION writes_its_record(p_account bigint, p_request jsonb) RETURNS jsonb LANGUAGE sql AS $$
    INSERT INTO request_result (account_id, operation, request_key, request, response)
    VALUES (p_account, 'own:v1', 'by hand', p_request, '{}') RETURNING response
$$;
SELECT code FROM refusal($$SELECT run_once(1, 'own:v1', 'by hand', '{}', 'writes_its_record(bigint, jsonb)')$$);
SELECT count(*) FROM request_result WHERE request_key = 'by hand';
-- It sees what was committed up to its own start, also where it is declared STABLE.
CREATE FUNCTION balance_of(p_account bigint, p_request jsonb) RETURNS jsonb STABLE LANGUAGE sql AS
    'SELECT to_jsonb(balance) FROM account WHERE account_id = p_account';
BEGIN;
UPDATE account SET balance = 4711 WHERE account_id = 1;
SELECT run_once(1, 'own:v1', 'stable', '{}', 'balance_of(bigint, jsonb)');
ROLLBACK;
DROP FUNCTION writes_its_record, balance_of;

DROP SCHEMA closed CASCADE;
DROP SCHEMA "odd "" schema; SELECT 'x'" CASCADE;
DROP VIEW books;
DROP FUNCTION who_defined(bigint, jsonb);
DROP EXTENSION idempotency_record;
DROP OWNED BY regress_ir_run_caller, regress_ir_run_owner;
DROP ROLE regress_ir_run_caller, regress_ir_run_owner;
