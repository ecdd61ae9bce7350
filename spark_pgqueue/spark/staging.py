"""Staging rows, on executors, and publishing what was staged, on the driver."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, NoReturn

from pyspark.sql.datasource import WriterCommitMessage
from pyspark.sql.types import StructType

from spark_pgqueue.postgres.adbc import call, kept_connection
from spark_pgqueue.postgres.errors import (
    NOT_ALLOWED,
    UNFIT_DATA,
    PgQueueError,
    Said,
    sqlstate_of,
    translate,
)
from spark_pgqueue.postgres.retrying import with_backoff
from spark_pgqueue.postgres.statements import Statements
from spark_pgqueue.spark.columns import check_columns
from spark_pgqueue.spark.options import SINK_NAMES, SinkOptions
from spark_pgqueue.spark.rows import chunks, group, to_messages

if TYPE_CHECKING:
    import pyarrow as pa
    from adbc_driver_manager import dbapi


@dataclass(frozen=True)
class Staged(WriterCommitMessage):
    """What a task tells the driver.

    Attributes:
        sink: the sink's identity.
        staged: the ids of its staged chunks.
        rows: how many rows they hold.
        is_repeated: whether nothing was staged because the batch, or a later one, was published
            before.
    """

    sink: str
    staged: tuple[int, ...]
    rows: int
    is_repeated: bool = False


class Target:
    """The stream that is written to, and the columns that it takes."""

    def __init__(self, options: SinkOptions, schema: StructType):
        self._options = options
        self._patience = options.retry_timeout.total_seconds()
        statements = self._statements()
        try:
            self._stream_id, self._kind = statements.row(
                "select stream_id, kind from pgqueue.open_sink(%s, %s::text[])",
                [options.stream, self._consumers()],
            )
        except PgQueueError as error:
            if error.argument == "p_consumers":
                error.hint = "name consumers of this stream, or remove the option to publish to all"
            raise
        finally:
            statements.close()
        self._columns = check_columns(schema, options.stream, self._kind)

    def stage(
        self, batches: Iterator[pa.RecordBatch], sink: str, batch: int, skip_published: bool = False
    ) -> Staged:
        """Copy rows into the stream's table, unpublished.

        Args:
            batches: the rows.
            sink: the sink's identity.
            batch: the number of its batch.
            skip_published: whether to stage nothing where the batch, or a later one, was published
                before. A query's batch is counted once more instead: whether it is the same.
        """
        if skip_published and self._is_published(sink, batch):
            return Staged(sink, (), 0, is_repeated=True)
        staged, rows = [], 0
        for chunk in chunks(batches):
            messages = to_messages(chunk.rename_columns(self._columns), self._kind)
            # A chunk is staged again when its connection broke, even if it had been committed: only
            # the ids that reach `publish` count.
            staged += with_backoff(
                lambda messages=messages: self._store(messages, sink, batch),
                self._options.url,
                self._patience,
            )
            rows += chunk.num_rows
        return Staged(sink, tuple(staged), rows)

    def publish(self, messages: list[Staged | None], batch: int) -> bool:
        """Make everything that the tasks staged visible at once.

        Returns:
            whether it was this call; False when the batch, or a later one, was published before.
        """
        tasks = [message for message in messages if message is not None]
        staged = [each for task in tasks for each in task.staged]
        if not staged:
            return not any(task.is_repeated for task in tasks)
        statements = Statements(self._options.url, patience=0, names=SINK_NAMES.get)
        sent = 0

        def publish() -> bool:
            nonlocal sent
            statements.connection()
            sent += 1
            (published,) = statements.row(
                "select pgqueue.publish_staged(%s, %s, %s, %s::bigint[], %s, %s::text[])",
                [
                    tasks[0].sink,
                    batch,
                    self._stream_id,
                    staged,
                    sum(task.rows for task in tasks),
                    self._consumers(),
                ],
            )
            # When it is sent again, what was published before is what was sent the first time.
            return published or sent > 1

        try:
            return with_backoff(publish, self._options.url, self._patience)
        finally:
            statements.close()

    def _is_published(self, sink: str, batch: int) -> bool:
        def ask() -> bool:
            with kept_connection(self._options.url, patience=0) as conn, conn.cursor() as cursor:
                sql = "select pgqueue.is_published($1, $2::int4, $3)"
                return call(cursor, sql, (sink, self._stream_id, batch))[0][0]

        return with_backoff(ask, self._options.url, self._patience)

    def _store(self, rows: pa.Table, sink: str, batch: int) -> list[int]:
        """Copy one chunk in one transaction; returns the ids under which its groups are staged."""
        try:
            with kept_connection(self._options.url, patience=0) as conn, conn.cursor() as cursor:
                seqs = reserve(cursor, self._stream_id, rows.num_rows)
                rows, groups = group(rows, seqs)
                cursor.adbc_ingest(
                    f"messages_{self._stream_id}",
                    rows.append_column("seq", seqs),
                    mode="append",
                    db_schema_name="pgqueue",
                )
                blocks = json.dumps([asdict(each) for each in groups])
                staged = call(
                    cursor,
                    "select pgqueue.stage($1, $2, $3::int4, b.seqs::int8multirange, "
                    "b.priority::int4, to_timestamp(b.deliver_at), b.dedup_keys) "
                    "from json_to_recordset($4::text::json) "
                    "as b (seqs text, priority int8, deliver_at int8, dedup_keys text[])",
                    (sink, batch, self._stream_id, blocks),
                )
                conn.commit()
                return [block for (block,) in staged]
        except Exception as error:
            self._raise_unfit(error)

    def _statements(self) -> Statements:
        return Statements(
            self._options.url, patience=self._patience, repeat=True, names=SINK_NAMES.get
        )

    def _consumers(self) -> list[str] | None:
        return None if self._options.consumers is None else list(self._options.consumers)

    def _raise_unfit(self, error: Exception) -> NoReturn:
        """Name column or stream when Postgres refused a row; else raise the error as it is."""
        if (known := translate(error, SINK_NAMES.get)) is not None:
            raise known from None
        code, said = sqlstate_of(error), Said.by(error)
        if code == "22003":
            raise PgQueueError(
                f"column priority holds a number that is no priority: {said.message}",
                sqlstate=NOT_ALLOWED,
            ) from None
        # Not valid JSON, not valid text (a NUL character), or a check of the stream's table.
        if code in ("22P02", "22021", "22P05", "23502", "23514"):
            # The rest of the context quotes what is in the row.
            where = re.search(
                r"^COPY \w+, line \d+, (column \w+)", said.context or "", re.MULTILINE
            )
            raise PgQueueError(
                f"a row does not fit stream {self._options.stream} of kind {self._kind}: "
                f"{said.message}" + (f" ({where[1]})" if where else ""),
                hint="text and json hold no NUL character, json must be valid, headers are an "
                "object and a key has at most 1024 bytes; a binary stream takes any bytes",
                sqlstate=UNFIT_DATA,
            ) from None
        raise error


def reserve(cursor: dbapi.Cursor, stream_id: int, count: int) -> pa.Int64Array:
    """So many new sequence numbers of a stream, ascending, without a lock."""
    import pyarrow as pa
    import pyarrow.compute as pc

    ranges = call(
        cursor,
        "select lower(r), upper(r) from unnest(pgqueue.reserve($1::int4, $2::int4)) r",
        (stream_id, count),
    )
    return pa.concat_arrays(
        [
            pc.call_function(
                "cumulative_sum",
                [pa.repeat(pa.scalar(1, pa.int64()), hi - lo)],
                pc.CumulativeOptions(start=lo - 1),
            )
            for lo, hi in ranges
        ]
    )
