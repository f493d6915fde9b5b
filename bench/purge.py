"""What a purge costs, and what it costs the debits that run meanwhile.

A constant load of debits, new ones and replays, on a table of which half has expired; after some quiet seconds, one of:
`CALL purge()`, with several batch sizes and with an old snapshot held, or what one would write by hand, one DELETE. Each
begins with a copy of the same database, and has its own quiet seconds to be compared with. They take turns.

  REPEAT=5                    how often each runs
  RATE=500                    debits a second
  BATCHES="1000 100000"       batch sizes besides the default one
  PATIENCE=60                 seconds to wait, before each measurement, for other programs to use less than 10 % of the CPUs

Writes bench/purge.json, docs/purge.svg and docs/purge.md. Fails where counts or balances are wrong, and never for a time.
"""

import os
import time

import numpy as np
import psutil

from harness import (ACCOUNT, KEY, QUICK, Load, check, connect, copy, machine, middle, option, path_for, percentiles, plt, save,
                     save_plot, say, show, start, table)

KEYS = option("KEYS", 2_000_000, 100_000)
EXPIRED = KEYS // 2
ACCOUNTS = option("ACCOUNTS", 10_000, 1_000)
BALANCE = 1_000_000_000
REPEAT = option("REPEAT", 5, 1)
RATE = option("RATE", 500, 300)
CONNECTIONS = 4
WARM, QUIET, AFTER = (1, 3, 1) if QUICK else (3, 12, 3)
PATIENCE = option("PATIENCE", 60, 1)
BATCHES = [int(size) for size in os.environ.get("BATCHES", "" if QUICK else "1000 100000").split()]

SETTINGS = {
    "fsync": "on",
    "synchronous_commit": "on",
    "full_page_writes": "on",
    "shared_buffers": "256MB" if QUICK else "1GB",
    # One checkpoint before each measurement, and none in it: when it comes would be chance. Each change of a page is the
    # first since then, so that the WAL is as large as it can be.
    "checkpoint_timeout": "1h",
    "max_wal_size": "16GB",
    # Segments are recycled, as on a server that has run for long, and not made while somebody waits for them.
    "min_wal_size": "2GB",
    # It would begin in some measurements and not in others. What it has to do afterwards is the same for all.
    "autovacuum": "off",
}

FILL = f"""
CREATE EXTENSION idempotency_record;
INSERT INTO account SELECT n, {BALANCE} FROM generate_series(1, {ACCOUNTS}) AS n;
-- The foreign key is true, and checking it takes longer than the rest.
SET session_replication_role = replica;
INSERT INTO request_result (account_id, operation, request_key, request, response, created_at)
SELECT {ACCOUNT.format(n='n', accounts=ACCOUNTS)},
       CASE WHEN n % 10 < 6 THEN 'debit:v1' WHEN n % 10 < 9 THEN 'credit:v1' ELSE 'invoice:v1' END,
       {KEY.format(n='n')}, '{{"amount": 1}}', jsonb_build_object('balance', {BALANCE} - n),
       CASE WHEN n <= {EXPIRED} THEN now() - interval '5 days' + n * interval '1 day' / {EXPIRED}
            ELSE now() - interval '1 day' + (n - {EXPIRED}) * interval '12 hours' / {KEYS - EXPIRED} END
  FROM generate_series(1::bigint, {KEYS}) AS n;
"""
CUTOFF = "now() - interval '48 hours'"  # the default retention; nothing in the table is between 4 days and 1 day old

FRESH = f"""
\\set account random(1, {ACCOUNTS})
SELECT debit_once(:account, uuidv7()::text, 1);
"""
REPLAY = f"""
\\set n 10 * random({EXPIRED // 10 + 1}, {KEYS // 10})
\\set account {ACCOUNT.format(n=':n', accounts=ACCOUNTS)}
SELECT debit_once(:account, {KEY.format(n=':n')}, 1);
"""
SCRIPTS = [(FRESH, 8), (REPLAY, 2)]


class Purge:
    """`CALL purge`, with the default batch size or this one."""

    def __init__(self, batch=None, snapshot=False):
        self.sql = f"CALL purge({batch})" if batch else "CALL purge()"
        self.name = self.sql + (", old snapshot held" if snapshot else "")
        self.snapshot = snapshot

    def run(self, session):
        deleted, remaining, _ = session.execute(self.sql).fetchone()
        check("left over, by its own count", remaining, 0)
        return deleted


