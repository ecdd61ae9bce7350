"""Streams that are read without a consumer, each promise in the name of its test."""

from __future__ import annotations

import json
import time
from datetime import UTC
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame

import spark_pgqueue
from spark_pgqueue.postgres.connection import connect
from spark_pgqueue.postgres.errors import PgQueueError
from spark_pgqueue.spark.options.stream_source import parse_stream_source
from spark_pgqueue.spark.stream_source.streams import Streams
from tests.spark.conftest import Queue, numbers, wait_until

pytestmark = pytest.mark.spark


def load(queue: Queue, stream: str | None = "s", *, batch: bool = False, **options) -> DataFrame:
    reader = queue.spark.read if batch else queue.spark.readStream
    given = {"url": queue.url, "stream": stream, "startingOffsets": "earliest"} | options
    given = {name: value for name, value in given.items() if value is not None}
    return reader.format("pgqueue").options(**given).load()  # type: ignore[return-value]


def offset_of(queue: Queue, batch: int, checkpoint: str = "checkpoint") -> dict[str, Any]:
    lines = Path(queue.checkpoint(checkpoint), "offsets", str(batch)).read_text().splitlines()
    return json.loads(lines[-1])


@pytest.mark.promise("kafka: without a consumer, includeHeaders, maxOffsetsBehindLatest")
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
    assert {row.source for row in spark_pgqueue.history(query).collect()} == {"s"}
    queue.send("s", 1002, 1005)
    queue.collect(load(queue, includeHeaders="false")).awaitTermination()
    assert queue.data() == numbers(1, 1005)
    assert queue.backlog("s", "c") == 1005, "no consumer is touched"
    assert set(offset_of(queue, 3)["streams"]["s"]) == {"incarnation", "next", "messages"}


@pytest.mark.promise("kafka: without a consumer, key")
def test_streams_of_a_pattern_are_read_together_and_a_failed_first_batch_is_replayed(
    queue: Queue, fails
):
    """Into our sink, each message once, though the first batch fails after it was read."""
    queue.create("a 1")
    queue.create("a 2")
    queue.create("out")
    queue.send("a 1", 1, 5)
    queue.send("a 2", 1, 5)
    failed: list[Any] = []

    def fail(batch: DataFrame, batch_id: int) -> None:
        failed.extend(batch.collect())
        raise RuntimeError("the sink fails")

    options = {"streamPattern": "a .", "maxMessagesPerTrigger": 6, "includeHeaders": "false"}
    frame = load(queue, None, **options)
    assert frame.columns == ["stream", "seq", "key", "data", "inserted_at"]
    assert "the sink fails" in fails(queue.collect(frame, each=fail))
    queue.send("a 1", 6, 7)
    queue.publish(frame.selectExpr("concat(stream, '/', data) as data"), "out").awaitTermination()
    assert sorted(f"{row.stream}/{row.data}" for row in failed) == [
        f"a {stream}/{i}" for stream in (1, 2) for i in (1, 2, 3)
    ]
    assert queue.sent("out") == sorted(
        [f"a 1/{i}" for i in numbers(1, 7)] + [f"a 2/{i}" for i in numbers(1, 5)]
    )
    ends = [offset_of(queue, batch)["streams"]["a 1"] for batch in (0, 1)]
    assert ["from" in each for each in ends] == [True, False]


@pytest.mark.promise("kafka: without a consumer, kafka.group.id")
def test_a_query_notes_how_far_it_is_as_the_position_of_a_group(queue: Queue, fails):
    """What its checkpoint has as done: no batch that is under way, and none that failed."""
    for stream in ("s", "t"):
        queue.create(stream)
        queue.sql("select pgqueue.create_group(%s, 'report', 1, 'earliest')", stream)
        queue.send(stream, 1, 15)
    behind: list[int] = []

    def look(batch: DataFrame, batch_id: int) -> None:
        batch.collect()
        ((owed,),) = queue.sql("select sum(behind)::int from pgqueue.group_stats")
        behind.append(owed)
        if len(behind) == 2:
            raise RuntimeError("the sink fails")

    frame = load(queue, None, streams="s,t", group="report", maxMessagesPerTrigger=10)
    assert "the sink fails" in fails(queue.collect(frame, each=look))
    queue.collect(frame, each=look).awaitTermination()
    assert behind == [30, 20, 20, 10]
    assert queue.sql("select distinct behind from pgqueue.group_stats") == [(0,)]


