"""Probes and systemd learn whether a worker is alive and ready, and a stop counts no delivery."""

import json
import os
import re
import signal
import socket
import time
import urllib.error
import urllib.request
from collections import Counter
from contextlib import suppress
from datetime import timedelta

import pytest

import spark_pgqueue
from spark_pgqueue import Consumer, PgQueueError
from tests.processes import EACH, Child, started, wait_until
from tests.unit.test_serving_program import each_of

pytestmark = pytest.mark.usefixtures("allowed_afterwards")
CONSUMER = {"start": "earliest", "settings": {"max_deliver_count": 1}}

HANGING = """
    import asyncio, sys, time
    import spark_pgqueue
    from spark_pgqueue.worker import health
    from spark_pgqueue.worker.poller import Poller
    health.HUNG_AFTER = 1.5
    url, where, what = sys.argv[1:]

    def wait(*_):
        time.sleep(60)

    async def block(message):
        wait()

    async def sleep(message):
        await asyncio.sleep(60)

    worker = spark_pgqueue.Consumer(url, "s", "c")
    with spark_pgqueue.supervised(worker, health=where):
        if what == "event loop":
            worker.run(block)
        elif what == "task":
            worker.run(sleep)
        elif what == "poller":
            Poller._extend = wait  # which it calls in each step
            worker.run(print)
        elif "start" in what:
            worker.run(block if "loop" in what else wait, on_start=wait)
        else:
            worker.run(wait)
"""


def free_address():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{found.getsockname()[1]}"


def probe(where, path):
    """The code of the answer, and the status in it."""
    try:
        with urllib.request.urlopen(f"http://{where}{path}", timeout=10) as answer:
            return answer.status, json.load(answer)["status"]
    except urllib.error.HTTPError as error:
        return error.code, json.load(error).get("status")
    except OSError:
        return None, None


class Systemd:
    """The socket of a service manager, and the lines that arrived there."""

    def __init__(self, name, watchdog=0.4):
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(name)
        self._socket.setblocking(False)
        address = "@" + name[1:] if name.startswith("\0") else name
        self.environment = {"NOTIFY_SOCKET": address, "WATCHDOG_USEC": str(int(watchdog * 1e6))}
        self._lines = []

    @property
    def lines(self):
        with suppress(BlockingIOError):
            while True:
                self._lines += self._socket.recv(4096).decode().split("\n")
        return self._lines

    def close(self):
        self._socket.close()


@pytest.fixture(params=["path", "abstract"])
def systemd(request, tmp_path):
    name = str(tmp_path / "notify") if request.param == "path" else f"\0pgqueue-{os.getpid()}"
    manager = Systemd(name)
    yield manager
    manager.close()


@pytest.mark.promise("deploy: alive and ready")
def test_systemd_and_probes_learn_when_a_worker_is_ready_and_when_it_stops(
    queue, url, systemd, done
):
    """While a call has the time that it gets after SIGTERM, the worker is alive, and not ready."""
    where = free_address()
    command = ("work", "tests.handlers:begin", "s", "c", "--health", where)
    with started(*command, url=url, environment=systemd.environment) as process:
        wait_until(lambda: probe(where, "/ready") == (200, "working"))
        assert probe(where, "/live") == (200, "working")
        assert probe(where, "/")[0] == 404
        wait_until(lambda: systemd.lines.count("WATCHDOG=1") > 2)
        queue.send("s", "x")
        wait_until(done)
        process.terminate()
        wait_until(lambda: probe(where, "/ready") == (503, "stopping"))
        assert probe(where, "/live") == (200, "stopping")
        wait_until(lambda: "STOPPING=1" in systemd.lines)
        pings = systemd.lines.count("WATCHDOG=1")
        wait_until(lambda: systemd.lines.count("WATCHDOG=1") > pings)
        process.terminate()
        assert process.wait(20) == 0
    others = [each for each in systemd.lines if each not in ("WATCHDOG=1", "STATUS=starting")]
    assert set(others) == {"STATUS=working", "READY=1", "STATUS=stopping", "STOPPING=1"}
    assert others.count("READY=1") == 1
    assert others.index("READY=1") < others.index("STOPPING=1")


