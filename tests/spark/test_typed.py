"""Option typed: payloads as the columns of the stream's schema."""

from __future__ import annotations

import json
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame
from pyspark.sql.types import StructType

from spark_pgqueue.postgres.connection import connect
from tests.spark.conftest import Queue
from tests.spark.test_archive import move, stored
from tests.spark.test_offset_source import load
from tests.sql.queue import maintain

pytestmark = pytest.mark.spark

SCHEMA = (
    "id bigint not null, name string, at timestamp, day date, amount decimal(10, 2), raw binary, "
    "tags array<string>, more struct<a: int not null, b: array<struct<c: double>>>"
)
FULL = json.dumps({
    "id": 1, "name": "ä", "at": "2026-01-31T12:00:00Z", "day": "2026-01-31", "amount": 12.5,
    "raw": "aGk=", "tags": ["x", None], "more": {"a": 1, "b": [{"c": 1}, None]}, "other": True,
})  # fmt: skip


@pytest.fixture
def typed(queue: Queue) -> Queue:
    """A queue with stream s, whose schema is SCHEMA, and its consumer c."""
    queue.create("s", "c", kind="json")
    alter(queue, SCHEMA)
    return queue


def alter(queue: Queue, schema: str | None) -> None:
    settings = json.dumps({"schema": schema})
    queue.sql("select pgqueue.alter_stream('s', %s::text::jsonb)", settings)


def send(queue: Queue, *data: str) -> None:
    queue.sql("select pgqueue.send_batch('s', %s)", list(data))


def values(queue: Queue) -> list[Any]:
    """The value of each row that was collected, in order."""
    rows = [row for batch in queue.seen.values() for row in batch]
    return [row.value for row in sorted(rows, key=lambda row: row.seq)]


def test_each_type_comes_as_spark_knows_it_and_as_from_json_reads_it(typed: Queue) -> None:
    send(typed, FULL, '{"id": 2}')
    frame = typed.load("s", "c", typed="failfast")
    assert frame.columns[:3] == ["seq", "key", "value"]
    columns = frame.schema["value"].dataType
    assert isinstance(columns, StructType)
    ((told,),) = typed.sql("select pgqueue.schema_of('s')")
    assert columns.simpleString() == StructType.fromJson(told).simpleString()
    typed.collect(frame).awaitTermination()
    full, least = values(typed)
    assert full.asDict(recursive=True) == {
        "id": 1, "name": "ä", "at": datetime(2026, 1, 31, 12), "day": date(2026, 1, 31),
        "amount": Decimal("12.50"), "raw": bytearray(b"hi"), "tags": ["x", None],
        "more": {"a": 1, "b": [{"c": 1.0}, None]},
    }  # fmt: skip
    assert least.asDict() == dict.fromkeys(columns.names) | {"id": 2}
    plain = load(typed, batch=True).selectExpr(f"from_json(data, '{SCHEMA}') as value")
    by_spark = [row.value.asDict(recursive=True) for row in plain.collect()]
    assert by_spark == [row.asDict(recursive=True) for row in (full, least)]


def test_what_was_sent_before_the_schema_is_null_beside_its_payload_or_fails(queue: Queue) -> None:
    queue.create("s", "c", "d", kind="json")
    old = ["null", "[1]", '{"id": "1"}', "{}"]
    send(queue, *old, '{"id": 1}')
    alter(queue, SCHEMA)
    rows = load(queue, batch=True, typed="permissive").selectExpr("data", "value", "value.id")
    found = {row.data: (row.value, row.id) for row in rows.collect()}
    assert {data: found.pop(data) for data in old} == dict.fromkeys(old, (None, None))
    assert found['{"id": 1}'][1] == 1
    with pytest.raises(Exception, match="message 1 of stream 's' does not fit the schema"):
        load(queue, batch=True, typed="failfast").collect()
    with pytest.raises(StreamingQueryException, match="message 1 of stream 's' does not fit"):
        queue.collect(queue.load("s", "c", typed="failfast")).awaitTermination()
    queue.collect(queue.load("s", "d", typed="permissive"), "other").awaitTermination()
    assert [value and value.id for value in values(queue)] == [None] * 4 + [1]


