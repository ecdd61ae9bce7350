"""What workers do: produce, consume, or both in turn."""

from __future__ import annotations

import time
from dataclasses import dataclass

import psycopg

from tests.benchmarks.compare.counts import Log, acknowledge
from tests.benchmarks.compare.crew import Seat
from tests.benchmarks.compare.sides import Delivery, Side, Store, payload

PAUSE = 0.001
"""Seconds that a worker waits after it found nothing, and a producer that is too far ahead."""

APART = 10**9
"""So far are the numbers of one producer from those of the next."""


@dataclass(frozen=True)
class Consume:
    """Receive and acknowledge.

    Attributes:
        size: messages to ask for.
        seconds: how long.
        expected: stop too when the crew has settled so many.
        warm_up: so many deliveries before it begins.
        least: go on for so many deliveries, as long as there are messages: on a machine that does
            other work, too, a few calls would tell nothing.
    """

    side: Side
    size: int
    seconds: float
    expected: int
    warm_up: int = 0
    least: int = 0

    def __call__(self, seat: Seat) -> Log:
        conn, log, clock = seat.connection, Log(), time.perf_counter
        for _ in range(self.warm_up):
            self._settle(seat, log, self._first(seat, log))
        began = seat.begin()
        end, done, before = began + self.seconds, None, len(log.deliveries)
        ended = began
        while clock() < end or len(log.deliveries) - before < self.least:
            delivery = self.side.receive(conn, self.size, 0, done)
            if done is not None:
                seat.count(len(done.numbers))
                done = None
            if not delivery.numbers:
                if clock() >= end or sum(seat.counters) >= self.expected:
                    break
                time.sleep(PAUSE)
                continue
            if self.side.one_call:
                # Settled with the next call: by then its time has come.
                done, now = delivery, clock()
                log.deliveries.append((now, now, delivery.numbers))
            else:
                self._settle(seat, log, delivery)
            ended = clock()
        else:
            ended = clock()
        if done is not None:
            acknowledge(self.side, conn, done, 0)
            ended = clock()
        log.seconds = ended - began
        log.messages = sum(len(numbers) for *_, numbers in log.deliveries[before:])
        return log

    def _first(self, seat: Seat, log: Log) -> Delivery:
        """A delivery, after which each statement that will be used is prepared."""
        first = self.side.receive(seat.connection, self.size, 0, None)
        if not (self.side.one_call and first.numbers):
            return first
        log.deliveries.append((0, 0, first.numbers))
        second = self.side.receive(seat.connection, self.size, 0, first)
        seat.count(len(first.numbers))
        return second

    def _settle(self, seat: Seat, log: Log, delivery: Delivery) -> None:
        if delivery.numbers:
            received = time.perf_counter()
            log.deliveries.append((received, received, delivery.numbers))
            acknowledge(self.side, seat.connection, delivery, 0)
            seat.count(len(delivery.numbers))


@dataclass(frozen=True)
class Produce:
    """Send single messages, or batches.

    Attributes:
        producer: which one this is; gives its messages their numbers.
        seconds: how long.
        count: stop after so many messages; None to go on.
        batch: messages in a call; 1 is a single send.
        per_second: send no faster.
        ahead: wait while the workers have settled so many fewer than this producer has sent.
    """

    side: Store
    producer: int
    seconds: float
    count: int | None = None
    batch: int = 1
    per_second: int | None = None
    ahead: int | None = None
    warm_up: int = 0

    def __call__(self, seat: Seat) -> Log:
        conn, log, clock = seat.connection, Log(), time.perf_counter
        number = self.producer * APART
        for _ in range(self.warm_up):
            number = self._send(conn, log, number)
        began, first = seat.begin(), number
        last = first + self.count if self.count else None
        while (now := clock()) < began + self.seconds and number != last:
            if self.per_second is not None:
                early = began + (number - first) / self.per_second - now
                if early > 0:
                    time.sleep(early)
            elif self.ahead and number - first - sum(seat.counters) > self.ahead:
                time.sleep(PAUSE)
                continue
            number = self._send(conn, log, number)
        log.seconds, log.messages = clock() - began, number - first
        return log

    def _send(self, conn: psycopg.Connection, log: Log, number: int) -> int:
        """Send one message or batch; returns the next number."""
        began = time.perf_counter()
        numbers = list(range(number, number + self.batch))
        if self.batch == 1:
            self.side.send(conn, payload(number), None)
        else:
            data = [payload(each) for each in numbers]
            self.side.send_batch(conn, data, [f"key {each % 5000}" for each in numbers])
        log.deliveries.append((began, time.perf_counter(), numbers))
        return number + self.batch
