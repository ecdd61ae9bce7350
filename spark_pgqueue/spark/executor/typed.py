"""The executor's side of column value: payloads as columns, from JSON into Arrow.

`sql/typed/schemas.sql` decides what fits. There are two parsers: a converter in Python, which reads
exactly what the server accepts, one message at a time; and Arrow's parser, which is fast and
accepts more than the server. Arrow's result is used only if both would read the batch alike.
Otherwise the batch is halved, until few enough messages are left for the converter.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable
from decimal import Context, Decimal, Inexact, InvalidOperation
from typing import TYPE_CHECKING, Any

from spark_pgqueue.postgres.errors import UNFIT_DATA, PgQueueError
from spark_pgqueue.spark.columns import VALUE

if TYPE_CHECKING:
    import pyarrow as pa

DAY = (
    "(([0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)-((0[13578]|1[02])-(0[1-9]|[12][0-9]"
    "|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))|([0-9]{2}(0[48]"
    "|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00)-02-29)"
)
MOMENT = DAY + "[T ]([01][0-9]|2[0-3]):[0-5][0-9](:[0-5][0-9]([.][0-9]{1,6})?)?"
ZONED = MOMENT + "(Z|[+-](0[0-9]|1[0-4]):?[0-5][0-9])"
BASE64 = "([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?"
"""The texts that fit a type, as in `sql/typed/schemas.sql`."""

LARGEST = {"float": Decimal("3.40282356e38"), "double": Decimal("1.7976931348623158e308")}
"""Below this, a number fits the type: it is rounded to a finite one."""

_DOUBTFUL = r"\\u0000|[0-9]{300}|[:,\[ \t\r\n]-?(?:NaN|Inf|[0-9]+(?:[.][0-9]+)?[eE][-+]?[0-9]{4})"
"""What Arrow takes anywhere in a text, and the server may refuse."""

_HINTS = (r"\\u0000", "NaN", "Inf", r"[eE][-+]?[0-9]{4}[0-9]*[ \t\r\n,\]}]")
"""What all of _DOUBTFUL but the digits have: a search for a known first letter is many times as
quick.
"""

_NUMBER_AS_TEXT = r'"[-+]?[0-9.]+(?:[eE][-+]?[0-9]+)?"|"[-+0-9.eE]*\\u00'
"""What Arrow may take for a decimal, and is none."""

_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_TOKEN = re.compile(_STRING.pattern + r'|[][{}"]|[^][{}"]+', re.DOTALL)

_UNFIT = (ValueError, ArithmeticError)
"""What Python, and Arrow, raise for a value that does not fit."""

_FEW = 8
"""Up to this number, messages are read one by one: Arrow takes longer to begin."""

_LEVELS = 64
"""Deeper than any schema."""


def stored(names: list[str], constant: dict[str, Any]) -> list[str]:
    """The columns of a message to read, for these columns of a row."""
    return list(
        dict.fromkeys("data" if name == VALUE else name for name in names if name not in constant)
    )


def typed(batch: pa.RecordBatch, target: pa.Schema, stream: str) -> pa.Array:
    """The payloads of a batch as structs.

    Raises:
        PgQueueError: PQ004 for a message that does not fit. If `target` has column data, such a
            message is null instead.
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
            rows.append(convert(read_json(text)))
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
    """Payloads, by Arrow's parser; None where it might not read one of them as the server does."""
    import pyarrow as pa
    import pyarrow.compute as pc

    # For anything but an object the parser fails, or crashes.
    begun = pc.call_function("starts_with", [texts], pc.MatchSubstringOptions("{")).true_count
    if begun < len(texts) and not _all_match(texts, r"^[ \t\r\n]*\{"):
        return None
    joined = pc.call_function(
        "binary_join", [pa.ListArray.from_arrays([0, len(texts)], texts), "\n"]
    )
    lines, numbers = joined[0].as_buffer(), _decimals(type_)
    longest = pc.call_function("max", [pc.call_function("binary_length", [texts])]).as_py()
    if _is_doubtful(joined, longest):
        return None
    parsed = None
    if numbers is None or not _any_match(joined, _NUMBER_AS_TEXT):
        parsed = _parse(lines, len(texts), type_, None)
    else:
        # Arrow reads a decimal from more texts than the server takes. So texts are read as texts,
        # and decimals from numbers only where Arrow reads all of them as doubles, which no text is.
        parsed = _parse(lines, len(texts), type_, pa.string())
        if parsed is None and _parse(lines, len(texts), numbers, pa.float64()) is not None:
            parsed = _parse(lines, len(texts), type_, None)
    try:
        return None if parsed is None or not _fits(parsed, type_) else parsed.cast(type_)
    except _UNFIT:
        return None


