"""The rows of the sink: from Spark's Arrow to the Arrow that the stream's table takes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from spark_pgqueue.postgres.errors import UNFIT_DATA, PgQueueError

if TYPE_CHECKING:
    import pyarrow as pa

CHUNK_ROWS = 50_000
CHUNK_BYTES = 16 << 20
"""The limits of the rows that a task copies in one transaction. A task holds these rows in memory,
to copy them again if Postgres goes away, and the next ones."""

T = TypeVar("T")


@dataclass(frozen=True)
class StagedChunk:
    """Rows that are published together, with one priority, time and so on."""

    seqs: str  # the sequence numbers, as the text of an int8multirange
    priority: int = 0  # the priority of the messages
    deliver_at: int | None = None  # seconds since 1970; None for immediately
    expires_at: int | None = None  # seconds since 1970; None for never
    # the consumers of the messages; None for those of the sink's options
    consumers: list[str] | None = None
    # one for each number; None where the rows have no such column
    dedup_keys: list[str | None] | None = None


def joined(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.Table]:
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


def ahead(items: Iterator[T]) -> Iterator[T]:
    """The same items; a thread makes the next item while the caller uses one.

    So Spark goes on reading while Postgres writes.
    """
    pool = ThreadPoolExecutor(1, "spark-pgqueue-ahead")
    try:
        coming = pool.submit(next, items, None)
        while (item := coming.result()) is not None:
            coming = pool.submit(next, items, None)
            yield item
    finally:
        # No wait: the next item may take Spark long, and is not needed any more.
        pool.shutdown(wait=False, cancel_futures=True)


# What Postgres holds, in microseconds and in days since 1970: times from 4714-11-24 BC on, dates to
# the year 5874897. The last time of Arrow is before that of Postgres.
_MICROS = (-210_866_803_200_000_000, 2**63 - 1)
_DAYS = (-2_440_588, 2_145_042_905)


def check_times(rows: pa.Table) -> None:
    """Raise unless Postgres can hold all times and dates, those in lists and structs too.

    ADBC and COPY would fail without the column's name, or as if the connection were lost.
    """
    for name in rows.column_names:
        for chunk in rows[name].chunks:
            _check_times(name, chunk)


def _check_times(name: str, values: pa.Array) -> None:
    import pyarrow as pa
    import pyarrow.compute as pc

    kind = values.type
    if pa.types.is_struct(kind):
        for field, part in zip(kind, values.flatten(), strict=True):
            _check_times(f"{name}.{field.name}", part)
    elif pa.types.is_list(kind):
        _check_times(name, values.flatten())
    elif pa.types.is_timestamp(kind) or pa.types.is_date32(kind):
        low, high = _DAYS if pa.types.is_date32(kind) else _MICROS
        numbers = values.view(pa.int32() if pa.types.is_date32(kind) else pa.int64())
        found = pc.call_function("min_max", [numbers]).as_py()
        for extreme in (found["min"], found["max"]):
            if extreme is not None and not low <= extreme <= high:
                shown = pa.array([extreme], numbers.type).view(kind).cast(pa.string())[0]
                raise PgQueueError(
                    f"column {name} has a value that does not fit: {shown} is out of the range of "
                    "Postgres",
                    hint="times must be from 4714-11-24 BC on, and dates at most in the year "
                    "5874897",
                    sqlstate=UNFIT_DATA,
                )


@contextmanager
def naming_the_column(rows: pa.Table) -> Iterator[None]:
    """Around work with columns: an error of Arrow, or of Python's text, names the column."""
    import pyarrow as pa

    try:
        yield
    except (UnicodeDecodeError, pa.ArrowInvalid) as error:
        for name in rows.column_names:
            try:
                rows[name].validate(full=True)
            except pa.ArrowInvalid as reason:
                raise PgQueueError(
                    f"column {name} has a value that does not fit: {reason}",
                    hint="text must be UTF-8 (a binary column that was cast to string may not be)",
                    sqlstate=UNFIT_DATA,
                ) from None
        raise PgQueueError(f"a row does not fit: {error}", sqlstate=UNFIT_DATA) from None


def to_messages(rows: pa.Table, kind: str) -> pa.Table:
    """Rows as the stream's table takes them: data_bytes for a binary stream, headers as jsonb."""
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


