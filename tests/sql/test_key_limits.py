"""Limits of keys: how many may be in flight, how many in a time, and turns."""

from __future__ import annotations

import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from typing import Any

import psycopg
import pytest
from psycopg.types.json import Jsonb

from tests.sql import checker, clock, internals
from tests.sql.cases import for_each
from tests.sql.queue import *

pytestmark = pytest.mark.usefixtures("stream", "allowed_afterwards")

BY_KEY = ["none", "key"]


def limited(conn: Conn, ordering: str, **settings: Any) -> int:
    """The consumer c with these settings; its id."""
    return consumer(conn, ordering=ordering, visibility_timeout=seconds(60), **settings)


def keys_of(rows: list[Any]) -> list[str]:
    """The keys of what `receive` returned."""
    return [row.key for row in rows]


def drained(conn: Conn, size: int = 3, name: str = "c") -> list[Any]:
    """Receives and acknowledges all that can be had at once."""
    got: list[Any] = []
    while rows := receive(conn, size, name):
        got += rows
        value(conn, "ack", claim_of(rows))
    return got


@pytest.mark.small_limits
@for_each("ordering", BY_KEY)
@pytest.mark.parametrize("size", [1, 2, 10])
@pytest.mark.promise("feature: concurrency of a key")
def test_no_more_of_a_key_are_in_flight_than_its_limit_allows(
    conn: Conn, ordering: str, size: int
) -> None:
    limited(conn, ordering, per_key_limit=2)
    seqs = send_keys(conn, *"aaaaab", None, None, "b")
    held = [rows for _ in range(20) if (rows := receive(conn, size))]
    delivered = Counter(key for rows in held for key in keys_of(rows))
    assert max(delivered["a"], delivered["b"]) <= 2
    if ordering == "none":
        assert delivered == {"a": 2, "b": 2, None: 2}, "and no fewer"
    assert delivered.total() - sum(delivered[k] for k in "ab") == 2
    for rows in held:
        value(conn, "ack", claim_of(rows))
    done = [seq for rows in held for seq in seqs_of(rows)] + seqs_of(drained(conn, size))
    assert sorted(done) == seqs
    assert stats(conn).backlog == 0


@for_each("ordering", ["none", "key"])
def test_a_key_behind_many_messages_of_another_is_reached_soon(
    conn: Conn, stream: int, ordering: str
) -> None:
    """After 12 claims of ten."""
    limited(conn, ordering, per_key_limit=1)
    internals.publish_together(conn, stream, 100_000, "'a'")
    (b,) = send_keys(conn, "b")
    for _ in range(12):
        rows = receive(conn, 10)
        if b in seqs_of(rows):
            break
        value(conn, "ack", claim_of(rows))
    else:
        pytest.fail("it was not reached")
    value(conn, "drop_stream", "s")  # the checker would read all of it


@pytest.mark.small_limits
@for_each("ordering", BY_KEY)
def test_what_is_settled_in_part_frees_as_much(conn: Conn, ordering: str) -> None:
    limited(conn, ordering, per_key_limit=2)
    seqs = send_keys(conn, *"aaaaaa")
    first = receive(conn, 2)
    assert seqs_of(first) == seqs[:2]
    assert receive(conn, 2) == []
    value(conn, "ack", claim_of(first), [seqs[0]])
    second = receive(conn, 2)
    assert seqs_of(second) == ([seqs[2]] if ordering == "none" else [])
    value(conn, "nack", claim_of(first), [seqs[1]])
    again = receive(conn, 1)
    assert len(again) == 1
    for rows in (second, again):
        if rows:
            value(conn, "ack", claim_of(rows))
    assert len(drained(conn)) == 6 - 1 - len(second) - len(again)


@for_each("ordering", BY_KEY)
def test_an_expired_claim_is_delivered_again_within_the_limit(conn: Conn, ordering: str) -> None:
    limited(conn, ordering, per_key_limit=1)
    seqs = send_keys(conn, *"aaa")
    receive(conn, 5, p_visibility_timeout=seconds(0.001))
    time.sleep(0.01)
    rows = receive(conn, 5)
    assert [(row.seq, row.deliver_count) for row in rows] == [(seqs[0], 2)]
    assert receive(conn, 5) == []
    value(conn, "nack", claim_of(rows), p_delay=seconds(0.2))
    if ordering == "none":
        assert seqs_of(receive(conn, 5)) == [seqs[1]], "a delayed one is not in flight"
    else:
        assert receive(conn, 5) == []


