"""By key: what is assigned for small claims, what waits and what comes back, in each key's order.

With ordering=stream all messages are of one key. The attack at the end is on all orderings.
"""

from __future__ import annotations

import os
import random
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest

from spark_pgqueue.postgres import connection
from tests.sql import checker, clock, internals, limits
from tests.sql.cases import for_each
from tests.sql.cost import cost
from tests.sql.queue import *

pytestmark = [pytest.mark.usefixtures("stream", "allowed_afterwards"), pytest.mark.timeout(120)]


@pytest.fixture
def keyed(conn: Conn, stream: int) -> int:
    """What `by_key` makes."""
    return by_key(conn)


def by_key(conn: Conn) -> int:
    """The consumer c with ordering=key; its id."""
    return consumer(conn, ordering="key", visibility_timeout=seconds(60))


@pytest.fixture
def sent(conn: Conn, keyed: int) -> list[int]:
    """Three messages of a, three of b, and one of c, all assigned one by one. Two are claimed."""
    sent = send_keys(conn, *"ababcab")
    assert seqs_of(receive(conn, 1)) == sent[:1]
    assert seqs_of(receive(conn, 1)) == sent[1:2]
    checker.check(conn)
    return sent


def free(conn: Conn) -> int:
    """How many assigned bundles claims may have."""
    assigned = one(conn, "select _pgqueue.lane_assigned()")
    return sum((b.lane, b.state) == (assigned, "ready") for b in internals.bundles(conn))


def settled(conn: Conn, rows: list[Any]) -> list[int]:
    """Acknowledges what was received, all of it; returns its numbers."""
    assert value(conn, "ack", claim_of(rows)) == len(rows)
    return seqs_of(rows)


def assert_in_order(found: list[int], keys: dict[int, str]) -> None:
    last: dict[str, int] = defaultdict(int)
    for seq in found:
        assert last[keys[seq]] < seq
        last[keys[seq]] = seq


# One after the other


@for_each("ordering", ["key", "stream"])
def test_an_open_acknowledgement_holds_what_comes_after_it(
    conn: Conn, session: Session, opened: Session, ordering: str
) -> None:
    """Also over its rollback; the session itself may go on, because it does both or neither."""
    consumer(conn, ordering=ordering)
    sent = send_keys(conn, *"aaa")
    first = receive(conn, 1)
    assert seqs_of(first) == sent[:1]
    assert receive(conn, 1) == []
    acking = opened()
    assert value(acking, "ack", claim_of(first)) == 1
    assert receive(conn, 1) == []
    assert seqs_of(receive(acking, 1)) == sent[1:2]
    acking.execute("rollback")
    assert receive(conn, 1) == []
    second = call(conn, "receive", "s", "c", 1, p_ack=claim_of(first))
    assert seqs_of(second) == sent[1:2]
    assert seqs_of(call(conn, "receive", "s", "c", 1, p_ack=claim_of(second))) == sent[2:]


@pytest.mark.all_versions
@for_each("ordering", ["key", "stream"])
def test_a_claim_that_is_acknowledged_twice_at_once_frees_one_bundle(
    conn: Conn, session: Session, opened: Session, ordering: str
) -> None:
    consumer(conn, ordering=ordering)
    sent = send_keys(conn, *"aaaa")
    claim = claim_of(receive(conn, 1))
    first = opened()
    assert value(first, "ack", claim) == 1
    with ThreadPoolExecutor(2) as pool:
        again = [pool.submit(value, session(), "ack", claim) for _ in range(2)]
        wait_for_a_lock(conn, 2)
        first.execute("commit")
        assert [each.result(30) for each in again] == [0, 0]
    assert seqs_of(receive(conn, 1)) == sent[1:2]
    assert receive(conn, 1) == []


@for_each("end", ["commit", "rollback"])
def test_a_prepared_acknowledgement_holds_what_comes_after_it(
    conn: Conn, opened: Session, end: str
) -> None:
    by_key(conn)
    sent = send_keys(conn, *"aab")
    first = receive(conn, 1)
    acking = opened()
    assert value(acking, "ack", claim_of(first)) == 1
    acking.execute("prepare transaction 'p'")
    assert seqs_of(receive(conn, 1)) == sent[2:]
    assert receive(conn, 1) == []
    assert receive(conn, 5) == [], "which assigns again"
    conn.execute(f"{end} prepared 'p'".encode())
    checker.check(conn)
    assert seqs_of(receive(conn, 1)) == (sent[1:2] if end == "commit" else [])
    assert value(conn, "ack", claim_of(first)) == (end == "rollback")


@for_each("ordering", ["key", "stream"])
def test_dealt_bundles_are_claimed_beside_who_has_the_lock(
    conn: Conn, opened: Session, ordering: str
) -> None:
    consumer_id = consumer(conn, ordering=ordering)
    sent = send_keys(conn, *"aaaaaa")
    rows = receive(conn, 2)
    holder = opened()
    internals.lock_consumer(holder, consumer_id)
    conn.execute("set lock_timeout = '100 ms'")
    for part in sent[2:4], sent[4:]:
        rows = call(conn, "receive", "s", "c", 2, p_ack=claim_of(rows))
        assert seqs_of(rows) == part
    holder.execute("rollback")
    settled(conn, rows)
    later = send_keys(conn, "a")
    assert seqs_of(receive(conn, 2)) == later


