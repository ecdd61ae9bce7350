"""A worker whose handler does nothing, against claims of one message; and what a kill repeats."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import psycopg

import spark_pgqueue
from spark_pgqueue import Consumer
from tests.benchmarks.harness import Bench, Line, Target, alternate, run
from tests.benchmarks.server_cpu import ServerCpu, between
from tests.sql.queue import AT_ONCE

SLOTS = 4
GOAL = Target(least=20_000)  # messages per second, without order

# Sent singly: a publication each, as producers that know nothing of each other make them.
SEND = """
do $$
begin
    for i in 1..{count} loop
        perform pgqueue.send('worker', repeat('x', 200), p_key => 'key ' || i % 5000);
        if i % 100 = 0 then commit; end if;
    end loop;
end $$
"""


def worker(bench: Bench) -> None:
    """Messages that were sent singly, and the same work by claims of one, in the same rounds."""
    count = 10_000 if bench.quick else 40_000
    with bench.connect() as conn:
        run(conn, "select pgqueue.create_stream('worker')")
        ways: dict[str, Callable[[str, str, int], float]] = {
            "a claim each": singly,
            f"{SLOTS} threads": threads,
            f"{SLOTS} tasks": tasks,
            "2 processes": processes,
            f"{SLOTS} threads, transactional": transactional,
        }
        sides = {
            (ordering, name): partial(way, bench.url, f"{ordering} {name}", count)
            for ordering in ("none", "key")
            for name, way in ways.items()
        }
        for ordering, name in sides:
            create = "select pgqueue.create_consumer('worker', %s, p_ordering => %s)"
            run(conn, create, (f"{ordering} {name}", ordering))
        first, *others = sides
        sides[first] = partial(send_before, conn, count, sides[first])  # for all of them
        taken = alternate(sides, 2 if bench.quick else 4)
        for ordering, name in others:
            if name != "a claim each":
                group = f"a worker, ordering={ordering}, against {SLOTS} threads with claims of one"
                theirs = taken[ordering, "a claim each"]
                bench.report.ratio(group, name, taken[ordering, name], theirs, "1/s")
        best = 1 / min(taken["none", f"{SLOTS} threads"])
        bench.report.add(
            Line("a worker", f"{SLOTS} threads, the best round", best, "/s", target=GOAL)
        )
        costs(bench, conn)
        kills(bench, conn)
        run(conn, "select pgqueue.drop_stream('worker')")


def send_before(conn: psycopg.Connection, count: int, side: Callable[[], float]) -> float:
    """What everybody works on in this round."""
    conn.execute(SEND.format(count=count).encode())
    return side()


class Until:
    """Counts messages, and ends a worker: how long one took, from the first to the last."""

    def __init__(self, count: int):
        self._left = count
        self._count = count
        self._times: list[float] = []
        self.stop: Callable[[], None] = lambda: None

    def __call__(self, *_: Any) -> None:
        self._left -= 1  # (threads may miscount by a few; the run ends by `wait` then)
        if not self._times or self._left <= 0:
            self._times.append(time.perf_counter())
            if self._left <= 0:
                self.stop()

    def each(self, given: Any) -> None:
        """Count a message, or those of a batch."""
        for message in given if isinstance(given, list) else [given]:
            self(message)

    async def awaited(self, message: Any) -> None:
        self(message)

    @property
    def seconds(self) -> float:
        return (self._times[-1] - self._times[0]) / self._count


def work_off(url: str, consumer: str, count: int, run: Callable[[Consumer, Until], int]) -> float:
    """Seconds per message."""
    until = Until(count)
    worker = Consumer(url, "worker", consumer)
    until.stop = worker.stop
    assert run(worker, until) >= count
    return until.seconds


def threads(url: str, consumer: str, count: int) -> float:
    return work_off(url, consumer, count, lambda w, until: w.run(until, concurrency=SLOTS))


def tasks(url: str, consumer: str, count: int) -> float:
    return work_off(url, consumer, count, lambda w, until: w.run(until.awaited, concurrency=SLOTS))


def processes(url: str, consumer: str, count: int) -> float:
    return work_off(
        url, consumer, count, lambda w, until: w.run(nothing, processes=2, on_success=until)
    )


def transactional(url: str, consumer: str, count: int) -> float:
    """For a part of them: each is a transaction. The others are skipped."""
    part = count // 10
    taken = work_off(
        url, consumer, part, lambda w, until: w.run(until, concurrency=SLOTS, transactional=True)
    )
    skip(url, consumer)
    return taken


def singly(url: str, consumer: str, count: int) -> float:
    """Claim a message, acknowledge it with the next: as a simple loop does, in threads."""
    part = count // 10 // SLOTS

    def work() -> None:
        with spark_pgqueue.connect(url) as queue:
            claim = None
            for _ in range(part):
                claim = queue.receive("worker", consumer, ack=claim)

    crew = [threading.Thread(target=work) for _ in range(SLOTS)]
    began = time.perf_counter()
    for each in crew:
        each.start()
    for each in crew:
        each.join()
    taken = (time.perf_counter() - began) / (part * SLOTS)
    skip(url, consumer)
    return taken


def skip(url: str, consumer: str) -> None:
    with spark_pgqueue.connect(url) as queue:
        queue.seek("worker", consumer, "latest")


def nothing(message: Any) -> None:
    """In a process."""


COSTS: dict[str, dict[str, Any]] = {
    "1 thread, nothing ahead": {"prefetch": 0},
    "4 threads, nothing ahead": {"prefetch": 0, "concurrency": SLOTS},
    "1 thread, batches of 10": {"batch": 10},
    "4 threads": {"concurrency": SLOTS},
}
"""Options of workers whose calls are counted."""


def costs(bench: Bench, conn: psycopg.Connection) -> None:
    """The calls that a worker makes for a message, and what the server works for it."""
    count = 1_000 if bench.quick else 5_000
    found: dict[str, dict[str, tuple[float, str]]] = {"calls": {}, "the server's CPU": {}}
    cpu = ServerCpu(conn)
    for name, options in COSTS.items():
        run(conn, "select pgqueue.create_consumer('worker', %s)", (name,))
        conn.execute(SEND.format(count=count).encode())
        calls, worked = transactions(conn), cpu.seconds()

        def work(worker: Consumer, until: Until, options: dict[str, Any] = options) -> int:
            return worker.run(until.each, **options)

        work_off(bench.url, name, count, work)
        worked = between(worked, cpu.seconds())
        found["calls"][name] = (transactions(conn) - calls) / count, "calls"
        if worked is not None:
            found["the server's CPU"][name] = worked / count * 1e6, "us"
    for what, figures in found.items():
        for name, (value, unit) in figures.items():
            bench.report.add(Line(f"a worker: {what} for a message", name, value, unit))


def transactions(conn: psycopg.Connection) -> int:
    """The transactions so far, once the sessions of workers have told theirs."""
    others = "select from pg_stat_activity where datname = current_database() and pid <> %s"
    while run(conn, others, (conn.info.backend_pid,)):
        time.sleep(0.01)
    sql = "select xact_commit + xact_rollback from pg_stat_database where datname = %s"
    return run(conn, sql, (conn.info.dbname,))[0][0]


def kills(bench: Bench, conn: psycopg.Connection) -> None:
    """kill -9 of a worker at full speed: what it had handled, and nobody knows."""
    create = "select pgqueue.create_consumer('worker', 'killed', p_settings => %s)"
    run(conn, create, (json.dumps(AT_ONCE),))
    most, path = 0, Path(bench.home) / "handled"
    for _ in range(3 if bench.quick else 10):
        conn.execute(SEND.format(count=5_000).encode())
        path.unlink(missing_ok=True)
        process = get_context("spawn").Process(target=write_down, args=(bench.url, str(path)))
        process.start()
        while not path.exists() or path.stat().st_size < 8 * 1_000:
            time.sleep(0.001)
        process.kill()
        process.join()
        data = path.read_bytes()
        handled = {int.from_bytes(data[i : i + 8], "big") for i in range(0, len(data) - 7, 8)}
        held = run(
            conn,
            "select seq from pgqueue.message_states"
            " where consumer = 'killed' and state = 'claimed'",
        )
        most = max(most, len(handled & {seq for (seq,) in held}))
        skip(bench.url, "killed")
    bench.report.add(
        Line("a worker", "handled and not settled when it was killed, at most", most, "messages")
    )


def write_down(url: str, path: str) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def handle(message: Any) -> None:
        os.write(file, message.seq.to_bytes(8, "big"))

    Consumer(url, "worker", "killed").run(handle, concurrency=SLOTS)
