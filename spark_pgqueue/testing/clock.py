"""Time that passes at once: the server's clock stays, and the stored times move into the past.

To the queue, an hour that passes and stored times that are all an hour older are the same.
"""

from __future__ import annotations

from datetime import timedelta
from typing import LiteralString

import psycopg
from psycopg import sql
from psycopg.rows import tuple_row

_TIMES: LiteralString = """
select c.relname, array_agg(a.attname), array_agg(a.attndims > 0)
from pg_catalog.pg_class c join pg_catalog.pg_attribute a on a.attrelid = c.oid
where c.relnamespace = 'pgqueue'::pg_catalog.regnamespace and c.relkind = 'r'
  and not c.relispartition and not a.attisdropped
  and a.atttypid in ('timestamptz'::pg_catalog.regtype, 'timestamptz[]'::pg_catalog.regtype)
  and a.attname not in ('created_at', 'installed_at')
group by c.relname order by c.relname
"""
"""Tables with times that are compared with a clock; those left out only say when something was."""

TIMES_OF_HINTS = (
    "due_from",
    "long_from",
    "probe_at",
    "rebuilt_at",
    "gaps_probe",
    "idle_until",
    "assigned_until",
)
"""When a consumer looks again for what it looks for once in a while."""

_EARLIER = sql.SQL("{0} = {0} - {1}")
_ALL_EARLIER = sql.SQL(
    "{0} = case when {0} is not null then array(select at - {1} from unnest({0}) with ordinality"
    " u (at, i) order by i) end"
)
# Delays and leases order the bundles of these lanes: as microseconds.
_PLACES: LiteralString = """
update pgqueue.consumer_messages set place = place - (extract(epoch from {by}) * 1000000)::bigint
where lane in (_pgqueue.lane_delayed(), _pgqueue.lane_long()) and place < 1::bigint << 62
"""
_EXPIRIES: LiteralString = """
update pgqueue.consumer_messages
set note = note || jsonb_build_object(
    'expires', (note ->> 'expires')::bigint - extract(epoch from {by})::bigint)
where note ? 'expires'
"""


def pass_time(connection: psycopg.Connection, by: timedelta) -> None:
    """Move all that the queue compares with its clock into the past: delays, leases, schedules.

    The messages themselves keep the time at which they were inserted.

    Args:
        connection: of a database that is for tests only, as the owner of the schema.
        by: how much time passes.
    """
    with connection.transaction():
        move_times(connection, by)
        hints = sql.SQL(", ").join(
            sql.SQL("hints.{0} = (hints).{0} - {1}").format(sql.Identifier(name), by)
            for name in TIMES_OF_HINTS
        )
        _execute(
            connection,
            sql.SQL(
                "update pgqueue.consumer_cursors set {} where (hints).lanes is not null"
            ).format(hints),
            sql.SQL(_PLACES).format(by=by),
        )


def move_times(connection: psycopg.Connection, by: timedelta) -> None:
    """Move the columns that are times, and expiries: all that there was up to version 2."""
    # Not connection.execute(): the caller's connection may have factories of its own.
    with psycopg.Cursor(connection, row_factory=tuple_row) as cursor:
        tables = cursor.execute(_TIMES).fetchall()
    _execute(
        connection,
        sql.SQL(_EXPIRIES).format(by=by),
        *(
            sql.SQL("update {} set {}").format(
                sql.Identifier("pgqueue", table),
                sql.SQL(", ").join(
                    (_ALL_EARLIER if is_array else _EARLIER).format(sql.Identifier(name), by)
                    for name, is_array in zip(names, are_arrays, strict=True)
                ),
            )
            for table, names, are_arrays in tables
        ),
    )


def _execute(connection: psycopg.Connection, *statements: sql.Composable) -> None:
    # In one message: the project's own tests call this very often.
    connection.execute(sql.SQL(";").join(statements))
