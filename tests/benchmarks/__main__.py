"""`python -m tests.benchmarks`: run the benchmarks, print a table, write JSON."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from spark_pgqueue import embedded
from spark_pgqueue.postgres import connection, schema
from tests.benchmarks.archive import archive
from tests.benchmarks.capture import capture
from tests.benchmarks.claims import claims
from tests.benchmarks.harness import SETTINGS, Bench, Report, timed
from tests.benchmarks.into_tables import into_tables
from tests.benchmarks.positions import positions
from tests.benchmarks.publish import publish
from tests.benchmarks.queries import queries
from tests.benchmarks.reading import reading
from tests.benchmarks.retention import retention
from tests.benchmarks.settings import settings
from tests.benchmarks.sink import sink
from tests.benchmarks.sizes import sizes
from tests.benchmarks.source import source
from tests.benchmarks.spark import JDBC
from tests.benchmarks.tables import tables
from tests.benchmarks.worker import worker

BENCHMARKS = {
    each.__name__: each
    for each in (
        publish,
        claims,
        positions,
        source,
        tables,
        sink,
        into_tables,
        archive,
        queries,
        retention,
        reading,
        capture,
        worker,
        settings,
        sizes,
    )
}
NAMES = ", ".join(BENCHMARKS)


def main(
    only: Annotated[list[str] | None, typer.Argument(help=f"Some of {NAMES}.")] = None,
    quick: Annotated[bool, typer.Option(help="Less of everything: two minutes.")] = False,
    json: Annotated[Path, typer.Option(help="Where the figures are written.")] = Path(
        "bench-results/benchmarks.json"
    ),
) -> None:
    """Measure spark-pgqueue against plain Postgres, plain Spark, and a row per message."""
    if unknown := set(only or ()) - set(BENCHMARKS):
        raise typer.BadParameter(f"{', '.join(unknown)}: there are {NAMES}")
    report = Report(quick)
    home = Path(tempfile.mkdtemp(prefix="pgqueue-bench-"))
    try:
        tcp = {"listen_addresses": "127.0.0.1"} if JDBC.exists() else {}
        with embedded.start(home / "postgres", settings={**SETTINGS, **tcp}) as server:
            with connection.connect(server.url) as conn:
                schema.install(conn)
                (version,) = conn.execute("show server_version").fetchone() or ("",)
            bench = Bench(home, server.url, report)
            for name in only or BENCHMARKS:
                took = timed(lambda name=name: BENCHMARKS[name](bench))
                report.console.print(f"[dim]{name}: {took:.0f} s[/]")
    finally:
        shutil.rmtree(home, ignore_errors=True)
    report.console.print(report.table())
    report.write(json, version)
    report.console.print(f"written to {json}")
    # A missed target is no failure: on a machine that does other things, any may be missed.


if __name__ == "__main__":
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(main)
    app()
