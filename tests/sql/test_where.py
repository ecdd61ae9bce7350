"""Conditions on tables in Spark: what compares is taken, and what could do anything else is not."""

import psycopg
import pytest

from tests.sql import odd
from tests.sql.queue import Conn, call

COLUMNS = ["seq", "key", "data", "headers", "inserted_at", "state", "reason", "new"]

ROW = """
    select 7::bigint as seq, 'k'::text as key, '{"total": 5}'::text as data,
           '{"a": "b"}'::jsonb as headers, '2026-01-02 03:04:05Z'::timestamptz as inserted_at,
           'ready'::text as state, E'o''clock \\\\ back'::text as reason, 3 as new"""


def asked(conn: Conn, where: str) -> bool | None:
    """Whether the row passes, as Spark's executors ask it."""
    condition = call(conn, "scan_where", where, COLUMNS)[0].condition
    with conn.transaction():
        conn.execute("set local search_path = pg_catalog, pg_temp")
        query = f"select ({condition}) from ({ROW}) w"
        row = conn.execute(query.encode()).fetchone()
    assert row is not None
    return row[0]


TAKEN = [
    "seq between 5 and 9 and key = 'k'",
    "SEQ>=7 and \"state\" in ('ready', 'new')",
    "data::jsonb ->> 'total' = '5' and (data::jsonb->'total')::int<6",
    "data::jsonb @? '$.total ? (@ > 4)'",
    "headers @> '{\"a\": \"b\"}' and not headers ? 'c'",
    "inserted_at < now() - interval '1 day' and inserted_at<Now ( )",
    "current_timestamp > inserted_at at time zone 'UTC'",
    "date_trunc('day', inserted_at) = timestamptz '2026-01-02 00:00:00Z'",
    "extract(year from inserted_at) = 2026",
    "case when key ~ '^[a-z]$' then length(key) = 1 else false end",
    "reason = 'o''clock \\ back' and reason like '%\\\\ b%'",
    "coalesce(nullif(key, ''), 'none') = any (array['k', 'x'])",
    "new=-3*-1 and seq % 2 = 1 and .5e1 < 5.1",
    "(key, state) = ('k', 'ready')",
    "starts_with(upper(key), 'K') and substring(state from 1 for 3) = 'rea'",
    "reason <> ') or true; -- /* \" $$'",
    "reason <> 'now and then' and reason not in ('nowhere', 'until today, at noon or so')",
    "key <> 'to' || 'day'",
]


@pytest.mark.all_versions
def test_a_condition_over_columns_says_what_postgres_says(conn: Conn) -> None:
    name = "standard_conforming_strings"
    can_be_off = name in odd.accepted(odd.SETTINGS, conn.info.server_version // 10000)
    for setting in ("on", "off") if can_be_off else ("on",):
        conn.execute(f"set {name} = {setting}".encode())
        for where in TAKEN:
            assert asked(conn, where) is True, where
            assert asked(conn, f"not ({where})") is False, where


REFUSED = [
    (
        "inserted_at < 'now'",
        "contains the text 'now', which would mean a different time in each task",
    ),
    ("inserted_at::date = date ' Today '", "contains the text ' Today '"),
    ("inserted_at > 'yesterday 12:00'", "contains the text 'yesterday 12:00'"),
    ("age('tomorrow UTC', inserted_at) is null", "contains the text 'tomorrow UTC'"),
    ("true) or (true", "cannot contain ')'"),
    ("true) union select null from pgqueue.streams where (true", "cannot contain ')'"),
    ("(true", "has an unclosed ("),
    ("key = any (array['k')", "cannot contain ')'"),
    ("true; drop table x", "cannot contain ';'"),
    ("true -- and more", "cannot contain '--'"),
    ("true /* and more", "cannot contain '/*'"),
    ("key = $$k$$", "cannot contain '$'"),
    ("key = $1", "cannot contain '$'"),
    ("key = 'k", "cannot contain ''''"),
    ("pgqueue.schema_version() > 0", "has no column pgqueue"),
    ("w.key = 'k'", "has no column w"),
    ("(w).key = 'k'", "has no column w"),
    ("1.key = 'k' . x", "cannot contain '.'"),
    ("seq in (select 1)", "has no column select"),
    ("exists (table pgqueue.streams)", "not exists"),
    ("array(values (1)) is null", "not values"),
    ("kye = 'k'", "no column kye"),
    ("\"Key\" = 'k'", 'no column "Key"'),
    ("xmin is null", "no column xmin"),
    ("tableoid::regclass is null", "no column tableoid"),
    ("'pg_class'::regclass is null", "no column regclass"),
    ("E'k' = key", "no column E"),
    ("U&'k' = key", "no column U"),
    ("key collate \"C\" < 'k'", "no column collate"),
    ("seq operator(public.+) 1 = 2", "not operator"),
    *(
        (f"{function}({arguments}) is null", f"not {function}")
        for function, arguments in (
            ("pg_sleep", "1"), ("set_config", "'a.b', 'c', false"),
            ("current_setting", "'port'"), ("query_to_xml", "'select 1', true, true, ''"),
            ("table_to_xml", "'pg_class', true, true, ''"),
            ("database_to_xml", "true, true, ''"), ("pg_read_file", "'/etc/passwd'"),
            ("lo_get", "1"), ("pg_get_viewdef", "1"),
            ("has_table_privilege", "'pg_class', 'select'"), ("random", ""),
            ("clock_timestamp", ""), ("nextval", "'x'"), ("pg_advisory_lock", "1"),
            ("pg_notify", "'a', 'b'"), ("count", "seq"), ("generate_series", "1, 2"),
            ("row_number", ""), ("regexp_matches", "key, 'k'"), ("key", "seq"),
            ("mine", "seq"), ("pg_temp", ""),
        )
    ),
]  # fmt: skip


def test_what_is_no_comparison_is_refused_by_name(conn: Conn) -> None:
    conn.execute("create function public.mine(bigint) returns int language sql as 'select 1'")
    for where, says in REFUSED:
        with pytest.raises(psycopg.Error) as error:
            call(conn, "scan_where", where, COLUMNS)
        assert error.value.sqlstate == "PQ003", where
        assert error.value.diag.column_name == "p_where", where
        assert says in str(error.value), where


def test_a_misspelled_column_is_suggested(conn: Conn) -> None:
    with pytest.raises(psycopg.Error, match="Did you mean reason") as error:
        call(conn, "scan_where", "raeson = 'x'", COLUMNS)
    assert "Available: seq, key, data" in str(error.value)


def test_a_condition_names_its_columns_and_one_time(conn: Conn) -> None:
    found = call(conn, "scan_where", "key = 'seq' and inserted_at < now() and KEY > ''", COLUMNS)[0]
    assert sorted(found.columns) == ["inserted_at", "key"]
    assert "now" not in found.condition
    (at,) = call(conn, "scan_where", "now()", COLUMNS)[0][:1]
    row = conn.execute(f"select {at} between now() - interval '1 min' and now()".encode())
    assert row.fetchone() == (True,)


def test_an_operator_of_another_schema_is_not_asked(conn: Conn) -> None:
    """... though it matches better: the statement searches pg_catalog alone."""
    conn.execute(
        "create function public.lies(text, text) returns bool language sql as 'select true'"
    )
    conn.execute(
        "create operator public.~~~ (function = public.lies, leftarg = text, rightarg = text)"
    )
    with pytest.raises(psycopg.Error, match="operator does not exist"):
        asked(conn, "key ~~~ state")
