"""The base of the client's calls: how they become statements."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import fields
from functools import cache, wraps
from typing import Any, LiteralString, TypeVar
from weakref import WeakSet

from psycopg.rows import class_row

from spark_pgqueue import nearest
from spark_pgqueue.client import arguments
from spark_pgqueue.client.long_poll import LongPoll
from spark_pgqueue.postgres.errors import PgQueueError
from spark_pgqueue.postgres.statements import Statements

T = TypeVar("T")

_STREAMS_AT_ONCE = 300
"""Streams whose figures one statement reads. It locks up to four objects of each until it ends; the
lock table of a server has room for some 14,000 by default."""


def note_meant(error: TypeError, method: Callable[..., Any], named: Iterable[str]) -> None:
    """Add the hint for an argument that has another name in other software, or is a setting."""
    known = inspect.signature(method).parameters
    for name in [each for each in named if each not in known]:
        hint = nearest.meant(name, known) or ""
        if hint:
            error.add_note(f"hint: {hint}")
        if "settings" in known and not hint.startswith("did you mean"):
            error.add_note('hint: a setting is passed as settings={"NAME": VALUE}')


def _hinted(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def call(*given: Any, **named: Any) -> Any:
        try:
            return method(*given, **named)
        except TypeError as error:
            note_meant(error, method, named)
            raise

    return call


class Calls:
    """Calls of the schema's functions, over the connection of one client.

    Arguments are given by the client's names, which `arguments` describes.
    """

    _statements: Statements
    _long_poll: LongPoll
    _consuming: WeakSet[Generator[Any, None, None]]
    """Iterations over claims, which may have claims when the client is closed."""

    def __init_subclass__(cls) -> None:
        for name, method in [*vars(cls).items()]:
            if inspect.isfunction(method) and not name.startswith("_"):
                setattr(cls, name, _hinted(method))

    def _check_can_wait(self) -> None:
        if not self._statements.can_wait:
            raise PgQueueError(
                "wait requires a connection that the client opened, outside a transaction",
                hint="omit wait, or create the client with spark_pgqueue.connect(url)",
            )

    def _must_exist(self, stream: str | None) -> None:
        if stream is not None:
            self._call("open_stream", stream=stream)

    def _value(self, sql: LiteralString, *parameters: Any) -> Any:
        return self._statements.rows(sql, parameters)[0][0]

    def _call(self, function: str, what: str = "", /, **given: Any) -> Any:
        """The value that a function returns; or `what`, an expression, in its first row."""
        return self._rows(function, what, **given)[0][0]

    def _rows(self, function: str, what: str, /, **given: Any) -> list[tuple[Any, ...]]:
        """Columns, or expressions, of the rows of a function."""
        return self._statements.rows(*statement(function, what, given))

    def _long_rows(self, function: str, what: str, /, **given: Any) -> list[tuple[Any, ...]]:
        """As `_rows`, for a call that may take long: see `Statements.long_rows`."""
        return self._statements.long_rows(*statement(function, what, given))

    def _long_call(self, function: str, /, **given: Any) -> Any:
        """As `_call`, for a call that may take long: it may change any number of messages."""
        return self._long_rows(function, "", **given)[0][0]

    def _read(self, function: str, kind: type[T], /, **given: Any) -> list[T]:
        """The rows of a function, whose columns are the fields of a dataclass."""
        sql, values = statement(function, _columns(kind), given)
        return self._statements.rows(sql, values, row_factory=class_row(kind))

    def _view(
        self,
        kind: type[T],
        view: str,
        order: str,
        chosen: Mapping[str, str | None] | None = None,
        limit: int | None = None,
        /,
        **columns: str,
    ) -> list[T]:
        """The rows of a view.

        Args:
            kind: the dataclass of a row.
            view: the view's name.
            order: the columns to sort by.
            chosen: the stream, and the consumer, by the name of the column; None for all.
            limit: return at most this many rows.
            columns: the columns, or expressions, of fields that have another name than theirs.
        """
        chosen = chosen or {}
        self._must_exist(chosen.get("stream"))
        values = [arguments.maybe(arguments.text, *each) for each in chosen.items()]
        where = " and ".join(f"{name} = coalesce(%s::text, {name})" for name in chosen) or "true"
        return self._selected(kind, view, where, order, [*values, limit], **columns)

    def _figures(
        self, kind: type[T], view: str, order: str, stream: str | None = None, /, **columns: str
    ) -> list[T]:
        """The rows of a view that reads figures of a stream, or of all: of some in each statement.

        Arguments as for `_view`; `order` begins with the stream.
        """
        if stream is not None:
            return self._view(kind, view, order, {"stream": stream}, **columns)
        names = self._statements.rows("select stream from pgqueue.stream_stats order by stream")
        found: list[T] = []
        for at in range(0, len(names), _STREAMS_AT_ONCE):
            some = [name for (name,) in names[at : at + _STREAMS_AT_ONCE]]
            where = "stream = any(%s::text[])"
            found += self._selected(kind, view, where, order, [some, None], **columns)
        return found

    def _selected(
        self, kind: type[T], view: str, where: str, order: str, values: list[Any], /, **columns: str
    ) -> list[T]:
        sql: Any = (
            f"select {_columns(kind, **columns)} from pgqueue.{view}"
            f" where {where} order by {order} limit %s::bigint"
        )
        return self._statements.rows(sql, values, row_factory=class_row(kind))


def statement(function: str, what: str, given: dict[str, Any]) -> tuple[Any, list[Any]]:
    """The statement that calls a function, and its values. Calls with the same arguments have the
    same text.

    Args:
        function: the function of the schema.
        what: columns, or expressions, of its rows; empty for a function that returns a value.
        given: the arguments, by the client's names. Afterwards their values are those of SQL.

    Raises:
        PgQueueError: an argument is of the wrong type.
    """
    sql, checks = _described(function, what, tuple(given))
    for name, check, may_be_none in checks:
        value = given[name]
        if value is not None or not may_be_none:
            given[name] = check(name, value)
    return sql, list(given.values())


@cache
def _described(
    function: str, what: str, names: tuple[str, ...]
) -> tuple[str, list[tuple[str, arguments.Check, bool]]]:
    described = [(name, *arguments.described(function, name)) for name in names]
    given = ", ".join(by_name for *_, by_name in described)
    columns = f" {what} from" if what else ""
    checks = [(name, check, maybe) for name, check, maybe, _ in described if check is not None]
    return f"select{columns} pgqueue.{function}({given})", checks


def _columns(kind: Any, **others: str) -> str:
    """The fields of a dataclass as columns."""
    return ", ".join(f'{others.get(each.name, "")} "{each.name}"' for each in fields(kind))
