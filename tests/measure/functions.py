"""The functions of `sql/`: where each is, how long it is, and which others it names."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from spark_pgqueue.postgres import schema

# The comment above it, the text up to its end, and its name.
DEFINED = re.compile(
    r"((?:^--[^\n]*\n)*)^(create or replace (?:function|procedure) ((?:_?pgqueue|pgmq)\.\w+)"
    r"[^$]*?\bas\s+(\$\w*\$|').*?\4;)",
    re.MULTILINE | re.DOTALL,
)
COMMENT = re.compile(r"--[^\n]*")
CALLED = re.compile(r"\b((?:_?pgqueue|pgmq)\.\w+)\s*\(")


@dataclass
class Function:
    """A function, or several of one name.

    Attributes:
        name: with its schema.
        file: from the folder `sql`.
        header: the comment above it.
        text: its definition without comments.
        lines: of its definition, with comments.
        longest: of these, where there are several of its name, the lines of one.
        count: how many there are of its name.
        calls: the functions that it calls.
    """

    name: str
    file: str
    header: str
    text: str
    lines: int
    longest: int
    count: int = 1
    calls: set[str] = field(default_factory=set)

    @property
    def bare(self) -> str:
        """Its name without the schema."""
        return self.name.partition(".")[2]


def code(text: str) -> str:
    """SQL without comments."""
    return COMMENT.sub("", text)


def read() -> dict[str, Function]:
    """All functions by name, in the order in which they are installed."""
    found: dict[str, Function] = {}
    folder = schema.sql_directory()
    for path in dict.fromkeys([*schema.sql_files(), *schema.sql_files(schema.PGMQ)]):
        for header, text, name, _ in DEFINED.findall(path.read_text()):
            file, lines = str(path.relative_to(folder)), text.rstrip().count("\n") + 1
            if name in found:
                one = found[name]
                one.text, one.lines, one.count = (
                    one.text + code(text),
                    one.lines + lines,
                    one.count + 1,
                )
                if lines > one.longest:
                    one.longest, one.header = lines, header
            else:
                found[name] = Function(name, file, header, code(text), lines, lines)
    for each in found.values():
        each.calls = {name for name in CALLED.findall(each.text) if name in found} - {each.name}
    return found


def callers(functions: Iterable[Function]) -> dict[str, set[str]]:
    """By name, who calls it."""
    found: dict[str, set[str]] = defaultdict(set)
    for each in functions:
        for name in each.calls:
            found[name].add(each.name)
    return found
