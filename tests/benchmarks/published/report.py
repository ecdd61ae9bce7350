"""What is shown of runs: a table of minutes, and a table beside what was published."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from rich.table import Table

from tests.benchmarks.published.setups import SETUPS, Setup

Run = dict[str, Any]

COLUMNS = {
    "sent": "sent",
    "done": "done",
    "backlog": "backlog",
    "p50": "p50 ms",
    "p99": "p99 ms",
    "claim_p50": "claim p50",
    "claim_p99": "claim p99",
    "bystander": "bystander",
    "cpu": "µs CPU",
    "dead": "dead rows",
    "catalog": "of catalog",
    "tables": "tables MB",
    "indexes": "indexes MB",
}
SIDES = {"pgqueue": "ours", "row per message": "row per message", "pgmq": "pgmq"}
"""The columns of a page, by the name of a side; other sides follow by their own."""


Measure = Callable[[Run], float | None]


def per_second(name: str) -> Measure:
    return lambda run: _sum(run, name) / _sum(run, "seconds")


def last(name: str) -> Measure:
    return lambda run: run["minutes"][-1][name]


def worst(name: str) -> Measure:
    return lambda run: max((m[name] for m in run["minutes"] if m[name] is not None), default=None)


def owed(run: Run) -> float:
    """Messages of the set-up's rate that are not done: producers that are held up send fewer."""
    return max(run["rate"] * _sum(run, "seconds") - _sum(run, "done"), 0.0)


def size(run: Run) -> float:
    return (run["minutes"][-1]["tables"] + run["minutes"][-1]["indexes"]) / 2**20


def cpu(run: Run) -> float | None:
    known = [each for each in run["minutes"] if each["cpu"] is not None]
    done = sum(each["done"] for each in known)
    return sum(each["cpu"] * each["done"] for each in known) / done if done else None


def _sum(run: Run, name: str) -> float:
    return sum(each[name] for each in run["minutes"])


MEASURES: dict[str, tuple[str, Measure]] = {
    "sent": ("messages sent, /s", per_second("sent")),
    "done": ("messages done, /s", per_second("done")),
    "backlog": ("backlog at the end", last("backlog")),
    "owed": ("... with what the producers owe", owed),
    "dead": ("dead rows at the end", last("dead")),
    "claim_p50": ("a claim in the last minute, median, ms", last("claim_p50")),
    "p50": ("from commit to handler in the last minute, median, ms", last("p50")),
    "p99": ("... 99%, in the worst minute, ms", worst("p99")),
    "size": ("tables and indexes at the end, MiB", size),
    "cpu": ("the server's CPU, µs a message", cpu),
    "bystander": ("a bystander's query in the last minute, ms", last("bystander")),
}
"""What a page shows, by name: its words, and how it follows from a run."""


def path_of(folder: Path, run: Run) -> Path:
    """The file of a run."""
    side = run["side"].replace(", ", "-").replace(" ", "-")
    free = "" if run["held"] else "-free"
    return folder / f"{run['setup']}-{side}{free}.json"


def write(folder: Path, run: Run) -> Path:
    """Write a run to its file."""
    path = path_of(folder, run)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(run, indent=1, ensure_ascii=False) + "\n")
    return path


def read(folder: Path, setup: str) -> list[Run]:
    """The runs of a set-up, of which files are there."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob(f"{setup}-*.json"))]


def table(run: Run) -> Table:
    """A row for each minute."""
    held = "" if run["held"] else ", nothing holds the horizon"
    title = f"{run['setup']}: {run['side']}{held}"
    found = Table(title=title, title_justify="left")
    found.add_column("min", justify="right")
    shown = [name for name in COLUMNS if any(m[name] is not None for m in run["minutes"])]
    for name in shown:
        found.add_column(COLUMNS[name], justify="right")
    for number, minute in enumerate(run["minutes"], 1):
        found.add_row(str(number), *(_cell(name, minute[name]) for name in shown))
    return found


def markdown(setup: Setup, runs: Iterable[Run]) -> str:
    """A table of what was published and of runs; the plain queue of a publication is ours, too."""
    by_side = {run["side"]: run for run in runs if run["held"]}
    order = [*SIDES, *(side for side in by_side if side not in SIDES)]
    sides = [side for side in order if side in by_side]
    theirs = [f"theirs: {each.what}" for each in setup.theirs]
    heads = [*theirs, *(SIDES.get(side, side) for side in sides)]
    lines = [
        f"| {setup.name}, {_about(setup, by_side.values())} | " + " | ".join(heads) + " |",
        "|---" * (len(heads) + 1) + "|",
    ]
    for name, (words, of) in MEASURES.items():
        cells = [each.figures.get(name, "") for each in setup.theirs]
        cells += [_number(of(by_side[side])) for side in sides]
        if any(cells):
            lines.append(f"| {words} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def page(path: Path, folder: Path) -> None:
    """Write the tables of all set-ups that were run into a page, between the two marks of each."""
    text = path.read_text()
    for setup in SETUPS.values():
        if runs := read(folder, setup.name):
            begin, end = marks(setup)
            before, rest = text.split(begin)
            _, after = rest.split(end)
            text = f"{before}{begin}\n{markdown(setup, runs)}\n{end}{after}"
    path.write_text(text)


def marks(setup: Setup) -> tuple[str, str]:
    """What stands around the table of a set-up in a page."""
    return f"<!-- published: {setup.name} -->", f"<!-- end of {setup.name} -->"


def _about(setup: Setup, runs: Iterable[Run]) -> str:
    about = {(each["date"], each["postgres"], len(each["minutes"])) for each in runs}
    ours = [f"{minutes} minutes, PostgreSQL {pg}, {date}" for date, pg, minutes in sorted(about)]
    return "; ".join([f"published {setup.date}", *ours])


def _cell(name: str, value: float | None) -> str:
    if value is not None and name in ("tables", "indexes"):
        value /= 2**20
    return _number(value)


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"
