"""The Spark sessions of the tests, and of the applications that they run in processes of their own.

An application finds this module by its PYTHONPATH, see `processes.Child`. It has to work with every
version of PySpark.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyspark
from pyspark.sql import SparkSession

import spark_pgqueue

QUIET = {
    "spark.ui.enabled": "false",
    "spark.driver.host": "localhost",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.log.level": "ERROR",
}
"""Nothing is served, nothing is printed but errors, and no name of the machine is looked up."""

QUICK_JAVA = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Xss4m"
"""The quick compiler alone, whose code needs more stack, and one thread that collects garbage."""

FEW_TASKS = "-Dspark.sql.shuffle.partitions=2"
"""An application that says nothing has two tasks in a shuffle, and not 200 almost empty ones."""


def quick_start(archives: bool = True) -> dict[str, str]:
    """Variables that save most of Spark's time where each session is short.

    Spark's Python processes import PySpark from a zip in SPARK_HOME, and compile it whenever they
    start: in a home without that zip they import the PySpark that is installed. And Java maps the
    classes that a first session loaded, in place of loading them: half of a start is less.

    Args:
        archives: whether to let a session archive its classes, where none has yet: 40 s of CPU.
    """
    jars = Path(pyspark.__path__[0], "jars")
    used = f"{jars} {jars.stat().st_mtime_ns} {os.environ.get('JAVA_HOME')}"
    key = hashlib.sha256(used.encode()).hexdigest()[:12]
    home = Path(tempfile.gettempdir(), f"pgqueue-spark-{os.getuid()}-{key}")
    home.mkdir(mode=0o700, exist_ok=True)
    assert home.stat().st_uid == os.getuid(), home
    for part in Path(pyspark.__path__[0]).iterdir():
        if part.name != "python":
            with suppress(FileExistsError):
                (home / part.name).symlink_to(part)
    classes = home / "classes.jsa"
    if archives and not classes.exists():
        _archive_classes(home, classes)
    mapped = f" -XX:SharedArchiveFile={classes} -Xlog:cds=off" if classes.exists() else ""
    return {"SPARK_HOME": str(home), "SPARK_SUBMIT_OPTS": f"{QUICK_JAVA} {FEW_TASKS}{mapped}"}


def _archive_classes(home: Path, classes: Path) -> None:
    """Let Java archive the classes of a session, unless another process is at it or has failed."""
    part = home / "classes.part"
    with suppress(FileExistsError):
        part.mkdir()
        options = f"{QUICK_JAVA} -XX:ArchiveClassesAtExit={part}/classes.jsa -Xlog:cds=off"
        subprocess.run(
            [sys.executable, "-m", "tests.sessions", str(part)],
            env={**os.environ, "SPARK_HOME": str(home), "SPARK_SUBMIT_OPTS": options},
            cwd=Path(__file__).parents[1],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            check=False,
        )
        with suppress(FileNotFoundError):  # a Java without archives starts slowly
            (part / "classes.jsa").rename(classes)
        shutil.rmtree(part)


def _load_classes(folder: Path) -> None:
    """What most sessions of the tests do: files, Python, Arrow, and a query."""
    spark = session()
    gateway: Any = spark.sparkContext._gateway
    frame = spark.range(10).selectExpr("id", "cast(id as string) as text")
    frame.mapInArrow(lambda batches: batches, frame.schema).write.parquet(str(folder / "in"))
    frame.groupBy("text").count().orderBy("text").collect()
    stream = spark.readStream.schema(frame.schema).parquet(str(folder / "in")).writeStream
    stream = stream.option("checkpointLocation", str(folder / "checkpoint"))
    stream.trigger(availableNow=True).foreachBatch(lambda batch, _: batch.show()).start()
    for query in spark.streams.active:
        query.awaitTermination()
    spark.stop()
    gateway.shutdown()
    gateway.proc.stdin.close()
    gateway.proc.wait()


def session(master: str = "local[2,4]", settings: Mapping[str, str] | None = None) -> SparkSession:
    """A session with the data source registered.

    Args:
        master: where its tasks run; two at a time, and tried four times each, unless told.
        settings: of Spark, beside `QUIET`.
    """
    builder = SparkSession.builder.master(master)
    for name, value in {**QUIET, **(settings or {})}.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    spark_pgqueue.register(spark)
    return spark


if __name__ == "__main__":
    _load_classes(Path(sys.argv[1]))
