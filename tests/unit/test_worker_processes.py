"""Workers beside others in a process: signals, threads, forks, and programs that handlers start."""

import asyncio
import importlib
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from typing import Any

import psutil
import psycopg
import pytest

import spark_pgqueue
from spark_pgqueue import Consumer
from spark_pgqueue.worker import poller
from tests import handlers
from tests.processes import wait_until, worker

MOMENT = timedelta(milliseconds=50)
BOTH = (signal.SIGTERM, signal.SIGINT)
CONSUMER = {"settings": {"max_deliver_count": 1}}


def _some(cases, few):
    """Cases, of which the few run by default: the others are the same in other ways."""
    return [pytest.param(*c, marks=[pytest.mark.longer] * (c not in few)) for c in cases]


def counts(queue):
    (stats,) = queue.stats("s")
    return stats.backlog, stats.dead


@pytest.fixture
def as_before():
    """The handlers of signals are set again after the test."""
    before = {number: signal.getsignal(number) for number in BOTH}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_runs_of_a_loop_leave_its_threads_to_the_handlers(queue, url):
    """More runs than the loop has threads, whose handlers use these threads."""
    queue.send_batch("s", ["x"] * 60)
    begun = []

    async def handle(message):
        await asyncio.to_thread(time.sleep, 0.001)

    async def main():
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(1))
        runs = [
            Consumer(url, "s", "c").run_async(handle, on_start=lambda: begun.append(1), wait=MOMENT)
            for _ in range(5)
        ]
        return await asyncio.wait_for(asyncio.gather(*runs), 60)

    assert sum(asyncio.run(main())) == 60
    assert len(begun) == 5


def test_an_asynchronous_client_needs_no_thread_of_the_loop(queue, url):
    async def main():
        loop, over = asyncio.get_running_loop(), threading.Event()
        loop.set_default_executor(ThreadPoolExecutor(1))
        busy = loop.run_in_executor(None, over.wait, 60)
        async with await psycopg.AsyncConnection.connect(url) as conn:
            await asyncio.wait_for(spark_pgqueue.AsyncClient(conn).send("s", "x"), 30)
        assert not busy.done()
        over.set()
        await busy

    asyncio.run(main())


@pytest.mark.parametrize(
    ("number", "before"),
    _some(
        [(n, b) for b in ("function", "loop", "leaves", "default", "ignored") for n in BOTH],
        [(signal.SIGTERM, "function"), (signal.SIGTERM, "loop"), (signal.SIGINT, "leaves")],
    ),
)
def test_a_signal_ends_all_runs_and_reaches_the_application(queue, url, as_before, number, before):
    """Runs of a loop that begin and end in any order; afterwards all is as it was."""
    heard = []

    def leave(*_):
        heard.append("leave")
        raise SystemExit(3)

    async def wait(message):
        await asyncio.sleep(60)

    async def main():
        loop = asyncio.get_running_loop()
        given = {
            "function": lambda *_: heard.append("function"),
            "leaves": leave,
            "default": signal.SIG_DFL,
            "ignored": signal.SIG_IGN,
        }
        if before == "loop":
            loop.add_signal_handler(number, heard.append, "loop")
        else:
            signal.signal(number, given[before])
        set_before, woken = signal.getsignal(number), signal.set_wakeup_fd(-1)
        signal.set_wakeup_fd(woken)
        with suppress(SystemExit):
            short = asyncio.create_task(Consumer(url, "s", "c").run_async(wait, wait=MOMENT))
            long = [asyncio.create_task(Consumer(url, "s", "c").run_async(wait)) for _ in range(2)]
            await short
            os.kill(os.getpid(), number)
            await asyncio.wait_for(asyncio.gather(*long), 30)
        assert signal.getsignal(number) is set_before
        assert signal.set_wakeup_fd(woken) == woken
        await asyncio.sleep(0.05)
        if before == "loop":
            loop.remove_signal_handler(number)

    with suppress(SystemExit):
        asyncio.run(main())
    assert heard == ([before.replace("leaves", "leave")] if before[0] in "fl" else [])


