"""The stream reader of a consumer: options become claims, claims partitions, partitions rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pyspark

from spark_pgqueue.spark.consumer_source.batches import ConsumerBatches, Offset
from spark_pgqueue.spark.driver.micro_batches import MicroBatchReader
from spark_pgqueue.spark.executor.reading import closing_after, read_claimed
from spark_pgqueue.spark.options.source import SourceOptions
from spark_pgqueue.spark.partitions import ClaimedPartition
from spark_pgqueue.spark.platform.error_format import plain_errors
from spark_pgqueue.spark.platform.process import exit_at_sigterm
from spark_pgqueue.spark.platform.pyspark_compat import ONE_MICRO_BATCH, local_property

if TYPE_CHECKING:
    import pyarrow as pa


@plain_errors
class PgQueueConsumerReader(MicroBatchReader):
    """Claims and reads the messages of one consumer."""

    offset_type = Offset
    _options: SourceOptions

    def _make_batches(self) -> ConsumerBatches:
        if self._options.checkpoint_location is not None:
            exit_at_sigterm()
        return ConsumerBatches(self._options, self._schema)

    def _warning_of_the_end(self, knows_start: bool, is_once: bool) -> str | None:
        if self._options.checkpoint_location is not None:
            return None
        if not knows_start:
            return (
                f"PySpark {pyspark.__version__} does not tell a source of its trigger: after a run "
                "with trigger(availableNow=True) or trigger(once=True) the last micro-batch stays "
                "claimed until the query's next run, or until its visibilityTimeout passes and "
                "another claimer asks for it; with the option checkpointLocation here, it is "
                "acknowledged when the query ends"
            )
        if is_once:
            return (
                f"{ONE_MICRO_BATCH}, and ends without acknowledging it: its messages stay claimed "
                "until the query's next run with the same checkpoint, or until their "
                "visibilityTimeout passes and another claimer asks for them; with the option "
                "checkpointLocation here, they are acknowledged when the query ends"
            )
        return None

    def read(self, partition: ClaimedPartition) -> Iterator[pa.RecordBatch]:  # type: ignore[override]
        """Read one partition, on an executor.

        Raises:
            PgQueueError: messages are gone, and failOnDataLoss is true; the query reads the
                consumer twice; its lease ended, and another claimer has messages of the
                partition's batch; or Postgres stayed away too long.
        """
        query_id = local_property("sql.streaming.queryId")
        batches = read_claimed(self._options, partition, self._schema, query_id)
        return closing_after(batches, self._options.url, self._options.max_connections)
