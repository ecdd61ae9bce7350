"""The worker: a handler that is called for each message of a consumer."""

from __future__ import annotations

import asyncio
import inspect
import os
import socket
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, Unpack

from psycopg.conninfo import make_conninfo

from spark_pgqueue import calling, nearest
from spark_pgqueue.client import arguments
from spark_pgqueue.client.messages import Message
from spark_pgqueue.postgres.errors import PgQueueError
from spark_pgqueue.postgres.forks import Origin
from spark_pgqueue.postgres.retrying import PATIENCE
from spark_pgqueue.postgres.url import parse
from spark_pgqueue.postgres.wake_event import WakeEvent
from spark_pgqueue.worker.attempts import Attempt, Hooks
from spark_pgqueue.worker.executor import Executor
from spark_pgqueue.worker.health import Health, worst
from spark_pgqueue.worker.job_queue import Job, JobQueue, WorkerSlot, next_call
from spark_pgqueue.worker.meter import Meter
from spark_pgqueue.worker.options import ListenOptions, Options, RunOptions
from spark_pgqueue.worker.poller import Poller
from spark_pgqueue.worker.processes import Child
from spark_pgqueue.worker.signals import stopped_by_signals, waking
from spark_pgqueue.worker.tasks import Tasks
from spark_pgqueue.worker.threads import Threads
from spark_pgqueue.worker.verdicts import DeliveryState


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
        worker: the worker's name in claims, history and dead letters; by default the machine and
            the process number, or the application_name of url.
        patience: seconds to try for the first connection. A connection that is lost later is tried
            again without limit.

    Raises:
        PgQueueError: an argument has the wrong type.
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
        self._of = f"{self._stream!r}, {self._name!r}"
        self._meter = Meter(self._stream, self._name)
        self._pollers: set[Poller] = set()
        self._is_stopped = False  # before a run has begun

    def __repr__(self) -> str:
        return f"<consumer {self._name!r} of stream {self._stream!r}>"

    @property
    def health(self) -> Health:
        """The health of the runs of this object: `is_live`, `is_ready` and a readable `status`.

        Any thread may read it, for the application's own probe. `supervised` serves probes.

        >>> billing = spark_pgqueue.Consumer(url, "orders", "billing")
        >>> billing.health
        Health(is_live=True, is_ready=False, status='not running')
        """
        return worst(poller.pulse.health() for poller in list(self._pollers))

    def run(self, handler: Callable[..., Any], **options: Unpack[RunOptions]) -> int:
        """Call a handler for each message, until `stop`, SIGTERM or SIGINT.

        A message is acknowledged when the handler has returned. The handler raises `Retry` for a
        message that failed, and `Reject` to dead-letter it; any other exception counts as Retry,
        with the exception as the reason. An exception that is returned counts as raised. An
        awaitable return value is awaited. Returning an iterator or a function is a failure, because
        it would not be run. With ordering, the messages of a key are handled one after the other,
        and different keys in parallel.

        When the worker stops, messages that were not started are returned, and running calls have
        the time `grace` to finish. A signal stops all runs of the main thread's program, a second
        one at once. Earlier signal handlers are called, too, and restored after the last run; what
        they raise is raised then. (Only the main thread receives signals.)

            >>> def bill(message):
            ...     if message.key == "customer 8":
            ...         raise spark_pgqueue.Reject("no such customer")
            ...     print("billed", message.data)
            >>> billing = spark_pgqueue.Consumer(url, "orders", "billing")
            >>> billing.run(bill, wait=timedelta(0))
            billed order 1
            1

        Args:
            handler: called with a `Message`; a function, or a coroutine function.
            options: keywords:
                concurrency (int): the number of concurrent calls, in threads; by default one. A
                    coroutine function runs in tasks of one event loop.
                processes (int): the number of concurrent calls, each in its own process. When a
                    process crashes, its message fails, and the process is replaced. The handler
                    must be a function of a module.
                batch (int): the handler is called with a list of at most this many messages. An
                    error applies to all of them, unless it names `messages`.
                prefetch (int): claim at most this many messages ahead, 500 by default. The worker
                    claims as many messages as it will start within a tenth of a second.
                prefetch_bytes (int): claim ahead only while the claimed data, estimated by the mean
                    of the last claims, has at most this many bytes; 64 MiB by default. A free slot
                    still gets a message.
                transactional (bool): the handler is also called with a connection that is in a
                    transaction. It commits together with the acknowledgement, or rolls back, so
                    its effects happen once. The handler must not commit. After an error that names
                    `messages` of a batch, the other messages are returned, because their effects
                    are rolled back too.
                timeout (timedelta): the maximum run time of a call. A message that takes longer
                    fails: its process is killed, or its task cancelled. A thread cannot be killed:
                    it keeps running, another replaces it, and its return value is ignored.
                grace (timedelta): the time for running calls after a stop; 25 s by default.
                visibility_timeout (timedelta): how long after a crash other workers take over the
                    messages; None for the consumer's. A running worker extends its claims.
                wait (timedelta): the run ends when no message came for this time; None for never.
                signals (bool): whether SIGTERM and SIGINT stop the run, True by default.
                on_start, on_stop: called without arguments, before the first and after the last
                    message.
                on_success, on_failure: called after the handler, with the message and the return
                    value or the error, but not for messages that were returned. These and those
                    before may be coroutine functions.
                wrap: called with the message, or the list of a batch; returns a context manager
                    that is entered around the handler, for a span or a timer. Around a coroutine
                    function, it may be asynchronous.

        Returns:
            how many messages were handled and acknowledged; those that failed do not count.

        Raises:
            PgQueueError: an option is not allowed, PQ001 unknown stream, PQ002 unknown consumer,
                the first connection could not be made, or an error that no message caused.
        """
        if calling.is_async(handler):
            calling.check_no_loop()
            return asyncio.run(self.run_async(handler, **options))
        chosen = options_of(options)
        check_handler(handler, chosen)
        check_annotations(handler, chosen)
        hooks = Hooks(self._of, chosen)
        timeout = None if chosen.timeout is None else chosen.timeout.total_seconds()
        with self._polling(chosen, hooks) as (poller, queue, wake):

            def attempt() -> Attempt | Child:
                attempt = Attempt(self._of, handler, chosen, self._url)
                return attempt if chosen.processes is None else Child(attempt, chosen.timeout)

            executor = Threads(queue, chosen.slots, attempt, hooks, timeout)
            try:
                with ExitStack() as stack:
                    if chosen.signals:
                        stack.enter_context(stopped_by_signals(poller.stop, wake.writable))
                    poller.run(executor)
            finally:
                try:
                    hooks.run("on_stop")
                finally:
                    calling.end_loop()
        return poller.handled

    async def run_async(self, handler: Callable[..., Any], **options: Unpack[RunOptions]) -> int:
        """Run a coroutine function as the handler, in the running loop; otherwise as `run`.

        When the task is cancelled, the worker stops, and cancels the running calls.

            >>> async def bill(message):
            ...     await asyncio.sleep(0)
            >>> billing = spark_pgqueue.Consumer(url, "orders", "billing")
            >>> asyncio.run(billing.run_async(bill, concurrency=100, wait=timedelta(0)))
            2

        Args:
            handler: called with a `Message`, and awaited: a coroutine function, which may be
                decorated by `functools.wraps`.
            options: as in `run`, without processes. The connection of a transactional handler is a
                psycopg AsyncConnection.

        Returns:
            as `run`. The errors are the same, too.
        """
        chosen = options_of(options)
        # A function that only decorates one that is awaited returns something to await.
        is_async = calling.is_async(handler) or calling.is_async(inspect.unwrap(handler))
        check_handler(handler, chosen, is_async=is_async)
        check_annotations(handler, chosen)
        if not is_async:
            raise PgQueueError(
                "handler must be an async function", hint="for a synchronous handler, use `run`"
            )
        if chosen.processes is not None:
            raise PgQueueError("processes require a synchronous handler")
        hooks = Hooks(self._of, chosen)
        with self._polling(chosen, hooks) as (poller, queue, _):
            executor = Tasks(self._of, queue, handler, chosen, hooks, self._url, poller.pulse)
            loop = asyncio.get_running_loop()
            with ExitStack() as stack:
                if chosen.signals:
                    woken = stack.enter_context(waking(loop))
                    stack.enter_context(stopped_by_signals(poller.stop, woken, is_async=True))
                # A thread of its own: those of the loop are few, and the handlers'.
                thread = ThreadPoolExecutor(1, thread_name_prefix="pgqueue poller")
                stack.callback(thread.shutdown, wait=False)
                kept = loop.run_in_executor(thread, poller.run, executor)
                try:
                    await asyncio.shield(kept)
                except asyncio.CancelledError:
                    poller.stop(0)
                    executor.cancel_start()
                    while not kept.done():  # however often the task is cancelled
                        with suppress(asyncio.CancelledError):
                            await asyncio.wait([kept])
                    kept.result()
                    raise
                finally:
                    await executor.join()
                    await hooks.run_async("on_stop")
        return poller.handled

    def listen(self, **options: Unpack[ListenOptions]) -> Iterator[Message]:
        """Iterate over messages, one at a time.

        A message is done when the loop requests the next, and acknowledged soon after. Leaving
        the loop, by break or by an error, returns the current message and the messages that
        were claimed ahead. A thread extends the claims while the loop runs.

            >>> billing = spark_pgqueue.Consumer(url, "orders", "billing")
            >>> for message in billing.listen(wait=timedelta(0)):
            ...     print(message.data)
            order 1
            order 2

        Args:
            options: prefetch, prefetch_bytes, visibility_timeout and wait, as in `run`.

        Raises:
            PgQueueError: as `run`.
        """
        return self._listen(options_of(options, ListenOptions.__annotations__))

    def stop(self) -> None:
        """End all runs; or the next run, if none has begun. The run after that is not stopped.

        May be called from another thread, a signal handler, or the handler.

        >>> billing = spark_pgqueue.Consumer(url, "orders", "billing")
        >>> billing.run(lambda message: billing.stop() if message.seq == 2 else None)
        2
        """
        self._stop()

    def _stop(self, grace: float | None = None) -> None:
        self._is_stopped = True  # first: a run that begins now sees it
        for poller in list(self._pollers):
            poller.stop(grace)
            self._is_stopped = False

    def _listen(self, options: Options) -> Iterator[Message]:
        with self._polling(options, Hooks(self._of, options)) as (poller, queue, _):
            failed: list[BaseException] = []

            def keep() -> None:
                try:
                    poller.run(Executor())
                except BaseException as error:
                    failed.append(error)

            thread = threading.Thread(target=keep, name="pgqueue poller", daemon=True)
            thread.start()
            slot = WorkerSlot(queue)
            try:
                while (job := queue.take()) is not None:
                    yield from _messages(slot, job)
            finally:
                poller.stop(0)
                thread.join()
            if failed:
                raise failed[0]

    @contextmanager
    def _polling(
        self, options: Options, hooks: Hooks
    ) -> Generator[tuple[Poller, JobQueue, WakeEvent], None, None]:
        """A poller and its queue for one run."""
        wake = WakeEvent()
        queue = JobQueue(wake)
        poller = Poller(
            self._url,
            self._stream,
            self._name,
            options,
            hooks.of,
            queue,
            wake,
            self._patience,
            self._meter,
        )
        self._pollers.add(poller)
        if self._is_stopped:
            self._is_stopped = False
            poller.stop()
        try:
            yield poller, queue, wake
        finally:
            self._pollers.discard(poller)
            wake.close()


