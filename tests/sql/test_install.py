"""What an installation leaves, by psql and again and over data, and who may do what then."""

from __future__ import annotations

import re
import shutil
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.types.json import Jsonb

from spark_pgqueue.postgres import binaries, connection, schema
from spark_pgqueue.postgres.errors import PgQueueError
from tests.sql import checker, internals
from tests.sql.catalogue import catalogue
from tests.sql.hijack import hijack
from tests.sql.queue import AT_ONCE, Conn, acked, call, claim_of, one, value


def psql(url: str, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Run install.sql as a person would, or what the arguments say."""
    program = shutil.which("psql") or str(binaries.find_binaries(18) / "psql")
    arguments = arguments or ("-f", str(schema.sql_directory() / "install.sql"))
    command = [program, "-X", *arguments, url]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, input=stdin)


def install(url: str) -> None:
    """Run install.sql, which prints nothing."""
    done = psql(url)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def content(conn: Conn) -> dict[str, str]:
    """Everything that is stored and every function's text, by name."""
    stored = conn.execute(
        "select oid::regclass::text from pg_class"
        " where relnamespace = 'pgqueue'::regnamespace and relkind = 'r'"
    ).fetchall()
    sequences = conn.execute(
        "select sequencename, last_value::text from pg_sequences where schemaname = 'pgqueue'"
    ).fetchall()
    rows = "select coalesce(jsonb_agg(t order by t::text), '[]')::text from {} t"
    functions = conn.execute(
        "select oid::regprocedure::text, pg_get_functiondef(oid) from pg_proc"
        " where pronamespace in ('pgqueue'::regnamespace, '_pgqueue'::regnamespace)"
    ).fetchall()
    tables = {name: one(conn, rows.format(name)) for (name,) in stored}
    return tables | dict(sequences) | dict(functions)


def public_functions(conn: Conn, condition: str) -> list[str]:
    """The functions that people call and for which a condition holds."""
    found = conn.execute(
        "select oid::regprocedure::text from pg_proc"
        f" where pronamespace = 'pgqueue'::regnamespace and {condition} order by 1".encode()
    ).fetchall()
    return [row[0] for row in found]


@pytest.mark.each_version
@pytest.mark.promise("operations: installing again")
def test_installing_again_with_psql_keeps_what_is_inside(empty_url: str) -> None:
    install(empty_url)
    with connection.connect(empty_url) as conn:
        for ordering in ("none", "key", "stream"):
            value(conn, "create_stream", ordering)
            value(conn, "create_consumer", ordering, "c", "earliest", ordering,
                  p_settings=Jsonb(AT_ONCE))  # fmt: skip
            conn.execute("select pgqueue.send_batch(%s, '{a,b,c,d}', '{k,k,l,l}')", [ordering])
        claims = {
            ordering: claim_of(call(conn, "receive", ordering, "c", 3))
            for ordering in ("none", "key", "stream")
        }
        value(conn, "nack", claims["key"], [2])
        before = content(conn)
        install(empty_url)
        assert content(conn) == before
        schema.check(conn)
        assert [value(conn, "ack", claim) for claim in claims.values()] == [3, 2, 3]
        assert [len(acked(conn, ordering, "c")) for ordering in claims] == [1, 2, 1]
        checker.check(conn)


@pytest.mark.each_version
def test_every_body_passes_the_check_that_the_installation_leaves_out(conn: Conn) -> None:
    """That of `create function`: the syntax; in SQL also all names and types."""
    conn.execute("set check_function_bodies = on")
    conn.execute("set search_path = pg_catalog, pg_temp")
    checked = conn.execute(
        "select case when lanname = 'sql' then fmgr_sql_validator(p.oid)"
        "            else plpgsql_validator(p.oid) end"
        " from pg_proc p join pg_language l on l.oid = p.prolang"
        " where p.pronamespace in ('pgqueue'::regnamespace, '_pgqueue'::regnamespace)"
    ).fetchall()
    assert len(checked) > 700


def test_every_function_that_the_sql_calls_is_there(conn: Conn) -> None:
    """The check of PL/pgSQL looks at no name: a call that is seldom reached would fail there."""
    code = "".join(re.sub(r"--[^\n]*", "", file.read_text()) for file in schema.sql_files())
    found = conn.execute(
        "select proname from pg_proc where pronamespace = '_pgqueue'::regnamespace"
    ).fetchall()
    made = {name for (name,) in found}
    called = set(re.findall(r"\b_pgqueue\.(\w+)\s*\(", code))
    assert len(called) > 500
    assert sorted(called - made) == []


def test_the_plain_file_installs_the_same_from_standard_input_and_again(
    empty_url: str, conn: Conn
) -> None:
    plain = schema.script()
    assert "${" not in plain, "Flyway would replace it"
    assert not re.search(r"^\\s*\\\\", plain, re.MULTILINE), "a command of psql"
    for _ in range(2):
        done = psql(empty_url, "-q", "-v", "ON_ERROR_STOP=1", stdin=plain)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    with connection.connect(empty_url) as plainly:
        assert catalogue(plainly) == catalogue(conn)


def test_the_plain_file_runs_in_the_transaction_of_another_tool(empty_url: str) -> None:
    with connection.connect(empty_url) as conn:
        with conn.transaction(force_rollback=True):
            conn.execute(schema.script(transaction=False).encode())
            assert conn.info.transaction_status == psycopg.pq.TransactionStatus.INTRANS
            schema.check(conn)
        assert schema.installed_version(conn) is None


def test_installing_needs_a_transaction_of_its_own(conn: Conn) -> None:
    with conn.transaction(), pytest.raises(PgQueueError, match="in its own transaction"):
        schema.install(conn)


def test_an_older_installer_is_refused_and_changes_nothing(conn: Conn, url: str) -> None:
    newer = schema.expected_version() + 1
    conn.execute("insert into pgqueue.installed (version) values (%s)", [newer])
    conn.execute("drop view pgqueue.message_states")
    index = internals.index_of(conn, "dead_messages")
    conn.execute(f"drop index {index}".encode())
    conn.execute(
        "create or replace function pgqueue.schema_version() returns int language sql"
        " as 'select max(version) from pgqueue.installed'"
    )
    before = content(conn)
    done = psql(url)
    assert done.returncode != 0
    assert f"version {newer}, newer than this installer" in done.stderr
    assert content(conn) == before
    for relation in ("pgqueue.message_states", index):
        assert one(conn, "select to_regclass(%s)", relation) is None


def test_an_installation_that_fails_leaves_nothing(empty_url: str) -> None:
    with connection.connect(empty_url) as conn:
        conn.execute("create schema pgqueue")
        conn.execute("create view pgqueue.stream_stats as select 1 as mine")
        done = psql(empty_url)
        assert done.returncode != 0
        found = conn.execute(
            "select relname from pg_class where relnamespace = 'pgqueue'::regnamespace"
        ).fetchall()
        assert found == [("stream_stats",)]
        assert one(conn, "select mine from pgqueue.stream_stats") == 1


def test_every_function_and_view_says_what_it_does_directly_above() -> None:
    made = re.compile(r"create (or replace )?(function|view|procedure)|do \$view\$", re.IGNORECASE)
    for file in schema.sql_files():
        lines = file.read_text().splitlines()
        assert lines[0].startswith("-- "), f"and so does the file: {file.name}"
        for before, line in pairwise(lines):
            # a comment may stand for a few one-line functions
            above = before.startswith("--") or (made.match(before) and before.endswith(";"))
            assert above or not made.match(line), f"{file.name}: {line}"


def test_the_header_of_a_public_function_names_the_errors_that_its_body_raises() -> None:
    for file in schema.sql_files():
        made = re.compile(r"create or replace function (?=_?pgqueue\.)")
        above, *functions = made.split(file.read_text())
        for function in functions:
            header = above.rstrip("\n").rpartition("\n\n")[2]
            above = function
            for code in re.findall(r"errcode = '(PQ(?!099)\d{3})'", function):
                assert function.startswith("_") or code in header, function.partition("(")[0]


@pytest.mark.all_versions
def test_what_people_call_and_views_ask_runs_as_the_owner_with_a_pinned_path(conn: Conn) -> None:
    path = "search_path=pg_catalog, pg_temp"
    pinned = f"exists (select from unnest(proconfig) c where c like '{path}')"
    # A procedure that commits can have neither: its operators are named with their schema.
    procedure = "pgqueue.maintain_all(interval,interval)"
    assert public_functions(conn, f"not {pinned}") == [procedure]
    as_caller = [f.partition("(")[0] for f in public_functions(conn, "not prosecdef")]
    assert [name.removeprefix("pgqueue.") for name in as_caller] == [
        "apply_table_batch", "capture", "change_capture", "create_roles", "execute_as",
        "maintain_all", "release",
    ]  # fmt: skip
    asked = conn.execute(
        f"select proname from pg_proc where oid in (select _pgqueue.view_functions())"
        f" and not (prosecdef and {pinned})".encode()
    ).fetchall()
    assert asked == []


def test_all_that_people_use_has_a_comment_of_one_sentence(conn: Conn) -> None:
    found = conn.execute(
        "select oid::regprocedure::text, obj_description(oid, 'pg_proc') from pg_proc"
        " where pronamespace = 'pgqueue'::regnamespace"
        " union all select oid::regclass::text, obj_description(oid, 'pg_class') from pg_class"
        " where relnamespace = 'pgqueue'::regnamespace and relkind = 'v'"
    ).fetchall()
    assert len(found) > 30
    for name, comment in found:
        assert comment is not None, name
        assert re.fullmatch(r"[A-Z][^\n]{15,120}\.", comment), name


# Others, with bad intentions or without


@pytest.fixture
def other(empty_url: str) -> Iterator[str]:
    """The url of a role that may create schemas in the empty database, and nothing else."""
    role = f"pgqueue_test_{uuid.uuid4().hex[:12]}"
    with connection.connect(empty_url) as conn:
        database = one(conn, "select current_database()")
        conn.execute(f"create role {role} login password '{role}'".encode())
        conn.execute(f"grant create on database {database} to {role}".encode())
        yield make_conninfo(empty_url, user=role, password=role)
        conn.execute(f"drop owned by {role} cascade".encode())
        conn.execute(f"drop role {role}".encode())


PREPARED = {
    "schema": "select 1",
    "table": "create table pgqueue.streams (name text);"
    " create function pgqueue.evil() returns trigger language plpgsql"
    " as 'begin raise exception ''hijacked''; end';"
    " create trigger evil before insert on pgqueue.streams execute function pgqueue.evil()",
    "function": "create function _pgqueue.check_name(text, text) returns void language sql"
    " as 'select'",
    "type": "create type pgqueue.lane_hint as (lane int, place bigint, first_seq bigint)",
    "view": "create view pgqueue.stream_stats as select 1 as mine",
}


@pytest.mark.all_versions
@pytest.mark.parametrize("what", PREPARED)
@pytest.mark.parametrize("schema_of", ["other", "installer"])
def test_what_somebody_else_prepared_is_refused(
    empty_url: str, other: str, what: str, schema_of: str
) -> None:
    role = conninfo_to_dict(other)["user"]
    with connection.connect(empty_url) as conn, connection.connect(other) as theirs:
        if schema_of == "other":
            theirs.execute("create schema pgqueue; create schema _pgqueue")
        else:
            conn.execute("create schema pgqueue; create schema _pgqueue")
            conn.execute(f"grant all on schema pgqueue, _pgqueue to {role}".encode())
        theirs.execute(PREPARED[what].encode())
        if (what, schema_of) == ("schema", "installer"):
            schema.install(conn)
            return
        with pytest.raises(PgQueueError, match=f"which belongs to {role}") as caught:
            schema.install(conn)
        assert caught.value.sqlstate == "PQ011"
        if what == "table":  # psql runs the same files
            done = psql(empty_url)
            assert done.returncode != 0
            assert f"which belongs to {role}" in done.stderr


@pytest.mark.parametrize(
    "made",
    [
        "function pgqueue.enqueue(int) returns int language sql as 'select 1'",
        "function _pgqueue.enqueue(int) returns int language sql as 'select 1'",
        "table pgqueue.installed (name text)",
        "type pgqueue.priority as enum ('low')",
    ],
)
def test_a_schema_of_another_project_is_neither_changed_nor_removed(
    empty_url: str, made: str
) -> None:
    """Although it belongs to the role that installs."""
    with connection.connect(empty_url) as conn:
        conn.execute("create schema pgqueue; create schema _pgqueue")
        conn.execute(f"create {made}; grant usage on schema pgqueue to public".encode())
        before = catalogue(conn)
        with pytest.raises(PgQueueError, match="belongs to another project") as caught:
            schema.install(conn)
        assert caught.value.sqlstate == "PQ011"
        assert "rename that schema" in str(caught.value.hint)
        if " pgqueue" in made and "type" not in made:
            with pytest.raises(PgQueueError, match="belongs to another project"):
                schema.uninstall(conn)
        assert catalogue(conn) == before
        conn.execute("drop schema pgqueue, _pgqueue cascade")
        schema.install(conn)


def test_what_a_removal_of_one_schema_left_is_no_installation(conn: Conn) -> None:
    conn.execute("drop schema pgqueue cascade")
    with pytest.raises(PgQueueError, match=r"no queue is installed: .*was removed in part"):
        schema.install(conn)
    conn.execute("drop schema if exists pgqueue, _pgqueue cascade")
    schema.install(conn)


@pytest.mark.all_versions
def test_what_others_put_into_public_is_not_found_by_the_installers_nor_by_what_they_made(
    empty_url: str,
) -> None:
    with connection.connect(empty_url) as conn:
        hijack(conn, first=True)
    with connection.connect(empty_url) as conn:
        with pytest.raises(psycopg.Error, match="hijacked"):
            conn.execute("select format('%s', 1)")
        schema.install(conn)
        install(empty_url)
        conn.execute("select pgqueue.create_stream('s')")
        conn.execute("select pgqueue.create_consumer('s', 'c', 'earliest', 'key')")
        conn.execute("select pgqueue.send('s', 'x', 'k', '{\"h\": 1}')")
        conn.execute("select pgqueue.send_batch('s', '{x,y}')")
        (row,) = conn.execute("select claim_id from pgqueue.receive('s', 'c', 1)").fetchall()
        conn.execute("select pgqueue.nack(%s)", row)
        for view in ("message_states", "consumer_settings", "consumer_stats", "stream_stats"):
            assert conn.execute(f"select * from pgqueue.{view}".encode()).fetchall()
        conn.execute("select pgqueue.maintain()")
        schema.check(conn)
        assert schema.content(conn)
        schema.uninstall(conn)


# Uninstalling


@pytest.mark.promise("operations: uninstalling")
def test_uninstalling_leaves_nothing_of_the_schema(conn: Conn, url: str) -> None:
    assert schema.content(conn) == "0 streams, 0 consumers, and all messages"
    value(conn, "create_stream", "s")
    value(conn, "create_consumer", "s", "c")
    assert schema.content(conn) == "1 stream ('s'), 1 consumer, and all messages"
    done = psql(url, "-f", str(schema.sql_directory() / "uninstall.sql"))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert one(conn, "select to_regnamespace('pgqueue')") is None
    assert schema.content(conn) is None
    schema.uninstall(conn)
    schema.install(conn)


DEPENDING = [
    "view public.mine as select * from pgqueue.stream_stats",
    "view public.mine as select pgqueue.schema_version()",
    "table public.mine (s int references pgqueue.streams)",
    "table public.mine (s int default pgqueue.schema_version())",
    "table public.mine (s pgqueue.lane_hint)",
    "function public.mine(pgqueue.streams) returns int language sql as 'select 1'",
]


@pytest.mark.promise("operations: uninstalling")
def test_uninstalling_is_refused_where_something_of_others_depends_on_the_schema(
    conn: Conn,
) -> None:
    for depending in DEPENDING:
        conn.execute(f"create {depending}".encode())
        before = catalogue(conn)
        with pytest.raises(PgQueueError, match="mine") as caught:
            schema.uninstall(conn)
        assert caught.value.sqlstate == "2BP01", depending
        assert catalogue(conn) == before, depending
        conn.execute(f"drop {depending.split()[0]} public.mine".encode())


# Installing while others are at work


def send(conn: Conn, streams: dict[str, int]) -> None:
    with conn.transaction():
        for name in streams:
            value(conn, "send", name, "x", "k")


def work(conn: Conn, streams: dict[str, int]) -> None:
    for name in streams:
        with conn.transaction():
            if found := call(conn, "receive", name, "c", 3):
                value(conn, "ack", claim_of(found))


def write(conn: Conn, streams: dict[str, int]) -> None:
    with conn.transaction():
        stream = streams["none"]
        (seq,) = internals.insert_messages(conn, stream, 1)
        value(conn, "stage", "sink", seq, stream, f"{{[{seq},{seq + 1})}}")


def look(conn: Conn, streams: dict[str, int]) -> None:
    with conn.transaction():
        for view in ("stream_stats", "consumer_stats"):
            conn.execute(f"select * from pgqueue.{view}".encode()).fetchall()


def maintain(conn: Conn, streams: dict[str, int]) -> None:
    call(conn, "maintain")


@contextmanager
def at_work(url: str, streams: dict[str, int]) -> Iterator[None]:
    """Senders, workers and all others at it; in the end none had an error or waited for long."""
    over = threading.Event()
    errors: list[Exception] = []
    slowest: list[float] = []

    def repeat(step: Callable[[Conn, dict[str, int]], None]) -> None:
        longest = 0.0
        try:
            with connection.connect(url) as own:
                while not over.is_set():
                    start = time.monotonic()
                    step(own, streams)
                    longest = max(longest, time.monotonic() - start)
        except Exception as error:
            errors.append(error)
        slowest.append(longest)

    steps = (send, work, work, write, look, maintain)
    threads = [threading.Thread(target=repeat, args=[step]) for step in steps]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join(60)
    assert errors == []
    assert max(slowest) < 10


def test_installing_again_disturbs_nobody_who_is_at_work(url: str, conn: Conn) -> None:
    """No error in workers, senders, dashboards or COPY; and a transaction that stays open is none
    that anybody waits behind.
    """
    streams = {o: value(conn, "create_stream", o) for o in ("none", "key")}
    for ordering in streams:
        value(conn, "create_consumer", ordering, "c", "earliest", ordering)
    deadlocks = "select deadlocks from pg_stat_database where datname = current_database()"
    before = one(conn, deadlocks)
    with connection.connect(url) as idle:
        idle.execute("begin")
        value(idle, "send", "none", "open")
        idle.execute("select * from pgqueue.consumer_stats")
        with at_work(url, streams):
            for _ in range(3):
                schema.install(conn)
    assert one(conn, deadlocks) == before
    checker.check(conn)


def test_installing_tries_again_behind_a_lock_and_says_so_and_waits_for_nobody_who_looks(
    url: str, conn: Conn, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(schema, "PAUSE", 0.01)
    monkeypatch.setattr(schema, "ATTEMPTS", 2)
    value(conn, "create_stream", "s")
    with connection.connect(url) as idle:
        idle.execute("begin")
        idle.execute("lock table pgqueue.installed in exclusive mode")
        with pytest.raises(PgQueueError, match=r"in use.*tried 2 times, and nothing was changed"):
            schema.install(conn)
        assert caplog.messages[-1].endswith("; trying again, up to 1 time")
        idle.execute("rollback")
        idle.execute("begin")
        for view in ("stream_stats", "consumer_stats", "message_states"):
            idle.execute(f"select * from pgqueue.{view}".encode())
        schema.install(conn)
