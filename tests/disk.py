"""A server whose disk fails when a test says so, by a preloaded library (`disk_faults.c`)."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psycopg
import pytest

from spark_pgqueue.postgres import connection, embedded, schema
from spark_pgqueue.postgres.errors import PgQueueError
from tests.conftest import SETTINGS, VERSIONS

FAILED = (psycopg.Error, PgQueueError)
"""What calls raise while the disk fails."""


class Disk:
    """A server of its own, and its disk.

    Attributes:
        server: the server.
        url: a database with the schema.
    """

    def __init__(self, home: Path):
        home.mkdir(mode=0o755)
        home.parent.chmod(0o755)  # the server's user reads the library and the faults
        self._library = home / "faults.so"
        source = Path(__file__).with_name("disk_faults.c")
        command = ["gcc", "-shared", "-fPIC", "-O1", "-o", self._library, source, "-ldl"]
        subprocess.run(command, check=True)
        self._faults = home / "faults"
        self._read = 0
        settings = {**SETTINGS, "fsync": "on", "synchronous_commit": "on"}
        with self._preloaded():
            self.server = embedded.start(home / "pg", version=VERSIONS[0], settings=settings)
        self.url = self.server.url_of("faults")
        with connection.connect(self.server.url) as conn:
            conn.execute("create database faults")
        with connection.connect(self.url) as conn:
            schema.install(conn)

    @contextmanager
    def failing(self, calls: str, error: int, part: str) -> Iterator[None]:
        """Within the block, calls ("write" or "sync") fail for files with a part in their path.

        Behind the block the server is started again, where it has given up.
        """
        self._read = self._log.stat().st_size
        new = self._faults.with_suffix(".new")
        new.write_text(f"{calls} {error} {part}")
        new.chmod(0o644)
        new.rename(self._faults)
        try:
            yield
        finally:
            self._faults.unlink()
            if not self.checkpoint():
                with self._preloaded():
                    self.server.restart("immediate")

    def said(self) -> str:
        """What the server has logged since the fault began."""
        return self._log.read_bytes()[self._read :].decode(errors="replace")

    def checkpoint(self) -> bool:
        """Have the server write and sync its tables; returns whether that was done."""
        with suppress(*FAILED), connection.connect(self.url, patience=0) as conn:
            conn.execute("checkpoint")
            return True
        return False

    @contextmanager
    def _preloaded(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("LD_PRELOAD", str(self._library))
            patch.setenv("FAULTS", str(self._faults))
            yield

    @property
    def _log(self) -> Path:
        return self.server.directory / "data" / "server.log"


@contextmanager
def a_disk(home: Path) -> Iterator[Disk]:
    """A server in a new folder, whose disk can fail."""
    if shutil.which("gcc") is None:
        pytest.skip("apt-get install gcc")
    disk = Disk(home)
    try:
        yield disk
    finally:
        disk.server.stop("immediate")
        disk.server.close()
        shutil.rmtree(home)
