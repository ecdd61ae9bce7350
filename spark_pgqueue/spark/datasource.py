"""The data source "pgqueue": what Spark asks for first."""

from __future__ import annotations

from collections.abc import MutableMapping

from pyspark.sql.datasource import DataSource
from pyspark.sql.types import StructType

from spark_pgqueue.postgres.errors import PgQueueError
from spark_pgqueue.spark.columns import (
    check_cursor_schema,
    check_source_schema,
    cursor_schema,
    source_schema,
)
from spark_pgqueue.spark.consumer import find_stream
from spark_pgqueue.spark.cursor import PgQueueCursorBatchReader, PgQueueCursorReader
from spark_pgqueue.spark.cursor_streams import find_streams, kind_of
from spark_pgqueue.spark.options import parse_cursor, parse_sink, parse_source
from spark_pgqueue.spark.sink import PgQueueBatchWriter, PgQueueStreamWriter
from spark_pgqueue.spark.source import PgQueueStreamReader


class PgQueueDataSource(DataSource):
    """Reads a consumer with `readStream`, or streams without one with `readStream` and `read`;
    writes a stream with `writeStream` and `write`.

    Options: see `spark_pgqueue.spark.options`.
    """

    def __init__(self, options: MutableMapping[str, str]):
        self._given = options

    @classmethod
    def name(cls) -> str:
        """The format's name."""
        return "pgqueue"

    @property
    def _has_consumer(self) -> bool:
        return any(name.lower() == "consumer" for name in self._given)

    def schema(self) -> StructType:
        """The source's columns: `data` is binary for a stream of that kind, else string.

        Raises:
            PgQueueError: an option is wrong, the stream or the consumer does not exist, or Postgres
                cannot be reached.
        """
        if not self._has_consumer:
            cursor = parse_cursor(self._given)
            kind = kind_of(find_streams(cursor))
            return cursor_schema(kind, cursor.include_headers, cursor.has_several)
        options = parse_source(self._given)
        return source_schema(find_stream(options).kind, options.include_headers)

    def reader(self, schema: StructType) -> PgQueueCursorBatchReader:
        """The reader of a range of streams. There is none of a consumer: its messages are claimed
        by a query, one micro-batch after another.

        Raises:
            PgQueueError: it is of a consumer; or the user specified another schema.
        """
        if not self._has_consumer:
            cursor = parse_cursor(self._given, streaming=False)
            check_cursor_schema(schema, cursor.include_headers, cursor.has_several)
            return PgQueueCursorBatchReader(cursor, schema)
        raise PgQueueError(
            "a consumer cannot be read with spark.read, which claims nothing",
            hint="remove option consumer to read the stream itself; use spark.readStream with "
            "trigger(availableNow=True) to read what is there and stop, or the view "
            "pgqueue.message_states to look at messages without claiming them",
        )

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
        check_source_schema(schema, options.include_headers)
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
