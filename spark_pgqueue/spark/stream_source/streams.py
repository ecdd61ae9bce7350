"""The streams of the offset source: finding them, their first positions, and the next messages."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from contextlib import closing
from typing import Any

from psycopg.types.json import Jsonb

from spark_pgqueue.archive.files import Segment
from spark_pgqueue.postgres.errors import (
    DATA_LOSS,
    FOREIGN_CHECKPOINT,
    UNKNOWN_STREAM,
    PgQueueError,
)
from spark_pgqueue.postgres.statements import Statements
from spark_pgqueue.printable import warn
from spark_pgqueue.spark.columns import Stream, check_kinds
from spark_pgqueue.spark.options.stream_source import (
    STREAM_SOURCE_NAMES,
    StreamSourceOptions,
    parse_stream_source,
)
from spark_pgqueue.spark.partitions import OffsetPartition, Range, cut_streams
from spark_pgqueue.spark.platform.pyspark_compat import TELLS_START
from spark_pgqueue.spark.stream_source.offsets import Position, StreamOffsets, position_of

DISCOVERY_SECONDS = 1.0
"""The highest age in seconds of the list of streams that match a pattern."""

THE_CHECKPOINT = "the checkpoint"


def offsets(url: str, *streams: str) -> str:
    """The ends of streams as they are now, to read up to there, and later to go on from there.

    It is a value for `endingOffsets` of a batch, and for `startingOffsets` of the query that reads
    the rest: each message is in one of the two. Times and numbers of messages do not ensure that:
    messages of transactions that are still open are sent before such a bound, and visible after it.

        >>> here = spark_pgqueue.offsets(url, "orders")
        >>> pgqueue = {"url": url, "stream": "orders"}
        >>> old = spark.read.format("pgqueue").options(**pgqueue, endingOffsets=here).load()
        >>> live = spark.readStream.format("pgqueue").options(**pgqueue, startingOffsets=here)
        >>> old.count()
        2

    Args:
        url: the database, as in the option.
        streams: names of streams.

    Returns:
        JSON with an offset for each stream. Each of them is also a position: for `create_consumer`
        and `seek` of the client, `pgqueue consumer create --start`, option startingPosition.

    Raises:
        PgQueueError: PQ001 when a stream does not exist; or Postgres cannot be reached.
    """
    options = parse_stream_source({"url": url, "streams": ",".join(streams)})
    with closing(Streams(options, patience=0)) as found:
        ends = {name: found.position_at(name, "latest") for name in found.find()}
    return json.dumps({name: {"stream": name} | ends[name] for name in ends})


# An end that was found without the start may lack deleted messages.
_END = "a.t" if TELLS_START else "pgqueue.end_after(a.stream, a.f, a.t)"


class Streams:
    """A connection that reads streams by offsets.

    Its methods raise a PgQueueError for a stream that is gone, was made again or has no such place
    or group; for streams whose data do not fit one column, of type `data` where that is known; for
    messages that retention has deleted if failOnDataLoss is true; and if Postgres stays away.
    """

    def __init__(self, options: StreamSourceOptions, patience: float, data: str | None = None):
        self._options = options
        self._offset_is = THE_CHECKPOINT
        self._statements = Statements(
            options.url, patience=patience, repeat=True, names=self._name_of
        )
        self._found: dict[str, Stream] = {}
        self._found_at = float("-inf")
        self._data = data
        self._reads_archive = options.archive == "auto"

    def close(self) -> None:
        """Close the connection."""
        self._statements.close()

    def find(self) -> dict[str, Stream]:
        """The streams to read, by name, in order; of a pattern, the streams that exist now."""
        names, pattern = self._options.names, self._options.stream_pattern
        if self._found and names is not None:
            return self._found
        if time.monotonic() < self._found_at + DISCOVERY_SECONDS:
            return self._found
        if names is not None:
            rows = self._statements.rows(
                "select s.name, o.stream_id, o.kind from pg_catalog.unnest(%s::text[]) s (name) "
                "cross join lateral pgqueue.open_stream(s.name) o",
                [list(names)],
            )
        else:
            assert pattern is not None
            rows = self._statements.rows(
                "select stream, stream_id, kind from pgqueue.open_streams()"
            )
            rows = [row for row in rows if pattern.fullmatch(row[0])]
        found = {name: Stream(stream_id, kind) for name, stream_id, kind in sorted(rows)}
        check_kinds(found, self._data)
        if not found and self._found_at == float("-inf"):
            warn("streamPattern %s does not match any stream yet", self._options.title)
        self._found, self._found_at = found, time.monotonic()
        return found

    def forget(self) -> None:
        """Look for the streams again the next time."""
        self._found, self._found_at = {}, float("-inf")

    def position_at(self, stream: str, place: str) -> Position:
        """The position of a place in a stream: earliest, latest (of what is published by now), a
        time or a number.
        """
        (offset,) = self._statements.row(
            "select pgqueue.start_offset(%s::text, %s::text, %s)",
            [stream, place, self._reads_archive],
        )
        return position_of(offset)

    def end_at(self, stream: str, begin: Position, place: str) -> Position:
        """The same for the end of a query that began at `begin`."""
        (offset,) = self._statements.row(
            "select pgqueue.end_offset(%s::text, %s, %s::text, %s)",
            [stream, _offset(stream, begin), place, self._reads_archive],
        )
        return position_of(offset)

    def begin(self, stream: str, default: str) -> Position:
        """The position where a new query begins in a stream, by the options or `default`."""
        place = self._options.start_of(stream, default)
        if place is None:
            raise PgQueueError(
                f"option startingOffsets has no position for stream {stream!r}",
                hint='give one for each stream that the pattern finds now, such as "earliest"',
            )
        if isinstance(place, str):
            self._warn_of_open_transactions(stream, place)
            return self.position_at(stream, place)
        return self._checked("startingOffsets", stream, place)

    def end(self, stream: str, begin: Position) -> Position:
        """The position where a batch that begins at `begin` ends in a stream."""
        place = self._options.end_of(stream)
        if place is None:
            raise PgQueueError(
                f"option endingOffsets has no position for stream {stream!r}",
                hint='give one for each stream that the pattern finds, such as "latest"',
            )
        if isinstance(place, str):
            self._warn_of_open_transactions(stream, place)
            return self.end_at(stream, begin, place)
        return self._checked("endingOffsets", stream, place)

    def last_publications(self) -> dict[str, int]:
        """The last publication of each stream that is visible, or was trimmed."""
        found = self.find()
        return dict(
            self._statements.rows(
                "select s.name, pgqueue.last_publication(s.id) "
                "from unnest(%s::text[], %s::int[]) s (name, id)",
                [list(found), [each.stream_id for each in found.values()]],
            )
        )

    def note(self, positions: Mapping[str, Position]) -> None:
        """Store the query's positions as positions of the group of option group."""
        try:
            self._statements.rows(
                "select pgqueue.note_offset(a.stream, %s::text, a.o) "
                "from unnest(%s::text[], %s::jsonb[]) a (stream, o)",
                [self._options.group, list(positions), _offsets(positions)],
            )
        except PgQueueError as error:
            raise self._explained(error) from None

    def read_to(
        self,
        positions: Mapping[str, Position],
        most: Mapping[str, int] | int | None,
        bounds: Mapping[str, int] | None = None,
    ) -> dict[str, Position]:
        """The positions after the next messages of each stream: of `most`, or of all (of up to
        100,000 publications), and up to the publication that is its bound.
        """
        limits = most if isinstance(most, Mapping) else dict.fromkeys(positions, most)

        def read(names: list[str], skip: bool) -> dict[str, Position]:
            rows = self._statements.rows(
                "select a.stream, pgqueue.read_to(a.stream, a.o, a.most, a.upto, %s, %s) "
                "from unnest(%s::text[], %s::jsonb[], %s::bigint[], %s::bigint[]) "
                "a (stream, o, most, upto)",
                [
                    *(skip, self._reads_archive, names, _offsets(positions, names)),
                    [limits[name] for name in names],
                    [bounds[name] if bounds else None for name in names],
                ],
            )
            return {name: position_of(offset) for name, offset in rows}

        found = self._each(positions, read)
        return {name: found[name] for name in positions}

    def partitions(self, start: StreamOffsets, end: StreamOffsets) -> list[OffsetPartition]:
        """Partitions that together read the messages between two offsets."""
        spans = end.spans(start)
        found = self.find() if spans else {}
        if self._options.stream_pattern is not None and not self._options.fail_on_data_loss:
            for name in spans.keys() - found.keys():
                warn("stream %s was dropped before it was read", name)
            spans = {name: spans[name] for name in spans if name in found}

        def plan(names: list[str], skip: bool) -> dict[str, list[Range]]:
            sides = [[_offset(name, spans[name][side]) for name in names] for side in (0, 1)]
            rows = self._statements.rows(
                "select a.stream, p.lo, p.hi "
                "from unnest(%s::text[], %s::jsonb[], %s::jsonb[]) with ordinality "
                "a (stream, f, t, i) cross join lateral "
                f"pgqueue.read_plan(a.stream, a.f, {_END}, %s, %s) with ordinality p (lo, hi, j) "
                "order by a.i, p.j",
                [names, *sides, skip, self._reads_archive],
            )
            ranges: dict[str, list[Range]] = {}
            for name, lo, hi in rows:
                ranges.setdefault(name, []).append(Range(lo, hi, 0, 0))
            return ranges

        ranges = self._each(spans, plan)
        archives = self._archives(ranges, found) if self._reads_archive else {}
        return cut_streams(ranges, found, archives, self._options)

    def size(self, start: StreamOffsets, end: StreamOffsets) -> int:
        """The bytes of data between two offsets."""
        return sum(
            self._statements.row(
                "select pgqueue.size_between(%s::text, %s, %s, %s)",
                [name, *(_offset(name, each) for each in span), self._reads_archive],
            )[0]
            for name, span in end.spans(start).items()
        )

    def lag(self, positions: Mapping[str, Position]) -> tuple[int, float | None]:
        """The number of messages after the positions, and the age of the oldest in seconds."""
        backlog, seconds = self._statements.row(
            "select coalesce(sum(l.messages), 0)::bigint, "
            "greatest(0, extract(epoch from clock_timestamp() - pg_catalog.min(l.since)))::float8 "
            "from unnest(%s::text[], %s::jsonb[]) a (stream, o) "
            "cross join lateral pgqueue.offset_lag(a.stream, a.o, %s) l",
            [list(positions), _offsets(positions), self._reads_archive],
        )
        return backlog, seconds

    def _archives(
        self, ranges: Mapping[str, list[Range]], found: Mapping[str, Stream]
    ) -> dict[str, list[Segment]]:
        """The segments of each stream, around the ranges, that are in files."""
        archives: dict[str, list[Segment]] = {}
        for name, *segment in self._statements.rows(
            "select a.stream, f.lo, f.hi, f.uri, f.folder, f.files "
            "from unnest(%s::text[], %s::int[], %s::bigint[], %s::bigint[]) a (stream, id, lo, hi) "
            "cross join lateral pgqueue.archive_files(a.id, a.lo, a.hi) f order by a.stream, f.lo",
            [
                list(ranges),
                [found[name].stream_id for name in ranges],
                [each[0].lo for each in ranges.values()],
                [each[-1].hi for each in ranges.values()],
            ],
        ):
            archives.setdefault(name, []).append(Segment.of(*segment))
        return archives

    def _warn_of_open_transactions(self, stream: str, place: str) -> None:
        """Warn if messages may appear later on the other side of a time or a number."""
        if place not in ("earliest", "latest") and "gaps" in self.position_at(stream, "latest"):
            warn(
                "transactions that send to stream %s are open: their messages may have a time or a "
                "number before %s but become visible later, so that a query that ends there and "
                "another that starts there both miss them; give both the offset of "
                "spark_pgqueue.offsets(url, stream)",
                *(stream, place),
            )

    def _each(self, names: Iterable[str], ask: Any) -> dict[str, Any]:
        """Call `ask` for all streams together; after an allowed loss, for each stream alone."""
        names = list(names)
        if not names:
            return {}
        try:
            return ask(names, False)
        except PgQueueError as error:
            if error.sqlstate != DATA_LOSS or self._options.fail_on_data_loss:
                raise self._explained(error) from None
        found: dict[str, Any] = {}
        for name in names:
            try:
                found |= ask([name], False)
            except PgQueueError as error:
                if error.sqlstate != DATA_LOSS:
                    raise self._explained(error) from None
                warn("%s; the query continues without them", error.message)
                found |= ask([name], True)
        return found

    def _checked(self, option: str, stream: str, place: Position) -> Position:
        """The position of an offset that a user gave, if the stream has it."""
        self._offset_is = f"option {option}"
        try:
            self._statements.row(
                "select pgqueue.offset_lag(%s::text, %s, %s)",
                [stream, _offset(stream, place), self._reads_archive],
            )
        finally:
            self._offset_is = THE_CHECKPOINT
        return position_of(place)

    def _name_of(self, argument: str) -> str | None:
        if argument in ("p_offset", "p_from", "p_to"):
            return self._offset_is
        return STREAM_SOURCE_NAMES.get(argument)

    def _explained(self, error: PgQueueError) -> PgQueueError:
        """The error with the hint that is right for a query."""
        error.hint = {
            DATA_LOSS: 'to continue with the remaining messages, set option("failOnDataLoss", '
            '"false"); and keep messages longer: see pgqueue.set_retention',
            FOREIGN_CHECKPOINT: "connect to the database that it belongs to, or give the query a "
            "checkpointLocation of its own, and startingOffsets",
            UNKNOWN_STREAM: "create it if it never existed; if it was dropped, use a query without "
            "it, with a checkpointLocation of its own",
        }.get(error.sqlstate or "", error.hint)
        return error


def _offset(stream: str, position: Position) -> Jsonb:
    """A position as SQL takes it."""
    return Jsonb(position | {"stream": stream})


def _offsets(positions: Mapping[str, Position], names: Iterable[str] | None = None) -> list[Jsonb]:
    """The positions of some streams, or of all."""
    return [_offset(name, positions[name]) for name in (positions if names is None else names)]
