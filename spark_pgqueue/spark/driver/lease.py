"""The parts of a source that work between Spark's calls: its lease, its parent, and its waiting.

All of them live in the one driver-side process that Spark starts for a source. They are made on
first use, because Spark also pickles the reader object to executors.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from datetime import timedelta

import psycopg

from spark_pgqueue.postgres import clock, owners
from spark_pgqueue.postgres.connection import connect
from spark_pgqueue.postgres.errors import PgQueueError
from spark_pgqueue.postgres.notifications import Listener, StreamSubscription, wait_for_any
from spark_pgqueue.postgres.statements import Statements
from spark_pgqueue.postgres.time_limit import SHORT
from spark_pgqueue.printable import warn


class Parent:
    """The process that started this one: Spark's JVM. After its death nothing here may claim
    messages.
    """

    def __init__(self) -> None:
        self._pid = os.getppid()

    def lives(self) -> bool:
        """Whether the parent runs. A process whose parent died gets another parent at once."""
        return os.getppid() == self._pid

    def check(self) -> None:
        """Raise when the parent is dead.

        Raises:
            PgQueueError: the parent died.
        """
        if not self.lives():
            raise PgQueueError("the Spark driver of this source is gone")


class Lease:
    """Extends a checkpoint reader's claims every third of their visibility timeout, in a thread."""

    def __init__(self, url: str | None, visibility_timeout: timedelta, parent: Parent):
        self._every = visibility_timeout.total_seconds() / 3
        self._statements = Statements(url, patience=self._every, repeat=True, limit=SHORT)
        self._parent = parent
        self.reader: str | None = None
        """The checkpoint reader whose claims are extended."""
        self._stopped = threading.Event()

    def hold(self, reader: str) -> None:
        """Extend the claims of `reader` (a uuid) from now on. Idempotent."""
        starting = self.reader is None
        self.reader = reader
        if starting:
            threading.Thread(target=self._run, name="pgqueue lease", daemon=True).start()

    def stop(self) -> None:
        """Stop extending, within a third of the visibility timeout."""
        self._stopped.set()

    def _run(self) -> None:
        due = clock.now() + self._every
        # At most a second at a time: a wait stands still while the machine sleeps.
        while not self._stopped.wait(min(self._every, 1.0)) and self._parent.lives():
            if clock.now() < due:
                continue
            due = clock.now() + self._every
            try:
                self._statements.row("select pgqueue.reader_extend(%s)", [self.reader])
            except Exception as error:
                # The next beat tries again. If the lease is lost meanwhile, the next claim in the
                # main thread reports it.
                warn("could not extend the claims of reader %s: %s", self.reader, error)
        self._statements.close()


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
        """Listen from now on. Returns whether that is new, so that a look is due."""
        started = [each for each in self._current() if each.is_started]
        if len(started) == len(self._streams):
            return False
        return self._attempt(self._start)

    def note_messages(self, streams: Iterable[str] | None = None) -> None:
        """Note that streams had messages at once: the given streams, or all.

        After several times in a row, producers need not notify.
        """
        for name in self._streams if streams is None else streams:
            if subscription := self._subscriptions.get(name):
                self._attempt(subscription.note_messages)

    def wait(self, seconds: float) -> bool:
        """Wait until looking makes sense, the time is over, or the parent is dead.

        Returns:
            whether looking makes sense.
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
