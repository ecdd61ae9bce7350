"""The files of an archive.

A segment is in one folder, `<uri>/<incarnation>/<segment>`, and its messages are in the files
`<attempt>-<n>.parquet` there, from n = 1 on. The messages are sorted by seq within a file and from
file to file. guide/archive.md describes the columns, for other programs.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from spark_pgqueue.archive.folders import Folder, make_durable
from spark_pgqueue.archive.pieces import KEY, Piece, Written

if TYPE_CHECKING:
    import pyarrow as pa

FILE_MESSAGES, FILE_BYTES = 1_000_000, 1 << 30
"""A file is closed when it has this many messages, or bytes before compression."""

GROUP_MESSAGES, GROUP_BYTES = 25_000, 64 << 20
"""The same for a row group. A task reads whole row groups, of which it may need a part."""


_WITH_DICTIONARY: Any = [
    *("key", "headers.key_value.key", "headers.key_value.value", "inserted_at", "publication_id"),
    *("published_at", "deliver_at", "expires_at", "priority", "consumers.list.element"),
]
"""All columns but seq and data, by their paths in the file. Few values of these two repeat. Without
a dictionary that overflows, a file is written and read in 0.85 of the time, and is 0.86 as large.
"""


class ArchiveFile(NamedTuple):
    """A file of an archive, as the manifest has it.

    Attributes:
        name: below the folder of its segment.
        lo: the first number in it.
        hi: the number after the last one in it.
        messages: how many messages it has.
        bytes: its size.
        sha256: the digest of all of it, in hexadecimal; None in files that 0.1.0 wrote.
        footer_bytes: the size of its footer, from the end of the last row group on.
        footer_sha256: the digest of the footer.
    """

    name: str
    lo: int
    hi: int
    messages: int
    bytes: int
    sha256: str | None = None
    footer_bytes: int = 0
    footer_sha256: str = ""

    @property
    def footer(self) -> Piece:
        """The last piece of it."""
        return Piece(self.bytes - self.footer_bytes, self.footer_bytes, self.footer_sha256)


def schema(kind: str) -> pa.Schema:
    """The columns of a file.

    Args:
        kind: of the stream: text, json or binary.
    """
    import pyarrow as pa

    moment = pa.timestamp("us", "UTC")
    return pa.schema(
        [
            pa.field("seq", pa.int64(), nullable=False),
            pa.field("key", pa.string()),
            pa.field("data", pa.binary() if kind == "binary" else pa.string(), nullable=False),
            pa.field("headers", pa.map_(pa.string(), pa.string())),
            pa.field("inserted_at", moment, nullable=False),
            pa.field("publication_id", pa.int64(), nullable=False),
            pa.field("published_at", moment, nullable=False),
            pa.field("deliver_at", moment),
            pa.field("expires_at", moment),
            pa.field("priority", pa.int32(), nullable=False),
            pa.field("consumers", pa.list_(pa.string())),
        ]
    )


def write(
    place: Folder, folder: str, attempt: str, kind: str, rows: Iterable[pa.Table]
) -> list[ArchiveFile]:
    """Write the messages of a segment.

    Args:
        place: the archive.
        folder: the segment's, below it.
        attempt: what the names of the files begin with.
        kind: of the stream.
        rows: the messages in order, in tables that fit into memory.

    Raises:
        PgQueueError: a file cannot be written.
    """
    import pyarrow as pa

    if place.is_local:
        place.system.create_dir(place.below(folder))
    files: list[ArchiveFile] = []
    groups = map(pa.concat_tables, _cut(rows, GROUP_MESSAGES, GROUP_BYTES))
    for tables in _cut(groups, FILE_MESSAGES, FILE_BYTES):
        name = f"{attempt}-{len(files) + 1}.parquet"
        path = place.below(folder, name)
        with place.system.open_output_stream(path) as stream:
            files.append(_write(stream, name, kind, tables))
        if place.is_local:
            make_durable(path)
    return files


def _write(stream: pa.NativeFile, name: str, kind: str, tables: Iterable[pa.Table]) -> ArchiveFile:
    from pyarrow import parquet

    written, groups, numbers, messages = Written(stream), [], [], 0
    with parquet.ParquetWriter(
        written,
        schema(kind),
        compression="zstd",
        use_dictionary=_WITH_DICTIONARY,
        column_encoding={"seq": "DELTA_BINARY_PACKED"},
        sorting_columns=[parquet.SortingColumn(0)],
        write_page_checksum=True,
    ) as writer:
        for table in tables:
            writer.write_table(table, row_group_size=len(table))
            groups.append(written.piece())
            numbers += [table["seq"][0].as_py(), table["seq"][-1].as_py()]
            messages += len(table)
        writer.add_key_value_metadata({KEY: json.dumps(groups)})
    footer = written.piece()
    return ArchiveFile(
        *(name, numbers[0], numbers[-1] + 1, messages, written.tell(), written.sha256),
        *(footer.bytes, footer.sha256),
    )


def delete(place: Folder, folder: str, attempt: str, keep_folder: bool = False) -> None:
    """Delete the files of an attempt; those that are gone already are no error.

    Args:
        place: the archive.
        folder: the segment's, below it. On a local disk it is deleted, too, if it is empty.
        attempt: what the names of the files begin with.
        keep_folder: for a caller without the export lock: another exporter may be about to write
            into the folder.
    """
    from pyarrow import fs

    path = place.below(folder)
    found = place.system.get_file_info(fs.FileSelector(path, allow_not_found=True))
    mine = [each for each in found if each.base_name.startswith(f"{attempt}-")]
    for each in mine:
        with suppress(FileNotFoundError):
            place.system.delete_file(each.path)
    if place.is_local and not keep_folder:
        with suppress(OSError):  # not there, or not empty: an exporter without the lock is late
            Path(path).rmdir()


class Publications:
    """The columns of the messages of a slice that come from publications.

    Args:
        ranges: as `pgqueue.export_ranges` returns them.
        kind: of the stream.
    """

    def __init__(self, ranges: pa.Table, kind: str):
        import pyarrow as pa
        import pyarrow.compute as pc

        self._schema, self._ranges, self._done = schema(kind), ranges.combine_chunks(), 0
        lo, hi = (self._ranges[name].combine_chunks() for name in ("lo", "hi"))
        sizes = pc.call_function("subtract", [hi, lo])
        ends = pc.call_function("cumulative_sum", [sizes])
        runs = pa.RunEndEncodedArray.from_arrays(ends, _counted(len(ranges)))
        self._which = pc.call_function("run_end_decode", [runs])
        # The number of a message is its place in the slice, and how far its range is ahead of that.
        ahead = pc.call_function(
            "subtract", [lo, pc.call_function("subtract", [ends, sizes])]
        ).take(self._which)
        self._seqs = pc.call_function("add", [_counted(len(ahead)), ahead])

    def added_to(self, messages: pa.RecordBatch) -> pa.Table | None:
        """The rows of the next messages, without those that no publication has.

        None where a message is missing among them.
        """
        import pyarrow as pa
        import pyarrow.compute as pc

        seqs = self._seqs.slice(self._done, len(messages))
        if not messages["seq"].equals(seqs):
            wanted = pc.SetLookupOptions(value_set=self._seqs)
            messages = messages.filter(pc.call_function("is_in", [messages["seq"]], wanted))
            seqs = self._seqs.slice(self._done, len(messages))
            if not messages["seq"].equals(seqs):
                return None
        which = self._which.slice(self._done, len(messages))
        self._done += len(messages)
        columns = {name: messages[name] for name in messages.schema.names}
        for name in self._ranges.column_names[2:]:
            columns[name] = self._ranges[name].take(which)
        return pa.table([columns[name] for name in self._schema.names], schema=self._schema)

    @property
    def is_complete(self) -> bool:
        """Whether all messages were added."""
        return self._done == len(self._seqs)


def _counted(count: int) -> pa.Int64Array:
    """The numbers from 0 to below `count`."""
    import pyarrow as pa
    import pyarrow.compute as pc

    ones = pa.repeat(pa.scalar(1, pa.int64()), count)
    return pc.call_function("subtract", [pc.call_function("cumulative_sum", [ones]), 1])


def _cut(tables: Iterable[pa.Table], most: int, most_bytes: int) -> Iterator[Iterator[pa.Table]]:
    """Tables in groups: a group ends when it has enough rows, or enough bytes."""
    rest = (each for each in tables if len(each))
    for first in rest:

        def group(table: pa.Table = first) -> Iterator[pa.Table]:
            rows, size = len(table), table.nbytes
            yield table
            while rows < most and size < most_bytes and (more := next(rest, None)) is not None:
                rows, size = rows + len(more), size + more.nbytes
                yield more

        yield group()
