"""The options that limit the size of micro-batches: the same for both stream readers."""

from __future__ import annotations

from datetime import timedelta
from typing import Protocol

from spark_pgqueue.postgres.errors import PgQueueError
from spark_pgqueue.spark.driver.admission import MAX_DELAY, Admission
from spark_pgqueue.spark.options.checking import Option
from spark_pgqueue.spark.options.values import DURATION, NUMBER, SIZE, duration, positive, size

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
    "How long to wait for minMessagesPerTrigger. By default 15 minutes.",
    needs=("minMessagesPerTrigger",),
)


class _Admitting(Protocol):
    @property
    def max_messages_per_trigger(self) -> int | None: ...
    @property
    def max_bytes_per_trigger(self) -> int | None: ...
    @property
    def min_messages_per_trigger(self) -> int | None: ...
    @property
    def max_trigger_delay(self) -> timedelta | None: ...


def check_admission(options: _Admitting) -> None:
    """Check that the four options fit together.

    Raises:
        PgQueueError: two of them contradict each other.
    """
    least, most = options.min_messages_per_trigger, options.max_messages_per_trigger
    if least is not None and most is not None and least > most:
        raise PgQueueError(
            f"option minMessagesPerTrigger is {least}, and maxMessagesPerTrigger is {most}: no "
            "micro-batch could have as many",
            hint="give a minMessagesPerTrigger of at most maxMessagesPerTrigger",
        )
    if least is None and options.max_trigger_delay is not None:
        raise PgQueueError(
            "option maxTriggerDelay has no effect without minMessagesPerTrigger",
            hint="maxTriggerDelay limits how long a micro-batch waits for that many messages: add "
            'option("minMessagesPerTrigger", ...), or remove maxTriggerDelay; to begin micro-'
            "batches at a fixed interval, use trigger(processingTime=...)",
        )


def admission_of(options: _Admitting) -> Admission:
    """The limits that the options set."""
    return Admission(
        options.max_messages_per_trigger,
        options.max_bytes_per_trigger,
        options.min_messages_per_trigger,
        options.max_trigger_delay or MAX_DELAY,
    )
