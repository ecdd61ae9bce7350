"""Fixtures of unit tests: directories for embedded servers."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from spark_pgqueue import embedded


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
