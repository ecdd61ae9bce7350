"""Postponing: messages that nobody has claimed come later, and no other message is changed."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from itertools import product
from typing import Any

import psycopg
import pytest

from tests.sql import checker, clock, internals
from tests.sql.queue import *

pytestmark = pytest.mark.usefixtures("stream", "allowed_afterwards")

HOUR = timedelta(hours=1)


def postpone(conn: Conn, *seqs: int, by: timedelta = HOUR, name: str = "c") -> int:
    """Postpone messages of a consumer; how many that were."""
    return value(conn, "postpone", "s", name, list(seqs), now(conn) + by)


def acked_all(conn: Conn) -> list[int]:
    """Everything, also where a claim with small limits finds nothing at first."""
    got: list[int] = []
    for _ in range(40):
        got += acked(conn, "s", "c", 7)
    return got


@pytest.mark.small_limits
@pytest.mark.parametrize("ordering", ORDERINGS)
@pytest.mark.promise("concepts: transitions of a message")
def test_messages_come_later_wherever_the_consumer_has_them(conn: Conn, ordering: str) -> None:
    """New, ready, delayed and waiting ones; not claimed and dead ones, nor others of their runs."""
    consumer(conn, ordering=ordering)
    dead = send_keys(conn, "dead")
    value(conn, "dead_letter", claim_of(receive(conn)))
    held = send_keys(conn, "a", "b")
    claim = claim_of(receive(conn, 2))
    ready = send_keys(conn, *"aabbefghij")
    receive(conn, 1)
    later = now(conn) + timedelta(minutes=1)
    delayed = send_all(conn, ["x"] * 3, p_keys=["k", "l", "m"], p_deliver_at=later)
    receive(conn, 1)
    before = states(conn)
    new = send_all(conn, ["x"] * 3, p_keys=["n", "o", "p"])
    chosen = [held[1], ready[0], ready[5], delayed[1], new[1], dead[0], 10**9]
    waiting = [s for s in chosen if before.get(s, "new") not in ("claimed", "dead") and s < 10**9]

    assert postpone(conn, *chosen) == len(waiting)
    checker.check(conn)
    assert states(conn)[held[1]] == "claimed"
    assert value(conn, "ack", claim) == 2
    clock.pass_time(conn, timedelta(minutes=10))
    clock.end_leases(conn)
    early = acked_all(conn)
    assert not set(early) & set(waiting)
    clock.pass_time(conn, HOUR)
    got = [*early, *acked_all(conn)]
    assert sorted(got) == sorted({*ready, *delayed, *new})
    assert len(got) == len(set(got))
    if ordering == "none":
        assert set(early) == {*ready, *delayed, *new} - set(waiting)


@pytest.mark.parametrize("assigned", ["", "waiting", "delayed"])
def test_a_key_waits_for_its_postponed_message(conn: Conn, assigned: str) -> None:
    """In the line, behind another, or delayed already."""
    consumer(conn, ordering="key")
    first, second, other, third = send_keys(conn, "k", "k", "o", "k")
    claim = claim_of(receive(conn, 1)) if assigned else 0
    if assigned == "delayed":
        value(conn, "nack", claim, None, timedelta(minutes=1))
    assert postpone(conn, second if assigned == "waiting" else first) == 1
    checker.check(conn)
    if assigned == "waiting":
        value(conn, "ack", claim)
    clock.pass_time(conn, timedelta(minutes=10))
    assert acked_all(conn) == [other]
    clock.pass_time(conn, HOUR)
    assert acked_all(conn) == [first, second, third][assigned == "waiting" :]


def test_a_dealt_bundle_that_nobody_has_claimed_waits(conn: Conn) -> None:
    """Two messages of a key, of which the first is postponed, beside one without a key."""
    consumer(conn, ordering="key")
    a, b, c, first, second, other, third = send_keys(conn, "a", "b", "c", "k", "k", "o", "k")
    alone = send(conn)
    held = receive(conn, 3)
    assert seqs_of(held) == [a, b, c]
    assigned = [bundle for bundle in internals.bundles(conn) if bundle.lane == 0]
    assert [each.message_count for each in assigned] == [3, 3, 2]
    assert postpone(conn, first) == 1
    checker.check(conn)
    assert sorted(acked_all(conn)) == [other, alone]
    value(conn, "ack", claim_of(held))
    assert postpone(conn, third) == 1
    clock.pass_time(conn, HOUR)
    assert acked_all(conn) == [first, second, third]


def test_a_key_that_waits_stays_in_order_around_its_postponed_messages(conn: Conn) -> None:
    """Before them the key is served; what comes between and behind waits for them."""
    consumer(conn, ordering="key")
    for size, by in product((1, 3, 10), (HOUR, -HOUR)):
        send_keys(conn, "k")
        claim = claim_of(receive(conn, size))
        behind = send_keys(conn, *"kkkkkk")
        assert receive(conn, size) == []
        assert postpone(conn, behind[2], behind[4], by=by) == 2
        checker.check(conn)
        value(conn, "ack", claim)
        found = acked(conn, "s", "c", size)
        assert found == (behind[:2] if by == HOUR else behind), (size, by)
        clock.pass_time(conn, 2 * HOUR)
        assert found + acked(conn, "s", "c", size) == behind, (size, by)


def test_the_rest_of_a_delayed_run_stays_behind(conn: Conn) -> None:
    """Both messages of a key failed together; the first is postponed, so the second waits."""
    consumer(conn, ordering="key")
    first, second = send_keys(conn, "k", "k")
    value(conn, "nack", claim_of(receive(conn, 2)), [first, second], timedelta(minutes=1))
    receive(conn, 2)
    assert postpone(conn, first) == 1
    checker.check(conn)
    clock.pass_time(conn, timedelta(minutes=10))
    assert receive(conn, 2) == []
    clock.pass_time(conn, HOUR)
    assert acked_all(conn) == [first, second]


@pytest.mark.parametrize("settings", [{}, {"per_key_limit": 1}, {"fair": True}])
def test_a_time_that_has_passed_makes_them_due(conn: Conn, settings: dict[str, Any]) -> None:
    consumer(conn, **settings)
    later = now(conn) + HOUR
    seqs = send_all(conn, ["x"] * 3, p_keys=["k", "l", "m"], p_deliver_at=later)
    assert receive(conn, 3) == []
    assert postpone(conn, *seqs[:2], by=-HOUR) == 2
    assert sorted(acked_all(conn)) == seqs[:2]
    assert postpone(conn, seqs[2], by=2 * HOUR) == 1
    clock.pass_time(conn, HOUR * 1.5)
    assert receive(conn, 3) == []
    clock.pass_time(conn, HOUR)
    assert acked_all(conn) == [seqs[2]]


def test_limits_of_keys_hold_for_postponed_messages(conn: Conn) -> None:
    consumer(conn, p_settings='{"per_key_limit": 2}')
    seqs = send_keys(conn, *"kkkkk")
    held = seqs_of(receive(conn, 1))
    assert postpone(conn, seqs[1], seqs[3]) == 2
    checker.check(conn)
    got = {*held, *acked_all(conn)}
    assert got == {seqs[0], seqs[2], seqs[4]}
    clock.pass_time(conn, HOUR)
    clock.end_leases(conn)
    assert set(acked_all(conn)) == {seqs[1], seqs[3], *held}


@pytest.mark.small_limits
def test_new_messages_keep_priority_and_expiry(conn: Conn) -> None:
    """Found far behind, without taking what is before them."""
    consumer(conn)
    receive(conn, 1)
    many = [send(conn, p_priority=i % 2) for i in range(20)]
    offer = send(conn, p_expires_at=now(conn) + timedelta(minutes=30))
    assert postpone(conn, many[17], many[4], offer) == 3
    assert postpone(conn, many[17], by=2 * HOUR) == 1, "once more"
    checker.check(conn)
    assert len([s for s, state in states(conn).items() if state == "new"]) == 18
    assert set(acked_all(conn)) == {*many} - {many[17], many[4]}
    clock.pass_time(conn, 3 * HOUR)
    assert [m.priority for m in receive(conn, 5)] == [1, 0]
    assert states(conn)[offer] == "dead"


def test_a_filter_is_not_passed_by_postponing(conn: Conn) -> None:
    consumer(conn, p_topic="a.#")
    a, b, c = send_keys(conn, "a.x", "b.x", "a.y")
    assert postpone(conn, a, b) == 1
    assert acked_all(conn) == [c]
    clock.pass_time(conn, HOUR)
    assert acked_all(conn) == [a]
    assert states(conn) == {}


def test_small_claims_do_not_find_it(conn: Conn) -> None:
    """Messages that were cut ahead for small claims are postponed, too."""
    consumer(conn)
    seqs = send_all(conn, ["x"] * 40)
    early = [claimed.seq for _ in range(3) for claimed in receive(conn, 1)]
    assert internals.count(conn, "consumer_messages") > 9
    assert postpone(conn, *seqs[5:8]) == 3
    checker.check(conn)
    assert early + acked(conn, "s", "c", 1) == [s for s in seqs if s not in seqs[5:8]]
    assert receive(conn) == []
    clock.pass_time(conn, HOUR)
    assert sorted(acked(conn, "s", "c", 9)) == sorted(early + seqs[5:8]), "and what was claimed"


def test_a_claim_that_is_being_made_is_waited_for(conn: Conn, session: Session) -> None:
    consumer(conn)
    (first, second) = send_all(conn, ["x"] * 2)
    other = session()
    with other.transaction():
        assert seqs_of(receive(other, 1)) == [first]
        with conn.transaction():
            conn.execute("set local lock_timeout = '100 ms'")
            with pytest.raises(psycopg.errors.LockNotAvailable, match="Nothing was changed"):
                postpone(conn, first, second)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(postpone, session(), first, second)
            other.execute("select pg_sleep(0.05)")
            other.execute("commit")
            assert waiting.result() == 1, "what is claimed by then is passed over"
    assert states(conn) == {first: "claimed", second: "delayed"}
