"""Slots with an order: what is dealt for small claims is claimed and settled as slots, in order.

With ordering=stream all messages are as of one key: one slot goes on with what is next in the line.
"""

from __future__ import annotations

import os
import random
import re
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest
from psycopg.types.json import Jsonb

from spark_pgqueue.postgres import connection
from tests.sql import checker, clock, internals, limits
from tests.sql.cost import cost
from tests.sql.queue import (
    Conn,
    Reader,
    Session,
    acked,
    call,
    claim_of,
    consumer,
    now,
    one,
    receive,
    scanned,
    seconds,
    send_all,
    seqs_of,
    states,
    stats,
    value,
    wait_for_a_lock,
)

pytestmark = [pytest.mark.usefixtures("stream", "allowed_afterwards"), pytest.mark.timeout(120)]


def send_keys(conn: Conn, keys: str) -> list[int]:
    """A message for each letter, whose key it is."""
    return [
        seq for (seq,) in conn.execute(
            "select pgqueue.send_batch('s', %s::text[], p_keys => %s::text[])",
            [["x"] * len(keys), list(keys)],
        ).fetchall()
    ]  # fmt: skip


def slots(conn: Conn) -> tuple[int, int]:
    """How many messages in slots are not claimed, and how many slots are claimed."""
    return (
        one(conn, "select coalesce(sum(r.message_count), 0) from pgqueue.slots s,"
                  " _pgqueue.runs_of_slot(s) r where r.state <> 'claimed'"),
        one(conn, "select count(*) from pgqueue.slots where token is not null"),
    )  # fmt: skip


def held(rows: list[Any]) -> int:
    claim = claim_of(rows)
    assert claim is not None
    return claim


@pytest.fixture
def sent(conn: Conn) -> list[int]:
    """Three messages of a, three of b, and one of c. Each key is a slot; two are claimed."""
    consumer(conn, ordering="key")
    sent = send_keys(conn, "ababcab")
    assert seqs_of(receive(conn, 1)) == sent[:1]
    assert seqs_of(receive(conn, 1)) == sent[1:2]
    assert slots(conn) == (5, 2)
    checker.check(conn)
    return sent


# Order


@pytest.mark.parametrize("ordering", ["key", "stream"])
def test_a_slot_is_claimed_when_the_one_before_it_is_gone(conn: Conn, ordering: str) -> None:
    consumer(conn, ordering=ordering)
    sent = send_keys(conn, "aaa")
    first = receive(conn, 1)
    assert seqs_of(first) == sent[:1]
    assert receive(conn, 1) == []
    assert value(conn, "ack", held(first)) == 1
    second = receive(conn, 1)
    assert seqs_of(second) == sent[1:2]
    assert slots(conn) == (1, 1)
    assert seqs_of(call(conn, "receive", "s", "c", 1, p_ack=held(second))) == sent[2:]


@pytest.mark.parametrize("ordering", ["key", "stream"])
def test_an_open_acknowledgement_holds_what_comes_after_it(
    conn: Conn, session: Session, ordering: str
) -> None:
    """Also over its rollback; the session itself may go on, because it does both or neither."""
    consumer(conn, ordering=ordering)
    sent = send_keys(conn, "aaa")
    first = receive(conn, 1)
    acking = session()
    acking.execute("begin")
    assert value(acking, "ack", held(first)) == 1
    assert receive(conn, 1) == []
    assert seqs_of(receive(acking, 1)) == sent[1:2]
    acking.execute("rollback")
    assert receive(conn, 1) == []
    assert value(conn, "ack", held(first)) == 1
    assert seqs_of(receive(conn, 1)) == sent[1:2]


@pytest.mark.all_versions
@pytest.mark.parametrize("ordering", ["key", "stream"])
def test_a_claim_that_is_acknowledged_twice_at_once_goes_on_once(
    conn: Conn, session: Session, ordering: str
) -> None:
    consumer(conn, ordering=ordering)
    sent = send_keys(conn, "aaaa")
    claim = held(receive(conn, 1))
    first = session()
    first.execute("begin")
    assert value(first, "ack", claim) == 1
    with ThreadPoolExecutor(2) as pool:
        again = [pool.submit(value, session(), "ack", claim) for _ in range(2)]
        wait_for_a_lock(conn, 2)
        first.execute("commit")
        assert [each.result(30) for each in again] == [0, 0]
    assert seqs_of(receive(conn, 1)) == sent[1:2]


