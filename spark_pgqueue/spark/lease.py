"""What keeps a source alive and awake between Spark's calls: its leases, its parent, its wake-ups.

All of it lives in the one driver-side process that Spark starts for a source and is made on first
use, because the reader object itself is also pickled to the executors.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from datetime import timedelta

import psycopg

from spark_pgqueue.postgres.connection import connect
from spark_pgqueue.postgres.errors import PgQueueError
from spark_pgqueue.postgres.notifications import Listener, Waiter, wait_for_any
from spark_pgqueue.postgres.statements import Statements
from spark_pgqueue.printable import warn


class Parent:
    """The process that started this one: Spark's JVM. When it dies, nothing here may claim more."""

    def __init__(self) -> None:
        self._pid = os.getppid()

    def lives(self) -> bool:
        """Whether it still runs. A process whose parent died is given another one at once."""
        return os.getppid() == self._pid

    def check(self) -> None:
        """Raise when it does not.

        Raises:
            PgQueueError: the parent died.
        """
        if not self.lives():
            raise PgQueueError("the Spark driver of this source is gone")


class Lease:
    """Extends a reader's claims every third of their visibility timeout, from a daemon thread."""

    def __init__(self, url: str | None, visibility_timeout: timedelta, parent: Parent):
        self._every = visibility_timeout.total_seconds() / 3
        self._statements = Statements(url, patience=self._every, repeat=True)
        self._parent = parent
        self.reader: str | None = None
        """Whose claims it extends."""
        self._stopped = threading.Event()

    def hold(self, reader: str) -> None:
        """Extend the claims of `reader` (a uuid) from now on. Idempotent."""
        starting = self.reader is None
        self.reader = reader
        if starting:
            threading.Thread(target=self._run, name="pgqueue lease", daemon=True).start()

    def stop(self) -> None:
        """Stop extending, within a beat."""
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.wait(self._every) and self._parent.lives():
            try:
                self._statements.row("select pgqueue.reader_extend(%s)", [self.reader])
            except Exception as error:
                # The next beat tries again. A lease that is lost meanwhile is reported by the
                # claim that finds it so, in the main thread.
                warn("could not extend the claims of reader %s: %s", self.reader, error)
        self._statements.close()


class Wakeup:
    """Waits for publications of streams. What it cannot hear (a pooler, a restart) it sits out."""

    def __init__(self, url: str | None, streams: Iterable[str], parent: Parent):
        self._url = url
        self._streams = list(streams)
        self._parent = parent
        self._conn: psycopg.Connection | None = None
        self._listener: Listener | None = None
        self._waiters: dict[str, Waiter] = {}

    def wait_for_streams(self, streams: Iterable[str]) -> None:
        """Wait for these streams from now on, in place of those before."""
        self._streams = list(streams)
        # A stream that was dropped may come back as another one.
        self._waiters = {
            name: self._waiters[name] for name in self._streams if name in self._waiters
        }

    def forget(self) -> None:
        """Forget what was heard so far. To be called before looking for messages."""
        for waiter in self._current():
            self._attempt(waiter.forget)

    def start(self) -> bool:
        """Wait from now on; returns whether that is new, and so messages have to be looked for."""
        started = [each for each in self._current() if each.is_started]
        if len(started) == len(self._streams):
            return False
        return self._attempt(self._start)

    def note_messages(self, streams: Iterable[str] | None = None) -> None:
        """Note that there was something at once, of some streams or all of them.

        Time and again, producers need not notify.
        """
        for name in self._streams if streams is None else streams:
            if waiter := self._waiters.get(name):
                self._attempt(waiter.note_messages)

    def wait(self, seconds: float) -> bool:
        """Wait until it makes sense to look, the time is over, or the parent is gone.

        Returns:
            whether it makes sense to look.
        """
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0 and self._parent.lives():
            # A second at most at a time, because nothing else shows that the parent died.
            if self._wait(min(left, 1.0)):
                return True
        return False

    def close(self) -> None:
        """Stop listening."""
        if self._conn is not None:
            self._conn.close()
        self._conn = self._listener = None
        self._waiters = {}

    def _current(self) -> list[Waiter]:
        return [self._waiters[name] for name in self._streams if name in self._waiters]

    def _start(self) -> None:
        if self._conn is None or self._listener is None:
            self._conn = connect(self._url, patience=0)
            self._listener = Listener(self._conn)
        for name in self._streams:
            waiter = self._waiters.setdefault(name, Waiter(self._listener, name))
            if not waiter.is_started:
                waiter.start()

    def _wait(self, seconds: float) -> bool:
        waiters = self._current()
        if waiters and all(each.is_started for each in waiters):
            try:
                return wait_for_any(waiters, seconds)
            except psycopg.Error:
                self.close()
        time.sleep(seconds)
        return False

    def _attempt(self, step: Callable[[], None]) -> bool:
        """Whether it worked; if not, the connection is closed, and everything it held is gone."""
        try:
            step()
        except (psycopg.Error, PgQueueError):
            self.close()
            return False
        return True
