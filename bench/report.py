"""docs/performance.md and its plots, from what bench/performance.py measured."""

import numpy as np

from harness import ROOT, middle, path_for, plt, save_plot, show, table

NAMES = {"floor": "floor", "ours": "`idempotency_record`", "plpgsql": "PL/pgSQL", "client": "client transaction",
         "app": "DBOS Transact"}
COLORS = {"floor": "tab:gray", "idempotency_record": "tab:blue", "PL/pgSQL": "tab:orange", "client transaction": "tab:green",
          "idempotency_record from Python": "lightskyblue", "client transaction from Python": "lightgreen",
          "DBOS Transact from Python": "tab:purple"}
OURS, PLPGSQL, CLIENT, DBOS = "idempotency_record", "PL/pgSQL", "client transaction", "DBOS Transact from Python"
PYTHON = " from Python"


def ratio(over, under):
    """Of two turns of the same round."""
    return middle([a / b for a, b in zip(over, under)])


def net(took, kind, name):
    """Less the loop's own cost, round by round."""
    return [all_of_it - loop for all_of_it, loop in zip(took[kind][name], took[kind]["nothing"])]


def goals(results):
    """What the project set out for, what was reached, and whether that is enough."""
    took, races, many = results["cost"], results["throughput"], results["batches"]
    grown, sizes = results["growth"]["took"], list(results["growth"]["sizes"])
    fresh, hot = races["fresh, 8 connections"], races["one hot account, 8 connections"]
    # Where the disk's flush does not set the pace for all.
    fresh_off, hot_off = (races[f"{work}, 8 connections, synchronous_commit off"] for work in ("fresh", "one hot account"))
    least, most = sizes[0], sizes[-1]
    ours = {kind: net(took, kind, "ours") for kind in ("fresh", "replay")}
    free, left = results["replay is free"], results["footprint"]["ours"]["fresh"]

    def growing(what):
        return ratio(grown[what][most], grown[what][least])

    listed = [
        ("fresh, in the server, over the floor", ratio(ours["fresh"], net(took, "fresh", "floor")), "≤", 1.15),
        ("fresh, in the server: PL/pgSQL over ours", ratio(net(took, "fresh", "plpgsql"), ours["fresh"]), "≥", 1.3),
        ("replay, in the server: PL/pgSQL over ours", ratio(net(took, "replay", "plpgsql"), ours["replay"]), "≥", 3),
        ("replay: WAL bytes, transaction ids", middle([free["WAL bytes"] + free["transaction ids"]]), "≤", 0),
        ("hot account, 8 connections: ours over PL/pgSQL", ratio(hot[OURS], hot[PLPGSQL]), "≥", 4),
        ("the same, `synchronous_commit` off", ratio(hot_off[OURS], hot_off[PLPGSQL]), "≥", 4),
        ("fresh, 8 connections: ours over client transaction, both by pgbench", ratio(fresh[OURS], fresh[CLIENT]), "≥", 3),
        ("the same, `synchronous_commit` off", ratio(fresh_off[OURS], fresh_off[CLIENT]), "≥", 3),
        ("fresh, 8 connections: ours over client transaction, both from Python",
         ratio(fresh[OURS + PYTHON], fresh[CLIENT + PYTHON]), "≥", 3),
        ("the same, `synchronous_commit` off", ratio(fresh_off[OURS + PYTHON], fresh_off[CLIENT + PYTHON]), "≥", 3),
        ("fresh, 8 connections: ours over DBOS, both from Python", ratio(fresh[OURS + PYTHON], fresh[DBOS]), "≥", 10),
        ("dead rows a fresh call", middle([left[3] + left[4]]), "≤", 1),
        (f"fresh at {int(most):,} keys over {int(least):,}", growing("fresh, full_page_writes off"), "≤", 1.3),
        ("the same, right after a checkpoint", growing("fresh, full_page_writes on"), "≤", 1.3),
        (f"replay at {int(most):,} keys over {int(least):,}", growing("replay, full_page_writes off"), "≤", 1.3),
    ]
    if many:
        single, pipelined, batch = many.values()
        listed += [("batches of 1,000, 8 connections, over single calls", ratio(batch, single), "≥", 6),
                   ("batches of 1,000 over single calls, pipelined in one transaction", ratio(batch, pipelined), "≥", 3)]
    return [(what, numbers, f"{sign} {goal:g}",
             "yes" if (numbers["median"] <= goal if sign == "≤" else numbers["median"] >= goal) else "**no**")
            for what, numbers, sign, goal in listed]


