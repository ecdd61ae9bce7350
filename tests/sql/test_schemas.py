"""Schemas of streams: what is sent fits the schema, and a schema only grows."""

import json
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from psycopg.types.json import Jsonb

from tests.payloads import FIT, NO_FIT
from tests.sql import clock
from tests.sql.queue import Conn, call, one, raises, value

ORDER = "id bigint not null, name string, at timestamp, tags array<string>"


def make(conn: Conn, schema: str | None = ORDER, name: str = "o") -> None:
    value(conn, "create_stream", name, "json", p_settings=Jsonb({"schema": schema}))


def alter(conn: Conn, schema: str | None, name: str = "o") -> None:
    value(conn, "alter_stream", name, Jsonb({"schema": schema}))


def refused(conn: Conn, code: str, function: str, *args: Any, **named: Any) -> str:
    with pytest.raises(psycopg.Error) as caught, conn.transaction():
        call(conn, function, *args, **named)
    assert caught.value.sqlstate == code, caught.value
    return f"{caught.value.diag.message_primary} | {caught.value.diag.message_hint}"


@pytest.mark.all_versions
def test_each_type_takes_its_values_and_no_others(conn: Conn) -> None:
    types = list({type_: None for type_, *_ in [*FIT, *NO_FIT]})
    for type_ in types:
        make(conn, f"v {type_}", type_)
    paths = one(conn, "select array_agg(schema_path::text) from pgqueue.streams")
    assert (
        one(conn, "select array_agg(p::jsonpath::text) from unnest(%s::text[]) p", paths) == paths
    )
    for type_, text, _ in FIT:
        assert value(conn, "send", type_, f'{{"v": {text}}}'), (type_, text)
        assert value(conn, "send", type_, '{"v": null}')
        assert value(conn, "send", type_, "{}")
    for type_, text in NO_FIT:
        said = refused(conn, "PQ004", "send", type_, f'{{"v": {text}}}')
        assert "does not fit its schema: column v is " in said, (type_, text)


MISFITS = {
    "{}": "column id is a whole number from -9223372036854775808 to 9223372036854775807, "
    "not null, but the message has none",
    '{"id": null}': "has a value of type null",
    '{"id": 1, "at": "soon"}': 'column at is a text such as "2026-01-31T12:00:00.123456Z"',
    '{"id": 1, "tags": [1]}': "column tags is array, but the message has a value of type array",
    "[1]": "it is not a JSON object, but of type array",
    "null": "of type null",
    '{"id": 1': "is not valid JSON",
    '{"id": 1, "name": "\\u0000"}': "is not valid JSON",
    '{"id": 1e999999}': "is not valid JSON",
    '{"id": 1, "other": 1e200000}': "is not valid JSON",
    '{"id": 1, "other": "\\ud800"}': "is not valid JSON",
    '{"id": 1, "at": "2026-01-31"}': "column at is",
    '{"id": 1, "at": "2026-01-31T12Z"}': "column at is",
    '{"id": 1, "at": "2026-01-31T12:00:00"}': "column at is",
}
FITS = [
    '{"id": 1}',
    '{"id": -0, "id": 1e2, "other": [1e400]}',
    '{"id": 1, "other": ' + "[" * 1500 + "]" * 1500 + "}",
    '{"id": 1, "other": ' + "9" * 5000 + "}",
]


@pytest.mark.promise("feature: schemas of payloads")
def test_a_message_that_does_not_fit_is_refused_by_every_way_to_send(conn: Conn) -> None:
    make(conn)
    for data, says in MISFITS.items():
        check_refused(conn, data, says)
    assert published(conn) == []
    with conn.transaction():
        copied(conn, FITS)
    for data in FITS:
        value(conn, "send", "o", data)
    value(conn, "send_batch", "o", FITS)
    assert sorted(published(conn)) == sorted(FITS * 3)


def check_refused(conn: Conn, data: str, says: str) -> None:
    good = '{"id": 1}'
    assert says in refused(conn, "PQ004", "send", "o", data)
    assert says in refused(conn, "PQ004", "send_batch", "o", [good, data])
    assert says in refused(
        conn, "PQ004", "create_schedule", "o", "h", p_cron="@hourly", p_data=data
    )
    with raises("PQ004") as caught, conn.transaction():
        copied(conn, [good, data])
    assert says in str(caught.value)
    assert "(row 2 of 2 in this write" in str(caught.value)


def published(conn: Conn, name: str = "o") -> list[str]:
    """What was published to a stream."""
    return [row.data for row in call(conn, "read", name) if row.seq is not None]


def copied(conn: Conn, data: list[str]) -> None:
    """Publish messages by COPY, as Spark and large batches do."""
    stream = one(conn, "select stream_id from pgqueue.open_stream('o')")
    seqs = value(conn, "reserve", stream, len(data))
    first = one(conn, "select lower(%s::int8multirange)", seqs)
    with conn.cursor().copy("copy pgqueue.written (stream_id, seq, data) from stdin") as copy:
        for number, each in enumerate(data):
            copy.write_row((stream, first + number, each))
    call(conn, "publish_written", "o", seqs)


