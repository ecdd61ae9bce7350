"""Reading tables: the driver plans a table, and executors read its partitions.

What the database knows about messages, such as their state, comes as ranges of numbers with columns
(`pgqueue.scan_...`). Their content comes by COPY into Arrow, and never changes. So a planned table
shows one state of the queue, however long the reading takes.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from pyspark.sql.datasource import InputPartition
from pyspark.sql.types import StructType

from spark_pgqueue.postgres.adbc import call, kept_connection
from spark_pgqueue.postgres.errors import NO_PERMISSION, PgQueueError, translated
from spark_pgqueue.postgres.payloads import expression, headers_map, set_up
from spark_pgqueue.postgres.retrying import with_backoff
from spark_pgqueue.spark.consumer import Stream
from spark_pgqueue.spark.options import TABLE_NAMES, TableOptions
from spark_pgqueue.spark.partitions import (
    MESSAGES_PER_PARTITION,
    KnownRange,
    partition_count,
    split,
)
from spark_pgqueue.spark.reading import (
    count_messages,
    going_on,
    ranges_sql,
    report_loss,
    slices,
)
from spark_pgqueue.spark.tables import HELD, TABLES, Table, Where
from spark_pgqueue.spark.versions import arrow_schema
from spark_pgqueue.spark.where import blamed_on, check_types, messages_sql

if TYPE_CHECKING:
    import pyarrow as pa
    from adbc_driver_manager import dbapi

T = TypeVar("T")

ROWS_PER_BATCH = 50_000
"""The size of Arrow batches of rows that no COPY returns."""


class Place(NamedTuple):
    """A part of the history, as `pgqueue.scan_parts` cuts it."""

    consumer: str | None
    from_place: int
    to_place: int
    from_seq: int | None
    to_seq: int | None


@dataclass(frozen=True)
class TablePartition(InputPartition):
    """An input partition of a table.

    Attributes:
        ranges: the messages; none where there are places, until an executor has looked them up.
        known: the known columns of each range.
        places: what an executor looks up first.
    """

    ranges: tuple[KnownRange, ...] = ()
    known: pa.Table | None = None
    places: tuple[Place, ...] = ()


@dataclass(frozen=True)
class Scan:
    """What to read of a table: the same for all partitions."""

    options: TableOptions
    stream: Stream | None
    where: Where | None
    schema: StructType

    @property
    def table(self) -> Table:
        return TABLES[self.options.table]

    @property
    def held(self) -> list[str]:
        """The wanted columns that are stored with a message."""
        return [name for name in self.schema.names if name in HELD]

    @property
    def named(self) -> tuple[str, ...]:
        """The columns that option where names."""
        return self.where.columns if self.where else ()

    @property
    def told(self) -> list[str]:
        """The columns that the database knows of ranges, or of rows that are no messages."""
        names = dict.fromkeys([*self.schema.names, *self.named])
        return [name for name in names if name not in ("seq", *HELD)]

    @property
    def read(self) -> list[str]:
        """The columns that are stored with a message, and wanted, or named by option where."""
        return [name for name in HELD if name in (*self.held, *self.named)]

    @property
    def judges_messages(self) -> bool:
        """Whether messages of one range may differ in whether option where holds."""
        return any(name in ("seq", *HELD) for name in self.named)

    @property
    def condition(self) -> str:
        """The where clause of statements for ranges, or for rows that are no messages."""
        return f" where ({self.where.condition})" if self.where and not self.judges_messages else ""


def plan(scan: Scan) -> list[TablePartition]:
    """The partitions of a table, as the queue is now.

    Raises:
        PgQueueError: the stream or the consumer was dropped, the role may not read it, or Postgres
            stayed away too long.
    """
    return _asked(scan.options, lambda cursor: _plan(cursor, scan))


def _plan(cursor: dbapi.Cursor, scan: Scan) -> list[TablePartition]:
    options, stream = scan.options, scan.stream
    if scan.where is not None:
        check_types(cursor, scan.table, scan.where, stream.kind if stream else "")
    if stream is None or options.table == "stats":
        return [TablePartition()]
    if scan.read:
        _check_rights(cursor, scan, stream)
    if scan.table.shared_out:
        return _share_out(cursor, scan)
    known = _known(cursor, scan, None)
    ranges = _ranges(known)
    total = sum(each.hi - each.lo for each in ranges)
    count = partition_count(total, options)
    return [_part(share, known) for share in (split(ranges, count) if total else [])]


def _share_out(cursor: dbapi.Cursor, scan: Scan) -> list[TablePartition]:
    """Partitions that executors look up."""
    options = scan.options
    size = options.max_records_per_partition or MESSAGES_PER_PARTITION
    found = call(
        cursor,
        "select consumer, from_place, to_place, from_seq, to_seq, message_count"
        " from pgqueue.scan_parts($1, $2, nullif($3::text, ''), $4, $5)",
        (options.stream, options.table, options.consumer or "", size, options.min_partitions or 1),
    )
    total = sum(each[-1] for each in found)
    size = max(1, min(size, total // (options.min_partitions or 1)))
    parts: list[list[Place]] = []
    room = 0
    for *place, count in found:
        if count > room:
            parts.append([])
            room = size
        parts[-1].append(Place(*place))
        room -= count
    count = min(len(parts), options.max_connections or len(parts))
    return [
        TablePartition(
            places=tuple(chain(*parts[len(parts) * i // count : len(parts) * (i + 1) // count]))
        )
        for i in range(count)
    ]


def _part(ranges: list[KnownRange], known: pa.Table) -> TablePartition:
    """A partition with its ranges and only their known columns."""
    mine = known.drop_columns(["lo", "hi"]).take([each.no for each in ranges])
    return TablePartition(tuple(each._replace(no=no) for no, each in enumerate(ranges)), mine)


def read_table(scan: Scan, part: TablePartition) -> Iterator[pa.RecordBatch]:
    """The rows of a partition, resumed after a broken connection.

    Raises:
        PgQueueError: messages were deleted after the plan was made, and failOnDataLoss is true; or
            Postgres stayed away too long.
    """
    target = arrow_schema(scan.schema)
    if not scan.table.of_messages:
        rows = _asked(scan.options, lambda cursor: _rows(cursor, scan, part.places))
        return iter(rows.select(target.names).cast(target).combine_chunks().to_batches())
    ranges, known = part.ranges, part.known
    if part.places:
        known = _asked(scan.options, lambda cursor: _looked_up(cursor, scan, part.places))
        ranges = tuple(_ranges(known))
    if known is None or not ranges:
        return iter(())
    rows = _Rows(known, target)
    if not scan.held and not scan.judges_messages:
        return map(rows.of, _unfolded(ranges))
    return _read_messages(scan, ranges, known, rows)


def _read_messages(
    scan: Scan, ranges: tuple[KnownRange, ...], known: pa.Table, rows: _Rows
) -> Iterator[pa.RecordBatch]:
    options, stream = scan.options, scan.stream
    assert stream is not None
    left, last, seen = ranges, (0, 0), 0
    read: list[pa.RecordBatch] = []

    def rest() -> Generator[pa.RecordBatch]:
        nonlocal left, last, seen
        left = _behind(left, *last) if seen else left
        patience = options.retry_timeout.total_seconds()
        with (
            blamed_on(options.where),
            kept_connection(options.url, patience) as conn,
            conn.cursor() as cursor,
        ):
            set_up(cursor)
            for some in slices(left):
                only = some[0].no if len(some) == 1 else None
                cursor.execute(_select_sql(scan, stream, some, known))
                for batch in cursor.fetch_record_batch():
                    if batch.num_rows:
                        no = batch["no"][-1].as_py() if only is None else only
                        made = rows.of(batch, only)
                        if scan.table.outlives and not scan.judges_messages:
                            read.append(_numbers(batch, only))
                        last, seen = (no, batch["seq"][-1].as_py()), seen + batch.num_rows
                        yield made

    yield from going_on(rest, options.url, f"table {options.table} of stream {options.stream}")
    if scan.judges_messages:
        if scan.table.outlives or not scan.read:
            return  # it asked the condition of numbers, also of those without a message
        seen = _asked(options, lambda cursor: count_messages(cursor, stream.stream_id, ranges))
    total = sum(each.hi - each.lo for each in ranges)
    if seen < total and scan.table.outlives:
        yield from map(rows.of, _missing(ranges, read))
    elif seen < total:
        report_loss(total - seen, options.stream or "", options.fail_on_data_loss)


def _select_sql(scan: Scan, stream: Stream, ranges: tuple[KnownRange, ...], known: pa.Table) -> str:
    wanted = ["m.seq", *(expression(name, stream.kind) for name in scan.held)]
    if len(ranges) > 1:
        wanted.append("no")
    if scan.where is not None and scan.judges_messages:
        source = messages_sql(scan.table, scan.where, stream, ranges, known, bool(scan.read))
    else:
        source = ranges_sql(stream.stream_id, ranges, no="int4")
    return f"select {', '.join(wanted)} from {source}"


def _missing(
    ranges: tuple[KnownRange, ...], read: list[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """The messages of ranges that were not read, because they are not stored any more.

    It does not ask the database again, as retention may have gone on since.
    """
    import pyarrow as pa

    for batch in _unfolded(ranges):
        wanted = pa.Table.from_batches([batch])
        if read:
            wanted = wanted.join(pa.Table.from_batches(read), ["no", "seq"], join_type="left anti")
        yield from wanted.combine_chunks().to_batches()


def _numbers(batch: pa.RecordBatch, no: int | None) -> pa.RecordBatch:
    """The numbers of the messages of a batch; `no` as in `_Rows.of`."""
    import pyarrow as pa

    nos = batch["no"] if no is None else pa.repeat(pa.scalar(no, pa.int32()), batch.num_rows)
    return pa.RecordBatch.from_arrays([nos, batch["seq"]], ["no", "seq"])


def _unfolded(ranges: tuple[KnownRange, ...]) -> Iterator[pa.RecordBatch]:
    """The messages of ranges, by their numbers."""
    import pyarrow as pa

    def batch() -> pa.RecordBatch:
        arrays = [pa.array(nos, pa.int32()), pa.array(seqs, pa.int64())]
        return pa.RecordBatch.from_arrays(arrays, ["no", "seq"])

    nos: list[int] = []
    seqs: list[int] = []
    for each in ranges:
        for lo in range(each.lo, each.hi, ROWS_PER_BATCH):
            some = range(lo, min(lo + ROWS_PER_BATCH, each.hi))
            seqs.extend(some)
            nos.extend(repeat(each.no, len(some)))
            if len(seqs) >= ROWS_PER_BATCH:
                yield batch()
                nos, seqs = [], []
    if seqs:
        yield batch()


class _Rows:
    """Makes the columns with exactly Spark's types."""

    def __init__(self, known: pa.Table, target: pa.Schema):
        self._target = target
        self._known = {
            field.name: known[field.name].cast(field.type).combine_chunks()
            for field in target
            if field.name in known.column_names and field.name not in HELD
        }
        # Nearly always all ranges have one value.
        self._constant = {
            name: values[0]
            for name, values in self._known.items()
            if len(values) and (values.null_count == len(values) or _is_constant(values))
        }

    def of(self, batch: pa.RecordBatch, no: int | None = None) -> pa.RecordBatch:
        """The rows of a batch with seq and the content of messages.

        Args:
            batch: the batch.
            no: the number of the range of all messages; None where the batch has a column no.
        """
        import pyarrow as pa

        nos = pa.repeat(pa.scalar(no, pa.int32()), batch.num_rows) if no is not None else None
        columns = [self._column(batch, nos, field) for field in self._target]
        return pa.RecordBatch.from_arrays(columns, schema=self._target)

    def _column(self, batch: pa.RecordBatch, nos: pa.Array | None, field: pa.Field) -> pa.Array:
        import pyarrow as pa

        name = field.name
        if name in self._constant:
            value = self._constant[name]
            if value.is_valid:
                return pa.repeat(value, batch.num_rows)
            return pa.nulls(batch.num_rows, field.type)
        if name in self._known:
            return self._known[name].take(batch["no"] if nos is None else nos)
        if name not in batch.schema.names:
            return pa.nulls(batch.num_rows, field.type)
        return headers_map(batch[name], field.type) if name == "headers" else batch[name]


