"""The tally of the long run: `tally.json`, a line for each date, commit and version.

`make docs` writes it into the page of guarantees, and a run does so too, after each round.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests.endure.judge import Judgement
from tests.endure.world import replace

ROOT = Path(__file__).parents[2]
FILE = Path(__file__).with_name("tally.json")
PAGE = ROOT / "sql" / "guide" / "guarantees.md"

MADE_OF = ("sql", "spark_pgqueue", ":(exclude)*.md")
"""The product, by whose last commit the tally is kept."""

WRONG = ("lost", "twice", "unsent", "disordered")

_PART = re.compile(
    r"(<!-- written by make docs: the long run -->\n).*?(<!-- to here -->)", re.DOTALL
)

Entry = dict[str, Any]


def load(file: Path = FILE) -> list[Entry]:
    return json.loads(file.read_text()) if file.exists() else []


def has(queue: str, number: int, file: Path = FILE) -> bool:
    """Whether a round was added."""
    return any(entry["last_rounds"].get(queue, 0) >= number for entry in load(file))


def about(postgres: str, pyspark: str) -> dict[str, str]:
    """By what the tally is kept."""
    commit = _git("log", "-1", "--format=%h", "--", *MADE_OF)
    if _git("status", "--porcelain", "--", *MADE_OF):
        commit += " and more"
    return {
        "date": f"{datetime.now(UTC):%Y-%m-%d}", "commit": commit,
        "postgres": postgres, "pyspark": pyspark,
    }  # fmt: skip


def _git(*arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", ROOT, *arguments], capture_output=True, text=True, check=False
    )
    return done.stdout.strip()


def add(
    of: Mapping[str, str],
    queue: str,
    number: int,
    judgement: Judgement,
    kills: Mapping[str, int],
    seconds: float,
    file: Path = FILE,
) -> None:
    """Add a round, once: a run that is killed thereafter judges the round again.

    Args:
        of: date, commit and versions, as `about` says.
        queue: its name.
        number: of its round.
        judgement: of the round.
        kills: the number of each kind.
        seconds: that the round took.
        file: of the tally.
    """
    entries = load(file)
    if has(queue, number, file):
        return
    entry = next((e for e in entries if all(e[k] == v for k, v in of.items())), None)
    if entry is None:
        entry = {**of, "rounds": 0, "seconds": 0, "sent": 0, "delivered": {}, "kills": {},
                 **dict.fromkeys(WRONG, 0), "replayed": 0, "changed": 0,
                 "last_rounds": {}}  # fmt: skip
        entries.append(entry)
    entry["rounds"] += 1
    entry["seconds"] += round(seconds)
    entry["sent"] += judgement.sent
    entry["delivered"] = dict(
        Counter(entry["delivered"]) + Counter({v.who: v.delivered for v in judgement.verdicts})
    )
    entry["kills"] = dict(sorted((Counter(entry["kills"]) + Counter(kills)).items()))
    for name in WRONG:
        entry[name] += sum(getattr(verdict, name) for verdict in judgement.verdicts)
    entry["replayed"] += judgement.replayed
    entry["changed"] += judgement.changed
    entry["last_rounds"][queue] = number
    replace(file, json.dumps(entries, indent=2) + "\n")


def text(entries: list[Entry]) -> str:
    """The table of the page: a row for each entry, one for all, and the kinds of kills."""
    head = "| date, commit | messages | deliveries | kills | lost"
    head += " | twice, or not sent | out of order | micro-batches replayed |"
    rows = [head, "|---|---|---|---|---|---|---|---|"]
    rows += [_row(f"{e['date']}, {e['commit']}, {_versions(e)}", [e]) for e in entries]
    if len(entries) > 1:
        rows.append(_row("all", entries))
    kills: Counter[str] = Counter()
    for entry in entries:
        kills.update(entry["kills"])
    kinds = [f"| {kind} | {count:,} |" for kind, count in kills.most_common()]
    return "\n".join([*rows, "", "| what was killed | times |", "|---|---|", *kinds])


def _versions(entry: Entry) -> str:
    return f"PostgreSQL {entry['postgres']}, PySpark {entry['pyspark']}"


def _row(name: str, entries: list[Entry]) -> str:
    sums = [
        sum(e["sent"] for e in entries),
        sum(sum(e["delivered"].values()) for e in entries),
        sum(sum(e["kills"].values()) for e in entries),
        sum(e["lost"] for e in entries),
        sum(e["twice"] + e["unsent"] + e["changed"] for e in entries),
        sum(e["disordered"] for e in entries),
        sum(e["replayed"] for e in entries),
    ]
    return f"| {name} | " + " | ".join(f"{each:,}" for each in sums) + " |"


def page(old: str, entries: list[Entry]) -> str:
    """The page of guarantees, with the tally as it is.

    Raises:
        LookupError: the page has no place for it.
    """
    new, count = _PART.subn(lambda found: f"{found[1]}{text(entries)}\n{found[2]}", old)
    if count != 1:
        raise LookupError(f"{PAGE.name} has no place for the long run")
    return new


def write_page() -> None:
    replace(PAGE, page(PAGE.read_text(), load()))
