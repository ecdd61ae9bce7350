"""Cases of one test that share a database: to make one, and its plans, takes longer than a case."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from tests.sql import checker
from tests.sql.explaining import check_explanations
from tests.sql.queue import Conn, rows, value

Test = Callable[..., None]

STALE = ("begun", "face", "keyed", "new_role", "reader", "sent", "writer")
"""Fixtures of which a new stream has nothing: tests that need one are parametrized."""


def for_each(name: str, cases: Iterable[Any]) -> Callable[[Test], Test]:
    """Run a test with each of these as this argument, and with a new stream s, in one database.

    Several names, as in "before, after", have cases that are tuples. As with
    `pytest.mark.parametrize`, a failure says which case it is, though later cases do not run then.
    Between two cases, other sessions are closed, and if the test has the fixture
    `allowed_afterwards`, the checker looks at what the case left. Statistics, sinks, tables and
    replaced functions stay: for a test that goes by one of these, parametrize.
    """
    names = name.split(", ")
    listed = [case if len(names) > 1 else (case,) for case in cases]

    def decorate(test: Test) -> Test:
        wanted = inspect.signature(test).parameters

        @functools.wraps(test)
        def run(request: pytest.FixtureRequest, conn: Conn, **others: Any) -> None:
            assert not {*STALE} & {*request.fixturenames}
            known = {"request": request, "conn": conn, **others}
            for number, case in enumerate(listed):
                if number > 0:
                    known["stream"] = begin_next(conn, request)
                known |= zip(names, case, strict=True)
                try:
                    test(**{each: known[each] for each in wanted})
                except BaseException as error:
                    error.add_note(f"in the case {name} = {case}")
                    raise

        ours = [each for each in dict.fromkeys(("request", "conn", *wanted)) if each not in names]
        kind = inspect.Parameter.KEYWORD_ONLY
        signature = inspect.Signature([inspect.Parameter(each, kind) for each in ours])
        run.__signature__ = signature  # type: ignore[attr-defined]
        return run

    return decorate


def begin_next(conn: Conn, request: pytest.FixtureRequest) -> int:
    """Look at what a case leaves, drop all streams, and make the stream s; returns its id."""
    if "session" in request.fixturenames:
        request.getfixturevalue("session").close()
    if "allowed_afterwards" in request.fixturenames:
        checker.check(conn)
        check_explanations(conn)
    conn.execute("reset lock_timeout; reset plan_cache_mode; reset track_functions")
    for (stream,) in rows(conn, "select name from pgqueue.streams"):
        value(conn, "drop_stream", stream)
    return value(conn, "create_stream", "s")
