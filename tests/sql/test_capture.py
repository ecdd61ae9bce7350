"""Capture: what is written to a table becomes messages, from which a copy can be kept."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from spark_pgqueue.postgres import connection, schema
from tests.conftest import user_of
from tests.sql import internals
from tests.sql.queue import Conn, call, claim_of, consumer, one, raises, value

pytestmark = pytest.mark.usefixtures("stream", "allowed_afterwards")

TABLE = "create table t (id int primary key, name text, price numeric)"


@pytest.fixture
def table(conn: Conn) -> None:
    """The table t, captured to the stream s, whose consumer c gets everything in its order."""
    consumer(conn, ordering="stream")
    conn.execute(TABLE)
    call(conn, "capture", "t", "s")


def messages(conn: Conn) -> list[tuple[str | None, str, Any]]:
    """Key, operation and row of what was captured since the last look, in order."""
    got = []
    while rows := call(conn, "receive", "s", "c", 1000):
        got += [(row.key, row.headers["operation"], json.loads(row.data)) for row in rows]
        value(conn, "ack", claim_of(rows))
    return got


def apply(copy: dict[str | None, Any], found: list[tuple[str | None, str, Any]]) -> None:
    """What one who keeps a copy does."""
    for key, operation, row in found:
        if operation == "truncate":
            copy.clear()
        elif operation == "delete":
            copy.pop(key, None)  # of a row that a trigger deleted at once, it has none
        else:
            copy[key] = row


def content(conn: Conn, table: str = "t", key: str = "id::text") -> dict[str, Any]:
    rows = conn.execute(f"select {key}, row_to_json(x) from {table} x".encode()).fetchall()
    return dict(rows)


@pytest.mark.all_versions
@pytest.mark.promise("feature: changes of tables")
def test_every_statement_becomes_messages_that_say_what_it_did(conn: Conn, table: None) -> None:
    conn.execute("insert into t values (1, 'a', 1.50), (2, 'b', null)")
    conn.execute("update t set name = 'c' where id = 1")
    conn.execute("update t set id = id + 1")
    conn.execute("update t set name = 'nobody' where id = 99")
    conn.execute("delete from t where id = 2")
    conn.execute("truncate t")
    a, b, c = ({"id": i, "name": n, "price": p} for i, n, p in
               [(1, "a", 1.5), (2, "b", None), (1, "c", 1.5)])  # fmt: skip
    found = messages(conn)
    assert found[:3] == [("1", "insert", a), ("2", "insert", b), ("1", "update", c)]
    # the new key of one row is the old one of another
    assert sorted(found[3:5], key=str) == [("1", "delete", c), ("2", "delete", b)]
    moved = [("2", "insert", c | {"id": 2}), ("3", "insert", b | {"id": 3})]
    assert sorted(found[5:7], key=str) == moved
    assert found[7:] == [("2", "delete", c | {"id": 2}), (None, "truncate", {})]
    assert internals.count(conn, "publications") == 6, "one per statement, two where keys change"


def test_headers_say_where_and_when_and_in_which_transaction(conn: Conn, table: None) -> None:
    with conn.transaction():
        conn.execute("insert into t values (1)")
        conn.execute("update t set name = 'x'")
        xid = one(conn, "select pg_current_xact_id()::text")
    headers = [row.headers for row in call(conn, "receive", "s", "c", 10)]
    assert [h["transaction"] for h in headers] == [xid, xid]
    assert {h["table"] for h in headers} == {"public.t"}
    assert one(conn, "select clock_timestamp() - %s::timestamptz < '1 min'", headers[0]["time"])


def test_a_copy_follows_whatever_statement_it_is(conn: Conn, table: None) -> None:
    """on conflict, merge, COPY, cascades, a trigger of the user's, many rows."""
    copy: dict[str | None, Any] = {}

    def check() -> None:
        apply(copy, messages(conn))
        assert copy == content(conn)

    conn.execute("create table parent (id int primary key)")
    conn.execute("insert into parent values (1), (2)")
    conn.execute("alter table t add parent int references parent on delete cascade")
    # plans that were made for one row must do for many: with nested loops it would take minutes
    conn.execute("insert into t values (1); update t set id = 2; delete from t")
    conn.execute("set statement_timeout = '15s'")
    conn.execute("insert into t select i, 'x', i from generate_series(1, 10000) i")
    check()
    conn.execute("update t set price = price * 2")
    check()
    conn.execute("update t set id = -id where id % 2 = 0")
    conn.execute("update t set id = id + 15000")
    check()
    conn.execute("delete from t where id > 14500")
    check()
    conn.execute(
        "insert into t select i, 'y' from generate_series(1, 10) i union all"
        " select id, 'z' from t where id < 6000 on conflict (id) do update set name = 'again'"
    )
    check()
    conn.execute(
        "merge into t using generate_series(5, 15) i on t.id = i"
        " when matched and i < 8 then delete when matched then update set name = 'merged'"
        " when not matched then insert values (i, 'new')"
    )
    check()
    with conn.cursor().copy("copy t (id, name) from stdin") as written:
        for i in range(100, 200):
            written.write_row((i, "copied"))
    conn.execute("update t set parent = 1 where id < 120; update t set parent = 2 where id = 150")
    check()
    conn.execute("delete from parent where id = 1")
    check()
    conn.execute("truncate parent cascade")
    check()


