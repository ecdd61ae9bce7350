"""What others made of tables and sequences of the queue keeps no message, and stops no maintain().

A role needs no right on a table to create a view of it, nor on a sequence to use it in a default.
"""

import random
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest

from spark_pgqueue.postgres import connection
from tests.conftest import user_of
from tests.sql import clock, internals
from tests.sql.queue import *
from tests.sql.table_writes import Write, staged_tables

pytestmark = pytest.mark.usefixtures("stream", "allowed_afterwards")

BYTES = """
    select coalesce(sum(pg_total_relation_size(oid)), 0)::bigint from pg_class
    where relnamespace = 'pgqueue'::regnamespace and relkind = 'r' and relname ~ %s"""


@pytest.fixture
def analyst(conn: Conn, new_role: Callable[..., str]) -> Iterator[Conn]:
    """A role that may look at the views of the queue, and create its own."""
    url = new_role("observer")
    conn.execute(f"create schema mine authorization {user_of(url)}".encode())
    with connection.connect(url) as session:
        yield session


def bytes_of(conn: Conn, tables: str = "^messages_1($|_)") -> int:
    """What tables with such names take on the disk."""
    return one(conn, BYTES, tables)


def send_much(conn: Conn) -> None:
    send_all(conn, [random.randbytes(2000).hex() for _ in range(300)])


def trim_all(conn: Conn) -> None:
    """Acknowledge all messages, and maintain until they are old."""
    acked(conn, "s", "c")
    for _ in range(3):
        clock.pass_time(conn, timedelta(hours=1))
        maintain(conn, 20)


def test_a_view_of_a_stream_does_not_keep_its_messages(conn: Conn, analyst: Conn) -> None:
    """It follows the table, which becomes a segment."""
    analyst.execute("create view mine.v as select * from pgqueue.messages_1")
    consumer(conn)
    value(conn, "set_retention", "s", p_done=True)
    maintain(conn)
    for _ in range(2):
        send_much(conn)
        assert bytes_of(conn) > 1e6
        with warned(conn) as said:
            trim_all(conn)
        assert bytes_of(conn) < 1e6 / 5
        assert one(conn, "select count(*) from pgqueue.messages") == 0
        assert all("cannot drop table" in each and "view mine.v" in each for each in said)
        assert said, "the log names the view"
    (kept,) = internals.rows(conn, "select * from pgqueue.stream_retention")
    assert kept.bytes < 1e6 / 5
    assert kept.held_by == []
    tables = "select count(*) from pg_inherits where inhparent = 'pgqueue.messages_1'::regclass"
    assert one(conn, tables) <= 5, "its segment is no partition any more"
    assert call(conn, "numbers_behind") == []
    analyst.execute("drop view mine.v")
    with warned(conn) as said:
        maintain(conn, 20)
    assert said == []
    assert one(conn, "select to_regclass('pgqueue.messages_1_1')") is None
    assert one(conn, "select count(*) from pgqueue.segments where emptied") == 0


@pytest.mark.parametrize("segments", [False, True], ids=["one table", "segments"])
@pytest.mark.parametrize(
    "what",
    ["view mine.v as select * from pgqueue.messages_1",
     "table mine.v (id bigint default nextval('pgqueue.seq_1'))",
     pytest.param("table mine.v (id bigint default nextval('pgqueue.publication_1'))",
                  marks=pytest.mark.longer)],
)  # fmt: skip
def test_what_depends_on_a_dropped_stream_keeps_no_space(
    conn: Conn, analyst: Conn, what: str, segments: bool
) -> None:
    analyst.execute(f"create {what}".encode())
    consumer(conn)
    if segments:
        value(conn, "set_retention", "s", p_done=True)
        send_much(conn)
        trim_all(conn)
    send_much(conn)
    assert bytes_of(conn) > 1e6
    value(conn, "create_stream", "other")
    value(conn, "drop_stream", "s")
    for _ in range(2):
        with warned(conn) as said:
            maintain(conn, 20)
        assert len(said) == 1
        assert "mine.v" in said[0]
        assert bytes_of(conn) < 1e6 / 5
        assert one(conn, "select count(*) from pgqueue.publications") == 0
    assert call(conn, "numbers_behind") == []
    value(conn, "recover")
    assert value(conn, "send", "other", "x") == 1
    analyst.execute(f"drop {what.split()[0]} mine.v".encode())
    with warned(conn) as said:
        maintain(conn, 20)
    assert said == []
    assert internals.count(conn, "dropped_streams") == 0
    left = "select count(*) from pg_class where relname ~ '^(messages|seq|publication)_1($|_)'"
    assert one(conn, left) == 0


def test_a_default_of_others_keeps_one_sequence_of_a_dropped_consumer(
    conn: Conn, analyst: Conn
) -> None:
    """And not those of other consumers."""
    for name in "abc":
        consumer(conn, name, max_backlog=10)
    left = "select array_agg(relname::text) from pg_class where relname ~ '^backlog_'"
    sequences = one(conn, left)
    assert len(sequences) == 3
    kept = sequences[0]
    analyst.execute(f"create table mine.t (id int default nextval('pgqueue.{kept}'))".encode())
    for name in "abc":
        value(conn, "drop_consumer", "s", name)
    with warned(conn) as said:
        maintain(conn, 20)
    assert one(conn, left) == [kept]
    assert "mine.t" in said[0]
    analyst.execute("drop table mine.t")
    maintain(conn)
    assert one(conn, left) is None


def test_a_view_of_staged_rows_does_not_keep_them(
    conn: Conn, analyst: Conn, bills: dict[str, Any]
) -> None:
    """Of a killed write, and of one that is over."""
    row = (1, "1.00", 1, False)
    killed, done = (Write(conn, bills, sink=name).stage(*[row] * 500) for name in ("killed", "b"))
    for each in (killed, done):
        analyst.execute(
            f"create view mine.{each.staged} as select * from pgqueue.{each.staged}".encode()
        )
    assert bytes_of(conn, "^staged_rows") > 60_000
    internals.age_writes(conn, [killed.write_no], "2 days")
    with warned(conn) as said:
        maintain(conn)
        assert done.drop()
        maintain(conn)
    assert len(said) == 2, "once a day, or an hour"
    assert bytes_of(conn, "^staged_rows") < 40_000  # empty, with their indexes
    analyst.execute(f"drop view mine.{killed.staged}, mine.{done.staged}".encode())
    internals.age_writes(conn, [killed.write_no, done.write_no], "2 days")
    maintain(conn)
    assert staged_tables(conn) == set()
