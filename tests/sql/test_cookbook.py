"""What recipes of sql/guide/cookbook.md promise together, where no other test has it."""

from __future__ import annotations

from datetime import timedelta

from tests.sql import clock
from tests.sql.queue import Conn, claim_of, one, receive, value

HOUR = timedelta(hours=1)


def test_a_run_that_is_due_is_left_out_while_the_one_before_it_is_not_done(
    conn: Conn, stream: int
) -> None:
    """Cron: with per_key_capacity of 1 and a key, runs of a schedule do not overlap."""
    settings = '{"per_key_capacity": 1, "visibility_timeout": "1 day"}'
    value(conn, "create_consumer", "s", "c", p_settings=settings)
    value(conn, "create_schedule", "s", "job", p_every=HOUR, p_data="run", p_key="job")
    clock.pass_time(conn, HOUR)
    first = receive(conn)
    assert len(first) == 1
    clock.pass_time(conn, HOUR)
    assert receive(conn) == []
    clock.pass_time(conn, HOUR)
    assert receive(conn) == []
    assert "per_key_capacity" in one(conn, "select last_error from pgqueue.stream_schedules")
    assert value(conn, "ack", claim_of(first)) == 1
    clock.pass_time(conn, HOUR)
    assert len(receive(conn)) == 1
