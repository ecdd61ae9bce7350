"""What another role may put into a schema that everybody can write to."""

from __future__ import annotations

import contextlib

import psycopg


def hijack(conn: psycopg.Connection, first: bool) -> None:
    """Put better matches of what we call into public, where each raises an error.

    first: public also comes before pg_catalog, for all sessions to come. Otherwise only exact
        matches are found there, in place of polymorphic and variadic functions of pg_catalog.
    """
    body = "language plpgsql as 'begin raise exception ''hijacked''; end'"
    functions = {
        "format(text, int)": "text",
        "format(text, text)": "text",
        "format(text, bigint)": "text",
        "format(text, name, text)": "text",
        "hashtextextended(text, int)": "bigint",
        "int8range(int, bigint)": "int8range",
        "unnest(int8multirange)": "setof int8range",
        "unnest(text[])": "setof text",
        "unnest(bigint[])": "setof bigint",
        "lower(int8range)": "bigint",
        "upper(int8range)": "bigint",
        "count(bigint)": "bigint",
        "string_to_array(text, char)": "text[]",
        "to_timestamp(bigint)": "timestamptz",
        "quote_ident(name)": "text",
        "pg_get_userbyid(int)": "name",
        "set_config(text, text, boolean)": "text",
        "clock_timestamp()": "timestamptz",
        "to_regclass(text)": "regclass",
        "to_regprocedure(text)": "regprocedure",
        "jsonb_typeof(jsonb)": "text",
        "jsonb_build_object(text, interval)": "jsonb",
        "left(text, smallint)": "text",
    }
    for function, returns in functions.items():
        with contextlib.suppress(psycopg.errors.InvalidFunctionDefinition):
            conn.execute(f"create function public.{function} returns {returns} {body}".encode())
    for left, operator, right, returns in (
        ("int8range", "&&", "int8range", "boolean"),
        ("bigint", "&", "int", "bigint"),
        ("text", "=", "text", "boolean"),
        ("name", "=", "text", "boolean"),
        ("oid", "=", "regnamespace", "boolean"),
        ("bigint", "=", "bigint", "boolean"),
        ("int", "=", "int", "boolean"),
    ):
        name = f"evil_{left}_{right}"
        conn.execute(
            f"create or replace function public.{name}({left}, {right}) returns {returns} {body};"
            f"create operator public.{operator}"
            f" (leftarg = {left}, rightarg = {right}, function = public.{name})".encode()
        )
    conn.execute(
        f"create function public.count_next(bigint, text) returns bigint {body};"
        "create aggregate public.count(text) (sfunc = public.count_next, stype = bigint)".encode()
    )
    if first:
        path = f"alter database {conn.info.dbname} set search_path = public, pg_catalog"
        conn.execute(path.encode())
