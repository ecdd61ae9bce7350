"""`python -m tests.benchmarks.scale`: how costs grow, as tables and as figures for the model.

    python -m tests.benchmarks.scale [streams|consumers|keys|backlog|connections|serial|spark ...]
    python -m tests.benchmarks.scale --quick    small sizes, in minutes
    python -m tests.benchmarks.scale.model      what 64 cores carry: an estimate

Each dimension has a server of its own, which ends with it.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from spark_pgqueue import embedded
from spark_pgqueue.postgres import connection, schema
from tests.benchmarks.harness import SETTINGS
from tests.benchmarks.scale.backlog import backlog
from tests.benchmarks.scale.connections import connections
from tests.benchmarks.scale.consumers import consumers
from tests.benchmarks.scale.figures import MEASURED, Figures
from tests.benchmarks.scale.keys import keys
from tests.benchmarks.scale.serial import serial
from tests.benchmarks.scale.spark import spark
from tests.benchmarks.scale.streams import streams

DIMENSIONS: dict[str, Callable[[str, Figures], None]] = {
    each.__name__: each for each in (streams, consumers, keys, backlog, connections, serial, spark)
}
NAMES = ", ".join(DIMENSIONS)
ROOM = {"max_connections": 600, "max_wal_size": "2GB"}


def main(
    only: Annotated[list[str] | None, typer.Argument(help=f"Some of {NAMES}.")] = None,
    quick: Annotated[bool, typer.Option(help="Small sizes.")] = False,
    huge: Annotated[bool, typer.Option(help="A backlog of 100 million, too.")] = False,
    json: Annotated[Path | None, typer.Option(help="Where the figures are kept.")] = None,
) -> None:
    """Measure how the cost of each operation grows."""
    if unknown := set(only or ()) - set(DIMENSIONS):
        raise typer.BadParameter(f"{', '.join(unknown)}: there are {NAMES}")
    path = json or (Path("bench-results/scale.json") if quick else MEASURED)
    path.parent.mkdir(exist_ok=True)
    for name in only or DIMENSIONS:
        figures = Figures(quick, huge)
        began = time.monotonic()
        home = Path(tempfile.mkdtemp(prefix="pgqueue-scale-"))
        try:
            with embedded.start(home / "postgres", settings={**SETTINGS, **ROOM}) as server:
                with connection.connect(server.url) as conn:
                    schema.install(conn)
                DIMENSIONS[name](server.url, figures)
        finally:
            shutil.rmtree(home, ignore_errors=True)
        for dimension in figures.series:
            figures.console.print(figures.table(dimension))
        figures.keep(path)
        figures.console.print(f"{name}: {time.monotonic() - began:.0f} s, kept in {path}")


if __name__ == "__main__":
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(main)
    app()