def test_polls_of_a_stream_in_order_beside_its_claim_lock_nobody(conn: Conn) -> None:
    """All workers but one poll all the time."""
    consumer(conn, ordering="stream")
    send_keys(conn, *"aaa")
    assert len(receive(conn, 1)) == 1
    with conn.transaction():
        assert receive(conn, 1) == []
        mine = "from pg_locks where locktype = 'advisory' and pid = pg_backend_pid()"
        assert one(conn, f"select count(*) {mine}") == 0


@for_each("size", [1, 2**30, 2**31 - 1])
@for_each("how", ["defer", "release"])
def test_a_claim_of_any_size_that_comes_back_stops_no_later_one(
    conn: Conn, how: str, size: int
) -> None:
    """It is assigned as it was: later claims compare twice its size with theirs."""
    reader = Reader(conn, consumer(conn, ordering="stream"))
    sent = send_keys(conn, *"aaa")
    assert settled(conn, receive(conn, 1)) == sent[:1]
    if how == "defer":
        assert value(conn, "defer", claim_of(receive(conn, 2**31 - 1))) == 2
    else:
        assert reader.ask().claimed == 2
        clock.end_leases(conn)
        released = call(conn, "reader_release", reader.id, reader.consumer_id, 0)
        assert [tuple(row) for row in released] == [(0, 2)]
    assert seqs_of(delivered(conn, size)) == sent[1:]


@for_each("size", [1, 3])
def test_claims_of_a_stream_in_order_are_full_over_gaps(conn: Conn, size: int) -> None:
    """Numbers that a rollback left out stand between those of one bundle."""
    consumer(conn, ordering="stream")
    sent: list[int] = []
    for i in range(20):
        with conn.transaction(force_rollback=True):
            send_keys(conn, "x")
        sent += send_keys(conn, *("ab" if i % 2 else "a"))
    assert max(sent) > len(sent) + 10
    found: list[int] = []
    for _ in range(8):
        rows = receive(conn, size)
        checker.check(conn)
        assert len(rows) == size
        found += settled(conn, rows)
    assert found + acked(conn, "s", "c", 7) == sent


@for_each("keys", ["ab" * 101, "aab" * 70, "a" * 780])
def test_claims_of_frequent_keys_are_full(conn: Conn, keys: str) -> None:
    """Also where all that was assigned of a key is done, and the rest of it is assigned."""
    by_key(conn)
    key_of = dict(zip(send_keys(conn, *keys), keys, strict=True))
    got = defaultdict(list)
    claims = []
    while rows := receive(conn, 3):
        assert {row.key for row in rows} == {key_of[rows[0].seq]}
        got[rows[0].key] += settled(conn, rows)
        claims.append(len(rows))
        if len(claims) in (1, 2, 60, 61):
            checker.check(conn)
    assert got == {k: [seq for seq in key_of if key_of[seq] == k] for k in set(keys)}
    assert claims.count(3) >= len(claims) - 5


def test_more_is_dealt_before_the_last_bundle_is_claimed(conn: Conn, keyed: int) -> None:
    """So other claimers need not wait for who assigns."""
    clock.stop_looking(conn)
    send_keys(conn, *(f"k{i}" for i in range(1000)))
    receive(conn, 1)
    left, before = free(conn), 1001
    while left < before:
        receive(conn, 1)
        left, before = free(conn), left
        assert left > 0
    checker.check(conn)


# Sizes


@for_each("sizes", [(10, 1), (1, 10), (64, 3)])
def test_claims_of_one_size_do_not_starve_beside_bundles_of_another(
    conn: Conn, sizes: tuple[int, int]
) -> None:
    """A claim has at most what it wants, and acknowledges what it has."""
    by_key(conn)
    sent = send_keys(conn, *"abcdefgh" * 15)
    found: list[int] = []
    while len(found) < len(sent):
        for size in sizes:
            rows = receive(conn, size)
            assert 0 < len(rows) <= size
            found += settled(conn, rows)
            if len(found) == len(sent):
                break
    checker.check(conn)
    assert sorted(found) == sent
    assert_in_order(found, {s: "abcdefgh"[i % 8] for i, s in enumerate(sent)})


def test_a_bundle_that_a_rollback_left_is_not_too_large_for_a_claim(
    conn: Conn, session: Session, keyed: int
) -> None:
    """It stands before the bundles of the size that others claim by now."""
    sent = send_keys(conn, *(str(i) for i in range(32)))
    other = session()
    got = [receive(conn, 8)]
    other.execute("begin")
    assert len(receive(other, 8)) == 8
    got += [receive(conn, 8), receive(conn, 8)]
    sent += send_keys(conn, *(str(i) for i in range(32, 92)))
    got.append(receive(conn, 6))
    other.execute("rollback")
    while rows := receive(conn, 6):
        got.append(rows)
    assert max(map(len, got[3:])) == 6
    assert sorted(row.seq for rows in got for row in rows) == sent


