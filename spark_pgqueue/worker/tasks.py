"""An executor of asyncio tasks, for a handler that is a coroutine function."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

import psycopg
from psycopg.rows import tuple_row

from spark_pgqueue import calling
from spark_pgqueue.postgres.connection import connect_async, in_open_transaction, odd_settings
from spark_pgqueue.postgres.errors import translated
from spark_pgqueue.worker.attempts import (
    ACK,
    RESET,
    ClaimLostError,
    Hooks,
    Losses,
    ack_of,
    failed,
    kept,
    set_again,
    timed_out,
)
from spark_pgqueue.worker.executor import Executor
from spark_pgqueue.worker.health import Pulse
from spark_pgqueue.worker.job_queue import Job, JobQueue, Messages, WorkerSlot, next_call
from spark_pgqueue.worker.options import Options
from spark_pgqueue.worker.verdicts import DeliveryState, Outcome, of_result

_BEAT_EVERY = 1.0  # seconds


class Tasks(Executor):
    """Runs calls in tasks of the running loop. Each task has a timeout of its own.

    Args:
        of: the stream and the consumer, for the log.
        queue: holds the jobs.
        handler: called with a message, or with a list of messages; a transactional handler also
            gets a connection.
        options: the worker's options.
        url: the database of the connections for a transactional handler.
        pulse: gets a beat of the loop each second, which a handler that blocks the loop delays.
    """

    def __init__(
        self,
        of: str,
        queue: JobQueue,
        handler: Callable[..., Any],
        options: Options,
        hooks: Hooks,
        url: str | None,
        pulse: Pulse,
    ):
        self._of = of
        self._queue = queue
        self._handler = handler
        self._options = options
        self._hooks = hooks
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._on_loop = calling.OnLoop(self._loop)
        self._is_over = False
        self._url = url
        self._connections: list[psycopg.AsyncConnection[Any]] = []  # idle
        self._losses = Losses(of)
        self._pulse = pulse
        self._beat()

    def _beat(self) -> None:
        self._pulse.beat("event loop")
        self._next_beat = self._loop.call_later(_BEAT_EVERY, self._beat)

    def start(self) -> None:
        """See `Executor`. Another thread than the loop's calls it."""
        self._on_loop(partial(self._hooks.run_async, "on_start"))

    def cancel_start(self) -> None:
        """End the hook on_start, if it still runs."""
        self._on_loop.cancel()

    def feed(self) -> None:
        """See `Executor`. Another thread than the loop's calls it."""
        self._loop.call_soon_threadsafe(self._begin)

    def end(self) -> None:
        self._loop.call_soon_threadsafe(self._cancel)

    async def join(self) -> None:
        """Wait until all tasks are over, and close their connections."""
        while self._tasks:
            await asyncio.wait(self._tasks)
        for conn in self._connections:
            await conn.close()
        self._next_beat.cancel()

    def _begin(self) -> None:
        todo = self._queue.todo
        slot = WorkerSlot(self._queue)
        while len(self._tasks) < self._options.slots and not self._queue.is_closed:
            try:
                slot.job = todo.popleft()
            except IndexError:
                return
            try:
                task = self._loop.create_task(self._work(slot, slot.job))
            except BaseException as error:
                slot.lose(error)
                raise
            self._tasks.add(task)
            task.add_done_callback(partial(self._go_on, slot))
            slot = WorkerSlot(self._queue)

    def _go_on(self, slot: WorkerSlot, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is not None and not self._is_over:
            slot.lose(error)
        self._begin()

    def _cancel(self) -> None:
        self._is_over = True
        for task in self._tasks:
            task.cancel()

    async def _work(self, slot: WorkerSlot, job: Job) -> None:
        calls = slot.calls(job)
        messages = next(calls, None)
        while messages is not None:
            outcome, result = await self._call(job.claim.claim_id, messages)
            try:
                await self._hooks.after_async(messages, outcome, result)
            finally:  # also where the handler has cancelled its own task
                messages = next_call(calls, outcome)

    async def _call(self, claim_id: int, messages: Messages) -> tuple[Outcome, Any]:
        options = self._options
        given = messages[0] if options.batch is None else list(messages)
        seconds = None if options.timeout is None else options.timeout.total_seconds()
        time = asyncio.timeout(seconds)
        result = None
        try:
            async with time, AsyncExitStack() as stack:
                await calling.enter_async(stack, options.wrap, given)
                if options.transactional:
                    return await self._in_transaction(claim_id, messages, given)
                result = await calling.call_async(self._handler, given)
            if time.expired():  # and the option wrap has suppressed the error
                raise TimeoutError
            return of_result(result, messages), result
        except TimeoutError as error:
            if time.expired():
                return timed_out(self._of, messages, options.timeout), error
            return failed(self._of, messages, error), error
        except BaseException as error:
            if self._is_over:  # cancelled, and returned
                raise
            return failed(self._of, messages, error), error

    async def _in_transaction(
        self, claim_id: int, messages: Messages, given: Any
    ) -> tuple[Outcome, Any]:
        """Do as `Attempt` does, on an idle connection or on a new one."""
        conn: psycopg.AsyncConnection[Any] | None = None
        before: dict[str, Any] = {}
        is_settled = False
        try:
            conn = self._connections.pop() if self._connections else await connect_async(self._url)
            async with conn.transaction():
                before = kept(conn)
                with in_open_transaction(conn):
                    result = await calling.call_async(self._handler, given, conn)
                ack = ack_of(claim_id, messages, self._options.batch is not None, result)
                set_again(conn, before)
                cursor = psycopg.AsyncClientCursor(conn, row_factory=tuple_row)
                with translated():
                    await cursor.execute(ACK, ack)
                while cursor.nextset():
                    pass
                (count,) = await cursor.fetchone() or (0,)
                if count < len(messages):
                    raise ClaimLostError
            is_settled = True
        except Exception as error:
            return self._losses.outcome(messages, error, conn), error
        finally:
            if conn is not None and not conn.closed and await _is_reset(conn, before, is_settled):
                self._connections.append(conn)
        return DeliveryState.settled, result


async def _is_reset(
    conn: psycopg.AsyncConnection[Any], before: dict[str, Any], is_settled: bool
) -> bool:
    """Reset the session after a handler, or close it. Returns whether it is open."""
    try:
        if not is_settled:
            set_again(conn, before)
            await conn.execute(RESET)
        if odd := odd_settings(conn.info):
            await conn.execute(odd)
    except BaseException as error:
        await conn.close()
        if not isinstance(error, Exception):
            raise
    return not conn.closed
