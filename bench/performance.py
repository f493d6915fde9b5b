"""What a debit costs: with this extension, and with what one would use instead, side by side.

In each round every contestant has its turn, and the order changes from round to round; a ratio is one of two turns of a round.

  ROUNDS=5 SECONDS=4          rounds of each throughput, and seconds of a turn
  CALLS=5000 COST_ROUNDS=15   calls and rounds of the cost within the server
  GROWTH="10000 1000000 10000000"   keys in the table; the first is also what is in it everywhere else
  BUFFERS=8GB                 shared_buffers: everything fits

Writes bench/results.json, docs/performance*.svg and docs/performance.md. Fails where contestants do not compute the same
balances, or a record is missing or too many; never for a time.
"""

import collections
import os
import pathlib
import statistics
import threading
import time

import report
from clients import BATCH, KINDS, account_of, key_of
from contestant import (ACCOUNTS, BALANCE, CLIENT_PYTHON, CONTESTANTS, DBOS, DBOS_CALLS, DBOS_DEBITED, DBOS_KNOWN, DONE, FLOOR,
                        KNOWN, OURS, SECONDS, SIZES, Many, Python)
from harness import ACCOUNT, DIR, KEY, QUICK, check, connect, copy, count_checks, machine, option, path_for, save, say, start

ROUNDS = option("ROUNDS", 5, 1)
CALLS = option("CALLS", 5_000, 500)
LEFT_CALLS = option("LEFT_CALLS", 1_000, 200)  # whose traces are counted; DBOS takes its time for them
COST_ROUNDS = option("COST_ROUNDS", 15, 3)
STORMS = option("STORMS", 20, 2)
AGREE = option("AGREE", 1_000, 100)
CONNECTIONS, WAITERS, HOLD = 8, 16, 0.1

SETTINGS = {
    "fsync": "on",
    "synchronous_commit": "on",  # off where it says so
    "full_page_writes": "on",
    "shared_buffers": os.environ.get("BUFFERS") or ("256MB" if QUICK else "8GB"),
    # One checkpoint before each kind of work, and none in it: when it comes would be chance. Only filling a table for
    # `growth` writes more.
    "checkpoint_timeout": "1h",
    "max_wal_size": "8GB",
    "min_wal_size": "2GB",
    # It would begin in some turns and not in others.
    "autovacuum": "off",
    "max_connections": "100",
}

FILL = f"""
INSERT INTO ours.account SELECT n, {BALANCE} FROM generate_series(1, {ACCOUNTS}) AS n;
-- The foreign key is true, and checking it takes longer than the rest.
SET session_replication_role = replica;
INSERT INTO ours.request_result (account_id, operation, request_key, request, response)
SELECT {ACCOUNT.format(n='n', accounts=ACCOUNTS)}, 'debit:v1', {KEY.format(n='n')}, '{{"amount": 1}}',
       jsonb_build_object('balance', {BALANCE} - n)
  FROM generate_series(1::bigint, {KNOWN}) AS n;
UPDATE ours.account SET balance = balance - (SELECT count(*) FROM ours.request_result AS r WHERE r.account_id = account.account_id);
"""

WITHIN = ["nothing", "floor", "ours", "plpgsql"]  # the procedures of contestants.sql


def rotated(items, number):
    number %= len(items)
    return items[number:] + items[:number]


# ---- the databases -----------------------------------------------------------------------------------------------
def fill():
    """The database that every kind of work begins with a copy of."""
    with connect("postgres") as session:
        session.execute("CREATE DATABASE bench")
    with connect("bench") as session:
        session.execute(pathlib.Path(__file__).with_name("contestants.sql").read_text())
        session.execute(FILL)
        for schema in ("floor", "plpgsql", "client"):
            session.execute(f"INSERT INTO {schema}.account SELECT * FROM ours.account")
            session.execute(f"INSERT INTO {schema}.request_result SELECT * FROM ours.request_result")
        session.execute("INSERT INTO app.account SELECT * FROM ours.account")
    Python.take_turn(kind="migrate")
    with connect("bench") as session:
        session.execute("VACUUM (FREEZE, ANALYZE)")
    with connect("postgres") as session:
        session.execute("ALTER DATABASE bench RENAME TO filled")