class Delete:
    """One statement."""

    name, snapshot = "DELETE, one statement", False

    def run(self, session):
        return session.execute(f"DELETE FROM request_result WHERE created_at < {CUTOFF}").rowcount


def wait_for_peace():
    """Waits a while for others to leave the processors alone. What they use, in per cent: nothing of ours runs now."""
    for _ in range(max(1, PATIENCE)):
        busy = psutil.cpu_percent(interval=1)
        if busy < 10:
            break
    return busy


def measure(contestant):
    copy("filled", "bench")
    busy = wait_for_peace()
    load = Load("bench", SCRIPTS, CONNECTIONS, RATE)
    with connect("bench") as session, connect("bench") as old:
        if contestant.snapshot:
            old.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
            old.execute("SELECT count(*) FROM account")
        time.sleep(WARM)
        quiet = time.time()
        time.sleep(QUIET)
        begin = time.time()
        deleted = contestant.run(session)
        end = time.time()
        time.sleep(AFTER)
        log = load.stop()
        session.execute("SELECT pg_stat_force_next_flush()")
        wal, = session.execute("SELECT wal_bytes FROM pg_stat_get_backend_wal(pg_backend_pid())").fetchone()
        if contestant.snapshot:
            old.execute("COMMIT")

        executed = int((log["script"] == 0).sum())
        check("deleted", deleted, EXPIRED)
        check("expired records left", session.execute(f"SELECT count(*) FROM request_result WHERE created_at < {CUTOFF}")
              .fetchone()[0], 0)
        check("records", session.execute("SELECT count(*) FROM request_result").fetchone()[0], KEYS - EXPIRED + executed)
        check("sum of balances", session.execute("SELECT sum(balance) FROM account").fetchone()[0],
              ACCOUNTS * BALANCE - executed)

    before = (log["begin"] >= quiet) & (log["end"] < begin)
    during = (log["end"] >= begin) & (log["begin"] < end)
    numbers = {
        "seconds": end - begin,
        "rows a second": deleted / (end - begin),
        "WAL bytes a row": int(wal) / deleted,
        "busy": busy,
        "quiet": percentiles(log["latency"][before]),
        "during": percentiles(log["latency"][during]),
        "series": series(log, begin),
    }
    numbers["ratio"] = numbers["during"]["p99"] / numbers["quiet"]["p99"]
    say(f"{contestant.name}: {numbers['rows a second']:,.0f} rows a second; p99 {numbers['quiet']['p99']:.1f} ms, "
        f"during it {numbers['during']['p99']:.1f} ms ({numbers['ratio']:.2f} times); others used {busy:.0f} % of the CPUs")
    return numbers


STEP = 0.5


def series(log, begin):
    """Percentiles of each half second, of the debits that were due in it, from the purge's begin."""
    step = np.floor((log["begin"] - begin) / STEP).astype(int)
    steps = [number for number in range(round(-QUIET / STEP), step.max()) if (step == number).any()]
    values = [np.percentile(log["latency"][step == number], [50, 99]) for number in steps]
    return {"from": [number * STEP for number in steps],
            "p50": [float(p50) for p50, _ in values], "p99": [float(p99) for _, p99 in values]}


def capacity():
    """Debits a second without a limit of the rate."""
    copy("filled", "bench")
    load = Load("bench", SCRIPTS, CONNECTIONS)
    time.sleep(2 if QUICK else 10)
    log = load.stop()
    return len(log["end"]) / (log["end"].max() - log["begin"].min())


def summary(runs):
    """Medians and spread of the repetitions, for each number."""
    result = {name: middle([run[name] for run in runs])
              for name in ("seconds", "rows a second", "WAL bytes a row", "ratio", "busy")}
    for phase in ("quiet", "during"):
        result[phase] = {name: middle([run[phase][name] for run in runs]) for name in ("p50", "p99", "max")}
    return result