def test_no_error_shows_a_payload(conn: Conn) -> None:
    make(conn)
    with pytest.raises(psycopg.Error) as caught:
        value(conn, "send", "o", '{"id": "hunter2", "name": 1}')
    assert "hunter2" not in str(caught.value)


def test_columns_that_may_be_null_are_added(conn: Conn) -> None:
    make(conn)
    value(conn, "send", "o", '{"id": 1, "note": 5}')  # what no column names is passed over
    for schema in (ORDER.replace(",", " ,"), f"note string, {ORDER}", None, f"{ORDER}, note int"):
        alter(conn, schema)
        assert one(conn, "select settings ->> 'schema' from pgqueue.stream_stats") == schema
    refused(conn, "PQ004", "send", "o", '{"id": 1, "note": "five"}')


CHANGES = [
    (ORDER, "id bigint not null", "column name is missing"),
    (ORDER, ORDER.replace("name", "title"), "column name is missing"),
    (ORDER, ORDER.replace("bigint", "int"), "column id has another type"),
    (ORDER, ORDER.replace(" not null", ""), "column id is nullable in only one of the two"),
    (ORDER, ORDER.replace("string,", "string not null,"), "column name is nullable in only one"),
    (ORDER, ORDER + ", n int not null", "column n is new, and not null"),
    ("a array<struct<b: int>>", "a array<struct<c: int>>", "column a column b is missing"),
    ("a struct<b: int>", "a struct<b: int, c: int not null>", "column a column c is new"),
]


def test_a_schema_takes_what_the_one_before_took(conn: Conn) -> None:
    make(conn, None)
    for old, new, says in CHANGES:
        alter(conn, old)
        said = refused(conn, "PQ003", "alter_stream", "o", Jsonb({"schema": new}))
        assert says in said
        assert "set it to null first" in said
        assert one(conn, "select settings ->> 'schema' from pgqueue.stream_stats") == old
        alter(conn, None)
        value(conn, "send", "o", "[]")
        alter(conn, new)
        refused(conn, "PQ004", "send", "o", "[]")
        alter(conn, None)


def test_structs_and_arrays_of_structs_grow_too(conn: Conn) -> None:
    make(conn, "a array<struct<b: int>>, s struct<b: int not null>")
    alter(conn, "a array<struct<b: int, c: int>>, s struct<c: string, b: int not null>, d date")
    value(conn, "send", "o", '{"s": {"b": 1}, "a": [{"c": 1}]}')
    assert "column a is" in refused(conn, "PQ004", "send", "o", '{"a": [{"c": ""}]}')


NO_SCHEMAS: list[tuple[Any, str]] = [
    ("", "as word 1, nothing, but the name of a column is expected"),
    ("id", "as word 2, nothing, but a type (string, boolean, tinyint"),
    ("id bigint,", "as word 4, nothing, but the name of a column"),
    ("1 bigint", "as word 1, '1', but the name of a column"),
    ("id bigint not", "as word 4, nothing, but null is expected"),
    ("id bigint name string", "as word 3, 'name', but a comma or the end"),
    ("id bigint, ID int", "as word 4, 'ID', but an unused name"),
    ("id map<string, int>", "as word 2, 'map', but a type"),
    ("id variant", "as word 2, 'variant', but a type"),
    ("id array<int", "as word 5, nothing, but a comma or >"),
    ("id struct<a int", "as word 6, nothing, but a comma or >"),
    ("id decimal(39, 2)", "as word 4, '39', but a precision from 1 to 38"),
    ("id decimal(2, 3)", "as word 4, '2', but a precision from 1 to 38"),
    ("id decimal(x)", "as word 4, 'x', but a precision and a scale"),
    ("id " + "array<" * 17 + "int" + ">" * 17, "after 16 levels, is expected"),
    ("id " + "struct<a: " * 17 + "int" + ">" * 17, "after 16 levels, is expected"),
    ("a string, " * 1638 + "b string", "at most 16,384 characters, not 16388"),
    (5, "as word 1, '5', but the name of a column"),
    ({"type": "struct"}, "must be null (default: none) or columns in Spark's DDL"),
]


def test_what_is_no_schema_is_refused(conn: Conn) -> None:
    make(conn)
    for schema, says in NO_SCHEMAS:
        settings = Jsonb({"schema": schema})
        assert says in refused(conn, "PQ003", "create_stream", "n", "json", p_settings=settings)
        assert says in refused(conn, "PQ003", "alter_stream", "o", settings)


