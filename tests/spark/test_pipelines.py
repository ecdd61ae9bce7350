"""Spark's declarative pipelines read and write streams, run after run, also after a kill."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tests.pages import environment_of
from tests.processes import Child, connect_port
from tests.spark.conftest import Queue
from tests.sql import internals

pytest.importorskip("pyspark.pipelines", reason="PySpark 4.1 and later have pipelines")

SPEC = """
name: parcels
storage: file://{folder}/storage
libraries: [{{glob: {{include: transformations/**}}}}]
"""
DEFINITIONS = """
import os
from pyspark import pipelines as dp
from pyspark.sql import SparkSession

spark = SparkSession.active()
given = {"url": os.environ["PGQUEUE_URL"], "stream": "parcels"}

def load(**options):
    return spark.readStream.format("pgqueue").options(**given, **options).load()

@dp.table
def claimed():
    return load(consumer="c", visibilityTimeout="5s", maxMessagesPerTrigger="200")

@dp.table
def read():
    return load(startingOffsets="earliest", maxMessagesPerTrigger="200")

dp.create_sink("labels", "pgqueue", {"url": given["url"], "stream": "labels"})

@dp.append_flow(target="labels")
def label():
    return spark.readStream.table("claimed").selectExpr("key", "data")

dp.create_sink("copies", "pgqueue", {"url": given["url"], "stream": "copies"})

@dp.append_flow(target="copies")
def copy():
    claimed = load(consumer="copier", visibilityTimeout="5s", maxMessagesPerTrigger="200")
    return claimed.select("key", "data")
"""


@pytest.fixture
def project(url: str, tmp_path: Path) -> Queue:
    """A pipeline in a folder, with a catalogue and a warehouse that outlive a run."""
    queue = Queue(url, tmp_path)
    queue.create("parcels", "c", "copier")
    queue.create("labels")
    queue.create("copies")
    (tmp_path / "spark-pipeline.yml").write_text(SPEC.format(folder=tmp_path))
    (tmp_path / "transformations").mkdir()
    (tmp_path / "transformations" / "parcels.py").write_text(DEFINITIONS)
    return queue


RUN = "import os, sys; os.chdir(sys.argv[1]); os.execv(sys.argv[2], sys.argv[2:])"


def run(project: Queue, *more: str) -> Child:
    """`spark-pipelines run` in the project's folder."""
    settings = ("catalogImplementation=hive", f"warehouse.dir={project.folder}/warehouse")
    confs = [word for each in settings for word in ("--conf", f"spark.sql.{each}")]
    script = str(Path(sys.executable).parent / "spark-pipelines")
    environment = environment_of(project.url)
    return Child(RUN, str(project.folder), script, "run", *confs, *more, environment=environment)


@pytest.mark.longer
@pytest.mark.spark
@pytest.mark.timeout(900)
@pytest.mark.promise("pipelines: Two runs with messages between, the first one killed")
def test_a_pipeline_goes_on_where_it_was_also_after_a_kill(
    project: Queue, spark: SparkSession
) -> None:
    """Tables and sinks have each message once, whether a consumer claims it or an offset has it."""
    project.send("parcels", 1, 1000)
    with connect_port(), run(project) as child:
        child.wait_until(lambda: project.look(internals.count, "sink_batches") > 2, 300)
        child.kill()
    project.send("parcels", 1001, 1200)
    with connect_port(), run(project) as child:
        assert child.wait(400) == 0, child.output[-5000:]
    expected = sorted(str(i) for i in range(1, 1201))
    for table in ("claimed", "read"):
        rows = spark.read.parquet(f"{project.folder}/warehouse/{table}").select("data").collect()
        assert sorted(row.data for row in rows) == expected, table
    for stream in ("labels", "copies"):
        assert project.sent(stream) == expected, stream
    assert project.backlog("parcels", "c") == project.backlog("parcels", "copier") == 0
