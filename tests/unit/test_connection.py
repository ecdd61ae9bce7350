import asyncio
import os
import socket
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta

import psycopg
import pyarrow as pa
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from spark_pgqueue.postgres import connection, retrying, schema
from spark_pgqueue.postgres.errors import PgQueueError
from spark_pgqueue.postgres.kept import take
from spark_pgqueue.postgres.statements import Statements
from spark_pgqueue.postgres.url import redact
from tests.conftest import user_of
from tests.processes import wait_until

SECRET = "s3cr3t"


@pytest.fixture(autouse=True)
def _no_libpq_environment(monkeypatch):
    for name in [name for name in os.environ if name.startswith("PG") and "TEST" not in name]:
        monkeypatch.delenv(name)


def both(url, **options):
    """Connect with psycopg and with ADBC; the name of the database, as each sees it."""
    with connection.connect(url, **options) as conn:
        by_psycopg = conn.execute("select current_database()").fetchone()
    with connection.connect_adbc(url, **options) as conn, conn.cursor() as cursor:
        cursor.execute("select current_database()::text")
        by_adbc = cursor.fetchone()
    assert by_psycopg == by_adbc
    assert by_psycopg is not None
    return by_psycopg[0]


def test_uri_conninfo_environment_and_service_file_all_connect(empty_url, tmp_path, monkeypatch):
    parts = conninfo_to_dict(empty_url)
    name = parts["dbname"]
    assert both(empty_url) == name
    assert both(" ".join(f"{k}='{v}'" for k, v in parts.items())) == name
    service = tmp_path / "services"
    service.write_text("[queue]\n" + "".join(f"{k}={v}\n" for k, v in parts.items()))
    monkeypatch.setenv("PGSERVICEFILE", str(service))
    assert both("service=queue") == name
    monkeypatch.setenv("PGSERVICE", "queue")
    assert both(None) == name
    monkeypatch.delenv("PGSERVICE")
    for key, value in parts.items():
        variable = {"dbname": "PGDATABASE"}.get(key, f"PG{key.upper()}")
        monkeypatch.setenv(variable, str(value))
    assert both(None) == name
    assert both("") == name


def test_defaults_yield_to_the_url_and_to_the_environment(empty_url, monkeypatch):
    def parameters(url):
        return conninfo_to_dict(connection.conninfo(url))

    assert parameters(empty_url)["connect_timeout"] == "10"
    assert parameters(empty_url)["tcp_user_timeout"] == "20000"
    assert parameters(empty_url + "&connect_timeout=3")["connect_timeout"] == "3"
    monkeypatch.setenv("PGCONNECT_TIMEOUT", "4")
    assert parameters(empty_url)["connect_timeout"] == "4"
    with connection.connect(empty_url) as conn:
        assert conn.execute("show application_name").fetchone() == ("spark-pgqueue",)
    monkeypatch.setenv("PGAPPNAME", "mine")
    with connection.connect(empty_url) as conn:
        assert conn.execute("show application_name").fetchone() == ("mine",)
        assert conn.autocommit
        assert conn.prepare_threshold is None


def test_no_setting_changes_what_a_connection_reads(empty_url):
    """For psycopg, for asyncio and for ADBC, whose texts are all UTF-8."""
    styles = "-c DateStyle=SQL,DMY -c IntervalStyle=iso_8601"
    odd = make_conninfo(empty_url, client_encoding="LATIN1", options=styles)
    ask = "select '\u20ac'::text, interval '1 day', timestamptz '2026-02-01 00:00+00'"
    read = ("\u20ac", timedelta(days=1), datetime(2026, 2, 1, tzinfo=UTC))
    with connection.connect(odd) as conn:
        assert conn.execute(ask).fetchone() == read

    async def in_a_loop():
        async with await connection.connect_async(odd) as conn:
            return await (await conn.execute(ask)).fetchone()

    assert asyncio.run(in_a_loop()) == read
    with connection.connect_adbc(odd) as conn, conn.cursor() as cursor:
        cursor.execute("select '\u20ac'::text")
        assert cursor.fetchone() == read[:1]


@pytest.mark.parametrize(
    "url",
    [
        f"postgresql://u:{SECRET}%zz@h/d",
        f"postgresql://u:a@{SECRET}@h/d",
        f"postgresql://u:{SECRET}/x@h/d",
        f"postgresql://u:12/{SECRET}@h/d",
        f"postgresql://u:x@h/d?password={SECRET}&nonsense=1",
        f"postgresql://u:x@h/d?pasword={SECRET}",
        f"host=h password=a {SECRET}",
        f"host=h password='{SECRET}",
        f"host=h pasword={SECRET}",
        f"host=h port={SECRET}",
        f"host=h password={SECRET}\udcff",  # of a command line: the byte FF
        f"postgresql://u:{SECRET}%ff@h/d",
        f"{SECRET}",
        f"jdbc:postgresql://h/d?password={SECRET}",
    ],
)
def test_an_invalid_url_is_refused_without_showing_its_password(url):
    for attempt in (connection.connect, connection.connect_adbc, connection.describe):
        with pytest.raises(PgQueueError, match="url is not valid") as caught:
            attempt(url)
        assert SECRET not in "".join(traceback.format_exception(caught.value))
        assert "libpq URI" in (caught.value.hint or "")


