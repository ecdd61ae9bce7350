"""The fixtures for pytest. They import what they need when a test uses them."""

from __future__ import annotations

import fcntl
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from spark_pgqueue.testing import QueueTester

_PREFIX = "pgqueue-testing-"
_URL = "the server for databases of tests: the url of a role that may create databases"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option of the command line, and of the file of settings."""
    parser.getgroup("pgqueue").addoption("--pgqueue-url", metavar="URL", help=_URL)
    parser.addini("pgqueue_url", f"{_URL}; by default a private one is started")


@pytest.fixture(scope="session")
def pgqueue_server(request: pytest.FixtureRequest) -> Iterator[str]:
    """The url of a server: a private one, or that of the option --pgqueue-url."""
    given = request.config.getoption("--pgqueue-url") or request.config.getini("pgqueue_url")
    if given:
        yield given
        return
    from spark_pgqueue.postgres import embedded

    _remove_left()
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    try:
        # Nothing outlives the run, so nothing has to reach the disk.
        fast = {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off"}
        with embedded.start(folder / "server", settings=fast) as server:
            yield server.url
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _remove_left() -> None:
    """Remove the servers of runs that were killed: a server whose folder is gone ends."""
    for left in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        users = left / "server/users"
        with suppress(OSError), users.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # no process uses it
            shutil.rmtree(left, ignore_errors=True)


@pytest.fixture(scope="session")
def pgqueue_setup() -> Callable[[str], object]:
    """To override: a function that prepares the database at a url, once for all tests."""
    return lambda url: None


@pytest.fixture(scope="session")
def _pgqueue_template(pgqueue_server: str) -> Iterator[Callable[[Callable[[str], object]], str]]:
    """The name of the database that a setup has prepared. Each folder may have its own setup."""
    from spark_pgqueue.testing import databases

    with ExitStack() as stack:
        yield cache(lambda setup: stack.enter_context(databases.template(pgqueue_server, setup)))


@pytest.fixture
def pgqueue_url(
    pgqueue_server: str,
    pgqueue_setup: Callable[[str], object],
    _pgqueue_template: Callable[[Callable[[str], object]], str],
) -> Iterator[str]:
    """The url of a database for one test, a copy of the one that `pgqueue_setup` prepared."""
    from spark_pgqueue.testing import databases

    with databases.database(pgqueue_server, _pgqueue_template(pgqueue_setup)) as url:
        yield url


@pytest.fixture
def pgqueue(pgqueue_url: str) -> Iterator[QueueTester]:
    """A `QueueTester` on that database."""
    from spark_pgqueue.testing import QueueTester

    with QueueTester(pgqueue_url) as tester:
        yield tester
