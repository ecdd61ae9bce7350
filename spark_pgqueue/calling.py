"""Calls functions of the user, such as handlers and hooks.

A call must run the body of its function. `check` refuses functions whose calls never do, before the
first message. The return value decides about the others: an awaitable is awaited, an exception is
raised, and an object that stands for work not done is an error.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import re
import sys
import traceback
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from concurrent.futures import Future
from functools import partial
from types import FunctionType, MethodType
from typing import Any

from spark_pgqueue.postgres.errors import PgQueueError
from spark_pgqueue.postgres.forks import OfThisThread
from spark_pgqueue.postgres.url import redact

_PLAIN = (str, int, float, bool, type(None))
_BOXES = (dict, list, tuple, set, frozenset, deque)
# An iterator with one of these gives access to finished work: an open file, a cursor.
_HANDLES = ("__enter__", "__aenter__", "fetchone")
_MANAGERS = (contextlib._GeneratorContextManager, contextlib._AsyncGeneratorContextManager)


@contextlib.contextmanager
def _manager() -> Iterator[None]:
    yield


@contextlib.asynccontextmanager
async def _async_manager() -> AsyncIterator[None]:
    yield


# All functions that contextlib's decorators make have the code of these.
_MADE = {
    _manager.__code__: "context manager",
    _async_manager.__code__: "asynchronous context manager",
}

CONNECTION = {"connection", "conn"}
"""The names by which a function declares the argument that is the connection."""

_COUNTS = ("no arguments", "one argument", "two arguments")

_loops = OfThisThread()


def name_of(function: Any) -> str:
    """The name of a callable."""
    bare = bare_function(function)
    return getattr(function, "__qualname__", None) or getattr(bare, "__qualname__", repr(bare))


def kind_of(function: Any) -> str:
    """What a call returns: "coroutine", "generator", "asynchronous generator", "context manager",
    "asynchronous context manager", or "" for anything else.
    """
    bare = bare_function(function)
    if isinstance(bare, type):
        has = set(dir(bare))
        if "__await__" in has:
            return ""
        if "__enter__" in has:
            return "context manager"
        return "asynchronous context manager" if "__aenter__" in has else ""
    if inspect.isasyncgenfunction(bare):
        return "asynchronous generator"
    if inspect.isgeneratorfunction(bare):
        return "generator"
    # The mark of a coroutine function may be on either.
    if inspect.iscoroutinefunction(bare) or inspect.iscoroutinefunction(function):
        return "coroutine"
    return _MADE.get(bare.__code__, "") if isinstance(bare, FunctionType) else ""


def is_async(function: Any) -> bool:
    """Whether a call returns a coroutine, as far as is known before it."""
    return kind_of(function) == "coroutine"


def check(
    name: str,
    function: Any,
    given: Iterable[str] | None = None,
    *,
    hint: str | None = None,
    is_wrap: bool = False,
) -> None:
    """Refuse a function whose body no call would run.

    Args:
        name: the option, for the error.
        function: the function.
        given: a description of each argument, for the error; None if they are not known.
        hint: the hint for arguments that do not match.
        is_wrap: whether a call has to return a context manager.

    Raises:
        PgQueueError: not a function, a body that would not run, or other parameters.
    """
    if not callable(function):
        raise PgQueueError(f"{name} must be a function, not {type(function).__name__}")
    kind, bare = kind_of(function), bare_function(function)
    known = {"__call__", "__await__"} & {*dir(bare)} if isinstance(bare, type) else set()
    if not kind and known == {"__call__"}:
        raise PgQueueError(
            f"{name} must be a function whose body runs when it is called:"
            f" {name_of(function)} returns an object that is never called",
            hint=f"pass the object: {bare.__name__}(...)",
        )
    if kind.endswith("generator") or (kind.endswith("manager") and not is_wrap):
        way_out = "decorate it with @contextlib.contextmanager" if is_wrap else "leave out yield"
        raise PgQueueError(
            f"{name} must be a function whose body runs when it is called:"
            f" {name_of(function)} returns a{'n' * kind.startswith('a')} {kind}",
            hint=way_out,
        )
    if given is not None:
        _check_arguments(name, function, list(given), hint)


def call(function: Callable[..., Any], *given: Any) -> Any:
    """Call a function in this thread. A coroutine runs in a loop that the thread keeps, see
    `end_loop`.

    Returns:
        the final return value, as in `returned`.
    """
    here = os.getpid()
    try:
        return _done(function, returned(function(*given)))
    finally:
        _end_child_of(here)


async def call_async(function: Callable[..., Any], *given: Any) -> Any:
    """As `call`, in the running loop."""
    here = os.getpid()
    try:
        return _done(function, await returned_async(function(*given)))
    finally:
        _end_child_of(here)


def check_no_loop(hint: str = "await run_async, or use the asynchronous client") -> None:
    """Refuse to wait for a coroutine in a thread with a running loop, which would be blocked.

    Args:
        hint: what to do instead.

    Raises:
        PgQueueError: a loop is running in this thread.
    """
    with contextlib.suppress(RuntimeError):  # no loop runs
        asyncio.get_running_loop()
        raise PgQueueError(
            "a coroutine cannot run here: this thread already runs an event loop", hint=hint
        )


class OnLoop:
    """Calls as `call` does, but a coroutine runs in a loop of another thread.

    Args:
        loop: that loop.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self._loop = loop
        self._running: Future[Any] | None = None
        self._is_cancelled = False

    def __call__(self, function: Callable[..., Any], *given: Any) -> Any:
        value = function(*given)
        if inspect.isawaitable(value):
            self._running = asyncio.run_coroutine_threadsafe(returned_async(value), self._loop)
            if self._is_cancelled:  # in the meantime
                self._running.cancel()
            value = self._running.result()
        return _done(function, returned(value))

    def cancel(self) -> None:
        """Cancel the running coroutine, and all later ones."""
        self._is_cancelled = True
        if self._running is not None:
            self._running.cancel()


