"""A worker of a group: it leases partitions, and works them off in transactions of its own."""

from __future__ import annotations

import os
import socket
import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import psycopg

from spark_pgqueue.client import reading
from spark_pgqueue.client.results import StoredMessage
from spark_pgqueue.client.waiting import Waiting
from spark_pgqueue.postgres.errors import LEASE_LOST, PgQueueError
from spark_pgqueue.postgres.retrying import is_passing
from spark_pgqueue.postgres.statements import Statements
from spark_pgqueue.printable import warn

Handler = Callable[[list[StoredMessage], psycopg.Connection[Any]], object]

_FOR_EVER = timedelta(days=1).total_seconds()
_BEAT = 1.0
"""Seconds, at most, after which a lease is renewed: so long it takes to hear of other workers."""

_WINDOW = 1_000_000  # messages, of all partitions, that one look may go through


@dataclass(frozen=True)
class _Share:
    """What a worker has to do next, and what to commit when it is done."""

    messages: list[StoredMessage]
    lease_ids: list[int]
    offset: list[int]


class Group:
    """A group of a stream, made by `Client.group`."""

    def __init__(
        self,
        statements: Statements,
        waiting: Waiting,
        stream: str,
        name: str,
        another: Callable[[], Statements],
    ):
        self._statements = statements
        self._waiting = waiting
        self._stream = stream
        self._name = name
        self._another = another
        self._stopped = threading.Event()

    def run(
        self,
        handler: Handler,
        *,
        worker: str | None = None,
        lease: timedelta = timedelta(seconds=30),
        max_messages: int = 1000,
        wait: timedelta | None = None,
    ) -> int:
        """Work off messages, as one of the workers of the group.

        The messages of a key all come to one worker, in order. What the handler does on its
        connection, which is in a transaction, is committed together with how far it is: once,
        whoever dies or sleeps too long. What it does elsewhere may happen again after such a
        failure. It must not commit itself; an error of it ends the run, and its messages stay.

        The lease is renewed meanwhile, by a thread with a connection of its own.

            >>> def handle(messages, connection):
            ...     for message in messages:
            ...         connection.execute("insert into bills values (%s, 0)", [message.seq])
            >>> group_id = queue.create_group("orders", "mailing", start="earliest")
            >>> queue.group("orders", "mailing").run(handle, wait=timedelta(0))
            2

        Args:
            handler: called with messages, at least one, and the connection.
            worker: a name that no other process has; by default one is made.
            lease: after how long others take over from a process that died.
            max_messages: for a call of the handler, about.
            wait: the run ends when there was nothing for so long; None for not before `stop`.

        Returns:
            how many messages were worked off.

        Raises:
            PgQueueError: PQ001 unknown stream, PQ002 unknown group, PQ006 a consumer that is no
                group, PQ003 a value out of range; and what the handler raises.
        """
        name = worker or f"{socket.gethostname()} {os.getpid()} {uuid.uuid4().hex[:8]}"
        self._stopped.clear()
        seconds = _FOR_EVER if wait is None else wait.total_seconds()
        count = 0
        with _Leases(self._another(), self._stream, self._name, name, lease) as leases:
            look = _Look(self._statements, leases, max_messages)
            while not self._stopped.is_set():
                try:
                    share = self._waiting.first(
                        self._stream, look, look, seconds, self._stopped.is_set
                    )
                    if share is not None:
                        self._work(handler, share)
                        count += len(share.messages)
                    elif wait is not None:
                        break
                except (PgQueueError, psycopg.Error) as error:
                    if getattr(error, "sqlstate", None) != LEASE_LOST and not is_passing(error):
                        raise
                    warn("work of group %s is undone, and done again: %s", self._name, error)
                    leases.renew()
        return count

    def stop(self) -> None:
        """End `run`, from another thread or a signal, after the call of the handler at hand."""
        self._stopped.set()

    def _work(self, handler: Handler, share: _Share) -> None:
        with self._statements.turn, self._statements.transaction():
            if share.messages:
                handler(share.messages, self._statements.connection())
            self._statements.rows(
                "select count(pgqueue.commit_offset(l, %s::bigint[])) from"
                " pg_catalog.unnest(%s::bigint[]) l",
                [share.offset, share.lease_ids],
            )


class _Leases:
    """The partitions of a worker, renewed by a thread for as long as it is in its context."""

    def __init__(
        self, statements: Statements, stream: str, group: str, worker: str, lease: timedelta
    ):
        self.stream = stream
        self.group = group
        self._statements = statements
        self._worker = worker
        self._lease = lease
        self._held: dict[int, bool] = {}  # whether to release it
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
        """Renew the lease, take what is due, and hear what to release."""
        rows = self._statements.rows(
            "select lease_id, to_release from"
            " pgqueue.lease_partitions(%s::text, %s::text, %s::text, %s::interval)",
            [self.stream, self.group, self._worker, self._lease],
        )
        self._held = dict(rows)

    def settle(self, statements: Statements) -> list[int]:
        """Release what others are due, while nothing of it is at work; returns what is left."""
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
    """Looks for what a worker has to do next."""

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
        # How many of the messages that it looks through are its own is found out by looking.
        grown = self._window * self._wanted // max(len(messages), 1)
        self._window = min(max(grown, self._wanted), self._window * 4, _WINDOW)
        return _Share(messages, lease_ids, offset)
