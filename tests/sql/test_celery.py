"""Celery's own workers over the schema pgmq, with the application of sql/guide/pgmq.md."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.pages import ROOT, blocks_of
from tests.processes import wait_until
from tests.sql import clock

pytest.importorskip("kombu.transport.pgmq", reason="needs kombu 5.7 or later")
pytest.importorskip("celery", reason="celery is not installed")

Conn = psycopg.Connection
(PAGE,) = re.findall(
    r"tasks.py <<'END'\n(.*?)END\n",
    "".join(text for tag, text in blocks_of((ROOT / "sql/guide/pgmq.md").read_text())),
    re.DOTALL,
)
MORE = """
import os, signal, time
import psycopg
from tasks import app, bill, url

app.conf.broker_transport_options |= {"polling_interval": 0.05, "visibility_timeout": VISIBILITY}
app.conf.task_acks_late = ACKS_LATE

def note(what):
    with psycopg.connect(url, autocommit=True) as conn:
        conn.execute("insert into notes (what) values (%s)", [what])

@app.task
def work(name, seconds=0):
    note(f"began {name}")
    time.sleep(seconds)
    note(f"ended {name}")

@app.task
def hold(name):
    note(f"began {name}")
    with psycopg.connect(url, autocommit=True) as conn:
        while not conn.execute("select 1 from notes where what = 'go on'").fetchone():
            time.sleep(0.05)
    note(f"ended {name}")

@app.task
def die():
    note("died")
    os.kill(os.getpid(), signal.SIGKILL)

@app.task
def double(n):
    return 2 * n

@app.task
def total(numbers):
    return sum(numbers)
