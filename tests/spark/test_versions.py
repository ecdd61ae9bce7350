"""What holds with each version of PySpark, also with 4.0 and 4.1, which tell a source less.

`make matrix` runs these tests with all of them. See spark_pgqueue/guide/where-it-runs.md for what
differs.
"""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from contextlib import nullcontext
from pathlib import Path

import pyspark
import pytest
from pyspark import cloudpickle
from pyspark.sql import SparkSession

import spark_pgqueue
from spark_pgqueue.postgres.errors import PgQueueError
from spark_pgqueue.spark.platform.pyspark_compat import TELLS_START
from tests.processes import Child
from tests.spark.conftest import Queue
from tests.spark.test_checkpoint import await_backlog
from tests.spark.test_crash import Traffic, wait_for_more

pytestmark = [
    *(pytest.mark.spark, pytest.mark.slow, pytest.mark.longer, pytest.mark.timeout(1800)),
    pytest.mark.usefixtures("spark_environment"),
    pytest.mark.skipif(
        TELLS_START and "PGQUEUE_MATRIX" not in os.environ,
        reason="for `make matrix`: the other files have what the installed PySpark does",
    ),
]

COPY = """
    import sys, time
    from tests.sessions import session
    url, checkpoint, trigger = sys.argv[1:]
    spark = session()
    most = 200 if trigger == "stop" else 5_000

    def read(name, **options):
        source = spark.readStream.format("pgqueue").options(
            url=url, stream="in", maxMessagesPerTrigger=most, **options
        )
        return source.load().selectExpr("key", f"concat('{name} ', data) as data")

    rows = read("claimed", consumer="c", visibilityTimeout="5s", checkpointLocation=checkpoint)
    rows = rows.union(read("read", startingOffsets="earliest"))
    sink = rows.writeStream.format("pgqueue").options(
        url=url, stream="out", checkpointLocation=checkpoint
    )
    query = (sink.trigger(availableNow=True) if trigger == "now" else sink).start()
    print("started", flush=True)
    if trigger == "stop":
        while sum(each.numInputRows for each in query.recentProgress) < 400:
            time.sleep(0.1)
        query.stop()
    else:
        query.awaitTermination()
    print("done", flush=True)
"""


def test_everything_is_copied_once(url: str, tmp_path: Path):
    """By a source with a consumer and one without: with availableNow, killed, and stopped."""
    queue = Queue(url, tmp_path)
    queue.create("in", "c", ordering="key")
    queue.create("out")

    def application(trigger: str) -> Child:
        return Child(COPY, queue.url, queue.checkpoint(), trigger)

    def run(trigger: str) -> None:
        with application(trigger) as child:
            assert child.wait(240) == 0, child.output

    for first, last in ((1, 100), (101, 150)):
        queue.send("in", first, last)
        run("now")
        check(queue, last)
        await_backlog(queue, 0, "in")

    with Traffic(queue) as traffic:
        traffic.sent = 150
        with application("always") as child:
            wait_for_more(queue, child)
            time.sleep(random.uniform(0, 2))
            child.kill()
    run("now")  # in older versions that is only what was begun
    queue.send("in", traffic.sent + 1, traffic.sent + 1000)
    traffic.sent += 1000
    run("stop")
    with application("always") as child:
        child.wait_until(lambda: len(queue.sent("out")) >= 2 * traffic.sent, 300)
        child.kill()
    run("now")
    check(queue, traffic.sent)
    await_backlog(queue, 0, "in")


def check(queue: Queue, count: int) -> None:
    """Each message is there once from either source."""
    found = Counter(queue.sent("out"))
    for how in ("claimed", "read"):
        expected = {f"{how} {i}" for i in range(1, count + 1)}
        missing = len(expected - found.keys())
        assert not missing, f"{missing} of {count} were not {how}"
    assert max(found.values()) == 1, "a message was copied twice"
    assert len(found) == 2 * count


def sizes(queue: Queue) -> list[int]:
    return [len(queue.seen[batch]) for batch in sorted(queue.seen)]


