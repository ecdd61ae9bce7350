"""Hearing of publications: nothing piles up, and a waiting worker asks as little as can be."""

import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest

import spark_pgqueue
from spark_pgqueue import Consumer
from spark_pgqueue.client import long_poll
from spark_pgqueue.client.long_poll import LongPoll
from spark_pgqueue.postgres import connection
from spark_pgqueue.postgres.notifications import Listener
from spark_pgqueue.postgres.statements import Statements
from spark_pgqueue.spark.driver.waiter import PublicationWaiter
from spark_pgqueue.spark.platform.process import Parent
from spark_pgqueue.worker import poller
from tests.processes import wait_until
from tests.sql import clock


@pytest.fixture
def queue(queue):
    """Also a stream "t" with its consumer "c"."""
    queue.create_stream("t")
    queue.create_consumer("t", "c")
    return queue


def notify(url: str, channel: str, count: int) -> None:
    """Send many notifications, and wait until the server has given them to all listeners."""
    with connection.connect(url) as conn:
        conn.execute(
            "select pg_notify(%s, i::text) from generate_series(1, %s) i", [channel, count]
        )
        used = "select pg_notification_queue_usage()"
        wait_until(lambda: conn.execute(used).fetchone() == (0.0,))


def test_a_query_that_waits_hears_what_comes_after_it_forgot_what_came_before(queue, url):
    channel = f"pgqueue_{stream_id(queue, 's')}"
    wakeup = PublicationWaiter(url, ["s"], Parent())
    assert wakeup.start()
    assert not wakeup.start()
    notify(url, channel, 5000)
    wakeup.forget()
    assert not wakeup.wait(0.3)
    queue.send("s", "x")
    assert wakeup.wait(10)
    wakeup.close()


def is_waited_for(queue, stream: str) -> bool:
    sql = "select _pgqueue.is_waited_for(%s)"
    with connection.connect(queue._statements._url) as producer:
        return producer.execute(sql, [stream_id(queue, stream)]).fetchone() == (True,)


def test_who_waits_is_notified_until_there_is_much_to_do(queue, url):
    """And again when it waits again, however the wait before ended."""
    receive, moment = queue.receive, timedelta(milliseconds=50)
    assert not is_waited_for(queue, "s")
    for _ in range(2):
        # A look may take so long that no time is left to wait.
        wait_until(lambda: not receive("s", "c", wait=moment) and is_waited_for(queue, "s"))
        assert not is_waited_for(queue, "t")
        queue.send_batch("s", ["x"] * 20)
        for _ in range(20):
            received(queue, "s").ack()
        assert not is_waited_for(queue, "s")
        producer = publish_once_it_waits(url, "s")
        received(queue, "s").ack()
        producer.join()


def test_a_worker_finds_what_a_transaction_publishes_that_began_before_it_waited(queue, url):
    """Without a notification, and at once."""
    with connection.connect(url) as producer:
        producer.execute("begin")
        producer.execute("select pgqueue.send('s', 'x')")
        ended: list[float] = []

        def end() -> None:
            producer.execute("select pg_sleep(0.2)")
            producer.execute("commit")
            ended.append(time.monotonic())

        thread = threading.Thread(target=end)
        thread.start()
        received(queue, "s")
        late = time.monotonic()
        thread.join()
    assert late - ended[0] < 0.5


def test_a_listener_hears_each_channel_for_itself_and_keeps_no_notification(url):
    with connection.connect(url) as conn:
        listener = Listener(conn)
        conn.execute('listen a; listen "b ""c"')
        notify(url, 'b "c', 3000)
        conn.execute("select 1")  # some of them come with its answer
        assert not listener.wait("a", 0)
        assert listener.wait('b "c', 10)
        listener.forget('b "c')
        assert not listener.wait('b "c', 0)
        assert not conn._notifies_backlog


def stream_id(queue, name: str) -> int:
    sql = "select stream_id from pgqueue.open_stream(%s)"
    return queue._statements.row(sql, [name])[0]


def publish_once_it_waits(url: str, stream: str) -> threading.Thread:
    """Publish when the server has nothing to do for the worker, from another thread."""

    def publish() -> None:
        time.sleep(0.2)
        with spark_pgqueue.connect(url) as producer:
            producer.send(stream, "x")

    thread = threading.Thread(target=publish)
    thread.start()
    return thread


def received(queue, stream: str):
    claim = queue.receive(stream, "c", wait=timedelta(seconds=20))
    assert claim is not None
    return claim


def test_a_worker_that_waits_asks_once_before_and_once_after_a_publication(
    queue, url, tmp_path: Path
):
    """And in between, once, when something is due that notifies nobody."""
    first = publish_once_it_waits(url, "s")
    received(queue, "s").ack()
    first.join()
    trace = tmp_path / "trace"
    pgconn = queue._statements.connection().pgconn
    with trace.open("wb") as file:
        pgconn.trace(file.fileno())
        second = publish_once_it_waits(url, "s")
        received(queue, "s")
        second.join()
        pgconn.untrace()
    sent = [line for line in trace.read_text().splitlines() if "\tF\t" in line]
    asked = [line for line in sent if "\tParse\t" in line or "\tQuery\t" in line]
    assert ["pgqueue.next_due(" in line for line in asked] == [False, True, False]


