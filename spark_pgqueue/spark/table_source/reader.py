"""The batch readers: `spark.read` reads the state of a queue, and changes nothing.

The state of messages and similar columns come as ranges of numbers with columns (`pgqueue.scan`).
The content of messages comes by COPY into Arrow, and never changes. So a planned table shows one
state of the queue, however long the reading takes.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, TypeVar

from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from spark_pgqueue.postgres.adbc import call, kept_connection
from spark_pgqueue.postgres.errors import NO_PERMISSION, PgQueueError, translated
from spark_pgqueue.postgres.payloads import expression, headers_map, numbers, set_up
from spark_pgqueue.spark.columns import Stream, check_is
from spark_pgqueue.spark.executor.reading import (
    asked,
    closing_after,
    count_messages,
    going_on,
    ranges_sql,
    report_loss,
    slices,
)
from spark_pgqueue.spark.executor.stale_plan import PlanGuard
from spark_pgqueue.spark.options.table import TABLE_NAMES, TableOptions
from spark_pgqueue.spark.partitions import KnownRange, cut_behind, partition_count, split
from spark_pgqueue.spark.platform.error_format import plain_errors
from spark_pgqueue.spark.platform.pyspark_compat import arrow_schema
from spark_pgqueue.spark.table_source.tables import (
    HELD,
    TABLES,
    Where,
    blamed_on,
    check_types,
    column,
    messages_sql,
    table_schema,
)

if TYPE_CHECKING:
    import pyarrow as pa
    from adbc_driver_manager import dbapi

T = TypeVar("T")

Bound = list[int] | None
"""A bound of `pgqueue.scan_bounds`; None before the first and after the last."""

ROWS_PER_BATCH = 50_000
"""The size of Arrow batches of rows that no COPY returns."""


@dataclass(frozen=True)
class TablePartition(InputPartition):
    """An input partition of a table."""

    ranges: tuple[KnownRange, ...] = ()  # the messages; each with the number of its row of `known`
    known: pa.Table | None = None  # the known columns; None: the executor queries them
    within: tuple[Bound, Bound] = (None, None)  # the bounds of the executor's query


@plain_errors
class PgQueueTableReader(DataSourceReader):
    """Reads a table of a queue: planned on the driver, and pickled to executors."""

    def __init__(
        self, options: TableOptions, stream: Stream, where: Where | None, schema: StructType
    ):
        allowed = table_schema(options, stream.kind)
        hint = "read, and use option columns, or select() afterwards"
        check_is(schema, [allowed], "a table", hint)
        self._options, self._stream, self._where = options, stream, where
        self._table, self._schema = TABLES[options.table], schema
        named = where.columns if where else ()
        wanted = dict.fromkeys([*schema.names, *named])
        # The columns that are stored with a message, and are returned; and those that are read.
        self._held = [name for name in schema.names if name in HELD]
        self._read = [name for name in HELD if name in wanted]
        # The columns that come with ranges, or with rows that are no messages.
        self._known = [name for name in wanted if name not in ("seq", *HELD)]
        # Whether messages of one range may differ in whether option where holds.
        self._judges_messages = any(name not in self._known for name in named)
        of = "" if options.stream is None else f" of stream {options.stream}"
        self._name = f"table {options.table}{of}"
        self._plan_guard = PlanGuard(self._name)

    def partitions(self) -> list[TablePartition]:  # type: ignore[override]
        """Plan the reading. All partitions of most tables show the queue as it is now."""
        return self._asked(self._plan)

    def read(self, partition: TablePartition) -> Iterator[pa.RecordBatch]:  # type: ignore[override]
        """Read one partition, on an executor; resumed after a broken connection.

        Raises:
            PgQueueError: a micro-batch reads with the plan of another one; messages were deleted
                after the plan was made, and failOnDataLoss is true; or Postgres stayed away too
                long.
        """
        self._plan_guard.check()
        # For a plan without partitions Spark makes a partition of another class.
        rows = self._rows(partition) if isinstance(partition, TablePartition) else iter(())
        return closing_after(rows, self._options.url, self._options.max_connections)

    def _plan(self, cursor: dbapi.Cursor) -> list[TablePartition]:
        if self._where is not None:
            check_types(cursor, self._where, self._stream.kind)
        if self._options.table == "stats":
            return [TablePartition()]
        if self._read:
            self._check_rights(cursor)
        if self._table.shared_out:
            return [TablePartition(within=each) for each in self._shares(cursor)]
        ranges, known = self._look(cursor)
        parts = split(ranges, partition_count(_size(ranges), self._options)) if ranges else []
        return [
            TablePartition(
                tuple(each._replace(no=no) for no, each in enumerate(part)),
                known.take([each.no for each in part]),
            )
            for part in parts
        ]

    def _shares(self, cursor: dbapi.Cursor) -> list[tuple[Bound, Bound]]:
        """The bounds of the shares that executors query."""
        options = self._options

        def divided(count: int) -> list[tuple[int, Bound]]:
            return call(
                cursor,
                "select total, bound from pgqueue.scan_bounds($1, $2, nullif($3, ''), $4)",
                (options.stream, options.table, options.consumer or "", count),
            )

        ((total, _),) = divided(1)
        count = partition_count(total, options)
        bounds = [bound for _, bound in divided(count)] if count > 1 else []
        return list(pairwise([None, *bounds, None])) if total else []

    def _look(
        self, cursor: dbapi.Cursor, within: tuple[Bound, Bound] = (None, None)
    ) -> tuple[list[KnownRange], pa.Table]:
        """The ranges of a table, or of a share, and the known columns of each."""
        import pyarrow as pa

        options = self._options
        given = [options.stream or "", options.consumer or ""]
        if options.table == "stats":
            view = "select 0::int8 as lo, 1::int8 as hi, * from pgqueue.consumer_stats"
            source = f"({view} where $1 in ('', stream) and $2 in ('', consumer)) m"
        else:
            given.append(f"{{{','.join(self._known)}}}")
            source = "pgqueue.scan_claimed($1, nullif($2, ''), $3::text::text[])"
            if options.table != "claimed":
                given += ["" if each is None else f"{{{str(each)[1:-1]}}}" for each in within]
                source = (
                    f"pgqueue.scan($1, '{options.table}', nullif($2, ''), $3::text::text[],"
                    " nullif($4, '')::bigint[], nullif($5, '')::bigint[])"
                )
            types = [f", {name} {column(name)[0]}" for name in self._known]
            source += f" as m (lo int8, hi int8{''.join(types)})"
        if self._where is not None and not self._judges_messages:
            source += f" where ({self._where.condition})"
        cursor.execute(
            f"select {', '.join(['lo', 'hi', *self._known])} from {source}", tuple(given)
        )
        found = cursor.fetch_arrow_table()
        lo, hi = (found[name].to_pylist() for name in ("lo", "hi"))
        typed = arrow_schema(self._table.schema(self._known, self._stream.kind))
        known = found.cast(pa.schema([*list(found.schema)[:2], *typed]))
        return list(map(KnownRange, lo, hi, range(len(lo)))), known

    def _rows(self, part: TablePartition) -> Iterator[pa.RecordBatch]:
        ranges, known = part.ranges, part.known
        if known is None:
            found, known = self._asked(lambda cursor: self._look(cursor, part.within))
            ranges = tuple(found)
        known = known.combine_chunks()
        if not self._table.of_messages:
            yield from known.select(self._schema.names).to_batches()
        elif ranges and (self._held or self._judges_messages):
            yield from self._messages(ranges, known)
        else:
            yield from map(partial(self._made, known), _unfolded(ranges))

    def _messages(
        self, ranges: tuple[KnownRange, ...], known: pa.Table
    ) -> Iterator[pa.RecordBatch]:
        options, outlives, is_whole = self._options, self._table.outlives, not self._judges_messages
        left, seen = ranges, 0

        def rest() -> Generator[pa.RecordBatch]:
            nonlocal left, seen
            patience = options.retry_timeout.total_seconds()
            with (
                blamed_on(options.where),
                kept_connection(options.url, patience) as conn,
                conn.cursor() as cursor,
            ):
                set_up(cursor)
                for some in slices(left):
                    cursor.execute(self._select(some, known))
                    for batch in cursor.fetch_record_batch():
                        if batch.num_rows:
                            batch = _numbered(batch, some)
                            last = (batch[name][-1].as_py() for name in ("seq", "no"))
                            here, behind = cut_behind(left, *last)
                            made = [self._made(known, batch)]
                            if outlives and is_whole:
                                made += map(partial(self._made, known), _deleted(here, batch))
                            left, seen = behind, seen + batch.num_rows
                            yield from made

        yield from going_on(rest, options.url, self._name)
        if outlives and is_whole:
            yield from map(partial(self._made, known), _unfolded(left))
        elif self._read and not outlives:
            if not is_whole:
                seen = self._asked(lambda c: count_messages(c, self._stream.stream_id, ranges))
            if missed := _size(ranges) - seen:
                report_loss(missed, options.stream or "", options.fail_on_data_loss)

    def _select(self, ranges: tuple[KnownRange, ...], known: pa.Table) -> str:
        wanted = ["m.seq", *(expression(name, self._stream.kind) for name in self._held)]
        if len(ranges) > 1:
            wanted.append("no")
        if self._where is not None and self._judges_messages:
            about = (self._table, self._where, self._stream, ranges, known, bool(self._read))
            source = messages_sql(*about)
        else:
            source = ranges_sql(self._stream.stream_id, ranges, no="int4")
        return f"select {', '.join(wanted)} from {source}"

    def _made(self, known: pa.Table, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The rows of messages, with exactly Spark's types: the known columns of the ranges, and
        the content of the messages of the batch.
        """
        import pyarrow as pa

        def made(field: pa.Field) -> pa.Array:
            if field.name in known.column_names:
                return known[field.name].chunk(0).take(batch["no"])
            if field.name not in batch.schema.names:
                return pa.nulls(batch.num_rows, field.type)
            found = batch[field.name]
            return headers_map(found, field.type) if field.name == "headers" else found

        target = arrow_schema(self._schema)
        return pa.RecordBatch.from_arrays([made(each) for each in target], schema=target)

    def _asked(self, ask: Callable[[dbapi.Cursor], T]) -> T:
        """The result of `ask` in a read-only transaction, repeated after a broken connection."""
        options = self._options

        def attempt(cursor: dbapi.Cursor) -> T:
            with blamed_on(options.where), translated(TABLE_NAMES.get):
                return ask(cursor)

        return asked(attempt, options.url, options.retry_timeout.total_seconds())

    def _check_rights(self, cursor: dbapi.Cursor) -> None:
        """Refuse to read the content of messages with a role that may only see their state."""
        messages = f"'pgqueue.messages_{self._stream.stream_id}'"
        if not call(cursor, f"select has_table_privilege({messages}, 'select')")[0][0]:
            raise PgQueueError(
                f"the role may not read what messages of stream {self._options.stream} hold: "
                f"{', '.join(self._read)}",
                hint='leave these out: option("columns", ...), and option("includeHeaders", '
                '"false"); or let the role read them: `pgqueue grant consumer ROLE`',
                sqlstate=NO_PERMISSION,
            )