def _is_doubtful(joined: pa.StringArray, longest: int) -> bool:
    """Whether the text, with lines of up to `longest` bytes, contains something of _DOUBTFUL."""
    import pyarrow as pa

    hinted = any(_any_match(joined, hint) for hint in _HINTS)
    if longest > 300 and not hinted:
        # Of 300 digits in a row, ten are among each thirtieth byte.
        sample = memoryview(joined[0].as_buffer())[::30].tobytes()
        hinted = _any_match(pa.array([sample]), "[0-9]{10}")
    return hinted and _any_match(joined, _DOUBTFUL)


def _parse(
    lines: pa.Buffer, count: int, type_: pa.StructType, decimals: pa.DataType | None
) -> pa.StructArray | None:
    """Lines of JSON in the types that Arrow's parser reads, see _wire; None where it refuses."""
    import pyarrow as pa
    from pyarrow import json as arrow_json

    wire = _wire(type_, decimals)
    try:
        table = arrow_json.read_json(
            pa.BufferReader(lines),
            # One block, so that line feeds within a message do not matter.
            arrow_json.ReadOptions(use_threads=False, block_size=lines.size + 1),
            arrow_json.ParseOptions(
                explicit_schema=pa.schema(list(wire)), unexpected_field_behavior="ignore"
            ),
        )
    except (*_UNFIT, NotImplementedError):  # (older Arrow reads no decimals from numbers)
        return None
    if len(table) != count:
        return None
    (struct,) = table.select([field.name for field in wire]).to_struct_array().chunks
    return struct


def _wire(type_: pa.DataType, decimals: pa.DataType | None) -> pa.DataType:
    """The type that Arrow's parser reads, to be cast: it takes numbers for dates, for example.

    `decimals` is the type of decimals; None stands for decimals of more digits than the precision.
    """
    import pyarrow as pa

    if pa.types.is_struct(type_):
        return pa.struct([field.with_type(_wire(field.type, decimals)) for field in type_])
    if pa.types.is_list(type_):
        return pa.list_(type_.value_field.with_type(_wire(type_.value_type, decimals)))
    if pa.types.is_decimal(type_):
        return decimals or pa.decimal256(76, type_.scale)
    return pa.string() if pa.types.is_temporal(type_) else type_


def _decimals(type_: pa.DataType) -> pa.DataType | None:
    """The part of a type that has decimals; None: there are none."""
    import pyarrow as pa

    if pa.types.is_struct(type_):
        parts = [(field, _decimals(field.type)) for field in type_]
        fields = [pa.field(field.name, part) for field, part in parts if part is not None]
        return pa.struct(fields) if fields else None
    if pa.types.is_list(type_):
        part = _decimals(type_.value_type)
        return None if part is None else pa.list_(part)
    return type_ if pa.types.is_decimal(type_) else None


def _is_exact(type_: pa.DataType) -> bool:
    """Whether Arrow's parser reads the type."""
    import pyarrow as pa

    if pa.types.is_nested(type_):
        return all(_is_exact(type_.field(i).type) for i in range(type_.num_fields))
    return not (pa.types.is_binary(type_) or pa.types.is_float32(type_))


def _fits(array: pa.Array, type_: pa.DataType) -> bool:
    """Whether all that Arrow's parser read fits the type; its cast checks the rest."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if pa.types.is_struct(type_):
        columns = zip(array.flatten(), type_, strict=True)
        return all(
            _fits(column, field.type) and (field.nullable or column.null_count <= array.null_count)
            for column, field in columns
        )
    if pa.types.is_list(type_):
        return _fits(array.flatten(), type_.value_type)
    if pa.types.is_string(array.type):
        words = text_of(type_)
        return words is None or _all_match(array, f"^({words})$")
    if pa.types.is_float64(type_):
        sizes = pc.call_function("abs", [array])
        most = pa.scalar(float(LARGEST["double"]))
        return not pc.call_function("greater_equal", [sizes, most]).true_count
    return True


def _all_match(texts: pa.Array, regex: str) -> bool:
    """Whether all texts that are not null match."""
    return _matches(texts, regex) == len(texts) - texts.null_count


def _any_match(texts: pa.Array, regex: str) -> bool:
    return _matches(texts, regex) > 0


def _matches(texts: pa.Array, regex: str) -> int:
    import pyarrow.compute as pc

    options = pc.MatchSubstringOptions(regex)
    return pc.call_function("match_substring_regex", [texts], options).true_count


def read_json(text: str) -> Any:
    """The value of a text that is JSON, as jsonb reads it; numbers as Decimal.

    Raises:
        ValueError: jsonb cannot hold it.
        ArithmeticError: so, for a number.
    """
    try:
        value = _loads(text)
    except RecursionError:
        value = _loads(_shallow(text))
    if "\\u" in text:
        for each in _STRING.findall(text):
            if "\\u" in each:
                found = json.loads(each)
                if "\0" in found:
                    raise ValueError("U+0000")
                found.encode()  # raises for half of a surrogate pair
    return value


def _number(text: str) -> Decimal:
    """A number as numeric holds it: 131,072 digits before the point, and 16,383 behind it."""
    number = Decimal(text)
    if len(text) > 300 or "e" in text or "E" in text or not number.is_finite():
        exponent = number.as_tuple().exponent
        if not (isinstance(exponent, int) and -16383 <= exponent < 1 << 30):
            raise ValueError("a number that is too long")
        if number and number.adjusted() >= 131072:
            raise ValueError("a number that is too large")
    return number


class _Decoder(json.JSONDecoder):
    """Reads numbers exactly. Its scanner cannot be pickled, so Spark's processes make their own."""

    def __init__(self):
        super().__init__(parse_float=_number, parse_int=_number, parse_constant=_number)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Decoder, ()


