"""Whether a worker is alive and ready, for what restarts it: systemd, Kubernetes and others."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import NamedTuple

from spark_pgqueue.postgres.time_limit import SHORT

HUNG_AFTER = SHORT + 30.0
"""Seconds without a beat after which a thread or a loop hangs. A poller beats each second, except
while a statement waits, which is given up after `SHORT`."""

NOT_RUNNING, STARTING = "not running", "starting"


class Health(NamedTuple):
    """The health of a worker.

    Attributes:
        is_live: False if its thread or its event loop hangs: only a restart helps. An unavailable
            Postgres, a slow handler and a slow start leave it True.
        is_ready: whether it claims messages: it is connected, the schema fits the package,
            and it was not stopped.
        status: `working`, or why the worker is not ready or hangs, as text.
    """

    is_live: bool
    is_ready: bool
    status: str


class Pulse:
    """What the poller and the event loop of one run report. Any thread may ask for the health."""

    def __init__(self) -> None:
        self.status: str = STARTING
        self.is_stopping: bool = False
        self._beats: dict[str, float] = {}

    def beat(self, part: str = "poller") -> None:
        """Record that a part of the worker, the poller or the event loop, goes on."""
        # Not the clock of leases: a machine that wakes from suspend has no worker that hangs.
        self._beats[part] = time.monotonic()

    def health(self) -> Health:
        """The health now."""
        late = time.monotonic() - HUNG_AFTER
        for part, at in list(self._beats.items()):
            if at < late and self.status != STARTING:  # the hook on_start may take long
                return Health(False, False, f"the {part} hangs")
        status = "stopping" if self.is_stopping else self.status
        return Health(True, status == "working", status)


def worst(found: Iterable[Health]) -> Health:
    """The health of several workers together: that of the worst one; of none, not running."""
    return min(found, key=lambda each: each[:2], default=Health(True, False, NOT_RUNNING))
