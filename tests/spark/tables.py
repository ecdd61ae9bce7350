"""Tables as `spark.read` reads them, without Spark: planned, pickled and read as Spark does it."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
from pyspark import cloudpickle
from pyspark.sql.pandas.types import to_arrow_schema

from spark_pgqueue.spark.datasource import PgQueueDataSource


class Look:
    """A table, planned: what is read of it is of the queue as it was then."""

    def __init__(self, url: str, **options: Any):
        given = {name.lower(): str(value) for name, value in {"url": url, **options}.items()}
        source = PgQueueDataSource(given)
        self.schema = source.schema()
        reader = source.reader(self.schema)
        self.parts = reader.partitions()
        self._reader = cloudpickle.loads(cloudpickle.dumps(reader))

    def batches(self) -> list[list[pa.RecordBatch]]:
        """By partition."""
        parts = cloudpickle.loads(cloudpickle.dumps(self.parts))
        found = [list(self._reader.read(part)) for part in parts]
        expected = to_arrow_schema(self.schema, timezone="UTC")
        assert {batch.schema for some in found for batch in some} <= {expected}
        return found

    def rows(self) -> list[dict[str, Any]]:
        """All rows; headers as a dict."""
        rows = [row for some in self.batches() for batch in some for row in batch.to_pylist()]
        for row in rows:
            if row.get("headers") is not None:
                row["headers"] = dict(row["headers"])
        return rows


def look(url: str, table: str, **options: Any) -> list[dict[str, Any]]:
    """The rows of a table; unless it says otherwise, of the stream s."""
    options = {"stream": "s", **options}
    given = {name: value for name, value in options.items() if value is not None}
    return Look(url, table=table, **given).rows()
