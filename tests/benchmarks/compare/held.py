"""Beside a transaction that holds an old snapshot, so that no dead row can be removed."""

from __future__ import annotations

import time
from typing import NamedTuple

from tests.benchmarks.compare.compare import Compare
from tests.benchmarks.compare.crew import connect
from tests.benchmarks.compare.pgmq import Pgmq
from tests.benchmarks.compare.rows import Rows
from tests.benchmarks.compare.sides import Ours, Side
from tests.benchmarks.compare.work import Consume, Produce
from tests.benchmarks.harness import run
from tests.benchmarks.server_cpu import between

SCENARIO = "beside a held snapshot"
WORKERS = 4
SLICES = 20
FOR_EVER = 10**15


def held(compare: Compare) -> None:
    """A producer of batches of 100, and four workers that receive 10, for some time."""
    sides = compare.sides(Ours(), Pgmq(), Rows())
    with compare.queues(sides):
        totals = {side: turn(compare, side) for side in sides}
    line = f"receive and acknowledge 10, {WORKERS} workers, {compare.effort.held:g} s"
    quarter = SLICES // 4
    for point, first in (("first quarter", 0), ("last quarter", SLICES - quarter)):
        values = {}
        for side, looks in totals.items():
            then, now = looks[first], looks[first + quarter]
            settled = now.settled - then.settled
            values[side.name] = [settled / (now.at - then.at)]
            compare.note_cpu(side, settled, between(then.cpu, now.cpu))
        compare.case(SCENARIO, line, point, "/s", values)


class Look(NamedTuple):
    """A look at the workers.

    Attributes:
        at: the time.
        settled: the messages so far.
        cpu: the server's seconds of CPU so far.
    """

    at: float
    settled: int
    cpu: float | None


def turn(compare: Compare, side: Side) -> list[Look]:
    """Looks at the workers, in slices of the time."""
    seconds = compare.effort.held
    looks: list[Look] = []

    def watch() -> None:
        began = time.perf_counter()
        for slice_ in range(SLICES + 1):
            time.sleep(max(0.0, began + slice_ * seconds / SLICES - time.perf_counter()))
            settled = sum(compare.crew.counters)
            looks.append(Look(time.perf_counter(), settled, compare.crew.cpu.seconds()))

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
    return looks
