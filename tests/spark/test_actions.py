"""Rows that settle messages, or bring them back: by the query that has them, and by anybody."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from spark_pgqueue.postgres.errors import PgQueueError
from spark_pgqueue.spark.columns import check_columns, source_schema
from spark_pgqueue.spark.options.sink import parse_sink
from spark_pgqueue.spark.options.table import CONSUMER_OF, parse_table
from spark_pgqueue.spark.sink.stream_writer import StreamWriter
from spark_pgqueue.spark.table_source.tables import TABLES, table_schema
from tests.spark.conftest import Queue, no_commit_log, refusal

pytestmark = pytest.mark.spark


def act(queue: Queue, frame: DataFrame, action: str | None = None, **options: str) -> None:
    """Write actions on messages of the consumer c of the stream in."""
    given = {"url": queue.url, "stream": "in", "consumer": "c", **options}
    if action is not None:
        given["action"] = action
    frame.write.format("pgqueue").mode("append").options(**given).save()


def dead(queue: Queue) -> list[tuple[Any, ...]]:
    return queue.sql("select data, reason, details from pgqueue.read_dead('in', 'c') order by seq")


@pytest.mark.promise("writing: Good and bad rows, and a replay", "kafka: writing, action")
def test_a_batch_is_split_into_good_and_bad_and_its_replay_changes_nothing(queue: Queue, fails):
    """Sends and actions are one transaction, once; the rows of the replay are the same."""
    queue.create("in", "c")
    queue.create("out")
    queue.send("in", 1, 10)
    attempts: list[list[str]] = []

    def split(batch: DataFrame, batch_id: int) -> None:
        bad = F.col("data") % 5 == 0
        late = F.col("data") == "7"
        batch.select(
            F.when(bad, "dead_letter").when(late, "nack").alias("action"),
            F.when(bad | late, "in").otherwise("out").alias("stream"),
            "seq",
            F.when(bad, F.concat(F.lit("no good: "), "data")).alias("reason"),
            F.to_json(F.struct(F.col("deliver_count").alias("at"))).alias("details"),
            F.expr("interval 1 hour").alias("delay"),
            F.concat(F.lit("good "), "data").alias("data"),
        ).write.format("pgqueue").mode("append").options(
            url=queue.url, consumer="c", txnAppId="split", txnVersion=str(batch_id)
        ).save()
        attempts.append(sorted(row.data for row in batch.collect()))
        if len(attempts) == 1:
            raise RuntimeError("died after the write")

    frame = queue.load("in", "c")
    assert "died after the write" in fails(queue.collect(frame, each=split))
    good = sorted(f"good {i}" for i in (1, 2, 3, 4, 6, 8, 9))
    letters = [(str(i), f"no good: {i}", {"at": 1}) for i in (5, 10)]
    assert (queue.sent("out"), dead(queue)) == (good, letters)
    assert queue.backlog("in", "c") == 8, "seven that the query holds, and the one for later"
    queue.collect(frame, each=split).awaitTermination()
    assert attempts[0] == attempts[1] == sorted(str(i) for i in range(1, 11))
    assert len(attempts) == 2
    assert (queue.sent("out"), dead(queue)) == (good, letters)
    assert queue.backlog("in", "c") == 1, "the query has acknowledged the others"
    assert queue.sql("select lost from pgqueue.readers") == [(0,)]


TARGETS = {
    "stream": ("key", "data"),
    "action": ("'ack' as action", "'in' as stream", "'c' as consumer", "seq"),
    "table": ("data as id",),
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.promise("writing: a txnAppId of another query")
def test_a_query_with_a_new_checkpoint_and_an_old_txn_app_id_fails_and_loses_nothing(
    queue: Queue, fails, target: str
):
    """Its batches have the numbers of others, and would count as repetitions of these."""
    queue.create("in", "c")
    queue.create("out")
    queue.sql("create table public.bills (id text primary key)")
    app = "first"
    names = {"stream": "out"} if target == "stream" else {}
    if target == "table":
        names = {"table": "public.bills", "mergeKeys": "id"}

    def write(batch: DataFrame, batch_id: int) -> None:
        rows = batch.selectExpr(*TARGETS[target])
        writer = rows.write.format("pgqueue").mode("append").options(url=queue.url, **names)
        writer.options(txnAppId=app, txnVersion=str(batch_id)).save()

    def written() -> int:
        if target == "action":
            return queue.sql("select count(*) from pgqueue.messages")[0][0] - queue.backlog(
                "in", "c"
            )
        if target == "table":
            return queue.sql("select count(*) from public.bills")[0][0]
        return len(queue.sent("out"))

    frame = queue.load("in", "c")
    queue.send("in", 1, 3)
    queue.collect(frame, each=write).awaitTermination()
    queue.send("in", 4, 6)
    assert written() == 3
    other = queue.collect(frame, checkpoint="another", each=write)
    message = fails(other)
    assert "PQ010" in message
    assert "version 0 of txn:first was published by query" in message
    assert "needs another txnAppId" in message
    assert queue.backlog("in", "c") == 3
    app = "second"
    queue.collect(frame, checkpoint="another", each=write).awaitTermination()
    assert (written(), queue.backlog("in", "c")) == (6, 0)


def test_a_stream_write_acts_and_sends_once_although_it_is_run_again(queue: Queue, fails):
    """Killed between the sink's commit and Spark's commit log. Rows go to the streams that they
    name; a stream that was made again is another one.
    """
    queue.create("in", "c")
    queue.create("out")
    rows = queue.load("in", "c").selectExpr(
        "case when data % 10 = 0 then 'dead_letter' when data % 10 = 5 then 'ack' end as action",
        "case when data % 5 = 0 then 'in' else 'out' end as stream",
        *("seq", "data"),
    )
    query = queue.publish(rows, "out", consumer="c", available_now=False)
    with no_commit_log(query, queue.checkpoint()):
        queue.send("in", 1, 10)
        fails(query)
    assert queue.sent("out") == sorted(str(i) for i in range(1, 11) if i % 5)
    assert [data for data, _, _ in dead(queue)] == ["10"]
    queue.send("in", 11, 20)
    queue.publish(rows, "out", consumer="c").awaitTermination()
    assert queue.sent("out") == sorted(str(i) for i in range(1, 21) if i % 5)
    assert [data for data, _, _ in dead(queue)] == ["10", "20"]
    assert queue.backlog("in", "c") == 0
    queue.sql("select pgqueue.drop_stream('out')")
    queue.create("out")
    queue.send("in", 21, 21)
    query = queue.publish(rows, "out", consumer="c")
    assert "stream 'out' was dropped and created again" in fails(query)


def test_who_is_no_query_acts_on_what_nobody_works_on(queue: Queue):
    """Dead letters come back; what a worker holds is left; rows that were read are taken as is."""
    queue.create("in", "c")
    queue.send("in", 1, 6)
    held = queue.sql("select claim_id, seq from pgqueue.receive('in', 'c', 2)")
    rows = queue.spark.range(1, 7).selectExpr("id as seq", "'x' as data", "1 as deliver_count")
    act(queue, rows.withColumn("reason", F.lit("never")), "dead_letter")
    assert [(data, reason) for data, reason, _ in dead(queue)] == [
        (str(i), "never") for i in range(3, 7)
    ]
    assert queue.sql("select pgqueue.ack(%s)", held[0][0]) == [(2,)]
    letters = rows.where("seq > 4").selectExpr("seq", "'c' as consumer", "'in' as stream")
    writer = letters.write.format("pgqueue").mode("append").option("action", "REDRIVE")
    writer = writer.options(url=queue.url, txnAppId="a", txnVersion="1")
    writer.save()
    assert len(dead(queue)) == 2
    again = queue.sql("select claim_id, seq from pgqueue.receive('in', 'c', 9)")
    assert sorted(seq for _, seq in again) == [5, 6]
    queue.sql("select pgqueue.dead_letter(%s)", again[0][0])
    writer.save()
    assert len(dead(queue)) == 4, "once for this version"
    act(queue, rows.where("seq = 3"), "ack")
    assert len(dead(queue)) == 4, "it is dead, and nobody's to acknowledge"


@pytest.mark.parametrize("action", ["ack", "redrive"])
def test_a_repeated_batch_acts_on_the_same_messages_or_only_on_as_many(url: str, action: str):
    """As option compareRepeats says."""
    queue = Queue(url, Path())
    queue.create("in", "c")
    queue.send("in", 1, 2)
    given = {"url": url, "stream": "in", "consumer": "c", "action": action}

    def write(batch: int, seq: int, compares: str) -> bool:
        options = parse_sink(given | {"compareRepeats": compares}, streaming=True)
        writer = StreamWriter(options, StructType().add("seq", "long"))
        rows = pa.RecordBatch.from_pydict({"seq": [seq]})
        return writer.publish([writer.stage(iter([rows]), "query", batch, "query")], batch)

    assert write(0, 1, "content")
    assert not write(0, 1, "content")
    assert not write(0, 2, "count")
    with pytest.raises(PgQueueError, match="with other messages than it has now") as error:
        write(0, 2, "content")
    assert "compareRepeats = count" in (error.value.hint or "")
    assert write(1, 2, "count")
    assert not write(1, 1, "count")


DETAILS = [
    '{"b": 12345678901234567890123456789.123456789, "a": 1.10}',
    "1e400",
    "-0.00000000000000000000000000000000001",
    "12345678901234567890123456789012345678",
    r'["\\u0000", "\ud83d\ude00", "]}"]',
    '{"a": 1, "a": 2}',
    ' "text" ',
    "[" * 1000 + "]" * 1000,
]


def test_details_are_stored_as_they_are_written(queue: Queue):
    """No number goes through a float; what jsonb can hold reaches it, and all else is refused."""
    queue.create("in", "c")
    queue.send("in", 1, len(DETAILS))
    rows = queue.spark.createDataFrame(list(enumerate(DETAILS, 1)), "seq long, details string")
    act(queue, rows, "dead_letter")
    found = queue.sql(
        "select d.details::text, i.text::jsonb::text from pgqueue.read_dead('in', 'c') d "
        "join unnest(%s::text[]) with ordinality i (text, seq) using (seq) order by seq",
        DETAILS,
    )
    assert len(found) == len(DETAILS)
    assert [details for details, _ in found] == [expected for _, expected in found]


def test_what_was_read_along_with_messages_may_stay_in_rows_with_an_action():
    """Of every table of messages, and of the source with all of its columns."""
    options = parse_sink({"stream": "s", "consumer": "c", "action": "ack"}, streaming=False)
    schemas = [source_schema("text", include_headers=True, has_arrival=True)]
    for name, table in TABLES.items():
        if table.of_messages:
            names = ",".join(each for each in table.columns if each != "consumers")
            consumer = {"consumer": "c"} if CONSUMER_OF[name] != "refused" else {}
            given = {"table": name, "stream": "s", "columns": names, **consumer}
            schemas.append(table_schema(parse_table(given), "text"))
    assert len(schemas) == 6
    for schema in schemas:
        assert check_columns(schema, options) == schema.names


BAD_FRAMES: list[tuple[str, dict[str, str | None], str]] = [
    ("1L as seq", {"action": "drop"}, "option action is 'drop', but must be ack, nack"),
    ("'ack' as action, 1L as seq", {"action": "ack"}, "but there is also a column action"),
    ("1L as seq", {"action": "ack", "consumers": "c"}, "with option action no rows are sent"),
    ("'x' as data", {"action": "ack"}, "column seq is missing: the DataFrame has data"),
    ("'x' as seq", {"action": "ack"}, "column seq is string, but must be long"),
    ("cast(null as long) as seq", {"action": "ack"}, "column seq is null in 1 of 1 rows"),
    ("1L as seq, 'ack' as action, null as x", {}, "column x is not a column of a message"),
    ("1L as seq, 'x' as data", {"consumer": ""}, "option consumer is ''"),
    ("1L as seq, 'x' as data", {"consumer": None}, "say which one: option action"),
    ("1L as seq, 'eat' as action", {}, "column action is 'eat', but must be ack, nack"),
    ("1L as seq, if(1 = 2, 'ack', null) as action", {}, "there is no column data"),
    (f"{2**63 - 1}L as seq", {"action": "ack"}, f"seq is {2**63 - 1}, which no message can have"),
    ("1L as seq", {"action": "ack", "consumer": None}, "option consumer is missing"),
    ("1L as seq", {"action": "ack", "consumer": "no"}, "unknown consumer 'no' of stream"),
    ("1L as seq", {"action": "ack", "stream": "no"}, "unknown stream 'no'"),
    ("1L as seq, '1 s' as delay", {"action": "nack"}, "must be interval day to second"),
    (
        "1L as seq, interval -1 second as delay",
        {"action": "nack"},
        "column delay must be null or an interval from 0 to 10 years",
    ),
    *(
        (f"1L as seq, {details} as details", {"action": "dead_letter"}, "details is not JSON")
        for details in (
            *("'{'", "'NaN'", "'1e131072'", "'1e-16384'", "repeat('[', 1001) || repeat(']', 1001)"),
            *(f"r'{text}'" for text in (r'["\u0000"]', r'"\ud800"', r'{"\udc00\ud800": 1}')),
        )
    ),
    (
        "explode(array(1L, 1L)) as seq, uuid() as reason",
        {"action": "dead_letter"},
        "message 1 of consumer 'c' of stream 'in' is named by two actions",
    ),
]


class TestBadInput:
    """Each ends in one clear error that names the column or option, and changes nothing."""

    def test_when_a_frame_is_written(self, queue: Queue):
        queue.create("in", "c")
        queue.send("in", 1, 2)
        for select, options, expected in BAD_FRAMES:
            given = {"url": queue.url, "stream": "in", "consumer": "c", **options}
            given = {name: value for name, value in given.items() if value is not None}
            assert expected in refusal(queue.spark.sql(f"select {select}"), **given)
        assert queue.backlog("in", "c") == 2
        assert queue.sent("in") == ["1", "2"]
