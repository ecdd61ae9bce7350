"""The calls that a worker makes: a claim acknowledges the claim before, and that loses nothing."""

import threading
from datetime import timedelta

import pytest
from psycopg.conninfo import make_conninfo

from spark_pgqueue import Consumer
from tests.processes import wait_until
from tests.unit.test_worker import either, running

MOMENT = timedelta(milliseconds=50)


pytestmark = pytest.mark.usefixtures("allowed_afterwards")
CONSUMER = None


def calls(conn):
    """How often sessions that are over have called each function."""
    conn.execute("select pg_stat_clear_snapshot()")
    sql = "select funcname, calls from pg_stat_user_functions where schemaname = 'pgqueue'"
    return dict(conn.execute(sql).fetchall())


@pytest.mark.previous_version
@pytest.mark.parametrize(
    ("ordering", "way"),
    [
        ("none", "threads"),
        ("key", "tasks"),
        ("stream", "batch"),
    ],
)
def test_a_claim_acknowledges_the_claim_before(queue, conn, new_role, ordering, way):
    """Without messages ahead, no claim is acknowledged by a call of its own."""
    queue.create_consumer("s", "c", ordering=ordering)
    queue.send_batch("s", ["x"] * 40, keys=[f"k{i % 7}" for i in range(40)])

    async def handle(message):
        pass

    consumer = new_role("consumer")
    conn.execute("revoke execute on function pgqueue.ack from pgqueue_consumer, public")
    batch = 1 if way == "batch" else None
    handler = either(way == "tasks", handle)
    assert Consumer(consumer, "s", "c").run(handler, prefetch=0, wait=MOMENT, batch=batch) == 40
    (stats,) = queue.stats()
    assert (stats.backlog, stats.claims) == (0, 0)


def test_a_claim_that_fails_takes_no_acknowledgement_with_it(queue, url, conn):
    """The call for both waits for a lock in vain; an acknowledgement alone needs no such lock."""
    queue.create_consumer("s", "c", settings={"max_in_flight": 100})
    sent = queue.send_batch("s", ["x"] * 2)
    got, locked = [], threading.Event()
    worker = Consumer(make_conninfo(url, options="-c lock_timeout=100ms"), "s", "c")

    def handle(message):
        got.append((message.seq, message.deliver_count))
        if len(got) == 1:
            conn.execute("begin")
            conn.execute("select _pgqueue.lock_consumer(consumer_id) from pgqueue.consumers")
            locked.set()
        else:
            worker.stop()

    with running(worker, handle, prefetch=0) as run:
        assert locked.wait(60)
        try:
            wait_until(lambda: queue.stats()[0].claims == 0)
            assert (queue.stats()[0].backlog, len(got)) == (1, 1)
        finally:
            conn.execute("rollback")
        run.result(60)
    assert got == [(seq, 1) for seq in sent]
    assert queue.stats()[0].claims == 0
