"""The readers of streams without a consumer: as a stream, and once as a batch.

Spark's checkpoint alone says how far a query is; nothing is kept in Postgres. `CursorSession` holds
what lives in the driver-side process of a streaming query; see `source` for who calls what.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader
from pyspark.sql.types import StructType

from spark_pgqueue.spark.admission import Admission
from spark_pgqueue.spark.cursor_offset import CursorOffset
from spark_pgqueue.spark.cursor_session import CursorSession
from spark_pgqueue.spark.cursor_streams import Streams
from spark_pgqueue.spark.options import CursorOptions
from spark_pgqueue.spark.partitions import CursorPartition
from spark_pgqueue.spark.plain import plain_errors
from spark_pgqueue.spark.reading import check_complete, closing_after, read_rows
from spark_pgqueue.spark.source import NO_LIMIT
from spark_pgqueue.spark.versions import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

if TYPE_CHECKING:
    import pyarrow as pa


@plain_errors
class PgQueueCursorReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads streams as they grow, by offsets in Spark's checkpoint."""

    def __init__(self, options: CursorOptions, schema: StructType):
        self._options = options
        self._schema = schema
        self._session: CursorSession | None = None

    @property
    def session(self) -> CursorSession:
        """The state of the driver-side process, made on first use."""
        if self._session is None:
            self._session = CursorSession(self._options, self._schema)
        return self._session

    def initialOffset(self) -> dict[str, Any]:
        """The offset before the first batch: where it begins, says that batch's end."""
        return CursorOffset().as_json()

    def getDefaultReadLimit(self) -> ReadLimit:
        """What maxMessagesPerTrigger says; never all, which is what trigger(once=True) asks for."""
        return ReadMaxRows(self._options.max_messages_per_trigger or NO_LIMIT)

    def prepareForTriggerAvailableNow(self) -> None:
        """From now on read what is published now, and nothing that is published later."""
        self.session.stop_at_what_is_published()

    def latestOffset(
        self, start: dict[str, Any] | None = None, limit: ReadLimit | None = None
    ) -> dict[str, Any]:
        """Say where the next micro-batch ends.

        PySpark 4.0 and 4.1 give no arguments: see `CursorSession.position`.

        Raises:
            PgQueueError: retention was faster, and failOnDataLoss is true; the checkpoint is of
                another stream, or of other streams; or Postgres stayed away too long.
        """
        is_once = isinstance(limit, ReadAllAvailable)
        admission = Admission() if is_once else self._options.admission
        begin = self.session.position if start is None else CursorOffset.parse(start)
        if begin is None:
            return self.session.everything().as_json()
        return self.session.next(begin, admission).as_json()

    def reportLatestOffset(self) -> dict[str, Any] | None:
        """What the query's progress shows: see `CursorSession.latest`."""
        return self.session.latest()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[CursorPartition]:
        """Plan how the executors read what is between two offsets. Errors as `latestOffset`."""
        return self.session.plan(CursorOffset.parse(start), CursorOffset.parse(end))

    def commit(self, end: dict[str, Any]) -> None:
        """Note that the checkpoint has an offset."""
        self.session.note_logged(CursorOffset.parse(end))

    def read(self, partition: CursorPartition) -> Iterator[pa.RecordBatch]:  # type: ignore[override]
        """Read one partition, on an executor. Errors as `read_partition`."""
        return read_partition(self._options, partition, self._schema)

    def stop(self) -> None:
        """Let go of connections."""
        if self._session is not None:
            self._session.close()


@plain_errors
class PgQueueCursorBatchReader(DataSourceReader):
    """Reads a range of streams, once."""

    def __init__(self, options: CursorOptions, schema: StructType):
        self._options = options
        self._schema = schema

    def partitions(self) -> list[CursorPartition]:  # type: ignore[override]
        """Find the range, and plan how the executors read it.

        Raises:
            PgQueueError: a place is none; retention took a part of the range, and failOnDataLoss is
                true; or Postgres stayed away too long.
        """
        data = self._schema["data"].dataType.simpleString()
        streams = Streams(self._options, self._options.retry_timeout.total_seconds(), data)
        try:
            begun = {name: streams.begin(name, "earliest") for name in streams.find()}
            ends = {name: streams.end(name, begun[name]) for name in begun}
            partitions = streams.partitions(CursorOffset(begun), CursorOffset(ends))
            return partitions or [CursorPartition(())]  # for none, Spark makes one of its own
        finally:
            streams.close()

    def read(self, partition: CursorPartition) -> Iterator[pa.RecordBatch]:  # type: ignore[override]
        """Read one partition, on an executor. Errors as `read_partition`."""
        return read_partition(self._options, partition, self._schema)


def read_partition(
    options: CursorOptions, partition: CursorPartition, schema: StructType
) -> Iterator[pa.RecordBatch]:
    """The messages of a partition, in order of each stream.

    Raises:
        PgQueueError: messages are gone, and failOnDataLoss is true; or Postgres stayed away too
            long.
    """
    patience = options.retry_timeout.total_seconds()

    def batches() -> Iterator[pa.RecordBatch]:
        for piece in partition.pieces:
            constant = {"stream": piece.stream} if options.has_several else {}
            rows = yield from read_rows(options.url, patience, piece, schema, constant)
            check_complete(piece, rows, options.fail_on_data_loss)

    return closing_after(batches(), options.url, options.max_connections)
