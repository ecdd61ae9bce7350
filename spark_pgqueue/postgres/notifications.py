"""Waiting for publications: `pgqueue.start_waiting` makes producers notify, here it is heard.

Why no publication is missed is in sql/functions/waiting.sql.
"""

from __future__ import annotations

import select
import time
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import psycopg

from spark_pgqueue.postgres.wake import Wake

_FIRST_LOOK = 0.001
_LAST_LOOK = 0.05
"""Seconds after which is looked whether a transaction that may publish without notifying is over:
at first, for most are over soon; and at last, for one that stays open."""

_BUSY = 10
"""How often in a row there has to be something at once, for a wait to be stopped: to start one
again takes longer than to be notified."""


class Listener:
    """Which channels were heard by a connection that listens.

    It holds a name per channel, however many notifications come. Errors are those of psycopg.

    Args:
        conn: the connection, in autocommit. What its other statements bring is heard too.
        wake: ends each wait when it is set.
    """

    def __init__(self, conn: psycopg.Connection[Any], wake: Wake | None = None):
        self.conn = conn
        self._wake = wake
        self._heard: set[str] = set()
        # Without a handler psycopg would keep what comes with the answer of a statement.
        conn.add_notify_handler(lambda notify: self._heard.add(notify.channel))

    def forget(self, channel: str) -> None:
        """Forget all notifications so far. To be called before looking for what they tell of."""
        with self.conn.lock:
            self._read()
        self._heard.discard(channel)

    @property
    def is_woken(self) -> bool:
        """Whether no wait may last."""
        return self._wake is not None and self._wake.wait(0)

    def sleep(self, seconds: float) -> None:
        """Wait until the time is over, whatever comes but for being woken."""
        if self._wake is None:
            time.sleep(max(seconds, 0))
        else:
            self._wake.wait(seconds)

    def wait(self, channel: str, seconds: float) -> bool:
        """Wait until the channel is heard or the time is over; returns which, and forgets it."""
        return self.wait_for_any([channel], seconds)

    def wait_for_any(self, channels: Collection[str], seconds: float) -> bool:
        """Wait until a channel is heard or the time is over; returns which, and forgets them."""
        end = time.monotonic() + seconds
        with self.conn.lock:
            self._read()
            while self._heard.isdisjoint(channels) and (left := end - time.monotonic()) > 0:
                if self._readable(left):
                    self._read()
                elif self.is_woken:
                    break
        heard = not self._heard.isdisjoint(channels)
        self._heard.difference_update(channels)
        return heard

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
        """Whether something came; false also when it was woken."""
        poll = select.poll()
        socket = self.conn.pgconn.socket
        poll.register(socket, select.POLLIN)
        if self._wake is not None:
            poll.register(self._wake, select.POLLIN)
        return any(descriptor == socket for descriptor, _ in poll.poll(seconds * 1000))


class Waiter:
    """A connection's wait for publications of a stream. Errors are those of psycopg.

    Once started it goes on until there is much to do, or the connection is closed: so who looks,
    finds nothing and waits, time and again, asks for no more than that.

    Args:
        listener: the connection's.
        stream: the stream's name.
        turn: held while it uses the connection, where threads share that.
    """

    def __init__(
        self, listener: Listener, stream: str, turn: AbstractContextManager[Any] | None = None
    ):
        self._listener = listener
        self._stream = stream
        self._turn = turn or nullcontext()
        self._channel: str | None = None
        self._publishers: list[str] = []
        self._look = _FIRST_LOOK
        self._found = 0
        self.is_started: bool = False

    def start(self) -> None:
        """Wait from now on; the next look finds what was published before. Safe to repeat.

        Behind a pooler, and where the stream does not notify, nothing will be heard.
        """
        pid = self._listener.conn.info.backend_pid
        self._channel, self._publishers = self._row(
            "select channel, publishers from pgqueue.start_waiting(%s::text, %s::int)",
            [self._stream, pid],
        )
        self._look = _FIRST_LOOK
        self.is_started = True
        self.forget()

    def note_messages(self) -> None:
        """Note that there was something at once. Time and again, producers need not notify."""
        self._found += 1
        if self._found >= _BUSY:
            self.stop()

    def stop(self) -> None:
        """Let producers publish without notifying."""
        self.is_started = False
        if self._channel is not None:
            self._channel = None
            self._row("select pgqueue.stop_waiting(%s::text)", [self._stream])

    def doubt(self) -> None:
        """Start again before the next wait: perhaps another stream has the name now."""
        self.is_started = False

    def forget(self) -> None:
        """Forget what was heard. To be called before looking for messages."""
        if self._channel is not None:
            with self._turn:
                self._listener.forget(self._channel)

    def wait(self, seconds: float) -> bool:
        """Wait until it makes sense to look, or the time is over; returns which, and forgets."""
        return wait_for_any([self], seconds)

    def _publishes_less(self) -> bool:
        """Whether a transaction is over that may have published without notifying."""
        self._look = min(2 * self._look, _LAST_LOOK)
        before = len(self._publishers)
        (self._publishers,) = self._row(
            "select pgqueue.still_publishing(%s::text, %s::text[])",
            [self._stream, self._publishers],
        )
        return len(self._publishers) < before

    def _row(self, sql: Any, parameters: list[Any]) -> tuple[Any, ...]:
        with self._turn:
            row = self._listener.conn.execute(sql, parameters).fetchone()
        assert row is not None
        return row


def wait_for_any(waiters: Sequence[Waiter], seconds: float) -> bool:
    """Wait until it makes sense to look for messages of one of some streams, or the time is over.

    Args:
        waiters: of one connection, with one listener; at least one.
        seconds: at most.

    Returns:
        which; what was heard is forgotten.
    """
    end = time.monotonic() + seconds
    listener, turn = waiters[0]._listener, waiters[0]._turn
    channels = [each._channel for each in waiters if each._channel is not None]
    for each in waiters:
        each._found = 0
    while True:
        left = end - time.monotonic()
        publishing = [each for each in waiters if each._publishers]
        pause = min([left, *(each._look for each in publishing)])
        if channels:
            with turn:
                if listener.wait_for_any(channels, pause):
                    return True
        else:
            listener.sleep(pause)
        if left <= 0 or not publishing or listener.is_woken:
            return False
        if any(each._publishes_less() for each in publishing):
            return True
