"""The stream reader: from options to claims, from claims to partitions, from partitions to rows.

Spark makes two of these objects. One lives in a driver-side process for as long as the query
runs; there `latestOffset` claims messages and `partitions` plans how to read them. The other is
pickled to the executors, where `read` sees nothing but its partition. `Session` holds what only the
first needs.

An offset is `{"reader": uuid, "claim": id, "messages": count}`: the highest claim of the
micro-batch, by the reader that the checkpoint belongs to, and how many messages it has claimed
since its start. The claims of a reader are numbered under a lock, so the claims between two offsets
never change.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import TYPE_CHECKING
from uuid import uuid4

from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceStreamReader
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from spark_pgqueue.arrow import Piece, Range, read_piece, report_loss
from spark_pgqueue.database import Database
from spark_pgqueue.errors import PgQueueError
from spark_pgqueue.lease import Lease, Parent, Wakeup
from spark_pgqueue.options import SourceOptions

if TYPE_CHECKING:
    import pyarrow as pa

log = logging.getLogger("spark_pgqueue")

MESSAGES_PER_PARTITION = 125_000
"""By default; a partition costs Spark about 25 ms, reading so many messages twenty times that."""

BACKLOG_SECONDS = 10
"""How old the backlog that an idle query reports may be."""


@dataclass(frozen=True)
class Stream:
    """A stream, as the database knows it."""

    stream_id: int
    kind: str


@dataclass(frozen=True)
class Consumer(Stream):
    """A consumer, as the database knows it."""

    consumer_id: int
    ordering: str
    visibility_timeout: timedelta


@dataclass(frozen=True)
class Offset:
    """A position of the source; the order of the fields is part of the format."""

    reader: str
    claim: int
    messages: int

    @classmethod
    def parse(cls, offset: dict) -> Offset:
        """From what Spark read in the checkpoint.

        Raises:
            PgQueueError: another source, or a newer version of this one, has written it.
        """
        if list(offset) != ["reader", "claim", "messages"]:
            raise PgQueueError(
                f"the checkpoint's offset {offset} is none of this version of spark-pgqueue",
                hint="upgrade spark-pgqueue if a newer version has written it, else give the query "
                "a checkpointLocation of its own",
                sqlstate="PQ005",
            )
        return cls(**offset)


class PgQueueStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads the messages of one consumer. See `DataSourceStreamReader` for who calls what."""

    def __init__(self, options: SourceOptions, schema: StructType):
        self._options = options
        self._schema = schema
        self._session: Session | None = None

    @property
    def session(self) -> Session:
        """The state of the driver-side process, made on first use."""
        if self._session is None:
            self._session = Session(self._options, self._schema)
        return self._session

    def initialOffset(self) -> dict:
        """The offset before the first batch, with a new reader's id; one a process."""
        return asdict(self.session.initial)

    def getDefaultReadLimit(self) -> ReadLimit:
        """What maxMessagesPerTrigger says."""
        limit = self._options.max_messages_per_trigger
        return ReadAllAvailable() if limit is None else ReadMaxRows(limit)

    def prepareForTriggerAvailableNow(self) -> None:
        """From now on claim what is published now, and nothing that is published later."""
        self.session.stop_at_what_is_published()

    def latestOffset(self, start: dict, limit: ReadLimit) -> dict:
        """Acknowledge everything up to `start`, claim the next micro-batch, and say where it ends.

        Raises:
            PgQueueError: the consumer is gone, the checkpoint belongs to another one, or Postgres
                stayed away too long.
        """
        return asdict(self.session.claim(Offset.parse(start), getattr(limit, "max_rows", None)))

    def reportLatestOffset(self) -> dict | None:
        """The last offset with the backlog added to its messages, for the query's progress."""
        return asdict(self.session.latest())

    def partitions(self, start: dict, end: dict) -> list[Piece]:
        """Plan how the executors read the messages claimed between two offsets.

        Raises:
            PgQueueError: messages are gone, and failOnDataLoss is true; or as in `latestOffset`.
        """
        return self.session.plan(Offset.parse(start), Offset.parse(end))

    def read(self, partition: Piece) -> Iterator[pa.RecordBatch]:  # type: ignore[override]
        """Read one partition, on an executor.

        Raises:
            PgQueueError: messages are gone, and failOnDataLoss is true; the query reads the
                consumer twice; or Postgres stayed away too long.
        """
        context = TaskContext.get()
        query_id = context.getLocalProperty("sql.streaming.queryId") if context else None
        return read_piece(
            self._options.url, partition, self._schema, query_id, self._options.fail_on_data_loss
        )

    def stop(self) -> None:
        """Let go of connections and of the lease."""
        if self._session is not None:
            self._session.close()


