"""Forks: objects that only the process that made them can use.

A child inherits copies of all objects, but shares the socket of a connection with its parent: each
process misses what the other reads, and a child that closes its copy ends its parent's session.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol, TypeVar
from weakref import WeakSet

import psycopg

from spark_pgqueue.postgres.errors import PgQueueError


class HasDescriptor(Protocol):
    """A connection."""

    def fileno(self) -> int:
        """The descriptor of its socket."""
        ...


C = TypeVar("C", bound=HasDescriptor)
T = TypeVar("T")


class OfThisProcess(WeakSet[T]):
    """Objects of this process: empty after Spark unpickles a module that was pickled by value."""

    def __reduce__(self) -> tuple[Any, ...]:
        return OfThisProcess, ()


class OfThisThread(threading.local):
    """Attributes of each thread: none after Spark unpickles a module that was pickled by value."""

    def __reduce__(self) -> tuple[Any, ...]:
        return OfThisThread, ()


_connections: OfThisProcess[HasDescriptor] = OfThisProcess()


class Origin:
    """The process that made an object."""

    def __init__(self):
        self._pid = os.getpid()

    @property
    def is_here(self) -> bool:
        """Whether this is that process."""
        return os.getpid() == self._pid

    def check(self, what: str, way_out: str) -> None:
        """Refuse a use of `what` in another process; `way_out` is the hint.

        Raises:
            PgQueueError: this is a child of the process.
        """
        if not self.is_here:
            raise PgQueueError(
                f"{what} belongs to process {self._pid}, which made it before it forked;"
                f" this is its child, process {os.getpid()}",
                hint=way_out,
            )


def cut_in_children(connection: C) -> C:
    """Keep the children of this process from using the session of a connection."""
    _connections.add(connection)
    return connection


def _cut() -> None:
    dead, other = socket.socketpair()
    other.close()
    with dead:
        for connection in list(_connections):
            with suppress(OSError, psycopg.Error):  # it is closed
                os.dup2(dead.fileno(), connection.fileno(), inheritable=False)


def after_fork(do: Callable[[], None]) -> None:
    """Call a function in each forked child, if the system supports forks."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=do)


def around_fork(
    before: Callable[[], T], in_child: Callable[[], None], after: Callable[[T], None]
) -> None:
    """Call functions at each fork, if the system supports forks.

    Args:
        before: called before the fork, in the thread that forks.
        in_child: called in the child.
        after: called afterwards in both processes, with the result of `before`.
    """
    held = threading.local()

    def begin() -> None:
        held.value = before()

    def end() -> None:
        after(held.value)

    def end_in_child() -> None:
        in_child()
        end()

    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=begin, after_in_parent=end, after_in_child=end_in_child)


after_fork(_cut)