def _end_child_of(caller: int) -> None:
    """End this process if the function has forked and this is the child.

    Only the parent may report the outcome and handle other messages.
    """
    if os.getpid() == caller:
        return
    error = sys.exception()
    code = error.code if isinstance(error, SystemExit) else int(error is not None)
    if code == 1 and error is not None and not isinstance(error, SystemExit):
        text = redact("".join(traceback.format_exception(error)), 10_000)
        print(text, file=sys.stderr)
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


def returned(value: Any) -> Any:
    """The final return value of a call, after awaiting it where needed.

    Raises:
        BaseException: the exception that the call returned.
        PgQueueError: the value must be awaited, and a loop is running in this thread.
    """
    while True:
        if isinstance(value, Future):
            value = value.result()
        elif inspect.isawaitable(value):
            try:
                loop = _loop()
            except PgQueueError:
                _close(value)
                raise
            value = loop.run(_awaited(value))
        else:
            return _raised(value)


async def returned_async(value: Any) -> Any:
    """As `returned`, in the running loop."""
    while True:
        if isinstance(value, Future):
            value = asyncio.wrap_future(value)
        if not inspect.isawaitable(value):
            return _raised(value)
        value = await value


def end_loop() -> None:
    """Close the loop of this thread, if `call` made one and it is not running."""
    loop = getattr(_loops, "kept", None)
    if loop is not None and not loop.get_loop().is_running():
        _loops.kept = None
        loop.close()


def enter(stack: contextlib.ExitStack, wrap: Callable[..., Any] | None, given: Any) -> None:
    """Enter the context manager that the option wrap returns for a message.

    Raises:
        PgQueueError: it returned something else, or an asynchronous context manager.
    """
    if wrap is not None:
        manager = returned(wrap(given))
        if not isinstance(manager, contextlib.AbstractContextManager):
            raise _no_manager(wrap, manager)
        stack.enter_context(manager)


async def enter_async(
    stack: contextlib.AsyncExitStack, wrap: Callable[..., Any] | None, given: Any
) -> None:
    """As `enter`, in the running loop, also for an asynchronous context manager."""
    if wrap is not None:
        manager = await returned_async(wrap(given))
        if isinstance(manager, contextlib.AbstractContextManager):
            stack.enter_context(manager)
        elif isinstance(manager, contextlib.AbstractAsyncContextManager):
            await stack.enter_async_context(manager)
        else:
            raise _no_manager(wrap, manager)


