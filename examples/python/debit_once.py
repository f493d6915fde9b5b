"""Debits an account once, whatever breaks: debit_once.py INTENTION ACCOUNT AMOUNT

INTENTION is a file. It holds the intention from before the first attempt until the answer is known, so that whoever
starts this again with the same file carries on, with the same key. The connection is libpq's: PGHOST, PGDATABASE, ...
Prints the answer; where the debit is refused, the status is 1 and the SQLSTATE the last line on standard error.
"""

import json
import os
import sys
import uuid
from pathlib import Path

import psycopg
from tenacity import retry, retry_if_exception, wait_random_exponential

DEBIT = "SELECT debit_once(%(account)s, %(key)s, %(amount)s)::text"
CANCEL = "SELECT cancel_request(%(account)s, 'debit:v1', %(key)s)::text"
RETRY = ("55P03", "57014", "57P01", "57P02", "57P03", "25006")
REFUSALS = ("P0001", "22023", "23503")


def load_or_create(file, account, amount):
    """The intention, and whether an earlier process may have sent it."""
    if file.exists():
        return json.loads(file.read_text()), True
    intention = {"key": str(uuid.uuid4()), "account": account, "amount": amount}
    unfinished = file.with_name(file.name + ".new")
    with unfinished.open("w") as out:
        json.dump(intention, out)
        out.flush()
        os.fsync(out.fileno())
    unfinished.rename(file)
    directory = os.open(file.parent, os.O_RDONLY)
    os.fsync(directory)  # the name, too, has to survive
    os.close(directory)
    return intention, False


def worth_a_retry(error):
    state = getattr(error, "sqlstate", None)
    if state is None:  # no connection, or none any more
        return isinstance(error, psycopg.OperationalError)
    return state[:2] in ("08", "40", "53") or state in RETRY  # see docs/clients.md


@retry(
    retry=retry_if_exception(worth_a_retry),
    wait=wait_random_exponential(multiplier=0.05, max=5),
    before_sleep=lambda state: print("retry:", state.outcome.exception(), file=sys.stderr),
    reraise=True,
)
def until_definite(sql, intention):
    # Each attempt has a transaction of its own, committed when `execute` returns.
    with psycopg.connect(autocommit=True) as connection:
        return connection.execute(sql, intention).fetchone()[0]


def main():
    file = Path(sys.argv[1])
    intention, sent_before = load_or_create(file, int(sys.argv[2]), int(sys.argv[3]))
    refusal = None
    try:
        answer = until_definite(DEBIT, intention)
    except psycopg.Error as error:
        if error.sqlstate not in REFUSALS:
            raise  # not an answer: the intention stays, for when the fault is mended
        refusal = error.sqlstate
        if refusal == "P0001" and (sent_before or until_definite.statistics["attempt_number"] > 1):
            # An attempt that was not answered may still be under way, and execute once there is money. Now it cannot.
            answer = until_definite(CANCEL, intention)
            refusal = None if answer is not None else refusal
    if refusal is None:
        print(answer, flush=True)
    else:
        print(refusal, file=sys.stderr)
    file.unlink()  # only now, when the answer is where it belongs
    sys.exit(0 if refusal is None else 1)


main()
