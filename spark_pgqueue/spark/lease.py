"""What keeps a source alive and awake between Spark's calls: its leases, its parent, its wake-ups.

All of it lives in the one driver-side process that Spark starts for a source and is made on first
use, because the reader object itself is also pickled to the executors.
"""

from __future__ import annotations

import os
import threading
import time
from datetime import timedelta

import psycopg

from spark_pgqueue.postgres.connection import connect
from spark_pgqueue.postgres.errors import PgQueueError
from spark_pgqueue.postgres.notifications import Listener
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
        self._reader: str | None = None
        self._stopped = threading.Event()

    def hold(self, reader: str) -> None:
        """Extend the claims of `reader` (a uuid) from now on. Idempotent."""
        starting = self._reader is None
        self._reader = reader
        if starting:
            threading.Thread(target=self._run, name="pgqueue lease", daemon=True).start()

    def stop(self) -> None:
        """Stop extending, within a beat."""
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.wait(self._every) and self._parent.lives():
            try:
                self._statements.row("select pgqueue.reader_extend(%s)", [self._reader])
            except Exception as error:
                # The next beat tries again. A lease that is lost meanwhile is reported by the
                # claim that finds it so, in the main thread.
                warn("could not extend the claims of reader %s: %s", self._reader, error)
        self._statements.close()


class Wakeup:
    """Waits for a notification on a channel. Without one (a pooler, a restart) it just waits."""

    def __init__(self, url: str | None, channel: str, parent: Parent):
        self._url = url
        self._channel = channel
        self._parent = parent
        self._listener: Listener | None = None

    def arm(self) -> None:
        """Listen, and forget the notifications so far. To be called before looking for messages."""
        try:
            if self._listener is None:
                self._listener = Listener(connect(self._url, patience=0))
                self._listener.listen(self._channel)
            self._listener.forget(self._channel)
        except (psycopg.Error, PgQueueError):
            self.close()

    def wait(self, seconds: float) -> bool:
        """Wait until there is a notification, the time is over, or the parent is gone.

        Returns:
            whether there was a notification.
        """
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0 and self._parent.lives():
            # A second at most at a time, because nothing else shows that the parent died.
            if self._wait(min(left, 1.0)):
                return True
        return False

    def close(self) -> None:
        """Stop listening."""
        if self._listener is not None:
            self._listener.conn.close()
            self._listener = None

    def _wait(self, seconds: float) -> bool:
        if self._listener is not None:
            try:
                return self._listener.wait(self._channel, seconds)
            except psycopg.Error:
                self.close()
        time.sleep(seconds)
        return False
