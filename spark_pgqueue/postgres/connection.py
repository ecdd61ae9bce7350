"""Connecting to Postgres, with psycopg and with ADBC.

The functions here hold no state, and connections rely on no session settings, so that they work
behind a transaction pooler. So the search path is what the role or the database says, and what is
sent names its functions with their schema, or needs no better match than pg_catalog has; where that
is too little, a transaction pins its path (see `PIN_PATH`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import psycopg

from spark_pgqueue.postgres.retrying import PATIENCE, told_if_slow, with_backoff
from spark_pgqueue.postgres.url import conninfo, describe

if TYPE_CHECKING:
    from adbc_driver_manager import dbapi as adbc

__all__ = ["PIN_PATH", "connect", "connect_adbc", "conninfo", "describe"]

PIN_PATH = "pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true)"
"""For the start of a transaction: no function or operator is found where others can put one.

Postgres takes the better match behind pg_catalog too, such as public.lower(int8range) in place of
pg_catalog.lower(anyrange). Local to the transaction: a setting of the session would stay with a
connection that a transaction pooler shares, and many poolers refuse one given when connecting.
"""


def connect(
    url: str | None = None, *, patience: float = PATIENCE, autocommit: bool = True
) -> psycopg.Connection:
    """Connect with psycopg, waiting out a restart of Postgres.

    Within 2 s the log says, once, where it is still trying to connect to.

    Args:
        url: a libpq URI or conninfo string; None for libpq's environment and service files.
        patience: seconds to go on trying for while Postgres may be restarting; 0 to try once.
        autocommit: whether each statement is a transaction of its own.

    Returns:
        a connection that makes no server-side prepared statements.

    Raises:
        PgQueueError: the url is not valid, Postgres refuses it, or patience is over.
    """
    info = conninfo(url)

    def attempt() -> psycopg.Connection:
        with told_if_slow(url):
            # Prepared statements would not survive the change of backend that a transaction pooler
            # makes.
            return psycopg.connect(info, autocommit=autocommit, prepare_threshold=None)

    return with_backoff(attempt, url, patience)


def connect_adbc(
    url: str | None = None, *, patience: float = PATIENCE, autocommit: bool = True
) -> adbc.Connection:
    """As `connect`, with ADBC, for COPY from and to Arrow.

    Raises:
        PgQueueError: the url is not valid, Postgres refuses it, or patience is over.
    """
    from adbc_driver_postgresql import dbapi

    info = conninfo(url)

    def attempt() -> adbc.Connection:
        with told_if_slow(url):
            return dbapi.connect(info, autocommit=autocommit)

    return with_backoff(attempt, url, patience)
