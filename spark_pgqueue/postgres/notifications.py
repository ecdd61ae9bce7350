"""Hearing notifications, without keeping them: which channels were heard is all that matters."""

from __future__ import annotations

import select
import time
from typing import Any

import psycopg
from psycopg.sql import SQL, Identifier


class Listener:
    """The channels that a connection listens to, and which of them were heard.

    It holds a name per channel, however many notifications come. Errors are those of psycopg.

    Args:
        conn: the connection, in autocommit. What its other statements bring is heard too.
    """

    def __init__(self, conn: psycopg.Connection[Any]):
        self.conn = conn
        self._channels: set[str] = set()
        self._heard: set[str] = set()
        # Without a handler psycopg would keep what comes with the answer of a statement.
        conn.add_notify_handler(lambda notify: self._heard.add(notify.channel))

    def listen(self, channel: str) -> bool:
        """Listen to a channel from now on; returns whether that is new."""
        if channel in self._channels:
            return False
        self.conn.execute(SQL("listen {}").format(Identifier(channel)))
        self._channels.add(channel)
        return True

    def forget(self, channel: str) -> None:
        """Forget all notifications so far. To be called before looking for what they tell of."""
        with self.conn.lock:
            self._read()
        self._heard.discard(channel)

    def wait(self, channel: str, seconds: float) -> bool:
        """Wait until the channel is heard or the time is over; returns whether it was heard."""
        end = time.monotonic() + seconds
        with self.conn.lock:
            self._read()
            while channel not in self._heard and (left := end - time.monotonic()) > 0:
                if self._readable(left):
                    self._read()
        return channel in self._heard

    def _read(self) -> None:
        # Packet by packet, until nothing is left: what is not read fills the server's queue.
        pgconn = self.conn.pgconn
        while True:
            pgconn.consume_input()
            while notify := pgconn.notifies():
                self._heard.add(notify.relname.decode())
            if not self._readable(0):
                return

    def _readable(self, seconds: float) -> bool:
        poll = select.poll()
        poll.register(self.conn.pgconn.socket, select.POLLIN)
        return bool(poll.poll(seconds * 1000))
