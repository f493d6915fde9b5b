-- A purge uses the privileges of the tables' owner on those tables, and nothing else of his: whatever a caller, or an owner of the
-- schema, puts in the way has no effect, and no code runs with more rights than the caller's.
\set VERBOSITY sqlstate
SET client_min_messages = warning;
SET TimeZone = 'UTC';
CREATE ROLE regress_ir_caller;
CREATE ROLE regress_ir_schema;
DO $$ BEGIN EXECUTE format('GRANT CREATE ON DATABASE %I TO regress_ir_caller, regress_ir_schema', current_database()); END $$;

-- What would be found in a table, by whoever, is told here.
CREATE SCHEMA trace;
GRANT USAGE ON SCHEMA trace TO regress_ir_caller, regress_ir_schema;
CREATE TABLE trace.ran_as (what text, who name);
GRANT INSERT, SELECT ON trace.ran_as TO regress_ir_caller, regress_ir_schema;

CREATE SCHEMA app AUTHORIZATION regress_ir_schema;
CREATE EXTENSION idempotency_record SCHEMA app;
GRANT USAGE ON SCHEMA app TO regress_ir_caller;
GRANT EXECUTE ON FUNCTION app.purge_expired_keys(interval), app.purge_expired_keys(), app.purge_processed_messages(interval), app.purge_processed_messages() TO regress_ir_caller;
GRANT EXECUTE ON PROCEDURE app.purge TO regress_ir_caller;
INSERT INTO app.account VALUES (1, 1000);
CREATE PROCEDURE trace.fill(schema name) LANGUAGE plpgsql SET session_replication_role = replica AS $$
BEGIN
    EXECUTE format($f$
        DELETE FROM %1$I.request_result;
        DELETE FROM %1$I.processed_message;
        INSERT INTO %1$I.request_result (account_id, operation, request_key, request, response, created_at)
        SELECT 1, 'debit:v1', made, '{}', '{}', made::timestamptz FROM unnest(ARRAY['2020-01-01 00:00+00', '2020-01-02 00:00+00', '2500-01-01 00:00+00']) AS made;
        INSERT INTO %1$I.processed_message (subscriber, message_id, account_id, created_at)
        SELECT 's', md5(made)::uuid, 1, made::timestamptz FROM unnest(ARRAY['2020-01-01 00:00+00', '2500-01-01 00:00+00']) AS made$f$, schema);
END $$;

-- The caller's operators and functions, in front of the server's, and temporary tables of our names.
CREATE SCHEMA hostile AUTHORIZATION regress_ir_caller;
SET SESSION AUTHORIZATION regress_ir_caller;
CREATE FUNCTION hostile.ran(what text) RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO trace.ran_as VALUES (what, current_user);
    RETURN true;
END $$;
CREATE PROCEDURE hostile.make_operators() LANGUAGE plpgsql AS $p$
DECLARE
    operator text;
    type text;
BEGIN
    FOREACH operator IN ARRAY ARRAY['=', '<>', '<', '<=', '>', '>='] LOOP
        FOREACH type IN ARRAY ARRAY['bigint', 'text', 'interval', 'timestamptz', 'tid', 'boolean', 'name', 'oid'] LOOP
            EXECUTE format('CREATE FUNCTION hostile.%I(%s, %s) RETURNS boolean LANGUAGE sql AS %L', 'f' || md5(operator || type), type, type,
                           format('SELECT hostile.ran(%L)', operator || ' ' || type));
            EXECUTE format('CREATE OPERATOR hostile.%s (FUNCTION = hostile.%I, LEFTARG = %s, RIGHTARG = %s)', operator, 'f' || md5(operator || type), type, type);
        END LOOP;
    END LOOP;
    FOREACH type IN ARRAY ARRAY['clock_timestamp()|timestamptz', 'make_interval()|interval', 'make_interval(secs double precision)|interval'] LOOP
        EXECUTE format('CREATE FUNCTION hostile.%s RETURNS %s LANGUAGE sql AS %L', split_part(type, '|', 1), split_part(type, '|', 2),
                       format('SELECT CASE WHEN hostile.ran(%L) THEN NULL::%s END', type, split_part(type, '|', 2)));
    END LOOP;
    EXECUTE 'CREATE FUNCTION hostile.minus(timestamptz, interval) RETURNS timestamptz LANGUAGE sql AS $$SELECT CASE WHEN hostile.ran(''minus'') THEN now() END$$';
    EXECUTE 'CREATE OPERATOR hostile.- (FUNCTION = hostile.minus, LEFTARG = timestamptz, RIGHTARG = interval)';
