"""The executor's side of an archive: a task reads messages from files.

The driver plans by the files that exist at that time. If a segment leaves Postgres after that and
before it is read, a task finds messages missing, and reads these from the files.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from pyspark.sql.types import StructType

from spark_pgqueue.archive.files import Segment, overlapping, read
from spark_pgqueue.postgres.adbc import call
from spark_pgqueue.postgres.payloads import numbers
from spark_pgqueue.printable import warn
from spark_pgqueue.spark.executor.reading import as_spark, asked
from spark_pgqueue.spark.executor.typed import stored
from spark_pgqueue.spark.options.stream_source import StreamSourceOptions
from spark_pgqueue.spark.partitions import ArchivedPartition, MessagePartition, cut_behind
from spark_pgqueue.spark.platform.pyspark_compat import arrow_schema

if TYPE_CHECKING:
    import pyarrow as pa


def read_archived(
    part: ArchivedPartition,
    options: StreamSourceOptions,
    schema: StructType,
    constant: dict[str, Any],
) -> Iterator[pa.RecordBatch]:
    """The messages of a partition, in order; fewer than it has, where a file is gone. Columns
    that are constant are not stored with messages.
    """
    spans = [each[:2] for each in part.ranges]
    return _read(part.segments, part.kind, spans, options, schema, constant)


def completed(
    batches: Iterator[pa.RecordBatch],
    part: MessagePartition,
    options: StreamSourceOptions,
    schema: StructType,
    constant: dict[str, Any],
) -> Iterator[pa.RecordBatch]:
    """Batches from Postgres, with the messages that are only in files, in order."""
    import pyarrow as pa
    import pyarrow.compute as pc

    def missing(spans: list[tuple[int, int]]) -> Iterator[pa.RecordBatch]:
        segments = _find(options.url, part.stream_id, spans[0][0], spans[-1][1])
        return _read(segments, part.kind, spans, options, schema, constant)

    if options.archive == "never":
        yield from batches
        return
    rest = part.ranges
    for batch in batches:
        here, rest = cut_behind(rest, batch["seq"][-1].as_py())
        if sum(each.hi - each.lo for each in here) == batch.num_rows:
            yield batch
            continue
        wanted = numbers([each[:2] for each in here])
        there = pc.call_function("is_in", [wanted], pc.SetLookupOptions(value_set=batch["seq"]))
        lacking = wanted.filter(pc.call_function("invert", [there])).to_pylist()
        found = missing([(seq, seq + 1) for seq in lacking])
        table = pa.Table.from_batches([batch, *found]).sort_by("seq").combine_chunks()
        yield from table.to_batches()
    if rest:
        yield from missing([each[:2] for each in rest])


def _find(url: str | None, stream_id: int, lo: int, hi: int) -> list[Segment]:
    """The segments of a stream, with numbers from lo to below hi, that are in files now."""
    sql = "select lo, hi, uri, folder, files::text from pgqueue.archive_files($1::int, $2, $3)"
    rows = asked(lambda cursor: call(cursor, sql, (stream_id, lo, hi)), url, 0)
    return [
        Segment.of(*(lo, hi, uri, folder), json.loads(files)) for lo, hi, uri, folder, files in rows
    ]


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
                yield as_spark(batch, constant, target, options.title)
        except FileNotFoundError as error:
            warn("a file of the archive is missing: %s", error)
