-- Many messages at once: accept_messages, and the statements that users write themselves.
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

-- Message number n.
CREATE FUNCTION m(n integer) RETURNS uuid IMMUTABLE LANGUAGE sql AS $$SELECT lpad(n::text, 32, '0')::uuid$$;
CREATE FUNCTION ms(VARIADIC n integer[]) RETURNS uuid[] IMMUTABLE LANGUAGE sql AS $$SELECT array_agg(m(i) ORDER BY ordinal) FROM unnest(n) WITH ORDINALITY AS given (i, ordinal)$$;
CREATE VIEW records AS
    SELECT string_agg(concat_ws(':', subscriber, ltrim(right(message_id::text, 5), '0'), account_id), ' ' ORDER BY subscriber, message_id) AS records FROM processed_message;
INSERT INTO account VALUES (1, 1000), (2, 1000), (3, 1000);

-- The ids that are new come back in the order given, each once, whatever the order of ids and accounts.
SELECT right(id::text, 2) AS id FROM accept_messages('s', ms(5, 3, 9, 1), '{2, 3, 1, 2}') AS id;
TABLE records;
-- All known: none. Some known: the rest.
SELECT count(*) FROM accept_messages('s', ms(5, 3, 9, 1), '{2, 3, 1, 2}');
SELECT right(id::text, 2) AS id FROM accept_messages('s', ms(8, 5, 7, 9, 2), '{1, 2, 1, 1, 1}') AS id;
-- WITH ORDINALITY tells the same order.
SELECT ordinality, right(id::text, 2) AS id FROM accept_messages('t', ms(4, 2, 6), '{1, 1, 1}') WITH ORDINALITY AS id (id, ordinality);
-- A copy counts once, at its first place.
SELECT right(id::text, 2) AS id FROM accept_messages('s', ms(22, 21, 22, 5, 21, 22), '{1, 2, 1, 2, 2, 1}') AS id;
-- Another subscriber takes them for itself; and what accept_message took is known here, and the other way round.
SELECT accept_message('u', m(1), 1);
SELECT right(id::text, 2) AS id FROM accept_messages('u', ms(1, 2), '{1, 1}') AS id;
SELECT accept_message('u', m(2), 1), accept_message('u', m(3), 1);
-- Nothing is changed but the records.
SELECT string_agg(balance::text, ' ') AS balances FROM account;
-- Empty arrays: none, whatever stands for empty.
SELECT count(*) FROM accept_messages('s', '{}', '{}');
SELECT count(*) FROM accept_messages('s', '{}', '{}', '{}');
SELECT count(*) FROM accept_messages('s', ARRAY[]::uuid[], '{}', NULL);
-- Arrays that do not begin at 1.
SELECT right(id::text, 2) AS id FROM accept_messages('v', format('[5:6]={%s,%s}', m(2), m(1))::uuid[], '[0:1]={1,2}', '[-1:0]={1,2}') AS id;
SELECT string_agg(right(message_id::text, 1) || ':' || account_id || ':' || (payload_fingerprint = request_fingerprint(to_jsonb(account_id))), ' ' ORDER BY message_id)
  FROM processed_message WHERE subscriber = 'v';

-- Payloads are kept as fingerprints, each of its message, and compared as jsonb is.
SELECT right(id::text, 2) AS id FROM accept_messages('p', ms(2, 1), '{1, 2}', ARRAY['{"a": 1, "b": 2}', 'null']::jsonb[]) AS id;
SELECT right(message_id::text, 1) AS id, payload_fingerprint = request_fingerprint(CASE account_id WHEN 1 THEN '{"a": 1, "b": 2}' ELSE 'null' END::jsonb) AS digest
  FROM processed_message WHERE subscriber = 'p' ORDER BY message_id;
