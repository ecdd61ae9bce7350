"""Tables that a query writes: what its role needs, and what another role cannot do."""
# ruff: noqa: E501  a case is a line

import psycopg
import pytest

from spark_pgqueue.postgres import schema
from tests.sql.queue import Conn
from tests.sql.table_writes import Write, content, refusal, target, write

pytestmark = pytest.mark.all_versions


def test_a_role_needs_its_grants_and_no_more(conn: Conn, writer: Conn, bills: dict) -> None:
    name = writer.info.user
    row = (1, "1.00", 1, False)
    error = refusal(lambda: Write(writer, target("public.bills", {"id": "bigint"})))
    assert error.sqlstate == "42501"
    assert f"role {name} may not insert table public.bills" in str(error)
    conn.execute(f"grant insert on bills to {name}".encode())
    assert write(writer, target("public.bills", {"id": "bigint"}), (7,), sink="append")
    for grant, lacks in (
        ("select (id, amount, version)", "delete, select, update"),
        ("delete", "delete, update"),
        ("update (amount)", "update"),
    ):
        error = refusal(lambda: Write(writer, bills))
        assert error.sqlstate == "42501"
        assert f"may not {lacks} table" in str(error)
        conn.execute(f"grant {grant} on bills to {name}".encode())
    assert refusal(lambda: Write(writer, bills)).sqlstate == "42501"
    conn.execute(f"grant update (version) on bills to {name}".encode())
    assert write(writer, bills, row)
    conn.execute(f"revoke insert on bills from {name}".encode())
    assert "may not insert" in str(refusal(lambda: Write(writer, bills)))


def test_rights_that_end_before_the_commit_count(conn: Conn, writer: Conn) -> None:
    conn.execute("create table public.t (id int)")
    conn.execute(f"grant insert on t to {writer.info.user}".encode())
    one_ = Write(writer, target("public.t", {"id": "int"})).stage((1,))
    conn.execute(f"revoke insert on t from {writer.info.user}".encode())
    assert refusal(one_.apply).sqlstate == "42501"


def test_another_producer_can_neither_read_nor_fill_nor_write_nor_drop_what_is_staged(
    conn: Conn, writer: Conn, bills: dict
) -> None:
    staged = Write(conn, bills).stage((1, "1.00", 1, False))
    for sql in (
        f"select from pgqueue.{staged.staged}",
        f"insert into pgqueue.{staged.staged} values (1, 1)",
    ):
        assert refusal(lambda sql=sql: writer.execute(sql.encode())).sqlstate == "42501"
    conn.execute(f"grant all on bills to {writer.info.user}".encode())
    assert refusal(lambda: staged.apply(writer)).sqlstate == "42501"
    assert staged.drop(writer) is False
    assert (
        refusal(lambda: Write.stage(staged, (2, "1.00", 1, False), conn=writer)).sqlstate == "PQ008"
    )
    assert staged.apply()
    assert content(conn, "bills") == [(1, 1, 1)]
    assert (
        refusal(lambda: write(writer, bills, (1, "1.00", 1, False), batch=1)).sqlstate == "42501"
    ), "the sink's role"
    assert write(writer, bills, (1, "1.00", 1, False), sink="its own")


def test_no_type_in_the_path_of_the_writer_is_used(conn: Conn, writer: Conn) -> None:
    """Not even if another schema comes before pg_catalog: its domains could call functions."""
    types = {
        "text": "x", "varchar": "x", "bpchar": "x", '"char"': "x", "name": "x", "date": "2020-02-29",
        "uuid": "00000000-0000-0000-0000-000000000001", "jsonb": "{}", "bytea": "x", "oid": "7",
        "inet": "::1", "numeric": "1.5", "bit": "1", "timestamptz": "2020-02-29", "interval": "1 h",
    }  # fmt: skip
    conn.execute("create schema evil; grant usage on schema evil to public")
    columns, texts = {"shortest": "double"}, [1.5]
    for n, (type_, value) in enumerate(types.items()):
        columns |= {f"c{n}": "string", f"a{n}": "array<string>"}
        texts += [value, [value]]
        conn.execute(
            f"create function evil.check_{n}(pg_catalog.{type_}) returns boolean language plpgsql"
            " as 'begin raise exception ''hijacked''; end';"
            f"create domain evil.{type_} as pg_catalog.{type_} check (evil.check_{n}(value))".encode()
        )
    made = ", ".join(f"c{n} {type_}, a{n} {type_}[]" for n, type_ in enumerate(types))
    conn.execute(f"create table public.t (shortest numeric, {made})".encode())
    conn.execute(f"grant insert on t to {writer.info.user}".encode())
    staged = Write(writer, target("public.t", columns)).stage(tuple(texts))
    writer.execute("set search_path = evil, pg_catalog")
    with pytest.raises(psycopg.Error, match="hijacked"):
        writer.execute("select 'x'::text")
    assert staged.apply()


def test_a_role_that_a_session_took_on_writes(conn: Conn, writer: Conn) -> None:
    conn.execute("create table public.t (id int)")
    group = f"{writer.info.user}_owner"
    conn.execute(
        f"create role {group}; grant {group} to {writer.info.user}; grant insert on t to {group}".encode()
    )
    schema.grant(conn, "producer", group)
    assert write(writer, target("public.t", {"id": "int"}), (1,)), (
        "a member has the rights of its group"
    )
    writer.execute(f"set role {group}".encode())
    assert write(writer, target("public.t", {"id": "int"}), (2,), batch=1)
    assert len(content(conn, "t")) == 2
    conn.execute(f"drop owned by {group}; drop role {group}".encode())
