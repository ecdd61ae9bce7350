"""The driver-side state of the source: it claims micro-batches and plans how executors read them.

An offset is `{"reader": uuid, "claim": id, "messages": count}`: the checkpoint reader, the last
claim of the micro-batch, and how many messages the reader has claimed since its start. The database
numbers the claims of a reader under a lock, so the claims between two offsets never change.
"""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass, replace
from typing import Any
from uuid import uuid4

from pyspark.sql.types import StructType

from spark_pgqueue.postgres.errors import FOREIGN_CHECKPOINT, READ_TWICE, PgQueueError
from spark_pgqueue.postgres.statements import Statements
from spark_pgqueue.postgres.time_limit import SHORT
from spark_pgqueue.printable import warn
from spark_pgqueue.spark.columns import data_type
from spark_pgqueue.spark.consumer_source.consumer import open_consumer
from spark_pgqueue.spark.driver.admission import Admission
from spark_pgqueue.spark.driver.checkpoint import FIELDS, Checkpoint, position_of, unknown_offset
from spark_pgqueue.spark.driver.lease import Lease, Parent, PublicationWaiter
from spark_pgqueue.spark.driver.registration import ReaderRegistration
from spark_pgqueue.spark.executor.reading import report_loss
from spark_pgqueue.spark.options import SOURCE_NAMES, SourceOptions
from spark_pgqueue.spark.partitions import Batch, ClaimedPartition, cut_into_partitions, in_order

BACKLOG_SECONDS = 10
"""The highest age in seconds of the backlog that an idle query reports."""

BRIEFLY = 0.05
"""Seconds that a source without messages waits while others of its application have messages: Spark
asks the sources of a query one after the other."""

ENDING_SECONDS = 10.0
"""Seconds for which a source tries to reach Postgres when its query ends."""

ASKS = 1000
"""How often in a row the source repeats a claim that the database tells it to repeat."""


@dataclass(frozen=True)
class Offset:
    """A position of the source; the order of the fields is part of the format."""

    reader: str
    claim: int
    messages: int

    @classmethod
    def parse(cls, offset: dict[str, Any]) -> Offset:
        """The offset that Spark read in the checkpoint.

        Raises:
            PgQueueError: another source, or a newer version of this one, has written the
                checkpoint.
        """
        if not isinstance(offset, dict):
            raise unknown_offset(offset)
        if list(offset) == ["streams"]:
            raise PgQueueError(
                "the checkpoint is of a query that reads streams without a consumer, and this one "
                "has one",
                hint="remove the option consumer again, or give the query a checkpointLocation of "
                "its own",
                sqlstate=FOREIGN_CHECKPOINT,
            )
        if list(offset) != FIELDS:
            raise unknown_offset(offset)
        return cls(**offset)


