"""How each side sends to three consumers, and how its workers get messages and settle them."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import NamedTuple, Protocol

import psycopg

from spark_pgqueue import Client
from spark_pgqueue.postgres import schema
from tests.benchmarks.compare.pgmq import READ, TIMEOUT, Pgmq, PgmqTopic, queue, topic
from tests.benchmarks.compare.rows import CLAIM, DATA, INSERT, Rows
from tests.benchmarks.compare.sides import Delivery, number_of
from tests.benchmarks.harness import run
from tests.benchmarks.hour.plan import (
    ANY_ORDER,
    BY_KEY,
    CONSUMERS,
    SECOND,
    SPARK,
    STREAM,
    WARM_UP,
    Plan,
)

AT_ONCE = 100
"""Messages that a worker asks for."""

PAUSE = 0.02
"""Seconds that a worker of a peer sleeps when it found nothing; ours waits for a notification."""


class Received(NamedTuple):
    """A message, and what a peer deletes it by."""

    number: int
    handle: int
    attempt: int


class Side(Protocol):
    """A system with three consumers.

    Attributes:
        schemas: all tables in them are the side's.
    """

    @property
    def schemas(self) -> tuple[str, ...]: ...

    def create(self, conn: psycopg.Connection, plan: Plan) -> None:
        """Make what is sent to and consumed from."""
        ...

    def send(
        self, conn: psycopg.Connection, data: list[str], keys: list[str | None], delay: int
    ) -> None:
        """Send one message, or several together, to all consumers."""
        ...

    def backlog(self, conn: psycopg.Connection) -> dict[str, int]:
        """Messages that are left to each consumer, delayed and claimed ones too."""
        ...


class Ours:
    """A stream with a retention, and the one that Spark writes to."""

    schemas = ("pgqueue", "_pgqueue")

    def __init__(self) -> None:
        self._client: Client | None = None

    def create(self, conn: psycopg.Connection, plan: Plan) -> None:
        schema.install(conn)
        client = Client(conn)
        keep = timedelta(seconds=plan.retention)
        settings = {"max_deliver_count": 5, "backoff_base": f"{2 * plan.share:g} s"}
        client.create_stream(STREAM, "json")
        client.set_retention(STREAM, keep_for=keep)
        client.create_consumer(STREAM, ANY_ORDER, settings=settings)
        client.create_consumer(STREAM, BY_KEY, ordering="key")
        client.create_consumer(STREAM, SPARK)
        if plan.spark:
            client.create_stream(SECOND)
            client.set_retention(SECOND, keep_for=keep)
            client.create_consumer(SECOND, SPARK)
            client.send(STREAM, "{}", key=WARM_UP, consumers=[SPARK])

    def send(
        self, conn: psycopg.Connection, data: list[str], keys: list[str | None], delay: int
    ) -> None:
        client = self._client = self._client or Client(conn)
        later = timedelta(seconds=delay) if delay else None
        if len(data) > 1:
            client.send_batch(STREAM, data, keys=keys, delay=later)
        else:
            client.send(STREAM, data[0], key=keys[0], delay=later)

    def backlog(self, conn: psycopg.Connection) -> dict[str, int]:
        sql = "select stream, consumer, backlog + claimed + dead from pgqueue.consumer_stats"
        return {
            consumer if stream == STREAM else f"{consumer}, written": count
            for stream, consumer, count in run(conn, sql)
        }


class PeerOfPgmq:
    """A queue of pgmq for each consumer, to which a topic sends."""

    schemas = ("pgmq",)
    _pgmq = PgmqTopic(consumers=len(CONSUMERS))

    def create(self, conn: psycopg.Connection, plan: Plan) -> None:
        self._pgmq.install(conn)
        self._pgmq.create(conn, len(CONSUMERS), by_key=False)

    def send(
        self, conn: psycopg.Connection, data: list[str], keys: list[str | None], delay: int
    ) -> None:
        place = topic(len(CONSUMERS))
        if len(data) > 1:
            sql = "select count(*) from pgmq.send_batch_topic(%s::text, %b::jsonb[], %s::int)"
            run(conn, sql, (place, data, delay))
        else:
            run(conn, "select pgmq.send_topic(%s::text, %s::jsonb, %s)", (place, data[0], delay))

    def backlog(self, conn: psycopg.Connection) -> dict[str, int]:
        return {name: Pgmq().left(conn, index) for index, name in enumerate(CONSUMERS)}

    def receive(self, conn: psycopg.Connection, consumer: int) -> list[Received]:
        rows = run(conn, READ % "read", (queue(consumer), TIMEOUT, AT_ONCE))
        return [Received(number_of(row[5]), row[0], row[1]) for row in rows]

    def ack(self, conn: psycopg.Connection, handles: list[int], consumer: int) -> int:
        return self._pgmq.ack(conn, Delivery(handles, handles), consumer)


LATER = """
with sent as (
    insert into {schema}.messages (data) select * from unnest(%b::text[]) returning message_id
)
insert into {schema}.deliveries (consumer_id, message_id, visible_at)
select consumer_id, message_id, now() + make_interval(secs => %s)
from sent cross join {schema}.consumers order by consumer_id, message_id
"""

TRIM = """
delete from {schema}.messages m
where message_id <= %s and not exists (
    select from {schema}.consumers c join {schema}.deliveries d using (consumer_id)
    where d.message_id = m.message_id)
"""


class PeerOfRows:
    """A row for each message, and for each message and consumer."""

    schemas = (Rows().schema,)
    _rows = Rows()

    def create(self, conn: psycopg.Connection, plan: Plan) -> None:
        self._rows.install(conn)
        self._rows.create(conn, len(CONSUMERS), by_key=False)

    def send(
        self, conn: psycopg.Connection, data: list[str], keys: list[str | None], delay: int
    ) -> None:
        if delay:
            run(conn, LATER.format(schema=self._rows.schema), (data, delay))
            return
        rows = "select * from unnest(%b::text[], %b::text[])"
        sql = INSERT.format(schema=self._rows.schema, rows=rows, key="null", result="count(*)")
        run(conn, sql, (keys, data))

    def backlog(self, conn: psycopg.Connection) -> dict[str, int]:
        return {name: self._rows.left(conn, index) for index, name in enumerate(CONSUMERS)}

    def receive(self, conn: psycopg.Connection, consumer: int) -> list[Received]:
        sql = CLAIM.format(schema=self._rows.schema, size=AT_ONCE)
        rows = run(conn, sql, (consumer,))
        return [Received(number_of(row[DATA]), row[0], row[3]) for row in rows]

    def ack(self, conn: psycopg.Connection, handles: list[int], consumer: int) -> int:
        return self._rows.ack(conn, Delivery(handles, handles), consumer)

    def trim(self, conn: psycopg.Connection, plan: Plan, stopped: Callable[[], bool]) -> None:
        """Delete messages that are old and done, as often as maintain is called."""
        seen: list[tuple[float, int]] = []
        of = self._rows.schema
        while not stopped():
            ((newest,),) = run(conn, f"select coalesce(max(message_id), 0) from {of}.messages")
            seen.append((time.time(), newest))
            old = [upto for at, upto in seen if at < time.time() - plan.retention]
            if old:
                run(conn, TRIM.format(schema=of), (old[-1],))
            time.sleep(plan.maintained)


SIDES: dict[str, Callable[[], Side]] = {"pgqueue": Ours, "rows": PeerOfRows, "pgmq": PeerOfPgmq}
