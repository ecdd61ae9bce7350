"""What Spark's source and sink are compared with: the least that a Python source or sink can do.

`plain` reads a table by ranges of its key, as Arrow with ADBC, and writes one by COPY, a
transaction for each task; `nothing` has batches without rows, and forgets what is written to it;
`ready` has batches that are in memory before Spark asks.
Executors import this module, so that a connection outlives a task, as the queue's does.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, pairwise

import pyarrow as pa
from adbc_driver_manager import dbapi as adbc
from adbc_driver_postgresql import dbapi
from pyarrow import parquet
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
    InputPartition,
    WriterCommitMessage,
)
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.streaming.datasource import SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

SCHEMA = (
    "seq long not null, inserted_at timestamp not null, "
    "key string, data string not null, headers string"
)

_connections: dict[str, adbc.Connection] = {}


def connection(url: str) -> adbc.Connection:
    """The connection of this process."""
    if url not in _connections:
        _connections[url] = dbapi.connect(url)
    return _connections[url]


@dataclass(frozen=True)
class Slice(InputPartition):
    """Rows lo <= seq < hi."""

    lo: int
    hi: int


class Plain(DataSource):
    """Options: url; to read: rows in the table; batch, of how many rows; partitions of it."""

    @classmethod
    def name(cls) -> str:
        return "plain"

    def schema(self) -> str:
        return SCHEMA

    def reader(self, schema: StructType) -> PlainBatchReader:
        return PlainBatchReader(PlainReader(self.options, schema))

    def streamReader(self, schema: StructType) -> PlainReader:
        return PlainReader(self.options, schema)

    def streamWriter(self, schema: StructType, overwrite: bool) -> PlainWriter:
        return PlainWriter(self.options["url"])


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
        target = to_arrow_schema(self._schema, timezone="UTC")
        with connection(self._url).cursor() as cursor:
            cursor.adbc_statement.set_options(
                **{"adbc.postgresql.batch_size_hint_bytes": str(8 << 20)}
            )
            cursor.execute(
                "select seq, inserted_at, key, data, headers::text from plain "
                f"where seq >= {partition.lo} and seq < {partition.hi}"
            )
            for batch in cursor.fetch_record_batch():
                yield pa.RecordBatch.from_arrays(batch.columns, schema=target)


class PlainBatchReader(DataSourceReader):
    """Reads the first batch of the other one."""

    def __init__(self, reader: PlainReader):
        self._reader = reader

    def partitions(self) -> list[Slice]:  # type: ignore[override]
        start = self._reader.initialOffset()
        return self._reader.partitions(start, self._reader.latestOffset(start, None))

    def read(self, partition: Slice) -> Iterator[pa.RecordBatch]:  # type: ignore[override]
        return self._reader.read(partition)


class Nothing(DataSource):
    """Options: batches, how many there are; done, a datagram socket for a byte at each commit."""

    @classmethod
    def name(cls) -> str:
        return "nothing"

    def schema(self) -> str:
        return SCHEMA

    def streamReader(self, schema: StructType) -> NothingReader:
        return NothingReader(int(self.options["batches"]))

    def streamWriter(self, schema: StructType, overwrite: bool) -> NothingWriter:
        return NothingWriter(self.options.get("done"))


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


class Ready(DataSource):
    """Options: file, of Parquet; columns, separated by commas; rows, of all tasks."""

    @classmethod
    def name(cls) -> str:
        return "ready"

    def _table(self) -> pa.Table:
        with parquet.ParquetFile(self.options["file"]) as file:
            return file.read_row_group(0, columns=self.options["columns"].split(","))

    def schema(self) -> StructType:
        return from_arrow_schema(self._table().schema)

    def reader(self, schema: StructType) -> ReadyReader:
        (batch,) = self._table().combine_chunks().to_batches()
        return ReadyReader(batch, int(self.options["rows"]))


class ReadyReader(DataSourceReader):
    """Two tasks return the same batch again and again."""

    def __init__(self, batch: pa.RecordBatch, rows: int):
        self._batch, self._rows = batch, rows

    def partitions(self) -> list[Slice]:  # type: ignore[override]
        half = self._rows // 2
        return [Slice(0, half), Slice(half, self._rows)]

    def read(self, partition: Slice) -> Iterator[pa.RecordBatch]:  # type: ignore[override]
        for at in range(partition.lo, partition.hi, self._batch.num_rows):
            yield self._batch.slice(0, partition.hi - at)


class Signalled(DataSource):
    """Option socket: the path of a datagram socket, made here; what comes there is a batch."""

    @classmethod
    def name(cls) -> str:
        return "signalled"

    def schema(self) -> str:
        return SCHEMA

    def streamReader(self, schema: StructType) -> SignalledReader:
        return SignalledReader(self.options["socket"])


class SignalledReader(DataSourceStreamReader):
    """Offsets are numbers of batches, as those of `nothing`."""

    def __init__(self, path: str):
        self._path = path
        self._socket: socket.socket | None = None

    def initialOffset(self) -> dict:
        return {"batch": 0}

    def latestOffset(self, start: dict, limit: object) -> dict:
        if self._socket is None:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            self._socket.bind(self._path)
            self._socket.settimeout(1)
        try:
            self._socket.recv(1)
        except TimeoutError:
            return start
        return {"batch": start["batch"] + 1}

    def partitions(self, start: dict, end: dict) -> list[InputPartition]:
        return [InputPartition(0)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:  # type: ignore[override]
        return iter(())


@dataclass
class Written(WriterCommitMessage):
    """What a task wrote."""

    rows: int


class NothingWriter(DataSourceStreamArrowWriter):
    """Counts the rows."""

    def __init__(self, done: str | None):
        self._done = done

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        return Written(sum(batch.num_rows for batch in iterator))

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        if self._done is not None:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as done:
                done.sendto(b"x", self._done)


class PlainWriter(DataSourceStreamArrowWriter):
    """Copies the rows of a task into the table plain as they come."""

    def __init__(self, url: str):
        self._url = url

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        first = next(iterator)
        rows = pa.RecordBatchReader.from_batches(first.schema, chain([first], iterator))
        with connection(self._url).cursor() as cursor:
            count = cursor.adbc_ingest("plain", rows, mode="append")
        connection(self._url).commit()
        return Written(count)