class Session:
    """The driver-side state of a checkpoint reader: connections, lease, and the last claim."""

    def __init__(self, options: SourceOptions, schema: StructType):
        self._options = options
        self._parent = Parent()
        patience = options.retry_timeout.total_seconds()
        self._statements = Statements(
            options.url, patience=patience, repeat=True, names=SOURCE_NAMES.get, limit=SHORT
        )
        self._consumer = open_consumer(self._statements, options)
        self._check_kind(schema)
        self._registration = ReaderRegistration(self._consumer.identity, options.share_consumer)
        self._register()
        timeout = options.visibility_timeout or self._consumer.visibility_timeout
        self._lease = Lease(options.url, timeout, self._parent)
        self._waiter = PublicationWaiter(options.url, [options.stream], self._parent)
        self._process = str(uuid4())
        self._bound: int | None = None
        self._backlog, self._lag, self._backlog_until = 0, None, 0.0
        self._is_estimate = False
        self._told_of_others = self._told_of_the_start = False
        self._had_messages = -math.inf  # the time of the last claim
        self._average: float | None = None  # mean bytes of data of a message
        self._acknowledged: Offset | None = None
        self._planned: Offset | None = None
        self.committed: Offset | None = None
        self._planned_to: Offset | None = None
        self.initial: Offset = Offset(str(uuid4()), 0, 0)
        self._last = self.initial

    def stop_at_what_is_published(self) -> None:
        """Set the bound of `claim` to the last publication."""
        if self._consumer.paused:
            warn(
                "consumer %s is paused, and a run with availableNow ends without its messages: "
                "resume it, and run the query again",
                self._options.consumer,
            )
        (self._bound,) = self._statements.row(
            "select pgqueue.last_publication(%s)", [self._consumer.stream_id]
        )

    @property
    def position(self) -> Offset:
        """The end of the last finished batch, for Spark 4.0 and 4.1, which do not say it.

        These versions ask for the next batch only when the last planned batch is finished. A
        restarted query first plans the last batch of its log as empty, and then once more if it is
        not finished. After that it asks for the next batch; with a trigger of one micro-batch it
        does not ask.
        """
        return self._planned_to or self.initial

    def claim(self, start: Offset, admission: Admission) -> Offset:
        """Acknowledge up to `start`, and claim what `admission` allows, waiting for messages."""
        self._tell_of_the_start(start)
        self._lease.hold(start.reader)
        others_are_busy = self._registration.others_had_messages()
        if self._bound is None and not self._is_enough(start, admission, others_are_busy):
            self._last = start
            return start
        self._waiter.forget()
        self._last, wait = self._claim(start, admission)
        if self._last != start:
            self._waiter.note_messages()
        elif self._bound is None:
            self._wait_and_claim(start, admission, min(wait, BRIEFLY) if others_are_busy else wait)
        if self._last == start:
            self._tell_of_others(start)
        else:
            self._registration.note_messages()
            self._had_messages = time.monotonic()
        return self._last

    def _wait_and_claim(self, start: Offset, admission: Admission, at_most: float) -> None:
        if self._waiter.start():
            self._last, wait = self._claim(start, admission)
            at_most = min(at_most, wait)
        if self._last == start and self._waiter.wait(at_most):
            self._last, _ = self._claim(start, admission)

    def _is_enough(self, start: Offset, admission: Admission, others_are_busy: bool) -> bool:
        """Whether a batch may begin; if not, acknowledges up to `start`."""
        wait_time = self._options.wait_time.total_seconds()
        end = time.monotonic() + (min(wait_time, BRIEFLY) if others_are_busy else wait_time)
        while not admission.begins(self._available(admission), self._since_messages()):
            self._acknowledge(start)
            if self._waiter.start():
                continue
            left = end - time.monotonic()
            if left <= 0:
                return False
            left = min(left, admission.max_delay.total_seconds() - self._since_messages())
            if self._waiter.wait(left):
                time.sleep(BRIEFLY)  # do not count again for each of many publications
            self._waiter.forget()
        return True

    def _since_messages(self) -> float:
        return time.monotonic() - self._had_messages

    def _available(self, admission: Admission) -> int:
        if admission.min_messages is None or self._had_messages == -math.inf:
            return 0  # no limit needs the number
        return self._statements.row(
            "select pgqueue.consumer_available(%s, %s)",
            [self._consumer.consumer_id, admission.min_messages],
        )[0]

    def _acknowledge(self, start: Offset) -> None:
        if start.claim and start != self._acknowledged:
            lost = self._statements.row(
                "select lost from pgqueue.reader_ack(%s, %s, %s)",
                [start.reader, self._consumer.consumer_id, start.claim],
            )[0]
            self._acknowledged = start
            self._tell_of_loss(lost)

    def latest(self) -> dict[str, Any]:
        """For the query's progress: the last offset plus the backlog, the names, and the backlog.

        The backlog is in messages, and in seconds: the age of the oldest message that can be
        delivered.
        """
        if time.monotonic() >= self._backlog_until:
            self._backlog, self._lag, self._is_estimate = self._statements.row(
                "select backlog, greatest(0, extract(epoch from clock_timestamp() - oldest_at))"
                "::float8, estimated from pgqueue.consumer_lag(%s)",
                [self._consumer.consumer_id],
            )
            self._backlog_until = time.monotonic() + BACKLOG_SECONDS
        return asdict(replace(self._last, messages=self._last.messages + self._backlog)) | {
            "stream": self._options.stream,
            "consumer": self._options.consumer,
            "backlog": self._backlog,
            "backlogIsEstimate": self._is_estimate,
            "lagSeconds": round(self._lag or 0.0, 3),
        }

    def plan(self, start: Offset, end: Offset) -> list[ClaimedPartition]:
        """The partitions of the batch between two offsets."""
        self._planned_to = end
        # When Spark replays the first batch, it gives a new start, which was never stored.
        after = start.claim if start.reader == end.reader else 0
        if end.claim <= after:
            return []
        if start == self._planned != self.committed:
            raise asynchronous_progress("acknowledged")
        self._planned = end
        self._lease.hold(end.reader)
        planned, taken_over, gone, returned, poison = self._statements.row(
            "select planned, taken_over, gone, returned, poison "
            "from pgqueue.reader_resume(%s, %s, %s, %s, %s, %s)",
            [
                end.reader,
                self._consumer.consumer_id,
                after,
                end.claim,
                self._process,
                self._options.quarantine_after,
            ],
        )
        if taken_over:
            warn(
                "%s messages of this batch of consumer %s were taken over by another claimer after "
                "their lease ended, and are delivered there; %s are left",
                *(taken_over, self._options.consumer, planned),
            )
        if returned:
            warn(
                "this batch of consumer %s was begun too often and never finished: %s of its "
                "messages come later, %s are left",
                *(self._options.consumer, returned, planned),
            )
        if poison:
            warn(
                "a message of consumer %s stopped the query each time, at last alone: it is a dead "
                "letter now, with the reason poison",
                self._options.consumer,
            )
        if gone:
            report_loss(gone, self._options.stream, self._options.fail_on_data_loss)
        ranges = self._statements.rows(
            "select lo, hi, priority, deliver_count from pgqueue.reader_plan(%s, %s, %s)",
            [end.reader, after, end.claim],
        )
        batch = Batch(end.reader, after, end.claim, lost=taken_over + gone)
        return cut_into_partitions(in_order(ranges), batch, self._consumer, self._options)

    def close(self) -> None:
        """Stop the lease, close the connections, and acknowledge the finished micro-batches."""
        self._lease.stop()
        self._waiter.close()
        self._statements.close()
        self._registration.unregister()
        if self._options.checkpoint_location is not None and self._lease.reader is not None:
            self._acknowledge_finished(str(self._options.checkpoint_location), self._lease.reader)

    def _acknowledge_finished(self, checkpoint: str, reader: str) -> None:
        # Spark never repeats a batch of its commit log, however the query ends.
        statements = Statements(self._options.url, patience=ENDING_SECONDS, repeat=True)
        try:
            finished = Checkpoint.read(checkpoint).finished_offsets.values()
            for each, claim, _ in filter(None, map(position_of, finished)):
                if each == reader:
                    statements.row(
                        "select lost from pgqueue.reader_ack(%s, %s, %s)",
                        [reader, self._consumer.consumer_id, claim],
                    )
        except Exception as error:
            warn("could not acknowledge what the query of %s has finished: %s", checkpoint, error)
        finally:
            statements.close()

    def _register(self) -> None:
        if not self._registration.register():
            self._statements.close()
            raise PgQueueError(
                f"consumer {self._options.consumer!r} of stream {self._options.stream!r} is read "
                "twice in this Spark application: each of two readers would get a part of the "
                "messages",
                hint="in a self-join read the consumer once and derive both sides from that, or "
                "give each side a consumer of its own; of two queries stop the other one, or, to "
                'share the messages, set option("shareConsumer", "true") in both',
                sqlstate=READ_TWICE,
            )

    def _tell_of_the_start(self, start: Offset) -> None:
        """Warn once when a new query has a start that is for new consumers."""
        if self._told_of_the_start or start.claim:
            return
        self._told_of_the_start = True
        if self._options.starting_position is not None and not self._consumer.is_new:
            warn(
                "consumer %s exists, so option startingPosition does nothing: the query goes on "
                "where the consumer is; pgqueue.seek moves it",
                self._options.consumer,
            )

    def _tell_of_others(self, start: Offset) -> None:
        """Warn once when a new query finds nothing as another checkpoint holds the messages."""
        if self._told_of_others or start.claim:
            return
        self._told_of_others = True
        messages, until = self._statements.row(
            "select messages, until::timestamptz(0)::text from pgqueue.reader_others(%s, %s)",
            [start.reader, self._consumer.consumer_id],
        )
        if messages:
            warn(
                "this query has a new checkpoint and finds nothing: %s messages of consumer %s are "
                "held by a query with another checkpoint, until %s if that one does not run; start "
                "it with that checkpoint, or wait",
                *(messages, self._options.consumer, until),
            )

    def _claim(self, start: Offset, admission: Admission) -> tuple[Offset, float]:
        """Claim messages; returns the new end, and the seconds until another claim makes sense."""
        # A claim scans a bounded part of a long line of messages that it may not take. It says so,
        # and the next claim goes on there.
        end, wait = self._ask(start, admission)
        asked = 1
        while end == start and wait <= 0 and asked < ASKS:
            time.sleep(0.001 * min(asked, 20))
            end, wait = self._ask(start, admission)
            asked += 1
        return end, wait

    def _ask(self, start: Offset, admission: Admission) -> tuple[Offset, float]:
        self._parent.check()
        if admission.max_bytes is not None and self._average is None:
            (self._average,) = self._statements.row(
                "select pgqueue.recent_size(%s)", [self._consumer.stream_id]
            )
        limit = admission.messages_to_ask(admission.max_messages, self._average)
        claim, messages, claimed, lost, size, due = self._statements.row(
            "select claim_id, messages, claimed, lost, bytes, "
            "extract(epoch from next_due - clock_timestamp())::float8 "
            "from pgqueue.reader_claim(%s, %s, %s, %s, %s, %s, %s, %s)",
            [
                start.reader,
                self._consumer.consumer_id,
                start.claim,
                start.messages,
                limit,
                self._options.visibility_timeout,
                self._bound,
                admission.max_bytes,
            ],
        )
        self._tell_of_loss(lost)
        if claim != start.claim:
            some_may_be_left = self._bound is not None or size is not None or claimed == limit
            self._note_claimed(claimed, some_may_be_left)
        if size:
            self._average = size / claimed
        wait = self._options.wait_time.total_seconds()
        return Offset(start.reader, claim, messages), wait if due is None else min(wait, due)

    def _note_claimed(self, claimed: int, some_may_be_left: bool) -> None:
        # Where the claim took all messages, the batch need not wait for a count of the rest.
        self._backlog = max(0, self._backlog - claimed)
        self._lag = self._lag if self._backlog else None
        soon = 0.0 if some_may_be_left else time.monotonic() + 1
        self._backlog_until = min(self._backlog_until, soon)

    def _tell_of_loss(self, lost: int) -> None:
        if lost:
            warn(
                "%s messages of consumer %s were processed here, but their lease had ended before "
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


def asynchronous_progress(done: str) -> PgQueueError:
    """The error of a query that begins a batch before its log has the batch before.

    Spark commits an offset to its source once its log has the offset. With asynchronous progress
    the log falls behind what Postgres was told is done, and after a crash the query could not
    resume. The source cannot see it earlier: see "Asynchronous progress" in the README of this
    package.

    Args:
        done: what the source told Postgres about the batch before, in a word.
    """
    return PgQueueError(
        "the query began a micro-batch before the one before it was in its checkpoint, as with "
        "asyncProgressTrackingEnabled: after a crash it could not go on, because what it has "
        f"{done} may be gone",
        hint="remove the option asyncProgressTrackingEnabled, and start the query again; with a "
        "new checkpoint if this one is refused",
    )
