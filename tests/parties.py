"""A client, workers, a group and a reader, at work while a test makes something fail."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import psycopg
from psycopg.types.json import Jsonb

import spark_pgqueue
from spark_pgqueue import Consumer
from spark_pgqueue.postgres import connection
from spark_pgqueue.postgres.errors import PgQueueError
from spark_pgqueue.postgres.retrying import with_backoff
from tests.processes import wait_until
from tests.sql import checker
from tests.sql.queue import AT_ONCE, one, value


class Parties:
    """A client that sends each message once, workers, a group and a reader, in threads.

    Args:
        url: their database.
        sure: another url of it, for what the test itself does, such as to make the stream s.
    """

    def __init__(self, url: str, sure: str | None = None):
        self.sure, self.url = sure or url, url
        with connection.connect(self.sure) as conn:
            value(conn, "create_stream", "s", p_settings='{"dedup_window": "1 hour"}')
            value(conn, "create_consumer", "s", "c", "earliest", "key", p_settings=Jsonb(AT_ONCE))
            value(conn, "create_group", "s", "g", 4, "earliest")
            value(conn, "create_consumer", "s", "t", "earliest", p_settings=Jsonb(AT_ONCE))
            conn.execute("create table done (who text, data text)")
        self.unsure: list[PgQueueError] = []
        self.over = threading.Event()
        self.sent = 0
        self.handled: Counter[str] = Counter()
        self.read: list[str] = []
        self.failures: list[str] = []
        self.client = spark_pgqueue.connect(url)
        self.group = self.client.group("s", "g")
        self.workers = [Consumer(url, "s", name) for name in ("c", "t")]
        jobs = (self.produce, self.work, self.work_in_transactions, self.run_group, self.follow)
        self.threads = [
            threading.Thread(target=self.watched, args=(job,), daemon=True) for job in jobs
        ]

    def start(self) -> None:
        """Let them begin, until each has done something."""
        for thread in self.threads:
            thread.start()
        self.go_on()

    def go_on(self, seconds: float = 60) -> None:
        """Wait until all of them have done more."""
        before = self._done()

        def is_more() -> bool:
            return all(now > n + 20 for n, now in zip(before, self._done(), strict=True))

        wait_until(lambda: self.failures or is_more(), seconds)
        assert not self.failures, self.failures

    def _done(self) -> list[int]:
        def look() -> list[int]:
            with connection.connect(self.sure) as conn:
                count = "select count(*) from done where who = %s"
                return [one(conn, count, who) for who in "gt"]

        return [self.sent, len(self.handled), len(self.read), *with_backoff(look, self.sure)]

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
                except PgQueueError as error:
                    self.unsure.append(error)  # nobody can say whether it took effect
                    time.sleep(0.05)
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
        """Let them end their work, and end them."""
        self.over.set()
        self.threads[0].join(60)
        wait_until(lambda: self.failures or len(self.handled) >= self.sent)
        with connection.connect(self.sure) as conn:
            count = "select count(*) from done"
            wait_until(lambda: self.failures or one(conn, count) >= 2 * self.sent)
        self.end()
        assert not self.failures, self.failures

    def end(self) -> None:
        self.over.set()
        for worker in self.workers:
            worker.stop()
        self.group.stop()
        for thread in self.threads:
            thread.join(60)
        self.client.close()

    def __enter__(self) -> Parties:
        return self

    def __exit__(self, *exception: object) -> None:
        self.end()

    def check(self, conn: psycopg.Connection) -> None:
        """Each message was sent once, and done by everybody: once, but by the plain worker."""
        everything = [f"{n}" for n in range(1, self.sent + 1)]
        assert sorted(self.handled, key=int) == everything, "at least once"
        assert sorted(self.read, key=int) == everything, "once"
        checker.check(conn)
        for who in ("g", "t"):
            done = conn.execute("select data from done where who = %s", [who]).fetchall()
            assert sorted((data for (data,) in done), key=int) == everything, f"{who}: once"
