"""The contestants that live in an application, in Python: processes that debit, a connection each.

bench/performance.py starts it as `clients.py DIR DATABASE ACCOUNTS BALANCE`, writes a line of JSON for each turn, and reads one:
how many calls, how many a second, which accounts they debited. A process a connection, because threads of one process would
wait for each other in Python. Each makes its connection and some calls before all of them begin, so that neither that nor
planning is measured.
"""

import collections
import hashlib
import json
import multiprocessing
import os
import random
import sys
import time
import uuid

import psycopg
from psycopg.types.json import Jsonb

WARM = 20  # calls; psycopg prepares a statement when it has been sent five times
BATCH = 1_000


def account_of(number, accounts):
    """As ACCOUNT in harness.py."""
    return number * 7919 % accounts + 1


def key_of(number):
    """As KEY in harness.py."""
    digest = hashlib.md5(str(number).encode()).hexdigest()
    return str(uuid.UUID(digest[:12] + "4" + digest[13:]))


class Client:
    """One connection. `work` is what is within the transaction."""

    size = 1  # debits a call

    def __init__(self, directory, database):
        self.connection = psycopg.connect(host=directory, user="postgres", dbname=database, autocommit=True)

    def debit(self, account, key):
        return self.work(account, key)


class Ours(Client):
    """One statement, which is its own transaction."""

    schema = "ours"

    def work(self, account, key):
        return self.connection.execute(f"SELECT {self.schema}.debit_once(%s, %s, 1)", (account, key)).fetchone()[0]


class PlPgSql(Ours):
    schema = "plpgsql"


class Transaction(Client):
    """What an application does that keeps records by itself."""

    def debit(self, account, key):
        with self.connection.transaction():
            return self.work(account, key)

    def work(self, account, key, amount=1):
        run = self.connection.execute
        identity = (account, key)
        claimed = run("INSERT INTO client.request_result (account_id, operation, request_key, request, response) "
                      "VALUES (%s, 'debit:v1', %s, %s, '{}') ON CONFLICT DO NOTHING", (*identity, Jsonb({"amount": amount})))
        if claimed.rowcount == 0:
            request, response = run("SELECT request, response FROM client.request_result "
                                    "WHERE account_id = %s AND operation = 'debit:v1' AND request_key = %s", identity).fetchone()
            if request != {"amount": amount}:
                raise ValueError("idempotency key reused with different request")
            return response
        # Not FOR UPDATE: it waits for whoever inserts a record of the account, who waits for this, and one of them dies of it.
        balance, = run("SELECT balance FROM client.account WHERE account_id = %s FOR NO KEY UPDATE", (account,)).fetchone()
        if balance < amount:
            raise ValueError("insufficient balance")
        response = {"balance": balance - amount}
        run("UPDATE client.account SET balance = %s WHERE account_id = %s", (balance - amount, account))
        run("UPDATE client.request_result SET response = %s "
            "WHERE account_id = %s AND operation = 'debit:v1' AND request_key = %s", (Jsonb(response), *identity))
        return response


class Dbos:
    """A workflow whose id is the key, with one step: a transaction of a datasource, so that the debit happens exactly once."""

    size = 1

    def __init__(self, directory, database, migrate=False):
        # Slow to import, and of no use to the others.
        import sqlalchemy
        from dbos import DBOS, SetWorkflowID, SQLAlchemyDatasource

        url = f"postgresql+psycopg://postgres@/{database}?host={directory}"
        DBOS(config={"name": "bench", "system_database_url": url, "log_level": "WARNING", "run_migrations": migrate,
                     "executor_id": str(os.getpid()), "application_version": "1"})
        source = SQLAlchemyDatasource.create(url, run_migrations=migrate)
        update = sqlalchemy.text("UPDATE app.account SET balance = balance - :amount "
                                 "WHERE account_id = :account AND balance >= :amount RETURNING balance")

        # The default, SERIALIZABLE, makes concurrent debits of an account fail and be repeated; one UPDATE does not need it.
        @source.transaction(isolation_level="READ COMMITTED")
        def take(account, amount):
            balance = source.sql_session().execute(update, {"account": account, "amount": amount}).scalar_one_or_none()
            if balance is None:
                raise ValueError("insufficient balance")
            return balance

        @DBOS.workflow()
        def debit(account, amount):
            return {"balance": take(account, amount)}

        self.workflow, self.identify = debit, SetWorkflowID
        DBOS.launch()

    def debit(self, account, key):
        with self.identify(key):
            return self.workflow(account, 1)


class Pipeline(Client):
    """Many calls of the function in one transaction, sent without waiting for answers."""

    size = BATCH

    def debit_many(self, accounts, keys):
        # In the order of accounts, for two transactions that lock accounts in different orders may deadlock.
        calls = sorted(zip(accounts, keys))
        with self.connection.pipeline(), self.connection.transaction():
            cursors = [self.connection.execute("SELECT ours.debit_once(%s, %s, 1)", call) for call in calls]
        return [cursor.fetchone()[0] for cursor in cursors]