@pytest.mark.small_limits
@for_each("ordering", BY_KEY)
@pytest.mark.parametrize("size", [1, 10])
@pytest.mark.promise("feature: rate of a key")
def test_no_more_of_a_key_are_delivered_in_a_time_than_its_burst(
    conn: Conn, ordering: str, size: int
) -> None:
    limited(conn, ordering, per_key_interval="400 ms", per_key_burst=2)
    seqs = send_keys(conn, *"aaaaab", None)
    times: dict[int, tuple[float, float]] = {}  # it was delivered between these
    end = time.monotonic() + 10
    while len(times) < len(seqs) and time.monotonic() < end:
        before = time.monotonic()
        for row in drained_once(conn, size):
            times[row.seq] = (before, time.monotonic())
        time.sleep(0.005)
    assert sorted(times) == seqs
    of_a = sorted(times[s] for s in seqs[:5])
    assert times[seqs[5]] < of_a[2], "b does not wait for a"
    assert times[seqs[6]] < of_a[2], "nor what has no key"
    for first, third in zip(of_a, of_a[2:], strict=False):
        assert third[1] - first[0] > 0.4, "more than the burst within the interval"
        assert third[0] - first[1] < 5
    if ordering == "key":
        assert [times[s] for s in seqs[:5]] == of_a


def drained_once(conn: Conn, size: int) -> list[Any]:
    """Receives and acknowledges one claim."""
    rows = receive(conn, size)
    if rows:
        value(conn, "ack", claim_of(rows))
    return rows


@for_each("ordering", BY_KEY)
def test_a_retry_counts_against_the_rate(conn: Conn, ordering: str) -> None:
    limited(conn, ordering, per_key_interval="300 ms")
    (seq,) = send_keys(conn, "a")
    began = time.monotonic()
    value(conn, "nack", claim_of(receive(conn, 5)))
    while not (rows := receive(conn, 5)):
        time.sleep(0.005)
    assert seqs_of(rows) == [seq]
    assert time.monotonic() - began > 0.28


@pytest.mark.small_limits
@for_each("ordering", BY_KEY)
def test_who_is_moved_keeps_the_rate(conn: Conn, ordering: str) -> None:
    """Whom a key stands for does not get more because its messages are delivered once more."""
    limited(conn, ordering, per_key_interval="1 hour", per_key_burst=2)
    seqs = send_keys(conn, *"aaa")
    receive(conn, 1)
    value(conn, "seek", "s", "c", "earliest")
    assert len(drained(conn)) == 1
    clock.pass_time(conn, seconds(3600))
    assert seqs_of(drained(conn, 2)) == seqs[1:]


@for_each("ordering", BY_KEY)
@pytest.mark.promise("feature: fairness, round robin")
def test_keys_take_turns(conn: Conn, ordering: str) -> None:
    limited(conn, ordering, fair=True)
    n = 300
    send_keys(conn, *["hot"] * n)
    got = keys_of(drained_some(conn, 3))
    send_keys(conn, "b", "c", "d")
    got = keys_of(drained_some(conn, 12))
    assert {"b", "c", "d"} <= set(got), "they need not wait for what was there before"
    assert len(drained(conn)) == n + 3 - 3 - 12


def drained_some(conn: Conn, n: int) -> list[Any]:
    """Receives and acknowledges so many, one at a time."""
    got: list[Any] = []
    for _ in range(20 * n):
        got += drained_once(conn, 1)
        if len(got) == n:
            break
    return got


def test_without_order_all_workers_work_on_the_only_key(conn: Conn) -> None:
    limited(conn, "none", fair=True)
    send_keys(conn, *["hot"] * 50)
    held = [receive(conn, 1) for _ in range(20)]
    assert all(held)


def test_what_is_assigned_in_another_size_is_bundles_of_few_ranges_meanwhile(conn: Conn) -> None:
    """To take messages out of a bundle costs in proportion to its ranges."""
    limited(conn, "none", per_key_limit=1)
    sent = send_keys(conn, *(key for n in range(800) for key in (f"k{n}", "hot")))
    first = receive(conn, 90)
    assert len(receive(conn, 5)) == 5, "it has made all bundles of 90 unassigned, and assigned some"
    checker.check(conn)
    value(conn, "ack", claim_of(first))
    left = (
        {*sent} - {*seqs_of(first)} - {seq for seq, at in states(conn).items() if at == "claimed"}
    )
    assert {*seqs_of(drained(conn, 100))} == left