def bars(axis, title, numbers, unit, log=False):
    """Horizontal, with medians, and whiskers from the least to the greatest."""
    names = list(numbers)
    middles = [middle(numbers[name]) for name in names]
    medians = [of["median"] for of in middles]
    spread = [[of["median"] - of["min"] for of in middles], [of["max"] - of["median"] for of in middles]]
    places = np.arange(len(names))[::-1]
    axis.barh(places, medians, xerr=spread, color=[COLORS.get(name, "tab:blue") for name in names], height=0.7,
              error_kw={"elinewidth": 1, "capsize": 2, "ecolor": "black"})
    for place, of in zip(places, middles):
        axis.annotate(f"{of['median']:,.0f}" if of["median"] >= 100 else f"{of['median']:.1f}", (of["max"], place),
                      xytext=(5, 0), textcoords="offset points", va="center", fontsize=8)
    axis.set_yticks(places, names, fontsize=8)
    axis.grid(axis="y", visible=False)
    axis.set_title(title, fontsize=10, loc="left")
    axis.set_xlabel(unit)
    if log:
        axis.set_xscale("log")
        axis.set_xlim(right=3 * max(of["max"] for of in middles))
    else:
        axis.set_xlim(right=1.2 * max(of["max"] for of in middles))


def plot_throughput(races):
    figure, axes = plt.subplots(len(races), 1, figsize=(8, 2.3 * len(races)), sharex=True, layout="constrained")
    for axis, (title, rates) in zip(axes, races.items()):
        bars(axis, title, rates, "", log=True)
    axes[-1].set_xlabel("debits a second (logarithmic); whiskers: the slowest and the quickest round")
    greatest = max(max(of) for rates in races.values() for of in rates.values())
    axes[-1].set_xlim(10, 4 * greatest)
    save_plot("docs/performance-throughput.svg", figure)


def plot_cost(took):
    figure, axes = plt.subplots(1, 2, figsize=(8, 1.9), layout="constrained", width_ratios=[3, 2])
    labels = {"floor": "floor", "ours": OURS, "plpgsql": PLPGSQL}
    for axis, kind, title in zip(axes, ("fresh", "replay"), ("fresh", "replay")):
        bars(axis, title, {labels[name]: net(took, kind, name) for name in took[kind] if name != "nothing"}, "µs a call")
    save_plot("docs/performance-cost.svg", figure)


def plot_growth(grown):
    figure, axis = plt.subplots(figsize=(8, 3.2), layout="constrained")
    lines = (("fresh", "idempotency_record, fresh", "tab:blue", "-"), ("floor", "floor, fresh", "tab:gray", "-"),
             ("replay", "idempotency_record, replay", "tab:cyan", "-"))
    for what, label, color, style in lines:
        numbers = grown["took"][f"{what}, full_page_writes off"]
        sizes = [int(size) for size in numbers]
        middles = [middle(of) for of in numbers.values()]
        medians = [of["median"] for of in middles]
        spread = [[of["median"] - of["min"] for of in middles], [of["max"] - of["median"] for of in middles]]
        axis.errorbar(sizes, medians, yerr=spread, color=color, linestyle=style, marker="o", markersize=4, capsize=3, label=label)
    axis.set_xscale("log")
    axis.set_xticks(sizes, [f"{size:,}" for size in sizes])
    axis.xaxis.set_minor_locator(plt.NullLocator())
    axis.set_xlabel("keys in the table (logarithmic)")
    axis.set_ylabel("µs a call")
    axis.set_ylim(bottom=0)
    axis.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    save_plot("docs/performance-growth.svg", figure)


def throughput_table(races):
    names = list(dict.fromkeys(name for rates in races.values() for name in rates))
    rows = [[f"`{name}`" if name == OURS else name,
             *(show(middle(rates[name]), "{:,.0f}") if name in rates else "" for rates in races.values())] for name in names]
    return table(["debits a second", *races], rows)


def ratio_table(races):
    races = {what: rates for what, rates in races.items() if "floor" in rates}
    names = list(next(iter(races.values())))
    rows = [[f"`{name}`" if name == OURS else name,
             *(show(ratio(rates[name], rates["floor"]), "{:.2f}") for rates in races.values())] for name in names]
    return table(["ratio to the floor", *races], rows)


