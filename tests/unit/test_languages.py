"""The page of other languages: its programs send, receive, acknowledge and wait."""

import os
import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

import spark_pgqueue
from tests.pages import ROOT, blocks_of, environment_of
from tests.processes import wait_until

PAGE = (ROOT / "sql/guide/languages.md").read_text()
JARS = ("/usr/share/java", Path.home() / ".m2/repository/org/postgresql/postgresql")

pytestmark = pytest.mark.longer


def program(language: str) -> str:
    """The page's only block of a language."""
    (found,) = [text for tag, text in blocks_of(PAGE) if tag == language]
    return found


@contextmanager
def by_tcp(folder: str, port: str) -> Iterator[int]:
    """A port of this machine that leads to a server's socket: Java has no sockets of files."""

    def copy(source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data)
        with suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    def serve() -> None:
        with suppress(OSError):
            while True:
                here, _ = listening.accept()
                there = socket.socket(socket.AF_UNIX)
                there.connect(f"{folder}/.s.PGSQL.{port}")
                for pair in ((here, there), (there, here)):
                    threading.Thread(target=copy, args=pair, daemon=True).start()

    with closing(socket.create_server(("127.0.0.1", 0))) as listening:
        threading.Thread(target=serve, daemon=True).start()
        yield listening.getsockname()[1]


def works(command: list[str], url: str, folder: Path, conn: psycopg.Connection) -> None:
    """A program has its own message, then waits, gets one that is sent then, and settles both."""
    conn.execute("select pgqueue.create_stream('mails')")
    conn.execute("select pgqueue.create_consumer('mails', 'relay')")
    with subprocess.Popen(
        command,
        cwd=folder,
        env=environment_of(url),
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        timer = threading.Timer(60, process.kill)
        timer.start()
        try:
            first = process.stdout.readline()
            waits = "select _pgqueue.is_waited_for(stream_id) from pgqueue.streams"
            wait_until(lambda: conn.execute(waits).fetchone() == (True,))
            conn.execute("select pgqueue.send('mails', '{\"to\": \"fay\"}', p_key => 'fay')")
            second = process.stdout.readline()
            with spark_pgqueue.connect(url) as queue:
                found = queue.wait_for("mails", "relay", 2, timedelta(seconds=30))
        finally:
            timer.cancel()
            os.killpg(process.pid, signal.SIGKILL)
    assert '{"to": ' in first
    assert first.startswith("1 ")
    assert second == '2 fay {"to": "fay"}\n'
    assert found.state == "done"


def test_node(url, conn, tmp_path):
    if not (shutil.which("node") and shutil.which("npm")):
        pytest.skip("no node and npm (on Debian and Ubuntu: apt install nodejs npm)")
    there = subprocess.run(["npm", "install", "pg@8"], cwd=tmp_path, capture_output=True, text=True)
    if there.returncode:
        pytest.skip(f"npm cannot install pg: {there.stderr[-200:]}")
    (tmp_path / "main.js").write_text(program("js"))
    works(["node", "main.js"], url, tmp_path, conn)


def test_java(url, conn, tmp_path):
    jars = [jar for folder in JARS for jar in sorted(Path(folder).rglob("postgresql*.jar"))]
    if not (shutil.which("java") and shutil.which("javac") and jars):
        pytest.skip(
            "no JDK with a driver (apt install default-jdk-headless libpostgresql-jdbc-java)"
        )
    (tmp_path / "Mails.java").write_text(program("java"))
    given = conninfo_to_dict(url)
    with by_tcp(str(given["host"]), str(given["port"])) as port:
        address = f"jdbc:postgresql://127.0.0.1:{port}/{given['dbname']}?user={given['user']}"
        command = ["java", "-cp", str(jars[-1]), "Mails.java", address]
        works(command, url, tmp_path, conn)