def test_a_claim_counts_against_the_limit_until_its_message_is_settled(conn: Conn) -> None:
    """Messages of several keys are one bundle, also where keys have limits."""
    limited(conn, "none", per_key_limit=1)
    send_keys(conn, *"ab")
    rows = receive(conn, 2)
    (bundle,) = internals.bundles(conn)
    assert (bundle.state, bundle.message_count) == ("claimed", 2)
    send_keys(conn, *"ab")
    assert receive(conn, 2) == []
    value(conn, "ack", claim_of(rows), [rows[0].seq])
    assert keys_of(receive(conn, 2)) == ["a"]
    value(conn, "ack", claim_of(rows))
    assert keys_of(receive(conn, 2)) == ["b"]


def test_what_is_claimed_takes_no_turn_from_its_key(conn: Conn) -> None:
    limited(conn, "none", fair=True)
    for _ in range(3):
        send_keys(conn, *"abcd")
        assert keys_of([receive(conn, 1)[0] for _ in range(4)]) == list("abcd")
    assert len(internals.claims(conn)) == 12


@for_each("ordering", BY_KEY)
def test_workers_that_race_keep_the_limit_and_the_rate(
    conn: Conn, session: Session, ordering: str
) -> None:
    limited(conn, ordering, per_key_limit=2, per_key_interval="200 ms", per_key_burst=3)
    keys = ["a", "b", "c"]
    seqs = send_keys(conn, *(keys * 14))
    events: list[tuple[float, int, str]] = []  # surely in flight, and no more
    begun: list[tuple[float, float, str]] = []  # delivered between these
    done: list[int] = []
    lock = threading.Lock()

    def work(number: int) -> None:
        with session() as mine:
            end = time.monotonic() + 20
            while len(done) < len(seqs) and time.monotonic() < end:
                before = time.monotonic()
                rows = receive(mine, 1 + number % 3)
                if not rows:
                    time.sleep(0.01)
                    continue
                with lock:
                    begun.extend((time.monotonic(), before, row.key) for row in rows)
                    events.extend((time.monotonic(), 1, row.key) for row in rows)
                time.sleep(0.003)
                with lock:
                    events.extend((time.monotonic(), -1, row.key) for row in rows)
                if number == 0 and len(done) % 5 == 0:
                    value(mine, "nack", claim_of(rows))
                    continue
                value(mine, "ack", claim_of(rows))
                with lock:
                    done.extend(seqs_of(rows))

    with ThreadPoolExecutor(4) as pool:
        for worker in [pool.submit(work, number) for number in range(4)]:
            worker.result(60)
    assert sorted(done) == seqs
    for key in keys:
        changes = [change for _, change, k in sorted(events) if k == key]
        assert max(accumulate(changes)) <= 2, "more in flight than the limit"
        starts = sorted((after, before) for after, before, k in begun if k == key)
        for i in range(len(starts) - 3):
            window = starts[i : i + 4]
            span = window[-1][0] - min(before for _, before in window)
            assert span > 0.2, "more than the burst within the interval"
    assert internals.claims(conn) == []


def test_limits_of_a_consumer_without_order_need_it_paused_and_without_claims(conn: Conn) -> None:
    consumer(conn)
    seqs = send_keys(conn, *"aab", None)
    with raises("PQ003", "is not paused, open claims: 0", column="p_settings"):
        alter(conn, per_key_limit=1)
    rows = receive(conn, 1)
    value(conn, "pause", "s", "c")
    with pytest.raises(psycopg.Error, match="is paused, open claims: 1"):
        alter(conn, per_key_limit=1)
    value(conn, "nack", claim_of(rows), p_delay=seconds(0.001))
    alter(conn, per_key_limit=1)
    alter(conn, per_key_limit=2)
    alter(conn, per_key_limit=1)
    value(conn, "resume", "s", "c")
    held = receive(conn, 10)  # with what failed before
    assert sorted(map(str, keys_of(held))) == ["None", "a", "b"]
    assert receive(conn, 10) == []
    value(conn, "ack", claim_of(held))
    value(conn, "pause", "s", "c")
    alter(conn, per_key_limit=None)
    value(conn, "resume", "s", "c")
    assert sorted(acked(conn, "s", "c") + seqs_of(held)) == seqs


