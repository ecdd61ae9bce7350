"""A cursor says where to look. What it says may cost time when it is wrong, and never a message.

Each of its hints is made wrong here.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.sql import checker, clock, internals, limits
from tests.sql.cases import for_each
from tests.sql.queue import *

pytestmark = pytest.mark.usefixtures("stream")

LATER = "clock_timestamp() + interval '1 year'"
BEYOND = "1::bigint << 60"


def lanes(low: str, free: str) -> str:
    """All lanes have their first bundle at one place, and their first free one at another."""
    lane = f"(lane, {free}, 0, {low}, 0)::pgqueue.lane_hint"
    return f"array(select {lane} from unnest((hints).lanes))"


# What is wrong with each hint, by its name: it hides whatever there is.
WRONG = {
    "lanes": "'{}'",
    "lanes lost": "null",
    "lanes of another": "array[(1000, 0, 0, 0, 0)::pgqueue.lane_hint]",
    "lanes beyond": lanes(BEYOND, BEYOND),
    "lanes without a free bundle": lanes("low_place", "null"),
    "lanes_from": "null",
    "lanes_from beyond": "1000",
    "due_from": LATER,
    "due_from lost": "null",
    "long_from": LATER,
    "probe_at": LATER,
    "rebuilt_at": LATER,
    "gaps_probe": LATER,
    "idle_until": LATER,
    "was_cut": "not (hints).was_cut",
    "filter_from": "null",
    "filter_from beyond": BEYOND,
    "prefetch_at": "null",
    "prefetch_at of all": "0",
    "size": "null",
    "size of others": "1000",
    "any_waiting": "false",
    "waits_from": BEYOND,
    "free_from": "0",
    "freed_from": BEYOND,
    "tokens_from": LATER,
    "all_keys": "true",
    "assigned_until": LATER,
}  # fmt: skip


BACKOFFS = [pytest.param("linear", marks=pytest.mark.longer), "exponential"]


def test_each_hint_is_made_wrong_here(conn: Conn) -> None:
    assert {name.split()[0] for name in WRONG} == internals.hints(conn)


@pytest.mark.parametrize("backoff", BACKOFFS)
def test_what_failed_a_few_times_comes_again_though_its_next_claimer_waited_for_the_lock(
    conn: Conn, session: Session, backoff: str
) -> None:
    """Three messages of a claim failed once, twice and thrice: the second is due meanwhile."""
    id_ = consumer(conn, backoff=backoff, backoff_base="0.8 s")
    sent = failed(conn, 0, 1, 2)
    send(conn, p_deliver_at=now(conn) + seconds(0.1))
    claim = claim_of(receive(conn, 3))
    busy, settling, waiting = session(), session(), session()
    with ThreadPoolExecutor(1) as pool:
        settling.execute("begin")
        busy.execute("begin")
        clock.end_lease(conn, claim)
        internals.lock_claim(settling, claim)
        internals.lock_consumer(busy, id_)
        due = now(conn) + seconds(0.7)  # the second one, and the first is due already
        waiter = pool.submit(receive, waiting)
        wait_for_a_lock(conn)
        while now(conn) < due:
            time.sleep(0.02)
        assert len(receive(busy)) == 1
        settling.execute("rollback")
        busy.execute("commit")
    checker.check(conn)
    got = seqs_of(waiter.result())
    clock.pass_time(conn, seconds(3))
    assert sorted(got + acked(conn, "s", "c")) == sent


@pytest.mark.parametrize("backoff", BACKOFFS)
def test_what_failed_a_few_times_comes_again_after_the_clock_was_set_back(
    conn: Conn, backoff: str
) -> None:
    consumer(conn, backoff=backoff, backoff_base="0.8 s")
    sent = failed(conn, 0, 1, 2)
    claim = claim_of(receive(conn, 3))
    clock.set_clock_back(conn, seconds(3600))
    clock.end_lease(conn, claim)
    clock.set_clock_back(conn, seconds(3600))
    got = seqs_of(receive(conn))
    checker.check(conn)
    clock.pass_time(conn, seconds(3))
    assert sorted(got + acked(conn, "s", "c")) == sent


@for_each("hint", ["probe_at", "gaps_probe"])
def test_a_look_that_was_noted_before_the_clock_was_set_back_is_made_beside_ready_messages(
    conn: Conn, opened: Session, hint: str
) -> None:
    consumer(conn)
    late = opened()
    expected = send(late, p_priority=1) if hint == "gaps_probe" else 0
    sent = send_all(conn, ["x"] * 5)
    claim = claim_of(receive(conn, 1))
    late.execute("commit")
    if hint == "probe_at":
        clock.end_lease(conn, claim)
        expected = sent[0]
    internals.set_hint(conn, hint, LATER)
    time.sleep(0.05)  # claims do not look until the next look into gaps, after 10 ms
    assert seqs_of(receive(conn, 1)) == [expected]


def test_hints_that_are_told_anew_when_nothing_can_be_had_stay_so(conn: Conn) -> None:
    """Nor is there a look that was made later than now."""
    consumer(conn, visibility_timeout="0.5 s")
    seq = send(conn)
    receive(conn)
    internals.set_hint(conn, "long_from", LATER)
    internals.set_hint(conn, "rebuilt_at", LATER)
    end = time.monotonic() + 30
    while not (got := receive(conn)):
        assert time.monotonic() < end, "its end is hidden"
        time.sleep(0.05)
    assert seqs_of(got) == [seq]


def failed(conn: Conn, *times: int) -> list[int]:
    """Messages that failed so often, and are ready; their numbers."""
    sent = [send(conn) for _ in times]
    for n in range(max(times)):
        claim = claim_of(receive(conn))
        again = [seq for seq, wanted in zip(sent, times, strict=True) if wanted > n]
        value(conn, "nack", claim, again, seconds(0))
        value(conn, "defer", claim) if len(again) < len(sent) else None
    return sent


# Consumers of which some have bundles behind hints that others do not have.
CONSUMERS: dict[str, dict[str, Any]] = {
    "none": {},
    "none filtered": {"p_where": "$.data != null"},
    "none limited": {"per_key_limit": 3},
    "none rated": {"per_key_interval": "10 ms", "per_key_burst": 2},
    "key": {},
    "key filtered": {"p_where": "$.data != null"},
    "key limited": {"per_key_limit": 3},
    "key rated": {"per_key_interval": "10 ms", "per_key_burst": 2},
    "stream": {},
    "stream filtered": {"p_where": "$.data != null"},
}
# What each of the others has, in other combinations.
COMBINED = ("key filtered", "key rated", "stream filtered")
KINDS: list[Any] = [kind for kind in CONSUMERS if kind not in COMBINED]
KINDS += [pytest.param(kind, marks=pytest.mark.longer) for kind in COMBINED]


def everything(conn: Conn, opened: Session, kind: str) -> None:
    """The consumer c has messages in every state; none of them has to wait for long."""
    ordering = kind.split()[0]
    consumer(conn, ordering=ordering, visibility_timeout=seconds(3600), **CONSUMERS[kind])
    open_ = opened()
    send(open_, p_key="late")
    for priority in range(4):
        send_all(conn, ["x"] * 3, p_keys=["a", "b", None], p_priority=priority)
    late = claim_of(receive(conn, 3))
    back = receive(conn, 2)
    send_all(conn, ["x"] * 3, p_keys=["a", "b", None])
    if back:
        value(conn, "nack", claim_of(back), p_delay=seconds(60))
    open_.execute("commit")
    internals.take(conn, 3)
    clock.end_delays(conn)
    clock.end_lease(conn, late)
    if "limited" in kind:
        alter(conn, per_key_limit=4)


@pytest.mark.small_limits
@pytest.mark.parametrize("kind", KINDS)
def test_what_a_wrong_hint_hides_is_found_within_a_minute(
    conn: Conn, opened: Session, kind: str
) -> None:
    everything(conn, opened, kind)
    owed = set(states(conn))
    assert len(owed) == 16
    hidden = {}
    for hint, wrong in WRONG.items():
        with conn.transaction(force_rollback=True):
            internals.set_hint(conn, hint.split()[0], wrong)
            got = acked(conn, "s", "c")
            clock.pass_a_minute(conn)
            for _ in range(100 if "rated" in kind else 1):
                got += acked(conn, "s", "c")
                if len(got) == len(owed):
                    break
                time.sleep(0.012)
            assert len(set(got)) == len(got)
            if left := owed - set(got):
                hidden[hint] = left
    assert hidden == {}


# What lets a message come in 10 s: its number.


def nacked(conn: Conn) -> int:
    (near,) = send_keys(conn, "near")
    value(conn, "nack", claim_of(receive(conn)), p_delay=seconds(10))
    return near


def nacked_alone(conn: Conn) -> int:
    near, _ = send_keys(conn, "near", "other")
    claim = claim_of(receive(conn))
    value(conn, "nack", claim, [near], p_delay=seconds(10))
    value(conn, "ack", claim)
    return near


def nacked_by_a_backoff(conn: Conn) -> int:
    (near,) = send_keys(conn, "near")
    value(conn, "nack", claim_of(receive(conn)))
    return near


def deferred(conn: Conn) -> int:
    (near,) = send_keys(conn, "near")
    value(conn, "defer", claim_of(receive(conn)), p_delay=seconds(10))
    return near


def released(conn: Conn) -> int:
    (near,) = send_keys(conn, "near")
    receive(conn, p_visibility_timeout=seconds(5))
    clock.pass_time(conn, seconds(6))
    return near


def sent_for_later(conn: Conn) -> int:
    return send(conn, p_key="near", p_deliver_at=now(conn) + seconds(10))


def sent_for_later_beside_another(conn: Conn) -> int:
    near = send(conn, p_key="near", p_deliver_at=now(conn) + seconds(10))
    send(conn, p_key="other", p_priority=1)
    value(conn, "ack", claim_of(receive(conn)))
    return near


def postponed(conn: Conn) -> int:
    (near,) = send_keys(conn, "near")
    value(conn, "postpone", "s", "c", [near], now(conn) + seconds(10))
    return near


def postponed_to_sooner(conn: Conn) -> int:
    value(conn, "postpone", "s", "c", [1], now(conn) + seconds(10))
    return 1


def retried(conn: Conn) -> int:
    value(conn, "retry", "s", "c")
    return 1


OF_THE_FIRST = [postponed_to_sooner, retried]
COMES_BACK = [
    sent_for_later,  # before any of them is rolled back, which leaves a gap
    nacked, nacked_alone, nacked_by_a_backoff, deferred, released,
    sent_for_later_beside_another, postponed, *OF_THE_FIRST,
]  # fmt: skip


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "rated" not in str(kind)])
def test_what_comes_back_before_all_that_is_delayed_is_seen_when_it_is_due(
    conn: Conn, kind: str
) -> None:
    """A look at all hints has noted that nothing is due for an hour."""
    ordering = kind.split()[0]
    consumer(conn, ordering=ordering, backoff_base="10 s", **CONSUMERS[kind])
    send_keys(conn, "far")
    value(conn, "nack", claim_of(receive(conn)), p_delay=seconds(3600))
    assert receive(conn) == []
    clock.pass_a_minute(conn)
    assert receive(conn) == []
    hidden = []
    for come_back in OF_THE_FIRST if ordering == "stream" else COMES_BACK:
        with conn.transaction(force_rollback=True):
            expected = come_back(conn)
            if come_back is not retried:
                assert receive(conn) == []
                clock.pass_time(conn, seconds(20))
            if acked(conn, "s", "c") != [expected]:
                hidden.append(come_back.__name__)
    assert hidden == []


def one_waits_for_tokens(conn: Conn) -> None:
    consumer(conn, per_key_interval="1 hour")
    send_keys(conn, "k", "k")
    value(conn, "ack", claim_of(receive(conn)))
    assert receive(conn) == []
    clock.pass_time(conn, seconds(3600))
    internals.set_hint(conn, "rebuilt_at", "clock_timestamp()")


def one_waited_for_one_that_is_gone(conn: Conn) -> None:
    consumer(conn, ordering="key")
    send_keys(conn, "k", "k")
    claim = claim_of(receive(conn, 1))
    assert receive(conn) == []
    value(conn, "ack", claim)


def one_is_held_and_its_lease_ended(conn: Conn) -> None:
    consumer(conn, visibility_timeout=seconds(60))
    send_all(conn, ["x"] * 2)
    receive(conn, 1)
    clock.pass_time(conn, seconds(2))
    value(conn, "ack", claim_of(receive(conn)))
    clock.pass_time(conn, seconds(100))
    internals.set_hint(conn, "rebuilt_at", "clock_timestamp()")


def one_came_back(conn: Conn) -> None:
    consumer(conn, ordering="key")
    (seq,) = send_keys(conn, "k")
    value(conn, "nack", claim_of(receive(conn)), [seq], seconds(0))


def one_is_in_a_lane_of_many(conn: Conn) -> None:
    limits.shrink(conn)
    consumer(conn)
    assert receive(conn) == []  # it has looked at all that there is
    for priority in range(4):
        send(conn, p_priority=priority)
    for _ in range(2):
        internals.take(conn, 2)


@pytest.mark.parametrize("ahead", [True, False])
def test_claims_in_more_lanes_than_have_a_hint_expire_as_soon_as_others(
    conn: Conn, ahead: bool
) -> None:
    """Lanes with free bundles need the hints; those whose bundles all are claimed lose theirs."""
    limits.set_constant(conn, "limit_lanes", 2)
    consumer(conn, visibility_timeout=seconds(10), notify_done=not ahead)
    sent = [send(conn, p_priority=-i) for i in range(7)]
    assert [seqs_of(receive(conn, 1)) for _ in sent] == [[seq] for seq in sent]
    checker.check(conn)
    clock.pass_time(conn, seconds(20))
    assert sorted(acked(conn, "s", "c", 1)) == sent


@pytest.mark.parametrize(
    ("hint", "one_message"),
    [
        ("due_from", one_waits_for_tokens),
        ("long_from", one_is_held_and_its_lease_ended),
        ("any_waiting", one_waited_for_one_that_is_gone),
        ("waits_from", one_waited_for_one_that_is_gone),
        ("free_from", one_came_back),
        ("lanes_from", one_is_in_a_lane_of_many),
    ],
)
def test_a_hint_that_is_seldom_needed_hides_nothing_for_longer(
    conn: Conn, hint: str, one_message: Callable[[Conn], None]
) -> None:
    one_message(conn)
    for name, wrong in WRONG.items():
        if name.split()[0] == hint:
            with conn.transaction(force_rollback=True):
                internals.set_hint(conn, hint, wrong)
                most = acked(conn, "s", "c")
                clock.pass_a_minute(conn)
                assert len(acked(conn, "s", "c")) == 1, f"{name} hides it, beside {most}"


def test_a_key_that_a_long_claim_frees_goes_on_once_that_is_committed(
    conn: Conn, session: Session
) -> None:
    """Also if all hints were read before the commit: they do not pass what may be recorded yet."""
    consumer(conn, ordering="key", visibility_timeout=seconds(3600))
    send_key(conn, "a")
    claim = claim_of(receive(conn, 1))
    clock.pass_time(conn, seconds(2))
    send_key(conn, "b")
    delivered(conn)  # which moves the claim to the long ones
    later = send_key(conn, "a")
    assert receive(conn) == []
    other = session()
    other.execute("begin")
    assert value(other, "ack", claim) == 1
    for _ in range(2):
        clock.pass_a_minute(conn)
        send_keys(conn, *"bcd")
        assert len(delivered(conn, 2)) == 3
    other.execute("commit")
    assert seqs_of(receive(conn)) == [later]
