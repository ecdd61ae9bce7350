"""A stream, sessions and a reader; and a look at the tables when a test is over."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from psycopg.conninfo import make_conninfo

from spark_pgqueue.postgres import connection, schema
from tests import conftest
from tests.conftest import GivenServer, Server
from tests.sql import checker
from tests.sql.explaining import check_explanations
from tests.sql.queue import Conn, Reader, Session, consumer, one, value
from tests.sql.table_writes import target


@pytest.fixture
def url(
    request: pytest.FixtureRequest, server: Server, template: str, _templates: dict[Any, str]
) -> Iterator[str]:
    """The url of a fresh database with the schema, and the stream s for tests that ask for it."""
    if "stream" in request.fixturenames:
        if (made := _templates.get((server.url, template))) is None:
            url = next(conftest._database(server, template))
            with connection.connect(url) as conn:
                value(conn, "create_stream", "s")
                made = _templates[server.url, template] = conn.info.dbname
        template = made
    yield from conftest._database(server, template)


@pytest.fixture
def own_server(server: Server) -> Server:
    """The server, which the test may restart."""
    if isinstance(server, GivenServer):
        pytest.skip("PGQUEUE_TEST_URL names a server that tests cannot restart")
    return server


@pytest.fixture
def stream(conn: Conn) -> int:
    """The text stream s, which `url` has; its id. It is new: a first segment is as old as it."""
    set_new = "update pgqueue.streams set created_at = clock_timestamp() where name = 's'"
    return one(conn, f"{set_new} returning stream_id")


@pytest.fixture
def allowed_afterwards(conn: Conn, stream: int) -> Iterator[None]:
    """The test leaves the tables in a state that the invariants allow."""
    yield
    checker.check(conn)
    check_explanations(conn)


@pytest.fixture
def session(url: str) -> Iterator[Session]:
    """Opens another session, which is closed at the end of the test."""
    with ExitStack() as stack:
        yield lambda: stack.enter_context(connection.connect(url))


@pytest.fixture
def opened(session: Session) -> Session:
    """Opens another session, and in it a transaction."""

    def begin() -> Conn:
        opened = session()
        opened.execute("begin")
        return opened

    return begin


@pytest.fixture
def reader(conn: Conn, stream: int) -> Reader:
    """A new checkpoint of the consumer c, which is made for it."""
    return Reader(conn, consumer(conn))


@pytest.fixture
def bills(conn: Conn) -> dict[str, Any]:
    """The table public.bills, and a write that merges rows into it and deletes some."""
    conn.execute(
        "create table public.bills (id bigint primary key, amount numeric(10, 2), version int)"
    )
    columns = {"id": "bigint", "amount": "decimal(10,2)", "version": "int", "gone": "boolean"}
    return target("public.bills", columns, ["id"], sequence_by="version", delete_when="gone")


@pytest.fixture
def new_role(conn: Conn) -> Iterator[Callable[[], str]]:
    """Makes a role without any right; returns its name, which is its password."""
    names: list[str] = []

    def make() -> str:
        names.append(f"pgqueue_test_{uuid.uuid4().hex[:12]}")
        conn.execute(f"create role {names[-1]} login password '{names[-1]}'".encode())
        return names[-1]

    yield make
    for name in names:
        conn.execute(f"drop owned by {name} cascade; drop role {name}".encode())


@pytest.fixture
def writer(conn: Conn, url: str, new_role: Callable[[], str]) -> Iterator[Conn]:
    """A session of a role that may publish, and nothing else."""
    name = new_role()
    schema.grant(conn, "producer", name)
    with connection.connect(make_conninfo(url, user=name, password=name)) as writer:
        yield writer