@pytest.mark.small_limits
@pytest.mark.parametrize("before", [{"fair": True}, {"per_key_interval": "1 us"}], ids=str)
def test_a_limit_counts_what_was_in_flight_when_it_was_set(
    conn: Conn, before: dict[str, Any]
) -> None:
    limited(conn, "none", **before)
    send_keys(conn, *"ab")
    held = [claim_of(receive(conn, 1)) for _ in range(2)]
    assert receive(conn, 1) == []
    alter(conn, per_key_limit=1)
    send_keys(conn, *"aab")
    assert receive(conn, 5) == []
    value(conn, "ack", held[0])
    (row,) = receive(conn, 5)
    assert row.key == "a"
    value(conn, "ack", held[1])
    assert keys_of(receive(conn, 5)) == ["b"]


@pytest.mark.promise("settings: limits of a key and Spark")
def test_a_spark_query_is_refused(conn: Conn) -> None:
    consumer_id = limited(conn, "key", per_key_limit=1)
    with raises("PQ006", "which Spark queries do not support"):
        value(conn, "reader_claim", "0" * 32, consumer_id, 0, 0, None)


@for_each("ordering", BY_KEY)
@pytest.mark.promise("settings: limits of a key and Spark")
def test_a_spark_query_whose_consumer_has_limits_now_replays_nothing(
    conn: Conn, ordering: str
) -> None:
    """Its batch could never be acknowledged: workers get it."""
    reader = Reader(conn, consumer(conn, ordering=ordering))
    seqs = send_keys(conn, *"ab")
    end = reader.ask()
    clock.end_leases(conn)
    value(conn, "ack", claim_of(receive(conn, 1)))
    value(conn, "pause", "s", "c")
    alter(conn, per_key_limit=1)
    value(conn, "resume", "s", "c")
    with raises("PQ006", "which Spark queries do not support"):
        reader.resume(end)
    assert seqs_of(drained(conn)) == seqs[1:]


def test_a_message_of_later_waits_behind_those_that_wait_for_a_token(conn: Conn) -> None:
    limited(conn, "key", per_key_interval="1 hour", per_key_burst=1)
    first, second = send_keys(conn, *"aa")
    rows = receive(conn, 5)
    assert seqs_of(rows) == [first]
    value(conn, "ack", claim_of(rows))
    assert receive(conn, 5) == []
    (third,) = send_all(conn, ["x"], p_keys=["a"], p_deliver_at=now(conn) + seconds(1800))
    assert receive(conn, 5) == []
    checker.check(conn)
    for seq in (second, third):
        clock.pass_time(conn, seconds(3600))
        rows = receive(conn, 5)
        assert seqs_of(rows) == [seq]
        value(conn, "ack", claim_of(rows))
        checker.check(conn)


@for_each("ordering", BY_KEY)
def test_what_waits_for_a_limit_says_so(conn: Conn, ordering: str) -> None:
    limited(conn, ordering, per_key_interval="1 hour", per_key_limit=1)
    _, second, third = send_keys(conn, *"aaa")
    claim = claim_of(receive(conn, 5))
    (row,) = call(conn, "key_stats", "s", "c")
    assert (row.key, row.waiting, row.delayed, row.first_seq) == ("a", 2, 0, 1)
    for seq in (second, third):
        (row,) = call(conn, "explain_message", "s", "c", seq)
        why = "behind the rate limit of its key: 1 delivered within 01:00:00"
        assert (row.state, row.because) == ("waiting", why)
        assert row.until - now(conn) > seconds(3500)
    alter(conn, per_key_interval=None)
    (row,) = call(conn, "explain_message", "s", "c", second)
    assert row.because.startswith("behind messages of its key, held by spark-pgqueue since ")
    assert row.because.endswith(f" (claim {claim} of 1 message)")
    assert stats(conn).waiting == 2
    value(conn, "ack", claim)


