"""The map from what the pages promise to its tests, `tests/promises.md`, from the marks of tests.

A test says by `@pytest.mark.promise("guarantee: No loss")` what it checks: a guarantee, a fault or
a feature that a page lists, or the page and what it says.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "tests/promises.md"
GUIDES = {page.stem: page for page in sorted(ROOT.glob("*/guide/*.md"))}
LISTED = {"guarantee": "Guarantees", "fault": "Faults", "feature": "Features"}
"""Kinds of promises beside those of a page, and their headings."""

_ABOUT = """# Promises and their tests

Each test names the promises that it checks by a mark, `promise`, from which `make docs` writes
this page. To run these tests, or those of one file:

```text
make test-all ARGS="-m promise"
make test-all ARGS="-m promise tests/sql/test_invariants.py"
```

[Guarantees](../sql/guide/guarantees.md) lists the guarantees and faults. The sections after the
features cover single pages.
"""


def marked() -> dict[str, list[str]]:
    """The promises that tests name, each with these tests."""
    found: dict[str, list[str]] = {}
    for file in sorted(ROOT.glob("tests/**/test_*.py")):
        for name, promise in _marks(ast.parse(file.read_text())):
            found.setdefault(promise, []).append(f"`{file.relative_to(ROOT)}::{name}`")
    return found


def _marks(module: ast.Module) -> Iterator[tuple[str, str]]:
    for each in module.body:
        if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef)):
            for mark in each.decorator_list:
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.promise":
                    yield from ((each.name, ast.literal_eval(given)) for given in mark.args)


def listed() -> dict[str, list[str]]:
    """What the pages list one by one, in their order, and the features: of each kind, the names."""
    guarantees = GUIDES["guarantees"].read_text()
    faults = guarantees.split("## What fails, and what you see")[1].split("\n## ")[0]
    return {
        "guarantee": re.findall(r"^\d+\. \*\*([^*]+?)\.\*\*", guarantees, re.MULTILINE),
        "fault": [plain(row[0]) for row in rows_of(faults)],
        "feature": sorted(
            promise.removeprefix("feature: ")
            for promise in marked()
            if promise.startswith("feature: ")
        ),
    }


def rows_of(text: str) -> list[list[str]]:
    """The rows of the tables in a text, without their heads."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line[1:-1].split("|")] for line in lines[2:]]


def plain(cell: str) -> str:
    """A cell without links and code."""
    return re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", cell).replace("`", "")


def page() -> str:
    """The page.

    Raises:
        LookupError: a mark names what no page lists.
    """
    tests = marked()
    parts = [_ABOUT]
    for kind, names in listed().items():
        rows = [(name, tests.pop(f"{kind}: {name}", [])) for name in names]
        parts.append(_section(LISTED[kind], kind, rows))
    by_page: dict[str, list[tuple[str, list[str]]]] = {}
    for promise, of in sorted(tests.items()):
        stem, _, name = promise.partition(": ")
        if stem not in GUIDES:
            raise LookupError(f"no page lists {promise!r}, which {of[0]} is marked with")
        by_page.setdefault(stem, []).append((name, of))
    for stem, rows in by_page.items():
        title = GUIDES[stem].read_text().split("\n")[0].removeprefix("# ")
        link = f"[{title}](../{GUIDES[stem].relative_to(ROOT)})"
        parts.append(_section(stem.replace("-", " ").capitalize(), "promise", rows, f"{link}:\n\n"))
    return "\n".join(parts)


def _section(title: str, head: str, rows: list[tuple[str, list[str]]], before: str = "") -> str:
    lines = [f"| {name} | {'<br>'.join(tests)} |\n" for name, tests in rows]
    return f"## {title}\n\n{before}| {head} | tests |\n|---|---|\n{''.join(lines)}"