def renew(synchronous_commit="on", database="bench"):
    """A new copy, in which nothing was executed."""
    copy("filled", database)
    with connect("postgres") as session:
        session.execute(f"ALTER DATABASE {database} SET synchronous_commit = {synchronous_commit}")
    DONE.clear()
    DBOS_DEBITED.clear()


def one(session, query, *arguments):
    row = session.execute(query, *arguments).fetchone()
    return row[0] if len(row) == 1 else row


def balances(session, schema):
    return dict(session.execute(f"SELECT account_id, balance FROM {schema}.account").fetchall())


def verify(what, known=KNOWN, database="bench", schemas=("floor", "ours", "plpgsql", "client")):
    """That each contestant debited each account once for each of its records, and has a record for each distinct key."""
    with connect(database) as session:
        for schema in schemas:
            records, keys, provisional = one(session, f"""SELECT count(*), count(DISTINCT request_key),
                count(*) FILTER (WHERE response = '{{}}') FROM {schema}.request_result""")
            check(f"{what}: {schema}'s records", records, known + DONE[schema])
            check(f"{what}: {schema}'s distinct keys", keys, records)
            check(f"{what}: {schema}'s records without an answer", provisional, 0)
            check(f"{what}: {schema}'s accounts with a wrong balance", one(session, f"""
                SELECT count(*) FROM {schema}.account LEFT JOIN (
                    SELECT account_id, count(*) AS debits FROM {schema}.request_result GROUP BY account_id) AS r USING (account_id)
                 WHERE balance <> {BALANCE} - coalesce(debits, 0)"""), 0)
        if database == "bench":
            check(f"{what}: DBOS's workflows", one(session, "SELECT count(*), count(*) FILTER (WHERE status = 'SUCCESS') "
                                                            "FROM dbos.workflow_status"), (DONE["app"], DONE["app"]))
            with connect("filled") as before:
                expected = collections.Counter(balances(before, "app"))
            expected.subtract(DBOS_DEBITED)
            check(f"{what}: DBOS's balances", balances(session, "app") == dict(expected), True)


def same_balances(what, schemas):
    """Of contestants that were sent the same calls."""
    with connect("bench") as session:
        first = balances(session, schemas[0])
        for schema in schemas[1:]:
            check(f"{what}: the balances of {schema} are those of {schemas[0]}", balances(session, schema) == first, True)


