"""Handlers that take the fields of a JSON object as arguments."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import is_dataclass
from functools import cache, cached_property
from types import SimpleNamespace, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from spark_pgqueue.calling import CONNECTION, bare_function, check, is_async, name_of
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
    def _annotations(self) -> dict[str, Any]:
        parameters = {} if self._signature is None else self._signature.parameters
        return {n: p.annotation for n, p in parameters.items() if p.annotation is not p.empty}

    @cached_property
    def _hints(self) -> dict[str, Any]:
        hints = {}
        for name in self._annotations:
            with suppress(Exception):  # it is a comment; or `check_annotations` has accepted it
                hints[name] = self._type_of(name)
        return hints

    def _type_of(self, name: str) -> Any:
        """The type that the annotation of a parameter names. One that cannot be evaluated says
        nothing about the others.
        """
        names = getattr(inspect.unwrap(bare_function(self._function)), "__globals__", {})
        of = SimpleNamespace(__annotations__={name: self._annotations[name]})
        return get_type_hints(of, names, include_extras=True)[name]

    def check_annotations(self, options: Options) -> None:
        """Refuse annotations of fields that name what is unknown: no field would be converted.

        Call it when a worker starts: when the function is decorated, the module may not have
        defined all names yet.

        Raises:
            PgQueueError: an annotation, or one of a dataclass that it names, is unknown.
        """
        parameters = [] if self._signature is None else [*self._signature.parameters]
        for name in parameters[options.transactional :]:
            if name not in self._annotations:
                continue
            try:
                _look_within(self._type_of(name), set())
            except (NameError, AttributeError) as error:
                raise PgQueueError(
                    f"the annotation of {name!r} in {self.__qualname__} cannot be evaluated:"
                    f" {str(self._annotations[name])[:100]!r}: {error}",
                    hint="import or define what it names at the top level of its module, and not"
                    " under TYPE_CHECKING",
                ) from None
            except Exception:  # it is a comment, not a type
                continue

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
            if _bare(hint) is Message:
                fields[name] = message
        self._fit(fields, connection)
        return self._function(*connection, **fields)

    def _fit(self, fields: dict[str, Any], connection: tuple[Any, ...]) -> None:
        """Convert the fields, by the function's annotations; an error names what does not fit."""
        if self._signature is None:
            return
        with self._explaining(after=f"; given: {', '.join(fields)[:200] or 'none'}"):
            self._signature.bind(*connection, **fields)
        for name in self._hints.keys() & fields.keys():
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
    bare = _bare(hint)
    if isinstance(value, list) and get_origin(bare) is list:
        return [_converted(each, *get_args(bare)) for each in value]
    if isinstance(value, dict) and isinstance(bare, type):
        if _is_model(bare):
            return bare.model_validate(value)  # type: ignore[attr-defined]
        if is_dataclass(bare):
            hints = _fields_of(bare)
            return bare(**{n: _converted(each, hints.get(n, Any)) for n, each in value.items()})
    if not _fits(value, bare):
        kind = getattr(bare, "__name__", bare)
        raise TypeError(f"must be {kind}, not {type(value).__name__}: {repr(value)[:100]}")
    return _member(value, hint) if get_origin(bare) in (UnionType, Union) else value


def _member(value: Any, hint: Any) -> Any:
    """A JSON value as the member of a union that it fits: the first that accepts it. Between models
    Pydantic chooses, by the discriminator, if there is one.

    Raises:
        TypeError, ValueError: no member accepts it.
    """
    members = [each for each in get_args(_bare(hint)) if _fits(value, each)]
    if len(members) > 1 and all(map(_is_model, members)) and "pydantic" in sys.modules:
        return _validator(hint).validate_python(value)
    errors = list[Exception]()
    for each in members:
        try:
            return _converted(value, each)
        except (TypeError, ValueError) as error:
            errors.append(error)
    raise errors[0] if len(errors) == 1 else TypeError("; ".join(map(str, errors)))


def _validator(hint: Any) -> Any:
    """Pydantic's validator of a union."""
    if id(hint) not in _validators:  # with the hint, so that its id stays its own
        _validators[id(hint)] = hint, sys.modules["pydantic"].TypeAdapter(hint)
    return _validators[id(hint)][1]


_validators: dict[int, tuple[Any, Any]] = {}


def _is_model(hint: Any) -> bool:
    """Whether this is a model of Pydantic, which is not imported here."""
    return hasattr(_bare(hint), "model_validate")


def _bare(hint: Any) -> Any:
    """A type without what `Annotated` says of it."""
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


@cache
def _fields_of(kind: type) -> dict[str, Any]:
    """The types of the fields of a dataclass."""
    return get_type_hints(kind, include_extras=True)


def _look_within(hint: Any, seen: set[type]) -> None:
    """Evaluate the annotations of all dataclasses in a type.

    Raises:
        NameError, AttributeError: one names what is unknown.
    """
    for each in get_args(hint):
        _look_within(each, seen)
    if isinstance(hint, type) and is_dataclass(hint) and hint not in seen:
        seen.add(hint)
        for each in _fields_of(hint).values():
            _look_within(each, seen)


def _fits(value: Any, hint: Any) -> bool:
    """Whether a JSON value fits an annotation; True for annotations of types that JSON lacks."""
    hint = _bare(hint)
    if isinstance(hint, UnionType) or get_origin(hint) is Union:
        return any(_fits(value, each) for each in get_args(hint))
    kind = get_origin(hint) or hint
    if is_dataclass(kind) or _is_model(kind):
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