def test_available_now_takes_one_batch_in_older_versions_and_a_failed_one_first(
    queue: Queue, fails
):
    queue.create("s", "c")
    queue.send("s", 1, 1000)
    frame = queue.load("s", "c", maxMessagesPerTrigger=400, checkpointLocation=queue.checkpoint())
    tried = []

    def fail(batch, batch_id):
        if batch_id == 1:
            tried.append(sorted(int(row.data) for row in batch.select("data").collect()))
            raise RuntimeError("the sink fails")

    if not TELLS_START:
        queue.collect(frame).awaitTermination()
        assert sizes(queue) == [400]
        await_backlog(queue, 600)
    fails(queue.collect(frame, each=fail))
    queue.send("s", 1001, 1010)
    for batches in ([400, 400, 210] if TELLS_START else [400, 400], [400, 400, 210]):
        queue.collect(frame).awaitTermination()
        assert sizes(queue) == batches
    assert sorted(int(row.data) for row in queue.seen[1]) == tried[0]
    assert sorted(queue.data()) == list(range(1, 1011))
    await_backlog(queue, 0)


RUNS = """
    import sys
    from tests.sessions import session
    url, checkpoint, trigger = sys.argv[1:]
    spark = session("local[2]")
    source = spark.readStream.format("pgqueue").options(url=url, stream="s", consumer="c")
    if trigger.endswith("told"):
        source = source.option("checkpointLocation", checkpoint)
    writer = source.load().writeStream.foreachBatch(
        lambda batch, batch_id: print("rows", batch.count(), flush=True)
    ).option("checkpointLocation", checkpoint)
    once = trigger.startswith("once")
    writer = writer.trigger(once=True) if once else writer.trigger(availableNow=True)
    writer.start().awaitTermination()
"""


@pytest.mark.parametrize("trigger", ["once"] if TELLS_START else ["once", "now"])
def test_a_run_that_cannot_acknowledge_its_batch_says_so(queue: Queue, trigger: str):
    """The trigger once never can, and availableNow in older versions: the next run does, which goes
    on from there. A source that is told where its checkpoint is can.
    """
    queue.create("s", "c")
    queue.send("s", 1, 10)
    can = trigger == "now" and TELLS_START
    with Child(RUNS, queue.url, queue.checkpoint(), trigger) as child:
        assert child.wait(240) == 0, child.output
        assert "rows 10" in child.output
        assert ("with the option checkpointLocation here" in child.output) == (not can)
    assert queue.backlog("s", "c") == (0 if can else 10)
    queue.send("s", 11, 30)
    with Child(RUNS, queue.url, queue.checkpoint(), trigger) as child:
        assert child.wait(240) == 0, child.output
        assert "rows 20" in child.output
    assert queue.backlog("s", "c") == (0 if can else 20)
    queue.send("s", 31, 33)
    with Child(RUNS, queue.url, queue.checkpoint(), trigger + ", told") as child:
        assert child.wait(240) == 0, child.output
        assert "rows 3" in child.output
        assert "with the option checkpointLocation here" not in child.output
    await_backlog(queue, 0)


def test_a_stream_is_read_to_its_end_at_first_in_older_versions(queue: Queue):
    """Where a new query begins, they do not say; later the limit of a batch holds."""
    queue.create("s")
    queue.send("s", 1, 30)
    load = queue.spark.readStream.format("pgqueue").option("url", queue.url).option("stream", "s")
    frame = load.option("startingOffsets", "earliest").option("maxMessagesPerTrigger", 10).load()
    queue.collect(frame).awaitTermination()
    first = [10, 10, 10] if TELLS_START else [30]
    assert sizes(queue) == first
    queue.send("s", 31, 45)
    for batches in ([10, 5] if TELLS_START else [10], [10, 5]):
        queue.collect(frame).awaitTermination()
        assert sizes(queue) == first + batches
    assert sorted(queue.data()) == list(range(1, 46))


def test_the_backlog_is_in_the_progress_but_for_older_versions(queue: Queue):
    queue.create("s", "c")
    queue.send("s", 1, 10)
    query = queue.collect(queue.load("s", "c", checkpointLocation=queue.checkpoint()))
    query.awaitTermination()
    assert queue.data() == list(range(1, 11))
    found = [str(source) for each in query.recentProgress for source in each.sources]
    assert found
    assert any("lagSeconds" in each for each in found) == TELLS_START


def test_an_installed_package_is_registered_again_and_shipped_but_by_4_0(spark: SparkSession):
    """PySpark 4.0 takes no other package for a format that it has found by itself."""
    spark_pgqueue.register(spark)
    is_refused = pyspark.__version__.startswith("4.0.")
    refused = pytest.raises(PgQueueError, match="found this package installed")
    try:
        with refused if is_refused else nullcontext():
            spark_pgqueue.register(spark, ship=True)
    finally:
        cloudpickle.unregister_pickle_by_value(spark_pgqueue)
        spark_pgqueue.register(spark)
