"""The queue's functions as Python calls, thin enough to be read as SQL."""

from __future__ import annotations

from typing import Any

import psycopg
from psycopg import sql
from psycopg.rows import namedtuple_row


def call(conn: psycopg.Connection, function: str, *args: Any, **named: Any) -> list[Any]:
    """Call `pgqueue.<function>` and return its rows as named tuples."""
    arguments = [sql.Placeholder() for _ in args] + [
        sql.SQL("{} => {}").format(sql.Identifier(name), sql.Placeholder()) for name in named
    ]
    query = sql.SQL("select * from {}({})").format(
        sql.Identifier("pgqueue", function), sql.SQL(", ").join(arguments)
    )
    cur = conn.cursor(row_factory=namedtuple_row)
    return cur.execute(query, [*args, *named.values()]).fetchall()


def value(conn: psycopg.Connection, function: str, *args: Any, **named: Any) -> Any:
    """Call `pgqueue.<function>` and return its one value; None for no row."""
    rows = call(conn, function, *args, **named)
    return rows[0][0] if rows else None


def one(conn: psycopg.Connection, query: Any, *args: Any) -> Any:
    """The first value that a query returns."""
    row = conn.execute(query, args or None).fetchone()
    return None if row is None else row[0]


def claim_of(rows: list[Any]) -> int:
    """The claim of what `receive` returned."""
    (claim_id,) = {row.claim_id for row in rows}
    return claim_id


def seqs_of(rows: list[Any]) -> list[int]:
    """The sequence numbers of what `receive` returned, in its order."""
    return [row.seq for row in rows]


def acked(conn: psycopg.Connection, stream: str, consumer: str, size: int = 1000) -> list[int]:
    """Receive and acknowledge everything that can be had; returns it in the order of delivery."""
    got: list[int] = []
    while rows := call(conn, "receive", stream, consumer, size):
        got += seqs_of(rows)
        value(conn, "ack", claim_of(rows))
    return got
