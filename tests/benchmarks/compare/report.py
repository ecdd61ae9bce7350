"""The figures of a run, and what they are written to: a table, JSON, a picture, the page."""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

OURS = "pgqueue"
"""The name of our side as it is usually called; variants have it in front."""


@dataclass(frozen=True)
class Case:
    """One thing that was measured, on all sides in turn.

    Attributes:
        scenario: what it belongs to.
        line: what is measured.
        point: which of the points of this line it is; cases of one line stand in one row of the
            README.
        unit: of the values.
        higher: whether more is better.
        values: by side, a value per round.
        cpu: by side, microseconds of the server's CPU for a message, per round; empty where they
            cannot be seen.
    """

    scenario: str
    line: str
    point: str
    unit: str
    values: dict[str, list[float]]
    higher: bool = True
    cpu: dict[str, list[float]] = field(default_factory=dict)

    @property
    def work(self) -> Case | None:
        """The server's CPU, as a case of its own."""
        if not self.cpu:
            return None
        line = f"{self.line}, the server's CPU"
        return Case(self.scenario, line, self.point, "µs", self.cpu, higher=False)

    @property
    def name(self) -> str:
        return f"{self.line}: {self.point}" if self.point else self.line

    def value(self, side: str) -> float:
        """The better quartile: what others do on the machine makes a round worse, never better."""
        values = self.values[side]
        if len(values) == 1:
            return values[0]
        return statistics.quantiles(values, n=4, method="inclusive")[2 if self.higher else 0]

    def ratio(self, ours: str, theirs: str) -> float:
        """How many times better ours is."""
        a, b = self.value(ours), self.value(theirs)
        if not self.higher:
            a, b = b, a
        return a / b if b else float("inf") if a else 1.0

    @property
    def ours(self) -> list[str]:
        return [side for side in self.values if is_ours(side)]

    @property
    def theirs(self) -> list[str]:
        return [side for side in self.values if not is_ours(side)]

    def ratios(self) -> dict[str, dict[str, float | None]]:
        """How many times better each of ours is than each of theirs; None for infinity."""
        return {
            ours: {peer: _finite(self.ratio(ours, peer)) for peer in self.theirs}
            for ours in self.ours
        }


def with_work(cases: list[Case]) -> list[Case]:
    """The cases, and beside each the server's CPU."""
    return [each for case in cases for each in (case, case.work) if each is not None]


def is_ours(side: str) -> bool:
    return side == OURS or side.startswith(f"{OURS},")


