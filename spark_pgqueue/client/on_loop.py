"""Client calls over an asynchronous connection of the caller.

A call runs in a thread, where the code of the client may block. The thread passes each statement to
the event loop, which runs it on the caller's connection, in the caller's transaction.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Awaitable, Callable, Collection, Generator, Sequence
from concurrent.futures import CancelledError as CancelledFuture
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, LiteralString, cast

import psycopg
from psycopg.rows import RowFactory, tuple_row

from spark_pgqueue.client import arguments
from spark_pgqueue.client.client import Client, log_warnings_of
from spark_pgqueue.client.unseen import give_back
from spark_pgqueue.postgres.errors import PgQueueError
from spark_pgqueue.postgres.loading import load_nearest, plain
from spark_pgqueue.postgres.statements import Statements, took_effect


class CallersLine:
    """Runs calls over the caller's connection, one at a time.

    Args:
        connection: an open connection, which stays open.

    Raises:
        PgQueueError: the connection is not an AsyncConnection of psycopg.
    """

    stop: None = None
    client: Client

    def __init__(self, connection: psycopg.AsyncConnection[Any]):
        if not isinstance(connection, psycopg.AsyncConnection):
            raise PgQueueError(
                f"connection must be a psycopg.AsyncConnection, not {type(connection).__name__}",
                hint="for a psycopg.Connection, use Client; on a connection of another driver, "
                "call the SQL function: select pgqueue.send(...)",
            )
        self._coroutines = _Coroutines()
        statements = _Statements(connection, self._coroutines.run)
        self.client = Client(cast("Any", connection), _statements=statements)
        # Not the loop's executor: calls that wait for each other's locks could use all its threads.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="pgqueue")
        self._turn = asyncio.Lock()

    async def call(self, function: Callable[[], Any]) -> Any:
        """Run a function in a thread. A cancelled call ends after its current statement, and then
        settles what it holds.
        """
        self.client._statements.check_process()
        async with self._turn:
            self._coroutines.begin()
            running = self._begun(function)
            try:
                return await asyncio.shield(running)
            except asyncio.CancelledError:
                self._coroutines.cancel()
                await _over(running)
                self._coroutines.begin()
                await _over(self._begun(partial(give_back, running)))
                raise

    def _begun(self, function: Callable[[], Any]) -> asyncio.Future[Any]:
        within = contextvars.copy_context()
        return asyncio.get_running_loop().run_in_executor(self._thread, within.run, function)

    async def finish(self, function: Callable[[], Any]) -> Any:
        """As `call`, but the function runs even if the caller is cancelled."""
        return await asyncio.shield(asyncio.ensure_future(self.call(function)))


class _Coroutines:
    """Runs coroutines in the event loop, for the call in the thread. It refers to no client, so
    that a client without references, and its thread, end without a full garbage collection.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._running: asyncio.Task[Any] | None = None
        self._is_cancelled = False

    def begin(self) -> None:
        """Begin a call, in the running loop."""
        self._loop, self._is_cancelled = asyncio.get_running_loop(), False

    def cancel(self) -> None:
        """Raise CancelledError in the call once, in the running coroutine or in place of the next.
        A call that catches it can still run others.
        """
        self._is_cancelled = True
        if self._running is not None:
            self._running.cancel()

    def run(self, work: Callable[[], Awaitable[Any]]) -> Any:
        """Run a coroutine in the loop, and return the result."""
        assert self._loop is not None
        try:
            return asyncio.run_coroutine_threadsafe(self._do(work), self._loop).result()
        except CancelledFuture:  # an Exception, which code of the call may catch
            raise asyncio.CancelledError from None

    async def _do(self, work: Callable[[], Awaitable[Any]]) -> Any:
        self._running = asyncio.current_task()
        try:
            if self._is_cancelled:
                raise asyncio.CancelledError
            return await work()
        except asyncio.CancelledError:
            self._is_cancelled = False
            raise
        finally:
            self._running = None


async def _over(running: asyncio.Future[Any]) -> None:
    """Wait until a call has ended, even if the waiting task is cancelled repeatedly."""
    while not running.done():
        try:
            await asyncio.wait([running])
        except asyncio.CancelledError:
            continue
    if not running.cancelled():
        running.exception()  # retrieved: the caller gets the CancelledError


class _Statements(Statements):
    """Statements that run in the loop, for a thread that waits for them.

    Args:
        connection: the caller's.
        on_loop: runs a coroutine in the loop and returns the result.
    """

    def __init__(
        self,
        connection: psycopg.AsyncConnection[Any],
        on_loop: Callable[[Callable[[], Awaitable[Any]]], Any],
    ):
        super().__init__(
            connection=cast("Any", connection),
            names=arguments.name_of,
            prepare=log_warnings_of,
            previous=True,
        )
        self._connection = connection
        self._on_loop = on_loop

    def install(self, *, pgmq: bool = False, without: Collection[str] = ()) -> int:
        raise PgQueueError(
            "installing the schema requires a connection that the client opened",
            hint="run pgqueue install, or call install() of spark_pgqueue.connect(url)",
        )

    @contextmanager
    def _begun(self, conn: psycopg.Connection[Any]) -> Generator[None, None, None]:
        transaction = self._connection.transaction()
        self._on_loop(transaction.__aenter__)
        try:
            yield
        except BaseException as error:
            given = type(error), error, error.__traceback__
            if not self._on_loop(partial(transaction.__aexit__, *given)):
                raise
        else:
            self._on_loop(partial(transaction.__aexit__, None, None, None))

    def _attempt(
        self,
        sql: LiteralString,
        parameters: Sequence[Any],
        row_factory: RowFactory[Any],
        binary: bool,
        into: list[Any],
    ) -> list[Any]:
        with self.turn, self.explained():
            self._check(cast("Any", self._connection))
            into += self._on_loop(partial(self._rows, sql, parameters, row_factory, binary))
            return into

    def _first_row(self, sql: LiteralString) -> tuple[Any, ...] | None:
        return next(iter(self._on_loop(partial(self._rows, sql, (), tuple_row, False))), None)

    async def _rows(
        self,
        sql: LiteralString,
        parameters: Sequence[Any],
        row_factory: Any,
        binary: bool,
    ) -> list[Any]:
        # As `Statements` does: neither factories nor loaders of the caller's connection.
        cursor = plain(psycopg.AsyncCursor(self._connection, row_factory=row_factory))
        async with cursor:
            try:
                await cursor.execute(sql, parameters, binary=binary)
            except asyncio.CancelledError:
                if not took_effect(cursor):
                    raise
                # The statement ended before psycopg cancelled it: `CallersLine.call` undoes it.
            try:
                return await cursor.fetchall()
            except psycopg.DataError:  # a value that Python cannot hold
                if binary:
                    await cursor.execute(sql, parameters)
                return load_nearest(cursor, row_factory)
