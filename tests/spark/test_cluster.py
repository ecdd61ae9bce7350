"""On a cluster whose executors are killed, with speculation and retries: exactly once."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.processes import ROOT, Child
from tests.sessions import QUICK_JAVA, QUIET
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
    """A standalone master and workers with two cores in all, on this machine."""

    def __init__(self, folder: Path, workers: int):
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
        sizes = ["--cores", str(2 // workers), "--memory", "1g"]
        for number in range(workers):
            given = [*common, *sizes, "--work-dir", str(folder / f"worker {number}"), self.master]
            self.processes.append(self._start("worker.Worker", *given))

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
def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path, getattr(request, "param", 1))
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


SUBMITTED = """
import os, sys, time
from pyspark.sql import SparkSession
import spark_pgqueue
url, checkpoint = os.environ["PGQUEUE_URL"], sys.argv[1]
assert "spark_pgqueue.zip" in spark_pgqueue.__file__, spark_pgqueue.__file__
spark = SparkSession.builder.getOrCreate()
spark_pgqueue.register(spark)

def note(batches):  # each executor has a folder in that of its worker
    time.sleep(0.5)  # so that one does not take all tasks
    for batch in batches:
        yield batch.set_column(1, "key", [os.getcwd().split("/")[-3]] * batch.num_rows)

source = spark.readStream.format("pgqueue").options(
    url=url, stream="in", consumer="c", minPartitions=4, maxMessagesPerTrigger=100)
rows = source.load().select("data", "key").mapInArrow(note, "data string, key string")
rows.writeStream.format("pgqueue").options(
    url=url, stream="out", checkpointLocation=checkpoint
).trigger(availableNow=True).start().awaitTermination()
"""

# As a machine that has what the package needs, and not the package: neither this checkout nor an
# installed one.
BARE = """
import os, sys
sys.meta_path = [each for each in sys.meta_path if "editable" not in repr(each)]
sys.path = [each for each in sys.path if not os.path.exists(each + "/spark_pgqueue/version.py")]
"""


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    """The wheel, by the name that Spark takes."""
    build = (sys.executable, "-m", "hatchling", "build", "--target", "wheel")
    subprocess.run([*build, "--directory", tmp_path], cwd=ROOT, check=True, capture_output=True)
    (built,) = tmp_path.glob("spark_pgqueue-*.whl")
    return built.rename(tmp_path / "spark_pgqueue.zip")


@pytest.mark.parametrize("cluster", [2], indirect=True)
def test_spark_submit_brings_the_wheel_to_two_workers(
    copying: Queue, cluster: Cluster, wheel: Path, tmp_path: Path
):
    """And each message comes once, by executors of both."""
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "sitecustomize.py").write_text(BARE)
    python = bare / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={bare}:$PYTHONPATH exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    lacking = subprocess.run(
        [python, "-c", "import spark_pgqueue.version"], cwd=tmp_path, capture_output=True, text=True
    )
    assert "No module named 'spark_pgqueue" in lacking.stderr
    application = tmp_path / "application.py"
    application.write_text(SUBMITTED)
    copying.send("in", 1, 400)
    settings = {**QUIET, "spark.executor.cores": "1", "spark.executor.memory": "512m"}
    done = subprocess.run(
        [
            *(Path(os.environ["SPARK_HOME"], "bin", "spark-submit"), "--master", cluster.master),
            *(word for name, value in settings.items() for word in ("--conf", f"{name}={value}")),
            *("--py-files", wheel, application, copying.checkpoint()),
        ],
        env={**os.environ, "PYSPARK_PYTHON": str(python), "PGQUEUE_URL": copying.url},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert copying.sent("out") == sorted(str(i) for i in range(1, 401))
    by = copying.sql("select distinct key from pgqueue.peek_at('out', 1, 1000)")
    assert {key for (key,) in by} == {"worker 0", "worker 1"}
