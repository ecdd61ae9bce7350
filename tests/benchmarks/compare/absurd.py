"""absurd, by the SQL that its command ships, called with the statements of its client."""

from __future__ import annotations

from dataclasses import dataclass

import psycopg

from tests.benchmarks.compare.sides import CHUNK, NUMBERED, Delivery, number_of
from tests.benchmarks.harness import run

TIMEOUT = 30
"""Seconds that a claim is for."""

RUN, PARAMS = 0, 4
"""Which columns of a claim the number of the run and the payload are."""

QUEUE = "compare"
OPTIONS = '{"max_attempts": 5}'
"""What its client sends where nothing is set."""

SPAWN = "select task_id, run_id, attempt from absurd.spawn_task(%s, %s, %s, %s)"
CLAIM = (
    "select run_id, task_id, attempt, task_name, params, retry_strategy, max_attempts,"
    " headers, wake_event, event_payload from absurd.claim_task(%s, %s, %s, %s)"
)
COMPLETE = "select absurd.complete_run(%s, %s, %s)"

# What is not measured goes in one statement.
FILL = f"""
select count(*) from (select data from ({NUMBERED}) n order by i) n
cross join lateral absurd.spawn_task('{QUEUE}', 'compare', n.data::jsonb, '{OPTIONS}')
"""
COMPLETE_REST = f"""
select count(*) from (
    select absurd.complete_run('{QUEUE}', id, 'null') from unnest(%s::uuid[]) id) c
"""


@dataclass(frozen=True)
class Absurd:
    """Tasks of one step. They are spawned one by one, claimed together, and completed one by one.

    Completed ones are kept until its cleanup.
    """

    name: str = "absurd"
    one_call: bool = False
    schema: str = "absurd"

    def install(self, conn: psycopg.Connection) -> None:
        from absurdctl import BUNDLED_SCHEMA_SQL

        if not run(conn, "select 1 from pg_namespace where nspname = 'absurd'"):
            run(conn, BUNDLED_SCHEMA_SQL)

    def create(self, conn: psycopg.Connection, consumers: int, *, by_key: bool) -> None:
        run(conn, "select absurd.create_queue(%s)", (QUEUE,))

    def drop(self, conn: psycopg.Connection) -> None:
        run(conn, "select absurd.drop_queue(%s)", (QUEUE,))

    def send(self, conn: psycopg.Connection, data: str, key: str | None) -> None:
        run(conn, SPAWN, (QUEUE, "compare", data, OPTIONS))

    def send_batch(self, conn: psycopg.Connection, data: list[str], keys: list[str]) -> None:
        raise NotImplementedError("absurd spawns one task at a time")

    def fill(self, conn: psycopg.Connection, first: int, keys: list[str]) -> None:
        run(conn, FILL, (first, keys))

    def receive(
        self, conn: psycopg.Connection, size: int, consumer: int, done: Delivery | None
    ) -> Delivery:
        rows = run(conn, CLAIM, (QUEUE, f"worker {conn.info.backend_pid}", TIMEOUT, size))
        numbers = [number_of(row[PARAMS]) for row in rows]
        return Delivery(numbers, [row[RUN] for row in rows])

    def receive_rest(self, conn: psycopg.Connection, consumer: int) -> Delivery:
        rest = self.receive(conn, CHUNK, consumer, None)
        run(conn, COMPLETE_REST, (rest.handle,))
        return Delivery(rest.numbers, [])

    def ack(self, conn: psycopg.Connection, delivery: Delivery, consumer: int) -> int:
        for number in delivery.handle:
            run(conn, COMPLETE, (QUEUE, number, "null"))  # raises where it does not run
        return len(delivery.numbers)

    def left(self, conn: psycopg.Connection, consumer: int) -> int:
        sql = f"select count(*) from absurd.t_{QUEUE} where state <> 'completed'"
        return run(conn, sql)[0][0]
