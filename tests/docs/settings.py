"""The table at the end of `sql/changing.md`: where each setting acts, and which tests know it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "sql" / "changing.md"

_PART = re.compile(r"(<!-- written by make docs: settings -->\n).*?(<!-- to here -->)", re.DOTALL)
_NAME = re.compile(r"\('(?:consumer|stream)',\s+'(\w+)',")
_FUNCTION = re.compile(
    r"^create or replace function _?pgqueue\.(\w+)\(.*?(\$\w*\$).*?\2;", re.MULTILINE | re.DOTALL
)
_TESTS_SHOWN = 8


def page(text: str) -> str:
    """The page, with its table."""
    return _PART.sub(lambda found: f"{found[1]}{_table()}\n{found[2]}", text)


def rows() -> Iterator[tuple[str, str, str]]:
    """Each setting, the functions that read it, and the tests that name it most."""
    names = _NAME.findall((ROOT / "sql" / "base" / "settings.sql").read_text())
    sources = {
        file.relative_to(ROOT / "sql"): file.read_text()
        for file in sorted((ROOT / "sql").rglob("*.sql"))
        if "migrations" not in file.parts and file.name != "settings.sql"
    }
    tests = {
        file.relative_to(ROOT): file.read_text()
        for folder in ("sql", "unit", "spark")
        for file in sorted(
            (ROOT / "tests" / folder).glob("*.py")
        )  # with the model, the crossing and the checker
        if file.name not in ("test_maps.py", "queue.py")  # they have all settings
    }
    bodies = {
        file: [(found[1], found[0]) for found in _FUNCTION.finditer(text)]
        for file, text in sources.items()
    }
    words = {file: Counter(re.findall(r"\w+", text)) for file, text in tests.items()}
    for name in names:
        read = re.compile(rf"\w\)?\.{name}\b")
        functions = "; ".join(
            f"`{file}`: " + ", ".join(f"`{function}`" for function in dict.fromkeys(found))
            for file, functions in bodies.items()
            if (found := [f for f, body in functions if f".{name}" in body and read.search(body)])
        )
        known = Counter({file: words[file][name] for file in tests})
        shown = [f"`{file}`" for file, count in known.most_common(_TESTS_SHOWN) if count]
        yield name, functions, ", ".join(shown)


def _table() -> str:
    top = "| setting | functions that read it | tests, and parts of tests, that name it most |"
    return "\n".join([top, "|---|---|---|", *(f"| `{n}` | {f} | {t} |" for n, f, t in rows())])
