"""Messages that failed come back: when, and with what is known of the failure."""

import time
from itertools import product

import pytest

from tests.sql import checker, clock, internals
from tests.sql.queue import *

pytestmark = [pytest.mark.small_limits, pytest.mark.usefixtures("stream", "allowed_afterwards")]


@pytest.mark.promise("concepts: transitions of a message")
def test_a_failed_message_comes_back_after_its_delay_with_its_reason(conn: Conn) -> None:
    for ordering in ORDERINGS:
        consumer(conn, ordering, ordering)
    seq = send(conn, p_key="k")
    for name in ORDERINGS:
        before, claim = now(conn), claim_of(receive(conn, name=name))
        assert value(conn, "nack", claim, None, seconds(0.5), "no such user") == 1
        assert receive(conn, name=name) == []
        row = state(conn, seq, name)
        assert (row.state, row.last_error, row.deliver_count) == ("delayed", "no such user", 1)
        assert before + seconds(0.5) <= row.not_visible_until <= now(conn) + seconds(0.5)
    time.sleep(0.6)
    for name in ORDERINGS:
        assert [(row.seq, row.deliver_count) for row in receive(conn, name=name)] == [(seq, 2)]


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


def test_after_the_clock_was_set_back_what_is_delayed_comes_when_it_is_due(conn: Conn) -> None:
    """1. It is due before the time at which the consumer last looked."""
    names = {}
    for ordering, how in product(ORDERINGS, ("returned", "returned in part", "sent")):
        names[f"{ordering}, {how}"] = how
        consumer(conn, f"{ordering}, {how}", ordering)
    clock.set_clock_back(conn, seconds(3600))
    for name, how in names.items():
        if how == "sent":
            for delay in (60, 70):
                due = now(conn) + seconds(delay)
                send(conn, p_key="k", p_consumers=[name], p_deliver_at=due)
        else:
            seq = send(conn, p_key="k", p_consumers=[name])
            claim = claim_of(receive(conn, name=name))
            value(conn, "nack", claim, None if how == "returned" else [seq], seconds(60))
        assert receive(conn, name=name) == []
    checker.check(conn)  # that it will be found, then


def test_a_message_that_was_delivered_as_often_as_can_be_counted_is_delivered_on(
    conn: Conn,
) -> None:
    """An int that overflows would stop its consumer."""
    most = 2**31 - 1
    for ordering in ORDERINGS:
        consumer(conn, ordering, ordering)
    seq = send(conn, p_key="k")
    for ordering in ORDERINGS:
        value(conn, "nack", claim_of(receive(conn, name=ordering)))
    internals.delivered_often(conn, most - 1)
    for _ in range(3):
        for ordering in ORDERINGS:
            (row,) = receive(conn, name=ordering)
            assert (row.seq, row.deliver_count) == (seq, most)
            value(conn, "nack", row.claim_id)
