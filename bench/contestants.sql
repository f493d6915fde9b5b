-- What bench/performance.py compares, each in a schema of its own.

CREATE SCHEMA ours;
CREATE EXTENSION idempotency_record SCHEMA ours;

-- The others' tables are as the extension's: columns, constraints, indexes and storage parameters are read from those, so that
-- a change there is one here.
DO $$
DECLARE
    contestant text;
    relation record;
    reference record;
BEGIN
    FOREACH contestant IN ARRAY '{floor, plpgsql, client}'::text[] LOOP
        EXECUTE format('CREATE SCHEMA %I', contestant);
        FOR relation IN
            SELECT relname, reloptions FROM pg_class WHERE oid IN ('ours.account'::regclass, 'ours.request_result'::regclass)
             ORDER BY relname
        LOOP
            EXECUTE format('CREATE TABLE %I.%I (LIKE ours.%2$I INCLUDING ALL)', contestant, relation.relname);
            IF relation.reloptions IS NOT NULL THEN
                EXECUTE format('ALTER TABLE %I.%I SET (%s)', contestant, relation.relname,
                               array_to_string(relation.reloptions, ', '));
            END IF;
        END LOOP;
        FOR reference IN
            SELECT conname, pg_get_constraintdef(oid) AS definition FROM pg_constraint
             WHERE conrelid = 'ours.request_result'::regclass AND contype = 'f'
        LOOP
            EXECUTE format('ALTER TABLE %I.request_result ADD CONSTRAINT %I %s', contestant, reference.conname,
                           replace(reference.definition, 'ours.', quote_ident(contestant) || '.'));
        END LOOP;
    END LOOP;
END
$$;

-- The least that a debit with a record can cost: both writes, and no question asked.
CREATE FUNCTION floor.debit_once(p_account bigint, p_key text, p_amount bigint) RETURNS jsonb LANGUAGE plpgsql AS $$
DECLARE
    answer jsonb;
BEGIN
    UPDATE floor.account SET balance = balance - p_amount WHERE account_id = p_account
    RETURNING jsonb_build_object('balance', balance) INTO answer;
    INSERT INTO floor.request_result (account_id, operation, request_key, request, response)
    VALUES (p_account, 'debit:v1', p_key, jsonb_build_object('amount', p_amount), answer);
    RETURN answer;
END
$$;

-- The routine that one writes by hand. The provisional record claims the key: whoever comes second waits for the first to end.
CREATE FUNCTION plpgsql.debit_once(p_account bigint, p_key text, p_amount bigint) RETURNS jsonb LANGUAGE plpgsql AS $$
DECLARE
    wanted constant jsonb := jsonb_build_object('amount', p_amount);
    saved jsonb;
    answer jsonb;
BEGIN
    IF p_key IS NULL OR p_key = '' OR p_amount IS NULL OR p_amount <= 0 THEN
        RAISE 'key and positive amount required' USING ERRCODE = '22023';
    END IF;
    INSERT INTO plpgsql.request_result (account_id, operation, request_key, request, response)
    VALUES (p_account, 'debit:v1', p_key, wanted, '{}')
    ON CONFLICT DO NOTHING;
    IF NOT FOUND THEN
        SELECT request, response INTO saved, answer FROM plpgsql.request_result
         WHERE account_id = p_account AND operation = 'debit:v1' AND request_key = p_key;
        IF saved <> wanted THEN
            RAISE 'idempotency key reused with different request' USING ERRCODE = '22023';
        END IF;
        RETURN answer;
    END IF;
    UPDATE plpgsql.account SET balance = balance - p_amount WHERE account_id = p_account AND balance >= p_amount
    RETURNING jsonb_build_object('balance', balance) INTO answer;
    IF NOT FOUND THEN
        RAISE 'insufficient balance' USING ERRCODE = 'P0001';
    END IF;
    UPDATE plpgsql.request_result SET response = answer
     WHERE account_id = p_account AND operation = 'debit:v1' AND request_key = p_key;
    RETURN answer;
END
$$;

-- DBOS keeps its records in tables of its own, in the schema dbos.
CREATE SCHEMA app;
CREATE TABLE app.account (LIKE ours.account INCLUDING ALL);

-- The calls of a round, one transaction each, within the server: nothing but the call and the commit is between the two looks
-- at the clock. `nothing` is the loop itself.
CREATE SCHEMA bench;
CREATE TYPE bench.call AS (account bigint, key text);
CREATE UNLOGGED TABLE bench.calls (number bigint PRIMARY KEY, account bigint NOT NULL, key text NOT NULL);

DO $do$
DECLARE
    contestant text;
    what text;
BEGIN
    FOREACH contestant IN ARRAY '{nothing, floor, ours, plpgsql}'::text[] LOOP
        what := CASE contestant WHEN 'nothing' THEN '' ELSE format('answer := %I.debit_once(one.account, one.key, 1);', contestant) END;
        EXECUTE format($definition$
            CREATE PROCEDURE bench.%I(INOUT microseconds float8) LANGUAGE plpgsql AS $$
            DECLARE
                calls bench.call[];
                one bench.call;
                answer jsonb;
                began timestamptz;
            BEGIN
                SELECT array_agg((account, key)::bench.call ORDER BY number) INTO calls FROM bench.calls;
                COMMIT;
                began := clock_timestamp();
                FOREACH one IN ARRAY calls LOOP
                    %s
                    COMMIT;
                END LOOP;
                microseconds := extract(epoch FROM clock_timestamp() - began) * 1e6 / cardinality(calls);
            END
            $$
        $definition$, contestant, what);
    END LOOP;
END
$do$;
