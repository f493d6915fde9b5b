-- Triggers of users on the extension's tables: they work, and none can make a record lie.
\set VERBOSITY sqlstate
SET client_min_messages = warning;
CREATE EXTENSION idempotency_record;
-- Records are changed by hand as a superuser can who means it: the triggers that keep them as they are do not fire.
CREATE PROCEDURE tamper(statement text) LANGUAGE plpgsql SET session_replication_role = replica AS 'BEGIN EXECUTE statement; END';
INSERT INTO account VALUES (1, 1000), (2, 1000);

CREATE VIEW books AS
    SELECT (SELECT string_agg(account_id || ':' || balance, ' ' ORDER BY account_id) FROM account) AS balances,
           (SELECT string_agg(account_id || ':' || request_key, ' ' ORDER BY account_id, request_key)
              FROM request_result) AS records;
CREATE FUNCTION refusal(call text, OUT code text, OUT message text, OUT hint text) LANGUAGE plpgsql AS $$
BEGIN
    EXECUTE call;
    code := '00000';
EXCEPTION WHEN OTHERS THEN
    GET STACKED DIAGNOSTICS code = RETURNED_SQLSTATE, message = MESSAGE_TEXT, hint = PG_EXCEPTION_HINT;
END $$;
SELECT debit_once(1, 'known', 1);

-- User triggers fire once for each debit, and never for a replay or a refusal. A replay fires not even those of
-- statements.
CREATE TABLE fired (id int GENERATED ALWAYS AS IDENTITY, what text);
CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO fired (what) VALUES (concat_ws(' ', TG_TABLE_NAME, TG_WHEN, TG_OP, TG_LEVEL));
    RETURN NEW;
END $$;
CREATE TRIGGER a BEFORE INSERT OR UPDATE OR DELETE ON account FOR EACH ROW EXECUTE FUNCTION note();
CREATE TRIGGER b AFTER INSERT OR UPDATE OR DELETE ON account FOR EACH ROW EXECUTE FUNCTION note();
CREATE TRIGGER a BEFORE INSERT OR UPDATE OR DELETE ON request_result FOR EACH ROW EXECUTE FUNCTION note();
CREATE TRIGGER b AFTER INSERT OR UPDATE OR DELETE ON request_result FOR EACH ROW EXECUTE FUNCTION note();
SELECT debit_once(1, 'fires', 1);
SELECT what FROM fired ORDER BY id;
TRUNCATE fired;
CREATE TRIGGER c BEFORE INSERT OR UPDATE OR DELETE ON account EXECUTE FUNCTION note();
CREATE TRIGGER c BEFORE INSERT OR UPDATE OR DELETE ON request_result EXECUTE FUNCTION note();
SELECT debit_once(1, 'fires', 1), debit_once(1, 'known', 1);
SELECT debit_once(1, 'fires', 2);
SELECT debit_once(1, 'poor', 10000);
SELECT count(*) FROM fired;
DROP TRIGGER a ON account;
DROP TRIGGER b ON account;
DROP TRIGGER c ON account;
DROP TRIGGER a ON request_result;
DROP TRIGGER b ON request_result;
DROP TRIGGER c ON request_result;
TABLE books;

-- An update of the account that a trigger suppresses is refused, and neither record nor effect is left.
CREATE FUNCTION suppress() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END';
CREATE TRIGGER t BEFORE UPDATE ON account FOR EACH ROW EXECUTE FUNCTION suppress();
SELECT * FROM refusal($$SELECT debit_once(1, 'suppressed', 1)$$);
SELECT debit_once(1, 'known', 1);
TABLE books;
DROP TRIGGER t ON account;

-- So is an update to another balance than the answer says.
CREATE FUNCTION charge_double() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    NEW.balance := 2 * NEW.balance - OLD.balance;
    RETURN NEW;
END $$;
CREATE TRIGGER t BEFORE UPDATE ON account FOR EACH ROW EXECUTE FUNCTION charge_double();
SELECT * FROM refusal($$SELECT debit_once(1, 'doubled', 1)$$);
TABLE books;
DROP TRIGGER t ON account;
CREATE FUNCTION charge_nothing() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN OLD; END';
CREATE TRIGGER t BEFORE UPDATE ON account FOR EACH ROW EXECUTE FUNCTION charge_nothing();
SELECT * FROM refusal($$SELECT debit_once(1, 'for free', 1)$$);
TABLE books;
DROP TRIGGER t ON account;

-- A record that a trigger suppresses is no record: refused, by no SQLSTATE that asks for a retry, and no debit is left.
CREATE TRIGGER t BEFORE INSERT ON request_result FOR EACH ROW EXECUTE FUNCTION suppress();
SELECT code LIKE '40%' AS retryable, code = '00000' AS executed FROM refusal($$SELECT debit_once(1, 'no record', 1)$$);
SELECT debit_once(1, 'known', 1);
TABLE books;
DROP TRIGGER t ON request_result;

