"""A query's progress in a terminal: a table with bars."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from spark_pgqueue.printable import printable
from spark_pgqueue.watching.progress import ProgressHistory, backlog_of, count, duration

_BLOCKS = " ▁▂▃▄▅▆▇█"


def picture(history: ProgressHistory) -> RenderableType:
    """The last sample of each source, and the throughput of the last samples as small bars."""
    table = Table(box=None, pad_edge=False)
    for heading in ("source", "batch", "messages", "per second", "seconds", "backlog", "lag"):
        table.add_column(heading, justify="left" if heading == "source" else "right")
    table.add_column("done since the start of watching", min_width=20)
    table.add_column("per second (recent)")
    for source, seen in history.sources().items():
        last = seen[-1]
        table.add_row(
            Text(printable(source)),
            str(last.batch),
            count(last.messages),
            count(last.per_second),
            f"{last.seconds:.2f}",
            backlog_of(last),
            duration(last.lag_seconds),
            ProgressBar(total=100, completed=100 * history.done(source), width=20),
            Text(_bars([each.per_second for each in seen[-30:]])),
        )
    return Group(Text(printable(history.headline)), table)


def _bars(values: list[float]) -> str:
    most = max(values, default=0) or 1
    return "".join(_BLOCKS[round(value / most * (len(_BLOCKS) - 1))] for value in values)
