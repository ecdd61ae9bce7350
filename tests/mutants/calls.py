"""A plugin of pytest that records which functions of the SQL each test calls, and its duration.

    pytest -p tests.mutants.calls --record-calls=FOLDER

Each process of pytest writes a file of lines `{"test": ..., "seconds": ..., "calls": [...]}`.
Postgres counts no call of an SQL function that it puts into the query that calls it: such a
function has no test here, and `Calls` takes the tests of the functions that name it.
"""

from __future__ import annotations

import ast
import json
import math
import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psycopg
import pytest

from spark_pgqueue.postgres import connection, schema
from spark_pgqueue.postgres.errors import PgQueueError
from tests.mutants.faults import FUNCTION, Fault

ROOT = Path(__file__).parents[2]
NOT_HERE = ("tests/mutants/", "tests/test_wheel.py", "tests/test_newcomers.py", "tests/notebooks/")
"""Tests that take another copy of the SQL, or all of it."""

COUNTED = """
select distinct schemaname || '.' || funcname from pg_stat_user_functions
where schemaname in ('pgqueue', '_pgqueue', 'pgmq')
"""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record-calls", type=Path)


class Recorder:
    """Asks each database, before it is dropped, which functions were called in it."""

    def __init__(self, folder: Path):
        self._file = folder / f"{os.getpid()}.jsonl"
        self._calls: dict[str, set[str]] = defaultdict(set)

    def databases(self, make: Callable[..., Iterator[str]]) -> Callable[..., Iterator[str]]:
        """The fixture's function that makes a database, with a look before it is dropped."""

        def made(*args: Any) -> Iterator[str]:
            database = make(*args)
            url = next(database)
            yield url
            with suppress(psycopg.Error, PgQueueError), connection.connect(url) as conn:
                conn.execute(  # what a session has counted is there when it ends
                    "select pg_terminate_backend(pid, 1000) from pg_stat_activity"
                    " where datname = current_database() and pid <> pg_backend_pid()"
                )
                test = os.environ["PYTEST_CURRENT_TEST"].rpartition(" ")[0]
                self._calls[test] |= {row[0] for row in conn.execute(COUNTED)}
            next(database, None)

        return made

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        import time

        began = time.monotonic()
        result = yield
        record = {
            "test": item.nodeid,
            "seconds": round(time.monotonic() - began, 3),
            "calls": sorted(self._calls.pop(item.nodeid, ())),
        }
        with self._file.open("a") as file:
            file.write(json.dumps(record) + "\n")
        return result


def pytest_configure(config: pytest.Config) -> None:
    folder: Path | None = config.getoption("--record-calls")
    if folder is None:
        return
    from tests import conftest

    recorder = Recorder(folder)
    conftest.SETTINGS["track_functions"] = "all"
    conftest._database = recorder.databases(conftest._database)
    config.pluginmanager.register(recorder)


def words_of(text: str) -> set[str]:
    """The names in a text, without the prefixes of arguments and variables."""
    return {re.sub("^[pvo]_", "", word) for word in re.findall(r"[a-z]\w{3,}", text.lower())}


class Words:
    """The names in the source of tests, by the function's node id; and in their files."""

    def __init__(self, tests: set[str]):
        self._of: dict[str, set[str]] = {}
        for file in {test.partition("::")[0] for test in tests}:
            if (ROOT / file).is_file():
                source = (ROOT / file).read_text()
                self._of[file] = words_of(source)
                for node in ast.walk(ast.parse(source)):
                    if isinstance(node, ast.FunctionDef):
                        segment = ast.get_source_segment(source, node) or ""
                        self._of[f"{file}::{node.name}"] = words_of(segment)
        self._tests = Counter(word for words in self._of.values() for word in words)

    def weight(self, word: str, test: str) -> float:
        """How much a name says for a test: more if few others have it, less if its file has it."""
        rare = math.log(len(self._of) / max(self._tests[word], 1))
        names, of_file = self._of.get(test, ()), self._of.get(test.partition("::")[0], ())
        return rare * (1 if word in names else 0.3 if word in of_file else 0)


class Calls:
    """Which tests call a function, from the records of a run."""

    def __init__(self, folder: Path):
        records = [
            json.loads(line)
            for file in sorted(folder.glob("*.jsonl"))
            for line in file.read_text().splitlines()
        ]
        self.seconds: dict[str, float] = {each["test"]: each["seconds"] for each in records}
        self._words = Words({test.partition("[")[0] for test in self.seconds})
        self._tests: dict[str, set[str]] = defaultdict(set)
        for each in records:
            for function in each["calls"]:
                self._tests[function].add(each["test"])
        bodies = {
            match["name"]: match["body"]
            for name in ("install.sql", schema.PGMQ)
            for file in schema.sql_files(name)
            for match in FUNCTION.finditer(file.read_text())
        }
        self._callers: dict[str, set[str]] = defaultdict(set)
        for caller, body in bodies.items():
            for called in re.findall(r"\b(?:_?pgqueue|pgmq)\.\w+(?=\s*\()", body):
                self._callers[called].add(caller)

    def of(self, fault: Fault, seconds: float) -> list[str]:
        """The tests that call the function of a fault, as many as take so long.

        First one of each, and of these the short ones that name what the faulty line names; then
        those with other parameters. Names that few tests have count more than those of many.
        """
        text = (schema.sql_directory() / fault.file).read_text()
        line = text[text.rfind("\n", 0, fault.start) : text.find("\n", fault.end)]
        words = words_of(line) | words_of(fault.function)
        seen = Counter[str]()
        order: list[tuple[int, float, float, str]] = []
        for test in sorted(self._tests_of(fault.function), key=self.seconds.__getitem__):
            bare = test.partition("[")[0]
            score = sum(self._words.weight(word, bare) for word in words)
            took = self.seconds[test]
            order.append((seen[bare], -score / math.sqrt(1 + took), took, test))
            seen[bare] += 1
        tests: list[str] = []
        for *_, test in sorted(order):
            if not test.startswith(NOT_HERE) and self.seconds[test] < seconds:
                seconds -= self.seconds[test]
                tests.append(test)
        return tests

    def _tests_of(self, function: str) -> set[str]:
        looked: set[str] = set()
        nearest, found = {function}, self._tests[function]
        while nearest and not found:
            looked |= nearest
            nearest = set[str]().union(*(self._callers[each] for each in nearest)) - looked
            found = set[str]().union(*(self._tests[each] for each in nearest))
        return found