def test_a_claim_of_all_there_is_has_no_key_of_another_one(conn: Conn, keyed: int) -> None:
    sent = send_keys(conn, *"aab")
    rows = receive(conn, 1)
    assert seqs_of(rows) == sent[:1]
    more = send_keys(conn, *"a" * 300, "c")
    assert sorted(acked(conn, "s", "c", 1000)) == [sent[2], more[-1]]
    settled(conn, rows)
    assert acked(conn, "s", "c", 1000) == [sent[1], *more[:-1]]


def test_a_claim_of_all_there_is_keeps_all_keys_to_its_end(conn: Conn, keyed: int) -> None:
    """As Spark has it: it knows no key."""
    sent = send_keys(conn, *(f"k{i}" for i in range(300)))
    rows = receive(conn, 1000)
    assert seqs_of(rows) == sent
    later = send_keys(conn, "k0", "other")
    assert receive(conn, 1) == []
    assert value(conn, "ack", claim_of(rows), sent[:-1]) == 299
    assert receive(conn, 1000) == []
    assert value(conn, "nack", claim_of(rows)) == 1
    assert sorted(acked(conn, "s", "c", 1)) == [sent[-1], *later]


@pytest.mark.small_limits
def test_a_key_that_left_a_claim_is_free_also_when_the_rest_comes_back_for_smaller_claims(
    conn: Conn, keyed: int
) -> None:
    a1, b1, c1 = send_keys(conn, "a", "b", "c")
    claim = claim_of(receive(conn, 3))
    a2, a3 = send_keys(conn, "a", "a")
    assert receive(conn) == [], "a2 and a3 wait for a1"
    value(conn, "ack", claim, [a1])
    value(conn, "nack", claim)
    (a4,) = send_keys(conn, "a")
    assert sorted(acked(conn, "s", "c", 1)) == [b1, c1, a2, a3, a4]


@for_each("ordering", ["none", "key"])
def test_a_reader_has_what_was_cut_or_dealt_for_small_claims(conn: Conn, ordering: str) -> None:
    reader = Reader(conn, consumer(conn, ordering=ordering))
    sent = send_keys(conn, *"aabc")
    rows = receive(conn, 1)
    assert seqs_of(rows) == sent[:1]
    assert sorted(reader.plan(reader.ask())) == sent[2 if ordering == "key" else 1 :]
    checker.check(conn)
    settled(conn, rows)
    assert seqs_of(receive(conn, 1)) == (sent[1:2] if ordering == "key" else [])


# Parts of claims


def test_what_comes_after_a_claim_waits_for_its_last_message(conn: Conn, keyed: int) -> None:
    sent = send_keys(conn, *"aaaaaaaab")
    rows = receive(conn, 4)
    assert seqs_of(rows) == sent[:4]
    assert value(conn, "ack", claim_of(rows), sent[:3]) == 3
    assert value(conn, "ack", claim_of(rows), sent[:3]) == 0
    assert seqs_of(receive(conn, 4)) == sent[8:]
    assert receive(conn, 4) == []
    checker.check(conn)
    assert value(conn, "extend", claim_of(rows)) == 1
    assert value(conn, "ack", claim_of(rows)) == 1
    assert seqs_of(receive(conn, 4)) == sent[4:8]


@pytest.mark.parametrize("first", ["a", None])
def test_a_key_leaves_a_long_claim_that_still_has_messages_without_a_key(
    conn: Conn, keyed: int, first: str | None
) -> None:
    seqs = send_keys(conn, *(["a", None] if first else [None, "a"]))
    rows = receive(conn)
    assert seqs_of(rows) == seqs
    a = next(row.seq for row in rows if row.key)
    age_claims(conn)
    value(conn, "ack", claim_of(rows), [a])
    (later,) = send_keys(conn, "a")
    assert seqs_of(receive(conn)) == [later]
    value(conn, "ack", claim_of(rows))
    assert states(conn) == {**states(conn), later: "claimed"}


def test_a_key_is_free_when_its_claim_is_gone_though_others_were_settled_in_part(
    conn: Conn, keyed: int
) -> None:
    """An assigner reads again which keys these claims have, and no others."""
    send_keys(conn, *"a" * 30, *"b" * 15, *"d" * 15)
    a, b, d = (receive(conn, 10) for _ in "abd")
    assert value(conn, "dead_letter", claim_of(d), seqs_of(d)[:1]) == 1
    assert value(conn, "ack", claim_of(a), seqs_of(a)[:9]) == 9
    settled(conn, b)
    b = receive(conn, 10)
    assert [row.key for row in b] == ["b"] * 5
    send_keys(conn, *"bbbccccc")
    assert [row.key for row in receive(conn, 10)] == ["c"] * 5  # this assigned; those of b wait
    checker.check(conn)
    assert value(conn, "ack", claim_of(a), seqs_of(a)[9:]) == 1
    assert [row.key for row in receive(conn, 10)] == ["a"] * 10
    settled(conn, b)
    checker.check(conn)
    assert [row.key for row in receive(conn, 10)] == ["b"] * 3


