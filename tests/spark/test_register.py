"""Where Spark's processes cannot import the package, `register` sends it along."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import spark_pgqueue
from spark_pgqueue.postgres.errors import PgQueueError
from tests.processes import connect_port
from tests.spark.conftest import Queue

ROOT = Path(__file__).parents[2]

# Spark's Python processes find this before anything else.
BLOCK = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in open({refused!r}).read().split():
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Refuse())
"""
OURS = ("spark_pgqueue", "pyspark_pgqueue")

SCRIPT = """
import sys
from pyspark.sql import SparkSession
url, checkpoint, package, register, refused = sys.argv[1:]
sys.meta_path = [each for each in sys.meta_path if "editable" not in repr(each)]
sys.path = [package, *(each for each in sys.path if each not in ("", package))]
import spark_pgqueue
assert spark_pgqueue.__file__.startswith(package), spark_pgqueue.__file__
spark = SparkSession.builder{kind}.config("spark.ui.enabled", "false").getOrCreate()
try:
    spark_pgqueue.register(spark, **eval(register))
except spark_pgqueue.PgQueueError as error:
    print(error)
    with open(refused, "w") as file:
        file.write("spark_pgqueue pyspark_pgqueue")
    spark_pgqueue.register(spark, **eval(register))
options = {{"url": url, "stream": "s"}}
spark.range(10).selectExpr("cast(id as string) as data").write.format("pgqueue").options(
    **options).mode("append").save()
found = spark.read.format("pgqueue").options(**options, table="messages", where="seq > 0").load()
assert found.count() == 10
frame = spark.readStream.format("pgqueue").options(**options, consumer="c").load()
copy = frame.selectExpr("data").writeStream.format("pgqueue").option("url", url)
copy.option("stream", "copy").option("checkpointLocation", checkpoint).trigger(
    availableNow=True).start().awaitTermination()
print("copied")
"""
CLASSIC, CONNECT = '.master("local[2]")', '.remote("local[2]")'


@pytest.fixture
def package(tmp_path: Path) -> str:
    """A zip with what the wheel has, and nothing else: no metadata."""
    path = tmp_path / "package.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for folder, name in (("spark_pgqueue", "spark_pgqueue"), ("sql", "spark_pgqueue/sql")):
            for file in sorted((ROOT / folder).rglob("*")):
                if file.is_file() and "__pycache__" not in file.parts:
                    archive.write(file, Path(name) / file.relative_to(ROOT / folder))
        archive.write(ROOT / "spark_pgqueue/spark/discovery.py", "pyspark_pgqueue.py")
    return str(path)


def python_without(folder: Path, *modules: str) -> str:
    """A Python that cannot import them."""
    folder.mkdir()
    (folder / "refused").write_text(" ".join(modules))
    (folder / "sitecustomize.py").write_text(BLOCK.format(refused=str(folder / "refused")))
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={folder}:$PYTHONPATH exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    refused = subprocess.run([python, "-c", f"import {modules[0]}"], capture_output=True)
    assert b"No module named" in refused.stderr
    return str(python)


def run(queue: Queue, python: str, package: str, kind: str = CLASSIC, register: str = "{}"):
    environment = {**os.environ, "PYSPARK_PYTHON": python, "PYSPARK_DRIVER_PYTHON": sys.executable}
    environment.pop("SPARK_REMOTE", None)
    return subprocess.run(
        [
            *(sys.executable, "-c", SCRIPT.format(kind=kind)),
            *(queue.url, queue.checkpoint(), package, register, Path(python).with_name("refused")),
        ],
        env=environment,
        cwd=queue.folder,
        capture_output=True,
        text=True,
    )


@pytest.fixture
def copying(url: str, tmp_path: Path, spark_environment: None) -> Queue:
    queue = Queue(url, tmp_path)
    queue.create("s", "c")
    queue.create("copy", "c")
    return queue


@pytest.mark.slow
@pytest.mark.longer
def test_source_and_sink_work_where_only_the_driver_has_the_package_in_a_zip(
    copying: Queue, tmp_path: Path, package: str
):
    done = run(copying, python_without(tmp_path / "bin", *OURS), package)
    assert done.returncode == 0, done.stderr[-3000:]
    assert copying.sent("copy") == sorted(str(i) for i in range(10))


@pytest.mark.slow
@pytest.mark.longer
def test_a_connect_server_needs_no_package_where_it_is_shipped(copying: Queue, tmp_path: Path):
    """An installed package is shipped too; and what the server lacks is said, until it is there."""
    pytest.importorskip("grpc")
    python = python_without(tmp_path / "bin", *OURS, "psycopg")
    with connect_port():
        done = run(copying, python, str(ROOT), CONNECT, "{'ship': True}")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "the Python of Spark's executors lacks psycopg" in done.stdout
    assert "pip install" in done.stdout
    assert copying.sent("copy") == sorted(str(i) for i in range(10))


@pytest.mark.spark
def test_a_python_without_the_package_is_refused(spark, tmp_path: Path, monkeypatch):
    """With the local session, whose Python is asked before a query needs it."""
    spark_pgqueue.register(spark)
    bare = tmp_path / "bare python"
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "$@"\n')
    bare.chmod(0o755)
    monkeypatch.setattr(spark.sparkContext, "pythonExec", str(bare))
    with pytest.raises(PgQueueError, match=r"bare python .*lacks spark_pgqueue, psycopg") as caught:
        spark_pgqueue.register(spark)
    assert f"export PYSPARK_PYTHON={sys.executable}" in (caught.value.hint or "")
