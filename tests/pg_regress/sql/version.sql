-- accept_version: only a version above the highest accepted one, for each subscriber and entity.
\set VERBOSITY sqlstate
SET client_min_messages = warning;
CREATE EXTENSION idempotency_record;

-- Every field of an error of ours; of the server's errors the tests look at the SQLSTATE alone.
CREATE FUNCTION refusal(call text, OUT code text, OUT message text, OUT detail text, OUT hint text) LANGUAGE plpgsql AS $$
BEGIN
    EXECUTE call;
    code := '00000';
EXCEPTION WHEN OTHERS THEN
    GET STACKED DIAGNOSTICS code = RETURNED_SQLSTATE, message = MESSAGE_TEXT, detail = PG_EXCEPTION_DETAIL,
        hint = PG_EXCEPTION_HINT;
END $$;

-- Order, which idempotency does not give: "shipped", late, does not overwrite "delivered".
CREATE TABLE parcel (state text, version bigint);
INSERT INTO parcel VALUES ('ordered', 1);
UPDATE parcel SET state = 'delivered', version = 3 WHERE accept_version('tracking', 'parcel-1', 3);
UPDATE parcel SET state = 'shipped', version = 2 WHERE accept_version('tracking', 'parcel-1', 2);
TABLE parcel;

-- Above: true. Equal or below: false. From this and from another session.
SELECT version, accept_version('s', 'e', version) FROM unnest(ARRAY[5, 5, 4, 6, 5, -1, 0, 6, 100, 99]) WITH ORDINALITY AS given (version, ordinal) ORDER BY ordinal;
\c -
\set VERBOSITY sqlstate
SET client_min_messages = warning;
SELECT accept_version('s', 'e', 100), accept_version('s', 'e', 101);
SELECT subscriber, entity, version, accepted_at <= clock_timestamp() AS dated FROM accepted_version ORDER BY subscriber, entity;
-- The first version may be any, also zero or the lowest; the range is that of bigint.
SELECT accept_version('s', 'lowest', -9223372036854775808), accept_version('s', 'lowest', -9223372036854775808), accept_version('s', 'lowest', 0),
       accept_version('s', 'lowest', 9223372036854775807), accept_version('s', 'lowest', 9223372036854775807);
-- Subscribers and entities are independent, and compared byte for byte.
SELECT accept_version('t', 'e', 1), accept_version('s', 'E', 1), accept_version('s', 'e ', 1), accept_version('S', 'e', 1), accept_version('t', 'e', 1);
-- accepted_at is the time of the call, and only an accepted version changes it.
UPDATE accepted_version SET accepted_at = '2001-01-01' WHERE entity = 'e' AND subscriber = 's';
SELECT accept_version('s', 'e', 50);
SELECT version, accepted_at = '2001-01-01' AS untouched FROM accepted_version WHERE entity = 'e' AND subscriber = 's';
BEGIN;
SELECT pg_sleep(0.01);
SELECT accept_version('s', 'e', 102);
SELECT version, accepted_at > now() + interval '10 milliseconds' AS time_of_the_call FROM accepted_version WHERE entity = 'e' AND subscriber = 's';
ROLLBACK;

-- A refused version writes nothing: no transaction id, and it works in a READ ONLY transaction, where a new one is 25006.
BEGIN READ ONLY;
SELECT accept_version('s', 'e', 101), accept_version('s', 'e', 1);
SELECT pg_current_xact_id_if_assigned() IS NULL AS no_transaction_id;
SELECT accept_version('s', 'e', 102);
ROLLBACK;
-- It vanishes with its transaction or savepoint: a lower version is accepted then.
BEGIN;
SELECT accept_version('s', 'e', 200), accept_version('s', 'e', 150);
SAVEPOINT s;
SELECT accept_version('s', 'e', 300);
ROLLBACK TO SAVEPOINT s;
SELECT accept_version('s', 'e', 250);
ROLLBACK;
SELECT accept_version('s', 'e', 102);
-- In one statement each call sees the one before.
SELECT accept_version('s', 'n', 1), accept_version('s', 'n', 1), accept_version('s', 'n', 2), accept_version('s', 'n', 1);

-- A trigger that records another entity is refused, the first time too.
CREATE FUNCTION lower_entity() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN NEW.entity := lower(NEW.entity); RETURN NEW; END';
CREATE TRIGGER t BEFORE INSERT ON accepted_version FOR EACH ROW EXECUTE FUNCTION lower_entity();
SELECT code FROM refusal($$SELECT accept_version('s', 'ENTITY', 1)$$);
DROP TRIGGER t ON accepted_version;
DROP FUNCTION lower_entity;

-- Arguments.
SELECT call, code, message
  FROM unnest(ARRAY[$$accept_version(NULL, 'e', 1)$$, $$accept_version('', 'e', 1)$$, $$accept_version(repeat('s', 256), 'e', 1)$$,
                    $$accept_version('s', NULL, 1)$$, $$accept_version('s', '', 1)$$, $$accept_version('s', repeat('e', 256), 1)$$, $$accept_version('s', 'e', NULL)$$,
                    $$accept_version(repeat('s', 255), repeat('e', 255), 1)$$]) WITH ORDINALITY AS given (call, ordinal), refusal('SELECT ' || call) ORDER BY ordinal;
SELECT count(*) FROM accepted_version WHERE octet_length(subscriber) > 255 OR octet_length(entity) > 255 OR subscriber = '' OR entity = '';

-- The table: commented throughout, dumped, and its key is a constraint.
SELECT obj_description('accepted_version'::regclass) IS NOT NULL AS commented;
SELECT attname FROM pg_attribute WHERE attrelid = 'accepted_version'::regclass AND attnum > 0 AND col_description(attrelid, attnum) IS NULL;
SELECT 'accepted_version'::regclass = ANY (extconfig) AS dumped FROM pg_extension WHERE extname = 'idempotency_record';
INSERT INTO accepted_version VALUES ('s', 'e', 1);
INSERT INTO accepted_version VALUES ('s', 'x', NULL);

-- A version whose record a trigger suppresses is not told to be outdated: the caller would drop it.
CREATE FUNCTION suppress() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END';
CREATE TRIGGER t BEFORE INSERT ON accepted_version FOR EACH ROW EXECUTE FUNCTION suppress();
SELECT code LIKE '40%' AS retryable, code = '00000' AS told_to_be_outdated FROM refusal($$SELECT accept_version('s', 'suppressed', 1)$$);
DROP TRIGGER t ON accepted_version;

DROP EXTENSION idempotency_record;
