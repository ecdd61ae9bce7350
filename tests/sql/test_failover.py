"""The primary is killed, and its standby promoted, under clients, a worker, a group and a reader.

All of them have a url that names both servers, with target_session_attrs=read-write.
`tests/spark/test_failover.py` has Spark's side.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any

import psycopg
import pytest

import spark_pgqueue
from spark_pgqueue import Consumer
from spark_pgqueue.postgres import connection
from spark_pgqueue.postgres.errors import PgQueueError
from tests.failover import Pair, a_pair
from tests.processes import wait_until
from tests.sql import checker
from tests.sql.queue import acked, one, publish, send, stage, value

pytestmark = [pytest.mark.longer, pytest.mark.timeout(300)]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """A primary and its standby."""
    with a_pair() as servers:
        yield servers


class Parties:
    """A client that sends each message once, workers, a group and a reader, in threads."""

    def __init__(self, url: str):
        self.url = url
        self.over = threading.Event()
        self.sent = 0
        self.handled: Counter[str] = Counter()
        self.read: list[str] = []
        self.failures: list[str] = []
        self.client = spark_pgqueue.connect(url)
        self.group = self.client.group("s", "g")
        self.workers = [Consumer(url, "s", name) for name in ("c", "t")]
        jobs = (self.produce, self.work, self.work_in_transactions, self.run_group, self.follow)
        self.threads = [threading.Thread(target=self.watched, args=(job,)) for job in jobs]

    def watched(self, job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as error:
            self.failures.append(f"{job.__name__}: {error!r}")

    def produce(self) -> None:
        """Sends again what may not have been sent: a dedup key makes it one message."""
        with spark_pgqueue.connect(self.url) as client:
            while not self.over.is_set():
                n = self.sent + 1
                try:
                    client.send("s", f"{n}", key=f"k{n % 7}", dedup_key=f"{n}")
                    self.sent = n
                except PgQueueError:
                    time.sleep(0.05)  # nobody can say whether it took effect
                time.sleep(0.005)

    def work(self) -> None:
        def handle(message: Any) -> None:
            self.handled[str(message.data)] += 1

        # A claim whose answer was lost comes back after this time.
        self.workers[0].run(handle, visibility_timeout=timedelta(seconds=5))

    def work_in_transactions(self) -> None:
        def handle(message: Any, conn: psycopg.Connection) -> None:
            conn.execute("insert into done values ('t', %s)", [message.data])

        self.workers[1].run(handle, transactional=True, visibility_timeout=timedelta(seconds=5))

    def run_group(self) -> None:
        def handle(messages: list[Any], conn: psycopg.Connection) -> None:
            for message in messages:
                conn.execute("insert into done values ('g', %s)", [message.data])

        self.group.run(handle, lease=timedelta(seconds=2))

    def follow(self) -> None:
        with spark_pgqueue.connect(self.url) as client:
            offset = None
            while not self.over.is_set() or len(self.read) < self.sent:
                with suppress(PgQueueError):  # the connection was lost: read on from the offset
                    for batch in client.read("s", offset):
                        self.read += [str(m.data) for m in batch.messages]
                        offset = batch.offset
                time.sleep(0.02)

    def stop(self) -> None:
        self.over.set()
        self.threads[0].join(60)
        wait_until(lambda: self.failures or len(self.handled) >= self.sent)
        with connection.connect(self.url) as conn:
            count = "select count(*) from done"
            wait_until(lambda: self.failures or one(conn, count) >= 2 * self.sent)
        for worker in self.workers:
            worker.stop()
        self.group.stop()
        for thread in self.threads:
            thread.join(60)
        self.client.close()
        assert not self.failures, self.failures


def test_a_synchronous_failover_loses_nothing_and_ends_nobody(pair: Pair) -> None:
    with connection.connect(pair.primary.url) as conn:
        value(conn, "create_stream", "s", p_settings='{"dedup_window": "1 hour"}')
        value(conn, "create_consumer", "s", "c", "earliest", "key")
        value(conn, "create_group", "s", "g", 4, "earliest")
        value(conn, "create_consumer", "s", "t", "earliest")
        conn.execute("create table done (who text, data text)")
    pair.synchronize()
    parties = Parties(pair.url)
    for thread in parties.threads:
        thread.start()
    wait_until(lambda: parties.failures or len(parties.handled) > 100)
    pair.kill()
    time.sleep(1)
    pair.promote()
    before = parties.sent
    wait_until(lambda: parties.failures or parties.sent > before + 100)
    parties.stop()

    everything = [f"{n}" for n in range(1, parties.sent + 1)]
    assert sorted(parties.handled, key=int) == everything, "at least once"
    assert sorted(parties.read, key=int) == everything, "once"
    with connection.connect(pair.primary.url) as conn:
        checker.check(conn)
        for who in ("g", "t"):
            done = conn.execute("select data from done where who = %s", [who]).fetchall()
            assert sorted((data for (data,) in done), key=int) == everything, f"{who}: once"
        assert value(conn, "is_restored") is True
        value(conn, "recover")
        assert value(conn, "is_restored") is False
        assert acked(conn, "s", "c") == []


def test_the_old_primary_is_rewound_and_takes_over_again(pair: Pair) -> None:
    """Asynchronous: what only it had is gone, and who has read that is told so, PQ005."""
    with connection.connect(pair.primary.url) as conn:
        value(conn, "create_stream", "s")
        value(conn, "create_consumer", "s", "c", "earliest")
        kept = [send(conn) for _ in range(10)]
    pair.follow()
    pair.cut()
    with spark_pgqueue.connect(pair.url) as client:
        client.send("s", "lost")
        (batch,) = client.read("s")
        assert len(batch.messages) == 11
        with connection.connect(pair.primary.url) as conn:
            stream = value(conn, "open_stream", "s")
            chunk = stage(conn, stream, 5)
        pair.kill()
        pair.promote()
        with connection.connect(pair.url) as conn, pytest.raises(psycopg.Error) as said:
            publish(conn, stream, [chunk], 5)
        assert said.value.sqlstate == "PQ005", "not that the batch is incomplete, PQ008"
        with pytest.raises(PgQueueError, match="whether the call took effect is not known"):
            client.send("s", "lost too")
        client.recover()
        sent = [client.send("s", "new") for _ in range(40)]  # the numbers are given out again
        with pytest.raises(PgQueueError) as error:
            list(client.read("s", batch.offset))
        assert error.value.sqlstate == "PQ005"

        pair.rewind()
        pair.follow()
        with connection.connect(pair.standby.url) as there:
            assert one(there, "select pg_is_in_recovery()")
            assert one(there, "select count(*) from pgqueue.messages where data = 'lost'") == 0
        pair.synchronize()
        with spark_pgqueue.connect(pair.url) as another:
            sent.append(another.send("s", "new"))
        pair.kill()
        pair.promote()
        with connection.connect(pair.url) as conn:
            sent.append(send(conn))
            assert acked(conn, "s", "c") == [*kept, *sent]
            checker.check(conn)
