"""The columns of the source, and the columns that the sink takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    ByteType,
    DataType,
    DayTimeIntervalType,
    IntegerType,
    LongType,
    MapType,
    ShortType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from spark_pgqueue.postgres.errors import PgQueueError
from spark_pgqueue.spark.options.sink import SinkOptions
from spark_pgqueue.spark.options.source import SourceOptions
from spark_pgqueue.spark.options.stream_source import StreamSourceOptions

VALUE = "value"
"""The column of option typed: the payload as the columns of the stream's schema."""

ABOUT = {
    "stream": "the name of the stream",
    "seq": "the message's number in the stream",
    "key": "the ordering key; null: not ordered with other messages",
    "data": "the payload; binary in streams of that kind",
    "headers": "the headers that its sender set; null: none",
    "priority": "higher priorities are delivered first",
    "deliver_count": "the number of deliveries, including this one",
    "inserted_at": "when it was sent, by the database's clock",
    "arrival": "the message's position in the order of its key, for in_key_order()",
}
"""The meaning of each column of a message."""


def source_schema(kind: str, include_headers: bool, has_arrival: bool = False) -> StructType:
    """The columns of a stream of this kind (text, json or binary)."""
    data = BinaryType() if kind == "binary" else StringType()
    columns = [
        StructField("seq", LongType(), nullable=False),
        StructField("key", StringType()),
        StructField("data", data, nullable=False),
        StructField("headers", MapType(StringType(), StringType())),
        StructField("priority", IntegerType(), nullable=False),
        StructField("deliver_count", IntegerType(), nullable=False),
        StructField("inserted_at", TimestampType(), nullable=False),
    ]
    if has_arrival:
        columns.append(StructField("arrival", LongType(), nullable=False))
    return StructType([c for c in columns if include_headers or c.name != "headers"])


_CLAIMED = ("priority", "deliver_count")
"""The columns that a message has only for a consumer."""


def stream_source_schema(kind: str, include_headers: bool, has_several: bool) -> StructType:
    """The columns of the offset source; with several streams, the first column names the stream."""
    stream = [StructField("stream", StringType(), nullable=False)] if has_several else []
    columns = source_schema(kind, include_headers)
    return StructType([*stream, *(each for each in columns if each.name not in _CLAIMED)])


def columns_of(
    options: SourceOptions | StreamSourceOptions, kind: str, value: StructType | None
) -> StructType:
    """The columns of a query over a stream, or streams, of this kind.

    With option typed, `value` has the columns of the stream's schema.
    """
    if isinstance(options, SourceOptions):
        columns = source_schema(kind, options.include_headers, options.has_arrival)
    else:
        columns = stream_source_schema(kind, options.include_headers, options.has_several)
    if value is None:
        return columns
    fields = columns.fields
    at = columns.names.index("data")
    keeps_data = options.typed == "permissive"  # and then a value may be null
    field = StructField(VALUE, value, nullable=keeps_data)
    return StructType([*fields[: at + keeps_data], field, *fields[at + 1 :]])


def data_type(schema: StructType) -> str:
    """The type of column data; string where column value is in its place."""
    return schema["data"].dataType.simpleString() if "data" in schema.names else "string"


def check_schema(schema: StructType, options: SourceOptions | StreamSourceOptions) -> None:
    """Raise unless these are the columns of a query with the options."""
    value = None
    if options.typed is not None:
        given = schema[VALUE].dataType if VALUE in schema.names else None
        value = given if isinstance(given, StructType) else StructType()
    allowed = [columns_of(options, kind, value) for kind in ("text", "binary")]
    check_is(schema, allowed, "pgqueue", "readStream, and use select() afterwards")


def check_is(schema: StructType, allowed: Sequence[StructType], what: str, instead_of: str) -> None:
    """Raise unless a schema is one of those that are allowed; `instead_of` ends the hint."""
    if _types(schema) not in [_types(each) for each in allowed]:
        raise PgQueueError(
            f"the schema of {what} cannot be chosen: given {schema.simpleString()}, must be "
            f"{allowed[0].simpleString()}",
            hint=f"remove schema(...) from {instead_of}",
        )


def _types(schema: StructType) -> list[tuple]:
    return [(field.name, field.dataType) for field in schema.fields]


