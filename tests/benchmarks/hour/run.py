"""One run: everything is started, looked at for an hour, drained, and counted."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import psycopg

from spark_pgqueue import Client
from tests.benchmarks.compare.crew import connect
from tests.benchmarks.compare.sides import number_of
from tests.benchmarks.harness import run
from tests.benchmarks.hour.actors import CUSTOMERS
from tests.benchmarks.hour.crew import Crew
from tests.benchmarks.hour.plan import ANY_ORDER, CONSUMERS, KEYS, STREAM, Plan, is_purged
from tests.benchmarks.hour.samples import Sampler
from tests.benchmarks.hour.shared import Shared, total
from tests.benchmarks.hour.sides import SIDES

LINES = "looks.jsonl"
START = 10.0
"""Seconds until all processes wait for messages."""

DRAIN = 300.0
"""Seconds within which all is done after the last message was sent."""


class Snapshot:
    """A transaction that holds a snapshot for some time."""

    def __init__(self, plan: Plan):
        self._plan = plan
        self._conn: psycopg.Connection | None = None

    def is_held(self, at: float) -> bool:
        """Hold it, or not, as it is due; returns whether it is held."""
        since, upto = self._plan.held
        if since <= at < upto and self._conn is None:
            self._conn = connect(self._plan.url)
            run(self._conn, "begin isolation level repeatable read")
            run(self._conn, "select count(*) from pg_class")
        if at >= upto and self._conn is not None and not self._conn.closed:
            self._conn.close()
        return self._conn is not None and not self._conn.closed


class Janitor:
    """Redrives dead letters, and deletes others, once a minute of an hour."""

    def __init__(self, plan: Plan, conn: psycopg.Connection):
        self._is_needed = plan.side == "pgqueue"
        self._client = Client(conn)
        self._dropped = Shared(plan, "janitor").dropped
        self._every, self._next = 60 * plan.share, 0.0

    def look(self, at: float) -> None:
        if not self._is_needed or at < self._next:
            return
        self._next = at + self._every
        dead = [
            (each.seq, number_of(str(each.data)))
            for each in self._client.read_dead(STREAM, ANY_ORDER)
        ]
        purged = [(seq, number) for seq, number in dead if is_purged(number)]
        redriven = [seq for seq, number in dead if not is_purged(number)]
        if purged:
            self._client.purge_dead(STREAM, ANY_ORDER, [seq for seq, _ in purged])
            for _, number in purged:
                self._dropped[number] += 1
        if redriven:
            self._client.redrive(STREAM, ANY_ORDER, redriven)


def prepare(plan: Plan) -> None:
    """Make the queue, and the table of the service that sends."""
    with connect(plan.url) as conn:
        SIDES[plan.side]().create(conn, plan)
        run(conn, CUSTOMERS)
        run(conn, "insert into public.customers select generate_series(0, %s), 0", (KEYS - 1,))


def measure(plan: Plan, path: Path) -> None:
    """Run it.

    Args:
        plan: what to do.
        path: the plan's file; looks and logs go beside it.

    Raises:
        RuntimeError: a process failed.
    """
    with connect(plan.url) as conn, connect(plan.url) as janitors, Crew(plan, path) as crew:
        if plan.side == "pgqueue" and plan.spark:
            crew.start_spark()
        plan = replace(plan, began=time.time() + START)
        plan.write(path)
        crew.start()
        sampler = Sampler(conn, SIDES[plan.side](), path.parent / LINES, crew.pids)
        snapshot, janitor = Snapshot(plan), Janitor(plan, janitors)
        step = 0
        while crew.sending():
            time.sleep(max(0.0, plan.began + step * plan.look_every - time.time()))
            at = time.time() - plan.began
            step = int(at / plan.look_every) + 1
            line = sampler.look(at, held=snapshot.is_held(at))
            janitor.look(at)
            if step % 6 == 1:
                print(f"{at:6.0f} s: backlog {line['backlog']}", flush=True)
        _drain(plan, crew, janitor)
        sampler.look(time.time() - plan.began, held=False)


def _drain(plan: Plan, crew: Crew, janitor: Janitor) -> None:
    """Wait until each message has had its effect, and some more: for those that come twice."""
    end, missing = time.time() + DRAIN, []
    folder = Path(plan.folder)
    sent = np.fromfile(folder / "due", "f8") > 0
    while time.time() < end:
        crew.sending()
        janitor.look(time.time() - plan.began)
        missing = [_missing(folder, consumer, sent) for consumer in CONSUMERS]
        if not any(missing):
            time.sleep(2)
            return
        time.sleep(1)
    print(f"after {DRAIN:.0f} s, not all is done: {missing}")


def _missing(folder: Path, consumer: str, sent: np.ndarray) -> int:
    effects = total(folder, "done", consumer, "u1")
    if consumer == ANY_ORDER:
        effects = effects + np.fromfile(folder / "dropped", "u1")
    return int((sent & (effects == 0)).sum())
