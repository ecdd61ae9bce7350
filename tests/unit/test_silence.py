"""A network or a server that falls silent, without a word, ends no client and hangs none."""

import ast
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

import spark_pgqueue
from spark_pgqueue.postgres import clock
from spark_pgqueue.postgres.adbc import call as adbc_call
from spark_pgqueue.postgres.adbc import kept_connection, let_go
from spark_pgqueue.postgres.errors import PgQueueError
from spark_pgqueue.postgres.retrying import is_passing
from spark_pgqueue.postgres.statements import Statements
from spark_pgqueue.postgres.time_limit import answers
from spark_pgqueue.postgres.url import with_credentials
from spark_pgqueue.worker import Consumer
from tests.conftest import Server
from tests.processes import wait_until

ALONE = r"""
import os, socket, subprocess, sys, threading, time
from psycopg.conninfo import make_conninfo
from spark_pgqueue.postgres.connection import connect, connect_adbc
from spark_pgqueue.postgres.retrying import is_passing
url, path = sys.argv[1:]
subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
proxy = socket.create_server(("127.0.0.1", 0))
def forward(a, b):
    while data := a.recv(1 << 16):
        b.sendall(data)
def serve():
    while True:
        near, _ = proxy.accept()
        far = socket.socket(socket.AF_UNIX)
        far.connect(path)
        for pair in ((near, far), (far, near)):
            threading.Thread(target=forward, args=pair, daemon=True).start()
threading.Thread(target=serve, daemon=True).start()
there = make_conninfo(url, host="127.0.0.1", port=proxy.getsockname()[1])
waiting, sending, arrow = connect(there), connect(there), connect_adbc(there, autocommit=True)
silent = threading.Event()
def look(name, statement, begins):
    if begins:
        silent.wait()
    began = time.monotonic()
    try:
        statement()
        print(name, "answered")
    except Exception as error:
        # one write: two threads notice it at the same moment
        os.write(1, f"{name} {is_passing(error)} {round(time.monotonic() - began)}\n".encode())
def copy():
    with arrow.cursor() as cursor:
        cursor.execute("select pg_sleep(100)")
        cursor.fetchall()
calls = [
    ("waiting", lambda: waiting.execute("select pg_sleep(100)"), False),
    ("sending", lambda: sending.execute("select 1"), True),
    ("adbc", copy, False),
]
threads = [threading.Thread(target=look, args=call, daemon=True) for call in calls]
for each in threads:
    each.start()
time.sleep(1)
subprocess.run(["tc", "qdisc", "add", "dev", "lo", "root", "blackhole"], check=True)
silent.set()
for each in threads:
    each.join(60)
os._exit(0)
"""
"""In a network of its own, with the server's socket behind a proxy, until all packets are lost."""


