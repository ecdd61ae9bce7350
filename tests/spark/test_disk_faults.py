"""The disk of the database is full for a while, under a query that copies."""

from __future__ import annotations

import errno
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tests.disk import Disk, a_disk
from tests.spark.conftest import Queue, wait_until

pytestmark = [
    *(pytest.mark.spark, pytest.mark.slow, pytest.mark.longer, pytest.mark.timeout(600)),
]


@pytest.fixture
def disk(servers_home: Path) -> Iterator[Disk]:
    with a_disk(servers_home / "spark-disk") as made:
        yield made


@pytest.mark.parametrize("full", ["/base/", "pg_wal"])
@pytest.mark.promise(
    "fault: the disk of the tables is full", "fault: tables cannot be written or read"
)
def test_a_query_waits_for_room_on_a_full_disk_and_copies_each_message_once(
    disk: Disk, spark: SparkSession, tmp_path: Path, full: str
) -> None:
    """A full disk of the log ends Postgres: somebody starts it again once there is room."""
    queue = Queue(disk.url, tmp_path, spark)
    queue.create("in", "c", ordering="key")
    queue.create("out")
    queue.send("in", 1, 600)
    frame = queue.load("in", "c", maxMessagesPerTrigger=50, visibilityTimeout="5 s")
    query = queue.publish(frame.select("key", "data"), "out", available_now=False)
    wait_until(lambda: len(queue.sent("out")) >= 100, query)
    with disk.failing("write", errno.ENOSPC, full):
        wait_until(lambda: "No space left on device" in disk.said(), query)
        time.sleep(2)
    queue.send("in", 601, 700)
    wait_until(lambda: queue.backlog("in", "c") == 0, query, 120)
    query.stop()
    assert sorted(map(int, queue.sent("out"))) == list(range(1, 701))
