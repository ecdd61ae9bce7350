"""The options of `Consumer.run` and its variants, checked once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypedDict

from spark_pgqueue import calling
from spark_pgqueue.client import arguments
from spark_pgqueue.postgres.errors import PgQueueError

MOST = 10_000
"""The highest number of slots, and of messages of a batch."""

_HOOKS: dict[str, list[str]] = {
    "on_start": [],
    "on_success": ["a message", "a result"],
    "on_failure": ["a message", "an error"],
    "on_stop": [],
    "wrap": ["a message"],
}
"""The options that are functions, and what each is called with."""


class ListenOptions(TypedDict, total=False):
    """The types of the options of `Consumer.listen`."""

    prefetch: int
    prefetch_bytes: int
    visibility_timeout: timedelta | None
    wait: timedelta | None


class RunOptions(ListenOptions, total=False):
    """The types of the options of `Consumer.run`: the fields of `Options`."""

    concurrency: int
    processes: int | None
    batch: int | None
    transactional: bool
    timeout: timedelta | None
    grace: timedelta
    on_start: Callable[[], Any] | None
    on_success: Callable[[Any, Any], Any] | None
    on_failure: Callable[[Any, BaseException], Any] | None
    on_stop: Callable[[], Any] | None
    wrap: Callable[[Any], Any] | None
    signals: bool


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of a worker; `Consumer.run` explains each.

    Raises:
        PgQueueError: an option has a value that is not allowed, or contradicts another option.
    """

    concurrency: int = 1
    processes: int | None = None
    batch: int | None = None
    prefetch: int = 500
    prefetch_bytes: int = 64 << 20
    transactional: bool = False
    timeout: timedelta | None = None
    grace: timedelta = timedelta(seconds=25)
    visibility_timeout: timedelta | None = None
    wait: timedelta | None = None
    signals: bool = True
    on_start: Callable[[], Any] | None = None
    on_success: Callable[[Any, Any], Any] | None = None
    on_failure: Callable[[Any, BaseException], Any] | None = None
    on_stop: Callable[[], Any] | None = None
    wrap: Callable[[Any], Any] | None = None

    def __post_init__(self) -> None:
        arguments.number("concurrency", self.concurrency, 1, MOST)
        arguments.maybe(lambda name, n: arguments.number(name, n, 1, 1000), "processes",
                        self.processes)  # fmt: skip
        arguments.maybe(lambda name, n: arguments.number(name, n, 1, MOST), "batch", self.batch)
        arguments.number("prefetch", self.prefetch, 0, 1_000_000)
        arguments.number("prefetch_bytes", self.prefetch_bytes, 0, 2**63 - 1)
        arguments.flag("transactional", self.transactional)
        arguments.flag("signals", self.signals)
        for name in ("timeout", "visibility_timeout"):
            value = arguments.maybe(arguments.duration, name, getattr(self, name))
            if value is not None and value <= timedelta():
                raise PgQueueError(f"{name} must be longer than 0, not {value}")
        arguments.patience("grace", self.grace)
        arguments.maybe(arguments.patience, "wait", self.wait)
        for name, given in _HOOKS.items():
            if getattr(self, name) is not None:
                calling.check(name, getattr(self, name), given, is_wrap=name == "wrap")
        if self.processes is not None and self.concurrency != 1:
            raise PgQueueError(
                "concurrency is for threads or asyncio tasks: a process runs one call at a time",
                hint="pass only processes: the number of concurrent calls",
            )

    @property
    def slots(self) -> int:
        """The number of calls of the handler that run at a time."""
        return self.processes or self.concurrency
