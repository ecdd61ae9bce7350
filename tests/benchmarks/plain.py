"""What Spark's source is compared with: the least that a Python source can do.

`plain` reads a table by ranges of its key, as Arrow with ADBC; `nothing` has batches without rows.
Executors import this module, so that a connection outlives a task, as the queue's does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

import pyarrow as pa
from adbc_driver_manager import dbapi as adbc
from adbc_driver_postgresql import dbapi
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.streaming.datasource import SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

SCHEMA = (
    "seq long not null, inserted_at timestamp not null, "
    "key string, data string not null, headers string"
)

_connections: dict[str, adbc.Connection] = {}


@dataclass(frozen=True)
class Slice(InputPartition):
    """Rows lo <= seq < hi."""

    lo: int
    hi: int


class Plain(DataSource):
    """Options: url; rows in the table; batch, of how many rows; partitions of it."""

    @classmethod
    def name(cls) -> str:
        return "plain"

    def schema(self) -> str:
        return SCHEMA

    def streamReader(self, schema: StructType) -> PlainReader:
        return PlainReader(self.options, schema)


class PlainReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Offsets are sequence numbers."""

    def __init__(self, options: Mapping[str, str], schema: StructType):
        self._url = options["url"]
        self._rows, self._batch = int(options["rows"]), int(options["batch"])
        self._partitions = int(options["partitions"])
        self._schema = schema

    def prepareForTriggerAvailableNow(self) -> None:
        pass

    def initialOffset(self) -> dict:
        return {"seq": 1}

    def latestOffset(self, start: dict, limit: object) -> dict:
        return {"seq": min(start["seq"] + self._batch, self._rows + 1)}

    def partitions(self, start: dict, end: dict) -> list[Slice]:
        rows, count = end["seq"] - start["seq"], self._partitions
        bounds = [start["seq"] + rows * each // count for each in range(count + 1)]
        return [Slice(lo, hi) for lo, hi in pairwise(bounds)]

    def read(self, partition: Slice) -> Iterator[pa.RecordBatch]:  # type: ignore[override]
        if self._url not in _connections:
            _connections[self._url] = dbapi.connect(self._url)
        target = to_arrow_schema(self._schema, timezone="UTC")
        with _connections[self._url].cursor() as cursor:
            cursor.adbc_statement.set_options(
                **{"adbc.postgresql.batch_size_hint_bytes": str(8 << 20)}
            )
            cursor.execute(
                "select seq, inserted_at, key, data, headers::text from plain "
                f"where seq >= {partition.lo} and seq < {partition.hi}"
            )
            for batch in cursor.fetch_record_batch():
                yield pa.RecordBatch.from_arrays(batch.columns, schema=target)


class Nothing(DataSource):
    """Option batches: how many there are."""

    @classmethod
    def name(cls) -> str:
        return "nothing"

    def schema(self) -> str:
        return SCHEMA

    def streamReader(self, schema: StructType) -> NothingReader:
        return NothingReader(int(self.options["batches"]))


class NothingReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Offsets are numbers of batches; each has one partition, without rows."""

    def __init__(self, batches: int):
        self._batches = batches

    def prepareForTriggerAvailableNow(self) -> None:
        pass

    def initialOffset(self) -> dict:
        return {"batch": 0}

    def latestOffset(self, start: dict, limit: object) -> dict:
        return {"batch": min(start["batch"] + 1, self._batches)}

    def partitions(self, start: dict, end: dict) -> list[InputPartition]:
        return [InputPartition(0)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:  # type: ignore[override]
        return iter(())
