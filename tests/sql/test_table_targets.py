"""Tables that a query writes: what each may be, and which values arrive in it."""
# ruff: noqa: E501  a case is a line

import psycopg
import pytest

from tests.sql.queue import Conn
from tests.sql.table_writes import Write, content, refusal, target, write

pytestmark = pytest.mark.all_versions


def test_missing_columns_get_defaults_and_stay_as_they_are(conn: Conn) -> None:
    conn.execute(
        "create table public.bills (id bigint primary key, note text default 'new', n int)"
    )
    assert write(conn, target("public.bills", {"id": "bigint", "n": "int"}, ["id"]), (1, 1))
    conn.execute("update bills set note = 'mine'")
    assert write(
        conn, target("public.bills", {"id": "bigint", "n": "int"}, ["id"]), (1, 2), (2, 2), batch=1
    )
    assert content(conn, "bills") == [(1, "mine", 2), (2, "new", 2)]
    assert write(conn, target("public.bills", {"id": "bigint"}, ["id"]), (1,), (3,), batch=2), (
        "only keys"
    )
    assert [row[0] for row in content(conn, "bills")] == [1, 2, 3]


TYPES = [
    ("boolean", "boolean", True, "true"),
    ("tinyint", "smallint", 127, "127"),
    ("int", "bigint", 7, "7"),
    ("bigint", "smallint", 7, "7"),
    ("bigint", "numeric(12,2)", 7, "7.00"),
    ("float", "double precision", 1.5, "1.5"),
    ("double", "numeric", 123456789012345.67, "123456789012345.67"),
    ("float", "numeric", 16777216, "16777216"),
    ("decimal(10,2)", "numeric(12,2)", "1.23", "1.23"),
    ("decimal(10,0)", "integer", "123", "123"),
    ("decimal(10,2)", "numeric", "1.23", "1.23"),
    ("string", "text", "a", "a"),
    ("string collate UTF8_LCASE", "text", "a", "a"),
    ("string", "varchar(3)", "abc", "abc"),
    ("string", "char(4)", "ab", "ab"),
    ("string", "uuid", "6E0E5A3F-0000-0000-0000-000000000001", "6e0e5a3f-0000-0000-0000-000000000001"),
    ("string", "jsonb", '{"a":1}', '{"a": 1}'),
    ("string", "json", '{"a":1}', '{"a":1}'),
    ("string", "mood", "happy", "happy"),
    ("string", "short", "abc", "abc"),
    ("string", "inet", "10.0.0.1", "10.0.0.1/32"),
    ("string", "int4range", "[1,3)", "[1,3)"),
    ("string", "bit(3)", "101", "101"),
    ("string", "integer[]", "{{1,2},{3,4}}", "{{1,2},{3,4}}"),
    ("string", "bytea", "\\x0102", "\\x0102"),
    ("string", "numeric(5,2)", "1.5", "1.50"),
    ("string", "interval year to month", "14 months", "1 year 2 mons"),
    ("binary", "bytea", b"\x01\x02", "\\x0102"),
    ("date", "date", "2024-02-29", "2024-02-29"),
    ("date", "timestamp", "2024-02-29", "2024-02-29 00:00:00"),
    ("timestamp", "timestamptz(6)", "2024-01-01 00:00:00.123456+00", "2024-01-01 00:00:00.123456+00"),
    ("timestamp_ntz", "timestamp", "2024-01-01 00:00:00", "2024-01-01 00:00:00"),
    ("interval day to second", "interval", "1 day 01:00:00", "1 day 01:00:00"),
    ("array<int>", "bigint[]", [1, 2], "{1,2}"),
    ("array<string>", "uuid[]", ["6E0E5A3F-0000-0000-0000-000000000001"], "{6e0e5a3f-0000-0000-0000-000000000001}"),
    ("array<string>", "varchar(3)[]", ["abc"], "{abc}"),
    ("array<decimal(10,2)>", "numeric(10,2)[]", "{1.23}", "{1.23}"),
    ("array<timestamp>", "timestamptz[]", "{2024-01-01 00:00:00+00}", '{"2024-01-01 00:00:00+00"}'),
]  # fmt: skip


@pytest.fixture
def kinds(conn: Conn) -> None:
    conn.execute("create type public.mood as enum ('sad', 'happy')")
    conn.execute("create domain public.short as varchar(3)")
    conn.execute("create domain public.exact as numeric(5, 2)")
    conn.execute("set timezone = 'UTC'")