_loads = _Decoder().decode


def _shallow(text: str) -> str:
    """A text with empty objects and arrays in place of those that are deeper than any schema.

    Python's parser is recursive, and fails beyond some depth. Members that no column names may have
    any depth.

    Raises:
        ValueError: the text is no JSON.
    """
    open_: list[list[str]] = [[]]
    for token in _TOKEN.findall(text):
        if token in "[{":
            open_.append([token])
        elif token in "]}":
            inner = "".join(open_.pop()) + token
            if len(open_) > _LEVELS:
                inner = "[]" if isinstance(_loads(inner), list) else "{}"
            if not open_:
                raise ValueError("more is closed than is opened")
            open_[-1].append(inner)
        else:
            open_[-1].append(token)
    (whole,) = open_  # or more is opened than is closed
    return "".join(whole)


def converter(type_: pa.DataType) -> Callable[[Any], Any]:
    """A function that turns a value of `json.loads` into the one of an Arrow type.

    The function raises one of _UNFIT for a value that does not fit. The types and their values are
    those of `sql/typed/schemas.sql`.
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
        most = LARGEST["float" if pa.types.is_float32(type_) else "double"]
        return lambda given: float(_between(-most, _a(Decimal, given), most))
    if pa.types.is_boolean(type_):
        return lambda given: _a(bool, given)
    words = text_of(type_)
    if words is None:
        return lambda given: _a(str, given)
    regex, text = re.compile(words), pa.string()
    if pa.types.is_binary(type_):
        return lambda given: base64.b64decode(_matching(regex, given), validate=True)
    return lambda given: pa.scalar(_matching(regex, given), text).cast(type_).value


def text_of(type_: pa.DataType) -> str | None:
    """A regular expression for the texts that fit a type; None: any."""
    import pyarrow as pa

    if pa.types.is_decimal(type_):
        before, behind = type_.precision - type_.scale, type_.scale
        whole = "(0%s)" % (f"|[1-9][0-9]{{0,{before - 1}}}" if before else "")
        return f"-?{whole}" + (f"([.][0-9]{{1,{behind}}})?" if behind else "")
    if pa.types.is_date(type_):
        return DAY
    if pa.types.is_timestamp(type_):
        return ZONED if type_.tz else MOMENT
    return BASE64 if pa.types.is_binary(type_) else None


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
    exact = Context(prec=type_.precision, traps=[Inexact, InvalidOperation])
    unit, regex = Decimal(1).scaleb(-type_.scale), re.compile(text_of(type_) or "")

    def convert(given: Any) -> Decimal:
        if isinstance(given, str):
            given = Decimal(_matching(regex, given))
        return exact.quantize(_a(Decimal, given), unit)

    return convert


def _whole(bits: int) -> Callable[[Any], int]:
    most = Decimal(1 << bits - 1)

    def convert(given: Any) -> int:
        number = _between(-most - 1, _a(Decimal, given), most)
        if number != int(number):
            raise ValueError
        return int(number)

    return convert


def _between(least: Decimal, number: Decimal, most: Decimal) -> Decimal:
    if not least < number < most:
        raise ValueError
    return number


def _matching(regex: re.Pattern[str], given: Any) -> str:
    if not regex.fullmatch(_a(str, given)):
        raise ValueError
    return given


def _a(type_: type, given: Any) -> Any:
    """The value, which must be of the type."""
    if not isinstance(given, type_):
        raise ValueError
    return given