@pytest.mark.parametrize(
    "what", ["event loop", "poller", "start", "loop's start", "handler", "task"]
)
@pytest.mark.promise("deploy: alive and ready")
def test_what_hangs_is_not_alive_and_gets_no_watchdog(queue, url, tmp_path, what):
    """But a start or a handler may take as long as it does."""
    hangs = what in ("event loop", "poller")
    where, systemd = free_address(), Systemd(str(tmp_path / "notify"))
    queue.send("s", "x")
    with Child(HANGING, url, where, what, environment=systemd.environment) as child:
        if hangs:
            child.wait_until(lambda: probe(where, "/live") == (503, f"the {what} hangs"))
            assert probe(where, "/ready")[0] == 503
        else:
            starts = "start" in what
            status = "starting" if starts else "working"
            child.wait_until(lambda: probe(where, "/live") == (200, status))
            time.sleep(2.5)
            assert probe(where, "/live") == (200, status)
            assert probe(where, "/ready")[0] == (503 if starts else 200)
        # What nobody reads fills the socket, and the next ping waits before it.
        assert "STATUS=" in "".join(systemd.lines)
        time.sleep(0.5)
        pings = systemd.lines.count("WATCHDOG=1")
        time.sleep(1)
        assert (systemd.lines.count("WATCHDOG=1") == pings) == hangs
        child.kill()
    systemd.close()


@pytest.mark.promise("deploy: alive and ready")
def test_a_worker_without_postgres_is_alive_and_not_ready(url, server):
    """A restart of the worker would bring Postgres back no sooner."""
    with spark_pgqueue.connect(url) as client:
        client.create_stream("s")
        client.create_consumer("s", "c")
    where = free_address()
    with started("work", "tests.handlers:note", "s", "c", "--health", where, url=url) as process:
        wait_until(lambda: probe(where, "/ready")[0] == 200)
        server.stop()
        try:
            wait_until(lambda: probe(where, "/ready") == (503, "waiting for Postgres"))
            assert probe(where, "/live")[0] == 200
        finally:
            server.restart()
        wait_until(lambda: probe(where, "/ready") == (200, "working"))
        assert process.poll() is None


def test_a_worker_whose_schema_has_another_version_is_never_ready(queue, url, conn, tmp_path):
    body = "create or replace function pgqueue.schema_version() returns int language sql as"
    (version,) = conn.execute("select pgqueue.schema_version()").fetchone()
    systemd = Systemd(str(tmp_path / "notify"))
    conn.execute(f"{body} 'select {version + 1}'")
    command = ("work", "tests.handlers:note", "s", "c")
    with started(*command, url=url, environment=systemd.environment) as process:
        said = process.communicate(timeout=60)[1]
    conn.execute(f"{body} 'select {version}'")
    assert process.returncode == 1
    assert "version" in said
    assert "READY=1" not in systemd.lines
    systemd.close()


def test_all_workers_of_a_program_are_asked(queue, url):
    """One that is ready does not answer for another."""
    ready, other = Consumer(url, "s", "c"), Consumer(url, "s", "c")
    where, seen = free_address(), []

    def look(message):
        seen.append((ready.health.is_ready, other.health.is_ready, probe(where, "/ready")[0]))

    queue.send("s", "x")
    with spark_pgqueue.supervised(ready, other, health=where):
        assert probe(where, "/ready") == (503, "not running")
        ready.run(look, wait=timedelta(0))
    queue.send("s", "y")
    with spark_pgqueue.supervised(ready, health=where):
        ready.run(look, wait=timedelta(0))
    assert seen == [(True, False, 503), (True, False, 200)]


def test_what_cannot_be_listened_on_is_an_error_before_a_message(queue, url):
    queue.send("s", "x")
    worker = Consumer(url, "s", "c")
    refused = pytest.raises(PgQueueError, match=r"health: 'a:b' is not HOST:PORT")
    with refused, spark_pgqueue.supervised(worker, health="a:b"):
        pass
    with socket.create_server(("127.0.0.1", 0), reuse_port=True) as taken:
        port = taken.getsockname()[1]
        work = "work tests.handlers:note s c --wait 0 --health"
        done = each_of(url, EACH, f"{work} a:b", f"{work} {port}")
    assert re.findall("^ended with (.*)$", done.stderr, re.MULTILINE) == ["2", "1"]
    assert "'a:b' is not HOST:PORT" in done.stderr
    assert "Address already in use" in done.stderr
    assert queue.stats("s")[0].backlog == 1


