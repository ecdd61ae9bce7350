"""Trusted owners: nothing of the schema pgqueue is called before its owners are checked.

A role that may create schemas could create a schema pgqueue before the installation; its functions,
views and triggers would run with all privileges of their caller. So each connection first reads the
catalogue, and refuses a schema with objects of a role that it does not trust. A session trusts

- a role that has all its privileges anyway: its own role, a member of that role, a superuser;
- unless its role is privileged: the current role (`set role`), the database's owner, and members of
  the role pgqueue_owner, which only a role with CREATEROLE can create. A privileged session trusts
  none of these, since a function can `reset role`. As a function can `set role`, too, a role is
  privileged if it is a member of a superuser, of a role with CREATEROLE, or of one that accesses
  files and programs of the server.
"""

from __future__ import annotations

from typing import Any, LiteralString, NamedTuple

import psycopg
from psycopg.rows import tuple_row

from spark_pgqueue.postgres.errors import SCHEMA_VERSION, PgQueueError

LOOK: LiteralString = """
with me as materialized (
    select r.oid, exists (
        select from pg_catalog.pg_roles p
        where (p.rolsuper or p.rolcreaterole
               or p.rolname operator(pg_catalog.=) any ('{pg_execute_server_program,
                   pg_read_server_files, pg_write_server_files}'::pg_catalog.name[]))
          and pg_catalog.pg_has_role(r.oid, p.oid, 'member')) as is_privileged
    from pg_catalog.pg_roles r where r.rolname operator(pg_catalog.=) session_user),
trusted as materialized (
    select r.oid from pg_catalog.pg_roles r cross join me
    where r.oid operator(pg_catalog.=) me.oid
       or (not me.is_privileged
           and (r.rolname operator(pg_catalog.=) current_user
                or r.rolname operator(pg_catalog.=) 'pgqueue_owner'
                or r.oid operator(pg_catalog.=) (
                    select d.datdba from pg_catalog.pg_database d
                    where d.datname operator(pg_catalog.=) pg_catalog.current_database())))),
s as materialized (
    select n.oid, n.nspname, n.nspowner from pg_catalog.pg_namespace n
    where n.nspname operator(pg_catalog.=) 'pgqueue'
       or n.nspname operator(pg_catalog.=) '_pgqueue'),
owned (kind, home, name, owner) as (
    select 'schema', null, s.nspname, s.nspowner from s
    union all
    select 'table', s.nspname, c.relname, c.relowner from pg_catalog.pg_class c join s
        on c.relnamespace operator(pg_catalog.=) s.oid
        and c.relowner operator(pg_catalog.<>) s.nspowner
    union all
    select 'function', s.nspname, p.proname, p.proowner from pg_catalog.pg_proc p join s
        on p.pronamespace operator(pg_catalog.=) s.oid
        and p.proowner operator(pg_catalog.<>) s.nspowner
    union all
    select 'type', s.nspname, t.typname, t.typowner from pg_catalog.pg_type t join s
        on t.typnamespace operator(pg_catalog.=) s.oid
        and t.typowner operator(pg_catalog.<>) s.nspowner
    union all
    select 'function of trigger', c.relname, g.tgname, p.proowner
    from pg_catalog.pg_class c join s on c.relnamespace operator(pg_catalog.=) s.oid
    join pg_catalog.pg_trigger g on g.tgrelid operator(pg_catalog.=) c.oid
    join pg_catalog.pg_proc p on p.oid operator(pg_catalog.=) g.tgfoid
        and p.proowner operator(pg_catalog.<>) s.nspowner)
select pg_catalog.current_setting('array_nulls'),
       case when f.owner is null
           then pg_catalog.to_regprocedure('pgqueue.schema_version()') is not null end,
       pg_catalog.concat(f.kind, ' ', f.home, case when f.home is not null then '.' end, f.name),
       pg_catalog.pg_get_userbyid(f.owner)::pg_catalog.text,
       session_user::pg_catalog.text,
       me.is_privileged
from me left join lateral (
    select o.kind, o.home, o.name, o.owner from owned o
    where not exists (
        select from trusted t where pg_catalog.pg_has_role(o.owner, t.oid, 'member'))
    limit 1) f on true
"""
"""One row for `judge`. It uses only functions and operators of pg_catalog, in any search path."""


class Look(NamedTuple):
    """The result of the check, if all owners are trusted.

    Attributes:
        array_nulls: the setting of this name.
        is_installed: whether the schema is installed.
    """

    array_nulls: str
    is_installed: bool


def judge(row: tuple[Any, ...] | None) -> Look:
    """Judge the row of `LOOK`.

    Raises:
        PgQueueError: PQ011, the schema or an object in it belongs to a role that this session does
            not trust.
    """
    if row is None:
        raise PgQueueError("the role of the session no longer exists", sqlstate=SCHEMA_VERSION)
    array_nulls, is_installed, what, owner, role, is_privileged = row
    if owner is None:
        return Look(array_nulls, is_installed)
    if is_privileged:
        hint = (
            f"connect as {owner}, or as a role that neither is nor may become a superuser or one "
            "that creates roles"
        )
    else:
        quoted = owner.replace('"', '""')  # an administrator copies it
        hint = (
            f"to let {owner} own the queue, run as an administrator: create role pgqueue_owner "
            f'nologin; grant pgqueue_owner to "{quoted}"'
        )
    raise PgQueueError(
        f"the {what} belongs to {owner}, and is not run with the rights of {role}",
        hint=f"{hint}; if it was created by an untrusted role, drop it",
        sqlstate=SCHEMA_VERSION,
    )


def check(conn: psycopg.Connection[Any]) -> Look:
    """Read the catalogue and judge. Errors as in `judge`."""
    # Plain rows, whatever row factory the caller's connection has.
    with psycopg.Cursor(conn, row_factory=tuple_row) as cursor:
        return judge(cursor.execute(LOOK).fetchone())
