"""What a role or database sets changes nothing: names, literals, times and text mean the same."""

import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

import spark_pgqueue
from spark_pgqueue.postgres import binaries, connection, schema
from spark_pgqueue.postgres.errors import PgQueueError
from tests.sql import checker, odd

ROOT = Path(__file__).parents[2]

LITERAL = re.compile(
    r"--[^\n]*|\"[^\"]*\"|\b[eE]'(?:\\.|''|[^'\\])*'|(?P<plain>'(?:''|[^'])*')", re.DOTALL
)


def test_no_literal_of_a_function_depends_on_standard_conforming_strings(conn):
    """A backslash is in literals E'...' alone, which mean the same whatever a session sets."""
    rows = conn.execute(
        "select proname, prosrc from pg_proc"
        " where pronamespace in ('pgqueue'::regnamespace, '_pgqueue'::regnamespace)"
    ).fetchall()
    assert len(rows) > 300
    found = [
        (name, each["plain"])
        for name, source in rows
        for each in LITERAL.finditer(source)
        if "\\" in (each["plain"] or "")
    ]
    assert found == []


def test_no_file_sets_what_a_later_version_of_postgres_refuses():
    """Neither what is installed and run, nor a page's example; on is what 19 has."""
    refused = "|".join(name for names in odd.REFUSED.values() for name in names)
    found = {
        line.strip()
        for folder in ("sql", "spark_pgqueue")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".sql", ".py", ".md")
        for line in path.read_text().splitlines()
        if re.search(refused, line)
    }
    assert found == {"set local standard_conforming_strings = on;"}


def used(url: str) -> dict[str, Any]:
    """A database after a look at each part of the queue: what each part answered."""
    friday = datetime(2026, 1, 1, tzinfo=UTC)
    said: dict[str, Any] = {}
    with spark_pgqueue.connect(url) as queue:
        for name, kind in (("s", "text"), ("j", "json"), ("b", "binary"), ("copy", "text")):
            queue.create_stream(name, kind)
            queue.create_consumer(name, "c", start="earliest")
        queue.create_consumer(
            "s",
            "keyed",
            ordering="key",
            start="earliest",
            topic="eu.*.a+b",
            settings={"keep_history": timedelta(hours=26), "visibility_timeout": "3 minutes"},
        )
        queue.create_consumer("j", "where", where='$.data.a == "x\\"y"', start="earliest")
        queue.bind("s", "eu.#", "copy")
        queue.send("s", r"a\nb 'c' $d$", key="eu.x.a+b", headers={"h": r"q\"'"})
        queue.send_batch("s", ["d", "e"], keys=[None, "eu.y.a+b"])
        queue.send("j", '{"a": "x\\"y"}')
        queue.send("b", b"\x00\\\xff'")
        for stream, name in (("s", "keyed"), ("j", "where"), ("b", "c"), ("copy", "c"), ("s", "c")):
            claim = queue.receive(stream, name, 10)
            assert claim is not None
            said[f"{stream} {name}"] = [(m.data, m.key, m.headers) for m in claim.messages]
            if len(claim.messages) > 1:
                claim.ack(claim.messages[:1])
            queue.dead_letter(claim.claim_id, reason="no", details={"a": "\\"})
        said["dead"] = [m.data for m in queue.read_dead("s", "c")]
        said["redriven"] = queue.redrive("s", "c")
        for text in ("0 0 * * FRI", "0 0 1 JUN *", "@MONTHLY"):
            times = queue.schedule_times(cron=text, after=friday, count=2)
            said[text] = [f"{each.astimezone(UTC):%F %R}" for each in times]
        queue.create_schedule("s", "often", "x", every=timedelta(days=1, hours=2))
        said["every"] = [each.every for each in queue.schedules("s")]
        queue.set_retention("s", keep_for=timedelta(days=3, seconds=1))
        said["timeout"] = [
            (each.visibility_timeout, each.settings) for each in queue.consumers("s")
        ]
        queue.maintain()
        queue.explain("s", "c", 2)
        queue.look()
        queue.create_group("s", "g", start="earliest")
        group: list[str] = []
        queue.group("s", "g").run(
            lambda messages, conn: group.extend(str(m.data) for m in messages), wait=timedelta(0)
        )
        said["group"] = sorted(group)
    with connection.connect(url) as conn:
        conn.execute("create schema mine")
        conn.execute("create table mine.t (at timestamp primary key, many interval, raw bytea)")
        conn.execute("select pgqueue.capture('mine.t', 'j')")
        conn.execute("insert into mine.t values ('2026-01-02 03:04', '1 day -2:00', E'\\\\xff00')")
        said["captured"] = conn.execute(
            "select key, data::jsonb - 'at', headers ->> 'table' from pgqueue.messages"
            " where headers ? 'table'"
        ).fetchall()
        checker.check(conn)
    return said


