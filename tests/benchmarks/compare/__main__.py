"""`python -m tests.benchmarks.compare`: all sides in turn; a table, JSON, a picture, the page."""

from __future__ import annotations

import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from spark_pgqueue import embedded
from tests.benchmarks.compare import peers as systems
from tests.benchmarks.compare import report
from tests.benchmarks.compare.backlog import backlog
from tests.benchmarks.compare.compare import FULL, QUICK, Compare, Effort
from tests.benchmarks.compare.crew import Crew, connect
from tests.benchmarks.compare.held import held
from tests.benchmarks.compare.keys import keys
from tests.benchmarks.compare.others import others
from tests.benchmarks.compare.rate import rate
from tests.benchmarks.compare.report import Report
from tests.benchmarks.compare.send import send
from tests.benchmarks.compare.steady import steady
from tests.benchmarks.compare.wake import wake
from tests.benchmarks.harness import run, timed
from tests.benchmarks.server_cpu import ServerCpu
from tests.docs import figures

SCENARIOS: dict[str, Callable[[Compare], None]] = {
    each.__name__: each for each in (send, backlog, steady, rate, held, keys, wake, others)
}
ROOT = Path(__file__).parents[3]
PICTURE = ROOT / "tests/benchmarks/compare.svg"
OUT = ROOT / "build/compare"

# As it is installed: commits wait for the disk, and autovacuum runs. In the laboratory no commit
# waits, since all sides wait equally and that hides the rest, and vacuum runs between measurements.
LABORATORY: dict[str, str | int] = {
    "autovacuum": "off",
    "checkpoint_timeout": "30min",
    "fsync": "off",
    "jit": "off",
    "max_wal_size": "8GB",
    "shared_buffers": "1GB",
}
SHOWN = ("shared_buffers", "max_wal_size", "synchronous_commit", "fsync", "autovacuum")
"""Settings that a report names."""


WHERE = "An empty database of a superuser, in place of a server made here."
APART = "Neither wait for the disk nor vacuum during a measurement."
PEER = f"Beside these alone, of {', '.join(systems.NAMES)}."
SQL = "Where the SQL of a peer is that no package has: pgque=PATH."
KEEP = "Measure nothing: keep the figures of the last run, and write them into the pages."


def main(
    scenario: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(SCENARIOS)}.")] = None,
    quick: Annotated[bool, typer.Option(help="Less of everything: a minute or two.")] = False,
    url: Annotated[str | None, typer.Option(help=WHERE)] = None,
    laboratory: Annotated[bool, typer.Option(help=APART)] = False,
    out: Annotated[Path, typer.Option(help="Folder of JSON and picture.")] = OUT,
    keep: Annotated[bool, typer.Option(help=KEEP)] = False,
    peer: Annotated[list[str] | None, typer.Option(help=PEER)] = None,
    sql: Annotated[list[str] | None, typer.Option(help=SQL)] = None,
) -> None:
    """Measure spark-pgqueue beside other queues, a row per message, and plain inserts."""
    check_names(scenario, SCENARIOS)
    check_names(peer, systems.NAMES)
    paths = paths_of(sql or [])
    if keep:
        shutil.copy(out / "compare.json", figures.KEPT)
        report.draw(figures.kept(), PICTURE)
        figures.write()
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # the server is to stop too
    found = Report()
    with database(url, laboratory) as where:
        effort = QUICK if quick else FULL
        try:
            compare(where, scenario or list(SCENARIOS), effort, found, peer or systems.NAMES, paths)
        finally:
            found.write(out / "compare.json")  # also what a run measured before it failed
    for table in found.tables():
        found.console.print(table)
    report.draw(found, out / "compare.svg")
    found.console.print(f"written to {out}/compare.json and compare.svg")


def check_names(names: Collection[str] | None, known: Collection[str]) -> None:
    """Refuse names that are not known."""
    if unknown := set(names or ()) - set(known):
        raise typer.BadParameter(f"{', '.join(unknown)}: there are {', '.join(known)}")


def paths_of(values: Sequence[str]) -> dict[str, Path]:
    """Files by the names of peers."""
    paths = {name: Path(path) for name, _, path in (each.partition("=") for each in values)}
    check_names(paths, systems.BY_SQL)
    for path in paths.values():
        if not path.is_file():
            raise typer.BadParameter(f"there is no file {path}")
    return paths


def compare(
    url: str,
    scenarios: Sequence[str],
    effort: Effort,
    figures: Report,
    peers: Sequence[str] = systems.NAMES,
    sql: Mapping[str, Path] | None = None,
) -> None:
    """Run scenarios.

    Args:
        url: of the database.
        scenarios: their names.
        effort: how much to do.
        figures: where figures go.
        peers: names of other systems.
        sql: the SQL of those that no package has.

    Raises:
        RuntimeError, CountError: a worker failed, or messages were lost or came twice.
    """
    found = systems.find(peers, sql)
    for sentence in found.missing:
        figures.console.print(f"[yellow]{sentence}[/]")
    with connect(url) as conn, Crew(url, ServerCpu(conn)) as crew:
        ((postgres,),) = run(conn, "show server_version")
        settings = {name: run(conn, f"show {name}")[0][0] for name in SHOWN}
        figures.about = report.machine(postgres.split()[0], settings, effort.name, found.versions)
        it = Compare(url, conn, crew, effort, figures, found.has_pgmq, found.sides)
        for name in scenarios:
            took = timed(lambda name=name: SCENARIOS[name](it))
            figures.console.print(f"[dim]{name}: {took:.0f} s[/]")


@contextmanager
def database(url: str | None, laboratory: bool) -> Iterator[str]:
    """The given one, or that of an embedded server."""
    if url is not None:
        yield url
        return
    home = Path(tempfile.mkdtemp(prefix="pgqueue-compare-"))
    try:
        settings = LABORATORY if laboratory else {}
        with embedded.start(home / "postgres", settings=settings) as server:
            yield server.url
    finally:
        shutil.rmtree(home, ignore_errors=True)


if __name__ == "__main__":
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(main)
    app()
