"""Connections: workers that poll through PgBouncer, that listen, that have transactions open."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import psycopg

from tests.benchmarks.scale.figures import Figures
from tests.benchmarks.scale.gauge import Cost, Gauge, settle
from tests.benchmarks.server_cpu import ServerCpu
from tests.pooler import pooled

SIZES = [10, 100, 250, 500]
QUICK = [10, 50]
POOL = 20
SECONDS = 5.0
SENDS = 50
SETTLED = 1.0
"""Seconds after which all sessions have read their notifications."""


def connections(url: str, figures: Figures) -> None:
    """All costs are those of the whole server, except for the claims beside open transactions."""
    gauge = Gauge(url)
    for name in ("s", "t"):
        gauge.ask(f"select pgqueue.create_stream('{name}')")
        gauge.ask(f"select pgqueue.create_consumer('{name}', 'c')")
    for n in QUICK if figures.quick else SIZES:
        _idle(gauge, n, figures)
        with pooled(url, "transaction", POOL) as through:
            _polling(gauge, through, n, figures)
        _listening(gauge, n, figures, "waiting for the stream", lambda _: "s")
        _listening(gauge, n, figures, "waiting for other streams", "other {}".format)
        _open_transactions(gauge, n, figures)
    gauge.conn.close()


@contextmanager
def _sessions(url: str, n: int) -> Iterator[list[psycopg.Connection]]:
    with ExitStack() as stack:
        yield [stack.enter_context(psycopg.connect(url, autocommit=True)) for _ in range(n)]


def _server(gauge: Gauge, work: Callable[[], int]) -> float:
    """Microseconds of the whole server's CPU for each of the calls of `work`."""
    cpu = ServerCpu(gauge.conn)
    before = cpu.seconds()
    calls = work()
    after = cpu.seconds()
    assert before is not None
    assert after is not None
    return (after - before) / calls * 1e6


def _of(cpu: float) -> Cost:
    return Cost(round(cpu, 1), round(cpu, 1), 0, 0)


def _idle(gauge: Gauge, n: int, figures: Figures) -> None:
    with _sessions(gauge.url, n):
        cost = gauge.cost("select pgqueue.send('t', 'x')", 100)
    figures.add("connections", n, "send, beside idle sessions", cost)


def _polling(gauge: Gauge, through: str, n: int, figures: Figures) -> None:
    """Clients of PgBouncer that ask once a second, and find nothing."""
    polls = 0

    async def client(number: int) -> None:
        nonlocal polls
        conn = await psycopg.AsyncConnection.connect(
            through, autocommit=True, prepare_threshold=None
        )
        async with conn:
            await conn.execute("select * from pgqueue.receive('s', 'c', 1)")
            ready.append(number)
            while len(ready) < n:
                await asyncio.sleep(0.05)
            await asyncio.sleep(number / n)
            end = time.monotonic() + SECONDS
            while time.monotonic() < end:
                await conn.execute("select * from pgqueue.receive('s', 'c', 1)")
                polls += 1
                await asyncio.sleep(1)

    async def crowd() -> float:
        clients = [asyncio.create_task(client(i)) for i in range(n)]
        while len(ready) < n:
            await asyncio.sleep(0.02)
        cpu = ServerCpu(gauge.conn)
        before = cpu.seconds()
        await asyncio.gather(*clients)
        after = cpu.seconds()
        assert before is not None
        assert after is not None
        return after - before

    ready: list[int] = []
    taken = asyncio.run(crowd())
    poll = _of(taken / polls * 1e6)
    figures.add("connections", n, "a poll through PgBouncer, finds nothing", poll)
    figures.note("connections", f"{n:,}: server's CPU for idle polls, of a core", taken / SECONDS)


def _listening(
    gauge: Gauge, n: int, figures: Figures, what: str, stream: Callable[[int], str]
) -> None:
    """Sends while so many sessions wait, each as a worker does. They claim nothing."""
    names = {stream(i) for i in range(n)}
    for name in names:
        gauge.ask(f"select pgqueue.create_stream('{name}', p_if_not_exists => true)")
    with _sessions(gauge.url, n) as sessions:
        for i, conn in enumerate(sessions):
            conn.execute("select * from pgqueue.start_waiting(%s)", (stream(i),))
        wait = Gauge(gauge.url)  # the stream has a session that waits, so sends notify
        wait.ask("select * from pgqueue.start_waiting('s')")

        def send() -> int:
            for _ in range(SENDS):
                gauge.ask("select pgqueue.send('s', 'x')")
                time.sleep(0.01)
            time.sleep(SETTLED)
            return SENDS

        figures.add("connections", n, f"send, sessions {what}", _of(_server(gauge, send)))
        figures.add(
            "connections", n, f"start_waiting, sessions {what}",
            gauge.cost("select * from pgqueue.start_waiting('t')", 10),
        )  # fmt: skip
        gauge.ask("select pgqueue.stop_waiting('t')")
        gauge.ask("unlisten *")
        wait.conn.close()


def _open_transactions(gauge: Gauge, n: int, figures: Figures) -> None:
    """Sessions whose transactions have sent a message, and are not over."""
    with _sessions(gauge.url, n) as sessions:
        for conn in sessions:
            conn.execute("begin")
            conn.execute("select pgqueue.send('s', 'x')")
        for stream in ("s", "t"):
            gauge.ask(f"select pgqueue.seek('{stream}', 'c', 'latest')")
            gauge.ask(f"select pgqueue.send('{stream}', 'x') from generate_series(1, 200)")
        where = {"s": "the stream", "t": "another stream"}
        for stream, name in where.items():
            cost = gauge.cost(settle(1, stream), 60)
            figures.add("connections", n, f"receive 1, ack, open senders to {name}", cost)
            gauge.ask(f"select pgqueue.seek('{stream}', 'c', 'latest')")
            nothing = f"select * from pgqueue.receive('{stream}', 'c', 1)"
            cost = gauge.cost(nothing, 40)
            figures.add("connections", n, f"receive nothing, open senders to {name}", cost)
        for conn in sessions:
            conn.execute("rollback")
