"""Fixtures: real Postgres servers, a database per test, and a Spark session.

PGQUEUE_TEST_ODD=1 sets all that changes a meaning to an odd value, for all roles (`sql/odd.py`).
PGQUEUE_TEST_VERSIONS chooses major versions of Postgres ("16,18"; by default 18, and for
the longer tests the oldest that is found); `fetched` brings 17 and 19. PGQUEUE_TEST_URL uses a
given server in place of embedded ones (a superuser's url; databases named pgqueue_test_* are made
and dropped there).
"""

from __future__ import annotations

import fcntl
import functools
import gc
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import psycopg
import pytest
import typer.main
import typer.testing
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

from spark_pgqueue import embedded, java
from spark_pgqueue.postgres import binaries, connection, schema
from spark_pgqueue.postgres.errors import PgQueueError
from tests import fetched
from tests.sql import freeze, limits, odd

# Modules of helpers that assert; pytest says why an assertion fails only where it is told to.
for helper in ("checker", "cost", "crossing_judge", "model", "owing", "queue"):
    pytest.register_assert_rewrite(f"tests.sql.{helper}")

# CliRunner makes all commands of an app again for each call: 93 ms of 100.
typer.testing._get_command = functools.cache(typer.main.get_command)  # type: ignore[attr-defined]

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

VERSIONS = (18, 16, 15)  # those that dependencies bring, or Debian 12
SEVERAL = ("all_versions", "each_version")
ROOT = Path(__file__).parent.parent

# Where servers keep their data, if there is room. A database for each test is some 350 files: to
# make those on a disk may take as long as the tests.
MEMORY = Path("/dev/shm")
ROOM = 8 << 30  # bytes: all processes take 5 GB, and their servers' data up to 3 GB

# Names of tests that share what takes long to make: a Spark session, a browser, an environment.
# Those of two halves of tests/spark make a session each: one would be the last to end.
TOGETHER = (
    "tests/spark/test_[st]",
    "tests/spark/",
    "tests/test_newcomers.py",
    "tests/test_wheel.py",
    "tests/unit/test_web.py",
)
# ... but for those that start applications of their own, and have no session here.
APART = (
    r"tests/spark/test_(cluster|crash|ending|half_open|offset_source_crash|stateful|"
    r"register(?!\.py::test_a_python_without))\.py"
)

# What a test's name says of the version of its server, if that is not the newest of `VERSIONS`.
OLDER = rf"\bpg(?!{VERSIONS[0]}\b)\d+\b"

# Nothing here outlives the run, so that nothing has to reach the disk. With synchronous_commit off,
# a Postgres that is killed forgets the last commits, but never what Spark was told.
SETTINGS = {
    "fsync": "off",
    "synchronous_commit": "off",
    "full_page_writes": "off",
    "max_connections": 200,
    "max_wal_size": "512MB",
    "max_prepared_transactions": 10,
    "log_lock_waits": "on",
}
if os.environ.get("PGQUEUE_TEST_ODD"):
    SETTINGS |= odd.SETTINGS

WITHOUT = os.environ.get("PGQUEUE_TEST_WITHOUT", "").split()
"""Features that the schemas of tests do not have."""


class GivenServer:
    """The server of PGQUEUE_TEST_URL, with what tests use of `embedded.Server`."""

    def __init__(self, url: str):
        self.url = url

    def url_of(self, database: str) -> str:
        return make_conninfo(self.url, dbname=database)

    def stop(self, mode: str = "fast") -> None:
        pytest.skip("PGQUEUE_TEST_URL names a server that tests cannot stop")

    def restart(self, mode: str = "fast") -> None:
        pytest.skip("PGQUEUE_TEST_URL names a server that tests cannot restart")


Server = embedded.Server | GivenServer


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give tests marked all_versions the newest version and the oldest, and others the newest.

    Those marked each_version run on the fetched versions too. All but the newest are for the
    longer tests, unless versions were chosen: those run all.
    Those marked small_limits run in a database whose limits are 2 or 3, where all that limits do
    is met by few messages, and with the usual limits in the longer tests.
    Those marked previous_version also run, in the longer tests, in a database of the previous
    version of the schema.
    """
    if metafunc.definition.get_closest_marker("previous_version"):
        metafunc.parametrize(
            "template", ["usual", pytest.param("previous", marks=pytest.mark.longer)],
            indirect=True, scope="session", ids=[pytest.HIDDEN_PARAM, "previous_version"],
        )  # fmt: skip
    if metafunc.definition.get_closest_marker("small_limits"):
        metafunc.parametrize(
            "template", [pytest.param("usual", marks=pytest.mark.longer), "small"],
            indirect=True, scope="session", ids=[pytest.HIDDEN_PARAM, "small_limits"],
        )  # fmt: skip
    if "server" not in metafunc.fixturenames:
        return
    several = [each for each in SEVERAL if metafunc.definition.get_closest_marker(each)]
    older: list[int] = []
    if os.environ.get("PGQUEUE_TEST_URL"):
        versions: list[int | str] = ["given"]
    elif chosen := os.environ.get("PGQUEUE_TEST_VERSIONS"):
        versions = [int(v) for v in chosen.split(",")]
    else:
        versions = [VERSIONS[0]]
        older = [*(fetched.SUITES if "each_version" in several else ()), _oldest()]
    if not several:
        versions, older = versions[:1], []
    newer = [pytest.param(version, id=f"pg{version}") for version in versions]
    longer = [pytest.param(each, id=f"pg{each}", marks=pytest.mark.longer) for each in older]
    metafunc.parametrize("server", newer + longer, indirect=True, scope="session")


def pytest_configure() -> None:
    """Let Ctrl-C end what tests start, also where a shell runs pytest in the background."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longer tests: with short ones at the end, all processes end together."""
    items.sort(key=lambda item: item.get_closest_marker("longer") is None)


