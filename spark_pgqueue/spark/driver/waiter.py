"""Waiting for publications, in the driver-side process of a source."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import psycopg

from spark_pgqueue.postgres import owners
from spark_pgqueue.postgres.connection import connect
from spark_pgqueue.postgres.errors import PgQueueError
from spark_pgqueue.postgres.notifications import Listener, StreamSubscription, wait_for_any
from spark_pgqueue.spark.platform.process import Parent


class PublicationWaiter:
    """Waits for publications; where it cannot listen (a pooler, a restart), it sleeps."""

    def __init__(self, url: str | None, streams: Iterable[str], parent: Parent):
        self._url = url
        self._streams = list(streams)
        self._parent = parent
        self._conn: psycopg.Connection | None = None
        self._listener: Listener | None = None
        self._subscriptions: dict[str, StreamSubscription] = {}

    def wait_for_streams(self, streams: Iterable[str]) -> None:
        """Wait for these streams from now on, instead of the streams before."""
        self._streams = list(streams)
        # A stream that was dropped may come back as a new stream with the same name.
        self._subscriptions = {
            name: self._subscriptions[name] for name in self._streams if name in self._subscriptions
        }

    def forget(self) -> None:
        """Forget all notifications so far. Call this before looking for messages."""
        for subscription in self._current():
            self._attempt(subscription.forget)

    def start(self) -> bool:
        """Listen from now on. Returns whether that is new, so that messages may be there."""
        started = [each for each in self._current() if each.is_started]
        if len(started) == len(self._streams):
            return False
        return self._attempt(self._start)

    def note_messages(self, streams: Iterable[str] | None = None) -> None:
        """Record that streams, the given ones or all, had messages without a wait.

        After several times in a row, producers need not notify.
        """
        for name in self._streams if streams is None else streams:
            if subscription := self._subscriptions.get(name):
                self._attempt(subscription.note_messages)

    def wait(self, seconds: float) -> bool:
        """Wait until there may be messages, the time is over, or the parent is dead.

        Returns:
            whether there may be messages.
        """
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0 and self._parent.lives():
            # At most a second at a time, because only polling shows that the parent died.
            if self._wait(min(left, 1.0)):
                return True
        return False

    def close(self) -> None:
        """Stop listening."""
        if self._conn is not None:
            self._conn.close()
        self._conn = self._listener = None
        self._subscriptions = {}

    def _current(self) -> list[StreamSubscription]:
        return [self._subscriptions[name] for name in self._streams if name in self._subscriptions]

    def _start(self) -> None:
        if self._conn is None or self._listener is None:
            self._conn = connect(self._url, patience=0)
            owners.check(self._conn)
            self._listener = Listener(self._conn)
        for name in self._streams:
            subscription = self._subscriptions.setdefault(
                name, StreamSubscription(self._listener, name)
            )
            if not subscription.is_started:
                subscription.start()

    def _wait(self, seconds: float) -> bool:
        subscriptions = self._current()
        if subscriptions and all(each.is_started for each in subscriptions):
            try:
                return wait_for_any(subscriptions, seconds)
            except psycopg.Error:
                self.close()
        time.sleep(seconds)
        return False

    def _attempt(self, step: Callable[[], None]) -> bool:
        """Whether a step succeeded. After a failure the connection is closed."""
        try:
            step()
        except (psycopg.Error, PgQueueError):
            self.close()
            return False
        return True
