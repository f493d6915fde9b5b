"""What the benchmarks share: the server, a constant load on it, the machine's description, plots.

tools/bench.sh starts a benchmark as `python3 bench/NAME.py DIR OUTPUT`, makes DIR for the server, and stops the server and
removes DIR however the benchmark ends. PGBIN is the server's bin directory.
"""

import glob
import json
import os
import pathlib
import platform
import re
import signal
import subprocess
import sys
import time

import matplotlib
import numpy as np
import psutil
import psycopg

matplotlib.use("svg")
# Text stays text, and the same numbers give the same file.
matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "idempotency_record", "axes.grid": True,
                            "grid.alpha": 0.3, "axes.spines.top": False, "axes.spines.right": False})
import matplotlib.pyplot as plt  # noqa: E402 - after the choice of the backend

ROOT = pathlib.Path(__file__).resolve().parent.parent
DIR, SCRATCH = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
BIN = pathlib.Path(os.environ["PGBIN"])
QUICK = os.environ.get("QUICK", "") not in ("", "0")
BEGAN = time.monotonic()


def option(name, full, quick):
    """A number that the caller may set in the environment."""
    return int(os.environ.get(name) or (quick if QUICK else full))


def say(text):
    print(f"{time.monotonic() - BEGAN:6.0f} s  {text}")


def path_for(name):
    """Where this result belongs: a smoke run replaces none that is in the repository."""
    return SCRATCH / pathlib.Path(name).name if QUICK else ROOT / name


# ---- the server --------------------------------------------------------------------------------------------------
def start(settings):
    """Starts the server with these settings, on top of those of tools/cluster.sh, which switch fsync off."""
    subprocess.run([ROOT / "tools/cluster.sh", "start", DIR, *(f"{name}={value}" for name, value in settings.items())],
                   check=True)


def connect(database, **options):
    return psycopg.connect(host=str(DIR), user="postgres", dbname=database, autocommit=True, **options)


def copy(template, database):
    """A new copy of a database that nobody is connected to, in memory and on disk."""
    with connect("postgres") as session:
        strategy = "STRATEGY file_copy" if session.info.server_version >= 150000 else ""  # before, there was no other
        session.execute(f"DROP DATABASE IF EXISTS {database}")
        session.execute(f"CREATE DATABASE {database} TEMPLATE {template} {strategy}")
    with connect(database) as session:
        session.execute("CREATE EXTENSION IF NOT EXISTS pg_prewarm")
        session.execute("SELECT pg_prewarm(c.oid) FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace "
                        "WHERE n.nspname !~ '^(pg_|information_schema)' AND c.relkind IN ('r', 'i')")
        session.execute("CHECKPOINT")
    os.sync()


# The key and the account of record n are known without a look, for the replays. A key looks like a UUID, of version 4.
KEY = "overlay(md5(({n})::text) PLACING '4' FROM 13)::uuid::text"
ACCOUNT = "({n} * 7919) % {accounts} + 1"


def pgbench(database, *arguments):
    """The command that runs pgbench on this database."""
    return [BIN / "pgbench", "-h", DIR, "-U", "postgres", "--no-vacuum", "--protocol=prepared", *arguments, database]


def throughput(database, script, connections, *limit):
    """Runs the script over and over, and returns how often, and how often a second. `limit` says when pgbench ends."""
    path = DIR / "script.sql"
    path.write_text(script)
    arguments = [f"--client={connections}", f"--jobs={min(connections, os.cpu_count() or 1)}", f"--file={path}", *limit]
    done = subprocess.run(pgbench(database, *arguments), capture_output=True, text=True)
    count = re.search(r"number of transactions actually processed: (\d+)", done.stdout)
    if done.returncode != 0 or not count or re.search(r"number of failed transactions: [1-9]", done.stdout):
        raise RuntimeError(f"pgbench failed:\n{done.stdout}{done.stderr}")
    return int(count[1]), float(re.search(r"tps = ([\d.]+) \(without initial connection time\)", done.stdout)[1])


