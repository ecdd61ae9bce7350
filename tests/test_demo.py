"""The demo: a small version of it succeeds, and a wrong figure makes it fail."""

from __future__ import annotations

import io
import os
import shlex
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest
from rich.console import Console

from spark_pgqueue import embedded
from spark_pgqueue.command_line import demo
from spark_pgqueue.postgres.errors import PgQueueError

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def flights():
    return demo.read_file(2000)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder as a user may have one."""
    made = tmp_path / "it's my folder"
    made.mkdir()
    return made


def run_demo(
    folder: Path, *arguments: str, python: str | Path = sys.executable
) -> subprocess.CompletedProcess[str]:
    """`pgqueue demo` in a process of its own, with temporary files in the folder and no home."""
    app = "from spark_pgqueue.command_line.cli import app; app()"
    run = f"import sys; sys.executable = {str(python)!r}; {app}"
    return run_python(folder, run, "demo", "--rows", "3000", *arguments)


def run_python(folder: Path, script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A script in a process of its own, with temporary files in the folder and no home."""
    environment = {"PYTHONPATH": str(ROOT), "TMPDIR": str(folder), "COLUMNS": "80"}
    return subprocess.run(
        [sys.executable, "-c", script, *arguments],
        cwd=folder,
        env={**os.environ, **environment, "HOME": "/nonexistent"},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.longer
@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("spark_environment")
def test_twice_in_one_directory(folder):
    directory = folder / "kept"
    for _ in range(2):
        done = run_demo(folder, "--directory", str(directory))
        assert done.returncode == 0, done.stdout + done.stderr
        rows = [line for line in done.stdout.splitlines() if line.startswith("│")]
        assert len(rows) == 12, done.stdout
        assert all(row.split("│")[-2].strip() == "ok" for row in rows), done.stdout
        assert "WARN" not in done.stderr.replace("WARNING: Using incubator modules", "")
    assert list(folder.glob("pgqueue-demo-*")) == []

    with embedded.start(directory) as server, psycopg.connect(server.url_of("pgqueue_demo")) as db:
        left = db.execute("select sum(backlog + claimed) from pgqueue.consumer_stats").fetchone()
        assert left == (0,)


@pytest.mark.longer
@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("spark_environment")
def test_on_a_busy_machine_and_a_given_database(folder, url, conn):
    """The first source's process is too slow for Spark; the database is left as it was."""
    conn.execute("select pgqueue.create_stream('mine')")
    slow = folder / "python"
    # It never answers: Spark waits for 10 s, whether a process is slow or gone.
    slow.write_text(
        f"""#!/bin/sh
        case "$*" in *python_streaming_source_runner*) mkdir {shlex.quote(f"{slow}.once")} && exit
        esac 2> /dev/null
        exec {shlex.quote(sys.executable)} "$@"
        """
    )
    slow.chmod(0o755)
    done = run_demo(folder, "--url", url, python=slow)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "starting daily again" in done.stdout
    assert "Exception" not in done.stderr
    assert conn.execute("select name from pgqueue.streams").fetchall() == [("mine",)]


# The same session as the demo's, left in the middle of a function that has a job running.
LEFT = """
import sys, time
from pathlib import Path
from spark_pgqueue.command_line import demo

def count(batch, batch_id):
    batch.sparkSession.range(1 << 60).selectExpr("sum(hash(id))").collect()

with demo.spark_session(Path(sys.argv[1])) as spark:
    read = spark.readStream.format("rate").load()
    read.writeStream.foreachBatch(demo.in_short(count)).start()
    while not spark.sparkContext.statusTracker().getActiveStageIds():
        time.sleep(0.05)
print("left")
"""


@pytest.mark.longer
@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("spark_environment")
def test_a_query_that_is_stopped_in_the_middle_of_its_function_is_quiet(folder):
    done = run_python(folder, LEFT, str(folder))
    assert (done.returncode, done.stdout) == (0, "left\n"), done.stdout + done.stderr
    assert "Exception" not in done.stderr
    assert "Error" not in done.stderr


def test_a_stream_of_the_user_is_not_touched(url, conn):
    conn.execute("select pgqueue.create_stream('delayed')")
    with pytest.raises(PgQueueError, match=r"delayed.*exists"):
        demo.run(url=url, rows=10)
    assert conn.execute("select name from pgqueue.streams").fetchall() == [("delayed",)]


def test_arguments(tmp_path):
    with pytest.raises(PgQueueError, match="exclude each other"):
        demo.run(directory=tmp_path, url="postgresql:///x")
    with pytest.raises(PgQueueError, match="rows is 0"):
        demo.run(rows=0)


def test_the_file(flights):
    whole = demo.read_file()
    assert whole.num_rows == 336_776
    assert flights.equals(whole[:2000])
    assert {day for day, _ in demo.days_of(flights)} == {
        "2013-01-01",
        "2013-01-02",
        "2013-01-03",
    }


def test_a_wrong_figure_is_found(flights):
    told = demo.told_by(flights)
    assert demo.compare(told, told, Console(file=io.StringIO()))

    days = demo.days_of(flights)
    one = ("2013-01-02", "UA")
    days[one] = (days[one][0], days[one][1], (days[one][2] or 0) + 1)
    seen = {**told, **demo.daily_figures(days)}
    output = io.StringIO()
    assert not demo.compare(seen, told, Console(file=output, width=120))
    differing = [
        line.split("│")[1].strip() for line in output.getvalue().splitlines() if "differs" in line
    ]
    assert "daily: minutes late" in differing
    assert "daily: days, airlines" in differing
