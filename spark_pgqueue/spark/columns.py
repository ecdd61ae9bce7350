"""The columns that the source has, and those that the sink takes."""

from __future__ import annotations

from pyspark.sql.types import (
    BinaryType,
    ByteType,
    DataType,
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


def source_schema(kind: str, include_headers: bool) -> StructType:
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
    return StructType([c for c in columns if include_headers or c.name != "headers"])


_CLAIMED = ("priority", "deliver_count")
"""What a message has for a consumer alone."""


def cursor_schema(kind: str, include_headers: bool, has_several: bool) -> StructType:
    """The columns of what is read without a consumer; with several streams the first says which."""
    stream = [StructField("stream", StringType(), nullable=False)] if has_several else []
    columns = source_schema(kind, include_headers)
    return StructType([*stream, *(each for each in columns if each.name not in _CLAIMED)])


def check_source_schema(schema: StructType, include_headers: bool) -> None:
    """Raise unless these are the columns of a consumer's source."""
    _check_schema(schema, [source_schema(kind, include_headers) for kind in ("text", "binary")])


def check_cursor_schema(schema: StructType, include_headers: bool, has_several: bool) -> None:
    """Raise unless these are the columns of what is read without a consumer."""
    kinds = ("text", "binary")
    _check_schema(schema, [cursor_schema(kind, include_headers, has_several) for kind in kinds])


def _check_schema(schema: StructType, allowed: list[StructType]) -> None:
    if _types(schema) not in [_types(each) for each in allowed]:
        raise PgQueueError(
            f"the schema of pgqueue cannot be chosen: given {schema.simpleString()}, must be "
            f"{allowed[0].simpleString()}",
            hint="remove schema(...) from readStream, and use select() afterwards",
        )


def _types(schema: StructType) -> list[tuple]:
    return [(field.name, field.dataType) for field in schema.fields]


_INTEGERS = (ByteType, ShortType, IntegerType, LongType)

# What each column may be, in words and in types; data depends on the stream's kind.
_COLUMNS: dict[str, tuple[str, tuple[type[DataType], ...]]] = {
    "data": ("", ()),
    "key": ("string", (StringType,)),
    "headers": ("map<string,string>, or string with a JSON object", (MapType, StringType)),
    "priority": ("int", _INTEGERS),
    "deliver_at": ("timestamp", (TimestampType,)),
    "dedup_key": ("string", (StringType,)),
}


def check_columns(schema: StructType, stream: str, kind: str) -> list[str]:
    """The columns of a DataFrame, by the names that the queue has for them.

    Raises:
        PgQueueError: data is missing, or a column has another name or type than the allowed.
    """
    hints = {
        "text": "cast(data as string), or to_json(struct(...)) as data",
        "json": "to_json(struct(...)) as data",
        "binary": "cast(data as binary)",
    }
    data = ("binary", (BinaryType,)) if kind == "binary" else ("string", (StringType,))
    allowed = {**_COLUMNS, "data": data}
    names = [field.name.lower() for field in schema.fields]
    if "data" not in names:
        raise PgQueueError(
            f"column data is missing: the DataFrame has {', '.join(schema.names) or 'no columns'}",
            hint=f"select {hints[kind]}",
        )
    for name, field in zip(names, schema.fields, strict=True):
        if name not in allowed:
            raise PgQueueError(
                f"column {field.name} is none of a message's: {', '.join(allowed)}",
                hint="drop it, or put it into data: to_json(struct(...)) as data",
            )
        if names.count(name) > 1:
            raise PgQueueError(f"column {field.name} is there twice", hint="drop one of them")
        words, types = allowed[name]
        is_map = isinstance(field.dataType, MapType)
        if not isinstance(field.dataType, types) or (
            is_map and field.dataType.simpleString() != "map<string,string>"
        ):
            of = f" for stream {stream}, which holds {kind}" if name == "data" else ""
            raise PgQueueError(
                f"column {field.name} is {field.dataType.simpleString()}, and must be {words}{of}",
                hint=f"select {hints[kind]}" if name == "data" else f"cast {field.name}",
            )
    return names
