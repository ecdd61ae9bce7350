"""A crew of asyncio tasks: calls of a handler that is awaited."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from typing import Any

import psycopg

from spark_pgqueue.postgres.url import conninfo
from spark_pgqueue.worker.attempts import ACK, Hooks, failed, json_of, lost
from spark_pgqueue.worker.board import Board, Job, Messages, Slot
from spark_pgqueue.worker.options import Options
from spark_pgqueue.worker.verdicts import Fate, Outcome, Retry, of_result

AsyncHandler = Callable[..., Awaitable[Any]]


class Tasks:
    """So many tasks at a time, in the loop that is running.

    Args:
        board: where the jobs are.
        handler: called with a message, or with a list of them; and with a connection, where it is
            transactional.
        options: those of the worker.
        hooks: to be called after a call.
        url: of the connections that a transactional handler gets.
    """

    def __init__(
        self, board: Board, handler: AsyncHandler, options: Options, hooks: Hooks, url: str | None
    ):
        self._board = board
        self._handler = handler
        self._options = options
        self._hooks = hooks
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_over = False
        self._url = url
        self._connections: list[psycopg.AsyncConnection[Any]] = []  # at rest

    def start(self) -> None:
        """See `Crew`."""

    def feed(self) -> None:
        """See `Crew`. Called by another thread than the loop's."""
        self._loop.call_soon_threadsafe(self._begin)

    def next_timeout(self) -> float | None:
        """See `Crew`: tasks look after that by themselves."""
        return None

    def give_up(self, now: float) -> list[tuple[Job, Messages]]:
        """See `Crew`: what is over its time is cancelled."""
        return []

    def end(self) -> None:
        """See `Crew`."""
        self._loop.call_soon_threadsafe(self._cancel)

    async def join(self) -> None:
        """Wait until all of them are over, and close their connections."""
        while self._tasks:
            await asyncio.wait(self._tasks)
        for conn in self._connections:
            await conn.close()

    def _begin(self) -> None:
        todo = self._board.todo
        while len(self._tasks) < self._options.slots and not self._board.is_closed:
            try:
                job = todo.popleft()
            except IndexError:
                return
            task = self._loop.create_task(self._work(job))
            self._tasks.add(task)
            task.add_done_callback(self._go_on)

    def _go_on(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._begin()

    def _cancel(self) -> None:
        self._is_over = True
        for task in self._tasks:
            task.cancel()

    async def _work(self, job: Job) -> None:
        calls = Slot(self._board).calls(job)
        messages = next(calls, None)
        while messages is not None:
            outcome, result = await self._call(job.claim.claim_id, messages)
            self._hooks.after(messages, outcome, result)
            try:
                messages = calls.send(outcome)
            except StopIteration:
                break

    async def _call(self, claim_id: int, messages: Messages) -> tuple[Outcome, Any]:
        options = self._options
        given = messages[0] if options.batch is None else list(messages)
        seconds = None if options.timeout is None else options.timeout.total_seconds()
        time = asyncio.timeout(seconds)
        try:
            async with time:
                with options.wrap(given) if options.wrap else nullcontext():
                    if options.transactional:
                        return await self._in_transaction(claim_id, messages, given)
                    result = await self._handler(given)
                    return of_result(result), result
        except TimeoutError as error:
            if time.expired():
                return Retry(reason=f"timed out after {options.timeout}"), error
            return failed(messages, error), error
        except BaseException as error:
            if self._is_over:  # cancelled, and given back
                raise
            return failed(messages, error), error

    async def _in_transaction(
        self, claim_id: int, messages: Messages, given: Any
    ) -> tuple[Outcome, Any]:
        """As `Attempt` does it, on one of the connections that are at rest, or a new one."""
        conn = self._connections.pop() if self._connections else await self._connect()
        try:
            async with conn.transaction() as transaction:
                result = await self._handler(given, conn)
                seqs = None if self._options.batch is not None else [m.seq for m in messages]
                ack = [claim_id, seqs, json_of(of_result(result))]
                cursor = await conn.execute(ACK, ack)
                (count,) = await cursor.fetchone() or (0,)
                if count < len(messages):
                    raise psycopg.Rollback(transaction)
        finally:
            if conn.closed or conn.broken:
                await conn.close()
            else:
                self._connections.append(conn)
        return (Fate.settled, result) if count == len(messages) else (lost(messages), None)

    async def _connect(self) -> psycopg.AsyncConnection[Any]:
        # As `connection.connect` does; who waits for a restart is the message, by its retries.
        return await psycopg.AsyncConnection.connect(
            conninfo(self._url), autocommit=True, prepare_threshold=None
        )