@pytest.mark.parametrize("connect", [connection.connect, connection.connect_adbc])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"user": "nobody_here"}, r"user=nobody_here.*does not exist"),
        ({"dbname": "no_such_db"}, r"dbname=no_such_db.*does not exist"),
        ({"host": "no-such-host.invalid"}, r"host=no-such-host.invalid.*(resolve|translate) host"),
    ],
)
def test_errors_that_will_not_go_away_are_raised_at_once(empty_url, connect, change, message):
    url = make_conninfo(empty_url, password=SECRET, **change)
    began = time.monotonic()
    with pytest.raises(PgQueueError, match=message) as caught:
        connect(url, patience=60)
    assert time.monotonic() - began < 20
    assert not retrying.is_passing(caught.value)
    assert SECRET not in "".join(traceback.format_exception(caught.value))
    assert caught.value.hint


@pytest.mark.parametrize("connect", [connection.connect, connection.connect_adbc])
def test_patience_ends_with_an_error_that_names_the_place(connect):
    began = time.monotonic()
    with pytest.raises(PgQueueError, match=r"host=127.0.0.1 port=1 .*refused") as caught:
        connect(f"postgresql://u:{SECRET}@127.0.0.1:1/d", patience=1.0)
    assert 1.0 <= time.monotonic() - began < 5
    assert retrying.is_passing(caught.value)
    assert SECRET not in "".join(traceback.format_exception(caught.value))


def test_a_wrong_password_is_refused_at_once_and_not_shown(directory):
    from spark_pgqueue import embedded

    with embedded.start(directory) as server:
        with connection.connect(server.url) as conn:
            conn.execute("create role writer login password 'right'")
        (directory / "data/pg_hba.conf").write_text("local all all scram-sha-256\n")
        server.restart()
        url = server.url.replace("postgres@", f"writer:{SECRET}@")
        for connect in (connection.connect, connection.connect_adbc):
            began = time.monotonic()
            with pytest.raises(PgQueueError, match="authentication failed") as caught:
                connect(url, patience=60)
            assert time.monotonic() - began < 10
            assert SECRET not in "".join(traceback.format_exception(caught.value))
        assert both(server.url.replace("postgres@", "writer:right@")) == "postgres"


def test_connecting_waits_out_a_restart(server, empty_url):
    """Connects again and again, from before a restart to after it, without one error."""
    stop, connected = threading.Event(), []

    def work(_: int) -> None:
        while not stop.is_set():
            try:
                connected.append(both(empty_url, patience=30))
            except Exception as error:
                # What broke after connecting is not connect's to wait out; what it is must show.
                if not retrying.is_passing(error):
                    raise

    with ThreadPoolExecutor(3) as pool:
        work_of_all = pool.map(work, range(3))
        for mode in ("fast", "immediate"):
            time.sleep(0.3)
            server.restart(mode)
        before = len(connected)
        wait_until(lambda: len(connected) > before)
        stop.set()
        list(work_of_all)


def test_too_many_connections_pass(conn, new_role):
    url = new_role()
    conn.execute(f"alter role {user_of(url)} connection limit 0".encode())
    with pytest.raises(PgQueueError, match="too many connections") as caught:
        connection.connect(url, patience=0)
    assert retrying.is_passing(caught.value)


@pytest.mark.parametrize("connect", [connection.connect, connection.connect_adbc])
def test_a_terminated_backend_is_a_passing_error(empty_url, connect):
    with connect(empty_url) as victim, connection.connect(empty_url) as killer:
        cursor = victim.cursor()
        cursor.execute("select pg_backend_pid()")
        killer.execute("select pg_terminate_backend(%s, 5000)", cursor.fetchone())
        for _ in range(2):  # the first says so, the second has no connection
            with pytest.raises(Exception, match=r"terminat|clos|lost|no connection") as caught:
                cursor.execute("select 1")
            assert retrying.is_passing(caught.value), caught.value


def test_other_errors_do_not_pass_and_come_through(empty_url):
    def divide():
        with connection.connect(empty_url) as conn:
            conn.execute("select 1/0")

    with pytest.raises(psycopg.errors.DivisionByZero):
        retrying.with_backoff(divide, empty_url, 60)
    assert not retrying.is_passing(ValueError("connection refused"))
    assert not retrying.is_passing(OSError("connection refused"))