def test_what_is_acknowledged_twice_at_once_is_counted_once(conn: Conn, session: Session) -> None:
    """A part in one session, and meanwhile the whole claim in another."""
    consumer(conn, ordering="key")
    sent = send_keys(conn, "a" * 7)
    claim = held(receive(conn, 3))
    part = session()
    part.execute("begin")
    assert value(part, "ack", claim, sent[:1]) == 1
    with ThreadPoolExecutor(1) as pool:
        whole = pool.submit(value, session(), "ack", claim)
        wait_for_a_lock(conn)
        part.execute("commit")
        assert whole.result(30) == 2
    assert acked(conn, "s", "c", 3) == sent[3:]


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_a_prepared_acknowledgement_holds_what_comes_after_it(
    conn: Conn, session: Session, end: str
) -> None:
    consumer(conn, ordering="key")
    sent = send_keys(conn, "aab")
    first = receive(conn, 1)
    acking = session()
    acking.execute("begin")
    assert value(acking, "ack", held(first)) == 1
    acking.execute("prepare transaction 'slot'")
    assert seqs_of(receive(conn, 1)) == sent[2:]
    assert receive(conn, 1) == []
    assert value(conn, "cancel", "s", "c", sent[2:]) == 1, "which moves all that is not locked"
    assert receive(conn, 1) == []
    conn.execute(f"{end} prepared 'slot'".encode())
    checker.check(conn)
    assert seqs_of(receive(conn, 1)) == (sent[1:2] if end == "commit" else [])
    assert value(conn, "ack", held(first)) == (end == "rollback")


def test_a_claim_that_finds_each_key_held_needs_no_lock(conn: Conn, session: Session) -> None:
    """Workers that are more than the keys ask all the time; a key that is free ends it."""
    consumer_id = consumer(conn, ordering="key")
    sent = send_keys(conn, "aab")
    first = receive(conn, 1)
    assert [seqs_of(receive(conn, 1)), receive(conn, 1)] == [sent[2:], []]
    dealing = session()
    dealing.execute("begin")
    internals.lock_consumer(dealing, consumer_id)
    conn.execute("set lock_timeout = '100 ms'")
    assert receive(conn, 1) == []
    assert value(conn, "ack", held(first)) == 1
    second = receive(conn, 1)
    assert seqs_of(second) == sent[1:2]
    assert value(conn, "ack", held(second)) == 1
    assert receive(conn, 1) == [], "the next message of a waits for a deal"
    dealing.execute("rollback")
    (later,) = send_keys(conn, "a")
    assert seqs_of(receive(conn, 1)) == [later]


def test_with_the_order_of_the_stream_small_claims_need_no_lock(
    conn: Conn, session: Session
) -> None:
    """Neither those that get messages, nor those of other workers meanwhile."""
    consumer_id = consumer(conn, ordering="stream")
    sent = send_keys(conn, "abcabcabc")
    first = receive(conn, 2)
    claiming = session()
    claiming.execute("begin")
    internals.lock_consumer(claiming, consumer_id)
    conn.execute("set lock_timeout = '100 ms'")
    assert receive(conn, 2) == []
    assert value(conn, "ack", held(first)) == 2
    second = receive(conn, 2)
    assert seqs_of(second) == sent[2:4]
    assert receive(conn, 2) == []
    third = call(conn, "receive", "s", "c", 2, p_ack=held(second))
    assert seqs_of(third) == sent[4:6]
    claiming.execute("rollback")
    checker.check(conn)
    assert seqs_of(third) + acked(conn, "s", "c", 2) == sent[4:6]
    assert value(conn, "ack", held(third)) == 2
    assert acked(conn, "s", "c", 2) == sent[6:]


@pytest.mark.parametrize("size", [1, 3])
def test_with_the_order_of_the_stream_a_slot_goes_on_over_gaps(conn: Conn, size: int) -> None:
    """Numbers that a rollback left out stand between those of one run."""
    consumer(conn, ordering="stream")
    sent: list[int] = []
    for i in range(20):
        with conn.transaction(force_rollback=True):
            send_keys(conn, "x")
        sent += send_keys(conn, "ab" if i % 2 else "a")
    assert max(sent) > len(sent) + 10
    found: list[int] = []
    for _ in range(8):
        rows = receive(conn, size)
        checker.check(conn)
        found += seqs_of(rows)
        assert value(conn, "ack", held(rows)) == size
    assert found + acked(conn, "s", "c", 7) == sent