def test_a_watchdog_of_another_process_gets_no_pings(queue, url, tmp_path, monkeypatch):
    """systemd names the process that it watches: a child has the variables, too."""
    systemd = Systemd(str(tmp_path / "notify"), watchdog=0.1)
    for name, value in {**systemd.environment, "WATCHDOG_PID": "1"}.items():
        monkeypatch.setenv(name, value)
    queue.send("s", "x")
    worker = Consumer(url, "s", "c")
    with spark_pgqueue.supervised(worker):
        worker.run(lambda message: wait_until(lambda: "READY=1" in systemd.lines) or worker.stop())
    assert "WATCHDOG=1" not in systemd.lines
    assert systemd.lines[-1] == "STOPPING=1"
    systemd.close()


STOPS = {
    "threads": {"handler": "begin", "concurrency": 2},
    "processes": {"handler": "begin", "processes": 2},
    "tasks": {"handler": "begin_async", "concurrency": 2},
    "transactional": {"handler": "begin", "concurrency": 2, "transactional": True},
    "batches": {"handler": "begin", "batch": 5},
}

STOPPED = """
import datetime, sys
from spark_pgqueue import Consumer
from tests import handlers
url, options = sys.argv[1], eval(sys.argv[2])
handler = getattr(handlers, options.pop("handler"))
Consumer(url, "s", "c").run(handler, grace=datetime.timedelta(seconds=0.3), **options)
"""


@pytest.mark.parametrize("ordering", ["none", "key"])
@pytest.mark.parametrize("way", STOPS)
@pytest.mark.promise(
    "fault: a worker is stopped by SIGTERM (rollout)", "deploy: a stop counts no delivery"
)
def test_a_stop_counts_no_delivery(queue, url, done, way, ordering):
    """What was claimed ahead, and what the stop interrupted, comes again as for the first time.

    SIGTERM reaches all processes of the worker, as it does from systemd without KillMode=mixed.
    """
    queue.create_consumer("s", "ordered", start="earliest", ordering="key")
    consumer = "c" if ordering == "none" else "ordered"
    data = ["quick"] * 40 + ["x"] * 40  # after quick ones, it claims ahead
    queue.send_batch("s", data, keys=[f"k{i % 20}" for i in range(80)])
    script = STOPPED.replace('"c"', f'"{consumer}"')
    with Child(script, url, repr(STOPS[way])) as child:
        child.wait_until(lambda: len(done()) >= (1 if way == "batches" else 2), 60)
        # More than the two that it has begun; in batches, those of a key wait for the batch.
        child.wait_until(lambda: stats(queue, consumer).claimed > 2, 60)
        for process in [*child.descendants(), child.process]:
            process.send_signal(signal.SIGTERM)
        assert child.wait(30) == 0, child.output
    now = stats(queue, consumer)
    assert (now.claimed, now.dead) == (0, 0)
    assert now.backlog >= 40
    got = Counter()
    while claim := queue.receive("s", consumer, 80):
        assert {message.deliver_count for message in claim.messages} == {1}
        got.update(message.seq for message in claim.messages)
        claim.ack()
    assert [*got.values()] == [1] * now.backlog


def stats(queue, consumer):
    (found,) = [each for each in queue.stats("s") if each.consumer == consumer]
    return found


@pytest.mark.parametrize(("host", "code"), [("127.0.0.1", 421), ("0.0.0.0", 200)])
def test_a_port_for_other_machines_answers_by_the_name_that_they_use(queue, url, host, code):
    """Such as that of a service; on a local address, a page of a browser could have such a name."""
    where = free_address().replace("127.0.0.1", host)
    seen = []

    def look(message):
        request = urllib.request.Request(f"http://127.0.0.1:{where.rpartition(':')[2]}/live")
        request.add_header("Host", "worker:8080")
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                seen.append(answer.status)
        except urllib.error.HTTPError as error:
            seen.append(error.code)

    queue.send("s", "x")
    worker = Consumer(url, "s", "c")
    with spark_pgqueue.supervised(worker, health=where):
        worker.run(look, wait=timedelta(0))
    assert seen == [code]
