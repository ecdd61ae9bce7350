"""Admission control: when a micro-batch begins, and how many messages it asks for."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

MAX_DELAY = timedelta(minutes=15)
"""For how long a query waits for minMessagesPerTrigger, unless maxTriggerDelay says otherwise."""


@dataclass(frozen=True)
class Admission:
    """What a query says of the size of its micro-batches. None: nothing.

    Attributes:
        max_messages: messages at most.
        max_bytes: bytes of data at most, but one message at least.
        min_messages: with fewer it waits, ...
        max_delay: ... but no longer than this after it last had some.
    """

    max_messages: int | None = None
    max_bytes: int | None = None
    min_messages: int | None = None
    max_delay: timedelta = MAX_DELAY

    def begins(self, available: int, since: float) -> bool:
        """Whether a micro-batch begins now.

        Args:
            available: how many messages there are for it.
            since: seconds since the last one; infinity for none, which begins at once.
        """
        return (
            self.min_messages is None
            or available >= self.min_messages
            or since >= self.max_delay.total_seconds()
        )

    def messages_to_ask(self, most: int | None, average: float | None) -> int | None:
        """How many messages to ask for, so that what comes has about max_bytes; None: all.

        It only has to be near: the database cuts what has more bytes, by claiming it again.

        Args:
            most: never more than so many; None: any number.
            average: bytes of data of a message; None: not known.
        """
        if self.max_bytes is None or average is None:
            return most
        about = max(1, int(self.max_bytes / max(average, 1.0)))
        about -= about // 100  # one in a hundred less, and most claims need not be cut
        return about if most is None else min(most, about)
