"""Single faults in the functions of the SQL, drawn by a seed from operators over their text.

An operator knows nothing of what a function does or which test guards it: it turns a comparison, or
leaves a predicate, a lock or a call out, wherever there is one.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from spark_pgqueue.postgres import schema

FUNCTION = re.compile(
    r"^create or replace (?:function|procedure) (?P<name>_?pgqueue\.\w+|pgmq\.\w+)\(.*?"
    r"\$\$(?P<body>.*?)\$\$",
    re.MULTILINE | re.DOTALL,
)
NO_CODE = re.compile(r"--[^\n]*|'(?:[^']|'')*'")


@dataclass(frozen=True)
class Fault:
    """A change of one place in a function.

    Attributes:
        file: its path below `sql/`.
        function: the function, with its schema.
        operator: what was done to the place.
        start, end: the place, in the file's text.
        new: what stands there instead.
        line: the place's line in the file.
        old: what stood there.
    """

    file: str
    function: str
    operator: str
    start: int
    end: int
    new: str
    line: int
    old: str

    def __str__(self) -> str:
        old, new = (" ".join(text.split()) for text in (self.old, self.new))
        return f"{self.file}:{self.line} {self.function}: {self.operator}: {old!r} -> {new!r}"

    def plant(self, folder: Path) -> None:
        """Put the fault into a copy of `sql/`."""
        path = folder / self.file
        text = path.read_text()
        assert text[self.start : self.end] == self.old, f"{self.file} has changed"
        path.write_text(text[: self.start] + self.new + text[self.end :])


@dataclass(frozen=True)
class Operator:
    """A kind of fault: a pattern of code, and what takes the place of a match (None: no fault)."""

    name: str
    pattern: re.Pattern[str]
    turn: Callable[[re.Match[str]], str | None]


def _swap(**pairs: str) -> Callable[[re.Match[str]], str]:
    both = {**pairs, **{new: old for old, new in pairs.items()}}
    return lambda match: both[match[0]]


def _comparison(match: re.Match[str]) -> str:
    return {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "=": "<>", "<>": "="}[match[0]]


def _balanced(match: re.Match[str]) -> str | None:
    """Nothing, where the match leaves no half of a pair behind."""
    of = match[0]
    whole = of.count("(") == of.count(")") and of.count("[") == of.count("]")
    words = re.findall(r"\b(?:case|begin|if|end)\b", of)
    return "" if whole and not words else None


def _first_argument(match: re.Match[str]) -> str | None:
    """The first argument of a call alone."""
    inner = match[1]
    depth = 0
    for place, letter in enumerate(inner):
        depth += (letter in "([") - (letter in ")]")
        if letter == "," and depth == 0:
            return f"({inner[:place]})"
    return None


_TEST = r"(?:is (?:not )?null|=|<|>|<=|>=) [\w.]+"
_CALL = r"(?:_?pgqueue|pgmq|pg_catalog)?\.?\w+"
_NESTED = r"((?:[^()]|\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\))*)"

OPERATORS = [
    Operator(
        "a comparison is turned",
        re.compile(r"(?<=\s)(?:<=|>=|<>|<|>|=)(?=\s)"),
        _comparison,
    ),
    Operator(
        "a predicate is left out",
        re.compile(rf"(?<=\n)[ ]*and [^\n;]*(?=\n)|(?<=\s)and (?:not )?[\w.]+ {_TEST}(?=[\s;)])"),
        _balanced,
    ),
    Operator(
        "a lock is left out",
        re.compile(
            r"\bfor (?:no key )?update(?: of \w+)?(?: skip locked| nowait)?"
            rf"|perform (?:_pgqueue\.\w*(?:lock|await)\w*|pg_advisory\w*)\({_NESTED}\)(?=;)"
        ),
        lambda match: "null" if match[0].startswith("perform") else "",
    ),
    Operator(
        "a plus one is left out, or one too many",
        re.compile(r"(?<=[\w)]) ([+-]) 1\b(?![.\d])"),
        lambda match: "" if match[1] == "+" else f" {match[1]} 2",
    ),
    Operator(
        "a call is left out",
        re.compile(rf"(?<=\s)perform {_CALL}\({_NESTED}\)(?=;)"),
        lambda match: "null",
    ),
    Operator(
        "the least for the greatest",
        re.compile(r"\b(?:min|max|least|greatest|lower|upper)(?=\()"),
        _swap(min="max", least="greatest", lower="upper"),
    ),
    Operator(
        "a coalesce is dropped",
        re.compile(rf"\bcoalesce\({_NESTED}\)"),
        _first_argument,
    ),
    Operator(
        "a negation is turned",
        re.compile(r"\bis not null\b|\bis null\b|\bnot exists\b|\bexists\b(?= \()"),
        lambda match: {"is not null": "is null", "is null": "is not null",
                       "not exists": "exists", "exists": "not exists"}[match[0]],
    ),
    Operator(
        "an order is turned",
        re.compile(r"(?<=order by )[\w.]+(?=[\s,)])(?! desc)"),
        lambda match: f"{match[0]} desc",
    ),
]  # fmt: skip


def all_faults() -> list[Fault]:
    """Every fault of every operator, in the order of the files."""
    folder = schema.sql_directory()
    files = [*schema.sql_files(), *schema.sql_files(schema.PGMQ)]
    return [
        fault
        for file in files
        for fault in _faults_of(str(file.relative_to(folder)), file.read_text())
    ]


def _faults_of(file: str, text: str) -> Iterator[Fault]:
    code = NO_CODE.sub(lambda match: re.sub(r"[^\n]", "\0", match[0]), text)
    for function in FUNCTION.finditer(text):
        start, end = function.span("body")
        for operator in OPERATORS:
            for match in operator.pattern.finditer(code, start, end):
                new = operator.turn(match)
                if new is None or "\0" in new:
                    continue
                line = text.count("\n", 0, match.start()) + 1
                old = text[match.start() : match.end()]
                place = match.start(), match.end()
                yield Fault(file, function["name"], operator.name, *place, new, line, old)


def by_name() -> dict[str, Fault]:
    """All faults, by names that other changes of their files leave as they are."""
    named: dict[str, Fault] = {}
    for fault in all_faults():
        what = re.sub(r"^\S+ ", "", str(fault))
        nth = next(n for n in itertools.count(1) if f"{what} #{n}" not in named)
        named[f"{what} #{nth}"] = fault
    return named


def name_of(fault: Fault) -> str:
    """The name of a fault."""
    return next(name for name, each in by_name().items() if each == fault)


def draw(seed: int, count: int) -> list[Fault]:
    """As many faults of all operators, each operator as likely as another, by a seed."""
    luck = random.Random(seed)
    by_operator: dict[str, list[Fault]] = {}
    for fault in all_faults():
        by_operator.setdefault(fault.operator, []).append(fault)
    for faults in by_operator.values():
        luck.shuffle(faults)
    drawn: list[Fault] = []
    while len(drawn) < count:
        drawn.append(by_operator[luck.choice(list(by_operator))].pop())
    return drawn