def test_what_was_dealt_behind_a_key_that_left_a_claim_is_free(
    conn: Conn, keyed: int, opened: Session
) -> None:
    """An assigner waits for nobody who settles the rest; the next one finds it."""
    a, b = send_keys(conn, "a", "b")
    claim = claim_of(receive(conn, 2))
    send_keys(conn, "c")
    other = claim_of(receive(conn, 1))
    later = send_keys(conn, "a", "b", "c")
    assert receive(conn, 1) == []
    value(conn, "ack", claim, [a])
    value(conn, "ack", other)
    settling = opened()
    assert value(settling, "extend", claim) == 1
    conn.execute("set lock_timeout = '100 ms'")
    assert later[2] in acked(conn, "s", "c", 1)
    settling.execute("commit")
    acked(conn, "s", "c", 1)
    assert list(states(conn)) == [b, later[1]]
    assert value(conn, "ack", claim) == 1
    assert acked(conn, "s", "c", 1) == later[1:2]


# What goes back


def test_the_order_of_the_stream_stays_whatever_becomes_of_a_claim(conn: Conn) -> None:
    hows = ["nack", "defer", "expire", "another size", "dead_letter"]
    cases = [(f"{how} {part}", how, part) for how in hows for part in (True, False)]
    for c, *_ in cases:
        consumer(conn, c, "stream")
    sent = send_keys(conn, *"abcabcabc")
    for c, how, part in cases:
        rows = receive(conn, 2, c)
        left = sent
        if part:
            assert value(conn, "ack", claim_of(rows), sent[:1]) == 1
            left = sent[1:]
        if how == "expire":
            clock.end_lease(conn, claim_of(rows))
        elif how == "another size":
            assert receive(conn, 5, c) == []
            assert value(conn, "ack", claim_of(rows)) == len(left) - 7
            left = sent[2:]
        else:
            assert value(conn, how, claim_of(rows)) == len(left) - 7
            left = sent[2:] if how == "dead_letter" else left
        checker.check(conn)
        if how != "expire":  # which the next claim finds
            assert seqs_of(call(conn, "peek", "s", c, 20)) == left
        assert acked(conn, "s", c, 5 if how == "another size" else 2) == left, c


def test_what_goes_back_comes_before_the_rest_of_its_key(conn: Conn) -> None:
    """What was assigned behind it waits from then on."""
    delays: list[Any] = [None, seconds(0), seconds(3600)]
    hows = [(how, delay) for how in ("nack", "defer") for delay in delays]
    hows.append(("dead_letter", None))
    cases = [(f"{how} {delay} {part}", how, delay, part)
             for how, delay in hows for part in (True, False)]  # fmt: skip
    for c, *_ in cases:
        consumer(conn, c, "key", visibility_timeout=seconds(60))
    sent = send_keys(conn, *"aaaaaab")
    for c, how, delay, part in cases:
        rows = receive(conn, 2, c)
        assert seqs_of(rows) == sent[:2]
        back = sent[1:2] if part else None
        has_none = how == "dead_letter" or (how, delay) == ("defer", None)
        given = [back] if has_none else [back, delay]
        assert value(conn, how, claim_of(rows), *given) == (1 if part else 2)
        checker.check(conn)
        if part:
            assert value(conn, "ack", claim_of(rows)) == 1
        dead = [seq for seq, state in states(conn, c).items() if state == "dead"]
        assert dead == (sent[1 if part else 0 : 2] if how == "dead_letter" else [])
        found = []
        if delay == seconds(3600):
            found = acked(conn, "s", c, 2)
            assert found == sent[6:], "of another key"
            clock.end_delays(conn)
        found += acked(conn, "s", c, 2)
        assert sorted(found) == [seq for seq in sent[part:] if seq not in dead], c
        assert_in_order(found, dict.fromkeys(sent[:6], "a") | {sent[6]: "b"})


def test_a_poll_in_an_open_transaction_keeps_nothing_from_waiting(
    conn: Conn, opened: Session
) -> None:
    """It locked what was assigned next, which then came before what went back."""
    consumer(conn, ordering="stream")
    sent = send_keys(conn, *"aaaaaa")
    rows = receive(conn, 2)
    polling = opened()
    assert receive(polling, 2) == []
    assert value(conn, "nack", claim_of(rows), sent[1:2], seconds(0)) == 1
    polling.execute("commit")
    assert value(conn, "ack", claim_of(rows)) == 1
    assert acked(conn, "s", "c", 2) == sent[1:]


def test_what_failed_comes_before_most_of_a_frequent_key(conn: Conn, keyed: int) -> None:
    """It is assigned with what comes next of the other key, and claimed before that."""
    sent = send_keys(conn, *"bbbbb", *"a" * 2000)
    rows = receive(conn, 5)
    assert seqs_of(rows) == sent[:5]
    assert value(conn, "nack", claim_of(rows), sent[4:5], seconds(0)) == 1
    assert value(conn, "ack", claim_of(rows)) == 4
    assigned = one(conn, "select _pgqueue.limit_chain()")
    assert sent[4] in [seq for _ in range(2 * assigned) for seq in settled(conn, receive(conn, 5))]


