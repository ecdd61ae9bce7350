"""Queries with state, killed and started again, against what SQL computes of the same messages.

A join of two consumers, and a state of our own: each publishes to a stream what it computes, and
that stream has to hold what a computation over all messages gives, each result exactly once.
"""

from __future__ import annotations

import json
import random
import time
from itertools import accumulate
from pathlib import Path

import pytest

from tests.processes import Child
from tests.spark import test_crash
from tests.spark.conftest import Queue

pytestmark = [
    *(pytest.mark.spark, pytest.mark.slow, pytest.mark.longer, pytest.mark.timeout(600)),
    pytest.mark.usefixtures("spark_environment"),
]

APPLICATION = """
    import sys
    from pyspark.sql import Row, functions as f
    from pyspark.sql.streaming import StatefulProcessor
    from tests.sessions import session

    url, checkpoint, trigger, *pipelines = sys.argv[1:]
    spark = session(settings={
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.streaming.stateStore.providerClass":
            "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider",
    })

    def load(stream, **options):
        # As many as arrive while a batch runs, so that watermarks move; more where it lags.
        return spark.readStream.format("pgqueue").options(
            url=url, stream=stream, maxMessagesPerTrigger=100_000 if trigger == "now" else 300,
            minPartitions=2, **options,
        ).load()

    def joined():
        def side(stream, consumer, alias):
            rows = load(stream, consumer=consumer).withWatermark("inserted_at", "1 second")
            return rows.select("key", "data", "inserted_at").alias(alias)
        near = f.expr(
            "a.data = b.data and b.inserted_at between a.inserted_at - interval 5 seconds"
            " and a.inserted_at + interval 5 seconds")
        return side("in", "c", "a").join(side("other", "d", "b"), near, "left").select(
            f.col("a.key").alias("key"), f.col("a.data").alias("data"),
            f.col("b.data").alias("partner"))

    class Running(StatefulProcessor):
        '''Numbers the messages of a key, and adds them up.'''

        def init(self, handle):
            self.state = handle.getValueState("state", "number long, total long")

        def handleInputRows(self, key, rows, timers):
            number, total = self.state.get() if self.state.exists() else (0, 0)
            for row in rows:
                number, total = number + 1, total + int(row.data)
                yield Row(key=key[0], number=number, data=row.data)
            self.state.update((number, total))
            yield Row(key=key[0], number=number, data=f"total {total}")

        def close(self):
            pass

    def running():
        return load("in", consumer="e").groupBy("key").transformWithState(
            Running(), "key string, number long, data string", "Append", "None")

    queries = []
    for pipeline in pipelines:
        rows = {"joined": joined, "running": running}[pipeline]()
        sink = rows.select("key", f.to_json(f.struct("*")).alias("data")).writeStream.format(
            "pgqueue").options(
                url=url, stream=pipeline, checkpointLocation=f"{checkpoint}/{pipeline}")
        sink = sink.trigger(availableNow=True) if trigger == "now" else sink
        queries.append(sink.start())
    print("started", flush=True)
    for query in queries:
        query.awaitTermination()
    print("done", flush=True)
"""

PIPELINES = ("joined", "running")

MESSAGES = "(select m.* from pgqueue.messages m join pgqueue.streams using (stream_id) "
MESSAGES += "where name = '{}') as {}"


class Traffic(test_crash.Traffic):
    """Sends to the streams in and other until the block ends.

    Every other batch of `in` is sent once more, a while later; of `other` two of three messages.
    """

    every = 0.3

    def send(self) -> None:
        first = self.sent + 1
        self.queue.send("in", first, first + 49)
        if first > 200 and first % 100 == 1:
            self.queue.send("in", first - 200, first - 151)
        self.queue.sql(
            "select pgqueue.send_batch('other', array("
            "select i::text from generate_series(%s::int, %s) i where i %% 3 > 0))",
            *(first, first + 49),
        )
        self.sent += 50


def finished(queue: Queue) -> int:
    """How many micro-batches are in the commit log of each query, at least."""
    logs = [Path(queue.checkpoint(), pipeline, "commits") for pipeline in PIPELINES]
    return min(len(list(log.glob("[0-9]*"))) for log in logs)


def joined(queue: Queue, until: int) -> list[dict]:
    """What the join has to publish of the messages sent before `until` (a Unix time)."""
    a, b = MESSAGES.format("in", "a"), MESSAGES.format("other", "b")
    sql = (
        f"select a.key, a.data, b.data as partner from {a} left join {b} "
        "on a.data = b.data and b.inserted_at between a.inserted_at - interval '5 s' "
        "and a.inserted_at + interval '5 s' where a.inserted_at < to_timestamp(%s)"
    )
    return [row for (row,) in queue.sql(f"select to_jsonb(x) from ({sql}) x", until)]


def test_queries_with_state_that_are_killed_compute_what_the_messages_say(url: str, tmp_path: Path):
    queue = Queue(url, tmp_path)  # the applications have sessions of their own
    queue.create("in", "c", "e")
    queue.create("other", "d")
    for pipeline in PIPELINES:
        queue.create(pipeline)

    def application(trigger: str) -> Child:
        return Child(APPLICATION, url, queue.checkpoint(), trigger, *PIPELINES)

    with Traffic(queue) as traffic, application("always") as child:
        child.wait_until(lambda: finished(queue) >= 4)
        time.sleep(random.uniform(0, 1))
        child.kill()
    until = int(time.time()) + 1
    time.sleep(until + 7 - time.time())
    before = queue.sql(f"select key, array_agg(data) from {MESSAGES.format('in', 'a')} group by 1")
    for stream in ("in", "other"):  # moves the watermark past all of them
        queue.sql("select pgqueue.send(%s, '0', p_key => 'last')", stream)
    with application("now") as child:
        assert child.wait(240) == 0, child.output[-5000:]
    assert traffic.sent > 300
    states = [json.loads(data) for data in queue.sent("running")]
    check_states(before, states)
    rows = [{"partner": None, **json.loads(data)} for data in queue.sent("joined")]
    found = in_order([row for row in rows if row["key"] != "last"])
    assert found == in_order(joined(queue, until))


def check_states(sent: list[tuple], rows: list[dict]) -> None:
    """Each message has a number of its key, and the totals are those of the numbers so far."""
    for key, data in sent:
        of_key = [row for row in rows if row["key"] == key]
        states = [row for row in of_key if row["data"].startswith("total")]
        numbered = [row for row in of_key if row not in states]
        numbered.sort(key=lambda row: row["number"])
        assert [row["number"] for row in numbered] == list(range(1, len(data) + 1))
        assert sorted(row["data"] for row in numbered) == sorted(data)
        totals = list(accumulate(int(row["data"]) for row in numbered))
        assert len(states) > 3
        assert all(row["data"] == f"total {totals[row['number'] - 1]}" for row in states)


def in_order(rows: list[dict]) -> list[str]:
    return sorted(json.dumps(row, sort_keys=True) for row in rows)
