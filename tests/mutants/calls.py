"""A plugin of pytest that records which functions of the SQL each test calls, and its duration.

    pytest -p tests.mutants.calls --record-calls=FOLDER

Each process of pytest writes a file of lines `{"test": ..., "seconds": ..., "calls": [...]}`.
Postgres counts no call of an SQL function that it puts into the query that calls it: such a
function has no test here, and `Calls` takes the tests of the functions that name it.
"""

from __future__ import annotations

import json
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
from tests.mutants.faults import FUNCTION

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


class Calls:
    """Which tests call a function, from the records of a run."""

    def __init__(self, folder: Path):
        records = [
            json.loads(line)
            for file in sorted(folder.glob("*.jsonl"))
            for line in file.read_text().splitlines()
        ]
        self.seconds: dict[str, float] = {each["test"]: each["seconds"] for each in records}
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

    def of(self, function: str, seconds: float) -> list[str]:
        """The tests that call a function, as many as take so long: first one of each, the shortest
        first, then those with other parameters."""
        order = sorted(self._tests_of(function), key=self.seconds.__getitem__)
        seen = Counter[str]()
        rank: dict[str, int] = {}
        for test in order:
            bare = test.partition("[")[0]
            rank[test] = seen[bare]
            seen[bare] += 1
        tests = []
        for test in sorted(order, key=rank.__getitem__):
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