@dataclass
class Report:
    """The figures of a run; shown as they come."""

    about: dict[str, Any] = field(default_factory=dict)
    cases: list[Case] = field(default_factory=list)
    console: Console = field(default_factory=lambda: Console(width=_width()))

    def add(self, case: Case) -> None:
        if not self.cases or self.cases[-1].scenario != case.scenario:
            self.console.print(f"[bold]{case.scenario}[/]")
        self.cases.append(case)
        for each in with_work([case]):
            said = ", ".join(f"{side} {_number(each.value(side))}" for side in each.values)
            self.console.print(f"  [dim]{each.name} ({each.unit}): {said}[/]")

    def scenarios(self) -> dict[str, list[Case]]:
        found: dict[str, list[Case]] = {}
        for case in self.cases:
            found.setdefault(case.scenario, []).append(case)
        return found

    def tables(self) -> Iterable[Table]:
        """A table per scenario: ours, theirs, and how many times better ours is."""
        for scenario, cases in self.scenarios().items():
            table = Table(title=scenario, title_justify="left", show_lines=False)
            table.add_column("", overflow="fold", min_width=36)
            table.add_column("unit", no_wrap=True)
            table.add_column("ours", justify="right", no_wrap=True)
            peers = _peers(cases)
            for peer in peers:
                table.add_column(peer, justify="right")
            for case in with_work(cases):
                for ours in case.ours:
                    cells = [_cell(case, ours, peer) for peer in peers]
                    value = _number(case.value(ours))
                    table.add_row(case.name + ours.removeprefix(OURS), case.unit, value, *cells)
            yield table

    def write(self, path: Path) -> None:
        document = {
            **self.about,
            "cases": [
                {
                    **asdict(case),
                    "ratios": case.ratios(),
                    "cpu_ratios": case.work.ratios() if case.work else {},
                }
                for case in self.cases
            ],
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")


def read(path: Path) -> Report:
    """The report that was written to a file."""
    document = json.loads(path.read_text())
    cases = [
        Case(**{name: value for name, value in each.items() if not name.endswith("ratios")})
        for each in document.pop("cases")
    ]
    return Report(document, cases)


def machine(postgres: str, settings: dict[str, Any], effort: str, versions: dict[str, str]) -> dict:
    """What a report is about."""
    return {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "effort": effort,
        "cpus": os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "postgres": postgres,
        "versions": versions,
        "settings": settings,
    }


# The page of figures, tests/benchmarks/README.md

BEGIN = "<!-- written by: make compare ARGS=--keep -->"
END = "<!-- to here -->"


def readme_of(report: Report) -> str:
    """The part of the page that the figures make: a table per scenario, of ratios."""
    about = report.about
    durable = ", ".join(f"`{name}` {value}" for name, value in about["settings"].items())
    parts = [
        f"On {about['cpus']} cores with PostgreSQL {about['postgres']} ({durable}),"
        f" {about['date']}"
        + "".join(f"; {name} {version}" for name, version in about["versions"].items())
        + (f"; **{about['effort']}**" if about["effort"] != "full" else "")
        + ". Each cell of a peer says how many times better pgqueue is; **bold** is where we lose.",
        "",
    ]
    for scenario, cases in report.scenarios().items():
        peers = _peers(cases)
        parts.append(f"| {scenario} | pgqueue | " + " | ".join(peers) + " |")
        parts.append("|---" * (len(peers) + 2) + "|")
        cases = with_work(cases)
        parts += [_row(cases, *key, peers) for key in _lines(cases)]
        parts.append("")
    return "\n".join(parts)


def written(text: str, report: Report) -> str:
    """The text of the page, with the figures between the two marks."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{readme_of(report)}\n{END}{after}"


def _lines(cases: list[Case]) -> list[tuple[str, str, str]]:
    """The rows of a table: line, our variant and unit, in the order of the cases."""
    return list(dict.fromkeys((c.line, ours, c.unit) for c in cases for ours in c.ours))


def _row(cases: list[Case], line: str, ours: str, unit: str, peers: list[str]) -> str:
    row = [c for c in cases if (c.line, c.unit) == (line, unit) and ours in c.values]
    points = " / ".join(c.point for c in row if c.point)
    variant = ours.removeprefix(OURS).removeprefix(", ")
    label = line + (f": {points}" if points else "") + (f"; *{variant}*" if variant else "")
    values = " / ".join(_number(c.value(ours)) for c in row)
    cells = [
        " / ".join(shown_ratio(c.ratio(ours, peer)) if peer in c.values else "-" for c in row)
        if any(peer in c.values for c in row)
        else ""
        for peer in peers
    ]
    return "| " + " | ".join([label, f"{values} {unit}".replace(" /s", "/s"), *cells]) + " |"


def shown_value(case: Case, side: str) -> str:
    """A figure with its unit."""
    return f"{_number(case.value(side))} {case.unit}".replace(" /s", "/s")


def shown_ratio(value: float) -> str:
    """How many times better ours is; bold where it is worse."""
    shown = _number(value) if value < 100 else f"{value:,.0f}"
    return f"**{shown}**" if value < 1 else shown


# The picture

NARROWEST, WIDEST = 0.02, 200
"""Ratios beyond these are drawn there."""


def draw(report: Report, path: Path) -> None:
    """A dot for each ratio of our usual side, on a logarithmic axis; left of 1 we lose."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "compare"  # the same figures make the same file
    matplotlib.rcParams["svg.fonttype"] = "none"
    from matplotlib import pyplot as plt
    from matplotlib.lines import Line2D

    scenarios = report.scenarios()
    columns: list[list[str]] = [[], []]
    for scenario in sorted(scenarios, key=lambda each: -len(scenarios[each])):
        # into the shorter column
        lengths = [sum(len(scenarios[each]) + 3 for each in column) for column in columns]
        columns[lengths.index(min(lengths))].append(scenario)
    columns = [[each for each in scenarios if each in column] for column in columns]
    rows = max(sum(len(scenarios[each]) + 3 for each in column) for column in columns)
    figure = plt.figure(figsize=(15, 1 + 0.19 * rows), layout="constrained")
    peers = _peers(report.cases)
    halves = figure.subfigures(1, 2, squeeze=False)[0]
    for column, half in zip(columns, halves, strict=True):
        if not column:
            continue
        heights = [len(scenarios[each]) + 1.5 for each in column]
        panels = half.subplots(len(column), 1, squeeze=False, height_ratios=heights)[:, 0]
        for scenario, axes in zip(column, panels, strict=True):
            _panel(axes, scenario, scenarios[scenario], peers)
    handles = [
        Line2D([], [], marker=_marker(number), linestyle="", color=f"C{number}", label=peer)
        for number, peer in enumerate(peers)
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=min(len(peers), 9), fontsize=8)
    figure.suptitle(
        "How many times better pgqueue is than others; in red, where it loses"
        f" (PostgreSQL {report.about['postgres']}, {report.about['cpus']} cores)",
        fontsize=11,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)


def _marker(number: int) -> str:
    """Another one where the ten colors begin again."""
    return "osD"[number // 10]


def _panel(axes: Any, scenario: str, cases: list[Case], peers: list[str]) -> None:
    for row, case in enumerate(cases):
        for peer in case.theirs:
            ratio = min(max(case.ratio(OURS, peer), NARROWEST), WIDEST)
            number = peers.index(peer)
            axes.plot(ratio, row, _marker(number), markersize=5, color=f"C{number}")
    axes.set_xscale("log")
    axes.set_xlim(NARROWEST / 1.2, WIDEST * 1.2)
    axes.set_ylim(len(cases) - 0.4, -0.6)
    axes.set_yticks(range(len(cases)), [f"{case.name} ({case.unit})" for case in cases], fontsize=7)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.tick_params(axis="x", labelsize=7)
    axes.grid(axis="y", alpha=0.3)
    axes.axvline(1, color="black", linewidth=1)
    axes.axvspan(NARROWEST / 1.2, 1, color="red", alpha=0.07, zorder=0)
    axes.set_title(scenario, fontsize=9, loc="left")


def _peers(cases: Iterable[Case]) -> list[str]:
    return list(dict.fromkeys(peer for case in cases for peer in case.theirs))


def _cell(case: Case, ours: str, peer: str) -> str:
    if peer not in case.values:
        return ""
    ratio = case.ratio(ours, peer)
    mark = "[bold red]" if ratio < 1 else "[green]"
    lost = " LOSS" if ratio < 1 else ""
    return f"{_number(case.value(peer))} {mark}{_number(ratio)}x{lost}[/]"


def _finite(value: float) -> float | None:
    return value if value != float("inf") else None


def _number(value: float) -> str:
    if value >= 999.5:
        return f"{value:,.0f}"
    return f"{value:.3g}" if value >= 1 else f"{value:.2f}"


def _width() -> int | None:
    return None if Console().is_terminal else 180
