"""A stream, sessions and a reader; and a look at the tables when a test is over."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from spark_pgqueue.postgres import connection
from tests.sql import checker
from tests.sql.explaining import check_explanations
from tests.sql.queue import Conn, Reader, Session, consumer, value


@pytest.fixture
def stream(conn: Conn) -> int:
    """The text stream s; its id."""
    return value(conn, "create_stream", "s")


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
def reader(conn: Conn, stream: int) -> Reader:
    """A new checkpoint of the consumer c, which is made for it."""
    return Reader(conn, consumer(conn))
