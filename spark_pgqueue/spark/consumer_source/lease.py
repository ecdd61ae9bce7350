"""The lease of a source: a thread extends its claims between the calls of Spark."""

from __future__ import annotations

import threading
from datetime import timedelta

from spark_pgqueue.postgres import clock
from spark_pgqueue.postgres.statements import Statements
from spark_pgqueue.postgres.time_limit import SHORT
from spark_pgqueue.printable import warn
from spark_pgqueue.spark.platform.process import Parent


class Lease:
    """Extends a checkpoint reader's claims every third of their visibility timeout, in a thread."""

    def __init__(self, url: str | None, visibility_timeout: timedelta, parent: Parent):
        self._timeout = visibility_timeout
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
        # At most a second at a time: a wait does not count the time in which the machine sleeps.
        while not self._stopped.wait(min(self._every, 1.0)) and self._parent.lives():
            if clock.now() < due:
                continue
            due = clock.now() + self._every
            try:
                self._statements.row(
                    "select pgqueue.reader_extend(%s, %s)", [self.reader, self._timeout]
                )
            except Exception as error:
                # The next round tries again. If the lease is lost before, the next claim in the
                # main thread reports it.
                warn("could not extend the claims of reader %s: %s", self.reader, error)
        self._statements.close()
