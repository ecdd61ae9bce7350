"""The micro-batches of the stream source: it plans them by the offsets in Spark's checkpoint.

No state has to outlive the process. The checkpoint has the query's position, and the messages
between two offsets never change: see `offsets` and `sql/reading/offsets.sql`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from uuid import uuid4

from pyspark.sql.types import StructType

from spark_pgqueue.postgres.errors import FOREIGN_CHECKPOINT, UNKNOWN_STREAM, PgQueueError
from spark_pgqueue.printable import warn
from spark_pgqueue.spark.columns import data_type
from spark_pgqueue.spark.driver.micro_batches import MicroBatches
from spark_pgqueue.spark.driver.registration import ReaderRegistration
from spark_pgqueue.spark.options.admission import Admission
from spark_pgqueue.spark.options.stream_source import StreamSourceOptions
from spark_pgqueue.spark.partitions import OffsetPartition
from spark_pgqueue.spark.stream_source.offsets import Position, StreamOffsets
from spark_pgqueue.spark.stream_source.streams import Streams

PATTERN_SECONDS = 10.0
"""The longest time between two searches of a query with streamPattern for new streams."""

FIRST_MESSAGES = 1_000
"""A query with maxBytesPerTrigger first reads this many messages, to learn their size."""

WORTH_A_BATCH = 100_000
"""After passing this many publications without messages for the query, the source begins an empty
micro-batch. Its checkpoint saves a restarted query from passing them again."""

LOOKS = 1_000
"""The number of reads in a row that may find no messages for the query."""


class StreamBatches(MicroBatches[StreamOffsets]):
    """The micro-batches of a query, and its state besides the last offset."""

    def __init__(self, options: StreamSourceOptions, schema: StructType):
        self._options = options
        patience = options.retry_timeout.total_seconds()
        self._streams = Streams(options, patience, data_type(schema))
        registration = ReaderRegistration(f"offsets-{uuid4()}", is_shared=True)
        registration.register()
        super().__init__(options.url, [], registration, StreamOffsets())
        self._wait_seconds = options.wait_time.total_seconds()
        if options.stream_pattern is not None:
            self._wait_seconds = min(self._wait_seconds, PATTERN_SECONDS)
        self._has_begun = False
        self._begun: dict[str, Position] = {}
        self._ahead: dict[str, tuple[Position, Position]] = {}
        self._noted: dict[str, Position] = {}
        self._average: float | None = None  # mean bytes of data of a message

    def next(self, start: StreamOffsets | None, admission: Admission) -> StreamOffsets:
        """The end of the next micro-batch; without a start, the end of all messages.

        That end is right for every position, because a micro-batch is the difference of two
        offsets. (With a limit, the end might lie before the query's position.) For a new query, it
        also contains the beginning.
        """
        if start is not None:
            return super().next(start, admission)
        self._parent.check()
        begun = self._begin(StreamOffsets())
        ends = {name: self._streams.end_at(name, begun[name], "latest") for name in begun}
        self._last = StreamOffsets(ends).beginning_at(self._begun)
        return self._last

    def latest(self) -> dict[str, Any]:
        """The last offset, the streams, and the backlog."""
        last = StreamOffsets(self._last.positions).as_json()
        return {**last, "stream": self._options.title, **super().latest()}

    def note_logged(self, offset: StreamOffsets) -> None:
        """Record that Spark's log has an offset: later ones need not have its streams' begins."""
        super().note_logged(offset)
        for name in offset.positions:
            self._begun.pop(name, None)

    def plan(self, start: StreamOffsets, end: StreamOffsets) -> list[OffsetPartition]:
        """The partitions of the micro-batch between two offsets."""
        self._check_named(end)  # a replay begins here, and not with the next micro-batch
        if self._options.group is not None:
            self._check_log(start, end, "noted")
        self.position: StreamOffsets | None = end
        return self._streams.partitions(start, end)

    def close(self) -> None:
        """Close the connections."""
        self._streams.close()
        super().close()

    def _last_publications(self) -> dict[str, int]:
        return self._streams.last_publications()

    def _counts(self, start: StreamOffsets, end: StreamOffsets) -> dict[str, int]:
        return {
            name: last["messages"] - first["messages"]
            for name, (first, last) in end.spans(start).items()
        }

    def _count_backlog(self) -> tuple[int, float | None]:
        try:
            return self._streams.lag(self._last.positions)
        except PgQueueError:  # the next read reports the error
            return self._backlog, self._lag

    def _advance(self, start: StreamOffsets, admission: Admission) -> tuple[StreamOffsets, float]:
        try:
            return self._look(start, admission), self._wait_seconds
        except PgQueueError as error:
            if error.sqlstate != UNKNOWN_STREAM or self._options.stream_pattern is None:
                raise
        self._streams.forget()  # a stream was dropped since the streams were found
        return self._look(start, admission), self._wait_seconds

    def _look(self, start: StreamOffsets, admission: Admission) -> StreamOffsets:
        """The end of the available messages; `start` if they are too few for a micro-batch."""
        positions = self._begin(start)
        self._note(positions)
        least, since = admission.min_messages, self._since_messages()
        found, had, begins = positions, 0, admission.begins(0, since)
        if least is not None and not begins:
            found, had = self._read_messages(positions, least)
            begins = admission.begins(self._count_on(found, had, least), since)
        if begins:
            found, had = self._read_on(positions, admission)
        if positions.keys() == start.positions.keys():
            passed = sum(found[name]["next"] - positions[name]["next"] for name in found)
            if not (begins if had else passed >= WORTH_A_BATCH):
                return start
        elif had and not begins:  # the checkpoint must have the new stream
            found = positions
        return StreamOffsets(found).beginning_at(self._begun)

    def _begin(self, start: StreamOffsets) -> dict[str, Position]:
        """The position to read on from in each stream: the last batch's end, or the beginning."""
        found = self._streams.find()
        self._check_still_there(start, found)
        # A running query reads a new stream from its first message: messages may have been
        # published before the query noticed the stream.
        is_new = not start.positions and not self._has_begun
        for name in found:
            if name not in start.positions and name not in self._begun:
                if is_new:
                    self._begun[name] = self._streams.begin(name, "latest")
                else:
                    self._begun[name] = self._streams.position_at(name, "earliest")
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

    def _check_named(self, offset: StreamOffsets) -> None:
        """Raise unless the options name all streams of an offset of the checkpoint."""
        names, pattern = self._options.names, self._options.stream_pattern
        for name in sorted(offset.positions):
            if not (name in names if names is not None else pattern and pattern.fullmatch(name)):
                raise PgQueueError(
                    f"the checkpoint belongs to a query that read stream {name!r}, which the "
                    "options no longer name",
                    hint="name it again, or give the query a checkpointLocation of its own. "
                    "(Streams can be added to a query, and are read from their first message.)",
                    sqlstate=FOREIGN_CHECKPOINT,
                )

    def _check_still_there(self, start: StreamOffsets, found: Mapping[str, Any]) -> None:
        self._check_named(start)
        gone = sorted(start.positions.keys() - found.keys())
        if not gone:
            return
        message = f"stream {gone[0]!r}, which the query has read, was dropped"
        if self._options.fail_on_data_loss:
            raise PgQueueError(
                message,
                hint='to continue without it, set option("failOnDataLoss", "false")',
                sqlstate=UNKNOWN_STREAM,
            )
        warn("%s; the query continues without it", message)

    def _read_on(
        self, positions: dict[str, Position], admission: Admission
    ) -> tuple[dict[str, Position], int]:
        """The positions after the messages of the next micro-batch, and the number of messages."""
        if admission.is_only:
            return self._read_all(positions)
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

    def _read_all(self, positions: dict[str, Position]) -> tuple[dict[str, Position], int]:
        """The positions after all messages that are published now, and their number. A read passes
        a bounded number of publications, so there may be several.
        """
        bounds = dict.fromkeys(positions, 0) | self._streams.last_publications()
        _, found = self._pass_by(positions, None, bounds)  # PySpark 4.0 asks so at each look
        here: dict[str, Position] = {}
        while found != here:
            here, found = found, self._streams.read_to(found, None, bounds)
        return found, StreamOffsets(found).messages - StreamOffsets(positions).messages

    def _count_on(self, found: dict[str, Position], had: int, enough: int) -> int:
        """The number of available messages, at most `enough`: `had`, and those after `found`.

        A micro-batch may have fewer, because a read passes a bounded number of publications.
        """
        for _ in range(LOOKS if had else 0):
            if had >= enough:
                break
            last = found
            found = self._streams.read_to(last, enough - had)
            had += StreamOffsets(found).messages - StreamOffsets(last).messages
            if not any(found[name]["next"] > last[name]["next"] for name in found):
                break
        return had

    def _read_messages(
        self, positions: dict[str, Position], most: int | None
    ) -> tuple[dict[str, Position], int]:
        here, found = self._pass_by(positions, most)
        had = {name: found[name]["messages"] - positions[name]["messages"] for name in found}
        if most is not None and sum(had.values()) > most:
            share = dict(zip(had, even_shares(list(had.values()), most), strict=True))
            fewer = {name: here[name] for name in had if share[name] < had[name]}
            found |= {name: fewer[name] for name in fewer if not share[name]}
            asked = {name: fewer[name] for name in fewer if share[name]}
            found |= self._streams.read_to(asked, share, self._bounds)
        return found, sum(found[name]["messages"] - positions[name]["messages"] for name in found)

    def _pass_by(
        self,
        positions: dict[str, Position],
        most: int | None,
        bounds: Mapping[str, int] | None = None,
    ) -> tuple[dict[str, Position], dict[str, Position]]:
        """Read on as `read_to` does, past publications without messages for this query.

        Returns the positions before the first messages, and after those that the last read found.

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
            found = self._streams.read_to(here, most, bounds or self._bounds)
            empty = all(found[name]["messages"] == here[name]["messages"] for name in found)
            moved = any(found[name]["next"] > here[name]["next"] for name in found)
            if not empty or not moved:
                break
            here = found
        for name, position in positions.items():
            if found[name]["messages"] == position["messages"]:
                self._ahead[name] = (position, found[name])
        return here, found


def even_shares(available: list[int], limit: int) -> list[int]:
    """How many messages of each stream a micro-batch takes, of those that are available.

    The number is the same for each stream, and more only for streams that have more than others
    take.
    """
    taken = [0] * len(available)
    left = limit
    # The streams with the fewest messages come first: they leave the rest of their share to others.
    order = sorted(range(len(available)), key=lambda index: available[index])
    for done, index in enumerate(order):
        taken[index] = min(available[index], -(-left // (len(order) - done)))
        left -= taken[index]
    return taken
