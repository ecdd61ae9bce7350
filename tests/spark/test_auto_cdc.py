"""Auto CDC of declarative pipelines: tables that follow a captured one, and its history."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pyspark
import pytest
from chispa import assert_df_equality
from pyspark.sql import SparkSession

from tests.pages import ROOT, blocks_of, run_commands
from tests.processes import connect_port
from tests.spark.conftest import Queue
from tests.spark.test_pipelines import run

pipelines = pytest.importorskip("pyspark.pipelines", reason="PySpark 4.1 and later have pipelines")
if not hasattr(pipelines, "create_auto_cdc_flow"):
    pytest.skip("PySpark 4.3 and later have auto CDC", allow_module_level=True)

PAGE = (ROOT / "spark_pgqueue/guide/pipelines.md").read_text()
TABLE, DEFINITIONS = (
    next(text for _, text in blocks_of(PAGE) if word in text)
    for word in ("pgqueue.capture(", "create_auto_cdc_flow(")
)

LAKE = """configuration:
  spark.sql.catalog.lake: MergingCatalog
  spark.sql.catalog.lake.folder: {folder}/lake
"""
VIEWS = """
from pyspark import pipelines as dp
from pyspark.sql import SparkSession

@dp.materialized_view
def current():
    return SparkSession.active().read.table("lake.default.paints")

@dp.materialized_view
def history():
    return SparkSession.active().read.table("lake.default.paints_history")
"""
"""What the pipeline adds, for the test to read as Parquet."""

SPAN = ", __START_AT bigint, __END_AT bigint"
FIRST = [(1, "red", 20, 1, 4), (1, "red", 25, 4, None), (2, "blue", 90, 2, 5)]
FIRST += [(3, "green", 40, 3, None)]
SECOND = [(1, "red", 20, 1, 4), (1, "red", 25, 4, 12), (1, "red", 30, 12, None)]
SECOND += [(2, "blue", 90, 2, 5), (2, "blue", 95, 11, None)]
SECOND += [(3, "green", 40, 3, 9), (4, "green", 40, 10, None), (5, "grey", 70, 8, None)]


@pytest.fixture
def jar(tmp_path: Path) -> Path:
    """A catalogue whose tables take MERGE, as those of Spark do not."""
    if not (shutil.which("javac") and shutil.which("jar")):
        pytest.skip("no JDK (apt install default-jdk-headless)")
    classes, jar = tmp_path / "classes", tmp_path / "catalog.jar"
    source = Path(__file__).with_name("MergingCatalog.java")
    path = f"{pyspark.__path__[0]}/jars/*"
    for command in (
        ["javac", "-proc:none", "-nowarn", "-cp", path, "-d", str(classes), str(source)],
        ["jar", "cf", str(jar), "-C", str(classes), "."],
    ):
        subprocess.run(command, check=True)
    return jar


@pytest.mark.longer
@pytest.mark.spark
@pytest.mark.timeout(1800)  # another test may have the port of Spark Connect for minutes
@pytest.mark.promise("pipelines: Two runs with changes between")
def test_auto_cdc_keeps_a_copy_of_a_captured_table_and_its_history(
    url: str, tmp_path: Path, jar: Path, spark: SparkSession
) -> None:
    """The page's pipeline, run after run: type 1 is the table, type 2 each state of each row."""
    folder = tmp_path / "paints"
    queue = Queue(url, folder)
    queue.sql(TABLE)
    run_commands(DEFINITIONS, url, tmp_path)
    (folder / "transformations" / "views.py").write_text(VIEWS)
    with (folder / "spark-pipeline.yml").open("a") as spec:
        spec.write(LAKE.format(folder=folder))

    def run_once() -> None:
        with connect_port(), run(queue, "--jars", str(jar)) as child:
            assert child.wait(600) == 0, child.output[-5000:]

    def assert_is(view: str, rows: list[tuple], columns: str) -> None:
        found = spark.read.parquet(f"{folder}/warehouse/{view}").drop("__spark_autocdc_metadata")
        expected = spark.createDataFrame(rows, f"id int, name string, price int{columns}")
        assert_df_equality(found, expected, ignore_row_order=True, ignore_nullable=True)

    run_once()
    assert_is("current", queue.sql("select * from paints"), "")
    assert_is("history", FIRST, SPAN)
    for change in (
        # A row that was not captured; then each row says what it is.
        "select pgqueue.release('paints', 'paints'); insert into paints values (5, 'grey', 70); "
        "select pgqueue.capture('paints', 'paints')",
        "update paints set id = id",
        "update paints set id = 4 where id = 3",
        "insert into paints values (2, 'blue', 95)",
        "update paints set price = 30 where id = 1",
    ):
        queue.sql(change)
    run_once()
    assert_is("current", queue.sql("select * from paints"), "")
    assert_is("history", SECOND, SPAN)
