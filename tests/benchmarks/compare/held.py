"""Beside a transaction that holds an old snapshot, so that no dead row can be removed."""

from __future__ import annotations

import time
from itertools import pairwise

from tests.benchmarks.compare.compare import Compare
from tests.benchmarks.compare.crew import connect
from tests.benchmarks.compare.pgmq import Pgmq
from tests.benchmarks.compare.rows import Rows
from tests.benchmarks.compare.sides import Ours, Side
from tests.benchmarks.compare.work import Consume, Produce
from tests.benchmarks.harness import run

SCENARIO = "beside a held snapshot"
WORKERS = 4
SLICES = 20
FOR_EVER = 10**15


def held(compare: Compare) -> None:
    """A producer of batches of 100, and four workers that receive 10, for some time."""
    sides = compare.sides(Ours(), Pgmq(), Rows())
    first: dict[str, list[float]] = {}
    last: dict[str, list[float]] = {}
    with compare.queues(sides):
        for side in sides:
            speeds = turn(compare, side)
            quarter = SLICES // 4
            first[side.name] = [sum(speeds[:quarter]) / quarter]
            last[side.name] = [sum(speeds[-quarter:]) / quarter]
    seconds = compare.effort.held
    line = f"receive and acknowledge 10, {WORKERS} workers, {seconds:g} s"
    compare.case(SCENARIO, line, "first quarter", "/s", first)
    compare.case(SCENARIO, line, "last quarter", "/s", last)


def turn(compare: Compare, side: Side) -> list[float]:
    """Messages per second, in slices of the time."""
    seconds = compare.effort.held
    totals: list[tuple[float, int]] = []

    def watch() -> None:
        began = time.perf_counter()
        for slice_ in range(SLICES + 1):
            time.sleep(max(0.0, began + slice_ * seconds / SLICES - time.perf_counter()))
            totals.append((time.perf_counter(), sum(compare.crew.counters)))

    # The producer stays ahead: what is measured is the workers.
    jobs = [Consume(side, 10, seconds, FOR_EVER)] * WORKERS
    producer = Produce(side, 0, seconds, batch=100, ahead=2000)
    with connect(compare.url) as other:
        run(other, "begin isolation level repeatable read")
        run(other, "select count(*) from pg_class")
        logs = compare.crew.run([*jobs, producer], watch)
        run(other, "rollback")
    compare.vacuum(side)
    sent = [number for *_, numbers in logs[-1].deliveries for number in numbers]
    compare.settle(side, sent, logs[:-1])
    return [(count - before) / (now - then) for (then, before), (now, count) in pairwise(totals)]
