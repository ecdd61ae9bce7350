"""The files of `sql/` are floors: each calls only functions of files that stand before it."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from spark_pgqueue.postgres import schema
from tests.measure import functions as measured
from tests.sql import core

ASIDE = (
    *("schema.sql", "version.sql", "roles.sql", "function_settings.sql"),
    *("comments.sql", "view_comments.sql"),
)
"""Files without functions of the queue, or that concern all of them."""

HOOKS = "hooks.sql"

COMMENT = re.compile(r"--[^\n]*")
HINT = re.compile(r"hint = (?:format\()?'(?:[^']|'')*'(?:\s*'(?:[^']|'')*')*")
DEFINED = re.compile(r"create or replace (?:function|procedure) (_?pgqueue\.\w+)")
CALLED = re.compile(r"(_?pgqueue\.\w+)\s*\(")
MADE = re.compile(r"^create or replace (?:function|procedure) (?!pg_temp)\S", re.MULTILINE)


def test_a_file_calls_only_what_stands_before_it() -> None:
    folder = schema.sql_directory()
    names = [str(file.relative_to(folder)) for file in schema.sql_files()]
    floors = [name for name in names if not name.startswith(ASIDE)]
    code = {name: HINT.sub("", COMMENT.sub("", (folder / name).read_text())) for name in floors}
    home = {function: name for name in floors for function in DEFINED.findall(code[name])}

    def is_upward(name: str, function: str) -> bool:
        """A hook may be called from below: it is for who does not know what is above."""
        place = home.get(function, name)
        return place != HOOKS and floors.index(place) > floors.index(name)

    upward = [
        f"{name} calls {function} of {home[function]}"
        for name in floors
        for function in sorted(set(CALLED.findall(code[name])))
        if is_upward(name, function)
    ]
    assert not upward, "\n".join(upward)


def test_who_only_looks_asks_states_and_none_of_the_tables_of_claims() -> None:
    """How bundles and gaps make states is said once, in `queue/state/states.sql`."""
    stored = re.compile(rf"\bpgqueue\.(?:{'|'.join((*core.STORED, 'reader_claims'))})\b")
    looking = (
        r"(?:archive|schedules|queue/send)/.*"
        r"|operate/(?:consumer_lag|explain|maintain|outcome|peek|recover|scan\w*|seek"
        r"|stream_lifecycle|views)\.sql"
    )
    folder = schema.sql_directory()
    files = {*schema.sql_files(), *schema.sql_files(schema.PGMQ)}
    names = {str(file.relative_to(folder)): file for file in files}
    wrong = [
        f"{name} names {found}"
        for name, file in sorted(names.items())
        if re.fullmatch(f"{looking}|pgmq/(?:messages|queues).sql|operate/retention.sql", name)
        for found in stored.findall(COMMENT.sub("", file.read_text()))
    ]
    assert not wrong, "\n".join(wrong)


def test_every_file_of_the_sql_is_installed() -> None:
    folder = schema.sql_directory()
    apart = {"install.sql", "uninstall.sql"}
    there = {str(file.relative_to(folder)) for file in folder.rglob("*.sql")} - apart
    both = [*schema.sql_files(), *schema.sql_files(schema.PGMQ), folder / schema.PGMQ]
    assert there == {str(file.relative_to(folder)) for file in both}


def test_a_line_has_at_most_120_columns_and_a_file_at_most_450_lines() -> None:
    wrong = []
    for file in [*schema.sql_files(), *schema.sql_files(schema.PGMQ)]:
        lines = file.read_text().splitlines()
        wrong += [f"{file.name}: {len(lines)} lines"] * (len(lines) > 450)
        wrong += [f"{file}:{i}" for i, line in enumerate(lines, 1) if len(line) > 120]
    assert not wrong, "\n".join(wrong)


def test_a_function_above_60_lines_says_why() -> None:
    wrong = []
    for each in measured.read().values():
        if each.longest > 60 and "60 lines" not in re.sub(r"\s*\n--\s*", " ", each.header):
            wrong.append(f"{each.file}: {each.name} has {each.longest} lines")
    assert not wrong, "\n".join(wrong)


def test_every_function_is_read_and_called() -> None:
    """By another one, by Python, or by a name that is put together."""
    functions = measured.read()
    files = {*schema.sql_files(), *schema.sql_files(schema.PGMQ)}
    text = "\n".join(measured.code(file.read_text()) for file in files)
    assert sum(each.count for each in functions.values()) == len(re.findall(MADE, text))
    python = "\n".join(file.read_text() for file in Path(schema.__file__).parents[1].rglob("*.py"))
    words = Counter(re.findall(r"\w+", text))
    uncalled = [
        name
        for name, each in functions.items()
        if name.startswith("_") and name not in python
        and words[each.bare] <= Counter(re.findall(r"\w+", each.text))[each.bare]
    ]  # fmt: skip
    assert not uncalled, "\n".join(uncalled)
