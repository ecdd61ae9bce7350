"""Nothing of a schema runs before its owner is trusted."""

import ast
import asyncio
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import make_conninfo
from typer.testing import CliRunner

import spark_pgqueue
from spark_pgqueue.client import AsyncClient, Client
from spark_pgqueue.command_line import cli
from spark_pgqueue.postgres import adbc, binaries, connection, owners, schema
from spark_pgqueue.postgres.errors import PgQueueError
from spark_pgqueue.spark.driver.waiter import PublicationWaiter
from spark_pgqueue.spark.platform.process import Parent
from tests.prepared import Prepared, prepared
from tests.unit.test_cli import completed
from tests.unit.test_commands import commands

WORDS = {
    "ack": "1", "defer": "1", "nack": "1", "archive set": "s /tmp", "capture": "public.t s",
    "cancel": "s c 1", "consumer replay": "s c earliest", "consumer seek": "s c earliest",
    "consumer set": "s c max_deliver_count=3", "explain": "s c 1", "grant": "producer postgres",
    "outcome": "s c 1", "postpone": "s c 1 --until 2100-01-31T12:00:00Z", "release": "public.t s",
    "schedule create": "s n --data x --cron @hourly", "send": "s --data x", "stream bind": "s a s",
    "stream set": "s dedup_window=1h", "stream unbind": "s a s", "uninstall": "--yes",
    "schedule times": "--cron @hourly", "work": "os.path:join s c", "tail": "s --no-follow",
    "purge": "s c --yes", "recover": "--yes",
    "stream drop": "s --yes", "consumer drop": "s c --yes",
    "dead purge": "s c --yes", "top": "--json",
}  # fmt: skip
"""The arguments of commands for which those required, a stream and a consumer, do not do."""

ELSEWHERE = {"checkpoint", "deploy", "sql", "up", "down", "demo", "web", "top"}
"""Commands that ask no database, or a server of their own; the page asks by a `Client`."""


@pytest.fixture
def hostile(empty_url: str) -> Iterator[Prepared]:
    with prepared(empty_url) as found:
        yield found