@pytest.mark.all_versions
@pytest.mark.parametrize("old", [False, True], ids=["", "old"])
def test_a_copy_follows_what_triggers_and_merge_do_to_the_same_rows(
    conn: Conn, table: None, old: bool
) -> None:
    """Postgres calls the trigger of a statement after those of what the statement set off."""
    call(conn, "capture", "t", "s", p_old=old)
    copy: dict[str | None, Any] = {}

    def check() -> None:
        found = messages(conn)
        if old:
            found = [(key, operation, row["new"]) for key, operation, row in found]
        apply(copy, found)
        assert copy == content(conn)

    conn.execute("insert into t values (1, 'a', 1), (2, 'b', 2), (3, 'c', 3), (4, 'd', 4)")
    conn.execute(
        "merge into t using (values (1, 9), (7, 1), (2, 8), (8, 2)) as s (id, becomes)"
        " on t.id = s.id when matched and t.id = 1 then delete"
        " when matched then update set id = becomes when not matched then insert values (becomes)"
    )
    check()
    conn.execute(
        "create function after_row() returns trigger language plpgsql as $$ begin"
        " if pg_trigger_depth() > 1 then return null; end if;"
        " if tg_op = 'DELETE' and old.id = 3 then insert into t values (3, 'again');"
        " elsif tg_op = 'INSERT' and new.id = 5 then delete from t where id = 5;"
        " elsif tg_op <> 'DELETE' then"
        "   update t set name = name || '!', price = price + 1 where id = new.id; end if;"
        " return null; end $$;"
        "create trigger mine after insert or update or delete on t for each row"
        " execute function after_row()"
    )
    for statement in (
        "update t set name = 'x'",
        "insert into t values (5, 'gone'), (6, 'kept')",
        "delete from t where id in (3, 4)",
        "update t set id = id + 10",
        "begin; insert into t values (20, 'y'); delete from t where id > 10; commit",
        "insert into t values (2, 'z'), (6, 'z') on conflict (id) do update set name = 'w'",
    ):
        conn.execute(statement.encode())
        check()


def test_with_old_rows_data_has_both(conn: Conn, table: None) -> None:
    call(conn, "capture", "t", "s", p_columns=["id", "name"], p_old=True)
    conn.execute("insert into t values (1, 'a', 5), (2, 'b', 6)")
    conn.execute("update t set name = name || '!'")
    conn.execute("update t set id = 3 where id = 2")
    conn.execute("delete from t where id = 1")
    conn.execute("truncate t")
    a, b, c = {"id": 1, "name": "a"}, {"id": 1, "name": "a!"}, {"id": 3, "name": "b!"}
    found = messages(conn)
    assert found[0] == ("1", "insert", {"old": None, "new": a})
    assert found[2] == ("1", "update", {"old": a, "new": b})
    assert found[4:] == [
        ("2", "delete", {"old": c | {"id": 2}, "new": None}),
        ("3", "insert", {"old": None, "new": c}),
        ("1", "delete", {"old": b, "new": None}),
        (None, "truncate", {"old": None, "new": None}),
    ]


def test_keys_and_columns_can_be_chosen(conn: Conn, table: None) -> None:
    conn.execute('create table many (a int, b text, c int, "d\'D" int)')
    for keys, expected in [(["c"], "7"), (["a", "b", "d'D"], '[1, "x", 9]'), ([], None)]:
        call(conn, "capture", "many", "s", keys, ["b", "d'D"])
        conn.execute("insert into many values (1, 'x', 7, 9)")
        assert messages(conn) == [(expected, "insert", {"b": "x", "d'D": 9})]
    wide = [f"c{i}" for i in range(60)]
    conn.execute(f"create table wide ({', '.join(c + ' int' for c in wide)}, more int)".encode())
    call(conn, "capture", "wide", "s", [], wide)
    conn.execute("insert into wide (c0, more) values (1, 2)")
    assert messages(conn) == [(None, "insert", {c: 1 if c == "c0" else None for c in wide})]