@for_each("ordering", BY_KEY)
@for_each(
    "before, after",
    [
        ({"per_key_interval": "1 hour"}, {"per_key_interval": None}),
        ({"per_key_limit": 1}, {"per_key_limit": 5}),
        ({"per_key_limit": 1, "fair": True}, {"per_key_limit": None}),
    ],
)
def test_a_limit_that_is_raised_or_lifted_lets_go_of_what_waits(
    conn: Conn, ordering: str, before: dict[str, Any], after: dict[str, Any]
) -> None:
    """At once, and not when what is in flight is done. By key the order holds all the same."""
    limited(conn, ordering, fair=True)
    alter(conn, **before)
    seqs = send_keys(conn, *"aaaa")
    first = receive(conn, 5)
    assert seqs_of(first) == seqs[:1] or (ordering, "per_key_limit") == ("key", next(iter(before)))
    held = claim_of(first)
    done = seqs_of(first)
    assert receive(conn, 5) == []
    alter(conn, **after)
    rest = [] if ordering == "key" else seqs_of(drained(conn, 5))
    assert sorted(done + rest) == (seqs if ordering == "none" else done)
    value(conn, "ack", held)
    done += rest + seqs_of(drained(conn, 5))
    assert sorted(done) == seqs


@for_each("ordering", BY_KEY)
def test_a_rate_that_is_lifted_while_a_claim_waits_holds_nothing_up(
    conn: Conn, session: Session, ordering: str
) -> None:
    """The claim has read the old settings: tokens that it spends would be asked for by nobody."""
    limited(conn, ordering, per_key_interval="300 ms", fair=True)
    seqs = send_keys(conn, *"aaa")
    with ThreadPoolExecutor(1) as pool, session() as other:
        with conn.transaction():
            alter(conn, per_key_interval=None)
            claim = pool.submit(receive, other, 1)
            wait_for_a_lock(conn)
        rows = claim.result(20)
    checker.check(conn)
    value(conn, "ack", claim_of(rows))
    done = seqs_of(rows)
    end = time.monotonic() + 10
    while len(done) < 3 and time.monotonic() < end:
        done += seqs_of(drained(conn))
        time.sleep(0.01)
    assert done == seqs
    clock.pass_time(conn, seconds(1))
    assert receive(conn, 1) == []
    value(conn, "maintain")
    assert internals.count(conn, "key_tokens") == 0


@pytest.mark.parametrize(
    ("ordering", "before", "after"),
    [
        ("none", {"per_key_limit": 9}, {"per_key_limit": 1}),
        ("none", {"fair": True}, {"per_key_interval": "1 hour"}),
        ("key", {}, {"per_key_interval": "1 hour"}),
    ],
)
def test_a_claim_that_waits_for_a_change_of_limits_keeps_the_new_ones(
    conn: Conn, session: Session, ordering: str, before: dict[str, Any], after: dict[str, Any]
) -> None:
    """It has read the consumer before, and assigns messages that others then claim."""
    limited(conn, ordering, **before)
    send_keys(conn, *"aaaaaaaa")
    changing, claiming = session(), session()
    changing.execute("begin")
    alter(changing, **after)
    with ThreadPoolExecutor(1) as pool:
        got = pool.submit(receive, claiming, 1)
        wait_for_a_lock(conn)
        changing.execute("commit")
        rows = got.result(20)
    assert len(rows) == 1
    if "per_key_interval" in after:
        value(conn, "ack", claim_of(rows))
    assert [receive(conn, 1) for _ in range(3)] == [[], [], []]


def test_a_bundle_that_is_dealt_again_when_tokens_come_back_is_delivered_whole(conn: Conn) -> None:
    """Its messages came at different times: one is stored before the token that it waits for."""
    limited(conn, "key", per_key_interval=seconds(60), per_key_burst=2)
    claims = []
    for key in "abcd":
        send_keys(conn, key, key)
        claims.append(claim_of(receive(conn, 1)))
    for claim in claims:
        value(conn, "ack", claim)
    rows = receive(conn, 2)
    assert keys_of(rows) == ["a", "b"], "c and d are assigned as the next bundle"
    value(conn, "ack", claim_of(rows))
    clock.pass_time(conn, seconds(61))
    assert keys_of(drained(conn, 1)) == ["c", "d"]


