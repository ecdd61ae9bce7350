"""Admission control: when a micro-batch begins, and how many messages it asks for."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

MAX_DELAY = timedelta(minutes=15)
"""The default of maxTriggerDelay."""


@dataclass(frozen=True)
class Admission:
    """The limits on the size of a query's micro-batches. None stands for no limit.

    Attributes:
        max_messages: the highest number of messages.
        max_bytes: the highest number of bytes of data, but at least one message.
        min_messages: the query waits for this many messages, ...
        max_delay: ... but at most this long after its last batch with messages.
    """

    max_messages: int | None = None
    max_bytes: int | None = None
    min_messages: int | None = None
    max_delay: timedelta = MAX_DELAY

    def begins(self, available: int, since: float) -> bool:
        """Whether a micro-batch begins now.

        Args:
            available: how many messages there are for it.
            since: seconds since the last batch; infinity for the first, which begins at once.
        """
        return (
            self.min_messages is None
            or available >= self.min_messages
            or since >= self.max_delay.total_seconds()
        )

    def messages_to_ask(self, most: int | None, average: float | None) -> int | None:
        """How many messages to ask for, to get about max_bytes; None for all.

        The number need not be exact: the database cuts a claim that has more bytes, by claiming it
        again.

        Args:
            most: the highest number of messages; None for any.
            average: mean bytes of data of a message; None where not known.
        """
        if self.max_bytes is None or average is None:
            return most
        about = max(1, int(self.max_bytes / max(average, 1.0)))
        about -= about // 100  # with 1% fewer messages, most claims need no cut
        return about if most is None else min(most, about)