def pytest_collection_finish() -> None:
    """Let no collection of garbage look at all tests and modules: that took 2% of a run."""
    gc.freeze()


@functools.cache
def _oldest() -> int:
    """The oldest version that is found; if none is, the oldest, whose tests say what is missing."""
    for version in reversed(VERSIONS):
        with suppress(PgQueueError):
            binaries.find_binaries(version)
            return version
    return VERSIONS[-1]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Scheduler:
    """How tests are shared out to processes."""
    return Scheduler(config, log)


class Scheduler(LoadScopeScheduling):
    """Each test goes to the process that is free; those of a scope in `TOGETHER` to one.

    So do those of an older Postgres, which starts once then, unless versions were chosen.

    Not by the mark xdist_group: pytest-xdist 3.8 does not see it with pytest 9.2.
    """

    def _split_scope(self, nodeid: str) -> str:
        scopes = () if re.match(APART, nodeid) else TOGETHER
        older = not os.environ.get("PGQUEUE_TEST_VERSIONS") and re.search(OLDER, nodeid)
        single = older[0] if older else nodeid
        return next((scope for scope in scopes if re.match(scope, nodeid)), single)


@pytest.fixture(scope="session")
def servers_home() -> Iterator[Path]:
    """A folder for servers."""
    # Not pytest's own directory: another pytest of root takes the server's user its way to it.
    home = Path(tempfile.mkdtemp(prefix="pgqueue-test-", dir=_folder_in_memory()))
    yield home
    shutil.rmtree(home, ignore_errors=True)


@pytest.fixture(scope="session")
def _servers(servers_home: Path) -> Iterator[Callable[[int | str], Server]]:
    """Start servers on demand, each once, with a template database that has the schema."""
    servers: dict[int | str, Server] = {}

    with ExitStack() as stack:

        def get(version: int | str) -> Server:
            if version in servers:
                return servers[version]
            if version == "given":
                return servers.setdefault(version, GivenServer(os.environ["PGQUEUE_TEST_URL"]))
            try:
                fetched.find(int(version))
            except PgQueueError as error:
                pytest.skip(str(error))
            settings = odd.accepted(SETTINGS, int(version))
            server = embedded.start(
                servers_home / str(version), version=int(version), settings=settings
            )
            return servers.setdefault(version, stack.enter_context(server))

        yield get


def _folder_in_memory() -> Path | None:
    """Where servers keep their data in memory; None where there is no room, or only the disk."""
    if not MEMORY.is_dir() or not os.access(MEMORY, os.W_OK | os.X_OK):
        return None
    for left in MEMORY.glob("pgqueue-test-*"):  # by a run that was killed
        users = list(left.glob("*/users"))
        is_old = time.time() - left.stat().st_mtime > 600  # another run may be about to lock it
        if is_old and not any(map(_is_locked, users)):
            shutil.rmtree(left, ignore_errors=True)  # a server without its data ends
    room = min(shutil.disk_usage(MEMORY).free, psutil.virtual_memory().available)
    return MEMORY if room >= ROOM else None


def _is_locked(users: Path) -> bool:
    """Whether a living process uses an embedded server."""
    try:
        with users.open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    return False


@pytest.fixture(scope="session")
def server(request: pytest.FixtureRequest, _servers) -> Server:
    """A Postgres server; parametrised with its version by `pytest_generate_tests`."""
    return _servers(request.param)


@pytest.fixture(scope="session")
def _templates(_servers) -> dict[tuple[str, str], str]:
    """The names of the templates that were made, by server and kind."""
    return {}


