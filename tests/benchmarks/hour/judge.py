"""What still grows in the last third, and which messages were lost or came twice.

In the last third nothing new begins: the snapshot has been gone for five minutes of an hour, and
retention has deleted what was sent beside it. So each figure is at its level, in a sawtooth:

- Autovacuum removes dead rows once in its naptime, a minute. A half of the last third, ten minutes,
  has ten teeth, so its highest look is near the top of one: looks are ten seconds apart, a sixth of
  a tooth. So the highest may differ by what two looks are apart; a peak alone is no growth, as when
  the machine was busy for a minute: the median of dead rows, and of a backlog, has to rise, too.
- Retention drops segments of an eighth of the time kept, when maintain is called: another tenth of
  it in an hour. The highest of a half, which has 16 segments, is near the top.
- A file grows by pages, and is used again without shrinking. Half a megabyte is not growth.

So what grows by more than a tenth in ten minutes is found: what grew evenly from the first minute
on has grown by a fifth. And so is less that never falls: a relation whose lowest look of the second
half is not below the highest of the first one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.benchmarks.hour.plan import ANY_ORDER, CONSUMERS, Plan
from tests.benchmarks.hour.shared import total

SIZE, DEAD, LIVE = "bytes", "dead rows", "live rows"
BACKLOG = "backlog"

TOLERANCE = 0.1
"""The share by which the second half may be higher."""

SMALL_SIZE, SMALL_COUNT = 1 << 19, 500
"""Less is not growth. Counts also may differ by the rows of two looks."""

CREEP_SIZE, CREEP_COUNT = 1 << 16, 100
"""What grows by less than the tolerance, but never falls, may grow by this."""


@dataclass(frozen=True)
class Growth:
    """A figure of a relation that grows.

    Attributes:
        name: of the relation.
        what: which figure.
        first, second: its maxima in the halves of the last third.
    """

    name: str
    what: str
    first: float
    second: float

    def __str__(self) -> str:
        return f"{self.name}: {self.what} grow from {self.first:,.0f} to {self.second:,.0f}"


def series(lines: list[dict[str, Any]]) -> dict[tuple[str, str], np.ndarray]:
    """Figures by relation and kind, one for each line; 0 where there is no such relation."""
    names = sorted({name for line in lines for name in line["relations"]})
    found: dict[tuple[str, str], np.ndarray] = {}
    for name in names:
        rows = np.array([line["relations"].get(name, [0, 0, 0, 0]) for line in lines], "f8")
        for place, what in enumerate((SIZE, DEAD, LIVE)):
            if rows[:, place].any():
                found[name, what] = rows[:, place]
    for consumer in sorted({name for line in lines for name in line["backlog"]}):
        counts = np.array([line["backlog"].get(consumer, 0) for line in lines], "f8")
        found[consumer, BACKLOG] = counts
    return found


def growth(plan: Plan, lines: list[dict[str, Any]]) -> Iterator[Growth]:
    """What grows in the last third."""
    at = np.array([line["at"] for line in lines])
    end = plan.seconds
    halves = [
        (at >= end * since) & (at <= end * upto)
        for since, upto in ((4 / 6, 5 / 6), (5 / 6, 1 + 1e-9))
    ]
    if not all(half.any() for half in halves):
        raise ValueError("there are no looks at the last third")
    for (name, what), values in series(lines).items():
        first, second = (values[half] for half in halves)
        if _grows(plan, what, first, second):
            yield Growth(name, what, first.max(), second.max())


def _grows(plan: Plan, what: str, first: np.ndarray, second: np.ndarray) -> bool:
    small = SMALL_SIZE if what == SIZE else SMALL_COUNT
    rise = second.max() - first.max()
    if what in (DEAD, BACKLOG):
        small += plan.rate * plan.look_every
        risen = float(np.median(second) - np.median(first))
        return min(rise, risen) > first.max() * TOLERANCE + small
    if rise > first.max() * TOLERANCE + small:
        return True
    creep = CREEP_SIZE if what == SIZE else CREEP_COUNT
    return second.min() >= first.max() and rise > creep


@dataclass(frozen=True)
class Count:
    """What a consumer got of the messages sent.

    Attributes:
        consumer: its name.
        sent, once: how many messages; those that had their effect once, or were dropped.
        lost, doubled, unknown: those that had none, several, and that nobody sent.
        failed, disordered: deliveries that failed, and that came too late in their key.
        dropped: dead letters that were deleted.
    """

    consumer: str
    sent: int
    once: int
    lost: int
    doubled: int
    unknown: int
    failed: int
    disordered: int
    dropped: int

    @property
    def ok(self) -> bool:
        return not (self.lost or self.doubled or self.unknown or self.disordered)

    def __str__(self) -> str:
        return (
            f"{self.consumer}: of {self.sent:,} messages {self.once:,} once, {self.lost:,} lost,"
            f" {self.doubled:,} more than once, {self.unknown:,} never sent;"
            f" {self.failed:,} deliveries failed, {self.dropped:,} dead letters dropped,"
            f" {self.disordered:,} out of order"
        )


def counted(folder: Path, consumer: str) -> Count:
    """Count by the numbers in payloads alone."""
    sent = np.fromfile(folder / "due", "f8") > 0
    effects = total(folder, "done", consumer, "u1")
    dropped = np.zeros_like(effects)
    if consumer == ANY_ORDER and (folder / "dropped").exists():
        dropped = np.fromfile(folder / "dropped", "u1")
    effects = effects + dropped
    failed, disordered = total(folder, "events", consumer, "i8")
    return Count(
        consumer,
        sent=int(sent.sum()),
        once=int((sent & (effects == 1)).sum()),
        lost=int((sent & (effects == 0)).sum()),
        doubled=int((sent & (effects > 1)).sum()),
        unknown=int((~sent & (effects > 0)).sum()),
        failed=int(failed),
        disordered=int(disordered),
        dropped=int(dropped.sum()),
    )


def counts(folder: Path) -> list[Count]:
    """Of all consumers."""
    return [counted(folder, consumer) for consumer in CONSUMERS]
