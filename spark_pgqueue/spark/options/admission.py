"""The options for the begin and the size of micro-batches, for both sources."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from spark_pgqueue.postgres.errors import PgQueueError
from spark_pgqueue.spark.options.checking import Option
from spark_pgqueue.spark.options.values import DURATION, NUMBER, SIZE, duration, positive, size


@dataclass(frozen=True)
class Admission:
    """The limits on the size of a query's micro-batches. None stands for no limit."""

    max_messages: int | None = None  # the highest number of messages
    max_bytes: int | None = None  # the highest number of bytes of data, but at least one message
    min_messages: int | None = None  # the query waits for this many messages,
    max_delay: timedelta = timedelta.max  # ... at most this long after its last one with messages
    is_only: bool = False  # Spark may ask for no other micro-batch: it has all that is published

    def begins(self, available: int, since: float) -> bool:
        """Whether a micro-batch of `available` messages begins, `since` seconds after the last one;
        infinity for the first, which begins immediately.
        """
        return (
            self.min_messages is None
            or available >= self.min_messages
            or since >= self.max_delay.total_seconds()
        )

    def messages_to_ask(self, most: int | None, average: float | None) -> int | None:
        """The number of messages to request, for about max_bytes; None for all.

        The number need not be exact: the database cuts a claim that has more bytes, by claiming it
        again. `most` is the highest number of messages, `average` the mean bytes of a message, if
        known.
        """
        if self.max_bytes is None or average is None:
            return most
        about = max(1, int(self.max_bytes / max(average, 1.0)))
        about -= about // 100  # with 1% fewer messages, most claims need no cut
        return about if most is None else min(most, about)


MAX_MESSAGES_PER_TRIGGER = Option(
    positive, NUMBER, "At most this many messages in a micro-batch. By default all messages."
)
MAX_BYTES_PER_TRIGGER = Option(
    size,
    SIZE,
    "At most this many bytes of data in a micro-batch, but at least one message. By default any "
    "number.",
)
MIN_MESSAGES_PER_TRIGGER = Option(
    positive,
    NUMBER,
    "Begin a micro-batch when there are this many messages, or maxTriggerDelay after the last "
    "micro-batch. The first micro-batch of a run, and availableNow, do not wait. At most "
    "maxMessagesPerTrigger. By default 1.",
)
MAX_TRIGGER_DELAY = Option(
    duration,
    DURATION,
    "How long to wait for minMessagesPerTrigger. By default {default}.",
    default=timedelta(minutes=15),
    needs=("minMessagesPerTrigger",),
)
WAIT_TIME = Option(
    duration,
    DURATION,
    "How long to wait for messages before the source reports to Spark that there are none.",
    default=timedelta(seconds=1),
)


class Admitting:
    """A dataclass of options with these four."""

    given: frozenset[str]
    max_messages_per_trigger: int | None
    max_bytes_per_trigger: int | None
    min_messages_per_trigger: int | None
    max_trigger_delay: timedelta

    @property
    def admission(self) -> Admission:
        """The limits on the size of micro-batches."""
        return Admission(
            self.max_messages_per_trigger,
            self.max_bytes_per_trigger,
            self.min_messages_per_trigger,
            self.max_trigger_delay,
        )

    def check_admission(self) -> None:
        """Check that the four options fit together."""
        least, most = self.min_messages_per_trigger, self.max_messages_per_trigger
        if least is not None and most is not None and least > most:
            raise PgQueueError(
                f"option minMessagesPerTrigger is {least}, and maxMessagesPerTrigger is {most}: no "
                "micro-batch could have as many",
                hint="give a minMessagesPerTrigger of at most maxMessagesPerTrigger",
            )
        if least is None and "maxTriggerDelay" in self.given:
            raise PgQueueError(
                "option maxTriggerDelay has no effect without minMessagesPerTrigger",
                hint="maxTriggerDelay limits how long a micro-batch waits for that many messages: "
                'add option("minMessagesPerTrigger", ...), or remove maxTriggerDelay; to begin '
                "micro-batches at a fixed interval, use trigger(processingTime=...)",
            )
