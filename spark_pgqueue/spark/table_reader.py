"""The batch readers: `spark.read` looks into a queue, and changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSourceReader
from pyspark.sql.types import StructType

from spark_pgqueue.spark.consumer import Stream
from spark_pgqueue.spark.first_plan import FirstPlan
from spark_pgqueue.spark.options import TableOptions
from spark_pgqueue.spark.plain_errors import plain_errors
from spark_pgqueue.spark.reading import closing_after
from spark_pgqueue.spark.scanning import Scan, TablePartition, plan, read_table
from spark_pgqueue.spark.tables import Where, check_table_schema, table_schema

if TYPE_CHECKING:
    import pyarrow as pa


@plain_errors
class PgQueueTableReader(DataSourceReader):
    """Reads a table of a queue: planned on the driver, and pickled to executors."""

    def __init__(
        self, options: TableOptions, stream: Stream | None, where: Where | None, schema: StructType
    ):
        check_table_schema(schema, table_schema(options, stream.kind if stream else None))
        self._scan = Scan(options, stream, where, schema)
        of = "" if options.stream is None else f" of stream {options.stream}"
        self._first_plan = FirstPlan(f"table {options.table}{of}")

    def partitions(self) -> list[TablePartition]:  # type: ignore[override]
        """Plan the reading. All partitions of most tables show the queue as it is now.

        Raises:
            PgQueueError: see `scanning.plan`.
        """
        return plan(self._scan)

    def read(self, partition: TablePartition) -> Iterator[pa.RecordBatch]:  # type: ignore[override]
        """Read one partition, on an executor.

        Raises:
            PgQueueError: a micro-batch reads with the plan of another one; or see
                `scanning.read_table`.
        """
        self._first_plan.check()
        # For a plan without partitions Spark makes a partition of another class.
        rows = (
            read_table(self._scan, partition) if isinstance(partition, TablePartition) else iter(())
        )
        options = self._scan.options
        return closing_after(rows, options.url, options.max_connections)
