"""`python -m tests.benchmarks.published planetscale|pgque|page`."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from tests.benchmarks.compare import pgmq
from tests.benchmarks.compare.__main__ import ROOT, WHERE, database
from tests.benchmarks.compare.pgmq import Pgmq
from tests.benchmarks.compare.rows import Rows
from tests.benchmarks.compare.sides import Ours, Side
from tests.benchmarks.published import report
from tests.benchmarks.published.jobs import Jobs
from tests.benchmarks.published.measure import measure
from tests.benchmarks.published.setups import PGQUE, PLANETSCALE, SETUPS, Setup
from tests.docs.figures import PAGE

OUT = ROOT / "build/published"
SIDES: dict[str, Side] = {
    "pgqueue": Ours(),
    "one-call": Ours("one call", one_call=True),
    "rows": Rows(),
    "pgmq": Pgmq(),
}
JOBS = "jobs"
"""The plain queue of the publication, which differs between them."""

USUAL = ("pgqueue", "rows", "pgmq", JOBS)

app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)
Minutes = Annotated[int | None, typer.Option(min=1, help="How many; those of the publication.")]
Chosen = Annotated[list[str] | None, typer.Option(help=f"Of {', '.join([*SIDES, JOBS])}.")]
Url = Annotated[str | None, typer.Option(help=WHERE)]
Out = Annotated[Path, typer.Option(help="Folder of the JSON files.")]
Free = Annotated[bool, typer.Option("--free", help="Nothing holds the horizon of vacuum.")]


@app.command()
def planetscale(
    minutes: Minutes = None,
    side: Chosen = None,
    url: Url = None,
    out: Out = OUT,
    free: Free = False,
) -> None:
    """800 messages a second, 8 workers, three overlapping queries of 120 s: 15 minutes a side."""
    each_side(PLANETSCALE, minutes, side, url, out, free)


@app.command()
def pgque(
    minutes: Minutes = None,
    side: Chosen = None,
    url: Url = None,
    out: Out = OUT,
    free: Free = False,
) -> None:
    """800 messages a second, 4 workers, an idle transaction: 3 minutes a side."""
    each_side(PGQUE, minutes, side, url, out, free)


@app.command()
def page(folder: Out = OUT, markdown: bool = False) -> None:
    """Put the tables of what was measured into the page of figures, or print them."""
    if not markdown:
        report.page(PAGE, folder)
        return
    for setup in SETUPS.values():
        print(report.markdown(setup, report.read(folder, setup.name)), end="\n\n")


def each_side(
    setup: Setup,
    minutes: int | None,
    chosen: list[str] | None,
    url: str | None,
    out: Path,
    free: bool,
) -> None:
    """Run a set-up with each side, each in a server of its own unless a database is given."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # the server is to stop too
    sides = {**SIDES, JOBS: Jobs(by_update=setup.by_update)}
    if unknown := set(chosen or ()) - set(sides):
        raise typer.BadParameter(f"{', '.join(unknown)}: there are {', '.join(sides)}")
    console = Console(width=None if Console().is_terminal else 150)
    for name in chosen or USUAL:
        if name == "pgmq" and not pgmq.is_installed():
            console.print("[yellow]pgmq is left out: pip install pgmq[/]")
            continue
        with database(url, laboratory=False) as where:
            found = measure(where, setup, sides[name], minutes or setup.minutes, held=not free)
        path = report.write(out, found)
        console.print(report.table(found), f"written to {path}")


if __name__ == "__main__":
    app()
