"""Rows of the sink, from Arrow as Spark has it to Arrow as the stream's table takes it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from spark_pgqueue.postgres.errors import PgQueueError

if TYPE_CHECKING:
    import pyarrow as pa

CHUNK_ROWS = 50_000
CHUNK_BYTES = 16 << 20
"""A task holds one chunk in memory, and copies it again if Postgres goes away meanwhile."""


@dataclass(frozen=True)
class Group:
    """Rows [first, first + rows) of a chunk, which are published with one priority and time."""

    first: int
    rows: int
    priority: int = 0
    deliver_at: int | None = None
    """Seconds since 1970."""


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
