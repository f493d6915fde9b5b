-- The fingerprint of a request: equal where jsonb is equal, different where it is not, and the same in every language.
\set VERBOSITY sqlstate
SET client_min_messages = warning;
CREATE EXTENSION idempotency_record;

-- Test vectors, computed with hashlib and json of Python from the canonical form that docs/reference.md describes, and
-- not by this extension: the canonical form in the comment, the version byte and its SHA-256 in the column.
CREATE TABLE vector (id int GENERATED ALWAYS AS IDENTITY, request jsonb, expected text);
INSERT INTO vector (request, expected) VALUES
    ($j$null$j$, '0174234e98afe7498fb5daf1f36ac2d78acc339464f950703b8c019892f982b90b'), -- null
    ($j$true$j$, '01b5bea41b6c623f7c09f1bf24dcae58ebab3c0cdd90ad966bc43a45b44867e12b'), -- true
    ($j$false$j$, '01fcbcf165908dd18a9e49f7ff27810176db8e9f63b4352213741664245224f8aa'), -- false
    ($j$0$j$, '015feceb66ffc86f38d952786c6d696c79c2dbc239dd4e91b46729d73a27fb57e9'), -- 0
    ($j$-0.00$j$, '015feceb66ffc86f38d952786c6d696c79c2dbc239dd4e91b46729d73a27fb57e9'), -- 0
    ($j$1$j$, '01bcac40fbed4ed4e1042a0c9dafbe9cdd58447415f19a11e59add45fdc083e2f5'), -- 1e0
    ($j$1.00$j$, '01bcac40fbed4ed4e1042a0c9dafbe9cdd58447415f19a11e59add45fdc083e2f5'), -- 1e0
    ($j$-1200$j$, '01edf91c7e349cf95de976befa80f166ef51fd09f0009376d2c2c2a3701a31af51'), -- -12e2
    ($j$0.05$j$, '01d905c0606ba9325ef0e9ddac2b8fcd88e8b5de5679b9de427d33b194263049b2'), -- 5e-2
    ($j$100.50$j$, '011017b8ccd76b5368685fffe03731cb762933d47203d30d2d90a6238e37cf4b58'), -- 1005e-1
    ($j$9223372036854775808$j$, '01fb8b9f8f0e5d064f0e393d3b9105b5cbe4d32c412c5f428687909051e4ba309c'), -- 9223372036854775808e0
    ($j$123456789012345678901234567890.10$j$, '010f4a742a83be67cc202885eacf6a649125fd38ab0ca66bdae8c4820ab9273f49'), -- 1234567890123456789012345678901e-1
    ($j$1e131071$j$, '017b42c8c0c7bbf8ca6be483d0e7694417f87c2fbd9072578c3f4fe23d9ec7062a'), -- 1e131071
    ($j$1e-16383$j$, '01ffad032b25c4d06d0f06f8dfb4ba2b1bfa5ba6f8fb7ead515e8be3329cc578fd'), -- 1e-16383
    ($j$"1"$j$, '01391552c099c101b131feaf24c5795a6a15bc8ec82015424e0d2b4274a369a0bf'), -- "1"
    ($j$""$j$, '0112ae32cb1ec02d01eda3581b127c1fee3b0dc53572ed6baf239721a03d82e126'), -- ""
    ($j$"a\"\\\n"$j$, '01d2eeb9175d55060a3daa8ef498f84529f50730d59e8425e3ab9e2027227eaa7d'), -- "a\"\\\u000a"
    ($j$"\u0001\u001f\u007f\t\/"$j$, '01d3155b59499aa87395657bb81c695bb9de7d7ae7fb7d72a8c0d7900769d120ef'), -- "\u0001\u001f", DEL as it is, "\u0009/"
    ($j$"\u00e9"$j$, '01f2886017e9c7abacf804b54d64787dce2b611c9544ba21f3affdd126a6e50086'), -- "é"
    ($j$[]$j$, '014f53cda18c2baa0c0354bb5f9a3ecbe5ed12ab4d8e11ba873c2f11161202b945'), -- []
    ($j${}$j$, '0144136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a'), -- {}
    ($j$[[]]$j$, '01cf1cbb66a638b4860a516671fb74850e6ccf787fe6c4c8d29e9c04efe880bd05'), -- [[]]
    ($j$[1,[2,"x"],null]$j$, '01e713a418196b0b4c78d89623f74de1032714b796e5af76f7e50427d075c77a23'), -- [1e0,[2e0,"x"],null]
    ($j${"amount": 100}$j$, '01c690f8676163df1116e5e197db2103b78f473c5b15b933c412d708ea0be0a77d'), -- {"amount":1e2}
    ($j${"b": [1, 2.50, -1200], "a": {"\u00e9": null}}$j$, '019c6c52597e2ca1277041e509e6d56f72df9dcacb80e807baa167d06ccc074f4d'), -- {"a":{"é":null},"b":[1e0,25e-1,-12e2]}
    -- By the bytes of UTF-8: neither by length first, as jsonb stores them, nor by UTF-16, which has the last two the other way round.
    ($j${"\uff5e": 1, "\ud83d\ude00": 2, "z": 3, "aa": 4, "b": 5}$j$, '01b786b15cbf2a2a9651dbef8b24b9b50cbdacbd4b4353f3f57dc3e17f1fa04692'), -- {"aa":4e0,"b":5e0,"z":3e0,"～":1e0,"😀":2e0}
    ($j${"": 0, " ": 1}$j$, '018352182c87fea531684f0088645863dec2eefa53a9f26c763d6951f730cf7749'), -- {"":0," ":1e0}
    ((repeat('[', 127) || repeat(']', 127))::jsonb, '010d0ce008686806cefb2386af80bbb495dc8279da83466a8fc0bb25faa9660142');
