-- Keys are opaque and compared byte for byte: each of these is a key of its own.
\set VERBOSITY sqlstate
SET client_min_messages = warning;
CREATE EXTENSION idempotency_record;
-- Records are changed by hand as a superuser can who means it: the triggers that keep them as they are do not fire.
CREATE PROCEDURE tamper(statement text) LANGUAGE plpgsql SET session_replication_role = replica AS 'BEGIN EXECUTE statement; END';

CREATE FUNCTION refusal(call text, OUT code text, OUT message text) LANGUAGE plpgsql AS $$
BEGIN
    EXECUTE call;
    code := '00000';
EXCEPTION WHEN OTHERS THEN
    GET STACKED DIAGNOSTICS code = RETURNED_SQLSTATE, message = MESSAGE_TEXT;
END $$;

INSERT INTO account VALUES (1, 1000), (2, 1000);

-- 1 and 255 bytes are keys, 256 are not: bytes count, and not characters.
CREATE TABLE sized (name text, key text);
INSERT INTO sized VALUES
    ('1 byte', 'k'),
    ('255 bytes', repeat('k', 255)),
    ('256 bytes', repeat('k', 256)),
    ('127 characters, 254 bytes', repeat(U&'\00E9', 127)),
    ('128 characters, 255 bytes', repeat(U&'\00E9', 127) || 'k'),
    ('128 characters, 256 bytes', repeat(U&'\00E9', 128)),
    ('85 characters, 255 bytes', repeat(U&'\20AC', 85)),
    ('86 characters, 256 bytes', repeat(U&'\20AC', 85) || 'k'),
    ('63 characters, 252 bytes', repeat(U&'\+01F600', 63)),
    ('64 characters, 256 bytes', repeat(U&'\+01F600', 64)),
    ('1 MB, compressible', repeat('x', 1000000)),
    ('1 MB, incompressible', (SELECT string_agg(md5(i::text), '') FROM generate_series(1, 31250) AS i));
SELECT name, octet_length(key), (refusal(format('SELECT debit_once(1, %L, 1)', key))).* FROM sized;
SELECT count(*) AS records, max(octet_length(request_key)) AS longest, (SELECT balance FROM account WHERE account_id = 1)
  FROM request_result;

-- A key that comes out of a table is the same key, however the table stores it.
SELECT name, debit_once(1, key, 1) FROM sized WHERE octet_length(key) <= 255;
SELECT name, octet_length(key), (refusal('SELECT debit_once(1, key, 1) FROM sized WHERE name = ' || quote_literal(name))).*
  FROM sized WHERE octet_length(key) > 255;
CREATE TABLE compressed (key text, filler text) WITH (toast_tuple_target = 128);
INSERT INTO compressed
SELECT key, (SELECT string_agg(md5(i::text), '') FROM generate_series(1, 100) AS i)
  FROM sized WHERE name IN ('255 bytes', '256 bytes');
SELECT octet_length(key), pg_column_size(key) < 100 AS is_compressed FROM compressed;
SELECT debit_once(1, key, 1) FROM compressed WHERE octet_length(key) = 255;
SELECT * FROM refusal('SELECT debit_once(1, key, 1) FROM compressed WHERE octet_length(key) = 256');
DROP TABLE compressed, sized;
CALL tamper($t$DELETE FROM request_result$t$);
UPDATE account SET balance = 1000;