@pytest.fixture(scope="session")
def template(request: pytest.FixtureRequest, server: Server, _templates) -> str:
    """The name of a database with the schema installed, to make others from.

    For tests marked small_limits and previous_version, `pytest_generate_tests` parametrises it.
    """
    kind = getattr(request, "param", "usual")
    if (server.url, kind) not in _templates:
        name = f"pgqueue_test_{uuid.uuid4().hex[:12]}"
        with connection.connect(server.url) as conn:
            conn.execute(f"create database {name}")  # type: ignore[arg-type]
        with connection.connect(server.url_of(name)) as conn:
            if kind == "previous":
                freeze.install(conn, schema.expected_version() - 1)
            else:
                schema.install(conn, without=WITHOUT)
            # A copy is not taken for its template: the database of which is not noted.
            conn.execute("update pgqueue.servers set database = null")
            made = kind != "small" or limits.shrink(conn)
        _templates[server.url, kind] = name if made else ""
    if not (name := _templates[server.url, kind]):
        pytest.skip("no limit of the schema is a function named _limit_")
    return name


@pytest.fixture
def has_small_limits(request: pytest.FixtureRequest) -> bool:
    """Whether this run of a test marked small_limits is the one with small limits."""
    callspec = getattr(request.node, "callspec", None)
    return callspec is not None and callspec.params.get("template") == "small"


@pytest.fixture
def empty_url(server: Server) -> Iterator[str]:
    """The url of a fresh database without the schema."""
    yield from _database(server, "template0")


@pytest.fixture
def url(server: Server, template: str) -> Iterator[str]:
    """The url of a fresh database with the schema."""
    yield from _database(server, template)


@pytest.fixture
def conn(url: str) -> Iterator[psycopg.Connection]:
    """An autocommit connection to that database."""
    with connection.connect(url) as conn:
        yield conn


GRANTED = "select has_schema_privilege(oid, 'pgqueue', 'usage') from pg_roles where rolname = %s"
"""Whether a group role has its rights in the database."""


@pytest.fixture
def new_role(conn: psycopg.Connection, url: str) -> Iterator[Callable[..., str]]:
    """Makes a role that may log in, in groups of the schema; returns the url of its sessions."""
    made: list[str] = []

    def make(*groups: str) -> str:
        made.append(name := f"pgqueue_test_{uuid.uuid4().hex[:12]}")
        conn.execute(f"create role {name} login password '{name}'".encode())
        for group in groups:
            if conn.execute(GRANTED, [f"pgqueue_{group}"]).fetchone() == (True,):
                conn.execute(f"grant pgqueue_{group} to {name}".encode())
            else:  # which grants the rights of all groups: that takes longer than most tests
                schema.grant(conn, group, name)
        return make_conninfo(url, user=name, password=name)

    yield make
    for name in made:
        conn.execute(f"drop owned by {name} cascade; drop role {name}".encode())


def user_of(url: str) -> str:
    """The role of the sessions of a url."""
    return str(conninfo_to_dict(url)["user"])


def _database(server: Server, template: str) -> Iterator[str]:
    name = f"pgqueue_test_{uuid.uuid4().hex[:12]}"
    # The files as they are: to log each page takes longer, and lets the log grow.
    _admin(server).execute(
        f"create database {name} template {template} strategy file_copy".encode()
    )
    yield server.url_of(name)
    _admin(server).execute(f"drop database if exists {name} with (force)".encode())


_admins: dict[str, psycopg.Connection] = {}


def _admin(server: Server) -> psycopg.Connection:
    """A connection that makes and drops databases, made again after a restart of the server."""
    with suppress(KeyError, psycopg.OperationalError):
        _admins[server.url].execute("select")
        return _admins[server.url]
    _admins[server.url] = connection.connect(server.url)
    return _admins[server.url]


@pytest.fixture(scope="session")
def spark_environment(request: pytest.FixtureRequest) -> None:
    """What Spark needs to start quickly, also in a child process: a Java, and this very Python."""
    from tests import sessions

    java.ensure_java_home()
    os.environ["PYSPARK_PYTHON"] = sys.executable
    # What a test of an error may have left here, and Spark's processes would take over.
    os.environ.pop("SPARK_HIDE_TRACEBACK", None)
    starts_many = request.config.getoption("markexpr") != "not longer"
    os.environ.update(sessions.quick_start(archives=starts_many))


@pytest.fixture(scope="session")
def spark(
    spark_environment: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SparkSession]:
    """A local Spark session of two cores, with the data source registered."""
    from tests import pages, sessions

    settings = {
        "spark.app.name": "spark-pgqueue tests",
        "spark.driver.memory": "2g",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.warehouse.dir": str(tmp_path_factory.mktemp("warehouse")),
    }
    # Pages name no database: Spark's processes find the one of the page in a service file.
    os.environ.update(pages.service_of(None, tmp_path_factory.mktemp("service")))
    session = sessions.session("local[2]", settings)
    for name in ("PGSERVICE", "PGSERVICEFILE"):
        del os.environ[name]
    yield session
    session.stop()
