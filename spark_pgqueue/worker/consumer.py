"""The worker: a handler that is called for each message of a consumer."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any

from psycopg.conninfo import make_conninfo

from spark_pgqueue.client import arguments
from spark_pgqueue.client.results import Message
from spark_pgqueue.postgres.errors import PgQueueError
from spark_pgqueue.postgres.retrying import PATIENCE
from spark_pgqueue.postgres.url import parse
from spark_pgqueue.postgres.wake import Wake
from spark_pgqueue.worker.attempts import Attempt, Hooks, is_async
from spark_pgqueue.worker.board import Board, Job, Slot
from spark_pgqueue.worker.keeper import Keeper
from spark_pgqueue.worker.options import Options
from spark_pgqueue.worker.processes import Child
from spark_pgqueue.worker.signals import stopped_by_signals
from spark_pgqueue.worker.tasks import Tasks
from spark_pgqueue.worker.threads import Threads
from spark_pgqueue.worker.verdicts import Fate

logger: logging.Logger = logging.getLogger("spark_pgqueue.worker")


class Consumer:
    """A worker of a consumer.

        >>> billing = spark_pgqueue.Consumer(url, "orders", "billing")
        >>> billing.run(lambda message: print(message.data), wait=timedelta(0))
        order 1
        order 2
        2

    Args:
        url: a libpq URI or conninfo string; None for libpq's environment and service files.
        stream: the stream's name.
        name: the consumer's name.
        worker: what claims, history and dead letters say of who it was; by default the machine and
            the number of the process, or the application_name of url.
        patience: seconds to go on trying to connect for at first. Later a connection that is lost
            is made again, however long that takes.

    Raises:
        PgQueueError: an argument of the wrong type.
    """

    def __init__(
        self,
        url: str | None,
        stream: str,
        name: str,
        *,
        worker: str | None = None,
        patience: float = PATIENCE,
    ):
        self._url = _named(url, arguments.maybe(arguments.text, "worker", worker))
        self._stream = arguments.text("stream", stream)
        self._name = arguments.text("name", name)
        self._patience = patience
        self._keepers: set[Keeper] = set()

    def __repr__(self) -> str:
        return f"<consumer {self._name!r} of stream {self._stream!r}>"

    def run(self, handler: Callable[..., Any], **options: Any) -> int:
        """Call a handler for each message, until `stop`, SIGTERM or SIGINT.

        A message is acknowledged when the handler has returned. It raises `Retry` for a message
        that failed, `Reject` for one to be dead-lettered; any other exception is as Retry, with
        the exception as the reason. With ordering, messages of a key are worked on one after the
        other, those of other keys beside them.

        To stop, messages that were not begun are given back, and calls that run may end within
        `grace`. A second signal stops at once. (Signals come to the main thread alone.)

            >>> def bill(message):
            ...     if message.key == "customer 8":
            ...         raise spark_pgqueue.Reject("no such customer")
            ...     print("billed", message.data)
            >>> billing = spark_pgqueue.Consumer(url, "orders", "billing")
            >>> billing.run(bill, wait=timedelta(0))
            billed order 1
            2

        Args:
            handler: called with a `Message`; a function, or one that is awaited.
            options: keywords:
                concurrency (int): so many calls at a time, in threads; by default one. A handler
                    that is awaited: in tasks of one loop.
                processes (int): so many calls at a time, each in a process of its own. One that
                    dies has failed the message that it had, and is replaced. The handler must be a
                    function of a module.
                batch (int): the handler is called with a list of up to so many messages. An error
                    is one of all of them, unless it names `messages`.
                prefetch (int): claim at most so many messages that are not begun, 500 by default.
                    As many are claimed as will be begun within a tenth of a second.
                transactional (bool): the handler is called with a connection too, which is in a
                    transaction; that ends with the acknowledgement, or is undone. So what it does
                    there happens once. It must not commit. Of a batch with an error that names
                    `messages` the others are given back: what was done for them is undone too.
                timeout (timedelta): of a call. A message that takes longer has failed: its process
                    is killed, its task cancelled. A thread cannot be ended; it goes on, another one
                    takes its place, and what it returns is ignored.
                grace (timedelta): for the calls that run when it is stopped; 25 s by default.
                visibility_timeout (timedelta): after how long other workers take over from one
                    that died; None for the consumer's. Claims are extended meanwhile.
                wait (timedelta): the run ends when there was nothing for so long; None for never.
                on_start, on_stop: called without arguments, before the first and after the last
                    message.
                on_success, on_failure: called after the handler, with the message and what it
                    returned, or its error: not for messages that were given back.
                wrap: called with the message; returns a context manager to be entered around the
                    handler, for a span or a timer.

        Returns:
            how many messages were handled, one way or the other.

        Raises:
            PgQueueError: an option that is not allowed, PQ001 unknown stream, PQ002 unknown
                consumer, no connection at first, and what has no connection with messages.
        """
        if is_async(handler):
            return asyncio.run(self.run_async(handler, **options))
        chosen = _options(options)
        _check_handler(handler)
        hooks = Hooks(chosen)
        timeout = None if chosen.timeout is None else chosen.timeout.total_seconds()
        with self._kept(chosen, hooks) as (keeper, board, wake):

            def attempt() -> Attempt | Child:
                attempt = Attempt(handler, chosen, self._url)
                return attempt if chosen.processes is None else Child(attempt, chosen.timeout)

            crew = Threads(board, chosen.slots, attempt, hooks, timeout)
            with stopped_by_signals(keeper.stop, wake.writable):
                keeper.run(crew)
        return keeper.handled

    async def run_async(self, handler: Callable[..., Any], **options: Any) -> int:
        """The same in the loop that is running, for a handler that is awaited.

        Where the task is cancelled, it stops, and cancels the calls that run.

            >>> async def bill(message):
            ...     await asyncio.sleep(0)
            >>> billing = spark_pgqueue.Consumer(url, "orders", "billing")
            >>> asyncio.run(billing.run_async(bill, concurrency=100, wait=timedelta(0)))
            2

        Args:
            handler: called with a `Message`, and awaited.
            options: as in `run`, but for processes. The connection of a transactional handler is
                psycopg's AsyncConnection.

        Returns:
            as `run`; so are the errors.
        """
        chosen = _options(options)
        _check_handler(handler)
        if not is_async(handler):
            raise PgQueueError(
                "handler must be awaited: an async function", hint="for others there is `run`"
            )
        if chosen.processes is not None:
            raise PgQueueError("processes are for handlers that are not awaited")
        hooks = Hooks(chosen)
        with self._kept(chosen, hooks) as (keeper, board, _):
            crew = Tasks(board, handler, chosen, hooks, self._url)
            with stopped_by_signals(keeper.stop):
                kept = asyncio.get_running_loop().run_in_executor(None, keeper.run, crew)
                try:
                    await asyncio.shield(kept)
                except asyncio.CancelledError:
                    keeper.stop(0)
                    await kept
                    raise
                finally:
                    await crew.join()
        return keeper.handled

    def listen(self, **options: Any) -> Iterator[Message]:
        """Iterate over messages, one at a time.

        A message is done when the next one is asked for, and acknowledged a moment later. Who
        leaves the loop, by break or by an error, gives back the message at hand and those that
        were claimed ahead. The claim is extended meanwhile, by a thread.

            >>> billing = spark_pgqueue.Consumer(url, "orders", "billing")
            >>> for message in billing.listen(wait=timedelta(0)):
            ...     print(message.data)
            order 1
            order 2

        Args:
            options: prefetch, visibility_timeout and wait, as in `run`.

        Raises:
            PgQueueError: as `run`.
        """
        allowed = ("prefetch", "visibility_timeout", "wait")
        if unknown := sorted(set(options) - set(allowed)):
            raise PgQueueError(f"listen has no option {unknown[0]!r}: {', '.join(allowed)}")
        return self._listen(_options(options))

    def stop(self) -> None:
        """End all runs, from another thread, a handler of a signal, or the handler itself.

        >>> billing = spark_pgqueue.Consumer(url, "orders", "billing")
        >>> billing.run(lambda message: billing.stop() if message.seq == 2 else None)
        2
        """
        for keeper in list(self._keepers):
            keeper.stop()

    def _listen(self, options: Options) -> Iterator[Message]:
        with self._kept(options, Hooks(options)) as (keeper, board, _):
            failed: list[BaseException] = []

            def keep() -> None:
                try:
                    keeper.run(_Nobody())
                except BaseException as error:
                    failed.append(error)

            thread = threading.Thread(target=keep, name="pgqueue keeper", daemon=True)
            thread.start()
            slot = Slot(board)
            try:
                while (job := board.take()) is not None:
                    yield from _messages(slot, job)
            finally:
                keeper.stop(0)
                thread.join()
            if failed:
                raise failed[0]

    @contextmanager
    def _kept(
        self, options: Options, hooks: Hooks
    ) -> Generator[tuple[Keeper, Board, Wake], None, None]:
        """A keeper and its board, for one run, and the hooks around it."""
        wake = Wake()
        board = Board(wake)
        keeper = Keeper(
            self._url, self._stream, self._name, options, hooks, board, wake, self._patience
        )
        self._keepers.add(keeper)
        try:
            yield keeper, board, wake
        finally:
            self._keepers.discard(keeper)
            wake.close()
            if options.on_stop is not None:
                options.on_stop()


class _Nobody:
    """The crew of `listen`: the caller works by itself."""

    def start(self) -> None: ...
    def feed(self) -> None: ...
    def next_timeout(self) -> None: ...
    def end(self) -> None: ...

    def give_up(self, now: float) -> list[Any]:
        return []


def _messages(slot: Slot, job: Job) -> Iterator[Message]:
    """The messages of a job, one after the other: each is done when the next is asked for."""
    calls = slot.calls(job)
    messages = next(calls, None)
    while messages is not None:
        outcome = Fate.unstarted
        try:
            yield messages[0]
            outcome = Fate.done
        finally:
            try:
                messages = calls.send(outcome)
            except StopIteration:
                messages = None


def _named(url: str | None, worker: str | None) -> str:
    """The url with the name of a worker, for who looks at claims."""
    given = {key: value for key, value in parse(url).items() if key != "application_name"}
    if worker is None:
        worker = parse(url).get("application_name") or os.environ.get("PGAPPNAME")
    name = worker or f"{socket.gethostname()} {os.getpid()}"
    return make_conninfo("", **given, application_name=name)


def _options(given: dict[str, Any]) -> Options:
    names = Options.__dataclass_fields__
    for name in given:
        if name not in names:
            raise PgQueueError(f"there is no option {name!r}", hint=f"there are {', '.join(names)}")
    return Options(**given)


def _check_handler(handler: Any) -> None:
    if not callable(handler):
        raise PgQueueError(f"handler must be a function, not {type(handler).__name__}")
