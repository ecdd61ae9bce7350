"""Messages that failed come back: when, and with what is known of the failure."""

import time

import pytest

from tests.sql import checker, clock, internals
from tests.sql.queue import (
    ORDERINGS,
    Conn,
    claim_of,
    consumer,
    now,
    receive,
    seconds,
    send,
    send_all,
    seqs_of,
    state,
    value,
)

pytestmark = [pytest.mark.small_limits, pytest.mark.usefixtures("stream", "allowed_afterwards")]


@pytest.mark.parametrize("ordering", ORDERINGS)
def test_a_failed_message_comes_back_after_its_delay_with_its_reason(
    conn: Conn, ordering: str
) -> None:
    consumer(conn, ordering=ordering)
    seq = send(conn, p_key="k")
    before = now(conn)
    assert value(conn, "nack", claim_of(receive(conn)), None, seconds(0.5), "no such user") == 1
    assert receive(conn) == []
    row = state(conn, seq)
    assert (row.state, row.last_error, row.deliver_count) == ("delayed", "no such user", 1)
    assert before + seconds(0.5) <= row.not_visible_until <= now(conn) + seconds(0.5)
    time.sleep(0.6)
    (again,) = receive(conn)
    assert (again.seq, again.deliver_count) == (seq, 2)


def test_what_failed_together_keeps_its_reason_when_it_is_claimed_in_parts(conn: Conn) -> None:
    consumer(conn)
    sent = send_all(conn, ["x"] * 5)
    value(conn, "nack", claim_of(receive(conn)), None, seconds(0), "no such user")
    assert seqs_of(receive(conn, 2)) == sent[:2]
    assert [(r.last_error, r.deliver_count) for r in (state(conn, seq) for seq in sent)] == [
        ("no such user", 2),
        ("no such user", 2),
        *[("no such user", 1)] * 3,
    ]


@pytest.mark.parametrize("ordering", ORDERINGS)
@pytest.mark.parametrize("how", ["returned", "returned in part", "sent"])
def test_after_the_clock_was_set_back_what_is_delayed_comes_when_it_is_due(
    conn: Conn, ordering: str, how: str
) -> None:
    """1. It is due before the time at which the consumer last looked."""
    consumer(conn, ordering=ordering)
    clock.set_clock_back(conn, seconds(3600))
    if how == "sent":
        for delay in (60, 70):
            send(conn, p_key="k", p_deliver_at=now(conn) + seconds(delay))
    else:
        seq = send(conn, p_key="k")
        claim = claim_of(receive(conn))
        value(conn, "nack", claim, None if how == "returned" else [seq], seconds(60))
    assert receive(conn) == []
    checker.check(conn)  # that it will be found, then


@pytest.mark.parametrize("ordering", ORDERINGS)
def test_a_message_that_was_delivered_as_often_as_can_be_counted_is_delivered_on(
    conn: Conn, ordering: str
) -> None:
    """An int that overflows would stop its consumer."""
    most = 2**31 - 1
    consumer(conn, ordering=ordering)
    seq = send(conn, p_key="k")
    value(conn, "nack", claim_of(receive(conn)))
    internals.delivered_often(conn, most - 1)
    for _ in range(3):
        (row,) = receive(conn)
        assert (row.seq, row.deliver_count) == (seq, most)
        value(conn, "nack", row.claim_id)
