"""Connections that a process keeps for reuse.

Connecting takes longer than most statements, as ADBC reads the catalogue of types. An idle
connection is closed soon, because a cluster has more workers than tasks.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
from types import ModuleType
from typing import Any, Protocol, TypeVar

IDLE_SECONDS = 3.0
"""Seconds for which an idle connection is kept."""


class Closable(Protocol):
    """A connection."""

    def close(self) -> Any:
        """Close it."""
        ...


C = TypeVar("C", bound=Closable)


def take(kind: type[C], url: str | None) -> C | None:
    """The kept connection of a kind and a database, if there is one. The caller owns it."""
    found = _idle().pop((kind.__qualname__, url), None)
    return None if found is None else found[0]


def keep(kind: type[C], url: str | None, connection: C) -> None:
    """Keep a connection for the next `take`, for some seconds.

    A process keeps at most one of each kind and database, as a Python worker of Spark runs one task
    at a time. A connection that was kept before is closed.
    """
    if older := take(kind, url):
        older.close()
    _idle()[kind.__qualname__, url] = connection, time.monotonic()
    closers = _shared("closers", set())
    if os.getpid() not in closers:
        closers.add(os.getpid())
        threading.Thread(target=_close_old, daemon=True).start()
        atexit.register(_close_older, 0.0)


def _idle() -> dict[tuple[str, str | None], tuple[Any, float]]:
    return _shared(f"idle in {os.getpid()}", {})  # a child does not use those of its parent


def _shared(name: str, default: Any) -> Any:
    """An object that all copies of this module in a process share.

    Spark may pickle this module by value, which makes copies. Connections and threads are kept
    outside of them, in a module of their own.
    """
    module = sys.modules.setdefault("_spark_pgqueue_kept", ModuleType("_spark_pgqueue_kept"))
    return vars(module).setdefault(name, default)


def _close_old() -> None:
    while True:
        time.sleep(IDLE_SECONDS / 3)
        _close_older(IDLE_SECONDS)


def _close_older(seconds: float) -> None:
    old = time.monotonic() - seconds
    for key in [key for key, (_, since) in list(_idle().items()) if since <= old]:
        if found := _idle().pop(key, None):
            with contextlib.suppress(Exception):
                found[0].close()
