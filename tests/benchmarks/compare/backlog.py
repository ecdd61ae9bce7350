"""Receiving and acknowledging from a backlog."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial

import spark_pgqueue
from tests.benchmarks.compare.compare import KEYS, Compare
from tests.benchmarks.compare.counts import Log
from tests.benchmarks.compare.crew import Job, Seat
from tests.benchmarks.compare.pgmq import Pgmq
from tests.benchmarks.compare.rows import Rows, RowsByFunctions
from tests.benchmarks.compare.sides import Ours, Side, number_of
from tests.benchmarks.compare.storage import STORAGE, empty_storage, storage
from tests.benchmarks.compare.work import Consume
from tests.benchmarks.harness import alternate

SCENARIO = "receive and acknowledge, backlog"
SIZES = {1: 10_000, 10: 50_000, 100: 80_000, 10_000: 160_000}
"""Messages to receive at a time, and how many there are."""

SINGLY = {1: 10_000, 10: 15_000, 100: 20_000}
"""The same for what was sent one by one, which takes longer."""

LEAST = 200
"""Messages that a worker handles at least, in claims of one: then its turn may be over."""

FETCHED = 100
"""Messages that a worker fetches at once, to handle them one by one."""


def backlog(compare: Compare) -> None:
    """Sizes of 1 to 10,000, with 1 and 4 workers."""
    peers = compare.sides(Pgmq(), Rows())
    in_bulk: list[Side] = [Ours(), Ours("one call", one_call=True)]
    singly: list[Side] = [
        Ours("sent one by one", singly=True),
        Ours("sent one by one, one call", singly=True, one_call=True),
    ]
    by_functions: list[Side] = [RowsByFunctions()]
    sizes = compare.effort.some(list(SIZES))
    with compare.queues([*in_bulk, *singly, *peers, *by_functions]):
        compare.prepare(
            partial(turn, compare, side, size, 4)
            for size in sizes
            for side in [*in_bulk, *peers, *(by_functions if size == 1 else [])]
        )
        for workers in (1, 4):
            for size in sizes:
                sides = [*in_bulk, *(singly if size in SINGLY else []), *peers]
                sides += by_functions if size == 1 else []
                turns = {side.name: partial(turn, compare, side, size, workers) for side in sides}
                values = alternate(turns, compare.effort.rounds, warm_up=0)
                who = f"{workers} workers" if workers > 1 else "1 worker"
                compare.case(SCENARIO, f"{who}, messages at a time", f"{size:,}", "/s", values)
    with compare.queues([PREFETCHING, *peers]):
        stored = {side.name: claimed_singly(compare, side) for side in [PREFETCHING, *peers]}
        compare.prepare(partial(handled, compare, side, 4) for side in [PREFETCHING, *peers])
        for what, unit in STORAGE.items():
            values = {name: [each[what]] for name, each in stored.items()}
            line = f"1 worker, sent and received one by one: {what}"
            compare.case(SCENARIO, line, "", unit, values, higher=False)
        for workers in (1, 4):
            sides = [PREFETCHING, *peers]
            turns = {side.name: partial(handled, compare, side, workers) for side in sides}
            values = alternate(turns, compare.effort.rounds, warm_up=0)
            who = f"{workers} workers" if workers > 1 else "1 worker"
            line = f"{who}, handled one by one, fetched {FETCHED} at a time"
            compare.case(SCENARIO, line, "", "/s", values)


def turn(compare: Compare, side: Side, size: int, workers: int, count: int | None = None) -> float:
    """Messages per second of all workers.

    Args:
        count: how many messages there are; as many as in SIZES or SINGLY without it.
    """
    if count is None:
        is_single = isinstance(side, Ours) and side.singly
        count = compare.effort.messages((SINGLY if is_single else SIZES)[size])
    size = min(size, max(count // (4 * workers), 1))
    compare.fill(side, count)
    # Postgres plans a statement anew for its first five calls.
    warm_up = 6 if size < 1000 and count > 1000 else 1
    least = LEAST // size
    job = Consume(side, size, compare.effort.seconds, count, warm_up, least)
    return compare.work(side, [job] * workers, count)


def claimed_singly(compare: Compare, side: Side) -> dict[str, float]:
    """What a message of a backlog costs in storage: sent in one transaction, claimed alone."""
    count = compare.effort.messages(5000)
    before = empty_storage(compare, side)
    side.fill(compare.conn, 0, [f"key {number % KEYS}" for number in range(count)])
    compare.work(side, [Consume(side, 1, 60.0, count)], count)
    after = storage(compare, side)
    return {what: (after[what] - before[what]) / count for what in STORAGE}


PREFETCHING = Ours(singly=True)


def handled(compare: Compare, side: Side, workers: int) -> float:
    """Messages per second of all workers, each message in a step of its own."""
    count = compare.effort.messages(40_000)
    compare.fill(side, count)
    if side is PREFETCHING:
        job: Job = Prefetch(side, FETCHED)
    else:
        job = Consume(side, FETCHED, compare.effort.seconds, count, 1)
    return compare.work(side, [job] * workers, count)


@dataclass(frozen=True)
class Prefetch:
    """A worker with `Client.consume`, until nothing is left."""

    side: Side
    prefetch: int

    def __call__(self, seat: Seat) -> Log:
        log = Log()
        with spark_pgqueue.connect(seat.url) as queue:
            queue.consumers()  # connected
            began = seat.begin()
            for message in queue.consume(self.side.name, "c0", prefetch=self.prefetch):
                now = time.perf_counter()
                log.deliveries.append((now, now, [number_of(str(message.data))]))
                log.messages += 1
            log.seconds = time.perf_counter() - began
        return log