def test_only_a_json_stream_has_a_schema(conn: Conn) -> None:
    settings = Jsonb({"schema": ORDER})
    for kind in ("text", "binary"):
        said = refused(conn, "PQ003", "create_stream", "o", kind, p_settings=settings)
        assert f"schema requires a stream of kind json, not {kind}" in said
        value(conn, "create_stream", kind, kind)
        refused(conn, "PQ003", "alter_stream", kind, settings)
    value(conn, "alter_stream", "text", Jsonb({"schema": None}))


def test_the_columns_are_told_as_spark_writes_them(conn: Conn) -> None:
    assert "unknown stream" in refused(conn, "PQ001", "schema_of", "o")
    make(conn, "`a b` decimal(10, 2) not null, c: struct<`d e`: array<int>>, e dec, f real")
    assert one(conn, "select pgqueue.schema_of('o') #>> '{fields, 0, name}'") == "a b"
    names = one(
        conn,
        "select array_agg(f ->> 'type' order by i) "
        "from jsonb_array_elements(pgqueue.schema_of('o') -> 'fields') with ordinality c (f, i)",
    )
    assert [names[0], *names[2:]] == ["decimal(10,2)", "decimal(10,0)", "float"]
    value(conn, "create_stream", "none", "json")
    assert value(conn, "schema_of", "none") is None


def test_a_column_may_have_any_name(conn: Conn) -> None:
    names = ['"', "'", "\\", "$", "@", "a.b", "é", "%s", "null"]
    make(conn, ", ".join(f"`{name}` int not null" for name in names))
    good = dict.fromkeys(names, 1)
    value(conn, "send", "o", json.dumps(good))
    with conn.transaction():
        copied(conn, [json.dumps(good)])
    for name in names:
        bad = json.dumps(good | {name: ""})
        assert f"column {name} is" in refused(conn, "PQ004", "send", "o", bad)
        with pytest.raises(psycopg.Error, match="does not fit"), conn.transaction():
            copied(conn, [json.dumps(good), bad])


def test_what_is_copied_by_a_binding_fits_the_other_schema(conn: Conn) -> None:
    """The schema of a stream has the columns of those that it is copied to: so it grows first."""
    for name, schema in (("o", ORDER), ("to", "id bigint not null"), ("any", None)):
        make(conn, schema, name)
    assert "no schema or a part of its schema" in refused(conn, "PQ003", "bind", "any", "#", "to")
    value(conn, "bind", "o", "#", "to")
    value(conn, "bind", "o", "#", "any")
    for name, schema in (("o", None), ("to", ORDER + ", n int")):
        said = refused(conn, "PQ003", "alter_stream", name, Jsonb({"schema": schema}))
        assert "would accept less than is copied to it" in said
    alter(conn, ORDER + ", n int", "o")
    alter(conn, ORDER + ", n int", "to")
    value(conn, "send", "o", '{"id": 1}')
    assert [published(conn, name) for name in ("o", "to", "any")] == [['{"id": 1}']] * 3


def test_a_schedule_that_no_longer_fits_sends_nothing_and_says_why(conn: Conn) -> None:
    make(conn, None)
    value(conn, "create_schedule", "o", "h", p_every="1 s", p_data="{}")
    alter(conn, ORDER)
    clock.pass_time(conn, timedelta(minutes=1))
    call(conn, "maintain")
    assert "does not fit its schema" in one(conn, "select last_error from pgqueue.stream_schedules")
    assert published(conn) == []


def test_a_captured_row_fits_or_is_not_written(conn: Conn) -> None:
    make(conn, "id bigint not null, name string not null")
    conn.execute("create table public.t (id bigint primary key, name text)")
    value(conn, "capture", "public.t", "o")
    conn.execute("insert into public.t values (1, 'a')")
    with pytest.raises(psycopg.Error, match="column name is a text, not null"):
        conn.execute("insert into public.t values (2, null), (3, null)")
    assert one(conn, "select count(*) from public.t") == 1
    assert len(published(conn)) == 1


def test_a_schema_costs_nothing_where_there_is_none(conn: Conn) -> None:
    """The check calls no function, and asks no table, with and without a schema."""
    make(conn, None)
    make(conn, ORDER, "typed")
    seen = []
    for name in ("o", "typed"):
        value(conn, "send", name, '{"id": 1}')
        with conn.transaction():
            conn.execute("set local track_functions = 'all'")
            before = counts(conn)
            value(conn, "send", name, '{"id": 1}')
            seen.append({k: n - before.get(k, 0) for k, n in counts(conn).items()})
    assert seen[0] == seen[1]


def counts(conn: Conn) -> dict[str, int]:
    found = conn.execute(
        "select funcname, calls from pg_stat_xact_user_functions union all "
        "select relname, seq_scan + idx_scan from pg_stat_xact_user_tables "
        "where relname !~ '^messages_'"
    )
    return {name: int(n) for name, n in found if n and not name.startswith("limit")}
