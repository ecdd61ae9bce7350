"""The files of `sql/` are floors: each calls only functions of files that stand before it."""

from __future__ import annotations

import re

from spark_pgqueue.postgres import schema

ASIDE = (
    *("tables/", "schema.sql", "version.sql", "roles.sql", "settings.sql"),
    *("comments.sql", "view_comments.sql"),
)
"""Files without functions of the queue, or that concern all of them."""

COMMENT = re.compile(r"--[^\n]*")
HINT = re.compile(r"hint = (?:format\()?'(?:[^']|'')*'(?:\s*'(?:[^']|'')*')*")
DEFINED = re.compile(r"create or replace (?:function|procedure) (_?pgqueue\.\w+)")
CALLED = re.compile(r"(_?pgqueue\.\w+)\s*\(")


def test_a_file_calls_only_what_stands_before_it() -> None:
    folder = schema.sql_directory()
    names = [str(file.relative_to(folder)) for file in schema.sql_files()]
    floors = [name for name in names if not name.startswith(ASIDE)]
    code = {name: HINT.sub("", COMMENT.sub("", (folder / name).read_text())) for name in floors}
    home = {function: name for name in floors for function in DEFINED.findall(code[name])}
    upward = [
        f"{name} calls {function} of {home[function]}"
        for name in floors
        for function in sorted(set(CALLED.findall(code[name])))
        if function in home and floors.index(home[function]) > floors.index(name)
    ]
    assert not upward, "\n".join(upward)


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
    made = r"((?:^--.*\n)*)(create or replace (?:function|procedure) (_?pgqueue\.\w+)(?:.*\n)*?)"
    end = r"(?=\n|(?:--|create|revoke|do )|\Z)"
    wrong = []
    for file in schema.sql_files():
        for header, text, name in re.findall(made + end, file.read_text(), re.MULTILINE):
            lines = text.rstrip().count("\n") + 1
            if lines > 60 and "60 lines" not in re.sub(r"\s*\n--\s*", " ", header):
                wrong.append(f"{file.name}: {name} has {lines} lines")
    assert not wrong, "\n".join(wrong)