def test_what_goes_back_is_not_passed_when_the_first_of_its_tokens_comes_back(conn: Conn) -> None:
    """It was in a bundle with a message that came earlier, and so stands before its first token."""
    limited(conn, "key", per_key_interval=seconds(60), per_key_burst=2)
    send_keys(conn, "c", "c", "c")
    claims = [claim_of(receive(conn, 1))]
    _, seq, last = send_keys(conn, "d", "d", "d")
    claims.append(claim_of(receive(conn, 1)))
    for claim in claims:
        value(conn, "ack", claim)
    clock.pass_time(conn, seconds(30))
    rows = receive(conn, 2)
    assert seqs_of(rows)[1] == seq
    value(conn, "nack", claim_of(rows))
    assert receive(conn, 10) == [], "the tokens are spent"
    clock.pass_time(conn, seconds(31))
    got = seqs_of(receive(conn, 10))
    assert (seq in got, last in got) == (True, False)


def test_a_token_says_when_a_claim_makes_sense_again(conn: Conn) -> None:
    limited(conn, "none", per_key_interval="1 hour", per_key_burst=2)
    send_keys(conn, *"aaa")
    assert len(drained(conn)) == 2
    assert seconds(3500) < value(conn, "next_due", "s", "c") - now(conn) <= seconds(3600)
    clock.pass_time(conn, seconds(3600))
    assert value(conn, "next_due", "s", "c") <= now(conn)
    assert len(drained(conn)) == 1
    clock.pass_time(conn, seconds(3600))
    assert drained(conn) == []
    assert value(conn, "next_due", "s", "c") is None
    value(conn, "maintain")
    assert internals.count(conn, "key_tokens") == 0


@pytest.mark.small_limits
@for_each("ordering", BY_KEY)
@pytest.mark.parametrize("settings", [{"per_key_limit": 5}, {"fair": True}], ids=str)
def test_a_message_that_kills_its_worker_dies_alone(
    conn: Conn, ordering: str, settings: dict[str, Any]
) -> None:
    """Claims are halved within the limits; and where nothing is in flight, a claim finds some."""
    limited(conn, ordering, max_deliver_count=2, **settings)
    seqs = send_keys(conn, *("aaaaabbcd" * 3))
    poison = seqs[7]
    done = []
    while rows := receive(conn, 20):
        if poison in seqs_of(rows):
            value(conn, "nack", claim_of(rows))
        else:
            done += seqs_of(rows)
            value(conn, "ack", claim_of(rows))
    assert sorted([*done, poison]) == seqs
    assert [row.message_count for row in internals.dead_letters(conn)] == [1]


def test_who_retries_all_that_is_delayed_ends_no_rate(conn: Conn) -> None:
    limited(conn, "none", per_key_interval="1 hour")
    send_keys(conn, "a", "a")
    value(conn, "nack", claim_of(receive(conn, 5)), p_delay=seconds(3600))
    value(conn, "retry", "s", "c")
    assert receive(conn, 5) == []


@for_each("delay", [60, 7200])
@for_each("interval", [None, "1 minute"])
def test_a_message_of_later_waits_no_longer_than_a_new_interval(
    conn: Conn, delay: int, interval: str | None
) -> None:
    """Nor does it come before its time."""
    limited(conn, "key", per_key_interval="1 hour")
    send_keys(conn, "a")
    value(conn, "ack", claim_of(receive(conn)))
    (later,) = send_all(conn, ["x"], p_keys=["a"], p_deliver_at=now(conn) + seconds(delay))
    assert receive(conn) == []
    checker.check(conn)
    (row,) = call(conn, "explain_message", "s", "c", later)
    assert row.state == "delayed"
    assert abs((row.until - now(conn)).total_seconds() - max(delay, 3600)) < 60
    alter(conn, per_key_interval=interval)
    assert receive(conn) == []
    checker.check(conn)
    clock.pass_time(conn, seconds(delay - 30))
    assert receive(conn) == []
    clock.pass_time(conn, seconds(31))
    assert seqs_of(receive(conn)) == [later]


def test_a_message_whose_delay_has_passed_waits_for_a_token(conn: Conn) -> None:
    limited(conn, "key", per_key_interval="1 hour")
    send_keys(conn, "a")
    value(conn, "ack", claim_of(receive(conn)))
    (later,) = send_all(conn, ["x"], p_keys=["a"], p_deliver_at=now(conn) + seconds(60))
    assert receive(conn) == []
    clock.pass_time(conn, seconds(120))
    assert receive(conn) == []
    (row,) = call(conn, "explain_message", "s", "c", later)
    why = "behind the rate limit of its key: 1 delivered within 01:00:00"
    assert (row.state, row.because) == ("waiting", why)
    assert row.until - now(conn) > seconds(3400)