def _messages(slot: WorkerSlot, job: Job) -> Iterator[Message]:
    """The messages of a job, one after the other; requesting the next reports the last as done."""
    calls, origin = slot.calls(job), Origin()
    messages = next(calls, None)
    while messages is not None:
        outcome = DeliveryState.unstarted
        try:
            yield messages[0]
            # A child process lacks the thread with the connection.
            origin.check("the iteration", "begin one in the child: listen()")
            outcome = DeliveryState.done
        finally:
            messages = next_call(calls, outcome)


def _named(url: str | None, worker: str | None) -> str:
    """The url with the worker's name, which observers of claims see."""
    given = {key: value for key, value in parse(url).items() if key != "application_name"}
    if worker is None:
        worker = parse(url).get("application_name") or os.environ.get("PGAPPNAME")
    name = worker or f"{socket.gethostname()} {os.getpid()}"
    return make_conninfo("", **given, application_name=name)


def options_of(
    given: Mapping[str, Any], names: Iterable[str] = Options.__dataclass_fields__
) -> Options:
    """The options of a run.

    Raises:
        PgQueueError: there is no such option, or its value is not allowed.
    """
    for name in given:
        if name not in names:
            hint = nearest.option_hint(name, names)
            raise PgQueueError(f"unknown option {name!r}", hint=hint)
    return Options(**given)


