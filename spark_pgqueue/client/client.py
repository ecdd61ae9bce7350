"""The client and its connection; the methods are in `calls`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any
from weakref import WeakSet

import psycopg

from spark_pgqueue.client import arguments
from spark_pgqueue.client.calls.monitoring import Monitoring
from spark_pgqueue.client.calls.receiving import Receiving
from spark_pgqueue.client.long_poll import LongPoll
from spark_pgqueue.postgres.errors import PgQueueError
from spark_pgqueue.postgres.retrying import PATIENCE
from spark_pgqueue.postgres.statements import Statements
from spark_pgqueue.postgres.wake_event import WakeEvent
from spark_pgqueue.printable import warn


def connect(
    url: str | None = None, *, patience: float = PATIENCE, _wake: WakeEvent | None = None
) -> Client:
    """Connect to the database of a queue: see `spark_pgqueue.connect`."""
    statements = make_statements(url=url, patience=patience)
    return Client(statements.connection(), _statements=statements, _wake=_wake)


class Client(Receiving, Monitoring):
    """A queue, over one connection. Made by `connect`, or with a connection of the caller.

    On the caller's connection each call takes part in the caller's transaction, if there is one:
    sent messages become visible with its commit, and claimed messages stay locked until then.

    The database must have the schema version that this package needs; the first call checks that.
    Threads may share a client, and then wait for each other; `transaction` is for one thread.

    Args:
        connection: an open connection of psycopg. `close` leaves it open.

    Raises:
        PgQueueError: the connection is not psycopg's. All other methods raise it too: for each
            error of the database's functions (sqlstate PQ...), an argument of the wrong type, a
            missing permission, a missing or different schema, and a lost connection.
    """

    def __init__(
        self,
        connection: psycopg.Connection[Any],
        *,
        _statements: Statements | None = None,
        _wake: WakeEvent | None = None,
    ):
        if _statements is None and not isinstance(connection, psycopg.Connection):
            raise PgQueueError(
                f"connection must be a psycopg.Connection, not {type(connection).__name__}",
                hint="to connect by url, use spark_pgqueue.connect(url)",
            )
        self._statements = _statements or make_statements(connection=connection)
        self._long_poll = LongPoll(self._statements, _wake)
        self._consuming = WeakSet()

    @contextmanager
    def transaction(self) -> Iterator[Client]:
        """Make the calls inside one transaction: all of them take effect at its end, or none.

        Keep it short: messages that it claims or settles stay locked until its end. A connection
        that is lost inside is not replaced; then no call took effect.

            >>> with queue.transaction():
            ...     claim = queue.receive("orders", "billing")
            ...     seq = queue.send("orders", f"{claim.messages[0].data} again")
            ...     count = claim.ack()

        Raises:
            PgQueueError: the connection is lost.
        """
        with self._statements.transaction():
            yield self

    def __repr__(self) -> str:
        return f"<client of {self._statements}>"

    def close(self) -> None:
        """Close the connection, if it is the client's own, and end iterations. Safe to repeat."""
        for messages in list(self._consuming) if self._statements.is_here else ():
            with suppress(ValueError):  # it runs, in another thread
                messages.close()
        self._statements.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def make_statements(**where: Any) -> Statements:
    """Statements for the client: with its names for arguments, and with warnings logged."""
    return Statements(**where, names=arguments.name_of, prepare=log_warnings_of, previous=True)


def log_warnings_of(connection: psycopg.Connection) -> None:
    """Log the warnings of the schema's functions over a connection, once."""
    # Each connection has one handler, however many clients use it. A worker removes it with those
    # that a transactional handler has added.
    if _log_warning not in connection._notice_handlers:
        connection.add_notice_handler(_log_warning)


def _log_warning(notice: psycopg.errors.Diagnostic) -> None:
    ours = "pgqueue." in (notice.context or "")
    if ours and notice.severity_nonlocalized == "WARNING":
        warn("%s", notice.message_primary, logger="spark_pgqueue.client")
