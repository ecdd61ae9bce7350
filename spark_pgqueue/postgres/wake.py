"""Waking who waits for a connection: an event that is polled beside its socket."""

from __future__ import annotations

import os
import select
from contextlib import suppress


class Wake:
    """Ends the wait of another thread, or its next one; may be set in a handler of a signal."""

    def __init__(self):
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)

    def fileno(self) -> int:
        """A descriptor that is readable while it is set."""
        return self._read

    @property
    def writable(self) -> int:
        """A descriptor that sets it when something is written to it."""
        return self._write

    def set(self) -> None:
        """End the wait, and all that begin before `clear`."""
        with suppress(BlockingIOError, OSError):  # it is full of this; or closed
            os.write(self._write, b"\0")

    def clear(self) -> None:
        """Let waits be as long as they like again."""
        with suppress(BlockingIOError):
            while os.read(self._read, 65536):
                pass

    def wait(self, seconds: float) -> bool:
        """Wait until it is set or the time is over; returns which."""
        poll = select.poll()
        poll.register(self._read, select.POLLIN)
        return bool(poll.poll(max(seconds, 0) * 1000))

    def close(self) -> None:
        """Let go of the descriptors."""
        write, self._write = self._write, -1  # who is late must not write to another file
        os.close(write)
        os.close(self._read)
