"""How soon a worker that waits has a message that was just committed."""

from __future__ import annotations

import random
import statistics
import time
from dataclasses import dataclass
from datetime import timedelta

import psycopg

import spark_pgqueue
from tests.benchmarks.compare.compare import Compare
from tests.benchmarks.compare.counts import CountError, Log, acknowledge
from tests.benchmarks.compare.crew import Seat
from tests.benchmarks.compare.pgmq import COLUMNS, TIMEOUT, Pgmq, queue, received
from tests.benchmarks.compare.sides import Delivery, Ours, Side, number_of, payload
from tests.benchmarks.harness import run

SCENARIO = "wake-up of a waiting worker"
PATIENCE = 20
"""Seconds that a worker waits for a message."""

POLL = (
    f"select {COLUMNS} from pgmq.read_with_poll(queue_name=>%s::text, vt=>%s::integer,"
    " qty=>%s::integer, max_poll_seconds=>%s::integer)"
)
CHANNEL = "compare_bare"


@dataclass(frozen=True)
class Bare(Ours):
    """No queue at all: LISTEN, and a notification in place of a message."""

    @property
    def name(self) -> str:
        return "bare LISTEN"

    def send(self, conn: psycopg.Connection, data: str, key: str | None) -> None:
        run(conn, "select pg_notify(%s, %s)", (CHANNEL, data))


def wake(compare: Compare) -> None:
    """One worker waits; each message is sent when it waits again, after a pause."""
    sides = [*compare.sides(Ours(), Pgmq("LISTEN"), Pgmq("read_with_poll")), Bare()]
    found: dict[str, dict[str, list[float]]] = {}
    with compare.queues([side for side in sides if not isinstance(side, Bare)]):
        for _ in range(compare.effort.rounds):
            for side in sides:
                for what, seconds in turn(compare, side).items():
                    found.setdefault(what, {}).setdefault(side.name, []).append(seconds * 1e3)
    for what, values in found.items():
        line = f"from the call of send to the worker, {what}"
        compare.case(SCENARIO, line, "", "ms", values, higher=False)


def turn(compare: Compare, side: Side) -> dict[str, float]:
    """Seconds from the call of send to the message in the worker's hands."""
    count, chance = compare.effort.wakes, random.Random(1)
    sent: list[float] = []
    if side.name == "pgmq, LISTEN":
        sql = "select pgmq.enable_notify_insert(queue_name=>%s, throttle_interval_ms=>0)"
        run(compare.conn, sql, (queue(0),))

    def produce() -> None:
        for number in range(count):
            time.sleep(chance.uniform(0.03, 0.13))
            sent.append(time.perf_counter())
            side.send(compare.conn, payload(number), None)

    (log,) = compare.crew.run([Wait(side, count)], produce)
    compare.note_cpu(side, count, compare.crew.worked)
    if isinstance(side, Bare):
        if [numbers for *_, numbers in log.deliveries] != [[number] for number in range(count)]:
            raise CountError(f"{side.name}: {log.deliveries}")
    else:
        compare.settle(side, range(count), [log])
    came = [received for received, *_ in log.deliveries]
    late = sorted(after - before for before, after in zip(sent, came, strict=True))
    return {"median": statistics.median(late), "p99": late[int(len(late) * 0.99)]}


@dataclass(frozen=True)
class Wait:
    """A worker that waits for one message after the other, as users of its side do."""

    side: Side
    count: int

    def __call__(self, seat: Seat) -> Log:
        if isinstance(self.side, Bare):
            return self._listen(seat)
        if isinstance(self.side, Ours):
            return self._client(seat)
        return self._pgmq(seat)

    def _client(self, seat: Seat) -> Log:
        log, wait = Log(), timedelta(seconds=PATIENCE)
        with spark_pgqueue.connect(seat.url) as client:
            client.receive(self.side.name, "c0", wait=timedelta(milliseconds=1))
            seat.begin()
            while len(log.deliveries) < self.count:
                claim = client.receive(self.side.name, "c0", wait=wait)
                now = time.perf_counter()
                if claim is None:
                    raise CountError(f"{self.side.name}: nothing came")
                numbers = [number_of(str(each.data)) for each in claim.messages]
                log.deliveries.append((now, now, numbers))
                claim.ack()
        return log

    def _pgmq(self, seat: Seat) -> Log:
        conn, log = seat.connection, Log()
        is_listening = self.side.name == "pgmq, LISTEN"
        if is_listening:
            run(conn, f'listen "pgmq.q_{queue(0)}.INSERT"')
        seat.begin()
        while len(log.deliveries) < self.count:
            if is_listening:
                delivery = self.side.receive(conn, 1, 0, None)
                while not delivery.numbers:
                    for _ in conn.notifies(timeout=PATIENCE, stop_after=1):
                        pass
                    delivery = self.side.receive(conn, 1, 0, None)
            else:
                delivery = received(run(conn, POLL, (queue(0), TIMEOUT, 1, PATIENCE)))
            self._log(seat, log, delivery)
        if is_listening:
            run(conn, "unlisten *")
        return log

    def _listen(self, seat: Seat) -> Log:
        conn, log = seat.connection, Log()
        run(conn, f"listen {CHANNEL}")
        seat.begin()
        for notify in conn.notifies(timeout=PATIENCE, stop_after=self.count):
            now = time.perf_counter()
            log.deliveries.append((now, now, [number_of(notify.payload)]))
        run(conn, "unlisten *")
        return log

    def _log(self, seat: Seat, log: Log, delivery: Delivery) -> None:
        now = time.perf_counter()
        log.deliveries.append((now, now, delivery.numbers))
        acknowledge(self.side, seat.connection, delivery, 0)
