"""The set-ups, what holds the horizon of vacuum in each, and what their authors measured."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field

import psycopg

from tests.benchmarks.compare.crew import connect
from tests.benchmarks.harness import run

Hold = Callable[[str], AbstractContextManager[None]]
"""Holds the horizon of vacuum in the database of a url."""


@dataclass(frozen=True)
class Published:
    """Figures of others.

    Attributes:
        what: they are of.
        figures: by the name of a measure of `report.MEASURES`, as they were published.
    """

    what: str
    figures: dict[str, str]


@dataclass(frozen=True)
class Setup:
    """A set-up.

    Attributes:
        name: of the set-up.
        link: where it was published.
        date: when.
        rate: messages a second, of all producers.
        producers: how many.
        workers: how many.
        size: messages of a claim.
        work: seconds of work for a claim.
        minutes: how long.
        hold: what holds the horizon.
        held: the same in words.
        by_update: how the plain queue claims.
        bystanders: clients that read an unrelated table.
        settings: of the server, on top of ours.
        theirs: what was published.
    """

    name: str
    link: str
    date: str
    rate: float
    producers: int
    workers: int
    size: int
    work: float
    minutes: float
    hold: Hold
    held: str
    by_update: bool
    bystanders: int = 0
    settings: dict[str, str] = field(default_factory=dict)
    theirs: tuple[Published, ...] = ()


def overlapping(url: str, queries: int = 3, seconds: float = 120) -> AbstractContextManager[None]:
    """Queries one after the other in several sessions, begun so that they overlap evenly.

    They sleep, as the machine has two cores: what is shown is the horizon, not the load.
    """
    return _Overlapping(url, queries, seconds)


class _Overlapping(AbstractContextManager):
    def __init__(self, url: str, queries: int, seconds: float):
        self._seconds = seconds
        self._over = threading.Event()
        self._sessions = [connect(url) for _ in range(queries)]
        self._began = time.monotonic()
        self._threads = [
            threading.Thread(target=self._query, args=(session, place * seconds / queries))
            for place, session in enumerate(self._sessions)
        ]

    def _query(self, session: psycopg.Connection, later: float) -> None:
        # All begin at once, so that the horizon is held from the beginning; the first query of a
        # later session is shorter by its place.
        seconds = self._seconds - later
        with suppress(psycopg.errors.QueryCanceled):
            while not self._over.is_set():
                session.execute("select count(*), pg_sleep(%s) from pg_class", (seconds,))
                seconds = self._seconds

    def __enter__(self) -> None:
        for thread in self._threads:
            thread.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for session, thread in zip(self._sessions, self._threads, strict=True):
            while thread.is_alive():  # it may have been between two queries
                session.cancel_safe()
                thread.join(0.1)
            session.close()


@contextmanager
def idle_in_transaction(url: str) -> Iterator[None]:
    """A session that took a snapshot for all its transaction, and does nothing."""
    with connect(url) as other:
        run(other, "begin isolation level repeatable read")
        run(other, "select count(*) from pg_class")
        yield
        run(other, "rollback")


PLANETSCALE = Setup(
    name="planetscale",
    link="https://planetscale.com/blog/keeping-a-postgres-queue-healthy",
    date="2026-04-11",
    rate=800,
    producers=4,
    workers=8,
    size=10,
    work=0.01,
    minutes=15,
    hold=overlapping,
    held="three overlapping queries of 120 s",
    by_update=False,
    theirs=(
        Published(
            "plain queue",
            {"backlog": "155,000", "dead": "383,000", "claim_p50": "more than 300"},
        ),
        Published("one query at a time", {"backlog": "0", "dead": "0 to 23,000", "claim_p50": "2"}),
    ),
)

PGQUE = Setup(
    name="pgque",
    link="https://github.com/NikolayS/pgque/blob/main/docs/benchmarks.md",
    date="2026-04-30",
    rate=800,
    producers=4,
    workers=4,
    size=1,
    work=0,
    minutes=3,
    hold=idle_in_transaction,
    held="an idle transaction in repeatable read",
    by_update=True,
    bystanders=2,
    settings={
        "autovacuum_vacuum_scale_factor": "0.005",
        "autovacuum_naptime": "10s",
        "autovacuum_vacuum_cost_limit": "10000",
    },
    theirs=(
        Published(
            "plain queue",
            {"done": "517", "dead": "91,593", "size": "15.1", "bystander": "2.05"},
        ),
        Published("pgque", {"done": "804", "dead": "0", "size": "27.0", "bystander": "1.45"}),
    ),
)

SETUPS = {each.name: each for each in (PLANETSCALE, PGQUE)}
