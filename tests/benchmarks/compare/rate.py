"""How soon a message is in a handler after its commit, at a fixed rate: medians and tails."""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import timedelta

import spark_pgqueue
from tests.benchmarks.compare.compare import Compare
from tests.benchmarks.compare.counts import Log, acknowledge
from tests.benchmarks.compare.crew import Seat, connect
from tests.benchmarks.compare.pgmq import Pgmq
from tests.benchmarks.compare.rows import Rows
from tests.benchmarks.compare.sides import Ours, Side, number_of
from tests.benchmarks.compare.work import PAUSE, Produce

SCENARIO = "from commit to handler, at a fixed rate"
RATES = (300, 1000)
"""Messages a second."""

WORKERS = 4
FIRST = 1.0
"""Seconds of new sessions, which are shown apart: the first call of a function plans it."""

CLIENT = "the client waits"
"""Of the name of our side, where a worker calls the Python client and waits by LISTEN."""


def rate(compare: Compare) -> None:
    """Four workers that poll each millisecond, or wait; their sessions are new in each round."""
    ours: list[Side] = [Ours(), Ours("one call", one_call=True), Ours(CLIENT)]
    sides = [*ours, *compare.sides(Pgmq(), Rows())]
    for each in compare.effort.some(RATES):
        found: dict[str, dict[str, list[float]]] = {}
        with compare.queues(sides):
            for _ in range(compare.effort.rounds):
                for side in sides:
                    for what, seconds in turn(compare, side, each).items():
                        found.setdefault(what, {}).setdefault(side.name, []).append(seconds * 1e3)
                    compare.vacuum(side)
        for what, values in found.items():
            line = f"{each:,} a second, {WORKERS} workers: {what}"
            compare.case(SCENARIO, line, "", "ms", values, higher=False)


def turn(compare: Compare, side: Side, per_second: int, workers: int = WORKERS) -> dict[str, float]:
    """Figures in seconds, by their names."""
    count = max(int(compare.effort.rated * per_second), 20)
    produce = Produce(side, 0, 600.0, count, per_second=per_second)
    *logs, sent = compare.crew.run([*[Poll(side, count)] * workers, produce])
    compare.note_cpu(side, count, compare.crew.worked)
    compare.settle(side, range(count), logs)
    late = delays(sent, logs)
    first = int(FIRST * per_second)
    at_first, later = sorted(late[:first]), sorted(late[first:] or late)
    shares = {"median": 0.5, "p99": 0.99, "p99.9": 0.999}
    figures = {what: later[int(len(later) * share)] for what, share in shares.items()}
    return {**figures, "longest": later[-1], "longest in the first second": at_first[-1]}


def delays(sent: Log, logs: list[Log]) -> list[float]:
    """Seconds from the return of send to the message in a worker's process, in the order sent."""
    came = {n: at for log in logs for at, _, numbers in log.deliveries for n in numbers}
    return [
        max(came[number] - committed, 0)
        for _, committed, numbers in sent.deliveries
        for number in numbers
    ]


@dataclass(frozen=True)
class Poll:
    """A worker with a new session, until the crew has settled so many."""

    side: Side
    expected: int

    def __call__(self, seat: Seat) -> Log:
        if isinstance(self.side, Ours) and self.side.variant == CLIENT:
            return self._wait(seat)
        log, done = Log(), None
        with connect(seat.url) as conn:
            seat.begin()
            while sum(seat.counters) < self.expected:
                delivery = self.side.receive(conn, 1, 0, done)
                now = time.perf_counter()
                if done is not None:
                    seat.count(len(done.numbers))
                    done = None
                if not delivery.numbers:
                    time.sleep(PAUSE)
                    continue
                log.deliveries.append((now, now, delivery.numbers))
                if self.side.one_call:
                    done = delivery
                else:
                    acknowledge(self.side, conn, delivery, 0)
                    seat.count(len(delivery.numbers))
            if done is not None:
                acknowledge(self.side, conn, done, 0)
        return log

    def _wait(self, seat: Seat) -> Log:
        log, wait = Log(), timedelta(milliseconds=100)
        with spark_pgqueue.connect(seat.url) as queue:
            queue.consumers()  # connected
            seat.begin()
            while sum(seat.counters) < self.expected:
                claim = queue.receive(self.side.name, "c0", wait=wait)
                now = time.perf_counter()
                if claim is None:
                    continue
                numbers = [number_of(str(each.data)) for each in claim.messages]
                log.deliveries.append((now, now, numbers))
                claim.ack()
                seat.count(len(numbers))
        return log
