"""The micro-batches of a streaming query, which both sources make in the same way.

Spark requests the end of the next micro-batch and its partitions from the source, in turn. This
module decides when a micro-batch begins, how long the source waits for messages, and what the
query's progress shows. A source adds how it advances from one offset to the next, and how it plans
partitions.

Spark makes two readers. One lives in a driver-side process as long as the query runs; its
`MicroBatches` hold the state. Spark pickles the other to the executors, where `read` sees nothing
but its partition.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Any, Generic, TypeVar

from pyspark.sql.datasource import DataSourceStreamReader
from pyspark.sql.types import StructType

from spark_pgqueue.postgres.errors import PgQueueError
from spark_pgqueue.printable import warn
from spark_pgqueue.spark.driver.registration import ReaderRegistration
from spark_pgqueue.spark.driver.waiter import PublicationWaiter
from spark_pgqueue.spark.options.admission import Admission
from spark_pgqueue.spark.options.source import SourceOptions
from spark_pgqueue.spark.options.stream_source import StreamSourceOptions
from spark_pgqueue.spark.platform.error_format import plain_errors
from spark_pgqueue.spark.platform.process import Parent
from spark_pgqueue.spark.platform.pyspark_compat import (
    TELLS_START,
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

T = TypeVar("T")
"""A source's offset."""

BACKLOG_SECONDS = 10
"""The highest age in seconds of the backlog that an idle query reports."""

BRIEFLY = 0.05
"""Seconds that a source without messages waits while others of its application have messages: Spark
calls the sources of a query one after the other."""

NO_LIMIT = 2**62
"""The number of rows that stands for no limit, for Spark."""


class MicroBatches(ABC, Generic[T]):
    """The driver-side state of a query, which waits for the publications of some streams."""

    def __init__(
        self, url: str | None, streams: list[str], registration: ReaderRegistration, initial: T
    ):
        self._parent = Parent()
        self._waiter = PublicationWaiter(url, streams, self._parent)
        self._registration = registration
        self.initial: T = initial
        self.position: T | None = None
        """The end of the last planned micro-batch, for Spark 4.0 and 4.1, which do not pass it.

        These versions request the next micro-batch only when the last planned one is finished. A
        restarted query first plans the last micro-batch of its log as empty, and then again if it
        is not finished. With a trigger of one micro-batch it requests no other one.
        """
        self._last = initial
        self._planned: T | None = None
        self._logged: T | None = None
        self._bounds: dict[str, int] | None = None
        self._had_messages = -math.inf  # the time of the last micro-batch with messages
        self._backlog, self._lag, self._backlog_until = 0, None, -math.inf

    def stop_at_what_is_published(self) -> None:
        """Read no message that is published later than now."""
        self._bounds = self._last_publications()

    def next(self, start: T, admission: Admission) -> T:
        """The end of the next micro-batch, after waiting for messages; `start` where none came."""
        if self._bounds is not None:
            admission = replace(admission, min_messages=None)
        others_are_busy = self._registration.others_had_messages()
        self._waiter.forget()
        end, wait = self._try(start, admission)
        counts = self._counts(start, end)
        if any(counts.values()):
            self._waiter.note_messages([name for name, count in counts.items() if count])
        elif end == start and self._bounds is None:
            end = self._wait(start, admission, min(wait, BRIEFLY) if others_are_busy else wait)
            counts = self._counts(start, end)
        if count := sum(counts.values()):
            self._registration.note_messages()
            self._had_messages = time.monotonic()
            # The micro-batch need not wait until the rest is counted.
            self._backlog = max(0, self._backlog - count)
            self._lag = self._lag if self._backlog else None
            self._backlog_until = min(self._backlog_until, time.monotonic() + 1)
        self._last = end
        return end

    def latest(self) -> dict[str, Any]:
        """For the query's progress: the backlog in messages, and in seconds the age of the oldest
        message that can be delivered.
        """
        if time.monotonic() >= self._backlog_until:
            self._backlog, self._lag = self._count_backlog()
            self._backlog_until = time.monotonic() + BACKLOG_SECONDS
        return {"backlog": self._backlog, "lagSeconds": round(self._lag or 0.0, 3)}

    def note_logged(self, offset: T) -> None:
        """Record that Spark's log has an offset."""
        self._logged = offset

    @abstractmethod
    def plan(self, start: T, end: T) -> list[Any]:
        """The partitions of the micro-batch between two offsets."""

    def close(self) -> None:
        """Close the connections."""
        self._waiter.close()
        self._registration.unregister()

    @abstractmethod
    def _last_publications(self) -> dict[str, int]:
        """The last publication of each stream that is visible now."""

    @abstractmethod
    def _advance(self, start: T, admission: Admission) -> tuple[T, float]:
        """The end of the messages that a micro-batch may take now, or `start` where none begins;
        and the seconds until another attempt makes sense.
        """

    @abstractmethod
    def _counts(self, start: T, end: T) -> dict[str, int]:
        """The number of messages between two offsets, by the name of their stream."""

    @abstractmethod
    def _count_backlog(self) -> tuple[int, float | None]:
        """The number of messages after the last offset, and the age of the oldest in seconds."""

    def _try(self, start: T, admission: Admission) -> tuple[T, float]:
        self._parent.check()
        return self._advance(start, admission)

    def _wait(self, start: T, admission: Admission, seconds: float) -> T:
        """Wait for messages, and try again; `start` where no micro-batch begins."""
        until, end = time.monotonic() + seconds, start
        if self._waiter.start():
            end, wait = self._try(start, admission)
            until = min(until, time.monotonic() + wait)
        while end == start and (left := until - time.monotonic()) > 0:
            if admission.min_messages is None:
                return self._try(start, admission)[0] if self._waiter.wait(left) else start
            rest = admission.max_delay.total_seconds() - self._since_messages()
            if self._waiter.wait(min(left, rest) if rest > 0 else left):
                time.sleep(min(left, BRIEFLY))  # do not count for each of many publications
            self._waiter.forget()
            end, _ = self._try(start, admission)
        return end

    def _since_messages(self) -> float:
        return time.monotonic() - self._had_messages

    def _check_log(self, start: T, end: T, done: str) -> None:
        """Refuse a micro-batch if Spark's log does not have the one before it.

        Spark commits an offset to its source once its log has the offset. With asynchronous
        progress the log falls behind what the source has `done` in Postgres, and after a crash the
        query could not resume. The source cannot detect it earlier: see
        "Asynchronous progress" in the README of this package.
        """
        if start == self._planned != self._logged:
            raise PgQueueError(
                "the query began a micro-batch before the previous one was in its checkpoint, as "
                "with asyncProgressTrackingEnabled: after a crash it could not continue, because "
                f"what it has {done} may be gone",
                hint="remove the option asyncProgressTrackingEnabled, and start the query again; "
                "with a new checkpoint if this one is refused",
            )
        self._planned = end


