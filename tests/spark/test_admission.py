"""How large micro-batches are: by messages and bytes, and how few of them a query waits for."""

from __future__ import annotations

import math
import threading
from datetime import timedelta

import pytest

from spark_pgqueue.spark.columns import source_schema
from spark_pgqueue.spark.consumer_source.batches import ConsumerBatches
from spark_pgqueue.spark.options.admission import Admission
from spark_pgqueue.spark.options.source import parse_source
from tests.spark.conftest import Queue, numbers

BOUNDS = {"maxMessagesPerTrigger": 100, "maxBytesPerTrigger": 1000, "minMessagesPerTrigger": 90}


def test_a_batch_begins_when_there_is_enough_or_the_delay_is_over():
    admission = Admission(min_messages=10, max_delay=timedelta(seconds=60))
    assert [admission.begins(n, 5.0) for n in (0, 9, 10, 11)] == [False, False, True, True]
    assert [admission.begins(9, since) for since in (59.9, 60.0, math.inf)] == [False, True, True]
    assert Admission().begins(0, 0.0)


def test_how_many_messages_are_asked_for_goes_by_their_size():
    admission = Admission(max_bytes=1000)
    assert admission.messages_to_ask(None, None) is None
    assert admission.messages_to_ask(50, None) == 50
    assert admission.messages_to_ask(None, 10.5) == 95
    assert admission.messages_to_ask(None, 1.0) == 990
    assert admission.messages_to_ask(50, 10.0) == 50
    assert admission.messages_to_ask(None, 5000.0) == 1
    assert admission.messages_to_ask(None, 0.0) == 990
    assert Admission().messages_to_ask(7, 10.0) == 7


@pytest.mark.spark
@pytest.mark.promise(
    "guarantee: Available now",
    "kafka: with a consumer, endingOffsets",
    "kafka: with a consumer, maxOffsetsPerTrigger",
)
def test_available_now_takes_everything_whatever_the_bounds(queue: Queue):
    """In batches that keep them: of messages, and of bytes."""
    queue.create("s", "c")
    sent = [n % 40 for n in range(300)]
    queue.sql(
        "select count(*) from pgqueue.send_batch('s', "
        "array(select repeat('x', n) from unnest(%s::int[]) n))",
        sent,
    )

    def send_more(batch, batch_id):
        queue.sql("select pgqueue.send('s', 'later')")

    queue.collect(queue.load("s", "c", **BOUNDS), each=send_more).awaitTermination()
    batches = [[len(row.data) for row in queue.seen[i]] for i in sorted(queue.seen)]
    assert sorted(size for batch in batches for size in batch) == sorted(sent)
    assert all(len(batch) <= 100 and sum(batch) <= 1000 for batch in batches)
    assert len(batches) <= 7
    assert queue.backlog("s", "c") == len(batches), "what was published later"


@pytest.mark.spark
@pytest.mark.promise("guarantee: Available now")
def test_available_now_waits_for_what_a_rate_allows(queue: Queue):
    """And ends when nothing is left but what was published later."""
    queue.create("s", "c")
    settings = '{"rate_limit": 50, "rate_interval": "1 s"}'
    queue.sql("select pgqueue.alter_consumer('s', 'c', %s)", settings)
    queue.send("s", 1, 120)

    def send_more(batch, batch_id):
        queue.send("s", 1000, 1099)
        if batch_id == 2:
            slow = '{"rate_limit": 1, "rate_interval": "10 minutes"}'
            queue.sql("select pgqueue.alter_consumer('s', 'c', %s)", slow)

    assert queue.collect(queue.load("s", "c"), each=send_more).awaitTermination(60)
    assert [len(queue.seen[i]) for i in sorted(queue.seen)] == [50, 50, 20]
    assert sorted(queue.data()) == numbers(1, 120)


@pytest.mark.spark
@pytest.mark.promise("guarantee: Available now")
def test_available_now_waits_for_workers_of_a_consumer_that_is_full(queue: Queue):
    queue.create("s", "c")
    queue.sql("select pgqueue.alter_consumer('s', 'c', %s)", '{"max_in_flight": 50}')
    queue.send("s", 1, 120)
    ((claim,),) = queue.sql("select distinct claim_id from pgqueue.receive('s', 'c', 50, '1 hour')")
    worker = threading.Timer(6, queue.sql, ["select pgqueue.ack(%s)", claim])
    worker.start()
    assert queue.collect(queue.load("s", "c")).awaitTermination(60)
    worker.join()
    assert sorted(queue.data()) == numbers(51, 120)


@pytest.mark.spark
@pytest.mark.promise("kafka: with a consumer, maxOffsetsPerTrigger")
def test_a_query_waits_for_its_minimum_or_for_the_delay(queue: Queue):
    """What it has finished is acknowledged meanwhile."""
    queue.create("s", "c")
    options = {"url": queue.url, "stream": "s", "consumer": "c", "waittime": "1ms"}
    options |= {"minmessagespertrigger": "10", "maxtriggerdelay": "1 minute"}
    options = parse_source(options)
    session = ConsumerBatches(options, source_schema("text", include_headers=True))
    queue.send("s", 1, 3)
    first = session.next(session.initial, options.admission)
    assert first.messages == 3, "the first one waits for none"
    queue.send("s", 4, 6)
    assert session.next(first, options.admission) == first
    assert queue.backlog("s", "c") == 3
    queue.send("s", 7, 13)
    second = session.next(first, options.admission)
    assert second.messages == 13
    queue.send("s", 14, 14)
    assert session.next(second, options.admission) == second
    session._had_messages -= 61
    assert session.next(second, options.admission).messages == 14
    session.close()
