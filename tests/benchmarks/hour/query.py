"""`python -m tests.benchmarks.hour.query PLAN`: the Spark query, from stream to stream."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import spark_pgqueue
from spark_pgqueue import java
from tests.benchmarks.hour.plan import READY, SECOND, SPARK, STREAM, WARM_UP, Plan

CONFIGURATION: dict[str, bool | float | int | str | None] = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.driver.memory": "1g",
    "spark.driver.host": "localhost",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.log.level": "ERROR",
}


def main(path: str) -> None:
    """Copy messages exactly once, a micro-batch a second."""
    java.ensure_java_home()
    os.environ["PYSPARK_PYTHON"] = sys.executable
    from pyspark.sql import SparkSession

    plan = Plan.read(Path(path))
    builder = SparkSession.builder.master("local[2]").appName("hour")  # type: ignore[attr-defined]
    spark = builder.config(map=CONFIGURATION).getOrCreate()
    spark_pgqueue.register(spark)
    given = {"url": plan.url, "checkpointLocation": f"{plan.folder}/checkpoint"}
    source = spark.readStream.format("pgqueue").options(stream=STREAM, consumer=SPARK, **given)
    sink = (
        source.load()
        .where(f"not key <=> '{WARM_UP}'")
        .select("key", "data")
        .writeStream.format("pgqueue")
    )
    query = sink.options(stream=SECOND, **given).trigger(processingTime="1 second").start()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    while query.isActive and not any(each.numInputRows for each in query.recentProgress):
        time.sleep(0.2)
    (Path(plan.folder) / READY).touch()
    query.awaitTermination()


if __name__ == "__main__":
    main(sys.argv[1])
