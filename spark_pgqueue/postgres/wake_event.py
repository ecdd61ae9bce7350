"""An event that ends a thread's wait for a connection: it is polled together with the socket."""

from __future__ import annotations

import os
import select
from contextlib import suppress


class WakeEvent:
    """Ends the current or the next wait of another thread. Safe to set in a signal handler."""

    def __init__(self):
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)

    def fileno(self) -> int:
        """A descriptor that is readable while the event is set."""
        return self._read

    @property
    def writable(self) -> int:
        """A descriptor; any write to it sets the event."""
        return self._write

    def set(self) -> None:
        """End the current wait, and all waits that begin before `clear`."""
        with suppress(BlockingIOError, OSError):  # the pipe is full, or closed
            os.write(self._write, b"\0")

    def clear(self) -> None:
        """Reset the event."""
        with suppress(BlockingIOError):
            while os.read(self._read, 65536):
                pass

    def wait(self, seconds: float) -> bool:
        """Wait until the event is set or a timeout; returns whether it is set."""
        poll = select.poll()
        poll.register(self._read, select.POLLIN)
        return bool(poll.poll(max(seconds, 0) * 1000))

    def close(self) -> None:
        """Close the descriptors."""
        write, self._write = self._write, -1  # a late `set` must not write to another file
        os.close(write)
        os.close(self._read)
