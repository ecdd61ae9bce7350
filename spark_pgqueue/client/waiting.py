"""Waiting for a message: by notifications, and by asking again each second."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import psycopg

from spark_pgqueue.postgres.notifications import Listener, Waiter
from spark_pgqueue.postgres.statements import Statements
from spark_pgqueue.postgres.wake import Wake

T = TypeVar("T")

ASK_AGAIN = 1.0
"""Seconds. A delay or a lease that is over notifies nobody."""

_AT_LEAST = 0.02
"""Seconds, where something is due at once, and was not to be had: others are at it."""


class Waiting:
    """Looks that wait for something to be found, on a connection that goes on listening.

    Args:
        statements: the connection's.
        wake: ends each wait when it is set.
    """

    def __init__(self, statements: Statements, wake: Wake | None = None):
        self._statements = statements
        self._wake = wake
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
            what was found; None when the time was over before, or it was woken.

        Raises:
            PgQueueError: that of a look, or the connection was lost.
        """
        end = time.monotonic() + seconds
        with self._statements.explained():
            self.forget(stream)
            found = look()
            if found is not None:
                self.note_messages(stream)
            heard = True
            while (
                found is None
                and (left := end - time.monotonic()) > 0
                and not is_stopped()
                and not self._current_listener().is_woken
            ):
                until = self.until_due(stream, due)
                heard = self.pause(stream, min(left, until)) or until < ASK_AGAIN
                found = look_again()
            if not heard:
                self.doubt(stream)
        return found

    def until(
        self,
        look: Callable[[], T],
        is_over: Callable[[T], bool],
        listen: Callable[[], str | None],
        seconds: float,
    ) -> T:
        """Look, and again at each notification and each second, until what is found will do.

        Args:
            look: what is looked for.
            is_over: whether it will do.
            listen: begins to listen to a channel, and returns it; None where nobody notifies.
            seconds: how long to wait.

        Returns:
            what was found last, also when it was woken.

        Raises:
            PgQueueError: that of a look, or the connection was lost.
        """
        end = time.monotonic() + seconds
        with self._statements.explained():
            found = look()
            if is_over(found):
                return found
            channel = listen()
            pause = _AT_LEAST
            while True:
                listener = self._current_listener()
                if channel is not None:
                    with self._statements.turn:
                        listener.forget(channel)
                found = look()
                left = end - time.monotonic()
                if is_over(found) or left <= 0 or listener.is_woken:
                    return found
                if channel is None:
                    listener.sleep(min(left, pause))
                    pause = min(2 * pause, ASK_AGAIN)
                else:
                    with self._statements.turn:
                        listener.wait(channel, min(left, ASK_AGAIN))

    def until_due(self, stream: str, due: Callable[[], float | None]) -> float:
        """For how many seconds to pause, after a look that found nothing.

        Args:
            stream: what is looked for.
            due: as in `first`.

        Raises:
            PgQueueError: the connection was lost.
        """
        with self._statements.explained():
            soon = due() if self._waiter(stream).is_started else None
        return ASK_AGAIN if soon is None else min(max(soon, _AT_LEAST), ASK_AGAIN)

    def forget(self, stream: str) -> None:
        """Forget what was heard. To be called before looking.

        Raises:
            PgQueueError: the connection was lost.
        """
        with self._statements.explained():
            self._waiter(stream).forget()

    def note_messages(self, stream: str) -> None:
        """Note that a look found something at once. Time and again, producers need not notify."""
        # What was found is its caller's: nothing may keep it from him.
        try:
            self._waiter(stream).note_messages()
        except psycopg.Error:
            self._statements.disconnect()

    def pause(self, stream: str, seconds: float) -> bool:
        """Wait until it makes sense to look again, after a look that found nothing.

        Args:
            stream: what is looked for.
            seconds: at most; some second, as a delay or a lease that is over notifies nobody.

        Returns:
            whether it makes sense; else the time is over, or it was woken.

        Raises:
            PgQueueError: the connection was lost.
        """
        with self._statements.explained():
            waiter = self._waiter(stream)
            if not waiter.is_started:
                waiter.start()
                return True
            return waiter.wait(seconds)

    def doubt(self, stream: str) -> None:
        """Listen anew before the next pause: there was something, and it was not heard.

        Raises:
            PgQueueError: the connection was lost.
        """
        self._waiter(stream).doubt()

    def _waiter(self, stream: str) -> Waiter:
        listener = self._current_listener()
        if stream not in self._waiters:
            self._waiters[stream] = Waiter(listener, stream, self._statements.turn)
        return self._waiters[stream]

    def _current_listener(self) -> Listener:
        """That of the connection that there is now."""
        conn = self._statements.connection()
        if self._listener is None or self._listener.conn is not conn:
            self._listener = Listener(conn, self._wake)
            self._waiters.clear()
        return self._listener
