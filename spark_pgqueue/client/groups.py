"""A worker of a group: it leases partitions, and handles their messages in its own transactions."""

from __future__ import annotations

import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import psycopg

from spark_pgqueue import calling
from spark_pgqueue.client import reading
from spark_pgqueue.client.long_poll import LongPoll
from spark_pgqueue.client.messages import StoredMessage
from spark_pgqueue.postgres.errors import LEASE_LOST, PgQueueError
from spark_pgqueue.postgres.retrying import is_passing, is_worth_a_retry
from spark_pgqueue.postgres.statements import Statements
from spark_pgqueue.printable import warn

Handler = Callable[[list[StoredMessage], psycopg.Connection[Any]], object]

_FOR_EVER = timedelta(days=1).total_seconds()
_BEAT = 1.0
"""The longest time in seconds between two renewals of a lease. So long it takes until a worker
learns of other workers."""

_WINDOW = 1_000_000  # messages, of all partitions, that one look may scan


@dataclass(frozen=True)
class _Share:
    """The messages that a worker handles next, and the offset to commit afterwards."""

    messages: list[StoredMessage]
    lease_ids: list[int]
    offset: list[int]


class Group:
    """A group of a stream, made by `Client.group`."""

    def __init__(
        self,
        statements: Statements,
        long_poll: LongPoll,
        stream: str,
        name: str,
        another: Callable[[], Statements],
    ):
        self._statements = statements
        self._long_poll = long_poll
        self._stream = stream
        self._name = name
        self._another = another
        self._is_stopped = False  # an Event's lock would block a signal handler
        self._call: Callable[..., Any] = calling.call
        """Calls the handler."""

    def run(
        self,
        handler: Handler,
        *,
        worker: str | None = None,
        lease: timedelta = timedelta(seconds=30),
        max_messages: int = 1000,
        wait: timedelta | None = None,
    ) -> int:
        """Handle messages, as one of the workers of the group.

        All messages of a key come to one worker, in order. The handler's connection is in a
        transaction, which is committed together with the offset: its effects happen once, even if
        a worker dies or stalls. Effects elsewhere may happen again after such a failure. The
        handler must not commit. An error of the handler ends the run, and its messages stay.

        A thread with a connection of its own renews the lease meanwhile.

            >>> def handle(messages, connection):
            ...     for message in messages:
            ...         connection.execute("insert into bills values (%s, 0)", [message.seq])
            >>> group_id = queue.create_group("orders", "mailing", start="earliest")
            >>> queue.group("orders", "mailing").run(handle, wait=timedelta(0))
            2

        Args:
            handler: called with at least one message, and the connection. A coroutine function is
                awaited, by the asynchronous client in the caller's loop.
            worker: a name that no other process has; by default a generated name.
            lease: how long after a process died other workers take over its partitions.
            max_messages: about how many messages a call of the handler gets.
            wait: the run ends when no message came for this time; None for not before `stop`.

        Returns:
            how many messages were handled.

        Raises:
            PgQueueError: PQ001 unknown stream, PQ002 unknown group, PQ006 a consumer that is no
                group, PQ003 a value out of range; a handler that takes something else, or whose
                body would not run. Errors of the handler are raised as they are, also if it
                returns them.
        """
        calling.check("handler", handler, ["a list of messages", "a connection"])
        name = worker or f"{socket.gethostname()} {os.getpid()} {uuid.uuid4().hex[:8]}"
        seconds = _FOR_EVER if wait is None else wait.total_seconds()
        self._is_handling = False
        count, pause = 0, 0.1
        with ExitStack() as stack:
            stack.callback(calling.end_loop)
            leases = _Leases(self._another(), self._stream, self._name, name, lease)
            stack.enter_context(leases)
            look = _Look(self._statements, leases, max_messages)
            while not self._is_stopped:
                try:
                    share = self._long_poll.first(
                        self._stream, look, look, seconds, lambda: self._is_stopped
                    )
                    if share is not None:
                        self._work(handler, share)
                        count += len(share.messages)
                    elif wait is not None:
                        break
                    pause = 0.1
                except (PgQueueError, psycopg.Error) as error:
                    if not self._passes(error):
                        raise
                    warn("work of group %s is undone, and done again: %s", self._name, error)
                    self._renew(leases)
                    time.sleep(pause)
                    pause = min(2 * pause, 2.0)
        self._is_stopped = False
        return count

    def stop(self) -> None:
        """End `run` after the current call of the handler; or the next `run`, if none has begun.

        Any thread, or a signal, may call it.
        """
        self._is_stopped = True

    def _passes(self, error: Exception) -> bool:
        """Whether the run goes on. A statement of the handler that fails is its failure."""
        is_handlers, self._is_handling = self._is_handling, False
        if getattr(error, "sqlstate", None) == LEASE_LOST:
            return True
        return is_passing(error) if is_handlers else is_worth_a_retry(error)

    def _renew(self, leases: _Leases) -> None:
        """Renew the leases after an error, as soon as Postgres is back."""
        pause = 0.1
        while not self._is_stopped:
            try:
                leases.renew()
                return
            except (PgQueueError, psycopg.Error) as error:
                if not is_worth_a_retry(error):
                    raise
            time.sleep(pause)
            pause = min(2 * pause, 2.0)

    def _work(self, handler: Handler, share: _Share) -> None:
        with self._statements.turn, self._statements.transaction():
            if share.messages:
                self._is_handling = True
                self._call(handler, share.messages, self._statements.connection())
                self._is_handling = False
            self._statements.rows(
                "select count(pgqueue.commit_offset(l, %s::bigint[])) from"
                " pg_catalog.unnest(%s::bigint[]) l",
                [share.offset, share.lease_ids],
            )


