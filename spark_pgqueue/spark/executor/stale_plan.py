"""Whether rows are read with the plan of another query.

Spark asks a batch reader once for its partitions, and keeps them for everything that is read of
what one `load()` returned. So a frame shows what its first query has found, in each later query
too: in each micro-batch of a stream-static join, and behind a temporary view. Rows of a streaming
query would be wrong without a word, so the second micro-batch fails; outside of streaming queries
there is a warning after a while.

A planner process makes a `PlanGuard`, and executors read with it. Nothing tells them of each other,
so files of the user, on each machine, say who has read before.
"""

from __future__ import annotations

import contextlib
import os
import random
import time
from dataclasses import dataclass, field
from uuid import uuid4

from pyspark import TaskContext

from spark_pgqueue.postgres.errors import PgQueueError
from spark_pgqueue.printable import warn
from spark_pgqueue.spark.platform.process import own_folder

REMEMBERED = 6 * 3600.0
"""Seconds for which a machine remembers a plan that nobody reads with."""

SOON = 60.0
"""A query that follows the first one within so many seconds gets no warning: people count a frame,
and then collect it."""

_WARNED: set[str] = set()
"""The plans that this process has warned of."""


@dataclass(frozen=True)
class PlanGuard:
    """The plan of what one `load()` returned."""

    what: str  # what is read, for people
    plan: str = field(default_factory=lambda: str(uuid4()))  # an id that no other plan has
    made_at: float = field(default_factory=time.time)  # when it was made

    def check(self) -> None:
        """Check, on an executor, that this is the query that was planned."""
        context = TaskContext.get()
        if context is None:
            return
        names = ("sql.streaming.queryId", "streaming.sql.batchId", "spark.sql.execution.id")
        query, batch, execution = map(context.getLocalProperty, names)
        self.compare(None if query is None else f"{query} {batch}", execution)

    def compare(self, batch: str | None, execution: str | None) -> None:
        """Compare who reads with who has read first: a micro-batch of a streaming query, or an
        execution of another query. Errors as `check`.
        """
        reads = f"execution {execution}" if batch is None else f"batch {batch}"
        with contextlib.suppress(OSError):  # no folder to write to
            if _first(self.plan, reads) == reads:
                return
            at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.made_at))
            if batch is not None:
                raise PgQueueError(
                    f"this micro-batch would read {self.what} as it was planned for another one, "
                    f"at {at}: Spark keeps the partitions of what load() returned",
                    hint="call load() inside of foreachBatch, which plans it for each micro-batch; "
                    "or persist() the frame before the query starts, if it is to stay as it is",
                )
            if time.time() > self.made_at + SOON and self.plan not in _WARNED:
                _WARNED.add(self.plan)
                warn(
                    "%s is read as it was at %s: Spark keeps the partitions of what load() "
                    "returned; load() it again to see it as it is now",
                    *(self.what, at),
                )


def _first(plan: str, reads: str) -> str:
    """Who was the first to read with a plan: this reader, if nobody did before."""
    folder = own_folder("pgqueue-plans")
    if random.random() < 0.01:
        old = time.time() - REMEMBERED
        for path in folder.iterdir():
            with contextlib.suppress(FileNotFoundError):
                if path.lstat().st_mtime < old:
                    path.unlink()
    # A link to nowhere: it is made and filled in one step.
    path = folder / plan
    with contextlib.suppress(FileExistsError):
        path.symlink_to(reads)
    os.utime(path, follow_symlinks=False)
    return str(path.readlink())
