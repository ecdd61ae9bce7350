"""The figures that pages state, from the run of `make compare` that is kept."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from tests.benchmarks.compare import report
from tests.benchmarks.compare.report import Case, Report
from tests.docs.defaults import ROOT, restated

KEPT = ROOT / "tests/benchmarks/figures.json"
PAGE = ROOT / "tests/benchmarks/README.md"
README, QUESTIONS = ROOT / "README.md", ROOT / "sql/guide/questions.md"
FILES = (PAGE, README, QUESTIONS)
"""The pages with figures of it."""

PEERS = ("pgmq", "row per message", "procrastinate", "PgQueuer", "absurd", "PgQue")
"""The columns of the README's table beside ours: names of sides."""

OTHERS, KEYS = "other systems", "FIFO by key"
"""The scenarios that its rows are of."""

BACKLOG = "backlog sent one by one, 1 worker, messages at a time"
"""A line of the first."""


@dataclass(frozen=True)
class Headline:
    """A row of the README's table.

    Attributes:
        label: its first cell.
        scenario, line, point: the case.
        sides: names of sides, by columns of other names.
    """

    label: str
    scenario: str
    line: str
    point: str = ""
    sides: dict[str, str] = field(default_factory=dict)


HEADLINES = (
    Headline("send single messages to 1 consumer", OTHERS, "send single messages, consumers", "1"),
    Headline("... to 10 consumers", OTHERS, "send single messages, consumers", "10"),
    Headline("send batches of 1,000", OTHERS, "send batches of 1,000"),
    Headline("1 worker: receive, acknowledge 1 at a time", OTHERS, BACKLOG, "1"),
    Headline("... 100 at a time", OTHERS, BACKLOG, "100"),
    Headline(
        "... FIFO by key, 10 at a time",
        KEYS,
        "5,000 keys, 1 worker, messages at a time",
        "10",
        {"pgmq": "pgmq, heads", "row per message": "row per message, FIFO by key"},
    ),
    Headline(
        "commit to handler at 1,000/s, 99%",
        OTHERS,
        "at 1,000 a second, from commit to handler",
        "p99",
    ),
    Headline("write-ahead log of a message", OTHERS, "at 1,000 a second: WAL"),
)


def kept() -> Report:
    """The run that pages state."""
    return report.read(KEPT)


def page(file: Path) -> str:
    """The text of a page, with the figures that are kept.

    Raises:
        LookupError: the page lacks a sentence of `stated`, or the run lacks a case.
    """
    found, text = kept(), file.read_text()
    if file == PAGE:
        return report.written(text, found)
    if file == README:
        rows = r"^\| \| spark-pgqueue \|.*\n(?:\|.*\n)+"
        text = re.sub(rows, lambda _: table(found), text, flags=re.MULTILINE)
    for words, values in stated(found)[file]:
        text = restated(file.name, text, words, values)
    return text


def write() -> None:
    """Write all pages."""
    for file in FILES:
        file.write_text(page(file))


def table(found: Report) -> str:
    """The README's table: our figures, and how many times better these are than a peer's."""
    peers = [peer for peer in PEERS if any(has(found, each, peer) for each in HEADLINES)]
    lines = [f"| | spark-pgqueue | {' | '.join(peers)} |", "|---" * (len(peers) + 2) + "|"]
    for headline in HEADLINES:
        case = case_of(found, headline)
        cells = [
            report.shown_ratio(case.ratio(report.OURS, headline.sides.get(peer, peer)))
            if has(found, headline, peer)
            else ""
            for peer in peers
        ]
        value = report.shown_value(case, report.OURS)
        lines.append(f"| {' | '.join([headline.label, value, *cells])} |")
    return "\n".join(lines) + "\n"


def stated(found: Report) -> dict[Path, list[tuple[str, list[str]]]]:
    """By page, the sentences that state figures: a pattern, and the values of its groups."""
    about = found.about
    machine = [f"{about['cpus']}", about["postgres"], about["date"]]
    at_once = [
        report.shown_value(case_of(found, each), report.OURS).removesuffix("/s")
        for each in HEADLINES
        if each.label in ("1 worker: receive, acknowledge 1 at a time", "... 100 at a time")
    ]
    return {
        README: [(r"on (\d+) cores with PostgreSQL ([\d.]+) as installed, ([\d-]+):", machine)],
        QUESTIONS: [
            (
                r"On (\d+) cores, a worker .+? ([\d,]+) messages .+? ([\d,]+) a",
                [machine[0], *at_once],
            )
        ],
    }


def case_of(found: Report, headline: Headline) -> Case:
    """The case that a row shows."""
    where = (headline.scenario, headline.line, headline.point)
    for case in found.cases:
        if (case.scenario, case.line, case.point) == where:
            return case
    raise LookupError(f"the run has no {where}")


def has(found: Report, headline: Headline, peer: str) -> bool:
    """Whether the peer was measured there."""
    return headline.sides.get(peer, peer) in case_of(found, headline).values
