"""Capture, and roles that mean harm: no role runs its code as another one, or stops the others."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo
from psycopg.sql import SQL, Identifier

from spark_pgqueue.postgres import connection, schema
from tests.conftest import user_of
from tests.sql.queue import Conn, Session, acked, call, consumer, one, raises, value
from tests.sql.test_capture import apply, content, messages

pytestmark = [pytest.mark.usefixtures("stream", "allowed_afterwards"), pytest.mark.all_versions]

# Tables, functions and triggers that the roles of a test have made, and what captured them.
FOREIGN_TRIGGERS = b"""
    select tgrelid::regclass::text, tgname from pg_trigger t
    join pg_class c on c.oid = t.tgrelid join pg_proc p on p.oid = t.tgfoid
    where not tgisinternal and c.relowner <> p.proowner"""
FUNCTIONS_OF_THE_SUPERUSER = b"""
    select p.oid::regprocedure::text from pg_proc p join pg_namespace n on n.oid = p.pronamespace
    join pg_roles r on r.oid = p.proowner
    where r.rolsuper and n.nspname !~ '^(pg_|information_schema|_?pgqueue$|public$)'"""


def name_of(conn: Conn) -> str:
    return str(one(conn, "select current_user::text"))


def run(conn: Conn, statement: str, **names: str) -> None:
    """Execute a statement, with names in the place of words in braces."""
    conn.execute(SQL(statement).format(**{k: Identifier(v) for k, v in names.items()}))  # type: ignore[arg-type]


def connect(url: str, role: str) -> Conn:
    return connection.connect(make_conninfo(url, user=role, password=role))


@pytest.fixture
def roles(conn: Conn, new_role: Callable[..., str]) -> tuple[str, str]:
    """A producer, and a role without any right of the queue. Both make schemas."""
    consumer(conn, ordering="stream")
    names = user_of(new_role()), user_of(new_role())
    schema.grant(conn, "producer", names[0])
    for name in names:
        conn.execute(f"grant create on database {conn.info.dbname} to {name}".encode())
    return names


@pytest.fixture
def producer(url: str, roles: tuple[str, str]) -> Iterator[Conn]:
    with connect(url, roles[0]) as conn:
        yield conn


@pytest.fixture
def stranger(url: str, roles: tuple[str, str]) -> Iterator[Conn]:
    with connect(url, roles[1]) as conn:
        yield conn


# Somebody's trigger has the name of ours


FAKE = """
    create schema app;
    create table app.t (id int primary key) partition by list (id);
    create table app.t1 partition of app.t for values in (1);
    create function app.f() returns trigger language plpgsql as $$ begin return null; end $$;
    create trigger pgqueue_1_insert after insert on app.t
        for each statement execute function app.f()
