"""A stream, sessions and a reader; and a look at the tables when a test is over."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from spark_pgqueue.postgres import connection, schema
from tests import conftest
from tests.conftest import GivenServer, Server
from tests.sql import checker
from tests.sql.explaining import check_explanations
from tests.sql.queue import Conn, Reader, Session, consumer, one, value
from tests.sql.table_writes import target

MADE: dict[str, Callable[[Conn], object]] = {
    "stream": lambda conn: value(conn, "create_stream", "s"),
    "face": lambda conn: schema.install(conn, pgmq=True),
    "writer": lambda conn: value(conn, "create_roles"),
}
"""What a database has for a test that asks for the fixture: made once, and then copied."""


@pytest.fixture
def url(
    request: pytest.FixtureRequest, server: Server, template: str, _templates: dict[Any, str]
) -> Iterator[str]:
    """The url of a fresh database with the schema, and what `MADE` has for the test."""
    for name in [name for name in MADE if name in request.fixturenames]:
        key = server.url, f"{template} {name}"
        if key not in _templates:
            with connection.connect(next(conftest._database(server, template))) as conn:
                MADE[name](conn)
                conn.execute("update pgqueue.servers set database = null")  # as in `template`
                _templates[key] = conn.info.dbname
        template = _templates[key]
    yield from conftest._database(server, template)


@pytest.fixture
def face(conn: Conn) -> Conn:
    """A database with the schema pgmq."""
    return conn


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
    """Opens another session, which is closed at the end of the test, or by `session.close`."""
    with ExitStack() as stack:
        session = functools.partial(lambda: stack.enter_context(connection.connect(url)))
        session.close = stack.close  # type: ignore[attr-defined]
        yield session


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
def writer(new_role: Callable[..., str]) -> Iterator[Conn]:
    """A session of a role that may publish, and nothing else."""
    with connection.connect(new_role("producer")) as writer:
        yield writer
