"""The figures of a run, kept as JSON, and shown as a table for each dimension."""

from __future__ import annotations

import json
import os
import platform
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.benchmarks.scale.gauge import Cost
from tests.benchmarks.scale.growth import law

MEASURED = Path(__file__).with_name("measured.json")
"""The figures that the model computes with."""

MEASURES = {"cpu": "µs of CPU", "blocks": "blocks"}


@dataclass
class Figures:
    """By dimension and operation: the cost at each size; and single figures by name."""

    quick: bool = False
    huge: bool = False
    series: dict[str, dict[str, dict[int, Cost]]] = field(default_factory=dict)
    single: dict[str, dict[str, float]] = field(default_factory=dict)
    console: Console = field(default_factory=lambda: Console(width=130))

    def add(self, dimension: str, n: int, operation: str, cost: Cost) -> None:
        self.series.setdefault(dimension, {}).setdefault(operation, {})[n] = cost
        self.console.print(
            f"  {dimension} {n:,}: {operation}: {cost.cpu:,.0f} µs (mean {cost.mean:,.0f}),"
            f" {cost.blocks:,.0f} blocks, {cost.wal:,.0f} bytes of WAL"
        )

    def note(self, dimension: str, name: str, value: float) -> None:
        self.single.setdefault(dimension, {})[name] = round(value, 6)
        self.console.print(f"  {dimension}: {name}: {value:,.3f}")

    def table(self, dimension: str) -> Table:
        sizes = sorted({n for each in self.series[dimension].values() for n in each})
        table = Table(title=f"{dimension}: µs of CPU / blocks of one call")
        table.add_column("operation")
        for n in sizes:
            table.add_column(f"{n:,}", justify="right", no_wrap=True)
        for measure in MEASURES.values():
            table.add_column(f"law of {measure}")
        for operation, costs in self.series[dimension].items():
            cells = [
                f"{costs[n].cpu:,.0f} / {costs[n].blocks:,.0f}" if n in costs else "" for n in sizes
            ]
            laws = [law({n: getattr(c, m) for n, c in costs.items()}, m) for m in MEASURES]
            table.add_row(operation, *cells, *laws)
        return table

    def keep(self, path: Path) -> None:
        """Writes the figures; those of other dimensions stay as they are."""
        kept: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        about = {
            "at": time.strftime("%Y-%m-%d", time.gmtime()),
            "quick": self.quick,
            "cpus": os.cpu_count(),
            "system": platform.platform(),
        }
        for dimension, operations in self.series.items():
            kept.setdefault("series", {})[dimension] = {
                operation: {str(n): asdict(cost) for n, cost in costs.items()}
                for operation, costs in operations.items()
            }
        for dimension, values in self.single.items():
            kept.setdefault("single", {})[dimension] = values
        for dimension in {*self.series, *self.single}:
            kept.setdefault("about", {})[dimension] = about
        path.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n")
