"""Connections of executors: COPY to and from Arrow, with ADBC.

A connection is kept for the next task of the same Python worker, because ADBC takes about 40 ms to
connect (it reads the catalogue of types). A broken connection is replaced.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from spark_pgqueue.postgres import owners
from spark_pgqueue.postgres.connection import PIN_PATH, connect_adbc
from spark_pgqueue.postgres.kept import keep, take
from spark_pgqueue.postgres.retrying import PATIENCE
from spark_pgqueue.postgres.time_limit import SHORT, TimeLimit, answers

if TYPE_CHECKING:
    from adbc_driver_manager import dbapi


@contextlib.contextmanager
def kept_connection(url: str | None, patience: float = PATIENCE) -> Iterator[dbapi.Connection]:
    """An ADBC connection in a transaction, which is rolled back at the end unless it was committed.

    If the server is frozen, statements fail as for a lost connection. `patience` is as in
    `connect_adbc`.

    Raises:
        PgQueueError: no connection can be made; or PQ011, see `owners`.
    """
    again = take(_Kept, url)
    kept = again or _connect(url, patience)
    conn = kept.conn
    try:
        with contextlib.nullcontext() if kept.socket is None else kept.limit.around(kept.socket):
            with conn.cursor() as cursor:
                call(cursor, f"select {PIN_PATH}")
                if again is None:
                    owners.judge(call(cursor, owners.LOOK)[0])
            yield conn
            conn.rollback()
    except BaseException:
        # Also when Spark has read enough rows: only closing the connection ends a running COPY.
        with contextlib.suppress(Exception):
            conn.close()
        raise
    keep(_Kept, url, kept)


def let_go(url: str | None) -> None:
    """Close the kept connection, if there is one."""
    if kept := take(_Kept, url):
        kept.close()


class _Socket(NamedTuple):
    """A connection's socket, with its inode, as the descriptor may be reused for another file."""

    descriptor: int
    inode: int

    def fileno(self) -> int:
        """The descriptor. Raises OSError where the socket is closed."""
        if os.fstat(self.descriptor).st_ino != self.inode:
            raise OSError("the connection is closed")
        return self.descriptor


class _Kept(NamedTuple):
    """A connection, its socket if that is known, and its limit."""

    conn: dbapi.Connection
    socket: _Socket | None
    limit: TimeLimit

    def close(self) -> None:
        """Close the connection."""
        self.conn.close()


def _connect(url: str | None, patience: float) -> _Kept:
    # ADBC does not expose its socket: it is the only new one.
    before = _sockets()
    conn = connect_adbc(url, patience=patience, autocommit=False)
    new = _sockets() - before
    limit = TimeLimit(SHORT, partial(answers, url))
    return _Kept(conn, new.pop() if len(new) == 1 else None, limit)


def _sockets() -> set[_Socket]:
    found = set()
    for each in Path("/dev/fd").iterdir():
        with contextlib.suppress(OSError):  # the descriptor of this listing is closed already
            file = os.fstat(int(each.name))
            if stat.S_ISSOCK(file.st_mode):
                found.add(_Socket(int(each.name), file.st_ino))
    return found


def call(cursor: dbapi.Cursor, sql: str, parameters: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The rows of a statement with parameters $1, $2, ...; ADBC cannot COPY such a statement."""
    cursor.execute(sql, parameters or None)
    return cursor.fetchall()
