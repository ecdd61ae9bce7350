"""`python -m tests.benchmarks.hour.actors ROLE INDEX PLAN`: the processes that send and receive."""

from __future__ import annotations

import logging
import random
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import spark_pgqueue
from spark_pgqueue import Consumer, Message, Reject, Retry
from tests.benchmarks.compare.crew import connect
from tests.benchmarks.compare.sides import number_of
from tests.benchmarks.harness import run
from tests.benchmarks.hour import plan as planned
from tests.benchmarks.hour.plan import ANY_ORDER, BY_KEY, CONSUMERS, SECOND, SPARK, STREAM, Plan
from tests.benchmarks.hour.shared import Shared
from tests.benchmarks.hour.sides import PAUSE, SIDES, PeerOfPgmq, PeerOfRows

FAILED, DISORDERED = 0, 1
"""Places in the events of a process."""

CUSTOMERS = "create table public.customers (customer int primary key, orders int not null)"
ORDERED = "update public.customers set orders = orders + 1 where customer = %s"
"""What a service does in the transaction that sends."""


class Producer:
    """Sends its numbers in their order, each when it is due."""

    def __init__(self, plan: Plan, index: int):
        self._plan = plan
        self._side = SIDES[plan.side]()
        self._due = Shared(plan, f"producer {index}").due
        self._random = random.Random(index)
        self._first = self._next = plan.per_producer * index
        self._end = self._first + plan.per_producer

    def run(self) -> None:
        end = self._plan.began + self._plan.seconds
        per_second = self._plan.rate / planned.PRODUCERS
        with connect(self._plan.url) as self._conn:
            while (now := time.time()) < end:
                early = self._plan.began + (self._next - self._first) / per_second - now
                if early > 0:
                    time.sleep(early)
                self._send(self._size())

    def _size(self) -> int:
        """How many to send next, so that SINGLE of all messages are sent singly."""
        batch, single = 1 / 55 * (1 - planned.SINGLE), planned.SINGLE
        is_single = self._random.random() < single / (single + batch)
        return 1 if is_single else self._random.randint(10, 100)

    def _send(self, size: int) -> None:
        numbers = range(self._next, min(self._next + size, self._end))
        if not numbers:
            raise RuntimeError("there are too few numbers")
        delay = 0
        if self._random.random() < planned.DELAYED:
            delay = self._random.randint(1, planned.LONGEST_DELAY)
        data = [planned.payload(number) for number in numbers]
        keys = [self._key(bool(delay)) for _ in numbers]
        if len(numbers) == 1:
            with self._conn.transaction():
                run(self._conn, ORDERED, (self._random.randrange(planned.KEYS),))
                self._side.send(self._conn, data, keys, delay)
        else:
            self._side.send(self._conn, data, keys, delay)
        due = time.time() + delay
        for number in numbers:
            self._due[number] = due
        self._next = numbers.stop

    def _key(self, delayed: bool) -> str | None:
        if not delayed:
            return f"{self._random.randrange(planned.KEYS)}"
        if self._random.random() < planned.DELAYED_KEYED:
            return f"{self._random.randrange(planned.SLOW_KEYS)}"
        return None


class Handler:
    """Handles messages of a consumer, and counts them."""

    def __init__(self, plan: Plan, consumer: str, index: int):
        self._plan = plan
        self._shared = Shared(plan, f"{consumer} {index}")
        self._fails = consumer == ANY_ORDER
        self._is_ordered = consumer == BY_KEY and plan.side == "pgqueue"
        assert self._shared.done is not None
        assert self._shared.delays is not None
        self._events = self._shared.events

    def outcome(self, number: int, attempt: int) -> str:
        """What becomes of a delivery: "done", "retry" or "reject"; it is counted."""
        rejected = self._shared.rejected
        again = self._fails and rejected[number]
        if attempt == 1 and not again:
            self._shared.note_delay(number)
        if self._fails and not again:
            ours = self._plan.side == "pgqueue"
            if planned.is_dead(number) and ours:
                rejected[number] += 1
                return "reject"
            if attempt <= planned.failures(number):
                self._events[FAILED] += 1
                return "retry"
        self._shared.done[number] += 1
        return "done"

    def __call__(self, message: Message) -> None:
        number = number_of(str(message.data))
        if self._is_ordered and message.key is not None:
            self._check_order(message.key, number)
        match self.outcome(number, message.deliver_count):
            case "retry":
                raise Retry("the printer is busy")
            case "reject":
                raise Reject("no such address")

    def _check_order(self, key: str, number: int) -> None:
        place = int(key) * planned.PRODUCERS + number // self._plan.per_producer
        if number < self._shared.last[place]:
            self._events[DISORDERED] += 1
        self._shared.last[place] = number + 1


def work(plan: Plan, consumer: str, index: int) -> None:
    """A worker of ours, of a peer; or what reads the messages that Spark wrote."""
    handler = Handler(plan, consumer, index)
    if plan.side != "pgqueue":
        _work_for_peer(plan, consumer, handler)
    elif consumer == SPARK:
        _audit(plan, handler)
    else:
        logging.getLogger("spark_pgqueue.worker").setLevel(logging.ERROR)
        Consumer(plan.url, STREAM, consumer).run(handler, concurrency=2)


def _audit(plan: Plan, handler: Handler) -> None:
    stream = SECOND if plan.spark else STREAM
    stopped = until_stopped()
    with spark_pgqueue.connect(plan.url) as client:
        claim = None
        while not stopped():
            wait = timedelta(seconds=1)
            claim = client.receive(stream, SPARK, 1000, ack=claim, wait=wait)
            for message in claim.messages if claim else ():
                handler.outcome(number_of(str(message.data)), message.deliver_count)
        if claim:
            claim.ack()


def _work_for_peer(plan: Plan, consumer: str, handler: Handler) -> None:
    side: Any = SIDES[plan.side]()
    assert isinstance(side, PeerOfPgmq | PeerOfRows)
    index, stopped = CONSUMERS.index(consumer), until_stopped()
    with connect(plan.url) as conn:
        while not stopped():
            received = side.receive(conn, index)
            done = [
                each.handle
                for each in received
                if handler.outcome(each.number, each.attempt) == "done"
            ]
            if done and side.ack(conn, done, index) != len(done):
                raise RuntimeError("what was handled had gone to others")
            if not received:
                time.sleep(PAUSE)


def until_stopped() -> Callable[[], bool]:
    """Whether this process has got SIGTERM."""
    got: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: got.append(number))
    return lambda: bool(got)


def main(role: str, index: int, path: str) -> None:
    """Do what the role does until SIGTERM, or until all is sent."""
    plan = Plan.read(Path(path))
    if role == "producer":
        Producer(plan, index).run()
    elif role == "trim":
        with connect(plan.url) as conn:
            PeerOfRows().trim(conn, plan, until_stopped())
    else:
        work(plan, role, index)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
