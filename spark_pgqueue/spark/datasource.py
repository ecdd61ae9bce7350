"""The data source "pgqueue": the entry point of Spark."""

from __future__ import annotations

from collections.abc import MutableMapping
from contextlib import closing
from typing import Any

from pyspark.sql.datasource import DataSource
from pyspark.sql.types import StructType

from spark_pgqueue.postgres.errors import NOT_ALLOWED, PgQueueError
from spark_pgqueue.postgres.statements import Statements
from spark_pgqueue.printable import warn
from spark_pgqueue.spark.columns import Stream, check_schema, columns_of, kind_of, source_schema
from spark_pgqueue.spark.consumer_source.consumer import find_stream
from spark_pgqueue.spark.consumer_source.reader import PgQueueConsumerReader
from spark_pgqueue.spark.options.checking import is_given
from spark_pgqueue.spark.options.sink import parse_sink
from spark_pgqueue.spark.options.source import SOURCE_NAMES, SourceOptions, parse_source
from spark_pgqueue.spark.options.stream_source import StreamSourceOptions, parse_stream_source
from spark_pgqueue.spark.options.table import TableOptions, as_pending, parse_table
from spark_pgqueue.spark.platform.error_format import plain_errors
from spark_pgqueue.spark.sink.writers import PgQueueBatchWriter, PgQueueStreamWriter
from spark_pgqueue.spark.stream_source.reader import PgQueueStreamsBatchReader, PgQueueStreamsReader
from spark_pgqueue.spark.stream_source.streams import Streams
from spark_pgqueue.spark.table_source.reader import PgQueueTableReader
from spark_pgqueue.spark.table_source.tables import Where, find_for, table_schema


@plain_errors
class PgQueueDataSource(DataSource):
    """Reads a consumer with `readStream`, streams without one with `readStream` and `read`, and
    tables of a queue with `read`; writes streams and tables with `writeStream` and `write`.

    Options: see `spark_pgqueue.spark.options`. Each method raises a PgQueueError for an option, a
    column or a schema that is wrong, and for a stream, a consumer or a table that does not exist.
    """

    def __init__(self, options: MutableMapping[str, str]):
        self._given = options
        self._looked: tuple[TableOptions, Stream, Where | None] | None = None
        self._is_copy = False

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._is_copy = True

    @classmethod
    def name(cls) -> str:
        """The format's name."""
        return "pgqueue"

    def _table(self) -> tuple[TableOptions, Stream, Where | None]:
        """The options, stream and condition of a table; Spark keeps them with this object."""
        if self._looked is None:
            options = parse_table(self._given)
            self._looked = options, *find_for(options)
        return self._looked

    def schema(self) -> StructType:
        """The columns of the source or of a table: `data` is binary for a binary stream."""
        if is_given("table", self._given):
            options, stream, _ = self._table()
            return table_schema(options, stream.kind)
        if not is_given("consumer", self._given):
            options = parse_stream_source(self._given)
            # No patience: this is load(), and a user who mistyped the host waits for the error.
            with closing(Streams(options, patience=0)) as streams:
                return columns_of(options, kind_of(streams.find()), _find_schema(options))
        options = parse_source(self._given)
        return columns_of(options, find_stream(options).kind, _find_schema(options))

    def reader(self, schema: StructType) -> PgQueueTableReader | PgQueueStreamsBatchReader:
        """The reader of a table, of a consumer's pending messages, or of a range of streams."""
        if is_given("table", self._given):
            return PgQueueTableReader(*self._table(), schema)
        if not is_given("consumer", self._given):
            options = parse_stream_source(self._given, streaming=False)
            check_schema(schema, options)
            return PgQueueStreamsBatchReader(options, schema)
        options = parse_source(self._given)
        # Spark requests the columns before it is known whether they are for read or readStream.
        columns = source_schema("text", options.include_headers).names
        pending = as_pending(self._given, columns)
        reader = PgQueueTableReader(pending, *find_for(pending), schema)
        warn(
            "spark.read of consumer %s shows its pending messages, and claims nothing: "
            'option("table", "pending") makes that explicit and has more columns; readStream '
            "claims",
            options.consumer,
        )
        return reader

    def streamReader(self, schema: StructType) -> PgQueueConsumerReader | PgQueueStreamsReader:
        """The stream reader of a consumer, or of streams without one."""
        if not is_given("consumer", self._given):
            options = parse_stream_source(self._given, streaming=True)
            check_schema(schema, options)
            return PgQueueStreamsReader(options, schema)
        options = parse_source(self._given)
        check_schema(schema, options)
        return PgQueueConsumerReader(options, schema)

    def streamWriter(self, schema: StructType, overwrite: bool) -> PgQueueStreamWriter:
        """The writer of one micro-batch.

        Spark calls this twice for each batch: for the tasks, and in a process that has a pickled
        copy of this object, for the commit.
        """
        options = parse_sink(self._given, streaming=True)
        if overwrite:
            raise PgQueueError(
                "outputMode complete cannot be written to a stream of messages, nor to a table",
                hint='use outputMode("append"), or foreachBatch with df.write',
            )
        return PgQueueStreamWriter(options, schema, begins=not self._is_copy)

    def writer(self, schema: StructType, overwrite: bool) -> PgQueueBatchWriter:
        """The writer of one DataFrame."""
        options = parse_sink(self._given, streaming=False)
        if overwrite:
            raise PgQueueError(
                'mode("overwrite") cannot be written to a stream of messages, nor to a table',
                hint='use mode("append")',
            )
        return PgQueueBatchWriter(options, schema)


def _find_schema(options: SourceOptions | StreamSourceOptions) -> StructType | None:
    """The columns of the stream's schema, which it must have, for option typed; None without it."""
    if options.typed is None:
        return None
    with closing(Statements(options.url, patience=0, names=SOURCE_NAMES.get)) as statements:
        (schema,) = statements.row("select pgqueue.schema_of(%s)", [options.stream])
    if schema is None:
        raise PgQueueError(
            f"option typed is given, but stream {options.stream!r} has no schema",
            hint="pgqueue stream set STREAM schema='id bigint not null, name string'; or read data "
            "with from_json",
            sqlstate=NOT_ALLOWED,
        )
    return StructType.fromJson(schema)
