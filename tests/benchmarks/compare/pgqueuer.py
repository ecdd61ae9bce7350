"""PgQueuer, by the statements that its own `Queries` issue."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Any

import psycopg
from psycopg.rows import dict_row

from tests.benchmarks.compare.sides import CHUNK, Delivery, number_of, payload
from tests.benchmarks.harness import run

TIMEOUT = timedelta(seconds=30)
"""After which others may have a job, as its workers do."""

ENTRYPOINT = "compare"


@dataclass(frozen=True)
class PgQueuer:
    """Jobs of one entrypoint without limits. What is done goes to its log, a delivery in a call."""

    name: str = "PgQueuer"
    one_call: bool = False
    schema: str = "pgqueuer"

    def install(self, conn: psycopg.Connection) -> None:
        from pgqueuer.adapters.persistence.qb import QueryBuilderEnvironment

        if run(conn, "select to_regclass('pgqueuer.pgqueuer')")[0][0] is None:
            environment = QueryBuilderEnvironment(settings())
            run(conn, environment.build_install_query())
            run(conn, environment.build_optimize_autovacuum_query())

    def create(self, conn: psycopg.Connection, consumers: int, *, by_key: bool) -> None:
        """Nothing: a queue is a name in its jobs."""

    def drop(self, conn: psycopg.Connection) -> None:
        run(conn, "truncate pgqueuer.pgqueuer, pgqueuer.pgqueuer_log")

    def send(self, conn: psycopg.Connection, data: str, key: str | None) -> None:
        self.send_batch(conn, [data], [])

    def send_batch(self, conn: psycopg.Connection, data: list[str], keys: list[str]) -> None:
        jobs = len(data)
        raw(
            conn,
            builder().build_enqueue_query(),
            [0] * jobs,
            [ENTRYPOINT] * jobs,
            [each.encode() for each in data],
            [timedelta()] * jobs,
            [None] * jobs,
            ["null"] * jobs,
        )

    def fill(self, conn: psycopg.Connection, first: int, keys: list[str]) -> None:
        self.send_batch(conn, [payload(first + each) for each in range(len(keys))], keys)

    def receive(
        self, conn: psycopg.Connection, size: int, consumer: int, done: Delivery | None
    ) -> Delivery:
        query = builder().build_dequeue_query(
            batch_size=size,
            entrypoints=[ENTRYPOINT],
            concurrency_limits=[0],
            queue_manager_id=worker_of(conn),
            global_concurrency_limit=None,
            heartbeat_timeout=TIMEOUT,
        )
        rows = raw(conn, query.sql, *query.args)
        numbers = [number_of(row["payload"].decode()) for row in rows]
        return Delivery(numbers, [row["id"] for row in rows])

    def receive_rest(self, conn: psycopg.Connection, consumer: int) -> Delivery:
        return self.receive(conn, CHUNK, consumer, None)

    def ack(self, conn: psycopg.Connection, delivery: Delivery, consumer: int) -> int:
        done = len(delivery.handle)
        sql = builder().build_log_job_query()
        cursor = psycopg.RawCursor(conn)
        cursor.execute(sql.encode(), (delivery.handle, ["successful"] * done, [None] * done))
        return cursor.rowcount

    def left(self, conn: psycopg.Connection, consumer: int) -> int:
        return run(conn, "select count(*) from pgqueuer.pgqueuer")[0][0]


@cache
def settings() -> Any:
    """Where its tables are."""
    from pgqueuer.adapters.persistence.qb import DBSettings

    return DBSettings(db_schema="pgqueuer")


@cache
def builder() -> Any:
    """What makes its statements."""
    from pgqueuer.adapters.persistence.qb import QueryQueueBuilder

    return QueryQueueBuilder(settings())


@cache
def worker_of(conn: psycopg.Connection) -> uuid.UUID:
    """The name of the worker that a session is."""
    return uuid.uuid4()


def raw(conn: psycopg.Connection, sql: str, *values: Any) -> list[dict[str, Any]]:
    """The rows of a statement whose parameters are $1, as its driver calls it."""
    cursor = psycopg.RawCursor(conn, row_factory=dict_row)
    return cursor.execute(sql.encode(), values).fetchall()
