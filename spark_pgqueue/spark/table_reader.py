"""The batch readers: `spark.read` looks into a queue, and changes nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from pyspark import TaskContext
from pyspark.sql import datasource
from pyspark.sql.datasource import DataSourceReader
from pyspark.sql.types import StructType

from spark_pgqueue.printable import warn
from spark_pgqueue.spark.consumer import Stream
from spark_pgqueue.spark.first_plan import FirstPlan
from spark_pgqueue.spark.options import TableOptions
from spark_pgqueue.spark.plain_errors import plain_errors
from spark_pgqueue.spark.reading import closing_after
from spark_pgqueue.spark.scanning import Scan, TablePartition, plan, read_table
from spark_pgqueue.spark.tables import check_table_schema, table_schema

if TYPE_CHECKING or hasattr(datasource, "Filter"):  # PySpark 4.0 has none, and asks for none
    from spark_pgqueue.spark.pushdown import Pushed, push

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.datasource import Filter


@plain_errors
class PgQueueTableReader(DataSourceReader):
    """Reads a table of a queue: planned on the driver, and pickled to executors."""

    def __init__(self, options: TableOptions, stream: Stream | None, schema: StructType):
        check_table_schema(schema, table_schema(options, stream.kind if stream else None))
        self._scan = Scan(options, stream, schema)
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


@plain_errors
class PgQueuePushdownReader(PgQueueTableReader):
    """A table reader with filters. Spark refuses `pushFilters` where pushdown is not enabled."""

    def __init__(self, options: TableOptions, stream: Stream | None, schema: StructType, load: str):
        super().__init__(options, stream, schema)
        self._pushed = Pushed(load)
        self._has_filters = False

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        """Take over the filters that the database can evaluate; return the others.

        Raises:
            PgQueueError: another query of the same load() has pushed other filters.
        """
        taken, left = push(filters, self._scan.table)
        self._pushed.note(taken)
        if len(left) < len(filters):
            warn(
                "filters were pushed into a table of pgqueue: Spark keeps them for all that is "
                "read of the same DataFrame from now on, also without them; load() it again for "
                "another query"
            )
            self._has_filters = True
        self._scan = replace(self._scan, filters=taken)
        return left

    def read(self, partition: TablePartition) -> Iterator[pa.RecordBatch]:  # type: ignore[override]
        """Read one partition, on an executor.

        Raises:
            PgQueueError: the filters are of another query; or as `PgQueueTableReader.read`.
        """
        if self._has_filters and (context := TaskContext.get()) is not None:
            self._pushed.check(context.getLocalProperty("spark.sql.execution.id"))
        return super().read(partition)


def make_table_reader(
    options: TableOptions, stream: Stream | None, schema: StructType, load: str
) -> PgQueueTableReader:
    """The reader of a table; `load` is an id of what `load()` returned.

    Raises:
        PgQueueError: the user gave a schema that is not the table's.
    """
    if options.pushdown and hasattr(datasource, "Filter"):
        return PgQueuePushdownReader(options, stream, schema, load)
    return PgQueueTableReader(options, stream, schema)
