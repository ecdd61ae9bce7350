"""SIGTERM and SIGINT stop a worker; the second signal stops it at once."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_STOP = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def stopped_by_signals(
    stop: Callable[[float | None], None], descriptor: int | None = None
) -> Iterator[None]:
    """Call `stop` at the first signal with None, and at each later signal with 0, for no grace.

    Outside of the main thread this does nothing: only the main thread gets signals.

    Args:
        stop: what to call.
        descriptor: written to at a signal, to wake a main thread that waits for it: the system may
            deliver the signal to another thread, which would not wake the main thread. None where
            an asyncio loop is running, which handles that.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    said = False

    def handle(*_: Any) -> None:
        nonlocal said
        stop(0.0 if said else None)
        said = True

    before = {number: signal.getsignal(number) for number in _STOP}
    woken = -1
    if descriptor is None:
        for number in _STOP:
            asyncio.get_running_loop().add_signal_handler(number, handle)
    else:
        woken = signal.set_wakeup_fd(descriptor, warn_on_full_buffer=False)
        for number in _STOP:
            signal.signal(number, handle)
    try:
        yield
    finally:
        if descriptor is None:
            for number in _STOP:
                asyncio.get_running_loop().remove_signal_handler(number)
        else:
            signal.set_wakeup_fd(woken)
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
