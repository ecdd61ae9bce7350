"""Messages by COPY into Arrow, for Spark's tasks and the exporter of an archive."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from spark_pgqueue.postgres.connection import PIN_PATH

if TYPE_CHECKING:
    import pyarrow as pa
    from adbc_driver_manager import dbapi

BATCH_BYTES = 8 << 20
"""The approximate size of an Arrow batch. A task has a few of them in memory."""


def set_up(cursor: dbapi.Cursor) -> None:
    """Prepare the transaction for statements with `ranges_sql`."""
    # Force an index scan for each range, in order, regardless of the statistics. The settings are
    # local to the transaction, as others are lost with a transaction pooler.
    cursor.execute(
        f"select {PIN_PATH}, "
        + ", ".join(
            f"pg_catalog.set_config('{setting}', '{value}', true)"
            for setting, value in (
                ("max_parallel_workers_per_gather", "0"),
                ("enable_seqscan", "off"),
                ("enable_bitmapscan", "off"),
                ("enable_sort", "off"),
            )
        )
    )
    cursor.fetchall()
    cursor.adbc_statement.set_options(**{"adbc.postgresql.batch_size_hint_bytes": str(BATCH_BYTES)})


def expression(column: str, kind: str) -> str:
    """The SQL of a message's column, read from m of `ranges_sql`."""
    if column == "data" and kind == "binary":
        return "m.data_bytes as data"
    if column == "headers":
        # One array of alternating names and values is cheaper than two, especially for nulls.
        return (
            "case when m.headers is not null then array(select x from "
            "jsonb_each_text(m.headers) h, unnest(array[h.key, h.value]) x) end as headers"
        )
    return f"m.{column}"


def headers_map(pairs: pa.ListArray, type_: pa.DataType) -> pa.Array:
    """Headers as Spark's map, from an array of alternating names and values."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if pairs.null_count == len(pairs):
        return pa.nulls(len(pairs), type_)
    names, values = (
        pairs.values.take(pa.array(range(first, len(pairs.values), 2), pa.int64()))
        for first in (0, 1)
    )
    return pa.MapArray.from_arrays(
        pc.call_function("divide", [pairs.offsets, pa.scalar(2, pa.int32())]),
        names,
        values,
        type=type_,
        mask=pairs.is_null(),
    )


def numbers(ranges: Sequence[tuple[int, int]]) -> pa.Int64Array:
    """The numbers of ascending ranges lo <= number < hi, of which there may be many."""
    import pyarrow as pa
    import pyarrow.compute as pc

    ends = list(accumulate(hi - lo for lo, hi in ranges))
    ones = pa.repeat(pa.scalar(1, pa.int64()), ends[-1])
    places = pc.call_function("cumulative_sum", [ones])
    # For each range, the difference between its numbers and their places, which count from 1.
    ahead = [hi - 1 - end for (_, hi), end in zip(ranges, ends, strict=True)]
    runs = pa.RunEndEncodedArray.from_arrays(
        pa.array(ends, pa.int64()), pa.array(ahead, pa.int64())
    )
    return pc.call_function("add", [places, pc.call_function("run_end_decode", [runs])])
