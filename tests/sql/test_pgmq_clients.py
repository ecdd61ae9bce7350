"""Clients of pgmq on PyPI with the settings that sql/guide/pgmq.md names, beside pgmq itself."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable
from datetime import datetime
from typing import Any

import psycopg
import pytest

from tests.sql.queue import Conn
from tests.sql.test_pgmq import pgmq as pgmq

sqlalchemy = pytest.importorskip("sqlalchemy")
asyncpg = pytest.importorskip("asyncpg")
psycopg_pool = pytest.importorskip("psycopg_pool")
client = pytest.importorskip("pgmq", reason="pgmq is not installed")
tembo = pytest.importorskip("tembo_pgmq_python", reason="tembo-pgmq-python is not installed")
tembo_async = pytest.importorskip("tembo_pgmq_python.async_queue")
by_sqlalchemy = pytest.importorskip("pgmq_sqlalchemy", reason="pgmq-sqlalchemy is not installed")


class Tembo(tembo.PGMQueue):
    def _initialize_extensions(self, conn: Any = None) -> None:
        pass


class AsyncTembo(tembo_async.PGMQueue):
    async def init(self) -> None:
        self.pool = await pool_of({**vars(self)})


def pool_of(fields: dict[str, Any]) -> Any:
    return asyncpg.create_pool(
        host=fields["host"], port=fields["port"], database=fields["database"],
        user=fields["username"], password=fields["password"],
    )  # fmt: skip


def engine_of(fields: dict[str, Any], driver: str) -> Any:
    query = {"host": fields["host"], "port": fields["port"]}
    return sqlalchemy.URL.create(
        f"postgresql+{driver}", fields["username"], database=fields["database"], query=query
    )


async def with_pool(fields: dict[str, Any]) -> Any:
    return client.AsyncPGMQueue(init_extension=False, pool=await pool_of(fields))


CLIENTS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "pgmq": lambda fields: client.PGMQueue(init_extension=False, **fields),
    "pgmq async": with_pool,
    "pgmq sqlalchemy": lambda fields: client.SQLAlchemyPGMQueue(
        init_extension=False, engine=sqlalchemy.create_engine(engine_of(fields, "psycopg"))
    ),
    "pgmq sqlalchemy async": lambda fields: client.SQLAlchemyAsyncPGMQueue(
        init_extension=False,
        engine=sqlalchemy.ext.asyncio.create_async_engine(engine_of(fields, "asyncpg")),
    ),
    "tembo": lambda fields: Tembo(**fields),
    "tembo async": lambda fields: AsyncTembo(**fields),
    "pgmq-sqlalchemy": lambda fields: by_sqlalchemy.PGMQueue(
        engine=sqlalchemy.create_engine(engine_of(fields, "psycopg"))
    ),
}
"""Each client by its name, from the fields of a connection."""
MISREAD = {"tembo", "tembo async", "pgmq-sqlalchemy"}
"""Those that take columns by their place before pgmq 1.10: a time is what they call the message."""


def fields_of(conn: Conn) -> dict[str, Any]:
    at = conn.info
    return {"host": at.host, "port": str(at.port), "database": at.dbname,
            "username": at.user, "password": at.password or "x"}  # fmt: skip


async def done(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


async def answers(name: str, conn: Conn) -> list[Any]:
    """What a client answers to the calls of a worker, or the kind of its error."""
    queue = await done(CLIENTS[name](fields_of(conn)))
    if hasattr(queue, "init"):
        await done(queue.init())
    try:
        return [each async for each in answers_of(queue)]
    finally:
        at = getattr(queue, "pool", None) or queue.engine
        await done(at.dispose() if hasattr(at, "dispose") else at.close())


async def answers_of(queue: Any) -> AsyncIterator[Any]:
    await done(queue.create_queue("mail"))
    for n in range(3):
        yield await done(queue.send("mail", {"n": n}))
    try:
        read = await done(queue.read("mail", vt=30))
    except ValueError as error:
        yield type(error)
        return
    yield read.msg_id
    yield datetime if isinstance(read.message, datetime) else read.message
    yield await done(queue.archive("mail", read.msg_id))
    yield await done(queue.delete("mail", 2))
    yield (await done(queue.metrics("mail"))).queue_length


@pytest.mark.parametrize("name", CLIENTS)
@pytest.mark.promise("pgmq: each client of PyPI with its setting, beside pgmq itself")
def test_a_client_with_its_setting_gets_what_pgmq_gives(face: Conn, pgmq: Conn, name: str) -> None:
    here, there = (asyncio.run(answers(name, conn)) for conn in (face, pgmq))
    assert here == there
    assert here[:3] == [1, 2, 3]
    is_right = here[3:] == [1, {"n": 0}, True, True, 1]
    assert is_right == (name not in MISREAD)


def test_by_its_defaults_a_client_creates_an_extension_that_is_not_there(face: Conn) -> None:
    with (
        psycopg_pool.ConnectionPool(face.info.dsn) as pool,
        pytest.raises(psycopg.Error, match='extension "pgmq" is not available'),
    ):
        client.PGMQueue(pool=pool, **fields_of(face))