@pytest.mark.promise("kafka: without a consumer, endingOffsets")
def test_a_batch_reads_a_range_once_and_touches_nothing(queue: Queue):
    queue.create("s", "c")
    queue.create("t")
    queue.send("s", 1, 400)
    ((at,),) = queue.sql("select clock_timestamp()")
    queue.send("s", 401, 600)
    queue.send("t", 1, 3)

    def data(**options: Any) -> list[int]:
        frame = load(queue, batch=True, **{"startingOffsets": None} | options)
        return [int(row.data) for row in frame.collect()]

    assert data(minPartitions=4) == numbers(1, 600)
    assert data(startingTimestamp=at.isoformat()) == numbers(401, 600)
    assert data(endingTimestamp=at.isoformat()) == numbers(1, 400)
    assert data(endingTimestamp=at.isoformat(), startingTimestamp=at.isoformat()) == []
    places = {"startingOffsets": '{"s": "seq 399"}', "endingOffsets": '{"s": "seq 402"}'}
    assert data(**places) == [399, 400, 401]
    both = load(queue, None, batch=True, streams="s,t", startingOffsets=None)
    assert both.groupBy("stream").count().orderBy("stream").collect() == [("s", 600), ("t", 3)]
    assert queue.backlog("s", "c") == 600
    assert queue.sql("select count(*) from pgqueue.sink_batches") == [(0,)]

    with pytest.raises(Exception, match=r"maxMessagesPerTrigger is for spark\.readStream"):
        data(maxMessagesPerTrigger=3)
    with pytest.raises(Exception, match="option visibilityTimeout needs consumer"):
        load(queue, visibilityTimeout="3s")


@pytest.mark.promise("cookbook: Backfill")
def test_a_batch_and_the_query_that_goes_on_miss_nothing_of_open_transactions(queue: Queue, caplog):
    queue.create("s")
    queue.send("s", 1, 2)
    with connect(queue.url) as producer, producer.transaction():
        producer.execute("select pgqueue.send('s', '3')")
        queue.send("s", 4, 5)
        here = spark_pgqueue.offsets(queue.url, "s")
        ((now,),) = queue.sql("select clock_timestamp()")
        options = parse_stream_source({"url": queue.url, "stream": "s"}, streaming=False)
        streams = Streams(options, patience=0)
        streams.end("s", streams.begin("s", "earliest"))
        assert "are open" not in caplog.text
        streams.end("s", streams.begin("s", now.isoformat()))
        assert "transactions that send to stream s are open" in caplog.text
        streams.close()
    old = load(queue, batch=True, endingOffsets=here)
    assert sorted(int(row.data) for row in old.collect()) == [1, 2, 4, 5]
    queue.collect(load(queue, startingOffsets=here)).awaitTermination()
    assert queue.data() == [3]
    with pytest.raises(PgQueueError, match="'no'"):
        spark_pgqueue.offsets(queue.url, "no")


@pytest.mark.longer
@pytest.mark.promise("kafka: without a consumer, kafkaConsumer.pollTimeoutMs")
def test_a_query_that_waits_is_woken_up_outlives_its_connections_and_makes_no_empty_batches(
    queue: Queue,
):
    queue.create("s")
    query = queue.collect(load(queue, startingOffsets="latest"), available_now=False)
    wait_until(lambda: 0 in queue.seen, query)
    queue.send("s", 1, 3)
    wait_until(lambda: queue.data() == [1, 2, 3], query)
    queue.terminate_backends()
    queue.send("s", 4, 4)
    wait_until(lambda: queue.data() == [1, 2, 3, 4], query)
    time.sleep(1.5)
    idle = [each for each in query.recentProgress if each.numInputRows == 0 and each.batchId > 2]
    assert not [each for each in idle if each.durationMs.get("addBatch")], "no empty batches"
