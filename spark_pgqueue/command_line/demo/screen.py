"""The output: sentences, bars, and the figures of consumers compared with those of the file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from spark_pgqueue.command_line.demo.flights import Figures
from spark_pgqueue.printable import printable


class Screen:
    """A terminal, or a file.

    Args:
        console: where to print; None: standard output.
    """

    def __init__(self, console: Console | None = None):
        self.console = console or Console()
        self._acts = 0

    def act(self, what: str, page: str) -> None:
        """Begin the next act.

        Args:
            what: what happens, and what the queue guarantees.
            page: the page of the documentation, in the repository.
        """
        self._acts += 1
        self.console.print()
        text = Text(f"{self._acts}. ", style="bold")
        text.append(what, style="not bold")
        text.append(f" ({page})", style="not bold dim")
        self.console.print(text)

    def say(self, what: str) -> None:
        """Print an observation."""
        self.console.print(Text(f"   {printable(what)}"))

    def whisper(self, what: str) -> None:
        """Print a minor message."""
        self.console.print(Text(printable(what), style="dim"), soft_wrap=True)

    @contextmanager
    def bars(self, totals: Mapping[str, int]) -> Iterator[Bars]:
        """Live bars, by name; `totals` has the number of messages of each."""
        columns = "{task.description}", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
        with Progress(*columns, console=self.console) as progress:
            yield Bars(progress, totals)

    def compare(self, seen: Figures, told: Figures) -> bool:
        """Print the figures of consumers and of the file side by side.

        Returns:
            whether they are equal.
        """
        table = Table("", "seen", "in the file", "", title="What each of them saw")
        for name, value in told.items():
            same = seen.get(name) == value
            mark = "[green]ok[/]" if same else "[bold red]differs[/]"
            table.add_row(name, _shown(seen.get(name)), _shown(value), mark)
        self.console.print()
        self.console.print(table)
        return seen == told


class Bars:
    """Bars that show the progress of each consumer."""

    def __init__(self, progress: Progress, totals: Mapping[str, int]):
        self._progress = progress
        self._tasks = {name: progress.add_task(name, total=n) for name, n in totals.items()}

    def show(self, done: Mapping[str, int]) -> None:
        """Show the number of finished messages, by name."""
        for name, count in done.items():
            self._progress.update(self._tasks[name], completed=count)


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return f"{len(value):,}"
    return f"{value:,}" if isinstance(value, int) else str(value)
