"""Looks at the pages that are named, or at all of them; ends with 1 where it finds something."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from proselint.tools import LintFile

from tests.pages import ROOT, all_pages
from tests.prose.markdown import prose_of
from tests.prose.rules import ALL

GENERATED = {"sql/guide/reference.md", "tests/promises.md"}
"""Pages whose sentences stand elsewhere."""


def pages() -> list[str]:
    """The pages of the project that the linter looks at."""
    names = [str(page.relative_to(ROOT)) for page in all_pages()]
    return [name for name in names if name not in GENERATED]


def findings(name: str, text: str) -> Iterator[str]:
    """What is to be mended in a page: the place, the rule, and why."""
    file = LintFile(name, prose_of(text))
    results = [result for check in ALL for result in check.check_with_flags(file.content)]
    for result in sorted(results, key=lambda each: each.span):
        before = file.content[: result.span[0]]  # begins with an empty line that the page has not
        line, column = before.count("\n"), len(before) - before.rfind("\n")
        yield f"{name}:{line}:{column}: {result.check_path}: {result.message}"


def main(names: list[str]) -> int:
    """Prints what is to be mended in these pages, or in all; returns the exit status."""
    names = names or pages()
    found = [each for name in names for each in findings(name, (ROOT / name).read_text())]
    print("\n".join(found) or f"{len(names)} pages: nothing to mend")
    return bool(found)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