@for_each("ordering", BY_KEY)
def test_a_shorter_interval_holds_for_what_was_delivered_before(conn: Conn, ordering: str) -> None:
    limited(conn, ordering, per_key_interval="1 hour")
    seqs = send_keys(conn, "a", "a", "a")
    assert seqs_of(drained(conn)) == seqs[:1]
    alter(conn, per_key_interval="1 minute")
    assert receive(conn) == []
    clock.pass_time(conn, seconds(61))
    assert seqs_of(drained(conn)) == seqs[1:2]
    alter(conn, per_key_interval="1 hour")
    assert receive(conn) == []
    clock.pass_time(conn, seconds(61))
    assert seqs_of(drained(conn)) == seqs[2:]


def test_messages_without_a_key_do_not_count_for_the_key_of_their_long_claim(conn: Conn) -> None:
    limited(conn, "none", per_key_limit=2)
    seqs = send_keys(conn, "a", None)
    rows = receive(conn)
    assert seqs_of(rows) == seqs
    age_claims(conn)
    later = send_keys(conn, "a", "a")
    assert seqs_of(receive(conn)) == later[:1]
    value(conn, "ack", claim_of(rows), seqs[:1])
    assert seqs_of(receive(conn)) == later[1:]


@for_each("before", [{"fair": True}, {"per_key_interval": "1 us"}])
@for_each("others", [[], [None]])
def test_a_limit_counts_long_claims_that_were_made_before_it_was_set(
    conn: Conn, before: dict[str, Any], others: list[None]
) -> None:
    limited(conn, "none", **before)
    b, a, *_ = send_keys(conn, "b", "a", *others)
    rows = receive(conn)
    assert len(rows) == 2 + len(others)
    value(conn, "ack", claim_of(rows), [b])
    age_claims(conn)
    alter(conn, per_key_limit=1)
    checker.check(conn)
    seqs = send_keys(conn, "a", "b")
    assert seqs_of(receive(conn)) == seqs[1:]
    value(conn, "ack", claim_of(rows), [a])
    assert seqs_of(receive(conn)) == seqs[:1]
    value(conn, "ack", claim_of(rows))


@for_each("limit", [9, None])
def test_a_key_whose_claim_stays_open_gets_its_next_token(conn: Conn, limit: int | None) -> None:
    """While the limit is not reached, or when it is reset."""
    limited(conn, "none", per_key_limit=9, per_key_interval="1 hour")
    send_keys(conn, "a")
    claim = claim_of(receive(conn))
    value(conn, "extend", claim, seconds(7200))
    age_claims(conn)
    alter(conn, per_key_limit=limit)
    later = send_keys(conn, "a", "a")
    assert receive(conn) == []
    clock.pass_time(conn, seconds(3600))
    assert seqs_of(receive(conn)) == later[:1]
    assert receive(conn) == []
    value(conn, "ack", claim)


def test_a_key_whose_first_message_is_cancelled_waits_for_its_token(conn: Conn) -> None:
    limited(conn, "none", per_key_limit=9, per_key_interval="1 hour")
    _, second, third = send_keys(conn, *"aaa")
    claim = claim_of(receive(conn))
    value(conn, "extend", claim, seconds(7200))
    age_claims(conn)
    assert value(conn, "cancel", "s", "c", [second]) == 1
    clock.pass_time(conn, seconds(3600))
    assert seqs_of(receive(conn)) == [third]
    value(conn, "ack", claim)


def test_nothing_is_left_of_long_claims_when_the_last_limit_is_reset(conn: Conn) -> None:
    limited(conn, "none", per_key_limit=1)
    send_keys(conn, "a")
    long_claim = claim_of(receive(conn))
    clock.pass_time(conn, seconds(2))
    (seq,) = send_keys(conn, "b")
    claim = claim_of(receive(conn))
    value(conn, "pause", "s", "c")
    value(conn, "ack", long_claim)
    value(conn, "defer", claim, p_state=Jsonb({"step": 2}))
    alter(conn, per_key_limit=None)
    checker.check(conn)
    value(conn, "resume", "s", "c")
    (row,) = receive(conn, 1)
    assert (row.seq, row.deliver_count, row.saved) == (seq, 1, {"step": 2})
    value(conn, "ack", claim_of([row]))
    assert receive(conn) == []
    assert internals.claims(conn) == []
