"""Reading messages from the files of an archive."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from spark_pgqueue.archive.folders import Folder, failed, folder
from spark_pgqueue.archive.layout import ArchiveFile, schema
from spark_pgqueue.archive.pieces import OfPiece, row_groups
from spark_pgqueue.postgres.errors import PgQueueError
from spark_pgqueue.postgres.payloads import BATCH_BYTES, numbers

if TYPE_CHECKING:
    import pyarrow as pa
    from pyarrow.parquet import FileMetaData, ParquetFile


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
        """A row of the function.

        Raises:
            PgQueueError: an exporter would not describe a file so.
        """
        found, above = list[ArchiveFile](), lo
        try:
            if not isinstance(files, list):
                raise TypeError("it is not a list of files")
            for each in files:
                found.append(_noted(each, above, hi))
                above = found[-1].hi
        except (TypeError, ValueError) as error:
            raise _damaged(f"the manifest of {folder}", error) from error
        return cls(lo, hi, uri, folder, tuple(found))

    def within(self, lo: int, hi: int) -> Segment:
        """The segment with those of its files alone that have numbers from lo to below hi."""
        return self._replace(files=tuple(f for f in self.files if f.lo < hi and f.hi > lo))


def _noted(each: dict[str, Any], lo: int, hi: int) -> ArchiveFile:
    """A file of the manifest, with numbers from lo to below hi, as `end_export` takes it.

    Raises:
        TypeError, ValueError: an exporter would not describe a file so.
    """
    about = ArchiveFile(**each)
    counts = (about.lo, about.hi, about.messages, about.bytes, about.footer_bytes)
    digests = (about.sha256, about.footer_sha256)
    is_old = each.keys().isdisjoint(ArchiveFile._field_defaults)
    if (
        any(type(count) is not int for count in counts)
        or not lo <= about.lo < about.hi <= hi
        or not 0 < about.messages <= about.hi - about.lo
        or not (is_old or 0 < about.footer_bytes <= about.bytes)
        or not (is_old or all(re.fullmatch("[0-9a-f]{64}", str(digest)) for digest in digests))
    ):
        raise ValueError(f"no exporter writes {str(each)[:500]} after number {lo - 1}")
    return about


def read(
    segment: Segment,
    kind: str,
    ranges: Sequence[tuple[int, int]],
    columns: list[str],
    options: Mapping[str, Any] | None,
) -> Iterator[pa.RecordBatch]:
    """The messages of ranges of a segment, in order, and as they were written.

    Args:
        segment: where they are.
        kind: of the stream.
        ranges: lo and hi of each range, in order.
        columns: the columns to read; seq is one of them.
        options: see `folders.folder`.

    Raises:
        FileNotFoundError: a file is gone.
        PgQueueError: a file is damaged, or cannot be read.
    """
    with folder(segment.uri, options) as place:
        for each in segment.files:
            if mine := overlapping(ranges, each.lo, each.hi):
                yield from read_file(place, segment.folder, each, kind, mine, columns)


def read_file(
    place: Folder,
    folder: str,
    about: ArchiveFile,
    kind: str,
    ranges: Sequence[tuple[int, int]],
    columns: list[str],
) -> Iterator[pa.RecordBatch]:
    """The messages of ranges of a file. Arguments, returns and errors as `read`."""
    import pyarrow as pa

    path = place.below(folder, about.name)
    try:
        with place.system.open_input_file(path) as source:
            for batch in _checked(_batches(source, about, kind, ranges, columns), about):
                if wanted := within(batch, ranges):
                    yield wanted
    except FileNotFoundError:
        raise  # the caller decides what that means
    except (OSError, ValueError, pa.ArrowException) as error:
        if about.sha256 and isinstance(error, OSError):  # Parquet's errors are OSErrors, too
            raise failed(path, error) from error
        raise _damaged(f"the file {path}", error) from error


def verify(place: Folder, folder: str, about: ArchiveFile, kind: str) -> None:
    """Read a file whole. Arguments and errors as `read_file`."""
    columns, every = schema(kind).names, [(about.lo, about.hi)]
    for _ in read_file(place, folder, about, kind, every, columns):
        pass


def _damaged(what: str, error: Exception) -> PgQueueError:
    return PgQueueError(
        f"{what} of the archive is damaged: {error}",
        hint="restore it from a copy; to continue without its messages, move it away and set "
        "failOnDataLoss to false",
    )


def _batches(
    source: pa.NativeFile,
    about: ArchiveFile,
    kind: str,
    ranges: Sequence[tuple[int, int]],
    columns: list[str],
) -> Iterator[pa.RecordBatch]:
    """The row groups that have numbers of ranges, after a check of their bytes."""
    if (size := source.size()) != about.bytes:
        raise ValueError(f"it has {size} bytes, and its manifest says {about.bytes}")
    file, group_of = _opened(source, about)
    metadata = file.metadata
    if metadata.num_rows != about.messages:
        raise ValueError(f"it has {metadata.num_rows} rows, and its manifest says {about.messages}")
    if not file.schema_arrow.equals(schema(kind)):
        raise ValueError(f"its columns are not those of a stream of kind {kind}")
    for index in range(metadata.num_row_groups):
        group = metadata.row_group(index)
        seqs = group.column(0).statistics
        if seqs and seqs.has_min_max and not overlapping(ranges, seqs.min, seqs.max + 1):
            continue
        widest = group.total_byte_size // max(1, group.num_rows)
        rows, most = 0, max(1, BATCH_BYTES // max(1, widest))
        for batch in group_of(index).iter_batches(most, row_groups=[index], columns=columns):
            rows += batch.num_rows
            yield batch
        if rows != group.num_rows:
            raise ValueError(f"row group {index} has {rows} rows, and not {group.num_rows}")


def _opened(
    source: pa.NativeFile, about: ArchiveFile
) -> tuple[ParquetFile, Callable[[int], ParquetFile]]:
    """The file of the metadata, and a function that returns the file of each row group."""
    import pyarrow as pa
    from pyarrow import parquet

    def opened(where: Any, metadata: FileMetaData | None = None) -> ParquetFile:
        return parquet.ParquetFile(where, metadata=metadata, page_checksum_verification=True)

    if about.sha256 is None:
        whole = opened(source)
        return whole, lambda index: whole
    found = about.footer.read(source)
    metadata = parquet.read_metadata(pa.BufferReader(found))
    pieces = row_groups(metadata, about.footer)

    def group_of(index: int) -> ParquetFile:
        piece = pieces[index]
        return opened(OfPiece(piece.read(source), piece.offset, about.bytes), metadata)

    return opened(OfPiece(found, about.footer.offset, about.bytes), metadata), group_of


def _checked(batches: Iterator[pa.RecordBatch], about: ArchiveFile) -> Iterator[pa.RecordBatch]:
    """Batches whose numbers go up, within those of the file."""
    import pyarrow.compute as pc

    above = about.lo - 1
    for batch in batches:
        seqs = batch["seq"]
        if not batch.num_rows:
            continue
        if about.sha256 is None:
            batch.validate(full=True)
        first, last = (seqs[i].as_py() or 0 for i in (0, -1))
        up = pc.call_function("greater", [seqs.slice(1), seqs.slice(0, len(seqs) - 1)])
        if first <= above or last >= about.hi or up.true_count < len(up):
            raise ValueError(f"its numbers do not go up from {about.lo} to below {about.hi}")
        above = last
        yield batch


R = TypeVar("R", bound=tuple[Any, ...])


def overlapping(ranges: Sequence[R], lo: int, hi: int) -> Sequence[R]:
    """The ranges, of those in order that begin with lo and hi, that overlap lo to below hi."""
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
