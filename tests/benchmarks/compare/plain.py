"""The bound for sending: rows in a table that nobody reads."""

from __future__ import annotations

from dataclasses import dataclass

import psycopg

from tests.benchmarks.compare.sides import BEFORE, DIGITS, Delivery
from tests.benchmarks.harness import run

TABLE = """
create table plain.{table} (
    message_id  bigint      generated always as identity primary key,
    inserted_at timestamptz not null default now(),
    key         text,
    data        text        not null
)
"""
INSERT = "insert into plain.{table} (key, data) values (%s, %s) returning message_id"
INSERT_BATCH = """
insert into plain.{table} (key, data)
select * from unnest(%b::text[], %b::text[]) returning message_id
"""


@dataclass(frozen=True)
class Plain:
    """A table with a primary key.

    Attributes:
        by_copy: batches are sent by COPY, which returns no numbers.
    """

    by_copy: bool = False
    schema: str = "plain"

    @property
    def table(self) -> str:
        return "copied" if self.by_copy else "inserted"

    @property
    def name(self) -> str:
        return "COPY" if self.by_copy else "plain insert"

    def install(self, conn: psycopg.Connection) -> None:
        run(conn, "create schema if not exists plain")

    def create(self, conn: psycopg.Connection, consumers: int, *, by_key: bool) -> None:
        run(conn, TABLE.format(table=self.table))

    def drop(self, conn: psycopg.Connection) -> None:
        run(conn, f"drop table plain.{self.table}")

    def send(self, conn: psycopg.Connection, data: str, key: str | None) -> None:
        run(conn, INSERT.format(table=self.table), (key, data))

    def send_batch(self, conn: psycopg.Connection, data: list[str], keys: list[str]) -> None:
        if not self.by_copy:
            run(conn, INSERT_BATCH.format(table=self.table), (keys, data))
            return
        sql = f"copy plain.{self.table} (key, data) from stdin".encode()
        with conn.cursor() as cursor, cursor.copy(sql) as copy:
            for row in zip(keys, data, strict=True):
                copy.write_row(row)

    def receive_rest(self, conn: psycopg.Connection, consumer: int) -> Delivery:
        number = f"substr(data, {len(BEFORE) + 1}, {DIGITS})::bigint"
        sql = f"select message_id, {number} from plain.{self.table}"
        rows = run(conn, sql)
        return Delivery([row[1] for row in rows], [row[0] for row in rows])

    def ack(self, conn: psycopg.Connection, delivery: Delivery, consumer: int) -> int:
        sql = f"delete from plain.{self.table} where message_id = any(%s)"
        return conn.execute(sql.encode(), (delivery.handle,)).rowcount

    def left(self, conn: psycopg.Connection, consumer: int) -> int:
        return run(conn, f"select count(*) from plain.{self.table}")[0][0]