def plot(results):
    """Of each contestant the repetition whose p99 is the median."""
    names = list(results)
    figure, axes = plt.subplots(len(names), 1, figsize=(8, 1.9 * len(names)), sharex=True, sharey=True, layout="constrained")
    for name, axis in zip(names, axes):
        runs = sorted(results[name]["runs"], key=lambda run: run["during"]["p99"])
        run = runs[(len(runs) - 1) // 2]
        axis.axvspan(0, run["seconds"], color="tab:orange", alpha=0.15, lw=0)
        middles = np.array(run["series"]["from"]) + STEP / 2
        axis.plot(middles, run["series"]["p99"], color="tab:red", label="p99")
        axis.plot(middles, run["series"]["p50"], color="tab:blue", label="median")
        axis.set_yscale("log")
        axis.yaxis.set_major_formatter("{x:g}")
        axis.set_title(f"{name}: {EXPIRED:,} records in {run['seconds']:.1f} s", fontsize=10, loc="left")
        axis.set_ylabel("ms")
    axes[0].legend(loc="upper left", fontsize=8, ncols=2)
    axes[-1].set_xlabel(f"seconds since the purge began (shaded: it runs); {RATE} debits a second all the time")
    save_plot("docs/purge.svg", figure)


def document(results, facts, capable):
    rows = []
    for name, result in results.items():
        numbers = result["summary"]
        sql, *rest = name.split(", ")
        rows.append([", ".join([f"`{sql}`", *rest]),
                     show(numbers["rows a second"], "{:,.0f}"), show(numbers["WAL bytes a row"], "{:,.0f}"),
                     *(show(numbers[phase][p], "{:.1f}") for p in ("p50", "p99") for phase in ("quiet", "during")),
                     show(numbers["ratio"], "{:.2f}"), show(numbers["during"]["max"], "{:.0f}")])
    quiet = [run["quiet"]["p99"] for result in results.values() for run in result["runs"]]
    busy = [run["busy"] for result in results.values() for run in result["runs"]]
    settings = ", ".join(f"`{name} = {value}`" for name, value in SETTINGS.items())
    text = f"""# The cost of a purge, measured

Made by `make bench-purge` (`bench/purge.py`); not to be edited by hand.

{KEYS:,} records of three operations, {EXPIRED:,} of them expired, {ACCOUNTS:,} accounts. Under a constant load of {RATE} debits a
second on {CONNECTIONS} connections, four of five new and one a replay ({RATE / capable:.0%} of the {capable:,.0f} that the machine reached without
limit), the expired ones are purged: after {QUIET} quiet seconds, to which the seconds of the purge are compared. A latency counts
from when the debit was due, in ms. Median of {REPEAT} runs, each on a fresh copy, in turn, and in brackets the least and the greatest.

{table(["", "rows a second", "WAL bytes a row", "p50 quiet", "during", "p99 quiet", "during", "p99 ratio", "longest during"], rows)}
The default batch size is 1,000, with a pause of twice as long after each batch. "Old snapshot held": another session has a transaction open, of REPEATABLE READ, that began
before the load. The DELETE is `DELETE FROM request_result WHERE created_at < {CUTOFF}`; it fires the trigger that keeps records, as every DELETE by hand, and holds its rows until it ends.

![Latency of debits before, during and after each purge](purge.svg)

How noisy it was: the p99 of the quiet seconds, which has nothing to do with the purge, was between {min(quiet):.1f} and {max(quiet):.1f} ms;
before each run, others used {min(busy):.0f} to {max(busy):.0f} % of the processors.

{table(["machine and versions", ""], facts.items(), "---")}
Settings: {settings}; the others as PostgreSQL has them. Everything fits into `shared_buffers` and is there at the start.
"""
    path_for("docs/purge.md").write_text(text)


def main():
    start(SETTINGS)
    facts = machine()
    say(f"filling {KEYS:,} keys")
    with connect("postgres") as session:
        session.execute("CREATE DATABASE filled")
    with connect("filled") as session:
        session.execute(FILL)
        session.execute("VACUUM (FREEZE, ANALYZE)")
    capable = capacity()
    say(f"without limit: {capable:,.0f} debits a second")
    contestants = [Purge(), Delete(), *(Purge(batch) for batch in BATCHES), Purge(snapshot=True)]
    results = {contestant.name: {"runs": []} for contestant in contestants}
    for _ in range(REPEAT):
        for contestant in contestants:
            results[contestant.name]["runs"].append(measure(contestant))
    for result in results.values():
        result["summary"] = summary(result["runs"])
    save("bench/purge.json", {"machine": facts, "settings": SETTINGS, "keys": KEYS, "expired": EXPIRED, "accounts": ACCOUNTS,
                              "debits a second": RATE, "debits a second without limit": capable, "results": results})
    plot(results)
    document(results, facts, capable)
    say(f"written: {', '.join(str(path_for(name)) for name in ('bench/purge.json', 'docs/purge.svg', 'docs/purge.md'))}")


main()
