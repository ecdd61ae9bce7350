"""The stream reader of the source: options become claims, claims partitions, and partitions rows.

Spark makes two of these objects. One lives in a driver-side process as long as the query runs;
there `latestOffset` claims messages and `partitions` plans how to read them. Spark pickles the
other to the executors, where `read` sees nothing but its partition. `Session` holds the state of
the first.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import pyspark
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceStreamReader
from pyspark.sql.types import StructType

from spark_pgqueue.printable import warn
from spark_pgqueue.spark.consumer_source.batches import Offset, Session
from spark_pgqueue.spark.driver.admission import Admission
from spark_pgqueue.spark.executor.reading import closing_after, read_claimed
from spark_pgqueue.spark.options import SourceOptions
from spark_pgqueue.spark.partitions import ClaimedPartition
from spark_pgqueue.spark.platform.error_format import plain_errors
from spark_pgqueue.spark.platform.pyspark_compat import (
    ONE_MICRO_BATCH,
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

if TYPE_CHECKING:
    import pyarrow as pa

NO_LIMIT = 2**62
"""The number of rows that stands for no limit, for Spark."""


@plain_errors
class PgQueueStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads the messages of one consumer. `DataSourceStreamReader` says when Spark calls which
    method.
    """

    def __init__(self, options: SourceOptions, schema: StructType):
        self._options = options
        self._schema = schema
        self._session: Session | None = None
        self._told_of_the_end = False

    @property
    def session(self) -> Session:
        """The state of the driver-side process, made on first use."""
        if self._session is None:
            if self._options.checkpoint_location is not None:
                _end_at_sigterm()
            self._session = Session(self._options, self._schema)
        return self._session

    def initialOffset(self) -> dict[str, Any]:
        """The offset before the first batch, with the id of a new checkpoint reader; one for each
        process.
        """
        return asdict(self.session.initial)

    def getDefaultReadLimit(self) -> ReadLimit:
        """The limit of maxMessagesPerTrigger; never ReadAllAvailable, which means
        trigger(once=True).
        """
        return ReadMaxRows(self._options.max_messages_per_trigger or NO_LIMIT)

    def prepareForTriggerAvailableNow(self) -> None:
        """Claim no message that is published later than now."""
        self.session.stop_at_what_is_published()

    def latestOffset(
        self, start: dict[str, Any] | None = None, limit: ReadLimit | None = None
    ) -> dict[str, Any]:
        """Acknowledge all messages up to `start`, claim the next micro-batch, and return its end.

        PySpark 4.0 and 4.1 give no arguments: see `Session.position`.

        Raises:
            PgQueueError: the consumer is gone, the checkpoint belongs to another consumer, or
                Postgres stayed away too long.
        """
        admission = self._options.admission
        if isinstance(limit, ReadAllAvailable):
            admission = Admission()
        self._warn_of_the_end(start, limit)
        begin = self.session.position if start is None else Offset.parse(start)
        return asdict(self.session.claim(begin, admission))

    def _warn_of_the_end(self, start: dict[str, Any] | None, limit: ReadLimit | None) -> None:
        """Warn once if the last micro-batch will stay claimed, because Spark will not commit it."""
        if self._options.checkpoint_location is not None or self._told_of_the_end:
            return
        if start is None:
            self._told_of_the_end = True
            warn(
                "PySpark %s does not tell a source of its trigger: after a run with "
                "trigger(availableNow=True) or trigger(once=True) the last micro-batch stays "
                "claimed until the query's next run, or until its visibilityTimeout passes and "
                "another claimer asks for it; with the option checkpointLocation here, it is "
                "acknowledged when the query ends",
                pyspark.__version__,
            )
        elif isinstance(limit, ReadAllAvailable):
            self._told_of_the_end = True
            warn(
                "%s, and ends without acknowledging it: its messages stay claimed until the "
                "query's next run with the same checkpoint, or until their visibilityTimeout "
                "passes and another claimer asks for them; with the option checkpointLocation "
                "here, they are acknowledged when the query ends",
                ONE_MICRO_BATCH,
            )

    def reportLatestOffset(self) -> dict[str, Any] | None:
        """The figures for the query's progress: see `Session.latest`."""
        return self.session.latest()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[ClaimedPartition]:
        """Plan how executors read the messages that were claimed between two offsets.

        Raises:
            PgQueueError: messages are gone, and failOnDataLoss is true; the query has asynchronous
                progress; or as in `latestOffset`.
        """
        return self.session.plan(Offset.parse(start), Offset.parse(end))

    def commit(self, end: dict[str, Any]) -> None:
        """Note that Spark is done with messages up to `end`; the next claim acknowledges them."""
        self.session.committed = Offset.parse(end)

    def read(self, partition: ClaimedPartition) -> Iterator[pa.RecordBatch]:  # type: ignore[override]
        """Read one partition, on an executor.

        Raises:
            PgQueueError: messages are gone, and failOnDataLoss is true; the query reads the
                consumer twice; its lease ended, and another claimer has messages of the
                partition's batch; or Postgres stayed away too long.
        """
        context = TaskContext.get()
        query_id = context.getLocalProperty("sql.streaming.queryId") if context else None
        batches = read_claimed(self._options, partition, self._schema, query_id)
        return closing_after(batches, self._options.url, self._options.max_connections)

    def stop(self) -> None:
        """Close the connections, and stop the lease."""
        if self._session is not None:
            self._session.close()


def _end_at_sigterm() -> None:
    """Let `stop` run when the query ends: Spark sends SIGTERM then, and again at once."""

    def end(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        sys.exit(0)

    with contextlib.suppress(ValueError):  # in another thread there is no process to end
        signal.signal(signal.SIGTERM, end)
