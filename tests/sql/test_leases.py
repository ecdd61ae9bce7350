"""Leases: how long they are, extending them, and what becomes of a claim whose lease ends."""

from __future__ import annotations

import time
from itertools import product

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


def test_a_claim_is_extended_while_another_claimer_is_at_it(conn: Conn, url: str) -> None:
    ids = {ordering: consumer(conn, ordering, ordering) for ordering in ORDERINGS}
    send(conn)
    claims = [claim_of(receive(conn, 1, name)) for name in ids]
    conn.execute("set statement_timeout = '5 s'")
    with connection.connect(url) as other, other.transaction():
        for consumer_id, claim in zip(ids.values(), claims, strict=True):
            internals.lock_consumer(other, consumer_id)
            assert value(conn, "extend", claim) == 1


@pytest.mark.promise("feature: visibility timeout, heartbeat", "concepts: transitions of a message")
def test_a_claim_is_taken_over_when_its_lease_is_over(conn: Conn) -> None:
    for ordering in ORDERINGS:
        consumer(conn, ordering, ordering, visibility_timeout=seconds(20))
    seq, firsts = send(conn), {}
    for name in ORDERINGS:
        firsts[name] = claim_of(receive(conn, name=name))
        assert receive(conn, name=name) == []
        value(conn, "extend", firsts[name], seconds(50))
    clock.pass_time(conn, seconds(25))
    for name in ORDERINGS:
        assert receive(conn, name=name) == [], "an extended claim is not taken over"
    clock.pass_time(conn, seconds(35))
    for name, first in firsts.items():
        (row,) = receive(conn, name=name)
        assert (row.seq, row.deliver_count) == (seq, 2)
        assert state(conn, seq, name).last_error == TAKEN_OVER
        assert value(conn, "ack", first) == 0
        assert value(conn, "ack", row.claim_id) == 1


@pytest.mark.promise("guarantee: Fixed claims", "concepts: transitions of a message")
def test_an_owner_that_comes_back_late_but_first_keeps_its_claim(conn: Conn) -> None:
    cases = [*product(("ack", "nack", "extend", "defer", "dead_letter"), ORDERINGS)]
    for settle, ordering in cases:
        consumer(conn, f"{settle} {ordering}", ordering)
    send(conn)
    claims = [claim_of(receive(conn, name=" ".join(case))) for case in cases]
    clock.pass_time(conn, seconds(100))
    assert [value(conn, case[0], claim) for case, claim in zip(cases, claims, strict=True)] == [
        1
    ] * len(cases)


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
