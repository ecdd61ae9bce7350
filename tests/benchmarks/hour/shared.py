"""What processes count, in files that they map: by the number of a message, a place for each."""

from __future__ import annotations

import mmap
import time
from functools import cached_property
from math import log
from pathlib import Path
from typing import Any

import numpy as np

from tests.benchmarks.hour.plan import KEYS, PRODUCERS, Plan

STEP, SHORTEST, BUCKETS = 1.05, 1e-4, 340
"""A bucket of delays is a twentieth longer than the one before it; the first is 0.1 ms."""

SPARE_MINUTES = 15
"""After the last message was sent."""

_SIZES = {"d": 8, "q": 8, "I": 4, "B": 1}


def mapped(path: Path, count: int, kind: str) -> Any:
    """A file of so many numbers, all 0 at first."""
    with path.open("ab") as file:
        file.truncate(count * _SIZES[kind])
    with path.open("r+b") as file:
        of: Any = memoryview(mmap.mmap(file.fileno(), 0))
    return of.cast(kind)


class Shared:
    """The files of a run.

    Args:
        plan: its plan.
        name: of this process: what it counts itself is in files of its own.
    """

    def __init__(self, plan: Plan, name: str):
        self._plan = plan
        self._folder = Path(plan.folder)
        self._name = name
        self._minutes = int(plan.minutes) + SPARE_MINUTES

    @cached_property
    def due(self) -> Any:
        """When each message was committed, or due if that was later. 0: it was not sent."""
        return mapped(self._folder / "due", self._plan.numbers, "d")

    @cached_property
    def rejected(self) -> Any:
        """How often each message became a dead letter."""
        return mapped(self._folder / "rejected", self._plan.numbers, "B")

    @cached_property
    def dropped(self) -> Any:
        """Whether each message was deleted as a dead letter."""
        return mapped(self._folder / "dropped", self._plan.numbers, "B")

    @cached_property
    def done(self) -> Any:
        """How often this process has handled each message."""
        return mapped(self._folder / f"done {self._name}", self._plan.numbers, "B")

    @cached_property
    def last(self) -> Any:
        """By key and producer, one more than the last number that was handled."""
        return mapped(self._folder / "last", KEYS * PRODUCERS, "q")

    @cached_property
    def events(self) -> Any:
        """What this process has seen: failures, and messages out of order."""
        return mapped(self._folder / f"events {self._name}", 2, "q")

    @cached_property
    def delays(self) -> Any:
        """Messages of this process by minute and bucket of their delay."""
        return mapped(self._folder / f"delays {self._name}", self._minutes * BUCKETS, "I")

    def note_delay(self, number: int) -> None:
        """A message has arrived for the first time."""
        now, due = time.time(), self.due[number]
        late = now - due if due else 0.0  # the producer has not seen its commit yet
        bucket = min(int(log(late / SHORTEST) / log(STEP)), BUCKETS - 1) if late > SHORTEST else 0
        minute = min(int(max(now - self._plan.began, 0) // 60), self._minutes - 1)
        self.delays[minute * BUCKETS + bucket] += 1


def total(folder: Path, what: str, consumer: str, kind: str) -> np.ndarray:
    """What all processes of a consumer have counted."""
    found = [np.fromfile(path, kind) for path in sorted(folder.glob(f"{what} {consumer} *"))]
    if not found:
        raise FileNotFoundError(f"nothing of {consumer} was counted")
    return np.asarray(np.sum(found, axis=0, dtype=np.int64))


def delays(folder: Path, consumer: str) -> np.ndarray:
    """Messages of a consumer, by minute and bucket."""
    return total(folder, "delays", consumer, "u4").reshape(-1, BUCKETS)


def percentile(buckets: np.ndarray, share: float) -> float:
    """Seconds within which this share of messages came."""
    upto = np.cumsum(buckets)
    bucket = int(np.searchsorted(upto, share * upto[-1]))
    return SHORTEST * STEP ** min(bucket + 1, BUCKETS)