SELECT count(*) AS vectors FROM vector;
SELECT id, left(request::text, 60) AS request, encode(request_fingerprint(request), 'hex') AS fingerprint FROM vector
 WHERE encode(request_fingerprint(request), 'hex') <> expected ORDER BY id;
-- The server's own SHA-256 agrees.
SELECT request_fingerprint('{"amount": 100}') = '\x01'::bytea || sha256('{"amount":1e2}') AS agrees;

-- Equal as jsonb, equal by fingerprint; different as jsonb, different by fingerprint: each pair of these.
CREATE TABLE given (request jsonb);
INSERT INTO given SELECT unnest(ARRAY[
    '1', '1.0', '1.00', '1e0', '10e-1', '0.1e1', '10', '1e1', '0.1', '-1', '-1.0', '0', '-0', '0.000', '0e10', '1e100', '1e-100', '11', '1.1', '110e-2',
    '12345678901234567890', '12345678901234567891', '0.1234567890123456789', '0.12345678901234567891', '9007199254740992', '9007199254740993',
    '"1"', '"1e0"', '"0"', '""', '" "', '"null"', 'null', '"true"', 'true', 'false', '"a"', '"A"', '"\u0061"', '"\u00e9"', '"e\u0301"', '"\u00ff"',
    '"\\u0001"', '"\u0001"', '"\""', '"\\"', '"\\\""', '"\/"', '"/"', '"\n"', '"\\n"', '"\\u000a"', '"a,b"', '"\",\""', '"a\":1e0,\"b"',
    '[]', '[[]]', '[[],[]]', '[[[]]]', '{}', '[{}]', '[null]', '[1]', '[1.0]', '[1,1]', '[1,2]', '[2,1]', '[[1],2]', '[[1,2]]', '[1,[2]]', '["1,2"]', '["1","2"]',
    '["1\",\"2"]', '{"a":1}', '{"a":1.0}', '{ "a" : 1e0 }', '{"A":1}', '{"a":"1"}', '{"a":null}', '{"a":[1]}', '{"":1}', '{"a":1,"b":2}', '{"b":2,"a":1}', '{"b":2.0,"a":1e0}',
    '{"a":2,"b":1}', '{"a":1,"a":2,"b":1}', '{"a":{"b":1}}', '{"a":{},"b":1}', '{"a\":1e0,\"b":2}', '["a",1]', '{"aa":1,"b":2}', '{"b":2,"aa":1}', '{"1":1}', '["a:1"]',
    '{"\u00e9":1,"z":2}', '{"z":2,"\u00e9":1}'])::jsonb;