def test_a_value_of_each_type_arrives(conn: Conn, kinds: None) -> None:
    for n, (spark, postgres, given, stored) in enumerate(TYPES):
        conn.execute(f"create table public.t{n} (id int primary key, v {postgres})".encode())
        columns, which, seen = (
            {"id": "int", "v": spark},
            {"sink": f"t{n}"},
            f"(select v::text from t{n}) x",
        )
        merge = target(f"public.t{n}", columns, ["id"])
        assert write(conn, merge, (1, given), (2, None), **which)
        assert write(conn, merge, (1, given), (2, given), batch=1, **which), "by an update too"
        assert content(conn, seen) == [(stored,)] * 2, (spark, postgres)
        conn.execute(f"truncate t{n}".encode())
        assert write(conn, target(f"public.t{n}", columns), (1, given), batch=2, **which), (
            "without a merge"
        )
        assert content(conn, seen) == [(stored,)], (spark, postgres)


UNFIT = [
    ("double", "integer", "column v is double, and must fit column v of table public.t, which is integer"),
    ("decimal(5,1)", "integer", "which is integer"),
    ("timestamp", "timestamp", "which is timestamp without time zone"),
    ("timestamp_ntz", "timestamptz", "which is timestamp with time zone"),
    ("date", "timestamptz", "which is timestamp with time zone"),
    ("timestamp", "date", "which is date"),
    ("int", "text", "which is text"),
    ("int", "boolean", "which is boolean"),
    ("boolean", "integer", "which is integer"),
    ("binary", "text", "which is text"),
    ("array<int>", "integer", "which is integer"),
    ("int", "integer[]", "which is integer[]"),
    ("array<double>", "integer[]", "which is integer[]"),
    ("decimal(10,3)", "numeric(10,2)", "numeric(10,2), which would round its values"),
    ("decimal(10,3)", "exact", "numeric(5,2), which would round its values"),
    ("array<decimal(10,3)>", "exact[]", "would round"),
    ("int", "oid", "which is oid"),
    ("string", "money", "would round"),
    ("decimal(10,0)", "numeric(5,-2)", "would round"),
    ("array<decimal(10,3)>", "numeric(10,2)[]", "would round"),
    ("map<string,string>", "jsonb", "column v is map<string,string>, which no table column accepts"),
    ("struct<a:int>", "jsonb", "which no table column accepts"),
    ("variant", "jsonb", "which no table column accepts"),
    ("interval year to month", "interval", "which no table column accepts"),
    ("array<array<int>>", "integer[]", "which no table column accepts"),
    ("void", "text", "which no table column accepts"),
]  # fmt: skip


def test_a_type_whose_values_would_change_is_refused(conn: Conn, kinds: None) -> None:
    for spark, postgres, says in UNFIT:
        conn.execute(f"create table public.t (id int primary key, v {postgres})".encode())
        error = refusal(
            lambda spark=spark: Write(conn, target("public.t", {"id": "int", "v": spark}))
        )
        assert error.sqlstate == "PQ003"
        assert says in str(error)
        conn.execute("drop table public.t")


TOO_LARGE = [
    ("bigint", "smallint", 70000, "22003"),
    ("string", "uuid", "no", "22P02"),
    ("string", "mood", "angry", "22P02"),
    ("string", "varchar(3)", "abcd", "22001"),
    ("string", "char(3)", "abcd", "22001"),
    ("string", "short", "abcd", "22001"),
    ("string", "bit(3)", "1011", "22026"),
    ("array<string>", "varchar(3)[]", ["abcd"], "22001"),
    ("decimal(10,2)", "numeric(4,2)", "123.45", "22003"),
]


def test_a_value_that_does_not_fit_fails_the_batch_and_is_never_cut(
    conn: Conn, kinds: None
) -> None:
    for spark, postgres, value, code in TOO_LARGE:
        conn.execute(f"create table public.t (id int primary key, v {postgres})".encode())
        for keys in ([], ["id"]):
            given = target("public.t", {"id": "int", "v": spark}, keys)
            assert refusal(lambda g=given, v=value: write(conn, g, (1, v))).sqlstate == code
        assert content(conn, "t") == []
        conn.execute("drop table public.t")


