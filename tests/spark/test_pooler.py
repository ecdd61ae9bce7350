"""Source and sink behind a PgBouncer."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tests.pooler import MODES, pooled
from tests.spark.conftest import Queue, wait_until

pytestmark = [pytest.mark.spark, pytest.mark.longer]

SIZES = {"transaction": 4, "session": 40}
ADVISORY = """
select count(*) from pg_locks l join pg_database d on d.oid = l.database
where d.datname = current_database() and l.locktype = 'advisory'
"""


@pytest.mark.parametrize("mode", MODES)
def test_a_query_from_stream_to_stream_works_behind_a_pooler(
    url: str, spark: SparkSession, tmp_path: Path, mode: str
):
    """It reads by COPY, writes by COPY, goes on from its checkpoint, and finds what comes later."""
    direct = Queue(url, tmp_path, spark)
    direct.create("a", "c", ordering="key")
    direct.create("b")
    with pooled(url, mode, SIZES[mode]) as through:
        queue = Queue(through, tmp_path, spark)
        for first in (1, 10_001):
            direct.send("a", first, first + 9_999)
            frame = queue.load("a", "c", maxMessagesPerTrigger=3_000, minPartitions=4)
            assert queue.publish(frame.select("key", "data"), "b").awaitTermination(120)
        assert queue.sent("b") == sorted(map(str, range(1, 20_001)))
        assert direct.backlog("a", "c") == 0

        query = queue.collect(queue.load("a", "c"), "another", available_now=False)
        try:
            for number in range(20_001, 20_004):
                direct.send("a", number, number)
                wait_until(lambda number=number: number in queue.data(), query)
            # Locks of a transaction come and go; one of a session would stay.
            wait_until(lambda: direct.sql(ADVISORY) == [(0,)], query)
        finally:
            query.stop()
        assert sorted(queue.data()) == [20_001, 20_002, 20_003]


@pytest.mark.parametrize("mode", MODES)
def test_a_stream_without_a_consumer_is_read_behind_a_pooler(
    url: str, spark: SparkSession, tmp_path: Path, mode: str
):
    direct = Queue(url, tmp_path, spark)
    direct.create("a")
    direct.send("a", 1, 5_000)
    with pooled(url, mode, SIZES[mode]) as through:
        queue = Queue(through, tmp_path, spark)
        reader = spark.readStream.format("pgqueue").option("url", through).option("stream", "a")
        frame = reader.option("startingOffsets", "earliest").load()
        assert queue.collect(frame).awaitTermination(120)
    assert sorted(queue.data()) == list(range(1, 5_001))
