"""The stream source: it reads streams without a consumer, as a stream or once as a batch.

Only Spark's checkpoint has the query's position; Postgres stores nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSourceReader
from pyspark.sql.types import StructType

from spark_pgqueue.spark.columns import data_type
from spark_pgqueue.spark.driver.micro_batches import MicroBatchReader
from spark_pgqueue.spark.executor.archive import completed, read_archived
from spark_pgqueue.spark.executor.reading import check_complete, closing_after, read_rows
from spark_pgqueue.spark.executor.stale_plan import PlanGuard
from spark_pgqueue.spark.options.stream_source import StreamSourceOptions
from spark_pgqueue.spark.partitions import ArchivedPartition, OffsetPartition
from spark_pgqueue.spark.platform.error_format import plain_errors
from spark_pgqueue.spark.platform.pyspark_compat import ONE_MICRO_BATCH
from spark_pgqueue.spark.stream_source.batches import StreamBatches
from spark_pgqueue.spark.stream_source.offsets import StreamOffsets
from spark_pgqueue.spark.stream_source.streams import Streams

if TYPE_CHECKING:
    import pyarrow as pa


@plain_errors
class PgQueueStreamsReader(MicroBatchReader):
    """Reads streams as they grow, by offsets in Spark's checkpoint."""

    offset_type = StreamOffsets
    _options: StreamSourceOptions

    def _make_batches(self) -> StreamBatches:
        return StreamBatches(self._options, self._schema)

    def _warning_of_the_end(self, knows_start: bool, is_once: bool) -> str | None:
        if not is_once or self._options.group is None:
            return None
        return (
            f"{ONE_MICRO_BATCH}, and ends without noting it in group {self._options.group}: the "
            "query's next run with the same checkpoint notes it"
        )

    def read(self, partition: OffsetPartition) -> Iterator[pa.RecordBatch]:  # type: ignore[override]
        """Read one partition, on an executor. Errors as `read_partition`."""
        return read_partition(self._options, partition, self._schema)


@plain_errors
class PgQueueStreamsBatchReader(DataSourceReader):
    """Reads a range of streams, once."""

    def __init__(self, options: StreamSourceOptions, schema: StructType):
        self._options = options
        self._schema = schema
        self._plan_guard = PlanGuard(f"stream {options.title}")

    def partitions(self) -> list[OffsetPartition]:  # type: ignore[override]
        """Find the range, and plan how executors read it. Errors as `Streams`."""
        data = data_type(self._schema)
        patience = self._options.retry_timeout.total_seconds()
        with closing(Streams(self._options, patience, data)) as streams:
            begun = {name: streams.begin(name, "earliest") for name in streams.find()}
            ends = {name: streams.end(name, begun[name]) for name in begun}
            partitions = streams.partitions(StreamOffsets(begun), StreamOffsets(ends))
            return partitions or [OffsetPartition(())]  # for no partition, Spark makes its own

    def read(self, partition: OffsetPartition) -> Iterator[pa.RecordBatch]:  # type: ignore[override]
        """Read one partition, on an executor. Errors as `PlanGuard.check`, `read_partition`."""
        self._plan_guard.check()
        return read_partition(self._options, partition, self._schema)


def read_partition(
    options: StreamSourceOptions, partition: OffsetPartition, schema: StructType
) -> Iterator[pa.RecordBatch]:
    """The messages of a partition, in the order of each stream. Messages that are gone are an error
    if failOnDataLoss is true.
    """
    patience = options.retry_timeout.total_seconds()

    def batches() -> Iterator[pa.RecordBatch]:
        for part in partition.parts:
            constant = {"stream": part.stream} if options.has_several else {}
            if isinstance(part, ArchivedPartition):
                found = read_archived(part, options, schema, constant)
            else:
                found = read_rows(options.url, patience, part, schema, constant)
                found = completed(found, part, options, schema, constant)
            rows = 0
            for batch in found:
                rows += batch.num_rows
                yield batch
            check_complete(part, rows, options.fail_on_data_loss)

    return closing_after(batches(), options.url, options.max_connections)