"""


def test_a_trigger_with_the_name_of_ours_is_no_capture(
    conn: Conn, stranger: Conn, empty_url: str
) -> None:
    """A role without rights stops neither maintain, drop_stream, the view nor uninstalling."""
    stranger.execute(FAKE.encode())
    call(conn, "maintain")
    ours = b"select tgrelid::regclass::text from pg_trigger where tgname like 'pgqueue\\_%'"
    assert conn.execute(ours).fetchall() == [("app.t",)]
    assert conn.execute("select * from pgqueue.captures").fetchall() == []
    with pytest.raises(psycopg.Error, match="a table that is captured to stream"):
        call(conn, "release", "app.t", "s")
    value(conn, "create_stream", "other")
    value(conn, "drop_stream", "s")
    assert conn.execute("select name from pgqueue.streams").fetchall() == [("other",)]
    schema.uninstall(conn)
    assert one(conn, "select to_regnamespace('pgqueue') is null")
    schema.install(conn)


def test_maintain_makes_nothing_for_tables_of_others(
    conn: Conn, producer: Conn, session: Session
) -> None:
    """While maintain waits for a partition, the name becomes that of another table."""
    producer.execute(FAKE.replace("1_insert", "1_other").encode())
    call(producer, "capture", "app.t", "s")
    # ... which is somebody else's in a schema of the attacker's, as tables of a migration often are
    producer.execute("create schema other")
    producer.execute("create table app.t2 partition of app.t for values in (2)")
    producer.execute(
        "create function other.evil() returns trigger language plpgsql as"
        " $$ begin execute format('alter role %I superuser', tg_argv[0]); return null; end $$"
    )
    conn.execute("create table other.t2 (id int)")
    (name,) = producer.execute(
        "select proname from pg_proc where proname ~ '^pgqueue_1_t$'"
    ).fetchone() or ("",)
    producer.execute(f"alter function other.evil() rename to {name}".encode())
    conn.execute("alter function _pgqueue.capture_partitions() set lock_timeout = '10s'")
    maintaining = session()
    producer.execute("begin")
    producer.execute("lock table app.t2 in access exclusive mode")
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(call, maintaining, "maintain")
        waits = "select exists (select from pg_locks where not granted)"
        while not (done.done() or one(conn, waits)):
            pass
        producer.execute("alter schema app rename to gone; alter schema other rename to app")
        producer.execute("commit")
        done.result(timeout=20)
    assert conn.execute(FOREIGN_TRIGGERS).fetchall() == []
    assert one(conn, "select uncaptured_partitions from pgqueue.captures") == 1
    producer.execute("alter schema app rename to other; alter schema gone rename to app")
    call(producer, "capture", "app.t", "s")
    assert one(conn, "select uncaptured_partitions from pgqueue.captures") == 0
    call(producer, "release", "app.t", "s")


# Names move while a superuser captures or releases for the owner

# A session named victim stops after those of its steps that the setting test.pause lists, until as
# many were let go.
PAUSE = """
    create sequence public.steps;
    create sequence public.stopped minvalue 0 start 0;
    create sequence public.let_go minvalue 0 start 0;
    create function public.pause() returns event_trigger language plpgsql as $$
    declare
        v_stop bigint;
    begin
        if current_setting('application_name') = 'victim'
           and nextval('public.steps') = any (current_setting('test.pause')::int[]) then
            v_stop := nextval('public.stopped');
            while (select last_value from public.let_go) < v_stop loop
                perform pg_sleep(0.001);
            end loop;
        end if;
    end $$;
    grant all on sequence public.steps, public.stopped, public.let_go to public;
    create event trigger pause on ddl_command_end execute function public.pause();
    create event trigger pause_drop on sql_drop execute function public.pause()
"""
TABLES = """
    create schema app;
    create table app.t (id int primary key) partition by list (id);
    create table app.t1 partition of app.t for values in (1);
