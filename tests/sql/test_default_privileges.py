"""What the owner of the schema grants by default on tables is not granted on those of the queue."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from psycopg.conninfo import make_conninfo

from spark_pgqueue.command_line import doctor
from spark_pgqueue.postgres import connection, schema
from tests.conftest import user_of
from tests.sql import clock
from tests.sql.queue import Conn, call, one, send_all, value

pytestmark = pytest.mark.all_versions

GRANTED = """
    select what, name from (
        select 'schema', nspname::text, nspacl from pg_namespace
        union all select 'relation', oid::regclass::text, relacl from pg_class
        union all select 'column', attrelid::regclass || '.' || attname, attacl from pg_attribute
        union all select 'routine', oid::regprocedure::text, proacl from pg_proc
        union all select 'type', oid::regtype::text, typacl from pg_type) o (what, name, acl)
    where %(role)s::regrole::oid in (select grantee from aclexplode(acl)) order by 1, 2
"""


def alter_defaults(conn: Conn, what: str) -> None:
    for objects in ("tables", "sequences", "routines", "types", "schemas"):
        conn.execute(f"alter default privileges {what.format(objects)}".encode())


@pytest.fixture
def stranger(conn: Conn, new_role: Callable[..., str]) -> str:
    """A role to which everything is granted by default that conn makes."""
    role = user_of(new_role())
    alter_defaults(conn, f"grant all on {{}} to {role}")
    return role


def granted(conn: Conn, role: str) -> list[tuple[str, str]]:
    return conn.execute(GRANTED.encode(), {"role": role}).fetchall()


def test_a_new_schema_grants_nothing_by_default(conn: Conn, stranger: str) -> None:
    schema.uninstall(conn)
    schema.install(conn)
    assert granted(conn, stranger) == []
    schema.install(conn)
    assert granted(conn, stranger) == []


@pytest.mark.promise("operations: default privileges")
def test_what_is_made_later_grants_nothing_by_default(conn: Conn, stranger: str) -> None:
    """A stream, its segments, a table that becomes one, and what a setting of a consumer needs."""
    for kind in ("text", "json", "binary"):
        value(conn, "create_stream", kind, kind)
    value(conn, "create_stream", "s")
    value(conn, "create_consumer", "s", "c", p_settings='{"max_backlog": 1000}')
    send_all(conn, ["x"] * 10)
    for _ in range(3):
        call(conn, "set_retention", "s", p_messages=8)
        while dict(call(conn, "maintain"))["unfinished"]:
            pass
        send_all(conn, ["x"] * 10)
        clock.pass_time(conn, clock.timedelta(hours=1))
    assert one(conn, "select count(*) from pgqueue.segments") > 2
    value(conn, "create_group", "s", "g", 2)
    assert granted(conn, stranger) == []
    conn.execute("create table other (id int)")
    assert granted(conn, stranger) == [("relation", "other")]


@pytest.mark.parametrize(
    ("to", "before"),
    [("role", True), ("public", False),
     pytest.param("role", False, marks=pytest.mark.longer),
     pytest.param("public", True, marks=pytest.mark.longer)],
)  # fmt: skip
@pytest.mark.promise("operations: default privileges")
def test_the_face_of_pgmq_grants_nothing_by_default(
    conn: Conn, stranger: str, to: str, before: bool
) -> None:
    """Neither what the installation makes, nor a queue's views and tables."""
    if before:
        schema.uninstall(conn)
        schema.install(conn)
    if to == "public":
        alter_defaults(conn, "grant all on {} to public")
    try:
        for _ in range(2):
            schema.install(conn, pgmq=True)
            conn.execute("select pgmq.create('q'), pgmq.send('q', '{}'), pgmq.archive('q', 1)")
            conn.execute("select pgmq.create_partitioned('p'), pgmq.bind_topic('#', 'q')")
            conn.execute("select pgmq.enable_notify_insert('q')")
            assert granted(conn, stranger) == []
            assert by_public(conn) == []
        schema.install(conn)
        assert granted(conn, stranger) == []
        assert by_public(conn) == []
    finally:
        alter_defaults(conn, "revoke all on {} from public")


def by_public(conn: Conn) -> list[tuple[str, str]]:
    """What everybody may do with objects of the queue's schemas."""
    return conn.execute(
        "select what, name from (select 'schema' as what, nspname::text as name, oid as home,"
        " nspacl as acl from pg_namespace"
        " union all select 'relation', oid::regclass::text, relnamespace, relacl from pg_class"
        " union all select 'routine', oid::regprocedure::text, pronamespace,"
        "  coalesce(proacl, acldefault('f', proowner)) from pg_proc"
        " union all select 'type', oid::regtype::text, typnamespace,"
        "  coalesce(typacl, acldefault('T', typowner)) from pg_type where typelem = 0) o"
        " where home in (select oid from pg_namespace"
        "  where nspname in ('pgqueue', '_pgqueue', 'pgmq'))"
        " and 0 in (select grantee from aclexplode(acl))"
    ).fetchall()


def test_what_somebody_grants_stays_and_doctor_names_it(
    conn: Conn, url: str, stranger: str
) -> None:
    def warnings() -> list[doctor.Check]:
        return [each for each in doctor.checks(url) if each.name == "permissions of others"]

    schema.install(conn, pgmq=True)
    conn.execute("select pgmq.create('q')")
    conn.execute(f"grant select on pgqueue.streams to {stranger}".encode())
    (check,) = warnings()
    assert check.found == f"{stranger} may select table pgqueue.streams"
    assert check.advice == f"revoke all on table pgqueue.streams from {stranger}"
    for what in ("table pgmq.q_q", "schema pgmq", "function pgmq.pop(text, integer)"):
        conn.execute(f"grant all on {what} to {stranger}".encode())
    for pgmq in (True, False):
        schema.install(conn, pgmq=pgmq)
        assert len(granted(conn, stranger)) == 4
        assert ("relation", "pgqueue.streams") in granted(conn, stranger)
    conn.execute((check.advice or "").encode())
    found = [each.found for each in warnings()]
    for name in ("table pgmq.q_q", "schema pgmq", "routine pgmq.pop(text,integer)"):
        assert any(each.endswith(name) for each in found), found
    conn.execute("select pgqueue.create_roles()")
    schema.install(conn, pgmq=True)
    conn.execute(f"revoke all on schema pgmq from {stranger}".encode())
    conn.execute(f"revoke all on pgmq.q_q from {stranger}".encode())
    conn.execute(f"revoke all on function pgmq.pop from {stranger}".encode())
    assert warnings() == []


def test_pgmq_itself_is_left_alone(conn: Conn, stranger: str) -> None:
    """A schema pgmq that is no face of the queue keeps its grants."""
    conn.execute("create schema pgmq; create table pgmq.meta (id int)")
    before = granted(conn, stranger)
    assert before
    schema.install(conn)
    assert granted(conn, stranger) == before


def test_doctor_names_who_holds_a_lock_without_a_right(conn: Conn, url: str, stranger: str) -> None:
    with connection.connect(make_conninfo(url, user=stranger, password=stranger)) as holder:
        holder.execute("select pg_advisory_lock(1885826421, 1)")
        (check,) = [each for each in doctor.checks(url) if each.name == "permissions of others"]
        assert f"process {holder.info.backend_pid} " in check.found