class Session:
    """A reader's driver-side state: its connections, its lease, and what it last claimed."""

    def __init__(self, options: SourceOptions, schema: StructType):
        self._options = options
        self._parent = Parent()
        self._database = Database(options.url)
        self._consumer = open_consumer(self._database, options)
        self._check_kind(schema)
        timeout = options.visibility_timeout or self._consumer.visibility_timeout
        self._lease = Lease(options.url, timeout, self._parent)
        channel = f"pgqueue_{self._consumer.stream_id}"
        self._wakeup = Wakeup(options.url, channel, self._parent)
        self._bound: int | None = None
        self._backlog, self._backlog_until = 0, 0.0
        self.initial = self._last = Offset(str(uuid4()), 0, 0)

    def stop_at_what_is_published(self) -> None:
        """Set the bound of `claim` to the last publication."""
        (self._bound,) = self._database.row(
            "select pgqueue.last_publication(%s)", [self._consumer.stream_id]
        )

    def claim(self, start: Offset, limit: int | None) -> Offset:
        """Acknowledge up to `start` and claim up to `limit` messages, waiting for them a while."""
        self._lease.hold(start.reader)
        if self._bound is not None:
            self._last, _ = self._claim(start, limit)
            return self._last
        self._wakeup.arm()
        self._last, wait = self._claim(start, limit)
        if self._last == start and self._wakeup.wait(wait):
            self._last, _ = self._claim(start, limit)
        return self._last

    def latest(self) -> Offset:
        """The last offset and the backlog behind it."""
        last = self._last
        if time.monotonic() >= self._backlog_until:
            (self._backlog,) = self._database.row(
                "select pgqueue.reader_backlog(%s)", [self._consumer.consumer_id]
            )
            self._backlog_until = time.monotonic() + BACKLOG_SECONDS
        return Offset(last.reader, last.claim, last.messages + self._backlog)

    def plan(self, start: Offset, end: Offset) -> list[Piece]:
        """The partitions of the batch between two offsets."""
        # Replaying the first batch, Spark gives a start that was made anew and never stored.
        after = start.claim if start.reader == end.reader else 0
        if end.claim <= after:
            return []
        self._lease.hold(end.reader)
        planned, taken_over, gone = self._database.row(
            "select planned, taken_over, gone from pgqueue.reader_resume(%s, %s, %s, %s)",
            [end.reader, self._consumer.consumer_id, after, end.claim],
        )
        if taken_over:
            log.warning(
                "%s messages of this batch of consumer %s were taken over by another claimer after "
                "their lease ended, and are delivered there; %s are left",
                *(taken_over, self._options.consumer, planned),
            )
        if gone:
            report_loss(gone, self._options.stream, self._options.fail_on_data_loss)
        ranges = self._database.rows(
            "select lo, hi, priority, deliver_count from pgqueue.reader_plan(%s, %s, %s)",
            [end.reader, after, end.claim],
        )
        return cut_into_pieces(
            [Range(*each) for each in ranges], end.reader, self._consumer, self._options
        )

    def close(self) -> None:
        """Stop the lease and close the connections."""
        self._lease.stop()
        self._wakeup.close()
        self._database.close()

    def _claim(self, start: Offset, limit: int | None) -> tuple[Offset, float]:
        """The new end, and for how many seconds it makes no sense to ask again."""
        self._parent.check()
        claim, messages, lost, due = self._database.row(
            "select claim_id, messages, lost, "
            "extract(epoch from next_due - clock_timestamp())::float8 "
            "from pgqueue.reader_claim(%s, %s, %s, %s, %s, %s, %s)",
            [
                start.reader,
                self._consumer.consumer_id,
                start.claim,
                start.messages,
                limit,
                self._options.visibility_timeout,
                self._bound,
            ],
        )
        if lost:
            log.warning(
                "%s messages of consumer %s were processed here, but their lease had ended before "
                "they could be acknowledged: they may be delivered twice; a longer "
                "visibilityTimeout helps",
                *(lost, self._options.consumer),
            )
        if claim != start.claim:
            self._backlog_until = 0.0
        wait = self._options.wait_time.total_seconds()
        return Offset(start.reader, claim, messages), wait if due is None else min(wait, due)

    def _check_kind(self, schema: StructType) -> None:
        given, kind = schema["data"].dataType.simpleString(), self._consumer.kind
        if (given == "binary") != (kind == "binary"):
            raise PgQueueError(
                f"stream {self._options.stream} is of kind {kind}, but column data was declared as "
                f"{given}",
                hint="remove schema(...) from readStream",
            )