def test_what_waits_of_a_key_in_many_ranges_is_bundles_of_few(conn: Conn, keyed: int) -> None:
    send_keys(conn, *"ab" * 400)
    rows = receive(conn, 10)
    assert value(conn, "nack", claim_of(rows), seqs_of(rows)[:1]) == 10
    checker.check(conn)
    most = max(len(b.seqs) for b in internals.bundles(conn))
    assert most <= one(conn, "select _pgqueue.limit_ranges()")


# What waits


def test_a_slow_worker_of_a_frequent_key_stops_no_other_key(conn: Conn, keyed: int) -> None:
    """What waits for it is out of the way."""
    sent = send_keys(conn, *"a" * 500, "b")
    assert seqs_of(receive(conn, 1)) == sent[:1]
    assert sent[-1:] in [seqs_of(receive(conn, 1)) for _ in range(5)]


def test_what_came_to_wait_one_by_one_comes_in_order(conn: Conn, keyed: int) -> None:
    send_keys(conn, "a")
    rows = receive(conn, 1)
    later: list[int] = []
    for _ in range(3 * one(conn, "select _pgqueue.limit_chain()")):
        later += send_keys(conn, "a")
        assert receive(conn, 1) == []
    settled(conn, rows)
    assert acked(conn, "s", "c", 1) == later


@for_each("later", ["p_deliver_at", "p_expires_at"])
def test_messages_that_wait_behind_what_is_claimed_of_their_keys_stop_no_other_key(
    conn: Conn, later: str
) -> None:
    """Of 33 keys a message is claimed, and the next is delayed, or will expire: both wait."""
    by_key(conn)
    for i in range(33):
        send_keys(conn, f"k{i}", f"k{i}")
        settled(conn, receive(conn, 1))
        assert len(receive(conn, 1)) == 1
        value(conn, "send", "s", "x", p_key=f"k{i}", **{later: now(conn) + seconds(3600)})
    assert receive(conn, 1) == []
    assert cost(conn, "select from pgqueue.receive('s', 'c', 1)") < 1000
    other = send_keys(conn, "z")
    assert seqs_of(receive(conn, 1)) == other


def test_a_claim_that_lives_long_stands_aside_and_its_keys_wait_for_it(
    conn: Conn, keyed: int
) -> None:
    """So claims and assigners walk over few claims, however long workers take. See test_plans."""
    sent = send_keys(conn, *"abc")
    long = receive(conn, 3)
    assert seqs_of(long) == sent
    later = send_keys(conn, *"abcd")
    clock.pass_time(conn, seconds(2))
    assert seqs_of(receive(conn, 3)) == later[3:]
    checker.check(conn)
    held = [b for b in internals.bundles(conn) if b.claim_id == claim_of(long)]
    assert len(held) == 3, "one for each key"
    assert {b.lane for b in held} == {one(conn, "select _pgqueue.lane_long()")}
    assert [states(conn)[seq] for seq in later[:3]] == ["waiting"] * 3
    before = internals.bundles(conn)
    assert receive(conn, 3) == []
    assert internals.bundles(conn) == before, "what waits for it is not assigned again and again"
    assert value(conn, "ack", claim_of(long), sent[1:2]) == 1
    assert seqs_of(receive(conn, 3)) == later[1:2]
    clock.end_lease(conn, claim_of(long))
    again = [(row.seq, row.deliver_count) for row in receive(conn, 3)]
    assert again == [(sent[0], 2), (sent[2], 2)]
    checker.check(conn)
    assert [states(conn)[seq] for seq in (later[0], later[2])] == ["waiting"] * 2


def test_a_failed_message_of_a_long_claim_goes_back_with_all_later_ones_of_its_key(
    conn: Conn, keyed: int
) -> None:
    """A claim that lives long has a bundle for each key; several, if a key has many ranges."""
    sent = send_keys(conn, *"ab" * 120)
    claim = claim_of(receive(conn, 240))
    send_keys(conn, "z")
    clock.pass_time(conn, seconds(2))
    assert len(receive(conn, 10)) == 1
    assert len([b for b in internals.bundles(conn) if b.claim_id == claim]) == 3
    assert value(conn, "nack", claim, [sent[3]]) == 119
    claimed = {seq for seq, state in states(conn).items() if state == "claimed"}
    assert claimed >= {*sent[::2], sent[1]}
    assert len(claimed) == 122
    checker.check(conn)
    assert value(conn, "ack", claim) == 121


@for_each("again", [False, True])
def test_a_stream_goes_on_behind_which_messages_were_dealt_that_had_failed(
    conn: Conn, again: bool
) -> None:
    """What failed comes before others, but not before what it is assigned behind."""
    consumer(conn, ordering="stream")
    failed = send_keys(conn, *"x" * 10)
    assert value(conn, "dead_letter", claim_of(receive(conn, 10))) == 10
    sent = send_keys(conn, *"x" * 100)
    got = []
    for _ in range(10):
        got += settled(conn, receive(conn, 1))
    assert value(conn, "redrive", "s", "c", p_reset=False) == 10
    while rows := receive(conn, 1):
        if again and seqs_of(rows) == failed[:1]:
            again = False
            value(conn, "nack", claim_of(rows))
            continue
        got += settled(conn, rows)
    assert got == sent + failed
    assert not again
    checker.check(conn)


