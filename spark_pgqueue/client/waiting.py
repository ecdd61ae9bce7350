"""Waiting for a message: by LISTEN, and by asking again each second."""

from __future__ import annotations

import time
from collections.abc import Callable

from spark_pgqueue.client.results import Claim
from spark_pgqueue.postgres.notifications import Listener
from spark_pgqueue.postgres.statements import Statements

ASK_AGAIN = 1.0
"""Seconds. A delay or a lease that is over notifies nobody."""


class Waiting:
    """Claims that wait for something to claim, on a connection that goes on listening."""

    def __init__(self, statements: Statements):
        self._statements = statements
        self._listener: Listener | None = None
        self._channels: dict[str, str] = {}

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
            is_new = self._listen(stream) if stream in self._channels else True
            claim = claim_first()
            if claim is None and is_new:
                self._listen(stream)
                claim = claim_again()
            heard = True
            while claim is None and (left := end - time.monotonic()) > 0:
                heard = self._wait(stream, min(left, ASK_AGAIN))
                claim = claim_again()
        if not heard:
            # Perhaps the stream was dropped and made again, and has another channel.
            self._channels.pop(stream, None)
        return claim

    def _listen(self, stream: str) -> bool:
        """Listen to a stream and forget what was heard of it; returns whether that is new."""
        if stream not in self._channels:
            sql = "select stream_id from pgqueue.open_stream(%s::text)"
            (stream_id,) = self._statements.row(sql, [stream])
            self._channels[stream] = f"pgqueue_{stream_id}"
        conn = self._statements.connection()
        if self._listener is None or self._listener.conn is not conn:
            self._listener = Listener(conn)
        is_new = self._listener.listen(self._channels[stream])
        self._listener.forget(self._channels[stream])
        return is_new

    def _wait(self, stream: str, seconds: float) -> bool:
        """Wait until a publication is heard of; returns whether one was."""
        assert self._listener is not None
        heard = self._listener.wait(self._channels[stream], seconds)
        self._listener.forget(self._channels[stream])
        return heard
