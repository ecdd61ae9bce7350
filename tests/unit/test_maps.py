"""The maps for maintainers name functions, constants, settings and tests that there are.

A map names a place as `` `file`: `name`, `name` ``. A file is one of `sql/`, of `spark_pgqueue/` or
of the checkout; a name is a function, a view or a column of SQL, or what Python code defines.
"""

import re
import tomllib
from collections.abc import Callable
from datetime import timedelta
from inspect import signature
from pathlib import Path
from typing import Any

import pytest

from spark_pgqueue import client, connect, connect_async
from spark_pgqueue.client import Client
from spark_pgqueue.command_line.arguments import default_of, duration
from spark_pgqueue.command_line.commands.upkeep import maintain
from spark_pgqueue.postgres import schema
from spark_pgqueue.version import VERSION
from tests.docs import defaults
from tests.matrix import PYTHONS
from tests.sql import freeze

ROOT = Path(__file__).parents[2]
SQL = ROOT / "sql"
TESTS = ROOT / "tests"
QUICK = TESTS / "quick.txt"
MAPS = [SQL / "README.md", SQL / "one-receive.md", SQL / "changing.md"]

FILE = r"[\w/]+\.(?:sql|py)"
PLACE = re.compile(rf"`({FILE})`: ((?:`\w+`(?:, )?)+)")
TEST = re.compile(r"`?((?:tests/)?(?:sql|unit|spark)/test_\w+\.py)(?:::(\w+))?")


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def places_in(page: str) -> list[tuple[str, str]]:
    """Each file that a page names, with a name that the page says is in it."""
    text = " ".join(page.split())
    return [(file, name) for file, names in PLACE.findall(text) for name in names_in(names)]


def names_in(text: str) -> list[str]:
    return re.findall(r"`(\w+)`", text)


def find(file: str) -> Path | None:
    """A file as a map names it."""
    paths = [folder / file for folder in (SQL, ROOT / "spark_pgqueue", ROOT)]
    return next((path for path in paths if path.exists()), None)


def defines(path: Path, name: str) -> bool:
    """Whether a file of SQL or Python defines something."""
    text = path.read_text()
    if path.suffix == ".py":
        return bool(re.search(rf"^\s*(?:(?:async )?def |class )?{name}\b(?=[(:=\[ ])", text, re.M))
    routine = rf"create or replace (?:function|procedure) _?pgqueue\.{name}\("
    column = rf"make_view\('{name}'" + (rf"|^    {name} +\w" if "create table" in text else "")
    if path in (SQL / "base/limits.sql", SQL / "log/stream_functions.sql"):  # what a list makes
        column = rf"^        \('{name}', "
    return bool(re.search(rf"{routine}|{column}", text, re.MULTILINE))


@pytest.mark.parametrize("page", MAPS, ids=[page.name for page in MAPS])
def test_what_a_map_names_is_in_the_file_that_it_names(page: Path) -> None:
    places = places_in(page.read_text())
    assert len(places) > 10
    wrong = []
    for file, name in places:
        path = find(file)
        if path is None or not defines(path, name):
            wrong.append(f"{name} is not in {file}, but in {', '.join(homes_of(name)) or 'none'}")
    assert not wrong, "\n".join(wrong)


def homes_of(name: str) -> list[str]:
    """Where something is, that a map looks for elsewhere."""
    files = [*SQL.rglob("*.sql"), *(ROOT / "spark_pgqueue").rglob("*.py")]
    return [str(path.relative_to(ROOT)) for path in files if defines(path, name)]


@pytest.mark.parametrize("page", MAPS, ids=[page.name for page in MAPS])
def test_a_file_that_a_map_names_is_there(page: Path) -> None:
    named = set(re.findall(rf"`({FILE})`", page.read_text()))
    folders = (SQL, TESTS, ROOT / "spark_pgqueue")
    missing = [f for f in named if not find(f) and not any([*each.rglob(f)] for each in folders)]
    assert not missing


def test_the_page_of_settings_has_a_row_for_each() -> None:
    assert len(defaults.SETTINGS) > 20
    page = "sql/guide/settings.md"
    other = defaults.SETTINGS.keys() ^ defaults.named(page)
    assert not other, f"{page} needs a row for each setting, and for no other: {other}"


def test_a_setting_that_no_released_version_has_is_in_the_changelog() -> None:
    released = freeze.sql_of(max(freeze.released()))
    changelog = (ROOT / "CHANGELOG.md").read_text()
    for name in defaults.SETTINGS:
        assert f"'{name}'" in released or f"`{name}`" in changelog, f"CHANGELOG.md lacks {name}"


