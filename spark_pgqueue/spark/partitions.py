"""Partitions: which share of a micro-batch each task reads."""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple, TypeVar

from pyspark.sql.datasource import InputPartition

from spark_pgqueue.spark.consumer import Consumer, Stream
from spark_pgqueue.spark.options import CursorOptions, SourceOptions, TableOptions

MESSAGES_PER_PARTITION = 125_000
"""By default; a partition costs Spark about 25 ms, reading so many messages twenty times that."""

BUCKETS = 8
"""A batch that is read by key has so many partitions, or as many as `SCANNED` allows."""

SCANNED = 2_000_000
"""How many rows the server may look at so that more partitions have their keys of a batch: some
0.6 s of its time."""


class Range(NamedTuple):
    """Messages lo <= seq < hi, all of one priority and delivered equally often.

    `shift` and a seq are its arrival, which grows in the order of delivery in a micro-batch.
    """

    lo: int
    hi: int
    priority: int
    deliver_count: int
    shift: int = 0


class Ranges(tuple[Range, ...]):
    """Ranges that travel fast: 200,000 of one message each in some 100 ms, and once for all
    partitions that have the same.
    """

    _packed: bytes | None = None

    def __reduce__(self) -> tuple[Callable[[bytes], Ranges], tuple[bytes]]:
        # (Not a cached_property: up to Python 3.11 that has a lock, and a class with a lock cannot
        # travel with a query.)
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
    """Ranges of lo, hi, priority and deliver_count in the order of delivery, with their shifts."""
    ranges: list[Range] = []
    shift = last = 0
    for each in found:
        if each[0] < last:
            shift += last - each[0]
        last = each[1]
        ranges.append(Range(*each, shift))
    return ranges


class Run(NamedTuple):
    """Messages lo <= seq < hi, of which the same is known: row `no` of what is known of ranges."""

    lo: int
    hi: int
    no: int


@dataclass(frozen=True)
class Batch:
    """A micro-batch: the claims of a reader after one and up to another.

    Attributes:
        reader: the reader's uuid.
        after: the last claim before it.
        end: its last claim.
        lost: how many of its messages the reader had lost when it was planned.
    """

    reader: str
    after: int
    end: int
    lost: int = 0


@dataclass(frozen=True)
class Piece(InputPartition):
    """Messages of a stream: all that an executor needs to know to read them.

    Attributes:
        index: its number among the partitions of the batch; also its bucket.
        stream_id: the stream's id; its messages are in the table messages_<stream_id>.
        kind: text, json or binary.
        stream: the stream's name.
        ranges: what to read, in the order of delivery.
        buckets: if more than 1, read only the keys whose hash modulo buckets is index.
    """

    index: int
    stream_id: int
    kind: str
    stream: str
    ranges: tuple[Range, ...]
    buckets: int = 1

    @property
    def messages(self) -> int:
        """How many messages its ranges have, of all keys."""
        return sum(each.hi - each.lo for each in self.ranges)


@dataclass(frozen=True, kw_only=True)
class ClaimedPiece(Piece):
    """A partition of what a consumer's reader has claimed.

    Attributes:
        batch: the micro-batch that it is a part of.
    """

    batch: Batch


@dataclass(frozen=True)
class CursorPartition(InputPartition):
    """A partition of what is read without a consumer.

    Attributes:
        pieces: its share of each stream.
    """

    pieces: tuple[Piece, ...]


def cut_into_pieces(
    ranges: list[Range], batch: Batch, consumer: Consumer, options: SourceOptions
) -> list[ClaimedPiece]:
    """Partitions of equal size, in the order of delivery, that together read `ranges`.

    With ordering by key each partition reads all of the ranges, but only a share of the keys: so
    all messages of a key are in one partition, in order; unless keyOrder says that the query puts
    them in order itself. With ordering by stream there is one.
    """
    total = sum(each.hi - each.lo for each in ranges)
    count = 1 if consumer.ordering == "stream" else piece_count(total, options)

    def piece(index: int, ranges: Ranges, buckets: int) -> ClaimedPiece:
        return ClaimedPiece(
            *(index, consumer.stream_id, consumer.kind, options.stream, ranges, buckets),
            batch=batch,
        )

    if consumer.ordering == "key" and options.key_order == "partition":
        # The server looks at every message for each partition.
        count = min(count, max(BUCKETS, SCANNED // (total or 1)))
        every = Ranges(ranges)
        return [piece(index, every, count) for index in range(count if total else 0)]
    shares = split(ranges, count) if total else []
    return [piece(index, Ranges(share), 1) for index, share in enumerate(shares)]


class _RangeOf(NamedTuple):
    """A range of one of several streams."""

    lo: int
    hi: int
    stream: str


def cut_streams(
    ranges: dict[str, list[Range]], streams: dict[str, Stream], options: CursorOptions
) -> list[CursorPartition]:
    """Partitions of equal size that together read the ranges of all streams, one after the other.

    Args:
        ranges: what to read of each stream, by its name.
        streams: the streams, by their names.
        options: the query's.
    """
    line = [_RangeOf(each.lo, each.hi, name) for name in ranges for each in ranges[name]]
    total = sum(each.hi - each.lo for each in line)
    shares = split(line, piece_count(total, options)) if total else []
    return [
        CursorPartition(
            tuple(
                Piece(
                    *(index, streams[name].stream_id, streams[name].kind, name),
                    Ranges(Range(each.lo, each.hi, 0, 0) for each in mine),
                )
                for name, mine in groupby(share, key=lambda each: each.stream)
            )
        )
        for index, share in enumerate(shares)
    ]


R = TypeVar("R", Range, Run, _RangeOf)


def split(ranges: list[R], count: int) -> list[list[R]]:
    """Cut a sequence of ranges into `count` sequences that differ by one message at most."""
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


def piece_count(total: int, options: SourceOptions | CursorOptions | TableOptions) -> int:
    """How many partitions so many messages are read in."""
    most = options.max_records_per_partition or total or 1
    least = options.min_partitions or -(-total // MESSAGES_PER_PARTITION)
    return max(1, min(total, options.max_connections or total, max(least, -(-total // most))))


def after(ranges: tuple[Range, ...], seq: int) -> tuple[Range, ...]:
    """What is left of ranges once everything up to `seq`, which is in one of them, was read."""
    for index, each in enumerate(ranges):
        if each.lo <= seq < each.hi:
            rest = ranges[index + 1 :]
            return (each._replace(lo=seq + 1), *rest) if seq + 1 < each.hi else rest
    return ranges
