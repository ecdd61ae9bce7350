"""The clock of leases. It continues while the machine sleeps, as the database's clock does."""

from __future__ import annotations

import time

# Python's monotonic clock stops in suspend on Linux, and not on macOS.
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def now() -> float:
    """Seconds since an arbitrary moment; never decreases."""
    return time.clock_gettime(_CLOCK)
