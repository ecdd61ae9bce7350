"""The demo: a small version of it succeeds, and a wrong figure makes it fail."""

from __future__ import annotations

import io
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil
import psycopg
import pytest
from rich.console import Console

import spark_pgqueue
from spark_pgqueue import embedded
from spark_pgqueue.command_line.demo import desk, flights, picture, story
from spark_pgqueue.command_line.demo.process import Worker
from spark_pgqueue.command_line.demo.screen import Screen
from spark_pgqueue.postgres.errors import PgQueueError

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def table():
    return flights.read_file(2000)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder as a user may have one."""
    made = tmp_path / "it's my folder"
    made.mkdir()
    return made


def run_demo(folder: Path, *arguments: str, python: Path) -> subprocess.CompletedProcess[str]:
    """`pgqueue demo` in a process of its own, with temporary files in the folder and no home."""
    app = "from spark_pgqueue.command_line.cli import app; app()"
    run = f"import sys; sys.executable = {str(python)!r}; {app}"
    return run_python(folder, run, "demo", "--rows", "3000", *arguments)


def run_python(folder: Path, script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A script in a process of its own, with temporary files in the folder and no home."""
    return subprocess.run(
        [sys.executable, "-c", script, *arguments],
        cwd=folder,
        env=environment_of(folder),
        capture_output=True,
        text=True,
        timeout=300,
    )


def environment_of(folder: Path) -> dict[str, str]:
    """The checkout's package, temporary files in the folder, no home, a terminal's width."""
    ours = {"PYTHONPATH": str(ROOT), "TMPDIR": str(folder), "COLUMNS": "80"}
    return {**os.environ, **ours, "HOME": "/nonexistent"}


def processes_of(folder: Path) -> list[list[str]]:
    """The command lines of processes whose temporary files are in the folder."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("TMPDIR") == str(folder):
                found.append(process.cmdline())
    return found


def interrupt(folder: Path, directory: Path) -> None:
    """Press Ctrl-C in the second act: nothing is left, and no stack is shown."""
    output, errors = folder / "output", folder / "errors"
    with output.open("wb") as out, errors.open("wb") as err:
        demo = subprocess.Popen(
            [
                *(sys.executable, "-m", "spark_pgqueue", "demo", "--rows", "6000"),
                *("--directory", str(directory)),
            ],
            cwd=folder,
            env=environment_of(folder),
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
        while "2. kill -9" not in output.read_text():
            assert demo.poll() is None, errors.read_text()
            time.sleep(0.1)
        os.killpg(demo.pid, signal.SIGINT)
        assert demo.wait(300) == 130, output.read_text() + errors.read_text()
    assert errors.read_text() == ""
    while processes_of(folder):  # the JVM ends a moment later
        time.sleep(0.1)
    for each in (output, errors):
        each.unlink()


@pytest.mark.longer
@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("spark_environment")
def test_ctrl_c_leaves_nothing_and_the_next_run_in_the_directory_succeeds_on_a_busy_machine(folder):
    """There the first source's process is too slow for Spark."""
    directory, drawn = folder / "kept", folder / "days.svg"
    interrupt(folder, directory)
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
    told = flights.told_by(flights.read_file(3000))
    assert told["desk: dead, redriven"] > 0
    where = ("--directory", str(directory), "--picture", str(drawn))
    done = run_demo(folder, *where, python=slow)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line for line in done.stdout.splitlines() if line.startswith("│")]
    assert len(rows) == len(told), done.stdout
    assert all(row.split("│")[-2].strip() == "ok" for row in rows), done.stdout
    acts = ("kill -9", "dead-lettered", "new consumer", "finished every flight")
    for act in (*acts, "because of consumer airports", "starting daily again"):
        assert act in " ".join(done.stdout.split())
    assert "and holds 0 claimed messages" not in " ".join(done.stdout.split())
    assert done.stderr == ""
    assert "</svg>" in drawn.read_text()
    shared = {f"pgqueue-{of}-{os.getuid()}" for of in ("spark", "plans")}
    left = {each.name for each in folder.iterdir()} - shared
    assert left == {drawn.name, directory.name, slow.name, f"{slow.name}.once"}
    assert processes_of(folder) == []

    with embedded.start(directory) as server, psycopg.connect(server.url_of("pgqueue_demo")) as db:
        left = db.execute("select sum(backlog + claimed) from pgqueue.consumer_stats").fetchone()
        assert left == (0,)


