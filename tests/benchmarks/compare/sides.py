"""What is compared: each side is one queue of one system, as its users call it.

All through psycopg in autocommit, with prepared statements, from processes of their own, with the
same durability. The payload is a JSON document of 1 kB, which begins with the message's number, by
which every delivery is counted.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Protocol

import psycopg

from spark_pgqueue.postgres import schema
from tests.benchmarks.harness import run

DIGITS = 12
BEFORE = '{"n": "'
"""What stands before the number, also in the text of a jsonb: its shortest key comes first."""

LINES = [
    {"product": f"article {line:04}", "count": line % 7 + 1, "price": f"{line * 13 % 97}.99"}
    for line in range(15)
]
AFTER = (
    f'", "customer": {{"name": "Ada Lovelace", "country": "GB"}}, "lines": {json.dumps(LINES)}}}'
)
CHUNK = 10_000
"""Messages in a call of `serve_claim`."""

# From an array of keys; numbers count from the first parameter.
NUMBERED = f"""
select '{BEFORE}' || lpad((%s + i - 1)::text, {DIGITS}, '0') || '{AFTER}' as data, k as key, i
from unnest(%s::text[]) with ordinality n (k, i)
"""


def payload(number: int) -> str:
    """The payload of a message."""
    return f"{BEFORE}{number:0{DIGITS}}{AFTER}"


def number_of(data: str) -> int:
    """The number of a message, of its payload."""
    return int(data[len(BEFORE) : len(BEFORE) + DIGITS])


@dataclass
class Delivery:
    """What one call received.

    Attributes:
        numbers: of the messages, in the order of delivery.
        handle: by which the side acknowledges them.
    """

    numbers: list[int]
    handle: Any


class Store(Protocol):
    """Where messages can be sent to, and counted. Frozen, so that it can go to another process.

    Attributes:
        name: as it is shown.
        schema: all tables in it are the side's.
    """

    @property
    def name(self) -> str: ...
    @property
    def schema(self) -> str: ...

    def install(self, conn: psycopg.Connection) -> None:
        """Make what all queues of the system share. Safe to repeat."""
        ...

    def create(self, conn: psycopg.Connection, consumers: int, *, by_key: bool) -> None:
        """Make the queue, empty."""
        ...

    def drop(self, conn: psycopg.Connection) -> None: ...

    def send(self, conn: psycopg.Connection, data: str, key: str | None) -> None:
        """Send a message to all consumers."""
        ...

    def send_batch(self, conn: psycopg.Connection, data: list[str], keys: list[str]) -> None:
        """Send messages to all consumers, from the client."""
        ...

    def receive_rest(self, conn: psycopg.Connection, consumer: int) -> Delivery:
        """Receive many messages, to empty the queue. This is not measured."""
        ...

    def ack(self, conn: psycopg.Connection, delivery: Delivery, consumer: int) -> int:
        """Acknowledge all of a delivery; returns how many messages that were."""
        ...

    def left(self, conn: psycopg.Connection, consumer: int) -> int:
        """How many messages of a consumer are not acknowledged, claimed ones included."""
        ...


class Side(Store, Protocol):
    """A queue.

    Attributes:
        one_call: whether a worker gives `done` to `receive`, in place of calling `ack`.
    """

    @property
    def one_call(self) -> bool: ...

    def fill(self, conn: psycopg.Connection, first: int, keys: list[str]) -> None:
        """Send a message for each key, numbered from `first`; the payload is made in the server."""
        ...

    def receive(
        self, conn: psycopg.Connection, size: int, consumer: int, done: Delivery | None
    ) -> Delivery:
        """Receive at most so many messages, for 30 s.

        Args:
            done: what to acknowledge in the same call; only where `one_call` is set.
        """
        ...


RECEIVE = "select * from pgqueue.receive(%s::text, %s::text, %s::int)"
RECEIVE_AND_ACK = "select * from pgqueue.receive(%s::text, %s::text, %s::int, p_ack => %s::bigint)"
DATA = 3
"""Which column of these the payload is."""

SEND_SINGLY = f"""
select count(pgqueue.send(%s, data, key)) from (select * from ({NUMBERED}) n order by i) n
"""
SEND_TOGETHER = f"""
select count(*) from (
    select array_agg(data order by i) as data, array_agg(key order by i) as keys from ({NUMBERED}) n
) n cross join lateral pgqueue.send_batch(%s, n.data, n.keys)
"""
LEFT = """
select pgqueue.consumer_backlog(c.consumer_id) + coalesce((
           select sum(message_count) from _pgqueue.unfinished(c.consumer_id)
           where state = 'claimed'), 0)::bigint
       + coalesce((select sum(message_count) from pgqueue.dead_messages d
                   where d.consumer_id = c.consumer_id), 0)::bigint
