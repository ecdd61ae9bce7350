"""Runs statements over a connection that survives restarts of Postgres; translates errors."""

from __future__ import annotations

import select
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from threading import RLock
from typing import Any, LiteralString

import psycopg
from psycopg.rows import RowFactory, tuple_row

from spark_pgqueue.postgres import schema
from spark_pgqueue.postgres.connection import NO_TIMEOUTS, connect
from spark_pgqueue.postgres.errors import (
    Names,
    PgQueueError,
    Said,
    sqlstate_of,
    translate,
    translated,
)
from spark_pgqueue.postgres.forks import Origin
from spark_pgqueue.postgres.kept import keep, take
from spark_pgqueue.postgres.loading import load_nearest, plain
from spark_pgqueue.postgres.retrying import PATIENCE, is_crash, is_passing, with_backoff
from spark_pgqueue.postgres.time_limit import SHORT, TimeLimit, answers

_READ_ONLY = "25006"
_LOST = "08006"  # connection_failure


class Statements:
    """Runs statements, each in a transaction of its own unless `transaction` is open.

    The connection is made at its first use and replaced when it is lost. The first statement of
    each connection checks that the database has the schema version that this package needs. Threads
    may share this object; their statements run one at a time.

    Args:
        url: the database; None for libpq's environment.
        patience: seconds to try to connect; 0 to try once.
        repeat: whether to retry a statement, for `patience` seconds, whose connection was lost or
            that waited too long for a lock. It must be safe to repeat, as it may have taken effect.
        connection: an open connection of the caller, instead of `url`. It is neither replaced nor
            closed.
        names: the user's names for the arguments of SQL functions, for error messages.
        prepare: called with each connection before its first statement.
        limit: seconds after which a statement without a response fails, as for a lost connection;
            None for statements that may take long, which fail only if the server is frozen.
        previous: whether the schema's previous version serves, too; see `schema.check`.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        patience: float = PATIENCE,
        repeat: bool = False,
        connection: psycopg.Connection[Any] | None = None,
        names: Names | None = None,
        prepare: Callable[[psycopg.Connection[Any]], None] | None = None,
        limit: float | None = None,
        previous: bool = False,
    ):
        self._url = url
        self._patience = patience
        self._repeat = repeat
        self._conn = connection
        self._names = names
        self._prepare = prepare
        self._previous = previous
        # For the caller's connection there is no url with which to check its server.
        self._limit = None if connection is not None else _limit(url, limit)
        self._checked = self._closed = False
        self._version: int | None = None  # of the schema, when it was checked
        self._transactions = 0
        self._is_own = connection is None
        self._turn = RLock()
        self._origin = Origin()  # of the connection
        if connection is not None and prepare is not None:
            prepare(connection)

    def __str__(self) -> str:
        if self._conn is None or self._conn.closed:
            return "no connection"
        info = self._conn.info
        return f"database {info.dbname!r} on {info.host}, as {info.user!r}"

    @property
    def turn(self) -> RLock:
        """The lock that each statement holds. Callers hold it around consecutive statements.

        Raises:
            PgQueueError: this is a child of the process that made the connection.
        """
        self.check_process()
        return self._turn

    def check_process(self) -> None:
        """Refuse a use of the connection in a child of the process that made it.

        Raises:
            PgQueueError: this is a child.
        """
        if self._conn is not None:
            self._origin.check("the client", "connect again in the child: spark_pgqueue.connect()")

    @property
    def is_here(self) -> bool:
        """Whether this process made the connection, and may close it."""
        return self._origin.is_here

    @property
    def can_wait(self) -> bool:
        """Whether the connection may wait: it is not the caller's, and not in a transaction."""
        return self._is_own and not self._transactions

    def rows(
        self,
        sql: LiteralString,
        parameters: Sequence[Any] = (),
        *,
        row_factory: RowFactory[Any] = tuple_row,
        binary: bool = False,
        into: list[Any] | None = None,
    ) -> list[Any]:
        """The rows of a statement.

        Args:
            sql: the statement.
            parameters: its values.
            row_factory: makes the rows.
            binary: whether to use Postgres' binary format, which is faster for many rows. The
                statement must be safe to repeat: it runs again if a value cannot be loaded.
            into: receives the rows, too, even if the caller is interrupted (Ctrl-C) after the
                statement took effect.

        Raises:
            PgQueueError: a known database error; a lost connection; Postgres was not available for
                `patience` seconds; or PQ011, as in `schema.check`.
        """
        into = [] if into is None else into
        attempt = partial(
            self._through_upgrade,
            partial(self._attempt, sql, parameters, row_factory, binary, into),
        )
        if self._repeat and not self._transactions:
            return with_backoff(attempt, self._url, self._patience)
        return attempt()

    def long_rows(self, sql: LiteralString, parameters: Sequence[Any] = ()) -> list[Any]:
        """As `rows`, without timeouts of the role or the database, which would cancel the statement
        each time. In the caller's transaction, or over its connection, they stay as they are.
        """

        def attempt() -> list[Any]:
            if not self.can_wait:
                return self.rows(sql, parameters)
            with self.turn, self._in_transaction():
                self.rows(NO_TIMEOUTS)
                return self.rows(sql, parameters)

        return self._through_upgrade(attempt)

    def row(self, sql: LiteralString, parameters: Sequence[Any] = ()) -> tuple[Any, ...]:
        """The row of a statement that returns exactly one. Errors as in `rows`."""
        (row,) = self.rows(sql, parameters)
        return row

    def install(self, *, pgmq: bool = False, without: Collection[str] = ()) -> int:
        """Install or upgrade the schema; see `schema.install`."""
        with self.explained():
            version = schema.install(self.connection(), pgmq=pgmq, without=without)
        self._checked = True
        return version

    def connection(self) -> psycopg.Connection[Any]:
        """The connection. A lost connection is replaced, unless it is the caller's.

        Raises:
            PgQueueError: no connection can be made.
        """
        self.check_process()
        lost = self._conn is None or self._conn.closed
        if lost and self._is_own and not self._closed and not self._transactions:
            # With `repeat`, the caller retries the connection together with the statement.
            self._conn = connect(self._url, patience=0 if self._repeat else self._patience)
            self._origin = Origin()
            self._checked = False  # the connection may have been lost by an upgrade
            if self._prepare is not None:
                self._prepare(self._conn)
        if self._conn is None:
            raise PgQueueError("the connection is closed")
        return self._conn

    def checked_connection(self) -> psycopg.Connection[Any]:
        """The connection, for statements of the caller's own that call the schema's functions.

        Raises:
            PgQueueError: no connection can be made, or PQ011, as in `rows`.
        """
        conn = self.connection()
        self._check(conn)
        return conn

    def _check(self, conn: psycopg.Connection[Any]) -> None:
        if not self._checked:
            with translated():
                self._version = schema.check_by(self._first_row, conn.info.dbname, self._previous)
            self._checked = True

    def _first_row(self, sql: LiteralString) -> tuple[Any, ...] | None:
        return schema.first_row(self.connection(), sql)

    def _through_upgrade(self, attempt: Callable[[], list[Any]]) -> list[Any]:
        """Repeat a statement that failed because the schema was upgraded while it ran.

        It ran the functions of before with the tables of after.
        """
        try:
            return attempt()
        except (PgQueueError, psycopg.Error):
            if not self._was_upgraded():
                raise
        return attempt()

    def _was_upgraded(self) -> bool:
        """Whether the schema has another version than at the last check of this connection.

        Raises:
            PgQueueError: PQ011, it is one that this package cannot use.
        """
        with self.turn:
            conn, known = self._conn, self._version
            if not self._checked or conn is None or conn.closed:
                return False
            if conn.info.transaction_status != psycopg.pq.TransactionStatus.IDLE:
                return False
            with self.limited(conn), suppress(psycopg.Error):  # else the check says what is wrong
                if self._first_row("select pgqueue.schema_version()") == (known,):
                    return False
            self._checked = False
            with self.explained(), self.limited(conn):
                self._check(conn)
            self.disconnect()  # other plans of this session are of before, too
            return True

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """A transaction around the statements inside. A connection lost inside is not replaced.

        Raises:
            PgQueueError: the connection is lost.
        """
        with self._in_transaction():
            self._transactions += 1
            try:
                yield
            finally:
                self._transactions -= 1

    @contextmanager
    def _in_transaction(self) -> Iterator[None]:
        # Errors of the caller's own statements inside are not translated.
        with ExitStack() as stack:
            with self.explained():
                conn = self.connection()
                with self.limited(conn):
                    stack.enter_context(self._begun(conn))
            yield
            self.check_process()
            with self.explained(), self.limited(conn):
                stack.close()

    def _begun(self, conn: psycopg.Connection[Any]) -> AbstractContextManager[Any]:
        return conn.transaction()

    def another(self, *, repeat: bool = True) -> Statements:
        """Another connection to the same database.

        Args:
            repeat: as for `Statements`, and then for short statements only.
        """
        return Statements(
            self._url,
            patience=self._patience,
            repeat=repeat,
            names=self._names,
            prepare=self._prepare,
            limit=SHORT if repeat else None,
            previous=self._previous,
        )

    def disconnect(self) -> None:
        """Close the connection, unless it is the caller's; the next statement connects again."""
        if self._is_own and self._conn is not None and self.is_here:
            self._conn.close()

    def close(self) -> None:
        """Close the connection for good, unless it is the caller's. Safe to repeat."""
        self.disconnect()
        self._closed = True

    @contextmanager
    def kept(self) -> Iterator[Statements]:
        """Use the connection that this process kept for the database, if there is one. Keep it for
        the next use, unless there is an error.
        """
        self._conn = take(psycopg.Connection, self._url)
        if self._conn is not None and not _is_quiet(self._conn):
            self.disconnect()
        try:
            yield self
        except BaseException:
            self.close()
            raise
        if self._conn is not None and not self._conn.closed:
            keep(psycopg.Connection, self._url, self._conn)
        self._conn, self._closed = None, True

    def limited(self, conn: psycopg.Connection[Any]) -> AbstractContextManager[None]:
        """A context for a use of the connection, which fails after the time limit."""
        return nullcontext() if self._limit is None else self._limit.around(conn)

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Raise a PgQueueError instead of every known database error.

        Raises:
            PgQueueError: for those; other errors are raised unchanged.
        """
        try:
            yield
        except psycopg.Error as error:
            known = self._explain(error)
            if known is None:
                raise
            raise known from None

    def _attempt(
        self,
        sql: LiteralString,
        parameters: Sequence[Any],
        row_factory: RowFactory[Any],
        binary: bool,
        into: list[Any],
    ) -> list[Any]:
        with self.turn, self.explained():
            conn = self.connection()
            with self.limited(conn):
                self._check(conn)
                # Not conn.cursor(): the caller's connection may have factories and loaders of its
                # own.
                cursor = psycopg.Cursor(conn, row_factory=row_factory)
                with cursor if self._is_own else plain(cursor):
                    try:
                        cursor.execute(sql, parameters, binary=binary)
                        into += cursor.fetchall()
                    except psycopg.DataError:  # a value that Python cannot represent
                        if not took_effect(cursor):
                            raise
                        if binary:
                            cursor.execute(sql, parameters)
                        into += load_nearest(cursor, row_factory)
                    except BaseException:
                        if not into and took_effect(cursor):  # before it could be cancelled
                            into += cursor.fetchall()
                        raise
                    return into

    def _explain(self, error: psycopg.Error) -> PgQueueError | None:
        sqlstate, said = sqlstate_of(error), Said.by(error)
        known = translate(error, self._names)
        if known is not None:
            return known
        if sqlstate == _READ_ONLY:
            if self._repeat:
                self.disconnect()  # a failover: the next connection may lead to the primary
            hint = "connect to the primary, or begin a transaction that is not read-only"
            return PgQueueError(said.message, hint=hint, sqlstate=sqlstate)
        if is_passing(error) or (self._conn is not None and self._conn.closed):
            self.disconnect()
            hint = "whether the call took effect is not known; "
            hint += "the next call reconnects" if self._is_own else "connect again"
            return PgQueueError(
                f"the connection to Postgres was lost: {said.message}",
                hint="check that Postgres runs and can be reached" if self._repeat else hint,
                # `is_passing` must be true of this error, too.
                sqlstate=_LOST if sqlstate is None or is_crash(error) else sqlstate,
            )
        if isinstance(error, psycopg.DataError):
            # Without the detail, which may quote a payload.
            return PgQueueError(said.message, sqlstate=sqlstate)
        return None


def took_effect(cursor: psycopg.Cursor[Any] | psycopg.AsyncCursor[Any]) -> bool:
    """Whether a statement that was interrupted has nevertheless returned rows."""
    result = cursor.pgresult
    return result is not None and result.status == psycopg.pq.ExecStatus.TUPLES_OK


def _is_quiet(conn: psycopg.Connection[Any]) -> bool:
    """Whether an idle connection is still open."""
    return not conn.closed and not select.select([conn], [], [], 0)[0]


def _limit(url: str | None, seconds: float | None) -> TimeLimit:
    if seconds is not None:
        return TimeLimit(seconds)
    return TimeLimit(SHORT, partial(answers, url))
