"""SIGTERM and SIGINT stop the runs of a process; the second signal stops them immediately.

Handlers that the application has set for these signals are called, too, and restored after the last
run. Children that a handler forks have the handlers that they would have without the runs.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from types import FrameType
from typing import Any

from spark_pgqueue.postgres.forks import around_fork
from spark_pgqueue.postgres.wake_event import WakeEvent

_STOP = (signal.SIGTERM, signal.SIGINT)
_DEFAULT: dict[int, Any] = {
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGINT: signal.default_int_handler,
}


class _Run:
    """A run that signals stop."""

    def __init__(self, stop: Callable[[float | None], None]):
        self._stop = stop
        self._is_stopped = False

    def stop(self) -> None:
        grace = 0.0 if self._is_stopped else None
        self._is_stopped = True
        self._stop(grace)


class _Handler:
    """Stops all runs at a signal, and then calls the handler that was set before."""

    def __init__(self, number: int):
        self.before = signal.getsignal(number)
        self.is_over = False  # the application has set another, which may call this one

    def __call__(self, number: int, frame: FrameType | None) -> None:
        runs = [] if self.is_over else list(_runs)
        for run in runs:
            run.stop()
        if not callable(self.before) or _is_default(self.before):
            return
        try:
            self.before(number, frame)
        except BaseException as error:  # sys.exit() ends the program, after the runs
            if not runs:
                raise
            _raised.append(error)


# Only the main thread changes these.
_runs: list[_Run] = []
_handlers: dict[int, _Handler] = {}
_descriptors: list[int] = []  # of the runs; a signal writes to the last
_raised: list[BaseException] = []
_outer = -1  # the application's descriptor


@contextmanager
def stopped_by_signals(
    stop: Callable[[float | None], None],
    descriptor: int | None = None,
    *,
    is_async: bool = False,
) -> Iterator[None]:
    """Call `stop` at the first signal with None, and at each later signal with 0, for no grace.

    Outside of the main thread this does nothing: only the main thread gets signals.

    Args:
        stop: what to call.
        descriptor: written to at a signal, to wake a main thread that waits for it: the system may
            deliver the signal to another thread, which would not wake the main thread.
        is_async: whether a loop of asyncio runs, whose own descriptor wakes it as well.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    run = _Run(stop)
    _runs.append(run)
    for number in _STOP:
        _handle(number)
    if descriptor is not None:
        _wake_by(descriptor, is_async)
    try:
        yield
    finally:
        _runs.remove(run)
        if descriptor is not None:
            _wake_no_more_by(descriptor)
        if not _runs:
            for number in list(_handlers):
                _restore(number)
            if _raised:
                error = _raised[-1]
                _raised.clear()
                raise error


@contextmanager
def waking(loop: asyncio.AbstractEventLoop) -> Iterator[int]:
    """A descriptor that wakes a loop when something is written to it."""
    with closing(WakeEvent()) as wake:
        loop.add_reader(wake, wake.clear)
        try:
            yield wake.writable
        finally:
            loop.remove_reader(wake)


def _is_default(handler: Any) -> bool:
    """Whether a handler is Python's or asyncio's, which would interrupt the runs, or do nothing:
    asyncio calls what was given to `add_signal_handler` by the descriptor.
    """
    function = getattr(handler, "func", handler)
    module = getattr(function, "__module__", None) or ""
    return handler is signal.default_int_handler or module.startswith(("asyncio.", "uvloop."))


def _handle(number: int) -> None:
    """Set our handler for a signal, unless it is set, or the present one is not Python's."""
    found, mine = signal.getsignal(number), _handlers.get(number)
    if found is None or (mine is not None and found is mine):
        return
    if mine is not None:
        mine.is_over = True
    _handlers[number] = _Handler(number)
    signal.signal(number, _handlers[number])


def _restore(number: int) -> None:
    """Restore the handler that was set before, unless the application has set another one."""
    mine = _handlers.pop(number)
    mine.is_over = True
    if signal.getsignal(number) is mine:
        signal.signal(number, mine.before)


def _wake_by(descriptor: int, is_async: bool) -> None:
    global _outer
    found = signal.set_wakeup_fd(descriptor, warn_on_full_buffer=False)
    if found not in _descriptors:
        _outer = found
    if is_async and _outer != -1:  # it wakes the loop, which calls the application's handlers
        signal.set_wakeup_fd(found)
    _descriptors.append(descriptor)


def _wake_no_more_by(descriptor: int) -> None:
    _descriptors.remove(descriptor)
    found = signal.set_wakeup_fd(-1)
    if found != descriptor:  # another run's, or the application's
        before = found
    elif _descriptors:
        before = _descriptors[-1]
    else:
        before = _outer
    with suppress(ValueError, OSError):  # the application has closed it
        signal.set_wakeup_fd(before, warn_on_full_buffer=before not in _descriptors)


def _leave_to_child() -> None:
    """In a child: forget the runs, which are the parent's, and restore the signal handlers."""
    if not _runs:
        return
    signal.set_wakeup_fd(-1)
    _runs.clear()
    _descriptors.clear()
    for number, mine in list(_handlers.items()):
        if _is_default(mine.before):
            mine.before = _DEFAULT[number]
        _restore(number)


def _hold_back() -> set[Any] | None:
    """Block signals in the child until its own handlers are set."""
    return signal.pthread_sigmask(signal.SIG_BLOCK, _STOP) if _runs else None


def _let_through(before: set[Any] | None) -> None:
    if before is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


around_fork(_hold_back, _leave_to_child, _let_through)
