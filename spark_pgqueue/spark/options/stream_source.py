"""The options of the offset source: a query that reads streams without a consumer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from spark_pgqueue.archive.folders import parse_options as file_system
from spark_pgqueue.postgres.errors import PgQueueError
from spark_pgqueue.spark.options.admission import (
    MAX_BYTES_PER_TRIGGER,
    MAX_MESSAGES_PER_TRIGGER,
    MAX_TRIGGER_DELAY,
    MIN_MESSAGES_PER_TRIGGER,
    WAIT_TIME,
    Admitting,
)
from spark_pgqueue.spark.options.checking import (
    BATCH,
    CATALOG,
    CONNECTION,
    INCLUDE_HEADERS,
    MAX_CONNECTIONS,
    MAX_RECORDS_PER_PARTITION,
    MIN_PARTITIONS,
    RETRY_TIMEOUT,
    STREAMING,
    TYPED,
    Connecting,
    Option,
    check_partitions,
    option,
    options_of,
    parse,
    use,
)
from spark_pgqueue.spark.options.source import SOURCE_OPTIONS
from spark_pgqueue.spark.options.values import (
    BOOLEAN,
    TIMESTAMP,
    Place,
    a_name,
    boolean,
    offsets,
    one_of,
    pattern,
    timestamp,
    unlike_names,
)

_OFFSETS = (
    'earliest, latest, "seq 17" of one stream, or JSON with a position for each stream: '
    '{"orders": "earliest"}; a position can also be a timestamp, or an offset from progress'
)


@dataclass(frozen=True, kw_only=True)
class StreamSourceOptions(Connecting, Admitting):
    """The options of the offset source, parsed."""

    stream: str | None = option(
        a_name,
        "a stream's name",
        "The stream to read. Give this option, streams or streamPattern.",
        excludes=("streams", "streamPattern"),
    )
    streams: tuple[str, ...] | None = option(
        unlike_names,
        "names of streams, with commas between them",
        "In place of stream: several streams. A column stream names the stream of each row.",
        excludes=("streamPattern",),
    )
    stream_pattern: re.Pattern[str] | None = option(
        pattern,
        "a regular expression for whole names, in Python's syntax",
        "In place of stream: all streams whose name matches, with a column stream. A running query "
        "notices new streams, and reads them from their first message.",
    )
    starting_offsets: str | dict[str, Place] | None = option(
        offsets,
        _OFFSETS,
        "Where a new query starts. A query with a checkpoint continues from its checkpoint. By "
        "default latest, in a batch earliest.",
        excludes=("startingTimestamp",),
    )
    starting_timestamp: str | None = option(
        timestamp,
        TIMESTAMP,
        "In place of startingOffsets: begin with the first message that was published at this time "
        "or later. To continue where a batch ended, give both an offset: spark_pgqueue.offsets.",
    )
    ending_offsets: str | dict[str, Place] = option(
        offsets,
        _OFFSETS.replace("earliest, ", "", 1),
        "Where to end. By default {default}.",
        default="latest",
        excludes=("endingTimestamp",),
        only=BATCH,
    )
    ending_timestamp: str | None = option(
        timestamp,
        TIMESTAMP,
        "In place of endingOffsets: end with the last message that was published before this time. "
        "Transactions that are open now may add such messages later, which a query that begins at "
        "this time misses too: give both an offset, of spark_pgqueue.offsets.",
        only=BATCH,
    )
    max_messages_per_trigger: int | None = use(MAX_MESSAGES_PER_TRIGGER, only=STREAMING)
    max_bytes_per_trigger: int | None = use(MAX_BYTES_PER_TRIGGER, only=STREAMING)
    min_messages_per_trigger: int | None = use(MIN_MESSAGES_PER_TRIGGER, only=STREAMING)
    max_trigger_delay: timedelta = use(MAX_TRIGGER_DELAY, only=STREAMING)
    min_partitions: int | None = use(MIN_PARTITIONS)
    max_records_per_partition: int | None = use(MAX_RECORDS_PER_PARTITION)
    max_connections: int | None = use(MAX_CONNECTIONS)
    wait_time: timedelta = use(WAIT_TIME, only=STREAMING)
    fail_on_data_loss: bool = option(
        boolean,
        BOOLEAN,
        "Fail when retention has deleted messages before the query read them, or a stream of the "
        "pattern was dropped; false logs a warning, and the query continues with the rest.",
        default=True,
    )
    group: str | None = option(
        a_name,
        "a group's name",
        "Store the query's position in Postgres, too, as the position of this group, which each "
        "stream must have, with one partition. The lag is visible there, and retention waits for "
        "the query. By default nothing is stored there.",
        only=STREAMING,
    )
    archive: str = option(
        one_of("auto", "never"),
        "auto or never",
        "Where the query reads messages that are in the archive of a stream: in its files (auto); "
        "or, where Postgres stores them, there (never): then the stream begins with the first "
        "message that Postgres stores.",
        default="auto",
    )
    archive_options: dict[str, Any] | None = field(
        repr=False,
        metadata={
            "option": Option(
                file_system,
                "a JSON object",
                "Arguments for the class of the archive's file system in pyarrow.fs, such as "
                '{"endpoint_override": "http://minio:9000"}. By default pyarrow uses the uri '
                "of the archive and the environment of the executors.",
                is_secret=True,
            )
        },
    )
    include_headers: bool = use(INCLUDE_HEADERS)
    typed: str | None = use(TYPED, excludes=("streams", "streamPattern"))
    retry_timeout: timedelta = use(RETRY_TIMEOUT)

    @property
    def has_several(self) -> bool:
        """Whether the query may read several streams, so that rows have a column stream."""
        return self.stream is None

    @property
    def title(self) -> str:
        """The streams that are read, for people."""
        if self.names is not None:
            return ", ".join(self.names)
        return self.stream_pattern.pattern if self.stream_pattern is not None else ""

    @property
    def names(self) -> tuple[str, ...] | None:
        """The streams to read; None for the streams of the pattern."""
        return (self.stream,) if self.stream is not None else self.streams

    def start_of(self, stream: str, default: str) -> Place | None:
        """Where to begin in a stream; None where startingOffsets names only other streams."""
        if self.starting_timestamp is not None:
            return self.starting_timestamp
        return _of(self.starting_offsets or default, stream)

    def end_of(self, stream: str) -> Place | None:
        """Where to end in a stream; None where endingOffsets names only other streams."""
        if self.ending_timestamp is not None:
            return self.ending_timestamp
        return _of(self.ending_offsets, stream)


def _of(places: str | dict[str, Place], stream: str) -> Place | None:
    return places if isinstance(places, str) else places.get(stream)


def parse_stream_source(
    given: Mapping[str, str], *, streaming: bool | None = None
) -> StreamSourceOptions:
    """Check and convert the options of `readStream` (streaming) or `read`, without a consumer;
    `streaming` is None while it is not known which of the two.
    """
    _check_side(given)
    options = StreamSourceOptions(**parse(given, STREAM_SOURCE_OPTIONS, "source", OTHERS))
    _check_streams(options)
    if options.typed is not None and options.has_several:
        raise PgQueueError(
            "option typed is for one stream: each stream has a schema of its own",
            hint='give option("stream", ...), and union() the DataFrames of several streams',
        )
    _check_start_and_end(options)
    options.check_admission()
    check_partitions(options.min_partitions, options.max_connections)
    if streaming is not None:
        _check_kind_of_query(options, streaming)
    return options


def _check_side(given: Mapping[str, str]) -> None:
    foreign = {name.lower() for name in given} - {o.name.lower() for o in STREAM_SOURCE_OPTIONS}
    for each in SOURCE_OPTIONS:
        if each.name.lower() in foreign:
            raise PgQueueError(
                f"option {each.name} needs consumer: without a consumer, the query claims no "
                "messages, and only Spark's checkpoint says how far it has read",
                hint=f'add option("consumer", ...), or remove {each.name}',
            )


def _check_kind_of_query(options: StreamSourceOptions, streaming: bool) -> None:
    for each in STREAM_SOURCE_OPTIONS:
        is_other = each.only == (BATCH if streaming else STREAMING)
        if is_other and each.name in options.given:
            where, way_out = (
                ("spark.read", "use trigger(availableNow=True), which ends at the last message")
                if streaming
                else ("spark.readStream", "remove it: a batch reads its range once")
            )
            raise PgQueueError(f"option {each.name} is for {where}", hint=way_out)


def _check_streams(options: StreamSourceOptions) -> None:
    given = [name for name in ("stream", "streams", "streamPattern") if name in options.given]
    if not given:
        raise PgQueueError(
            "option stream is missing",
            hint='add option("stream", ...): the stream to read; streams or streamPattern for '
            f"several; and consumer to claim its messages. ({CATALOG[0].upper()}{CATALOG[1:]})",
        )
    if len(given) > 1:
        raise PgQueueError(
            f"options {' and '.join(given)} are given", hint="give one of them, and remove the rest"
        )


def _check_start_and_end(options: StreamSourceOptions) -> None:
    for side, at in (("starting", options.starting_offsets), ("ending", options.ending_offsets)):
        if {f"{side}Offsets", f"{side}Timestamp"} <= options.given:
            raise PgQueueError(
                f"options {side}Offsets and {side}Timestamp are given", hint="give one of them"
            )
        if isinstance(at, str) and at.startswith("seq") and options.has_several:
            raise PgQueueError(
                f"option {side}Offsets is {at!r}, which is a position in one stream",
                hint='give JSON with a position for each stream by its name: {"orders": "seq 17"}',
            )
        if isinstance(at, dict) and options.names is not None:
            unknown = sorted(at.keys() - set(options.names))
            missing = sorted(set(options.names) - at.keys())
            if unknown or missing:
                raise PgQueueError(
                    f"option {side}Offsets "
                    + (f"names {unknown[0]!r}, which is" if unknown else f"lacks {missing[0]!r},")
                    + (" none" if unknown else " one")
                    + f" of the streams that are read: {', '.join(options.names)}",
                    hint="give a position for each of them",
                )
    ends = options.ending_offsets
    if ends == "earliest" or (isinstance(ends, dict) and "earliest" in ends.values()):
        raise PgQueueError(
            "option endingOffsets is 'earliest', before which there are no messages",
            hint="give latest, or JSON with other positions",
        )
    for stream in ends if isinstance(ends, dict) else options.names or [""]:
        begin, end = options.start_of(stream, "earliest"), options.end_of(stream)
        if _is_behind(begin, end):
            raise PgQueueError(
                f"the query would start at {begin}, but end before that, at {end}",
                hint="change the options startingOffsets or startingTimestamp, or endingOffsets or "
                "endingTimestamp",
            )


def _is_behind(begin: Place | None, end: Place | None) -> bool:
    """Whether a place is behind another place, where both are numbers or both are times."""
    if not isinstance(begin, str) or not isinstance(end, str):
        return False
    if begin.startswith("seq ") and end.startswith("seq "):
        return int(begin[4:]) > int(end[4:])
    if begin[0].isdigit() and end[0].isdigit():
        return datetime.fromisoformat(begin) > datetime.fromisoformat(end)
    return False


OTHERS = ("consumer", "table")
"""Options that choose another reader: a misspelled option may mean one of them."""


STREAM_SOURCE_OPTIONS = (*CONNECTION, *options_of(StreamSourceOptions))

STREAM_SOURCE_NAMES = {
    "p_stream": "the stream",
    "p_start": "option startingOffsets",
    "p_end": "option endingOffsets",
    "p_max": "option maxMessagesPerTrigger",
    "p_group": "option group",
}
"""The options and columns that set arguments of SQL functions, for errors."""
