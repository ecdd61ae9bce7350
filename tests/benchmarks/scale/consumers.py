"""Consumers of one stream: what a publisher and one consumer pay for the others."""

from __future__ import annotations

from tests.benchmarks.scale.figures import Figures
from tests.benchmarks.scale.gauge import Cost, Gauge, send_batch, usual

SIZES = [1, 10, 100, 1_000]
QUICK = [1, 10, 100]
TRIMMED = 5_000
"""Publications of a trim."""


def consumers(url: str, figures: Figures) -> None:
    """The other consumers are up to date, or have a message of a bundle each."""
    gauge = Gauge(url)
    gauge.ask("select pgqueue.create_stream('s')")
    gauge.ask("select pgqueue.create_consumer('s', 'c')")
    made = 1
    for n in QUICK if figures.quick else SIZES:
        for i in range(made, n):
            gauge.ask(f"select pgqueue.create_consumer('s', 'c{i}')")
        made = n
        for i in range(1, n):  # each has a claimed message and a ready one
            gauge.ask(f"select pgqueue.seek('s', 'c{i}', 'latest')")
        gauge.ask(send_batch(2))
        for i in range(1, n):
            gauge.ask(f"select from pgqueue.claim('s', 'c{i}', 1)")
        _measure(gauge, n, figures)
        _trim(gauge, n, figures)
    gauge.conn.close()


def _measure(gauge: Gauge, n: int, figures: Figures) -> None:
    def add(operation: str, query: str, calls: int = 20) -> None:
        figures.add("consumers", n, operation, gauge.cost(query, calls))

    usual(gauge, add)
    add("health of all, behind 70 publications", "select * from pgqueue.consumer_health", 2)
    add("stream_stats", "select * from pgqueue.stream_stats")
    add("maintain, nothing to trim", "select * from pgqueue.maintain()", 4)
    add("create_consumer", "select pgqueue.create_consumer('s', 'made {i}')")
    gauge.ask(
        "select pgqueue.drop_consumer('s', consumer) from pgqueue.consumer_stats"
        " where consumer like 'made%'"
    )
    gauge.refill(1)
    many = "select pgqueue.send('s', 'x') from generate_series(1, 4000)"
    gauge.ask(many)
    gauge.ask("vacuum analyze pgqueue.publications")
    add("health of all, behind 4,000 publications", "select * from pgqueue.consumer_health", 2)


def _trim(gauge: Gauge, n: int, figures: Figures) -> None:
    """A trim reads what each consumer has not finished."""
    name = f"trimmed {n}"
    gauge.ask(f"select pgqueue.create_stream('{name}')")
    for i in range(n):
        gauge.ask(f"select pgqueue.create_consumer('{name}', 'c{i}')")
    gauge.ask(f"select pgqueue.set_retention('{name}', p_messages => 100)")
    gauge.ask("select from pgqueue.maintain()")
    send = f"select pgqueue.send('{name}', 'x') from generate_series(1, {TRIMMED})"
    gauge.ask(send)
    for i in range(n):
        gauge.ask(f"select pgqueue.seek('{name}', 'c{i}', 'latest')")
    gauge.ask("select from pgqueue.maintain()")  # closes the segment
    gauge.ask(f"select pgqueue.send('{name}', 'x') from generate_series(1, 200)")
    for i in range(n):
        gauge.ask(f"select pgqueue.seek('{name}', 'c{i}', 'latest')")
    gauge.ask("vacuum analyze pgqueue.publications")
    maintain = "select deleted from pgqueue.maintain() where what = 'trimmed messages'"
    cpu, trimmed = 0.0, 0
    for _ in range(6):
        taken: list[int] = []
        spent = gauge.cpu(lambda taken=taken: taken.append(gauge.value(maintain)))
        if taken[0]:
            cpu, trimmed = cpu + spent, trimmed + taken[0]
    if trimmed:
        each = round(cpu * TRIMMED / trimmed, 1)
        figures.add("consumers", n, f"trim of {TRIMMED:,} publications", Cost(each, each, 0, 0))
    gauge.ask(f"select pgqueue.drop_stream('{name}')")