def test_a_query_goes_on_without_a_column_that_was_added_until_it_starts_again(
    typed: Queue,
) -> None:
    def each(_: DataFrame, batch_id: int) -> None:
        if batch_id == 0:
            alter(typed, SCHEMA + ", note string")
            send(typed, '{"id": 3, "note": "new"}')

    send(typed, '{"id": 1}', '{"id": 2}')
    frame = typed.load("s", "c", typed="failfast", maxMessagesPerTrigger=1)
    typed.collect(frame, each=each).awaitTermination()
    typed.collect(typed.load("s", "c", typed="failfast")).awaitTermination()
    found = values(typed)
    assert [row.id for row in found] == [1, 2, 3]
    assert ["note" in row for row in found] == [False, False, True]
    rows = load(typed, batch=True, typed="failfast").select("value.note").collect()
    assert [row.note for row in rows] == [None, None, "new"]


def test_messages_in_files_are_typed_as_they_are_read(typed: Queue, tmp_path: Path) -> None:
    typed.sql("select pgqueue.set_retention('s', p_messages => 16)")
    typed.sql("select pgqueue.set_archive('s', %s)", str(tmp_path / "archive"))
    typed.sql("select pgqueue.drop_consumer('s', 'c')")
    with connect(typed.url) as conn:
        for first in range(1, 61, 10):
            send(typed, *(f'{{"id": {i}}}' for i in range(first, first + 10)))
            maintain(conn)
    move(typed)
    assert stored(typed) < 40
    for mode in ("failfast", "permissive"):
        rows = load(typed, batch=True, typed=mode).select("seq", "value.id").collect()
        assert [row.id for row in sorted(rows)] == list(range(1, 61))


def test_what_the_sink_writes_fits_or_nothing_of_its_batch_is_published(typed: Queue) -> None:
    def write(ids: str) -> None:
        frame = typed.spark.range(1, 4).selectExpr(f"to_json(struct({ids} as id)) as data")
        writer = frame.coalesce(1).write.format("pgqueue").mode("append")
        writer.option("url", typed.url).option("stream", "s").save()

    write("id")
    assert typed.sent("s") == [f'{{"id":{i}}}' for i in (1, 2, 3)]
    with pytest.raises(Exception, match=r"column id is a whole .* \(row 2 of 3 in this write"):
        write("if(id = 2, null, id)")
    assert len(typed.sent("s")) == 3


def test_what_typed_cannot_do_is_said(typed: Queue) -> None:
    typed.create("plain", "c", kind="json")
    for given, says in (
        ({"stream": "plain", "consumer": "c"}, "stream 'plain' has no schema"),
        ({"stream": "plain"}, "stream 'plain' has no schema"),
        ({"streams": "s,plain"}, "option typed is for one stream"),
        ({"stream": "s", "typed": "yes"}, "must be permissive or failfast"),
        ({"stream": "s", "table": "messages"}, "option typed is for reading a stream"),
        ({"stream": "s", "consumer": "c"}, "option typed has no meaning for spark[.]read"),
    ):
        reader = typed.spark.read.format("pgqueue").option("url", typed.url)
        reader = reader.options(**({"typed": "failfast"} | given))
        with pytest.raises(Exception, match=says):
            reader.load().collect()


def test_a_schema_of_the_user_must_have_the_columns_of_the_option(typed: Queue) -> None:
    reader = typed.spark.readStream.format("pgqueue").option("url", typed.url).schema("id long")
    frame = reader.options(stream="s", typed="failfast").load()
    with pytest.raises(Exception, match="the schema of pgqueue cannot be chosen"):
        typed.collect(frame).awaitTermination()
