"""The executor's side of an archive: a task reads messages from files.

The driver plans by what is in files when it asks. Where a segment leaves Postgres after that, and
before it is read, a task finds messages missing, and reads these from the files.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from pyspark.sql.types import StructType

from spark_pgqueue.archive.files import Segment, overlapping, read
from spark_pgqueue.postgres.adbc import call, kept_connection
from spark_pgqueue.postgres.payloads import numbers
from spark_pgqueue.postgres.retrying import with_backoff
from spark_pgqueue.printable import warn
from spark_pgqueue.spark.columns import VALUE
from spark_pgqueue.spark.executor.typed import stored, typed
from spark_pgqueue.spark.options import StreamSourceOptions
from spark_pgqueue.spark.partitions import ArchivedPartition, MessagePartition, Range, cut_behind
from spark_pgqueue.spark.platform.pyspark_compat import arrow_schema

if TYPE_CHECKING:
    import pyarrow as pa


def read_archived(
    part: ArchivedPartition,
    options: StreamSourceOptions,
    schema: StructType,
    constant: dict[str, Any],
) -> Generator[pa.RecordBatch, None, int]:
    """The messages of a partition, in order.

    Args:
        part: the messages to read.
        options: the query's options.
        schema: the columns to return.
        constant: columns with the same value in every row, which no message stores.

    Returns:
        how many rows there were; fewer than messages, where a file is gone.

    Raises:
        PgQueueError: the files cannot be read.
    """
    rows = 0
    spans = [each[:2] for each in part.ranges]
    for batch in _read(part.segments, part.kind, spans, options, schema, constant):
        rows += batch.num_rows
        yield batch
    return rows


def completed(
    batches: Generator[pa.RecordBatch, None, int],
    part: MessagePartition,
    options: StreamSourceOptions,
    schema: StructType,
    constant: dict[str, Any],
) -> Generator[pa.RecordBatch, None, int]:
    """Batches from Postgres, with the messages that are in files alone by now, in order.

    Arguments, returns and errors as `read_archived`.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    rows, rest = 0, part.ranges

    def missing(seqs: pa.Int64Array | None, ranges: Sequence[Range]) -> Iterator[pa.RecordBatch]:
        wanted = numbers([each[:2] for each in ranges])
        if seqs is not None:
            there = pc.call_function("is_in", [wanted], pc.SetLookupOptions(value_set=seqs))
            wanted = wanted.filter(pc.call_function("invert", [there]))
        lacking = [(seq, seq + 1) for seq in wanted.to_pylist()] if seqs is not None else None
        spans = lacking or [each[:2] for each in ranges]
        segments = _find(options.url, part.stream_id, spans[0][0], spans[-1][1])
        return _read(segments, part.kind, spans, options, schema, constant)

    if options.archive == "never":
        return (yield from batches)
    for batch in batches:
        here, rest = cut_behind(rest, batch["seq"][-1].as_py())
        if sum(each.hi - each.lo for each in here) > batch.num_rows:
            found = list(missing(batch["seq"], here))
            table = pa.Table.from_batches([batch, *found]).sort_by("seq").combine_chunks()
            for whole in table.to_batches():
                rows += whole.num_rows
                yield whole
        else:
            rows += batch.num_rows
            yield batch
    if rest:
        for batch in missing(None, rest):
            rows += batch.num_rows
            yield batch
    return rows


def _find(url: str | None, stream_id: int, lo: int, hi: int) -> list[Segment]:
    """The segments of a stream, with numbers from lo to below hi, that are in files now."""

    def ask() -> list[Segment]:
        with kept_connection(url, patience=0) as conn, conn.cursor() as cursor:
            rows = call(
                cursor,
                "select lo, hi, uri, folder, files::text "
                "from pgqueue.archive_files($1::int, $2, $3)",
                (stream_id, lo, hi),
            )
        return [
            Segment.of(lo, hi, uri, folder, json.loads(files))
            for lo, hi, uri, folder, files in rows
        ]

    return with_backoff(ask, url, 0)


def _read(
    segments: Iterable[Segment],
    kind: str,
    ranges: Sequence[tuple[int, int]],
    options: StreamSourceOptions,
    schema: StructType,
    constant: dict[str, Any],
) -> Iterator[pa.RecordBatch]:
    target = arrow_schema(schema)
    columns = stored(target.names, constant)
    for segment in segments:
        mine = overlapping(ranges, segment.lo, segment.hi)
        try:
            for batch in read(segment, kind, mine, columns, options.archive_options):
                yield _as_spark(batch, constant, target, options.title)
        except FileNotFoundError as error:
            warn("a file of the archive is not there: %s", error)


def _as_spark(
    batch: pa.RecordBatch, constant: dict[str, Any], target: pa.Schema, stream: str
) -> pa.RecordBatch:
    """The columns with exactly Spark's types."""
    import pyarrow as pa

    return pa.RecordBatch.from_arrays(
        [
            pa.repeat(pa.scalar(constant[field.name], field.type), batch.num_rows)
            if field.name in constant
            else typed(batch, target, stream)
            if field.name == VALUE
            else batch[field.name].cast(field.type)
            for field in target
        ],
        schema=target,
    )
