"""The input partitions of a micro-batch: which messages each task reads."""

from __future__ import annotations

import math
import zlib
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple, TypeVar

from pyspark.sql.datasource import InputPartition

from spark_pgqueue.archive.files import Segment, overlapping
from spark_pgqueue.spark.columns import Stream
from spark_pgqueue.spark.options.source import SourceOptions
from spark_pgqueue.spark.options.stream_source import StreamSourceOptions
from spark_pgqueue.spark.options.table import TableOptions

MESSAGES_PER_PARTITION = 125_000
"""The default. A partition costs Spark 25 ms; reading this many messages takes 20 times that."""

BUCKETS = 8
"""A batch that is read by key has at most this many partitions, or more if `SCANNED` allows."""

ARCHIVED_PER_PARTITION = 1_000_000
"""The same for messages in the files of an archive, which are read four to five times as fast. A
partition costs 25 to 40 ms here too, and of twice the size, half as many."""

SCANNED = 2_000_000
"""How many rows the server may scan for more partitions than `BUCKETS`: about 0.6 s of its time.
Each partition scans the whole batch for its keys."""


class Range(NamedTuple):
    """Messages lo <= seq < hi, all of one priority and one deliver_count.

    A message's arrival is its seq plus `shift`; it grows in the order of delivery in a micro-batch.
    """

    lo: int
    hi: int
    priority: int
    deliver_count: int
    shift: int = 0


class Ranges(tuple[Range, ...]):
    """Ranges that pickle fast: 200,000 ranges of one message take about 100 ms.

    Partitions that share the same ranges pack them once.
    """

    _packed: bytes | None = None

    def __reduce__(self) -> tuple[Callable[[bytes], Ranges], tuple[bytes]]:
        # (Not a cached_property: up to Python 3.11 it has a lock, and a class with a lock cannot be
        # pickled by value.)
        if self._packed is None:
            columns = [array("q", column) for column in zip(*self, strict=True)]
            self._packed = zlib.compress(b"".join(column.tobytes() for column in columns), 1)
        return _unpacked, (self._packed,)


def _unpacked(packed: bytes) -> Ranges:
    values = array("q", zlib.decompress(packed))
    size = len(values) // len(Range._fields)
    columns = (values[first : first + size] for first in range(0, len(values), size or 1))
    return Ranges(map(Range._make, zip(*columns, strict=True)))


def in_order(found: Iterable[tuple[int, int, int, int]]) -> list[Range]:
    """Ranges in the order of delivery, with their shifts, from their other fields."""
    ranges: list[Range] = []
    shift = last = 0
    for each in found:
        if each[0] < last:
            shift += last - each[0]
        last = each[1]
        ranges.append(Range(*each, shift))
    return ranges


class KnownRange(NamedTuple):
    """Messages lo <= seq < hi for which row `no` of a table has the known columns."""

    lo: int
    hi: int
    no: int


@dataclass(frozen=True)
class Batch:
    """A micro-batch: the claims of a checkpoint reader after one claim and up to another."""

    reader: str  # the checkpoint reader's uuid
    after: int  # the last claim before the batch
    end: int  # the last claim of the batch
    lost: int = 0  # how many messages of the batch the reader had lost when the batch was planned


@dataclass(frozen=True)
class MessagePartition(InputPartition):
    """Messages of a stream: all that an executor needs to read them."""

    index: int  # the partition's number in the batch; also the number of its bucket
    stream_id: int  # the stream's id; the messages are in the table messages_<stream_id>
    kind: str  # text, json or binary
    stream: str  # the stream's name
    ranges: tuple[Range, ...]  # the messages to read, in the order of delivery
    buckets: int = 1  # if more than 1, read only keys whose hash modulo buckets is index

    @property
    def messages(self) -> int:
        """The number of messages of the ranges, of all keys."""
        return sum(each.hi - each.lo for each in self.ranges)


@dataclass(frozen=True, kw_only=True)
class ClaimedPartition(MessagePartition):
    """An input partition of messages that a checkpoint reader has claimed."""

    batch: Batch  # the micro-batch of the partition


@dataclass(frozen=True, kw_only=True)
class ArchivedPartition(MessagePartition):
    """Messages of a stream in the files of its archive."""

    segments: tuple[Segment, ...]  # where they are


@dataclass(frozen=True)
class OffsetPartition(InputPartition):
    """An input partition of the offset source."""

    parts: tuple[MessagePartition, ...]  # the messages to read of each stream


