"""The client, the command line and workers behind a PgBouncer."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from threading import Event

import psycopg
import pytest

import spark_pgqueue
from tests.pages import run
from tests.pooler import MODES, pooled

pytestmark = pytest.mark.longer

COUNT = 200
SOON = timedelta(seconds=60)
SESSION_STATE = """
select count(*) from pg_locks l join pg_database d on d.oid = l.database
where d.datname = current_database() and l.locktype = 'advisory'
"""

ASKED = """
select query_start from pg_stat_activity
where datname = current_database() and pid <> pg_backend_pid() and query like '%pgqueue.%'
"""


@pytest.fixture(params=MODES)
def through(request: pytest.FixtureRequest, url: str) -> Iterator[str]:
    """The database through a pooler. With transaction pooling, all share two connections."""
    size = 2 if request.param == "transaction" else 40
    with pooled(url, request.param, size) as pooled_url:
        yield pooled_url


@pytest.mark.promise("guarantee: Poolers", "operations: PgBouncer 1.18")
def test_everything_a_client_does_works_behind_a_pooler(through: str, tmp_path: Path):
    """Installing, sending one by one and by COPY, claims, transactions, dead letters, groups."""
    with spark_pgqueue.connect(through) as queue, spark_pgqueue.connect(through) as other:
        queue.install()
        queue.create_stream("s")
        queue.create_consumer("s", "c", ordering="key", settings={"max_deliver_count": 1})
        queue.send("s", "one", key="k", headers={"a": "b"})
        queue.send_batch("s", [f"of a few {i}" for i in range(10)])
        queue.send_batch("s", [f"of many {i}" for i in range(5000)])
        with queue.transaction():
            queue.send("s", "in a transaction")
            other.send("s", "beside")  # on another connection of the server
        claim = queue.receive("s", "c", 10_000)
        assert claim is not None
        seen = [message.data for message in claim.messages]
        while found := other.receive("s", "c", 10_000):
            seen += [message.data for message in found.messages]
            found.ack()
        assert sorted(seen) == sorted(
            ["one", "in a transaction", "beside"]
            + [f"of a few {i}" for i in range(10)]
            + [f"of many {i}" for i in range(5000)]
        )
        assert claim.nack(claim.messages[:1], reason="no") == 1
        claim.extend(SOON)
        claim.ack()
        assert [dead.error for dead in other.read_dead("s", "c")] == ["no"]
        assert queue.redrive("s", "c") == 1
        assert sum(len(batch.messages) for batch in queue.read("s", "earliest")) == len(seen)
        queue.create_group("s", "g", partitions=2, start="earliest")
        handled: list[str] = []

        def handle(messages, connection) -> None:
            handled.extend(message.data for message in messages)

        queue.group("s", "g").run(handle, wait=timedelta(milliseconds=200))
        assert sorted(handled) == sorted(seen)
        queue.maintain()
    assert '"ready": 1' in run(["pgqueue", "stats", "--json"], through, tmp_path)


@pytest.mark.promise("guarantee: Poolers", "operations: PgBouncer 1.18")
def test_who_waits_behind_a_pooler_asks_and_leaves_nothing_with_a_session_that_others_get(
    through: str, conn: psycopg.Connection
):
    with spark_pgqueue.connect(through) as queue, ThreadPoolExecutor(1) as pool:
        queue.create_stream("s")
        queue.create_consumer("s", "c")
        waiting = pool.submit(queue.receive, "s", "c", wait=SOON)
        asked: set[object] = set()  # when: it asks, begins to wait, and asks again each second
        while len(asked) < 4:
            assert not waiting.done()
            asked |= {each for (each,) in conn.execute(ASKED)}
            time.sleep(0.02)
        assert _one(conn, SESSION_STATE) == 0
        with spark_pgqueue.connect(through) as sender:
            sender.send("s", "here")
        claim = waiting.result(60)
        assert claim is not None
        assert claim.messages[0].data == "here"
    assert _one(conn, SESSION_STATE) == 0


@pytest.mark.parametrize("transactional", [False, True], ids=["claims", "transactional"])
@pytest.mark.promise("operations: PgBouncer 1.18")
def test_workers_behind_a_pooler_work_each_message_once(through: str, transactional: bool):
    """Four workers of four threads; with transaction pooling they share two connections."""
    done: list[str] = []
    all_done = Event()

    def note(message, connection=None) -> None:
        done.append(message.data)
        if len(done) == COUNT:
            all_done.set()

    def work(name: str) -> None:
        worker = spark_pgqueue.Consumer(through, "s", "c", worker=name)
        workers.append(worker)
        worker.run(note, concurrency=4, transactional=transactional)

    with spark_pgqueue.connect(through) as queue, ThreadPoolExecutor(4) as pool:
        queue.create_stream("s")
        queue.create_consumer("s", "c", ordering="key", settings={"keep_history": SOON})
        workers: list[spark_pgqueue.Consumer] = []
        running = [pool.submit(work, f"worker {i}") for i in range(4)]
        try:
            for i in range(COUNT):
                queue.send("s", str(i), key=f"key {i % 20}")
            while not all_done.wait(0.1):
                assert not any(each.done() for each in running)
        finally:
            for worker in workers:
                worker.stop()
        for each in running:
            each.result(60)
        assert sorted(done) == sorted(map(str, range(COUNT)))
        (stats,) = queue.stats("s")
        assert (stats.backlog, stats.claimed) == (0, 0)
        owners = {each.owner for each in queue.history("s", "c", limit=1000)}
        assert owners <= {f"worker {i}" for i in range(4)}, "each claim has the name of its worker"


def _one(conn: psycopg.Connection, query: str) -> int:
    row = conn.execute(query.encode()).fetchone()
    assert row is not None
    return row[0]
