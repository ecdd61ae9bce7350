"""Other systems beside ours: the figures that a reader asks for first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from tests.benchmarks.compare import backlog, send, steady
from tests.benchmarks.compare import rate as rates
from tests.benchmarks.compare.absurd import Absurd
from tests.benchmarks.compare.compare import Compare
from tests.benchmarks.compare.pgmq import Pgmq, PgmqTopic
from tests.benchmarks.compare.pgque import PgQue, ticking
from tests.benchmarks.compare.procrastinate import Procrastinate
from tests.benchmarks.compare.rows import Rows
from tests.benchmarks.compare.sides import Ours, Side
from tests.benchmarks.compare.storage import STORAGE, empty_storage, storage
from tests.benchmarks.harness import alternate

SCENARIO = "other systems"
ROUNDS = 2
"""Turns of each side at most."""

BATCH = 1000
SIZES = {1: 4000, 10: 8000, 100: 20_000}
"""Messages to receive at a time, and how many there are."""

WARM_UP = 100
"""Messages that a queue has had before messages come at a fixed rate."""

MOST: dict[type, int] = {Procrastinate: 1, Absurd: 10}
"""Messages at a time, of those that receive or acknowledge one by one."""

SHORT = 10.0
"""Milliseconds from tick to tick, where PgQue ticks more often than by default."""

Turn = Callable[[], float]


def others(compare: Compare) -> None:
    """Sending, a backlog, a message at a time, and fixed rates."""
    peers = [*compare.sides(Pgmq(), Rows()), *compare.peers]
    sent_singly(compare, peers)
    sent_together(compare, peers)
    for workers in (1, 4):
        received(compare, peers, workers)
    cycles(compare, peers)
    at_rates(compare, peers)


def case(compare: Compare, line: str, point: str, unit: str, turns: dict[str, Turn]) -> None:
    """Let the sides take turns, and report what they return."""
    values = alternate(turns, min(compare.effort.rounds, ROUNDS), warm_up=0)
    compare.case(SCENARIO, line, point, unit, values, higher=unit == "/s")


def sent_singly(compare: Compare, peers: list[Side]) -> None:
    """Single messages, to one consumer and to ten; to ten where a message goes to several."""
    for consumers in (1, 10):
        sides: list[Side] = [Ours(), *peers]
        if consumers > 1:
            topics = [PgmqTopic(consumers=consumers) if side == Pgmq() else side for side in peers]
            sides = [
                Ours(),
                *(each for each in topics if isinstance(each, (PgmqTopic, PgQue, Rows))),
            ]
        turns = {side.name: partial(send.turn, compare, side, 1, consumers, 1) for side in sides}
        compare.prepare(turns.values())
        case(compare, "send single messages, consumers", f"{consumers}", "/s", turns)


def sent_together(compare: Compare, peers: list[Side]) -> None:
    """Batches from one producer."""
    sides = [Ours(), *(side for side in peers if not isinstance(side, Absurd))]
    batch = compare.effort.messages(BATCH)
    turns = {side.name: partial(send.turn, compare, side, 1, 1, batch) for side in sides}
    compare.prepare(turns.values())
    case(compare, f"send batches of {batch:,}", "", "/s", turns)


def received(compare: Compare, peers: list[Side], workers: int) -> None:
    """From a backlog: messages that were sent one by one, in batches of some sizes."""
    ours = Ours(singly=True)
    who = f"{workers} workers" if workers > 1 else "1 worker"
    for size, most in SIZES.items():
        sides = [ours, *(each for each in peers if size <= MOST.get(type(each), size))]
        sides = [
            replace(each, batch=size, shared=workers > 1) if isinstance(each, PgQue) else each
            for each in sides
            if not (isinstance(each, PgQue) and size == 1)
        ]
        count = compare.effort.messages(most)
        with compare.queues(sides):
            turn = partial(backlog.turn, compare, size=size, workers=workers, count=count)
            turns: dict[str, Turn] = {side.name: partial(turn, side) for side in sides}
            case(
                compare,
                f"backlog sent one by one, {who}, messages at a time",
                f"{size}",
                "/s",
                turns,
            )


def cycles(compare: Compare, peers: list[Side]) -> None:
    """A worker that sends, receives and acknowledges; without PgQue, which waits for its tick."""
    sides = [Ours(), *(side for side in peers if not isinstance(side, PgQue))]
    with compare.queues(sides):
        turns = {side.name: partial(cycle, compare, side) for side in sides}
        compare.prepare(turns.values())
        case(compare, "send, receive 1, acknowledge", "", "µs", turns)


def cycle(compare: Compare, side: Side) -> float:
    """Microseconds of a cycle: the median."""
    return next(iter(steady.cycles(compare, side).values()))


def at_rates(compare: Compare, peers: list[Side]) -> None:
    """How soon a message is with a worker, and what it leaves behind."""
    often = [
        replace(each, period=SHORT / 1e3, variant=f"{SHORT:g} ms")
        for each in peers
        if isinstance(each, PgQue)
    ]
    sides: list[Side] = [Ours(), *peers, *often]
    for per_second in rates.RATES:
        line = f"at {per_second:,} a second"
        found: dict[str, dict[str, list[float]]] = {}
        for _ in range(min(compare.effort.rounds, ROUNDS)):
            for side in sides:
                with compare.queues([side]):
                    for what, value in at_rate(compare, side, per_second).items():
                        found.setdefault(what, {}).setdefault(side.name, []).append(value)
        compare.forget_cpu()  # most is that of polls that find nothing
        for what in ("median", "p99"):
            late = f"{line}, from commit to handler"
            compare.case(SCENARIO, late, what, "ms", found[what], higher=False)
        for what, unit in STORAGE.items() if per_second == rates.RATES[-1] else ():
            compare.case(SCENARIO, f"{line}: {what}", "", unit, found[what], higher=False)


def at_rate(compare: Compare, side: Side, per_second: int) -> dict[str, float]:
    """Milliseconds from commit to handler, and what a message left in storage."""
    count = max(int(compare.effort.rated * per_second), 20)
    # Sessions keep plans, so the planner is to know the tables as they are in use.
    compare.fill(side, WARM_UP)
    compare.settle(side, range(WARM_UP), [])
    before = empty_storage(compare, side)
    workers = 1 if isinstance(side, PgQue) else rates.WORKERS  # a batch at a time
    with ticking(compare.url, side):
        late = rates.turn(compare, side, per_second, workers)
    after = storage(compare, side)
    left = {what: (after[what] - before[what]) / count for what in STORAGE}
    return {**{what: seconds * 1e3 for what, seconds in late.items()}, **left}
