"""Sending many messages by COPY: they are written into the stream's table, and published there."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from datetime import datetime
from typing import Any

import psycopg
from psycopg.pq import PipelineStatus, TransactionStatus
from psycopg.sql import SQL, Identifier

from spark_pgqueue.postgres.statements import Statements

WORTH_IT = 2 << 20
"""Characters or bytes of payloads from which on COPY is faster than an array, which is one call."""


def copy_messages(
    statements: Statements,
    stream: str,
    payloads: Sequence[str] | Sequence[bytes],
    keys: Sequence[str | None] | None,
    headers: Sequence[str | None] | None,
    dedup_keys: Sequence[str | None] | None,
    priority: int,
    deliver_at: datetime | None,
    consumers: Sequence[str] | None,
    expires_at: datetime | None,
) -> list[int] | None:
    """Publish messages together, in the caller's transaction if there is one.

    Args:
        statements: the connection's.
        stream: the stream's name.
        payloads: of one type; at least one.
        keys: one per payload, or None.
        headers: as JSON text, one per payload, or None.
        dedup_keys: one per payload, or None.
        priority: as in `send`, as the others.
        deliver_at: for all of them.
        consumers: for all of them.
        expires_at: for all of them.

    Returns:
        their seqs; None when nothing was done, because it cannot be done so: the role may only call
        functions, the connection is in pipeline mode, or these are no messages for the stream.

    Raises:
        PgQueueError: as `send_batch`.
    """
    with statements.turn:
        conn = statements.connection()
        binary = isinstance(payloads[0], bytes)
        if conn.pgconn.pipeline_status != PipelineStatus.OFF or not _may(statements):
            return None
        alone = conn.autocommit and conn.info.transaction_status == TransactionStatus.IDLE
        with statements.transaction() if alone else nullcontext():
            stream_id, kind, may_write = statements.row(
                "select stream_id, kind, pg_catalog.has_any_column_privilege("
                "'pgqueue.messages_' operator(pg_catalog.||) stream_id, 'insert')"
                " from pgqueue.open_sink(%s::text, %s::text[])",
                [stream, consumers],
            )
            if not may_write or binary != (kind == "binary"):
                return None
            (reserved,) = statements.row(
                "select pgqueue.reserve(%s::int, %s::int)", [stream_id, len(payloads)]
            )
            seqs = [seq for block in reserved for seq in range(block.lower, block.upper)]
            with statements.explained():
                _write(conn, stream_id, seqs, payloads, keys, headers)
            (first_seqs,) = statements.row(
                "select first_seqs from pgqueue.publish_written(%s::text, %s::int8multirange,"
                " %s::int, %s::timestamptz, %s::text[], %b::text[], %s::timestamptz)",
                [stream, reserved, priority, deliver_at, consumers, dedup_keys, expires_at],
            )
        return seqs if first_seqs is None else first_seqs


def _may(statements: Statements) -> bool:
    """Whether the role may call what it takes, which is more than for `send_batch`."""
    (may,) = statements.row(
        "select pg_catalog.bool_and(pg_catalog.has_function_privilege(p.oid, 'execute'))"
        " from pg_catalog.pg_proc p join pg_catalog.pg_namespace n on n.oid = p.pronamespace"
        " where n.nspname = 'pgqueue' and p.proname in ('open_sink', 'reserve', 'publish_written')"
    )
    return bool(may)


def _write(
    conn: psycopg.Connection,
    stream_id: int,
    seqs: Sequence[int],
    payloads: Sequence[str] | Sequence[bytes],
    keys: Sequence[str | None] | None,
    headers: Sequence[str | None] | None,
) -> None:
    columns: dict[str, tuple[str, Sequence[Any]]] = {"seq": ("int8", seqs)}
    if isinstance(payloads[0], bytes):
        columns["data_bytes"] = ("bytea", payloads)
    else:
        columns["data"] = ("text", payloads)
    if keys is not None:
        columns["key"] = ("text", keys)
    if headers is not None:
        # What jsonb is sent as: the number of a version, and the text.
        columns["headers"] = ("bytea", [None if h is None else b"\1" + h.encode() for h in headers])
    copy_in = SQL("copy {} ({}) from stdin (format binary)").format(
        Identifier("pgqueue", f"messages_{stream_id}"), SQL(", ").join(map(Identifier, columns))
    )
    with psycopg.Cursor(conn).copy(copy_in) as copy:
        copy.set_types([kind for kind, _ in columns.values()])
        for row in zip(*(values for _, values in columns.values()), strict=True):
            copy.write_row(row)
