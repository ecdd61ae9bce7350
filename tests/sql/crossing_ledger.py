"""The ledger of the crossing: what was sent and settled, in tables that the queue knows nothing of.

Each function of the schema `ledger` calls a function of the queue and writes down what it did, in
one transaction. So whatever is killed, cancelled, rolled back or forgotten by a crash, the ledger
and the queue are of one state, and any snapshot of both can be judged (`crossing_judge`).

A message is known by its token, which is its payload: copies by a binding have the same one. Calls
that did less than the caller believed end with `OTHERWISE`, and change nothing.
"""

from __future__ import annotations

from pathlib import Path

import psycopg

OTHERWISE = "CX001"  # the claim, or the consumer, is not what the caller believes

LEDGER = Path(__file__).with_suffix(".sql")


def make(conn: psycopg.Connection) -> None:
    """Make the ledger in a database that has the queue."""
    conn.execute(LEDGER.read_bytes())