def to_staged_chunks(rows: pa.Table, seqs: pa.Int64Array) -> tuple[pa.Table, list[StagedChunk]]:
    """The rows without the columns of publications, and the staged chunks that have these columns.

    Each staged chunk becomes a publication of its own, so times are rounded up to full seconds. The
    sequence numbers ascend: the messages of a key keep the order of the rows.
    """
    import pyarrow as pa

    grouping = ("priority", "deliver_at", "expires_at", "consumers")
    given = [name for name in grouping if name in rows.column_names]
    dedup_keys = pa.nulls(rows.num_rows, pa.string())
    if "dedup_key" in rows.column_names:
        dedup_keys = rows["dedup_key"]
        rows = rows.drop_columns(["dedup_key"])
    if not given:
        return rows, [StagedChunk(multirange(seqs), dedup_keys=_unless_null(dedup_keys))]
    keys = pa.table({"seq": seqs, "dedup_key": dedup_keys})
    if "priority" in given:
        keys = keys.append_column("priority", rows["priority"].cast(pa.int64()).fill_null(0))
    for name, times in _rounded_times(rows).items():
        keys = keys.append_column(name, times)
    if "consumers" in given:
        keys = keys.append_column("consumers", _joined(rows["consumers"]))
    # One thread keeps the numbers of a chunk in order.
    lists = [("seq", "list"), ("dedup_key", "list")]
    found = keys.group_by(given, use_threads=False).aggregate(lists).combine_chunks()
    values = found.select(given).to_pylist()
    for each in values:
        if each.get("consumers") is not None:
            each["consumers"] = each["consumers"].split("\0")
    chunks = [
        StagedChunk(multirange(numbers.values), **each, dedup_keys=_unless_null(of_these.values))
        for numbers, of_these, each in zip(
            found["seq_list"], found["dedup_key_list"], values, strict=True
        )
    ]
    return rows.drop_columns(given), chunks


def _joined(consumers: pa.ChunkedArray) -> pa.ChunkedArray:
    """Lists of names as texts, which can be compared: no name has a NUL character."""
    import pyarrow as pa
    import pyarrow.compute as pc

    # Arrow does not join lists whose type excludes nulls, as Spark's may.
    whole = consumers.combine_chunks().cast(pa.list_(pa.string()))
    named = pc.call_function("list_value_length", [whole])
    empty = pc.call_function("sum", [pc.call_function("equal", [named, 0])]).as_py()
    joined = pc.call_function("binary_join", [whole, pa.scalar("\0")])
    if empty or joined.null_count > whole.null_count:
        raise PgQueueError(
            f"column consumers is empty in {empty} and has a null name in "
            f"{joined.null_count - whole.null_count} of {len(whole)} rows",
            hint="name consumers of the stream, or use null for the consumers of option consumers, "
            "or all",
        )
    return pa.chunked_array([joined])


def _unless_null(dedup_keys: pa.Array | pa.ChunkedArray) -> list[str | None] | None:
    return None if dedup_keys.null_count == len(dedup_keys) else dedup_keys.to_pylist()


def multirange(seqs: pa.Int64Array) -> str:
    """Ascending numbers as the text of an int8multirange: '{[1,4),[6,7)}'."""
    import pyarrow.compute as pc

    first, last = seqs[0].as_py(), seqs[-1].as_py()
    if last - first == len(seqs) - 1:  # as nearly always
        return f"{{[{first},{last + 1})}}"
    before, behind = seqs.slice(0, len(seqs) - 1), seqs.slice(1)
    is_gap = pc.call_function("greater", [pc.call_function("subtract", [behind, before]), 1])
    starts = [first, *behind.filter(is_gap).to_pylist()]
    ends = [*before.filter(is_gap).to_pylist(), last]
    return "{" + ",".join(f"[{lo},{hi + 1})" for lo, hi in zip(starts, ends, strict=True)) + "}"


def _rounded_times(rows: pa.Table) -> dict[str, pa.ChunkedArray]:
    """The columns deliver_at and expires_at, rounded up to seconds since 1970. A message that
    expires after its delivery does so afterwards, too: a second later.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    names = [name for name in ("deliver_at", "expires_at") if name in rows.column_names]
    rounded = {name: _rounded_up(rows[name]) for name in names}
    if len(names) == 2:
        before, after = (
            rows[name].cast(pa.timestamp("us", "UTC")).cast(pa.int64()) for name in names
        )
        is_alike = pc.call_function("equal", [rounded["deliver_at"], rounded["expires_at"]])
        is_later = pc.call_function("greater", [after, before])
        more = pc.call_function("and", [is_alike, is_later]).cast(pa.int64()).fill_null(0)
        rounded["expires_at"] = pc.call_function("add", [rounded["expires_at"], more])
    return rounded


def _rounded_up(times: pa.ChunkedArray) -> pa.ChunkedArray:
    """Times as seconds since 1970.

    In whole numbers: Arrow rounds the local time of a zone, and refuses the hours of a change to or
    from daylight saving time, zones such as UTC+01:00, and the last second that it can hold.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    micros = times.cast(pa.timestamp("us", "UTC")).cast(pa.int64())
    full = pc.call_function("divide", [micros, 1_000_000])  # towards 1970
    is_more = pc.call_function("greater", [micros, pc.call_function("multiply", [full, 1_000_000])])
    return pc.call_function("add", [full, is_more.cast(pa.int64())])


def _to_jsonb(headers: pa.ChunkedArray) -> pa.Array:
    """Headers as COPY takes jsonb in binary: a version byte, and the JSON text."""
    import pyarrow as pa

    if headers.null_count == len(headers):
        return pa.nulls(len(headers), pa.binary())

    def jsonb(given: str | list | None) -> bytes | None:
        if given is None:
            return None
        return b"\x01" + (given if isinstance(given, str) else json.dumps(dict(given))).encode()

    return pa.array(map(jsonb, headers.to_pylist()), pa.binary())