@pytest.mark.longer
@pytest.mark.promise("fault: the network loses packets: requests, answers, or both")
def test_a_network_that_loses_all_packets_is_noticed_in_half_a_minute(url, server, tmp_path):
    given = conninfo_to_dict(url)
    socket_path = f"{given['host']}/.s.PGSQL.{given['port']}"
    needed = ["unshare", "ip", "tc"]
    alone = ["unshare", "--net", "--"]
    if (
        not all(map(shutil.which, needed))
        or subprocess.run([*alone, "true"], check=False).returncode
    ):
        pytest.skip("install iproute2 and util-linux, and run as root")
    script = tmp_path / "alone.py"
    script.write_text(ALONE)
    done = subprocess.run(
        [*alone, sys.executable, script, url, socket_path],
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    said = dict(line.split(maxsplit=1) for line in done.stdout.splitlines())
    assert set(said) == {"waiting", "sending", "adbc"}, done.stderr
    for how in said.values():
        passes, seconds = how.split()
        assert passes == "True"
        assert 5 < int(seconds) <= 35


def no_thread_looks():
    return all(each.name != "pgqueue limit" for each in threading.enumerate())


@pytest.mark.parametrize("is_new", [True, False])
def test_a_statement_that_should_be_short_is_given_up_where_the_server_is_frozen(
    url, server, is_new
):
    """The frozen server answers TCP. The next call has a new connection. What was answered in time
    keeps its connection, and the thread that looks ends.
    """
    statements = Statements(url, limit=0.5)
    (pid,) = statements.row("select pg_backend_pid()")
    if not is_new:
        wait_until(no_thread_looks)
    os.kill(pid, signal.SIGSTOP)
    try:
        began = time.monotonic()
        with pytest.raises(PgQueueError) as caught:
            statements.row("select 1")
        assert is_passing(caught.value)
        assert time.monotonic() - began < 20
        assert statements.row("select 1") == (1,)
    finally:
        os.kill(pid, signal.SIGCONT)
        statements.close()


@pytest.fixture
def frozen(url: str, server: Server) -> Iterator[Callable[[], None]]:
    """Stops all processes of the server, which then answers TCP and nothing else."""
    (pid,) = Statements(url).row("select pg_read_file('postmaster.pid')")
    postmaster = psutil.Process(int(pid.split()[0]))
    stopped: list[psutil.Process] = []

    def freeze() -> None:
        for each in (postmaster, *postmaster.children()):
            each.suspend()
            stopped.append(each)

    yield freeze
    for each in stopped:
        with suppress(psutil.NoSuchProcess):
            each.resume()


def adbc_statement(url: str) -> Iterator[None]:
    with kept_connection(url, patience=0) as conn, conn.cursor() as cursor:
        yield
        adbc_call(cursor, "select 1")


def statement_in_a_transaction(url: str) -> Iterator[None]:
    statements = Statements(url, patience=0)
    with statements.transaction():
        yield
        statements.row("select 1")


def commit(url: str) -> Iterator[None]:
    statements = Statements(url, patience=0)
    with statements.transaction():
        statements.row("select 1")
        yield


def send(url: str) -> Iterator[None]:
    with spark_pgqueue.connect(url, patience=0) as queue:
        queue.create_stream("s")
        yield
        queue.send("s", "x")


def send_by_copy(url: str) -> Iterator[None]:
    with spark_pgqueue.connect(url, patience=0) as queue:
        queue.create_stream("copied")
        with queue.transaction():
            yield
            queue.send_batch("copied", ["x" * 1000] * 3000)


CALLS = (adbc_statement, statement_in_a_transaction, commit, send, send_by_copy)


def error_of(call: Iterator[None]) -> Exception | None:
    try:
        return next(call, None)
    except Exception as error:
        return error


@pytest.mark.promise("fault: Postgres hangs", "operations: a frozen server")
def test_whatever_waits_for_a_frozen_server_fails_as_for_a_lost_connection(
    url, server, frozen, monkeypatch
):
    """All at once: each waits for seconds."""
    for module in ("statements", "adbc"):
        monkeypatch.setattr(f"spark_pgqueue.postgres.{module}.SHORT", 0.5)
    monkeypatch.setattr("spark_pgqueue.postgres.time_limit.ANSWER", 1.0)
    calls = [call(make_conninfo(url, connect_timeout=2)) for call in CALLS]
    for call in calls:
        next(call)
    frozen()
    with ThreadPoolExecutor(len(calls)) as pool:
        errors = dict(zip(CALLS, pool.map(error_of, calls), strict=True))
    for call, error in errors.items():
        assert error is not None, call
        assert is_passing(error), (call, error)


def test_a_statement_that_is_long_at_work_is_left_alone(url, server, monkeypatch):
    for module in ("statements", "adbc"):
        monkeypatch.setattr(f"spark_pgqueue.postgres.{module}.SHORT", 0.3)
    sleep = "select 1 from pg_catalog.pg_sleep(1)"
    assert Statements(url).row(sleep) == (1,)
    with kept_connection(url) as conn, conn.cursor() as cursor:
        assert adbc_call(cursor, sleep) == [(1,)]
    let_go(url)


def test_who_waits_beside_an_open_transaction_notices_a_frozen_server(
    url, server, conn, monkeypatch
):
    """The wait asks again and again whether that transaction is over."""
    monkeypatch.setattr("spark_pgqueue.postgres.notifications.SHORT", 1.0)
    failed: list[BaseException] = []

    def receive(queue):
        try:
            queue.receive("s", "c", wait=timedelta(minutes=5))
        except PgQueueError as error:
            failed.append(error)

    with spark_pgqueue.connect(url) as sender, spark_pgqueue.connect(url) as queue:
        sender.create_stream("s")
        sender.create_consumer("s", "c")
        (pid,) = queue._statements.row("select pg_backend_pid()")
        with sender.transaction():
            sender.send("s", "x")
            threading.Thread(target=receive, args=[queue], daemon=True).start()
            find = "select from pg_stat_activity where pid = %s and query ~ 'still_publishing'"
            wait_until(lambda: conn.execute(find, [pid]).fetchone() is not None)
            os.kill(pid, signal.SIGSTOP)
            try:
                wait_until(lambda: failed)
            finally:
                os.kill(pid, signal.SIGCONT)
    assert is_passing(failed[0])


def test_another_host_of_a_url_does_not_answer_for_one_that_is_frozen(url):
    """What answers nothing is first of two hosts: the connection leads there."""
    given = conninfo_to_dict(url)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        two = make_conninfo(
            url,
            host=f"127.0.0.1,{given['host']}",
            port=f"{port},{given['port']}",
            connect_timeout=2,
        )
        with socket.create_connection(("127.0.0.1", port)) as conn:
            assert not answers(two, conn)
    with Statements(url).connection() as conn:
        assert answers(two, conn)


def test_a_password_file_that_is_missing_for_a_moment_says_nothing_of_the_server(url, tmp_path):
    """As while a secret is replaced: an error would end the watch of the connection."""
    file = tmp_path / "password"
    file.write_text("x")
    given = with_credentials(url, None, None, str(file))
    with Statements(url).connection() as conn:
        assert answers(given, conn)
        file.unlink()
        assert answers(given, conn)


@pytest.mark.promise("operations: a frozen server")
def test_a_worker_goes_on_after_a_frozen_server(url, server, conn, monkeypatch):
    for module in ("worker.poller", "postgres.notifications"):
        monkeypatch.setattr(f"spark_pgqueue.{module}.SHORT", 1.0)
    got: list[object] = []
    with spark_pgqueue.connect(url) as queue:
        queue.create_stream("s")
        queue.create_consumer("s", "c", start="earliest")
        worker = Consumer(url, "s", "c", worker="frozen")
        thread = threading.Thread(target=worker.run, args=(got.append,), daemon=True)
        thread.start()
        find = "select pid from pg_stat_activity where application_name = 'frozen'"
        wait_until(lambda: conn.execute(find).fetchone() is not None)
        queue.send("s", "x")
        wait_until(lambda: len(got) == 1)
        pids = [pid for (pid,) in conn.execute(find).fetchall()]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            queue.send("s", "y")
            wait_until(lambda: len(got) == 2, 60)
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
            worker.stop()
            thread.join(30)


def test_leases_go_by_a_clock_that_does_not_stop_in_suspend():
    """Nothing of a worker, nor what extends leases, asks a clock that stops."""
    boot = time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))
    assert 0 <= clock.now() - boot < 10
    package = Path(spark_pgqueue.__file__).parent
    files = [*(package / "worker").glob("*.py"), package / "client" / "consuming.py"]
    # Whoever wakes from suspend has not hung.
    files = [file for file in files if file.stem not in ("health", "supervision")]
    found = [
        (file.name, node.lineno)
        for file in files
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in ("monotonic", "perf_counter")
    ]
    assert found == []