def test_a_handler_that_is_set_during_a_run_stays(queue, url, as_before):
    queue.send("s", "x")
    heard = []

    def mine(number, frame):
        heard.append(number)
        before[0](number, frame)

    def on_start():
        before.append(signal.signal(signal.SIGTERM, mine))

    before: list[Any] = []
    signal.signal(signal.SIGTERM, lambda *_: heard.append("first"))
    run = Consumer(url, "s", "c").run
    run(lambda m: os.kill(os.getpid(), signal.SIGTERM), on_start=on_start)
    assert signal.getsignal(signal.SIGTERM) is mine
    queue.send("s", "y")
    run(lambda m: os.kill(os.getpid(), signal.SIGTERM))
    assert heard == [signal.SIGTERM, "first"] * 2
    assert signal.getsignal(signal.SIGTERM) is mine


def test_signals_are_left_alone_by_an_option_and_outside_of_the_main_thread(queue, url, as_before):
    def seen(**options):
        found = []
        queue.send("s", "x")
        note = lambda m: found.append(signal.getsignal(signal.SIGTERM))  # noqa: E731
        Consumer(url, "s", "c").run(note, wait=MOMENT, **options)
        return found[0]

    before = signal.getsignal(signal.SIGTERM)
    with ThreadPoolExecutor(1) as pool:
        assert seen(signals=False) is pool.submit(seen).result(30) is before is not seen()


@pytest.mark.usefixtures("done")
@pytest.mark.parametrize(
    "way", _some([("threads",), ("tasks",), ("processes",)], [("threads",), ("processes",)])
)
def test_handlers_begin_processes_as_elsewhere(queue, url, way):
    """A Pool ends, and the signal that ends its children does not stop the worker."""
    queue.send_batch("s", ["x"] * 3)

    async def note(message):
        handlers.note_with_a_pool(message)

    options: Any = {"processes": 1} if way == "processes" else {}
    handler = note if way == "tasks" else handlers.note_with_a_pool
    assert Consumer(url, "s", "c").run(handler, wait=MOMENT, **options) == 3


@pytest.mark.parametrize(
    "end", _some([("timeout",), ("die",), ("kill -9",), ("SIGTERM",)], [("timeout",), ("kill -9",)])
)
def test_what_a_process_has_started_ends_with_it(queue, url, done, end):
    """And programs do not ignore the signals that the process ignores."""
    queue.send("s", "die" if end == "die" else "x")
    options = {"processes": 1, "grace": timedelta(0)}
    if end in ("timeout", "die"):
        options |= {"timeout": timedelta(seconds=2), "wait": MOMENT}
        Consumer(url, "s", "c").run(handlers.note_programs, **options)
    else:
        with worker(url, "note_programs", **options) as child:
            wait_until(done)
            if end == "SIGTERM":
                child.process.send_signal(signal.SIGTERM)
                child.wait(30)
            else:
                child.kill_alone()
    ((_, pid, ignored, _),) = done()
    assert not ignored
    wait_until(lambda: not psutil.pid_exists(int(pid)) or _is_zombie(int(pid)), 10)


