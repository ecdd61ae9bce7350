"""What an installation leaves, by psql and again and over data, and who may do what then."""

from __future__ import annotations

import re
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from spark_pgqueue import embedded
from spark_pgqueue.postgres import connection, schema
from spark_pgqueue.postgres.errors import PgQueueError
from tests.sql import checker, internals
from tests.sql.queue import acked, call, claim_of, one, value

Conn = psycopg.Connection
README = Path(__file__).parents[2] / "README.md"


def psql(url: str) -> subprocess.CompletedProcess[str]:
    """Run install.sql as a person would."""
    program = shutil.which("psql") or str(embedded.find_binaries(18) / "psql")
    file = schema.sql_directory() / "install.sql"
    command = [program, "-X", "-q", "-f", str(file), url]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


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
        " where pronamespace = 'pgqueue'::regnamespace"
    ).fetchall()
    tables = {name: one(conn, rows.format(name)) for (name,) in stored}
    return tables | dict(sequences) | dict(functions)


def public_functions(conn: Conn, condition: str) -> list[str]:
    """The functions that people call and for which a condition holds."""
    found = conn.execute(
        "select oid::regprocedure::text from pg_proc"
        " where pronamespace = 'pgqueue'::regnamespace and proname not like '\\_%'"
        f" and {condition} order by 1".encode()
    ).fetchall()
    return [row[0] for row in found]


@pytest.mark.all_versions
def test_installing_again_with_psql_keeps_what_is_inside(empty_url: str) -> None:
    first = psql(empty_url)
    assert first.returncode == 0, first.stderr
    with connection.connect(empty_url) as conn:
        for ordering in ("none", "key", "stream"):
            value(conn, "create_stream", ordering)
            value(conn, "create_consumer", ordering, "c", "earliest", ordering)
            conn.execute("select pgqueue.send_batch(%s, '{a,b,c,d}', '{k,k,l,l}')", [ordering])
        claims = {
            ordering: claim_of(call(conn, "receive", ordering, "c", 3))
            for ordering in ("none", "key", "stream")
        }
        value(conn, "nack", claims["key"], [2])
        before = content(conn)
        second = psql(empty_url)
        assert second.returncode == 0, second.stderr
        assert not re.search("error|warning", second.stderr, re.IGNORECASE)
        assert content(conn) == before
        schema.check(conn)
        assert [value(conn, "ack", claim) for claim in claims.values()] == [3, 2, 3]
        assert [len(acked(conn, ordering, "c")) for ordering in claims] == [1, 2, 1]
        checker.check(conn)


@pytest.mark.all_versions
def test_installing_over_an_earlier_state_leaves_one_function_of_each_name(
    conn: Conn, url: str
) -> None:
    """A function whose arguments changed would stay beside the new one, and calls be ambiguous.

    And nothing is said: that something is there already is no news.
    """
    conn.execute(
        "create function pgqueue.claim(text, text, int default 1, interval default null)"
        " returns bigint language sql as 'select 0::bigint'"
    )
    runs = internals.table("runs")
    check = "constraint consumer_messages_state_check check (true)"
    conn.execute(f"alter table {runs} add {check}".encode())
    done = psql(url)
    assert (done.returncode, done.stderr) == (0, "")
    assert conn.execute(
        "select proname from pg_proc where pronamespace = 'pgqueue'::regnamespace"
        " group by proname having count(*) > 1"
    ).fetchall() == []  # fmt: skip
    checks = "select count(*) from pg_constraint where conrelid = %s::regclass and contype = 'c'"
    assert one(conn, checks, runs) == 0


def test_an_older_installer_is_refused_and_changes_nothing(conn: Conn, url: str) -> None:
    newer = schema.expected_version() + 1
    conn.execute("insert into pgqueue.installed (version) values (%s)", [newer])
    conn.execute("drop view pgqueue.message_states")
    index = internals.index_of(conn, "dead letters")
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