"""
SWAP = b"""
    alter schema app rename to swapped; alter schema other rename to app;
    alter schema swapped rename to other"""


def swap(owner: Conn) -> bool:
    """Exchange the names of the two schemas; false where Postgres has the owner wait for that.

    A minor version of November 2026 (17.12) locks a schema where something is made in it.
    """
    try:
        with owner.transaction():
            owner.execute("set local lock_timeout = '20ms'")
            owner.execute(SWAP)
    except psycopg.errors.LockNotAvailable:
        return False
    return True


@pytest.mark.longer
@pytest.mark.parametrize("done", ["capture", "release", "maintain"])
@pytest.mark.promise("capture: names that move meanwhile")
def test_names_that_move_meanwhile_lead_nobody_to_make_something_for_somebody_else(
    conn: Conn, producer: Conn, session: Session, done: str
) -> None:
    """The owner of the schema moves its names, before and after each step of the way.

    A superuser captures and releases a table of the schema's owner, and calls maintain for a table
    of its own in that schema, whose owner may act as the superuser: else it were refused.
    """
    conn.execute(PAUSE.encode())
    producer.execute(TABLES.encode())
    producer.execute(TABLES.replace("app", "other").encode())
    if done == "maintain":
        conn.execute(f"alter table app.t owner to {name_of(conn)}".encode())
        conn.execute(f"alter table app.t1 owner to {name_of(conn)}".encode())
        run(conn, "grant {owner} to {role}", owner=name_of(conn), role=name_of(producer))
    # functions that take the place of those that are made
    for name, arguments, returns in (
        ("", "", "trigger"), ("_key", "record", "text"), ("_row", "record", "json"),
        ("_now", "record", "json"), ("_key", "other.t", "text"), ("_row", "other.t", "json"),
        ("_now", "other.t", "json"),
    ):  # fmt: skip
        producer.execute(
            f"create function other.pgqueue_1_t{name}({arguments}) returns {returns}"
            " language plpgsql as $$ begin raise exception 'hijacked'; end $$".encode()
        )
    victim = session()
    victim.execute("set application_name = 'victim'")
    oid = one(conn, "select 'app.t'::regclass::oid")
    ended: dict[int, list[Any]] = {}
    for length in (1, 2, 4, 8, 100):
        for step in range(1, 100):
            if one(conn, "select count(*) from pgqueue.captures") == 1:
                call(conn, "release", oid, "s")
            if done != "capture":
                call(conn, "capture", oid, "s")
            if done == "maintain":
                conn.execute(
                    "drop table app.t1; create table app.t1 partition of app.t for values in (1)"
                )
            for sequence, first in ("steps", 1), ("stopped", 0), ("let_go", 0):
                conn.execute(f"select setval('public.{sequence}', {first}, false)".encode())
            conn.execute("select nextval('public.stopped'), nextval('public.let_go')")
            victim.execute(f"set test.pause = '{{{step}, {step + length}}}'".encode())
            stops = swaps = 0
            with ThreadPoolExecutor(1) as pool:
                arguments = [] if done == "maintain" else [oid, "s"]
                doing = pool.submit(call, victim, done, *arguments)
                while not doing.done():
                    if one(conn, "select last_value from public.stopped") > stops:
                        swaps += swap(producer)
                        stops = one(conn, "select nextval('public.let_go')")
            ended.setdefault(length, []).append(doing.exception())
            if swaps % 2:
                assert swap(producer)
            strays = (
                [] if done == "maintain" else conn.execute(FUNCTIONS_OF_THE_SUPERUSER).fetchall()
            )
            assert strays == [], step
            assert conn.execute(FOREIGN_TRIGGERS).fetchall() == [], step
            others = "select count(*) from pg_trigger where tgrelid::regclass::text like 'other.%'"
            assert one(conn, others) == 0, step
            assert one(victim, "select current_user") == one(conn, "select current_user")
            if stops == 0:
                break
    for errors in ended.values():
        assert len(errors) > 4, "each step was tried"
        assert errors[-1] is None, "where nothing moves, all is well"
        assert all(error is None or isinstance(error, psycopg.Error) for error in errors)
    assert one(conn, "select count(*) from pgqueue.captures") == (done != "release")
    assert not one(conn, "select sum(uncaptured_partitions) from pgqueue.captures")
    conn.execute("drop event trigger pause; drop event trigger pause_drop")


def test_who_may_create_in_the_schema_of_a_captured_table_gets_nothing_to_run_in_its_triggers(
    conn: Conn, producer: Conn, stranger: Conn
) -> None:
    """Functions that fit better than ours the rows of a partition."""
    producer.execute(
        "create schema app; create table app.t (id int primary key) partition by list (id);"
        "create table app.t1 partition of app.t for values in (1);"
    )
    run(producer, "grant usage, create on schema app to {role}", role=name_of(stranger))
    call(producer, "capture", "app.t", "s")
    functions = "select proname from pg_proc where proname ~ '^pgqueue_1_t_'"
    for (function,) in conn.execute(functions.encode()).fetchall():
        for type_ in ("app.t", "app.t1", "record", "anyelement"):
            create = SQL(
                "create function app.{}(x {}) returns text language plpgsql as"
                " $$ begin raise exception 'hijacked'; end $$"
            )
            stranger.execute(create.format(Identifier(function), SQL(type_)))  # type: ignore[arg-type]
    producer.execute("insert into app.t1 values (1); update app.t1 set id = 1; truncate app.t1")
    assert [operation for _, operation, _ in messages(conn)] == ["insert", "update", "delete"]


@pytest.mark.parametrize("within", ["", "in schema app"])
def test_no_default_privilege_lets_others_publish_by_the_functions_of_a_captured_table(
    conn: Conn, producer: Conn, stranger: Conn, within: str
) -> None:
    """They run as the table's owner: a role could publish by a trigger on a table of its own."""
    other = name_of(stranger)
    producer.execute("create schema app")
    for to in (other, "public"):
        grant = f"alter default privileges {within} grant all on functions to {to}"
        producer.execute(grant.encode())
    producer.execute(
        f"create table app.t (id int primary key, x text) partition by list (id);"
        f" create table app.t1 (x text, id int not null);"
        f" alter table app.t attach partition app.t1 for values in (1);"
        f" grant usage, create on schema app to {other}".encode()
    )
    call(producer, "capture", "app.t", "s", p_outbox=True)
    made = conn.execute(b"select oid::regprocedure::text from pg_proc where proname ~ '^pgqueue_1'")
    functions = [function for (function,) in made]
    assert len(functions) > 5
    for function in functions:
        asked = "select has_function_privilege(%s, %s, 'execute')"
        assert conn.execute(asked.encode(), (other, function)).fetchone() == (False,), function
    producer.execute("insert into app.t1 (id) values (1)")
    assert [operation for _, operation, _ in messages(conn)] == ["insert"]