@dataclass(frozen=True)
class Stream:
    """A stream of the database."""

    stream_id: int
    kind: str


def kind_of(streams: Mapping[str, Stream]) -> str:
    """The kind of column data for all streams; text for no streams."""
    return "binary" if any(each.kind == "binary" for each in streams.values()) else "text"


def check_kinds(streams: Mapping[str, Stream], data: str | None = None) -> None:
    """Check that the data of all streams fit one column; of type `data`, if the query has it.

    Raises:
        PgQueueError: the data do not fit.
    """
    binary = [name for name, each in streams.items() if each.kind == "binary"]
    others = [name for name, each in streams.items() if each.kind != "binary"]
    if binary and others:
        raise PgQueueError(
            f"stream {others[0]!r} is of kind {streams[others[0]].kind} and stream {binary[0]!r} "
            "of kind binary: column data cannot be both",
            hint="read them in two queries, or give streams, or a streamPattern, of one kind",
        )
    wrong = others if data == "binary" else binary if data is not None else []
    if wrong:
        raise PgQueueError(
            f"stream {wrong[0]!r} is of kind {streams[wrong[0]].kind}, but column data is {data}",
            hint="restart the query if the stream is new, and remove schema(...)",
        )


_INTEGERS = (ByteType, ShortType, IntegerType, LongType)


class Taken(NamedTuple):
    """A column that the sink takes."""

    words: str  # the allowed types, in words; that of `data` depends on the stream's kind
    types: tuple[type[DataType], ...]  # the same as types
    help: str  # the meaning of the column, in Markdown


MESSAGE_COLUMNS = {
    "data": Taken(
        "string, or binary for streams of that kind",
        (StringType, BinaryType),
        "the payload: required, never null",
    ),
    "key": Taken(
        "string", (StringType,), "the ordering key; null: not ordered with other messages"
    ),
    "headers": Taken(
        "map<string,string>, or string with a JSON object",
        (MapType, StringType),
        "the headers of the message; null: none",
    ),
    "priority": Taken(
        "int", _INTEGERS, "-32768 to 32767, higher priorities are delivered first; null: 0"
    ),
    "deliver_at": Taken(
        "timestamp",
        (TimestampType,),
        "not delivered before this time; rounded up to a second; null: at once",
    ),
    "expires_at": Taken(
        "timestamp",
        (TimestampType,),
        "not delivered after this time; rounded up to a second; null: never",
    ),
    "dedup_key": Taken(
        "string",
        (StringType,),
        "skipped if it was already sent, see [send once]"
        "(../../sql/guide/sending.md#send-once-even-if-you-retry); null: never",
    ),
    "consumers": Taken(
        "array<string>",
        (ArrayType,),
        "published only to these consumers; null: as in option consumers",
    ),
    "stream": Taken(
        "string", (StringType,), "the stream to publish to; option stream takes precedence"
    ),
}
"""The columns of a row that is sent."""

ACTION_COLUMNS = {
    "action": Taken(
        "string",
        (StringType,),
        "`ack`, `nack`, `dead_letter`, `redrive` or `retry`; null: the row is sent",
    ),
    "stream": Taken(
        "string", (StringType,), "the stream of the message; null: as in option stream"
    ),
    "consumer": Taken("string", (StringType,), "the consumer; null: as in option consumer"),
    "seq": Taken("long", _INTEGERS, "the message's number; never null"),
    "delay": Taken(
        "interval day to second",
        (DayTimeIntervalType,),
        "for nack: the delay; null: the consumer's backoff",
    ),
    "reason": Taken("string", (StringType,), "for nack and dead_letter"),
    "details": Taken(
        "string with JSON", (StringType,), "for dead_letter: the details; for ack: the result"
    ),
}
"""The columns of a row with an action."""

# Columns of messages that were read; rows with an action may have them, and they are ignored.
READ_ALONG = {
    *("deliver_count", "inserted_at", "state", "not_visible_until", "owner", "lease_until"),
    *("error", "claim_id", "claimed_at", "died_at", "arrival", "published_at", "result", "done_at"),
}

# Columns of Kafka's sink.
_FOREIGN = {
    "value": "call it data",
    "topic": "call it stream",
    "partition": "drop it: the order of messages is by their key",
}

_PARTS = {"headers": "map<string,string>", "consumers": "array<string>"}

