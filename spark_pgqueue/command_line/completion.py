"""Completion of names in a shell, from the database."""

from __future__ import annotations

import os
import re
import shlex
from typing import LiteralString

import typer

from spark_pgqueue.postgres import connection, owners

_STREAMS = "select stream from pgqueue.stream_stats order by stream"
_CONSUMERS = """
select distinct consumer from pgqueue.consumer_settings
where stream = coalesce(%s::text, stream) order by consumer
"""


def streams(ctx: typer.Context, incomplete: str) -> list[str]:
    """The streams whose names begin like this."""
    return _beginning(incomplete, _names(ctx, _STREAMS, []))


def consumers(ctx: typer.Context, incomplete: str) -> list[str]:
    """The consumers whose names begin like this, of the stream that was typed."""
    return _beginning(incomplete, _names(ctx, _CONSUMERS, [ctx.params.get("stream")]))


def _beginning(incomplete: str, names: list[str]) -> list[str]:
    found = [name for name in names if name.startswith(incomplete) and name.isprintable()]
    shell = os.environ.get("_PGQUEUE_COMPLETE", "")
    if shell == "complete_zsh":  # it runs the answer, in which Typer does not quote all
        return [name for name in found if re.fullmatch(r"[\w .,:@%+/-]+", name)]
    return [_Quoted(shlex.quote(name)) for name in found] if shell == "complete_bash" else found


class _Quoted(str):
    """A quoted name. Typer keeps names that begin with the typed text, which is not quoted."""

    def startswith(self, *_: object) -> bool:
        return True


def _names(ctx: typer.Context, query: LiteralString, parameters: list[str | None]) -> list[str]:
    """Names from the given database, if it answers quickly: completion must not wait."""
    url = ctx.params.get("url") or os.environ.get("PGQUEUE_URL")
    if not url:
        return []
    os.environ["PGCONNECT_TIMEOUT"] = "2"
    try:
        with connection.connect(url, patience=0) as conn:
            conn.execute("set statement_timeout = '2s'")
            owners.check(conn)
            return [name for (name,) in conn.execute(query, parameters)]
    except Exception:  # completion in a shell cannot show an error
        return []
