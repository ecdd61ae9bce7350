"""Connecting to Postgres, with psycopg and with ADBC.

The functions here hold no state, and connections need no session settings but those that a
transaction pooler preserves (see `odd_settings`). The role or the database sets the search path. So
statements qualify functions with their schema, or use only names that no other schema can match
better than pg_catalog. Where that is not enough, a transaction pins its path (see `PIN_PATH`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, LiteralString

import psycopg

from spark_pgqueue.postgres import owners
from spark_pgqueue.postgres.errors import PgQueueError, sqlstate_of
from spark_pgqueue.postgres.forks import cut_in_children
from spark_pgqueue.postgres.retrying import PATIENCE, with_backoff
from spark_pgqueue.postgres.url import conninfo, describe

if TYPE_CHECKING:
    from adbc_driver_manager import dbapi as adbc

__all__ = [
    "NO_TIMEOUTS",
    "PIN_PATH",
    "LeftOpenError",
    "connect",
    "connect_adbc",
    "connect_async",
    "conninfo",
    "describe",
    "in_open_transaction",
    "odd_settings",
]

PIN_PATH = "pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true)"
"""For the start of a transaction: functions and operators are found only in pg_catalog.

Postgres prefers a better match of another schema to pg_catalog, such as public.lower(int8range) to
pg_catalog.lower(anyrange). The setting is local to the transaction: a session setting would persist
in a connection that a transaction pooler shares, and many poolers refuse settings at connect.
"""

NO_TIMEOUTS: LiteralString = (
    "select pg_catalog.set_config('statement_timeout', '0', true), case"
    " when pg_catalog.current_setting('transaction_timeout', true) is not null"  # since 17
    " then pg_catalog.set_config('transaction_timeout', '0', true) end"
)
"""A statement for the start of a transaction that takes long: a timeout that the role or the
database sets would cancel it, and each repetition. `sql/schema.sql` and `sql/uninstall.sql` do the
same.
"""

_READABLE = {"DateStyle": "ISO", "IntervalStyle": "postgres"}
# psycopg parses no other styles. The server reports both, so poolers preserve them.


def odd_settings(info: psycopg.ConnectionInfo) -> bytes:
    """The statements that give a connection the settings that psycopg needs.

    Empty if the connection has them. The check needs no query: the server reports them.
    """
    return b"".join(
        f"set {name} = {value};".encode()
        for name, value in _READABLE.items()
        if (info.parameter_status(name) or value).partition(",")[0] != value
    )


class LeftOpenError(PgQueueError):
    """The handler has left a statement open, and its connection is closed."""


@contextmanager
def in_open_transaction(
    conn: psycopg.Connection[Any] | psycopg.AsyncConnection[Any],
) -> Iterator[None]:
    """Around the call of a handler, whose messages are settled in the same transaction.

    Raises:
        LeftOpenError: the handler has left a COPY or another result open, for which a rollback
            could wait without end. After an error of the handler, the connection is closed, too.
        PgQueueError: the handler has ended the transaction by a statement: after a rollback, its
            work would be lost. (psycopg itself refuses `commit()` and `rollback()`.)
    """
    try:
        yield
    except BaseException:
        _close_if_left_open(conn)
        raise
    if _close_if_left_open(conn):
        raise LeftOpenError(
            "the handler has left a COPY or the rows of a statement open",
            hint="use `with cursor.copy(...) as copy`, and read cursor.stream() to its end",
        )
    if conn.info.transaction_status == psycopg.pq.TransactionStatus.IDLE:
        raise PgQueueError(
            "the handler has ended its transaction, with which its messages are done",
            hint="execute no commit or rollback; connection.transaction() makes a savepoint",
        )


def _close_if_left_open(conn: psycopg.Connection[Any] | psycopg.AsyncConnection[Any]) -> bool:
    """Close a connection that is in the middle of a COPY or a result; returns whether it was.

    A statement that the server still executes, such as one of another task, ends by itself.
    """
    status = conn.info.transaction_status
    is_left = status == psycopg.pq.TransactionStatus.ACTIVE and not conn.pgconn.is_busy()
    if is_left:
        conn.pgconn.finish()
    return is_left


def connect(
    url: str | None = None, *, patience: float = PATIENCE, autocommit: bool = True
) -> psycopg.Connection:
    """Connect with psycopg; retry while Postgres restarts.

    If attempts keep failing, one warning is logged with the database and the cause.

    Args:
        url: a libpq URI or conninfo string; None for libpq's environment and service files.
        patience: seconds to try while Postgres may be restarting; 0 to try once.
        autocommit: whether each statement is a transaction of its own.

    Returns:
        a connection that makes no server-side prepared statements.

    Raises:
        PgQueueError: the url is not valid, Postgres refuses it, or `patience` has passed.
    """
    info = conninfo(url)

    def attempt() -> psycopg.Connection:
        # With a transaction pooler, prepared statements are lost when the backend changes.
        made = psycopg.connect(info, autocommit=True, prepare_threshold=None)
        conn = cut_in_children(made)
        if odd := odd_settings(conn.info):
            conn.execute(odd)
        conn.autocommit = autocommit
        return conn

    return with_backoff(attempt, url, patience)


async def connect_async(url: str | None) -> psycopg.AsyncConnection[Any]:
    """As `connect`, for asyncio, without retries; also checks the owners of the schema.

    Errors are those of psycopg and of `owners.judge`.
    """
    conn = await psycopg.AsyncConnection.connect(
        conninfo(url), autocommit=True, prepare_threshold=None
    )
    cut_in_children(conn)
    if odd := odd_settings(conn.info):
        await conn.execute(odd)
    try:
        owners.judge(await (await conn.execute(owners.LOOK)).fetchone())
    except BaseException:
        await conn.close()
        raise
    return conn


def connect_adbc(
    url: str | None = None, *, patience: float = PATIENCE, autocommit: bool = True
) -> adbc.Connection:
    """As `connect`, with ADBC, for COPY from and to Arrow.

    Raises:
        PgQueueError: as `connect`.
    """
    from adbc_driver_postgresql import dbapi

    info = conninfo(url)

    def attempt() -> adbc.Connection:
        try:
            return dbapi.connect(info, autocommit=autocommit)
        except dbapi.Error as error:
            if sqlstate_of(error) is not None:
                raise
            # ADBC raises the same class for values that it cannot convert.
            raise psycopg.OperationalError(str(error)) from None

    return with_backoff(attempt, url, patience)
