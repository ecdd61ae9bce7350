"""A disk that refuses to write or to sync, or is full: what was confirmed stays, and comes once."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psycopg
import pytest

import spark_pgqueue
from spark_pgqueue.postgres import connection
from spark_pgqueue.postgres.errors import PgQueueError, sqlstate_of
from spark_pgqueue.postgres.retrying import is_passing
from tests.disk import FAILED, Disk, a_disk
from tests.processes import wait_until
from tests.sql import checker, clock
from tests.sql.queue import acked, call, claim_of, receive, send, seqs_of, value

pytestmark = pytest.mark.longer


@pytest.fixture(scope="module")
def disk(servers_home: Path) -> Iterator[Disk]:
    with a_disk(servers_home / "disk") as made:
        yield made


class Sessions:
    """A producer and two workers, which note what the server has confirmed.

    Attributes:
        sent: the messages whose `send` has returned.
        acked: the messages whose `ack` has returned.
        tried: the messages of each `ack`: one that failed may have taken effect.
        again: the messages that were received after that.
        errors: what the calls raised.
    """

    def __init__(self, url: str):
        self._url = url
        self._over = threading.Event()
        self.sent: set[int] = set()
        self.acked: set[int] = set()
        self.tried: set[int] = set()
        self.again: set[int] = set()
        self.errors: list[Exception] = []
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

    def go_on(self) -> None:
        """Wait until each of them was confirmed more."""
        sent, done = len(self.sent), len(self.acked)
        wait_until(lambda: len(self.sent) > sent + 20 and len(self.acked) > done + 20)

    def _repeat(self, step) -> None:
        while not self._over.is_set():
            try:
                with connection.connect(self._url, patience=0) as conn:
                    while not self._over.is_set():
                        step(conn)
            except FAILED as error:
                self.errors.append(error)
                time.sleep(0.05)

    def _produce(self, conn) -> None:
        self.sent.add(send(conn, "x" * 1500))

    def _work(self, conn) -> None:
        rows = receive(conn, 5)
        seqs = seqs_of(rows)
        self.again |= self.acked & set(seqs)
        self.tried |= set(seqs)
        if seqs and value(conn, "ack", claim_of(rows)) == len(seqs):
            self.acked |= set(seqs)


class Fault(NamedTuple):
    """What fails, and what clients see.

    Attributes:
        calls: "write" or "sync".
        error: its number.
        part: of the path of the files that the calls fail for.
        sqlstate: of the statements that fail. None: the server crashes, and connections are lost.
    """

    calls: str
    error: int
    part: str
    sqlstate: str | None = None


FAULTS = {
    "the log cannot be synced": Fault("sync", errno.EIO, "pg_wal"),
    "the log cannot be written": Fault("write", errno.EIO, "pg_wal"),
    "the disk of the log is full": Fault("write", errno.ENOSPC, "pg_wal"),
    "tables cannot be synced": Fault("sync", errno.EIO, "/base/"),
    "tables cannot be written": Fault("write", errno.EIO, "/base/", "58030"),
    "the disk of the tables is full": Fault("write", errno.ENOSPC, "/base/", "53100"),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.promise(
    "fault: the WAL cannot be written or synced, or its disk is full",
    "fault: the WAL cannot be written or synced, or its disk is full",
    "fault: the disk of the tables is full",
    "fault: tables cannot be written or read",
    "operations: a disk that fails",
)
def test_what_was_confirmed_stays_and_comes_once_although(disk: Disk, fault: str) -> None:
    calls, error, part, sqlstate = FAULTS[fault]
    with connection.connect(disk.url) as conn:
        with suppress(psycopg.Error):
            value(conn, "drop_stream", "s")
        value(conn, "create_stream", "s")
        value(conn, "create_consumer", "s", "c", "earliest")
    with Sessions(disk.url) as sessions:
        sessions.go_on()
        with disk.failing(calls, error, part):

            def is_seen() -> bool:
                disk.checkpoint()  # tables are written and synced by it
                return os.strerror(error) in disk.said() and bool(sessions.errors)

            wait_until(is_seen, 20)
            is_crash = "PANIC" in disk.said()
        sessions.go_on()
    assert is_crash == (sqlstate is None)
    seen = {sqlstate_of(each) for each in sessions.errors if not is_passing(each)}
    assert seen == ({sqlstate} if sqlstate else set()), sessions.errors
    with connection.connect(disk.url) as conn:
        call(conn, "maintain")
        clock.end_leases(conn)
        rest = set()
        while seqs := acked(conn, "s", "c"):
            rest |= set(seqs)
        assert sessions.again == set()
        assert rest & sessions.acked == set()
        assert sessions.sent <= rest | sessions.tried
        checker.check(conn)


def test_who_crashes_the_server_is_told_that_nobody_knows_what_took_effect(disk: Disk) -> None:
    """The log has the commit, perhaps. Whoever may repeat a call connects again."""
    calls, error, part, _ = FAULTS["the log cannot be synced"]
    with spark_pgqueue.connect(disk.url, patience=0) as client:
        client.create_stream("sent")
        with (
            disk.failing(calls, error, part),
            pytest.raises(PgQueueError, match="whether the call took effect is not known") as said,
        ):
            client.send("sent", "x")
        assert is_passing(said.value)