from pgqueue.consumers c join pgqueue.streams s using (stream_id) where s.name = %s and c.name = %s
"""


@dataclass(frozen=True)
class Ours:
    """A stream of spark-pgqueue and its consumers.

    Attributes:
        variant: what differs from the usual way, for its name.
        singly: filled with a publication for each message, as `send` makes them.
        notify: whether publications wake who waits.
    """

    variant: str = ""
    one_call: bool = False
    singly: bool = False
    notify: bool = True
    schema: str = "pgqueue"

    @property
    def name(self) -> str:
        return f"pgqueue, {self.variant}" if self.variant else "pgqueue"

    def install(self, conn: psycopg.Connection) -> None:
        schema.install(conn)

    def create(self, conn: psycopg.Connection, consumers: int, *, by_key: bool) -> None:
        run(
            conn,
            "select pgqueue.create_stream(%s, p_settings => jsonb_build_object('notify', %s))",
            (self.name, self.notify),
        )
        sql = "select pgqueue.create_consumer(%s, %s, p_start => 'earliest', p_ordering => %s)"
        for number in range(consumers):
            run(conn, sql, (self.name, f"c{number}", "key" if by_key else "none"))

    def drop(self, conn: psycopg.Connection) -> None:
        run(conn, "select pgqueue.drop_stream(%s)", (self.name,))

    def send(self, conn: psycopg.Connection, data: str, key: str | None) -> None:
        run(conn, "select pgqueue.send(%s::text, %s::text, %s::text)", (self.name, data, key))

    def send_batch(self, conn: psycopg.Connection, data: list[str], keys: list[str]) -> None:
        sql = "select * from pgqueue.send_batch(%s::text, %b::text[], %b::text[])"
        run(conn, sql, (self.name, data, keys))

    def fill(self, conn: psycopg.Connection, first: int, keys: list[str]) -> None:
        if self.singly:
            # In one transaction, so that nobody waits for 10,000 commits. Publications are rows all
            # the same, one for each call.
            run(conn, SEND_SINGLY, (self.name, first, keys))
        else:
            run(conn, SEND_TOGETHER, (first, keys, self.name))

    def receive(
        self, conn: psycopg.Connection, size: int, consumer: int, done: Delivery | None
    ) -> Delivery:
        if done is None:
            rows = run(conn, RECEIVE, (self.name, f"c{consumer}", size))
        else:
            rows = run(conn, RECEIVE_AND_ACK, (self.name, f"c{consumer}", size, done.handle))
        numbers = [number_of(row[DATA]) for row in rows]
        return Delivery(numbers, rows[0][0] if rows else None)

    def receive_rest(self, conn: psycopg.Connection, consumer: int) -> Delivery:
        return self.receive(conn, CHUNK, consumer, None)

    def ack(self, conn: psycopg.Connection, delivery: Delivery, consumer: int) -> int:
        return run(conn, "select pgqueue.ack(%s::bigint)", (delivery.handle,))[0][0]

    def left(self, conn: psycopg.Connection, consumer: int) -> int:
        return run(conn, LEFT, (self.name, f"c{consumer}"))[0][0]
