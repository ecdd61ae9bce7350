"""What Spark shows of its Python processes: their profile, what they log, their sockets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pyspark
import pytest
from pyspark.sql import SparkSession

from tests.processes import Child
from tests.spark.conftest import Queue, numbers

pytestmark = [
    pytest.mark.spark,
    pytest.mark.skipif(pyspark.__version__ < "4.3", reason="PySpark 4.3 and later"),
]


@pytest.fixture
def settings(spark: SparkSession) -> Iterator[Callable[[str, str], None]]:
    """Sets something of Spark for the time of a test."""
    names: list[str] = []

    def set_one(name: str, value: str) -> None:
        names.append(name)
        spark.conf.set(name, value)

    yield set_one
    for name in names:
        spark.conf.unset(name)


def test_the_profile_names_what_plans_reads_and_writes(queue: Queue, settings, capsys) -> None:
    """Of a query and of a batch, each from source to sink; not the process that claims."""
    queue.create("s", "c")
    queue.create("out")
    queue.send("s", 1, 1000)
    settings("spark.sql.pyspark.dataSource.profiler", "perf")

    def profile() -> tuple[set[str], str]:
        queue.spark.profile.show(type="perf")
        queue.spark.profile.clear()
        shown = capsys.readouterr().out
        parts = shown.split("Profile of ")[1:]
        tasks = "".join(part for part in parts if part.startswith("UDF"))
        return {part.split("\n")[0] for part in parts if not part.startswith("UDF")}, tasks

    queue.publish(queue.load("s", "c").select("data"), "out").awaitTermination()
    processes, tasks = profile()
    assert {"plan_data_source_read", "python_streaming_sink_runner"} <= processes
    assert "python_streaming_source_runner" not in processes  # as the page says
    assert "(adbc_ingest)" in tasks
    reader = queue.spark.read.format("pgqueue").options(url=queue.url, stream="s")
    queue.write(reader.option("table", "messages").load().select("data"), "out")
    processes, tasks = profile()
    assert {"plan_data_source_read", "commit_data_source_write"} <= processes
    assert "(adbc_ingest)" in tasks
    assert len(queue.sent("out")) == 2000


def test_what_the_processes_log_is_a_table(queue: Queue, settings) -> None:
    queue.create("s", "c")
    settings("spark.sql.pyspark.worker.logging.enabled", "true")
    reader = queue.spark.read.format("pgqueue").options(url=queue.url, stream="s", consumer="c")
    reader.load().count()  # a table that was not named: a warning
    logs = queue.spark.tvf.python_worker_logs().where("logger = 'spark_pgqueue'").collect()
    assert {row.level for row in logs} == {"WARNING"}  # Spark may plan it more than once
    assert any("claims nothing" in row.msg for row in logs)


SOCKETS = """
import sys
from pathlib import Path
from tests.sessions import session

url, folder = sys.argv[1:]
spark = session(settings={
    "spark.python.unix.domain.socket.enabled": "true",
    "spark.python.unix.domain.socket.dir": folder,
})
def load(reader, **options):
    return reader.format("pgqueue").options(url=url, stream="s", **options).load()

assert load(spark.read, table="messages").count() == 1000
copy = load(spark.readStream, consumer="c").select("data").writeStream.format("pgqueue")
copy = copy.option("url", url).option("stream", "out").option("checkpointLocation", folder + "/c")
copy.trigger(availableNow=True).start().awaitTermination()
print("sockets", [path.name for path in Path(folder).iterdir()])
"""


@pytest.mark.slow
@pytest.mark.longer
def test_sources_and_sinks_work_over_domain_sockets(
    url: str, tmp_path: Path, spark_environment: None
) -> None:
    queue = Queue(url, tmp_path)
    queue.create("s", "c")
    queue.create("out")
    queue.send("s", 1, 1000)
    # In a path of 60 characters at most.
    with TemporaryDirectory(dir="/tmp") as folder, Child(SOCKETS, url, folder) as child:
        assert child.wait(170) == 0, child.output[-5000:]
    assert queue.sent("out") == sorted(map(str, numbers(1, 1000)))
    assert ".sock'" in child.output.partition("sockets [")[2]