def cost_table(took):
    rows = []
    for name in ("floor", "ours", "plpgsql"):
        fresh, floor = net(took, "fresh", name), net(took, "fresh", "floor")
        replay = net(took, "replay", name) if name in took["replay"] else None
        rows.append([NAMES[name], show(middle(fresh)), show(ratio(fresh, floor), "{:.2f}"), show(middle(replay)) if replay else "",
                     show(ratio(replay, floor), "{:.2f}") if replay else ""])
    return table(["", "fresh, µs", "to the floor", "replay, µs", "to the fresh floor"], rows)


def footprint_table(footprint):
    rows = [[NAMES[name], kind, *(f"{number:,.0f}" if place == 0 else f"{number:.2f}" for place, number in enumerate(numbers[:3])),
             f"{numbers[3] + numbers[4]:.2f}"] for name, kinds in footprint.items() for kind, numbers in kinds.items()]
    return table(["", "call", "WAL bytes", "transaction ids", "rows inserted", "dead rows"], rows)


def storm_table(took):
    floor = took["ours"]
    return table(["", "last answer, ms after the commit", "to ours"],
                 [[NAMES[name], show(middle(times)), show(ratio(times, floor), "{:.2f}")] for name, times in took.items()])


def growth_tables(grown):
    sizes = list(grown["sizes"])
    labels = {"fresh": "`idempotency_record`, fresh", "floor": "floor, fresh", "replay": "`idempotency_record`, replay"}
    costs = []
    for what, numbers in grown["took"].items():
        kind, _, pages = what.partition(", full_page_writes ")
        costs.append([labels[kind] + (", right after a checkpoint" if pages == "on" else ""),
                      *(show(middle(of)) for of in numbers.values()), show(ratio(numbers[sizes[-1]], numbers[sizes[0]]), "{:.2f}")])
    bytes_of = []
    for name in ("ours", "floor"):
        for place, what in ((1, "table"), (2, "index of the key"), (None, "index of the purge"), (0, "together")):
            row = []
            for of in grown["sizes"].values():
                count, heap, key, indexes = of[name]
                size = {1: heap, 2: key, None: indexes - key, 0: heap + indexes}[place]
                row.append(f"{size / count:,.0f}")
            bytes_of.append([f"{NAMES[name]}, {what}", *row])
    heads = [f"{int(size):,} keys" for size in sizes]
    return (table(["µs a call, in the server", *heads, "largest over smallest"], costs) + "\n"
            + table(["bytes a key", *heads], bytes_of))


def batch_section(many, parameters):
    if not many:
        return "Not measured: this version has no `debit_batch_once`.\n"
    rows = [[name, show(middle(rates), "{:,.0f}"), show(ratio(rates, many[OURS]), "{:.2f}")] for name, rates in many.items()]
    return f"""Each with 8 connections and new keys, {parameters['batch']:,} debits in a batch, accounts at random. The pipelined calls are sent by psycopg in
pipeline mode, sorted by account, since two such transactions would otherwise deadlock.

{table(["", "debits a second", "to single calls"], rows)}"""


