"""Watching a query live."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress

from rich.console import Console
from rich.live import Live

from spark_pgqueue.postgres.errors import PgQueueError
from spark_pgqueue.watching import notebook, terminal
from spark_pgqueue.watching.progress import ProgressHistory, Query


def watch(
    query: Query,
    seconds: float | None = None,
    *,
    every: float = 1.0,
    console: Console | None = None,
) -> None:
    """Show the progress of a query until it ends: messages per second, backlog, lag and a bar.

    A terminal shows a table, a notebook also plots. An interrupt (Ctrl-C, or the notebook's stop
    button) ends the watching, and the query continues. An idle query reports progress every 10
    seconds (`spark.sql.streaming.noDataProgressEventInterval`).

        >>> spark_pgqueue.watch(query)  # doctest: +ELLIPSIS
        query ... has ended
        ...

    Args:
        query: a `StreamingQuery`.
        seconds: how long to watch; by default until the query ends.
        every: seconds between two updates.
        console: where to show the progress; by default the notebook, or standard output.

    Raises:
        PgQueueError: an argument is out of range.
    """
    for name, value in (("seconds", seconds), ("every", every)):
        if value is not None and not value > 0:
            raise PgQueueError(f"{name} must be greater than 0, not {value}")
    until = None if seconds is None else time.monotonic() + seconds
    history = ProgressHistory(query)
    show, showing = _shown(console, history)
    with showing, suppress(KeyboardInterrupt):
        active = True
        while active:
            active = history.update()
            show()
            left = every if until is None else min(every, until - time.monotonic())
            if left <= 0:
                return
            if active:
                time.sleep(left)


def _shown(
    console: Console | None, history: ProgressHistory
) -> tuple[Callable[[], None], AbstractContextManager]:
    """A function that shows the history again, and the context in which it works."""
    if console is None and _in_a_notebook():
        from IPython.display import HTML, display

        if (handle := display(HTML(notebook.page(history)), display_id=True)) is not None:
            return lambda: handle.update(HTML(notebook.page(history))), nullcontext()
    live = Live(terminal.picture(history), console=console, auto_refresh=False)
    return lambda: live.update(terminal.picture(history), refresh=True), live


def _in_a_notebook() -> bool:
    ipython = sys.modules.get("IPython")  # a notebook has imported it
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")