END $p$;
CALL hostile.make_operators();
CREATE TEMPORARY TABLE request_result (operation text, created_at timestamptz);
CREATE TEMPORARY TABLE processed_message (subscriber text, created_at timestamptz);
CREATE TEMPORARY TABLE purge_lock (only_row boolean);
CREATE TEMPORARY TABLE purge_progress (kind text, name text, deleted_before timestamptz, purged_at timestamptz, duration interval, deleted bigint, swept_at timestamptz, sweep_duration interval);
CREATE TEMPORARY TABLE retention_fence (kind text, name text, purged_before timestamptz);
CREATE TEMPORARY TABLE operation_policy (operation text, refusals text, stored_request text, retention interval);
INSERT INTO operation_policy VALUES ('debit:v1', 'raise', 'full', '900 years');
CREATE TEMPORARY TABLE subscriber_policy (subscriber text, retention interval);
INSERT INTO request_result SELECT 'debit:v1', '2020-01-01';
CREATE TEMPORARY VIEW pg_extension AS SELECT 4711 AS oid, hostile.ran('pg_extension') AS extname;
RESET SESSION AUTHORIZATION;
CALL trace.fill('app');
SET SESSION AUTHORIZATION regress_ir_caller;
SET search_path = pg_temp, hostile, pg_catalog, app;
SELECT 1::bigint OPERATOR(hostile.=) 2::bigint AS the_hostile_one;
SELECT app.purge_expired_keys(), app.purge_processed_messages();
SELECT app.purge_expired_keys('1 year'), app.purge_processed_messages('1 year');
CALL app.purge(1);
RESET search_path;
RESET SESSION AUTHORIZATION;
CALL trace.fill('app');
SET SESSION AUTHORIZATION regress_ir_caller;
SET search_path = hostile, pg_catalog, app;
CALL app.purge(1);
RESET search_path;
SELECT count(*) FROM pg_temp.request_result;
RESET SESSION AUTHORIZATION;
TABLE trace.ran_as;
SELECT request_key FROM app.request_result;
SELECT kind, name FROM app.retention_fence ORDER BY kind;
DELETE FROM trace.ran_as;

-- The schema's owner, who does not own the tables, gives the schema another name, and puts tables and views of his own in the
-- place where they were. In this session, which has plans, and in a new one, the purge finds ours and runs nothing of his.
CALL trace.fill('app');
SELECT app.purge_expired_keys('5000 years');
SET SESSION AUTHORIZATION regress_ir_schema;
ALTER SCHEMA app RENAME TO moved;
CREATE SCHEMA app;
CREATE FUNCTION app.ran(what text) RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO trace.ran_as VALUES (what, current_user);
    RETURN true;
END $$;
CREATE FUNCTION app.trap() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM app.ran(TG_OP || ' ' || TG_TABLE_NAME);
    RETURN NEW;
END $$;
CREATE VIEW app.purge_lock AS SELECT app.ran('purge_lock') AS only_row;
CREATE TABLE app.request_result (operation text COLLATE "C", created_at timestamptz);
INSERT INTO app.request_result VALUES ('debit:v1', '2020-01-01 00:00+00');
CREATE TRIGGER trap AFTER DELETE ON app.request_result FOR EACH ROW EXECUTE FUNCTION app.trap();
CREATE VIEW app.processed_message AS SELECT text 's' COLLATE "C" AS subscriber, timestamptz '2020-01-01' AS created_at WHERE app.ran('processed_message');
CREATE TABLE app.retention_fence (kind text, name text, purged_before timestamptz, PRIMARY KEY (kind, name));
CREATE TRIGGER trap BEFORE INSERT ON app.retention_fence FOR EACH ROW EXECUTE FUNCTION app.trap();
CREATE TABLE app.purge_progress (kind text, name text, deleted_before timestamptz, purged_at timestamptz, duration interval, deleted bigint, swept_at timestamptz, sweep_duration interval,
                                 PRIMARY KEY (kind, name));