def test_the_table_can_change(conn: Conn, table: None) -> None:
    """Columns are renamed and added, the key is not dropped, and so on."""
    conn.execute("insert into t values (1, 'a', 5)")
    conn.execute("alter table t rename id to number")
    conn.execute("alter table t rename name to title")
    conn.execute("alter table t add extra int")
    conn.execute("alter table t drop price")
    conn.execute("alter table t rename to u")
    conn.execute("update u set title = 'b'")
    assert messages(conn)[1:] == [("1", "update", {"number": 1, "title": "b", "extra": None})]
    with pytest.raises(psycopg.Error, match="cannot drop column number") as caught:
        conn.execute("alter table u drop number")
    depends = "function pgqueue_1_t_key(pgqueue_1_t_type) depends on column number"
    assert depends in str(caught.value)
    with pytest.raises(psycopg.Error, match="captured to stream 's'"):
        call(conn, "drop_stream", "s")
    conn.execute("drop table u cascade")
    assert one(conn, "select count(*) from pgqueue.captures") == 0


def test_the_same_value_is_the_same_key_in_every_session(conn: Conn, table: None) -> None:
    conn.execute(
        "create table at (at timestamptz, s float8, b bytea, i interval, primary key (at))"
    )
    call(conn, "capture", "at", "s", ["at", "s", "b", "i"])
    row = "('2026-01-31 12:00+00', 0.1::float8 + 0.2, '\\xff', '1 day 02:00')"
    conn.execute(f"insert into at values {row}".encode())
    conn.execute("set timezone = 'Asia/Tokyo'; set datestyle = 'SQL, DMY'")
    conn.execute("set extra_float_digits = 0; set intervalstyle = postgres_verbose")
    conn.execute("set bytea_output = escape")
    conn.execute("delete from at")
    conn.execute("reset all")
    (first, _, a), (second, _, b) = messages(conn)
    assert first == second
    assert a == b


@pytest.fixture
def partitioned(conn: Conn) -> None:
    consumer(conn, ordering="stream")
    conn.execute(
        "create table t (id int, region text, primary key (id, region)) partition by list (region);"
        "create table t_a partition of t for values in ('a');"
        "create table t_b (region text not null, id int not null) partition by range (id);"
        "alter table t attach partition t_b for values in ('b');"
        "create table t_b1 partition of t_b for values from (0) to (100)"
    )
    call(conn, "capture", "t", "s")


@pytest.mark.all_versions
def test_a_copy_of_a_partitioned_table_follows(conn: Conn, partitioned: None) -> None:
    """Also rows that move, and what is written straight into a partition."""
    copy: dict[str | None, Any] = {}
    for statement in (
        "insert into t values (1, 'a'), (2, 'b'), (3, 'a')",
        "insert into t_a values (4, 'a'); insert into t_b1 values ('b', 5)",
        "update t set region = 'b', id = id + 10 where id in (1, 2)",
        "update t_a set id = 7 where id = 3; delete from t_b where id = 2",
        "insert into t_b values ('b', 20), ('b', 21); delete from t_b1 where id = 20",
        "truncate t_b1",
        "insert into t values (30, 'b')",
        "truncate t_b",
        "insert into t values (8, 'a'), (9, 'b')",
    ):
        conn.execute(statement.encode())
        apply(copy, messages(conn))
        assert copy == content(conn, key="format('[%s, \"%s\"]', id, region)"), statement
    conn.execute("truncate t")
    assert [operation for _, operation, _ in messages(conn)] == ["truncate"]


def test_new_partitions_are_captured_and_detached_ones_are_not(
    conn: Conn, partitioned: None
) -> None:
    def left_out() -> int:
        return one(conn, "select uncaptured_partitions from pgqueue.captures")

    conn.execute("create table t_c partition of t for values in ('c')")
    assert left_out() == 1
    call(conn, "maintain")
    assert left_out() == 0
    conn.execute("insert into t_c values (1, 'c')")
    conn.execute("alter table t detach partition t_c")
    conn.execute("insert into t_c values (2, 'c'); truncate t_c; drop table t_c")
    assert [key for key, *_ in messages(conn)] == ['[1, "c"]']
    conn.execute("create table t_d partition of t for values in ('d')")
    call(conn, "capture", "t", "s")
    assert left_out() == 0
    call(conn, "release", "t", "s")
    assert one(conn, "select count(*) from pg_trigger where tgname like 'pgqueue%'") == 0
    assert one(conn, "select count(*) from pg_proc where proname like 'pgqueue\\_%'") == 0


