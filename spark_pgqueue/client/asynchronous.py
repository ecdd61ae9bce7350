"""The client for asyncio: all methods of `Client`, to be awaited, with the same arguments.

They are made of those of `Client`, which a thread of its own calls, so that no call is written
twice. What the loop does meanwhile is not kept waiting.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial, wraps
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast

from spark_pgqueue.client.client import Client, connect
from spark_pgqueue.client.groups import Group
from spark_pgqueue.client.results import Claim
from spark_pgqueue.postgres.retrying import PATIENCE
from spark_pgqueue.postgres.wake import Wake

_END = object()


async def connect_async(url: str | None = None, *, patience: float = PATIENCE) -> AsyncClient:
    """Connect to the database of a queue, for asyncio.

    Arguments and errors as in `connect`.

        >>> async def main():
        ...     async with await spark_pgqueue.connect_async(url) as queue:
        ...         claim = await queue.receive("orders", "billing", max_messages=100)
        ...         return await claim.ack()
        >>> asyncio.run(main())
        2
    """
    line = _Line()
    try:
        return AsyncClient(
            await line.call(partial(connect, url, patience=patience, _wake=line.wake)), line
        )
    except BaseException:
        line.close()
        raise


class _Line:
    """Calls, one after the other, in a thread."""

    def __init__(self):
        self.wake = Wake()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="pgqueue")
        self._lock = threading.Lock()
        self._at: object = None
        self.is_open = True

    async def call(self, function: Callable[[], Any]) -> Any:
        """Call a function there. If that is cancelled, it waits for no message any more."""
        token = object()
        future = self._thread.submit(self._call, token, function)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            with self._lock:
                if self._at is token:
                    self.wake.set()
            self._thread.submit(_give_back, future)
            raise

    def close(self) -> None:
        """End the thread, when all calls are over."""
        self.is_open = False
        self._thread.submit(self.wake.close)
        self._thread.shutdown(wait=False)

    def _call(self, token: object, function: Callable[[], Any]) -> Any:
        with self._lock:
            self._at = token
            self.wake.clear()
        try:
            return function()
        finally:
            with self._lock:
                self._at = None


def _give_back(future: Future[Any]) -> None:
    """Return a claim that its caller has not heard of."""
    if not future.cancelled() and future.exception() is None and isinstance(future.result(), Claim):
        future.result().nack(reason="who asked for it was cancelled")


class AsyncClient:
    """A queue, over one connection, for asyncio: see `Client`. Made by `connect_async`.

    Each method of `Client` is one of these, with the same arguments, and is awaited; those that
    iterate are for `async for`. So are the methods of claims: `await claim.ack()`.

    Tasks can share a client, and then wait for each other; `transaction` is for one task. A call
    that is cancelled may have taken effect; but a claim that nobody heard of is given back.
    """

    def __init__(self, client: Client, line: _Line):
        self._client = client
        self._line = line

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[AsyncClient]:
        """Make the calls inside one transaction: see `Client.transaction`."""
        context = self._client.transaction()
        await self._line.call(context.__enter__)
        try:
            yield self
        except BaseException as error:
            leave = partial(context.__exit__, type(error), error, error.__traceback__)
            if not await self._line.call(leave):
                raise
        else:
            await self._line.call(partial(context.__exit__, None, None, None))

    async def close(self) -> None:
        """Close the connection. Safe to repeat."""
        if self._line.is_open:
            await self._line.call(self._client.close)
            self._line.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def _call(self, function: Callable[[], Any]) -> Any:
        found = await self._line.call(function)
        if isinstance(found, Claim):
            return AsyncClaim(found.claim_id, found.messages, cast("Any", self))
        return AsyncGroup(found, self._line) if isinstance(found, Group) else found

    async def _iterate(self, function: Callable[[], Any]) -> AsyncIterator[Any]:
        items = await self._line.call(function)
        try:
            while (item := await self._line.call(partial(next, items, _END))) is not _END:
                yield item
        finally:
            await self._line.call(items.close)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Callable[..., Any]: ...


class AsyncClaim(Claim):
    """A claim, for asyncio: see `Claim`. Its methods have the same arguments, and are awaited."""


class AsyncGroup:
    """A group, for asyncio: see `Group`. Made by `AsyncClient.group`."""

    def __init__(self, group: Group, line: _Line):
        self._group = group
        self._line = line

    @wraps(Group.run)
    async def run(self, *arguments: Any, **named: Any) -> int:
        return await self._line.call(partial(self._group.run, *arguments, **named))

    @wraps(Group.stop)
    def stop(self) -> None:
        self._group.stop()


def _awaited(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    async def call(self: AsyncClient, *arguments: Any, **named: Any) -> Any:
        return await self._call(partial(method, self._client, *arguments, **named))

    return call


def _iterated(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def call(self: AsyncClient, *arguments: Any, **named: Any) -> AsyncIterator[Any]:
        return self._iterate(partial(method, self._client, *arguments, **named))

    return call


for _name, _method in inspect.getmembers(Client, inspect.isfunction):
    if not _name.startswith("_") and _name not in AsyncClient.__dict__:
        _iterates = str(inspect.signature(_method).return_annotation).startswith("Iterator[")
        setattr(AsyncClient, _name, (_iterated if _iterates else _awaited)(_method))