def _size(ranges: Sequence[KnownRange]) -> int:
    return sum(each.hi - each.lo for each in ranges)


def _unfolded(ranges: tuple[KnownRange, ...]) -> Iterator[pa.RecordBatch]:
    """The messages of ranges, by the numbers of ranges and their own."""
    import pyarrow as pa
    import pyarrow.compute as pc

    for some in split(list(ranges), -(-_size(ranges) // ROWS_PER_BATCH)):
        ends = pa.array(accumulate(each.hi - each.lo for each in some), pa.int32())
        nos = pa.array([each.no for each in some], pa.int32())
        runs = pa.RunEndEncodedArray.from_arrays(ends, nos)
        seqs = numbers([each[:2] for each in some])
        nos = pc.call_function("run_end_decode", [runs])
        yield pa.RecordBatch.from_arrays([nos, seqs], ["no", "seq"])


def _numbered(batch: pa.RecordBatch, ranges: tuple[KnownRange, ...]) -> pa.RecordBatch:
    """A batch with the numbers of its ranges; COPY returns these only where there are several."""
    import pyarrow as pa

    if len(ranges) != 1:
        return batch
    nos = pa.repeat(pa.scalar(ranges[0].no, pa.int32()), batch.num_rows)
    return pa.RecordBatch.from_arrays([*batch.columns, nos], [*batch.schema.names, "no"])


def _deleted(ranges: tuple[KnownRange, ...], there: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """The messages of ranges that are not among those that were read."""
    import pyarrow as pa

    if _size(ranges) > there.num_rows:
        found = pa.Table.from_batches([there]).select(["no", "seq"])
        for batch in _unfolded(ranges):
            wanted = pa.Table.from_batches([batch])
            missing = wanted.join(found, ["no", "seq"], join_type="left anti")
            yield from missing.combine_chunks().to_batches()
