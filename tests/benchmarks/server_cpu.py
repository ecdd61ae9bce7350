"""The CPU that a server has had: all its processes, those that are over too."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import psutil
import psycopg

TICKS = os.sysconf("SC_CLK_TCK")
"""In a second, of the CPU of processes that are over."""

# Fields of /proc/PID/stat behind the name: the parent, and what ended children have had.
_PARENT, _CHILDREN_USER, _CHILDREN_SYSTEM = 1, 13, 14

_LOOKS = 5  # until no process begins or ends during a look


class ServerCpu:
    """Counts the CPU of the server that a connection leads to.

    Other work of the machine makes a clock on the wall run on, and this one hardly. It sees a
    server of this machine alone, on Linux. Processes that are over are counted to 20 ms.

    Args:
        conn: a connection to the server.
    """

    def __init__(self, conn: psycopg.Connection):
        self._postmaster: int | None = None
        try:
            backend = _stat(conn.info.backend_pid)
            parent = int(backend[_PARENT])
            if Path(f"/proc/{parent}/comm").read_text().startswith("postgres"):
                self._postmaster = parent
        except OSError:
            pass  # the server is elsewhere

    def seconds(self) -> float | None:
        """The seconds of CPU so far; None where they cannot be seen."""
        if self._postmaster is None:
            return None
        process = psutil.Process(self._postmaster)
        seconds, children = 0.0, process.children()
        for _ in range(_LOOKS):
            seconds = _of_ended_children(self._postmaster)
            for child in children:
                with suppress(OSError):  # it is over now
                    seconds += nanoseconds(child.pid) / 1e9
            before, children = children, process.children()
            if children == before:
                break  # none was missed, and none was counted twice
        return seconds


def between(before: float | None, after: float | None) -> float | None:
    """The seconds from one count to the next; None where one was not seen."""
    return None if before is None or after is None else after - before


def nanoseconds(pid: int) -> int:
    """The nanoseconds of CPU that a process has had, as the kernel counts it.

    Raises:
        OSError: the process is over, or this is not Linux.
    """
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0])


def _of_ended_children(pid: int) -> float:
    stat = _stat(pid)
    return (int(stat[_CHILDREN_USER]) + int(stat[_CHILDREN_SYSTEM])) / TICKS


def _stat(pid: int) -> list[str]:
    """The fields of a process behind its name, which may hold spaces."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
