"""The driver-side state of a streaming query of the offset source: it plans micro-batches.

No state has to outlive the process. The checkpoint says how far the query has read, and the
messages between two offsets never change: see `offset_source_offset` and `sql/reading/offsets.sql`.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any
from uuid import uuid4

from pyspark.sql.types import StructType

from spark_pgqueue.postgres.errors import FOREIGN_CHECKPOINT, UNKNOWN_STREAM, PgQueueError
from spark_pgqueue.printable import warn
from spark_pgqueue.spark.columns import data_type
from spark_pgqueue.spark.consumer_source.batches import (
    BACKLOG_SECONDS,
    BRIEFLY,
    asynchronous_progress,
)
from spark_pgqueue.spark.driver.admission import Admission
from spark_pgqueue.spark.driver.lease import Parent, PublicationWaiter
from spark_pgqueue.spark.driver.registration import ReaderRegistration
from spark_pgqueue.spark.options import OffsetSourceOptions
from spark_pgqueue.spark.partitions import OffsetPartition
from spark_pgqueue.spark.stream_source.offsets import Position, StreamOffsets
from spark_pgqueue.spark.stream_source.streams import Streams

WAIT_SECONDS = 1.0
"""The default of waitTime."""

PATTERN_SECONDS = 10.0
"""The longest time between two looks of a query with streamPattern for new streams."""

FIRST_MESSAGES = 1_000
"""A query with maxBytesPerTrigger first reads this many messages, to learn their size."""

WORTH_A_BATCH = 100_000
"""After passing this many publications without messages for the query, the source begins an empty
micro-batch. Its checkpoint saves a restarted query from passing them again."""

LOOKS = 1_000
"""How many reads follow each other while none of them finds messages for the query."""


class OffsetSourceSession:
    """The connections of a query, and its knowledge beyond the last offset."""

    def __init__(self, options: OffsetSourceOptions, schema: StructType):
        self._options = options
        self._parent = Parent()
        data = data_type(schema)
        self._streams = Streams(options, options.retry_timeout.total_seconds(), data)
        self._waiter = PublicationWaiter(options.url, [], self._parent)
        self._registration = ReaderRegistration(f"offsets-{uuid4()}", is_shared=True)
        self._registration.register()
        self._bounds: dict[str, int] | None = None
        self._has_begun = False
        self._begun: dict[str, Position] = {}
        self._ahead: dict[str, tuple[Position, Position]] = {}
        self._noted: dict[str, Position] = {}
        self._planned: StreamOffsets | None = None
        self._logged: StreamOffsets | None = None
        self._average: float | None = None
        self.position: StreamOffsets | None = None
        """How far the query has read, for Spark 4.0 and 4.1, which do not say it; None: unknown."""
        self._had_messages = -math.inf  # the time of the last micro-batch with messages
        self._last = StreamOffsets()
        self._backlog, self._lag, self._backlog_at = 0, None, -math.inf

    def stop_at_what_is_published(self) -> None:
        """Read no message that is published later than now."""
        self._bounds = self._streams.last_publications()

    def next(self, start: StreamOffsets, admission: Admission) -> StreamOffsets:
        """The end of the next micro-batch, after waiting for messages; `start` where none came."""
        self._parent.check()
        others_are_busy = self._registration.others_had_messages()
        try:
            return self._next(start, admission, others_are_busy)
        except PgQueueError as error:
            if error.sqlstate != UNKNOWN_STREAM or self._options.stream_pattern is None:
                raise
            self._streams.forget()  # a stream was dropped since the streams were found
            return self._next(start, admission, others_are_busy)

    def everything(self) -> StreamOffsets:
        """The end of all messages, for a query whose position is not known.

        This end is right for every position, because a batch is the difference of two offsets.
        (With a limit, the end might lie before the query's position.) For a new query, the offset
        also says where it begins.
        """
        self._parent.check()
        begun = self._begin(StreamOffsets())
        self._last = StreamOffsets(
            {name: self._streams.all_after(name, begun[name]) for name in begun}
        ).beginning_at(self._begun)
        return self._last

    def _next(
        self, start: StreamOffsets, admission: Admission, others_are_busy: bool
    ) -> StreamOffsets:
        positions = self._begin(start)
        self._note(positions)
        self._waiter.forget()
        end = self._look(start, positions, admission)
        if end == start and self._bounds is None:
            end = self._wait(start, positions, admission, others_are_busy)
        if had := end.messages - StreamOffsets(positions).messages:
            self._registration.note_messages()
            self._had_messages = time.monotonic()
            self._backlog = max(0, self._backlog - had)
            self._backlog_at = min(self._backlog_at, time.monotonic() - BACKLOG_SECONDS + 1)
        self._last = end
        return end

    def latest(self) -> dict[str, Any]:
        """For the query's progress: the last offset, the streams, and the backlog.

        The backlog is in messages, and in seconds: the age of its oldest message.
        """
        if time.monotonic() >= self._backlog_at + BACKLOG_SECONDS:
            with contextlib.suppress(PgQueueError):  # the next read reports the error
                self._backlog, self._lag = self._streams.lag(self._last.positions)
            self._backlog_at = time.monotonic()
        return StreamOffsets(self._last.positions).as_json() | {
            "stream": self._options.title,
            "backlog": self._backlog,
            "lagSeconds": round(self._lag or 0.0, 3),
        }

    def note_logged(self, offset: StreamOffsets) -> None:
        """Note that Spark's log has an offset: later ones need not say where its streams began."""
        self._logged = offset
        for name in offset.positions:
            self._begun.pop(name, None)

    def plan(self, start: StreamOffsets, end: StreamOffsets) -> list[OffsetPartition]:
        """The partitions of the batch between two offsets."""
        if self._options.group is not None:
            if start == self._planned != self._logged:
                raise asynchronous_progress("noted")
            self._planned = end
        self.position = end  # Spark asks for the next batch only when this one is read
        return self._streams.partitions(start, end)

    def close(self) -> None:
        """Close the connections."""
        self._waiter.close()
        self._streams.close()
        self._registration.unregister()

    def _begin(self, start: StreamOffsets) -> dict[str, Position]:
        """The position to read on from in each stream: the last batch's end, or the beginning."""
        found = self._streams.find()
        self._check_still_there(start, found)
        # A running query reads a new stream from its first message: messages may have been
        # published before the query noticed the stream.
        is_new = not start.positions and not self._has_begun
        for name in found:
            if name not in start.positions and name not in self._begun:
                self._begun[name] = (
                    self._streams.begin(name, "latest") if is_new else self._streams.earliest(name)
                )
        self._has_begun = True
        if self._bounds is None:
            self._waiter.wait_for_streams(found)
        return {
            name: start.positions.get(name) or self._begun[name]
            for name in found
            if self._bounds is None or name in self._bounds
        }

    def _note(self, positions: dict[str, Position]) -> None:
        """With option group, store where a micro-batch begins: all messages before it are done."""
        if self._options.group is None:
            return
        new = {name: each for name, each in positions.items() if self._noted.get(name) != each}
        if new:
            self._streams.note(new)
            self._noted |= new

    def _check_still_there(self, start: StreamOffsets, found: Mapping[str, Any]) -> None:
        gone = sorted(start.positions.keys() - found.keys())
        if not gone:
            return
        pattern = self._options.stream_pattern
        if pattern is None or not pattern.fullmatch(gone[0]):
            raise PgQueueError(
                f"the checkpoint is of a query that read stream {gone[0]!r}, which the options do "
                "not name any more",
                hint="name it again, or give the query a checkpointLocation of its own. (Streams "
                "can be added to a query, and are read from their first message.)",
                sqlstate=FOREIGN_CHECKPOINT,
            )
        message = f"stream {gone[0]!r}, which the query has read, was dropped"
        if self._options.fail_on_data_loss:
            raise PgQueueError(
                message,
                hint='to go on without it, set option("failOnDataLoss", "false")',
                sqlstate=UNKNOWN_STREAM,
            )
        warn("%s; the query goes on without it", message)

    def _wait(
        self,
        start: StreamOffsets,
        positions: dict[str, Position],
        admission: Admission,
        others_are_busy: bool,
    ) -> StreamOffsets:
        """Wait for messages, and read again; `start` where none came."""
        given = self._options.wait_time
        seconds = WAIT_SECONDS if given is None else given.total_seconds()
        if others_are_busy:
            seconds = min(seconds, BRIEFLY)
        if self._options.stream_pattern is not None:
            seconds = min(seconds, PATTERN_SECONDS)
        if admission.min_messages is not None:
            seconds = min(seconds, max(0.0, self._until_delay_is_over(admission)))
        end = start
        if self._waiter.start():
            end = self._look(start, positions, admission)
        if end == start:
            heard = self._waiter.wait(seconds)
            if heard and admission.min_messages is not None:
                time.sleep(min(seconds, BRIEFLY))  # do not read for each of many publications
            if heard or admission.min_messages is not None:
                end = self._look(start, positions, admission)
        return end

    def _until_delay_is_over(self, admission: Admission) -> float:
        return self._had_messages + admission.max_delay.total_seconds() - time.monotonic()

    def _look(
        self, start: StreamOffsets, positions: dict[str, Position], admission: Admission
    ) -> StreamOffsets:
        """The end of the available messages, if they suffice for a micro-batch; else `start`."""
        if self._bounds is not None:
            admission = replace(admission, min_messages=None)
        found, had = self._read_on(positions, admission)
        passed = sum(found[name]["next"] - positions[name]["next"] for name in found)
        begins = admission.begins(had, time.monotonic() - self._had_messages)
        is_new = positions.keys() != start.positions.keys()
        if not is_new and not (begins if had else passed >= WORTH_A_BATCH):
            return start
        if had and not begins:  # the checkpoint must have the new stream
            found = positions
        if had and begins:
            self._waiter.note_messages(
                [name for name in found if found[name]["messages"] > positions[name]["messages"]]
            )
        return StreamOffsets(found).beginning_at(self._begun)

    def _read_on(
        self, positions: dict[str, Position], admission: Admission
    ) -> tuple[dict[str, Position], int]:
        """The positions after the messages of the next micro-batch, and the number of messages."""
        most = admission.max_messages
        if admission.max_bytes is not None and self._average is None:
            most = min(most or FIRST_MESSAGES, FIRST_MESSAGES)
        most = admission.messages_to_ask(most, self._average)
        found, had = self._read_messages(positions, most)
        while admission.max_bytes is not None and had:
            size = self._streams.size(StreamOffsets(positions), StreamOffsets(found))
            self._average = size / had
            if size <= admission.max_bytes or had == 1:
                break
            most = max(1, min(had - 1, int(had * admission.max_bytes / size * 0.95)))
            found, had = self._read_messages(positions, most)
        return found, had

    def _read_messages(
        self, positions: dict[str, Position], most: int | None
    ) -> tuple[dict[str, Position], int]:
        found = self._pass_by(positions, most)
        had = {name: found[name]["messages"] - positions[name]["messages"] for name in found}
        if most is not None and sum(had.values()) > most:
            share = dict(zip(had, even_shares(list(had.values()), most), strict=True))
            fewer = {name: positions[name] for name in had if share[name] < had[name]}
            found |= {name: positions[name] for name in fewer if not share[name]}
            asked = {name: fewer[name] for name in fewer if share[name]}
            found |= self._streams.read_to(asked, share, self._bounds)
        return found, sum(found[name]["messages"] - positions[name]["messages"] for name in found)

    def _pass_by(self, positions: dict[str, Position], most: int | None) -> dict[str, Position]:
        """Read on as `read_to` does, past publications without messages for this query.

        The session remembers the positions, because Spark's offset may stay the same: in a batch
        that does not begin, or when transactions end that published nothing for this query.
        """
        here = dict(positions)
        for name, position in positions.items():
            began, ahead = self._ahead.get(name, (None, position))
            if began == position:
                here[name] = ahead
        found = here
        for _ in range(LOOKS):
            found = self._streams.read_to(here, most, self._bounds)
            empty = all(found[name]["messages"] == here[name]["messages"] for name in found)
            moved = any(found[name]["next"] > here[name]["next"] for name in found)
            if not empty or not moved:
                break
            here = found
        for name, position in positions.items():
            if found[name]["messages"] == position["messages"]:
                self._ahead[name] = (position, found[name])
        return found


def even_shares(available: list[int], limit: int) -> list[int]:
    """How many messages of each stream a micro-batch takes, as evenly as possible.

    Args:
        available: how many messages each stream has.
        limit: for all streams together.

    Returns:
        the same number for each stream, and more only for streams that have more than others take.
    """
    taken = [0] * len(available)
    left = limit
    # The streams with the fewest messages come first: they leave the rest of their share to others.
    order = sorted(range(len(available)), key=lambda index: available[index])
    for done, index in enumerate(order):
        taken[index] = min(available[index], -(-left // (len(order) - done)))
        left -= taken[index]
    return taken
