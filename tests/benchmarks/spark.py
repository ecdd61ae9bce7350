"""A Spark session, and queries that are run for their times."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

ROOT = Path(__file__).parent.parent.parent

JDBC = Path(os.environ.get("PGQUEUE_BENCH_JDBC", "/usr/share/java/postgresql.jar"))
"""The driver for Spark's JDBC, of Debian's package libpostgresql-jdbc-java, where it is there."""


def session(home: Path, cores: int = 2) -> SparkSession:
    """A local Spark that runs so many tasks at once."""
    import spark_pgqueue
    from spark_pgqueue import java

    java.ensure_java_home()
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["PYTHONPATH"] = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"
    from pyspark.sql import SparkSession

    from tests.benchmarks.plain import Nothing, Plain, Ready, Signalled

    spark = (
        SparkSession.builder.master(f"local[{cores}]")
        .appName("spark-pgqueue benchmark")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.memory", "2g")
        .config("spark.driver.host", "localhost")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.sql.warehouse.dir", str(home / "warehouse"))
        .config("spark.sql.streaming.checkpointLocation", str(home / "checkpoints"))
        .config("spark.log.level", "ERROR")
        .config("spark.jars", str(JDBC) if JDBC.exists() else "")
        .getOrCreate()
    )
    spark_pgqueue.register(spark)
    for each in (Plain, Nothing, Ready, Signalled):
        spark.dataSource.register(each)
    return spark


def batch_seconds(
    frame: DataFrame, rows: int, sink: str = "noop", warm_up: int = 2, **options: str
) -> list[float]:
    """Run a streaming query over what is there, and see how long its micro-batches take.

    Args:
        frame: what to run.
        rows: only batches of so many count.
        sink: the format to write to, with its options.
        warm_up: so many batches do not count at the start.
    """
    query = frame.writeStream.format(sink).options(**options).trigger(availableNow=True).start()
    query.awaitTermination()
    progress = [each for each in query.recentProgress if each.numInputRows == rows]
    return [each.durationMs["triggerExecution"] / 1e3 for each in progress[warm_up:]]
