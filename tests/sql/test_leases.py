"""Leases: how long they are, extending them, and what becomes of a claim whose lease ends."""

from __future__ import annotations

import time
from itertools import product
from typing import Any

import pytest

from spark_pgqueue.postgres import connection
from tests.sql import checker, clock, internals, limits
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


# Claims behind many free bundles


def where(conn: Conn, key: str, **options: Any) -> list[Any]:
    """Receive a message with a key."""
    return call(conn, "receive_where", "s", "c", f'$.key == "{key}"', **options)


def bundles_ahead(conn: Conn, count: int) -> list[int]:
    """Send messages x, each of which becomes a free bundle of its own."""
    sent = []
    for _ in range(count):
        sent += send_keys(conn, "x")
        assert where(conn, "y", p_look=1) == []  # takes it
    free = "select count(*) from pgqueue.consumer_messages where token is null"
    assert one(conn, free) == count
    return sent


@pytest.mark.parametrize(
    ("ahead", "is_new"),
    [(3, True), (3, False), pytest.param(1010, False, marks=pytest.mark.longer)],
)
@pytest.mark.parametrize("settings", [{}, {"max_in_flight": 1}])
def test_a_claim_behind_many_others_expires_as_any_other(
    conn: Conn, ahead: int, is_new: bool, settings: dict[str, Any]
) -> None:
    """What is not new is claimed without the consumer's lock, unless settings need it."""
    if ahead == 3:
        limits.set_constant(conn, "limit_long", 1)
    consumer(conn, **settings)
    first = bundles_ahead(conn, ahead)[0]
    (seq,) = send_keys(conn, "y")
    assert is_new or where(conn, "y", p_look=1) == []
    assert seqs_of(where(conn, "y", p_visibility_timeout=seconds(0.5))) == [seq]
    assert where(conn, "y") == []
    checker.check(conn)
    time.sleep(0.6)
    if settings:
        assert claim_one(conn) == first, "the expired claim is no longer in flight"
    else:
        (again,) = where(conn, "y")
        assert (again.seq, again.deliver_count) == (seq, 2)


def test_a_claim_before_which_others_were_returned_does_not_stay_in_flight(conn: Conn) -> None:
    """With max_in_flight, nothing is claimed before it expires."""
    limits.set_constant(conn, "limit_long", 1)
    consumer(conn, max_in_flight=1)
    sent = [send(conn) for _ in range(4)]
    for _ in sent[:3]:
        value(conn, "nack", claim_of(receive(conn, 1)), p_delay=seconds(1000))
    assert seqs_of(receive(conn, 1, p_visibility_timeout=seconds(0.5))) == sent[3:]
    value(conn, "retry", "s", "c")
    alter(conn, max_in_flight=2)
    value(conn, "ack", claim_of(receive(conn, 1)))  # the others are ready now
    alter(conn, max_in_flight=1)
    time.sleep(0.6)
    clock.pass_a_minute(conn)
    assert claim_one(conn) == sent[1]


def test_what_a_query_claims_back_behind_many_others_expires_as_any_other(conn: Conn) -> None:
    reader = Reader(conn, consumer(conn))
    firsts = [claim_of(receive(conn, 1)) for _ in send_keys(conn, *"xxx")]
    (seq,) = send_keys(conn, "y")
    end = reader.ask()
    assert end.claimed == 1
    clock.end_leases(conn)
    value(conn, "nack", claim_of(where(conn, "y")))
    for claim in firsts:
        value(conn, "nack", claim)
    limits.set_constant(conn, "limit_long", 1)
    assert reader.resume(end) == (1, 0, 0)
    clock.end_leases(conn)
    assert seqs_of(where(conn, "y")) == [seq]
