"""Run cases through all their schedules, and say how many there were."""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import psycopg

from spark_pgqueue.postgres import connection
from tests.explore.calls import HELPERS
from tests.explore.cases import LEASES, Case
from tests.explore.instrument import instrument
from tests.explore.mutants import Mutant
from tests.explore.scheduler import Event, Scheduler
from tests.explore.search import Search
from tests.sql.limits import shrink

SESSIONS = 4  # three, and the one of a retention


@dataclass
class Result:
    """What came of a case."""

    case: Case
    schedules: int
    whole: bool  # no schedule was left out that could differ
    seconds: float
    diverged: int
    failure: BaseException | None = None
    trace: list[Event] | None = None

    def __str__(self) -> str:
        found = f"{self.case}: {self.schedules}{'' if self.whole else '+'} schedules"
        return found + (f"\n  {self.failure}\n{self.steps()}" if self.failure else "")

    def steps(self) -> str:
        """The schedule that failed."""
        return "\n".join(f"    {event.actor} {event.what}" for event in self.trace or [])


class Explorer:
    """A database whose functions have pauses, and sessions of it.

    Args:
        url: the database.
        mutant: a fault that is planted there.
        limits: what each limit of the queue is; None: 2 or 3.
    """

    def __init__(self, url: str, mutant: Mutant | None = None, limits: int | None = None):
        self.conn = connection.connect(url)
        shrink(self.conn, limits)
        if mutant is not None:
            mutant.plant(self.conn)
        steps, footprints = instrument(self.conn)
        self.conn.execute(HELPERS.encode())
        self.folder = tempfile.TemporaryDirectory()
        Path(self.folder.name).chmod(0o777)
        self.scheduler = Scheduler(url, Path(self.folder.name), SESSIONS, steps, footprints)
        self.names = (f"s{n}" for n in itertools.count())

    def close(self) -> None:
        self.scheduler.close()
        self.conn.close()
        self.folder.cleanup()

    def clear(self, case: Case) -> None:
        """Drop what a case made, also after a schedule that failed halfway."""
        self.scheduler.stop()
        self.conn.rollback()
        case.clean()

    def explore(self, case: Case, most: int) -> Result:
        """Try the schedules of a case, at most so many; ends with the first that fails."""
        search, began = Search(most), time.monotonic()
        result = Result(case, 0, True, 0.0, 0)
        while not search.over:
            trace: list[Event] = []
            try:
                case.prepare(self.conn, next(self.names))
                trace += self.scheduler.run(
                    case.programs(), search.choose, case.ledger.outcome, case.check
                )
                case.check_end()
            except (AssertionError, psycopg.Error) as error:
                result.failure, result.trace = error, trace
                self.clear(case)  # what this left is not to harm the next case
                break
            case.clean()
            self.conn.execute("select pgqueue.maintain()")  # drops the tables
            search.learn(trace)
        result.schedules, result.whole = search.tried, search.whole
        result.seconds, result.diverged = time.monotonic() - began, search.diverged
        return result


def all_cases(
    calls: Iterable[str], beside: Iterable[str], orderings: Iterable[str], sessions: int = 2
) -> list[Case]:
    """Each pair of calls, or as many, with each ordering, beside each thing that they can meet."""
    sets = list(itertools.combinations_with_replacement(calls, sessions))
    cases = [Case(one, ordering, more) for one in sets for ordering in orderings for more in beside]
    return [case for case in cases if case.beside != "expiry" or case.has(*LEASES)]


def summary(results: list[Result]) -> str:
    """How many schedules there were."""
    schedules = sum(result.schedules for result in results)
    seconds = sum(result.seconds for result in results)
    cut = sum(not result.whole for result in results)
    failed = sum(result.failure is not None for result in results)
    return (
        f"{len(results)} cases, {schedules} schedules in {seconds:.0f} s;"
        f" {cut} cases were cut short; {failed} failed"
    )
