"""Waiting for a message: by notifications, and by asking again each second."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import psycopg

from spark_pgqueue.postgres.notifications import Listener, Waiter
from spark_pgqueue.postgres.statements import Statements

T = TypeVar("T")

ASK_AGAIN = 1.0
"""Seconds. A delay or a lease that is over notifies nobody."""

_AT_LEAST = 0.02
"""Seconds, where something is due at once, and was not to be had: others are at it."""


class Waiting:
    """Looks that wait for something to be found, on a connection that goes on listening."""

    def __init__(self, statements: Statements):
        self._statements = statements
        self._listener: Listener | None = None
        self._waiters: dict[str, Waiter] = {}

    def first(
        self,
        stream: str,
        look: Callable[[], T | None],
        look_again: Callable[[], T | None],
        seconds: float,
        is_stopped: Callable[[], bool] = lambda: False,
        due: Callable[[], float | None] = lambda: None,
    ) -> T | None:
        """Look, and again at each publication and each second, until there is something.

        Args:
            stream: what the looks are for.
            look: claims or reads; None when there is nothing.
            look_again: the same, when the first found nothing.
            seconds: how long to wait.
            is_stopped: whether to wait no longer; asked once a second.
            due: in how many seconds something may be found that notifies nobody; None for never.

        Returns:
            what was found; None when the time was over before.

        Raises:
            PgQueueError: that of a look, or the connection was lost.
        """
        end = time.monotonic() + seconds
        with self._statements.explained():
            waiter = self._waiter(stream)
            waiter.forget()
            found = look()
            if found is not None:
                self._note_messages(waiter)
            waiter = self._waiter(stream)
            heard = True
            while found is None and (left := end - time.monotonic()) > 0 and not is_stopped():
                if waiter.is_started:
                    soon = due()
                    until = ASK_AGAIN if soon is None else min(max(soon, _AT_LEAST), ASK_AGAIN)
                    heard = waiter.wait(min(left, until)) or until < ASK_AGAIN
                else:
                    waiter.start()
                found = look_again()
        if not heard:
            waiter.doubt()
        return found

    def _waiter(self, stream: str) -> Waiter:
        """The one of the connection that there is now."""
        conn = self._statements.connection()
        if self._listener is None or self._listener.conn is not conn:
            self._listener = Listener(conn)
            self._waiters.clear()
        if stream not in self._waiters:
            self._waiters[stream] = Waiter(self._listener, stream, self._statements.turn)
        return self._waiters[stream]

    def _note_messages(self, waiter: Waiter) -> None:
        # What was found is its caller's: nothing may keep it from him.
        try:
            waiter.note_messages()
        except psycopg.Error:
            self._statements.disconnect()