@contextmanager
def role_with(url: str, settings: dict[str, str]) -> Iterator[str]:
    """The url of a new superuser that has these settings."""
    name = sql.Identifier(role := f"pgqueue_test_{uuid4().hex[:12]}")
    with connection.connect(url) as conn:
        conn.execute(sql.SQL("create role {} superuser login").format(name))
        for setting, value in settings.items():
            part = sql.SQL("alter role {} set {} = {}") if setting != "search_path" else sql.SQL(
                "alter role {} set {} = public, pg_catalog")  # fmt: skip
            part = part.format(name, sql.SQL(setting), value)  # type: ignore[arg-type]
            conn.execute(part)
    try:
        yield make_conninfo(url, user=role)
    finally:
        with connection.connect(make_conninfo(url, dbname="postgres")) as conn:
            database = sql.Identifier(str(conninfo_to_dict(url)["dbname"]))
            conn.execute(sql.SQL("drop database {} with (force)").format(database))
            conn.execute(sql.SQL("drop role {}").format(name))


@pytest.mark.each_version
def test_a_role_with_odd_settings_gets_the_same_answers(server, url, empty_url):
    """Installed by that role, too."""
    with connection.connect(url) as conn:
        settings = odd.accepted(odd.SETTINGS, conn.info.server_version // 10000)
    with role_with(empty_url, settings) as theirs:
        with connection.connect(theirs) as conn:
            schema.install(conn)
            schema.install(conn)
            there = [conn.execute(f"show {name}".encode()).fetchone() for name in settings]
            assert ("off",) in there  # not pinned by the client
        assert used(theirs) == used(url)
        with connection.connect(theirs) as conn:
            conn.execute("drop schema mine cascade")
            schema.uninstall(conn)


def test_psql_installs_whatever_the_role_sets(server, empty_url):
    with connection.connect(empty_url) as conn:
        usual = odd.accepted(odd.SETTINGS, conn.info.server_version // 10000)
    settings = usual | {
        "array_nulls": "off",
        "default_transaction_isolation": "serializable",
        "default_transaction_read_only": "on",
    }
    programs = binaries.find_binaries(18)
    with role_with(empty_url, settings) as theirs:
        for file in ("install.sql", "install.sql", "uninstall.sql"):
            done = subprocess.run(
                [programs / "psql", "-qX", theirs, "-f", schema.sql_directory() / file],
                capture_output=True, text=True, check=False,
            )  # fmt: skip
            assert (done.returncode, done.stderr) == (0, "")


def test_lists_with_nulls_are_refused_where_a_null_would_become_a_text(server, url):
    with connection.connect(url) as conn:
        conn.execute(f"alter database {conn.info.dbname} set array_nulls = off".encode())
    with spark_pgqueue.connect(url) as queue, pytest.raises(PgQueueError, match="array_nulls"):
        queue.streams()


@pytest.fixture
def database(server, request) -> Iterator[str]:
    """A database with other rules for text."""
    name = f"pgqueue_test_{uuid4().hex[:12]}"
    with connection.connect(server.url) as conn:
        options = odd.DATABASES[request.param]
        try:
            conn.execute(f"create database {name} template template0 {options}".encode())
        except psycopg.errors.FeatureNotSupported as error:  # a server without ICU
            pytest.skip(str(error))
    yield server.url_of(name)
    with connection.connect(server.url) as conn:
        conn.execute(f"drop database {name} with (force)".encode())


@pytest.mark.longer
@pytest.mark.all_versions  # not each of them has ICU
@pytest.mark.parametrize("database", odd.DATABASES, indirect=True)
def test_a_database_of_any_encoding_gives_the_same_answers(database, url):
    with connection.connect(database) as conn:
        schema.install(conn)
    assert used(database) == used(url)


@pytest.mark.parametrize(
    ("database", "text"),
    [("LATIN1", "ä"), ("WIN1252", "ä€"), ("EUC_JP", "日本"), ("SQL_ASCII", "ä€日")],
    indirect=["database"],
)
def test_text_is_the_same_for_psycopg_and_adbc(database, text, monkeypatch):
    """Both ways, whatever libpq's environment says."""
    for environment in ("UTF8", "LATIN1"):
        monkeypatch.setenv("PGCLIENTENCODING", environment)
        check_text(database, text)


def check_text(database, text):
    with connection.connect(database) as conn, connection.connect_adbc(database) as arrow:
        conn.execute("drop table if exists t")
        conn.execute("create table t (x text)")
        conn.execute("insert into t values (%s)", [text])
        with arrow.cursor() as cursor:
            cursor.execute("select x from t")
            table = cursor.fetch_arrow_table()
            assert table.to_pydict() == {"x": [text]}
            cursor.adbc_ingest("t", table, mode="append")
        assert conn.execute("select distinct x from t").fetchall() == [(text,)]


@pytest.mark.parametrize("database", ["LATIN1"], indirect=True)
def test_a_text_that_the_database_cannot_store_is_refused(database):
    with spark_pgqueue.connect(database) as queue:
        queue.install()
        queue.create_stream("s")
        with pytest.raises(PgQueueError, match="no equivalent"):
            queue.send("s", "日本")