# ---- what is measured --------------------------------------------------------------------------------------------
def agree():
    """The same debits through every contestant, each key twice: the same balances, and the same answers where one sees them."""
    renew()
    first = 100 * ACCOUNTS + 1
    stride = -(-AGREE // ACCOUNTS) * ACCOUNTS  # after so many keys the accounts begin again
    debits = collections.Counter(account_of(n, ACCOUNTS) for n in range(first, first + AGREE))
    for number, contestant in enumerate(CONTESTANTS):
        with connect("bench") as session:
            before = balances(session, contestant.schema)
            answers = contestant.execute(first + number * stride, AGREE, 1 if contestant is FLOOR else 2)
            expected = collections.Counter(before)
            expected.subtract(debits)
            check(f"{contestant.name}: the same balances", balances(session, contestant.schema) == dict(expected), True)
        if answers:
            right = []
            for n in range(first, first + AGREE):
                before[account_of(n, ACCOUNTS)] -= 1
                right.append(before[account_of(n, ACCOUNTS)])
            check(f"{contestant.name}: the same answers, and again", answers == right * 2, True)
    verify("the same debits")
    say(f"all {len(CONTESTANTS)} contestants computed the same balances")


def race(what, kind, connections, contestants=CONTESTANTS, synchronous_commit="on"):
    """Calls a second, of each round."""
    renew(synchronous_commit)
    if kind == "replay":
        DBOS.call(DBOS_CALLS)
    rates = {contestant.name: [] for contestant in contestants}
    for number in range(ROUNDS):
        for contestant in rotated(contestants, number):
            rates[contestant.name].append(contestant.rate(kind, connections))
        say(f"{what}, round {number + 1} of {ROUNDS}: "
            + ", ".join(f"{name} {of[-1]:,.0f}" for name, of in rates.items()) + " a second")
    verify(what)
    return rates


def new_calls(session, count=CALLS):
    """Fills the table that the procedures read their calls from: accounts and keys at random."""
    session.execute("TRUNCATE bench.calls")
    session.execute(f"INSERT INTO bench.calls SELECT n, 1 + floor(random() * {ACCOUNTS}), gen_random_uuid()::text "
                    f"FROM generate_series(1, {count}) AS n")
    session.execute("ANALYZE bench.calls")


def inside(session, name):
    """Microseconds that a call costs within the server, with its commit."""
    return one(session, f"CALL bench.{name}(NULL)")


def cost():
    """Microseconds of each round, within the server, of new keys and of the same again."""
    renew("off")
    took = {"fresh": {name: [] for name in WITHIN}, "replay": {name: [] for name in WITHIN if name != "floor"}}
    with connect("bench") as session:
        sessions = {name: connect("bench") for name in WITHIN}
        for number in range(-1, COST_ROUNDS):  # the first plans, and does not count
            new_calls(session)
            for kind, names in took.items():
                for name in rotated(list(names), number):
                    microseconds = inside(sessions[name], name)
                    if number >= 0:
                        took[kind][name].append(microseconds)
                    if kind == "fresh":
                        DONE[name] += CALLS
        for other in sessions.values():
            other.close()
    for kind, names in took.items():
        say(f"within the server, {kind}: "
            + ", ".join(f"{name} {statistics.median(of):.1f}" for name, of in names.items()) + " µs")
    verify("within the server")
    same_balances("within the server", ["floor", "ours", "plpgsql"])
    return took


def counters(session, schemas):
    """WAL position, next transaction id, and row versions written so far."""
    written = one(session, """
        SELECT coalesce(sum(n_tup_ins), 0)::bigint, coalesce(sum(n_tup_upd), 0)::bigint, coalesce(sum(n_tup_del), 0)::bigint
          FROM pg_stat_user_tables WHERE schemaname = ANY (%s)""", (schemas,))
    return (one(session, "SELECT (pg_current_wal_insert_lsn() - '0/0')::bigint"),
            one(session, "SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint"), *written)


def footprint():
    """What a call leaves behind: bytes of WAL, transaction ids, row versions that are inserted and that are dead at once."""
    renew()
    result = {}
    with connect("bench") as session:
        batches = []
        for _ in range(2):
            new_calls(session, LEFT_CALLS)
            batches.append(session.execute("SELECT account, key FROM bench.calls ORDER BY number").fetchall())

        def run(name, calls, fresh):
            if name in WITHIN:
                session.execute("TRUNCATE bench.calls")
                with session.cursor() as cursor, cursor.copy("COPY bench.calls FROM STDIN") as lines:
                    for number, call in enumerate(calls):
                        lines.write_row((number, *call))
                with connect("bench") as other:
                    before = settled(other, schemas)
                    inside(other, name)
                    after = settled(other, schemas)
                if fresh:
                    DONE[name] += len(calls)
            else:
                contestant = CLIENT_PYTHON if name == "client" else DBOS
                before = settled(session, schemas)
                contestant.call([list(call) for call in calls], fresh)
                while one(session, "SELECT count(*) FROM pg_stat_activity WHERE datname = 'bench' AND pid <> pg_backend_pid()"):
                    time.sleep(0.01)  # a session that ends counts what it did before it is gone
                after = settled(session, schemas)
            return [(to - since) / len(calls) for since, to in zip(before, after)]

        def settled(session, schemas):
            if session.info.server_version >= 150000:
                session.execute("SELECT pg_stat_force_next_flush()")
            else:
                time.sleep(2)
            return counters(session, schemas)

        for name in ("floor", "ours", "plpgsql", "client", "app"):
            schemas = ["app", "dbos"] if name == "app" else [name]
            # The first calls touch each page for the first time since the checkpoint, which is not what a call costs.
            run(name, batches[0], True)
            result[name] = {"fresh": run(name, batches[1], True)}
            if name != "floor":
                # The server writes a few records of its own now and then; the least of some is the call's.
                result[name]["replay"] = min(run(name, batches[1], False) for _ in range(3))
            say(f"{name} leaves behind, a call (WAL, transaction ids, inserted, updated, deleted): {result[name]}")
    verify("footprint")
    same_balances("footprint", ["floor", "ours", "plpgsql", "client", "app"])
    return result


def replay_is_free():
    """What a replay of ours takes: nothing. In a transaction, as a lock would be gone after it."""
    renew()
    with connect("bench") as session, connect("bench") as other:
        session.execute("SELECT ours.debit_once(%s, %s, 1)", (account_of(1, ACCOUNTS), key_of(1)))  # plans
        wal = []
        for _ in range(5):
            before = counters(other, [])
            answers = [one(session, "SELECT ours.debit_once(%s, %s, 1)", (account_of(n, ACCOUNTS), key_of(n)))
                       for n in range(1, 101)]
            after = counters(other, [])
            check("answers of replays", answers, [{"balance": BALANCE - n} for n in range(1, 101)])
            check("transaction ids of replays", after[1] - before[1], 0)
            wal.append(after[0] - before[0])
        check("WAL bytes of 100 replays", min(wal), 0)
        session.execute("BEGIN")
        session.execute("SELECT ours.debit_once(%s, %s, 1)", (account_of(1, ACCOUNTS), key_of(1)))
        check("transaction id of a replay", one(session, "SELECT pg_current_xact_id_if_assigned()"), None)
        locks = session.execute("SELECT DISTINCT mode FROM pg_locks WHERE pid = pg_backend_pid() AND locktype <> 'virtualxid'")
        locks = sorted(mode for mode, in locks)
        check("locks of a replay", locks, ["AccessShareLock"])
        session.execute("ROLLBACK")
    say(f"a replay: {min(wal)} bytes of WAL, no transaction id, {' and '.join(locks)}")
    return {"WAL bytes": min(wal), "transaction ids": 0, "locks": locks}


def storm():
    """Milliseconds from a commit until each of the connections that wait for it has its answer: the last one, of each storm."""
    renew()
    took = {name: [] for name in ("ours", "plpgsql", "client")}
    with connect("bench") as session:
        for number in range(STORMS):
            for name in rotated(list(took), number):
                took[name].append(strike(session, KINDS[name], 10_000_000 + number))
                DONE[name] += 1
    say("retry storms: the last answer came " + ", ".join(f"{name} {statistics.median(of):.1f}" for name, of in took.items())
        + " ms after the commit")
    verify("retry storms")
    return took


def strike(session, kind, number):
    account, key = account_of(number, ACCOUNTS), key_of(number)
    leader, followers = kind(str(DIR), "bench"), [kind(str(DIR), "bench") for _ in range(WAITERS)]
    for client in (leader, *followers):
        client.debit(account_of(1, ACCOUNTS), key_of(1))  # a replay: it plans
    answers, times = [], []

    def follow(client):
        answer = client.debit(account, key)
        times.append(time.monotonic())
        answers.append(answer)

    threads = [threading.Thread(target=follow, args=(client,)) for client in followers]
    with leader.connection.transaction():
        first = leader.work(account, key)
        until = time.monotonic() + HOLD
        for thread in threads:
            thread.start()
        time.sleep(HOLD / 2)
        deadline = time.monotonic() + 10
        while waiting(session) < WAITERS:
            if time.monotonic() > deadline:
                raise SystemExit(f"WRONG: of {WAITERS} connections {waiting(session)} wait for the key in flight")
            time.sleep(0.005)
        time.sleep(max(0, until - time.monotonic()))
        committed = time.monotonic()
    for thread in threads:
        thread.join()
    check("a retry storm's answers", (len(answers), all(answer == first for answer in answers)), (WAITERS, True))
    for client in (leader, *followers):
        client.connection.close()
    return (max(times) - committed) * 1e3


def waiting(session):
    return one(session, "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()")


def growth():
    """Cost within the server, and bytes a key, of tables of different sizes, which take turns."""
    names = [f"grown_{size}" for size in SIZES]
    sizes = {}
    for name, size in zip(names, SIZES):
        began = time.monotonic()
        renew("off", name)
        loads = [threading.Thread(target=grow, args=(name, schema, size)) for schema in ("ours", "floor")]
        for load in loads:
            load.start()
        for load in loads:
            load.join()
        with connect(name) as session:
            session.execute("VACUUM (ANALYZE)")
            session.execute("CHECKPOINT")
            sizes[size] = {schema: one(session, f"""SELECT count(*), pg_table_size('{schema}.request_result'),
                pg_relation_size('{schema}.request_result_pkey'), pg_indexes_size('{schema}.request_result')
                FROM {schema}.request_result""") for schema in ("ours", "floor")}
        check(f"keys in {name}", [of[0] for of in sizes[size].values()], [size, size])
        say(f"{size:,} keys: {sum(sizes[size]['ours'][1::2]) / size:.0f} bytes a key; took {time.monotonic() - began:.0f} s")
    os.sync()
    took = {f"{kind}, full_page_writes {pages}": {str(size): [] for size in SIZES}
            for pages, kinds in (("off", ("fresh", "floor", "replay")), ("on", ("fresh", "floor"))) for kind in kinds}
    calls = min(CALLS, SIZES[0] // 5)  # so few that they do not make the smallest table a larger one
    executed, sessions = collections.Counter(), {}
    with connect("postgres") as session:
        for pages in ("off", "on"):
            session.execute(f"ALTER SYSTEM SET full_page_writes = {pages}")
            session.execute("SELECT pg_reload_conf()")
            for number in range(COST_ROUNDS):
                for name, size in rotated(list(zip(names, SIZES)), number):
                    if size == SIZES[0] and name in sessions:  # or it would not be the smallest for long
                        sessions.pop(name).close()
                        renew("off", name)
                        del executed[name]
                    if name not in sessions:
                        sessions[name] = settle_in(name, size, calls // 10)
                        executed[name] += calls // 10
                    # Replays write nothing, so that full_page_writes does not concern them.
                    numbers = measure_grown(sessions[name], calls, replays=pages == "off")
                    executed[name] += calls
                    for what, microseconds in numbers.items():
                        took[f"{what}, full_page_writes {pages}"][str(size)].append(microseconds)
            say(f"with full_page_writes {pages}: " + "; ".join(
                f"{what.split(',')[0]} " + ", ".join(f"{statistics.median(of):.1f}" for of in numbers.values()) + " µs"
                for what, numbers in took.items() if what.endswith(pages)))
        for name, size in zip(names, SIZES):
            with sessions.pop(name) as grown:
                for schema in ("ours", "floor"):
                    check(f"{name}: {schema}'s records", one(grown, f"SELECT count(*) FROM {schema}.request_result"),
                          size + executed[name])
            session.execute(f"DROP DATABASE {name}")
    return {"sizes": {str(size): of for size, of in sizes.items()}, "took": took}


def grow(name, schema, size):
    with connect(name) as session:
        session.execute("SET session_replication_role = replica")
        session.execute(f"""INSERT INTO {schema}.request_result (account_id, operation, request_key, request, response)
            SELECT 1 + floor(random() * {ACCOUNTS}), 'debit:v1', gen_random_uuid()::text, '{{"amount": 1}}',
                   jsonb_build_object('balance', {BALANCE} - n) FROM generate_series({KNOWN} + 1, {size}) AS n""")


def settle_in(name, size, calls):
    """A session as a pool has it: it has planned, and has every page of the tables mapped into its memory."""
    session = connect(name)
    session.execute("SET max_parallel_workers_per_gather = 0")
    for schema in ("ours", "floor"):
        session.execute(f"SELECT count(cancelled) FROM {schema}.request_result")
        session.execute("SET enable_seqscan = off")
        session.execute(f"SELECT count(*) FROM {schema}.request_result WHERE account_id > 0")
        session.execute(f"SELECT count(*) FROM {schema}.request_result WHERE operation > '' AND created_at > '-infinity'")
        session.execute("RESET enable_seqscan")
    # Keys to be replayed, from all over the table.
    session.execute("CREATE TEMPORARY TABLE known AS SELECT account_id AS account, request_key AS key "
                    f"FROM ours.request_result TABLESAMPLE BERNOULLI ({min(100, 1e7 / size)})")
    new_calls(session, calls)
    for procedure in WITHIN[:3]:
        inside(session, procedure)
    return session


def measure_grown(session, calls, replays):
    """Microseconds, less those of the empty loop."""
    new_calls(session, calls)
    session.execute("CHECKPOINT")
    nothing = inside(session, "nothing")
    result = {"fresh": inside(session, "ours") - nothing, "floor": inside(session, "floor") - nothing}
    if replays:
        session.execute("TRUNCATE bench.calls")
        session.execute("INSERT INTO bench.calls SELECT row_number() OVER (), account, key "
                        f"FROM (SELECT * FROM known ORDER BY random() LIMIT {calls}) AS known")
        result["replay"] = inside(session, "ours") - nothing
    return result


def batches():
    """Debits a second: single calls, many in a pipelined transaction, many by one call."""
    contestants = [OURS, Many("single calls, pipelined in one transaction", "ours", "pipeline")]
    with connect("filled") as session:
        if one(session, "SELECT to_regprocedure('ours.debit_batch_once(bigint[], text[], bigint[])')") is None:
            say("batches: skipped, for there is no debit_batch_once")
            return None
    contestants.append(Many("debit_batch_once", "ours", "batch"))
    return race(f"batches of {BATCH:,}", "fresh", CONNECTIONS, contestants)


def main():
    start(SETTINGS)
    facts = machine()
    say(f"filling: {ACCOUNTS:,} accounts, {KNOWN:,} keys")
    fill()
    agree()
    others = [contestant for contestant in CONTESTANTS if contestant is not FLOOR]
    results = {
        "cost": cost(),
        "replay is free": replay_is_free(),
        "footprint": footprint(),
        "storm": storm(),
        "throughput": {
            "fresh, 1 connection": race("fresh, 1 connection", "fresh", 1),
            "fresh, 8 connections": race("fresh, 8 connections", "fresh", CONNECTIONS),
            "replays, 8 connections": race("replays, 8 connections", "replay", CONNECTIONS, others),
            "one hot account, 8 connections": race("one hot account, 8 connections", "hot", CONNECTIONS),
            "fresh, 8 connections, synchronous_commit off":
                race("fresh, 8 connections, synchronous_commit off", "fresh", CONNECTIONS, synchronous_commit="off"),
            "one hot account, 8 connections, synchronous_commit off":
                race("one hot account, 8 connections, synchronous_commit off", "hot", CONNECTIONS, synchronous_commit="off"),
        },
        "batches": batches(),
        "growth": growth(),
    }
    parameters = {"rounds": ROUNDS, "seconds": SECONDS, "calls": CALLS, "left calls": LEFT_CALLS, "cost rounds": COST_ROUNDS,
                  "storms": STORMS, "accounts": ACCOUNTS, "known": KNOWN, "known to DBOS": DBOS_KNOWN, "sizes": SIZES, "connections": CONNECTIONS,
                  "waiters": WAITERS, "hold": HOLD, "batch": BATCH}
    save("bench/results.json", {"machine": facts, "settings": SETTINGS, "parameters": parameters, "results": results})
    report.write(results, facts, SETTINGS, parameters)
    say(f"written: {path_for('bench/results.json')}, {path_for('docs/performance.md')} and its plots")
    count_checks()


main()