@plain_errors
class MicroBatchReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """A stream reader over `MicroBatches`. `DataSourceStreamReader` documents when Spark calls each
    method.
    """

    offset_type: Any
    """The class of the source's offsets."""

    def __init__(self, options: SourceOptions | StreamSourceOptions, schema: StructType):
        self._options = options
        self._schema = schema
        self._batches: MicroBatches | None = None
        self._has_warned = False

    def _make_batches(self) -> MicroBatches:
        raise NotImplementedError

    def _warning_of_the_end(self, knows_start: bool, is_once: bool) -> str | None:
        """The warning for a query whose last micro-batch Spark does not report as committed."""
        raise NotImplementedError

    @property
    def batches(self) -> Any:
        """The state of the driver-side process, made on first use."""
        if self._batches is None:
            self._batches = self._make_batches()
        return self._batches

    def initialOffset(self) -> dict[str, Any]:
        """The offset before the first micro-batch; Spark does not store it."""
        return self.batches.initial.as_json()

    def getDefaultReadLimit(self) -> ReadLimit:
        """The limit of maxMessagesPerTrigger; never ReadAllAvailable, which means
        trigger(once=True).
        """
        return ReadMaxRows(self._options.max_messages_per_trigger or NO_LIMIT)

    def prepareForTriggerAvailableNow(self) -> None:
        """Read no message that is published later than now."""
        self.batches.stop_at_what_is_published()

    def latestOffset(
        self, start: dict[str, Any] | None = None, limit: ReadLimit | None = None
    ) -> dict[str, Any]:
        """The end of the next micro-batch.

        PySpark 4.0 and 4.1 give no arguments: see `MicroBatches.position`.

        Raises:
            PgQueueError: the checkpoint does not fit the query, or its progress is asynchronous;
                messages were lost; or Postgres stayed away too long.
        """
        is_once = isinstance(limit, ReadAllAvailable)
        if not self._has_warned:
            warning = self._warning_of_the_end(start is not None, is_once)
            if warning is not None:
                self._has_warned = True
                warn("%s", warning)
        begin = self.batches.position if start is None else self.offset_type.parse(start)
        admission = Admission(is_only=True) if is_once else self._options.admission
        if not TELLS_START and (admission.max_messages or admission.max_bytes) is None:
            admission = replace(admission, is_only=True)  # it does not tell of its trigger either
        return self.batches.next(begin, admission).as_json()

    def reportLatestOffset(self) -> dict[str, Any] | None:
        """The figures for the query's progress: see `MicroBatches.latest`."""
        return self.batches.latest()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[Any]:
        """Plan how executors read the messages between two offsets. Errors as `latestOffset`."""
        return self.batches.plan(self.offset_type.parse(start), self.offset_type.parse(end))

    def commit(self, end: dict[str, Any]) -> None:
        """Record that the checkpoint has an offset."""
        self.batches.note_logged(self.offset_type.parse(end))

    def stop(self) -> None:
        """Close the connections."""
        if self._batches is not None:
            self._batches.close()