def find_stream(options: SourceOptions) -> Stream:
    """The source's stream; also checks that the consumer exists unless it may be created.

    Raises:
        PgQueueError: PQ001 or PQ002 when one does not exist; PQ003 for a visibilityTimeout out of
            range; PQ011 for another schema version; or Postgres cannot be reached.
    """
    # No patience: this is load(), and whoever mistyped the host waits for the answer.
    database = Database(options.url, patience=0)
    try:
        if options.visibility_timeout is not None:
            database.row(
                "select pgqueue._check_timeout('option visibilityTimeout', %s)",
                [options.visibility_timeout],
            )
        if not options.create_consumer:
            return open_consumer(database, options)
        return Stream(
            *database.row("select stream_id, kind from pgqueue.open_stream(%s)", [options.stream])
        )
    finally:
        database.close()


def open_consumer(database: Database, options: SourceOptions) -> Consumer:
    """The source's consumer, created if it is missing and createConsumer is true.

    Raises:
        PgQueueError: PQ001 or PQ002 when the stream or the consumer does not exist.
    """
    find = (
        "select stream_id, kind, consumer_id, ordering, visibility_timeout "
        "from pgqueue.open_consumer(%s, %s)"
    )
    try:
        row = database.row(find, [options.stream, options.consumer])
    except PgQueueError as error:
        if not options.create_consumer or error.sqlstate != "PQ002":
            raise
        database.row(
            "select pgqueue.create_consumer(%s, %s, p_start => %s, p_ordering => %s, "
            "p_visibility_timeout => coalesce(%s, interval '30 s'), p_if_not_exists => true)",
            [
                options.stream,
                options.consumer,
                options.starting_position or "latest",
                options.ordering or "none",
                options.visibility_timeout,
            ],
        )
        row = database.row(find, [options.stream, options.consumer])
    consumer = Consumer(*row)
    if options.ordering not in (None, consumer.ordering):
        raise PgQueueError(
            f"consumer {options.consumer} has ordering {consumer.ordering}, but option ordering is "
            f"{options.ordering}",
            hint="remove the option, or create another consumer: its ordering cannot be changed",
        )
    return consumer


def cut_into_pieces(
    ranges: list[Range], reader: str, consumer: Consumer, options: SourceOptions
) -> list[Piece]:
    """Partitions of equal size, in the order of delivery, that together read `ranges`.

    With ordering by key each partition reads all of the ranges, but only a share of the keys: so
    all messages of a key are in one partition, in order. With ordering by stream there is one.
    """
    total = sum(each.hi - each.lo for each in ranges)
    count = 1 if consumer.ordering == "stream" else _piece_count(total, options)

    def piece(index: int, ranges: list[Range], buckets: int) -> Piece:
        return Piece(
            index, consumer.stream_id, consumer.kind, options.stream, reader, tuple(ranges), buckets
        )

    if consumer.ordering == "key" and count > 1:
        return [piece(index, ranges, count) for index in range(count)]
    shares = split(ranges, count) if total else []
    return [piece(index, share, 1) for index, share in enumerate(shares)]


def split(ranges: list[Range], count: int) -> list[list[Range]]:
    """Cut a sequence of ranges into `count` sequences that differ by one message at most."""
    total = sum(each.hi - each.lo for each in ranges)
    shares: list[list[Range]] = [[] for _ in range(count)]
    share, done = 0, 0
    for each in ranges:
        lo = each.lo
        while lo < each.hi:
            end = total * (share + 1) // count
            hi = min(each.hi, lo + end - done)
            shares[share].append(each._replace(lo=lo, hi=hi))
            done += hi - lo
            lo = hi
            share += done == end
    return shares


def _piece_count(total: int, options: SourceOptions) -> int:
    most = options.max_records_per_partition or total or 1
    least = options.min_partitions or -(-total // MESSAGES_PER_PARTITION)
    return max(1, min(total, max(least, -(-total // most))))
