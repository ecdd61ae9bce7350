"""Backlog: ten million messages that no consumer has taken, or a hundred million (--huge)."""

from __future__ import annotations

from tests.benchmarks.scale.figures import Figures
from tests.benchmarks.scale.gauge import Cost, Gauge, send_batch, settle
from tests.sql import internals

SIZES = [100_000, 1_000_000, 10_000_000]
HUGE = [*SIZES, 100_000_000]  # 9 GB on disk
QUICK = [100_000, 300_000, 1_000_000]
SINGLY = [10_000, 100_000, 1_000_000]
BATCH = 10_000


def backlog(url: str, figures: Figures) -> None:
    """Published by 10,000; and one by one, where each message is a publication."""
    sizes = QUICK if figures.quick else HUGE if figures.huge else SIZES
    _measured_in(url, figures, "backlog", sizes, singly=False)
    _measured_in(url, figures, "singly", SINGLY[:2] if figures.quick else SINGLY, singly=True)


def _measured_in(
    url: str, figures: Figures, dimension: str, sizes: list[int], *, singly: bool
) -> None:
    gauge = Gauge(url)
    stream = gauge.value("select pgqueue.create_stream('s')")
    gauge.ask("select pgqueue.create_consumer('s', 'c', 'earliest')")
    gauge.ask("select pgqueue.create_consumer('s', 'k', 'earliest', 'key')")
    sent = 0
    for n in sizes:
        while sent < n:
            if singly:
                internals.publish_singly(gauge.conn, stream, min(n - sent, 100_000), "null")
                sent += min(n - sent, 100_000)
            else:
                gauge.ask(send_batch(BATCH))
                sent += BATCH
        gauge.ask(f"vacuum analyze pgqueue.messages_{stream}")
        gauge.ask("vacuum analyze pgqueue.publications")
        gauge.ask("vacuum analyze pgqueue.consumer_messages")
        _measure(gauge, n, figures, dimension, stream)
        size = gauge.value(f"select pg_total_relation_size('pgqueue.messages_{stream}')")
        figures.note(dimension, f"{n:,}: bytes a message", size / n)
    gauge.ask("select pgqueue.drop_stream('s')")
    gauge.ask("select from pgqueue.maintain()")
    gauge.conn.close()


def _measure(gauge: Gauge, n: int, figures: Figures, dimension: str, stream: int) -> None:
    def add(operation: str, query: str, calls: int = 10) -> None:
        figures.add(dimension, n, operation, gauge.cost(query, calls))

    add("send", "select pgqueue.send('s', 'x')", 40)
    add("send_batch of 100", send_batch(100))
    add("receive 1, ack", settle(1), 40)
    add("receive 100, ack", settle(100))
    add("receive 100, ack, by key", settle(100, consumer="k"))
    add("consumer_stats, all is new", "select * from pgqueue.consumer_stats where consumer = 'c'")
    add("stream_stats", "select * from pgqueue.stream_stats")
    add("maintain, no retention", "select * from pgqueue.maintain()", 4)
    create = "select pgqueue.create_consumer('s', "
    add("create_consumer at the beginning", f"{create} 'e{{i}}', 'earliest')")
    add("create_consumer at the end", f"{create} 'l{{i}}', 'latest')")
    gauge.ask(
        "select pgqueue.drop_consumer('s', consumer) from pgqueue.consumer_stats"
        " where consumer ~ '^[el]'"
    )
    gauge.ask("select pgqueue.create_consumer('s', 'e', 'earliest')")
    add("the first claim of a new consumer", settle(1, consumer="e"), 1)
    middle = n // 2
    add("seek to a number", f"select pgqueue.seek('s', 'e', 'seq {middle}')")
    add("seek to the end", "select pgqueue.seek('s', 'e', 'latest')")
    add("seek to the beginning", "select pgqueue.seek('s', 'e', 'earliest')")
    gauge.ask("select pgqueue.seek('s', 'e', 'latest')")
    add("replay all", "select pgqueue.replay('s', 'e', 'earliest', 'latest')", 2)
    gauge.ask("select pgqueue.drop_consumer('s', 'e')")
    copy = f"copy (select seq, data from pgqueue.messages_{stream}"
    copy += f" where seq >= {middle} and seq < {middle + 5_000}) to stdout"

    def read() -> None:
        with gauge.conn.cursor().copy(copy.encode()) as rows:
            for _ in rows:
                pass

    taken = min(gauge.cpu(read) for _ in range(5))
    figures.add(dimension, n, "COPY of 5,000 messages", Cost(taken, taken, 0, 0))
