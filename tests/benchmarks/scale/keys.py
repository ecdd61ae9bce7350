"""Keys: a backlog of a million messages by key, of a thousand to a million keys."""

from __future__ import annotations

from tests.benchmarks.scale.figures import Figures
from tests.benchmarks.scale.gauge import Gauge, send_batch, settle

SIZES = [1_000, 10_000, 100_000, 1_000_000]
QUICK = [1_000, 10_000, 30_000]
BATCH = 10_000
CONSUMERS = {
    "ordering=key": ("key", "{}"),
    "per_key_limit": ("none", '{"per_key_limit": 2}'),
    "fair": ("none", '{"fair": true}'),
    "per_key_latest": ("none", '{"per_key_latest": true}'),
}
"""The kinds of consumers that know keys: the ordering and the settings of each."""


def keys(url: str, figures: Figures) -> None:
    """All sizes have the same number of messages, which come round by round through the keys."""
    gauge = Gauge(url)
    sizes = QUICK if figures.quick else SIZES
    for n in sizes:
        gauge.ask("select pgqueue.create_stream('s')")
        gauge.ask("""select pgqueue.alter_stream('s', '{"dedup_window": "1 day"}')""")
        for i in range(sizes[-1] // BATCH):
            gauge.ask(send_batch(BATCH, key=f"'key ' || (i + {i * BATCH}) % {n}"))
        gauge.ask("vacuum analyze pgqueue.messages")
        gauge.ask("vacuum analyze pgqueue.publications")
        for name, (ordering, settings) in CONSUMERS.items():
            _measure(gauge, n, figures, name, ordering, settings)
        gauge.ask(
            "select count(pgqueue.send('s', 'x', p_dedup_key => 'd' || i))"
            f" from generate_series(1, {n // 10}) i"
        )
        once = "select pgqueue.send('s', 'x', p_dedup_key => 'new ' || gen_random_uuid())"
        figures.add("keys", n, "send with a dedup key, beside a tenth as many", gauge.cost(once))
        gauge.ask("select pgqueue.drop_stream('s')")
        for _ in range(5):
            gauge.ask("select from pgqueue.maintain()")
        gauge.ask("vacuum analyze")
    gauge.conn.close()


def _measure(
    gauge: Gauge, n: int, figures: Figures, name: str, ordering: str, settings: str
) -> None:
    gauge.ask(
        f"select pgqueue.create_consumer('s', 'c', 'earliest', '{ordering}',"
        f" p_settings => '{settings}')"
    )
    first = gauge.cpu(lambda: gauge.ask(settle(100)))
    figures.note("keys", f"{n:,}: {name}: the first claim of 100, µs", first)
    for size, calls in ((1, 60), (100, 40)):
        cost = gauge.cost(settle(size), calls)
        figures.add("keys", n, f"{name}: receive {size}, ack", cost)
    one = "select * from pgqueue.consumer_stats"
    figures.add("keys", n, f"{name}: consumer_stats", gauge.cost(one, 4))
    gauge.ask("select pgqueue.drop_consumer('s', 'c')")
    gauge.ask("vacuum analyze pgqueue.consumer_messages")