@pytest.mark.parametrize("file", schema.sql_files(), ids=lambda file: file.name)
def test_every_function_and_view_says_what_it_does_directly_above(file: Path) -> None:
    lines = file.read_text().splitlines()
    assert lines[0].startswith("-- "), "and so does the file"
    for before, line in pairwise(lines):
        if re.match(r"create (or replace )?(function|view|procedure)", line, re.IGNORECASE):
            assert before.startswith("--"), line


def test_the_header_of_a_public_function_names_the_errors_that_its_body_raises() -> None:
    for file in schema.sql_files():
        above, *functions = file.read_text().split("create or replace function pgqueue.")
        for function in functions:
            header = above.rstrip("\n").rpartition("\n\n")[2]
            above = function
            for code in re.findall(r"errcode = '(PQ(?!099)\d{3})'", function):
                assert function.startswith("_") or code in header, function.partition("(")[0]


@pytest.mark.all_versions
def test_nothing_is_granted_to_public_after_the_first_and_the_second_installation(
    empty_url: str,
) -> None:
    with connection.connect(empty_url) as conn:
        for _ in range(2):
            schema.install(conn)
            value(conn, "create_stream", f"s{uuid.uuid4().hex}")
            functions = "has_function_privilege('public', oid, 'execute')"
            assert public_functions(conn, functions) == []
            private = conn.execute(
                "select oid::regprocedure::text from pg_proc"
                f" where pronamespace = 'pgqueue'::regnamespace and {functions}".encode()
            ).fetchall()
            assert private == []
            assert not one(conn, "select has_schema_privilege('public', 'pgqueue', 'usage')")
            relations = conn.execute(
                "select oid::regclass::text from pg_class where relnamespace ="
                " 'pgqueue'::regnamespace and relkind in ('r', 'p', 'v')"
                " and has_table_privilege('public', oid, 'select, insert, update, delete')"
            ).fetchall()
            assert relations == []


def test_every_function_that_people_call_pins_its_search_path(conn: Conn) -> None:
    pinned = (
        "exists (select from unnest(proconfig) c where c like 'search_path=pg_catalog, pg_temp')"
    )
    assert public_functions(conn, f"not {pinned}") == []
    assert public_functions(conn, "prosecdef") == [], "each runs with its caller's rights"


def test_names_in_the_callers_search_path_do_not_change_what_functions_do(conn: Conn) -> None:
    conn.execute("create schema evil")
    for table in ("streams", "consumers", "messages", "claims"):
        conn.execute(f"create table evil.{table} (evil int)".encode())
        conn.execute(f"create temp table {table} (evil int)".encode())
    for function in ("format(text, int)", "clock_timestamp()", "quote_literal(text)"):
        kind = "timestamptz" if "clock" in function else "text"
        conn.execute(
            f"create function evil.{function} returns {kind} language plpgsql"
            " as 'begin raise exception ''hijacked''; end'".encode()
        )
    conn.execute("set search_path = evil, pg_temp, public, pg_catalog")
    value(conn, "create_stream", "s")
    value(conn, "create_consumer", "s", "c", "earliest", "key")
    value(conn, "send", "s", "x", "k")
    assert value(conn, "nack", claim_of(call(conn, "receive", "s", "c"))) == 1
    assert len(acked(conn, "s", "c")) == 1


# Permissions


@pytest.fixture
def app(conn: Conn, url: str) -> Iterator[str]:
    """The url of a role without any right; README's grants are to be given to it."""
    role = f"pgqueue_test_{uuid.uuid4().hex[:12]}"
    conn.execute(f"create role {role} login password '{role}'".encode())
    yield make_conninfo(url, user=role, password=role)
    conn.execute(f"drop owned by {role}".encode())
    conn.execute(f"drop role {role}".encode())


