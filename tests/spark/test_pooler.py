"""Source and sink behind a PgBouncer."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tests.pooler import MODES, pooled
from tests.spark.conftest import Queue, wait_until
from tests.spark.test_offset_source import load

pytestmark = [pytest.mark.spark, pytest.mark.longer]

SIZES = {"transaction": 4, "session": 40}
ADVISORY = """
select count(*) from pg_locks l join pg_database d on d.oid = l.database
where d.datname = current_database() and l.locktype = 'advisory'
"""


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.promise("guarantee: Poolers", "operations: PgBouncer 1.18")
def test_a_query_from_stream_to_stream_works_behind_a_pooler(
    url: str, spark: SparkSession, tmp_path: Path, mode: str
):
    """It reads by COPY, writes by COPY, goes on from its checkpoint, and finds what comes later. So
    does a query without a consumer.
    """
    direct = Queue(url, tmp_path, spark)
    direct.create("a", "c", ordering="key")
    direct.create("b")
    with pooled(url, mode, SIZES[mode]) as through:
        queue = Queue(through, tmp_path, spark)
        for first in (1, 2_001):
            direct.send("a", first, first + 1_999)
            frame = queue.load("a", "c", maxMessagesPerTrigger=600, minPartitions=4)
            assert queue.publish(frame.select("key", "data"), "b").awaitTermination(120)
        assert queue.sent("b") == sorted(map(str, range(1, 4_001)))
        assert direct.backlog("a", "c") == 0
        assert queue.collect(load(queue, "a"), "offsets").awaitTermination(120)
        assert sorted(queue.data()) == list(range(1, 4_001))
        queue.seen.clear()

        query = queue.collect(queue.load("a", "c"), "another", available_now=False)
        try:
            for number in range(4_001, 4_004):
                direct.send("a", number, number)
                wait_until(lambda number=number: number in queue.data(), query)
            # Locks of a transaction come and go; one of a session would stay.
            wait_until(lambda: direct.sql(ADVISORY) == [(0,)], query)
        finally:
            query.stop()
        assert sorted(queue.data()) == [4_001, 4_002, 4_003]
