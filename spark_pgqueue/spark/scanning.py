"""Reading tables: what the driver plans, and what an executor reads of it.

What is known of messages, such as their state, comes as ranges of numbers with what is known of
each (`pgqueue.scan_...`); what messages hold comes from the stream's table, by COPY into Arrow, and
never changes. So what was planned is one state of the queue, however long it takes to read.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, repeat
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from pyspark.sql.datasource import InputPartition
from pyspark.sql.types import StructType

from spark_pgqueue.postgres.adbc import call, kept_connection
from spark_pgqueue.postgres.errors import NO_PERMISSION, PgQueueError, translated
from spark_pgqueue.postgres.retrying import with_backoff
from spark_pgqueue.spark.consumer import Stream
from spark_pgqueue.spark.filters import Filters
from spark_pgqueue.spark.options import TABLE_NAMES, TableOptions
from spark_pgqueue.spark.partitions import MESSAGES_PER_PARTITION, Run, piece_count, split
from spark_pgqueue.spark.reading import (
    count_messages,
    expression,
    going_on,
    headers_map,
    ranges_sql,
    report_loss,
    set_up,
    slices,
)
from spark_pgqueue.spark.tables import HELD, TABLES, Table
from spark_pgqueue.spark.versions import arrow_schema

if TYPE_CHECKING:
    import pyarrow as pa
    from adbc_driver_manager import dbapi

T = TypeVar("T")

ROWS_PER_BATCH = 50_000
"""Of rows that are made here."""


class Place(NamedTuple):
    """A part of what happened, as `pgqueue.scan_parts` shares it out."""

    consumer: str | None
    from_place: int
    to_place: int
    from_seq: int | None
    to_seq: int | None


@dataclass(frozen=True)
class Part(InputPartition):
    """A partition.

    Attributes:
        runs: its messages; none where there are places, until these were looked up.
        known: what is known of each of the runs.
        places: what an executor looks up first.
    """

    runs: tuple[Run, ...] = ()
    known: pa.Table | None = None
    places: tuple[Place, ...] = ()


@dataclass(frozen=True)
class Scan:
    """What is read of a table: the same for all partitions."""

    options: TableOptions
    stream: Stream | None
    schema: StructType
    filters: Filters = field(default_factory=Filters)

    @property
    def table(self) -> Table:
        return TABLES[self.options.table]

    @property
    def held(self) -> list[str]:
        """The wanted columns that are stored with a message."""
        return [name for name in self.schema.names if self.table.of_messages and name in HELD]

    @property
    def told(self) -> list[str]:
        """The columns that are known of ranges, or of rows that are no messages."""
        names = [*self.schema.names, *(name for name, _ in self.filters.told)]
        return [name for name in dict.fromkeys(names) if name not in ("seq", *self.held)]

    @property
    def reads_messages(self) -> bool:
        return bool(self.held)


def plan(scan: Scan) -> list[Part]:
    """The partitions of a table, as it is now.

    Raises:
        PgQueueError: the stream or the consumer was dropped, the role may not read it, or Postgres
            stayed away too long.
    """
    return _asked(scan.options, lambda cursor: _plan(cursor, scan))


def _plan(cursor: dbapi.Cursor, scan: Scan) -> list[Part]:
    options, stream = scan.options, scan.stream
    if stream is None or options.table == "stats":
        return [Part()]
    if scan.reads_messages:
        _check_rights(cursor, scan, stream)
    if scan.table.shared_out:
        return _share_out(cursor, scan)
    known = _known(cursor, scan, None)
    runs = _runs(known)
    total = sum(each.hi - each.lo for each in runs)
    count = piece_count(total, options)
    return [_part(share, known) for share in (split(runs, count) if total else [])]


def _share_out(cursor: dbapi.Cursor, scan: Scan) -> list[Part]:
    """Parts that are looked up by executors, as many as there are to be partitions."""
    options = scan.options
    size = options.max_records_per_partition or MESSAGES_PER_PARTITION
    found = call(
        cursor,
        "select consumer, from_place, to_place, from_seq, to_seq, message_count"
        " from pgqueue.scan_parts($1, $2, nullif($3::text, ''), $4, $5)",
        (options.stream, options.table, options.consumer or "", size, options.min_partitions or 1),
    )
    wanted = dict(scan.filters.told).get("consumer")
    found = [each for each in found if wanted is None or each[0] in wanted]
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
        Part(places=tuple(chain(*parts[len(parts) * i // count : len(parts) * (i + 1) // count])))
        for i in range(count)
    ]


def _part(runs: list[Run], known: pa.Table) -> Part:
    """A part that has no more of what is known than it needs."""
    mine = known.drop_columns(["lo", "hi"]).take([each.no for each in runs])
    return Part(tuple(each._replace(no=no) for no, each in enumerate(runs)), mine)


def read_part(scan: Scan, part: Part) -> Iterator[pa.RecordBatch]:
    """The rows of a partition; goes on where it was when the connection breaks.

    Raises:
        PgQueueError: messages were deleted since they were planned, and failOnDataLoss is true;
            or Postgres stayed away too long.
    """
    target = arrow_schema(scan.schema)
    if not scan.table.of_messages:
        rows = _asked(scan.options, lambda cursor: _rows(cursor, scan, part.places))
        rows = scan.filters.of(rows).select(target.names).cast(target).combine_chunks()
        return iter(rows.to_batches())
    runs, known = part.runs, part.known
    if part.places:
        known = _asked(scan.options, lambda cursor: _looked_up(cursor, scan, part.places))
        runs = tuple(_runs(known))
    if known is None or not runs:
        return iter(())
    rows = _Rows(known, target)
    if not scan.reads_messages:
        return map(rows.of, _unfolded(runs))
    return _read_messages(scan, runs, rows)


def _read_messages(scan: Scan, runs: tuple[Run, ...], rows: _Rows) -> Iterator[pa.RecordBatch]:
    options, stream = scan.options, scan.stream
    assert stream is not None
    left, last, seen = runs, (0, 0), 0
    read: list[pa.RecordBatch] = []

    def rest() -> Generator[pa.RecordBatch]:
        nonlocal left, last, seen
        left = _behind(left, *last) if seen else left
        patience = options.retry_timeout.total_seconds()
        with kept_connection(options.url, patience) as conn, conn.cursor() as cursor:
            set_up(cursor)
            for some in slices(left):
                only = some[0].no if len(some) == 1 else None
                cursor.execute(_select_sql(scan, stream, some))
                for batch in cursor.fetch_record_batch():
                    if batch.num_rows:
                        no = batch["no"][-1].as_py() if only is None else only
                        made = rows.of(batch, only)
                        if scan.table.outlives:
                            read.append(_numbers(batch, only))
                        last, seen = (no, batch["seq"][-1].as_py()), seen + batch.num_rows
                        yield made

    yield from going_on(rest, options.url, f"table {options.table} of stream {options.stream}")
    total = sum(each.hi - each.lo for each in runs)
    if scan.table.outlives:
        if not scan.filters.conditions and seen < total:
            yield from map(rows.of, _missing(runs, read))
    else:
        if scan.filters.conditions:
            seen = _asked(options, lambda cursor: count_messages(cursor, stream.stream_id, runs))
        if seen < total:
            report_loss(total - seen, options.stream or "", options.fail_on_data_loss)


def _select_sql(scan: Scan, stream: Stream, runs: tuple[Run, ...]) -> str:
    wanted = ["m.seq", *(expression(name, stream.kind) for name in scan.held)]
    if len(runs) > 1:
        wanted.append("r.no")
    conditions = "".join(f" and {each}" for each in scan.filters.conditions)
    return (
        f"select {', '.join(wanted)} from {ranges_sql(stream.stream_id, runs, no='int4')}"
        f" where true{conditions}"
    )


def _missing(runs: tuple[Run, ...], read: list[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The messages of runs that are not among those that were read: they are not stored any more.

    It does not ask the database again, where retention may have gone on since.
    """
    import pyarrow as pa

    for batch in _unfolded(runs):
        wanted = pa.Table.from_batches([batch])
        if read:
            wanted = wanted.join(pa.Table.from_batches(read), ["no", "seq"], join_type="left anti")
        yield from wanted.combine_chunks().to_batches()


