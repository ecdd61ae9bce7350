"""How values of Postgres become those of Python, whatever a connection's owner has chosen.

Frameworks change the loaders of their connections: over Django's, JSON is text, and times may have
no zone. And Python cannot represent all times of Postgres: infinity, and those after the year 9999.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, TypeVar, cast

import psycopg
from psycopg.abc import Loader
from psycopg.adapt import AdaptersMap, Buffer, Transformer
from psycopg.postgres import register_default_adapters
from psycopg.pq import Format
from psycopg.rows import RowFactory
from psycopg.types.datetime import TimestamptzLoader

C = TypeVar("C", bound=psycopg.Cursor[Any] | psycopg.AsyncCursor[Any])

KINDS = ("bool", "bytea", "float8", "int4", "int8", "interval", "json", "jsonb", "numeric", "text",
         "timestamptz")  # fmt: skip
"""The types of the columns that statements of this package read."""


class _OwnLoaders(list[tuple[int, type[Loader]]]):
    """psycopg's own loaders. Empty after Spark unpickles this module by value: a worker may have
    psycopg without its part in C.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return _OwnLoaders, ()


_own_loaders = _OwnLoaders()


def plain(cursor: C) -> C:
    """The cursor, with psycopg's own loaders instead of those of its connection."""
    adapters = cursor.adapters
    for oid, loader in _own_loaders or _found():
        if adapters.get_loader(oid, loader.format) is not loader:
            adapters.register_loader(oid, loader)
    return cursor


def _found() -> _OwnLoaders:
    own = AdaptersMap(types=psycopg.adapters.types)
    register_default_adapters(own)
    _own_loaders[:] = [
        (oid, loader)
        for oid in (own.types[kind].oid for kind in KINDS)
        for form in Format
        if (loader := own.get_loader(oid, form)) is not None
    ]
    return _own_loaders


def load_nearest(
    cursor: psycopg.Cursor[Any] | psycopg.AsyncCursor[Any], row_factory: RowFactory[Any]
) -> list[Any]:
    """The rows of a cursor, with the nearest times that Python can represent.

    Call it only after `fetchall` has failed: psycopg's own loader is ten times as fast.
    """
    result = cursor.pgresult
    assert result is not None
    cursor.adapters.register_loader("timestamptz", _NearestTime)
    transformer = Transformer(cursor)
    transformer.set_pgresult(result)
    return transformer.load_rows(0, result.ntuples, row_factory(cast("Any", cursor)))


class _NearestTime(TimestamptzLoader):
    def load(self, data: Buffer) -> datetime:
        try:
            return super().load(data)
        except psycopg.DataError:
            text = bytes(data)
            early = text.startswith(b"-") or text.endswith(b"BC")
            return (datetime.min if early else datetime.max).replace(tzinfo=UTC)
