"""The options that say how large micro-batches are: the same for all that is read as a stream."""

from __future__ import annotations

from datetime import timedelta
from typing import Protocol

from spark_pgqueue.postgres.errors import PgQueueError
from spark_pgqueue.spark.admission import MAX_DELAY, Admission
from spark_pgqueue.spark.options.checking import Option
from spark_pgqueue.spark.options.values import DURATION, NUMBER, SIZE, duration, positive, size

ADMISSION_OPTIONS = (
    Option(
        "maxMessagesPerTrigger",
        positive,
        NUMBER,
        None,
        "At most so many messages in a micro-batch. By default all that are available.",
    ),
    Option(
        "maxBytesPerTrigger",
        size,
        SIZE,
        None,
        "At most so many bytes of data in a micro-batch, but one message at least. By default any "
        "number.",
    ),
    Option(
        "minMessagesPerTrigger",
        positive,
        NUMBER,
        None,
        "Begin a micro-batch when there are so many messages, or maxTriggerDelay after the last "
        "one. The first one of a run, and availableNow, wait for none. At most "
        "maxMessagesPerTrigger. By default 1.",
    ),
    Option(
        "maxTriggerDelay",
        duration,
        DURATION,
        None,
        "How long to wait for minMessagesPerTrigger. By default 15 minutes.",
        needs=("minMessagesPerTrigger",),
    ),
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
    """Check that they fit together.

    Raises:
        PgQueueError: they do not.
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
            hint="it limits how long a micro-batch waits for that many: add "
            'option("minMessagesPerTrigger", ...), or remove maxTriggerDelay; to begin micro-'
            "batches at a pace of your own, use trigger(processingTime=...)",
        )


def admission_of(options: _Admitting) -> Admission:
    """What the options say."""
    return Admission(
        options.max_messages_per_trigger,
        options.max_bytes_per_trigger,
        options.min_messages_per_trigger,
        options.max_trigger_delay or MAX_DELAY,
    )
