"""The wheel, installed into an environment of its own: what a user or a cluster gets."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# Spark finds the format by itself: there is no call of register(), and no checkout to import from.
SCRIPT = """
import sys
from pyspark.sql import SparkSession
url, checkpoint = sys.argv[1:]
spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
options = {"url": url, "stream": "s"}
spark.range(10).selectExpr("cast(id as string) as data").write.format("pgqueue").options(
    **options).mode("append").save()
frame = spark.readStream.format("pgqueue").options(**options, consumer="c").load()
copy = frame.selectExpr("data").writeStream.format("pgqueue").option("url", url)
query = copy.option("stream", "copy").option("checkpointLocation", checkpoint).trigger(
    availableNow=True).start()
query.awaitTermination()
"""


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clean environment with the wheel in it, and without PySpark, as pip makes it."""
    directory = tmp_path_factory.mktemp("wheel")
    run(
        *(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"),
        *("--wheel-dir", directory, ROOT),
        cwd=directory,
    )
    (wheel,) = directory.glob("*.whl")
    venv.create(directory / "venv")
    python = directory / "venv" / "bin" / "python"
    run(*pip(python), "install", "--quiet", wheel, cwd=directory)
    return python


def pip(python: Path) -> tuple[str | Path, ...]:
    """This environment's pip, at work for another one: to make it one of its own takes long."""
    return sys.executable, "-m", "pip", "--python", python


@pytest.mark.timeout(600)
def test_the_client_and_the_command_line_need_no_spark(python: Path, empty_url: str, tmp_path):
    installed = run(*pip(python), "list", cwd=tmp_path)
    assert "spark_pgqueue" in installed.replace("-", "_")
    assert "pyspark" not in installed

    pgqueue = python.with_name("pgqueue")
    for command in (
        ("install",),
        ("stream", "create", "s"),
        ("consumer", "create", "s", "c"),
        ("send", "s", "--data", "hello"),
    ):
        run(pgqueue, *command, cwd=tmp_path, PGQUEUE_URL=empty_url)
    received = run(pgqueue, "receive", "s", "c", cwd=tmp_path, PGQUEUE_URL=empty_url)
    assert "hello" in received


@pytest.mark.longer
@pytest.mark.spark
@pytest.mark.usefixtures("spark_environment")
@pytest.mark.timeout(600)
def test_spark_finds_the_format_by_itself(python: Path, url: str, conn, tmp_path):
    conn.execute("select pgqueue.create_stream('s'), pgqueue.create_stream('copy')")
    conn.execute("select pgqueue.create_consumer('s', 'c')")
    conn.execute("select pgqueue.create_consumer('copy', 'c')")
    import pyspark

    # the PySpark that is here, in place of a download of 400 MB: a cluster has its own, too
    there = run(
        *(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"), cwd=tmp_path
    )
    here = Path(pyspark.__file__).parents[1]
    for name in ("pyspark", "py4j"):
        (Path(there.strip()) / name).symlink_to(here / name)
    (tmp_path / "job.py").write_text(SCRIPT)
    run(
        *(python, "job.py", url, tmp_path / "checkpoint"),
        cwd=tmp_path,
        PYSPARK_PYTHON=str(python),
        PYTHONPATH="",
    )
    copied = conn.execute("select data from pgqueue.receive('copy', 'c', 100)").fetchall()
    assert sorted(row[0] for row in copied) == [str(i) for i in range(10)]