# Who captures


def test_partitions_of_others_are_not_captured(conn: Conn, producer: Conn, stranger: Conn) -> None:
    producer.execute(
        "create schema app; create table app.t (id int primary key) partition by list (id);"
        "create table app.t1 partition of app.t for values in (1)"
    )
    conn.execute(f"alter table app.t1 owner to {name_of(stranger)}".encode())
    for who in (producer, conn):
        with raises("PQ003", r"partition app\.t1 .* belongs to"):
            call(who, "capture", "app.t", "s")
    assert conn.execute("select from pg_trigger where tgname like 'pgqueue%'").fetchall() == []


def test_a_table_in_a_schema_of_somebody_else_is_refused(
    conn: Conn, producer: Conn, stranger: Conn
) -> None:
    """The schema's owner may drop the functions of a capture, and create some with their names."""
    owner, other = name_of(producer), name_of(stranger)
    run(stranger, "create schema app; grant all on schema app to {owner}", owner=owner)
    producer.execute(
        "create table app.t (id int primary key); create schema mine;"
        "create table mine.t (id int primary key) partition by list (id);"
        "create table app.t1 partition of mine.t for values in (1)"
    )

    def is_refused(*tables: str) -> None:
        for who in (producer, conn):
            for table in tables:
                with raises("PQ003", rf"schema app, of table {table} .*belongs to role {other}"):
                    call(who, "capture", table, "s")

    def is_captured(*tables: str) -> None:
        for table in tables:
            call(producer, "capture", table, "s")
            call(conn, "release", table, "s")

    is_refused("app.t", "mine.t")
    run(conn, "grant {owner} to {other}", owner=owner, other=other)
    is_captured("app.t", "mine.t")
    run(conn, "revoke {owner} from {other}", owner=owner, other=other)
    is_refused("app.t", "mine.t")
    run(conn, "alter schema app owner to {to}", to=name_of(conn))
    run(conn, "grant all on schema app to {owner}", owner=owner)
    is_captured("app.t", "mine.t")


def test_a_table_in_public_is_refused_unless_the_databases_owner_may_act_as_its_owner(
    conn: Conn, producer: Conn, stranger: Conn
) -> None:
    database, before = conn.info.dbname, name_of(conn)
    owner, other = name_of(producer), name_of(stranger)
    run(conn, "grant create on schema public to {owner}", owner=owner)
    producer.execute("create table public.t (id int primary key)")
    try:
        for to in (other, owner, before):
            run(conn, "alter database {database} owner to {to}", database=database, to=to)
            if to == other:
                with raises("PQ003", f"schema public, .*belongs to role {other}") as caught:
                    call(producer, "capture", "public.t", "s")
                assert f"grant {owner} to {other}" in str(caught.value.diag.message_hint)
            else:
                call(producer, "capture", "public.t", "s")
    finally:
        run(conn, "alter database {database} owner to {to}", database=database, to=before)


def test_maintain_captures_no_partition_in_a_schema_of_somebody_else(
    conn: Conn, stranger: Conn
) -> None:
    conn.execute(
        "create schema app; create table app.t (id int primary key) partition by list (id)"
    )
    call(conn, "capture", "app.t", "s")
    stranger.execute("create schema theirs")
    conn.execute(
        "create table theirs.t1 partition of app.t for values in (1);"
        "create table app.t2 partition of app.t for values in (2)"
    )
    call(conn, "maintain")
    captured = "select relation::text from pgqueue.captured where relation <> root"
    assert conn.execute(captured.encode()).fetchall() == [("app.t2",)]
    conn.execute("insert into app.t values (1), (2)")
    assert len(messages(conn)) == 2
    run(conn, "alter schema theirs owner to {to}", to=name_of(conn))
    call(conn, "maintain")
    assert one(conn, "select uncaptured_partitions from pgqueue.captures") == 0


