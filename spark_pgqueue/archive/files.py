"""Reading messages from the files of an archive."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from spark_pgqueue.archive.folders import folder
from spark_pgqueue.archive.layout import ArchiveFile
from spark_pgqueue.postgres.payloads import BATCH_BYTES, numbers

if TYPE_CHECKING:
    import pyarrow as pa
    from pyarrow.parquet import ParquetFile


class Segment(NamedTuple):
    """A segment that is in files, as `pgqueue.archive_files` returns it.

    Attributes:
        lo: its first number.
        hi: the number after its last one.
        uri: the folder of the archive.
        folder: the segment's own, below it.
        files: the files, in order.
    """

    lo: int
    hi: int
    uri: str
    folder: str
    files: tuple[ArchiveFile, ...]

    @classmethod
    def of(cls, lo: int, hi: int, uri: str, folder: str, files: list[dict[str, Any]]) -> Segment:
        """A row of the function."""
        return cls(lo, hi, uri, folder, tuple(ArchiveFile(**each) for each in files))

    def within(self, lo: int, hi: int) -> Segment:
        """The segment with those of its files alone that have numbers from lo to below hi."""
        return self._replace(files=tuple(f for f in self.files if f.lo < hi and f.hi > lo))


def read(
    segment: Segment,
    ranges: Sequence[tuple[int, int]],
    columns: list[str],
    options: Mapping[str, Any] | None,
) -> Iterator[pa.RecordBatch]:
    """The messages of ranges of a segment, in order.

    Args:
        segment: where they are.
        ranges: lo and hi of each range, in order.
        columns: the columns to read; seq is one of them.
        options: see `folders.folder`.

    Raises:
        FileNotFoundError: a file is gone.
        PgQueueError: the files cannot be read.
    """
    from pyarrow import fs, parquet

    with folder(segment.uri, options) as (system, path):
        is_local = isinstance(system, fs.LocalFileSystem)
        for each in segment.files:
            mine = overlapping(ranges, each.lo, each.hi)
            if not mine:
                continue
            with (
                system.open_input_file(f"{path}/{segment.folder}/{each.name}") as source,
                parquet.ParquetFile(source, pre_buffer=not is_local) as file,
            ):
                yield from _read(file, mine, columns)


def _read(
    file: ParquetFile, ranges: Sequence[tuple[int, int]], columns: list[str]
) -> Iterator[pa.RecordBatch]:
    groups, widest = [], 1
    for index in range(file.metadata.num_row_groups):
        group = file.metadata.row_group(index)
        seqs = group.column(0).statistics
        if overlapping(ranges, seqs.min, seqs.max + 1):
            groups.append(index)
            widest = max(widest, group.total_byte_size // group.num_rows)
    rows = max(1, BATCH_BYTES // widest)
    for batch in file.iter_batches(batch_size=rows, row_groups=groups, columns=columns):
        if wanted := within(batch, ranges):
            yield wanted


R = TypeVar("R", bound=tuple[Any, ...])


def overlapping(ranges: Sequence[R], lo: int, hi: int) -> Sequence[R]:
    """Those of ranges, which are in order and begin with lo and hi, that have such numbers."""
    first = bisect_right(ranges, lo, key=lambda each: each[1])
    return ranges[first : bisect_left(ranges, hi, lo=first, key=lambda each: each[0])]


def within(batch: pa.RecordBatch, ranges: Sequence[tuple[int, int]]) -> pa.RecordBatch | None:
    """The messages of a batch, in order of seq, that are in ranges; None for none."""
    import pyarrow.compute as pc

    seqs = batch["seq"]
    first, last = seqs[0].as_py(), seqs[-1].as_py()
    mine = [(max(lo, first), min(hi, last + 1)) for lo, hi in overlapping(ranges, first, last + 1)]
    if mine == [(first, last + 1)]:
        return batch
    if not mine:
        return None
    if len(mine) == 1:
        ((lo, hi),) = mine
        low = pc.call_function("greater_equal", [seqs, lo])
        mask = pc.call_function("and", [low, pc.call_function("less", [seqs, hi])])
    else:
        mask = pc.call_function("is_in", [seqs], pc.SetLookupOptions(value_set=numbers(mine)))
    found = batch.filter(mask)
    return found if found.num_rows else None
