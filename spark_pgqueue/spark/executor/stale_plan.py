"""Detects rows that are read with the plan of another query.

Spark requests the partitions of a batch reader once, and reuses them for each query of the frame
that `load()` returned. So all queries of a frame show the rows of the first one: also each
micro-batch of a stream-static join, and queries of a temporary view. A streaming query would
silently use wrong rows, so the second micro-batch fails. Outside of streaming queries there is a
warning after some time.

A planner process makes a `PlanGuard`, and executors read with it. They cannot communicate, so files
of the user, on each machine, record the first reader of each plan. (So on a cluster, an executor
that reads the first time notices nothing.)
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
from spark_pgqueue.spark.platform.pyspark_compat import local_property

REMEMBERED = 6 * 3600.0
"""Seconds for which a machine remembers a plan that is not used."""

SOON = 60.0
"""A query within this number of seconds after the first one gets no warning: users often count a
frame before they collect it."""

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
        if TaskContext.get() is None:
            return
        names = ("sql.streaming.queryId", "streaming.sql.batchId", "spark.sql.execution.id")
        query, batch, execution = map(local_property, names)
        self.compare(None if query is None else f"{query} {batch}", execution)

    def compare(self, batch: str | None, execution: str | None) -> None:
        """Compare the reader with the first reader of the plan: a micro-batch of a streaming query,
        or an execution of another query. Errors as `check`.
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
                    "or persist() the DataFrame before the query starts, to keep it as it is",
                )
            if time.time() > self.made_at + SOON and self.plan not in _WARNED:
                _WARNED.add(self.plan)
                warn(
                    "%s is read as it was at %s: Spark keeps the partitions of what load() "
                    "returned; load() it again to see it as it is now",
                    *(self.what, at),
                )


def _first(plan: str, reads: str) -> str:
    """The first reader of a plan: the given one, if there was none before."""
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
