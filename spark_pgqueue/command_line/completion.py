"""What a shell completes beside commands and options: names, from the database."""

from __future__ import annotations

import os
from typing import LiteralString

import typer

from spark_pgqueue.postgres import connection

_STREAMS = "select stream from pgqueue.stream_stats order by stream"
_CONSUMERS = """
select distinct consumer from pgqueue.consumer_settings
where stream = coalesce(%s::text, stream) order by consumer
"""


def streams(ctx: typer.Context, incomplete: str) -> list[str]:
    """The streams whose names begin so."""
    return _beginning(incomplete, _names(ctx, _STREAMS, []))


def consumers(ctx: typer.Context, incomplete: str) -> list[str]:
    """The consumers, of the stream that is given already, whose names begin so."""
    return _beginning(incomplete, _names(ctx, _CONSUMERS, [ctx.params.get("stream")]))


def _beginning(incomplete: str, names: list[str]) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]


def _names(ctx: typer.Context, query: LiteralString, parameters: list[str | None]) -> list[str]:
    """Of a database that is told, and answers at once; of no other: nobody waits for a Tab."""
    url = ctx.params.get("url") or os.environ.get("PGQUEUE_URL")
    if not url:
        return []
    os.environ["PGCONNECT_TIMEOUT"] = "2"
    try:
        with connection.connect(url, patience=0) as conn:
            conn.execute("set statement_timeout = '2s'")
            return [name for (name,) in conn.execute(query, parameters)]
    except Exception:  # whatever it is: a shell is no place to hear of it
        return []
