"""The picture: a column for each side, of sizes, dead rows and p99 by minute."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.benchmarks.hour.judge import DEAD, SIZE, series
from tests.benchmarks.hour.plan import Plan

MOST = 5
"""Relations that have a line of their own; the others are one."""

CATALOGS = "the catalogs"
"""All of them are one line."""

POINTS = 90
"""Of a line."""


@dataclass(frozen=True)
class Drawn:
    """A side to draw: its plan, its looks, and its delays by consumer and minute."""

    plan: Plan
    lines: list[dict[str, Any]]
    delays: dict[str, list[dict[str, float]]]


def draw(sides: list[Drawn], path: Path) -> None:
    """Draw sides beside each other, on the same axes; the same figures make the same file."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "hour"
    matplotlib.rcParams["svg.fonttype"] = "none"
    from matplotlib import pyplot as plt

    panels: list[tuple[str, Callable[[Any, Drawn], None]]] = [
        ("MB of tables and indexes", lambda axes, side: _relations(axes, side, SIZE, 1 << 20)),
        ("dead rows, thousands", lambda axes, side: _relations(axes, side, DEAD, 1000)),
        ("p99 by minute, ms", _delays),
    ]
    figure, grid = plt.subplots(
        len(panels),
        len(sides),
        figsize=(1 + 6 * len(sides), 10),
        sharex="col",
        sharey="row",
        squeeze=False,
        layout="constrained",
    )
    for column, side in enumerate(sides):
        grid[0, column].set_title(f"{side.plan.side}, {side.plan.rate:,} messages a second")
        grid[-1, column].set_xlabel("minutes")
        for row, (title, panel) in enumerate(panels):
            axes = grid[row, column]
            since, upto = (each / 60 for each in side.plan.held)
            axes.axvspan(since, upto, color="gray", alpha=0.2, label="a snapshot is held")
            panel(axes, side)
            axes.grid(alpha=0.3)
            axes.legend(fontsize=6, loc="upper left", framealpha=0.5)
            if column == 0:
                axes.set_ylabel(title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)
    if path.suffix == ".svg":  # a tenth of a point is enough, and half as long
        path.write_text(re.sub(r"(?m)(?<=[ML ]\d)(\d*\.\d)\d+", r"\1", path.read_text()))


def _relations(axes: Any, side: Drawn, what: str, scale: float) -> None:
    """The largest relations, each as a line, and the sum of the others."""
    lines = [line for line in side.lines if 0 <= line["at"] <= side.plan.seconds + 1]
    at = np.array([line["at"] for line in lines]) / 60
    found: dict[str, np.ndarray] = {}
    for (name, kind), values in series(lines).items():
        if kind == what:
            name = CATALOGS if name.startswith("pg_catalog.") else name
            found[name] = found.get(name, 0) + values
    names = sorted(found, key=lambda name: -found[name].max())
    for name in names[:MOST]:
        _line(axes, at, found[name] / scale, name)
    if names[MOST:]:
        others = np.sum([found[name] for name in names[MOST:]], axis=0)
        _line(axes, at, others / scale, f"{len(names) - MOST} others", color="black")


def _line(axes: Any, at: np.ndarray, values: np.ndarray, label: str, **style: str) -> None:
    """A line of the highest values between points, since a sawtooth's tops count."""
    step = -(-len(at) // POINTS)
    starts = range(0, len(at), step)
    tops = [values[start : start + step].max() for start in starts]
    label = f" {label}"  # matplotlib hides a name that begins with an underscore
    axes.plot([at[start] for start in starts], np.round(tops, 3), label=label, linewidth=1, **style)


def _delays(axes: Any, side: Drawn) -> None:
    for consumer, rows in side.delays.items():
        rows = [row for row in rows if row["minute"] < side.plan.minutes]  # the rest is few
        minutes = [row["minute"] + 0.5 for row in rows]
        axes.plot(minutes, [1e3 * row["p99"] for row in rows], label=consumer, linewidth=1)
    axes.set_yscale("log")
