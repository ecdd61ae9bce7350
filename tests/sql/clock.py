"""Time that passes at once: all of it, or the end of one lease or delay."""

from __future__ import annotations

from datetime import timedelta

import psycopg

from spark_pgqueue.testing import clock
from spark_pgqueue.testing.clock import TIMES_OF_HINTS
from tests.sql import core

# Where consumers keep when to look again. A look that comes too early is always allowed.
HINTS = "update pgqueue.consumer_cursors set {} where (hints).lanes is not null;"


def pass_time(conn: psycopg.Connection, by: timedelta) -> None:
    """All time passes; also in a schema of version 1 or 2, which tests upgrade."""
    is_old = conn.execute("select pgqueue.schema_version() < 3").fetchone() == (True,)
    (clock.move_times if is_old else clock.pass_time)(conn, by)


def end_lease(conn: psycopg.Connection, *claims: int) -> None:
    """The visibility timeout of these claims passes, and nothing else."""
    if claims:
        core.end_lease(conn, *claims)
    set_hints(conn)


def end_leases(conn: psycopg.Connection) -> None:
    """The visibility timeout of every claim passes, and nothing else."""
    core.end_lease(conn)
    set_hints(conn)


def end_delay(conn: psycopg.Connection, seq: int) -> None:
    """A delayed message is due, with all that is stored with it, and nothing else."""
    core.end_delay(conn, seq)
    set_hints(conn)


def end_delays(conn: psycopg.Connection) -> None:
    """Every message that was taken and is delayed is due, and nothing else."""
    core.end_delay(conn)
    set_hints(conn)


def end_worker_lease(conn: psycopg.Connection, worker: str) -> None:
    """The lease of a worker of a group is over."""
    conn.execute(
        "update pgqueue.group_workers set lease_until = clock_timestamp() - interval '1 s'"
        " where worker = %s",
        [worker],
    )


def look_again(conn: psycopg.Connection) -> None:
    """The consumers look at the next chance for all that they look for once in a while."""
    set_hints(conn)


def set_clock_back(conn: psycopg.Connection, by: timedelta) -> None:
    """The consumers looked a moment ago, when the clock was ahead."""
    set_hints(conn, f"clock_timestamp() + interval '{by.total_seconds()} s'")


def pass_a_minute(conn: psycopg.Connection) -> None:
    """The consumers looked from the beginning a minute ago, and everything else is as it was."""
    conn.execute(HINTS.format("hints.rebuilt_at = (hints).rebuilt_at - interval '1 min'").encode())


def stop_looking(conn: psycopg.Connection) -> None:
    """No time comes at which claims look again for what is due, however long the test takes."""
    conn.execute(
        "create or replace function _pgqueue.not_yet(p_when timestamptz) returns boolean"
        " language sql volatile as $$ select p_when > '-infinity' $$"
    )


def set_hints(conn: psycopg.Connection, to: str = "'epoch'") -> None:
    # one that is null says that there is nothing to look for
    hints = ", ".join(
        f"hints.{c} = case when (hints).{c} is not null then ({to})::timestamptz end"
        for c in TIMES_OF_HINTS
    )
    conn.execute(HINTS.format(hints).encode())
