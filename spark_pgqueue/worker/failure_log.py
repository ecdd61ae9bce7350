"""What becomes of messages that failed, for the log of a worker."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from spark_pgqueue.printable import counted
from spark_pgqueue.worker.log import warn

if TYPE_CHECKING:
    from spark_pgqueue.client.client import Client

MOST = 1000
"""Messages that failed within a second and are looked up. The others are counted."""

_EVERY = 1.0  # seconds between two looks, each of which needs queries
_NEVER = float("inf")


class FailureLog:
    """Logs what becomes of messages that failed: at once, and then once a second.

    Each dead letter has a line. Of the messages that will be redelivered, one has a line, which
    counts the others.

    Args:
        stream: the stream's name.
        consumer: the consumer's name.

    Attributes:
        due_at: when `write` has something to log, by the monotonic clock.
    """

    def __init__(self, stream: str, consumer: str):
        self.due_at: float = _NEVER
        self._names = {"stream": stream, "consumer": consumer}
        self._of = f"{stream!r}, {consumer!r}"
        self._not_before = 0.0
        self._seqs: dict[int, None] = {}
        self._more = 0

    def note(self, seqs: Iterable[int]) -> None:
        """Record messages that were returned or dead-lettered because they failed."""
        for seq in seqs:
            if seq in self._seqs or len(self._seqs) < MOST:
                self._seqs[seq] = None
                self.due_at = self._not_before
            else:
                self._more += 1

    def write(self, client: Client, now: float) -> None:
        """Log what has become of the recorded messages, if that is due.

        Raises:
            PgQueueError: the connection was lost; the messages stay recorded.
        """
        if now < self.due_at or not self._seqs:
            return
        seqs = list(self._seqs)
        chosen = {"seqs": seqs, "reason": None, "before": None, "limit": len(seqs), "after": 0}
        found = client._rows("read_dead", "seq, deliver_count", **self._names, **chosen)
        dead = dict(found)
        left = [seq for seq in seqs if seq not in dead]
        first = client.outcome(**self._names, seq=left[0]) if left else None
        for seq, count in dead.items():
            after = counted(count, "delivery", "deliveries")
            warn("%s: message %s dead-lettered after %s", self._of, seq, after)
        if first is not None and not first.is_final:
            when = "now" if first.due_at is None else f"at {first.due_at}"
            others = counted(len(left) - 1, "other message", "other messages")
            also = f"; {others} failed, too" if len(left) > 1 else ""
            warn("%s: message %s will be redelivered %s%s", self._of, left[0], when, also)
        if self._more:
            more = counted(self._more, "more message", "more messages")
            warn("%s: %s failed; `pgqueue dead list` shows all dead letters", self._of, more)
        self._seqs, self._more = {}, 0
        self.due_at, self._not_before = _NEVER, now + _EVERY
