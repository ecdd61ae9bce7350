"""Times of Postgres that Python cannot represent: infinity, and times after the year 9999."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, cast

import psycopg
from psycopg.adapt import Buffer, Transformer
from psycopg.rows import RowFactory
from psycopg.types.datetime import TimestamptzLoader


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
