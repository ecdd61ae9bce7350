"""FIFO by key: many keys, few, and some that most messages are of."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

from tests.benchmarks.compare.backlog import LEAST
from tests.benchmarks.compare.compare import KEYS, Compare
from tests.benchmarks.compare.pgmq import Pgmq
from tests.benchmarks.compare.rows import Rows
from tests.benchmarks.compare.sides import Ours, Side
from tests.benchmarks.compare.work import Consume
from tests.benchmarks.harness import alternate

SCENARIO = "FIFO by key"
SIZES = {1: 10_000, 10: 20_000, 100: 40_000}
"""Messages to receive at a time, and how many there are."""


def many(chance: random.Random, count: int) -> list[str]:
    """5,000 keys, each as often as the others."""
    return [f"key {chance.randrange(KEYS)}" for _ in range(count)]


def zipf(chance: random.Random, count: int) -> list[str]:
    """5,000 keys; the second is half as frequent as the first, the third a third, and so on."""
    weights = [1 / rank for rank in range(1, KEYS + 1)]
    return [f"key {rank}" for rank in chance.choices(range(KEYS), weights, k=count)]


def ten(chance: random.Random, count: int) -> list[str]:
    """Ten keys, each as often as the others."""
    return [f"key {chance.randrange(10)}" for _ in range(count)]


DISTRIBUTIONS: dict[str, Callable[[random.Random, int], list[str]]] = {
    "5,000 keys": many,
    "Zipf": zipf,
    "ten keys": ten,
}


def keys(compare: Compare) -> None:
    """Sizes of 1, 10 and 100, with 1, 4 and 16 workers.

    Also against the row per message in no order, which is what order costs nothing there.
    """
    fifo, unordered = Rows(by_key=True, variant="FIFO by key"), Rows(variant="in no order")
    sides = compare.sides(Ours(), fifo, unordered, Pgmq("heads", by_key=True))
    with compare.queues(sides, by_key=True):
        drawn = many(random.Random(2), compare.effort.messages(10_000))
        compare.prepare(
            partial(turn, compare, side, 1, 16, drawn) for side in sides if is_asked(side, 16)
        )
        for name, keys_of in DISTRIBUTIONS.items():
            for workers in compare.effort.some((1, 4, 16)):
                for size in compare.effort.some(list(SIZES)):
                    drawn = keys_of(random.Random(1), compare.effort.messages(SIZES[size]))
                    asked = [side for side in sides if is_asked(side, workers)]
                    turns = {
                        side.name: partial(turn, compare, side, size, workers, drawn)
                        for side in asked
                    }
                    values = alternate(turns, min(compare.effort.rounds, 2), warm_up=0)
                    who = f"{workers} workers" if workers > 1 else "1 worker"
                    line = f"{name}, {who}, messages at a time"
                    compare.case(SCENARIO, line, f"{size}", "/s", values)


def is_asked(side: Side, workers: int) -> bool:
    """Not pgmq with many workers: each of its claims groups all messages, 16 at once time out."""
    return side.schema != "pgmq" or workers == 1


def turn(compare: Compare, side: Side, size: int, workers: int, keys: list[str]) -> float:
    """Messages per second of all workers."""
    compare.fill(side, len(keys), keys)
    warm_up = 1 if len(keys) < 1000 else 3
    job = Consume(side, size, compare.effort.seconds, len(keys), warm_up, LEAST // size)
    is_ordered = not (isinstance(side, Rows) and not side.by_key)
    return compare.work(side, [job] * workers, len(keys), keys if is_ordered else None)
