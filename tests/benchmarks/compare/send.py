"""Sending: bulk and single, to 1 to 100 consumers, by 1 and 4 producers; bound by a plain table."""

from __future__ import annotations

from functools import partial

from tests.benchmarks.compare.compare import Compare
from tests.benchmarks.compare.pgmq import Pgmq, PgmqTopic
from tests.benchmarks.compare.plain import Plain
from tests.benchmarks.compare.rows import Rows
from tests.benchmarks.compare.sides import Ours, Store
from tests.benchmarks.compare.work import Produce
from tests.benchmarks.harness import alternate

SCENARIO = "send"
EMPTIED = 5
"""Of more consumers than that, so many are emptied; what the others have is counted."""


def send(compare: Compare) -> None:
    """Batches of 10,000, then single messages."""
    some = compare.effort.some
    batch = compare.effort.messages(10_000)
    in_bulk = [(1, consumers) for consumers in some((1, 3, 10, 100))] + [(4, 1)]
    singly = [(1, consumers) for consumers in some((1, 3, 10, 100))] + [(4, 1), (4, 10)]
    for producers, consumers in in_bulk:
        case(compare, producers, consumers, batch)
    for producers, consumers in some(singly):
        case(compare, producers, consumers, 1)


def case(compare: Compare, producers: int, consumers: int, batch: int) -> None:
    """One number of producers and consumers."""
    is_bulk = batch > 1
    pgmq = PgmqTopic(consumers=consumers) if consumers > 1 else Pgmq()
    ours = [Ours()] if is_bulk else [Ours(), Ours("without notify", notify=False)]
    bounds = [Plain(), Plain(by_copy=True)] if is_bulk else [Plain()]
    sides: list[Store] = [*compare.sides(*ours, pgmq, Rows()), *bounds]
    rounds = 1 if is_bulk and consumers > 10 else compare.effort.rounds
    turns = {side.name: partial(turn, compare, side, producers, consumers, batch) for side in sides}
    values = alternate(turns, rounds, warm_up=0)
    who = f"{producers} producers" if producers > 1 else "1 producer"
    what = f"batches of {batch:,}" if is_bulk else "single messages"
    compare.case(SCENARIO, f"{what}, {who}, consumers", f"{consumers}", "/s", values)


def turn(compare: Compare, side: Store, producers: int, consumers: int, batch: int) -> float:
    """Messages per second of all producers; what they sent is received and counted."""
    batches = max(1, 5 // (consumers * producers))
    if batch > 1:
        how = {"seconds": 60.0, "count": batches * batch, "batch": batch}
    else:
        how = {"seconds": compare.effort.seconds, "warm_up": 5}
    jobs = [Produce(side, number, **how) for number in range(producers)]
    with compare.queues([side], consumers):  # new, as not all consumers will be emptied
        logs = compare.crew.run(jobs)
        compare.note_cpu(side, sum(log.messages for log in logs), compare.crew.worked)
        sent = [number for log in logs for *_, numbers in log.deliveries for number in numbers]
        kept = 1 if isinstance(side, Plain) else consumers
        for consumer in range(min(kept, EMPTIED)):
            compare.settle(side, sent, [], consumer)
        for consumer in range(EMPTIED, kept):
            compare.leave(side, len(sent), consumer)
    return sum(log.speed for log in logs)