def test_no_command_runs_what_another_role_prepared(
    hostile: Prepared, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does a Tab in a shell."""
    monkeypatch.setenv("PGQUEUE_URL", hostile.url)
    tried, wrong = 0, []
    for name, command in commands():
        if name in ELSEWHERE:
            continue
        needed = [p for p in command.params if p.required and p.param_type_name == "argument"]
        words = WORDS.get(name, " ".join("sc"[: len(needed)]))
        done = CliRunner().invoke(cli.app, [*name.split(), *words.split()], input="")
        if done.exit_code != 1 or f"belongs to {hostile.role}" not in done.output:
            wrong.append((name, done.output))
        assert not hostile.noted, name
        tried += 1
    assert wrong == []
    assert tried > 50
    assert completed("pgqueue stats ", 2) == []
    assert not hostile.noted


def test_what_was_prepared_would_run(hostile: Prepared) -> None:
    """Else the other tests could not fail."""
    with connection.connect(hostile.url) as conn:
        conn.execute("select pgqueue.schema_version()")
    assert hostile.noted


def test_no_connection_runs_what_another_role_prepared(hostile: Prepared) -> None:
    async def by_loop() -> None:
        async with await psycopg.AsyncConnection.connect(hostile.url) as conn:
            await AsyncClient(conn).send("s", "x")

    def by_executor() -> None:
        with adbc.kept_connection(hostile.url):
            pass

    def by_connection() -> None:
        with connection.connect(hostile.url) as conn:
            Client(conn).send("s", "x")

    def installed_again() -> None:
        with connection.connect(hostile.url) as conn:
            schema.install(conn, pgmq=True)

    def granted() -> None:
        with connection.connect(hostile.url) as conn:
            schema.grant(conn, "producer", "postgres")

    with spark_pgqueue.connect(hostile.url) as queue:
        for attempt in (
            lambda: queue.send("s", "x"),
            lambda: next(iter(queue.consume("s", "c"))),
            by_connection,
            lambda: asyncio.run(by_loop()),
            lambda: asyncio.run(connection.connect_async(hostile.url)),  # type: ignore[arg-type]
            by_executor,
            installed_again,
            granted,
        ):
            with pytest.raises(PgQueueError, match=f"belongs to {hostile.role}") as caught:
                attempt()
            assert caught.value.sqlstate == "PQ011"
    waiter = PublicationWaiter(hostile.url, ["s"], Parent())
    assert not waiter.start()
    assert not hostile.noted


def test_no_file_of_psql_runs_what_another_role_prepared(hostile: Prepared) -> None:
    psql = binaries.find_binaries(18) / "psql"
    for file in ("install.sql", "uninstall.sql", "pgmq/install.sql"):
        command = [psql, "-X", "-q", "-f", schema.sql_directory() / file, hostile.url]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode != 0, file
        assert "belongs to" in done.stderr, file
        assert not hostile.noted, file


def test_grant_runs_nothing_of_a_schema_pgmq_of_another_role(hostile: Prepared) -> None:
    with connection.connect(hostile.url) as conn:
        conn.execute("create schema other")
        conn.execute("alter schema pgqueue rename to theirs")
        conn.execute("alter schema _pgqueue rename to _theirs")
        schema.install(conn)
        schema.grant(conn, "observer", "pg_monitor")
        conn.execute("revoke pgqueue_observer from pg_monitor")
        assert not hostile.noted
        conn.execute("drop schema pgqueue, _pgqueue cascade")
        conn.execute("alter schema theirs rename to pgqueue")
        conn.execute("alter schema _theirs rename to _pgqueue")


@pytest.fixture
def roles(conn: psycopg.Connection) -> Iterator[tuple[str, str]]:
    """An owner, and a client in no privileged role."""
    names = tuple(f"pgqueue_test_{uuid.uuid4().hex[:8]}" for _ in range(2))
    for name in names:
        conn.execute(f"create role {name} login".encode())
    yield names  # type: ignore[misc]
    for name in names:
        conn.execute(f"reassign owned by {name} to current_user; drop owned by {name}".encode())
        conn.execute(f"drop role {name}".encode())


def test_a_client_trusts_its_own_role_the_databases_owner_and_those_that_are_named(
    conn: psycopg.Connection, url: str, roles: tuple[str, str]
) -> None:
    owner, app = roles
    conn.execute(f"alter schema pgqueue owner to {owner}".encode())
    mine = make_conninfo(url, user=app)
    conn.execute(f"grant usage on schema pgqueue to {app}".encode())

    def is_trusted(of: str) -> bool:
        with connection.connect(of) as session:
            try:
                return bool(owners.check(session))
            except PgQueueError:
                return False

    assert is_trusted(make_conninfo(url, user=owner))
    assert not is_trusted(mine)
    assert not is_trusted(url)  # a superuser
    (database,) = conn.execute("select current_database()").fetchone() or ("",)
    (before,) = conn.execute("select current_user").fetchone() or ("",)
    conn.execute(f"alter database {database} owner to {owner}".encode())
    assert is_trusted(mine)
    assert not is_trusted(url)
    conn.execute(f"alter role {app} createrole".encode())
    assert not is_trusted(mine)
    conn.execute(f"alter role {app} nocreaterole".encode())
    conn.execute(f"alter database {database} owner to {before}".encode())
    with suppress(psycopg.errors.DuplicateObject):  # create_roles() makes it, for the server
        conn.execute("create role pgqueue_owner nologin")
    try:
        assert not is_trusted(mine)
        conn.execute(f"grant pgqueue_owner to {owner}".encode())
        assert is_trusted(mine)
        assert not is_trusted(url)
    finally:
        conn.execute(f"revoke pgqueue_owner from {owner}".encode())
    # a session that took on the role of the owner; a superuser's could be reset by a function
    conn.execute(f"grant {owner} to {app}".encode())
    assert not is_trusted(mine)
    assert is_trusted(make_conninfo(mine, options=f"-c role={owner}"))
    assert not is_trusted(make_conninfo(url, options=f"-c role={owner}"))
    conn.execute(f"alter schema pgqueue owner to {before}".encode())
    assert is_trusted(mine)


@pytest.mark.parametrize(
    "becomes", ["superuser", "createrole", "pg_execute_server_program", "pg_write_server_files"]
)
def test_a_role_that_may_become_a_privileged_one_is_one(
    conn: psycopg.Connection, url: str, roles: tuple[str, str], becomes: str
) -> None:
    """A function may `set role` to all that its caller is a member of."""
    owner, app = roles
    (database,) = conn.execute("select current_database()").fetchone() or ("",)
    conn.execute(f"grant usage on schema pgqueue to {app}".encode())
    conn.execute(f"alter schema pgqueue owner to {owner}".encode())
    conn.execute(f"alter database {database} owner to {owner}".encode())
    group = becomes
    if not becomes.startswith("pg_"):
        group = f"{app}_admins"
        conn.execute(f"create role {group} {becomes}".encode())
    try:
        with connection.connect(make_conninfo(url, user=app)) as session:
            assert owners.check(session)
            conn.execute(f"grant {group} to {app}".encode())
            with pytest.raises(PgQueueError, match=f"belongs to {owner}") as caught:
                owners.check(session)
            assert "nor may become" in str(caught.value.hint)
            conn.execute("alter schema pgqueue owner to current_user")
            conn.execute(f"alter database {database} owner to current_user".encode())
            assert owners.check(session), "a superuser's schema is anybody's to use"
    finally:
        conn.execute(f"revoke {group} from {app}".encode())
        if group != becomes:
            conn.execute(f"drop role {group}".encode())


def test_the_name_of_an_owner_stays_a_name_in_the_statement_of_the_hint() -> None:
    with pytest.raises(PgQueueError) as caught:
        owners.judge(("on", None, "schema pgqueue", 'x"; alter role x superuser; --', "me", False))
    assert 'grant pgqueue_owner to "x""; alter role x superuser; --"' in str(caught.value.hint)


def test_a_trigger_with_the_function_of_another_role_is_noticed(
    conn: psycopg.Connection, url: str, roles: tuple[str, str]
) -> None:
    mallory, _ = roles
    conn.execute("grant usage on schema pgqueue to public")
    conn.execute(f"grant trigger on pgqueue.streams to {mallory}".encode())
    conn.execute(f"create schema {mallory} authorization {mallory}".encode())
    with connection.connect(make_conninfo(url, user=mallory)) as theirs:
        theirs.execute(
            f"create function {mallory}.noting() returns trigger language plpgsql"
            " as 'begin return new; end'".encode()
        )
        theirs.execute(
            "create trigger noting before insert on pgqueue.streams"
            f" for each row execute function {mallory}.noting()".encode()
        )
    with (
        spark_pgqueue.connect(url) as queue,
        pytest.raises(PgQueueError, match=f"trigger streams.noting belongs to {mallory}"),
    ):
        queue.streams()
    conn.execute("drop trigger noting on pgqueue.streams")


def test_who_owns_the_database_and_may_not_grant_a_group_leaves_that_to_an_administrator(
    conn: psycopg.Connection, empty_url: str, roles: tuple[str, str]
) -> None:
    owner, app = roles
    with connection.connect(empty_url) as admin:
        (database,) = admin.execute("select current_database()").fetchone() or ("",)
        conn.execute("select pgqueue.create_roles()")
        admin.execute(f"alter database {database} owner to {owner}".encode())
        with connection.connect(make_conninfo(empty_url, user=owner)) as theirs:
            schema.install(theirs)
            with pytest.raises(PgQueueError, match="permission denied to grant role") as caught:
                schema.grant(theirs, "producer", app)
            assert f"an administrator of the role runs: grant pgqueue_producer to {app}" in str(
                caught.value.hint
            )
            theirs.execute("select pgqueue.create_stream('s')")
        admin.execute(f"grant pgqueue_producer to {app}".encode())
        with spark_pgqueue.connect(make_conninfo(empty_url, user=app)) as queue:
            assert queue.send("s", "x")
        admin.execute(f"alter database {database} owner to current_user".encode())
        admin.execute(f"drop owned by {owner} cascade".encode())


def test_an_object_of_another_role_in_the_schema_is_noticed(
    conn: psycopg.Connection, url: str, roles: tuple[str, str]
) -> None:
    (send,) = conn.execute(
        "select min(oid::regprocedure::text) from pg_proc where pronamespace ="
        " 'pgqueue'::regnamespace and proname = 'send'"
    ).fetchone() or ("",)
    for each in (
        f"function {send}",
        "function _pgqueue.roles()",
        "view pgqueue.stream_stats",
        "table pgqueue.streams",
        "type pgqueue.claim_hints",
    ):
        conn.execute(f"alter {each} owner to {roles[0]}".encode())
        with (
            spark_pgqueue.connect(url) as queue,
            pytest.raises(PgQueueError, match=f"belongs to {roles[0]}") as caught,
        ):
            queue.streams()
        assert caught.value.sqlstate == "PQ011"
        conn.execute(f"alter {each} owner to current_user".encode())


OPENING = {
    "client.on_loop": "a connection of the caller, by schema.check_by",
    "command_line.commands.schema": "uninstall and grant, by schema.content and schema.grant",
    "command_line.completion": "by owners.check",
    "command_line.demo.story": "a database of its own",
    "command_line.doctor": "by schema.check, before it calls anything",
    "postgres.adbc": "by owners.judge",
    "postgres.statements": "by schema.check",
    "spark.driver.waiter": "by owners.check",
    "testing.databases": "databases of its own",
    "worker.tasks": "connect_async does it",
}
"""The modules that open connections by `postgres.connection`, and how each checks the owners."""


def test_all_that_opens_connections_checks_owners() -> None:
    root = Path(spark_pgqueue.__file__).parent
    found = set()
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module in (
                "spark_pgqueue.postgres.connection", "spark_pgqueue.postgres"
            ):  # fmt: skip
                names = {alias.name for alias in node.names}
                if names & {"connect", "connect_async", "connect_adbc", "connection"}:
                    found.add(".".join(path.relative_to(root).with_suffix("").parts))
    assert found == OPENING.keys() - {"client.on_loop"}
