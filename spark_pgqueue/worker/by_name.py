"""Handlers that take the fields of a JSON object as arguments."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import is_dataclass
from functools import cached_property
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from spark_pgqueue.calling import CONNECTION, check, is_async, name_of
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
            raise PgQueueError(f"{self.__qualname__} requires a JSON object: {error}") from None
        if not isinstance(fields, dict):
            kind = type(fields).__name__
            raise PgQueueError(
                f"{self.__qualname__} takes the fields of a JSON object, not of a {kind}"
            )
        for name, hint in self._hints.items():
            if hint is Message and name != "return":
                fields[name] = message
        self._fit(fields, connection)
        return self._function(*connection, **fields)

    def _fit(self, fields: dict[str, Any], connection: tuple[Any, ...]) -> None:
        """Convert the fields, by the function's annotations; an error names what does not fit."""
        if self._signature is None:
            return
        with self._explaining(after=f"; given: {', '.join(fields)[:200] or 'none'}"):
            self._signature.bind(*connection, **fields)
        for name in self._hints.keys() & fields.keys() - {"return"}:
            with self._explaining(before=f"{name!r} "):
                fields[name] = _converted(fields[name], self._hints[name])

    @contextmanager
    def _explaining(self, before: str = "", after: str = "") -> Iterator[None]:
        try:
            yield
        except (TypeError, ValueError) as error:
            fits = f"the fields do not fit {self.__qualname__}{self._signature}"
            raise PgQueueError(f"{fits}: {before}{error}{after}") from None


_JSON = (str, int, float, bool, list, dict, type(None))


def _converted(value: Any, hint: Any) -> Any:
    """A JSON value as an annotation says: of a dataclass or a Pydantic model, or as it is.

    Raises:
        TypeError, ValueError: it does not fit.
    """
    if isinstance(value, list) and get_origin(hint) is list:
        return [_converted(each, *get_args(hint)) for each in value]
    if isinstance(value, dict) and isinstance(hint, type):
        if hasattr(hint, "model_validate"):  # a model of Pydantic, which is not imported here
            return hint.model_validate(value)  # type: ignore[attr-defined]
        if is_dataclass(hint):
            hints = get_type_hints(hint)
            return hint(**{n: _converted(each, hints.get(n, Any)) for n, each in value.items()})
    if not _fits(value, hint):
        kind = getattr(hint, "__name__", hint)
        raise TypeError(f"must be {kind}, not {type(value).__name__}: {repr(value)[:100]}")
    if get_origin(hint) in (UnionType, Union):
        return _converted(value, next(each for each in get_args(hint) if _fits(value, each)))
    return value


def _fits(value: Any, hint: Any) -> bool:
    """Whether a JSON value fits an annotation; True for annotations of types that JSON lacks."""
    if isinstance(hint, UnionType) or get_origin(hint) is Union:
        return any(_fits(value, each) for each in get_args(hint))
    kind = get_origin(hint) or hint
    if is_dataclass(kind) or hasattr(kind, "model_validate"):
        return isinstance(value, dict | kind)
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
        raise PgQueueError("keyword arguments require single messages: batch cannot be used")
    parameters: list[inspect.Parameter] = []
    with suppress(TypeError, ValueError):  # some functions in C have no signature
        parameters += inspect.signature(function).parameters.values()
    required = [each.name for each in parameters[1:] if each.default is each.empty]
    if options.transactional and not CONNECTION.isdisjoint(required):
        raise PgQueueError(
            f"{name_of(function)} must take the connection as its first argument",
            hint="with transactional and keywords: def f(connection, order, total)",
        )
    parameters = parameters[options.transactional :]
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY,
             inspect.Parameter.VAR_KEYWORD)  # fmt: skip
    if not parameters or any(each.kind not in named for each in parameters):
        raise PgQueueError(f"{name_of(function)} takes no arguments by name")
    return (AsyncByName if is_async(function) else ByName)(function)
