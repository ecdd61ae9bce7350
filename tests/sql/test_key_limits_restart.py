"""Limits of keys when the server restarts."""

from __future__ import annotations

import pytest

from spark_pgqueue.postgres import connection
from tests.conftest import Server
from tests.sql import checker
from tests.sql.queue import acked, claim_of, consumer, receive, seconds, send_keys, value


@pytest.mark.parametrize("restart", ["fast", "immediate"])
def test_the_rate_and_the_limit_hold_over_a_restart(
    own_server: Server, url: str, restart: str
) -> None:
    with connection.connect(url) as conn:
        value(conn, "create_stream", "s")
        consumer(conn, p_settings='{"per_key_interval": "30 s", "per_key_burst": 2}')
        consumer(conn, "l", per_key_limit=2, visibility_timeout=seconds(60))
        seqs = send_keys(conn, *"aaab")
        assert sorted(acked(conn, "s", "c", 10)) == [*seqs[:2], seqs[3]]
        held = receive(conn, 10, "l")
        conn.execute("checkpoint")
    own_server.restart(restart)
    with connection.connect(url) as conn:
        assert receive(conn, 10) == []
        assert receive(conn, 10, "l") == []
        value(conn, "ack", claim_of(held))
        assert [row.seq for row in receive(conn, 10, "l")] == [seqs[2]]
        checker.check(conn)
