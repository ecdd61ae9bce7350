"""A write of Spark's sink to a table, played step by step as the driver and its tasks do it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import psycopg
from psycopg import sql
from psycopg.types.json import Jsonb

from tests.sql.queue import Conn, call, value

_chunks = itertools.count(1)


def target(
    table: str, columns: dict[str, str], keys: Sequence[str] = (), **options: str
) -> dict[str, Any]:
    """What the driver hands to SQL: columns by name, with Spark's types; sequence_by and so on."""
    named = [{"name": name, "type": type_} for name, type_ in columns.items()]
    return {"table": table, "columns": named, "merge_keys": list(keys) or None, **options}


class Write:
    """A try of a batch.

    Args:
        conn: of the writer; the driver checks the target.
        given: of `target`.
        sink: the sink's identity.
        batch: the number of the batch.
    """

    def __init__(self, conn: Conn, given: dict[str, Any], sink: str = "sink", batch: int = 0):
        self._conn, self._given, self._sink, self._batch = conn, given, sink, batch
        ((self.name, self.write_no),) = call(conn, "open_table", Jsonb(given))
        self.staged = ""
        self.chunks: list[int] = []
        self.rows = 0

    def stage(self, *rows: tuple[Any, ...], conn: Conn | None = None, wins: bool = True) -> Write:
        """A task copies rows.

        Args:
            rows: of the columns in their order.
            conn: of the task; else the driver's.
            wins: whether the task's message reaches the driver.
        """
        conn = conn or self._conn
        self.staged = value(
            conn, "open_table_write", self.write_no, self._sink, self._batch, Jsonb(self._given)
        )
        chunk = next(_chunks)
        names = [sql.Identifier(f"c{n}") for n, _ in enumerate(self._given["columns"], 1)]
        copy = sql.SQL("copy {} (chunk, {}) from stdin").format(
            sql.Identifier("pgqueue", self.staged), sql.SQL(", ").join(names)
        )
        with conn.cursor().copy(copy) as written:
            for row in rows:
                written.write_row((chunk, *row))
        if wins:
            self.chunks.append(chunk)
            self.rows += len(rows)
        return self

    def apply(self, conn: Conn | None = None) -> bool:
        """The driver's commit: whether this call did it."""
        return value(
            conn or self._conn, "apply_table_batch",
            *(self.write_no, self._sink, self._batch, self.name, self.chunks, self.rows),
        )  # fmt: skip

    def drop(self, conn: Conn | None = None) -> bool:
        """What follows the commit."""
        return value(conn or self._conn, "drop_table_write", self.write_no)


def write(conn: Conn, given: dict[str, Any], *rows: tuple[Any, ...], **which: Any) -> bool:
    """A whole batch: staged, applied, dropped; whether it was done."""
    one = Write(conn, given, **which).stage(*rows)
    done = one.apply()
    one.drop()
    return done


def content(conn: Conn, table: str, order: str = "1") -> list[tuple[Any, ...]]:
    """The rows of a table."""
    return [tuple(row) for row in conn.execute(f"select * from {table} order by {order}".encode())]


def staged_tables(conn: Conn) -> set[str]:
    """The tables of staged rows, and the writes that are noted."""
    found = conn.execute(
        "select relname from pg_class where relname like 'staged_rows%' union all "
        "select 'noted ' || write_no from pgqueue.table_writes"
    )
    return {row[0] for row in found}


def refusal(call_: Any) -> psycopg.Error:
    """The error of a call that must fail."""
    try:
        call_()
    except psycopg.Error as error:
        return error
    raise AssertionError("nothing was refused")
