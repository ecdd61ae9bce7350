"""What is in both schemas, as the catalogue of Postgres has it: to be compared."""

from __future__ import annotations

import re

import psycopg

# Column order differs where columns were added; NOT VALID where old messages were not looked at.
LOOKS = {
    "columns": """
        select c.relname, a.attname, format_type(a.atttypid, a.atttypmod), a.attnotnull,
               a.attidentity, a.attstorage, pg_get_expr(d.adbin, d.adrelid), a.attacl::text
        from pg_class c join pg_attribute a on a.attrelid = c.oid
        left join pg_attrdef d on d.adrelid = c.oid and d.adnum = a.attnum
        where c.relnamespace = 'pgqueue'::regnamespace and c.relkind in ('r', 'p', 'v', 'c')
          and a.attnum > 0 and not a.attisdropped""",
    "relations": """
        select relname, relkind, relowner::regrole::text, relpersistence, reloptions,
               (select array_agg(x::text order by x::text) from unnest(relacl) x)
        from pg_class where relnamespace = 'pgqueue'::regnamespace and relkind not in ('i', 'I')""",
    "indexes": """
        select indexrelid::regclass::text, pg_get_indexdef(indexrelid), indisvalid
        from pg_index join pg_class c on c.oid = indrelid
        where c.relnamespace = 'pgqueue'::regnamespace""",
    "constraints": """
        select conrelid::regclass::text, conname,
               replace(pg_get_constraintdef(oid), ' NOT VALID', '')
        from pg_constraint where connamespace = 'pgqueue'::regnamespace and contype <> 'n'""",
    "functions": """
        select oid::regprocedure::text, pg_get_functiondef(oid), proowner::regrole::text,
               (select array_agg(x::text order by x::text) from unnest(proacl) x)
        from pg_proc
        where pronamespace in ('pgqueue'::regnamespace, '_pgqueue'::regnamespace)""",
    "views": """
        select relname, pg_get_viewdef(oid) from pg_class
        where relnamespace = 'pgqueue'::regnamespace and relkind = 'v'""",
    "sequences": """
        select seqrelid::regclass::text, format_type(seqtypid, null), seqstart, seqincrement,
               seqmin, seqmax, seqcache, seqcycle
        from pg_sequence join pg_class c on c.oid = seqrelid
        where c.relnamespace = 'pgqueue'::regnamespace""",
    "types": """
        select typname, typtype, typowner::regrole::text,
               (select array_agg(x::text order by x::text) from unnest(typacl) x)
        from pg_type where typnamespace = 'pgqueue'::regnamespace""",
    "triggers": """
        select tgrelid::regclass::text, pg_get_triggerdef(t.oid) from pg_trigger t
        join pg_class c on c.oid = tgrelid
        where c.relnamespace = 'pgqueue'::regnamespace and not tgisinternal""",
    "comments": """
        select pg_describe_object(classoid, objoid, objsubid), description from pg_description
        where (classoid = 'pg_class'::regclass and objoid in
               (select oid from pg_class where relnamespace = 'pgqueue'::regnamespace))
           or (classoid = 'pg_proc'::regclass and objoid in
               (select oid from pg_proc
                where pronamespace in ('pgqueue'::regnamespace, '_pgqueue'::regnamespace)))
           or (classoid = 'pg_namespace'::regclass
               and objoid in ('pgqueue'::regnamespace, '_pgqueue'::regnamespace))""",
    "schema": "select nspowner::regrole::text, nspacl::text from pg_namespace"
    " where nspname in ('pgqueue', '_pgqueue')",
}


# What people and programs call, without what it does.
CALLED = """
    select oid::regprocedure::text, pg_get_function_arguments(oid), pg_get_function_result(oid),
           (select array_agg(x::text order by x::text) from unnest(proacl) x)
    from pg_proc where pronamespace = 'pgqueue'::regnamespace"""


def catalogue(conn: psycopg.Connection) -> dict[str, list[str]]:
    """Everything that the schema consists of, sorted."""
    return {what: _rows(conn, look) for what, look in LOOKS.items()}


def offered(conn: psycopg.Connection) -> dict[str, list[str]]:
    """What is stored, and what is called: all that a version of the schema promises to programs."""
    looks = {**LOOKS, "functions": CALLED}
    return {
        what: _rows(conn, look) for what, look in looks.items() if what not in ("views", "comments")
    }


def _rows(conn: psycopg.Connection, look: str) -> list[str]:
    return sorted(_without_order(repr(row)) for row in conn.execute(look.encode()).fetchall())


def _without_order(text: str) -> str:
    """The columns of a row in a view's text, in an order that does not say where they stand."""
    return re.sub(r"\((\w+(?:, \w+)+)\)", lambda found: str(sorted(found[1].split(", "))), text)
