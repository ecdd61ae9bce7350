"""Plans that sessions made while a table was empty: they remain, and the table fills.

Of an empty table that vacuum has read, all indexes look equally good to the planner, and a session
keeps its generic plan until somebody analyzes the table.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.sql.cases import for_each
from tests.sql.cost import cost
from tests.sql.queue import *

pytestmark = pytest.mark.usefixtures("stream")

FEW, MANY = 500, 4_000
TABLES = ("newest_of_keys", "key_backlog", "key_tokens", "dead_messages", "dedup_keys",
          "completed_messages", "consumer_messages", "publications")  # fmt: skip


def empty(conn: Conn) -> None:
    for table in TABLES:
        conn.execute(f"vacuum analyze pgqueue.{table}".encode())


def batch(n: int, first: int) -> str:
    """A call that sends so many messages, each with a key of its own."""
    keys = f"array(select 'k' || i from generate_series({first}, {first + n - 1}) i)"
    return f"select count(*) from pgqueue.send_batch('s', array_fill('x'::text, '{{{n}}}'), {keys})"


def each_key(conn: Conn, n: int) -> float:
    """Blocks for a key of the second call, whose plans are those of the first one."""
    cost(conn, batch(n, 0))
    return cost(conn, batch(n, n)) / n


def each_screened(conn: Conn, n: int) -> float:
    cost(conn, batch(n, 0))
    cost(conn, "select from pgqueue.claim('s', 'c', 1)")
    cost(conn, batch(n, n))
    return cost(conn, "select from pgqueue.claim('s', 'c', 1)") / n


@for_each("measured", ["per_key_capacity", "per_key_latest"])
def test_a_table_that_was_empty_costs_the_same_for_each_key(conn: Conn, measured: str) -> None:
    blocks = each_key if measured == "per_key_capacity" else each_screened
    settings: dict[str, Any] = {measured: 1 if measured == "per_key_capacity" else True}
    found = []
    for n in (FEW, MANY):
        conn.execute("discard plans")
        value(conn, "drop_stream", "s")
        empty(conn)
        value(conn, "create_stream", "s")
        consumer(conn, **settings)
        found.append(blocks(conn, n))
    few, many = found
    assert many <= few * 1.6 + 1, f"{few:.1f} blocks for each of {FEW} keys, {many:.1f} of {MANY}"