CREATE TRIGGER trap BEFORE INSERT ON app.purge_progress FOR EACH ROW EXECUTE FUNCTION app.trap();
CREATE VIEW app.operation_policy AS SELECT text 'debit:v1' COLLATE "C" AS operation, interval '900 years' AS retention WHERE app.ran('operation_policy');
CREATE VIEW app.subscriber_policy AS SELECT text 's' COLLATE "C" AS subscriber, interval '900 years' AS retention WHERE app.ran('subscriber_policy');
RESET SESSION AUTHORIZATION;
SELECT moved.purge_expired_keys(), moved.purge_processed_messages();
TABLE trace.ran_as;
CALL trace.fill('moved');
CALL moved.purge(1);
TABLE trace.ran_as;
CALL trace.fill('moved');
\c -
\set VERBOSITY sqlstate
SET client_min_messages = warning;
SET TimeZone = 'UTC';
SET SESSION AUTHORIZATION regress_ir_caller;
SELECT moved.purge_expired_keys(), moved.purge_processed_messages();
RESET SESSION AUTHORIZATION;
CALL trace.fill('moved');
SET SESSION AUTHORIZATION regress_ir_caller;
CALL moved.purge(1);
RESET SESSION AUTHORIZATION;
SELECT kind, name, expired, last_deleted FROM moved.retention_status;
TABLE trace.ran_as;
SELECT count(*) FROM app.request_result;
-- A rename within the transaction, and back.
CALL trace.fill('moved');
BEGIN;
SELECT moved.purge_expired_keys('5000 years');
ALTER SCHEMA moved RENAME TO third;
SELECT third.purge_expired_keys();
ROLLBACK;
SELECT moved.purge_expired_keys();
TABLE trace.ran_as;
SELECT count(*) FROM moved.request_result;
DROP SCHEMA app CASCADE;

-- A relation that has replaced a table of ours is used with the caller's own privileges, who has none.
BEGIN;
ALTER TABLE moved.purge_lock RENAME TO old_lock;
CREATE VIEW moved.purge_lock AS SELECT only_row FROM moved.old_lock WHERE hostile.ran('replaced');
SET LOCAL SESSION AUTHORIZATION regress_ir_caller;
SAVEPOINT s;
SELECT moved.purge_expired_keys('0');
ROLLBACK TO s;
SELECT moved.purge_processed_messages('0');
ROLLBACK;
BEGIN;
ALTER TABLE moved.request_result RENAME TO old_result;
CREATE VIEW moved.request_result AS SELECT * FROM moved.old_result WHERE hostile.ran('replaced');
SET LOCAL SESSION AUTHORIZATION regress_ir_caller;
SELECT moved.purge_expired_keys('0');
ROLLBACK;
BEGIN;
ALTER TABLE moved.purge_progress RENAME TO old_progress;
CREATE TABLE moved.purge_progress (LIKE moved.old_progress INCLUDING ALL);
SET LOCAL SESSION AUTHORIZATION regress_ir_caller;
SELECT moved.purge_expired_keys('0');
ROLLBACK;
TABLE trace.ran_as;

-- Triggers run as the caller, as on any table of his: a trigger of the owner's that finds the caller's function instead of its own
-- does not lend him the owner's rights. After an error the caller is himself.
CREATE FUNCTION trace.who() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO trace.ran_as VALUES ('trigger', current_user);
    RETURN NULL;
END $$;
CREATE TRIGGER who AFTER DELETE ON moved.request_result FOR EACH ROW EXECUTE FUNCTION trace.who();
CALL trace.fill('moved');
DELETE FROM trace.ran_as;
SET SESSION AUTHORIZATION regress_ir_caller;
SELECT moved.purge_expired_keys();
SELECT current_user;
RESET SESSION AUTHORIZATION;
SELECT what, who FROM trace.ran_as;
DROP TRIGGER who ON moved.request_result;
CREATE FUNCTION trace.stay() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    EXECUTE TG_ARGV[0];
    RETURN NULL;
END $$;
CREATE PROCEDURE trace.try(command text) LANGUAGE plpgsql AS $$
BEGIN
    CALL trace.fill('moved');
    EXECUTE format('CREATE TRIGGER stay AFTER DELETE ON moved.request_result FOR EACH STATEMENT EXECUTE FUNCTION trace.stay(%L)', command);
END $$;
CALL trace.try('SET ROLE regress_ir_schema');
SET SESSION AUTHORIZATION regress_ir_caller;
SELECT moved.purge_expired_keys();
CALL moved.purge();
SELECT current_user;
RESET SESSION AUTHORIZATION;
DROP TRIGGER stay ON moved.request_result;

-- Row security of the table says what the caller may purge.
CALL trace.fill('moved');
ALTER TABLE moved.request_result ENABLE ROW LEVEL SECURITY;
CREATE POLICY none ON moved.request_result USING (false);
SET SESSION AUTHORIZATION regress_ir_caller;
SELECT moved.purge_expired_keys();
SET row_security = off;
CALL moved.purge();
RESET row_security;
RESET SESSION AUTHORIZATION;
SELECT count(*) FROM moved.request_result;
SELECT moved.purge_expired_keys();

DROP SCHEMA hostile CASCADE;
DROP EXTENSION idempotency_record;
DROP SCHEMA moved CASCADE;
DROP SCHEMA trace CASCADE;
DROP OWNED BY regress_ir_caller, regress_ir_schema;
DROP ROLE regress_ir_caller, regress_ir_schema;
