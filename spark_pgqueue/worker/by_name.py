"""Handlers that take the fields of a JSON object as arguments, and no message."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from spark_pgqueue.calling import check, is_async, name_of
from spark_pgqueue.client.messages import Message
from spark_pgqueue.postgres.errors import PgQueueError
from spark_pgqueue.worker.options import Options


class ByName:
    """A handler that calls a function with the fields of a message, and with a connection, if any.

    It is an object, not a closure, so that pickle can send it to processes.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.__qualname__: str = name_of(function)

    def __reduce__(self) -> Any:
        return type(self), (self._function,)

    @cached_property
    def _signature(self) -> inspect.Signature | None:
        try:
            return inspect.signature(self._function)
        except (TypeError, ValueError):  # some functions in C have no signature
            return None

    @cached_property
    def _hints(self) -> dict[str, Any]:
        try:
            return get_type_hints(self._function)
        except Exception:  # an annotation names something unknown, or this is no function
            return {}

    def __call__(self, message: Message, *connection: Any) -> Any:
        try:
            fields = json.loads(message.data)
        except ValueError as error:
            raise PgQueueError(f"{self.__qualname__} takes a JSON object: {error}") from None
        if not isinstance(fields, dict):
            kind = type(fields).__name__
            raise PgQueueError(
                f"{self.__qualname__} takes the fields of a JSON object, not of a {kind}"
            )
        self._check(fields, connection)
        return self._function(*connection, **fields)

    def _check(self, fields: dict[str, Any], connection: tuple[Any, ...]) -> None:
        """Raise an error that names the field that does not fit."""
        if self._signature is None:
            return
        try:
            self._signature.bind(*connection, **fields)
        except TypeError as error:  # it names the field
            given = ", ".join(fields)[:200] or "none"
            raise self._misfit(f"{error}; given: {given}") from None
        for name, hint in self._hints.items():
            if name in fields and not _fits(fields[name], hint):
                found, kind = fields[name], getattr(hint, "__name__", hint)
                raise self._misfit(
                    f"{name!r} must be {kind}, not {type(found).__name__}: {repr(found)[:100]}"
                )

    def _misfit(self, why: str) -> PgQueueError:
        return PgQueueError(f"the fields do not fit {self.__qualname__}{self._signature}: {why}")


_JSON = (str, int, float, bool, list, dict, type(None))


def _fits(value: Any, hint: Any) -> bool:
    """Whether a JSON value fits an annotation; True for annotations of types that JSON lacks."""
    if isinstance(hint, UnionType) or get_origin(hint) is Union:
        return any(_fits(value, each) for each in get_args(hint))
    kind = get_origin(hint) or hint
    if kind not in _JSON:
        return True
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, (int, float) if kind is float else kind)


class AsyncByName(ByName):
    """The same for a function that is awaited."""

    async def __call__(self, message: Message, *connection: Any) -> Any:
        return await super().__call__(message, *connection)


def by_name(function: Callable[..., Any], options: Options) -> ByName:
    """A handler that calls a function with the fields of a message.

    Raises:
        PgQueueError: the function takes no arguments by name, its body would not run, or messages
            come in batches.
    """
    check("handler", function)
    if options.batch is not None:
        raise PgQueueError("keywords are of one message: give no batch")
    parameters: list[inspect.Parameter] = []
    with suppress(TypeError, ValueError):  # some functions in C have no signature
        parameters += inspect.signature(function).parameters.values()
    parameters = parameters[options.transactional :]
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY,
             inspect.Parameter.VAR_KEYWORD)  # fmt: skip
    if not parameters or any(each.kind not in named for each in parameters):
        raise PgQueueError(f"{name_of(function)} takes no arguments by name")
    return (AsyncByName if is_async(function) else ByName)(function)