SELECT count(*) FROM accept_messages('p', ms(1, 2), '{2, 1}', ARRAY['null', '{"b": 2.0, "a": 1}']::jsonb[]);
SELECT accept_message('p', m(2), 1, '{"a": 1, "b": 2}');
-- Without payloads there is nothing to compare.
SELECT count(*) FROM accept_messages('p', ms(1, 2), '{2, 1}');
SELECT right(id::text, 2) AS id FROM accept_messages('p', ms(3), '{1}') AS id;
SELECT count(*) FROM accept_messages('p', ms(3), '{1}', '{"1"}');

-- A mismatch with the record, or among copies, is refused, says which, and nothing of the call is recorded.
CALL tamper($t$TRUNCATE processed_message$t$);
SELECT count(*) FROM accept_messages('p', ms(1), '{1}', '{1}');
\x on
SELECT * FROM refusal($$SELECT accept_messages('p', ms(7, 1), '{1, 2}', '{7, 1}')$$);
SELECT * FROM refusal($$SELECT accept_messages('p', ms(7, 1), '{1, 1}', '{7, 2}')$$);
\x off
SELECT what, code, message
  FROM (VALUES (1, 'account of the last', $$SELECT accept_messages('p', ms(7, 8, 1), '{1, 1, 2}')$$),
               (2, 'account and payload', $$SELECT accept_messages('p', ms(7, 1), '{1, 2}', '{7, 2}')$$),
               (3, 'account of a copy', $$SELECT accept_messages('p', ms(7, 8, 7), '{1, 1, 2}')$$),
               (4, 'account of a copy, with payloads', $$SELECT accept_messages('p', ms(7, 8, 7), '{2, 1, 1}', '{7, 8, 7}')$$),
               (5, 'payload of a copy', $$SELECT accept_messages('p', ms(7, 8, 7), '{1, 1, 1}', '{7, 8, 9}')$$),
               (6, 'payload of a copy of a known one', $$SELECT accept_messages('p', ms(1, 8, 1), '{1, 1, 1}', '{1, 8, 9}')$$),
               (7, 'known account that does not exist', $$SELECT accept_messages('p', ms(1), '{404}')$$)) AS given (n, what, call), refusal(call)
 ORDER BY n;
TABLE records;
-- Copies that are equal as jsonb are no mismatch.
SELECT right(id::text, 2) AS id FROM accept_messages('p', ms(7, 7), '{1, 1}', ARRAY['{"a": 1, "b": 1.0}', '{"b": 1, "a": 1}']::jsonb[]) AS id;
-- A refusal leaves the caller's transaction usable.
BEGIN;
SELECT code FROM refusal($$SELECT accept_messages('p', ms(30, 1), '{1, 2}')$$);
SELECT right(id::text, 2) AS id FROM accept_messages('p', ms(30, 1), '{1, 1}') AS id;
ROLLBACK;
-- An unknown account: 23503, and nothing of the call is recorded.
SELECT accept_messages('p', ms(31, 32), '{1, 404}');
SELECT accept_messages('p', ms(32, 31), '{-9223372036854775808, 1}');
TABLE records;