def _numbers(batch: pa.RecordBatch, no: int | None) -> pa.RecordBatch:
    """Which messages a batch has; `no` as in `_Rows.of`."""
    import pyarrow as pa

    nos = batch["no"] if no is None else pa.repeat(pa.scalar(no, pa.int32()), batch.num_rows)
    return pa.RecordBatch.from_arrays([nos, batch["seq"]], ["no", "seq"])


def _unfolded(runs: tuple[Run, ...]) -> Iterator[pa.RecordBatch]:
    """The messages of runs, by their numbers."""
    import pyarrow as pa

    def batch() -> pa.RecordBatch:
        arrays = [pa.array(nos, pa.int32()), pa.array(seqs, pa.int64())]
        return pa.RecordBatch.from_arrays(arrays, ["no", "seq"])

    nos: list[int] = []
    seqs: list[int] = []
    for run in runs:
        for lo in range(run.lo, run.hi, ROWS_PER_BATCH):
            some = range(lo, min(lo + ROWS_PER_BATCH, run.hi))
            seqs.extend(some)
            nos.extend(repeat(run.no, len(some)))
            if len(seqs) >= ROWS_PER_BATCH:
                yield batch()
                nos, seqs = [], []
    if seqs:
        yield batch()


class _Rows:
    """Makes the columns that Spark expects, of exactly its types."""

    def __init__(self, known: pa.Table, target: pa.Schema):
        self._target = target
        self._known = {
            field.name: known[field.name].cast(field.type).combine_chunks()
            for field in target
            if field.name in known.column_names and field.name not in HELD
        }
        # Nearly always all ranges have the same.
        self._constant = {
            name: values[0]
            for name, values in self._known.items()
            if len(values) and (values.null_count == len(values) or _is_constant(values))
        }

    def of(self, batch: pa.RecordBatch, no: int | None = None) -> pa.RecordBatch:
        """The rows of a batch with seq, and what messages hold.

        Args:
            batch: it.
            no: the number of the run of all of them; None: the batch has them.
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


def _runs(known: pa.Table) -> list[Run]:
    """The ranges of what is known, each with its row."""
    lo, hi = (known[name].to_pylist() for name in ("lo", "hi"))
    return [Run(*each) for each in zip(lo, hi, range(len(lo)), strict=True)]


def _behind(runs: tuple[Run, ...], no: int, seq: int) -> tuple[Run, ...]:
    """What is left of runs behind a message of the one with a number."""
    for index, each in enumerate(runs):
        if each.no == no:
            rest = runs[index + 1 :]
            return (each._replace(lo=seq + 1), *rest) if seq + 1 < each.hi else rest
    return runs


def _known(cursor: dbapi.Cursor, scan: Scan, place: Place | None) -> pa.Table:
    """The ranges of a table, or of a place of it, and what is wanted of what is known of them."""
    options, filters = scan.options, scan.filters
    wanted = "".join(f", {name}" for name in scan.told)
    if place is not None:
        source = f"pgqueue.scan_{options.table}($1, $2, $3, $4, $5::text::int8multirange)"
        within = filters.within(place.from_seq, place.to_seq)
        given = (options.stream, place.consumer, place.from_place, place.to_place, within)
    elif options.table == "messages":
        source = "pgqueue.scan_messages($1, $2::text::int8multirange, $3::text::text[])"
        given = (options.stream, filters.within(None, None), "{" + ",".join(scan.told) + "}")
    else:
        source = f"pgqueue.scan_{options.table}($1, nullif($2::text, ''), $3::text::int8multirange)"
        given = (options.stream, options.consumer or "", filters.within(None, None))
    return filters.of(_fetched(cursor, f"select lo, hi{wanted} from {source}", given))


def _looked_up(cursor: dbapi.Cursor, scan: Scan, places: Sequence[Place]) -> pa.Table:
    import pyarrow as pa

    return pa.concat_tables([_known(cursor, scan, each) for each in places])


def _rows(cursor: dbapi.Cursor, scan: Scan, places: Sequence[Place]) -> pa.Table:
    """The rows of a table that are no messages."""
    import pyarrow as pa

    columns, options = ", ".join(scan.told), scan.options
    if options.table == "stats":
        return _fetched(
            cursor,
            f"select {columns} from pgqueue.consumer_stats where coalesce(stream = nullif($1::text,"
            " ''), $1 = '') and coalesce(consumer = nullif($2::text, ''), $2 = '')",
            (options.stream or "", options.consumer or ""),
        )
    statement = f"select {columns} from pgqueue.scan_publications($1, $2, $3)"
    found = [
        _fetched(cursor, statement, (options.stream, each.from_place, each.to_place))
        for each in places
    ]
    return pa.concat_tables(found)


def _fetched(cursor: dbapi.Cursor, sql: str, parameters: tuple = ()) -> pa.Table:
    cursor.execute(sql, parameters or None)
    return cursor.fetch_arrow_table()


def _asked(options: TableOptions, ask: Callable[[dbapi.Cursor], T]) -> T:
    """What is answered in a transaction that changes nothing; asked again when that breaks."""

    def attempt() -> T:
        with (
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
            f"{', '.join(scan.held)}",
            hint='leave these out: option("columns", ...), and option("includeHeaders", "false"); '
            "or let the role read them: `pgqueue grant consumer ROLE`",
            sqlstate=NO_PERMISSION,
        )
