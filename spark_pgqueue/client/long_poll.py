"""Long polling: waits for messages by notifications, and polls once a second.

All methods raise PgQueueError when the connection is lost.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import psycopg

from spark_pgqueue.postgres.notifications import Listener, StreamSubscription
from spark_pgqueue.postgres.statements import Statements
from spark_pgqueue.postgres.wake_event import WakeEvent

T = TypeVar("T")

ASK_AGAIN = 1.0
"""Seconds between two polls without a notification: the end of a delay or a lease sends none."""

ASK_AFTER = 0.02
"""Seconds to pause before asking when a message is due, which costs more than a poll: in a busy
stream, a notification arrives first. Messages that are due now are claimed by other workers."""

_FIRST_PAUSE = 0.02
"""Seconds between the first two polls for a result of which no notifications come."""


class LongPoll:
    """Polls that wait until they find messages. The connection keeps listening between them.

    Args:
        statements: the connection's statements.
        wake: ends each wait when it is set.
    """

    def __init__(self, statements: Statements, wake: WakeEvent | None = None):
        self._statements = statements
        self._wake = wake
        self._listener: Listener | None = None
        self._subscriptions: dict[str, StreamSubscription] = {}

    def first(
        self,
        stream: str,
        look: Callable[[], T | None],
        look_again: Callable[[], T | None],
        seconds: float,
        is_stopped: Callable[[], bool] = lambda: False,
        due: Callable[[], float | None] = lambda: None,
    ) -> T | None:
        """Poll, then again at each publication and each second, until a poll finds something.

        Args:
            stream: the stream to wait for.
            look: claims or reads; returns None when there is nothing.
            look_again: the same, for all polls but the first.
            seconds: how long to wait.
            is_stopped: whether to stop waiting; called once a second.
            due: the seconds until a message is due without a notification; None for never.

        Returns:
            the result of the poll; None after a timeout, or when `wake` ended the wait.
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
                heard = self.pause(stream, min(left, ASK_AFTER))
                if not heard and (left := end - time.monotonic()) > 0:
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
        """Poll, then again at each notification and each second, until the result is final.

        Args:
            look: returns the current result.
            is_over: whether a result is final.
            listen: listens on a channel and returns its name; None where no notifications come.
            seconds: how long to wait.

        Returns:
            the last result, even if it is not final.
        """
        end = time.monotonic() + seconds
        with self._statements.explained():
            found = look()
            if is_over(found):
                return found
            channel = listen()
            pause = _FIRST_PAUSE
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
        """The seconds to pause after a poll that found nothing and a pause of `ASK_AFTER`.

        Arguments as in `first`.
        """
        with self._statements.explained():
            soon = due() if self._subscription(stream).is_started else None
        return ASK_AGAIN if soon is None else min(max(soon, 0.0), ASK_AGAIN)

    def forget(self, stream: str) -> None:
        """Discard all notifications received so far. Call this before a poll."""
        with self._statements.explained():
            self._subscription(stream).forget()

    def note_messages(self, stream: str) -> None:
        """Record that a poll found messages at once. After several in a row, the subscription ends,
        and producers stop notifying.
        """
        # The caller must get the messages that were found, whatever happens here.
        try:
            self._subscription(stream).note_messages()
        except psycopg.Error:
            self._statements.disconnect()

    def pause(self, stream: str, seconds: float) -> bool:
        """Wait for a publication, after a poll that found nothing.

        Args:
            stream: the stream to wait for.
            seconds: the longest wait; about a second, as the end of a delay or lease sends no
                notification.

        Returns:
            whether there may be messages; False after a timeout, or when `wake` ended the wait.
        """
        with self._statements.explained():
            subscription = self._subscription(stream)
            if not subscription.is_started:
                subscription.start()
                return True
            return subscription.wait(seconds)

    def doubt(self, stream: str) -> None:
        """Subscribe again before the next pause: messages arrived without a notification."""
        self._subscription(stream).doubt()

    def _subscription(self, stream: str) -> StreamSubscription:
        listener = self._current_listener()
        if stream not in self._subscriptions:
            self._subscriptions[stream] = StreamSubscription(
                listener, stream, self._statements.turn
            )
        return self._subscriptions[stream]

    def _current_listener(self) -> Listener:
        """The listener of the current connection."""
        conn = self._statements.checked_connection()
        if self._listener is None or self._listener.conn is not conn:
            self._listener = Listener(conn, self._wake)
            self._subscriptions.clear()
        return self._listener
