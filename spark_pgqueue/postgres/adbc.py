"""What executors do in Postgres: COPY to and from Arrow, with ADBC.

A connection is kept for the next task of the same Python worker, because making one costs ADBC some
40 ms (it reads the catalogue of types). One that broke meanwhile is replaced. One that nobody asked
for is closed soon: a cluster has more workers than tasks, and others wait for a connection.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from spark_pgqueue.postgres.connection import PIN_PATH, connect_adbc
from spark_pgqueue.postgres.retrying import PATIENCE

if TYPE_CHECKING:
    from adbc_driver_manager import dbapi


IDLE_SECONDS = 3.0
"""How long a connection is kept for the next task."""


@contextlib.contextmanager
def kept_connection(url: str | None, patience: float = PATIENCE) -> Iterator[dbapi.Connection]:
    """An ADBC connection with a transaction, rolled back at the end unless it was committed.

    Args:
        url: the database.
        patience: seconds for which connecting is tried again; see `connect_adbc`.

    Raises:
        PgQueueError: it cannot be made.
    """
    conn, _ = _idle.pop(url, (None, 0.0))
    conn = conn or connect_adbc(url, patience=patience, autocommit=False)
    try:
        with conn.cursor() as cursor:
            call(cursor, f"select {PIN_PATH}")
        yield conn
        conn.rollback()
    except BaseException:
        # Also when Spark has read enough: only closing ends a COPY that is under way.
        with contextlib.suppress(Exception):
            conn.close()
        raise
    _idle[url] = conn, time.monotonic()
    if os.getpid() not in _closers:
        _closers.add(os.getpid())
        threading.Thread(target=_close_old, daemon=True).start()


def let_go(url: str | None) -> None:
    """Close the connection that is kept, if there is one."""
    conn, _ = _idle.pop(url, (None, 0.0))
    if conn is not None:
        conn.close()


# A Python worker runs one task at a time, so there is one idle connection to a database at most.
# With each, since when it is idle. Who takes one out of here has it alone.
_idle: dict[str | None, tuple[dbapi.Connection, float]] = {}

# The processes that have a thread which closes what is idle for long. No lock, and no thread, is
# held here: where the package travels with a query all this is pickled.
_closers: set[int] = set()


def _close_old() -> None:
    while True:
        time.sleep(IDLE_SECONDS / 3)
        old = time.monotonic() - IDLE_SECONDS
        for url in [url for url, (_, since) in list(_idle.items()) if since < old]:
            with contextlib.suppress(Exception):
                let_go(url)


@atexit.register
def _close_idle() -> None:
    for url in list(_idle):
        let_go(url)


def call(cursor: dbapi.Cursor, sql: str, parameters: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The rows of a statement with parameters $1, $2, ...; ADBC takes no COPY for these."""
    cursor.execute(sql, parameters or None)
    return cursor.fetchall()
