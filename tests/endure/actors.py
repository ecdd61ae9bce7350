"""Producers, workers and workers of a group: each goes on until it is killed, and is started again.

A message is a number n, which no other message has. A producer sends rising numbers, and keys of
its own: so for each key, n says which message was sent first.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from datetime import timedelta
from itertools import count, islice
from typing import Any

import psycopg

import spark_pgqueue
from spark_pgqueue.postgres import connection
from spark_pgqueue.postgres.errors import PgQueueError

NUMBERS = 10**9
"""The numbers of a process of a producer: no process sends more messages."""

KEYS = 100  # of each producer
SIZES = {1: 6, 10: 6, 100: 6, 1000: 6, 10_000: 1}  # of sendings, and how often each comes
PLACE = timedelta(seconds=5)  # after that time, others take over what a dead worker had
DELIVERED = (
    "insert into endure.delivered (who, n, key) select %s, * from unnest(%s::bigint[], %s::text[])"
)


def producer(url: str, start: str, name: str, backlog: str) -> None:
    """Send in transactions of all sizes, of which some are rolled back, or go back to a savepoint.

    Args:
        url: the database.
        start: a number that no other start of a producer has.
        name: of the producer, for its keys and its connection.
        backlog: of messages; the producer waits while a consumer has more.
    """
    numbers = count(int(start) * NUMBERS)
    while True:
        try:
            with connection.connect(f"{url}&application_name=producer-{name}") as conn:
                _await_predecessor(conn)
                while True:
                    _send(conn, name, numbers)
                    _await_consumers(conn, int(backlog))
        except (psycopg.Error, PgQueueError) as error:
            print(error, flush=True)
            time.sleep(0.1)


def _await_predecessor(conn: psycopg.Connection) -> None:
    """What the transactions of an earlier connection send has no order with ours: let them end."""
    others = "select from pg_stat_activity where pid <> pg_backend_pid() and application_name = "
    while conn.execute(others + "current_setting('application_name')").fetchall():
        time.sleep(0.02)


def _send(conn: psycopg.Connection, name: str, numbers: Iterator[int]) -> None:
    """Some transactions."""
    for _ in range(random.randint(1, 10)):
        conn.execute("begin")
        for _ in range(random.choice([1, 1, 2, 5])):
            conn.execute("savepoint one")
            (size,) = random.choices([*SIZES], [*SIZES.values()])
            _send_some(conn, name, [*islice(numbers, size)])
            conn.execute("rollback to one" if random.random() < 0.1 else "release one")
        conn.execute("rollback" if random.random() < 0.1 else "commit")


def _await_consumers(conn: psycopg.Connection, backlog: int) -> None:
    most = "select max(backlog + claimed) from pgqueue.consumer_stats where stream = 'in'"
    while (conn.execute(most).fetchone() or (0,))[0] > backlog:
        time.sleep(0.2)


def _send_some(conn: psycopg.Connection, name: str, numbers: list[int]) -> None:
    keys = [f"{name}.{random.randrange(KEYS)}" for _ in numbers]
    note = "insert into endure.sent select * from unnest(%s::bigint[], %s::text[])"
    conn.execute(note, [numbers, keys])
    send = "select count(*) from pgqueue.send_batch('in', %s::text[], %s::text[])"
    conn.execute(send, [[*map(str, numbers)], keys])


def worker(url: str) -> None:
    """Note batches of messages, in the transaction of their acknowledgement."""

    def note(messages: list[Any], conn: psycopg.Connection) -> None:
        conn.execute(DELIVERED, ["workers", [int(m.data) for m in messages],
                                 [m.key for m in messages]])  # fmt: skip

    spark_pgqueue.Consumer(url, "in", "w", patience=600).run(
        note, transactional=True, batch=500, visibility_timeout=PLACE
    )


def group(url: str) -> None:
    """Note messages in the transaction that commits the offset."""

    def note(messages: list[Any], conn: psycopg.Connection) -> None:
        conn.execute(DELIVERED, ["group", [int(m.data) for m in messages],
                                 [m.key for m in messages]])  # fmt: skip

    with spark_pgqueue.connect(url) as client:
        client.group("in", "g").run(note, lease=PLACE)
