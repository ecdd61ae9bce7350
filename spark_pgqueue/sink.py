"""The writers: rows are staged by the executors and published by the driver.

Executors copy their rows into the stream's table, chunk by chunk, each in a short transaction with
a row that says which sequence numbers it used. Nobody sees such messages before the driver
publishes them: one short transaction that names all staged chunks of the batch, and does nothing
when the same sink has published that batch before. What was staged and never published is deleted
by `pgqueue.maintain()`.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn
from uuid import uuid4

from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import (
    BinaryType,
    ByteType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    ShortType,
    StringType,
    StructType,
    TimestampType,
)

from spark_pgqueue.arrow import call, connection
from spark_pgqueue.connection import with_backoff
from spark_pgqueue.database import Database
from spark_pgqueue.errors import PgQueueError, sqlstate_of
from spark_pgqueue.options import SinkOptions

if TYPE_CHECKING:
    import pyarrow as pa
    from adbc_driver_manager import dbapi

log = logging.getLogger("spark_pgqueue")

CHUNK_ROWS = 50_000
CHUNK_BYTES = 16 << 20
"""A task holds one chunk in memory, and copies it again if Postgres goes away meanwhile."""


@dataclass(frozen=True)
class Staged(WriterCommitMessage):
    """What a task tells the driver.

    Attributes:
        sink: the sink's identity.
        staged: the ids of its staged chunks.
        rows: how many rows they hold.
        is_repeated: whether nothing was staged because the batch was published before.
    """

    sink: str
    staged: tuple[int, ...]
    rows: int
    is_repeated: bool = False


class PgQueueStreamWriter(DataSourceStreamArrowWriter):
    """Writes a micro-batch, exactly once by the query's id and the batch's number."""

    def __init__(self, options: SinkOptions, schema: StructType):
        self._target = Target(options, schema)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Staged:
        """Stage the rows of a task, on an executor.

        Raises:
            PgQueueError: a row does not fit the stream, or Postgres stayed away too long.
        """
        context = TaskContext.get()
        query_id = context.getLocalProperty("sql.streaming.queryId") if context else None
        batch = context.getLocalProperty("streaming.sql.batchId") if context else None
        if query_id is None or batch is None:
            raise PgQueueError(
                "this version of Spark does not tell the sink which query and batch it writes",
                hint="use foreachBatch with df.write, and options txnAppId and txnVersion",
            )
        return self._target.stage(iterator, query_id, int(batch))

    def commit(self, messages: list[Staged | None], batchId: int) -> None:  # type: ignore[override]
        """Publish what the tasks staged, on the driver. Does nothing when it was published before.

        Raises:
            PgQueueError: Postgres stayed away too long.
        """
        self._target.publish(messages, batchId)

    def abort(self, messages: list[Staged | None], batchId: int) -> None:  # type: ignore[override]
        """Nothing: it is also called after a commit that failed, and may run beside one."""


class PgQueueBatchWriter(DataSourceArrowWriter):
    """Writes a DataFrame: all or nothing; once per txnAppId and txnVersion if these are given."""

    def __init__(self, options: SinkOptions, schema: StructType):
        self._target = Target(options, schema)
        # Spark pickles this object, so tasks and commit see one identity. The query id that a task
        # finds in foreachBatch is none: a second write in the same batch has it too.
        self._sink = f"txn:{options.txn_app_id}" if options.txn_app_id else f"write:{uuid4()}"
        self._batch = options.txn_version or 0

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Staged:
        """Stage the rows of a task, on an executor. Errors as in `PgQueueStreamWriter`."""
        return self._target.stage(iterator, self._sink, self._batch)

    def commit(self, messages: list[Staged | None]) -> None:  # type: ignore[override]
        """Publish what the tasks staged, on the driver. Errors as in `PgQueueStreamWriter`."""
        if any(message is not None and message.is_repeated for message in messages):
            log.warning(
                "txnVersion %s of %s, or a later one, was published before: nothing was written",
                *(self._batch, self._sink),
            )
        self._target.publish(messages, self._batch)

    def abort(self, messages: list[Staged | None]) -> None:  # type: ignore[override]
        """Nothing, as in `PgQueueStreamWriter`."""


class Target:
    """The stream that is written to, and the columns that it takes."""

    def __init__(self, options: SinkOptions, schema: StructType):
        self._options = options
        database = Database(options.url)
        try:
            self._stream_id, self._kind = database.row(
                "select stream_id, kind from pgqueue.open_sink(%s, %s::text[])",
                [options.stream, self._consumers()],
            )
        except PgQueueError as error:
            if "p_consumers" not in error.message:
                raise
            raise PgQueueError(
                error.message.replace("p_consumers", "option consumers"),
                hint="name consumers of this stream, or remove the option to publish to all",
                sqlstate=error.sqlstate,
            ) from None
        finally:
            database.close()
        self._columns = check_columns(schema, options.stream, self._kind)

    def stage(self, batches: Iterator[pa.RecordBatch], sink: str, batch: int) -> Staged:
        """Copy rows into the stream's table, unpublished."""
        if self._is_published(sink, batch):
            return Staged(sink, (), 0, is_repeated=True)
        staged, rows = [], 0
        for chunk in chunks(batches):
            messages = to_messages(chunk.rename_columns(self._columns), self._kind)
            # A chunk is staged again when its connection broke, even if it had been committed: only
            # the ids that reach `publish` count.
            staged += with_backoff(
                lambda messages=messages: self._store(messages, sink, batch), self._options.url
            )
            rows += chunk.num_rows
        return Staged(sink, tuple(staged), rows)

    def publish(self, messages: list[Staged | None], batch: int) -> None:
        """Make everything that the tasks staged visible at once."""
        tasks = [message for message in messages if message is not None]
        staged = [each for task in tasks for each in task.staged]
        if not staged:
            return
        database = Database(self._options.url)
        try:
            database.row(
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
        finally:
            database.close()

    def _is_published(self, sink: str, batch: int) -> bool:
        def ask() -> bool:
            with connection(self._options.url, patience=0) as conn, conn.cursor() as cursor:
                sql = "select pgqueue.is_published($1, $2::int4, $3)"
                return call(cursor, sql, (sink, self._stream_id, batch))[0][0]

        return with_backoff(ask, self._options.url)

    def _store(self, rows: pa.Table, sink: str, batch: int) -> list[int]:
        """Copy one chunk in one transaction; returns the ids under which its groups are staged."""
        rows, groups = sort_into_groups(rows)
        try:
            with connection(self._options.url, patience=0) as conn, conn.cursor() as cursor:
                seqs = reserve(cursor, self._stream_id, rows.num_rows)
                cursor.adbc_ingest(
                    f"messages_{self._stream_id}",
                    rows.append_column("seq", seqs),
                    mode="append",
                    db_schema_name="pgqueue",
                )
                blocks = [
                    {
                        "seqs": multirange(seqs.slice(each.first, each.rows)),
                        "priority": each.priority,
                        "deliver_at": each.deliver_at,
                    }
                    for each in groups
                ]
                staged = call(
                    cursor,
                    "select pgqueue.stage($1, $2, $3::int4, b.seqs::int8multirange, "
                    "b.priority::int4, to_timestamp(b.deliver_at)) "
                    "from json_to_recordset($4::text::json) "
                    "as b (seqs text, priority int8, deliver_at int8)",
                    (sink, batch, self._stream_id, json.dumps(blocks)),
                )
                conn.commit()
                return [block for (block,) in staged]
        except Exception as error:
            self._raise_unfit(error)

    def _consumers(self) -> list[str] | None:
        return None if self._options.consumers is None else list(self._options.consumers)

    def _raise_unfit(self, error: Exception) -> NoReturn:
        """Name column or stream when Postgres refused a row; else raise the error as it is."""
        code, details = sqlstate_of(error), dict(getattr(error, "details", None) or [])
        said = details.get(b"PG_DIAG_MESSAGE_PRIMARY", b"").decode()
        if code == "PQ003" and re.match("p_(priority|deliver_at) ", said):
            raise PgQueueError(f"column {said[2:]}", sqlstate=code) from None
        if code == "22003":
            raise PgQueueError(
                f"column priority holds a number that is no priority: {said}", sqlstate="PQ003"
            ) from None
        # Not valid JSON, not valid text (a NUL character), or a check of the stream's table.
        if code in ("22P02", "22021", "22P05", "23502", "23514"):
            where = details.get(b"PG_DIAG_CONTEXT", b"").decode().splitlines()
            raise PgQueueError(
                f"a row does not fit stream {self._options.stream} of kind {self._kind}: {said}"
                + (f" ({where[-1][:200]})" if where else ""),
                hint="text and json hold no NUL character, json must be valid, headers are an "
                "object and a key has at most 1024 bytes; a binary stream takes any bytes",
                sqlstate="PQ004",
            ) from None
        raise error


@dataclass(frozen=True)
class Group:
    """Rows [first, first + rows) of a chunk, which are published with one priority and time."""

    first: int
    rows: int
    priority: int = 0
    deliver_at: int | None = None
    """Seconds since 1970."""


_INTEGERS = (ByteType, ShortType, IntegerType, LongType)

# What each column may be, in words and in types; data depends on the stream's kind.
_COLUMNS: dict[str, tuple[str, tuple[type[DataType], ...]]] = {
    "data": ("", ()),
    "key": ("string", (StringType,)),
    "headers": ("map<string,string>, or string with a JSON object", (MapType, StringType)),
    "priority": ("int", _INTEGERS),
    "deliver_at": ("timestamp", (TimestampType,)),
}


def check_columns(schema: StructType, stream: str, kind: str) -> list[str]:
    """The columns of a DataFrame, by the names that the queue has for them.

    Raises:
        PgQueueError: data is missing, or a column has another name or type than the allowed.
    """
    hints = {
        "text": "cast(data as string), or to_json(struct(...)) as data",
        "json": "to_json(struct(...)) as data",
        "binary": "cast(data as binary)",
    }
    data = ("binary", (BinaryType,)) if kind == "binary" else ("string", (StringType,))
    allowed = {**_COLUMNS, "data": data}
    names = [field.name.lower() for field in schema.fields]
    if "data" not in names:
        raise PgQueueError(
            f"column data is missing: the DataFrame has {', '.join(schema.names) or 'no columns'}",
            hint=f"select {hints[kind]}",
        )
    for name, field in zip(names, schema.fields, strict=True):
        if name not in allowed:
            raise PgQueueError(
                f"column {field.name} is none of a message's: {', '.join(allowed)}",
                hint="drop it, or put it into data: to_json(struct(...)) as data",
            )
        if names.count(name) > 1:
            raise PgQueueError(f"column {field.name} is there twice", hint="drop one of them")
        words, types = allowed[name]
        is_map = isinstance(field.dataType, MapType)
        if not isinstance(field.dataType, types) or (
            is_map and field.dataType.simpleString() != "map<string,string>"
        ):
            of = f" for stream {stream}, which holds {kind}" if name == "data" else ""
            raise PgQueueError(
                f"column {field.name} is {field.dataType.simpleString()}, and must be {words}{of}",
                hint=f"select {hints[kind]}" if name == "data" else f"cast {field.name}",
            )
    return names


def chunks(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.Table]:
    """Join small Arrow batches, up to CHUNK_ROWS or CHUNK_BYTES, whichever is reached first."""
    import pyarrow as pa

    waiting: list[pa.RecordBatch] = []
    for batch in batches:
        if batch.num_rows:
            waiting.append(batch)
        if (
            sum(each.num_rows for each in waiting) >= CHUNK_ROWS
            or sum(each.nbytes for each in waiting) >= CHUNK_BYTES
        ):
            yield pa.Table.from_batches(waiting)
            waiting = []
    if waiting:
        yield pa.Table.from_batches(waiting)


def to_messages(rows: pa.Table, kind: str) -> pa.Table:
    """Rows as the stream's table takes them: data_bytes for a binary stream, headers as jsonb.

    Raises:
        PgQueueError: data is null somewhere.
    """
    nulls = rows["data"].null_count
    if nulls:
        raise PgQueueError(
            f"column data is null in {nulls} of {rows.num_rows} rows",
            hint="filter them out: where data is not null",
        )
    if "headers" in rows.column_names:
        index = rows.column_names.index("headers")
        rows = rows.set_column(index, "headers", _to_jsonb(rows["headers"]))
    names = [
        "data_bytes" if name == "data" and kind == "binary" else name for name in rows.column_names
    ]
    return rows.rename_columns(names)


def sort_into_groups(rows: pa.Table) -> tuple[pa.Table, list[Group]]:
    """Rows without priority and deliver_at, ordered so that those with the same ones are together.

    Each group becomes a publication of its own, so times are rounded up to full seconds.
    """
    import pyarrow as pa

    given = [name for name in ("priority", "deliver_at") if name in rows.column_names]
    if not given:
        return rows, [Group(0, rows.num_rows)]
    keys = pa.table({"row": pa.array(range(rows.num_rows), pa.int64())})
    if "priority" in given:
        keys = keys.append_column("priority", rows["priority"].cast(pa.int64()).fill_null(0))
    if "deliver_at" in given:
        keys = keys.append_column("deliver_at", _rounded_up(rows["deliver_at"]))
    found = keys.group_by(given, use_threads=False).aggregate([("row", "list")]).to_pylist()
    groups, first = [], 0
    for each in found:
        size = len(each["row_list"])
        groups.append(Group(first, size, each.get("priority", 0), each.get("deliver_at")))
        first += size
    order = [row for each in found for row in each["row_list"]]
    return rows.drop_columns(given).take(pa.array(order, pa.int64())), groups


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


def multirange(seqs: pa.Int64Array) -> str:
    """Ascending numbers as the text of an int8multirange: '{[1,4),[6,7)}'."""
    first, last = seqs[0].as_py(), seqs[-1].as_py()
    if last - first == len(seqs) - 1:  # as nearly always
        return f"{{[{first},{last + 1})}}"
    ranges: list[list[int]] = []
    for seq in seqs.to_pylist():
        if ranges and ranges[-1][1] == seq:
            ranges[-1][1] += 1
        else:
            ranges.append([seq, seq + 1])
    return "{" + ",".join(f"[{lo},{hi})" for lo, hi in ranges) + "}"


def _rounded_up(times: pa.ChunkedArray) -> pa.ChunkedArray:
    """Times as seconds since 1970."""
    import pyarrow as pa
    import pyarrow.compute as pc

    options = pc.RoundTemporalOptions(unit="second")
    full = pc.call_function("ceil_temporal", [times], options)
    return full.cast(pa.timestamp("s", times.type.tz)).cast(pa.int64())


def _to_jsonb(headers: pa.ChunkedArray) -> pa.Array:
    """Headers as COPY takes jsonb in binary: a version byte, and the JSON text."""
    import pyarrow as pa

    if headers.null_count == len(headers):
        return pa.nulls(len(headers), pa.binary())
    return pa.array(
        [
            None
            if each is None
            else b"\x01" + (each if isinstance(each, str) else json.dumps(dict(each))).encode()
            for each in headers.to_pylist()
        ],
        pa.binary(),
    )
