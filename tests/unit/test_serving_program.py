"""`pgqueue web` and `pgqueue metrics --listen` as programs: signals, ports, and raw requests."""

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

import spark_pgqueue
from tests.processes import EACH, started
from tests.unit.test_serving import HIDDEN, HOST, rest_of

PROGRAMS = {"web": "/api/look", "metrics": "/metrics"}
"""The programs, each with a path that asks the database."""


class Program(NamedTuple):
    process: subprocess.Popen[str]
    host: str
    port: int

    def connect(self) -> socket.socket:
        return socket.create_connection((self.host, self.port), timeout=20)

    def send(self, text: str) -> str:
        with self.connect() as conn:
            conn.sendall(text.encode("latin-1"))
            return rest_of(conn)

    def end(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        """The exit code, and what it printed on standard error after its first line."""
        self.process.send_signal(number)
        said = self.process.communicate(timeout=20)[1]
        return self.process.returncode, said


@contextmanager
def running(url: str, name: str, listen: str, *more: str) -> Iterator[Program]:
    with started(name, "--listen", listen, *more, url=url, stdout=None) as process:
        assert process.stderr is not None
        said = process.stderr.readline()
        assert said.startswith("Listening at http://"), said
        assert "to this machine only" in said
        assert "s3cr3t" not in said
        host, _, port = said.split("http://")[1].split("/")[0].rpartition(":")
        yield Program(process, host.strip("[]"), int(port))


@pytest.fixture
def start(url: str, conn: psycopg.Connection) -> Iterator[Callable[..., Program]]:
    with spark_pgqueue.connect(url) as client:
        client.create_stream("s")
    with ExitStack() as stack:
        yield lambda name, listen=":0", *more: stack.enter_context(
            running(make_conninfo(url, password="s3cr3t"), name, listen, *more)
        )


@pytest.mark.parametrize(
    ("name", "listen", "number"),
    [("web", "[::1]:0" if socket.has_ipv6 else ":0", signal.SIGINT),
     ("metrics", ":0", signal.SIGTERM)],
)  # fmt: skip
def test_it_ends_by_a_signal_also_while_it_is_asked(
    start: Callable[..., Program], name: str, listen: str, number: int
) -> None:
    """A client that has a connection does not keep it."""
    program = start(name, listen)
    assert program.host == ("::1" if "::1" in listen else "127.0.0.1")
    with program.connect():
        answer = program.send(f"GET {PROGRAMS[name]} HTTP/1.0\r\n{HOST}\r\n")
        assert answer.startswith("HTTP/1.1 200 ")
        assert ("pgqueue_up 1" in answer) == (name == "metrics")
        code, said = program.end(number)
    assert code == {signal.SIGINT: 130, signal.SIGTERM: 0}[number]  # type: ignore[index]
    assert "Traceback" not in said


def test_a_port_that_is_taken_is_an_error(url: str) -> None:
    with socket.create_server(("127.0.0.1", 0), reuse_port=True) as taken:  # as two of these would
        listen = f"--listen 127.0.0.1:{taken.getsockname()[1]}"
        done = each_of(url, EACH, *(f"{name} {listen}" for name in PROGRAMS))
    assert re.findall("^ended with (.*)$", done.stderr, re.MULTILINE) == ["1"] * 2
    assert done.stderr.count("Address already in use") == 2
    assert "Traceback" not in done.stderr


def each_of(url: str, script: str, *command_lines: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script, *command_lines],
        env={**os.environ, "PGQUEUE_URL": url}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip


def test_a_program_refuses_what_its_server_refuses(start: Callable[..., Program]) -> None:
    """One of each kind over the wire; test_serving.py has them all."""
    program = start("web", ":0", "--allow-actions", "--allow-host", "queue.example")
    look, act = "GET /api/look HTTP/1.1\r\n", f"POST /api/action HTTP/1.1\r\n{HOST}"
    length = "Content-Length: 2\r\n"
    for text, status in (
        (f"{look}Host: queue.example\r\nConnection: keep-alive\r\n\r\n{HIDDEN}", 200),
        (f"GET / HTTP/1.1\r\n{HOST}\r\n", 200),
        (f"HEAD / HTTP/1.1\r\n{HOST}\r\n", 200),
        (f"OPTIONS /api/action HTTP/1.1\r\n{HOST}Origin: http://evil.example\r\n\r\n", 501),
        (f"{look}Host: evil.example\r\n\r\n", 421),
        (f"{look}{HOST}Host: evil.example\r\n\r\n", 400),
        (f"{look}{HOST}X: a\x00b\r\n\r\n", 400),
        (f"GET /\x1b HTTP/1.1\r\n{HOST}\r\n", 400),
        (f"{look}{HOST}{length}\r\n{{}}", 400),
        (f"{act}{length}Transfer-Encoding: chunked\r\n\r\n{{}}", 400),
        (f"{act}Content-Length: 65537\r\n\r\n", 413),
        (f"{act}Origin: http://evil.example\r\n{length}\r\n{{}}", 403),
    ):
        answer = program.send(text)
        assert answer.startswith(f"HTTP/1.1 {status} "), (text, answer)
        assert answer.count("HTTP/1.1 ") == 1, (text, answer)
        assert "Connection: close" in answer
        assert "Access-Control" not in answer
        assert "s3cr3t" not in answer
        head, _, body = answer.partition("\r\n\r\n")
        assert (body == "") == text.startswith("HEAD"), head
    assert program.end()[1] == "", "it logs no request"


def test_without_its_extra_it_says_what_to_install_and_the_rest_works(
    url: str, conn: psycopg.Connection
) -> None:
    """Where h11 is missing, what serves ends with an error, and figures are printed; where PySpark
    is missing, the demo does not begin.
    """
    without = f"import sys; sys.modules['h11'] = sys.modules['pyspark'] = None\n{EACH}"
    work = ("metrics", "metrics --grafana", "web --help")
    serves = ("web --listen :0", "metrics --listen :0", "work tests.handlers:note s c --health :0")
    done = each_of(url, without, *work, *serves, "demo")
    assert re.findall("^ended with (.*)$", done.stderr, re.MULTILINE) == ["0"] * 3 + ["1"] * 4
    for part in ("pgqueue_up 1", '"title": "pgqueue"', "--allow-actions"):
        assert part in done.stdout
    assert done.stderr.startswith("ended with 0\n" * 3)
    assert done.stderr.count("spark-pgqueue[web]") == 3
    assert 'pip install ".[demo]"' in done.stderr
    assert "Traceback" not in done.stderr
