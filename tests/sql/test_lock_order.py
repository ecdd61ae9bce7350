"""The order of locks in `sql/base/locks.sql`: every lock of the SQL has a place in it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from spark_pgqueue.postgres import schema

PLACE = re.compile(r"^-- (\d+)\. ([a-z ]+)  ", re.MULTILINE)
"""A place of the list: its number and its name."""

EXCEPTION = re.compile(r"^--   (\w+\.\w+): ([a-z ,]+) before ([a-z ]+)\.(?:  |$)", re.MULTILINE)
"""A function that waits for a lock of an earlier place while it holds one of a later place."""

NAMED = re.compile(r"-- lock: ([a-z ]+)$")

LOCKS = re.compile(
    r"\bfor (no key update|update|key share|share)\b"
    r"|pg_(try_)?advisory_(xact_)?lock"
    r"|\block table\b"
    r"|\btruncate pgqueue\b"
    r"|'(alter table|drop table|drop sequence|create trigger)\b"
    r"|on conflict \((stream_id, dedup_key|stream_id, name|name|reader)\)"
)
"""What takes a lock: locking clauses, advisory locks, table locks and changes of tables."""

CLASS = re.compile(r"advisory_(?:xact_)?lock(?:_shared)?\(_pgqueue\.lock_class_(\w+)\(")
AWAITED = re.compile(r"await_lock\(_pgqueue\.lock_class_(\w+)\(\), [\w.]+, (true|false)\)")
PASSED_OVER = re.compile(r"skip locked|nowait|pg_try_advisory")
SHARED = re.compile(r"_lock_shared\(|for key share")
DEFINED = re.compile(r"^create or replace (?:function|procedure) (_?pgqueue\.\w+)\(", re.MULTILINE)
CALLED = re.compile(r"(_?pgqueue\.\w+)\s*\(")
EXECUTED = re.compile(r"'(?:select|from) [^']*'")
"""What `_pgqueue.await` or `_pgqueue.run_task` execute: it may call a function."""
LITERAL = re.compile(r"'(?:[^']|'')*'|\$q\$.*?\$q\$|(?P<comment>--[^\n]*)", re.DOTALL)

TRIED = re.compile(r"\b(try_lock_\w+|pg_try_advisory_\w+)\s*\(")
STATEMENT = re.compile(r";|\b(?:then|loop|begin|else)\n|as \$\$")
READS = re.compile(r"\bselect\b|\bfrom pgqueue\.")

CALLED_BY_NAME = {
    "_pgqueue.maintain_segments": [
        "_pgqueue.check_bound",
        "_pgqueue.record_closed",
        "_pgqueue.close_segment",
        "_pgqueue.seal_segment",
        "_pgqueue.add_segment",
        "_pgqueue.empty_segment",
        "_pgqueue.drop_segments",
    ]
}
"""Calls in dynamic SQL."""


LET_GO = {"seqs"}
"""Places that no call holds longer than it takes: never to the end of a transaction."""

SOON = {"new"}
"""Places for which calls wait in tries alone."""


@dataclass(frozen=True)
class Step:
    """A lock that a function takes.

    Attributes:
        place: its name in the list.
        waits: whether the function waits for it; not so if it passes over what others hold.
        shared: whether others may have it at the same time.
    """

    place: str
    waits: bool = True
    shared: bool = False


Functions = dict[str, list["Step | str"]]
"""Of each function what it takes and the functions that it calls, in the order of its text."""


def test_every_lock_is_named_and_its_name_has_a_place() -> None:
    names = {*_places(), "any"}
    wrong = []
    for file, lines in _lines().items():
        for i, line in enumerate(lines):
            found = NAMED.search(line)
            if found and found[1] not in names:
                wrong.append(f"{file}:{i + 1}: no place is called {found[1]}")
            code = line.partition("--")[0]
            if LOCKS.search(code):
                name = _name_of(lines, i)
                if name is None:
                    wrong.append(f"{file}:{i + 1}: the lock has no name: {code.strip()}")
                elif (by_class := CLASS.search(code)) and by_class[1] != name:
                    wrong.append(f"{file}:{i + 1}: the lock {by_class[1]} is called {name}")
    assert not wrong, "\n".join(wrong)


def test_every_place_is_taken_somewhere() -> None:
    taken = {name for lines in _lines().values() for line in lines for name in NAMED.findall(line)}
    assert set(_places()) - taken == set()


def test_no_function_waits_for_an_earlier_place_than_it_holds() -> None:
    allowed = {
        (name, held, waited)
        for name, places, waited in EXCEPTION.findall(_list())
        for held in places.split(", ")
    }
    found = _inversions(_functions(), _places())
    unknown, over = sorted(found - allowed), sorted(allowed - found)
    assert not unknown, f"against the order, and not among the exceptions: {unknown}"
    assert not over, f"exceptions that are none: {over}"


def test_an_inversion_is_found() -> None:
    functions: Functions = {
        "lock_consumer": [Step("consumer")],
        "nack": [Step("claim"), "lock_consumer"],
        "settle": ["lock_consumer", Step("claim")],
        "probe": ["lock_consumer", Step("claim", waits=False)],
    }
    places = {"claim": 1, "consumer": 2}
    assert _inversions(functions, places) == {("settle", "consumer", "claim")}


def _inversions(functions: Functions, places: dict[str, int]) -> set[tuple[str, str, str]]:
    """Of functions the place that each holds, and the earlier one that it then waits for.

    Each is found in the one function where both are different steps. A place does no harm
    when nobody ever waits for it, or for long, when all share it, or when who has it waits for
    nothing.
    """
    steps = [step for some in functions.values() for step in some if isinstance(step, Step)]
    harmful = {step.place for step in steps if step.waits} - LET_GO - SOON
    harmful &= {step.place for step in steps if not step.shared}
    found = set()
    for name, some in functions.items():
        held: set[str] = set()
        for step in some:
            taken = _taken(functions, step)
            waited = {each.place for each in taken if each.waits} & harmful
            found |= {(name, h, w) for w in waited for h in held if places[h] > places[w]}
            held |= {each.place for each in taken} & harmful
    return found


def _taken(functions: Functions, step: Step | str) -> set[Step]:
    """What a step takes, itself or by all that it calls."""
    seen: set[str] = set()
    taken: set[Step] = set()
    todo = [step]
    while todo:
        step = todo.pop()
        if isinstance(step, Step):
            taken.add(step)
        elif step not in seen:
            seen.add(step)
            todo += functions.get(step, [])
    return taken


def test_nothing_is_read_by_the_statement_that_tries_a_lock() -> None:
    """A statement reads what was committed when it began: before it had the lock."""
    parts = list(_parts())
    stable = {
        found[1]
        for part in parts
        if (found := DEFINED.match(part)) and re.search(r"\bstable\b", part.partition("as $$")[0])
    }
    found = []
    for part in parts:
        for statement in STATEMENT.split(LITERAL.sub("", part)):
            for tried in TRIED.finditer(statement):
                later = statement[tried.end() :]
                if READS.search(later) or stable & set(CALLED.findall(later)):
                    found.append(statement.strip())
    assert not found, "\n".join(found)
    assert sum(len(TRIED.findall(part)) for part in parts) > 30


def _functions() -> Functions:
    """All functions of the SQL; those of one name count as one."""
    functions: Functions = {}
    for part in _parts():
        if start := DEFINED.match(part):
            steps = functions.setdefault(start[1], [])
            steps += _steps(part[start.end() :])
            steps += CALLED_BY_NAME.get(start[1], [])
    return functions


def _parts() -> Iterator[str]:
    """The text of each function, and what stands between them."""
    for lines in _lines().values():
        text = "\n".join(lines)
        yield from re.split(r"^(?=create or replace |do \$\$)", text, flags=re.MULTILINE)


def _steps(text: str) -> list[Step | str]:
    lines = text.split("\n")
    plain = LITERAL.sub(lambda found: "\n" * found[0].count("\n"), text).split("\n")
    steps: list[Step | str] = []
    for i, line in enumerate(lines):
        code = line.partition("--")[0]
        name = _name_of(lines, i)
        if name not in (None, "any") and code.strip():
            shared = SHARED.search(code) is not None
            steps.append(Step(name, PASSED_OVER.search(code) is None, shared))
        steps += [Step(place, True, shared == "true") for place, shared in AWAITED.findall(code)]
        steps += CALLED.findall(plain[i])
        for executed in EXECUTED.findall(code):
            steps += re.findall(r"(_pgqueue\.\w+)\(", executed)
    return steps


def _name_of(lines: list[str], i: int) -> str | None:
    """The name of the lock that a line takes: at its end, or alone in the line before it."""
    if found := NAMED.search(lines[i]):
        return found[1]
    found = NAMED.fullmatch(lines[i - 1].strip()) if i else None
    return found[1] if found else None


def _lines() -> dict[str, list[str]]:
    folder = schema.sql_directory()
    files = schema.sql_files()
    return {str(each.relative_to(folder)): each.read_text().splitlines() for each in files}


def _places() -> dict[str, int]:
    return {name: int(number) for number, name in PLACE.findall(_list())}


def _list() -> str:
    """The comment at the top of `base/locks.sql`."""
    text = (schema.sql_directory() / "base/locks.sql").read_text()
    return text.partition("\ncreate ")[0]
