"""A query's progress in a notebook: a bar for each source, and plots."""

from __future__ import annotations

import html
import io
from importlib.util import find_spec

from spark_pgqueue.watching.progress import ProgressHistory, backlog_of, count, duration


def page(history: ProgressHistory) -> str:
    """A piece of HTML, with plots of backlog and throughput where matplotlib is installed."""
    rows = "".join(_row(history, source) for source in history.sources())
    head = "".join(
        f"<th>{heading}</th>"
        for heading in ("source", "batch", "per second", "backlog", "lag", "done")
    )
    table = f"<table><tr>{head}</tr>{rows}</table>"
    return f"<p>{html.escape(history.headline)}</p>{table}{_plots(history)}"


def _row(history: ProgressHistory, source: str) -> str:
    last = history.sources()[source][-1]
    cells = (
        html.escape(source),
        str(last.batch),
        count(last.per_second),
        backlog_of(last),
        duration(last.lag_seconds),
        f'<progress max="1" value="{history.done(source):.3f}"></progress>',
    )
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def _plots(history: ProgressHistory) -> str:
    if find_spec("matplotlib") is None:
        return "<p>pip install matplotlib to see plots</p>"
    from matplotlib.figure import Figure

    # Not pyplot: a separate figure does not change the notebook's figures.
    figure = Figure(figsize=(10, 2.6), layout="constrained")
    backlog, speed = figure.subplots(1, 2)
    for source, seen in history.sources().items():
        at = [each.at for each in seen]
        speed.plot(at, [each.per_second for each in seen], label=source)
        if seen[-1].backlog is not None:
            backlog.plot(at, [each.backlog or 0 for each in seen], label=source)
    for axes, title in ((backlog, "backlog"), (speed, "messages per second")):
        axes.set_title(title)
        axes.set_ylim(bottom=0)
        axes.tick_params(axis="x", rotation=30)
    if history.sources():
        speed.legend()
    text = io.StringIO()
    figure.savefig(text, format="svg")
    return text.getvalue()[text.getvalue().index("<svg") :]