class Batch(Client):
    """Many debits by one call."""

    size = BATCH

    def debit_many(self, accounts, keys):
        rows = self.connection.execute("SELECT ordinal, response, replayed, sqlstate, message "
                                       "FROM ours.debit_batch_once(%s::bigint[], %s::text[], %s::bigint[])",
                                       (accounts, keys, [1] * len(keys)))
        return [response for _, response, *_ in rows.fetchall() if response is not None]


KINDS = {"ours": Ours, "plpgsql": PlPgSql, "client": Transaction, "dbos": Dbos, "pipeline": Pipeline, "batch": Batch}


class Turn:
    """What one process does in a turn."""

    def __init__(self, number, client, turn, accounts, balance):
        self.number, self.client, self.turn, self.accounts, self.balance = number, client, turn, accounts, balance
        self.debited = collections.Counter()
        self.answers = []

    def fresh(self):
        account = self.turn.get("account") or random.randint(1, self.accounts)
        self.client.debit(account, str(uuid.uuid4()))
        self.debited[account] += 1

    def replay(self):
        """Of records that were filled in, whose answers are known."""
        number = random.randint(1, self.turn["known"])
        answer = self.client.debit(account_of(number, self.accounts), key_of(number))
        if answer != {"balance": self.balance - number}:
            raise ValueError(f"key {number} was answered by {answer}")

    def repeat(self):
        """Of what the `calls` of an earlier turn executed."""
        number = random.randint(1, len(self.turn["calls"]))
        account, key = self.turn["calls"][number - 1]
        self.client.debit(account, key)

    def many(self):
        accounts = random.choices(range(1, self.accounts + 1), k=BATCH)
        if len(self.client.debit_many(accounts, [str(uuid.uuid4()) for _ in accounts])) != BATCH:
            raise ValueError("not as many answers as calls")
        self.debited.update(accounts)

    def run(self, barrier):
        one = getattr(self, self.turn["kind"], None)
        if self.turn["kind"] == "calls":  # in order; all of them by the only process
            barrier.wait()
            began = time.monotonic()
            for account, key in self.turn["calls"]:
                self.answers.append(self.client.debit(account, key)["balance"])
            return len(self.answers), time.monotonic() - began
        for _ in range(WARM if self.client.size == 1 else 1):
            one()
        barrier.wait()
        began, count = time.monotonic(), 0
        while time.monotonic() - began < self.turn["seconds"]:
            one()
            count += self.client.size
        return count, time.monotonic() - began


def work(number, turn, barrier, results, arguments):
    """A process. It ends without tidying up, for DBOS would wait for its threads."""
    directory, database, accounts, balance = arguments
    try:
        client = KINDS[turn["client"]](directory, database)
        mine = Turn(number, client, turn, accounts, balance)
        count, seconds = mine.run(barrier)
        results.put({"count": count, "rate": count / seconds, "debited": mine.debited, "answers": mine.answers})
    except BaseException as error:  # noqa: B902 - the caller has to hear of everything
        barrier.abort()
        results.put({"error": f"{turn['client']}: {error!r}"})
    results.close()
    results.join_thread()
    os._exit(0)


def migrate(directory, database):
    Dbos(directory, database, migrate=True)
    os._exit(0)


def take_turn(turn, arguments):
    # Forked, so that DBOS, which is slow to import, is there already.
    context = multiprocessing.get_context("fork")
    if turn["kind"] == "migrate":
        process = context.Process(target=migrate, args=arguments[:2])
        process.start()
        process.join()
        return {} if process.exitcode == 0 else {"error": "DBOS could not make its tables"}
    barrier, results = context.Barrier(turn["connections"]), context.Queue()
    processes = [context.Process(target=work, args=(number, turn, barrier, results, arguments))
                 for number in range(turn["connections"])]
    for process in processes:
        process.start()
    # More than any turn takes: a process that was killed says nothing.
    parts = [results.get(timeout=600) for _ in processes]
    for process in processes:
        process.join()
    errors = [part["error"] for part in parts if "error" in part]
    if errors:  # a barrier that another one's error broke is not the reason
        return {"error": next((error for error in errors if "BrokenBarrier" not in error), errors[0])}
    debited = sum((part["debited"] for part in parts), collections.Counter())
    return {"count": sum(part["count"] for part in parts), "rate": sum(part["rate"] for part in parts), "debited": debited,
            "answers": parts[0]["answers"] if turn["kind"] == "calls" else []}


def main():
    directory, database, accounts, balance = sys.argv[1:]
    import dbos  # noqa: F401 - before the first fork

    for line in sys.stdin:
        print(json.dumps(take_turn(json.loads(line), (directory, database, int(accounts), int(balance)))), flush=True)


if __name__ == "__main__":
    main()