_HINTS = {
    "text": "cast(data as string), or to_json(struct(...)) as data",
    "json": "to_json(struct(...)) as data",
    "binary": "cast(data as binary)",
}


def check_columns(schema: StructType, options: SinkOptions, beside_rows: bool = False) -> list[str]:
    """The columns of a DataFrame, by the queue's names. Beside the rows of a table, no row needs to
    be sent.

    Raises:
        PgQueueError: a column is missing, or a column has a name or type that is not allowed.
    """
    names = [field.name.lower() for field in schema.fields]
    acts = options.action is not None or "action" in names
    allowed = {**MESSAGE_COLUMNS, **ACTION_COLUMNS} if acts else MESSAGE_COLUMNS
    _check_together(names, schema, options, beside_rows)
    for name, field in zip(names, schema.fields, strict=True):
        if name not in allowed and not (acts and name in READ_ALONG):
            hint = _FOREIGN.get(name, "drop it, or put it into data: to_json(struct(...)) as data")
            if name in ACTION_COLUMNS:
                hint = "for an action, say which one: option action, or a column action"
            raise PgQueueError(
                f"column {field.name} is not a column of a message: {', '.join(MESSAGE_COLUMNS)}"
                + (f"; nor of an action: {', '.join(ACTION_COLUMNS)}" if acts else ""),
                hint=hint,
            )
        if names.count(name) > 1:
            raise PgQueueError(f"column {field.name} occurs twice", hint="drop one of them")
        if name in allowed:
            _check_type(name, field, allowed[name])
    return names


def _check_type(name: str, field: StructField, column: Taken) -> None:
    given = field.dataType.simpleString()
    parts = _PARTS[name] if isinstance(field.dataType, MapType | ArrayType) else given
    if not isinstance(field.dataType, column.types) or given != parts:
        raise PgQueueError(
            f"column {field.name} is {given}, but must be {column.words}",
            hint=_how_to_convert(name, field),
        )


def _how_to_convert(name: str, field: StructField) -> str:
    if name == "data":
        return f"select {_HINTS['text']}"
    if name == "headers" and isinstance(field.dataType, ArrayType):  # those of Kafka's source
        pairs = f"transform({field.name}, h -> struct(h.key, string(h.value)))"
        return f"select map_from_entries({pairs}) as headers; of headers with one key, choose one"
    return f"cast {field.name}"


def _check_together(
    names: list[str], schema: StructType, options: SinkOptions, beside_rows: bool
) -> None:
    """Raise unless columns and options are complete together, and do not contradict each other."""
    given = f"the DataFrame has {', '.join(schema.names) or 'no columns'}"
    by_row, acts = "action" in names, options.action is not None or "action" in names
    if by_row and options.action is not None:
        raise PgQueueError(
            f"option action is {options.action}, but there is also a column action",
            hint="remove the option, or drop the column",
        )
    if not acts:
        if options.consumer is not None:
            raise PgQueueError(
                "option consumer is for actions, but these rows have none",
                hint='to publish to one consumer, option("consumers", ...); for an action, option '
                "action or a column action",
            )
        if beside_rows and not names:
            return  # all columns are the table's, or there is only row
        if "data" not in names:
            hint = "select value as data" if "value" in names else f"select {_HINTS['text']}"
            raise PgQueueError(f"column data is missing: {given}", hint=hint)
    needed = {"stream": options.stream}
    if acts:
        needed |= {"consumer": options.consumer, "seq": None}
    for name, option in needed.items():
        if option is None and name not in names:
            either = "" if name == "seq" else f"option {name} is missing, and "
            raise PgQueueError(
                f"{either}column {name} is missing: {given}",
                hint="select the column seq of the messages"
                if name == "seq"
                else f'add option("{name}", ...), or a column {name}; a table of Spark\'s catalog '
                "(saveAsTable, insertInto, toTable) keeps no options",
            )


def check_kind(is_binary: bool, stream: str, kind: str) -> None:
    """Raise unless the type of column data fits the kind of the stream."""
    if is_binary != (kind == "binary"):
        given, must = ("binary", "string") if is_binary else ("string", "binary")
        raise PgQueueError(
            f"column data is {given}, but must be {must} for stream {stream}, which holds {kind}",
            hint=f"select {_HINTS[kind]}",
        )