"""


class Application:
    """The page's application, with tasks that note what they did."""

    def __init__(self, face: Conn, url: str, folder: Path, visibility: int, acks_late: bool):
        face.execute("create table notes (what text, at timestamptz default clock_timestamp())")
        more = MORE.replace("VISIBILITY", str(visibility)).replace("ACKS_LATE", str(acks_late))
        (folder / "tasks.py").write_text(PAGE)
        (folder / "more.py").write_text(more)
        self._folder, self._face = folder, face
        self._environment = {**os.environ, "PGQUEUE_URL": url, "PYTHONPATH": str(ROOT)}

    def notes(self) -> dict[str, list[datetime]]:
        """What tasks have noted, and when."""
        found: dict[str, list[datetime]] = {}
        for what, at in self._face.execute("select what, at from notes order by at"):
            found.setdefault(what, []).append(at)
        return found

    def ended(self) -> dict[str, int]:
        """How often each task ended, by its name."""
        return {what[6:]: len(at) for what, at in self.notes().items() if what.startswith("ended")}

    def owed(self) -> list[Any]:
        """The states of messages that are not done."""
        states = "select state from pgqueue.message_states where stream = 'celery'"
        return [state for (state,) in self._face.execute(states)]

    def call(self, code: str) -> str:
        """Run code beside the tasks; returns what it prints."""
        done = subprocess.run(
            [sys.executable, "-c", f"from more import *\n{code}"],
            cwd=self._folder, env=self._environment, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout.strip()

    @contextmanager
    def worker(self, name: str = "one", pool: str = "solo") -> Iterator[Callable[[], None]]:
        """A worker; the value kills it and its processes. It is killed at the end, too."""
        command = [sys.executable, "-m", "celery", "--app", "more", "worker", "--pool", pool,
                   "--concurrency", "2", "--hostname", name, "--loglevel", "info",
                   "--without-mingle", "--without-gossip"]  # fmt: skip
        with (self._folder / "worker.log").open("ab") as log:
            process = subprocess.Popen(
                command, cwd=self._folder, env=self._environment, stdout=log, stderr=log,
                stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip

        def kill() -> None:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

        try:
            yield kill
        finally:
            kill()

    def wait_until(self, condition: Callable[[], Any]) -> None:
        try:
            wait_until(condition)
        except AssertionError:
            log = (self._folder / "worker.log").read_text()
            raise AssertionError(f"{self.ended()}, {self.owed()}, {log[-4000:]}") from None


Make = Callable[..., Application]
SENDING = """
print(bill.delay(13).id)
note("sending")
work.apply_async(["eta"], countdown=1)
work.apply_async(["delayed"], DelaySeconds=1)
for n in range(5):
    work.delay(n)
hold.delay("long")
"""


@pytest.fixture
def application(face: Conn, url: str, tmp_path: Path) -> Make:
    def make(visibility: int = 3600, acks_late: bool = True) -> Application:
        return Application(face, url, tmp_path, visibility, acks_late)

    return make


@pytest.mark.promise(
    "pgmq: this page's application: tasks, retries, delays, and a worker that is killed"
)
def test_tasks_retries_delays_and_a_worker_that_is_killed(application: Make, face: Conn) -> None:
    """Each ends, none before its time; only what the killed worker had is run again."""
    made = application()
    with made.worker() as kill:
        retried = made.call(SENDING)
        made.wait_until(lambda: "began long" in made.notes())
        kill()
    face.execute("insert into notes (what) values ('go on')")
    clock.end_leases(face)
    with made.worker():
        made.wait_until(lambda: {"long", "eta", "delayed"} <= {*made.ended()})
        made.wait_until(lambda: made.owed() == [])
    status = "select status from celery_taskmeta where task_id = %s"
    assert face.execute(status, [retried]).fetchall() == [("SUCCESS",)]
    notes = made.notes()
    assert len(notes["began long"]) == 2
    ended = made.ended()
    assert ended.pop("eta") <= 2, "beside another one, so that it may have been killed, too"
    assert ended == dict.fromkeys([*map(str, range(5)), "long", "delayed"], 1)
    for late in ("began eta", "began delayed"):
        assert (notes[late][0] - notes["sending"][0]).total_seconds() >= 1


@pytest.mark.longer
@pytest.mark.slow
@pytest.mark.promise("pgmq: 101 tasks beside workers that are killed")
def test_each_of_101_tasks_is_run_though_workers_are_killed(application: Make, face: Conn) -> None:
    """By processes beside a worker that stays; only what they had is run again."""
    made = application(visibility=5)
    made.call("for n in range(100): work.delay(n, 0.05)\nwork.apply_async(['eta'], countdown=2)")
    with made.worker("stays"):
        for count in (10, 30, 60):
            with made.worker("dies", pool="prefork") as kill:
                made.wait_until(lambda count=count: len(made.ended()) > count)
                kill()
        made.wait_until(lambda: len(made.ended()) == 101 and made.owed() == [])
    assert sum(made.ended().values()) <= 101 + 3 * 4, "only what a killed worker had is run again"


@pytest.mark.longer
@pytest.mark.slow
@pytest.mark.promise("pgmq: a chord, and a dead letter")
def test_a_chord_and_a_task_that_kills_each_of_its_processes(application: Make, face: Conn) -> None:
    """The chord has its result; the task becomes a dead letter that names it."""
    made = application()
    made.call("die.delay()")
    alter = "select pgqueue.alter_consumer('celery', 'pgmq', '{\"max_deliver_count\": 2}')"
    face.execute(alter)
    with made.worker(pool="prefork"):
        made.wait_until(lambda: made.owed() == ["dead"])
        chord = "chord([double.s(n) for n in range(5)])(total.s()).get(timeout=60)"
        assert made.call(f"from celery import chord\nprint({chord})") == "20"
    assert len(made.notes()["died"]) == 2
    (dead,) = face.execute("select headers ->> 'task' from pgqueue.read_dead('celery', 'pgmq')")
    assert dead == ("more.die",)


@pytest.mark.longer
@pytest.mark.slow
@pytest.mark.parametrize("how", ["work.delay('x', 3)", "work.apply_async(['x'], countdown=4)"])
@pytest.mark.promise("pgmq: a task beyond the visibility timeout")
def test_what_outlasts_the_visibility_timeout_runs_twice(application: Make, how: str) -> None:
    """As the page warns: a long task, and one that waits in a worker."""
    made = application(visibility=1)
    with made.worker("one"), made.worker("two"):
        made.call(how)
        made.wait_until(lambda: made.ended().get("x", 0) > 1)


@pytest.mark.longer
@pytest.mark.promise("pgmq: a task that was acknowledged early")
def test_a_task_that_was_acknowledged_before_is_lost_with_its_worker(application: Make) -> None:
    """As the page warns of Celery's default."""
    made = application(acks_late=False)
    with made.worker() as kill:
        made.call("work.delay('x', 5)")
        made.wait_until(lambda: "began x" in made.notes())
        kill()
    assert made.owed() == []
    assert made.ended() == {}


@pytest.mark.longer
def test_names_that_pgmq_does_not_allow(application: Make, face: Conn) -> None:
    """As the page warns: the queue for answers to `celery inspect`."""
    made = application()
    with pytest.raises(AssertionError, match="queue name is too long, maximum length is 47"):
        made.call("app.conf.worker_enable_remote_control = True; app.control.inspect().ping()")
