"""On a standalone cluster, with executors of its own that are killed, speculation and retries."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from tests.processes import Child
from tests.spark.conftest import Queue
from tests.spark.test_crash import wait_for_more

pytestmark = [
    *(pytest.mark.spark, pytest.mark.slow, pytest.mark.longer, pytest.mark.timeout(600)),
    pytest.mark.usefixtures("spark_environment"),
]

APPLICATION = """
    import random, sys, time
    import pyarrow as pa
    from tests.sessions import session
    url, checkpoint = sys.argv[1:]
    spark = session("local-cluster[2,1,512]", {
        "spark.executor.memory": "512m",
        "spark.task.maxFailures": "8",
        "spark.speculation": "true",
        "spark.speculation.interval": "50ms",
        "spark.speculation.quantile": "0.3",
        "spark.speculation.multiplier": "1.1",
        "spark.speculation.minTaskRuntime": "50ms",
    })

    def slowly(batches):  # some tasks are slow, and so tried a second time beside
        time.sleep(random.choice([0, 0, 0, 0.5]))
        yield from batches

    source = spark.readStream.format("pgqueue").options(
        url=url, stream="in", consumer="c", minPartitions=4, visibilityTimeout="5s",
        maxMessagesPerTrigger=400,
    )
    rows = source.load().select("key", "data").mapInArrow(slowly, "key string, data string")
    query = rows.writeStream.format("pgqueue").options(
        url=url, stream="out", checkpointLocation=checkpoint
    ).start()
    print("started", flush=True)
    query.awaitTermination()
"""


def test_a_cluster_with_a_killed_executor_loses_and_repeats_nothing(url: str, tmp_path: Path):
    queue = Queue(url, tmp_path)
    queue.create("in", "c")
    queue.create("out")
    queue.send("in", 1, 4000)
    with Child(APPLICATION, url, queue.checkpoint()) as child:
        wait_for_more(queue, child)
        time.sleep(random.uniform(0, 1.5))
        random.choice(child.descendants("CoarseGrainedExecutorBackend")).kill()
        child.wait_until(lambda: queue.backlog("in", "c") == 0, 300)
    assert queue.sent("out") == sorted(str(i) for i in range(1, 4001))
