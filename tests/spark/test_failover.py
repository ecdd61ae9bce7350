"""The primary is killed, and its standby promoted, under queries; see `tests/sql/test_failover.py`.

The url of source and sink names both servers, with target_session_attrs=read-write.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from spark_pgqueue.postgres.connection import connect
from tests.failover import Pair, a_pair
from tests.spark.conftest import Queue, wait_until

pytestmark = [
    *(pytest.mark.spark, pytest.mark.slow, pytest.mark.longer, pytest.mark.timeout(300)),
]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """A primary and its standby."""
    with a_pair() as servers:
        yield servers


@pytest.fixture
def both(pair: Pair, spark: SparkSession, tmp_path: Path) -> Iterator[Queue]:
    """The database of the pair, with the streams in and out, and the consumer c of in."""
    queue = Queue(pair.url, tmp_path, spark)
    queue.create("in", "c", ordering="key")
    queue.create("out")
    yield queue
    for query in spark.streams.active:
        query.stop()


def copy(queue: Queue) -> StreamingQuery:
    """A query from in to out, in small batches, that goes on."""
    frame = queue.load("in", "c", maxMessagesPerTrigger=50, visibilityTimeout="5 s")
    return queue.publish(frame.select("key", "data"), "out", available_now=False)


@pytest.mark.promise("restore: synchronous failover")
def test_a_query_goes_on_after_a_synchronous_failover(pair: Pair, both: Queue) -> None:
    """The application is not started again, and each message is in the output once."""
    pair.synchronize()
    both.send("in", 1, 600)
    query = copy(both)
    wait_until(lambda: len(both.sent("out")) >= 100, query)
    pair.kill()
    time.sleep(1)
    pair.promote()
    both.send("in", 601, 700)
    wait_until(lambda: both.backlog("in", "c") == 0, query, 120)
    query.stop()
    assert sorted(map(int, both.sent("out"))) == list(range(1, 701))


@pytest.mark.promise("restore: asynchronous failover")
def test_after_an_asynchronous_failover_queries_are_told_that_they_are_ahead(
    pair: Pair, both: Queue, tmp_path: Path
) -> None:
    """The error is PQ005, with and without a consumer, and of a query that runs meanwhile too; and
    PQ010 of one whose source is no queue.
    """

    def from_file(number: int) -> None:
        (tmp_path / "files").mkdir(exist_ok=True)
        (tmp_path / "files" / f"{number}.txt").write_text(f"{number}")
        lines = both.spark.readStream.text(str(tmp_path / "files"))
        frame = lines.where("value <> '3'").withColumnRenamed("value", "data")
        both.publish(frame, "files", "of files").awaitTermination(60)

    def read_on() -> StreamingQuery:
        source = both.spark.readStream.format("pgqueue").option("url", both.url)
        source = source.options(stream="in", startingOffsets="earliest")
        return both.collect(source.load(), "offsets")

    both.create("files")
    for number in (1, 2, 3):
        from_file(number)
    both.send("in", 1, 100)
    query = copy(both)
    wait_until(lambda: both.backlog("in", "c") == 0, query)
    pair.follow()
    pair.cut()
    from_file(4)
    both.send("in", 101, 200)
    wait_until(lambda: len(both.sent("out")) >= 150, query)
    read_on().awaitTermination(60)
    assert len(both.data()) == 200
    pair.kill()
    pair.promote()
    with pytest.raises(StreamingQueryException, match="PQ005"):
        query.awaitTermination(100)
    with connect(pair.primary.url) as conn:
        conn.execute("select * from pgqueue.recover()")
    both.send("in", 1001, 1100)
    for again in (copy, lambda _: read_on()):
        with pytest.raises(StreamingQueryException, match="PQ005"):
            again(both).awaitTermination(100)
    assert sorted(map(int, both.sent("out"))) == list(range(1, 101))
    assert sorted({row.data for row in both.rows()}, key=int) == [f"{n}" for n in range(1, 201)]
    with pytest.raises(StreamingQueryException, match=r"batch 4 of query .* its batch 2"):
        from_file(5)
    assert both.sent("files") == ["1", "2"]
