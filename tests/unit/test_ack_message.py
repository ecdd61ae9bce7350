"""A handler that acknowledges in a transaction of its own: its rows are there exactly once."""

import asyncio
import logging
from collections import Counter
from datetime import timedelta

import psycopg
import pytest

from spark_pgqueue import Client, Consumer, PgQueueError
from spark_pgqueue.client import Message
from spark_pgqueue.testing import QueueTester
from tests import handlers
from tests.processes import wait_until, worker
from tests.sql import clock

SOON = timedelta(seconds=0.5)

pytestmark = pytest.mark.usefixtures("allowed_afterwards")
CONSUMER = {"settings": {"backoff_base": "0 s", "keep_history": "1 day"}}

WAYS = {
    "threads": (handlers.note_and_ack, {"concurrency": 4}),
    "processes": (handlers.note_and_ack, {"processes": 2}),
    "tasks": (handlers.note_and_ack_async, {"concurrency": 4}),
    "batches": (handlers.note_and_ack_all, {"batch": 3}),
}


@pytest.mark.previous_version
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.promise("guarantee: At least once, or exactly once")
def test_rows_and_the_end_of_the_delivery_are_committed_together(queue, url, done, caplog, way):
    """Also after an error between the two and the commit; and nothing is settled twice."""
    handler, options = WAYS[way]
    is_batch = "batch" in options
    sent = queue.send_batch("s", ["x"] * 20 if is_batch else ["x", "raise"] * 10)
    with caplog.at_level(logging.WARNING):
        assert Consumer(url, "s", "c").run(handler, wait=SOON, **options) == len(sent)
    assert sorted(seq for seq, *_ in done()) == sent
    assert queue.stats("s")[0].backlog == 0
    assert not [each.message for each in caplog.records if "claim" in each.message]


def test_a_message_of_a_batch_that_fails_comes_again_without_those_that_are_done(queue, url, done):
    sent = queue.send_batch("s", ["x", "raise", "x"])
    Consumer(url, "s", "c").run(handlers.note_and_ack_all, batch=3, wait=SOON)
    assert sorted((seq, count) for seq, _, count, _ in done()) == [(s, min(s, 2)) for s in sent]


def test_kill_9_before_the_commit_leaves_no_row_and_the_message_comes_again(queue, url, conn, done):
    (seq,) = queue.send_batch("s", ["die"])
    with worker(url, "note_and_ack") as child:
        child.wait()
    assert done() == []
    clock.end_leases(conn)
    assert Consumer(url, "s", "c").run(handlers.note_and_ack, wait=SOON) == 1
    assert Counter(seq for seq, *_ in done()) == {seq: 1}


def test_a_claim_that_was_taken_over_undoes_the_rows(queue, conn, done):
    queue.send("s", "x")
    claim = queue.receive("s", "c")
    clock.end_leases(conn)
    other = queue.receive("s", "c")
    with pytest.raises(PgQueueError, match="does not hold message 1"):
        handlers.note_and_ack(claim.messages[0])
    assert done() == []
    assert other.ack() == 1


def test_a_message_that_was_cancelled_undoes_the_rows(queue, done):
    queue.send("s", "x")
    claim = queue.receive("s", "c")
    queue.cancel("s", "c", [1])
    with pytest.raises(PgQueueError, match="does not hold message 1"):
        handlers.note_and_ack(claim.messages[0])
    assert done() == []


def test_a_message_that_is_acknowledged_twice_is_an_error(queue, url):
    queue.send("s", "x")
    with psycopg.connect(url) as connection:
        client = Client(connection)
        claim = client.receive("s", "c")
        assert claim
        (message,) = claim.messages
        client.ack_message(message, result={"total": 7})
        with pytest.raises(PgQueueError, match="does not hold"):
            client.ack_message(message)
    assert queue.outcome("s", "c", 1).result == {"total": 7}


def test_a_message_without_a_claim_and_what_is_no_message_are_refused(queue):
    with pytest.raises(PgQueueError, match="claim None does not hold message 1"):
        queue.ack_message(Message.for_test("x"))
    with pytest.raises(PgQueueError, match="message must be a Message, not int"):
        queue.ack_message(1)


def test_in_the_worker_s_own_transaction_it_is_refused(queue, url, done):
    def twice(message, connection):
        handlers.note_in_transaction(message, connection)
        Client(connection).ack_message(message)

    async def twice_async(message, connection):
        Client.ack_message(queue, message)

    queue.alter_consumer("s", "c", settings={"max_deliver_count": 1})
    queue.send_batch("s", ["x"])
    drained = QueueTester(url).drain(twice, "s", "c", transactional=True)
    assert ["without the option transactional" in str(each) for each in drained.errors] == [True]
    assert done() == []
    assert queue.redrive("s", "c") == 1
    errors = []
    asyncio.run(
        Consumer(url, "s", "c").run_async(
            twice_async,
            transactional=True,
            wait=SOON,
            on_failure=lambda message, error: errors.append(str(error)),
        )
    )
    assert ["without the option transactional" in each for each in errors] == [True]


def test_a_tester_drains_such_handlers_also_in_the_caller_s_transaction(queue, url, done):
    queue.send("s", "x")
    with psycopg.connect(url) as connection:
        tester = QueueTester(connection)

        def bill(message):
            with connection.transaction():
                handlers.note_in_transaction(message, connection)
                tester.client.ack_message(message)

        assert tester.drain(bill, "s", "c").handled == 1
        assert tester.outcomes("s", "c") == {1: "done"}
        connection.rollback()
    assert done() == []
    assert queue.peek("s", "c")


def test_the_worker_that_ends_has_no_claim_left(queue, url, done):
    """Messages that their handlers acknowledged are over for it, so it takes the next ones."""
    sent = queue.send_batch("s", ["x"] * 50)
    consumer = Consumer(url, "s", "c")
    consumer.run(
        handlers.note_and_ack,
        prefetch=1,
        on_success=lambda message, _: consumer.stop() if message.seq == sent[-1] else None,
    )
    wait_until(lambda: len(done()) == 50)
    assert queue.open_claims("s", "c") == []