def test_with_the_order_of_the_stream_a_claim_is_filled_where_a_run_ends(conn: Conn) -> None:
    consumer(conn, ordering="stream")
    sent = send_keys(conn, "abcd")
    assert value(conn, "ack", held(receive(conn, 3))) == 3
    sent += send_keys(conn, "efghi")
    assert seqs_of(receive(conn, 3)) == sent[3:6]


def test_what_a_slot_has_is_cut_without_a_look_at_all_of_a_long_run(conn: Conn) -> None:
    """A run of few ranges may have all of a backlog."""
    cut = "_pgqueue.cut_parts('{[1,20000),[20001,40000)}', 3)"
    [[[plan]]] = conn.execute(f"explain (analyze, format json) select * from {cut}".encode())
    looked = [int(n) for n in re.findall(r"'Actual Rows': (\d+)", str(plan))]
    assert max(looked) == 3 * one(conn, "select _pgqueue.limit_parts()")
    assert one(conn, f"select _pgqueue.cardinality(later) from {cut}") == 39998 - max(looked)


@pytest.mark.parametrize("limit", [2, 3])
def test_a_slot_is_cut_into_parts_that_are_all_of_it_in_order(conn: Conn, limit: int) -> None:
    """Of each length around each bound; of one range, and of several."""
    limits.shrink(conn, limit)
    for size in 1, 2, 3:
        for most in 8 * size * limit, size * limit:
            for n in range(1, most + 2 * size + 2):
                whole = list(range(1, n + 1))
                if most == size * limit:  # several ranges, which end anywhere in a part
                    whole = [i + i // 3 for i in whole]
                    if whole[-1] == n:
                        continue
                ranges = "{" + ",".join(f"[{i},{i + 1})" for i in whole) + "}"
                [row] = internals.rows(
                    conn,
                    "select array(select generate_series(lower(r), upper(r) - 1) from unnest(first)"
                    " r order by 1) as first, rest, parts, array(select generate_series(lower(r),"
                    " upper(r) - 1) from unnest(later) r order by 1) as later"
                    f" from _pgqueue.cut_parts('{ranges}', {size})",
                )
                rest = [sorted(checker.numbers(part)) for part in reversed(row.rest or [])]
                assert [*row.first, *(seq for part in rest for seq in part), *row.later] == whole
                assert len(row.first) == min(size, n)
                assert len(whole) - len(row.later) == min(most, n)
                assert row.parts == (None if most != size * limit else len(rest))
                assert row.parts is None or all(len(part) == size for part in rest[:-1])
                assert all(rest)


@pytest.mark.parametrize("how", ["nack", "defer", "expire", "another size", "dead_letter"])
@pytest.mark.parametrize("part", [True, False])
def test_the_order_of_the_stream_stays_whatever_becomes_of_a_slot(
    conn: Conn, how: str, part: bool
) -> None:
    consumer(conn, ordering="stream")
    sent = send_keys(conn, "abcabcabc")
    rows = receive(conn, 2)
    left = sent
    if part:
        assert value(conn, "ack", held(rows), sent[:1]) == 1
        left = sent[1:]
    if how == "expire":
        clock.end_lease(conn, held(rows))
    elif how == "another size":
        assert receive(conn, 5) == []
        assert value(conn, "ack", held(rows)) == len(left) - 7
        left = sent[2:]
    else:
        assert value(conn, how, held(rows)) == len(left) - 7
        left = sent[2:] if how == "dead_letter" else left
    checker.check(conn)
    if how != "expire":  # which the next claim finds
        assert seqs_of(call(conn, "peek", "s", "c", 20)) == left
    found = acked(conn, "s", "c", 5 if how == "another size" else 2)
    assert found == left
    checker.check(conn)


def test_a_slow_worker_of_a_frequent_key_stops_no_other_key(conn: Conn) -> None:
    """Without setting messages aside, it stopped all."""
    consumer(conn, ordering="key")
    sent = send_keys(conn, "a" * 500 + "b")
    assert seqs_of(receive(conn, 1)) == sent[:1]
    found = [seqs_of(receive(conn, 1)) for _ in range(5)]
    assert sent[-1:] in found
    checker.check(conn)


def test_slots_are_dealt_before_the_last_one_is_claimed(conn: Conn) -> None:
    """So other claimers need not wait for who deals."""
    consumer(conn, ordering="key")
    send_keys(conn, "".join(chr(ord("A") + i) for i in range(1000)))
    receive(conn, 1)
    free, before = slots(conn)[0], 1001
    while free < before:
        receive(conn, 1)
        free, before = slots(conn)[0], free
        assert free > 0
    checker.check(conn)


@pytest.mark.parametrize("sizes", [(10, 1), (1, 10), (3, 10), (10, 100), (64, 3)])
def test_claims_of_one_size_do_not_starve_beside_slots_of_another(
    conn: Conn, sizes: tuple[int, int]
) -> None:
    """A claim has at most what it wants, and acknowledges what it has."""
    consumer(conn, ordering="key")
    sent = send_keys(conn, "abcdefgh" * 15)
    found: list[int] = []
    for turn in range(200):
        rows = receive(conn, sizes[turn % 2])
        assert 0 < len(rows) <= sizes[turn % 2]
        assert value(conn, "ack", held(rows)) == len(rows)
        found += seqs_of(rows)
        if len(found) == len(sent):
            break
    checker.check(conn)
    assert sorted(found) == sent
    assert_in_order(found, {s: "abcdefgh"[i % 8] for i, s in enumerate(sent)})


def assert_in_order(found: list[int], keys: dict[int, str]) -> None:
    last: dict[str, int] = defaultdict(int)
    for seq in found:
        assert last[keys[seq]] < seq
        last[keys[seq]] = seq


# Settling


@pytest.mark.parametrize("later", ["p_deliver_at", "p_expires_at"])
def test_messages_that_wait_behind_the_last_slots_of_their_keys_stop_no_other_key(
    conn: Conn, later: str
) -> None:
    """Of 33 keys a slot is claimed, and a message is delayed, or will expire: both wait."""
    consumer(conn, ordering="key")
    keys = [chr(0x3B1 + i) for i in range(33)]
    for key in keys:
        send_keys(conn, key * 2)
        value(conn, "ack", held(receive(conn, 1)))
        assert len(receive(conn, 1)) == 1
        value(conn, "send", "s", "x", p_key=key, **{later: now(conn) + seconds(3600)})
    assert receive(conn, 1) == []
    assert cost(conn, "select from pgqueue.receive('s', 'c', 1)") < 1000
    (other,) = send_keys(conn, "z")
    assert seqs_of(receive(conn, 1)) == [other]


def test_some_of_a_slot_is_acknowledged_in_place(conn: Conn) -> None:
    """The slot keeps its keys; what comes after it waits for the rest."""
    consumer(conn, ordering="key")
    sent = send_keys(conn, "a" * 8 + "b")
    rows = receive(conn, 4)
    assert seqs_of(rows) == sent[:4]
    assert value(conn, "ack", held(rows), sent[:3]) == 3
    assert value(conn, "ack", held(rows), sent[:3]) == 0
    assert slots(conn)[1] == 1
    assert seqs_of(receive(conn, 4)) == sent[8:]
    assert receive(conn, 4) == []
    checker.check(conn)
    assert value(conn, "extend", held(rows)) == 1
    assert value(conn, "ack", held(rows)) == 1
    assert seqs_of(receive(conn, 4)) == sent[4:8]


def test_a_key_that_has_left_its_slot_is_free(conn: Conn) -> None:
    consumer(conn, ordering="key")
    sent = send_keys(conn, "abcd")
    rows = receive(conn, 4)
    assert value(conn, "ack", held(rows), sent[:1]) == 1
    more = send_keys(conn, "ab")
    assert seqs_of(receive(conn, 4)) == more[:1]


@pytest.mark.parametrize("promoted", [False, True])
def test_a_key_is_free_though_the_slot_of_another_goes_on(conn: Conn, promoted: bool) -> None:
    """A dealer came while most of that slot was acknowledged: then it has as much as before."""
    consumer(conn, ordering="key")
    send_keys(conn, "a" * 30 + "b" * 15 + "d" * 15)
    a, b, d = (receive(conn, 10) for _ in "abd")
    if promoted:
        assert value(conn, "dead_letter", held(d), seqs_of(d)[:1]) == 1
    assert value(conn, "ack", held(a), seqs_of(a)[:9]) == 9
    assert value(conn, "ack", held(b)) == 10
    b = receive(conn, 10)
    send_keys(conn, "b" * 3 + "c" * 5)
    assert [row.key for row in receive(conn, 10)] == ["c"] * 5  # this dealt; those of b wait
    checker.check(conn)
    assert value(conn, "ack", held(a), seqs_of(a)[9:]) == 1
    assert len(receive(conn, 10)) == 10
    assert value(conn, "ack", held(b)) == 5
    checker.check(conn)
    assert [row.key for row in receive(conn, 10)] == ["b"] * 3


@pytest.mark.parametrize("keys", ["ab" * 101, "aab" * 70, "a" * 780])
def test_a_slot_goes_on_claim_by_claim(conn: Conn, keys: str) -> None:
    """Also when it has gone on with all that it had, and the rest of its key is dealt anew."""
    consumer(conn, ordering="key")
    key_of = dict(zip(send_keys(conn, keys), keys, strict=True))
    got = defaultdict(list)
    claims = []
    while rows := receive(conn, 3):
        assert {row.key for row in rows} == {key_of[rows[0].seq]}
        got[rows[0].key] += seqs_of(rows)
        claims.append(len(rows))
        if len(claims) in (1, 2, 60, 61):
            checker.check(conn)
        value(conn, "ack", held(rows))
    assert got == {k: [seq for seq in key_of if key_of[seq] == k] for k in set(keys)}
    assert claims.count(3) >= len(claims) - 5


@pytest.mark.parametrize("delay", [None, seconds(0), seconds(3600)])
@pytest.mark.parametrize("how", ["nack", "defer"])
@pytest.mark.parametrize("part", [True, False])
def test_what_goes_back_comes_before_the_rest_of_its_key(
    conn: Conn, how: str, delay: Any, part: bool
) -> None:
    """The slots behind it wait in the usual way from then on."""
    consumer(conn, ordering="key")
    sent = send_keys(conn, "a" * 6 + "b")
    rows = receive(conn, 2)
    assert seqs_of(rows) == sent[:2]
    back = sent[1:2] if part else None
    given = [back] if how == "defer" and delay is None else [back, delay]
    assert value(conn, how, held(rows), *given) == (1 if part else 2)
    checker.check(conn)
    if part:
        assert value(conn, "ack", held(rows)) == 1
    if delay == seconds(3600):
        assert seqs_of(receive(conn, 2)) == sent[6:]
        assert receive(conn, 2) == []
        for seq in sent[:2]:
            if states(conn, "c").get(seq) == "delayed":
                clock.end_delay(conn, seq)
    found = acked(conn, "s", "c", 2)
    left = sent[1:] if part else sent
    assert sorted(set(found) | {sent[6]}) == left
    assert_in_order(found, dict.fromkeys(sent[:6], "a") | {sent[6]: "b"})
    checker.check(conn)


def test_what_failed_does_not_wait_for_the_slots_of_other_keys(conn: Conn) -> None:
    """A slot of a frequent key is free again after each claim of it."""
    consumer(conn, ordering="key")
    sent = send_keys(conn, "b" * 5 + "a" * 2000)
    rows = receive(conn, 5)
    assert seqs_of(rows) == sent[:5]
    assert value(conn, "nack", held(rows), sent[4:5], seconds(0)) == 1
    assert value(conn, "ack", held(rows)) == 4
    found: list[int] = []
    for _ in range(4):
        rows = receive(conn, 5)
        found += seqs_of(rows)
        assert value(conn, "ack", held(rows)) == len(rows)
    assert sent[4] in found
    checker.check(conn)


def test_some_of_a_slot_is_dead_lettered(conn: Conn) -> None:
    consumer(conn, ordering="key")
    sent = send_keys(conn, "aaab")
    rows = receive(conn, 2)
    assert value(conn, "dead_letter", held(rows), sent[:1]) == 1
    checker.check(conn)
    assert value(conn, "ack", held(rows)) == 1
    assert sorted(acked(conn, "s", "c", 2)) == sent[2:]
    assert states(conn, "c") == {sent[0]: "dead"}


def test_the_lease_of_a_slot_ends_and_its_key_waits_for_it(conn: Conn, sent: list[int]) -> None:
    clock.end_lease(conn, one(conn, "select min(claim_id) from pgqueue.open_claims"
                                    " where first_seq = %s", sent[0]))  # fmt: skip
    rows = receive(conn, 1)
    assert [(row.seq, row.deliver_count) for row in rows] == [(sent[0], 2)]
    checker.check(conn)
    assert states(conn, "c")[sent[2]] == "waiting"


def test_a_message_that_kills_its_worker_is_found(conn: Conn) -> None:
    """Slots that expire are halved, and the last one to blame is dead in the end."""
    consumer(conn, ordering="key", max_deliver_count=3)
    sent = send_keys(conn, "abcdefgh")
    bad = sent[3]
    done: list[int] = []
    for _ in range(40):
        rows = receive(conn, 4)
        if not rows:
            break
        if bad in seqs_of(rows):
            clock.end_lease(conn, held(rows))
        else:
            done += seqs_of(rows)
            value(conn, "ack", held(rows))
    assert sorted(done) == sorted(set(sent) - {bad})
    assert states(conn, "c") == {bad: "dead"}


def test_a_slot_that_outlives_its_block_becomes_a_claim(conn: Conn) -> None:
    """What waits behind it waits in the usual way."""
    consumer(conn, ordering="key")
    size = one(conn, "select _pgqueue.limit_pieces()")
    send_keys(conn, "a" * 3)
    first = receive(conn, 1)
    send_all(conn, ["x"] * 4 * size, p_keys=[f"k{i}" for i in range(4 * size)])
    internals.rows(conn, "select 1")
    conn.execute("update pgqueue.slots set claimed_at = claimed_at - interval '2 s'"
                 " where token is not null")  # fmt: skip
    for _ in range(3 * size):
        assert value(conn, "ack", held(receive(conn, 1))) == 1
    checker.check(conn)
    assert internals.count(conn, "claims") == 1
    assert states(conn, "c")[first[0].seq + 1] == "waiting"
    assert value(conn, "ack", held(first)) == 1


# Who looks, and who moves


def test_slots_are_counted_as_what_they_are(conn: Conn, sent: list[int]) -> None:
    found = stats(conn, "c")
    assert (found.ready, found.waiting, found.claimed, found.claims) == (1, 4, 2, 2)
    assert sorted(states(conn, "c").values()) == ["claimed"] * 2 + ["ready"] + ["waiting"] * 4
    (because,) = call(conn, "explain_message", "s", "c", sent[2])
    assert because.state == "waiting"
    assert "which is held by" in because.because
    (because,) = call(conn, "explain_message", "s", "c", sent[4])
    assert because.state == "ready"
    pending = scanned(conn, "pending", "c")
    assert sum(row.hi - row.lo for row in pending) == len(sent)
    claimed = scanned(conn, "claimed", "c")
    assert sum(row.hi - row.lo for row in claimed) == 2
    assert len(call(conn, "peek", "s", "c", 10)) == 5
    consumer_id = one(conn, "select consumer_id from pgqueue.consumers")
    for count in ("consumer_backlog", "consumer_available"):
        assert value(conn, count, consumer_id) == 5
    assert value(conn, "seek", "s", "c", "latest") == 7
    assert stats(conn, "c").settled == 0


def test_what_comes_next_of_a_key_in_many_ranges_waits_in_runs_of_few(conn: Conn) -> None:
    consumer(conn, ordering="key")
    send_keys(conn, "ab" * 400)
    rows = receive(conn, 10)
    assert value(conn, "nack", held(rows), seqs_of(rows)[:1]) == 10
    checker.check(conn)
    most = "select max((select count(*) from unnest(seqs))) from pgqueue.consumer_messages"
    assert one(conn, most) <= one(conn, "select _pgqueue.limit_ranges()")


MOVES: dict[str, Callable[[Conn, list[int]], object]] = {
    "cancel": lambda conn, sent: value(conn, "cancel", "s", "c", sent[2:3]),
    "replay": lambda conn, sent: value(conn, "replay", "s", "c", "earliest"),
    "seek": lambda conn, sent: value(conn, "seek", "s", "c", "earliest"),
    "retry": lambda conn, sent: value(conn, "retry", "s", "c"),
    "limits": lambda conn, sent: value(
        conn, "alter_consumer", "s", "c", Jsonb({"per_key_limit": 2})
    ),
    "history": lambda conn, sent: value(
        conn, "alter_consumer", "s", "c", Jsonb({"keep_history": "1 hour"})
    ),
    "paused": lambda conn, sent: [value(conn, do, "s", "c") for do in ("pause", "resume")],
    "large": lambda conn, sent: value(conn, "ack", held(receive(conn, 1000))),
    "other size": lambda conn, sent: value(conn, "ack", held(receive(conn, 5))),
}
"""What moves or looks at what a consumer has."""


@pytest.mark.parametrize("move", MOVES)
def test_who_moves_what_a_consumer_has_finds_slots_too(
    conn: Conn, sent: list[int], move: str
) -> None:
    """Claims that go on keep their messages, and the order stays."""
    before = internals.rows(conn, "select claim_id from pgqueue.open_claims order by first_seq")
    MOVES[move](conn, sent)
    checker.check(conn)
    keys = {s: "ababcab"[i] for i, s in enumerate(sent)}
    for row in before:
        assert value(conn, "ack", row.claim_id) == (move != "seek")
    found = acked(conn, "s", "c", 1)
    assert_in_order(found, keys)
    gone = {"cancel": {sent[2]}}.get(move, set())
    again = set(sent) if move == "seek" else set(sent[2:]) - gone
    if move in ("large", "other size"):
        assert set(found) < again
    else:
        assert set(found) == again
    checker.check(conn)


def test_a_reader_has_what_was_in_slots(conn: Conn) -> None:
    reader = Reader(conn, consumer(conn, ordering="key"))
    sent = send_keys(conn, "aabc")
    rows = receive(conn, 1)
    assert seqs_of(rows) == sent[:1]
    assert sorted(reader.plan(reader.ask())) == sent[2:]
    checker.check(conn)
    assert value(conn, "ack", held(rows)) == 1
    assert seqs_of(receive(conn, 1)) == sent[1:2]


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
    """Move and look at what the consumer has, at random, until all is done."""
    chance = random.Random(number)
    with connection.connect(url) as conn:
        consumer_id = one(conn, "select consumer_id from pgqueue.consumers")
        while one(conn, "select count(*) from public.done") < count:
            what = chance.randrange(6)
            with conn.transaction(force_rollback=what == 0):
                if what <= 1:
                    internals.own_consumer(conn, consumer_id)
                elif what == 2:
                    kept = "1 hour" if chance.random() < 0.3 else None
                    value(conn, "alter_consumer", "s", "c", Jsonb({"keep_history": kept}))
                elif what == 3:
                    value(conn, "retry", "s", "c")
                elif what == 4:
                    value(conn, "cancel", "s", "c", [10**9])
                else:
                    checker.check(conn)
            conn.execute("select pg_sleep(0.02)")


@pytest.mark.parametrize(
    ("keys", "sizes", "ordering"),
    [(4, (1,), "key"), pytest.param(3, (1, 1, 2, 5, 10), "key", marks=pytest.mark.longer),
     pytest.param(60, (3, 10), "key", marks=pytest.mark.longer),
     pytest.param(1, (1, 2), "key", marks=pytest.mark.longer),
     pytest.param(4, (2,), "stream", marks=pytest.mark.longer),
     pytest.param(4, (1, 2, 5, 100), "stream", marks=pytest.mark.longer)],
)  # fmt: skip
def test_whoever_is_killed_or_moves_what_there_is_the_order_of_each_key_stays(
    url: str, conn: Conn, keys: int, sizes: tuple[int, ...], ordering: str
) -> None:
    """Workers acknowledge late, in part, twice or never; a judge outside looks at their notes."""
    consumer(conn, ordering=ordering, visibility_timeout=seconds(0.3))
    conn.execute(NOTES)
    count = int(os.environ.get("PGQUEUE_ATTACK_MESSAGES", "250"))
    chance = random.Random(keys)

    def produce() -> None:
        left = count
        with connection.connect(url) as mine:
            while left:
                some = min(left, chance.choice([1, 1, 5, 40]))
                send_keys(mine, "".join(chr(97 + chance.randrange(keys)) for _ in range(some)))
                left -= some

    with ThreadPoolExecutor(7) as pool:
        jobs = [pool.submit(produce), pool.submit(operate, url, keys, count)]
        jobs += [pool.submit(Attacker(url, n, sizes).work, count) for n in range(5)]
        for job in jobs:
            job.result()
    too_early = TOO_EARLY if ordering == "key" else TOO_EARLY.replace("partition by key ", "")
    assert conn.execute(too_early.encode()).fetchall() == []
    assert receive(conn, 1000) == []
    checker.check(conn)
