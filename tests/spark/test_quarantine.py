"""A message that stops a query at each start: with quarantineAfter it ends as a dead letter."""

from __future__ import annotations

import os

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame
from pyspark.sql.functions import udf

from tests.spark.conftest import Queue

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]


def with_poison(frame: DataFrame, poison: str, how: str) -> DataFrame:
    """The messages of a frame, through a function that fails at one of them."""

    def work(data):
        if data == poison and how == "kill":
            os.kill(os.getpid(), 9)
        if data == poison:
            raise ValueError("no such customer")
        return data

    return frame.select("key", udf(work, "string")("data").alias("data"))


def restart_until_it_ends(queue: Queue, frame: DataFrame, at_most: int) -> int:
    """As a supervisor does; returns how often it failed."""
    for failures in range(at_most + 1):
        try:
            assert queue.publish(frame, "out").awaitTermination(120)
        except StreamingQueryException as error:
            assert "customer" in str(error) or "crashed" in str(error)  # noqa: PT017
        else:
            return failures
    raise AssertionError(f"it failed {at_most} times, and goes on failing")


@pytest.mark.parametrize(
    ("n", "after", "ordering", "how", "at_most"),
    [
        (2, 1, "key", "raise", 2),
        pytest.param(20, 2, "stream", "kill", 7, marks=pytest.mark.longer),
    ],
)
@pytest.mark.promise("guarantee: Deliveries to Spark", "checkpoints: The whole way")
def test_a_query_gets_past_a_message_that_stops_it(
    queue: Queue, n: int, after: int, ordering: str, how: str, at_most: int
):
    """All others are processed once, into a stream of the same database."""
    queue.create("in", "c", ordering=ordering)
    queue.create("out")
    queue.send("in", 1, n)
    poison = str(n * 2 // 3)
    frame = with_poison(queue.load("in", "c", quarantineAfter=after), poison, how)
    assert after < restart_until_it_ends(queue, frame, at_most)
    assert queue.sent("out") == sorted(str(i) for i in range(1, n + 1) if str(i) != poison)
    assert queue.backlog("in", "c") == 0
    dead = queue.sql("select data, reason, error from pgqueue.read_dead('in', 'c')")
    ((data, reason, error),) = dead
    assert (data, reason) == (poison, "poison")
    assert "but never finished" in error


@pytest.mark.promise("checkpoints: The whole way")
def test_a_batch_that_foreach_batch_has_published_is_not_bisected(queue: Queue, fails):
    """Its write is skipped in a replay; the other half would be another batch, published again."""
    queue.create("in", "c")
    queue.create("out")
    queue.send("in", 1, 4)
    poison = {"4"}

    def publish_then_work(batch: DataFrame, batch_id: int) -> None:
        queue.write(batch.select("data"), "out", txnAppId="a", txnVersion=str(batch_id))
        if poison & {row.data for row in batch.collect()}:
            raise RuntimeError("no such customer")

    frame = queue.load("in", "c", quarantineAfter=1)
    for _ in range(3):
        assert "no such customer" in fails(queue.collect(frame, each=publish_then_work))
        assert queue.sent("out") == ["1", "2", "3", "4"]
    poison.clear()
    queue.collect(frame, each=publish_then_work).awaitTermination()
    assert queue.sent("out") == ["1", "2", "3", "4"]
    assert queue.backlog("in", "c") == 0
