"""Column value: payloads as columns, by Arrow's parser and message by message."""

from typing import Any

import pyarrow as pa
import pytest

from spark_pgqueue.postgres.errors import PgQueueError
from spark_pgqueue.spark.executor import typed
from tests.payloads import FIT, NO_FIT

TYPES: dict[str, pa.DataType] = {
    "string": pa.string(),
    "boolean": pa.bool_(),
    "tinyint": pa.int8(),
    "smallint": pa.int16(),
    "int": pa.int32(),
    "bigint": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "decimal(5, 2)": pa.decimal128(5, 2),
    "decimal(2, 2)": pa.decimal128(2, 2),
    "decimal(38, 38)": pa.decimal128(38, 38),
    "decimal(38, 0)": pa.decimal128(38, 0),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us", "UTC"),
    "timestamp_ntz": pa.timestamp("us"),
    "binary": pa.binary(),
    "array<int>": pa.list_(pa.int32()),
    "array<array<string>>": pa.list_(pa.list_(pa.string())),
    "array<array<int>>": pa.list_(pa.list_(pa.int32())),
    "struct<a: int>": pa.struct([("a", pa.int32())]),
    "struct<a: int, b: string>": pa.struct([("a", pa.int32()), ("b", pa.string())]),
    "struct<a: int not null>": pa.struct([pa.field("a", pa.int32(), nullable=False)]),
    "array<struct<at: date>>": pa.list_(pa.struct([("at", pa.date32())])),
    "array<struct<a: int not null>>": pa.list_(
        pa.struct([pa.field("a", pa.int32(), nullable=False)])
    ),
}


def read(type_: pa.DataType, *texts: str, permissive: bool = True) -> list[Any]:
    """The structs of payloads, in one batch."""
    batch = pa.record_batch({"seq": list(range(len(texts))), "data": list(texts)})
    columns = [("seq", pa.int64()), ("data", pa.string()), ("value", type_)]
    target = pa.schema(columns if permissive else columns[::2])
    return typed.typed(batch, target, "orders").to_pylist()


def read_many(type_: pa.DataType, text: str) -> Any:
    """The struct of a payload, of which a batch has many: by Arrow's parser, if it takes it."""
    found = read(type_, *[text] * 20)
    assert found == found[:1] * 20
    return found[0]


def struct(type_: str) -> pa.StructType:
    return pa.struct([("v", TYPES[type_])])


def test_what_the_server_takes_is_read_alone_and_beside_a_message_that_does_not_fit() -> None:
    for type_, text, value in FIT:
        good = f'{{"v": {text}}}'
        assert read_many(struct(type_), good) == {"v": value}
        assert read(struct(type_), good, "[]", "{}") == [{"v": value}, None, {"v": None}]
        assert read(struct(type_), good, '{"v": null}', permissive=False)[0] == {"v": value}


def test_what_the_server_refuses_is_null_or_fails() -> None:
    for type_, text in NO_FIT:
        bad = f'{{"v": {text}}}'
        if (type_, text) == ("date", '"0000-01-01"'):
            continue  # no date for Python, but one for Spark
        assert read(struct(type_), "{}", bad) == [{"v": None}, None], (type_, text)
        assert read_many(struct(type_), bad) is None, (type_, text)
        with pytest.raises(PgQueueError, match="message 1 of stream 'orders' does") as caught:
            read(struct(type_), "{}", bad, permissive=False)
        assert caught.value.sqlstate == "PQ004"


@pytest.mark.parametrize(
    "text",
    ["null", "1", "[]", '"{"', '{"v": 1} {"v": 2}', '{"v": "\\ud800"}', "{" * 100_000, "",
     '{"v": 1e99999999999999999999}', '{"v": ' + "9" * 5000 + "}"],
)  # fmt: skip
def test_what_is_no_object_is_null_and_kills_nothing(text: str) -> None:
    for type_ in ("string", "bigint", "decimal(5, 2)", "double"):
        assert read(struct(type_), '{"v": null}', text) == [{"v": None}, None]
        assert read_many(struct(type_), text) is None


def test_line_feeds_duplicates_and_unknown_members() -> None:
    texts = ('\r\n{"v":\n1}\n', '{"v": 1, "v": 2}', '{"V": 1}', '{"w": {"deep": ' + "[" * 9000)
    assert [read_many(struct("int"), text) for text in texts] == [
        {"v": 1},
        {"v": 2},
        {"v": None},
        None,
    ]
    assert read(struct("int"), *texts) == [{"v": 1}, {"v": 2}, {"v": None}, None]


def test_one_message_that_does_not_fit_leaves_the_others_to_the_parser() -> None:
    texts = [f'{{"v": {n}}}' for n in range(1000)]
    texts[700] = '{"v": "seven"}'
    found = read(struct("int"), *texts)
    assert [each and each["v"] for each in found] == [n if n != 700 else None for n in range(1000)]
    with pytest.raises(PgQueueError, match="message 700 of stream"):
        read(struct("int"), *texts, permissive=False)


@pytest.mark.parametrize(
    "doubtful",
    [
        "9" * 300, "1e9999", "-1.5E+20000", "1e-9999", "NaN", "-Infinity", "Inf", r'"\u0000"',
        "9" * 299, "1e999", "1e99999x", '"Information"', '"deadbeef1234,"', r'"\u0001"',
    ],
)  # fmt: skip
def test_what_is_doubtful_is_found_wherever_it_is(doubtful: str) -> None:
    """Of digits, each thirtieth is looked at."""
    for before in range(31 if doubtful[0] == "9" else 5):
        end = ",}] \n"[before % 5]
        text = pa.array([f'{{"{"a" * before}":{doubtful}{end}{"b" * 100}'])
        found = typed._any_match(text, typed._DOUBTFUL)
        assert typed._is_doubtful(text, len(text[0].as_py())) == found or doubtful.endswith("x")
