"""`make explore`: all pairs of calls, each ordering, and what may be beside, to the last schedule.

python -m tests.explore                                everything: hours
python -m tests.explore --calls ack,receive --most 50  some of it
python -m tests.explore --programs                     sessions of two to four calls each
python -m tests.explore --sessions 3 --calls send,ack  three sessions
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from spark_pgqueue import embedded
from spark_pgqueue.postgres import connection, schema
from tests.explore.calls import CALLS, PROGRAMS
from tests.explore.cases import BESIDE, ORDERINGS
from tests.explore.explorer import Explorer, Result, all_cases, summary


def listed(value: str, allowed: list[str], option: str) -> list[str]:
    """The names of a list with commas."""
    names = value.split(",")
    if unknown := set(names) - set(allowed):
        raise typer.BadParameter(f"{option}: {', '.join(unknown)}: there are {', '.join(allowed)}")
    return names


def main(
    calls: Annotated[str, typer.Option(help="Names of calls.")] = ",".join(CALLS),
    programs: Annotated[bool, typer.Option(help="Programs of 2 to 4 calls instead.")] = False,
    sessions: Annotated[int, typer.Option(min=2, max=3)] = 2,
    with_: Annotated[str, typer.Option("--with", help="Pairs with one of these only.")] = "",
    orderings: Annotated[str, typer.Option()] = ",".join(ORDERINGS),
    beside: Annotated[str, typer.Option(help="'' is nothing.")] = ",".join(BESIDE),
    most: Annotated[int, typer.Option(help="Schedules of a case.")] = 2000,
) -> None:
    """Explore, and print each case; ends with 1 if a schedule broke a promise."""
    cases = all_cases(
        PROGRAMS if programs else listed(calls, list(CALLS), "--calls"),
        listed(beside, list(BESIDE), "--beside"),
        listed(orderings, list(ORDERINGS), "--orderings"),
        sessions,
    )
    if with_:
        cases = [case for case in cases if set(case.calls) & set(with_.split(","))]
    results: list[Result] = []
    with (
        tempfile.TemporaryDirectory(prefix="pgqueue-explore-") as folder,
        embedded.start(Path(folder) / "data", settings={"fsync": "off"}) as server,
    ):
        with connection.connect(server.url) as conn:
            schema.install(conn)
        explorer = Explorer(server.url)
        for case in cases:
            results.append(explorer.explore(case, most))
            print(results[-1], flush=True)
        explorer.close()
    print(summary(results))
    sys.exit(any(result.failure is not None for result in results))


if __name__ == "__main__":
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(main)
    app()