-- Every one of these is another key. Each executes once, and replays its own answer.
CREATE TABLE various (id int PRIMARY KEY, name text, key text);
INSERT INTO various VALUES
    (1, 'lower case', 'key'),
    (2, 'upper case', 'KEY'),
    (3, 'trailing space', 'key '),
    (4, 'leading space', ' key'),
    (5, 'a space', ' '),
    (6, 'two spaces', '  '),
    (7, 'no-break space', U&'\00A0'),
    (8, 'zero-width space', U&'\200B'),
    (9, 'newline', E'\n'),
    (10, 'carriage return', E'\r'),
    (11, 'trailing newline', E'key\n'),
    (12, 'tab', E'\t'),
    (13, 'first control character', E'\x01'),
    (14, 'composed (NFC)', U&'caf\00E9'),
    (15, 'decomposed (NFD)', U&'cafe\0301'),
    (16, 'without accent', 'cafe'),
    (17, 'sharp s', U&'stra\00DFe'),
    (18, 'double s', 'strasse'),
    (19, 'capital sharp s', U&'STRA\1E9EE'),
    (20, 'dotless i', U&'\0131'),
    (21, 'dotted capital i', U&'\0130'),
    (22, 'i', 'i'),
    (23, 'Latin a', 'a'),
    (24, 'Cyrillic a', U&'\0430'),
    (25, 'full-width a', U&'\FF41'),
    (26, 'ligature', U&'\FB01'),
    (27, 'its letters', 'fi'),
    (28, 'byte order mark before', U&'\FEFFkey'),
    (29, 'emoji', U&'\+01F600'),
    (30, 'printf string', '%s%s%n'),
    (31, 'printf percent', '%'),
    (32, 'SQL parameter', '$1'),
    (33, 'single quote', ''''),
    (34, 'two single quotes', ''''''),
    (35, 'double quote', '"'),
    (36, 'backslash', '\'),
    (37, 'two backslashes', '\\'),
    (38, 'backslash n', '\n'),
    (39, 'escaped NUL', '\x00'),
    (40, 'dollar quote', '$$; DROP TABLE account; $$'),
    (41, 'injection', '''; DROP TABLE account; --'),
    (42, 'LIKE wildcards', 'k_y%'),
    (43, 'JSON', '{"amount": 1}'),
    (44, 'number', '1'),
    (45, 'number with leading zero', '01'),
    (46, 'number with decimals', '1.0'),
    (47, 'number with exponent', '1e0'),
    (48, 'negative zero', '-0'),
    (49, 'zero', '0'),
    (50, 'not a number', 'NaN'),
    (51, 'word NULL', 'NULL'),
    (52, 'word null', 'null'),
    (53, 'UUID', 'a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11'),
    (54, 'UUID in upper case', 'A0EEBC99-9C0B-4EF8-BB6D-6BB9BD380A11'),
    (55, 'UUID in braces', '{a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11}'),
    (56, 'template word', '@extschema@');
CREATE TABLE first_answer AS
    SELECT id, name, debit_once(1, key, 1) AS answer FROM (SELECT * FROM various ORDER BY id) AS ordered;
SELECT count(*), count(DISTINCT answer) AS answers, (SELECT count(*) FROM request_result) AS records,
       (SELECT balance FROM account WHERE account_id = 1)
  FROM first_answer;
SELECT name FROM first_answer WHERE answer <> jsonb_build_object('balance', 1000 - id);
SELECT name FROM various JOIN first_answer USING (id, name) WHERE debit_once(1, key, 1) <> answer;
SELECT name FROM various WHERE NOT EXISTS (
    SELECT FROM request_result WHERE convert_to(request_key, 'UTF8') = convert_to(key, 'UTF8'));
-- And each with another amount is a mismatch.
SELECT code, count(*) FROM various, refusal(format('SELECT debit_once(1, %L, 2)', key)) GROUP BY code;
SELECT balance FROM account WHERE account_id = 1;

-- The same key on another account is another intention.
SELECT debit_once(2, 'key', 5);
SELECT debit_once(1, 'key', 1);
SELECT debit_once(2, 'key', 5);

-- The same key of another operation, or of another version of this one, is another intention.
INSERT INTO request_result (account_id, operation, request_key, request, response) VALUES
    (2, 'debit:v0', 'scoped', '{"amount": 1}', '"of debit:v0"'),
    (2, 'debit:v10', 'scoped', '{"amount": 1}', '"of debit:v10"'),
    (2, 'DEBIT:V1', 'scoped', '{"amount": 1}', '"of DEBIT:V1"'),
    (2, 'debit:v1 ', 'scoped', '{"amount": 1}', '"of debit:v1 with a space"'),
    (2, 'transfer:v1', 'scoped', '{"amount": 1}', '"of transfer:v1"');
SELECT debit_once(2, 'scoped', 1);
SELECT debit_once(2, 'scoped', 1);
SELECT operation, response FROM request_result WHERE request_key = 'scoped' ORDER BY operation;

-- Neither is a mismatch of the other operation's record one of this operation.
CALL tamper($t$DELETE FROM request_result WHERE request_key = 'scoped' AND operation = 'debit:v1'$t$);
SELECT debit_once(2, 'scoped', 2);

-- Account and key are two parts, and not one string: 1 and 11 are not 11 and 1.
INSERT INTO account VALUES (11, 100);
SELECT debit_once(1, '11', 1), debit_once(11, '1', 1);

DROP TABLE various, first_answer;
DROP FUNCTION refusal;
DROP EXTENSION idempotency_record;
