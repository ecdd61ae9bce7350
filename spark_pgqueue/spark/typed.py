"""The executor's side of column value: payloads as columns, from JSON into Arrow.

Arrow's parser reads nearly all batches. It has no notion of messages that do not fit, so a batch
that it refuses is halved, and a few messages are read one by one. Both ways make the same of a
message.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from decimal import Context, Decimal, Inexact, InvalidOperation
from typing import TYPE_CHECKING, Any

from spark_pgqueue.postgres.errors import UNFIT_DATA, PgQueueError

if TYPE_CHECKING:
    import pyarrow as pa

VALUE = "value"
"""The column's name."""

_LARGEST_FLOAT = 3.40282356e38
"""From here on, a number is not rounded to a finite float any more."""

_UNFIT = (ValueError, ArithmeticError, RecursionError)
"""What Python, and Arrow, raise for a value that does not fit."""

_FEW = 8
"""Up to so many messages are read one by one."""


def stored(names: list[str], constant: dict[str, Any]) -> list[str]:
    """The columns of a message to read, for these columns of a row."""
    return list(
        dict.fromkeys("data" if name == VALUE else name for name in names if name not in constant)
    )


def typed(batch: pa.RecordBatch, target: pa.Schema, stream: str) -> pa.Array:
    """The payloads of a batch as structs.

    Args:
        batch: messages, with seq and data.
        target: the columns of the query. With column data, a message that does not fit is null.
        stream: the stream's name, for the error.

    Raises:
        PgQueueError: PQ004 for a message that does not fit, without column data.
    """
    import pyarrow as pa

    type_ = target.field(VALUE).type
    if len(batch) > _FEW and _is_exact(type_):
        parsed = _parsed(batch["data"], type_)
        if parsed is not None:
            return parsed
        halves = (batch.slice(0, len(batch) // 2), batch.slice(len(batch) // 2))
        return pa.concat_arrays([typed(half, target, stream) for half in halves])
    convert, rows = converter(type_), []
    for place, text in enumerate(batch["data"].to_pylist()):
        try:
            rows.append(convert(json.loads(text, parse_float=Decimal)))
        except _UNFIT:
            if "data" not in target.names:
                raise PgQueueError(
                    f"message {batch['seq'][place].as_py()} of stream {stream!r} does not fit the "
                    "schema with which the query began",
                    hint='with option("typed", "permissive"), value is null for such a message, '
                    "and data has the payload",
                    sqlstate=UNFIT_DATA,
                ) from None
            rows.append(None)
    return pa.array(rows, type_)


def _parsed(texts: pa.StringArray, type_: pa.StructType) -> pa.Array | None:
    """Payloads, by Arrow's parser; None where it refuses one of them."""
    import pyarrow as pa
    import pyarrow.compute as pc
    from pyarrow import json as arrow_json

    # For anything else than an object the parser fails, or crashes.
    objects = pc.call_function(
        "match_substring_regex", [texts], pc.MatchSubstringOptions(r"^[ \t\r\n]*\{")
    )
    if objects.true_count < len(texts):
        return None
    joined = pc.call_function(
        "binary_join", [pa.ListArray.from_arrays([0, len(texts)], texts), "\n"]
    )
    lines = joined[0].as_buffer()
    wire = pa.schema([field.with_type(_wire(field.type)) for field in type_])
    try:
        table = arrow_json.read_json(
            pa.BufferReader(lines),
            # One block: so line feeds within a message are of no account.
            arrow_json.ReadOptions(use_threads=False, block_size=lines.size + 1),
            arrow_json.ParseOptions(explicit_schema=wire, unexpected_field_behavior="ignore"),
        )
        if len(table) == len(texts):
            (struct,) = table.select(wire.names).to_struct_array().chunks
            return None if _has_infinity(struct) else struct.cast(type_)
    except (
        *_UNFIT,
        NotImplementedError,
    ):  # (older versions of Arrow read no decimals from numbers)
        pass
    return None


def _is_exact(type_: pa.DataType) -> bool:
    """Whether Arrow's parser reads the type as `converter` does."""
    import pyarrow as pa

    if pa.types.is_nested(type_):
        return all(_is_exact(type_.field(i).type) for i in range(type_.num_fields))
    return not (pa.types.is_binary(type_) or pa.types.is_float32(type_))


def _has_infinity(array: pa.Array) -> bool:
    """Whether a number had more digits than a double has."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if pa.types.is_struct(array.type):
        return any(_has_infinity(array.field(i)) for i in range(array.type.num_fields))
    if pa.types.is_list(array.type):
        return _has_infinity(array.values)
    is_double = pa.types.is_float64(array.type)
    return is_double and pc.call_function("is_inf", [array]).true_count > 0


def _wire(type_: pa.DataType) -> pa.DataType:
    """The type that Arrow's parser reads, to be cast: it takes numbers for dates, for example, and
    decimals of more digits than the precision.
    """
    import pyarrow as pa

    if pa.types.is_struct(type_):
        return pa.struct([field.with_type(_wire(field.type)) for field in type_])
    if pa.types.is_list(type_):
        return pa.list_(type_.value_field.with_type(_wire(type_.value_type)))
    if pa.types.is_decimal(type_):
        return pa.decimal256(76, type_.scale)
    return pa.string() if pa.types.is_temporal(type_) else type_


def converter(type_: pa.DataType) -> Callable[[Any], Any]:
    """A function that turns a value of `json.loads` into the one of an Arrow type.

    The function raises one of _UNFIT for a value that does not fit. The types and their values are
    those of `sql/base/schemas.sql`.
    """
    import pyarrow as pa

    if pa.types.is_struct(type_):
        return _struct(type_)
    if pa.types.is_list(type_):
        element = converter(type_.value_type)
        return lambda given: [None if each is None else element(each) for each in _a(list, given)]
    if pa.types.is_decimal(type_):
        return _decimal(type_)
    if pa.types.is_integer(type_):
        return _whole(type_.bit_width)
    if pa.types.is_floating(type_):
        most = _LARGEST_FLOAT if pa.types.is_float32(type_) else float("inf")
        return lambda given: _below(most, float(_a((int, Decimal), given)))
    if pa.types.is_temporal(type_):
        text = pa.string()
        return lambda given: pa.scalar(_a(str, given), text).cast(type_).value
    if pa.types.is_binary(type_):
        return lambda given: base64.b64decode(_a(str, given), validate=True)
    if pa.types.is_boolean(type_):
        return lambda given: _a(bool, given)
    return _text


def _struct(type_: pa.StructType) -> Callable[[Any], dict[str, Any]]:
    columns = [(field.name, field.nullable, converter(field.type)) for field in type_]

    def convert(given: Any) -> dict[str, Any]:
        members = _a(dict, given)
        found = {name: members.get(name) for name, _, _ in columns}
        for name, nullable, column in columns:
            if found[name] is not None:
                found[name] = column(found[name])
            elif not nullable:
                raise ValueError
        return found

    return convert


def _decimal(type_: pa.Decimal128Type) -> Callable[[Any], Decimal]:
    import pyarrow as pa

    exact = Context(prec=type_.precision, traps=[Inexact, InvalidOperation])
    unit = Decimal(1).scaleb(-type_.scale)

    def convert(given: Any) -> Decimal:
        if isinstance(given, str):
            return pa.scalar(given, pa.string()).cast(_wire(type_)).cast(type_).as_py()
        return exact.quantize(Decimal(_a((int, Decimal), given)), unit)

    return convert


def _whole(bits: int) -> Callable[[Any], int]:
    def convert(given: Any) -> int:
        number = _a((int, Decimal), given)
        if not -(1 << bits - 1) <= number < 1 << bits - 1 or number != int(number):
            raise ValueError
        return int(number)

    return convert


def _text(given: Any) -> str:
    if not _a(str, given).isascii():
        given.encode()  # raises for half of a surrogate pair
    return given


def _below(most: float, number: float) -> float:
    if abs(number) >= most:
        raise ValueError
    return number


def _a(types: type | tuple[type, ...], given: Any) -> Any:
    """The value, if it is of one of the types; true and false are no numbers."""
    if not isinstance(given, types) or (isinstance(given, bool) and types is not bool):
        raise ValueError
    return given