SELECT count(*) FILTER (WHERE a.request = b.request) AS equal, count(*) FILTER (WHERE a.request <> b.request) > 4000 AS many_different,
       count(*) FILTER (WHERE (a.request = b.request) <> (request_fingerprint(a.request) = request_fingerprint(b.request))) AS wrong
  FROM given AS a CROSS JOIN given AS b;
SELECT DISTINCT octet_length(request_fingerprint(request)) AS bytes, get_byte(request_fingerprint(request), 0) AS version FROM given;
-- An object is an object, whatever its members are called: also with the names that a JSON library keeps for itself.
SELECT name, request_fingerprint(jsonb_build_object(name, '1')) = request_fingerprint('1') AS taken_for_a_number,
       request_fingerprint(jsonb_build_object(name, '1')) = '\x01'::bytea || sha256(convert_to('{"' || name || '":"1"}', 'UTF8')) AS right
  FROM unnest(ARRAY['$serde_json::private::Number', '$serde_json::private::RawValue', '__proto__']) AS name;
SELECT request_fingerprint('{"$serde_json::private::Number": "no number"}') = '\x01'::bytea || sha256('{"$serde_json::private::Number":"no number"}') AS right;

-- The same under every locale and setting of the session, and in a temporary index, for it is immutable.
SELECT provolatile, proisstrict, proparallel FROM pg_proc WHERE oid = 'request_fingerprint(jsonb)'::regprocedure;
SELECT request_fingerprint(NULL) IS NULL AS strict;
SET extra_float_digits = -15;
SET bytea_output = escape;
SET client_encoding = 'LATIN1';
SET lc_numeric = 'C';
SELECT count(*) AS wrong FROM vector WHERE encode(request_fingerprint(request), 'hex') <> expected;
RESET client_encoding;
RESET bytea_output;

-- 127 levels, of arrays or of objects, and no more.
SELECT levels, kind, octet_length(request_fingerprint(CASE kind WHEN 'array' THEN repeat('[', levels) || repeat(']', levels)
           ELSE repeat('{"a":', levels - 1) || '{}' || repeat('}', levels - 1) END::jsonb)) AS bytes
  FROM unnest(ARRAY[126, 127]) AS levels, unnest(ARRAY['array', 'object']) AS kind ORDER BY levels, kind;
SELECT request_fingerprint((repeat('[', 127) || '1' || repeat(']', 127))::jsonb) IS NOT NULL AS scalar_in_127;
SELECT request_fingerprint((repeat('[', 128) || repeat(']', 128))::jsonb);
SELECT request_fingerprint((repeat('{"a":', 127) || '{}' || repeat('}', 127))::jsonb);
SELECT request_fingerprint((repeat('[', 5000) || repeat(']', 5000))::jsonb);
-- After the error the session goes on.
SELECT count(*) AS wrong FROM vector WHERE encode(request_fingerprint(request), 'hex') <> expected;
-- Wide values are no trouble.
SELECT octet_length(request_fingerprint(jsonb_agg(i))) AS bytes FROM generate_series(1, 100000) AS i;
SELECT octet_length(request_fingerprint(jsonb_object_agg('k' || i, repeat('v', 100)))) AS bytes FROM generate_series(1, 10000) AS i;

DROP EXTENSION idempotency_record;
