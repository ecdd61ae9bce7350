"""Waiting for publications: `pgqueue.start_waiting` makes producers notify listeners.

sql/queue/claim/listen.sql explains why no publication is missed. Errors are those of psycopg.
"""

from __future__ import annotations

import select
import time
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import psycopg

from spark_pgqueue.postgres.time_limit import SHORT, TimeLimit
from spark_pgqueue.postgres.wake_event import WakeEvent

_FIRST_LOOK = 0.001
_LAST_LOOK = 0.05
"""Seconds between two checks for the end of a transaction that may publish without notifying: the
first pause, as most end soon, and the longest pause, for a transaction that stays open."""

_BUSY = 10
"""After this many polls in a row that find messages at once, the subscription stops. A later start
costs more than a notification."""


class Listener:
    """A connection that listens, and the set of channels that sent notifications.

    Args:
        conn: the connection, in autocommit. Notifications that arrive with the results of its other
            statements count, too.
        wake: ends each wait when it is set.
    """

    def __init__(self, conn: psycopg.Connection[Any], wake: WakeEvent | None = None):
        self.conn = conn
        self._wake = wake
        self._heard: set[str] = set()
        self._limit = TimeLimit(SHORT)
        # Without a handler, psycopg would queue notifications that arrive with a result.
        conn.add_notify_handler(lambda notify: self._heard.add(notify.channel))

    def row(self, sql: Any, parameters: list[Any]) -> tuple[Any, ...]:
        """The only row of a short statement; see `TimeLimit`."""
        with self._limit.around(self.conn):
            row = self.conn.execute(sql, parameters).fetchone()
        assert row is not None
        return row

    def forget(self, channel: str) -> None:
        """Discard all notifications received so far. Call this before a poll."""
        with self.conn.lock:
            self._read()
        self._heard.discard(channel)

    @property
    def is_woken(self) -> bool:
        """Whether the wake event is set, which ends all waits."""
        return self._wake is not None and self._wake.wait(0)

    def sleep(self, seconds: float) -> None:
        """Sleep until a timeout or the wake event. Notifications do not end the sleep."""
        if self._wake is None:
            time.sleep(max(seconds, 0))
        else:
            self._wake.wait(seconds)

    def wait(self, channel: str, seconds: float) -> bool:
        """Wait for a notification of the channel and discard it. Returns whether one arrived."""
        return self.wait_for_any([channel], seconds)

    def wait_for_any(self, channels: Collection[str], seconds: float) -> bool:
        """Wait for notifications of any channel and discard them. Returns whether one arrived."""
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
        # Until nothing is left: unread notifications fill the server's queue.
        pgconn = self.conn.pgconn
        while True:
            pgconn.consume_input()
            while notify := pgconn.notifies():
                self._heard.add(notify.relname.decode())
            if not self._readable(0):
                return

    def _readable(self, seconds: float) -> bool:
        """Whether data arrived; false also when the wake event was set."""
        poll = select.poll()
        socket = self.conn.pgconn.socket
        poll.register(socket, select.POLLIN)
        if self._wake is not None:
            poll.register(self._wake, select.POLLIN)
        return any(descriptor == socket for descriptor, _ in poll.poll(seconds * 1000))


class StreamSubscription:
    """A connection's subscription to the publications of a stream.

    A subscription lasts until messages arrive often or the connection is closed. So a caller that
    repeatedly finds nothing and waits starts it only once.

    Args:
        listener: the connection's listener.
        stream: the stream's name.
        turn: held while the connection is used, where threads share it.
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
        """Subscribe. The next poll finds all messages that were published before. Safe to repeat.

        Behind a pooler, and for a stream without notifications, no notifications arrive.
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
        """Record that a poll found messages at once. After several in a row, the subscription ends,
        and producers stop notifying.
        """
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
        """Subscribe again before the next wait: another stream may have the name now."""
        self.is_started = False

    def forget(self) -> None:
        """Discard all notifications received so far. Call this before a poll."""
        if self._channel is not None:
            with self._turn:
                self._listener.forget(self._channel)

    def wait(self, seconds: float) -> bool:
        """Wait for a publication; see `wait_for_any`."""
        return wait_for_any([self], seconds)

    def _publishes_less(self) -> bool:
        """Whether a transaction has ended that may have published without notifying."""
        self._look = min(2 * self._look, _LAST_LOOK)
        before = len(self._publishers)
        (self._publishers,) = self._row(
            "select pgqueue.still_publishing(%s::text, %s::text[])",
            [self._stream, self._publishers],
        )
        return len(self._publishers) < before

    def _row(self, sql: Any, parameters: list[Any]) -> tuple[Any, ...]:
        with self._turn:
            return self._listener.row(sql, parameters)


def wait_for_any(subscriptions: Sequence[StreamSubscription], seconds: float) -> bool:
    """Wait for a publication in one of several streams, and discard the notifications.

    Args:
        subscriptions: at least one; all of one connection and one listener.
        seconds: the longest time to wait.

    Returns:
        whether there may be messages.
    """
    end = time.monotonic() + seconds
    listener, turn = subscriptions[0]._listener, subscriptions[0]._turn
    channels = [each._channel for each in subscriptions if each._channel is not None]
    for each in subscriptions:
        each._found = 0
    while True:
        left = end - time.monotonic()
        publishing = [each for each in subscriptions if each._publishers]
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
