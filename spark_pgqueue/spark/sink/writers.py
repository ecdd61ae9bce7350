"""The writers: executors stage rows, and the driver publishes them.

Executors copy their rows into Postgres, chunk by chunk, each in a short transaction with a row that
records the sequence numbers. These messages are invisible until the driver publishes them, in one
short transaction that names all staged chunks of the batch. The transaction does nothing if the
same sink has published the batch before. A write that fails deletes its chunks. The next write of
the batch deletes those of a write that was killed, or `pgqueue.maintain()` does after a day.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING
from uuid import uuid4

from pyspark.sql.datasource import DataSourceArrowWriter
from pyspark.sql.types import StructType

from spark_pgqueue.postgres.errors import PgQueueError
from spark_pgqueue.printable import warn
from spark_pgqueue.spark.options.sink import SinkOptions
from spark_pgqueue.spark.platform.error_format import plain_errors
from spark_pgqueue.spark.platform.pyspark_compat import DataSourceStreamArrowWriter, local_property
from spark_pgqueue.spark.sink.stream_writer import Staged, StreamWriter

if TYPE_CHECKING:
    import pyarrow as pa


@plain_errors
class PgQueueStreamWriter(DataSourceStreamArrowWriter):
    """Writes a micro-batch, exactly once by the query's id and the batch's number."""

    def __init__(self, options: SinkOptions, schema: StructType, begins: bool = True):
        self._writer = StreamWriter(options, schema, begins)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Staged:
        """Stage the rows of a task, on an executor; a row that does not fit is an error."""
        query_id = local_property("sql.streaming.queryId")
        batch = local_property("streaming.sql.batchId")
        if query_id is None or batch is None:
            raise PgQueueError(
                "this version of Spark does not pass the ids of the query and batch to the sink",
                hint="use foreachBatch with df.write, and options txnAppId and txnVersion",
            )
        return self._writer.stage(iterator, query_id, int(batch), query_id)

    def commit(self, messages: list[Staged | None], batchId: int) -> None:  # type: ignore[override]
        """Publish the staged chunks, on the driver. Does nothing for a batch that was published
        before.

        Raises:
            PgQueueError: PQ010 when the batch is older than the last published batch, or is the
                last one with other rows or to another stream; PQ001 when the stream was dropped
                and made again since.
        """
        self._writer.publish(messages, batchId)

    def abort(self, messages: list[Staged | None], batchId: int) -> None:  # type: ignore[override]
        """Delete what the tasks have staged. Spark also calls this after a commit that failed, and
        maybe while it runs: then the batch is either published or deleted as a whole.
        """
        self._writer.abort(messages, batchId)


@plain_errors
class PgQueueBatchWriter(DataSourceArrowWriter):
    """Writes a DataFrame: all or nothing; once per txnAppId and txnVersion if these are given."""

    def __init__(self, options: SinkOptions, schema: StructType):
        self._writer = StreamWriter(options, schema)
        # Spark pickles this object, so tasks and commit see one identity. The query id is no
        # identity in foreachBatch: a second write in the same batch has it too.
        self._sink = f"txn:{options.txn_app_id}" if options.txn_app_id else f"write:{uuid4()}"
        self._batch = options.txn_version or 0

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Staged:
        """Stage the rows of a task, on an executor."""
        query_id = local_property("sql.streaming.queryId")
        return self._writer.stage(iterator, self._sink, self._batch, query_id, skip_published=True)

    def commit(self, messages: list[Staged | None]) -> None:  # type: ignore[override]
        """Publish the staged chunks, on the driver. Errors as in `PgQueueStreamWriter`."""
        if not self._writer.publish(messages, self._batch):
            warn(
                "txnVersion %s of %s, or a later one, was published before: nothing was written",
                *(self._batch, self._sink),
            )

    def abort(self, messages: list[Staged | None]) -> None:  # type: ignore[override]
        """Delete what the tasks have staged, as in `PgQueueStreamWriter`."""
        self._writer.abort(messages, self._batch)
