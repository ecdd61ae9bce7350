"""Messages one at a time, claimed many at a time."""

import threading
import time
from datetime import timedelta

import pytest
from psycopg.conninfo import make_conninfo

import spark_pgqueue
from spark_pgqueue.postgres.errors import PgQueueError
from tests.processes import wait_until
from tests.sql.queue import AT_ONCE, ORDERINGS
from tests.unit.conftest import end_session

CONSUMER = None


@pytest.mark.previous_version
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
    queue.send_batch("s", ["x"] * 25)
    claims = set()
    for _ in queue.consume("s", "c", prefetch=10):
        claims.add(queue.stats()[0].claimed)
    assert claims == {10, 5}, "a claim is acknowledged by the call that makes the next"


def test_a_claim_that_gets_nothing_takes_no_acknowledgement_with_it(queue, url, conn):
    """The call for both waits for a lock in vain; an acknowledgement alone needs no such lock."""
    queue.create_consumer("s", "c", settings={"max_in_flight": 100})
    sent = queue.send_batch("s", ["x"] * 3)
    hasty = make_conninfo(url, options="-c lock_timeout=100ms")
    with spark_pgqueue.connect(hasty) as client:
        messages = client.consume("s", "c", prefetch=2)
        assert [next(messages).seq for _ in range(2)] == sent[:2]
        with conn.transaction():
            conn.execute("select _pgqueue.lock_consumer(consumer_id) from pgqueue.consumers")
            assert next(messages, None) is None
            (stats,) = queue.stats()
            assert (stats.claimed, stats.backlog) == (0, 1)
    assert [message.seq for message in queue.consume("s", "c")] == sent[2:]


def test_a_connection_that_is_lost_takes_no_acknowledgement_with_it(queue, url, conn):
    queue.create_consumer("s", "c")
    sent = queue.send_batch("s", ["x"] * 3)
    with spark_pgqueue.connect(url) as client:
        messages = client.consume("s", "c", prefetch=2)
        assert [next(messages).seq for _ in range(2)] == sent[:2]
        end_session(conn, client)
        with pytest.raises(PgQueueError, match="was lost"):
            next(messages)
    (stats,) = queue.stats()
    assert (stats.claimed, stats.backlog) == (0, 1)
    assert [message.seq for message in queue.consume("s", "c")] == sent[2:]


def test_a_wait_that_is_cut_off_acknowledges_nothing_twice(queue, url, conn, caplog):
    """A second acknowledgement of a claim would be a warning."""
    queue.create_consumer("s", "c")
    queue.send_batch("s", ["x"])
    with spark_pgqueue.connect(url) as client:
        messages = client.consume("s", "c", wait=timedelta(minutes=1))
        next(messages)
        kept = client._statements.connection()

        def cut_off():
            wait_until(lambda: queue.stats()[0].claims == 0)
            end_session(conn, kept)

        thread = threading.Thread(target=cut_off)
        thread.start()
        with pytest.raises(PgQueueError, match="was lost"):
            next(messages)
        thread.join()
    assert caplog.records == []


def test_a_claim_is_extended_while_messages_of_it_are_left(queue):
    queue.create_consumer("s", "c", settings={"visibility_timeout": timedelta(seconds=0.6)})
    queue.send_batch("s", ["x"] * 6)
    for n, _ in enumerate(queue.consume("s", "c")):
        time.sleep(0.3)
        assert queue.receive("s", "c") is None, n


def test_what_another_worker_took_over_is_not_worked_on(queue):
    queue.create_consumer("s", "c", settings=AT_ONCE | {"visibility_timeout": "100 ms"})
    sent = queue.send_batch("s", ["x"] * 3)
    messages = queue.consume("s", "c")
    assert next(messages).seq == sent[0]
    time.sleep(0.2)
    other = queue.receive("s", "c", 3, visibility_timeout=timedelta(minutes=1))
    assert [m.seq for m in other.messages] == sent
    (later,) = queue.send_batch("s", ["y"])
    assert [m.seq for m in messages] == [later]


def test_bad_arguments_are_told_before_the_first_message(queue):
    with pytest.raises(PgQueueError, match="PQ002"):
        queue.consume("s", "nobody")
    queue.create_consumer("s", "c")
    with pytest.raises(PgQueueError, match="prefetch"):
        queue.consume("s", "c", prefetch=0)
