"""No public function that writes is forgotten by the exploration."""

from __future__ import annotations

import psycopg

from tests.explore.calls import (
    CALLED_BY_ANOTHER,
    CALLS,
    OF_A_SESSION,
    OF_AN_EXPORTER,
    OF_TABLES,
    OF_THE_SERVER,
    WRITES_NOTHING,
)

VOLATILE = """
select proname from pg_proc where pronamespace = 'pgqueue'::regnamespace and provolatile = 'v'
"""


def test_each_public_function_that_writes_is_explored(conn: psycopg.Connection):
    there = {name for (name,) in conn.execute(VOLATILE).fetchall()}
    called = {name for kind in CALLS.values() for name in kind.functions}
    excused = set(CALLED_BY_ANOTHER) | WRITES_NOTHING
    excused |= OF_A_SESSION | OF_AN_EXPORTER | OF_TABLES | OF_THE_SERVER
    assert there - called - excused == set(), "add a call to CALLS, or a reason why not"
    assert excused - there == set(), "there is no such function"
    unused = excused & called - {"start_offset", "send_captured"}
    assert unused == set(), "no excuse is needed"
    assert set(CALLED_BY_ANOTHER.values()) <= set(CALLS)