# The same session as the demo's, left in the middle of a function that has a job running.
LEFT = """
import sys, time
from pathlib import Path
from spark_pgqueue.command_line.demo import queries, session

def count(batch, batch_id):
    batch.sparkSession.range(1 << 60).selectExpr("sum(hash(id))").collect()

with session.spark_session(Path(sys.argv[1])) as spark:
    read = spark.readStream.format("rate").load()
    read.writeStream.foreachBatch(queries.in_short(count)).start()
    while not spark.sparkContext.statusTracker().getActiveStageIds():
        time.sleep(0.05)
print("left")
print(Path(sys.argv[1], "spark.log").read_text(), file=sys.stderr)
"""


@pytest.mark.longer
@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("spark_environment")
def test_a_query_that_is_stopped_in_the_middle_of_its_function_is_quiet(folder):
    done = run_python(folder, LEFT, str(folder))
    assert (done.returncode, done.stdout) == (0, "left\n"), done.stdout + done.stderr
    assert "incubator" in done.stderr  # Java says so: it is what Spark said
    assert "Exception" not in done.stderr
    assert "Error" not in done.stderr


def test_a_stream_of_the_user_is_not_touched(url, conn):
    conn.execute("select pgqueue.create_stream('notices')")
    with pytest.raises(PgQueueError, match=r"notices.*exists"):
        story.run(url=url, rows=10)
    assert conn.execute("select name from pgqueue.streams").fetchall() == [("notices",)]


def test_arguments(tmp_path):
    with pytest.raises(PgQueueError, match="exclude each other"):
        story.run(directory=tmp_path, url="postgresql:///x")
    with pytest.raises(PgQueueError, match="rows must be at least 1, not 0"):
        story.run(rows=0)
    with pytest.raises(PgQueueError, match=r"must end in \.pdf, \.png, \.svg"):
        story.run(picture_file=tmp_path / "days.bmp")
    with pytest.raises(PgQueueError, match="there is no folder"):
        story.run(picture_file=tmp_path / "none" / "days.png")


def test_the_file(table):
    whole = flights.read_file()
    assert whole.num_rows == 336_776
    assert table.equals(whole[:2000])
    assert {day for day, _ in flights.days_of(table)} == {
        "2013-01-01",
        "2013-01-02",
        "2013-01-03",
    }
    # What the desk may rely on: an aircraft, and an order of its flights.
    assert flights.delayed_of(whole)["tailnum"].null_count == 0
    assert flights.rarest_of(whole[:0]) is None


@contextmanager
def a_story(table, url, conn, tmp_path):
    """The story without Spark: what the router sends is sent here."""
    with ExitStack() as stack:
        queue = stack.enter_context(spark_pgqueue.connect(url))
        screen = Screen(Console(file=io.StringIO(), width=80))
        told = story.Story(url, queue, desk.Desk(conn), table, tmp_path, screen)
        story.create(told, stack)
        stack.enter_context(told.workers)
        yield told


@pytest.fixture
def told(table, url, conn, tmp_path):
    with a_story(table, url, conn, tmp_path) as told:
        yield told


def test_a_database_that_is_given_is_in_the_end_as_it_was(table, url, conn, tmp_path):
    conn.execute("select pgqueue.create_stream('mine')")
    with a_story(table, url, conn, tmp_path):
        assert conn.execute("select count(*) > 1 from pgqueue.streams").fetchone() == (True,)
    assert conn.execute("select name from pgqueue.streams").fetchall() == [("mine",)]
    assert conn.execute("select to_regnamespace('pgqueue_demo')").fetchone() == (None,)


