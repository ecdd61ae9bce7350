"""Connections of executors: COPY to and from Arrow, with ADBC.

A connection is kept for the next task of the same Python worker, because making one costs ADBC
about 40 ms (it reads the catalogue of types). A connection that broke meanwhile is replaced. An
unused connection is closed soon: a cluster has more workers than tasks, and other clients need
connections.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import stat
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from spark_pgqueue.postgres.connection import PIN_PATH, connect_adbc
from spark_pgqueue.postgres.retrying import PATIENCE
from spark_pgqueue.postgres.time_limit import SHORT, TimeLimit, answers

if TYPE_CHECKING:
    from adbc_driver_manager import dbapi


IDLE_SECONDS = 3.0
"""Seconds for which a connection is kept for the next task."""


@contextlib.contextmanager
def kept_connection(url: str | None, patience: float = PATIENCE) -> Iterator[dbapi.Connection]:
    """An ADBC connection in a transaction, which is rolled back at the end unless it was committed.

    Where the server is frozen, what runs inside fails as for a lost connection.

    Args:
        url: the database.
        patience: seconds to try to connect; see `connect_adbc`.

    Raises:
        PgQueueError: no connection can be made.
    """
    kept = _idle.pop(url, None) or _connect(url, patience)
    conn = kept.conn
    try:
        with contextlib.nullcontext() if kept.socket is None else kept.limit.around(kept.socket):
            with conn.cursor() as cursor:
                call(cursor, f"select {PIN_PATH}")
            yield conn
            conn.rollback()
    except BaseException:
        # Also when Spark has read enough rows: only closing ends a running COPY.
        with contextlib.suppress(Exception):
            conn.close()
        raise
    _idle[url] = kept._replace(since=time.monotonic())
    if os.getpid() not in _closers:
        _closers.add(os.getpid())
        threading.Thread(target=_close_old, daemon=True).start()


def let_go(url: str | None) -> None:
    """Close the kept connection, if there is one."""
    if kept := _idle.pop(url, None):
        kept.conn.close()


class _Socket(NamedTuple):
    """A connection's socket, by its inode too: the descriptor may be another file's later."""

    descriptor: int
    inode: int

    def fileno(self) -> int:
        """The descriptor. Raises OSError where the socket is closed."""
        if os.fstat(self.descriptor).st_ino != self.inode:
            raise OSError("the connection is closed")
        return self.descriptor


class _Kept(NamedTuple):
    """A connection, its socket if that is known, its limit, and the begin of its idleness."""

    conn: dbapi.Connection
    socket: _Socket | None
    limit: TimeLimit
    since: float


# A Python worker runs one task at a time, so each database has at most one idle connection. A task
# that takes a connection out of the dict owns it.
_idle: dict[str | None, _Kept] = {}

# The processes that have a thread which closes idle connections. This module holds no lock and no
# thread, because Spark may pickle it by value.
_closers: set[int] = set()


def _connect(url: str | None, patience: float) -> _Kept:
    # ADBC does not tell its socket: it is the only new one.
    before = _sockets()
    conn = connect_adbc(url, patience=patience, autocommit=False)
    new = _sockets() - before
    limit = TimeLimit(SHORT, partial(answers, url))
    return _Kept(conn, new.pop() if len(new) == 1 else None, limit, 0.0)


def _sockets() -> set[_Socket]:
    found = set()
    for each in Path("/dev/fd").iterdir():
        with contextlib.suppress(OSError):  # the descriptor of this listing is closed already
            file = os.fstat(int(each.name))
            if stat.S_ISSOCK(file.st_mode):
                found.add(_Socket(int(each.name), file.st_ino))
    return found


def _close_old() -> None:
    while True:
        time.sleep(IDLE_SECONDS / 3)
        old = time.monotonic() - IDLE_SECONDS
        for url in [url for url, kept in list(_idle.items()) if kept.since < old]:
            with contextlib.suppress(Exception):
                let_go(url)


@atexit.register
def _close_idle() -> None:
    for url in list(_idle):
        let_go(url)


def call(cursor: dbapi.Cursor, sql: str, parameters: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The rows of a statement with parameters $1, $2, ...; ADBC cannot COPY such a statement."""
    cursor.execute(sql, parameters or None)
    return cursor.fetchall()
