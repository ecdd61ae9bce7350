"""A schema pgqueue that somebody prepared: it notes when something of it runs as a superuser."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
from psycopg.conninfo import make_conninfo

from spark_pgqueue.postgres import connection, schema

_TRAP = """
create schema {role};
create sequence {role}.noted;
create function {role}.note() returns bool language plpgsql as $$ begin
    if current_setting('is_superuser') = 'on' then perform nextval('{role}.noted'); end if;
    return true; end $$;
create function {role}.noting() returns trigger language plpgsql as $$ begin
    perform {role}.note(); return new; end $$;
grant usage on schema {role} to public;
do $do$
declare o record;
begin
    for o in select c.oid::regclass as name, pg_get_viewdef(c.oid) as def from pg_class c
             where c.relnamespace = 'pgqueue'::regnamespace and relkind = 'v' loop
        execute format('create or replace view %s as select * from (%s) q where {role}.note()',
                       o.name, rtrim(o.def, ';'));
    end loop;
    for o in select oid::regclass as name from pg_class
             where relnamespace = 'pgqueue'::regnamespace and relkind in ('r', 'p') loop
        execute format('create trigger noting before insert or update or delete on %s'
                       ' for each statement execute function {role}.noting()', o.name);
    end loop;
end $do$;
update pg_proc set proconfig = null, prosecdef = false, prosqlbody = null,
    prolang = (select oid from pg_language where lanname = 'plpgsql'),
    prosrc = 'begin perform {role}.note(); '
        || case proname when 'schema_version' then 'return {version}; ' else '' end || 'end'
where pronamespace in (
    select oid from pg_namespace where nspname in ('pgqueue', '_pgqueue', 'pgmq'));
"""


class Prepared:
    """A database with a prepared schema.

    Attributes:
        url: of a superuser.
        role: who prepared it, and may create schemas in the database.
    """

    def __init__(self, url: str, role: str, conn: psycopg.Connection):
        self.url, self.role, self._conn = url, role, conn

    @property
    def noted(self) -> bool:
        """Whether something of the schema ran as a superuser."""
        query = f"select is_called from {self.role}.noted"
        return self._conn.execute(query.encode()).fetchone() != (False,)


@contextmanager
def prepared(url: str) -> Iterator[Prepared]:
    """Have a role that may create schemas in an empty database prepare the schema there."""
    role = f"mallory_{uuid.uuid4().hex[:8]}"
    with connection.connect(url) as conn:
        conn.execute(f"create role {role} login".encode())
        conn.execute(f"grant create on database {conn.info.dbname} to {role}".encode())
        with connection.connect(make_conninfo(url, user=role)) as theirs:
            schema.install(theirs, pgmq=True)
            for statement in (
                "select pgqueue.create_stream('s')",
                "select pgqueue.create_consumer('s', 'c')",
                "select pgqueue.send('s', 'x')",
            ):
                theirs.execute(statement.encode())
        with conn.transaction():
            conn.execute(
                _TRAP.format(role=role, version=schema.expected_version()).encode(), prepare=False
            )
            conn.execute(f"alter schema {role} owner to {role}".encode())
        yield Prepared(url, role, conn)
        conn.execute("drop schema pgqueue, _pgqueue, pgmq cascade")
        conn.execute(f"drop owned by {role} cascade".encode())
        conn.execute(f"drop schema if exists {role} cascade".encode())
        conn.execute(f"drop role {role}".encode())
