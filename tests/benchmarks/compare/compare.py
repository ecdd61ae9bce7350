"""What every scenario gets: the database, workers, and how much to do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import psycopg

from tests.benchmarks.compare.counts import CountError, Log, check, check_order, drain
from tests.benchmarks.compare.crew import Crew, Job
from tests.benchmarks.compare.report import Case, Report
from tests.benchmarks.compare.sides import CHUNK, Side, Store
from tests.benchmarks.harness import run

KEYS = 5000
"""How many keys messages have where that does not matter."""


@dataclass(frozen=True)
class Effort:
    """How much to do.

    Attributes:
        name: of this effort.
        rounds: how often each side has its turn.
        seconds: a turn.
        share: of the messages that a turn of a second has before it.
        held: seconds beside a held snapshot.
        rated: seconds of messages at a fixed rate.
        wakes: how often a waiting worker is woken.
        thorough: all cases; else only some of those that differ in a number.
    """

    name: str
    rounds: int
    seconds: float
    share: float
    held: float
    rated: float
    wakes: int
    thorough: bool = True

    def some(self, values: Sequence) -> Sequence:
        """All values, or the first and the last."""
        return values if self.thorough or len(values) < 3 else (values[0], values[-1])

    def messages(self, count: int) -> int:
        return max(int(count * self.share), 20)


FULL = Effort("full", rounds=3, seconds=0.6, share=1, held=20, rated=10, wakes=200)
QUICK = Effort("quick", rounds=1, seconds=0.2, share=0.3, held=3, rated=3, wakes=10, thorough=False)


@dataclass
class Compare:
    """A run.

    Attributes:
        url: of the database.
        conn: for what is not measured.
        crew: the workers.
        effort: how much to do.
        report: where figures go.
        has_pgmq: whether pgmq is there.
        peers: the sides of other systems that are there, for `others`.
    """

    url: str
    conn: psycopg.Connection
    crew: Crew
    effort: Effort
    report: Report
    has_pgmq: bool
    peers: Sequence[Side] = ()
    _cpu: dict[str, list[float]] = field(default_factory=dict)

    def sides(self, *sides: Side) -> list[Side]:
        """Those of the sides that are there."""
        return [side for side in sides if self.has_pgmq or side.schema != "pgmq"]

    @contextmanager
    def queues(
        self, sides: Iterable[Store], consumers: int = 1, *, by_key: bool = False
    ) -> Iterator[None]:
        """With a queue of each side, empty."""
        made: list[Store] = []
        for side in sides:
            side.install(self.conn)
            side.create(self.conn, consumers, by_key=by_key)
            made.append(side)
        yield  # after an error nothing is dropped: others may be at work, and the run is over
        for side in made:
            side.drop(self.conn)

    def fill(self, side: Side, count: int, keys: Sequence[str] | None = None) -> None:
        """Send messages 0 to count - 1, by the server itself, and vacuum."""
        keys = keys or [f"key {number % KEYS}" for number in range(count)]
        for first in range(0, count, CHUNK):
            side.fill(self.conn, first, list(keys[first : min(first + CHUNK, count)]))
        self.vacuum(side)

    def vacuum(self, side: Store) -> None:
        """Vacuum and analyze all tables of a side."""
        run(self.conn, f"vacuum (analyze) {', '.join(self.tables(side))}")

    def tables(self, side: Store) -> list[str]:
        sql = "select oid::regclass::text from pg_class where relkind = 'r' and relnamespace = %s"
        return [row[0] for row in run(self.conn, sql + "::regnamespace", (side.schema,))]

    def work(self, side: Side, jobs: list[Job], count: int, keys: list[str] | None = None) -> float:
        """Messages per second of workers that consume messages 0 to count - 1; all are counted."""
        logs: list[Log] = self.crew.run(jobs)
        self.note_cpu(side, sum(log.messages for log in logs), self.crew.worked)
        self.settle(side, range(count), logs)
        if keys is not None:
            check_order(side, logs, keys)
        return sum(log.speed for log in logs)

    def prepare(self, turns: Iterable[Callable[[], object]]) -> None:
        """Let turns pass that are not measured.

        A session plans what it does for the first time: 12 ms for its first claims, as many as 100
        claims take.
        """
        for turn in turns:
            turn()
        self.forget_cpu()

    def forget_cpu(self) -> None:
        """Leave out what was noted of the server's CPU since the last report."""
        self._cpu = {}

    def note_cpu(self, side: Store, messages: int, seconds: float | None) -> None:
        """Note the seconds of CPU that the server worked for messages, for the next `case`."""
        if seconds is not None and messages:
            self._cpu.setdefault(side.name, []).append(max(seconds, 0.0) / messages * 1e6)

    def settle(self, side: Store, sent: Iterable[int], logs: list[Log], consumer: int = 0) -> None:
        """Empty a queue, and see that all that was sent was received and acknowledged once."""
        check(side, self.conn, sent, [*logs, drain(side, self.conn, consumer)], consumer)

    def leave(self, side: Store, count: int, consumer: int) -> None:
        """See that a consumer has so many messages, and leave them."""
        if (left := side.left(self.conn, consumer)) != count:
            raise CountError(f"{side.name}: consumer {consumer} has {left} of {count} messages")

    def case(
        self,
        scenario: str,
        line: str,
        point: str,
        unit: str,
        values: dict[str, list[float]],
        *,
        higher: bool = True,
    ) -> None:
        """Report figures, and the server's CPU that was noted since the last report."""
        self.report.add(Case(scenario, line, point, unit, values, higher, self._cpu))
        self._cpu = {}
