"""A checkpoint that is used again: what may have changed meanwhile, and an error for the rest.

Where the source decides, its session is asked as Spark would: no query has to be started for it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import pytest

import spark_pgqueue
from spark_pgqueue.postgres.errors import PgQueueError
from spark_pgqueue.spark.columns import source_schema
from spark_pgqueue.spark.consumer_source.batches import ConsumerBatches, Offset
from spark_pgqueue.spark.options.source import parse_source
from tests.spark.conftest import Queue
from tests.spark.test_crash import application

pytestmark = pytest.mark.spark

ERRORS = [
    "Multiple streaming jobs detected",  # Spark, which finds its log written by another
    "two drivers run with this checkpoint",  # the source, which finds its batch acknowledged
    "comes after its batch",  # the sink, which finds a later batch published
]

SCHEMA = source_schema("text", include_headers=True)


@contextmanager
def session(queue: Queue, stream: str, consumer: str, **options: Any) -> Iterator[ConsumerBatches]:
    """The driver-side state of a query."""
    given = {"url": queue.url, "stream": stream, "consumer": consumer, "waittime": "1ms"} | options
    opened = ConsumerBatches(parse_source(given), SCHEMA)
    try:
        yield opened
    finally:
        opened.close()


def ask(queue: Queue, stream: str, consumer: str, start: Offset | None = None, **options) -> Offset:
    """A query is started, asks for the offset after `start`, and ends."""
    with session(queue, stream, consumer, **options) as opened:
        admission = parse_source({"stream": stream, "consumer": consumer} | options).admission
        return opened.next(start or opened.initial, admission)


def refused(queue: Queue, stream: str, consumer: str, start: Offset, end: Offset) -> str:
    """The error of a query that is started there; the same whether it has to replay or goes on."""
    with session(queue, stream, consumer) as opened:
        with pytest.raises(PgQueueError) as error:
            opened.next(end, parse_source({"stream": stream, "consumer": consumer}).admission)
        if start != end:
            with pytest.raises(PgQueueError):
                opened.plan(start, end)
    return str(error.value)


def test_options_that_may_change_from_run_to_run(queue: Queue):
    queue.create("s", "c", ordering="key")
    queue.send("s", 1, 100)
    end = ask(queue, "s", "c", maxmessagespertrigger="10", visibilitytimeout="1 minute")
    for options in (
        {"maxmessagespertrigger": "20", "minpartitions": "3", "visibilitytimeout": "2 minutes"},
        {"maxbytespertrigger": "25", "retrytimeout": "1s", "failondataloss": "false"},
        {"maxrecordsperpartition": "5", "shareconsumer": "true", "includeheaders": "false"},
    ):
        after = ask(queue, "s", "c", end, **options)
        assert after.messages > end.messages
        assert after.reader == end.reader
        end = after
    assert end.messages == 100
    assert ask(queue, "s", "c", end) == end
    assert queue.backlog("s", "c") == 0


def test_another_stream_consumer_or_ordering_is_refused(queue: Queue):
    queue.create("s", "c", "d")
    queue.create("t", "c")
    queue.send("s", 1, 10)
    queue.send("t", 1, 10)
    start = ask(queue, "s", "c", maxmessagespertrigger="5")
    end = ask(queue, "s", "c", start, maxmessagespertrigger="5")
    for stream, consumer in (("s", "d"), ("t", "c")):
        message = refused(queue, stream, consumer, start, end)
        assert "[PQ005] the checkpoint is of consumer 'c' of stream 's', not of" in message
        assert f"consumer '{consumer}' of stream '{stream}'" in message
        assert "Hint: Use the stream and consumer that it was created with" in message
        assert queue.backlog(stream, consumer) == 10
    with pytest.raises(PgQueueError, match="has ordering none, but option ordering is stream"):
        ask(queue, "s", "c", end, createconsumer="true", ordering="stream")


def test_an_older_copy_of_a_checkpoint_is_refused(queue: Queue):
    queue.create("s", "c")
    queue.send("s", 1, 30)
    ends = [ask(queue, "s", "c", maxmessagespertrigger="10")]
    for _ in range(2):
        ends.append(ask(queue, "s", "c", ends[-1], maxmessagespertrigger="10"))
    message = refused(queue, "s", "c", ends[0], ends[0])
    assert "[PQ010]" in message
    assert "is older than what its query has acknowledged" in message
    assert "Hint: Use the latest checkpoint, or a new one. If two drivers run with this" in message
    with session(queue, "s", "c") as opened, pytest.raises(PgQueueError, match="PQ010"):
        opened.plan(ends[0], ends[1])


@pytest.mark.parametrize("what", ["consumer", "stream"])
def test_what_was_dropped_and_made_again_under_its_name_is_another_one(queue: Queue, what: str):
    queue.create("s", "c")
    queue.send("s", 1, 10)
    start = ask(queue, "s", "c", maxmessagespertrigger="5")
    end = ask(queue, "s", "c", start, maxmessagespertrigger="5")
    if what == "stream":
        queue.sql("select pgqueue.drop_stream('s')")
        queue.create("s", "c")
    else:
        queue.sql("select pgqueue.drop_consumer('s', 'c')")
        queue.sql("select pgqueue.create_consumer('s', 'c')")
    message = refused(queue, "s", "c", start, end)
    assert "[PQ005]" in message
    assert "has a reader that does not exist in this database" in message
    assert "or its consumer was dropped" in message
    assert "start with a new checkpoint" in message
    queue.send("s", 11, 12)
    assert ask(queue, "s", "c").messages == 2, "with a new one it goes on"


def test_a_consumer_that_is_dropped_under_a_query_is_one_clear_error(queue: Queue):
    queue.create("s", "c")
    with session(queue, "s", "c") as opened:
        queue.sql("select pgqueue.drop_consumer('s', 'c')")
        with pytest.raises(PgQueueError, match=r"PQ002.*the consumer of this query was dropped"):
            opened.next(opened.initial, parse_source({"stream": "s", "consumer": "c"}).admission)


@pytest.mark.promise("kafka: with a consumer, startingOffsets")
def test_create_consumer_starts_at_the_end_or_at_a_place(queue: Queue):
    queue.create("s")
    queue.send("s", 1, 10)
    create: dict[str, Any] = {"createconsumer": "true"}
    end = ask(queue, "s", "last", **create)
    assert end.messages == 0
    between = datetime.now(UTC).isoformat()
    queue.send("s", 11, 20)
    here = json.dumps(json.loads(spark_pgqueue.offsets(queue.url, "s"))["s"])
    queue.send("s", 21, 25)
    assert ask(queue, "s", "last", end).messages == 15
    assert ask(queue, "s", "timed", **create, startingposition=between).messages == 15
    assert ask(queue, "s", "from here", **create, startingposition=here).messages == 5


@pytest.mark.longer
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("spark_environment")
def test_of_two_drivers_on_one_checkpoint_spark_stops_one_and_nothing_is_lost_or_twice(
    queue: Queue,
):
    queue.create("in", "c")
    queue.create("out")
    queue.send("in", 1, 10)
    with application(queue, "always") as first:
        first.wait_for("started", 180)
        _await_published(queue, 10, first)
        with application(queue, "always") as second:
            second.wait_for("started", 180)
            sent, end = 10, time.monotonic() + 120
            while first.process.poll() is None and second.process.poll() is None:
                assert time.monotonic() < end, first.output[-3000:] + second.output[-3000:]
                queue.send("in", sent + 1, sent + 10)
                sent += 10
                time.sleep(0.2)
            stopped, other = (
                (first, second) if first.process.poll() is not None else (second, first)
            )
            said = [each for each in ERRORS if each in stopped.output]
            assert said, stopped.output[-5000:]
            _await_published(queue, sent, other)
            other.kill()
    assert queue.sent("out") == sorted(str(n) for n in range(1, sent + 1))


def _await_published(queue: Queue, count: int, child: Any) -> None:
    end = time.monotonic() + 120
    while len(queue.sent("out")) < count:
        assert child.process.poll() is None, child.output[-3000:]
        assert time.monotonic() < end
        time.sleep(0.2)
