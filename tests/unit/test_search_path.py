"""What others put into public is not found by what this package sends."""

from datetime import timedelta

import psycopg
import pytest

import spark_pgqueue
from spark_pgqueue.postgres import adbc, connection
from spark_pgqueue.spark.sink.stream_writer import reserve
from tests.sql.hijack import hijack

HIJACKED = "select lower(int8range(1, 2)), format('%s', 1)"


@pytest.fixture
def hijacked(url: str) -> str:
    """The url of a database with a public that lies in wait."""
    with connection.connect(url) as conn:
        hijack(conn, first=False)
        with pytest.raises(psycopg.Error, match="hijacked"):
            conn.execute(HIJACKED)
    return url


def test_the_client_finds_nothing_in_public(hijacked: str) -> None:
    with spark_pgqueue.connect(hijacked) as queue:
        queue.create_stream("s")
        queue.create_consumer("s", "c", start="earliest", ordering="key")
        queue.send("s", "x", key="k", headers={"h": "1"})
        queue.send_batch("s", ["y", "z"])
        claim = queue.receive("s", "c", 10, wait=timedelta(seconds=1))
        assert claim is not None
        assert claim.nack(delay=timedelta(0)) == 3
        assert [stats.ready + stats.waiting for stats in queue.stats("s")] == [3]
        assert len(queue.streams()) == len(queue.consumers("s")) == 1
        queue.maintain()
        queue.install()
        queue.drop_consumer("s", "c")
        queue.drop_stream("s")


def test_what_tasks_send_finds_nothing_in_public(hijacked: str) -> None:
    with spark_pgqueue.connect(hijacked) as queue:
        stream = queue.create_stream("s")
    for _ in range(2):
        with adbc.kept_connection(hijacked) as conn, conn.cursor() as cursor:
            assert adbc.call(cursor, HIJACKED) == [(1, "1")]
            assert len(reserve(cursor, stream, 3)) == 3
