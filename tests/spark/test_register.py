"""Where Spark's processes cannot import the package, `register` sends it along."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.spark.conftest import Queue

# Spark's Python processes find this before anything else.
BLOCK = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("spark_pgqueue", "pyspark_pgqueue"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Refuse())
"""

SCRIPT = """
import sys
from pyspark.sql import SparkSession
import spark_pgqueue
spark_pgqueue._installed = lambda: False  # as in a checkout that was not installed
url, checkpoint = sys.argv[1:]
spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
spark_pgqueue.register(spark)
options = {"url": url, "stream": "s"}
spark.range(10).selectExpr("cast(id as string) as data").write.format("pgqueue").options(
    **options).mode("append").save()
frame = spark.readStream.format("pgqueue").options(**options, consumer="c").load()
copy = frame.selectExpr("data").writeStream.format("pgqueue").option("url", url)
copy.option("stream", "copy").option("checkpointLocation", checkpoint).trigger(
    availableNow=True).start().awaitTermination()
"""


@pytest.mark.slow
def test_source_and_sink_work_where_only_the_driver_has_the_package(
    url: str, tmp_path: Path, spark_environment: None
):
    queue = Queue(url, tmp_path)
    queue.create("s", "c")
    queue.create("copy", "c")
    (tmp_path / "sitecustomize.py").write_text(BLOCK)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path}:$PYTHONPATH exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    refused = subprocess.run([python, "-c", "import spark_pgqueue"], capture_output=True)
    assert b"No module named" in refused.stderr
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, url, queue.checkpoint()],
        env={**os.environ, "PYSPARK_PYTHON": str(python), "PYSPARK_DRIVER_PYTHON": sys.executable},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert queue.sent("copy") == sorted(str(i) for i in range(10))
