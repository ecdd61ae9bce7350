"""What the clients of a set-up do: producers at a fixed rate, workers, and bystanders.

A run has a million messages: what each client did is kept in arrays, which are small and quick to
hand over.
"""

from __future__ import annotations

import random
import time
from array import array
from dataclasses import dataclass, field

from tests.benchmarks.compare.counts import Log, acknowledge
from tests.benchmarks.compare.crew import Seat
from tests.benchmarks.compare.sides import Side, payload
from tests.benchmarks.compare.work import APART
from tests.benchmarks.harness import run

PAUSE = 0.01
"""Seconds that a worker waits after it found nothing."""

BYSTANDERS_ROWS = 1_000_000
BYSTANDERS = """
create schema bystanders;
create table bystanders.accounts as
select i::int as id, 0 as balance, repeat('x', 84) as filler from generate_series(1, %s) i;
alter table bystanders.accounts add primary key (id);
analyze bystanders.accounts;
"""


@dataclass
class Track:
    """What a client did.

    Attributes:
        numbers: of the messages.
        at: when each was committed, or came to a worker.
        calls: when each claim ended that found something, or each query of a bystander.
        took: the seconds of that call.
    """

    numbers: array = field(default_factory=lambda: array("q"))
    at: array = field(default_factory=lambda: array("d"))
    calls: array = field(default_factory=lambda: array("d"))
    took: array = field(default_factory=lambda: array("d"))

    def log(self) -> Log:
        """The same for `check`."""
        return Log(deliveries=[(0, 0, self.numbers.tolist())])


@dataclass(frozen=True)
class Produce:
    """Send single messages, each at its time; one that is late sends what it owes.

    Attributes:
        producer: which one this is.
        per_second: how many.
        seconds: how long.
    """

    side: Side
    producer: int
    per_second: float
    seconds: float

    def __call__(self, seat: Seat) -> Track:
        conn, track, clock = seat.connection, Track(), time.perf_counter
        first = self.producer * APART
        began = seat.begin()
        for place in range(int(self.per_second * self.seconds)):
            if (early := began + place / self.per_second - clock()) > 0:
                time.sleep(early)
            elif clock() >= began + self.seconds:
                break
            self.side.send(conn, payload(first + place), None)
            track.at.append(clock())
            track.numbers.append(first + place)
            seat.count(1)
        return track


@dataclass(frozen=True)
class Work:
    """Receive, work, acknowledge.

    Attributes:
        size: messages to ask for.
        work: seconds of work for each delivery.
        seconds: how long.
    """

    side: Side
    size: int
    work: float
    seconds: float

    def __call__(self, seat: Seat) -> Track:
        conn, track, clock = seat.connection, Track(), time.perf_counter
        done = None
        end = seat.begin() + self.seconds
        while (began := clock()) < end:
            delivery = self.side.receive(conn, self.size, 0, done)
            now = clock()
            if done is not None:
                seat.count(len(done.numbers))
                done = None
            if not delivery.numbers:
                time.sleep(PAUSE)
                continue
            track.calls.append(now)
            track.took.append(now - began)
            track.numbers.extend(delivery.numbers)
            track.at.extend([now] * len(delivery.numbers))
            if self.work:
                time.sleep(self.work)
            if self.side.one_call:
                done = delivery
                continue
            acknowledge(self.side, conn, delivery, 0)
            seat.count(len(delivery.numbers))
        if done is not None:
            acknowledge(self.side, conn, done, 0)
            seat.count(len(done.numbers))
        return track


@dataclass(frozen=True)
class Bystand:
    """Read single rows of a large table that has nothing to do with the queue.

    Attributes:
        per_second: how many.
        seconds: how long.
    """

    per_second: float
    seconds: float
    rows: int = BYSTANDERS_ROWS

    def __call__(self, seat: Seat) -> Track:
        conn, track, clock = seat.connection, Track(), time.perf_counter
        chance = random.Random(seat.index)
        end = seat.begin() + self.seconds
        while (began := clock()) < end:
            sql = "select balance from bystanders.accounts where id = %s"
            run(conn, sql, (chance.randint(1, self.rows),))
            now = clock()
            track.calls.append(now)
            track.took.append(now - began)
            time.sleep(max(0.0, began + 1 / self.per_second - now))
        return track