def test_an_outbox_is_empty_again_and_its_rows_are_messages(conn: Conn, table: None) -> None:
    conn.execute(
        "create table outbox (id bigint generated always as identity primary key,"
        " customer text, event jsonb)"
    )
    call(conn, "capture", "outbox", "s", ["customer"], ["event"], p_outbox=True)
    conn.execute(
        "insert into outbox (customer, event) values ('a', '{\"paid\": 1}'), ('b', 'null')"
    )
    with conn.transaction(force_rollback=True):
        conn.execute("insert into outbox (customer) values ('c')")
    assert one(conn, "select count(*) from outbox") == 0
    events = [("a", {"paid": 1}), ("b", None)]
    assert messages(conn) == [(key, "insert", {"event": event}) for key, event in events]


def test_what_others_have_under_a_name_of_a_capture_stays_theirs(conn: Conn) -> None:
    """Captured again with other columns, and released, too."""
    consumer(conn, ordering="stream")
    conn.execute(TABLE)
    theirs = dict.fromkeys(("", "_key", "_row", "_now", "_done"), "function") | {"_type": "type"}
    of = {"type": " as (mine int)", "function": "() returns int language sql return 1"}
    for name, kind in theirs.items():
        conn.execute(f"create {kind} pgqueue_1_t{name}{of[kind]}".encode())
        for columns in (None, ["id", "name"]):
            call(conn, "capture", "t", "s", p_columns=columns)
            conn.execute("insert into t select count(*) from t")
            assert len(messages(conn)) == 1
        call(conn, "release", "t", "s")
        conn.execute(f"drop {kind} pgqueue_1_t{name}".encode())
        assert one(conn, "select count(*) from pg_proc where proname like 'pgqueue\\_1%'") == 0
        assert one(conn, "select count(*) from pg_type where typname like 'pgqueue\\_1%'") == 0


# Who may


@pytest.fixture
def owner(conn: Conn, url: str, new_role: Callable[..., str]) -> str:
    """A url of a role that may send and owns the table t, to which everybody may write."""
    role = user_of(new_role())
    schema.grant(conn, "producer", role)
    consumer(conn, ordering="stream")
    made = f"create schema app authorization {role}; grant usage on schema app to public"
    conn.execute(made.encode())
    return make_conninfo(url, user=role, password=role)


@pytest.fixture
def writer(url: str, new_role: Callable[..., str]) -> str:
    """A url of a role that may do nothing in particular."""
    role = user_of(new_role())
    return make_conninfo(url, user=role, password=role)


@pytest.mark.all_versions
def test_the_owner_captures_and_whoever_writes_needs_no_right_of_the_queue(
    conn: Conn, owner: str, writer: str
) -> None:
    with connection.connect(owner) as own, connection.connect(writer) as other:
        own.execute("create table app.t (id int primary key, secret text)")
        own.execute("grant insert (id), update, delete on app.t to public")
        call(own, "capture", "app.t", "s")
        other.execute("insert into app.t (id) values (1)")
        own.execute("update app.t set secret = 'x'")
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            other.execute("select pgqueue.send('s', 'x')")
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            call(other, "capture", "app.t", "s")
        functions = "select oid::regprocedure::text from pg_proc where proname like 'pgqueue\\_1%'"
        assert len(own.execute(functions.encode()).fetchall()) == 4
        for (function,) in own.execute(functions.encode()).fetchall():
            may = "select has_function_privilege('public', %s, 'execute')"
            assert one(conn, may, function) is False
        call(own, "release", "app.t", "s")
    assert [key for key, *_ in messages(conn)] == ["1", "1"]


