"""The data source "pgqueue": what Spark asks for first."""

from __future__ import annotations

from collections.abc import MutableMapping
from uuid import uuid4

from pyspark.sql.datasource import DataSource
from pyspark.sql.types import StructType

from spark_pgqueue.postgres.errors import PgQueueError
from spark_pgqueue.printable import warn
from spark_pgqueue.spark.columns import (
    check_cursor_schema,
    check_source_schema,
    cursor_schema,
    source_schema,
)
from spark_pgqueue.spark.consumer import Stream, find_stream
from spark_pgqueue.spark.cursor import PgQueueCursorBatchReader, PgQueueCursorReader
from spark_pgqueue.spark.cursor_streams import find_streams, kind_of
from spark_pgqueue.spark.looking import PgQueueTableReader, table_reader
from spark_pgqueue.spark.options import (
    TableOptions,
    as_pending,
    names_table,
    parse_cursor,
    parse_sink,
    parse_source,
    parse_table,
)
from spark_pgqueue.spark.plain import plain_errors
from spark_pgqueue.spark.sink import PgQueueBatchWriter, PgQueueStreamWriter
from spark_pgqueue.spark.source import PgQueueStreamReader
from spark_pgqueue.spark.tables import find_for, table_schema


@plain_errors
class PgQueueDataSource(DataSource):
    """Reads a consumer with `readStream`, streams without one with `readStream` and `read`, and
    tables of a queue with `read`; writes a stream with `writeStream` and `write`.

    Options: see `spark_pgqueue.spark.options`.
    """

    def __init__(self, options: MutableMapping[str, str]):
        self._given = options
        self._load = str(uuid4())
        self._looked: tuple[TableOptions, Stream | None] | None = None

    @classmethod
    def name(cls) -> str:
        """The format's name."""
        return "pgqueue"

    def _table(self) -> tuple[TableOptions, Stream | None]:
        """The options of a table, and its stream; Spark keeps them with this object."""
        if self._looked is None:
            options = parse_table(self._given)
            self._looked = options, find_for(options)
        return self._looked

    @property
    def _has_consumer(self) -> bool:
        return any(name.lower() == "consumer" for name in self._given)

    def schema(self) -> StructType:
        """The source's columns, or a table's: `data` is binary for a stream of that kind.

        Raises:
            PgQueueError: an option is wrong, the stream or the consumer does not exist, or Postgres
                cannot be reached.
        """
        if names_table(self._given):
            options, stream = self._table()
            return table_schema(options, stream.kind if stream else None)
        if not self._has_consumer:
            cursor = parse_cursor(self._given)
            kind = kind_of(find_streams(cursor))
            return cursor_schema(kind, cursor.include_headers, cursor.has_several)
        options = parse_source(self._given)
        kind = find_stream(options).kind
        return source_schema(kind, options.include_headers, options.has_arrival)

    def reader(self, schema: StructType) -> PgQueueTableReader | PgQueueCursorBatchReader:
        """The reader of a table, of what a consumer has pending, or of a range of streams.

        Raises:
            PgQueueError: an option is wrong, the stream or the consumer does not exist, or the user
                specified another schema.
        """
        if names_table(self._given):
            return table_reader(*self._table(), schema, self._load)
        if not self._has_consumer:
            cursor = parse_cursor(self._given, streaming=False)
            check_cursor_schema(schema, cursor.include_headers, cursor.has_several)
            return PgQueueCursorBatchReader(cursor, schema)
        options = parse_source(self._given)
        # Spark asks for the columns before it says which of read and readStream it is for.
        columns = source_schema("text", options.include_headers).names
        pending = as_pending(self._given, columns)
        reader = table_reader(pending, find_for(pending), schema, self._load)
        warn(
            "spark.read of consumer %s looks at what it has pending, and claims nothing: "
            'option("table", "pending") says so, and tells more; readStream claims',
            options.consumer,
        )
        return reader

    def streamReader(self, schema: StructType) -> PgQueueStreamReader | PgQueueCursorReader:
        """The reader of a consumer, or of streams without one.

        Raises:
            PgQueueError: the user specified another schema than the source's.
        """
        if not self._has_consumer:
            cursor = parse_cursor(self._given, streaming=True)
            check_cursor_schema(schema, cursor.include_headers, cursor.has_several)
            return PgQueueCursorReader(cursor, schema)
        options = parse_source(self._given)
        check_source_schema(schema, options.include_headers, options.has_arrival)
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
