"""Waiting for publications: producers notify only who waits, and nobody misses one."""

import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from spark_pgqueue.postgres import connection
from spark_pgqueue.postgres.notifications import Listener, StreamSubscription
from tests.sql.queue import Conn, call, consumer, one, receive, send, value

pytestmark = pytest.mark.usefixtures("stream")

NOTIFIED = "select _pgqueue.is_waited_for(stream_id) from pgqueue.streams where name = 's'"


@pytest.fixture
def worker(url: str) -> Iterator[Conn]:
    """The connection of somebody who waits."""
    with connection.connect(url) as conn:
        yield conn


def start(worker: Conn) -> list[str]:
    """Begin to wait; who may publish without notifying."""
    ((channel, publishers),) = call(worker, "start_waiting", "s", worker.info.backend_pid)
    assert channel
    return publishers


def heard(worker: Conn, seconds: float = 0.2) -> bool:
    return bool(list(worker.notifies(timeout=seconds, stop_after=1)))


@pytest.mark.all_versions
def test_who_began_to_publish_before_somebody_waited_is_known_until_it_is_over(
    conn: Conn, worker: Conn, url: str
) -> None:
    """It does not notify, and so who waits looks when it is over."""
    consumer(conn)
    with connection.connect(url) as other:
        conn.execute("begin")
        send(conn)
        other.execute("begin")
        send(other)
        publishers = start(worker)
        assert len(publishers) == 2
        other.execute("rollback")
        publishers = value(worker, "still_publishing", "s", publishers)
        assert len(publishers) == 1
        assert receive(worker) == []
        conn.execute("commit")
        assert value(worker, "still_publishing", "s", publishers) == []
        assert len(receive(worker)) == 1
        assert not heard(worker)
        send(other)
        assert heard(worker, 10)


def test_it_waits_until_it_stops_or_its_session_ends(conn: Conn, worker: Conn, url: str) -> None:
    """However often it began, and however it ends."""
    assert not one(conn, NOTIFIED)
    start(worker)
    start(worker)
    assert one(conn, NOTIFIED)
    assert value(worker, "stop_waiting", "s")
    assert not one(conn, NOTIFIED)
    assert not value(worker, "stop_waiting", "s")
    with connection.connect(url) as other:
        start(worker)
        start(other)
        value(worker, "stop_waiting", "s")
        assert one(conn, NOTIFIED), "the other one still waits"
        conn.execute("select pg_terminate_backend(%s, 10000)", [other.info.backend_pid])
        assert not one(conn, NOTIFIED)


def test_a_wait_that_is_cancelled_or_rolled_back_can_be_stopped(conn: Conn, worker: Conn) -> None:
    """Locks of a session survive the transaction that took them."""
    with worker.transaction(force_rollback=True):
        start(worker)
    assert one(conn, NOTIFIED)
    assert value(worker, "stop_waiting", "s")
    assert not one(conn, NOTIFIED)


def test_behind_a_pooler_nothing_is_left_with_a_session_that_others_get(
    conn: Conn, worker: Conn
) -> None:
    """There the client was told of another process than the one that it talks to."""
    ((channel, publishers),) = call(worker, "start_waiting", "s", worker.info.backend_pid + 1)
    assert (channel, publishers) == (None, [])
    assert not one(conn, NOTIFIED)
    assert not worker.execute("select pg_listening_channels()").fetchall()


def test_who_keeps_everybody_from_waiting_only_makes_producers_notify(
    conn: Conn, worker: Conn, url: str, stream: int
) -> None:
    """Anybody who may connect can hold an advisory lock: for as long as one has this one alone."""
    with connection.connect(url) as other:
        lock = "select pg_advisory_lock(_pgqueue.lock_class_waiting(), %s)"
        other.execute(lock, [stream])
        assert one(conn, NOTIFIED)
        began = time.monotonic()
        assert call(worker, "start_waiting", "s") == [(None, [])]
        assert time.monotonic() - began < 10
    start(worker)


def test_two_streams_are_waited_for_apart(conn: Conn, worker: Conn) -> None:
    value(conn, "create_stream", "other")
    start(worker)
    value(conn, "send", "other", "x")
    assert not heard(worker)
    send(conn)
    assert heard(worker, 10)


@pytest.mark.parametrize("widened", [False, True], ids=["as it is", "with wider gaps"])
def test_nobody_sleeps_beside_a_message_however_it_falls_together(
    conn: Conn, url: str, widened: bool
) -> None:
    """Each message is sent as its worker begins to wait, by a transaction that stays open a while.

    Each has a stream of its own, so that no other message wakes it up, and workers do not look
    again by themselves: what one missed, it would find after a long sleep.
    """
    rounds, sleep = (30, 5) if widened else (120, 5)

    def publish(producer: Conn, name: str, chance: float) -> float:
        """Returns when it was over."""
        time.sleep(0.004 * chance)
        producer.execute("begin")
        value(producer, "send", name, "x")
        time.sleep(0.02 * chance if widened else 0)
        producer.execute("commit")
        return time.monotonic()

    def work(name: str) -> list[float]:
        """Returns how late its messages came."""
        chance, late = random.Random(name), []
        with (
            connection.connect(url) as worker,
            connection.connect(url) as producer,
            ThreadPoolExecutor(1) as pool,
        ):
            listener = Listener(worker)
            for _ in range(rounds):
                subscription = StreamSubscription(listener, name)
                published = pool.submit(publish, producer, name, chance.random())
                time.sleep(0.004 * chance.random())
                subscription.start()
                while not (got := call(worker, "receive", name, "c", 1)):
                    subscription.wait(sleep)
                late.append(time.monotonic() - published.result())
                assert late[-1] < sleep / 2
                value(worker, "ack", got[0].claim_id)
                subscription.stop()
        return late

    names = ["a", "b", "c"]
    for name in names:
        value(conn, "create_stream", name)
        value(conn, "create_consumer", name, "c")
    with ThreadPoolExecutor(len(names)) as pool:
        late = [each for found in pool.map(work, names) for each in found]
    assert len(late) == rounds * len(names)
