"""`python -m tests.benchmarks.hour`: an hour with autovacuum; ends with 1 if anything grows."""

from __future__ import annotations

import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from spark_pgqueue import embedded
from tests.benchmarks.hour import report
from tests.benchmarks.hour.plan import Plan
from tests.benchmarks.hour.run import measure, prepare
from tests.benchmarks.hour.sides import SIDES

OUT = Path("build/hour")
PLAN = "plan.json"


def main(
    minutes: Annotated[float, typer.Option(min=0.1, help="How long to send.")] = 60,
    side: Annotated[str, typer.Option(help=f"Of {', '.join(SIDES)}.")] = "pgqueue",
    rate: Annotated[int, typer.Option(min=1, help="Messages a second.")] = 1000,
    out: Annotated[Path, typer.Option(help="Folder of figures; the side's is in it.")] = OUT,
    spark: Annotated[bool, typer.Option(help="A Spark query, or a worker in its place.")] = True,
    draw: Annotated[
        list[Path] | None, typer.Option(help="Measure nothing: draw these folders of sides.")
    ] = None,
    others: Annotated[list[Path] | None, typer.Argument(help="More folders to draw.")] = None,
    picture: Annotated[Path | None, typer.Option(help="Of the picture; in `out`.")] = None,
) -> None:
    """Send, receive, retry, hold a snapshot; then say what grows, and what was lost."""
    if draw:
        report.draw([*draw, *(others or [])], picture or out / "hour.svg")
        return
    if side not in SIDES:
        raise typer.BadParameter(f"{side}: there are {', '.join(SIDES)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # the server is to stop too
    folder = out / side
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    run_side(folder.resolve(), minutes, side, rate, spark=spark and side == "pgqueue")
    ok = report.tell(folder)
    report.draw([folder], folder / "hour.svg")
    sys.exit(0 if ok else 1)


def run_side(folder: Path, minutes: float, side: str, rate: int, *, spark: bool) -> None:
    """Measure a side, with a server of its own, and put its figures into the folder."""
    home = Path(tempfile.mkdtemp(prefix="pgqueue-hour-"))
    try:
        shared = home / "shared"
        shared.mkdir()
        naptime = Plan(side, "", "", minutes, rate, 0).naptime
        settings = {"autovacuum_naptime": f"{naptime}s"} if naptime != 60 else {}
        with embedded.start(home / "postgres", settings=settings) as server:
            plan = Plan(side, server.url, str(shared), minutes, rate, 0.0, spark)
            prepare(plan)
            plan.write(folder / PLAN)
            measure(plan, folder / PLAN)
        report.summarize(plan, shared, folder)
    finally:
        shutil.rmtree(home, ignore_errors=True)


if __name__ == "__main__":
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(main)
    app()