REFUSED = [
    ("no_schema", {}, [], "a table with its schema, quoted as in SQL, such as public.bills, not 'no_schema'"),
    ("public.no", {}, [], "which has no public.no"),
    ('public."t', {}, [], "a table with its schema"),
    ("pgqueue.streams", {}, [], "is a table of the queue: option stream sends messages"),
    ("pg_catalog.pg_class", {}, [], "is a system table"),
    ("public.loose", {}, [], "is unlogged"),
    ("public.parted", {}, [], "has a partition that is unlogged or foreign"),
    ("public.seq", {}, [], "which has no public.seq"),
    ("public.stored", {}, [], "is not a table"),
    ("public.summed", {}, [], "is a view that accepts no rows"),
    ("public.t", {"other": "int"}, [], "table public.t has no column other: it has id, v, made, always"),
    ("public.t", {"made": "int"}, [], "column made of table public.t is generated"),
    ("public.t", {"always": "int"}, [], "column always of table public.t is generated"),
    ("public.t", {"ID": "int"}, [], "two columns of the DataFrame map to one column"),
    ("public.t", {}, ["v"], "p_merge_keys must be the columns of a unique index of table public.t"),
    ("public.t", {}, ["id", "v"], "it has CREATE UNIQUE INDEX"),
    ("public.t", {}, ["id", "id"], "different columns, each once"),
    ("public.t", {}, ["no"], "p_merge_keys must name a column of the DataFrame, not 'no': it has id, v"),
    ("public.partial", {}, ["id"], "neither partial nor"),
    ("public.deferred", {}, ["id"], "(deferrable)"),
    ("public.triggered", {}, ["id"], "is a view with triggers"),
]  # fmt: skip


@pytest.fixture
def tables(conn: Conn) -> None:
    conn.execute(
        "create table public.t (id int primary key, v int, made int generated always as (id + 1) stored,"
        " always int generated always as identity);"
        "create unlogged table public.loose (id int, v int);"
        "create table public.parted (id int, v int) partition by list (id);"
        "create unlogged table public.parted_1 partition of public.parted for values in (1);"
        "create sequence public.seq;"
        "create materialized view public.stored as select id, v from t;"
        "create view public.summed as select count(*) as id, 1 as v from t;"
        "create view public.triggered as select id, sum(v) as v from t group by id;"
        "create function public.f() returns trigger language plpgsql as"
        " $$ begin insert into public.t (id, v) values (new.id, new.v); return new; end $$;"
        "create trigger f instead of insert on public.triggered for each row execute function public.f();"
        "create table public.partial (id int, v int);"
        "create unique index on public.partial (id) where v > 0;"
        "create table public.deferred (id int unique deferrable, v int);"
    )


def test_what_cannot_be_written_is_refused_before_the_first_task(conn: Conn, tables: None) -> None:
    for table, more, keys, says in REFUSED:
        given = target(table, {"id": "int", "v": "int", **more}, keys)
        error = refusal(lambda given=given: Write(conn, given))
        assert error.sqlstate == "PQ003"
        assert says in str(error)


def test_options_that_do_not_go_together_are_refused(conn: Conn, tables: None) -> None:
    columns = {"id": "int", "v": "int", "s": "string", "b": "boolean"}
    for keys, options, says in (
        ([], {"sequence_by": "v"}, "p_sequence_by and p_delete_when require p_merge_keys"),
        ([], {"delete_when": "b"}, "p_sequence_by and p_delete_when require p_merge_keys"),
        (["id"], {"sequence_by": "id"}, "different columns, each once"),
        (["id"], {"sequence_by": "v", "delete_when": "v"}, "different columns, each once"),
        (
            ["id"],
            {"sequence_by": "s"},
            "p_sequence_by must name a column of numbers or times, but s is string",
        ),
        (["id"], {"delete_when": "s"}, "p_delete_when must name a boolean column, but s is string"),
        (
            ["id"],
            {"delete_when": "no"},
            "p_delete_when must name a column of the DataFrame, not 'no'",
        ),
    ):
        error = refusal(lambda k=keys, o=options: Write(conn, target("public.t", columns, k, **o)))
        assert error.sqlstate == "PQ003"
        assert says in str(error)


def test_a_key_or_a_sequence_that_is_null_is_refused(conn: Conn, bills: dict) -> None:
    for row in ((None, "1", 1, False), (1, "1", None, False)):
        assert refusal(lambda row=row: Write(conn, bills).stage(row)).sqlstate == "23502"


def test_triggers_and_policies_count_and_find_their_names(conn: Conn, writer: Conn) -> None:
    name = writer.info.user
    conn.execute(
        "create table public.t (id int primary key, v int, who text default current_user);"
        "create table public.audit (id int);"
        "create function public.audited() returns trigger language plpgsql security definer as"
        " $$ begin insert into audit values (new.id); return case when new.v = 0 then null else new end; end $$;"
        "create trigger audited before insert on t for each row execute function audited();"
        "alter table t enable row level security;"
        "create policy small on t using (true) with check (v < 100)"
    )
    conn.execute(f"grant all on t to {name}".encode())
    given = target("public.t", {"id": "int", "v": "int"}, ["id"])
    assert write(writer, given, (1, 1), (2, 0))
    assert content(conn, "t") == [(1, 1, name)], "a trigger may skip rows"
    assert content(conn, "audit") == [(1,), (2,)], "it finds a table in the path of the session"
    assert refusal(lambda: write(writer, given, (3, 100), batch=1)).sqlstate == "42501"
    assert content(conn, "t") == [(1, 1, name)]