def test_release_is_the_owners(
    conn: Conn, producer: Conn, new_role: Callable[..., str], url: str
) -> None:
    producer.execute("create schema app; create table app.t (id int primary key)")
    call(producer, "capture", "app.t", "s")
    another = user_of(new_role())
    schema.grant(conn, "producer", another)
    producer.execute(f"grant usage on schema app to {another}".encode())
    with connect(url, another) as other, raises("PQ003", "a table of the caller"):
        call(other, "release", "app.t", "s")
    assert one(conn, "select count(*) from pgqueue.captures") == 1
    call(producer, "release", "app.t", "s")


def test_no_other_role_has_a_table_send_that_was_restored_without_its_queue(
    conn: Conn, producer: Conn, new_role: Callable[..., str], url: str
) -> None:
    """Its triggers name the stream by number, which may be a stream of that other role."""
    producer.execute("create schema app; create table app.t (id int primary key)")
    call(producer, "capture", "app.t", "s")
    oid = one(conn, "select 'app.t'::regclass::oid")
    another = user_of(new_role())
    schema.grant(conn, "producer", another)
    with connect(url, another) as other:
        assert call(other, "note_captures", oid, "s")[0].captured, "there is nothing to add"
        conn.execute("delete from pgqueue.captured")
        for function in ("note_captures", "capture", "release"):
            with raises("PQ003", f"of the session's role, {another}, not", "p_table"):
                call(other, function, oid, "s")
    with raises("PQ003", "has triggers of a capture, but is not captured to"):
        producer.execute("insert into app.t values (1)")
    call(producer, "capture", "app.t", "s")
    producer.execute("insert into app.t values (1)")
    assert len(messages(conn)) == 1


def test_a_function_with_its_owners_rights_captures_what_it_creates(
    conn: Conn, producer: Conn, new_role: Callable[..., str], url: str
) -> None:
    """Also a partition later. Whoever calls it is no member of the owner."""
    producer.execute(
        "create schema app; create function app.add(made text) returns void security definer"
        " set search_path = app language plpgsql as $$ begin execute made;"
        " perform pgqueue.capture('app.t', 's'); end $$"
    )
    another = user_of(new_role())
    schema.grant(conn, "producer", another)
    run(producer, "grant usage on schema app to {role}", role=another)
    with connect(url, another) as other:
        made = "create table t (id int primary key) partition by range (id)"
        other.execute("select app.add(%s)", [made])
        made = "create table one partition of t for values from (1) to (9)"
        other.execute("select app.add(%s)", [made])
    producer.execute("insert into app.t values (1)")
    assert len(messages(conn)) == 1


@pytest.mark.parametrize("whose", ["another role's", "the owner's"])
def test_release_drops_no_function_but_those_that_capture_made(
    conn: Conn, stranger: Conn, whose: str
) -> None:
    """They use the domain of the capture; and a superuser could drop anything."""
    conn.execute("create schema app; create table app.t (id int primary key)")
    call(conn, "capture", "app.t", "s")
    domain = "app.pgqueue_1_t_type"
    if whose == "the owner's":
        conn.execute(f"create function app.mine({domain}) returns int return 1".encode())
    else:
        conn.execute(f"grant all on schema app to {name_of(stranger)}".encode())
        stranger.execute(
            f"create function app.pgqueue_1_t_done({domain}) returns int return 1".encode()
        )
    with pytest.raises(psycopg.errors.DependentObjectsStillExist):
        call(conn, "release", "app.t", "s")
    conn.execute(f"drop owned by {name_of(stranger)}; drop function if exists app.mine".encode())
    call(conn, "release", "app.t", "s")


def test_the_owner_of_the_queue_needs_no_right_in_the_schema_of_a_table(
    empty_url: str, conn: Conn, new_role: Callable[..., str]
) -> None:
    """An owner that is no superuser: it may not use the schemas of others."""
    owner, theirs = user_of(new_role()), user_of(new_role())
    with connection.connect(empty_url) as admin:
        database = admin.info.dbname
        for name in owner, theirs:
            run(
                admin, "grant create on database {database} to {name}", database=database, name=name
            )
        run(admin, "alter role {owner} createrole", owner=owner)
        with connect(empty_url, owner) as own:
            schema.install(own)
            call(own, "create_stream", "s")
            own.execute("select pgqueue.create_roles()")
        run(admin, "grant pgqueue_producer to {theirs}; alter role {owner} nocreaterole",
            theirs=theirs, owner=owner)  # fmt: skip
        with connect(empty_url, theirs) as producer:
            producer.execute("create schema mine; create table mine.t (id int primary key)")
            call(producer, "capture", "mine.t", "s")
            producer.execute("insert into mine.t values (7)")
            call(producer, "capture", "mine.t", "s", p_old=True)
            call(producer, "release", "mine.t", "s")
        assert one(admin, "select data from pgqueue.messages") == '{"id":7}'
        run(admin, "drop owned by {owner}, {theirs} cascade", owner=owner, theirs=theirs)


