"""Fixtures of unit tests: a client, the command line, directories for embedded servers."""

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from typer.testing import CliRunner

import spark_pgqueue
from spark_pgqueue import embedded
from spark_pgqueue.client import Client
from spark_pgqueue.command_line import cli
from spark_pgqueue.postgres import connection, schema
from tests import handlers
from tests.sql import checker
from tests.sql.conftest import url as url  # with the stream s, if a test asks for it


@pytest.fixture
def stream() -> None:
    """Lets `url` have the text stream s."""


@pytest.fixture
def queue(url: str, stream: None, request: pytest.FixtureRequest) -> Iterator[Client]:
    """A client, with a stream s of text and its consumer c, as `CONSUMER` of the module says.

    It says how the consumer is made, or None for no consumer.
    """
    options = getattr(request.module, "CONSUMER", {})
    with spark_pgqueue.connect(url) as client:
        # it is new: a first segment is as old as it
        client._value("update pgqueue.streams set created_at = clock_timestamp() returning 1")
        if options is not None:
            client.create_consumer("s", "c", **options)
        yield client


def end_session(conn: psycopg.Connection, of: Any) -> None:
    """End the session of a client or a connection, from another one."""
    theirs = of._statements.connection() if isinstance(of, Client) else of
    conn.execute("select pg_terminate_backend(%s, 10000)", [theirs.info.backend_pid])


@pytest.fixture
def allowed_afterwards(url: str) -> Iterator[None]:
    """The test leaves the tables in a state that the invariants allow; those of this version."""
    yield
    with connection.connect(url) as conn:
        if schema.installed_version(conn) == schema.expected_version():
            checker.check(conn)


@pytest.fixture
def done(
    url: str, conn: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[], list[Any]]]:
    """The table done, in which `handlers` note what they handle; returns its rows."""
    monkeypatch.setenv("PGQUEUE_TEST_HANDLERS", url)
    conn.execute(handlers.TABLE)
    yield lambda: conn.execute("select seq, key, count, at from done order by n").fetchall()
    if handlers.conn.cache_info().currsize:
        handlers.conn().close()
        handlers.conn.cache_clear()


@pytest.fixture
def run(url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., str]]:
    """Run `pgqueue` with arguments, of which the first may be several words.

    Returns what it printed, of an error to standard error.
    """
    monkeypatch.setenv("PGQUEUE_URL", url)
    terminate = signal.getsignal(signal.SIGTERM)

    def run(first: str, *more: Any, code: int = 0, stdin: str | bytes = "") -> str:
        words = [*first.split(), *map(str, more)]
        result = CliRunner().invoke(cli.app, words, input=stdin)
        assert result.exit_code == code, result.output
        assert code == 0 or "Traceback" not in result.output
        return result.stderr if code else result.stdout

    yield run
    signal.signal(signal.SIGTERM, terminate)  # a command that goes on sets it for its process


@pytest.fixture(scope="session")
def stopped_server(servers_home: Path) -> Callable[[Path], Path]:
    """Make a folder the directory of an embedded Postgres that ran and stopped.

    It is a copy: initdb takes longer than most tests.
    """
    made = Path(tempfile.mkdtemp(dir=servers_home)) / "pg"
    embedded.start(made).close()

    def copy(folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.run(["cp", "-a", f"{made}/.", folder], check=True)
        return folder

    return copy


@pytest.fixture
def new_directory(servers_home: Path) -> Iterator[Path]:
    """The path of a directory that is not there yet; a server that is left in it ends."""
    home = Path(tempfile.mkdtemp(dir=servers_home))
    yield home / "pg"
    for running in home.rglob("postmaster.pid"):
        os.kill(int(running.read_text().split()[0]), signal.SIGQUIT)
    shutil.rmtree(home, ignore_errors=True)


@pytest.fixture
def directory(new_directory: Path, stopped_server: Callable[[Path], Path]) -> Path:
    """The directory of an embedded Postgres that ran and stopped."""
    return stopped_server(new_directory)


@pytest.fixture
def public(servers_home: Path) -> Iterator[Path]:
    """A folder that every user can enter, as no folder of pytest is."""
    made = Path(tempfile.mkdtemp(prefix="pgqueue-test-", dir=servers_home.parent))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made, ignore_errors=True)