def test_constraints_hold_deferred_ones_too(conn: Conn) -> None:
    conn.execute(
        "create table public.people (id int primary key);"
        "create table public.t (id int primary key check (id > 0),"
        " person int references people deferrable initially deferred)"
    )
    given = target("public.t", {"id": "int", "person": "int"}, ["id"])
    assert refusal(lambda: write(conn, given, (0, None))).sqlstate == "23514"
    assert refusal(lambda: write(conn, given, (1, 7))).sqlstate == "23503"
    conn.execute("insert into people values (7)")
    assert write(conn, given, (1, 7))


def test_partitions_views_quoted_names_and_keys_of_several_columns(conn: Conn) -> None:
    conn.execute(
        'create schema "Big Shop";'
        'create table "Big Shop"."Bills %s" ("Id" int, day date, "a ""b""" text, primary key (day, "Id"))'
        " partition by range (day);"
        """create table "Big Shop".old partition of "Big Shop"."Bills %s" for values from (minvalue) to ('2024-01-01');"""
        """create table "Big Shop".new partition of "Big Shop"."Bills %s" for values from ('2024-01-01') to (maxvalue);"""
        'create view public.seen as select "Id" as id, day, "a ""b""" as note from "Big Shop"."Bills %s"'
    )
    table = '"Big Shop"."Bills %s"'
    given = target(
        table,
        {"day": "date", "Id": "int", 'a "b"': "string", "gone": "boolean"},
        ["Id", "day"],
        delete_when="gone",
    )
    assert write(
        conn,
        given,
        ("2023-01-01", 1, "x", None),
        ("2024-01-01", 1, "y", None),
        ("2024-01-01", 2, "z", None),
    )
    assert write(
        conn, given, ("2023-01-01", 1, "changed", None), ("2024-01-01", 1, "y", True), batch=1
    )
    view = target("public.seen", {"id": "int", "day": "date", "note": "string"}, ["id", "day"])
    assert write(conn, view, (2, "2024-01-01", "seen"), (3, "2024-01-01", "new"), batch=2)
    assert [row[::2] for row in content(conn, table, "day, 1")] == [
        (1, "changed"),
        (2, "seen"),
        (3, "new"),
    ]
    assert write(
        conn, target("public.seen", {"ID": "int", "Day": "date"}), (9, "2024-01-01"), batch=3
    )
    unfit = target("public.seen", {"id": "int", "note": "string"}, ["id"])
    assert refusal(lambda: write(conn, unfit, (2, "x"), batch=4)).sqlstate == "42P10"


def test_a_key_is_compared_as_its_index_does(conn: Conn) -> None:
    try:
        conn.execute(
            "create collation public.loose (provider = icu, locale = 'und-u-ks-level2', deterministic = false)"
        )
    except psycopg.errors.FeatureNotSupported:
        pytest.skip("the server has no ICU: PGQUEUE_TEST_VERSIONS=15 with Debian's")
    conn.execute("create table public.t (name text collate loose primary key, v int)")
    check_key(conn, "t", "string", "Anna", "ANNA", "anne")


def test_padded_text_is_compared_as_the_table_has_it(conn: Conn) -> None:
    conn.execute("create table public.c (name char(4) primary key, v int)")
    check_key(conn, "c", "string", "a ", "a", "b")


def check_key(conn: Conn, table: str, spark: str, old: object, new: object, other: object) -> None:
    """Two values are one key, to inserts, updates and deletes; another is another."""
    columns = {"name": spark, "v": "int", "gone": "boolean"}
    given = target(f"public.{table}", columns, ["name"], sequence_by="v", delete_when="gone")
    assert write(conn, given, (old, 1, False), (new, 2, False), (other, 1, False), sink=table)
    assert [row[1] for row in content(conn, table, "v")] == [1, 2], table
    assert write(conn, given, (old, 3, True), batch=1, sink=table)
    assert [row[1] for row in content(conn, table, "v")] == [1], table


def test_an_extensions_type_is_compared_by_its_own_operators(conn: Conn) -> None:
    """citext: the pinned path has no operator for it but those of text."""
    try:
        conn.execute("create schema ext; create extension citext schema ext")
    except psycopg.Error:
        pytest.skip("the server has no citext: apt-get install postgresql-contrib")
    conn.execute("create table public.t (name ext.citext primary key, v int)")
    check_key(conn, "t", "string", "Anna", "ANNA", "b")