-- Arguments: arrays of one dimension, of equal length, without NULL.
SELECT n, code, message
  FROM (VALUES (1, $$accept_messages('s', NULL, '{1}')$$), (2, $$accept_messages('s', ms(1), NULL)$$), (3, $$accept_messages('s', NULL, NULL)$$),
               (4, $$accept_messages('s', ms(1, 2), '{1}')$$), (5, $$accept_messages('s', ms(1), '{1, 1}')$$), (6, $$accept_messages('s', '{}', '{1}')$$),
               (7, $$accept_messages('s', ms(1), '{}')$$), (8, $$accept_messages('s', ms(1), '{1}', '{}')$$), (9, $$accept_messages('s', ms(1), '{1}', '{1, 2}')$$),
               (10, $$accept_messages('s', '{}', '{}', '{1}')$$), (11, $$accept_messages('s', ms(1, NULL), '{1, 1}')$$), (12, $$accept_messages('s', ARRAY[m(1), NULL], '{1, 1}')$$),
               (13, $$accept_messages('s', ms(1, 2), '{1, NULL}')$$), (14, $$accept_messages('s', ms(1, 2), '{1, 1}', '{1, NULL}')$$),
               (15, $$accept_messages('s', ARRAY[ms(1, 2), ms(3, 4)], '{1, 1, 1, 1}')$$), (16, $$accept_messages('s', ms(1, 2, 3, 4), '{{1, 1}, {1, 1}}')$$),
               (17, $$accept_messages('s', ARRAY[ms(1, 2), ms(3, 4)], '{{1, 1}, {1, 1}}')$$), (18, $$accept_messages('s', ms(1, 2), '{1, 1}', '{{1, 2}}')$$),
               (19, $$accept_messages('s', ARRAY[ms(1)], '{{1}}', '{{1}}')$$), (20, $$accept_messages(NULL, ms(1), '{1}')$$), (21, $$accept_messages('', ms(1), '{1}')$$),
               (22, $$accept_messages(repeat('s', 256), ms(1), '{1}')$$), (23, $$accept_messages(NULL, '{}', '{}')$$)) AS given (n, call), refusal('SELECT ' || call)
 ORDER BY n;
SELECT code, message, hint FROM refusal($$SELECT accept_messages('s', ms(1, 2), '{1}')$$);
SELECT accept_messages('s', ms(1), '{1}', ARRAY[(repeat('[', 128) || repeat(']', 128))::jsonb]);
SELECT count(*) FROM processed_message WHERE subscriber = 's';

-- They vanish with the transaction or savepoint, as all records do.
BEGIN;
SELECT count(*) FROM accept_messages('s', ms(1, 2), '{1, 1}');
SAVEPOINT s;
SELECT count(*) FROM accept_messages('s', ms(3, 4), '{1, 1}');
ROLLBACK TO SAVEPOINT s;
SELECT right(id::text, 2) AS id FROM accept_messages('s', ms(1, 3), '{1, 1}') AS id;
ROLLBACK;
SELECT count(*) FROM processed_message WHERE subscriber = 's';
-- In a READ ONLY transaction a first time is 25006.
BEGIN READ ONLY;
SELECT accept_messages('s', ms(1), '{1}');
ROLLBACK;
-- A result that is read in part has been recorded whole.
SELECT right(id::text, 2) AS id FROM accept_messages('s', ms(1, 2, 3), '{1, 1, 1}') AS id LIMIT 1;
SELECT count(*) FROM processed_message WHERE subscriber = 's';

-- 10,000 ids in one call, in falling order, with payloads: all come back in their order; again, none does; with one more, it.
CREATE TABLE many AS
    SELECT array_agg(m(i) ORDER BY i DESC) AS ids, array_agg((1 + i % 3)::bigint ORDER BY i DESC) AS accounts, array_agg(to_jsonb(i) ORDER BY i DESC) AS payloads
      FROM generate_series(1, 10000) AS i;
SELECT array_agg(id ORDER BY ordinality) = (SELECT ids FROM many) AS all_in_order FROM many, accept_messages('many', ids, accounts, payloads) WITH ORDINALITY AS new (id, ordinality);
SELECT count(*) AS records, count(DISTINCT payload_fingerprint) AS payloads FROM processed_message WHERE subscriber = 'many';
SELECT count(*) FROM many, accept_messages('many', ids, accounts, payloads);
SELECT right(id::text, 5) AS id FROM many, accept_messages('many', m(10001) || ids, 1::bigint || accounts, to_jsonb(0) || payloads) AS id;

