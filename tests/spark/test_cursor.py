"""Streams that are read without a consumer, each promise in the name of its test."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame

import spark_pgqueue
from spark_pgqueue.postgres.connection import connect
from spark_pgqueue.postgres.errors import PgQueueError
from tests.spark.conftest import Queue, wait_until

pytestmark = pytest.mark.spark


def load(queue: Queue, stream: str | None = "s", *, batch: bool = False, **options) -> DataFrame:
    reader = queue.spark.read if batch else queue.spark.readStream
    given = {"url": queue.url, "stream": stream, "startingOffsets": "earliest"} | options
    given = {name: value for name, value in given.items() if value is not None}
    return reader.format("pgqueue").options(**given).load()  # type: ignore[return-value]


def numbers(first: int, last: int) -> list[int]:
    return list(range(first, last + 1))


def offset_of(queue: Queue, batch: int, checkpoint: str = "checkpoint") -> dict[str, Any]:
    lines = Path(queue.checkpoint(checkpoint), "offsets", str(batch)).read_text().splitlines()
    return json.loads(lines[-1])


def test_a_query_reads_a_stream_in_batches_and_goes_on_from_its_checkpoint(queue: Queue):
    queue.create("s", "c")
    queue.send("s", 1, 1000)
    headers = '{"a": "b", "n": 1}'
    queue.sql("select pgqueue.send('s', '1001', 'k', %s, p_priority => 5)", headers)
    frame = load(queue, maxMessagesPerTrigger=400, minPartitions=2)
    assert frame.columns == ["seq", "key", "data", "headers", "inserted_at"]
    query = queue.collect(frame)
    query.awaitTermination()
    assert [len(queue.seen[batch]) for batch in sorted(queue.seen)] == [400, 400, 201]
    assert queue.data() == numbers(1, 1001)
    row = queue.rows()[-1]
    ((at,),) = queue.sql("select inserted_at from pgqueue.messages where seq = 1001")
    assert row.asDict() == {
        "seq": 1001,
        "key": "k",
        "data": "1001",
        "headers": {"a": "b", "n": "1"},
        "inserted_at": at.astimezone(UTC).replace(tzinfo=None),
    }
    told = [each.json for each in query.recentProgress if each.numInputRows]
    latest = [json.loads(each)["sources"][0]["latestOffset"] for each in told]
    latest = [json.loads(each) if isinstance(each, str) else each for each in latest]
    assert [each["backlog"] for each in latest] == [601, 201, 0]
    assert latest[0]["lagSeconds"] > 0
    assert spark_pgqueue.history(query).first().source == "s"
    queue.send("s", 1002, 1005)
    queue.collect(load(queue, includeHeaders="false")).awaitTermination()
    assert queue.data() == numbers(1, 1005)
    assert queue.backlog("s", "c") == 1005, "no consumer is touched"
    assert set(offset_of(queue, 3)["streams"]["s"]) == {"incarnation", "next", "messages"}