def cut_into_partitions(
    ranges: list[Range], batch: Batch, stream: Stream, ordering: str, options: SourceOptions
) -> list[ClaimedPartition]:
    """Partitions of equal size, in the order of delivery, that together read `ranges`.

    With ordering by key, each partition reads all ranges, but only a share of the keys. So all
    messages of a key are in one partition, in order. With keyOrder=column the query restores the
    order itself, and the ranges are split. With ordering by stream there is one partition.
    """
    total = sum(each.hi - each.lo for each in ranges)
    count = 1 if ordering == "stream" else partition_count(total, options)

    def partition(index: int, ranges: Ranges, buckets: int) -> ClaimedPartition:
        return ClaimedPartition(
            *(index, stream.stream_id, stream.kind, options.stream, ranges, buckets),
            batch=batch,
        )

    if ordering == "key" and options.key_order == "partition":
        # The server scans every message for each partition.
        count = min(count, max(BUCKETS, SCANNED // (total or 1)))
        every = Ranges(ranges)
        return [partition(index, every, count) for index in range(count if total else 0)]
    shares = split(ranges, count) if total else []
    return [partition(index, Ranges(share), 1) for index, share in enumerate(shares)]


class _RangeOf(NamedTuple):
    """A range of one of several streams, in the files of its archive or in Postgres."""

    lo: int
    hi: int
    stream: str
    is_archived: bool


def cut_streams(
    ranges: dict[str, list[Range]],
    streams: dict[str, Stream],
    archives: Mapping[str, Sequence[Segment]],
    options: StreamSourceOptions,
) -> list[OffsetPartition]:
    """Partitions of equal size that together read the ranges of all streams, stream by stream.

    `archives` has the segments of each stream that are in files, in order.
    """
    line = [
        each for name in ranges for each in _by_place(name, ranges[name], archives.get(name, ()))
    ]
    total = sum(each.hi - each.lo for each in line)
    archived = sum(each.hi - each.lo for each in line if each.is_archived)
    usual = (total - archived) / MESSAGES_PER_PARTITION + archived / ARCHIVED_PER_PARTITION
    shares = split(line, partition_count(total, options, math.ceil(usual))) if total else []

    def part(
        index: int, name: str, is_archived: bool, mine: Iterable[_RangeOf]
    ) -> MessagePartition:
        about = (index, streams[name].stream_id, streams[name].kind, name)
        ranges = Ranges(Range(each.lo, each.hi, 0, 0) for each in mine)
        if not is_archived:
            return MessagePartition(*about, ranges)
        lo, hi = ranges[0].lo, ranges[-1].hi
        segments = tuple(each.within(lo, hi) for each in overlapping(archives[name], lo, hi))
        return ArchivedPartition(*about, ranges, segments=segments)

    return [
        OffsetPartition(
            tuple(
                part(index, *place, mine)
                for place, mine in groupby(share, key=lambda each: (each.stream, each.is_archived))
            )
        )
        for index, share in enumerate(shares)
    ]


def _by_place(stream: str, ranges: list[Range], segments: Sequence[Segment]) -> Iterable[_RangeOf]:
    """The ranges of a stream, cut where a segment that is in files begins or ends."""
    for each in ranges:
        lo = each.lo
        for segment in overlapping(segments, each.lo, each.hi):
            if lo < segment.lo:
                yield _RangeOf(lo, segment.lo, stream, False)
            begin, lo = max(lo, segment.lo), min(each.hi, segment.hi)
            yield _RangeOf(begin, lo, stream, True)
        if lo < each.hi:
            yield _RangeOf(lo, each.hi, stream, False)


R = TypeVar("R", Range, KnownRange, _RangeOf)
K = TypeVar("K", Range, KnownRange)


def split(ranges: list[R], count: int) -> list[list[R]]:
    """Cut ranges into `count` lists whose numbers of messages differ by at most one."""
    total = sum(each.hi - each.lo for each in ranges)
    shares: list[list[R]] = [[] for _ in range(count)]
    share, done = 0, 0
    for each in ranges:
        lo = each.lo
        while lo < each.hi:
            end = total * (share + 1) // count
            hi = min(each.hi, lo + end - done)
            whole = hi - lo == each.hi - each.lo
            shares[share].append(each if whole else each._replace(lo=lo, hi=hi))
            done += hi - lo
            lo = hi
            share += done == end
    return shares


def partition_count(
    total: int,
    options: SourceOptions | StreamSourceOptions | TableOptions,
    usual: int | None = None,
) -> int:
    """The number of partitions for `total` messages; `usual` if the options do not decide."""
    most = options.max_records_per_partition or total or 1
    least = options.min_partitions or usual or -(-total // MESSAGES_PER_PARTITION)
    return max(1, min(total, options.max_connections or total, max(least, -(-total // most))))


def cut_behind(
    ranges: tuple[K, ...], seq: int, no: int | None = None
) -> tuple[tuple[K, ...], tuple[K, ...]]:
    """The ranges up to message `seq`, which is in one of them, and the rest.

    Known ranges may overlap: of these, `no` is the number of its range.
    """
    for index, each in enumerate(ranges):
        if each.lo <= seq < each.hi and (no is None or no == each[2]):
            here = (*ranges[:index], each._replace(hi=seq + 1))
            rest = ranges[index + 1 :]
            return here, (each._replace(lo=seq + 1), *rest) if seq + 1 < each.hi else rest
    return (), ranges