-- The caller makes the effects in the same statement: of new messages alone.
SELECT count(*) FROM accept_messages('effect', ms(1), '{1}');
WITH event (id, account_id, amount) AS (VALUES (m(1), 1::bigint, 5), (m(2), 1, 7), (m(3), 2, 11), (m(3), 2, 11)),
     accepted AS MATERIALIZED (
         SELECT id FROM accept_messages('effect', (SELECT array_agg(id) FROM event), (SELECT array_agg(account_id) FROM event)) AS id
     ), total AS (
         SELECT account_id, sum(amount) AS amount FROM (SELECT DISTINCT * FROM event) AS e JOIN accepted USING (id) GROUP BY account_id
     )
UPDATE account SET balance = balance + total.amount FROM total WHERE account.account_id = total.account_id;
SELECT string_agg(account_id || ':' || balance, ' ' ORDER BY account_id) AS balances FROM account;

-- Statements that users write around processed_message themselves: accepted ids in a CTE, then the accounts found there.
PREPARE apply AS
WITH event (id, account_id, amount) AS (VALUES (m(1), 1::bigint, 5), (m(2), 1, 7), (m(3), 2, 11)),
     accepted AS (
         INSERT INTO processed_message (subscriber, message_id, account_id)
         SELECT 'own', id, account_id FROM event
         ON CONFLICT DO NOTHING
         RETURNING message_id, account_id
     ), total AS (
         SELECT accepted.account_id, sum(event.amount) AS amount FROM accepted JOIN event ON event.id = accepted.message_id GROUP BY accepted.account_id
     )
UPDATE account SET balance = balance + total.amount FROM total WHERE account.account_id = total.account_id RETURNING account.account_id, balance;
SELECT accept_message('own', m(2), 1, '{"n": 2}');
EXECUTE apply;
EXECUTE apply;
-- Both ways know what the other recorded.
SELECT right(id::text, 2) AS id FROM accept_messages('own', ms(1, 2, 3, 4), '{1, 1, 2, 2}') AS id;
SELECT accept_message('own', m(3), 2, '{"any": 1}'), apply_message_once('own', m(1), 1, 5);
SELECT string_agg(account_id || ':' || balance, ' ' ORDER BY account_id) AS balances FROM account;

-- A message whose record a trigger suppresses is not told to be a repeat: the caller would lose it.
CREATE FUNCTION suppress() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END';
CREATE TRIGGER t BEFORE INSERT ON processed_message FOR EACH ROW EXECUTE FUNCTION suppress();
SELECT code LIKE '40%' AS retryable, code = '00000' AS told_to_be_a_repeat FROM refusal($$SELECT accept_messages('suppressed', ms(1), '{1}')$$);
DROP TRIGGER t ON processed_message;

-- A trigger that takes the fingerprint away would let another payload pass: refused as for one message.
CREATE FUNCTION forget_payload() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN NEW.payload_fingerprint := NULL; RETURN NEW; END';
CREATE TRIGGER t BEFORE INSERT ON processed_message FOR EACH ROW EXECUTE FUNCTION forget_payload();
SELECT code FROM refusal($$SELECT accept_messages('forgets', ARRAY[m(1)], '{1}', ARRAY[jsonb '1'])$$);
SELECT code FROM refusal($$SELECT accept_messages('forgets', ARRAY[m(1)], '{1}')$$);
DROP TRIGGER t ON processed_message;
DROP FUNCTION forget_payload;

-- Repeats alone write nothing and work in a READ ONLY transaction.
INSERT INTO account VALUES (7001, 0);
SELECT accept_messages('read only', ARRAY[m(1)], ARRAY[7001]) = m(1) AS first;
BEGIN READ ONLY;
SELECT count(*) AS new FROM accept_messages('read only', ARRAY[m(1), m(1)], ARRAY[7001, 7001]);
SELECT pg_current_xact_id_if_assigned() IS NULL AS no_transaction_id;
SELECT count(*) AS new FROM accept_messages('read only', ARRAY[m(2)], ARRAY[7001]);
ROLLBACK;

DROP VIEW records;
DROP EXTENSION idempotency_record;
