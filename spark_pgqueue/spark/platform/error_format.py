"""The format of errors in Spark, with the message of `PgQueueError` first.

A Python process of Spark sends an error to the JVM as its traceback, whose last lines are our
message. With SPARK_HIDE_TRACEBACK in its environment, the process sends only these lines. A
`PgQueueError` has a hint, so the variable is set when such an error is raised, and never for other
errors: the process ends with the error.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from pyspark.sql.datasource import DataSourceStreamReader

from spark_pgqueue.postgres.errors import PgQueueError
from spark_pgqueue.spark.platform.pyspark_compat import SupportsTriggerAvailableNow

T = TypeVar("T", bound=type)


def plain_errors(cls: T) -> T:
    """Let Spark show the errors of a class's public methods plainly."""
    for name, method in list(vars(cls).items()):
        if inspect.isfunction(method) and not name.startswith("_"):
            setattr(cls, name, _later(method) if name == "streamReader" else _plain(method))
    return cls


def _later(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a reader that raises the error later, for `streamReader`.

    When making the reader fails, Spark's process still tries to stop the reader, and then shows
    that failure instead.
    """

    @functools.wraps(method)
    def call(*arguments: Any, **named: Any) -> Any:
        try:
            return method(*arguments, **named)
        except PgQueueError as error:
            return _Refused(error)

    return call


def _plain(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*arguments: Any, **named: Any) -> Any:
        with _plainly():
            result = method(*arguments, **named)
        return _each(result) if isinstance(result, Iterator) else result

    return call


def _each(items: Iterator[Any]) -> Iterator[Any]:
    with _plainly():
        yield from items


@contextmanager
def _plainly() -> Iterator[None]:
    try:
        yield
    except PgQueueError:
        os.environ["SPARK_HIDE_TRACEBACK"] = "1"
        raise


@plain_errors
class _Refused(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """A reader that could not be made, and raises its error at every call."""

    def __init__(self, error: PgQueueError):
        self._error = error

    def latestOffset(self, start: Any = None, limit: Any = None) -> Any:
        raise self._error

    initialOffset = getDefaultReadLimit = prepareForTriggerAvailableNow = latestOffset
    partitions = read = latestOffset  # type: ignore[assignment]
