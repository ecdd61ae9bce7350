"""The sources of one Spark application register the consumers that they read.

Spark runs each source of a query in a separate process. The processes share only their parent, the
JVM. So each source holds a lock on a file, named by the JVM and the consumer, as long as it lives:
the kernel releases the lock when the process ends, however that happens. A source that has messages
touches its file, for the other sources.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from pathlib import Path

from spark_pgqueue.spark.platform.process import own_folder, process_name

PATIENCE = 5.0
"""Seconds for which a source waits for the end of the source of a query that was just stopped."""


class ReaderRegistration:
    """Registers a source as the reader of a consumer in its application.

    Sources that all share the consumer may read it together.
    """

    def __init__(self, consumer: str, is_shared: bool):
        self._application = process_name(os.getppid())
        self._folder = own_folder("pgqueue-spark")
        self._path = self._folder / f"{self._application}.{consumer}"
        self._mode = fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX
        self._file: int | None = None
        self._newest = 0

    def register(self, patience: float = PATIENCE) -> bool:
        """Register the source; returns False if a living source of the application is registered.

        The call waits some seconds for the end of that source: when a query stops, Spark sends its
        source a signal, and does not wait.
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

    def unregister(self) -> None:
        """Let another source register. Safe to repeat."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def note_messages(self) -> None:
        """Show the other sources that this source has messages."""
        if self._file is not None:
            os.utime(self._file)

    def others_had_messages(self) -> bool:
        """Whether another source of the application had messages since the last call."""
        newest = 0
        for path in self._folder.glob(f"{self._application}.*"):
            if path != self._path:
                with contextlib.suppress(FileNotFoundError):
                    newest = max(newest, path.stat().st_mtime_ns)
        changed, self._newest = newest != self._newest, newest
        return changed

    def _clear(self) -> None:
        """Delete the files of ended processes, also of other applications."""
        for path in self._folder.iterdir():
            if (file := _locked(path, fcntl.LOCK_EX)) is not None:
                path.unlink(missing_ok=True)
                os.close(file)


def _locked(path: Path, mode: int) -> int | None:
    """The descriptor of the locked file, which is made if missing; None when others hold it."""
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(file, mode | fcntl.LOCK_NB)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file), path.stat()):
                    return file
            os.close(file)  # the file was deleted in between
        except BlockingIOError:
            os.close(file)
            return None