def test_what_is_not_the_callers_is_not_captured(conn: Conn, owner: str, writer: str) -> None:
    with connection.connect(owner) as own:
        role = own.info.user
        conn.execute("create table others (id int primary key, secret text)")
        conn.execute(f"grant all on others to {role}".encode())
        own.execute("create table app.t (id int primary key, secret text, open text)")
        conn.execute("create function public.as_owner() returns void language sql security definer"
                     " as $$ select pgqueue.capture('others', 's') $$")  # fmt: skip
        conn.execute(f"alter function public.as_owner() owner to {role}".encode())
        for who, statement, says in (
            (own, "select pgqueue.capture('others', 's')", "a table of the caller"),
            (own, "select pgqueue.release('others', 's')", "is captured to stream"),
            # also where a superuser calls a function of the role's
            (conn, "select public.as_owner()", "a table of the caller"),
            (own, "select pgqueue.capture('pg_class', 's')", "p_table"),
            (own, "select pgqueue.capture('pgqueue.streams', 's')", "p_table"),
        ):
            with pytest.raises(psycopg.Error, match=says):
                who.execute(statement.encode())
        own.execute(f"revoke select on app.t from {role}".encode())
        own.execute(f"grant select (id, open) on app.t to {role}".encode())
        with pytest.raises(psycopg.Error, match="may read, not secret"):
            call(own, "capture", "app.t", "s")
        call(own, "capture", "app.t", "s", p_columns=["open"])
        own.execute("insert into app.t values (1, 'secret', 'open')")
    assert messages(conn) == [("1", "insert", {"open": "open"})]
    assert one(conn, "select count(*) from pgqueue.captures") == 1


def test_a_superuser_captures_for_the_owner_and_nothing_runs_with_its_rights(
    conn: Conn, owner: str, writer: str
) -> None:
    """A cast of a type may be anybody's function: it runs as the owner of the table."""
    with connection.connect(owner) as own, connection.connect(writer) as other:
        own.execute(
            "create type app.evil as enum ('x');"
            "create table app.ran (who name); grant insert on app.ran to public;"
            "create function app.cast_it(app.evil) returns json language plpgsql as"
            " $$ begin insert into app.ran values (current_user); return '{}'; end $$;"
            "create cast (app.evil as json) with function app.cast_it(app.evil);"
            "create table app.t (id int primary key, e app.evil);"
            "grant insert on app.t to public; grant usage on type app.evil to public"
        )
        call(conn, "capture", "app.t", "s")
        other.execute("insert into app.t values (1, 'x')")
        conn.execute("insert into app.t values (2, 'x')")
        role = own.info.user
        assert own.execute("select distinct who from app.ran").fetchall() == [(role,)]
    conn.execute("create table public.mine (id int primary key)")
    conn.execute(f"alter table public.mine owner to {role}".encode())
    conn.execute(f"revoke pgqueue_producer from {role}".encode())
    with pytest.raises(psycopg.Error, match="may not send") as caught:
        call(conn, "capture", "public.mine", "s")
    assert "grant pgqueue_producer to" in str(caught.value.diag.message_hint)
    call(conn, "release", "app.t", "s")


# Bad input, and what is left


REFUSED = [
    ("'t', 'no'", None, "unknown stream 'no'"),
    ("'t', 'b'", "p_stream", "kind json or text, not 'b', which is binary"),
    ("null, 's'", "p_table", "not null"),
    ("'v', 's'", "p_table", "not public.v"),
    ("'tmp', 's'", "p_table", "temporary"),
    ("'keyless', 's'", "p_keys", "primary key, but public.keyless has none"),
    ("'keyless', 's', '{a}', p_outbox => true", "p_outbox", "public.keyless has none"),
    ("'t', 's', '{no}'", "p_keys", "p_keys names no, which is not a column of public.t"),
    ("'t', 's', '{null}'", "p_keys", "p_keys names null"),
    ("'t', 's', '{{id}}'", "p_keys", "a list of columns"),
    ("'t', 's', '{ctid}'", "p_keys", "p_keys names ctid"),
    ("'t', 's', null, '{id,No}'", "p_columns", 'p_columns names "No", which is not a column'),
    ("'t', 's', null, '{}'", "p_columns", "a list of columns, or null"),
]


def test_bad_input_is_refused_by_name_and_changes_nothing(conn: Conn, table: None) -> None:
    value(conn, "create_stream", "b", "binary")
    conn.execute("create view v as select 1 as id; create table keyless (a int)")
    conn.execute("create temporary table tmp (id int primary key)")
    functions = "select array_agg(oid order by oid) from pg_proc where proname like 'pgqueue\\_%'"
    before = one(conn, functions)
    for arguments, argument, says in REFUSED:
        with pytest.raises(psycopg.Error) as caught:
            conn.execute(f"select pgqueue.capture({arguments})".encode())
        assert says in str(caught.value)
        assert caught.value.diag.column_name == argument
    assert one(conn, functions) == before


