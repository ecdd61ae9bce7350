"""One connection for short statements that outlives restarts of Postgres."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, LiteralString

import psycopg

from spark_pgqueue import schema
from spark_pgqueue.connection import PATIENCE, connect, is_passing, with_backoff


class Database:
    """Runs statements in autocommit, reconnecting with backoff when the connection is lost.

    A statement whose connection broke is run again, so it must be safe to repeat: nobody can say
    whether it took effect. For one thread; connects when first used, and checks then that the
    database has the schema version that this package needs.
    """

    def __init__(self, url: str | None, patience: float = PATIENCE):
        self._url = url
        self._patience = patience
        self._conn: psycopg.Connection | None = None
        self._checked = False

    def rows(self, sql: LiteralString, parameters: Sequence[Any] = ()) -> list[tuple]:
        """The rows of a statement.

        Raises:
            PgQueueError: a known database error, Postgres stayed away longer than patience, or
                PQ011: the schema is missing, older or newer.
        """
        return with_backoff(lambda: self._attempt(sql, parameters), self._url, self._patience)

    def row(self, sql: LiteralString, parameters: Sequence[Any] = ()) -> tuple:
        """The only row of a statement that always has one. Errors as in `rows`."""
        (row,) = self.rows(sql, parameters)
        return row

    def close(self) -> None:
        """Close the connection, if there is one; the next statement connects again."""
        if self._conn is not None:
            self._conn.close()
            self._conn = None

    def _attempt(self, sql: LiteralString, parameters: Sequence[Any]) -> list[tuple]:
        if self._conn is None:
            self._conn = connect(self._url, patience=0)
        try:
            if not self._checked:
                schema.check(self._conn)
                self._checked = True
            return self._conn.execute(sql, parameters).fetchall()
        except psycopg.Error as error:
            if is_passing(error) or self._conn.closed:
                self.close()
            raise
