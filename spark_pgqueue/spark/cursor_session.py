"""The driver-side state of a streaming query without a consumer: what its next micro-batch has.

Nothing of it has to outlive the process. Where a query is, says its checkpoint, and what lies
between two offsets never changes: see `cursor_offset` and `sql/core/offsets.sql`.
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
from spark_pgqueue.spark.admission import Admission
from spark_pgqueue.spark.application import Seat
from spark_pgqueue.spark.cursor_offset import CursorOffset, Position
from spark_pgqueue.spark.cursor_streams import Streams
from spark_pgqueue.spark.lease import Parent, Wakeup
from spark_pgqueue.spark.options import CursorOptions
from spark_pgqueue.spark.partitions import CursorPartition
from spark_pgqueue.spark.session import BACKLOG_SECONDS, BRIEFLY, asynchronous_progress

WAIT_SECONDS = 1.0
"""How long to wait for messages, unless waitTime says otherwise."""

PATTERN_SECONDS = 10.0
"""How long a query with streamPattern waits at most before it looks for new streams."""

FIRST_MESSAGES = 1_000
"""How many messages a query reads first that is to keep to a size, to learn theirs."""

WORTH_A_BATCH = 100_000
"""An empty micro-batch is worth it when so many publications were passed, which had no messages for
this query: when it is started again, they need not be passed once more."""

LOOKS = 1_000
"""How often to look in a row when there is nothing among so many publications."""


class CursorSession:
    """A query's connections, and what it knows beyond its last offset."""

    def __init__(self, options: CursorOptions, schema: StructType):
        self._options = options
        self._parent = Parent()
        data = schema["data"].dataType.simpleString()
        self._streams = Streams(options, options.retry_timeout.total_seconds(), data)
        self._wakeup = Wakeup(options.url, [], self._parent)
        self._seat = Seat(f"cursor-{uuid4()}", is_shared=True)
        self._seat.take()
        self._bounds: dict[str, int] | None = None
        self._has_begun = False
        self._begun: dict[str, Position] = {}
        self._ahead: dict[str, tuple[Position, Position]] = {}
        self._noted: dict[str, Position] = {}
        self._planned: CursorOffset | None = None
        self._logged: CursorOffset | None = None
        self._average: float | None = None
        self.position: CursorOffset | None = None
        """Up to where the query has read, where Spark does not say it (4.0, 4.1); None: unknown."""
        self._had_messages = -math.inf  # when
        self._last = CursorOffset()
        self._backlog, self._lag, self._backlog_at = 0, None, -math.inf

    def stop_at_what_is_published(self) -> None:
        """From now on read what is published by now, and nothing that is published later."""
        self._bounds = self._streams.last_publications()

    def next(self, start: CursorOffset, admission: Admission) -> CursorOffset:
        """The end of the next micro-batch, after waiting a while for something; or `start`."""
        self._parent.check()
        others_are_busy = self._seat.others_had_messages()
        try:
            return self._next(start, admission, others_are_busy)
        except PgQueueError as error:
            if error.sqlstate != UNKNOWN_STREAM or self._options.stream_pattern is None:
                raise
            self._streams.forget()  # it was dropped since they were found
            return self._next(start, admission, others_are_busy)

    def everything(self) -> CursorOffset:
        """The end of all that there is, for a query of which it is not known where it is.

        It is right wherever that is: what lies between two offsets is the difference of what they
        have read. With a limit it might end before the query's position. Where the query is new, it
        says where it begins.
        """
        self._parent.check()
        begun = self._begin(CursorOffset())
        self._last = CursorOffset(
            {name: self._streams.all_after(name, begun[name]) for name in begun}
        ).beginning_at(self._begun)
        return self._last

    def _next(
        self, start: CursorOffset, admission: Admission, others_are_busy: bool
    ) -> CursorOffset:
        positions = self._begin(start)
        self._note(positions)
        self._wakeup.forget()
        end = self._look(start, positions, admission)
        if end == start and self._bounds is None:
            end = self._wait(start, positions, admission, others_are_busy)
        if had := end.messages - CursorOffset(positions).messages:
            self._seat.note_messages()
            self._had_messages = time.monotonic()
            self._backlog = max(0, self._backlog - had)
            self._backlog_at = min(self._backlog_at, time.monotonic() - BACKLOG_SECONDS + 1)
        self._last = end
        return end

    def latest(self) -> dict[str, Any]:
        """For the query's progress: the last offset, what is read, and the backlog in messages and
        seconds (of its oldest one).
        """
        if time.monotonic() >= self._backlog_at + BACKLOG_SECONDS:
            with contextlib.suppress(PgQueueError):  # who asks for messages next is told
                self._backlog, self._lag = self._streams.lag(self._last.positions)
            self._backlog_at = time.monotonic()
        return CursorOffset(self._last.positions).as_json() | {
            "stream": self._options.title,
            "backlog": self._backlog,
            "lagSeconds": round(self._lag or 0.0, 3),
        }

    def note_logged(self, offset: CursorOffset) -> None:
        """Note that Spark's log has an offset: where its streams began need not be said again."""
        self._logged = offset
        for name in offset.positions:
            self._begun.pop(name, None)

    def plan(self, start: CursorOffset, end: CursorOffset) -> list[CursorPartition]:
        """The partitions of the batch between two offsets."""
        if self._options.group is not None:
            if start == self._planned != self._logged:
                raise asynchronous_progress("noted")
            self._planned = end
        self.position = end  # Spark asks for more when this is read, and not before
        return self._streams.partitions(start, end)

    def close(self) -> None:
        """Close the connections."""
        self._wakeup.close()
        self._streams.close()
        self._seat.leave()

    def _begin(self, start: CursorOffset) -> dict[str, Position]:
        """Where to read on in each stream: where the last batch ended, or where it begins."""
        found = self._streams.find()
        self._check_still_there(start, found)
        # A stream that is new for a query is read from its first message, because some may have
        # been published to it before it was noticed.
        is_new = not start.positions and not self._has_begun
        for name in found:
            if name not in start.positions and name not in self._begun:
                self._begun[name] = (
                    self._streams.begin(name, "latest") if is_new else self._streams.earliest(name)
                )
        self._has_begun = True
        if self._bounds is None:
            self._wakeup.wait_for_streams(found)
        return {
            name: start.positions.get(name) or self._begun[name]
            for name in found
            if self._bounds is None or name in self._bounds
        }

    def _note(self, positions: dict[str, Position]) -> None:
        """Note where a micro-batch begins, where the options name a group: all before is done."""
        if self._options.group is None:
            return
        new = {name: each for name, each in positions.items() if self._noted.get(name) != each}
        if new:
            self._streams.note(new)
            self._noted |= new

    def _check_still_there(self, start: CursorOffset, found: Mapping[str, Any]) -> None:
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
        start: CursorOffset,
        positions: dict[str, Position],
        admission: Admission,
        others_are_busy: bool,
    ) -> CursorOffset:
        """Wait for messages, and look again; or `start`."""
        given = self._options.wait_time
        seconds = WAIT_SECONDS if given is None else given.total_seconds()
        if others_are_busy:
            seconds = min(seconds, BRIEFLY)
        if self._options.stream_pattern is not None:
            seconds = min(seconds, PATTERN_SECONDS)
        if admission.min_messages is not None:
            seconds = min(seconds, max(0.0, self._until_delay_is_over(admission)))
        end = start
        if self._wakeup.start():
            end = self._look(start, positions, admission)
        if end == start:
            heard = self._wakeup.wait(seconds)
            if heard and admission.min_messages is not None:
                time.sleep(min(seconds, BRIEFLY))  # a publication each millisecond is not one look
            if heard or admission.min_messages is not None:
                end = self._look(start, positions, admission)
        return end

    def _until_delay_is_over(self, admission: Admission) -> float:
        return self._had_messages + admission.max_delay.total_seconds() - time.monotonic()

    def _look(
        self, start: CursorOffset, positions: dict[str, Position], admission: Admission
    ) -> CursorOffset:
        """What there is, if it is enough for a micro-batch; or `start`."""
        if self._bounds is not None:
            admission = replace(admission, min_messages=None)
        found, had = self._read_on(positions, admission)
        passed = sum(found[name]["next"] - positions[name]["next"] for name in found)
        begins = admission.begins(had, time.monotonic() - self._had_messages)
        is_new = positions.keys() != start.positions.keys()
        if not is_new and not (begins if had else passed >= WORTH_A_BATCH):
            return start
        if had and not begins:  # a stream is new, and that is to be kept
            found = positions
        if had and begins:
            self._wakeup.note_messages(
                [name for name in found if found[name]["messages"] > positions[name]["messages"]]
            )
        return CursorOffset(found).beginning_at(self._begun)

    def _read_on(
        self, positions: dict[str, Position], admission: Admission
    ) -> tuple[dict[str, Position], int]:
        """The positions after the next messages that a micro-batch may have, and how many."""
        most = admission.max_messages
        if admission.max_bytes is not None and self._average is None:
            most = min(most or FIRST_MESSAGES, FIRST_MESSAGES)
        most = admission.messages_to_ask(most, self._average)
        found, had = self._read_messages(positions, most)
        while admission.max_bytes is not None and had:
            size = self._streams.size(CursorOffset(positions), CursorOffset(found))
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
        """As `read_to`; goes on where there was nothing for this query among many publications.

        What it has passed it need not pass again, though Spark's offset stays as it is: where it is
        one number, or when transactions end that published nothing for this query.
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
    """How many messages of each stream a micro-batch takes: as evenly as can be.

    Args:
        available: how many each has.
        limit: for all of them.

    Returns:
        as many for each, and more only for those that have more than others take.
    """
    taken = [0] * len(available)
    left = limit
    # Those with the fewest first: what they do not need is there for the others.
    order = sorted(range(len(available)), key=lambda index: available[index])
    for done, index in enumerate(order):
        taken[index] = min(available[index], -(-left // (len(order) - done)))
        left -= taken[index]
    return taken
