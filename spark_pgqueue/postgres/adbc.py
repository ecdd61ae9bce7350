"""What executors do in Postgres: COPY to and from Arrow, with ADBC.

A connection is kept for the next task of the same Python worker, because making one costs ADBC some
40 ms (it reads the catalogue of types). One that broke meanwhile is replaced.
"""

from __future__ import annotations

import atexit
import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from spark_pgqueue.postgres.connection import PIN_PATH, connect_adbc
from spark_pgqueue.postgres.retrying import PATIENCE

if TYPE_CHECKING:
    from adbc_driver_manager import dbapi


@contextlib.contextmanager
def kept_connection(url: str | None, patience: float = PATIENCE) -> Iterator[dbapi.Connection]:
    """An ADBC connection with a transaction, rolled back at the end unless it was committed.

    Args:
        url: the database.
        patience: seconds for which connecting is tried again; see `connect_adbc`.

    Raises:
        PgQueueError: it cannot be made.
    """
    conn = _idle.pop(url, None) or connect_adbc(url, patience=patience, autocommit=False)
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
    _idle[url] = conn


# A Python worker runs one task at a time, so there is one idle connection to a database at most.
_idle: dict[str | None, dbapi.Connection] = {}


@atexit.register
def _close_idle() -> None:
    while _idle:
        _idle.popitem()[1].close()


def call(cursor: dbapi.Cursor, sql: str, parameters: tuple = ()) -> list[tuple]:
    """The rows of a statement with parameters $1, $2, ...; ADBC takes no COPY for these."""
    cursor.execute(sql, parameters or None)
    return cursor.fetchall()