class Load:
    """pgbench with these scripts, in a process of its own, until it is stopped.

    Transactions begin at random times at a constant rate, whether or not earlier ones are done; a latency counts from the
    time at which the transaction was due. So a stall shows in all that it delays, and not in one transaction a connection.
    """

    def __init__(self, database, scripts, connections, rate=None):
        self.prefix = DIR / f"load-{time.monotonic_ns()}"
        arguments = [f"--client={connections}", "--time=86400", "--log", f"--log-prefix={self.prefix}",
                     *([f"--rate={rate}"] if rate else [])]
        for number, (text, weight) in enumerate(scripts):
            path = DIR / f"script-{number}.sql"
            path.write_text(text)
            arguments.append(f"--file={path}@{weight}")
        self.process = subprocess.Popen(pgbench(database, *arguments), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def stop(self):
        """Its transactions: begin and end in seconds since the epoch, latency in ms, number of the script."""
        # The signal with which its own alarm clock tells it that the time is over: it ends what it began, and flushes its log.
        self.process.send_signal(signal.SIGALRM)
        output, _ = self.process.communicate(timeout=60)
        if self.process.returncode != 0:
            raise RuntimeError(f"pgbench failed:\n{output}")
        log = np.concatenate([np.loadtxt(name, usecols=range(6), ndmin=2) for name in glob.glob(f"{self.prefix}.*")])
        end = log[:, 4] + log[:, 5] / 1e6
        return {"begin": end - log[:, 2] / 1e6, "end": end, "latency": log[:, 2] / 1e3, "script": log[:, 3].astype(int)}


# ---- checks ------------------------------------------------------------------------------------------------------
CHECKS = 0


def check(what, found, expected):
    """Ends the program, with an error, where the work was not done right."""
    global CHECKS
    if found != expected:
        raise SystemExit(f"WRONG: {what}: {found}, not {expected}")
    CHECKS += 1


def count_checks():
    """For tools/test.sh."""
    print(f"checks: {CHECKS} passed")


# ---- numbers -----------------------------------------------------------------------------------------------------
def percentiles(latency):
    p50, p99 = np.percentile(latency, [50, 99])
    return {"transactions": len(latency), "p50": float(p50), "p99": float(p99), "max": float(latency.max())}


def middle(values):
    """Median, and the least and the greatest value."""
    return {"median": float(np.median(values)), "min": float(min(values)), "max": float(max(values))}


def show(numbers, form="{:,.1f}"):
    """The same as text; one value is its own spread."""
    text = form.format(numbers["median"])
    if numbers["min"] == numbers["max"]:
        return text
    return f"{text} ({form.format(numbers['min'])} to {form.format(numbers['max'])})"


def table(head, rows, align="---:"):
    """Markdown; the first column is text, the others are numbers unless `align` says otherwise."""
    lines = [head, ["---", *[align] * (len(head) - 1)], *rows]
    return "".join("| " + " | ".join(map(str, cells)) + " |\n" for cells in lines)


def machine():
    """What the numbers depend on, for a reader with another machine."""
    def run(*command):
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    with open("/proc/cpuinfo") as file:
        models = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
    took = []
    with open(DIR / "fdatasync", "wb", buffering=0) as file:
        for _ in range(200):
            file.write(bytes(8192))
            before = time.monotonic()
            os.fdatasync(file.fileno())
            took.append(time.monotonic() - before)
    return {
        "processor": f"{os.cpu_count()} × {models[0] if models else platform.machine()}",
        "memory": f"{psutil.virtual_memory().total / 2**30:.0f} GB",
        "fdatasync after 8 kB": f"{np.median(took) * 1e3:.1f} ms (median), {np.percentile(took, 99) * 1e3:.1f} ms (p99), "
                                f"on {run('findmnt', '--noheadings', '--output', 'FSTYPE', '--target', DIR)}",
        "kernel": f"{platform.system()} {platform.release()}",
        "server": run(BIN / "postgres", "--version"),
        "extension": f"{os.environ.get('BUILD') or 'release'} build of commit "
                     + run("git", "describe", "--always", "--dirty", "--abbrev=12"),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }


def save(name, results):
    path_for(name).write_text(json.dumps(results, indent=1) + "\n")


def save_plot(name, figure):
    figure.savefig(path_for(name), metadata={"Date": None})
    plt.close(figure)
