"""Reading without claiming: offsets that the reader keeps, and batches of messages between them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime
from typing import TYPE_CHECKING, Any, LiteralString, cast

from psycopg.sql import SQL, Literal
from psycopg.types.json import Jsonb

from spark_pgqueue.client import arguments
from spark_pgqueue.client.messages import Batch, StoredMessage
from spark_pgqueue.postgres.errors import DATA_LOSS, PgQueueError
from spark_pgqueue.postgres.statements import Statements

if TYPE_CHECKING:
    from spark_pgqueue.client.long_poll import LongPoll

Offset = dict[str, Any]


def start_offset(statements: Statements, stream: str, start: str | datetime) -> Offset:
    """See `Client.start_offset`."""
    (offset,) = statements.row(
        "select pgqueue.start_offset(%s::text, %s::text)",
        [arguments.text("stream", stream), arguments.position("start", start)],
    )
    return offset


def read_to(
    statements: Statements, stream: str, offset: Offset, max_messages: int | None
) -> Offset:
    """See `Client.read_to`."""
    (following,) = statements.row(
        "select pgqueue.read_to(%s::text, %s::jsonb, %s::bigint)",
        [
            arguments.text("stream", stream),
            _json("offset", offset),
            arguments.maybe(arguments.number, "max_messages", max_messages),
        ],
    )
    return following


def read_between(
    statements: Statements, stream: str, first: Offset, last: Offset
) -> list[StoredMessage]:
    """See `Client.read_between`."""
    ranges = statements.rows(
        "select lo, hi from pgqueue.read_plan(%s::text, %s::jsonb, %s::jsonb)",
        [arguments.text("stream", stream), _json("first", first), _json("last", last)],
    )
    return _all_messages(statements, stream, *_kind(statements, stream), ranges)


def read(
    statements: Statements,
    long_poll: LongPoll,
    stream: str,
    offset: Offset | str | datetime | None,
    max_messages: int,
    wait: float | None,
) -> Iterator[Batch]:
    """See `Client.read`; `wait` is in seconds."""
    stream_id, kind = _kind(statements, stream)
    if not isinstance(offset, dict):
        offset = start_offset(statements, stream, "earliest" if offset is None else offset)

    def look() -> Batch | None:
        nonlocal offset
        while True:
            # One statement for both, so that a batch takes two statements.
            rows = statements.rows(
                "with following as materialized (select o from pgqueue.read_to(%s::text, %s::jsonb,"
                " %s::bigint) o) select o, lo, hi from following left join lateral"
                " pgqueue.read_plan(%s::text, %s::jsonb, o) on true",
                [stream, Jsonb(offset), max_messages, stream, Jsonb(offset)],
            )
            following = rows[0][0]
            ranges = [(lo, hi) for _, lo, hi in rows if lo is not None]
            unchanged, offset = following == offset, following
            if ranges:
                batch = _all_messages(statements, stream, stream_id, kind, ranges)
                return Batch(batch, following)
            if unchanged:
                return None

    while True:
        batch = long_poll.first(stream, look, look, wait) if wait else look()
        if batch is None:
            return
        yield batch


def _kind(statements: Statements, stream: str) -> tuple[int, str]:
    sql = "select stream_id, kind from pgqueue.open_stream(%s::text)"
    stream_id, kind = statements.row(sql, [arguments.text("stream", stream)])
    return stream_id, kind


def _all_messages(
    statements: Statements, stream: str, stream_id: int, kind: str, ranges: list[tuple[int, int]]
) -> list[StoredMessage]:
    """The messages of a plan, whose plan and payloads are two statements.

    Raises:
        PgQueueError: PQ010, retention took some of them between the two.
    """
    found = messages(statements, stream_id, kind, ranges)
    missing = sum(hi - lo for lo, hi in ranges) - len(found)
    if missing:
        raise PgQueueError(
            f"retention was faster: {missing} messages of stream {stream!r} were deleted before"
            " they could be read",
            hint='begin anew, at "earliest" for all that there is; and keep messages longer,'
            " see set_retention",
            sqlstate=DATA_LOSS,
        )
    return found


def messages(
    statements: Statements,
    stream_id: int,
    kind: str,
    ranges: list[tuple[int, int]],
    condition: str = "true",
) -> list[StoredMessage]:
    """The messages of ranges, in order. From Python, a statement is faster than COPY.

    Args:
        statements: the connection's statements.
        stream_id: the stream's id.
        kind: the stream's kind.
        ranges: the first number, and the number behind the last; at least one range.
        condition: a condition on columns of the messages, from the database.
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
    return statements.rows(
        SQL("select {} {}").format(columns, where),  # type: ignore[arg-type]
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
    if text is None:  # most messages have no headers, and a batch has many messages
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


def _json(name: str, offset: Offset) -> Jsonb:
    arguments.check(name, offset, dict, "an offset, which is a dict")
    return Jsonb(json.loads(arguments.json_text(name, offset)))
