"""Streams: what a call about one of them costs beside thousands of others."""

from __future__ import annotations

from tests.benchmarks.scale.figures import Figures
from tests.benchmarks.scale.gauge import Gauge, settle, usual

SIZES = [10, 100, 1_000, 10_000]
QUICK = [10, 100, 500]
RENEWED = 250
"""A session creates so many: it keeps what it knows of each."""

STATIC = 32
"""The calls of so many streams are static: the measured one is behind them at each size."""


def streams(url: str, figures: Figures) -> None:
    """Each stream has a consumer; the measured stream is the first one behind the static ones."""
    gauge = Gauge(url)
    gauge.ask(f"select setval('pgqueue.streams_stream_id_seq', {STATIC})")
    made = 0
    for n in QUICK if figures.quick else SIZES:
        while made < n:
            name = "s" if made == 0 else f"stream {made}"
            gauge.ask(f"select pgqueue.create_stream('{name}')")
            gauge.ask(f"select pgqueue.create_consumer('{name}', 'c')")
            made += 1
            if made % RENEWED == 0:
                gauge.conn.close()
                gauge = Gauge(url)
        gauge.ask("vacuum analyze")
        gauge.conn.close()
        gauge = Gauge(url)  # without what creating them has left in the caches
        _measure(gauge, n, figures)


def _measure(gauge: Gauge, n: int, figures: Figures) -> None:
    def add(operation: str, query: str, calls: int = 20) -> None:
        figures.add("streams", n, operation, gauge.cost(query, calls))

    usual(gauge, add)
    add("health of all", "select * from pgqueue.consumer_health", 2)
    add("stream_stats of all", "select * from pgqueue.stream_stats", 2)
    add("maintain, one call", "select * from pgqueue.maintain()", 6)
    add("create_consumer", "select pgqueue.create_consumer('s', 'made {i}')")
    gauge.ask(
        "select pgqueue.drop_consumer('s', consumer) from pgqueue.consumer_stats"
        " where stream = 's' and consumer <> 'c'"
    )
    gauge.refill(60)
    first = gauge.first("select pgqueue.send('s', 'x')")
    figures.add("streams", n, "send, the first of a session", first)
    first = gauge.first(settle(1))
    figures.add("streams", n, "receive 1, ack, the first of a session", first)
    create = gauge.cost("select pgqueue.create_stream('new ' || gen_random_uuid())", 4, 1)
    figures.add("streams", n, "create_stream", create)
    gauge.ask("select pgqueue.create_stream('once more ' || gen_random_uuid())")
    other = Gauge(gauge.url)
    other.ask("select pgqueue.send('s', 'x')")
    gauge.ask("select pgqueue.create_stream('and once more ' || gen_random_uuid())")
    after = other.cpu(lambda: other.ask("select pgqueue.send('s', 'x')"))
    figures.note("streams", f"{n:,}: the send after another session creates a stream, µs", after)
    used = min(n, 1_000) - 1
    before = other.memory()
    for i in range(1, used + 1):
        other.ask(f"select pgqueue.send('stream {i}', 'x')")
        other.ask(settle(1, f"stream {i}"))
    figures.note(
        "streams", f"{n:,}: memory of a session per stream that it uses, kB",
        (other.memory() - before) / used,
    )  # fmt: skip
    other.conn.close()
