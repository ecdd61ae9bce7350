"""The offset source: it reads streams without a consumer, as a stream or once as a batch.

Only Spark's checkpoint says how far the query has read; Postgres keeps nothing. The state of the
driver-side process of a streaming query is in `OffsetSourceSession`. `source` says when Spark calls
which method.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader
from pyspark.sql.types import StructType

from spark_pgqueue.printable import warn
from spark_pgqueue.spark.columns import data_type
from spark_pgqueue.spark.consumer_source.reader import NO_LIMIT
from spark_pgqueue.spark.driver.admission import Admission
from spark_pgqueue.spark.executor.archive import completed, read_archived
from spark_pgqueue.spark.executor.reading import check_complete, closing_after, read_rows
from spark_pgqueue.spark.executor.stale_plan import FirstPlan
from spark_pgqueue.spark.options import OffsetSourceOptions
from spark_pgqueue.spark.partitions import ArchivedPartition, OffsetPartition
from spark_pgqueue.spark.platform.error_format import plain_errors
from spark_pgqueue.spark.platform.pyspark_compat import (
    ONE_MICRO_BATCH,
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from spark_pgqueue.spark.stream_source.batches import OffsetSourceSession
from spark_pgqueue.spark.stream_source.offsets import StreamOffsets
from spark_pgqueue.spark.stream_source.streams import Streams

if TYPE_CHECKING:
    import pyarrow as pa


@plain_errors
class PgQueueOffsetReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads streams as they grow, by offsets in Spark's checkpoint."""

    def __init__(self, options: OffsetSourceOptions, schema: StructType):
        self._options = options
        self._schema = schema
        self._session: OffsetSourceSession | None = None
        self._has_warned = False

    @property
    def session(self) -> OffsetSourceSession:
        """The state of the driver-side process, made on first use."""
        if self._session is None:
            self._session = OffsetSourceSession(self._options, self._schema)
        return self._session

    def initialOffset(self) -> dict[str, Any]:
        """The offset before the first batch. The end of that batch says where the query begins."""
        return StreamOffsets().as_json()

    def getDefaultReadLimit(self) -> ReadLimit:
        """The limit of maxMessagesPerTrigger; never ReadAllAvailable, which means
        trigger(once=True).
        """
        return ReadMaxRows(self._options.max_messages_per_trigger or NO_LIMIT)

    def prepareForTriggerAvailableNow(self) -> None:
        """Read no message that is published later than now."""
        self.session.stop_at_what_is_published()

    def latestOffset(
        self, start: dict[str, Any] | None = None, limit: ReadLimit | None = None
    ) -> dict[str, Any]:
        """The offset where the next micro-batch ends.

        PySpark 4.0 and 4.1 give no arguments: see `OffsetSourceSession.position`.

        Raises:
            PgQueueError: retention deleted messages first, and failOnDataLoss is true; the
                checkpoint is of other streams; or Postgres stayed away too long.
        """
        is_once = isinstance(limit, ReadAllAvailable)
        admission = Admission() if is_once else self._options.admission
        if is_once and self._options.group is not None and not self._has_warned:
            self._has_warned = True
            warn(
                "%s, and ends without noting it in group %s: the query's next run with the same "
                "checkpoint notes it",
                *(ONE_MICRO_BATCH, self._options.group),
            )
        begin = self.session.position if start is None else StreamOffsets.parse(start)
        if begin is None:
            return self.session.everything().as_json()
        return self.session.next(begin, admission).as_json()

    def reportLatestOffset(self) -> dict[str, Any] | None:
        """The figures for the query's progress: see `OffsetSourceSession.latest`."""
        return self.session.latest()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[OffsetPartition]:
        """Plan how executors read the messages between two offsets. Errors as `latestOffset`."""
        return self.session.plan(StreamOffsets.parse(start), StreamOffsets.parse(end))

    def commit(self, end: dict[str, Any]) -> None:
        """Note that the checkpoint has an offset."""
        self.session.note_logged(StreamOffsets.parse(end))

    def read(self, partition: OffsetPartition) -> Iterator[pa.RecordBatch]:  # type: ignore[override]
        """Read one partition, on an executor. Errors as `read_partition`."""
        return read_partition(self._options, partition, self._schema)

    def stop(self) -> None:
        """Close the connections."""
        if self._session is not None:
            self._session.close()


@plain_errors
class PgQueueOffsetBatchReader(DataSourceReader):
    """Reads a range of streams, once."""

    def __init__(self, options: OffsetSourceOptions, schema: StructType):
        self._options = options
        self._schema = schema
        self._first_plan = FirstPlan(f"stream {options.title}")

    def partitions(self) -> list[OffsetPartition]:  # type: ignore[override]
        """Find the range, and plan how executors read it.

        Raises:
            PgQueueError: a place does not exist; retention deleted messages of the range, and
                failOnDataLoss is true; or Postgres stayed away too long.
        """
        data = data_type(self._schema)
        streams = Streams(self._options, self._options.retry_timeout.total_seconds(), data)
        try:
            begun = {name: streams.begin(name, "earliest") for name in streams.find()}
            ends = {name: streams.end(name, begun[name]) for name in begun}
            partitions = streams.partitions(StreamOffsets(begun), StreamOffsets(ends))
            return partitions or [OffsetPartition(())]  # for no partition, Spark makes its own
        finally:
            streams.close()

    def read(self, partition: OffsetPartition) -> Iterator[pa.RecordBatch]:  # type: ignore[override]
        """Read one partition, on an executor. Errors as `FirstPlan.check` and `read_partition`."""
        self._first_plan.check()
        return read_partition(self._options, partition, self._schema)


def read_partition(
    options: OffsetSourceOptions, partition: OffsetPartition, schema: StructType
) -> Iterator[pa.RecordBatch]:
    """The messages of a partition, in the order of each stream.

    Raises:
        PgQueueError: messages are gone, and failOnDataLoss is true; or Postgres stayed away too
            long.
    """
    patience = options.retry_timeout.total_seconds()

    def batches() -> Iterator[pa.RecordBatch]:
        for part in partition.parts:
            constant = {"stream": part.stream} if options.has_several else {}
            if isinstance(part, ArchivedPartition):
                rows = yield from read_archived(part, options, schema, constant)
            else:
                batches = read_rows(options.url, patience, part, schema, constant)
                rows = yield from completed(batches, part, options, schema, constant)
            check_complete(part, rows, options.fail_on_data_loss)

    return closing_after(batches(), options.url, options.max_connections)
