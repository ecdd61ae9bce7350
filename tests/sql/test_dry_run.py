"""`pgqueue install --dry-run` says what an installation does, and leaves nothing of it."""

import json

import pytest
from typer.testing import CliRunner

import spark_pgqueue
from spark_pgqueue.command_line import cli
from spark_pgqueue.postgres import connection, dry_run, schema
from spark_pgqueue.postgres.errors import PgQueueError
from tests.sql import freeze, internals
from tests.sql.catalogue import catalogue
from tests.sql.owing import owed, use
from tests.sql.queue import *

THIS = schema.expected_version()
TABLES = (
    "select oid::regclass::text from pg_class where relnamespace = 'pgqueue'::regnamespace"
    " and relkind in ('r', 'p') order by 1"
)
VIEWS = (
    "select oid::regclass::text from pg_class where relnamespace = 'pgqueue'::regnamespace"
    " and relkind = 'v' order by 1"
)


def names(conn: Conn, query: str) -> set[str]:
    return {name for (name,) in conn.execute(query.encode())}


@pytest.mark.longer
@pytest.mark.promise("operations: rehearsal of an upgrade")
@pytest.mark.parametrize("version", freeze.released())
def test_it_says_what_the_upgrade_then_does(version: int, empty_url: str) -> None:
    with connection.connect(empty_url) as conn:
        freeze.install(conn, version)
        use(conn, empty_url, internals.insert_messages)
        before = catalogue(conn), owed(conn)
        tables, views = names(conn, TABLES), names(conn, VIEWS)
        value(conn, "send", "s", "x")  # the session has not reported its row yet
        before = catalogue(conn), owed(conn)
        found = dry_run.dry_run(conn)
        assert (catalogue(conn), owed(conn)) == before
        assert (found.installed, found.version) == (version, THIS)
        assert {(lock.table, lock.mode) for lock in found.locks} == {
            (table, "access exclusive") for table in tables
        }
        assert 0 < min(lock.seconds for lock in found.locks) <= found.seconds
        schema.install(conn)
        for kind, old, query in (("table", tables, TABLES), ("view", views, VIEWS)):
            new = names(conn, query)
            assert {*found.created.get(kind, [])} == new - old
            assert {*found.dropped.get(kind, [])} == old - new
            assert {*found.changed.get(kind, [])} <= new & old
        assert "pgqueue.consumers" in found.changed["table"]
        assert "pgqueue.ack(bigint,bigint[],jsonb)" in found.changed["function"]
        assert found.rows["pgqueue.consumer_messages"] > 0
        assert "pgqueue.publications" not in found.rows


@pytest.mark.promise("operations: rehearsal of an upgrade")
def test_installing_the_same_version_again_blocks_nobody(conn: Conn, url: str) -> None:
    """With an open transaction that has locks of all kinds, too."""
    conn.execute("set search_path to pgqueue, public")
    with spark_pgqueue.connect(url) as worker:
        worker.create_stream("s")
        worker.create_consumer("s", "c")
        before = catalogue(conn)
        with worker.transaction():
            worker.send("s", "x")
            worker.alter_consumer("s", "c", {"max_deliver_count": 7})
            found = dry_run.dry_run(conn)
        assert catalogue(conn) == before
    assert (found.installed, found.version, found.locks) == (THIS, THIS, [])
    assert (found.created, found.dropped, found.changed) == ({}, {}, {})
    assert found.rows.keys() <= {"pgqueue.servers"}  # that the database is a copy


def test_on_the_command_line(empty_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGQUEUE_URL", empty_url)

    def run(*words: str) -> str:
        result = CliRunner().invoke(cli.app, ["install", "--dry-run", *words])
        assert result.exit_code == 0, result.output
        return result.stdout

    with connection.connect(empty_url) as conn:
        first = f"This would install version {THIS} of the schema pgqueue in database"
        assert run().startswith(first)
        found = json.loads(run("--pgmq", "--without", "capture", "--json"))
        assert "pgmq.meta" in found["created"]["table"]
        assert "pgqueue.captured" not in found["created"]["table"]
        assert (found["installed"], found["locks"]) == (None, [])
        assert schema.installed_version(conn) is None
        freeze.install(conn, THIS - 1)
        lines = run().splitlines()
        assert lines[0].startswith(f"This would upgrade version {THIS - 1} to version {THIS} of")
        (locks,) = (line for line in lines if line.startswith("locks, access exclusive, for at"))
        assert "pgqueue.archive_attempts" in locks
        assert locks.endswith("more (--json has all)")
        assert schema.installed_version(conn) == THIS - 1


def test_behind_an_open_transaction_it_fails_as_the_upgrade_would(
    empty_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schema, "ATTEMPTS", 1)
    with connection.connect(empty_url) as conn, connection.connect(empty_url) as idle:
        freeze.install(conn, THIS - 1)
        value(conn, "create_stream", "s")
        migrating = schema.script(transaction=False).replace("interval '30 s'", "interval '1 s'")
        parts = [(schema.sql_directory(), migrating)]
        monkeypatch.setattr(schema, "_messages", lambda *_: iter(parts))
        idle.execute("begin")
        value(idle, "send", "s", "x")
        with pytest.raises(PgQueueError, match="in use: could not lock its tables"):
            dry_run.dry_run(conn)
        assert schema.installed_version(conn) == THIS - 1
        assert conn.info.transaction_status.name == "IDLE"
