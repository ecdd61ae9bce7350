"""A disk that refuses to write or to sync, or is full: what was confirmed stays, and comes once."""

from __future__ import annotations

import errno
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psycopg
import pytest

from spark_pgqueue.postgres import connection, embedded, schema
from spark_pgqueue.postgres.retrying import is_passing
from tests.conftest import SETTINGS, VERSIONS
from tests.sql import checker
from tests.sql.queue import acked, call, claim_of, receive, send, seqs_of, value

pytestmark = [
    pytest.mark.longer,
    pytest.mark.skipif(shutil.which("gcc") is None, reason="apt-get install gcc"),
]


class Disk:
    """The disk of a server of its own.

    Attributes:
        server: the server.
        url: a database with the schema.
    """

    def __init__(self, server: embedded.Server, faults: Path):
        self.server = server
        self.url = server.url_of("faults")
        self._faults = faults
        with connection.connect(server.url) as conn:
            conn.execute("create database faults")
        with connection.connect(self.url) as conn:
            schema.install(conn)

    def fail(self, calls: str, error: int, part: str) -> None:
        """Let calls ("write" or "sync") fail for files with a part in their path."""
        new = self._faults.with_suffix(".new")
        new.write_text(f"{calls} {error} {part}")
        new.chmod(0o644)
        new.rename(self._faults)

    def mend(self) -> None:
        """End the fault, and start the server where it has given up."""
        self._faults.unlink()
        with suppress(psycopg.Error), connection.connect(self.url) as conn:
            conn.execute("checkpoint")
            return
        self.server.restart("immediate")


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory, servers_home: Path) -> Iterator[Disk]:
    folder = servers_home / "disk"
    folder.mkdir(mode=0o755)
    servers_home.chmod(0o755)  # the server's user reads the library and the faults
    source = Path(__file__).with_name("disk_faults.c")
    library = folder / "faults.so"
    command = ["gcc", "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"]
    subprocess.run(command, check=True)
    settings = {**SETTINGS, "fsync": "on", "synchronous_commit": "on", "restart_after_crash": "on"}
    preloaded = {"LD_PRELOAD": str(library), "FAULTS": str(folder / "faults")}
    with pytest.MonkeyPatch.context() as patch:
        for name, text in preloaded.items():
            patch.setenv(name, text)
        with embedded.start(folder / "pg", version=VERSIONS[0], settings=settings) as server:
            yield Disk(server, folder / "faults")


class Sessions:
    """A producer and two workers, which note what the server has confirmed.

    Attributes:
        sent: the messages whose `send` has returned.
        acked: the messages whose `ack` has returned.
        again: the messages that were received after that.
        errors: what the calls raised.
    """

    def __init__(self, url: str):
        self._url = url
        self._over = threading.Event()
        self.sent: set[int] = set()
        self.acked: set[int] = set()
        self.again: set[int] = set()
        self.errors: list[psycopg.Error] = []
        self._threads = [threading.Thread(target=self._repeat, args=[self._produce])]
        self._threads += [threading.Thread(target=self._repeat, args=[self._work]) for _ in "12"]

    def __enter__(self) -> Sessions:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(60)

    def _repeat(self, step) -> None:
        while not self._over.is_set():
            try:
                with connection.connect(self._url) as conn:
                    while not self._over.is_set():
                        step(conn)
            except psycopg.Error as error:
                self.errors.append(error)
                time.sleep(0.05)

    def _produce(self, conn) -> None:
        self.sent.add(send(conn, "x" * 2000))

    def _work(self, conn) -> None:
        rows = receive(conn, 5)
        seqs = seqs_of(rows)
        self.again |= self.acked & set(seqs)
        if seqs and value(conn, "ack", claim_of(rows)) == len(seqs):
            self.acked |= set(seqs)


FAULTS = {
    "the log cannot be synced": ("sync", errno.EIO, "pg_wal"),
    "the log cannot be written": ("write", errno.EIO, "pg_wal"),
    "the disk of the log is full": ("write", errno.ENOSPC, "pg_wal"),
    "tables cannot be synced": ("sync", errno.EIO, "/base/"),
    "tables cannot be written": ("write", errno.EIO, "/base/"),
    "the disk of the tables is full": ("write", errno.ENOSPC, "/base/"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_was_confirmed_stays_and_comes_once_although(disk: Disk, fault: str) -> None:
    with connection.connect(disk.url) as conn:
        with suppress(psycopg.Error):
            value(conn, "drop_stream", "s", p_force=True)
        value(conn, "create_stream", "s")
        value(conn, "create_consumer", "s", "c", "earliest")
        send(conn)
    with Sessions(disk.url) as sessions:
        time.sleep(1)
        before = len(sessions.sent)
        disk.fail(*FAULTS[fault])
        time.sleep(1)
        with suppress(psycopg.Error), connection.connect(disk.url) as conn:
            conn.execute("checkpoint")  # tables are written and synced by it
        time.sleep(1)
        disk.mend()
        at_mend = len(sessions.sent)
        deadline = time.monotonic() + 30
        while len(sessions.sent) < at_mend + 20 and time.monotonic() < deadline:
            time.sleep(0.1)
    assert before > 20
    assert len(sessions.sent) >= at_mend + 20, "they went on by themselves"
    assert sessions.errors
    assert [error for error in sessions.errors if not is_passing(error)] == []
    with connection.connect(disk.url) as conn:
        call(conn, "maintain")
        conn.execute("update pgqueue.claims set lease_until = now() where live")
        conn.execute("update pgqueue.slots set lease_until = now() where token is not null")
        rest = set()
        while seqs := acked(conn, "s", "c"):
            rest |= set(seqs)
        assert sessions.again == set()
        assert rest & sessions.acked == set()
        assert sessions.sent <= rest | sessions.acked
        checker.check(conn)
