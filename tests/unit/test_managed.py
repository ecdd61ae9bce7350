"""The page of managed Postgres: roles that are no superusers install, on a server of its own."""

from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

import spark_pgqueue
from spark_pgqueue import embedded
from spark_pgqueue.postgres import connection, schema
from spark_pgqueue.postgres.errors import PgQueueError
from tests.pages import ROOT, blocks_of

PAGE = (ROOT / "spark_pgqueue/guide/where-it-runs.md").read_text()

pytestmark = pytest.mark.longer


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[embedded.Server]:
    """A server on which no test has created group roles, which only their creator may grant."""
    with embedded.start(tmp_path, settings={"fsync": "off"}) as server:
        yield server


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[embedded.Server]:
    """A server without group roles, with what a service gives: an administrator, and an owner."""
    folder: Path = tmp_path_factory.mktemp("managed")
    with embedded.start(folder, settings={"fsync": "off"}) as server:
        with connection.connect(server.url) as conn:
            for statement in (
                "create role service login createrole createdb",
                "create role owner login",
                "create role app login",
                "create database owned owner owner",
                "create database administered owner service",
            ):
                conn.execute(statement.encode())
        yield server


def of(server: embedded.Server, role: str, database: str) -> str:
    return make_conninfo(server.url, user=role, dbname=database)


def test_an_owner_who_may_not_create_roles_is_told_what_an_administrator_runs(fresh):
    owner, app = of(fresh, "owner", "owned"), of(fresh, "app", "owned")
    with (
        connection.connect(app) as conn,
        pytest.raises(PgQueueError, match="permission denied for database owned") as no,
    ):
        schema.install(conn)
    assert "`create` on the database" in str(no.value.hint)
    with connection.connect(owner) as conn:
        schema.install(conn)
        with pytest.raises(
            PgQueueError, match="owner may not create the role pgqueue_producer"
        ) as no:
            schema.grant(conn, "producer", "app")
        assert "create role pgqueue_producer nologin; create role" in str(no.value.hint)
    made = next(text for tag, text in blocks_of(PAGE) if "create role" in text)
    for statement in made.strip().splitlines():
        with connection.connect(of(fresh, "service", "owned")) as service:
            service.execute(statement.encode())
    with connection.connect(owner) as conn:
        conn.execute("select pgqueue.create_roles()")
        with pytest.raises(PgQueueError, match="permission denied to grant role") as no:
            schema.grant(conn, "observer", "app")
        assert "grant pgqueue_observer to app" in str(no.value.hint)
        conn.execute("call pgqueue.maintain_all()")
    with spark_pgqueue.connect(owner) as queue:
        queue.create_stream("s")
        queue.create_consumer("s", "c")
        queue.send("s", "by the owner")
    with spark_pgqueue.connect(app) as queue:
        queue.send_batch("s", ["x" * (3 << 20)])  # by COPY
        claim = queue.receive("s", "c", 10)
        assert claim is not None
        assert claim.ack() == 2
        with pytest.raises(PgQueueError, match="permission denied"):
            queue.create_stream("t")


def test_the_role_of_a_service_that_creates_roles_can_do_all(fresh):
    """After the other test, whose roles it takes over; as a second database of a server does."""
    service = of(fresh, "service", "administered")
    with connection.connect(service) as conn:
        schema.install(conn)
        schema.grant(conn, "admin", "app")
        schema.install(conn)
    with spark_pgqueue.connect(of(fresh, "app", "administered")) as queue:
        queue.create_stream("s")
        assert [stream.name for stream in queue.streams()] == ["s"]
    with connection.connect(service) as conn:
        schema.uninstall(conn)
        with pytest.raises(psycopg.errors.InvalidSchemaName):
            conn.execute("select pgqueue.schema_version()")


def test_login_roles_that_could_not_connect_are_refused(alone):
    """By who installs and does not own the database, whose owner keeps others out."""
    with connection.connect(alone.url) as conn:
        for statement in (
            "create role owner login",
            "create role guest login createrole",
            "create database closed owner owner",
            "revoke connect on database closed from public",
            "grant connect, create on database closed to guest",
        ):
            conn.execute(statement.encode())
    roles = (ROOT / "spark_pgqueue/deploy/roles.sql").read_bytes()
    with connection.connect(of(alone, "guest", "closed")) as conn:
        schema.install(conn)
        with pytest.raises(
            psycopg.Error, match="queue_producer may not connect to database closed"
        ):
            conn.execute(roles)
    with psycopg.connect(make_conninfo(alone.url, dbname="closed"), autocommit=True) as conn:
        conn.execute(roles)
        (may,) = conn.execute(
            "select has_database_privilege('queue_producer', 'closed', 'connect')"
        ).fetchone() or (None,)
    assert may
