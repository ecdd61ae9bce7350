"""The year as a picture: bars by month in the terminal, and a file with every day."""

from __future__ import annotations

import os
from collections import Counter
from datetime import date
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console
from rich.progress_bar import ProgressBar
from rich.table import Table

from spark_pgqueue.command_line.demo.flights import Days
from spark_pgqueue.postgres.errors import PgQueueError, how_to_install

_KINDS = ("pdf", "png", "svg")


def draw(days: Days, console: Console) -> None:
    """Print the mean delay of each month."""
    means = _means(days, len("2013-01"))
    most = max((minutes for _, minutes in means.values()), default=0)
    table = Table(title="Delay at departure, as daily found it", box=None, title_justify="left")
    for heading in ("month", "flights", "", "min"):
        table.add_column(heading, justify="right" if heading in ("flights", "min") else "left")
    for month, (flights, minutes) in sorted(means.items()):
        bar = ProgressBar(total=most or 1, completed=max(minutes, 0), width=40)
        table.add_row(month, f"{flights:,}", bar, f"{minutes:.1f}")
    console.print()
    console.print(table)


def check(file: Path) -> None:
    """Check that a picture can be written to a file.

    Raises:
        PgQueueError: it cannot be written.
    """
    if file.suffix[1:].lower() not in _KINDS:
        raise PgQueueError(f"picture must end in .{', .'.join(_KINDS)}, not {str(file)!r}")
    if not file.parent.is_dir():
        raise PgQueueError(f"picture is {str(file)!r}, but there is no folder {file.parent}")
    if find_spec("matplotlib") is None:
        raise PgQueueError("a picture needs matplotlib", hint=how_to_install("demo"))


def write(days: Days, file: Path, folder: Path) -> None:
    """Write the mean delay of each day, as PNG, SVG or PDF by the file's name.

    Args:
        days: the result of `daily`.
        file: the picture.
        folder: for matplotlib's files, as there may be no home.
    """
    os.environ.setdefault("MPLCONFIGDIR", str(folder))
    # Not pyplot, which needs a screen, and a folder in the user's home.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    means = sorted(_means(days, len("2013-01-01")).items())
    when = [date.fromisoformat(day) for day, _ in means]
    figure = Figure(figsize=(10, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.bar(when, [minutes for _, (_, minutes) in means], width=1.0)  # type: ignore[arg-type]
    axes.set_ylabel("mean delay at departure, minutes")
    axes.set_title("Flights from New York City, as the consumer daily found them")
    figure.savefig(file)


def _means(days: Days, length: int) -> dict[str, tuple[int, float]]:
    """By the first characters of the day: flights, and the mean delay of those that departed."""
    flights: Counter[str] = Counter()
    departures: Counter[str] = Counter()
    minutes: Counter[str] = Counter()
    for (day, _), found in days.items():
        flights[day[:length]] += found[0]
        departures[day[:length]] += found[1]
        minutes[day[:length]] += found[2] or 0
    return {when: (flights[when], minutes[when] / max(departures[when], 1)) for when in flights}