def notices(table):
    """Keys and payloads of the notices of badly delayed flights."""
    rows = [{**row, "scheduled": f"{row['time_hour']:%FT%H}:{row['minute']:02}:00Z"}
            for row in flights.delayed_of(table).to_pylist()]  # fmt: skip
    keys = [f"delayed.{row['tailnum']}" for row in rows]
    return keys, [json.dumps(row, default=str) for row in rows]


def test_a_desk_that_is_killed_in_the_middle_rebooks_each_flight_once_in_order(told, table):
    keys, data = notices(table)
    told.queue.send_batch("notices", data, keys=keys)
    told.queue.alter_consumer("notices", "desk", {"visibility_timeout": "1 s"})
    told.start_desk()
    while not told.kill_desk():
        time.sleep(0.02)
    assert 0 < told.office.count() < len(data)
    told.wait_for_desk()
    told.dead_letters()
    expected = {name: value for name, value in flights.told_by(table).items() if "desk" in name}
    assert {name: told.seen[name] for name in expected} == expected
    said = told.screen.console.file.getvalue()
    assert "1. kill -9: desk 1 has rebooked" in said
    assert f"whom to call for {told.rarest}?" in said


def test_a_consumer_over_history_gets_all_of_it_and_then_retention_takes_it(told, table):
    rows = [json.dumps(row, default=str) for row in table.to_pylist()]
    told.queue.send_batch("flights", rows)
    for consumer in ("daily", "router"):
        told.queue.seek("flights", consumer, "latest")
    told.history()
    assert "because of consumer airports" in told.screen.console.file.getvalue()
    assert told.queue.retention("flights")[0].trimmed == 0
    told.retention()
    assert told.seen["airports: flights"] == told.seen["retention: messages gone"] == 2000
    assert told.seen["airports: of airports"] == flights.counts_of(table, "origin")


def test_a_worker_that_ends_by_itself_is_told(told, url, tmp_path):
    told.queue.send("notices", "{}", key="delayed.N14228")
    told.desk = Worker("desk 1", url, ["json:nothing", "notices", "desk"], tmp_path / "log", {})
    with pytest.raises(PgQueueError, match=r"desk 1 ended with 1: .*nothing"):
        told.wait_for_desk()


def test_a_wrong_figure_is_found(table):
    told = flights.told_by(table)
    assert Screen(Console(file=io.StringIO())).compare(told, told)

    days = flights.days_of(table)
    one = ("2013-01-02", "UA")
    days[one] = (days[one][0], days[one][1], (days[one][2] or 0) + 1)
    seen = {**told, **flights.daily_figures(days)}
    del seen["desk: twice"]
    output = io.StringIO()
    assert not Screen(Console(file=output, width=120)).compare(seen, told)
    differing = [
        line.split("│")[1].strip() for line in output.getvalue().splitlines() if "differs" in line
    ]
    assert differing == ["daily: minutes late", "daily: days, airlines", "desk: twice"]


def test_the_picture_has_a_bar_for_each_month(table):
    output = io.StringIO()
    days = {("2013-01-01", "UA"): (6, 5, 60), ("2013-01-31", "UA"): (3, 2, 20),
            ("2013-01-31", "AA"): (1, 1, 0), ("2013-02-01", "UA"): (1234, 100, 500),
            ("2013-03-01", "UA"): (2, 0, None)}  # fmt: skip
    picture.draw(days, Console(file=output, width=80))
    lines = [line.split() for line in output.getvalue().splitlines() if "2013" in line]
    assert [(month, count, minutes) for month, count, *_, minutes in lines] == [
        ("2013-01", "10", "10.0"),
        ("2013-02", "1,234", "5.0"),
        ("2013-03", "2", "0.0"),
    ]
    assert [line[2].count("━") for line in lines[:2]] == [40, 20]