-- A trigger may change the time of a record: answer and replay are the same.
CREATE FUNCTION change_time() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    NEW.created_at := '2000-01-01';
    RETURN NEW;
END $$;
CREATE TRIGGER t BEFORE INSERT ON request_result FOR EACH ROW EXECUTE FUNCTION change_time();
SELECT debit_once(1, 'timed', 1);
SELECT debit_once(1, 'timed', 1);
DROP TRIGGER t ON request_result;

-- A record whose identity, request or response a trigger changes would lie: refused, and nothing is left.
CREATE FUNCTION rewrite() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    CASE TG_ARGV[0]
        WHEN 'account' THEN NEW.account_id := 2;
        WHEN 'operation' THEN NEW.operation := 'other';
        WHEN 'key' THEN NEW.request_key := lower(NEW.request_key);
        WHEN 'request' THEN NEW.request := '{"amount": 4711}';
        WHEN 'response' THEN NEW.response := '{"balance": 4711}';
    END CASE;
    RETURN NEW;
END $$;
CREATE FUNCTION code_with_rewritten(field text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
    code text;
BEGIN
    EXECUTE format('CREATE TRIGGER t BEFORE INSERT ON request_result FOR EACH ROW EXECUTE FUNCTION rewrite(%L)', field);
    code := (refusal(format('SELECT debit_once(1, %L, 1)', upper(field)))).code;
    DROP TRIGGER t ON request_result;
    RETURN code;
END $$;
SELECT field, code_with_rewritten(field) FROM unnest(ARRAY['response', 'request', 'key', 'operation', 'account']) AS field;
TABLE books;
CALL tamper($t$DELETE FROM request_result WHERE request_key NOT IN ('known', 'fires', 'timed')$t$);
UPDATE account SET balance = 1000;

-- A trigger's own error passes through, and nothing is left.
CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION USING ERRCODE = 'ZZ001', MESSAGE = 'closed';
END $$;
CREATE TRIGGER t AFTER UPDATE ON account FOR EACH ROW EXECUTE FUNCTION refuse();
SELECT code, message FROM refusal($$SELECT debit_once(1, 'refused', 1)$$);
DROP TRIGGER t ON account;
CREATE TRIGGER t AFTER INSERT ON request_result FOR EACH ROW EXECUTE FUNCTION refuse();
SELECT code, message FROM refusal($$SELECT debit_once(1, 'refused', 1)$$);
DROP TRIGGER t ON request_result;
CREATE CONSTRAINT TRIGGER t AFTER INSERT ON request_result DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION refuse();
BEGIN;
SELECT debit_once(1, 'refused', 1);
COMMIT;
DROP TRIGGER t ON request_result;
TABLE books;
SELECT debit_once(1, 'refused', 1);

-- A trigger may debit by another key, before or after: each executes once, and both replay.
CREATE FUNCTION fee() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NEW.request_key NOT LIKE 'fee of %' THEN
        PERFORM debit_once(2, 'fee of ' || NEW.request_key, 1);
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER t AFTER INSERT ON request_result FOR EACH ROW EXECUTE FUNCTION fee();
SELECT debit_once(1, 'with fee', 10);
SELECT debit_once(1, 'with fee', 10), debit_once(2, 'fee of with fee', 1);
SELECT debit_once(2, 'fee of with fee', 2);
DROP TRIGGER t ON request_result;
CREATE TRIGGER t BEFORE INSERT ON request_result FOR EACH ROW EXECUTE FUNCTION fee();
SELECT debit_once(1, 'fee before', 10);
SELECT debit_once(1, 'fee before', 10), debit_once(2, 'fee of fee before', 1);
DROP TRIGGER t ON request_result;
TABLE books;

-- A trigger that asks for the very key that is being executed gets its answer, and cannot execute it again.
CREATE FUNCTION ask_again() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO fired (what) VALUES (debit_once(NEW.account_id, NEW.request_key, (NEW.request ->> 'amount')::bigint));
    RETURN NEW;
END $$;
CREATE TRIGGER t AFTER INSERT ON request_result FOR EACH ROW EXECUTE FUNCTION ask_again();
SELECT debit_once(1, 'recursive', 10);
SELECT what FROM fired;
TABLE books;
DROP TRIGGER t ON request_result;

-- A trigger that debits the same account in between would make the answer wrong: refused, and nothing is left.
CREATE FUNCTION fee_of_the_same_account() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NEW.request_key NOT LIKE 'fee of %' THEN
        PERFORM debit_once(NEW.account_id, 'fee of ' || NEW.request_key, 1);
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER t AFTER INSERT ON request_result FOR EACH ROW EXECUTE FUNCTION fee_of_the_same_account();
SELECT code, message FROM refusal($$SELECT debit_once(1, 'own fee', 10)$$);
TABLE books;
DROP TRIGGER t ON request_result;

-- A key that comes and goes under every look is a trigger's doing, since the account is locked: refused for good, and
-- nothing is left.
CREATE FUNCTION take() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF pg_trigger_depth() = 1 THEN
        INSERT INTO request_result VALUES (NEW.*);
    END IF;
    RETURN NEW;
END $$;
CREATE FUNCTION give_back() RETURNS trigger LANGUAGE plpgsql SET session_replication_role = replica AS $$
BEGIN
    IF pg_trigger_depth() = 1 THEN
        DELETE FROM request_result WHERE request_key = 'comes and goes';
    END IF;
    RETURN NULL;
END $$;
CREATE TRIGGER t1 BEFORE INSERT ON request_result FOR EACH ROW EXECUTE FUNCTION take();
CREATE TRIGGER t2 AFTER INSERT ON request_result FOR EACH STATEMENT EXECUTE FUNCTION give_back();
SELECT * FROM refusal($$SELECT debit_once(1, 'comes and goes', 1)$$);
SELECT debit_once(1, 'known', 1);
TABLE books;
DROP TRIGGER t1 ON request_result;
DROP TRIGGER t2 ON request_result;

-- A purge that a trigger suppresses deletes and counts nothing.
CREATE FUNCTION keep() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RETURN CASE WHEN OLD.request_key = 'known' THEN NULL ELSE OLD END;
END $$;
CREATE TRIGGER t BEFORE DELETE ON request_result FOR EACH ROW EXECUTE FUNCTION keep();
SELECT purge_expired_keys('0') + 1 = count(*) AS one_kept FROM request_result;
TABLE books;
DROP TRIGGER t ON request_result;

-- A trigger that rewrites what a handler answered is refused too.
CREATE FUNCTION handler(bigint, jsonb) RETURNS jsonb LANGUAGE sql AS 'SELECT $2';
CREATE FUNCTION other_response() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN NEW.response := '{"x": 1}'; RETURN NEW; END$$;
CREATE TRIGGER t BEFORE INSERT ON request_result FOR EACH ROW EXECUTE FUNCTION other_response();
SELECT code FROM refusal($$SELECT run_once(1, 'own:v1', 'rewritten', '{}', 'handler(bigint, jsonb)')$$);
DROP TRIGGER t ON request_result;
DROP FUNCTION handler, other_response;

-- A trigger that marks the executed request cancelled would deny it: refused, and nothing is left.
CREATE FUNCTION deny() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    NEW := jsonb_populate_record(NEW, TG_ARGV[0]::jsonb);
    RETURN NEW;
END $$;
SELECT balance AS balance_before FROM account WHERE account_id = 1 \gset
CREATE TRIGGER t BEFORE INSERT ON request_result FOR EACH ROW WHEN (NOT NEW.cancelled)
    EXECUTE FUNCTION deny('{"cancelled": true}');
SELECT code FROM refusal($$SELECT debit_once(1, 'denied', 1)$$);
DROP TRIGGER t ON request_result;
CREATE TRIGGER t BEFORE INSERT ON request_result FOR EACH ROW EXECUTE FUNCTION deny('{"request_fingerprint": "\\x01"}');
SELECT code FROM refusal($$SELECT debit_once(1, 'denied', 1)$$);
SELECT code FROM refusal($$SELECT credit_once(1, 'denied', 1)$$);
DROP TRIGGER t ON request_result;
-- An operation of the user's own is refused as a debit is, and not told to come again.
CREATE FUNCTION handler(bigint, jsonb) RETURNS jsonb LANGUAGE sql AS 'SELECT $2';
CREATE FUNCTION suppress_all() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END';
CREATE TRIGGER t BEFORE INSERT ON request_result FOR EACH ROW EXECUTE FUNCTION suppress_all();
SELECT code FROM refusal($$SELECT run_once(1, 'own:v1', 'denied', '{}', 'handler(bigint, jsonb)')$$);
SELECT code FROM refusal($$SELECT cancel_request(1, 'own:v1', 'denied')$$);
DROP TRIGGER t ON request_result;
SELECT balance = :balance_before AS unchanged, (SELECT count(*) FROM request_result WHERE request_key = 'denied') AS records
  FROM account WHERE account_id = 1;
DROP FUNCTION deny, handler, suppress_all;

DROP VIEW books;
DROP FUNCTION refusal, note, suppress, charge_double, charge_nothing, change_time, rewrite, code_with_rewritten, refuse, fee, ask_again,
    fee_of_the_same_account, take, give_back, keep;
DROP TABLE fired;
DROP EXTENSION idempotency_record;