def test_a_value_that_a_driver_cannot_convert_is_no_lost_connection(empty_url):
    """Such an error has no SQLSTATE either."""
    rows = pa.table({"at": pa.array([-(2**63)], pa.int64()).view(pa.timestamp("us", "UTC"))})

    def copied():
        with connection.connect_adbc(empty_url) as conn, conn.cursor() as cursor:
            cursor.adbc_ingest("t", rows, mode="create")

    def loaded():
        with connection.connect(empty_url) as conn:
            conn.execute("select timestamptz '12000-01-01'").fetchone()

    for attempt in (copied, loaded):
        with pytest.raises(Exception) as caught:
            retrying.with_backoff(attempt, empty_url, 60)
        assert not isinstance(caught.value, PgQueueError)
        assert "no connection" not in str(caught.value)


def test_an_error_of_adbc_that_came_through_arrow_is_a_database_error():
    lost = "[libpq] Failed to execute query 'SET': FATAL:  terminating connection due to"
    assert retrying.is_passing(OSError(f"{lost} administrator command"))


@pytest.mark.parametrize(
    "text",
    [
        f"postgresql://u:{SECRET}@h/d",
        f"at postgresql://u:{SECRET}@x@h/d failed",
        rf"host=h password='a\'{SECRET}' dbname=d",
        rf"host=h password=a\ {SECRET} dbname=d",
        f"postgresql://h/d?user=u&password={SECRET}&sslmode=require",
        f"PASSWORD={SECRET}",
    ],
)
def test_redact_hides_passwords(text):
    assert SECRET not in redact(text)
    assert "***" in redact(text)


def test_redact_leaves_other_text_alone():
    text = "connection to host=h port=1 user=u failed: a@b postgresql://u@h/d"
    assert redact(text) == text


def test_describe_shows_the_place_and_no_password(monkeypatch):
    monkeypatch.setenv("PGPORT", "7777")
    shown = connection.describe(f"postgresql://u:{SECRET}@h/d?sslpassword={SECRET}")
    assert shown == "host=h port=7777 dbname=d user=u"


@pytest.mark.parametrize(
    "url",
    [
        f"host=/nowhere dbname=postgresql://u:{SECRET}@h/d",
        f"host=/nowhere user=u:{SECRET}",
        f"host=/nowhere user=u password={SECRET}",
    ],
)
def test_a_password_in_the_wrong_place_is_not_shown_either(url):
    with pytest.raises(PgQueueError, match="no connection") as error:
        connection.connect(url, patience=0)
    assert SECRET not in str(error.value)


@pytest.fixture
def silent():
    """The host and port of a server that never answers."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield f"host=127.0.0.1 port={server.getsockname()[1]}"


@pytest.mark.parametrize(
    "connect", [connection.connect, pytest.param(connection.connect_adbc, marks=pytest.mark.longer)]
)
def test_the_log_says_where_it_is_still_trying_and_why(connect, silent, caplog):
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        refused = f"host=127.0.0.1 port={held.getsockname()[1]}"
        for where, patience in ((refused, 3.0), (silent, 0)):
            caplog.clear()
            began = time.time()
            with pytest.raises(PgQueueError):
                connect(f"{where} user=u password={SECRET} connect_timeout=2", patience=patience)
            if where == silent:  # one slow attempt, and none that failed before
                assert not caplog.records
                continue
            (record,) = caplog.records
            assert record.levelname == "WARNING"
            assert record.created - began < 4
            assert "refused" in record.message
            assert f"{where} user=u" in record.message
            assert "retrying for" in record.message
            assert SECRET not in record.message


def test_a_quick_answer_is_not_logged_and_neither_is_slow_work(empty_url, caplog):
    statements = Statements(empty_url, repeat=True)
    schema.install(statements.connection())
    statements.rows("select pg_sleep(2)")
    assert not caplog.records


def test_a_connection_is_kept_for_the_next_statements_unless_it_broke(url):
    def pid() -> int:
        with Statements(url, patience=0).kept() as statements:
            return statements.row("select pg_backend_pid()")[0]

    first = pid()
    assert pid() == first
    with connection.connect(url) as conn:
        conn.execute("select pg_terminate_backend(%s, 5000)", [first])
    second = pid()
    assert second != first, "replaced before the first statement, which is not tried twice"
    with pytest.raises(PgQueueError), Statements(url, patience=0).kept() as statements:
        statements.row("select 1 / (pg_backend_pid() - %s)", [second])
    assert pid() != second, "after an error nobody knows what is under way"
    left = take(psycopg.Connection, url)
    assert left is not None
    left.close()
