import pickle

import psycopg
import pytest

from spark_pgqueue import connection
from spark_pgqueue.errors import PgQueueError, translate, translated

RAISE = "do $$ begin raise exception 'no stream %', 'a' using errcode = 'PQ001', hint = 'b'; end $$"


def test_message_hint_and_code_are_shown_and_survive_pickling():
    error = pickle.loads(pickle.dumps(PgQueueError("what", hint="way out", sqlstate="PQ001")))
    assert (error.message, error.hint, error.sqlstate) == ("what", "way out", "PQ001")
    assert str(error) == "[PQ001] what\nHint: way out"


def test_our_own_errors_keep_message_and_hint(empty_url):
    with connection.connect(empty_url) as conn, pytest.raises(PgQueueError) as caught, translated():
        conn.execute(RAISE)
    assert (caught.value.message, caught.value.hint) == ("no stream a", "b")
    assert caught.value.sqlstate == "PQ001"


def test_our_own_errors_keep_message_and_hint_through_adbc(empty_url):
    with (
        connection.connect_adbc(empty_url) as conn,
        conn.cursor() as cursor,
        pytest.raises(PgQueueError) as caught,
        translated(),
    ):
        cursor.execute(RAISE)
    assert (caught.value.message, caught.value.hint) == ("no stream a", "b")
    assert caught.value.sqlstate == "PQ001"


@pytest.mark.parametrize(
    ("statement", "names"),
    [
        ("select pgqueue.f()", "usage on schema pgqueue"),
        ("select * from pgqueue_t", "on table pgqueue.pgqueue_t"),
        ("select pg_read_file('x')", "execute on function pgqueue.pg_read_file"),
    ],
)
def test_a_refused_permission_names_what_to_grant(empty_url, statement, names):
    with connection.connect(empty_url) as conn:
        conn.execute("create schema pgqueue; create table pgqueue_t (); set role pg_monitor")
        with pytest.raises(PgQueueError, match="permission denied") as caught, translated():
            conn.execute(statement)
    assert names in (caught.value.hint or "")
    assert caught.value.sqlstate == "42501"


@pytest.mark.parametrize(
    "statement",
    [
        "select pgqueue.schema_version()",
        "select * from pgqueue.streams",
        "create table pgqueue.a()",
    ],
)
def test_a_missing_schema_says_to_install(empty_url, statement):
    with (
        connection.connect(empty_url) as conn,
        pytest.raises(PgQueueError, match="pgqueue install") as caught,
        translated(),
    ):
        conn.execute(statement)
    assert caught.value.sqlstate == "PQ011"


def test_a_dropped_stream_is_not_called_a_missing_schema(empty_url):
    with connection.connect(empty_url) as conn:
        conn.execute("create schema pgqueue")
        with pytest.raises(PgQueueError, match="stream was dropped"), translated():
            conn.execute("select * from pgqueue.messages_7")


def test_errors_without_a_way_out_pass_unchanged(empty_url):
    assert translate(ValueError("x")) is None
    with (
        connection.connect(empty_url) as conn,
        pytest.raises(psycopg.errors.DivisionByZero),
        translated(),
    ):
        conn.execute("select 1/0")
    with (
        connection.connect(empty_url) as conn,
        pytest.raises(psycopg.errors.UndefinedTable),
        translated(),
    ):
        conn.execute("select * from not_ours")
