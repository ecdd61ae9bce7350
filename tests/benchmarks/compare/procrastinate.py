"""procrastinate, by its functions, called with the statements of its own client."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import psycopg

from tests.benchmarks.compare.sides import Delivery, number_of, payload
from tests.benchmarks.harness import run

ID, ARGS = 0, 6
"""Which columns of a fetched job the number and the payload are."""

# What is not measured goes in one statement.
FETCH_REST = """
update procrastinate_jobs set status = 'doing', worker_id = %s where status = 'todo'
returning id, args
"""
FINISH_REST = """
select count(*) from (
    select procrastinate_finish_job_v1(id, 'succeeded', false) from unnest(%s::bigint[]) id) f
"""


@dataclass(frozen=True)
class Procrastinate:
    """Jobs of one task, whose arguments are the payload. A worker fetches one at a time.

    Finished jobs are kept, as its workers do unless they are asked to delete them. Its functions
    name no schema, so they are in `public`.
    """

    name: str = "procrastinate"
    one_call: bool = False
    schema: str = "public"

    def install(self, conn: psycopg.Connection) -> None:
        from procrastinate.schema import SchemaManager

        if run(conn, "select to_regclass('procrastinate_jobs')")[0][0] is None:
            run(conn, SchemaManager.get_schema())

    def create(self, conn: psycopg.Connection, consumers: int, *, by_key: bool) -> None:
        """Nothing: a queue is a name in its jobs."""

    def drop(self, conn: psycopg.Connection) -> None:
        # Not the workers, whose numbers the sessions keep.
        tables = "procrastinate_jobs, procrastinate_events, procrastinate_periodic_defers"
        run(conn, f"truncate {tables}")

    def send(self, conn: psycopg.Connection, data: str, key: str | None) -> None:
        run(conn, statement("defer_jobs"), {"jobs": [job(data)]})

    def send_batch(self, conn: psycopg.Connection, data: list[str], keys: list[str]) -> None:
        run(conn, statement("defer_jobs"), {"jobs": [job(each) for each in data]})

    def fill(self, conn: psycopg.Connection, first: int, keys: list[str]) -> None:
        self.send_batch(conn, [payload(first + each) for each in range(len(keys))], keys)

    def receive(
        self, conn: psycopg.Connection, size: int, consumer: int, done: Delivery | None
    ) -> Delivery:
        values = {"queues": None, "worker_id": worker_of(conn)}
        ((*found,),) = run(conn, statement("fetch_job"), values)
        if found[ID] is None:
            return Delivery([], None)
        return Delivery([number_of(found[ARGS])], [found[ID]])

    def receive_rest(self, conn: psycopg.Connection, consumer: int) -> Delivery:
        rows = run(conn, FETCH_REST, (worker_of(conn),))
        return Delivery([number_of(args) for _, args in rows], [number for number, _ in rows])

    def ack(self, conn: psycopg.Connection, delivery: Delivery, consumer: int) -> int:
        if len(delivery.handle) > 1:
            return run(conn, FINISH_REST, (delivery.handle,))[0][0]
        values = {"job_id": delivery.handle[0], "status": "succeeded", "delete_job": False}
        run(conn, statement("finish_job"), values)  # raises where it does not find the job
        return 1

    def left(self, conn: psycopg.Connection, consumer: int) -> int:
        sql = "select count(*) from procrastinate_jobs where status in ('todo', 'doing')"
        return run(conn, sql)[0][0]


@cache
def statement(name: str) -> str:
    """A statement of its client."""
    from procrastinate.sql import queries

    return queries[name]


def job(data: str) -> tuple[Any, ...]:
    """What its client makes of a call of `defer`: a JobToDefer."""
    return ("default", "compare", 0, None, None, data, None)


@cache
def worker_of(conn: psycopg.Connection) -> int:
    """The number of the worker that a session is."""
    return run(conn, statement("register_worker"))[0][0]
