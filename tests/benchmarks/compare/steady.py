"""Queues that are nearly empty: a message at a time, and full load."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

from tests.benchmarks.compare.compare import Compare
from tests.benchmarks.compare.counts import CountError, Log, acknowledge
from tests.benchmarks.compare.crew import Seat
from tests.benchmarks.compare.pgmq import Pgmq
from tests.benchmarks.compare.rows import Rows
from tests.benchmarks.compare.sides import Ours, Side, payload
from tests.benchmarks.compare.storage import STORAGE, empty_storage, storage
from tests.benchmarks.compare.work import Consume, Produce

SCENARIO = "steady state, no backlog"
FOR_EVER = 10**15
Figures = dict[tuple[str, str, bool], float]
"""Values by line, unit, and whether more is better."""


def steady(compare: Compare) -> None:
    """One worker that sends, receives and acknowledges; full load."""
    ours: list[Side] = [Ours(), Ours("one call", one_call=True)]
    peers = compare.sides(Pgmq(), Rows())
    rounds(compare, [*ours, *peers], cycles)
    rounds(compare, [*ours, *peers], full_load)


def rounds(compare: Compare, sides: list[Side], turn: Callable[[Compare, Side], Figures]) -> None:
    """Give each side its turns; a turn has several figures."""
    found: dict[tuple[str, str, bool], dict[str, list[float]]] = {}
    with compare.queues(sides):
        compare.prepare(partial(turn, compare, side) for side in sides)
        for _ in range(compare.effort.rounds):
            for side in sides:
                for what, value in turn(compare, side).items():
                    found.setdefault(what, {}).setdefault(side.name, []).append(value)
                compare.vacuum(side)
    for (line, unit, higher), values in found.items():
        compare.case(SCENARIO, line, "", unit, values, higher=higher)


def cycles(compare: Compare, side: Side) -> Figures:
    """Send a message, receive it, acknowledge it."""
    count = compare.effort.messages(1000)
    before = empty_storage(compare, side)
    ((log, taken),) = compare.crew.run([partial(cycle, side=side, count=count)])
    compare.note_cpu(side, count, compare.crew.worked)
    after = storage(compare, side)
    compare.settle(side, range(count), [log])
    line = "send, receive 1, acknowledge"
    figures = {(line, "µs", False): statistics.median(taken) * 1e6}
    if side.one_call:
        return figures  # it stores the same
    for name, unit in STORAGE.items():
        figures[f"{line}: {name}", unit, False] = (after[name] - before[name]) / count
    return figures


def cycle(seat: Seat, side: Side, count: int) -> tuple[Log, list[float]]:
    """One worker's cycles, and seconds for each."""
    conn, log, clock = seat.connection, Log(), time.perf_counter
    seat.begin()
    taken, done = [], None
    for number in range(count):
        began = clock()
        side.send(conn, payload(number), None)
        delivery = side.receive(conn, 1, 0, done)
        if delivery.numbers != [number]:
            raise CountError(f"{side.name}: sent {number} and received {delivery.numbers}")
        log.deliveries.append((began, began, delivery.numbers))
        if side.one_call:
            done = delivery
        else:
            acknowledge(side, conn, delivery, 0)
        taken.append(clock() - began)
    if done is not None:
        acknowledge(side, conn, done, 0)
    return log, taken


def full_load(compare: Compare, side: Side) -> Figures:
    """Two producers that wait for nobody until they are 500 messages ahead, and four workers."""
    seconds = compare.effort.seconds * 2
    consume = Consume(side, 1, seconds, FOR_EVER)
    produce = [Produce(side, number, seconds, ahead=250, warm_up=2) for number in range(2)]
    logs = compare.crew.run([*[consume] * 4, *produce])
    compare.note_cpu(side, sum(log.messages for log in logs[:4]), compare.crew.worked)
    sent = [number for log in logs[4:] for *_, numbers in log.deliveries for number in numbers]
    compare.settle(side, sent, logs[:4])
    speed = sum(log.messages for log in logs[:4]) / max(log.seconds for log in logs[:4])
    late = sorted(latencies(logs[4:], logs[:4]))
    line = "full load, 2 producers, 4 workers"
    return {
        (line, "/s", True): speed,
        (f"{line}: until received, median", "ms", False): statistics.median(late) * 1e3,
    }


def latencies(producers: list[Log], workers: list[Log]) -> list[float]:
    """Seconds from the call of send to the message in a worker's hands."""
    sent = {n: began for log in producers for began, _, numbers in log.deliveries for n in numbers}
    return [
        received - sent[number]
        for log in workers
        for received, _, numbers in log.deliveries
        for number in numbers
        if number in sent
    ]
