"""Reads messages by ranges of their numbers, without a claim."""

from __future__ import annotations

import json
from typing import Any, LiteralString, cast

from psycopg.sql import SQL, Literal

from spark_pgqueue.client.messages import StoredMessage
from spark_pgqueue.postgres.errors import DATA_LOSS, PgQueueError
from spark_pgqueue.postgres.statements import Statements


def all_messages(
    statements: Statements, stream: str, stream_id: int, kind: str, ranges: list[tuple[int, int]]
) -> list[StoredMessage]:
    """The messages of a plan.

    Raises:
        PgQueueError: PQ010, retention deleted some of them since the statement that planned.
    """
    found = messages(statements, stream_id, kind, ranges)
    missing = sum(hi - lo for lo, hi in ranges) - len(found)
    if missing:
        raise PgQueueError(
            f"retention deleted {missing} messages of stream {stream!r} before they could be read",
            hint='start again, at "earliest" for all stored messages; to keep messages longer, '
            "see set_retention",
            sqlstate=DATA_LOSS,
        )
    return found


def messages(
    statements: Statements,
    stream_id: int,
    kind: str,
    ranges: list[tuple[int, int]],
    condition: str = "true",
    limit: int | None = None,
) -> list[StoredMessage]:
    """The messages of at least one range, in order. In Python, a statement is faster than COPY.

    A range has the first number, and the number after the last. The database provides the
    condition, on columns of the messages. Of more messages than the limit, the first are returned.
    """
    data = "data_bytes" if kind == "binary" else "data"
    columns = _sql(f"m.seq, m.key, m.{data}, m.headers::text, m.inserted_at, null::text")
    table, mine = _sql(f"pgqueue.messages_{stream_id}"), _sql(condition)
    if len(ranges) == 1:
        where = SQL(
            "from {} m where seq operator(pg_catalog.>=) {} and seq operator(pg_catalog.<) {}"
            " and {} order by seq"
        ).format(table, *map(Literal, ranges[0]), mine)
    else:
        where = SQL(
            "from rows from (pg_catalog.unnest({}::bigint[]), pg_catalog.unnest({}::bigint[]))"
            " r (lo, hi) cross join lateral"
            " (select * from {} where seq operator(pg_catalog.>=) r.lo"
            " and seq operator(pg_catalog.<) r.hi and {} order by seq) m"
        ).format(*(Literal(list(each)) for each in zip(*ranges, strict=True)), table, mine)
    query = SQL("select {} {} limit {}").format(columns, where, Literal(limit))
    return statements.rows(
        query,  # type: ignore[arg-type]
        row_factory=lambda cursor: _stored,
        binary=True,
    )


def _sql(text: str) -> SQL:
    """SQL text that the database returned."""
    return SQL(cast(LiteralString, text.replace("%", "%%")))


def _stored(row: Any) -> StoredMessage:
    if row[3] is None:
        return _new(StoredMessage, row)
    seq, key, data, headers, inserted_at, _ = row
    found, why = headers_of(headers)
    return StoredMessage(seq, key, data, found, inserted_at, why)


def headers_of(text: str | None) -> tuple[dict[str, Any], str | None]:
    """The headers of a message, and the reason why they cannot be read, for its `error`."""
    if text is None:  # a fast path: most messages have no headers
        return {}, None
    found, why = json_of("headers", text)
    return found or {}, why


def json_of(what: str, text: str) -> tuple[Any, str | None]:
    """JSON of a message, or the reason why it cannot be read."""
    try:
        return json.loads(text), None
    except (ValueError, RecursionError) as error:
        return None, f"its {what} cannot be read: {error}"


_new = tuple.__new__
