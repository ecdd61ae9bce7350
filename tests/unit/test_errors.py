import pickle
import re

import psycopg
import pytest

from spark_pgqueue.postgres import connection, schema
from spark_pgqueue.postgres.errors import CODES, LEASE_LOST, PgQueueError, translate, translated

RAISE = "do $$ begin raise exception 'no stream %', 'a' using errcode = 'PQ001', hint = 'b'; end $$"


def test_message_hint_and_code_are_shown_and_survive_pickling():
    error = pickle.loads(pickle.dumps(PgQueueError("what", hint="way out", sqlstate="PQ001")))
    assert (error.message, error.hint, error.sqlstate) == ("what", "way out", "PQ001")
    assert str(error) == "[PQ001] what\nHint: way out"


def raised(connect, url, statement, name=None):
    """The error of a statement, as the caller gets it."""
    translating = translated(name) if name else translated()
    with (
        connect(url) as conn,
        conn.cursor() as cursor,
        pytest.raises(PgQueueError) as caught,
        translating,
    ):
        cursor.execute(statement)
    return caught.value


WAYS = [connection.connect, connection.connect_adbc]


@pytest.mark.parametrize("connect", WAYS)
def test_our_own_errors_keep_message_and_hint(empty_url, connect):
    error = raised(connect, empty_url, RAISE)
    assert (error.message, error.hint, error.sqlstate) == ("no stream a", "b", "PQ001")


NAMED = (
    "do $$ begin raise exception 'p_at is a time, not %', quote_literal('p_at') "
    "using errcode = 'PQ003', column = 'p_at', hint = 'Leave p_at_all and p_at out.'; end $$"
)


@pytest.mark.parametrize("connect", WAYS)
def test_an_argument_is_called_what_the_user_calls_it_but_not_in_what_was_given(empty_url, connect):
    names = {"p_at": "option at"}
    for get, name in ((names.get, "option at"), ({}.get, "p_at")):
        error = pickle.loads(pickle.dumps(raised(connect, empty_url, NAMED, get)))
        assert error.message == f"{name} is a time, not 'p_at'"
        assert error.hint == f"Leave p_at_all and {name} out."
        assert error.argument == "p_at"


def test_an_error_without_a_hint_has_the_way_out_of_its_code(empty_url):
    without = "do $$ begin raise exception 'no' using errcode = 'PQ004'; end $$"
    error = raised(connection.connect, empty_url, without)
    assert error.hint == CODES["PQ004"].way_out


def test_a_refused_permission_says_who_may_and_how_to_find_what_is_missing(empty_url):
    with connection.connect(empty_url) as conn:
        conn.execute("create schema pgqueue; create table pgqueue_t (); set role pg_monitor")
        for what in ("pgqueue.f()", "* from pgqueue_t", "pg_read_file('x')"):
            with pytest.raises(PgQueueError, match="permission denied") as caught, translated():
                conn.execute(f"select {what}")
            assert "owner" in (caught.value.hint or ""), what
            assert "pgqueue doctor" in (caught.value.hint or "")
            assert caught.value.sqlstate == "42501"


def test_a_missing_schema_says_to_install(empty_url):
    uses = "select pgqueue.schema_version()", "select * from pgqueue.streams"
    for statement in (*uses, "create table pgqueue.a()"):
        error = raised(connection.connect, empty_url, statement)
        assert "pgqueue install" in str(error), statement
        assert error.sqlstate == "PQ011"


def test_a_dropped_stream_is_not_called_a_missing_schema(empty_url):
    with connection.connect(empty_url) as conn:
        conn.execute("create schema pgqueue")
        with pytest.raises(PgQueueError, match="stream was dropped"), translated():
            conn.execute("select * from pgqueue.messages_7")


def test_errors_without_a_way_out_pass_unchanged(empty_url):
    assert translate(ValueError("x")) is None
    with connection.connect(empty_url) as conn:
        for statement, error in (
            ("select 1/0", psycopg.errors.DivisionByZero),
            ("select * from not_ours", psycopg.errors.UndefinedTable),
        ):
            with pytest.raises(error), translated():
                conn.execute(statement.encode())


CONDITIONS = {
    "lock_not_available": "55P03",
    "dependent_objects_still_exist": "2BP01",
    "object_in_use": "55006",
    "insufficient_privilege": "42501",
    "undefined_table": "42P01",
    "serialization_failure": "40001",
}


def test_every_error_of_the_sql_is_in_the_table_of_its_readme_and_in_that_of_this_package():
    folder = schema.sql_directory()
    files = [*folder.rglob("*.sql")]
    raised = {
        CONDITIONS.get(name, name)
        for file in files
        for name in re.findall(r"errcode = '(\w+)'", file.read_text())
    }
    readme = (folder / "README.md").read_text()
    rows = re.findall(r"^\| (\w{5}) \| (.+?) \| (.*?) ?\|$", readme, re.MULTILINE)
    table = {code: (meaning, way_out) for code, meaning, way_out in rows}
    assert len(table) == len(rows)
    assert table.keys() == raised | {LEASE_LOST}  # which executors raise, by what SQL answers
    assert {code for code in table if code.startswith("PQ") and code != "PQ099"} == CODES.keys()
    for code, (meaning, way_out) in table.items():
        assert meaning, code
        assert way_out or code == "PQ099", code
