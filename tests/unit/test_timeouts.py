"""Timeouts of a role or a database do not end what takes long: it would never be done."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from datetime import timedelta

import psycopg
import pytest
from psycopg.conninfo import make_conninfo
from pyspark.sql.types import StructType

import spark_pgqueue
from spark_pgqueue.client import Client
from spark_pgqueue.command_line import doctor
from spark_pgqueue.postgres import connection, schema
from spark_pgqueue.spark.options.sink import parse_sink
from spark_pgqueue.spark.sink.stream_writer import Staged, StreamWriter

SHORT, LONG = 0.3, 0.8


def hurried(url: str, seconds: float = SHORT) -> str:
    """The database, as for a role with all timeouts."""
    options = f"-c statement_timeout={seconds * 1000:.0f}"
    with connection.connect(url) as conn:
        if conn.info.server_version >= 170000:
            options += f" -c transaction_timeout={seconds * 1500:.0f}"
    return make_conninfo(url, options=options)


def slow_down(conn: psycopg.Connection, function: str, then: str = "") -> None:
    """Let a function take longer than the timeouts."""
    begin_with(conn, function, f"perform pg_sleep({LONG}); {then}")


def begin_with(conn: psycopg.Connection, function: str, statements: str) -> None:
    row = conn.execute("select pg_get_functiondef(%s::regproc)", [f"_pgqueue.{function}"])
    (text,) = row.fetchone() or ("",)
    assert "begin" in text
    conn.execute(text.replace("begin", f"begin {statements}", 1).encode())


@pytest.mark.all_versions
@pytest.mark.parametrize(
    ("function", "call"),
    [
        ("on_maintain", lambda queue: queue.maintain()),
        ("on_recover", lambda queue: queue.recover()),
        ("on_drop_consumer", lambda queue: queue.drop_consumer("s", "c")),
        ("on_drop_stream", lambda queue: queue.drop_stream("s")),
    ],
    ids=["maintain", "recover", "drop_consumer", "drop_stream"],
)
def test_calls_that_may_take_long_have_no_timeout(conn, queue, url, function, call):
    slow_down(conn, function)
    with spark_pgqueue.connect(hurried(url)) as hasty:
        call(hasty)
        with pytest.raises(psycopg.errors.QueryCanceled):
            hasty._statements.rows("select pg_sleep(10)")


TELL = "raise 'the timeout is %', current_setting('statement_timeout');"


def test_what_changes_any_number_of_messages_has_no_timeout(conn, queue, url):
    begin_with(conn, "check_isolation", TELL)
    with spark_pgqueue.connect(hurried(url)) as hasty:
        for call in (
            lambda: hasty.redrive("s", "c", max_messages=None),
            lambda: hasty.purge_dead("s", "c"),
            lambda: hasty.retry("s", "c"),
            lambda: hasty.seek("s", "c", "latest"),
            lambda: hasty.replay("s", "c", "earliest"),
        ):
            with pytest.raises(psycopg.Error, match="the timeout is 0"):
                call()


def test_the_commit_of_a_sink_has_no_timeout(conn, queue, url):
    """A batch may write any number of rows, and Spark would repeat it each time."""
    begin_with(conn, "check_batch", TELL)
    options = parse_sink({"url": hurried(url), "stream": "s"}, streaming=True)
    writer = StreamWriter(options, StructType().add("data", "string"), begins=False)
    staged = Staged("a query", (), 0, (), "a query")
    with pytest.raises(psycopg.Error, match="the timeout is 0"):
        writer.publish([staged], 0)


def test_what_doctor_reads_may_take_long(conn, url):
    slow_down(conn, "numbers")
    found = {check.name: check.status for check in doctor._postgres(hurried(url))}
    assert found["numbers"] == "ok"


@pytest.mark.all_versions
def test_neither_installing_nor_removing_has_a_timeout(empty_url):
    found = []
    with connection.connect(hurried(empty_url, 60)) as conn:

        def note():
            row = conn.execute("select current_setting('statement_timeout')").fetchone()
            found.append(row and row[0])

        for name in ("install.sql", "uninstall.sql"):
            with conn.transaction():
                schema.execute(conn, name, frozenset(), note)
    assert found[0] == "1min", "before the first file"
    assert set(found[1:]) == {"0"}


@pytest.mark.parametrize("within", [False, True], ids=["", "in a transaction"])
def test_the_callers_connection_keeps_its_timeouts(conn, url, within):
    slow_down(conn, "on_maintain")
    with connection.connect(hurried(url)) as theirs:
        client = Client(theirs)
        with (
            pytest.raises(psycopg.errors.QueryCanceled),
            client.transaction() if within else nullcontext(),
        ):
            client.maintain()
        row = theirs.execute("select current_setting('statement_timeout')").fetchone()
        assert row == ("300ms",)


def test_another_thread_has_no_part_in_the_transaction_of_a_long_call(conn, queue, url):
    """It may wait for a message, and what it does stays if that call fails."""
    queue.send("s", "x")
    slow_down(conn, "on_maintain", "raise 'maintain fails';")
    with spark_pgqueue.connect(url) as shared, ThreadPoolExecutor(1) as pool:
        shared.streams()  # connects
        failing = pool.submit(shared.maintain)
        time.sleep(LONG / 2)
        assert shared.receive("s", "c", wait=timedelta(seconds=5)) is not None
        with pytest.raises(Exception, match="maintain fails"):
            failing.result(10)
    assert queue.stats()[0].claims == 1