def _is_constant(values: pa.Array) -> bool:
    import pyarrow as pa
    import pyarrow.compute as pc

    return not pa.types.is_nested(values.type) and len(pc.call_function("unique", [values])) == 1


def _ranges(known: pa.Table) -> list[KnownRange]:
    """The known ranges, each with its row."""
    lo, hi = (known[name].to_pylist() for name in ("lo", "hi"))
    return [KnownRange(*each) for each in zip(lo, hi, range(len(lo)), strict=True)]


def _behind(ranges: tuple[KnownRange, ...], no: int, seq: int) -> tuple[KnownRange, ...]:
    """The rest of ranges behind a message of range `no`."""
    for index, each in enumerate(ranges):
        if each.no == no:
            rest = ranges[index + 1 :]
            return (each._replace(lo=seq + 1), *rest) if seq + 1 < each.hi else rest
    return ranges


def _known(cursor: dbapi.Cursor, scan: Scan, place: Place | None) -> pa.Table:
    """The ranges of a table, or of a place of it, with the wanted known columns."""
    options, wanted = scan.options, "".join(f", {name}" for name in scan.told)
    if place is not None:
        source = f"pgqueue.scan_{options.table}($1, $2, $3, $4, $5::text::int8multirange)"
        within = f"{{[{place.from_seq or ''},{place.to_seq or ''})}}"
        given = (options.stream, place.consumer, place.from_place, place.to_place, within)
    elif options.table == "messages":
        source = "pgqueue.scan_messages($1, null, $2::text::text[])"
        given = (options.stream, "{" + ",".join(scan.told) + "}")
    else:
        source = f"pgqueue.scan_{options.table}($1, nullif($2::text, ''))"
        given = (options.stream, options.consumer or "")
    return _fetched(cursor, f"select lo, hi{wanted} from {source}{scan.condition}", given)


