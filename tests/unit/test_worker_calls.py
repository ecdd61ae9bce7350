"""The calls that a worker makes: a claim acknowledges the claim before, and that loses nothing."""

import threading
from datetime import timedelta

import pytest
from psycopg.conninfo import make_conninfo

import spark_pgqueue
from spark_pgqueue import Consumer
from spark_pgqueue.postgres import connection
from tests.processes import wait_until
from tests.sql import checker

MOMENT = timedelta(milliseconds=50)


@pytest.fixture
def queue(url):
    """A client, with a stream "s"; a look at the tables afterwards."""
    with spark_pgqueue.connect(url) as client, connection.connect(url) as conn:
        client.create_stream("s")
        yield client
        checker.check(conn)


def calls(conn):
    """How often sessions that are over have called each function."""
    conn.execute("select pg_stat_clear_snapshot()")
    sql = "select funcname, calls from pg_stat_user_functions where schemaname = 'pgqueue'"
    return dict(conn.execute(sql).fetchall())


@pytest.mark.parametrize(
    ("ordering", "way"),
    [
        ("none", "threads"),
        ("none", "tasks"),
        ("key", "threads"),
        ("key", "tasks"),
        ("stream", "batch"),
    ],
)
def test_a_claim_acknowledges_the_claim_before(queue, url, ordering, way):
    """Without messages ahead, no claim is acknowledged by a call of its own."""
    queue.create_consumer("s", "c", ordering=ordering)
    queue.send_batch("s", ["x"] * 40, keys=[f"k{i % 7}" for i in range(40)])

    async def handle_async(message):
        handle(message)

    def handle(message):
        pass

    with connection.connect(url) as conn:
        (name,) = conn.execute("select current_database()").fetchone() or ("",)
        conn.execute(f"alter database {name} set track_functions = 'all'".encode())
        batch = 1 if way == "batch" else None
        worker = Consumer(url, "s", "c")
        handler = handle_async if way == "tasks" else handle
        assert worker.run(handler, prefetch=0, wait=MOMENT, batch=batch) == 40
        wait_until(lambda: calls(conn).get("receive", 0) >= 40)
        assert "ack" not in calls(conn)
    (stats,) = queue.stats()
    assert (stats.backlog, stats.claims) == (0, 0)


@pytest.mark.parametrize("awaited", [False, True], ids=["threads", "tasks"])
def test_a_claim_that_fails_takes_no_acknowledgement_with_it(queue, url, awaited):
    """The call for both waits for a lock in vain; an acknowledgement alone needs no such lock."""
    queue.create_consumer("s", "c", settings={"max_in_flight": 100})
    sent = queue.send_batch("s", ["x"] * 2)
    got, locked, release = [], threading.Event(), threading.Event()
    hasty = make_conninfo(url, options="-c lock_timeout=100ms")
    worker = Consumer(hasty, "s", "c")

    def hold():
        with connection.connect(url) as holder, holder.transaction():
            holder.execute("select _pgqueue.lock_consumer(consumer_id) from pgqueue.consumers")
            locked.set()
            release.wait(60)

    holder = threading.Thread(target=hold)

    def handle(message):
        got.append((message.seq, message.deliver_count))
        if len(got) == 1:
            holder.start()
            locked.wait(60)
        else:
            worker.stop()

    async def handle_async(message):
        handle(message)

    handler = handle_async if awaited else handle
    thread = threading.Thread(target=worker.run, args=(handler,), kwargs={"prefetch": 0})
    thread.start()
    try:
        assert locked.wait(60)
        wait_until(lambda: queue.stats()[0].claims == 0)
        assert (queue.stats()[0].backlog, len(got)) == (1, 1)
    finally:
        release.set()
        holder.join()
        thread.join(60)
    assert got == [(seq, 1) for seq in sent]
    assert queue.stats()[0].claims == 0
