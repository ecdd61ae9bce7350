"""Measuring two sides in turn, and what becomes of the figures."""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import psycopg
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

K = TypeVar("K")

# Commits do not wait for the disk: both sides would wait equally, and that hides the rest. But all
# is written there. Vacuum runs between measurements, never meanwhile; checkpoints are rare.
SETTINGS: dict[str, str | int] = {
    "autovacuum": "off",
    "checkpoint_timeout": "30min",
    "fsync": "off",
    "jit": "off",
    "max_wal_size": "8GB",
    "shared_buffers": "1GB",
}


@dataclass(frozen=True)
class Target:
    """What a figure must reach: at least, or at most, a value."""

    least: float | None = None
    most: float | None = None

    def __str__(self) -> str:
        return f"≥ {self.least:g}" if self.least is not None else f"≤ {self.most:g}"

    def is_met(self, value: float) -> bool:
        if self.least is not None:
            return value >= self.least
        return self.most is not None and value <= self.most


@dataclass(frozen=True)
class Line:
    """One figure.

    Attributes:
        group: the heading under which it stands; says what is compared.
        name: what was measured.
        value: the figure that the target is about.
        unit: of the value; "x" for a ratio of speeds, more than 1 where the queue is faster.
        target: what it must reach; None when it is only stated.
        ours, theirs: what a ratio was computed from.
        measure: the unit of these.
    """

    group: str
    name: str
    value: float
    unit: str = "x"
    target: Target | None = None
    ours: float | None = None
    theirs: float | None = None
    measure: str = ""

    @property
    def ok(self) -> bool | None:
        return None if self.target is None else self.target.is_met(self.value)


@dataclass
class Report:
    """The figures of a run; shown as they come, and together at the end."""

    quick: bool
    console: Console = field(default_factory=lambda: Console(width=_width()))
    lines: list[Line] = field(default_factory=list)
    began: float = field(default_factory=time.time)

    def add(self, line: Line) -> None:
        if not self.lines or self.lines[-1].group != line.group:
            self.console.print(f"[bold]{line.group}[/]")
        self.lines.append(line)
        mark = {None: " ", True: "[green]ok[/]", False: "[red]NO[/]"}[line.ok]
        self.console.print(f"  {line.name}: {_number(line.value)} {line.unit} {mark}")

    def ratio(
        self,
        group: str,
        name: str,
        ours: list[float],
        theirs: list[float],
        measure: str,
        *,
        target: Target | None = None,
    ) -> None:
        """Add how many times as fast as theirs ours is, from what each took in the same rounds.

        Args:
            ours, theirs: seconds per round, for the same work; shown in `measure`.
            measure: "ms" or "us" for a time, or "<n>/s" for the speed when a round is n things.
        """
        a, b = low(ours), low(theirs)
        value = b / a
        if measure in _PER_SECOND:
            a, b = a * _PER_SECOND[measure], b * _PER_SECOND[measure]
        else:
            count, measure = int(measure.removesuffix("/s")), "/s"
            a, b = count / a, count / b
        self.add(Line(group, name, value, "x", target, a, b, measure))

    def table(self) -> Table:
        table = Table(title="spark-pgqueue benchmark" + (" (quick)" if self.quick else ""))
        table.add_column("measured", overflow="fold")
        for name in ("spark-pgqueue", "the other", "result", "target"):
            table.add_column(name, justify="right", no_wrap=True)
        group = None
        for line in self.lines:
            if line.group != group:
                group = line.group
                table.add_section()
                table.add_row(f"[bold]{group}[/]")
            mark = {None: "", True: "[green]", False: "[red]"}[line.ok]
            table.add_row(
                f"  {line.name}",
                *(_with(value, line.measure) for value in (line.ours, line.theirs)),
                mark + _with(line.value, line.unit),
                mark + str(line.target or ""),
            )
        return table

    def write(self, path: Path, postgres: str) -> None:
        document: dict[str, Any] = {
            "quick": self.quick,
            "began": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self.began)),
            "seconds": round(time.time() - self.began),
            "machine": {
                "cpus": os.cpu_count(),
                "system": platform.platform(),
                "python": platform.python_version(),
                "postgres": postgres,
                "settings": SETTINGS,
            },
            "lines": [
                {**asdict(line), "target": str(line.target) if line.target else None, "ok": line.ok}
                for line in self.lines
            ],
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n")


def _width() -> int | None:
    """Wide enough for the table where there is no terminal; else the terminal's."""
    return None if Console().is_terminal else 110


_PER_SECOND = {"s": 1, "ms": 1e3, "us": 1e6}


@dataclass(frozen=True)
class Bench:
    """What every benchmark gets."""

    home: Path
    url: str
    report: Report

    @property
    def quick(self) -> bool:
        """Whether to do less of everything."""
        return self.report.quick

    def connect(self) -> psycopg.Connection:
        """A connection that prepares every statement, so that neither side pays for parsing."""
        conn = psycopg.connect(self.url, autocommit=True)
        conn.prepare_threshold = 0
        return conn

    @cached_property
    def spark(self) -> SparkSession:
        """A Spark session, started when the first benchmark needs it."""
        from tests.benchmarks.spark import session

        return session(self.home)


def timed(work: Callable[[], Any]) -> float:
    """How many seconds `work` takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def low(seconds: list[float]) -> float:
    """The lower quartile: what others do on the machine makes a round slower and never faster."""
    return statistics.quantiles(seconds, n=4, method="inclusive")[0] if seconds[1:] else seconds[0]


def alternate(
    sides: Mapping[K, Callable[[], float]], rounds: int, warm_up: int = 1
) -> dict[K, list[float]]:
    """Measure sides in turn, A B A B ..., because the machine is never the same twice.

    Args:
        sides: by name, what does the work once and returns the seconds that it took.
        rounds: how often, after `warm_up` times that are thrown away.
    """
    taken: dict[K, list[float]] = {name: [] for name in sides}
    for _ in range(warm_up + rounds):
        for name, side in sides.items():
            taken[name].append(side())
    return {name: seconds[warm_up:] for name, seconds in taken.items()}


def run(conn: psycopg.Connection, sql: str, parameters: Any = None) -> list[tuple]:
    """The rows of a statement; of several statements, when there are no parameters."""
    cursor = conn.execute(sql.encode(), parameters, prepare=None if parameters else False)
    return cursor.fetchall() if cursor.description else []


def _with(value: float | None, unit: str) -> str:
    return "" if value is None else f"{_number(value)} {unit}".replace(" /s", "/s")


def _number(value: float) -> str:
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"
