"""Time that passes at once: the server's clock stays, and the times that are stored move.

To the queue, an hour that passes and stored times that are all an hour older are the same.
"""

from __future__ import annotations

from datetime import timedelta

import psycopg

from tests.sql import core

# Where consumers keep when to look again. A look that comes too early is always allowed.
HINTS = "update pgqueue.consumer_cursors set {} where (hints).lanes is not null;"
TIMES_OF_HINTS = (
    "due_from",
    "long_from",
    "probe_at",
    "rebuilt_at",
    "gaps_probe",
    "idle_until",
    "assigned_until",
)

# Up to version 2 of the schema, which tests upgrade from, these had times, and no place was one.
HAD_TIMES = {"consumer_cursors"}

# What was stored once and is compared with no clock.
TIMES = """
select c.relname, array_agg(quote_ident(a.attname))
from pg_class c join pg_attribute a on a.attrelid = c.oid
where c.relnamespace = 'pgqueue'::regnamespace and c.relkind = 'r' and not c.relispartition
  and a.atttypid = 'timestamptz'::regtype and not a.attisdropped
  and a.attname not in ('created_at', 'installed_at')
group by c.relname order by c.relname
"""


def pass_time(conn: psycopg.Connection, by: timedelta) -> None:
    """All that the queue compares with its clock moves into the past: leases, delays, ages.

    The messages themselves keep the time at which they were inserted.
    """
    with conn.transaction():
        moves = ""  # all in one go: this is called very often
        times = dict(conn.execute(TIMES).fetchall())
        for table, columns in times.items():
            moved = ", ".join(f"{each} = {each} - interval '{by}'" for each in columns)
            moves += f"update pgqueue.{table} set {moved};"
        if not HAD_TIMES & times.keys():
            moves += HINTS.format(
                ", ".join(f"hints.{c} = (hints).{c} - interval '{by}'" for c in TIMES_OF_HINTS)
            )
        conn.execute(moves.encode())
        if not HAD_TIMES & times.keys():
            core.shift_places(conn, by)
        core.expire_earlier(conn, by)


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