class _Leases:
    """The leases of a worker, which a thread renews within the context."""

    def __init__(
        self, statements: Statements, stream: str, group: str, worker: str, lease: timedelta
    ):
        self.stream = stream
        self.group = group
        self._statements = statements
        self._worker = worker
        self._lease = lease
        self._held: dict[int, bool] = {}  # lease ids, and whether to release each
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="pgqueue group", daemon=True)

    def __enter__(self) -> _Leases:
        try:
            self.renew()
        except BaseException:
            self._statements.close()
            raise
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        try:
            self._statements.rows(
                "select pgqueue.leave_group(%s::text, %s::text, %s::text)",
                [self.stream, self.group, self._worker],
            )
        except (PgQueueError, psycopg.Error) as error:
            warn("worker %s could not leave its group: %s", self._worker, error)
        self._statements.close()

    def renew(self) -> None:
        """Renew the leases, take partitions that are due, and learn which leases to release."""
        rows = self._statements.rows(
            "select lease_id, to_release from"
            " pgqueue.lease_partitions(%s::text, %s::text, %s::text, %s::interval)",
            [self.stream, self.group, self._worker, self._lease],
        )
        self._held = dict(rows)

    def settle(self, statements: Statements) -> list[int]:
        """Release leases that other workers are due, between two calls; returns the remaining
        leases.
        """
        held = self._held
        for lease_id, to_release in held.items():
            if to_release:
                try:
                    statements.rows(
                        "select pgqueue.commit_offset(%s::bigint, null, true)", [lease_id]
                    )
                except PgQueueError as error:
                    if error.sqlstate != LEASE_LOST:
                        raise
        left = {lease_id: False for lease_id, to_release in held.items() if not to_release}
        if self._held is held:
            self._held = left
        return list(left)

    def _beat(self) -> None:
        while not self._ended.wait(min(self._lease.total_seconds() / 3, _BEAT)):
            try:
                self.renew()
            except (PgQueueError, psycopg.Error) as error:
                warn("could not renew the lease of worker %s: %s", self._worker, error)


class _Look:
    """Looks for the next messages of a worker."""

    def __init__(self, statements: Statements, leases: _Leases, max_messages: int):
        self._statements = statements
        self._leases = leases
        self._wanted = max_messages
        self._window = max_messages

    def __call__(self) -> _Share | None:
        mine = self._leases.settle(self._statements)
        if not mine:
            return None
        rows = self._statements.rows(
            "select stream_id, kind, lo, hi, lease_ids, condition, next_offset from"
            " pgqueue.plan_partitions(%s::text, %s::text, %s::bigint[], %s::int),"
            " pgqueue.open_stream(%s::text) s (stream, kind)",
            [self._leases.stream, self._leases.group, mine, self._window, self._leases.stream],
        )
        if not rows:
            return None
        stream_id, kind, lo, hi, lease_ids, condition, offset = rows[0]
        ranges: list[tuple[int, int]] = list(zip(lo or [], hi or [], strict=True))
        messages = (
            reading.messages(self._statements, stream_id, kind, ranges, condition) if ranges else []
        )
        # Only looking tells how many of the scanned messages are the worker's own.
        grown = self._window * self._wanted // max(len(messages), 1)
        self._window = min(max(grown, self._wanted), self._window * 4, _WINDOW)
        return _Share(messages, lease_ids, offset)