def test_a_timeout_is_not_of_a_process_that_starts(queue, url, tmp_path, monkeypatch):
    """Where one has died, and the next takes longer to import the handler."""
    (tmp_path / "takes_long_to_import.py").write_text(
        "import os, time\n"
        "time.sleep(0.8)\n"
        "def handle(message):\n"
        "    if message.data == 'kill':\n"
        "        os.kill(os.getpid(), 9)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    handle = importlib.import_module("takes_long_to_import").handle
    queue.send_batch("s", ["kill", "x", "x"])
    options: Any = {"processes": 1, "timeout": timedelta(seconds=0.5), "wait": timedelta(0)}
    assert Consumer(url, "s", "c").run(handle, **options) == 2
    assert counts(queue) == (0, 1)


def test_the_poller_rests_while_the_hook_of_a_call_that_it_ended_runs(queue, url, monkeypatch):
    """The call's timeout has passed all the while."""
    queue.send("s", "sleep")
    steps, seen = [], []
    step = poller.Poller._step

    def counted(self):
        steps.append(time.monotonic())
        step(self)

    def report(message, error):
        seen.append(time.monotonic())
        time.sleep(2)
        seen.append(time.monotonic())

    monkeypatch.setattr(poller.Poller, "_step", counted)
    options: Any = {"processes": 1, "timeout": timedelta(seconds=0.2), "wait": MOMENT}
    assert Consumer(url, "s", "c").run(handlers.do_as_told, on_failure=report, **options) == 0
    assert counts(queue) == (0, 1)
    began, ended = seen
    assert len([at for at in steps if began < at < ended]) < 20


def _is_zombie(pid):
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    return True


def test_finished_work_is_over_whatever_it_returns(queue, url, done):
    queue.alter_consumer("s", "c", settings={"max_deliver_count": 3})
    handler = handlers.rejected_with_details_of_its_own
    for each in (handler, handlers.note_and_return_what_leaves):
        queue.send("s", "x")
        Consumer(url, "s", "c").run(each, processes=1, wait=MOMENT)
    assert len(done()) == 2
    assert counts(queue) == (0, 1)


def test_a_child_that_returns_from_a_handler_reports_nothing(queue, url, tmp_path):
    queue.send_batch("s", ["x"] * 5)

    def handle(message):
        if os.fork() == 0:
            return
        with (tmp_path / "seen").open("a") as file:
            file.write(f"{os.getpid()}\n")
        os.wait()

    assert Consumer(url, "s", "c").run(handle, wait=MOMENT) == 5
    assert (tmp_path / "seen").read_text() == f"{os.getpid()}\n" * 5


def in_child(work):
    """What a call raises in a fork, as text; "" for nothing."""
    ours, theirs = multiprocessing.Pipe(False)
    if os.fork() == 0:
        said = ""
        try:
            work()
        except BaseException as error:
            said = str(error)
        theirs.send(said)
        os._exit(0)
    assert ours.poll(20), "the child hangs"
    said = ours.recv()
    os.wait()
    return said


def test_a_client_of_the_parent_is_refused_in_a_child(queue, url):
    """Whatever uses it, and what the child closes stays open for the parent."""
    queue.send_batch("s", ["x"] * 9)
    pid = queue._statements.connection().info.backend_pid

    consumed: Any = queue.consume("s", "c")
    queue.create_consumer("s", "d", start="earliest")
    listened: Any = Consumer(url, "s", "d").listen()
    next(consumed)
    next(listened)
    uses = [
        lambda: queue.send("s", "y"),
        lambda: queue.receive("s", "c", wait=timedelta(seconds=1)),
        lambda: queue.transaction().__enter__(),
        lambda: next(consumed),
        lambda: next(listened),
        lambda: next(queue.read("s")),
    ]
    for use in uses:
        assert "before it forked" in in_child(use)
    with queue.transaction():
        queue.send("s", "z")
        kept = queue._statements.connection()
        assert in_child(lambda: (queue.close(), kept.close())) == ""
        assert "before it forked" in in_child(lambda: queue.send("s", "y"))
    assert queue._statements.connection().info.backend_pid == pid
    assert in_child(lambda: spark_pgqueue.connect(url).send("s", "new")) == ""
    consumed.close()
    listened.close()

    async def main():
        async with await spark_pgqueue.connect_async(url) as client:
            await client.send("s", "x")

            def use():
                asyncio.set_event_loop(None)
                asyncio.events._set_running_loop(None)
                asyncio.run(client.send("s", "x"))

            assert "before it forked" in in_child(use)
            await client.send("s", "x")

    asyncio.run(main())


BLOCKED = """
import asyncio, time

async def blocks(message): time.sleep(600)

async def waits(message): await asyncio.to_thread(time.sleep, 600)

async def clings(message):
    while True:
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            pass
"""


@pytest.mark.parametrize("handler", ["blocks", "waits", "clings"])
def test_a_third_signal_ends_a_worker_whose_call_does_not_end(queue, url, tmp_path, handler):
    (tmp_path / "blocked.py").write_text(BLOCKED)
    queue.send("s", "x")
    command = [sys.executable, "-m", "spark_pgqueue", "work", f"blocked:{handler}", "s", "c"]
    path = os.pathsep.join([str(tmp_path), *sys.path])
    given = {**os.environ, "PGQUEUE_URL": url, "PYTHONPATH": path}
    with subprocess.Popen(command, env=given, stderr=subprocess.PIPE, text=True) as work:
        wait_until(lambda: queue.stats("s")[0].claimed == 1)
        work.terminate()
        time.sleep(0.5)
        work.terminate()
        wait_until(lambda: queue.stats("s")[0].claimed == 0)
        work.terminate()
        try:
            said = work.communicate(timeout=10)[1]
        finally:
            work.kill()
    assert work.returncode == 1
    assert "ended by a third signal" in said
