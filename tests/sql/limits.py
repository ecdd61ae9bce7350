"""The queue's limits: how much one statement takes, walks over, or puts into one run.

Each is a function without arguments in the schema _pgqueue, named limit_ and what it limits. With
all of them at 2 or 3, histories of a few messages reach what otherwise needs thousands.
"""

from __future__ import annotations

import psycopg

THREE = {
    *("ahead", "chain", "chain_of_stream", "claim_all", "counted", "cut", "deleted", "due"),
    *("entries", "error", "expired", "filters", "inspected", "lanes", "schedules", "shown"),
    *("small", "takes", "unlocked_seqs"),
}
"""The limits that `shrink` sets to 3; all others it sets to 2, so limits differ from each other."""

# By name and type, the limits that are whole numbers.
FIND = """
select p.proname, format_type(p.prorettype, null)
from pg_proc p
where p.pronamespace = '_pgqueue'::regnamespace and p.proname like 'limit\\_%'
  and p.pronargs = 0 and p.prorettype in ('int'::regtype, 'bigint'::regtype)
order by p.proname
"""


def limit(conn: psycopg.Connection, name: str, otherwise: int) -> int:
    """The limit of this name, or what it is without such a function."""
    function = f"_pgqueue.limit_{name}"
    found = conn.execute("select to_regprocedure(%s)", [f"{function}()"]).fetchone()
    if found is None or found[0] is None:
        return otherwise
    row = conn.execute(f"select {function}()".encode()).fetchone()
    return otherwise if row is None else row[0]


def set_constant(conn: psycopg.Connection, name: str, to: object) -> None:
    """Let a function without arguments of the schema _pgqueue, such as a limit, return this."""
    find = "select prorettype::regtype from pg_proc where oid = %s::regprocedure"
    row = conn.execute(find, [f"_pgqueue.{name}()"]).fetchone()
    assert row is not None
    conn.execute(
        (
            f"create or replace function _pgqueue.{name}() returns {row[0]}"
            f" language sql immutable as $$ select '{to}'::{row[0]} $$"
        ).encode()
    )


def shrink(conn: psycopg.Connection, to: int | None = None) -> list[str]:
    """Set every limit of a database to a number, or to 2 or 3; returns their names."""
    found = [name for name, _ in conn.execute(FIND).fetchall()]
    for name in found:
        set_constant(conn, name, to or 2 + (name.removeprefix("limit_") in THREE))
    return found
