"""On a cluster whose executors are killed, with speculation and retries: exactly once."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.processes import Child
from tests.sessions import QUICK_JAVA
from tests.spark.conftest import Queue
from tests.spark.test_crash import Traffic, check, drain, wait_for_more
from tests.sql import internals

pytestmark = [
    *(pytest.mark.spark, pytest.mark.slow, pytest.mark.longer, pytest.mark.timeout(600)),
    pytest.mark.usefixtures("spark_environment"),
]

APPLICATION = """
    import random, sys, time
    import pyarrow as pa
    from tests.sessions import QUICK_JAVA, session
    url, checkpoint, master = sys.argv[1:]
    spark = session(master, {
        "spark.executor.extraJavaOptions": QUICK_JAVA,
        "spark.executor.cores": "1",
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


@pytest.fixture
def copying(url: str, tmp_path: Path) -> Queue:
    queue = Queue(url, tmp_path)
    queue.create("in", "c")
    queue.create("out")
    return queue


class Cluster:
    """A standalone master and one worker with two cores, on this machine."""

    def __init__(self, folder: Path):
        self._log = (folder / "cluster.log").open("w")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.master = f"spark://127.0.0.1:{port}"
        common = ["--host", "127.0.0.1", "--webui-port", "0"]
        self.processes = [self._start("master.Master", *common, "--port", str(port))]
        end = time.monotonic() + 60
        while socket.socket().connect_ex(("127.0.0.1", port)):
            assert time.monotonic() < end, "the master did not start"
            time.sleep(0.2)
        sizes = ["--cores", "2", "--memory", "1g", "--work-dir", str(folder / "work")]
        self.processes.append(self._start("worker.Worker", *common, *sizes, self.master))

    def _start(self, name: str, *arguments: str) -> subprocess.Popen:
        program = Path(os.environ["SPARK_HOME"], "bin", "spark-class")
        options = {"SPARK_DAEMON_MEMORY": "256m", "SPARK_DAEMON_JAVA_OPTS": QUICK_JAVA}
        return subprocess.Popen(
            [program, f"org.apache.spark.deploy.{name}", *arguments],
            env={**os.environ, **options, "SPARK_LOCAL_IP": "127.0.0.1"},
            stdout=self._log,
            stderr=self._log,
        )

    def stop(self) -> None:
        for process in self.processes:
            for each in [*psutil.Process(process.pid).children(recursive=True), process]:
                with suppress(psutil.NoSuchProcess):
                    each.kill()
            process.wait()
        self._log.close()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path)
    yield made
    made.stop()


def executors(pid: int) -> list[psutil.Process]:
    found = []
    for process in psutil.Process(pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if "CoarseGrainedExecutorBackend" in " ".join(process.cmdline()):
                found.append(process)
    return found


def wait_for_batches(queue: Queue, child: Child, count: int) -> None:
    end = time.monotonic() + 120
    before = queue.look(internals.count, "sink_batches")
    while queue.look(internals.count, "sink_batches") < before + count:
        assert child.process.poll() is None, child.output[-5000:]
        assert time.monotonic() < end, child.output[-5000:]
        time.sleep(0.1)


def test_standalone_cluster_with_a_killed_executor_loses_and_repeats_nothing(
    copying: Queue, cluster: Cluster
):
    arguments = (copying.url, copying.checkpoint(), cluster.master)
    with Traffic(copying) as traffic, Child(APPLICATION, *arguments) as child:
        wait_for_more(copying, child)
        time.sleep(random.uniform(0, 1.5))
        victims = executors(cluster.processes[1].pid)
        assert victims
        random.choice(victims).kill()
        wait_for_batches(copying, child, 1)
        child.kill()
    drain(copying)
    check(copying, traffic)