def test_what_does_not_fit_the_stream_fails_the_statement(conn: Conn, table: None) -> None:
    """Rather than that the copy differs from the table."""
    value(conn, "create_stream", "small", "json", p_settings='{"max_bytes": 50}')
    call(conn, "capture", "t", "small", ["name"])
    for row, says in (
        (f"(1, '{'x' * 60}')", "at most 50 bytes"),
        (f"(1, '{'x' * 2000}')", "p_key"),
    ):
        for rows in (row, f"{row}, (2, 'b')"):
            with pytest.raises(psycopg.Error, match=says):
                conn.execute(f"insert into t values {rows}".encode())
    assert content(conn) == {}
    assert messages(conn) == []


def test_released_or_uninstalled_nothing_is_left_behind(conn: Conn, table: None) -> None:
    depends = r"other objects depend on the schema pgqueue: .*capture of public\.t"
    with pytest.raises(Exception, match=depends):
        schema.uninstall(conn)
    call(conn, "release", "t", "s")
    conn.execute("insert into t values (1)")
    assert messages(conn) == []
    for statement in ("release('t', 's')", "release(null, 's')", "release('t', 'no')"):
        with pytest.raises(psycopg.Error, match=r"captured to stream|unknown stream"):
            conn.execute(f"select pgqueue.{statement}".encode())
    conn.execute("alter table t drop id; drop table t")


def test_installing_again_keeps_tables_captured(conn: Conn, table: None) -> None:
    schema.install(conn)
    conn.execute("insert into t values (1)")
    assert [key for key, *_ in messages(conn)] == ["1"]


@pytest.mark.parametrize("way_out", ["capture", "release"])
@pytest.mark.parametrize("number", ["the stream's", "another stream's", "no stream's"])
def test_a_table_that_was_restored_without_its_queue_sends_nothing(
    conn: Conn, table: None, number: str, way_out: str
) -> None:
    """Its trigger names a stream by number, which another stream may have where it is restored."""
    conn.execute("insert into t values (1), (2)")
    assert len(messages(conn)) == 2
    if number != "the stream's":
        value(conn, "create_stream", "other", "json")
        call(conn, "release", "t", "s")
        call(conn, "capture", "t", "other")
    conn.execute("delete from pgqueue.captured")
    if number == "no stream's":
        value(conn, "drop_stream", "other")
    for statement in (
        *("insert into t values (3)", "insert into t select generate_series(3, 2000)"),
        *("update t set name = 'x'", "update t set id = id + 5", "delete from t", "truncate t"),
    ):
        with raises("PQ003", r"table public.t has triggers of a capture, but is not captured to"):
            conn.execute(statement.encode())
    assert messages(conn) == []
    call(conn, way_out, "t", "s")
    conn.execute("insert into t values (3)")
    assert len(messages(conn)) == (way_out == "capture")
    assert one(conn, "select count(*) from pgqueue.messages") == 2 + (way_out == "capture")
    functions = "select count(*) from pg_proc where proname like 'pgqueue\\_%'"
    assert one(conn, functions) == (4 if way_out == "capture" else 0)


def test_a_partitioned_table_that_was_restored_beside_a_smaller_queue_can_be_released(
    conn: Conn, partitioned: None
) -> None:
    value(conn, "create_stream", "other", "json")
    call(conn, "release", "t", "s")
    call(conn, "capture", "t", "other")
    conn.execute("delete from pgqueue.captured")
    value(conn, "drop_stream", "other")
    for table in ("t", "t_b1"):
        with raises("PQ003", f"table public.{table} .* is not captured to stream number"):
            conn.execute(f"insert into {table} (id, region) values (1, 'b')".encode())
    call(conn, "release", "t", "s")
    conn.execute("insert into t_b1 (id, region) values (1, 'b')")
    for catalog in ("pg_trigger where tgname", "pg_proc where proname", "pg_type where typname"):
        assert one(conn, f"select count(*) from {catalog} like 'pgqueue\\_%'") == 0


def test_a_restored_table_whose_owner_may_not_send_can_be_released(conn: Conn, owner: str) -> None:
    with connection.connect(owner) as own:
        own.execute("create table app.t (id int primary key)")
        call(own, "capture", "app.t", "s")
        conn.execute("delete from pgqueue.captured")
        conn.execute(f"revoke pgqueue_producer from {own.info.user}".encode())
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            own.execute("insert into app.t values (1)")
        call(conn, "release", "app.t", "s")
        own.execute("insert into app.t values (1)")
