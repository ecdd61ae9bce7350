"""Waiting for a message: by LISTEN, and by asking again each second."""

from __future__ import annotations

import time
from collections.abc import Callable

from psycopg.sql import SQL, Identifier

from spark_pgqueue.client.results import Claim
from spark_pgqueue.postgres.statements import Statements


def wait_for(
    statements: Statements, claim_now: Callable[[], Claim | None], stream: str, seconds: float
) -> Claim | None:
    """Claim at each publication and each second, until there is something or time is over."""
    end = time.monotonic() + seconds
    (stream_id,) = statements.row("select stream_id from pgqueue.open_stream(%s::text)", [stream])
    channel = Identifier(f"pgqueue_{stream_id}")
    conn = statements.connection()
    with statements.explained():
        conn.execute(SQL("listen {}").format(channel))
        try:
            while (claim := claim_now()) is None and (left := end - time.monotonic()) > 0:
                list(conn.notifies(timeout=min(left, 1.0), stop_after=1))
            return claim
        finally:
            if not conn.closed:
                # Else they would pile up, in the server too, until the next wait.
                conn.execute(SQL("unlisten {}").format(channel))
