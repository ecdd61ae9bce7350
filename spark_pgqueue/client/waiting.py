"""Waiting for a message: by notifications, and by asking again each second."""

from __future__ import annotations

import time
from collections.abc import Callable

import psycopg

from spark_pgqueue.client.results import Claim
from spark_pgqueue.postgres.notifications import Listener, Waiter
from spark_pgqueue.postgres.statements import Statements

ASK_AGAIN = 1.0
"""Seconds. A delay or a lease that is over notifies nobody."""


class Waiting:
    """Claims that wait for something to claim, on a connection that goes on listening."""

    def __init__(self, statements: Statements):
        self._statements = statements
        self._listener: Listener | None = None
        self._waiters: dict[str, Waiter] = {}

    def claim(
        self,
        stream: str,
        claim_first: Callable[[], Claim | None],
        claim_again: Callable[[], Claim | None],
        seconds: float,
    ) -> Claim | None:
        """Claim, and again at each publication and each second, until there is something.

        Args:
            stream: what the claims are of.
            claim_first: claims.
            claim_again: claims, when the first found nothing.
            seconds: how long to wait.

        Returns:
            the claim; None when the time was over before.

        Raises:
            PgQueueError: that of a claim, or the connection was lost.
        """
        end = time.monotonic() + seconds
        with self._statements.explained():
            waiter = self._waiter(stream)
            waiter.forget()
            claim = claim_first()
            if claim is not None:
                self._note_messages(waiter)
            waiter = self._waiter(stream)
            heard = True
            while claim is None and (left := end - time.monotonic()) > 0:
                if waiter.is_started:
                    heard = waiter.wait(min(left, ASK_AGAIN))
                else:
                    waiter.start()
                claim = claim_again()
        if not heard:
            waiter.doubt()
        return claim

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
        # The claim is made: nothing may keep it from its caller.
        try:
            waiter.note_messages()
        except psycopg.Error:
            self._statements.disconnect()
