"""Errors as Spark shows them: what is wrong comes first.

A Python process of Spark sends an error to the JVM as its traceback, whose last lines are what we
have to say. With SPARK_HIDE_TRACEBACK in its environment it sends these alone. A `PgQueueError`
says what to do about it, so that one is set when one is raised, and never for other errors: the
process ends with the error.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition

from spark_pgqueue.postgres.errors import PgQueueError
from spark_pgqueue.spark.versions import ReadLimit, SupportsTriggerAvailableNow

T = TypeVar("T", bound=type)


def plain_errors(cls: T) -> T:
    """Let what the methods of a class raise, which Spark calls, be shown plainly."""
    for name, method in list(vars(cls).items()):
        if inspect.isfunction(method) and not name.startswith("_"):
            setattr(cls, name, _later(method) if name == "streamReader" else _plain(method))
    return cls


def _later(method: Callable[..., Any]) -> Callable[..., Any]:
    """For what makes a stream's reader: Spark's process stops the reader even where there is none,
    and then shows that it failed to.
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
    """A reader that could not be made, and says why as soon as it is asked for anything."""

    def __init__(self, error: PgQueueError):
        self._error = error

    def initialOffset(self) -> dict:
        raise self._error

    def getDefaultReadLimit(self) -> ReadLimit:
        raise self._error

    def prepareForTriggerAvailableNow(self) -> None:
        raise self._error

    def latestOffset(self, start: dict | None = None, limit: ReadLimit | None = None) -> dict:
        raise self._error

    def partitions(self, start: dict, end: dict) -> list[InputPartition]:
        raise self._error

    def read(self, partition: InputPartition) -> Iterator[tuple]:
        raise self._error