def grant(conn: Conn, app: str) -> None:
    """Give the rights that README lists under Permissions, and no others."""
    role = conninfo_to_dict(app)["user"]
    found = re.search(r"\*\*Permissions\.\*\*.*?(?=\n- \*\*)", README.read_text(), re.DOTALL)
    assert found
    grants = re.findall(r"grant [^;`]+? to app\b", found[0])
    assert len(grants) >= 3
    for text in grants:
        conn.execute(text.replace("to app", f"to {role}").encode())


@pytest.mark.all_versions
def test_the_grants_of_the_readme_are_enough_to_work_with_a_queue(conn: Conn, app: str) -> None:
    stream = value(conn, "create_stream", "s")
    consumers = {o: value(conn, "create_consumer", "s", o, "earliest", o) for o in ("none", "key")}
    grant(conn, app)
    with connection.connect(app) as mine:
        value(mine, "create_consumer", "s", "own", "earliest", "stream")
        for data in "abcd":
            value(mine, "send", "s", data, "k")
        for name in ("none", "key", "own"):
            claim = claim_of(call(mine, "receive", "s", name, 10))
            assert value(mine, "extend", claim) == 4
            assert value(mine, "dead_letter", claim, [4]) == 1
            assert value(mine, "nack", claim, [3]) == 1
            assert value(mine, "ack", claim) == 2
            assert len(acked(mine, "s", name)) == 1
        with mine.transaction():
            seq = one(mine, f"select nextval('pgqueue.seq_{stream}')")
            with mine.cursor().copy(
                f"copy pgqueue.messages_{stream} (seq, data) from stdin".encode()
            ) as copy:
                copy.write_row((seq, "x"))
            staged = value(mine, "stage", "sink", 0, stream, f"{{[{seq},{seq + 1})}}")
        assert value(mine, "publish_staged", "sink", 0, stream, [staged], 1) is True
        reader = uuid.uuid4()
        (end,) = call(mine, "reader_claim", reader, consumers["none"], 0, 0)
        assert end.claimed == 1
        value(mine, "reader_query", reader, "q")
        assert len(call(mine, "reader_resume", reader, consumers["none"], 0, end.claim_id)) == 1
        call(mine, "reader_claim", reader, consumers["none"], end.claim_id, end.messages)
        call(mine, "maintain")
        schema.check(mine)
        for view in ("message_states", "consumer_stats", "stream_stats"):
            mine.execute(f"select * from pgqueue.{view}".encode())
        value(mine, "drop_consumer", "s", "own")
    checker.check(conn)


def test_without_the_grants_nothing_can_be_done(conn: Conn, app: str) -> None:
    value(conn, "create_stream", "s")
    value(conn, "create_consumer", "s", "c")
    with connection.connect(app) as mine:
        for function, *arguments in (("send", "s", "x"), ("receive", "s", "c"), ("maintain",)):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                call(mine, function, *arguments)
        with pytest.raises(PgQueueError, match="permission denied"):
            schema.check(mine)


def test_with_the_grants_a_role_can_neither_create_nor_drop_a_stream(conn: Conn, app: str) -> None:
    value(conn, "create_stream", "s")
    grant(conn, app)
    with connection.connect(app) as mine:
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            value(mine, "create_stream", "mine")
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            value(mine, "drop_stream", "s")
    assert one(conn, "select array_agg(name) from pgqueue.streams") == ["s"]


def test_a_stream_made_after_the_grants_needs_them_again(conn: Conn, app: str) -> None:
    grant(conn, app)
    value(conn, "create_stream", "later")
    value(conn, "create_consumer", "later", "c")
    with connection.connect(app) as mine:
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            value(mine, "send", "later", "x")
        grant(conn, app)
        value(mine, "send", "later", "x")
        assert len(acked(mine, "later", "c")) == 1


def test_installing_again_keeps_what_the_owner_granted(conn: Conn, app: str) -> None:
    value(conn, "create_stream", "s")
    value(conn, "create_consumer", "s", "c")
    grant(conn, app)
    schema.install(conn)
    with connection.connect(app) as mine:
        value(mine, "send", "s", "x")
        assert len(acked(mine, "s", "c")) == 1
