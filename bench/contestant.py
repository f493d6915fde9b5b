"""The contestants of bench/performance.py, as those who call them see them: pgbench, or processes in Python.

What they call within the server is in contestants.sql, and the Python processes are clients.py.
"""

import collections
import json
import os
import pathlib
import subprocess
import sys

from clients import account_of, key_of
from harness import ACCOUNT, DIR, KEY, QUICK, option, throughput

SECONDS = option("SECONDS", 4, 1)
ACCOUNTS = option("ACCOUNTS", 10_000, 1_000)
BALANCE = 1_000_000_000
SIZES = [int(size) for size in (os.environ.get("GROWTH") or ("1000 10000" if QUICK else "10000 1000000 10000000")).split()]
KNOWN = SIZES[0]  # records that are there before anything is measured
DBOS_KNOWN = option("DBOS_KNOWN", 2_000, 50)  # those of DBOS, which has to execute them

DEBIT = "SELECT {schema}.debit_once(:account, {key}, 1);\n"
# pgbench would take the operation's `:v1` for a variable. Of a conflict it learns only from a number that a query returns.
OPERATION = "E'debit\\072v1'"
TRANSACTION = """BEGIN;
WITH claimed AS (
    INSERT INTO {schema}.request_result (account_id, operation, request_key, request, response)
    VALUES (:account, {operation}, {key}, '{{"amount": 1}}', '{{}}') ON CONFLICT DO NOTHING RETURNING 1
) SELECT count(*) AS claimed FROM claimed \\gset
\\if :claimed
SELECT balance - 1 AS balance FROM {schema}.account WHERE account_id = :account FOR NO KEY UPDATE \\gset
UPDATE {schema}.account SET balance = :balance WHERE account_id = :account;
UPDATE {schema}.request_result SET response = jsonb_build_object('balance', (:balance)::bigint)
 WHERE account_id = :account AND operation = {operation} AND request_key = {key};
\\else
SELECT request, response FROM {schema}.request_result
 WHERE account_id = :account AND operation = {operation} AND request_key = {key};
\\endif
COMMIT;
"""
# Keys are UUIDs, and so at random places of the index. `n` is the number that a key is made of.
ARGUMENTS = {
    "fresh": f"\\set account random(1, {ACCOUNTS})\n\\set n random(1000000000, 9000000000000000000)\n",
    "hot": "\\set account 1\n\\set n random(1000000000, 9000000000000000000)\n",
    "replay": f"\\set n random(1, {KNOWN})\n\\set account {ACCOUNT.format(n=':n', accounts=ACCOUNTS)}\n",
}

DONE = collections.Counter()  # calls that had to execute, by schema
DBOS_DEBITED = collections.Counter()  # of these, DBOS's, by account: its records do not name it


class Pgbench:
    """Driven by pgbench, prepared statements: next to nothing is the client's."""

    def __init__(self, name, schema, text=DEBIT):
        self.name, self.schema, self.text = name, schema, text

    def script(self, arguments):
        return arguments + self.text.format(schema=self.schema, key=KEY.format(n=":n"), operation=OPERATION)

    def rate(self, kind, connections):
        count, rate = throughput("bench", self.script(ARGUMENTS[kind]), connections, f"--time={SECONDS}")
        if kind != "replay":
            DONE[self.schema] += count
        return rate

    def execute(self, first, count, times):
        """The keys `first` and following, all of them so many times, one after the other."""
        arguments = f"\\set n {first} + :i % {count}\n\\set i :i + 1\n\\set account {ACCOUNT.format(n=':n', accounts=ACCOUNTS)}\n"
        throughput("bench", self.script(arguments), 1, f"--transactions={count * times}", "--define=i=0")
        DONE[self.schema] += count
        return None


class Python:
    """Driven by processes of bench/clients.py."""

    process = None

    def __init__(self, name, schema, client):
        self.name, self.schema, self.client = name, schema, client

    @classmethod
    def take_turn(cls, **turn):
        if not cls.process:
            cls.process = subprocess.Popen(
                [sys.executable, pathlib.Path(__file__).with_name("clients.py"), DIR, "bench", str(ACCOUNTS), str(BALANCE)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        print(json.dumps(turn), file=cls.process.stdin, flush=True)
        result = json.loads(cls.process.stdout.readline() or '{"error": "bench/clients.py ended"}')
        if "error" in result:
            raise SystemExit(f"WRONG: {result['error']}")
        return result

    def count(self, debited):
        DONE[self.schema] += sum(debited.values())
        if self.client == "dbos":
            DBOS_DEBITED.update({int(account): count for account, count in debited.items()})

    def rate(self, kind, connections):
        turn = {"kind": kind}
        if kind == "hot":
            turn = {"kind": "fresh", "account": 1}
        elif kind == "replay" and self.client == "dbos":
            turn = {"kind": "repeat", "calls": DBOS_CALLS}
        result = self.take_turn(client=self.client, connections=connections, seconds=SECONDS, known=KNOWN, **turn)
        self.count(result["debited"])
        return result["rate"]

    def call(self, calls, fresh=True):
        """These calls, by one connection, and the balances that were answered."""
        if fresh:
            self.count(collections.Counter(account for account, _ in calls))
        return self.take_turn(client=self.client, connections=1, kind="calls", calls=calls)["answers"]

    def execute(self, first, count, times):
        calls = [[account_of(n, ACCOUNTS), key_of(n)] for n in range(first, first + count)]
        self.count(collections.Counter(account for account, _ in calls))
        return self.call(calls * times, fresh=False)


class Many(Python):
    """Batches of new keys, whatever is asked for."""

    def rate(self, kind, connections):
        return super().rate("many", connections)


FLOOR = Pgbench("floor", "floor")
OURS = Pgbench("idempotency_record", "ours")
PLPGSQL = Pgbench("PL/pgSQL", "plpgsql")
CLIENT = Pgbench("client transaction", "client", TRANSACTION)
OURS_PYTHON = Python("idempotency_record from Python", "ours", "ours")
CLIENT_PYTHON = Python("client transaction from Python", "client", "client")
DBOS = Python("DBOS Transact from Python", "app", "dbos")
CONTESTANTS = [FLOOR, OURS, PLPGSQL, CLIENT, OURS_PYTHON, CLIENT_PYTHON, DBOS]
DBOS_CALLS = [[account_of(n, ACCOUNTS), key_of(n)] for n in range(1, DBOS_KNOWN + 1)]
