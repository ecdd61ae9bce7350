"""What an hour is: its times, its messages, and what becomes of each of them."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.benchmarks.compare.sides import BEFORE, DIGITS

STREAM, SECOND = "orders", "invoices"
"""The stream, and the one that Spark writes to."""

ANY_ORDER, BY_KEY, SPARK = "packing", "billing", "invoicing"
CONSUMERS = (ANY_ORDER, BY_KEY, SPARK)
"""Of the stream. The messages of the last one are seen when they are in the second stream."""

WARM_UP, READY = "warm-up", "spark is ready"
"""The key of a message that Spark alone gets, and drops; and the file that says that it did."""

PRODUCERS = 8
"""As many as services have: where a commit waits 20 ms for the disk, two send 600 a second."""

WORKERS = {ANY_ORDER: 2, BY_KEY: 2}
KEYS, SLOW_KEYS = 5000, 25
"""Keys, and those of which a message is delayed now and then: later ones of the key wait."""

DELAYED, DELAYED_KEYED = 0.05, 0.01
"""Shares: of all messages; and of the delayed ones, those with a key."""

SINGLE = 0.2
"""The share of messages that are sent singly, in a transaction with other work."""

LONGEST_DELAY = 30
FILLER = f'", "shop": "{"Grey Street 12, Newcastle upon Tyne; " * 12}No. 42, on the left"}}'
"""So a payload has 500 bytes."""


@dataclass(frozen=True)
class Plan:
    """Of a run; all its processes read it.

    Attributes:
        side: pgqueue, rows or pgmq.
        url: of the database.
        folder: where processes share what they count.
        minutes: how long messages are sent.
        rate: messages a second.
        began: when sending begins, in seconds since 1970.
        spark: whether a Spark query is the third consumer; else a worker is.
    """

    side: str
    url: str
    folder: str
    minutes: float
    rate: int
    began: float
    spark: bool = True

    @property
    def seconds(self) -> float:
        return self.minutes * 60

    @property
    def share(self) -> float:
        """Of an hour: what is shorter has a shorter retention too, and is vacuumed more often."""
        return min(1.0, self.minutes / 60)

    @property
    def retention(self) -> float:
        """Seconds."""
        return 300 * self.share

    @property
    def maintained(self) -> float:
        """Seconds between calls of maintain."""
        return max(2.0, 30 * self.share)

    @property
    def naptime(self) -> int:
        """Seconds between rounds of autovacuum; in an hour, the default."""
        return max(1, round(60 * self.share))

    @property
    def look_every(self) -> float:
        """Seconds between looks at the sizes."""
        return max(1.0, 10 * self.share)

    @property
    def held(self) -> tuple[float, float]:
        """When a snapshot is held, in seconds from the beginning."""
        return self.seconds * 25 / 60, self.seconds * 35 / 60

    @property
    def per_producer(self) -> int:
        """Numbers of a producer; it ends before they do."""
        return int(self.rate * self.seconds / PRODUCERS * 1.01) + 200

    @property
    def numbers(self) -> int:
        return self.per_producer * PRODUCERS

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)) + "\n")

    @staticmethod
    def read(path: Path) -> Plan:
        return Plan(**json.loads(path.read_text()))


def payload(number: int) -> str:
    """The payload of a message."""
    return f"{BEFORE}{number:0{DIGITS}}{FILLER}"


def is_dead(number: int) -> bool:
    """Whether a worker of ANY_ORDER rejects the message when it first sees it: 0.01%."""
    return _dice(number) == 0


def is_purged(number: int) -> bool:
    """Whether a dead letter is dropped; else it is redriven."""
    return number // 2 % 2 == 0


def failures(number: int) -> int:
    """How often the message fails with a worker of ANY_ORDER: 2% do, once or twice."""
    return 0 if _dice(number) > 200 else 1 + number % 2


def _dice(number: int) -> int:
    return number * 2_654_435_761 % 2**32 // 1000 % 10_000
