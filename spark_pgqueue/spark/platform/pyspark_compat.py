"""What PySpark 4.0 and 4.1 lack, so that source and sink can be written for 4.2 alone.

These versions ask a source for its latest offset without saying where the query is. A reader learns
that from `partitions`, which Spark calls first for the last offset of its log (`partitions(x, x)`),
and then for each batch. The trigger availableNow runs one micro-batch, as once does.
"""

from __future__ import annotations

import inspect
from importlib.util import find_spec
from typing import TYPE_CHECKING

from pyspark.sql import datasource
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

TELLS_START = find_spec("pyspark.sql.streaming.datasource") is not None
"""Whether Spark tells a source where the query is, as 4.2 and later do."""

if TYPE_CHECKING or TELLS_START:
    from pyspark.sql.streaming.datasource import (
        ReadAllAvailable,
        ReadLimit,
        ReadMaxRows,
        SupportsTriggerAvailableNow,
    )
else:  # only names: these versions ask for no limits

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
"""What ReadAllAvailable means, for a warning: Spark never says that the batch is committed."""

__all__ = [
    "ONE_MICRO_BATCH",
    "TELLS_START",
    "DataSourceStreamArrowWriter",
    "ReadAllAvailable",
    "ReadLimit",
    "ReadMaxRows",
    "SupportsTriggerAvailableNow",
    "arrow_schema",
]

_NAMES_TIMEZONE = "timezone" in inspect.signature(to_arrow_schema).parameters


def arrow_schema(schema: StructType) -> pa.Schema:
    """The Arrow types that Spark expects of a source; times are in UTC."""
    return to_arrow_schema(schema, timezone="UTC") if _NAMES_TIMEZONE else to_arrow_schema(schema)
