"""Leases: how long they are, extending them, and what becomes of a claim whose lease ends."""

from __future__ import annotations

import time

import pytest

from spark_pgqueue.postgres import connection
from tests.sql import clock, internals
from tests.sql.queue import *

pytestmark = pytest.mark.usefixtures("stream", "allowed_afterwards")


def test_a_lease_is_the_consumers_visibility_timeout_or_that_of_the_claim(conn: Conn) -> None:
    consumer(conn, visibility_timeout=seconds(100))
    send_all(conn, ["x", "y"])

    def left() -> float:
        return internals.claims(conn)[-1].seconds_left

    claim = claim_of(receive(conn, 1))
    assert 95 < left() <= 100
    assert value(conn, "extend", claim, seconds(1000)) == 1
    assert 995 < left() <= 1000
    assert value(conn, "extend", claim, seconds(10)) == 1
    assert value(conn, "extend", claim) == 1
    assert 995 < left() <= 1000, "never shortened"
    value(conn, "ack", claim)
    claim = claim_of(receive(conn, 1, p_visibility_timeout=seconds(50)))
    assert 45 < left() <= 50
    value(conn, "extend", claim)
    assert 45 < left() <= 50


def test_a_claim_beside_another_claimer_has_the_lease_that_it_asks_for(
    conn: Conn, url: str
) -> None:
    consumer_id = consumer(conn)
    send_all(conn, ["x"] * 10)
    value(conn, "ack", claim_of(receive(conn, 1)))
    with connection.connect(url) as other, other.transaction():
        internals.lock_consumer(other, consumer_id)
        assert len(receive(conn, 5, p_visibility_timeout=seconds(500))) == 5
    assert 495 < internals.claims(conn)[-1].seconds_left <= 500


@pytest.mark.parametrize("ordering", ORDERINGS)
def test_a_claim_is_extended_while_another_claimer_is_at_it(
    conn: Conn, url: str, ordering: str
) -> None:
    consumer_id = consumer(conn, ordering=ordering)
    send(conn)
    claim = claim_of(receive(conn, 1))
    conn.execute("set statement_timeout = '5 s'")
    with connection.connect(url) as other, other.transaction():
        internals.lock_consumer(other, consumer_id)
        assert value(conn, "extend", claim) == 1


@pytest.mark.parametrize("ordering", ORDERINGS)
def test_a_claim_is_taken_over_when_its_lease_is_over(conn: Conn, ordering: str) -> None:
    consumer(conn, ordering=ordering, visibility_timeout=seconds(20))
    seq = send(conn)
    first = claim_of(receive(conn))
    assert receive(conn) == []
    value(conn, "extend", first, seconds(50))
    clock.pass_time(conn, seconds(25))
    assert receive(conn) == [], "an extended claim is not taken over"
    clock.pass_time(conn, seconds(35))
    (row,) = receive(conn)
    assert (row.seq, row.deliver_count) == (seq, 2)
    assert state(conn, seq).last_error == TAKEN_OVER
    assert value(conn, "ack", first) == 0
    assert value(conn, "ack", row.claim_id) == 1


@pytest.mark.parametrize("ordering", ORDERINGS)
def test_an_owner_that_comes_back_late_but_first_keeps_its_claim(conn: Conn, ordering: str) -> None:
    settlements = ("ack", "nack", "extend", "defer", "dead_letter")
    for name in settlements:
        consumer(conn, name, ordering)
    send(conn)
    claims = [claim_of(receive(conn, name=name)) for name in settlements]
    clock.pass_time(conn, seconds(100))
    assert [value(conn, *each) for each in zip(settlements, claims, strict=True)] == [1] * 5


def test_a_lease_that_ends_is_noticed_while_a_backlog_is_claimed(conn: Conn) -> None:
    consumer(conn, visibility_timeout=seconds(1))
    sent = send_all(conn, ["x"] * 5)
    assert [claim_one(conn), claim_one(conn)] == sent[:2]
    time.sleep(1.05)
    assert claim_one(conn) == sent[0]


def test_a_claim_passes_over_a_lease_whose_owner_is_just_settling(conn: Conn, url: str) -> None:
    consumer(conn)
    sent = send_all(conn, ["x"] * 2)
    late = claim_of(receive(conn, 1))
    clock.end_leases(conn)
    conn.execute("set statement_timeout = '5 s'")
    with connection.connect(url) as other, other.transaction():
        assert value(other, "ack", late) == 1
        assert claim_one(conn) == sent[1]
