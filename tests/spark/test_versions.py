"""Source and sink with the older versions of PySpark: exactly once, whatever stops them.

Each version needs an interpreter that has it, with what this package needs: PGQUEUE_PYSPARK_4_0
and PGQUEUE_PYSPARK_4_1 name them.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.processes import Child
from tests.spark.conftest import Queue
from tests.spark.test_crash import Traffic, wait_for_more

pytestmark = [
    *(pytest.mark.spark, pytest.mark.slow, pytest.mark.longer, pytest.mark.timeout(900)),
    pytest.mark.usefixtures("spark_environment"),
]

APPLICATION = """
    import sys, time
    import spark_pgqueue
    from pyspark.sql import SparkSession
    url, checkpoint, trigger, told = sys.argv[1:]
    spark = (
        SparkSession.builder.master("local[2,4]")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.host", "localhost")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.log.level", "ERROR")
        .getOrCreate()
    )
    spark_pgqueue.register(spark)
    print("spark", spark.version, flush=True)

    most = 1_000_000 if trigger == "now" else 200

    def read(name, **options):
        source = spark.readStream.format("pgqueue").options(
            url=url, stream="in", maxMessagesPerTrigger=most, **options
        )
        return source.load().selectExpr("key", f"concat('{name} ', data) as data")

    more = {"checkpointLocation": checkpoint} if told == "told" else {}
    rows = read("claimed", consumer="c", visibilityTimeout="5s", **more)
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


@pytest.fixture
def python(request: pytest.FixtureRequest) -> str:
    """An interpreter that has this version of PySpark."""
    name = f"PGQUEUE_PYSPARK_{request.param.replace('.', '_')}"
    return os.environ.get(name) or pytest.skip(f"{name} names no interpreter")


def run(queue: Queue, python: str, trigger: str, told: bool) -> Child:
    found = subprocess.check_output([python, "-c", "import pyspark; print(pyspark.__path__[0])"])
    home = queue.folder / "spark"
    if not home.exists():  # as in the fixture spark_environment
        home.mkdir()
        for part in Path(found.decode().strip()).iterdir():
            if part.name != "python":
                (home / part.name).symlink_to(part)
    return Child(
        APPLICATION,
        *(queue.url, queue.checkpoint(), trigger, "told" if told else "not told"),
        environment={"PYSPARK_PYTHON": python, "SPARK_HOME": str(home)},
        python=python,
    )


def expected(count: int) -> list[str]:
    return sorted(f"{how} {i}" for i in range(1, count + 1) for how in ("claimed", "read"))


@pytest.mark.parametrize(("python", "told"), [("4.0", True), ("4.1", True)], indirect=["python"])
def test_everything_is_copied_once_by_older_versions_of_pyspark(
    url: str, tmp_path: Path, python: str, told: bool
):
    """By a source with a consumer and one without: with availableNow, killed, and stopped.

    Told where its checkpoint is, the first one also reads in order of the keys.
    """
    queue = Queue(url, tmp_path)
    queue.create("in", "c", ordering="key" if told else "none")
    queue.create("out")

    def now() -> None:
        with run(queue, python, "now", told) as child:
            assert child.wait(240) == 0, child.output

    queue.send("in", 1, 100)
    now()
    assert queue.sent("out") == expected(100)
    if not told:
        assert queue.backlog("in", "c") == 100  # the last batch stays claimed
    queue.send("in", 101, 150)
    now()
    assert queue.sent("out") == expected(150)
    if not told:
        assert queue.backlog("in", "c") == 50  # and the next run acknowledges it

    with Traffic(queue) as traffic:
        traffic.sent = 150
        with run(queue, python, "always", told) as child:
            wait_for_more(queue, child)
            time.sleep(random.uniform(0, 2))
            child.kill()
        now()  # what was begun, and what there is
        with run(queue, python, "stop", told) as child:
            assert child.wait(240) == 0, child.output
    runs = 0
    while len(queue.sent("out")) < 2 * traffic.sent and runs < 10:
        now()
        runs += 1
        time.sleep(2)  # what the killed one had claimed and not logged is free after a while
    assert queue.sent("out") == expected(traffic.sent)
    command = [sys.executable, "-m", "spark_pgqueue", "checkpoint", queue.checkpoint(), "--ack"]
    subprocess.run([*command, "--url", url], check=True)
    assert queue.backlog("in", "c") == 0
