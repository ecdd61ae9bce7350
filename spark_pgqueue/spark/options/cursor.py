"""The options of a query that reads streams without a consumer, by offsets in its checkpoint."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

from spark_pgqueue.postgres.errors import PgQueueError
from spark_pgqueue.spark.admission import Admission
from spark_pgqueue.spark.options.admission import (
    ADMISSION_OPTIONS,
    admission_of,
    check_admission,
)
from spark_pgqueue.spark.options.checking import (
    BATCH,
    CONNECTION,
    INCLUDE_HEADERS,
    MAX_CONNECTIONS,
    MAX_RECORDS_PER_PARTITION,
    MIN_PARTITIONS,
    RETRY_TIMEOUT,
    STREAMING,
    Option,
    check_partitions,
    parse,
)
from spark_pgqueue.spark.options.foreign import CATALOG
from spark_pgqueue.spark.options.source import SOURCE_OPTIONS
from spark_pgqueue.spark.options.values import (
    BOOLEAN,
    DURATION,
    TIMESTAMP,
    Place,
    a_name,
    boolean,
    duration,
    offsets,
    pattern,
    timestamp,
    unlike_names,
)


@dataclass(frozen=True)
class CursorOptions:
    """The options of a reader without a consumer. The fields are those of `CURSOR_OPTIONS`."""

    url: str | None = field(repr=False)  # it may hold a password
    stream: str | None
    streams: tuple[str, ...] | None
    stream_pattern: re.Pattern[str] | None
    starting_offsets: str | dict[str, Place] | None
    starting_timestamp: str | None
    ending_offsets: str | dict[str, Place] | None
    ending_timestamp: str | None
    max_messages_per_trigger: int | None
    max_bytes_per_trigger: int | None
    min_messages_per_trigger: int | None
    max_trigger_delay: timedelta | None
    min_partitions: int | None
    max_records_per_partition: int | None
    max_connections: int | None
    wait_time: timedelta | None
    fail_on_data_loss: bool
    group: str | None
    include_headers: bool
    retry_timeout: timedelta

    @property
    def admission(self) -> Admission:
        """How large its micro-batches are."""
        return admission_of(self)

    @property
    def has_several(self) -> bool:
        """Whether it may be several streams that are read, and rows say which."""
        return self.stream is None

    @property
    def title(self) -> str:
        """What is read, for people."""
        if self.names is not None:
            return ", ".join(self.names)
        return self.stream_pattern.pattern if self.stream_pattern is not None else ""

    @property
    def names(self) -> tuple[str, ...] | None:
        """The streams to read; None: those of the pattern."""
        return (self.stream,) if self.stream is not None else self.streams

    def start_of(self, stream: str, default: str) -> Place | None:
        """Where to begin in a stream; None: startingOffsets names others, and not this one."""
        if self.starting_timestamp is not None:
            return self.starting_timestamp
        return _of(self.starting_offsets or default, stream)

    def end_of(self, stream: str) -> Place | None:
        """Where to end in a stream; None: endingOffsets names others, and not this one."""
        if self.ending_timestamp is not None:
            return self.ending_timestamp
        return _of(self.ending_offsets or "latest", stream)


def _of(places: str | dict[str, Place], stream: str) -> Place | None:
    return places if isinstance(places, str) else places.get(stream)


def parse_cursor(given: Mapping[str, str], *, streaming: bool | None = None) -> CursorOptions:
    """Check and convert the options of `readStream` (streaming) or `read`, without a consumer.

    Args:
        given: the options.
        streaming: whether it is a streaming query; None: not known yet.

    Raises:
        PgQueueError: an option is unknown, missing or malformed, is one of a reader with a
            consumer, or two do not fit together.
    """
    _check_side(given)
    options = CursorOptions(**parse(given, CURSOR_OPTIONS, "source", OTHERS))
    _check_streams(options)
    _check_start_and_end(options)
    check_admission(options)
    check_partitions(options.min_partitions, options.max_connections)
    if streaming is not None:
        for option, value in _of_the_other(options, streaming):
            if value is not None:
                where, way_out = (
                    ("spark.read", "use trigger(availableNow=True), which ends at the last message")
                    if streaming
                    else ("spark.readStream", "remove it: a batch reads its range once")
                )
                raise PgQueueError(f"option {option} is for {where}", hint=way_out)
    return options


def _check_side(given: Mapping[str, str]) -> None:
    mine = {option.name.lower() for option in CURSOR_OPTIONS}
    for option in SOURCE_OPTIONS:
        if option.name.lower() in {name.lower() for name in given} - mine:
            raise PgQueueError(
                f"option {option.name} needs consumer: without one, messages are read and not "
                "claimed, and Spark's checkpoint alone says how far",
                hint=f'add option("consumer", ...), or remove {option.name}',
            )


def _check_streams(options: CursorOptions) -> None:
    given = [
        name
        for name, value in (
            ("stream", options.stream),
            ("streams", options.streams),
            ("streamPattern", options.stream_pattern),
        )
        if value is not None
    ]
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


def _check_start_and_end(options: CursorOptions) -> None:
    for side, at, time in (
        ("starting", options.starting_offsets, options.starting_timestamp),
        ("ending", options.ending_offsets, options.ending_timestamp),
    ):
        if at is not None and time is not None:
            raise PgQueueError(
                f"options {side}Offsets and {side}Timestamp are given", hint="give one of them"
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
                    hint="give a place for each of them",
                )
    ends = options.ending_offsets
    if ends == "earliest" or (isinstance(ends, dict) and "earliest" in ends.values()):
        raise PgQueueError(
            "option endingOffsets is 'earliest', before which there is nothing",
            hint="give latest, or JSON with other places",
        )
    for stream in ends if isinstance(ends, dict) else options.names or [""]:
        begin, end = options.start_of(stream, "earliest"), options.end_of(stream)
        if _is_behind(begin, end):
            raise PgQueueError(
                f"it is to begin at {begin}, and to end at {end}, which is before that",
                hint="change the options startingOffsets or startingTimestamp, or endingOffsets or "
                "endingTimestamp",
            )


def _is_behind(begin: Place | None, end: Place | None) -> bool:
    """Whether a place is behind another one, where both are numbers, or times."""
    if not isinstance(begin, str) or not isinstance(end, str):
        return False
    if begin.startswith("seq ") and end.startswith("seq "):
        return int(begin[4:]) > int(end[4:])
    if begin[0].isdigit() and end[0].isdigit():
        return datetime.fromisoformat(begin) > datetime.fromisoformat(end)
    return False


OTHERS = ("consumer", "table")
"""Options by which it would be another reader: what is near to them may be meant to be one."""


def _of_the_other(options: CursorOptions, streaming: bool) -> list[tuple[str, object]]:
    if streaming:
        return [
            ("endingOffsets", options.ending_offsets),
            ("endingTimestamp", options.ending_timestamp),
        ]
    return [
        ("maxMessagesPerTrigger", options.max_messages_per_trigger),
        ("maxBytesPerTrigger", options.max_bytes_per_trigger),
        ("minMessagesPerTrigger", options.min_messages_per_trigger),
        ("maxTriggerDelay", options.max_trigger_delay),
        ("waitTime", options.wait_time),
        ("group", options.group),
    ]


_OFFSETS = (
    "earliest, latest, or JSON with a place for each stream by its name: "
    '{"orders": "earliest"}; a place is also latest, a timestamp, "seq 17", or an offset as '
    "progress shows it"
)

CURSOR_OPTIONS = (
    *CONNECTION,
    Option(
        "stream",
        a_name,
        "a stream's name",
        None,
        "The stream to read. This, or one of the two that stand in its place, is needed.",
        excludes=("streams", "streamPattern"),
    ),
    Option(
        "streams",
        unlike_names,
        "names of streams, with commas between them",
        None,
        "In place of stream: several, with a column stream that says which.",
        excludes=("streamPattern",),
    ),
    Option(
        "streamPattern",
        pattern,
        "a regular expression for whole names, as Python has them",
        None,
        "In place of stream: all streams with such a name, with a column stream. New ones are "
        "noticed while the query runs, and read from their first message.",
    ),
    Option(
        "startingOffsets",
        offsets,
        _OFFSETS,
        None,
        "Where a new query begins; one with a checkpoint goes on from there. By default latest, in "
        "a batch earliest.",
        excludes=("startingTimestamp",),
    ),
    Option(
        "startingTimestamp",
        timestamp,
        TIMESTAMP,
        None,
        "In place of startingOffsets: begin with what was published since.",
    ),
    Option(
        "endingOffsets",
        offsets,
        _OFFSETS.replace("earliest, latest, or", "latest, or"),
        None,
        "Where to end. By default latest.",
        excludes=("endingTimestamp",),
        only=BATCH,
    ),
    Option(
        "endingTimestamp",
        timestamp,
        TIMESTAMP,
        None,
        "In place of endingOffsets: end with what was published before.",
        only=BATCH,
    ),
    *(replace(option, only=STREAMING) for option in ADMISSION_OPTIONS),
    MIN_PARTITIONS,
    MAX_RECORDS_PER_PARTITION,
    MAX_CONNECTIONS,
    Option(
        "waitTime",
        duration,
        DURATION,
        None,
        "How long to wait for messages before Spark is told that there are none. By default 1s.",
        only=STREAMING,
    ),
    Option(
        "failOnDataLoss",
        boolean,
        BOOLEAN,
        True,
        "Fail when retention has taken away what was to be read, or a stream of the pattern was "
        "dropped; false logs a warning, and goes on with what is left.",
    ),
    Option(
        "group",
        a_name,
        "a group's name",
        None,
        "Note in Postgres, too, how far the query is: as the position of this group, of one "
        "partition, which each stream has. So its lag is to be seen there, and retention waits for "
        "it. By default nothing is kept there.",
        only=STREAMING,
    ),
    INCLUDE_HEADERS,
    RETRY_TIMEOUT,
)

# What the user calls the arguments of SQL functions.
CURSOR_NAMES = {
    "p_stream": "the stream",
    "p_start": "option startingOffsets",
    "p_end": "option endingOffsets",
    "p_max": "option maxMessagesPerTrigger",
    "p_group": "option group",
}