def _looked_up(cursor: dbapi.Cursor, scan: Scan, places: Sequence[Place]) -> pa.Table:
    import pyarrow as pa

    return pa.concat_tables([_known(cursor, scan, each) for each in places])


def _rows(cursor: dbapi.Cursor, scan: Scan, places: Sequence[Place]) -> pa.Table:
    """The rows of a table whose rows are no messages."""
    import pyarrow as pa

    columns, options = ", ".join(scan.told), scan.options
    if options.table == "stats":
        return _fetched(
            cursor,
            f"select {columns} from (select * from pgqueue.consumer_stats where coalesce(stream ="
            " nullif($1::text, ''), $1 = '') and coalesce(consumer = nullif($2::text, ''), $2 = ''"
            f")) m{scan.condition}",
            (options.stream or "", options.consumer or ""),
        )
    statement = f"select {columns} from pgqueue.scan_publications($1, $2, $3){scan.condition}"
    return pa.concat_tables(
        _fetched(cursor, statement, (options.stream, each.from_place, each.to_place))
        for each in places
    )


def _fetched(cursor: dbapi.Cursor, sql: str, parameters: tuple = ()) -> pa.Table:
    cursor.execute(sql, parameters or None)
    return cursor.fetch_arrow_table()


def _asked(options: TableOptions, ask: Callable[[dbapi.Cursor], T]) -> T:
    """What is answered in a transaction that changes nothing; asked again when that breaks."""

    def attempt() -> T:
        with (
            blamed_on(options.where),
            kept_connection(options.url, patience=0) as conn,
            conn.cursor() as cursor,
            translated(TABLE_NAMES.get),
        ):
            return ask(cursor)

    return with_backoff(attempt, options.url, options.retry_timeout.total_seconds())


def _check_rights(cursor: dbapi.Cursor, scan: Scan, stream: Stream) -> None:
    """Say what to do, where a role may look at the queue and not at what messages hold."""
    ((allowed,),) = call(
        cursor,
        f"select pg_catalog.has_table_privilege('pgqueue.messages_{stream.stream_id}', 'select')",
    )
    if not allowed:
        raise PgQueueError(
            f"the role may not read what messages of stream {scan.options.stream} hold: "
            f"{', '.join(scan.read)}",
            hint='leave these out: option("columns", ...), and option("includeHeaders", "false"); '
            "or let the role read them: `pgqueue grant consumer ROLE`",
            sqlstate=NO_PERMISSION,
        )
