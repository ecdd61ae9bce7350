"""What PySpark 4.0 and 4.1 lack, so that source and sink can be written for 4.2 alone.

These versions request the latest offset from a source without passing the query's position. A
reader gets the position from `partitions`, which Spark calls first for the last offset of its log
(`partitions(x, x)`), and then for each batch. The trigger availableNow runs one micro-batch, as the
trigger once does.
"""

from __future__ import annotations

import inspect
from importlib.util import find_spec
from typing import TYPE_CHECKING

from pyspark import TaskContext
from pyspark.sql import datasource
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

TELLS_START = find_spec("pyspark.sql.streaming.datasource") is not None
"""Whether Spark passes the query's position to a source, as 4.2 and later do."""

if TYPE_CHECKING or TELLS_START:
    from pyspark.sql.streaming.datasource import (
        ReadAllAvailable,
        ReadLimit,
        ReadMaxRows,
        SupportsTriggerAvailableNow,
    )
else:  # only names: these versions pass no limits

    class ReadLimit: ...

    class ReadAllAvailable(ReadLimit): ...

    class ReadMaxRows(ReadLimit):
        def __init__(self, max_rows: int):
            self.max_rows = max_rows

    class SupportsTriggerAvailableNow: ...


if TYPE_CHECKING or hasattr(datasource, "DataSourceStreamArrowWriter"):
    from pyspark.sql.datasource import DataSourceStreamArrowWriter
else:  # PySpark 4.0 gives Arrow to a writer that is also a DataSourceArrowWriter

    class DataSourceStreamArrowWriter(
        datasource.DataSourceStreamWriter, datasource.DataSourceArrowWriter
    ): ...


if TYPE_CHECKING:
    import pyarrow as pa

ONE_MICRO_BATCH = (
    "Spark runs one micro-batch, because of trigger(once=True), or because another source of the "
    "query, such as rate, has no availableNow"
)
"""The meaning of ReadAllAvailable, for a warning: Spark does not report the batch as committed."""

__all__ = [
    "ONE_MICRO_BATCH",
    "TELLS_START",
    "DataSourceStreamArrowWriter",
    "ReadAllAvailable",
    "ReadLimit",
    "ReadMaxRows",
    "SupportsTriggerAvailableNow",
    "arrow_schema",
    "local_property",
]


def local_property(name: str) -> str | None:
    """A property of the task that Spark runs here; None without it, or outside of a task."""
    context = TaskContext.get()
    return context.getLocalProperty(name) if context else None


_NAMES_TIMEZONE = "timezone" in inspect.signature(to_arrow_schema).parameters


def arrow_schema(schema: StructType) -> pa.Schema:
    """The Arrow types that Spark expects of a source; times are in UTC."""
    return to_arrow_schema(schema, timezone="UTC") if _NAMES_TIMEZONE else to_arrow_schema(schema)
