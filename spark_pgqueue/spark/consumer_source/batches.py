"""The micro-batches of a consumer: the source claims them, and plans how executors read them.

An offset is `{"reader": uuid, "claim": id, "messages": count}`: the checkpoint reader, the last
claim of the micro-batch, and how many messages the reader has claimed since its start. The database
numbers the claims of a reader under a lock, so the claims between two offsets never change.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any
from uuid import uuid4

from pyspark.sql.types import StructType

from spark_pgqueue.postgres.errors import FOREIGN_CHECKPOINT, READ_TWICE, PgQueueError
from spark_pgqueue.postgres.statements import Statements
from spark_pgqueue.postgres.time_limit import SHORT
from spark_pgqueue.printable import warn
from spark_pgqueue.spark.columns import data_type
from spark_pgqueue.spark.consumer_source.consumer import open_consumer
from spark_pgqueue.spark.consumer_source.lease import Lease
from spark_pgqueue.spark.driver.checkpoint import Checkpoint, position_of, unknown_offset
from spark_pgqueue.spark.driver.micro_batches import MicroBatches
from spark_pgqueue.spark.driver.registration import ReaderRegistration
from spark_pgqueue.spark.executor.reading import report_loss
from spark_pgqueue.spark.options.admission import Admission
from spark_pgqueue.spark.options.source import SOURCE_NAMES, SourceOptions
from spark_pgqueue.spark.partitions import Batch, ClaimedPartition, cut_into_partitions, in_order

ENDING_SECONDS = 10.0
"""Seconds for which a source tries to reach Postgres when its query ends."""

ASKS = 1000
"""The number of times that the source repeats a claim in a row when the database requests it."""

ACK = "select lost from pgqueue.reader_ack(%s, %s, %s)"


@dataclass(frozen=True)
class Offset:
    """A position of the source; the order of the fields is part of the format."""

    reader: str
    claim: int
    messages: int

    @classmethod
    def parse(cls, offset: dict[str, Any]) -> Offset:
        """The offset that Spark read in the checkpoint; one of another source is an error."""
        if isinstance(offset, dict) and list(offset) == ["streams"]:
            raise PgQueueError(
                "the checkpoint belongs to a query that reads streams without a consumer, but this "
                "query has one",
                hint="remove the option consumer again, or give the query a checkpointLocation of "
                "its own",
                sqlstate=FOREIGN_CHECKPOINT,
            )
        found = position_of(offset)
        if found is None:
            raise unknown_offset(offset)
        return cls(*found)

    def as_json(self) -> dict[str, Any]:
        """The form in which Spark stores the offset."""
        return asdict(self)


class ConsumerBatches(MicroBatches[Offset]):
    """The micro-batches of a checkpoint reader: its connection, its lease, and its last claim."""

    def __init__(self, options: SourceOptions, schema: StructType):
        self._options = options
        patience = options.retry_timeout.total_seconds()
        self._statements = Statements(
            options.url, patience=patience, repeat=True, names=SOURCE_NAMES.get, limit=SHORT
        )
        self._consumer = open_consumer(self._statements, options)
        self._check_kind(schema)
        registration = ReaderRegistration(self._consumer.identity, options.share_consumer)
        if not registration.register():
            self._statements.close()
            raise _read_twice(options)
        initial = Offset(str(uuid4()), 0, 0)
        super().__init__(options.url, [options.stream], registration, initial)
        self.position: Offset | None = initial
        # All claims get it, because it decides when they are extended: older claims of the reader
        # may have another one, and so may the consumer later.
        self._timeout = options.visibility_timeout or self._consumer.visibility_timeout
        self._lease = Lease(options.url, self._timeout, self._parent)
        self._process = str(uuid4())
        self._is_estimate = False  # the backlog
        self._average: float | None = None  # mean bytes of data of a message
        # with availableNow: the seconds to wait while the consumer's limits hold messages back
        self._limited_for: float | None = None
        self._acknowledged: Offset | None = None
        self._warned: set[str] = set()

    def next(self, start: Offset, admission: Admission) -> Offset:
        """Acknowledge up to `start`, and claim the next micro-batch, waiting for messages."""
        is_new = not start.claim
        if is_new and "start" not in self._warned:
            self._warn_of_starting_position()
        self._lease.hold(start.reader)
        end = super().next(start, admission)
        while end == start and self._limited_for is not None:  # else a run with availableNow ends
            self._waiter.wait(self._limited_for)
            end = super().next(start, admission)
        if is_new and end == start and "others" not in self._warned:
            self._warn_of_other_readers(start)
        return end

    def latest(self) -> dict[str, Any]:
        """The last offset plus the backlog, the names, and the backlog."""
        figures = super().latest()
        last = self._last.as_json()
        return {
            **(last | {"messages": self._last.messages + self._backlog}),
            "stream": self._options.stream,
            "consumer": self._options.consumer,
            "backlogIsEstimate": self._is_estimate,
            **figures,
        }

    def plan(self, start: Offset, end: Offset) -> list[ClaimedPartition]:
        """The partitions of the micro-batch between two offsets."""
        self.position = end
        # When Spark replays the first batch, it gives a new start, which was never stored.
        after = start.claim if start.reader == end.reader else 0
        if end.claim <= after:
            return []
        self._check_log(start, end, "acknowledged")
        self._lease.hold(end.reader)
        lost = self._resume(after, end)
        ranges = self._statements.rows(
            "select lo, hi, priority, deliver_count from pgqueue.reader_plan(%s, %s, %s)",
            [end.reader, after, end.claim],
        )
        batch = Batch(end.reader, after, end.claim, lost)
        about = (self._consumer, self._consumer.ordering, self._options)
        return cut_into_partitions(in_order(ranges), batch, *about)

    def close(self) -> None:
        """Stop the lease, close the connections, and acknowledge the finished micro-batches."""
        self._lease.stop()
        self._statements.close()
        super().close()
        if self._options.checkpoint_location is not None and self._lease.reader is not None:
            self._acknowledge_finished(str(self._options.checkpoint_location), self._lease.reader)

    def _last_publications(self) -> dict[str, int]:
        if self._consumer.paused:
            warn(
                "consumer %s is paused, so a run with availableNow ends without its messages: "
                "resume it, and run the query again",
                self._options.consumer,
            )
        (last,) = self._statements.row(
            "select pgqueue.last_publication(%s)", [self._consumer.stream_id]
        )
        return {self._options.stream: last}

    def _counts(self, start: Offset, end: Offset) -> dict[str, int]:
        return {self._options.stream: end.messages - start.messages}

    def _count_backlog(self) -> tuple[int, float | None]:
        backlog, lag, self._is_estimate = self._statements.row(
            "select backlog, greatest(0, extract(epoch from clock_timestamp() - oldest_at))"
            "::float8, estimated from pgqueue.consumer_lag(%s)",
            [self._consumer.consumer_id],
        )
        return backlog, lag

    def _advance(self, start: Offset, admission: Admission) -> tuple[Offset, float]:
        least, since = admission.min_messages, self._since_messages()
        if least is not None and not admission.begins(0, since):
            (available,) = self._statements.row(
                "select pgqueue.consumer_available(%s, %s)", [self._consumer.consumer_id, least]
            )
            if not admission.begins(available, since):
                self._acknowledge(start)
                return start, self._options.wait_time.total_seconds()
        # A claim scans a bounded part of a long backlog that it may not take, and requests another
        # claim, which continues there.
        end, wait = self._claim(start, admission)
        for asked in range(1, ASKS):
            if end != start or wait > 0:
                break
            time.sleep(0.001 * min(asked, 20))
            self._parent.check()
            end, wait = self._claim(start, admission)
        return end, wait

    def _claim(self, start: Offset, admission: Admission) -> tuple[Offset, float]:
        """Claim messages; returns the new end, and the seconds until another claim makes sense."""
        if admission.max_bytes is not None and self._average is None:
            (self._average,) = self._statements.row(
                "select pgqueue.recent_size(%s)", [self._consumer.stream_id]
            )
        limit = admission.messages_to_ask(admission.max_messages, self._average)
        bound = None if self._bounds is None else self._bounds[self._options.stream]
        claim, messages, claimed, lost, size, limited, due = self._statements.row(
            "select claim_id, messages, claimed, lost, bytes, limited, "
            "extract(epoch from next_due - clock_timestamp())::float8 "
            "from pgqueue.reader_claim(%s, %s, %s, %s, %s, %s, %s, %s)",
            [
                *(start.reader, self._consumer.consumer_id, start.claim, start.messages),
                *(limit, self._timeout, bound, admission.max_bytes),
            ],
        )
        self._warn_of_loss(lost)
        if claimed and (bound is not None or size is not None or claimed == limit):
            self._backlog_until = 0.0  # some messages may be left
        if size:
            self._average = size / claimed
        wait = self._options.wait_time.total_seconds()
        wait = wait if due is None else min(wait, due)
        self._limited_for = wait if limited else None
        return Offset(start.reader, claim, messages), wait

    def _acknowledge(self, start: Offset) -> None:
        if start.claim and start != self._acknowledged:
            (lost,) = self._statements.row(
                ACK, [start.reader, self._consumer.consumer_id, start.claim]
            )
            self._acknowledged = start
            self._warn_of_loss(lost)

    def _acknowledge_finished(self, checkpoint: str, reader: str) -> None:
        # Spark never repeats a batch of its commit log, however the query ends.
        statements = Statements(self._options.url, patience=ENDING_SECONDS, repeat=True)
        try:
            finished = Checkpoint.read(checkpoint).finished_offsets.values()
            for each, claim, _ in filter(None, map(position_of, finished)):
                if each == reader:
                    statements.row(ACK, [reader, self._consumer.consumer_id, claim])
        except Exception as error:
            warn("could not acknowledge what the query of %s has finished: %s", checkpoint, error)
        finally:
            statements.close()

    def _resume(self, after: int, end: Offset) -> int:
        """Extend the claims of a micro-batch; returns how many of its messages are lost."""
        consumer = self._options.consumer
        planned, taken_over, gone, returned, poison = self._statements.row(
            "select planned, taken_over, gone, returned, poison "
            "from pgqueue.reader_resume(%s, %s, %s, %s, %s, %s, %s)",
            [
                *(end.reader, self._consumer.consumer_id, after, end.claim),
                *(self._process, self._options.quarantine_after, self._timeout),
            ],
        )
        if taken_over:
            warn(
                "%s messages of this batch of consumer %s were taken over after their lease "
                "expired, and are delivered elsewhere; %s are left",
                *(taken_over, consumer, planned),
            )
        if returned:
            warn(
                "this batch of consumer %s was started too often and never finished: %s of its "
                "messages are delivered later, %s are left",
                *(consumer, returned, planned),
            )
        if poison:
            warn(
                "a message of consumer %s stopped the query each time, finally alone in its batch: "
                "it was dead-lettered with the reason poison",
                consumer,
            )
        if gone:
            report_loss(gone, self._options.stream, self._options.fail_on_data_loss)
        return taken_over + gone

    def _warn_of_starting_position(self) -> None:
        """Warn once when a new query has option startingPosition, and the consumer exists."""
        self._warned.add("start")
        if "startingPosition" in self._options.given and not self._consumer.is_new:
            warn(
                "consumer %s already exists, so option startingPosition has no effect: the query "
                "continues at the consumer's position; to move it, use pgqueue.seek",
                self._options.consumer,
            )

    def _warn_of_other_readers(self, start: Offset) -> None:
        """Warn once when a new query finds nothing because another checkpoint holds messages."""
        self._warned.add("others")
        messages, until = self._statements.row(
            "select messages, until::timestamptz(0)::text from pgqueue.reader_others(%s, %s)",
            [start.reader, self._consumer.consumer_id],
        )
        if messages:
            warn(
                "this query has a new checkpoint and receives nothing: %s messages of consumer %s "
                "are held by a query with another checkpoint, until %s if that one does not run; "
                "start it with that checkpoint, or wait",
                *(messages, self._options.consumer, until),
            )

    def _warn_of_loss(self, lost: int) -> None:
        if lost:
            warn(
                "%s messages of consumer %s were processed here, but their lease expired before "
                "they could be acknowledged: they may be delivered twice; a longer "
                "visibilityTimeout helps",
                *(lost, self._options.consumer),
            )

    def _check_kind(self, schema: StructType) -> None:
        given, kind = data_type(schema), self._consumer.kind
        if (given == "binary") != (kind == "binary"):
            raise PgQueueError(
                f"stream {self._options.stream} is of kind {kind}, but column data was declared as "
                f"{given}",
                hint="remove schema(...) from readStream",
            )


def _read_twice(options: SourceOptions) -> PgQueueError:
    return PgQueueError(
        f"consumer {options.consumer!r} of stream {options.stream!r} is read "
        "twice in this Spark application: each of two readers would get a part of the "
        "messages",
        hint="in a self-join read the consumer once and derive both sides from that, or "
        "give each side a consumer of its own; of two queries stop the other one, or, to "
        'share the messages, set option("shareConsumer", "true") in both',
        sqlstate=READ_TWICE,
    )
