"""The data source "pgqueue": what Spark asks for first."""

from __future__ import annotations

from collections.abc import MutableMapping

from pyspark.sql.datasource import DataSource
from pyspark.sql.types import StructType

from spark_pgqueue.postgres.errors import PgQueueError
from spark_pgqueue.printable import warn
from spark_pgqueue.spark.columns import check_source_schema, source_schema
from spark_pgqueue.spark.consumer import find_stream
from spark_pgqueue.spark.looking import PgQueueTableReader, table_reader
from spark_pgqueue.spark.options import (
    as_pending,
    names_table,
    parse_sink,
    parse_source,
    parse_table,
)
from spark_pgqueue.spark.sink import PgQueueBatchWriter, PgQueueStreamWriter
from spark_pgqueue.spark.source import PgQueueStreamReader
from spark_pgqueue.spark.tables import find_for, table_schema


class PgQueueDataSource(DataSource):
    """Reads a consumer with `readStream`, tables of a queue with `read`; writes a stream.

    Options: see `spark_pgqueue.spark.options`.
    """

    def __init__(self, options: MutableMapping[str, str]):
        self._given = options

    @classmethod
    def name(cls) -> str:
        """The format's name."""
        return "pgqueue"

    def schema(self) -> StructType:
        """The source's columns, or a table's: `data` is binary for a stream of that kind.

        Raises:
            PgQueueError: an option is wrong, the stream or the consumer does not exist, or Postgres
                cannot be reached.
        """
        if names_table(self._given):
            table = parse_table(self._given)
            stream = find_for(table)
            return table_schema(table, stream.kind if stream else None)
        options = parse_source(self._given)
        return source_schema(find_stream(options).kind, options.include_headers)

    def reader(self, schema: StructType) -> PgQueueTableReader:
        """The reader of a table: of what a consumer has pending, where none is named.

        Raises:
            PgQueueError: an option is wrong, the stream or the consumer does not exist, or the user
                specified another schema than the table's.
        """
        if names_table(self._given):
            return table_reader(parse_table(self._given), schema)
        options = parse_source(self._given)
        # Spark asks for the columns before it says which of read and readStream it is for.
        columns = source_schema("text", options.include_headers).names
        pending = table_reader(as_pending(self._given, columns), schema)
        warn(
            "spark.read of consumer %s looks at what it has pending, and claims nothing: "
            'option("table", "pending") says so, and tells more; readStream claims',
            options.consumer,
        )
        return pending

    def streamReader(self, schema: StructType) -> PgQueueStreamReader:
        """The reader of a consumer.

        Raises:
            PgQueueError: the user specified another schema than the source's.
        """
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
