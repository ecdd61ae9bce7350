"""What one call costs the server: CPU of its backend, blocks that it reads, and its WAL.

Not in time: other programs of the machine make a clock on the wall run on, and these hardly.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import psycopg

from tests.benchmarks.server_cpu import nanoseconds

WARM_UP = 3
"""Calls that fill the caches of a session first."""

SETTLE = (
    "select pgqueue.ack(id) from (select max(claim_id) as id"
    " from pgqueue.receive('{stream}', '{consumer}', {n})) r where id is not null"
)
"""A claim of so many messages with their payloads, and its acknowledgement."""


@dataclass(frozen=True)
class Cost:
    """Of one call.

    Attributes:
        cpu: microseconds of the backend's CPU, the median.
        mean: the same, as a mean: calls that do work for later ones count.
        blocks: blocks of shared memory that the call reads, nested statements included; a median.
        wal: bytes of WAL, a mean.
    """

    cpu: float
    mean: float
    blocks: float
    wal: float


class Gauge:
    """A session whose calls are measured."""

    def __init__(self, url: str):
        self.url = url
        self.conn = psycopg.connect(url, autocommit=True, prepare_threshold=0)

    def ask(self, query: str) -> list[Any]:
        cursor = self.conn.execute(query.encode())
        return cursor.fetchall() if cursor.description else []

    def value(self, query: str) -> Any:
        return self.ask(query)[0][0]

    def cpu(self, work: Callable[[], Any]) -> float:
        """Microseconds that the backend works meanwhile."""
        pid = self.conn.info.backend_pid
        before = nanoseconds(pid)
        work()
        return (nanoseconds(pid) - before) / 1000

    def explained(self, query: str) -> tuple[int, int]:
        """The blocks that a statement reads, and the bytes of WAL that it writes."""
        ((plan,),) = self.ask(f"explain (analyze, buffers, wal, format json) {query}")
        root = plan[0]["Plan"]
        return root["Shared Hit Blocks"] + root["Shared Read Blocks"], root["WAL Bytes"]

    def cost(self, query: str, calls: int = 20, warm_up: int = WARM_UP) -> Cost:
        """Of a statement that is repeated: first for its CPU, then for its blocks.

        Args:
            query: the statement; {i} in it is the number of the call.
            calls: how often it is called for its CPU, and half as often for its blocks.
            warm_up: so many calls do not count.
        """
        texts = [query.replace("{i}", str(i)) for i in range(warm_up + calls + calls // 2 + 1)]
        taken = [self.cpu(lambda text=text: self.ask(text)) for text in texts[: warm_up + calls]]
        taken = taken[warm_up:]
        read = [self.explained(text) for text in texts[warm_up + calls :]]
        return Cost(
            round(statistics.median(taken), 1),
            round(statistics.fmean(taken), 1),
            statistics.median(blocks for blocks, _ in read),
            round(statistics.fmean(wal for _, wal in read)),
        )

    def first(self, query: str, calls: int = 3) -> Cost:
        """Of the first call of a new session."""
        taken, read = [], []
        for i in range(2 * calls):
            text = query.replace("{i}", f"first{i}")
            with_new = Gauge(self.url)
            with with_new.conn:
                if i % 2:
                    read.append(with_new.explained(text))
                else:
                    taken.append(with_new.cpu(lambda g=with_new, text=text: g.ask(text)))
            with_new.conn.close()
        cpu = round(statistics.median(taken), 1)
        blocks = statistics.median(blocks for blocks, _ in read)
        return Cost(cpu, cpu, blocks, round(statistics.fmean(wal for _, wal in read)))

    def refill(self, batches: int, key: str = "null") -> None:
        """The consumer c has so many publications of 100 messages before it, and no others."""
        self.ask("select pgqueue.seek('s', 'c', 'latest')")
        for _ in range(batches):
            self.ask(send_batch(100, key=key))
        for table in ("consumer_messages", "consumer_cursors", "publications"):
            self.ask(f"vacuum analyze pgqueue.{table}")

    def memory(self) -> float:
        """Kilobytes of memory of the backend that no other process shares."""
        query = "select sum(used_bytes) / 1024.0 from pg_backend_memory_contexts"
        return float(self.value(query))


def settle(n: int, stream: str = "s", consumer: str = "c") -> str:
    """The statement that claims so many messages, and acknowledges them."""
    return SETTLE.format(stream=stream, consumer=consumer, n=n)


def send_batch(n: int, stream: str = "s", key: str = "null") -> str:
    """The statement that sends so many small messages; the key is an expression over i."""
    keys = "" if key == "null" else f", array(select {key} from generate_series(1, {n}) i)"
    return (
        f"select count(*) from pgqueue.send_batch('{stream}', array_fill('x'::text, '{{{n}}}')"
        f"{keys})"
    )


def usual(gauge: Gauge, add: Callable[..., None]) -> None:
    """What producers, workers and operators call all the time.

    Args:
        gauge: a session; the stream is s, the consumer c.
        add: measures: the operation, its statement, and how often it is called.
    """
    add("send", "select pgqueue.send('s', 'x')", 40)
    add("send_batch of 100", send_batch(100), 40)
    gauge.refill(60)
    add("receive 1, ack", settle(1), 40)
    gauge.refill(60)
    add("receive 100, ack", settle(100))
    one = "select * from pgqueue.consumer_stats where stream = 's' and consumer = 'c'"
    add("consumer_stats of one", one)