@for_each("ordering", ["key", "stream"])
@for_each("times", [1, 2, 10])
def test_what_has_expired_is_passed_in_one_claim(conn: Conn, ordering: str, times: int) -> None:
    consumer(conn, ordering=ordering)
    first = send_keys(conn, "x")
    begun = now(conn)
    for i in range(20):
        expiry = begun + seconds(600 + i * times // 20)
        value(conn, "send", "s", "x", p_key="x", p_expires_at=expiry)
    last = send_keys(conn, "x")
    assert settled(conn, receive(conn, 1)) == first
    clock.pass_time(conn, seconds(3600))
    assert seqs_of(receive(conn, 1)) == last
    checker.check(conn)


@for_each("ordering", ["key", "stream"])
def test_a_claim_that_acknowledges_waits_for_what_it_makes_free(
    conn: Conn, session: Session, ordering: str
) -> None:
    """Its own claim is in the way until it is acknowledged: so it does not say there is nothing."""
    id_ = consumer(conn, ordering=ordering)
    sent = send_keys(conn, *"xxx")
    claim = claim_of(receive(conn, 1))
    clock.pass_time(conn, seconds(2))
    holder, own = session(), session()
    with ThreadPoolExecutor(1) as pool:
        with holder.transaction():
            one(holder, "select _pgqueue.lock_consumer(%s)", id_)
            got = pool.submit(receive, own, 1, p_ack=claim)
            wait_for_a_lock(conn)
        assert seqs_of(got.result()) == sent[1:2]
    checker.check(conn)


def test_dealt_bundles_are_counted_as_what_they_are(conn: Conn, sent: list[int]) -> None:
    found = stats(conn, "c")
    assert (found.ready, found.waiting, found.claimed, found.claims) == (1, 4, 2, 2)
    waiting = ["waiting"] * 2
    assert list(states(conn).values()) == ["claimed"] * 2 + waiting + ["ready"] + waiting
    (because,) = call(conn, "explain_message", "s", "c", sent[2])
    assert because.state == "waiting"
    assert "held by" in because.because
    assert sum(row.hi - row.lo for row in scanned(conn, "pending", "c")) == len(sent)
    assert sum(row.hi - row.lo for row in scanned(conn, "claimed", "c")) == 2
    assert len(call(conn, "peek", "s", "c", 10)) == 5
    consumer_id = one(conn, "select consumer_id from pgqueue.consumers")
    for count in ("consumer_backlog", "consumer_available"):
        assert value(conn, count, consumer_id) == 5
    assert value(conn, "seek", "s", "c", "latest") == 7
    assert stats(conn, "c").settled == 0


MOVES: dict[str, Callable[[Conn, str, list[int]], object]] = {
    "cancel": lambda conn, c, sent: value(conn, "cancel", "s", c, sent[2:3]),
    "replay": lambda conn, c, sent: value(conn, "replay", "s", c, "earliest"),
    "seek": lambda conn, c, sent: value(conn, "seek", "s", c, "earliest"),
    "retry": lambda conn, c, sent: value(conn, "retry", "s", c),
    "limits": lambda conn, c, sent: alter(conn, c, per_key_limit=2),
    "history": lambda conn, c, sent: alter(conn, c, keep_history="1 hour"),
    "action": lambda conn, c, sent: settle(conn, action("ack", sent[2:3], c)),
    "paused": lambda conn, c, sent: [value(conn, do, "s", c) for do in ("pause", "resume")],
    "large": lambda conn, c, sent: settled(conn, receive(conn, 1000, c)),
    "other size": lambda conn, c, sent: settled(conn, receive(conn, 5, c)),
}
"""What moves or looks at what a consumer has."""


def test_who_moves_what_a_consumer_has_leaves_claims_and_the_order(conn: Conn) -> None:
    for move in MOVES:
        consumer(conn, move, "key", visibility_timeout=seconds(60))
    sent = send_keys(conn, *"ababcab")
    for move, do in MOVES.items():
        claims = [claim_of(receive(conn, 1, move)) for _ in range(2)]
        done = do(conn, move, sent)
        checker.check(conn)
        for claim in claims:
            assert value(conn, "ack", claim) == (move != "seek")
        found = acked(conn, "s", move, 1)
        assert_in_order(found, {s: "ababcab"[i] for i, s in enumerate(sent)})
        if move in ("large", "other size"):
            found += done  # type: ignore[operator]
        assert sorted(found) == (
            sent if move == "seek" else sent[3:] if move in ("cancel", "action") else sent[2:]
        ), move


# Many keys


def keys_in_claims(conn: Conn, keys: list[str], size: int) -> list[int]:
    """The claims of new messages of these keys."""
    send_keys(conn, *keys)
    claims = []
    while rows := receive(conn, size):
        claims.append(claim_of(rows))
    return claims


def all_come(conn: Conn, sent: list[int], size: int) -> bool:
    """Receives and acknowledges these messages; a claim looks at a part, and may find nothing."""
    left = set(sent)
    for _ in range(100):
        left -= set(acked(conn, "s", "c", size))
        if not left:
            return True
    return False


@pytest.mark.small_limits
def test_many_old_claims_that_end_together_free_their_keys(
    conn: Conn, keyed: int, has_small_limits: bool
) -> None:
    """Such as those of a Spark batch, while workers assign thousands beside it."""
    many, more, size = (8, 6, 1) if has_small_limits else (11_000, 1_300, 64)
    keys, others = [[f"{name}{i}" for i in range(n)] for name, n in (("k", many), ("o", more))]
    short = keys_in_claims(conn, others, size)
    claims = keys_in_claims(conn, keys, size)
    passing, later = send_keys(conn, *others), send_keys(conn, *keys)
    assert receive(conn) == []
    clock.pass_time(conn, seconds(2))
    assert receive(conn) == []
    for claim in short:
        value(conn, "ack", claim)
    assert all_come(conn, passing, 1)
    for claim in claims:
        value(conn, "ack", claim)
    assert all_come(conn, later, 1000)


def test_many_scheduled_messages_cost_a_claim_nothing(conn: Conn, keyed: int) -> None:
    """Each of a key and a time of its own; and to assign them costs the same for each of them."""
    scheduled = 5000

    def claim_cost(keys: str) -> int:
        send_keys(conn, *keys)
        return cost(conn, "select pgqueue.ack(claim_id) from pgqueue.claim('s', 'c', 2)")

    def schedule(n: int) -> None:
        conn.execute(
            "select pgqueue.send('s', 'x', p_key => i::text,"
            " p_deliver_at => clock_timestamp() + interval '1 hour' + i * interval '1 ms')"
            " from generate_series(1, %s) i",
            [n],
        )

    schedule(1)  # beside a key that waits, claims assign
    few = min(claim_cost(keys) for keys in ("ab", "cd", "kl"))
    schedule(scheduled)
    assert sum(cost(conn, "select pgqueue.claim('s', 'c', 10)") for _ in range(3)) < 50 * scheduled
    assert receive(conn, 10) == []
    many = [claim_cost(keys) for keys in ("ef", "gh", "ij")]
    assert min(many) <= few * 1.5 + 40, (few, many)
    value(conn, "drop_stream", "s")  # the checker would take long with as many


# At the same time

NOTES = """
create table public.got (no bigserial, claim bigint, seq bigint);
create table public.done (no bigint default nextval('public.got_no_seq'), seq bigint primary key);
"""
# A message came before an earlier one of its key was done, and not together with that one.
TOO_EARLY = """
with pair as (select seq, lag(seq) over (partition by key order by seq) as before
              from pgqueue.messages)
select g.seq, p.before from public.got g join pair p using (seq)
where p.before is not null
  and not exists (select from public.done d where d.seq = p.before and d.no < g.no)
  and not exists (select from public.got o where o.claim = g.claim and o.seq = p.before)
"""


class Attacker:
    """A worker that does anything with its claims, and notes what it got and what it finished.

    Each note is written in the transaction of the call, so the tables say what the queue promised.
    """

    def __init__(self, url: str, number: int, sizes: tuple[int, ...]) -> None:
        self.url = url
        self.chance = random.Random(number)
        self.sizes = sizes

    def work(self, count: int) -> None:
        """Until that many messages are done."""
        while True:
            try:
                with connection.connect(self.url) as conn:
                    conn.execute("set client_min_messages = error")
                    for _ in range(self.chance.randrange(5, 60)):
                        if one(conn, "select count(*) from public.done") == count:
                            return
                        self.turn(conn)
                    conn.execute("begin")
                    self.receive(conn)
                    conn.execute("select pg_terminate_backend(pg_backend_pid())")
            except psycopg.OperationalError as error:
                if "terminat" not in str(error) and "closed" not in str(error):
                    raise

    def receive(self, conn: Conn, ack: int | None = None) -> list[Any]:
        rows = call(conn, "receive", "s", "c", self.chance.choice(self.sizes), p_ack=ack)
        for row in rows:
            conn.execute("insert into public.got (claim, seq) values (%s, %s)",
                         [row.claim_id, row.seq])  # fmt: skip
        return rows

    def finish(self, conn: Conn, rows: list[Any], seqs: list[int] | None = None) -> None:
        if value(conn, "ack", rows[0].claim_id, seqs):
            self.note(conn, seqs or seqs_of(rows))

    def note(self, conn: Conn, seqs: list[int]) -> None:
        conn.execute("insert into public.done (seq) select unnest(%s::bigint[])", [seqs])

    def turn(self, conn: Conn) -> None:
        """Get some messages, and do something with them."""
        with conn.transaction(force_rollback=self.chance.random() < 0.05) as transaction:
            rows = self.receive(conn)
            if rows and self.chance.random() < 0.1:
                self.finish(conn, rows)
                rows = self.receive(conn)
        if not rows or transaction.force_rollback:
            return
        kind = self.chance.random()
        part = self.chance.sample(seqs_of(rows), self.chance.randint(1, len(rows)))
        delay = self.chance.choice([None, seconds(0), seconds(0.05)])
        roll = self.chance.random() < 0.05
        if kind < 0.08:
            return  # its lease will end
        if kind < 0.15:
            with conn.transaction(force_rollback=roll):
                value(conn, "nack", rows[0].claim_id, None, delay)
        elif kind < 0.35:
            with conn.transaction(force_rollback=roll):
                self.finish(conn, rows, part)
            if not roll and len(part) < len(rows):
                left = [seq for seq in seqs_of(rows) if seq not in part]
                how = self.chance.choice(["nack", "defer"])
                value(conn, how, rows[0].claim_id, left[:1], delay or seconds(0))
        elif kind < 0.5:
            with conn.transaction(force_rollback=roll):
                if internals.lock_claim(conn, rows[0].claim_id):
                    self.note(conn, seqs_of(rows))
                more = self.receive(conn, rows[0].claim_id)
                if more and self.chance.random() < 0.7:
                    self.finish(conn, more)
        else:
            with conn.transaction(force_rollback=roll):
                self.finish(conn, rows)


def operate(url: str, number: int, count: int) -> None:
    """Lock, alter and look at what the consumer has, at random, until all is done."""
    chance = random.Random(number)
    with connection.connect(url) as conn:
        consumer_id = one(conn, "select consumer_id from pgqueue.consumers")
        while one(conn, "select count(*) from public.done") < count:
            what = chance.randrange(6)
            with conn.transaction(force_rollback=what == 0):
                if what <= 1:
                    internals.lock_consumer(conn, consumer_id)
                    call(conn, "receive", "s", "c", 100) if what == 0 else time.sleep(0.02)
                elif what == 2:
                    alter(conn, keep_history="1 hour" if chance.random() < 0.3 else None)
                elif what == 3:
                    value(conn, "retry", "s", "c")
                elif what == 4:
                    value(conn, "cancel", "s", "c", [10**9])
                else:
                    checker.check(conn)
            conn.execute("select pg_sleep(0.02)")


@pytest.mark.parametrize(
    ("keys", "sizes", "ordering", "small"),
    [(4, (1,), "key", False), (3, (1, 2, 5, 100), "key", True), (4, (1, 3, 10), "none", False),
     pytest.param(3, (1, 1, 2, 5, 10), "key", False, marks=pytest.mark.longer),
     pytest.param(4, (1, 2, 5, 300), "none", True, marks=pytest.mark.longer),
     pytest.param(4, (1, 2, 5, 100), "stream", False, marks=pytest.mark.longer)],
)  # fmt: skip
@pytest.mark.promise("guarantee: Assignment by key")
def test_workers_that_are_killed_lose_double_and_disorder_nothing(
    url: str, conn: Conn, keys: int, sizes: tuple[int, ...], ordering: str, small: bool
) -> None:
    """Workers acknowledge late, in part, twice or never; a judge outside looks at their notes."""
    if small:
        limits.shrink(conn)
    consumer(conn, ordering=ordering, visibility_timeout=seconds(0.3))
    conn.execute(NOTES)
    count = int(os.environ.get("PGQUEUE_ATTACK_MESSAGES", "150"))
    chance = random.Random(keys)

    def produce() -> None:
        left = count
        with connection.connect(url) as mine:
            while left:
                some = min(left, chance.choice([1, 1, 5, 40]))
                send_keys(mine, *(f"k{chance.randrange(keys)}" for _ in range(some)))
                left -= some

    with ThreadPoolExecutor(7) as pool:
        jobs = [pool.submit(produce), pool.submit(operate, url, keys, count)]
        jobs += [pool.submit(Attacker(url, n, sizes).work, count) for n in range(5)]
        for job in jobs:
            job.result()
    too_early = TOO_EARLY if ordering == "key" else TOO_EARLY.replace("partition by key ", "")
    if ordering != "none":
        assert conn.execute(too_early.encode()).fetchall() == []
    assert receive(conn, 1000) == []


@for_each("ordering", ["key", "stream"])
def test_claims_of_another_size_keep_the_order_of_keys_whose_bundles_are_dealt_again(
    conn: Conn, ordering: str
) -> None:
    """Others of the same keys wait for such a bundle, or stand behind it."""
    consumer(conn, ordering=ordering)
    send_keys(conn, *"abcdefgh")
    claims = [claim_of(receive(conn, 2))]
    send_keys(conn, *"hi")
    while rows := receive(conn, 2):  # one of the last of these assigns what is new
        claims.append(claim_of(rows))
        if "waiting" in states(conn).values() or ordering == "stream":
            break
    for claim in claims:
        value(conn, "ack", claim)
    open_claims: list[int] = []
    while states(conn):
        rows = receive(conn, 1)
        open_claims += {row.claim_id for row in rows}
        checker.check(conn)
        if len(open_claims) > 1 or not rows:
            value(conn, "ack", open_claims.pop(0))
            checker.check(conn)