@pytest.mark.parametrize("file", defaults.FILES)
def test_a_default_that_is_stated_is_that_of_the_code(file: str) -> None:
    assert (ROOT / file).read_text() == defaults.page(file), "`make docs` writes the default"


SAME = [
    (Client.create_group, "partitions", "create_group", "p_partitions"),
    (Client.key_stats, "limit", "key_stats", "p_max"),
    (Client.maintain, "reader_age", "maintain", "p_reader_age"),
    (Client.maintain, "staged_age", "maintain", "p_staged_age"),
    (Client.peek, "max_messages", "peek", "p_max"),
    (Client.peek_at, "max_messages", "peek_at", "p_max"),
    (Client.receive, "look", "receive_where", "p_look"),
    (Client.receive, "max_messages", "receive", "p_max"),
    (Client.redrive, "max_messages", "redrive", "p_max"),
    (Client.schedule_times, "count", "schedule_times", "p_count"),
]
"""Arguments of the client and of SQL functions that are the same."""


@pytest.mark.parametrize(("method", "name", "function", "argument"), SAME)
def test_the_client_has_the_defaults_of_the_functions(
    method: Callable[..., Any], name: str, function: str, argument: str
) -> None:
    default = default_of(method, name)
    text = f"'{default.days} days?'" if isinstance(default, timedelta) else default
    sql = "".join(path.read_text() for path in SQL.rglob("*.sql"))
    head = rf"create or replace function pgqueue\.{function}\([^;]*?"
    assert re.search(rf"{head}\b{argument} \w+ default {text}[,)]", sql)


def test_the_client_and_the_program_have_the_same_defaults_where_they_repeat_them() -> None:
    for name in ("patience", "connections"):
        for ours, theirs in ((connect, client.connect), (connect_async, client.connect_async)):
            if name in signature(ours).parameters:
                assert default_of(ours, name) == default_of(theirs, name)
    for name in ("staged_age", "reader_age"):
        assert duration(default_of(maintain, name)) == default_of(Client.maintain, name)


def named_tests(text: str) -> set[tuple[str, str]]:
    """Files of tests, from the folder of tests, each with the name of a test or nothing."""
    return {(file.removeprefix("tests/"), test) for file, test in TEST.findall(text)}


@pytest.mark.parametrize("page", [*MAPS, TESTS / "README.md", QUICK], ids=lambda page: page.name)
def test_a_test_that_a_map_names_is_there(page: Path) -> None:
    named = named_tests(page.read_text())
    wrong = [
        f"{file}::{test}"
        for file, test in sorted(named)
        if not (TESTS / file).exists() or f"def {test}" not in (TESTS / file).read_text()
    ]
    assert not wrong, "\n".join(wrong)


def test_the_quick_tests_have_every_invariant() -> None:
    lines = QUICK.read_text().split()
    assert "tests/sql/test_invariants.py" in lines
    assert "tests/sql/test_model.py" in lines


def test_every_file_of_the_sql_has_a_floor_in_the_readme() -> None:
    text = MAPS[0].read_text()
    for path in schema.sql_files():
        file = path.relative_to(schema.sql_directory())
        name = file.name if file.parent == Path() else f"{file.parent}/"
        assert f"`{name}`" in text, file


def test_the_changelog_begins_with_the_version_of_the_package_and_of_the_schema() -> None:
    """And both files have the package's."""
    version = PROJECT["version"]
    assert version == VERSION
    newest = (ROOT / "CHANGELOG.md").read_text().split("\n## ")[1]
    assert newest.startswith(f"{version} - ")
    assert f"schema version {schema.expected_version()}" in " ".join(newest.split())


def test_the_metadata_have_the_versions_of_python_that_the_matrix_runs() -> None:
    named = re.findall(r"Python :: (3\.\d+)", " ".join(PROJECT["classifiers"]))
    assert tuple(named) == PYTHONS
    assert PROJECT["requires-python"] == f">={PYTHONS[0]}"


def test_an_error_lists_the_arguments_that_its_message_names():
    """As the column: clients say them by their own names, such as --cron."""
    raised = re.compile(r"raise exception '((?:[^']|'')*)'(.*?)column = '([^']*)'", re.DOTALL)
    found = 0
    for path in schema.sql_files():
        for message, between, column in raised.findall(path.read_text()):
            if "raise exception" not in between:
                found += 1
                named = set(re.findall(r"\bp_\w+", message))
                assert named <= set(re.findall(r"\w+", column)), f"{path.name}: {message}"
    assert found > 100