def test_a_member_of_the_owner_captures_as_the_owner(
    conn: Conn, producer: Conn, new_role: Callable[..., str], url: str
) -> None:
    """What is made is the owner's, and afterwards the session is who it was."""
    producer.execute("create schema app; create table app.t (id int primary key)")
    member = user_of(new_role())
    conn.execute(f"grant {name_of(producer)} to {member}".encode())
    with connect(url, member) as other:
        call(other, "capture", "app.t", "s")
        assert one(other, "show role") == "none"
        owners = "select distinct proowner::regrole::text from pg_proc where proname ~ '^pgqueue_1'"
        assert conn.execute(owners.encode()).fetchall() == [(name_of(producer),)]
        with other.transaction():
            other.execute(f"set local role {name_of(producer)}".encode())
            call(other, "release", "app.t", "s")
            assert one(other, "select current_user") == name_of(producer)
    assert one(conn, "select count(*) from pgqueue.captures") == 0


# Row level security


NESTED = """
    create function app.again() returns trigger language plpgsql as $$ begin
        if pg_trigger_depth() = 1 then
            update app.t set name = name || '!' where id = new.id;
        end if;
        return null; end $$;
    create trigger again after insert on app.t for each row execute function app.again()
"""


def test_a_table_whose_policies_bind_its_owner_is_refused(conn: Conn, producer: Conn) -> None:
    producer.execute("create schema app; create table app.t (id int primary key, name text)")
    producer.execute(
        "alter table app.t enable row level security; alter table app.t force row level security"
    )
    for who in (producer, conn):
        with raises("PQ003", "row level security"):
            call(who, "capture", "app.t", "s")
    producer.execute("alter table app.t no force row level security")
    call(producer, "capture", "app.t", "s")


def test_no_change_is_lost_to_a_policy(conn: Conn, producer: Conn) -> None:
    """A captured table gets policies: what is written to it is sent, or is not written."""
    producer.execute("create schema app; create table app.t (id int primary key, name text)")
    producer.execute(NESTED.encode())
    call(producer, "capture", "app.t", "s")
    producer.execute("alter table app.t enable row level security")
    producer.execute("create policy new on app.t for insert with check (true)")
    copy: dict[str | None, Any] = {}
    insert = "begin; insert into app.t values (1, 'a'); update app.t set name = 'b'; commit"
    producer.execute(insert.encode())
    apply(copy, messages(conn))
    assert copy == content(conn, "app.t") == {"1": {"id": 1, "name": "b"}}
    producer.execute("alter table app.t force row level security")
    with pytest.raises(psycopg.Error, match="affected by row-level security policy"):
        producer.execute("insert into app.t values (2, 'a')")
    producer.execute("rollback")
    assert messages(conn) == []
    # who minds no policy writes as before, but the trigger reads as the owner
    with pytest.raises(psycopg.Error, match="affected by row-level security policy"):
        conn.execute("insert into app.t values (2, 'a')")
    assert list(content(conn, "app.t")) == ["1"]


# Settings of who writes


def test_no_setting_of_a_writer_hides_what_it_does(
    conn: Conn, producer: Conn, stranger: Conn
) -> None:
    """Each setting that the triggers of a captured table read, whatever a writer puts there."""
    producer.execute(
        "create schema app;"
        "create table app.t (id int primary key, name text) partition by list (id);"
        "create table app.t1 partition of app.t for values in (1);"
        "create table app.t2 partition of app.t for values in (2);"
    )
    run(producer, "grant usage on schema app to {role}", role=name_of(stranger))
    run(producer, "grant all on app.t, app.t1, app.t2 to {role}", role=name_of(stranger))
    call(producer, "capture", "app.t", "s")
    source = one(conn, "select string_agg(prosrc, '') from pg_proc where proname ~ '^pgqueue_1'")
    names = set(re.findall(r"current_setting\('([^']+)'", source)) | {"pgqueue.truncated"}
    oids = [one(conn, f"select 'app.{t}'::regclass::oid::text") for t in ("t", "t1", "t2")]
    copy: dict[str | None, Any] = {}
    for name in names:
        for setting in ("", "nested", "inserted", "x", *oids):
            stranger.execute("select set_config(%s, %s, false)", [name, setting])
            for statement in (
                "insert into app.t values (1, 'a'), (2, 'b')",
                "update app.t1 set name = 'c'; delete from app.t2",
                "insert into app.t2 values (2, 'd')",
                "truncate app.t1",
                "truncate app.t2",
                "insert into app.t values (1, 'e'), (2, 'f')",
                "truncate app.t, app.t1",
                "begin; truncate app.t; insert into app.t values (1, 'g'); truncate app.t1; commit",
            ):
                stranger.execute(statement.encode())
                apply(copy, messages(conn))
                assert copy == content(conn, "app.t"), (name, setting, statement)


