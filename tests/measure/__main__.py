"""`make measure`: lines and calls of the SQL, and the ways of a receive and an acknowledgement.

python -m tests.measure             all figures
python -m tests.measure sizes ways  these alone
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from tests.measure import figures, functions
from tests.measure.ways import ways


class Figure(StrEnum):
    """What can be measured."""

    sizes = "sizes"
    calls = "calls"
    floors = "floors"
    ways = "ways"


def main(
    which: Annotated[list[Figure] | None, typer.Argument(help="All, if none is named.")] = None,
) -> None:
    """Print figures of the SQL of this checkout."""
    found = functions.read()
    for figure in which or Figure:
        lines = ways() if figure is Figure.ways else getattr(figures, figure)(found)
        for line in lines:
            print(line, flush=True)
        print()


if __name__ == "__main__":
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(main)
    app()
