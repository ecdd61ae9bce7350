"""What the sources of one Spark application know of each other: who reads a consumer, who is busy.

Spark runs each source of a query in a process of its own; they share nothing but their parent, the
JVM. So each holds a lock on a file, named by the JVM and the consumer, for as long as it lives: the
kernel alone knows at once and for certain that a process has ended, however it ended. When a source
has messages it touches its file, for the others to see.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import tempfile
import time
from pathlib import Path

from spark_pgqueue.postgres.errors import PgQueueError

PATIENCE = 5.0
"""Seconds for which a source waits for the one of a query that was just stopped to end."""


class Seat:
    """The place of a source among those of its application.

    Args:
        consumer: a name that no other consumer has.
        is_shared: whether other sources that say so too may read the consumer beside it.
    """

    def __init__(self, consumer: str, is_shared: bool):
        self._application = _process(os.getppid())
        self._folder = own_folder("pgqueue-spark")
        self._path = self._folder / f"{self._application}.{consumer}"
        self._mode = fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX
        self._file: int | None = None
        self._newest = 0

    def take(self, patience: float = PATIENCE) -> bool:
        """Take the seat, unless a living source of the application has it.

        Args:
            patience: seconds to wait for that one to end: Spark tells the source of a query that
                stops to end, and does not wait for it.

        Returns:
            whether it was taken.
        """
        end = time.monotonic() + patience
        while (file := _locked(self._path, self._mode)) is None:
            if time.monotonic() >= end:
                return False
            time.sleep(0.02)
        self._file = file
        self._clear()
        self.others_had_messages()
        return True

    def leave(self) -> None:
        """Leave the seat to others. Safe to repeat."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def note_messages(self) -> None:
        """Let the others know that there are messages here."""
        if self._file is not None:
            os.utime(self._file)

    def others_had_messages(self) -> bool:
        """Whether another source of the application had messages since this was last asked."""
        newest = 0
        for path in self._folder.glob(f"{self._application}.*"):
            if path != self._path:
                with contextlib.suppress(FileNotFoundError):
                    newest = max(newest, path.stat().st_mtime_ns)
        changed, self._newest = newest != self._newest, newest
        return changed

    def _clear(self) -> None:
        """Delete the files that processes have left, also those of other applications."""
        for path in self._folder.iterdir():
            if (file := _locked(path, fcntl.LOCK_EX)) is not None:
                path.unlink(missing_ok=True)
                os.close(file)


def _locked(path: Path, mode: int) -> int | None:
    """The descriptor of a file that is locked now, made if it was missing; None: others have it."""
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(file, mode | fcntl.LOCK_NB)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file), path.stat()):
                    return file
            os.close(file)  # it was deleted in between
        except BlockingIOError:
            os.close(file)
            return None


def own_folder(name: str) -> Path:
    """A temporary folder that nobody else can write to; the same for all processes of this user.

    Raises:
        PgQueueError: it is somebody else's.
    """
    folder = Path(tempfile.gettempdir(), f"{name}-{os.getuid()}")
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise PgQueueError(
            f"{folder} is not a folder of this user alone",
            hint="remove it, or set TMPDIR to a folder of your own",
        )
    return folder


def _process(pid: int) -> str:
    """A process by its number and, where that can be seen, its start: numbers are used again."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return str(pid)
    # The second field is a name, and may hold spaces and parentheses.
    return f"{pid}-{status.rpartition(')')[2].split()[19]}"
