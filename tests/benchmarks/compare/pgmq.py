"""pgmq, by the SQL that its Python package ships, and called with the statements of its client."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

import psycopg

from tests.benchmarks.compare.sides import CHUNK, NUMBERED, Delivery, number_of
from tests.benchmarks.harness import run

TIMEOUT = 30
"""Seconds that a message is invisible for."""

GROUP = "x-pgmq-group"
"""The header that its FIFO goes by."""

COLUMNS = "msg_id, read_ct, enqueued_at, last_read_at, vt, message, headers"
MESSAGE = 5
"""Which of these is the payload."""

READ = f"select {COLUMNS} from pgmq.%s(queue_name=>%%s::text, vt=>%%s::integer, qty=>%%s::integer)"
DELETE = "select pgmq.delete(queue_name=>%s::text, msg_id=>%s::bigint)"
DELETE_BATCH = "select * from pgmq.delete(queue_name=>%s::text, msg_ids=>%s::bigint[])"
SEND = "select * from pgmq.send(queue_name=>%s::text, msg=>%s::jsonb)"
SEND_TOPIC = "select pgmq.send_topic(routing_key=>%s::text, msg=>%s::jsonb)"
SEND_BATCH = "select * from pgmq.send_batch(queue_name=>%s::text, msgs=>%b::jsonb[])"
SEND_BATCH_TOPIC = "select * from pgmq.send_batch_topic(routing_key=>%s::text, msgs=>%b::jsonb[])"

FILL = f"""
select count(*) from (
    select array_agg(data::jsonb order by i) as data,
           array_agg(jsonb_build_object('{GROUP}', key) order by i) as headers
    from ({NUMBERED}) n
) n cross join lateral pgmq.send_batch(%s, n.data"""


def is_installed() -> bool:
    """Whether the package is there."""
    return find_spec("pgmq") is not None


def version() -> str:
    """The version of its SQL."""
    from pgmq.install import get_embedded_sql_version

    return get_embedded_sql_version()


@dataclass(frozen=True)
class Pgmq:
    """A queue of pgmq for each consumer; with several, messages go to them by a topic, in one call.

    Attributes:
        variant: how it is read where it is not `read`, for its name.
        by_key: read the heads of groups, which of its FIFO functions are the fastest.
    """

    variant: str = ""
    by_key: bool = False
    one_call: bool = False
    schema: str = "pgmq"

    @property
    def name(self) -> str:
        return f"pgmq, {self.variant}" if self.variant else "pgmq"

    def install(self, conn: psycopg.Connection) -> None:
        from pgmq.install import get_embedded_install_sql

        if run(conn, "select 1 from pg_namespace where nspname = 'pgmq'"):
            return
        with conn.transaction():
            run(conn, get_embedded_install_sql())

    def create(self, conn: psycopg.Connection, consumers: int, *, by_key: bool) -> None:
        for number in range(consumers):
            run(conn, "select pgmq.create(queue_name=>%s)", (queue(number),))
            if by_key:
                run(conn, "select pgmq.create_fifo_index(queue_name=>%s)", (queue(number),))
            if consumers > 1:
                sql = "select pgmq.bind_topic(pattern=>%s, queue_name=>%s)"
                run(conn, sql, (topic(consumers), queue(number)))

    def drop(self, conn: psycopg.Connection) -> None:
        sql = "select queue_name from pgmq.list_queues() where queue_name like 'compare_%'"
        for (name,) in run(conn, sql):
            run(conn, "select pgmq.drop_queue(queue_name=>%s)", (name,))

    def send(self, conn: psycopg.Connection, data: str, key: str | None) -> None:
        run(conn, SEND, (queue(0), data))

    def send_batch(self, conn: psycopg.Connection, data: list[str], keys: list[str]) -> None:
        run(conn, SEND_BATCH, (queue(0), data))

    def fill(self, conn: psycopg.Connection, first: int, keys: list[str]) -> None:
        headers = ", n.headers)" if self.by_key else ")"
        run(conn, FILL + headers, (first, keys, queue(0)))

    def receive(
        self, conn: psycopg.Connection, size: int, consumer: int, done: Delivery | None
    ) -> Delivery:
        function = "read_grouped_head" if self.by_key else "read"
        return received(run(conn, READ % function, (queue(consumer), TIMEOUT, size)))

    def receive_rest(self, conn: psycopg.Connection, consumer: int) -> Delivery:
        return received(run(conn, READ % "read", (queue(consumer), TIMEOUT, CHUNK)))

    def ack(self, conn: psycopg.Connection, delivery: Delivery, consumer: int) -> int:
        if len(delivery.handle) == 1:
            return int(run(conn, DELETE, (queue(consumer), delivery.handle[0]))[0][0])
        return len(run(conn, DELETE_BATCH, (queue(consumer), delivery.handle)))

    def left(self, conn: psycopg.Connection, consumer: int) -> int:
        return run(conn, f"select count(*) from pgmq.q_{queue(consumer)}")[0][0]


@dataclass(frozen=True)
class PgmqTopic(Pgmq):
    """The same for several consumers.

    Attributes:
        consumers: how many.
    """

    consumers: int = 1

    def send(self, conn: psycopg.Connection, data: str, key: str | None) -> None:
        run(conn, SEND_TOPIC, (topic(self.consumers), data))

    def send_batch(self, conn: psycopg.Connection, data: list[str], keys: list[str]) -> None:
        run(conn, SEND_BATCH_TOPIC, (topic(self.consumers), data))


def queue(consumer: int) -> str:
    return f"compare_{consumer}"


def topic(consumers: int) -> str:
    return f"compare.{consumers}"


def received(rows: list[tuple]) -> Delivery:
    """What was read; jsonb comes as text, since a worker's connection does not parse it."""
    numbers = [number_of(row[MESSAGE]) for row in rows]
    return Delivery(numbers, [row[0] for row in rows])
