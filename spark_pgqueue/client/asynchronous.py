"""The client for asyncio: the methods of `Client`, awaited, with the same arguments.

They are generated from the methods of `Client`, which run in threads and do not block the loop.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import AsyncIterator, Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, asynccontextmanager, suppress
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

from psycopg import AsyncConnection

from spark_pgqueue import calling
from spark_pgqueue.client import arguments
from spark_pgqueue.client.calls.base import note_meant
from spark_pgqueue.client.client import Client, connect
from spark_pgqueue.client.consuming import Asked
from spark_pgqueue.client.groups import Group
from spark_pgqueue.client.messages import Claim
from spark_pgqueue.client.on_loop import CallersLine
from spark_pgqueue.client.unseen import give_back
from spark_pgqueue.postgres.errors import PgQueueError
from spark_pgqueue.postgres.forks import Origin
from spark_pgqueue.postgres.retrying import PATIENCE
from spark_pgqueue.postgres.wake_event import WakeEvent

_END = object()


async def connect_async(
    url: str | None = None, *, patience: float = PATIENCE, connections: int = 10
) -> AsyncClient:
    """Connect to the database of a queue, for asyncio.

    Arguments and errors as in `connect`, and `connections`: the maximum number of connections, at
    least 2. One is for calls that do not wait, the others are opened for calls that wait.

        >>> async def main():
        ...     async with await spark_pgqueue.connect_async(url) as queue:
        ...         claim = await queue.receive("orders", "billing", max_messages=100)
        ...         return await claim.ack()
        >>> asyncio.run(main())
        2
    """
    most = arguments.number("connections", connections, 2)
    lines = _Lines(partial(connect, url, patience=patience))
    return AsyncClient._connected(await lines.open(), lines, most - 1)


class _Line:
    """A connection, and a thread that runs calls over it one at a time."""

    client: Client

    def __init__(self):
        self.wake = WakeEvent()
        self.stop: Callable[[], None] | None = None
        """Ends the running call, where the wake event is not enough."""
        self.is_open = True
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="pgqueue")
        self._lock = threading.Lock()
        self._at: threading.Event | None = None
        self._origin = Origin()

    async def call(self, function: Callable[[], Any]) -> Any:
        """Run a function in the thread. If cancelled, the call stops waiting for messages."""
        token = threading.Event()
        future = self._submit(token, function)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            with self._lock:
                token.set()  # for a call that is about to begin
                if self._at is token:
                    self._interrupt()
            with suppress(RuntimeError):  # the thread has ended
                self._thread.submit(give_back, future)
            raise

    async def finish(self, function: Callable[[], Any]) -> Any:
        """As `call`, but the function runs even if the caller is cancelled."""
        return await asyncio.shield(asyncio.wrap_future(self._submit(threading.Event(), function)))

    async def close(self) -> None:
        """Close the connection and end the thread. A running call stops waiting."""
        if not self._origin.is_here:
            return
        with self._lock:
            self.is_open = False
            self._interrupt()
        try:
            await self.finish(self.client.close)
        finally:
            self.end()

    def afterwards(self, function: Callable[[], Any]) -> None:
        """Call a function after the running call has ended, whose caller may be cancelled."""
        with self._lock:
            is_busy = self._at is not None
        if is_busy:
            with suppress(RuntimeError):  # the thread has ended
                self._thread.submit(function)
                return
        function()

    def end(self) -> None:
        """End the thread after its calls have ended. Safe to repeat."""
        self.is_open = False
        with suppress(RuntimeError):  # the thread has ended
            self._thread.submit(self.wake.close)
        self._thread.shutdown(wait=False)

    def _submit(self, token: threading.Event, function: Callable[[], Any]) -> Future[Any]:
        self._origin.check("the client", "connect again in the child: await connect_async()")
        try:
            return self._thread.submit(self._call, token, function)
        except RuntimeError:  # the thread has ended
            raise PgQueueError("the connection is closed") from None

    def _call(self, token: threading.Event, function: Callable[[], Any]) -> Any:
        with self._lock:
            if token.is_set():
                raise asyncio.CancelledError
            self._at = token
            if self.is_open:
                self.wake.clear()
        try:
            return function()
        finally:
            with self._lock:
                self._at = None

    def _interrupt(self) -> None:
        if self.stop is not None:
            self.stop()
        self.wake.set()


class _Lines:
    """The lines of a client: one for calls that do not wait, the others for calls that wait.

    Args:
        connect: makes a connection.
    """

    def __init__(self, connect: Callable[..., Client]):
        self._connect = connect
        self._open: set[_Line] = set()
        self._idle: list[_Line] = []
        self._is_closed = False

    async def open(self, failed: Callable[[], Any] = lambda: None) -> _Line:
        """A new line. If it fails, the function is called once nothing connects any more."""
        line = _Line()
        try:
            line.client = await line.call(partial(self._connect, _wake=line.wake))
            if self._is_closed:
                await line.close()
                raise PgQueueError("the connection is closed")
        except BaseException:
            line.afterwards(failed)
            line.end()
            raise
        self._open.add(line)
        return line

    @asynccontextmanager
    async def waiting(self, turns: asyncio.Semaphore | None = None) -> AsyncIterator[_Line]:
        """A line for the exclusive use of one call.

        Args:
            turns: the call takes a turn, which ends when its line is idle: after a cancellation,
                later than the call. None: the line does not count.
        """
        loop = asyncio.get_running_loop()

        def end_turn() -> None:
            if turns is not None:
                with suppress(RuntimeError):  # the loop is closed
                    loop.call_soon_threadsafe(turns.release)

        def become_idle() -> None:
            self._idle.append(line)
            end_turn()

        if turns is not None:
            await turns.acquire()
        if self._is_closed:
            end_turn()
            raise PgQueueError("the connection is closed")
        line = self._idle.pop() if self._idle else await self.open(end_turn)
        try:
            yield line
        finally:
            line.stop = None
            line.afterwards(become_idle)

    async def close(self) -> None:
        """Close all lines. Safe to repeat."""
        self._is_closed = True
        while self._open:
            await self._open.pop().close()


def _begun(client: Client) -> AbstractContextManager[Client]:
    """A transaction, begun."""
    transaction = client.transaction()
    transaction.__enter__()
    return transaction


class _Steps:
    """The steps of an iteration, which run in a line's thread.

    Args:
        items: the iteration.
    """

    def __init__(self, items: Generator[Any, None, None]):
        self.is_asked = False
        """Whether the caller waits for an item."""
        self._items = items
        self._has_begun = False  # the step for that item

    def next(self) -> Any:
        """The next item, or _END."""
        self._has_begun = True
        return next(self._items, _END)

    def got(self) -> None:
        """Record that the caller received the item."""
        self.is_asked = self._has_begun = False

    def end(self) -> None:
        """End the iteration. An item that the caller did not receive counts as not delivered."""
        if not self.is_asked:
            self._items.close()
            return
        with suppress(asyncio.CancelledError, StopIteration):
            self._items.throw(asyncio.CancelledError() if self._has_begun else Asked())


class AsyncClient:
    """A queue, for asyncio: see `Client`. Made by `connect_async`, or with a connection of the
    caller, in whose transaction each call then takes part.

    It has all methods of `Client`, with the same arguments. Methods are awaited; methods that
    iterate are for `async for`. Methods of claims are awaited, too: `await claim.ack()`.

    Tasks may share a client. Calls that do not wait for messages share one connection, one at a
    time. A call that waits uses another connection and delays no other task; when all `connections`
    of `connect_async` are in use, it waits for one. An iteration with `wait`, and the run of a
    group, have a connection of their own, which does not count there.

    `transaction` is for one task. A cancelled call may have taken effect, but a claim that its
    caller did not receive is returned.

        >>> async def main():
        ...     async with await psycopg.AsyncConnection.connect(url) as connection:
        ...         await connection.execute("insert into bills values (3, 12)")
        ...         return await AsyncClient(connection).send("orders", "order 3")
        >>> asyncio.run(main())
        3

    Args:
        connection: an open AsyncConnection of psycopg. `close` leaves it open.

    Raises:
        PgQueueError: the connection is not psycopg's, or not asynchronous.
    """

    def __init__(self, connection: AsyncConnection[Any]):
        # No call opens another line: calls that would wait are refused.
        self._begin(CallersLine(connection), _Lines(connect), 1)

    @classmethod
    def _connected(cls, line: _Line, lines: _Lines, waits: int) -> AsyncClient:
        client = cls.__new__(cls)
        client._begin(line, lines, waits)
        return client

    def _begin(self, line: _Line | CallersLine, lines: _Lines, waits: int) -> None:
        self._client = line.client
        self._line = line
        self._lines = lines
        self._turns = asyncio.Semaphore(waits)

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[AsyncClient]:
        """Make the calls inside one transaction: see `Client.transaction`."""
        context = await self._line.call(partial(_begun, self._client))
        try:
            yield self
        except BaseException as error:
            leave = partial(context.__exit__, type(error), error, error.__traceback__)
            if not await self._line.finish(leave):
                raise
        else:
            await self._line.finish(partial(context.__exit__, None, None, None))

    async def close(self) -> None:
        """Close the connections. Calls that wait return as after a timeout."""
        await self._lines.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @asynccontextmanager
    async def _line_for(
        self, method: _Method, turns: asyncio.Semaphore | None
    ) -> AsyncIterator[_Line | CallersLine]:
        """The line for a call; a call that waits has a line of its own."""
        # In a transaction no call may wait: on the client's own line it raises the error.
        if method.waits and self._client._statements.can_wait:
            async with self._lines.waiting(turns) as line:
                yield line
        else:
            yield self._line

    async def _call(self, method: _Method) -> Any:
        async with self._line_for(method, self._turns) as line:
            found = await line.call(partial(method, line.client))
        if isinstance(found, Claim):
            return AsyncClaim(found.claim_id, found.messages, self)
        return AsyncGroup(method, self._lines) if isinstance(found, Group) else found

    async def _iterate(self, method: _Method) -> AsyncIterator[Any]:
        # An iteration does not count as a call that waits: it may have no end.
        async with self._line_for(method, None) as line:
            steps = _Steps(await line.call(partial(method, line.client)))
            try:
                steps.is_asked = True
                while (item := await line.call(steps.next)) is not _END:
                    steps.got()
                    yield item
                    steps.is_asked = True
            finally:
                with suppress(PgQueueError):  # `close` has ended the iteration before
                    await line.finish(steps.end)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Callable[..., Any]: ...


class AsyncClaim(Claim):
    """A claim, for asyncio: see `Claim`. Its methods have the same arguments, and are awaited."""


class AsyncGroup:
    """A group, for asyncio: see `Group`. Made by `AsyncClient.group`."""

    def __init__(self, method: _Method, lines: _Lines):
        self._method = method
        self._lines = lines
        self._running: set[Group] = set()

    @wraps(Group.run)
    async def run(self, *given: Any, **named: Any) -> int:
        async with self._lines.waiting() as line:
            group = self._method(line.client)
            group._call = calls = calling.OnLoop(asyncio.get_running_loop())
            line.stop = group.stop
            self._running.add(group)
            try:
                return await line.call(partial(group.run, *given, **named))
            except asyncio.CancelledError:
                calls.cancel()
                raise
            finally:
                self._running.discard(group)

    @wraps(Group.stop)
    def stop(self) -> None:
        for group in self._running:
            group.stop()


class _Method:
    """A call of a method of `Client`, on any client."""

    def __init__(self, method: Callable[..., Any], given: tuple[Any, ...], named: dict[str, Any]):
        try:
            bound = inspect.signature(method).bind(None, *given, **named).arguments
        except TypeError as error:
            note_meant(error, method, named)
            raise
        self.waits: bool = bound.get("wait") is not None or "timeout" in bound
        self._method = method
        self._given = given
        self._named = named

    def __call__(self, client: Client) -> Any:
        return self._method(client, *self._given, **self._named)


def _awaited(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    async def call(self: AsyncClient, *given: Any, **named: Any) -> Any:
        return await self._call(_Method(method, given, named))

    return call


def _iterated(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def call(self: AsyncClient, *given: Any, **named: Any) -> AsyncIterator[Any]:
        return self._iterate(_Method(method, given, named))

    return call


for _name, _method in inspect.getmembers(Client, inspect.isfunction):
    if not _name.startswith("_") and _name not in AsyncClient.__dict__:
        _iterates = str(inspect.signature(_method).return_annotation).startswith("Iterator[")
        setattr(AsyncClient, _name, (_iterated if _iterates else _awaited)(_method))