@pytest.mark.parametrize("is_busy", [True, False])
@pytest.mark.parametrize("by", ["client", "worker"])
def test_in_a_busy_stream_a_worker_that_waits_does_not_ask_when_a_message_is_due(
    queue, url, monkeypatch, by: str, is_busy: bool
):
    """It asks after a pause without a notification, and finds in time what is delayed."""
    asked, sent, came = [], [], []
    pause, until_due = LongPoll.pause, LongPoll.until_due

    def send_and_pause(self, stream: str, seconds: float) -> bool:
        if not self._subscription(stream).is_started or sent:
            return pause(self, stream, seconds)
        with spark_pgqueue.connect(url) as producer:
            producer.send(stream, "x", delay=None if is_busy else timedelta(seconds=0.3))
        sent.append(time.monotonic())
        return is_busy and pause(self, stream, seconds)

    def ask(*given) -> float:
        asked.append(1)
        return until_due(*given)

    def note(message) -> None:
        came.append((time.monotonic(), len(asked)))

    monkeypatch.setattr(LongPoll, "pause", send_and_pause)
    monkeypatch.setattr(LongPoll, "until_due", ask)
    if is_busy:  # the notification may come late on a machine at work
        for module in (long_poll, poller):
            monkeypatch.setattr(module, "ASK_AFTER", 0.5)
    if by == "client":
        note(received(queue, "s"))
    else:
        worker = Consumer(url, "s", "c")
        thread = threading.Thread(target=worker.run, args=(note,), daemon=True)
        thread.start()
        wait_until(lambda: came)
        worker.stop()
        thread.join()
    ((at, asks),) = came
    assert (asks == 0) == is_busy
    assert at - sent[0] < 0.9, "the poll of each second found it"


def test_a_transaction_that_has_sent_a_due_schedule_does_not_make_who_waits_poll_all_the_time(
    queue, conn, url, monkeypatch
):
    queue.create_consumer("s", "other")
    queue.create_schedule("s", "h", "x", every=timedelta(hours=1))
    clock.pass_time(conn, timedelta(hours=1))
    asked = []
    rows = Statements.rows

    def note(self, *args, **named):
        asked.append(args[0])
        return rows(self, *args, **named)

    with connection.connect(url) as opened, opened.transaction():
        assert opened.execute("select seq from pgqueue.receive('s', 'other')").fetchall() == [(1,)]
        monkeypatch.setattr(Statements, "rows", note)
        assert queue.receive("s", "c", wait=timedelta(seconds=2)) is None
    assert len(asked) < 15
    assert queue.receive("s", "c") is not None


def test_it_listens_to_every_stream_that_it_waited_for_and_again_on_a_new_connection(queue, url):
    def channels() -> set[str]:
        return {name for (name,) in queue._statements.rows("select pg_listening_channels()")}

    for stream in ("s", "t"):
        producer = publish_once_it_waits(url, stream)
        received(queue, stream)
        producer.join()
    before = channels()
    assert len(before) == 2
    queue._statements.disconnect()

    def are_back() -> bool:
        for stream in ("s", "t"):
            assert queue.receive(stream, "c", wait=timedelta(milliseconds=50)) is None
        return channels() == before

    wait_until(are_back)  # a wait may be over before it has a connection


def test_a_stream_that_was_made_again_wakes_its_workers(queue, url):
    assert queue.receive("s", "c", wait=timedelta(milliseconds=50)) is None
    queue.drop_stream("s")
    queue.create_stream("s")
    queue.create_consumer("s", "c")
    waited = 0.0
    for _ in range(2):  # the first finds it when it asks again
        producer = publish_once_it_waits(url, "s")
        began = time.monotonic()
        received(queue, "s").ack()
        waited = time.monotonic() - began
        producer.join()
    assert waited < 0.9


@pytest.mark.parametrize("lost", ["unlisten *", "discard all"])
@pytest.mark.promise("fault: a worker's session loses its LISTEN on a live connection")
def test_a_worker_whose_session_has_lost_its_listen_listens_again(queue, url, lost):
    """On a socket that lives: the first message is late by up to a second, those after it are not.

    What a handler's own pool or a proxy does to a session, a test does by the worker's connection.
    """
    late: list[float] = []
    sent = threading.Event()

    def handle(message):
        late.append(time.monotonic() - began)
        sent.set()

    worker = Consumer(url, "s", "c")
    thread = threading.Thread(target=worker.run, args=(handle,), daemon=True)
    thread.start()
    wait_until(lambda: is_waited_for(queue, "s"))
    (poller,) = worker._pollers
    poller._statements.connection().execute(lost)
    for _ in range(6):
        time.sleep(0.3)  # less than the second after which it asks anyway
        sent.clear()
        began = time.monotonic()
        queue.send("s", "x")
        assert sent.wait(20)
    worker.stop()
    thread.join(20)
    assert late[0] < 2
    assert max(late[1:]) < 0.5, late
