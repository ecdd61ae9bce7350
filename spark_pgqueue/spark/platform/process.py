"""What a process of Spark shares with others: its parent, the JVM, and a folder of the user."""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import sys
import tempfile
from pathlib import Path

from spark_pgqueue.postgres.errors import PgQueueError


class Parent:
    """The process that started this one: Spark's JVM. After its death nothing here may claim
    messages.
    """

    def __init__(self) -> None:
        self._pid = os.getppid()

    def lives(self) -> bool:
        """Whether the parent runs. A process whose parent died has another parent."""
        return os.getppid() == self._pid

    def check(self) -> None:
        """Raise when the parent is dead."""
        if not self.lives():
            raise PgQueueError("the Spark driver of this source is gone")


def process_name(pid: int) -> str:
    """A name of a process: its number and, where visible, its start, as numbers are used again."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return str(pid)
    # The second field is the program's name, which may hold spaces and parentheses.
    return f"{pid}-{status.rpartition(')')[2].split()[19]}"


def own_folder(name: str) -> Path:
    """A temporary folder that only this user can write to; all processes of the user share it."""
    folder = Path(tempfile.gettempdir(), f"{name}-{os.getuid()}")
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise PgQueueError(
            f"{folder} is not a folder that only this user can access",
            hint="remove it, or set TMPDIR to a folder of your own",
        )
    return folder


def exit_at_sigterm() -> None:
    """Let `stop` run when the query ends: Spark sends SIGTERM then, twice in a row."""

    def end(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        sys.exit(0)

    with contextlib.suppress(ValueError):  # in another thread there is no process to end
        signal.signal(signal.SIGTERM, end)
