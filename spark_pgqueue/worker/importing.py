"""A handler by its name, as a command line gives it."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any

from spark_pgqueue import nearest
from spark_pgqueue.postgres.errors import PgQueueError
from spark_pgqueue.worker.handlers import is_marked


def import_named(name: str) -> ModuleType:
    """The module of that name.

    Python searches its path for the module, after the current directory.

    Raises:
        PgQueueError: the import raises any error.
    """
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    except PgQueueError:  # of a decorator, as a rule: it says what to do
        raise
    except Exception as error:
        raise PgQueueError(
            f"the module {name} of the handler cannot be imported: {type(error).__name__}: {error}",
            hint=f"searched in {here} and in Python's module path (PYTHONPATH)",
        ) from error


def import_handler(name: str) -> Callable[..., Any]:
    """The function that is called `name`: a module, a colon, and its name there.

    Raises:
        PgQueueError: the name is missing or is no function; or as `import_named`.
    """
    module_name, colon, path = name.partition(":")
    if not (module_name and colon and path):
        raise PgQueueError(
            f"the handler {name!r} is not MODULE:NAME",
            hint="for the function bill in app/jobs.py, give app.jobs:bill",
        )
    module = import_named(module_name)
    try:
        handler = attrgetter(path)(module)
    except AttributeError:
        names = [
            each
            for each, found in vars(module).items()
            if inspect.isfunction(found) and (found.__module__ == module_name or is_marked(found))
        ]
        raise PgQueueError(
            f"the module {module_name} has no {path}", hint=nearest.hint(path, names)
        ) from None
    if not callable(handler):
        raise PgQueueError(f"{name} must be a function, not {type(handler).__name__}")
    return handler
