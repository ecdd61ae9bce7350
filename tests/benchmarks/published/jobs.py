"""The plain queue of these publications: a table of jobs, which workers lock and delete."""

from __future__ import annotations

from dataclasses import dataclass

import psycopg

from tests.benchmarks.compare.sides import CHUNK, NUMBERED, Delivery, number_of
from tests.benchmarks.harness import run

TABLE = """
create table {schema}.jobs (
    job_id bigint      generated always as identity primary key,
    run_at timestamptz not null default clock_timestamp(),
    status text        not null default 'pending',
    data   text        not null
);
create index on {schema}.jobs (status, run_at);
"""
NEXT = """
select job_id, data from {schema}.jobs where status = 'pending' order by run_at
limit {size} for update skip locked
"""
START = """
update {schema}.jobs set status = 'running'
where job_id = any(array(
    select job_id from {schema}.jobs where status = 'pending' order by run_at
    limit {size} for update skip locked))
returning job_id, data
"""
DELETE = "delete from {schema}.jobs where job_id = any(%s)"


@dataclass(frozen=True)
class Jobs:
    """A table of jobs with an index of what is pending, in the order of time.

    Attributes:
        by_update: a worker sets the state of a job, commits, and deletes the job after its work; or
            it holds the row's lock in a transaction as long as it works.
    """

    by_update: bool = False
    one_call: bool = False

    @property
    def name(self) -> str:
        return "jobs, by update" if self.by_update else "jobs, locked"

    @property
    def schema(self) -> str:
        return "jobs_by_update" if self.by_update else "jobs_locked"

    def install(self, conn: psycopg.Connection) -> None:
        run(conn, f"create schema if not exists {self.schema}")

    def create(self, conn: psycopg.Connection, consumers: int, *, by_key: bool) -> None:
        run(conn, TABLE.format(schema=self.schema))

    def drop(self, conn: psycopg.Connection) -> None:
        run(conn, f"drop table {self.schema}.jobs")

    def send(self, conn: psycopg.Connection, data: str, key: str | None) -> None:
        run(conn, f"insert into {self.schema}.jobs (data) values (%s)", (data,))

    def send_batch(self, conn: psycopg.Connection, data: list[str], keys: list[str]) -> None:
        run(conn, f"insert into {self.schema}.jobs (data) select unnest(%b::text[])", (data,))

    def fill(self, conn: psycopg.Connection, first: int, keys: list[str]) -> None:
        sql = f"insert into {self.schema}.jobs (data) select data from ({NUMBERED}) n order by i"
        run(conn, sql, (first, keys))

    def receive(
        self, conn: psycopg.Connection, size: int, consumer: int, done: Delivery | None
    ) -> Delivery:
        if not self.by_update:
            run(conn, "begin")
        rows = run(conn, (START if self.by_update else NEXT).format(schema=self.schema, size=size))
        if not self.by_update and not rows:
            run(conn, "commit")
        return Delivery([number_of(row[1]) for row in rows], [row[0] for row in rows])

    def receive_rest(self, conn: psycopg.Connection, consumer: int) -> Delivery:
        return self.receive(conn, CHUNK, consumer, None)

    def ack(self, conn: psycopg.Connection, delivery: Delivery, consumer: int) -> int:
        sql = DELETE.format(schema=self.schema)
        count = conn.execute(sql.encode(), (delivery.handle,)).rowcount
        if not self.by_update:
            run(conn, "commit")
        return count

    def left(self, conn: psycopg.Connection, consumer: int) -> int:
        return run(conn, f"select count(*) from {self.schema}.jobs")[0][0]
