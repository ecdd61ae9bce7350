"""The decorator that assigns a function to a stream and a consumer, and running such functions."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from types import ModuleType
from typing import Any, NamedTuple, TypeVar, Unpack

from spark_pgqueue.calling import name_of
from spark_pgqueue.client import arguments
from spark_pgqueue.postgres.errors import PgQueueError
from spark_pgqueue.postgres.wake_event import WakeEvent
from spark_pgqueue.worker.by_name import by_name
from spark_pgqueue.worker.consumer import Consumer, check_handler, options_of
from spark_pgqueue.worker.log import LOGGER, warn
from spark_pgqueue.worker.options import RunOptions
from spark_pgqueue.worker.signals import stopped_by_signals
from spark_pgqueue.worker.supervision import supervised

F = TypeVar("F", bound=Callable[..., Any])

logger: logging.Logger = logging.getLogger(LOGGER)

_MARK = "_pgqueue_handles"
_LONG = 3600.0  # seconds; a signal, and the end of a worker, end the wait


class Handling(NamedTuple):
    """A function, and what it handles.

    Attributes:
        function: the function.
        stream: the stream's name.
        consumer: the consumer's name.
        options: as those of `Consumer.run`.
    """

    function: Callable[..., Any]
    stream: str
    consumer: str
    options: dict[str, Any]


def handler(
    stream: str, consumer: str, *, keywords: bool = False, **options: Unpack[RunOptions]
) -> Callable[[F], F]:
    """Name the stream and the consumer whose messages a function handles: a decorator.

    `pgqueue work app.jobs` runs all functions of the module app.jobs that have it. The function
    is not changed, and can be called as before.

        >>> @spark_pgqueue.handler("orders", "billing", concurrency=8)
        ... def bill(message):
        ...     print("billed", message.data)

    Args:
        stream: the stream's name.
        consumer: the consumer's name.
        keywords: call the function with the fields of the message's data, a JSON object, as
            its arguments, instead of the message: bill(order=7) for {"order": 7}.
        options: as those of `Consumer.run`; options of the command line take precedence.

    Raises:
        PgQueueError: an option is not allowed, or the function does not take what it is called
            with.
    """
    names = arguments.text("stream", stream), arguments.text("consumer", consumer)
    arguments.flag("keywords", keywords)
    chosen = options_of(options)

    def mark(function: F) -> F:
        called = by_name(function, chosen) if keywords else function
        check_handler(called, chosen)
        marks = getattr(function, "__dict__", {}).get(_MARK, [])
        try:
            setattr(function, _MARK, [*marks, (called, *names, options)])
        except (AttributeError, TypeError):
            raise PgQueueError(f"handler must be a function in Python, not {function!r}") from None
        return function

    return mark


def is_marked(function: Any) -> bool:
    """Whether a function has the decorator."""
    return _MARK in getattr(function, "__dict__", {})


def handlings(
    found: ModuleType | Callable[..., Any], instead: str = "give both on the command line"
) -> list[Handling]:
    """The handlers that a function is marked as, or all functions of a module, in source order.

    Args:
        found: the function, or the module.
        instead: how to do without the decorator, for the hint.

    Raises:
        PgQueueError: nothing has the decorator.
    """
    functions = vars(found).values() if isinstance(found, ModuleType) else [found]
    marked = {id(each): each for each in functions if is_marked(each)}
    if not marked:
        name = found.__name__ if isinstance(found, ModuleType) else name_of(found)
        raise PgQueueError(
            f"{name} does not name a stream and consumer",
            hint='put @spark_pgqueue.handler("STREAM", "CONSUMER") before a function, or '
            + instead,
        )
    return [Handling(*of) for each in marked.values() for of in vars(each)[_MARK]]


def _logged(each: Handling) -> dict[str, Any]:
    """The options of a handler, whose start is logged: the consumer exists, and may be read."""
    before = options_of(each.options).on_start

    def on_start() -> Any:
        name = name_of(each.function)
        logger.info("%r, %r: %s handles the messages", each.stream, each.consumer, name)
        return None if before is None else before()

    return {**each.options, "on_start": on_start}


def run_all(url: str | None, handled: Sequence[Handling], health: str | None = None) -> list[int]:
    """Run handlers, each with a worker of its own, until SIGTERM, SIGINT, or all are over.

    A third signal ends the process: an event loop with a call that blocks, or that suppresses its
    cancellation, does not end, nor do threads that its calls wait for.

    Args:
        url: as that of `Consumer`.
        handled: at least one.
        health: as that of `supervised`.

    Returns:
        for each, how many messages were handled.

    Raises:
        PgQueueError: as `Consumer.run`, of a worker that failed; the others are stopped then.
    """
    workers = [Consumer(url, each.stream, each.consumer) for each in handled]

    at_once = itertools.count()

    def stop(grace: float | None = None) -> None:
        if grace == 0 and next(at_once) > 0:
            warn("ended by a third signal, with calls that do not end")
            os._exit(1)
        for worker in workers:
            worker._stop(grace)

    with (
        supervised(*workers, health=health),
        closing(WakeEvent()) as wake,
        ThreadPoolExecutor(len(workers)) as threads,
    ):
        with stopped_by_signals(stop, wake.writable):
            running = [
                threads.submit(worker.run, each.function, **_logged(each))
                for worker, each in zip(workers, handled, strict=True)
            ]
            for future in running:
                future.add_done_callback(lambda _: wake.set())
            while not all(future.done() for future in running):
                wake.wait(_LONG)
                wake.clear()
                if any(future.done() and future.exception() for future in running):
                    stop()
        return [future.result() for future in running]