def write(results, facts, settings, parameters):
    plot_throughput(results["throughput"])
    plot_cost(results["cost"])
    plot_growth(results["growth"])
    profile = ROOT / "bench/profile.md"
    where = f"\n## Where the time goes\n\n{profile.read_text().strip()}\n" if profile.exists() else ""
    free = results["replay is free"]
    races = results["throughput"]
    reached = table(["ratio", "reached", "goal", ""],
                    [[what, show(numbers, "{:,.2f}"), goal, enough] for what, numbers, goal, enough in goals(results)])
    text = f"""# Performance, measured

Made by `make bench` (`bench/performance.py`), in one run on one machine; not to be edited by hand. Another machine has other times;
the ratios are what to look at. `make bench` measures yours, and `bench/results.json` has every round of this run.

## Goals

{reached}
Median, and in brackets the least and the greatest of the rounds; a ratio is one of two turns in the same round.

## What is compared

All do the same: debit an account by 1 and keep a record of it, on one server, each in a schema of its own with tables that have the same
columns, constraints, indexes and storage parameters. {parameters['accounts']:,} accounts; {parameters['known']:,} records are there at the start, and the server has their statistics. Keys are
UUIDs at random.

- **floor**: no idempotency. One PL/pgSQL function with one UPDATE of the account and one INSERT of the record.
- **`idempotency_record`**: `SELECT debit_once(...)`, one statement that is its own transaction.
- **PL/pgSQL**: the routine by hand. INSERT of a provisional record `ON CONFLICT DO NOTHING`, UPDATE of the account, UPDATE of the record; a
  repeat compares the request and gets the response.
- **client transaction**: the same from the application. BEGIN, INSERT, SELECT of the balance `FOR NO KEY UPDATE`, UPDATE, UPDATE, COMMIT, each a
  round trip; a repeat is BEGIN, INSERT, SELECT, COMMIT.
- **DBOS Transact**: a workflow whose id is the key, with one step, a transaction (`SQLAlchemyDatasource.transaction`, `READ COMMITTED`) that debits by
  one `UPDATE ... RETURNING`. Its system tables are in the same database, made beforehand; its driver and pools are its defaults (psycopg,
  20 connections); log level WARNING, no Conductor, no OpenTelemetry. The workflow is called directly, in a process a connection, as its threads would share
  one interpreter lock. Its records are its own, without the others' index for a purge, and it does not compare the request of a repeat.

The first four are driven by `pgbench` with prepared statements over a Unix socket; those "from Python" by a process a connection with psycopg 3
(statements prepared) or DBOS, so that neither the language nor its lock is what distinguishes DBOS from the others. In each round every
contestant has a turn of {parameters['seconds']} s, in an order that changes from round to round; rounds: {parameters['rounds']}. Each kind of work begins with a copy of the same database, in
memory, after a checkpoint. Before any of it, all contestants were sent the same debits, each key twice, and computed the same balances; after
each kind of work, every balance and the number of records were compared with what had been sent.

## Throughput

{throughput_table(races)}
{ratio_table(races)}
Replays are of the {parameters['known']:,} records at the start; DBOS replays {parameters['known to DBOS']:,} workflows of its own. The floor has no replays.

![Debits a second of each contestant, for each kind of work](performance-throughput.svg)

## Cost within the server

Microseconds a call, without a client: a procedure calls {parameters['calls']:,} times and commits each time, with `synchronous_commit = off`, so that the disk is
not what is measured. The cost of the loop itself, with its commits of nothing ({show(middle(results['cost']['fresh']['nothing']))} µs), is subtracted from all. Rounds: {parameters['cost rounds']}.

{cost_table(results['cost'])}
![Microseconds a call within the server, fresh and replay](performance-cost.svg)
{where}
## What a call leaves behind

Of each call: bytes of WAL (`pg_current_wal_insert_lsn`), transaction ids, and row versions, by the server's counters; a row that is
updated or deleted leaves a dead one. {parameters['left calls']:,} calls, on pages that were changed before since the checkpoint.

{footprint_table(results['footprint'])}
A replay of `idempotency_record` was looked at in a transaction: {free['WAL bytes']} bytes of WAL, no transaction id, and no lock but {' and '.join(free['locks'])}.

## Retry storm

A session executes a key and keeps its transaction open for {parameters['hold'] * 1e3:.0f} ms, while {parameters['waiters']} other connections send the same key. From the moment the COMMIT is
sent to the last of their answers; all of them got the first one's. {parameters['storms']} storms, from Python.

{storm_table(results['storm'])}
## Growth

Tables of different sizes in turn, within the server as above; new keys are UUIDs at random, replays are of keys from all over the table. `idempotency_record`
and the floor, each with the same number of keys. Each session has read the whole tables before, as one of a pool has in time, since the first time
that it reads a page it has to map it into its memory. The first change of a page after a checkpoint copies the page to the WAL. How many
calls pay for that depends on how often there are checkpoints, so it is measured without (`full_page_writes = off`), and as the worst case,
right after a checkpoint, where in a large table nearly every call does.

{growth_tables(results['growth'])}
![Cost of a call for different numbers of keys](performance-growth.svg)

## Batches

{batch_section(results['batches'], parameters)}
## Machine and settings

{table(["machine and versions", ""], facts.items(), "---")}
Settings: {', '.join(f"`{name} = {value}`" for name, value in settings.items())}; the others as PostgreSQL has them. Everything fits into `shared_buffers`.
"""
    path_for("docs/performance.md").write_text(text)
