"""Sends many messages by COPY into a table, and then publishes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import psycopg
from psycopg.pq import PipelineStatus, TransactionStatus
from psycopg.sql import SQL, Identifier

from spark_pgqueue.client import arguments
from spark_pgqueue.client.calls.base import statement
from spark_pgqueue.postgres.copy_target import COPY_TARGET
from spark_pgqueue.postgres.statements import Statements

WORTH_IT = 2 << 20
"""Characters or bytes of payloads above which COPY is faster than one call with an array."""

_SINK = (
    f"stream_id, kind, {COPY_TARGET},"
    " pg_catalog.has_any_column_privilege('pgqueue.written', 'insert')"
)


def copy_messages(
    statements: Statements,
    payloads: Sequence[str] | Sequence[bytes],
    given: Mapping[str, Any],
) -> list[int] | None:
    """Publish messages together, in the caller's transaction if there is one.

    Args:
        statements: the connection's statements.
        payloads: at least one, all of one type.
        given: the other arguments of `send_batch`, as SQL takes them.

    Returns:
        the seqs; None when nothing was done, because COPY is not possible: the role may only call
        functions, the connection is in pipeline mode or asynchronous, or the arguments do not fit
        each other or the stream.

    Raises:
        PgQueueError: as `send_batch`.
    """
    keys, headers = given["keys"], given["headers"]
    lists = [each for each in (keys, headers, given["dedup_keys"]) if each is not None]
    if any(len(each) != len(payloads) for each in lists):
        return None
    with statements.turn:
        conn = statements.connection()
        binary = isinstance(payloads[0], bytes)
        if not isinstance(conn, psycopg.Connection):  # an AsyncConnection of the caller
            return None
        if conn.pgconn.pipeline_status != PipelineStatus.OFF or not _may(statements):
            return None
        alone = conn.autocommit and conn.info.transaction_status == TransactionStatus.IDLE
        with statements.transaction() if alone else nullcontext():
            receivers = {"stream": given["stream"], "consumers": given["consumers"]}
            stream_id, kind, table, may_write = statements.row(
                *statement("open_sink", _SINK, receivers)
            )
            if not may_write or binary != (kind == "binary"):
                return None
            count = {"stream_id": stream_id, "count": len(payloads)}
            (reserved,) = statements.row(*statement("reserve", "", count))
            seqs = [seq for block in reserved for seq in range(block.lower, block.upper)]
            with statements.explained(), statements.limited(conn):
                _write(conn, table, stream_id, seqs, payloads, keys, headers)
            written = receivers | {
                "seqs": reserved,
                "priority": given["priority"],
                "dedup_keys": given["dedup_keys"],
                "expires_at": given["expires_at"],
            }
            written |= arguments.earliest(given.get("deliver_at"), given.get("delay"))
            (first_seqs,) = statements.row(*statement("publish_written", "first_seqs", written))
        return seqs if first_seqs is None else first_seqs


def _may(statements: Statements) -> bool:
    """Whether the role may call the functions for COPY, which `send_batch` does not need."""
    (may,) = statements.row(
        "select pg_catalog.bool_and(pg_catalog.has_function_privilege(p.oid, 'execute'))"
        " from pg_catalog.pg_proc p join pg_catalog.pg_namespace n on n.oid = p.pronamespace"
        " where n.nspname = 'pgqueue' and p.proname in ('open_sink', 'reserve', 'publish_written')"
    )
    return bool(may)


def _write(
    conn: psycopg.Connection,
    table: str,
    stream_id: int,
    seqs: Sequence[int],
    payloads: Sequence[str] | Sequence[bytes],
    keys: Sequence[str | None] | None,
    headers: Sequence[str | None] | None,
) -> None:
    columns: dict[str, tuple[str, Sequence[Any]]] = {
        "seq": ("int8", seqs),
        "stream_id": ("int4", [stream_id] * len(seqs)),
    }
    if isinstance(payloads[0], bytes):
        columns["data_bytes"] = ("bytea", payloads)
    else:
        columns["data"] = ("text", payloads)
    if keys is not None:
        columns["key"] = ("text", keys)
    if headers is not None:
        # The binary form of jsonb: a version number, and the text.
        columns["headers"] = ("bytea", [None if h is None else b"\1" + h.encode() for h in headers])
    copy_in = SQL("copy {} ({}) from stdin (format binary)").format(
        Identifier("pgqueue", table), SQL(", ").join(map(Identifier, columns))
    )
    with psycopg.Cursor(conn).copy(copy_in) as copy:
        copy.set_types([kind for kind, _ in columns.values()])
        for row in zip(*(values for _, values in columns.values()), strict=True):
            copy.write_row(row)
