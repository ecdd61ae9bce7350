"""Messages one at a time, claimed many at a time."""

import time
from contextlib import closing
from datetime import timedelta

import pytest

import spark_pgqueue
from spark_pgqueue.postgres.errors import PgQueueError
from tests.sql.queue import ORDERINGS


@pytest.fixture
def queue(url):
    with spark_pgqueue.connect(url) as client:
        client.create_stream("s")
        yield client


@pytest.mark.parametrize("ordering", ORDERINGS)
def test_each_message_comes_once_and_is_acknowledged(queue, ordering):
    queue.create_consumer("s", "c", ordering=ordering)
    sent = queue.send_batch("s", ["x"] * 250, keys=[f"k{i % 7}" for i in range(250)])
    got = [message.seq for message in queue.consume("s", "c")]
    assert sorted(got) == sent
    for key in range(7):
        mine = [seq for seq in got if (seq - sent[0]) % 7 == key]
        if ordering != "none":
            assert mine == sorted(mine)
    (stats,) = queue.stats()
    assert (stats.backlog, stats.claimed, stats.claims) == (0, 0, 0)


def test_it_takes_few_calls(queue):
    queue.create_consumer("s", "c")
    queue.send_batch("s", ["x"] * 250)
    claims = set()
    for _ in queue.consume("s", "c", prefetch=100):
        claims.add(queue.stats()[0].claimed)
    assert claims == {100, 50}, "a claim is acknowledged by the call that makes the next"


def test_who_leaves_returns_the_message_at_hand_and_those_behind_it(queue):
    queue.create_consumer("s", "c")
    sent = queue.send_batch("s", ["x"] * 5)
    with closing(queue.consume("s", "c")) as messages:
        assert [next(messages).seq for _ in range(3)] == sent[:3]
    (stats,) = queue.stats()
    assert (stats.claimed, stats.ready) == (0, 3)
    again = list(queue.consume("s", "c"))
    assert [(m.seq, m.deliver_count) for m in again] == [(seq, 2) for seq in sent[2:]]


def test_a_claim_is_extended_while_messages_of_it_are_left(queue):
    queue.create_consumer("s", "c", settings={"visibility_timeout": timedelta(seconds=0.6)})
    queue.send_batch("s", ["x"] * 6)
    for n, _ in enumerate(queue.consume("s", "c")):
        time.sleep(0.3)
        assert queue.receive("s", "c") is None, n


def test_what_another_worker_took_over_is_not_worked_on(queue):
    queue.create_consumer("s", "c", settings={"visibility_timeout": timedelta(seconds=0.1)})
    sent = queue.send_batch("s", ["x"] * 3)
    messages = queue.consume("s", "c")
    assert next(messages).seq == sent[0]
    time.sleep(0.2)
    other = queue.receive("s", "c", 3, visibility_timeout=timedelta(minutes=1))
    assert [m.seq for m in other.messages] == sent
    (later,) = queue.send_batch("s", ["y"])
    assert [m.seq for m in messages] == [later]


def test_it_waits_for_messages(queue):
    queue.create_consumer("s", "c")
    (first,) = queue.send_batch("s", ["x"])
    got = []
    began = time.monotonic()
    for message in queue.consume("s", "c", wait=timedelta(seconds=0.5)):
        got.append(message.seq)
        if len(got) == 1:
            queue.send("s", "y", deliver_at=None)
    assert got == [first, first + 1]
    assert 0.4 < time.monotonic() - began < 10


def test_bad_arguments_are_told_before_the_first_message(queue):
    with pytest.raises(PgQueueError, match="PQ002"):
        queue.consume("s", "nobody")
    queue.create_consumer("s", "c")
    with pytest.raises(PgQueueError, match="prefetch"):
        queue.consume("s", "c", prefetch=0)