def check_handler(handler: Any, options: Options, *, is_async: bool | None = None) -> None:
    """Refuse a handler that every call would fail with: all messages would become dead letters.

    Args:
        handler: the handler.
        options: the worker's options.
        is_async: whether the handler is awaited in a loop; None to find that out.

    Raises:
        PgQueueError: it is no function, its body would not run, or it does not take what it is
            called with; or the option wrap is not for it.
    """
    given = ["a list of messages" if options.batch is not None else "a message"]
    if options.transactional:
        given.append("a connection")
    calling.check(
        "handler",
        handler,
        given,
        hint="with the option transactional, it takes a connection, too; with batch, a list",
    )
    is_async = calling.is_async(handler) if is_async is None else is_async
    if not is_async and calling.kind_of(options.wrap) == "asynchronous context manager":
        raise PgQueueError(
            f"wrap must return a context manager: {calling.name_of(options.wrap)} returns an"
            " asynchronous one",
            hint="an asynchronous context manager requires an async handler",
        )


def check_annotations(handler: Any, options: Options) -> None:
    """As `ByName.check_annotations`, for a handler that is one; nothing for others."""
    # Here, so that Spark can pickle this module by value: a cached_property has a lock.
    from spark_pgqueue.worker.by_name import ByName

    if isinstance(handler, ByName):
        handler.check_annotations(options)