def bare_function(function: Any) -> Any:
    """The function that a partial, a method or an object with `__call__` finally calls."""
    while True:
        if isinstance(function, partial):
            function = function.func
        elif isinstance(function, MethodType | staticmethod):
            function = function.__func__
        else:
            inner = getattr(type(function), "__call__", None)  # noqa: B004
            known = isinstance(inner, FunctionType | MethodType | partial)
            if isinstance(function, FunctionType | type) or not known:
                return function
            function = inner


def _check_arguments(name: str, function: Any, given: list[str], hint: str | None) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # not known for some functions in C
        return
    shown = f"the {name} {name_of(function)}{signature} must accept"
    the = [re.sub("^an? ", "the ", each) for each in given]
    try:
        signature.bind(*given)
    except TypeError as error:
        wanted = f"{_COUNTS[len(the)]}, {' and '.join(the)}".removesuffix(", ")
        raise PgQueueError(f"{shown} {wanted}: {error}", hint=hint) from None
    names = [*signature.parameters]
    if the[1:] == ["the connection"] and names[0] in CONNECTION:
        raise PgQueueError(
            f"{shown} {the[0]} as its first argument and the connection as its second",
            hint=f"define it as {name_of(function)}({', '.join([*names[1:2], names[0]])})",
        )


def _loop() -> asyncio.Runner:
    """The loop of this thread."""
    check_no_loop()
    if getattr(_loops, "kept", None) is None:
        _loops.kept = asyncio.Runner()
    return _loops.kept


async def _awaited(value: Any) -> Any:
    return await value


def _close(value: Any) -> None:
    """Close a coroutine that is never awaited: otherwise Python logs a warning."""
    if inspect.iscoroutine(value):
        value.close()


def _is_exception(value: Any) -> bool:
    return isinstance(value, BaseException) or (
        isinstance(value, type) and issubclass(value, BaseException)
    )


def _raised(value: Any) -> Any:
    """Return a value, or raise it if it is an exception."""
    if _is_exception(value):
        raise value
    return value


def _done(function: Callable[..., Any], value: Any) -> Any:
    """Return a return value, unless it shows that work was not done.

    Raises:
        PgQueueError: it is, or contains, an object that nothing would run.
    """
    if isinstance(value, _PLAIN):
        return value
    why = _undone(value) or next(
        (f"in a {type(b).__name__}, {why}" for b, each in _within(value) if (why := _lost(each))),
        None,
    )
    if why:
        raise PgQueueError(
            f"{name_of(function)} returned {why}", hint="do the work, and return its result"
        )
    return value


def _within(value: Any) -> Iterator[tuple[Any, Any]]:
    """All elements of nested collections, each with its collection."""
    boxes, seen = [value], set()
    while boxes:
        box = boxes.pop()
        if isinstance(box, _BOXES) and id(box) not in seen:  # one may contain itself
            seen.add(id(box))
            for each in box.values() if isinstance(box, dict) else box:
                yield box, each
                if isinstance(each, _BOXES):
                    boxes.append(each)


def _lost(value: Any) -> str | None:
    """Why an element of a return value is not a result; None if it is one."""
    if isinstance(value, _PLAIN):
        return None
    if inspect.isawaitable(value) or isinstance(value, Future):
        _close(value)
        return f"an awaitable that is never awaited: {type(value).__name__}"
    if _is_exception(value):
        kind = value if isinstance(value, type) else type(value)
        return f"an exception that is never raised: {kind.__name__}"
    return _undone(value)


def _undone(value: Any) -> str | None:
    """The kind of a value that stands for work not begun; None for other values."""
    if isinstance(value, FunctionType | MethodType | partial):
        return "a function that is never called"
    if isinstance(value, _MANAGERS):
        return "a context manager that is never entered"
    if isinstance(value, Iterator | AsyncIterator) and not any(
        hasattr(type(value), name) for name in _HANDLES
    ):
        return f"an iterator that is never read: {type(value).__name__}"
    return None


def _no_manager(wrap: Callable[..., Any], found: Any) -> PgQueueError:
    return PgQueueError(
        f"wrap must return a context manager: {name_of(wrap)} returned a {type(found).__name__}",
        hint="an asynchronous context manager requires an async handler",
    )
