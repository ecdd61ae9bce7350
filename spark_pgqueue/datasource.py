"""The data source "pgqueue": what Spark asks for first, and the schema."""

from __future__ import annotations

from collections.abc import MutableMapping

from pyspark.sql.datasource import DataSource
from pyspark.sql.types import (
    BinaryType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from spark_pgqueue.errors import PgQueueError
from spark_pgqueue.options import parse_sink, parse_source
from spark_pgqueue.sink import PgQueueBatchWriter, PgQueueStreamWriter
from spark_pgqueue.source import PgQueueStreamReader, find_stream


class PgQueueDataSource(DataSource):
    """Reads a consumer with `readStream`, writes a stream with `writeStream` and `write`.

    Options: see `spark_pgqueue.options`.
    """

    def __init__(self, options: MutableMapping[str, str]):
        self._given = options

    @classmethod
    def name(cls) -> str:
        """The format's name."""
        return "pgqueue"

    def schema(self) -> StructType:
        """The source's columns: `data` is binary for a stream of that kind, else string.

        Raises:
            PgQueueError: an option is wrong, the stream or the consumer does not exist, or Postgres
                cannot be reached.
        """
        options = parse_source(self._given)
        return source_schema(find_stream(options).kind, options.include_headers)

    def reader(self, schema: StructType):
        """Not there: a consumer's messages are claimed by a query, one micro-batch after another.

        Raises:
            PgQueueError: always.
        """
        raise PgQueueError(
            "pgqueue cannot be read with spark.read",
            hint="use spark.readStream with trigger(availableNow=True) to read what is there and "
            "stop, or the view pgqueue.message_states to look at messages without claiming them",
        )

    def streamReader(self, schema: StructType) -> PgQueueStreamReader:
        """The reader of a consumer.

        Raises:
            PgQueueError: the user specified another schema than the source's.
        """
        options = parse_source(self._given)
        _check_schema(schema, options.include_headers)
        return PgQueueStreamReader(options, schema)

    def streamWriter(self, schema: StructType, overwrite: bool) -> PgQueueStreamWriter:
        """The writer of one micro-batch.

        Raises:
            PgQueueError: an option or a column is wrong, or the stream does not exist.
        """
        options = parse_sink(self._given, streaming=True)
        if overwrite:
            raise PgQueueError(
                "outputMode complete cannot be written to a stream of messages",
                hint='use outputMode("append"), or foreachBatch with df.write',
            )
        return PgQueueStreamWriter(options, schema)

    def writer(self, schema: StructType, overwrite: bool) -> PgQueueBatchWriter:
        """The writer of one DataFrame.

        Raises:
            PgQueueError: an option or a column is wrong, or the stream does not exist.
        """
        options = parse_sink(self._given, streaming=False)
        if overwrite:
            raise PgQueueError(
                'mode("overwrite") cannot be written to a stream of messages',
                hint='use mode("append")',
            )
        return PgQueueBatchWriter(options, schema)


def source_schema(kind: str, include_headers: bool) -> StructType:
    """The columns of a stream of this kind (text, json or binary)."""
    data = BinaryType() if kind == "binary" else StringType()
    columns = [
        StructField("seq", LongType(), nullable=False),
        StructField("key", StringType()),
        StructField("data", data, nullable=False),
        StructField("headers", MapType(StringType(), StringType())),
        StructField("priority", IntegerType(), nullable=False),
        StructField("deliver_count", IntegerType(), nullable=False),
        StructField("inserted_at", TimestampType(), nullable=False),
    ]
    return StructType([c for c in columns if include_headers or c.name != "headers"])


def _check_schema(schema: StructType, include_headers: bool) -> None:
    allowed = [source_schema(kind, include_headers) for kind in ("text", "binary")]
    if _types(schema) not in [_types(each) for each in allowed]:
        raise PgQueueError(
            f"the schema of pgqueue cannot be chosen: given {schema.simpleString()}, must be "
            f"{allowed[0].simpleString()}",
            hint="remove schema(...) from readStream, and use select() afterwards",
        )


def _types(schema: StructType) -> list[tuple]:
    return [(field.name, field.dataType) for field in schema.fields]
