"""Handlers that take the fields of a JSON object as arguments, and no message."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from spark_pgqueue.calling import check, is_async, name_of
from spark_pgqueue.client.messages import Message
from spark_pgqueue.postgres.errors import PgQueueError
from spark_pgqueue.worker.options import Options


class ByName:
    """A handler that calls a function with the fields of a message; with its connection, too.

    An object, and no closure: processes get it by pickle.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.__qualname__: str = name_of(function)

    def __call__(self, message: Message, *connection: Any) -> Any:
        fields = json.loads(message.data)
        if not isinstance(fields, dict):
            raise PgQueueError(f"{self.__qualname__} takes the fields of a JSON object")
        return self._function(*connection, **fields)


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
    with suppress(TypeError, ValueError):  # of some functions in C nobody knows them
        parameters += inspect.signature(function).parameters.values()
    parameters = parameters[options.transactional :]
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY,
             inspect.Parameter.VAR_KEYWORD)  # fmt: skip
    if not parameters or any(each.kind not in named for each in parameters):
        raise PgQueueError(f"{name_of(function)} takes no arguments by name")
    return (AsyncByName if is_async(function) else ByName)(function)
