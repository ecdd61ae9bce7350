"""What a run has shown: delays by minute, counts, the load, what grows; and its picture."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.benchmarks.hour import picture
from tests.benchmarks.hour.judge import DEAD, SIZE, Count, counts, growth, series
from tests.benchmarks.hour.plan import CONSUMERS, Plan
from tests.benchmarks.hour.run import LINES
from tests.benchmarks.hour.samples import read
from tests.benchmarks.hour.shared import STEP, delays, percentile

SUMMARY = "summary.json"
LEAST = 0.95
"""The share of the rate that has to be reached."""


def summarize(plan: Plan, shared: Path, folder: Path) -> None:
    """Write what the processes counted: delays by minute and consumer in seconds, and counts."""
    late: dict[str, list[dict[str, float]]] = {}
    for consumer in CONSUMERS:
        rows = late[consumer] = []
        for minute, buckets in enumerate(delays(shared, consumer)):
            if count := int(buckets.sum()):
                shares = {"p50": 0.5, "p99": 0.99, "max": 1.0}
                figures = {name: round(percentile(buckets, s), 4) for name, s in shares.items()}
                rows.append({"minute": minute, "messages": count, **figures})
    document = {"delays": late, "counts": [asdict(each) for each in counts(shared)]}
    (folder / SUMMARY).write_text(json.dumps(document, indent=1) + "\n")


def tell(folder: Path) -> bool:
    """Print all; returns whether the rate was reached, nothing grows and nothing was lost."""
    plan, lines = Plan.read(folder / "plan.json"), read(folder / LINES)
    summary = json.loads((folder / SUMMARY).read_text())
    _tell_load(plan, lines, summary)
    _tell_delays(summary)
    _tell_sizes(plan, lines)
    found = [Count(**each) for each in summary["counts"]]
    for count in found:
        print(("" if count.ok else "WRONG: ") + str(count))
    reached = found[0].sent >= plan.rate * plan.seconds * LEAST
    if not reached:
        print(f"WRONG: fewer messages were sent than {plan.rate:,} a second")
    grown = list(growth(plan, lines))
    for each in grown:
        print(f"GROWS: {each}")
    if not grown:
        print("in the last third, nothing grows")
    return reached and not grown and all(count.ok for count in found)


def _tell_load(plan: Plan, lines: list[dict[str, Any]], summary: dict[str, Any]) -> None:
    """Cores by role, from a twelfth of the time on, and the rate that was reached."""
    inside = [line for line in lines if plan.seconds / 12 <= line["at"] <= plan.seconds]
    first, last = inside[0], inside[-1]
    seconds = last["at"] - first["at"]
    sent = summary["counts"][0]["sent"]
    print(
        f"{plan.side}: {sent:,} messages in {plan.minutes:g} minutes, {sent / plan.seconds:,.0f}/s"
    )
    cores = {
        role: (worked - first["cpu"].get(role, 0)) / seconds for role, worked in last["cpu"].items()
    }
    shown = ", ".join(f"{role} {share:.2f}" for role, share in cores.items())
    print(f"cores: {sum(cores.values()):.2f}: {shown}")
    print(f"WAL: {(last['wal'] - first['wal']) / seconds / plan.rate:,.0f} bytes a message")
    print(f"longest look: {max(line['look'] for line in lines):.2f} s")


def _tell_delays(summary: dict[str, Any]) -> None:
    print(f"from commit, or due time, to the first call of the handler (to {STEP - 1:.0%}), in ms")
    for consumer, rows in summary["delays"].items():
        worst = ", ".join(f"{1e3 * row['p99']:.0f}" for row in rows)
        longest = max(row["max"] for row in rows)
        middle = sorted(row["p50"] for row in rows)[len(rows) // 2]
        print(f"{consumer}: median {1e3 * middle:.0f}, longest {1e3 * longest:.0f}; p99: {worst}")


def _tell_sizes(plan: Plan, lines: list[dict[str, Any]], most: int = 24) -> None:
    """The highest figures before the snapshot, beside it, and in the last third."""
    since, _ = plan.held
    spans = ((plan.seconds / 6, since), (since, plan.seconds * 2 / 3), (plan.seconds * 2 / 3, 1e9))
    print("the highest before the snapshot / from then on / in the last third")
    rows = []
    for (name, what), values in series(lines).items():
        if what not in (SIZE, DEAD):
            continue
        tops = [
            max(
                (v for v, line in zip(values, lines, strict=True) if a <= line["at"] < b), default=0
            )
            for a, b in spans
        ]
        rows.append((max(tops) / (1 << 20 if what == SIZE else 1000), name, what, tops))
    for _, name, what, tops in sorted(rows, reverse=True)[:most]:
        scale, unit = (1 << 20, "MB") if what == SIZE else (1, "dead rows")
        print(f"  {name}: " + " / ".join(f"{top / scale:,.1f}" for top in tops) + f" {unit}")


def draw(folders: list[Path], path: Path) -> None:
    """Draw sides beside each other."""
    picture.draw(
        [
            picture.Drawn(
                Plan.read(folder / "plan.json"),
                read(folder / LINES),
                json.loads((folder / SUMMARY).read_text())["delays"],
            )
            for folder in folders
        ],
        path,
    )