# Names


ODD = ["o", "Sales", 'it\'s "my" 100% {name} $function$ a\\b %1$s', "é" * 31, "select"]


def test_names_are_what_they_are(conn: Conn) -> None:
    """Of schemas, tables, partitions and columns; none is code, nor changed on the way."""
    consumer(conn, ordering="stream")
    for odd in ODD:
        check_name(conn, odd)
        acked(conn, "s", "c")


def check_name(conn: Conn, odd: str) -> None:
    names = {each: Identifier(odd) for each in ("schema", "table", "column", "part")}
    names["part"] = Identifier(f"{odd[:20]} part")

    def run(statement: str) -> None:
        conn.execute(SQL(statement).format(**names))  # type: ignore[arg-type]

    run("create schema {schema}")
    run(
        "create table {schema}.{table} ({column} int primary key, x text)"
        " partition by range ({column})"
    )
    run("create table {schema}.{part} (x text, {column} int not null)")
    run(
        "alter table {schema}.{table} attach partition {schema}.{part} for values from (0) to (100)"
    )
    table = one(conn, "select format('%%I.%%I', %s::text, %s::text)", odd, odd)
    call(conn, "capture", table, "s", [odd], [odd, "x"], p_old=True)
    run("insert into {schema}.{table} values (1, 'a')")
    run("update {schema}.{part} set x = 'b'")
    run("update {schema}.{table} set {column} = 2")
    run("truncate {schema}.{part}")
    found = call(conn, "receive", "s", "c", 10)
    value(conn, "ack", found[0].claim_id)
    assert {row.headers["table"] for row in found} == {table}
    assert [(row.key, row.headers["operation"]) for row in found] == [
        ("1", "insert"), ("1", "update"), ("1", "delete"), ("2", "insert"), ("2", "delete"),
    ]  # fmt: skip
    assert json.loads(found[3].data) == {"old": None, "new": {odd: 2, "x": "b"}}
    assert one(conn, 'select "table" from pgqueue.captures') == table
    run("create table {schema}.more partition of {schema}.{table} for values from (100) to (200)")
    call(conn, "maintain")
    assert one(conn, "select uncaptured_partitions from pgqueue.captures") == 0
    with raises("2BP01"):
        value(conn, "drop_stream", "s")
    call(conn, "capture", table, "s")
    call(conn, "release", table, "s")
    run("create table {schema}.outbox ({column} int primary key, x text)")
    outbox = SQL("{schema}.outbox").format(**names).as_string(conn)
    call(conn, "capture", outbox, "s", [odd], p_outbox=True)
    run("insert into {schema}.outbox values (1, 'x')")
    assert one(conn, SQL("select count(*) from {schema}.outbox").format(**names)) == 0
    call(conn, "release", outbox, "s")
    assert one(conn, "select count(*) from pg_proc where proname like 'pgqueue\\_%'") == 0


def test_roles_have_odd_names_too(conn: Conn, roles: tuple[str, str]) -> None:
    with conn.transaction(force_rollback=True):
        role = Identifier(f'it\'s "my" 100% {uuid.uuid4().hex[:8]}')
        for statement in (
            "create role {role}", "grant pgqueue_producer to {role}",
            "create schema app authorization {role}", "create table app.t (id int primary key)",
            "alter table app.t owner to {role}",
        ):  # fmt: skip
            conn.execute(SQL(statement).format(role=role))  # type: ignore[arg-type]
        call(conn, "capture", "app.t", "s")
        conn.execute("insert into app.t values (1)")
        call(conn, "release", "app.t", "s")
