"""An installation that is rolled back: what it changes, which locks it takes, and for how long."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial

import psycopg
from psycopg.rows import tuple_row

from spark_pgqueue.postgres import features, schema

OBJECTS = """
select kind, name, pg_catalog.md5(definition)
from pg_catalog.pg_namespace n
cross join lateral (
    select 'table' as kind, c.oid::pg_catalog.regclass::text as name,
           (select pg_catalog.string_agg(
                pg_catalog.concat_ws(' ', attname, pg_catalog.format_type(atttypid, atttypmod),
                                     attnotnull, pg_catalog.pg_get_expr(adbin, adrelid)),
                ', ' order by attname)
            from pg_catalog.pg_attribute a
            left join pg_catalog.pg_attrdef d on (d.adrelid, d.adnum) = (a.attrelid, a.attnum)
            where attrelid = c.oid and a.attnum > 0 and not attisdropped) as definition
    from pg_catalog.pg_class c where relnamespace = n.oid and relkind in ('r', 'p')
    union all
    select 'index', indexrelid::pg_catalog.regclass::text, pg_catalog.pg_get_indexdef(indexrelid)
    from pg_catalog.pg_index join pg_catalog.pg_class c on c.oid = indexrelid
    where c.relnamespace = n.oid
    union all
    select 'constraint', conrelid::pg_catalog.regclass || ' ' || conname,
           pg_catalog.pg_get_constraintdef(oid)
    from pg_catalog.pg_constraint where connamespace = n.oid and contype not in ('p', 'u', 'n')
    union all
    select 'view', oid::pg_catalog.regclass::text, pg_catalog.pg_get_viewdef(oid)
    from pg_catalog.pg_class where relnamespace = n.oid and relkind = 'v'
    union all
    select 'function', oid::pg_catalog.regprocedure::text, pg_catalog.pg_get_functiondef(oid)
    from pg_catalog.pg_proc where pronamespace = n.oid and prokind <> 'a') o
where n.nspname in ('pgqueue', 'pgmq')
"""
"""What others may use, and the tables: internal functions are in the schema _pgqueue."""

KINDS = ("table", "index", "constraint", "view", "function")

TABLES = """
select oid::bigint, oid::pg_catalog.regclass::text from pg_catalog.pg_class
where relnamespace = any (array(select oid from pg_catalog.pg_namespace
                                where nspname in ('pgqueue', '_pgqueue', 'pgmq')))
  and relkind in ('r', 'p')
"""

LOCKS = """
select distinct on (relation) relation::bigint, mode
from pg_catalog.pg_locks
join pg_catalog.unnest(array['AccessExclusiveLock', 'ExclusiveLock', 'ShareRowExclusiveLock',
                             'ShareLock']) with ordinality m (mode, rank) using (mode)
where pid = pg_catalog.pg_backend_pid() and granted and locktype = 'relation'
order by relation, rank
"""
"""The strongest of each table, if statements that write to the table wait for it."""

ROWS = """
select relid::bigint, relid::pg_catalog.regclass::text, n_tup_ins + n_tup_upd + n_tup_del
from pg_catalog.pg_stat_xact_all_tables
where schemaname in ('pgqueue', '_pgqueue', 'pgmq')
"""
"""What this transaction did, and those before it that the session has not reported yet."""


@dataclass(frozen=True)
class Lock:
    """A lock of a table on which other sessions would wait."""

    table: str
    mode: str
    """The name in Postgres' documentation, in lower case, such as "access exclusive"."""
    seconds: float
    """At most how long it would be held: from the begin of the part that took it to the end."""


@dataclass(frozen=True)
class DryRun:
    """What an installation did before it was rolled back."""

    installed: int | None
    """The version before; None without a schema."""
    version: int
    """The version that it installed."""
    seconds: float
    locks: list[Lock]
    created: dict[str, list[str]]
    """Names of objects, by kind: those of `KINDS`."""
    dropped: dict[str, list[str]]
    changed: dict[str, list[str]]
    rows: dict[str, int]
    """The number of rows that were written or deleted, by table."""


def dry_run(
    conn: psycopg.Connection, *, pgmq: bool = False, without: Collection[str] = ()
) -> DryRun:
    """Install or upgrade the schema pgqueue in one transaction, and roll it back.

    It takes the same locks as the installation, for the same time.

    Args:
        conn: a connection as the role that owns, or will own, the schema, in no transaction.
        pgmq: also the schema pgmq, see `schema.install`.
        without: features to leave out, see `schema.install`.

    Raises:
        PgQueueError: as in `schema.install`.
    """
    left_out, found = features.known(without), list[DryRun]()
    installed = schema.installed_version(conn)
    schema.in_transaction(conn, partial(_install, conn, installed, pgmq, left_out, found))
    return found[-1]


def _install(
    conn: psycopg.Connection,
    installed: int | None,
    pgmq: bool,
    without: frozenset[str],
    found: list[DryRun],
) -> None:
    cursor = psycopg.Cursor(conn, row_factory=tuple_row)
    # as in the installation: names and definitions are written by it
    cursor.execute("set local search_path = pg_catalog, pg_temp")
    tables = dict(cursor.execute(TABLES).fetchall())
    rows_before = {oid: count for oid, _, count in cursor.execute(ROWS)}
    before = _objects(cursor)
    begun = part = time.monotonic()
    held: dict[int, tuple[str, float]] = {}

    def look() -> None:
        nonlocal part
        for oid, mode in cursor.execute(LOCKS):
            if oid in tables and held.get(oid, [None])[0] != mode:
                held[oid] = mode, part
        part = time.monotonic()

    for name in ("install.sql", *([schema.PGMQ] if pgmq else [])):
        schema.execute(conn, name, without, look)
    end = time.monotonic()
    after = _objects(cursor)
    rows = {table: count - rows_before.get(oid, 0) for oid, table, count in cursor.execute(ROWS)}
    found.append(
        DryRun(
            installed=installed,
            version=schema.expected_version(),
            seconds=round(end - begun, 3),
            locks=sorted(
                (
                    Lock(tables[oid], _mode(mode), round(end - since, 3))
                    for oid, (mode, since) in held.items()
                ),
                key=lambda lock: (-lock.seconds, lock.mode, lock.table),
            ),
            created=_by_kind(after.keys() - before.keys()),
            dropped=_by_kind(before.keys() - after.keys()),
            changed=_by_kind(
                {each for each in before.keys() & after.keys() if before[each] != after[each]}
            ),
            rows={table: count for table, count in sorted(rows.items()) if count},
        )
    )
    raise psycopg.Rollback


def _objects(cursor: psycopg.Cursor) -> dict[tuple[str, str], str | None]:
    return {(kind, name): digest for kind, name, digest in cursor.execute(OBJECTS)}


def _by_kind(objects: Collection[tuple[str, str]]) -> dict[str, list[str]]:
    found = {kind: sorted(name for each, name in objects if each == kind) for kind in KINDS}
    return {kind: names for kind, names in found.items() if names}


def _mode(mode: str) -> str:
    words = "".join(f" {letter.lower()}" if letter.isupper() else letter for letter in mode)
    return words.removesuffix(" lock").strip()
