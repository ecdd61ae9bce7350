"""Latest wins: of a consumer with per_key_latest, only the newest message of a key waits."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.sql import clock, internals, limits
from tests.sql.cases import for_each
from tests.sql.queue import *

pytestmark = pytest.mark.usefixtures("stream", "allowed_afterwards")


def latest(conn: Conn, ordering: str = "none", **options: Any) -> int:
    """A consumer of which only the newest message of a key waits; its id."""
    given = {"per_key_latest": True, "keep_history": "1 day", **options}
    return consumer(conn, "c", ordering, **given)


def outcome(conn: Conn, seq: int) -> tuple[str, Any]:
    """How a message ended, or where it is, and by which one it was replaced."""
    (row,) = call(conn, "outcome", "s", "c", seq)
    return row.state, row.result and row.result.get("replaced_by")


@for_each("ordering", ORDERINGS)
@pytest.mark.promise(
    "feature: latest wins: the newest of a key replaces those that wait",
    "concepts: transitions of a message",
)
def test_of_a_key_only_the_newest_waiting_message_is_delivered(conn: Conn, ordering: str) -> None:
    """Messages without a key are never replaced; one publication is judged like several."""
    latest(conn, ordering)
    together = send_keys(conn, "a", None, "a", "b", None)
    assert states(conn) == dict.fromkeys(together, "new")
    first = send_key(conn, "c")
    rows = receive(conn)
    assert seqs_of(rows) == [*together[1:], first]
    assert outcome(conn, together[0]) == ("replaced", together[2])
    value(conn, "ack", claim_of(rows))
    singly = [send_key(conn, key) for key in "abacb"]
    assert acked(conn, "s", "c", 1) == [singly[2], singly[3], singly[4]]
    assert (stats(conn).settled, stats(conn).backlog) == (8, 0), "replaced ones are not settled"


@for_each("ordering", ORDERINGS)
def test_what_is_claimed_is_not_replaced_but_its_retry_is(conn: Conn, ordering: str) -> None:
    latest(conn, ordering, backoff_base="1 hour")
    old = send_key(conn)
    claim = claim_of(receive(conn))
    newer = send_key(conn)
    other = send_key(conn, "other")
    if ordering == "none":
        assert seqs_of(receive(conn, 1)) == [newer]
    elif ordering == "key":
        assert seqs_of(receive(conn)) == [other], "one of a key after the other"
    else:
        assert receive(conn) == []
    assert outcome(conn, old)[0] == "claimed"
    assert value(conn, "extend", claim) == 1
    value(conn, "nack", claim)
    assert outcome(conn, old) == ("replaced", newer) if ordering == "none" else True
    rest = {"none": [other], "key": [newer], "stream": [newer, other]}[ordering]
    assert seqs_of(receive(conn)) == rest, "the delay of the retry holds up nothing"
    assert outcome(conn, old) == ("replaced", newer)


@for_each("ordering", ["none", "key"])
def test_a_message_that_was_done_keeps_older_ones_from_coming_back(
    conn: Conn, opened: Session, ordering: str
) -> None:
    """A failed one, one whose lease ended, a dead letter, and one that is committed late."""
    latest(conn, ordering, max_deliver_count=5)
    late = opened()
    older = send_key(late)
    dead = send_key(conn)
    value(conn, "dead_letter", claim_of(receive(conn)))
    newest = send_key(conn)
    assert acked(conn, "s", "c") == [newest]
    late.execute("commit")
    assert value(conn, "redrive", "s", "c") == 1
    assert receive(conn) == []
    assert outcome(conn, older) == outcome(conn, dead) == ("replaced", newest)


def test_the_last_delivery_of_a_replaced_message_is_told(conn: Conn) -> None:
    latest(conn)
    old, alone = send_keys(conn, "k", "l")
    value(conn, "nack", claim_of(receive(conn)))
    newer = send_key(conn)
    rows = receive(conn)
    assert seqs_of(rows) == [alone, newer]
    assert [row.deliver_count for row in rows] == [2, 1]
    (row,) = call(conn, "outcome", "s", "c", old)
    assert (row.state, row.deliver_count, row.owner) == ("replaced", 1, None)
    (row,) = call(conn, "explain_message", "s", "c", old)
    assert row.because.endswith(f"by message {newer}, a newer one of the same key")
    alter(conn, keep_history=None)
    again = send_key(conn)
    send_key(conn)
    receive(conn)
    assert outcome(conn, again) == ("done", None), "nothing is kept of it"


def test_what_comes_back_behind_a_failed_message_is_replaced_too(conn: Conn) -> None:
    """With ordering=stream, all that follows the failed message in its claim goes back with it."""
    latest(conn, "stream")
    failed, older, other = send_keys(conn, "a", "b", "c")
    claim = claim_of(receive(conn))
    newer = send_key(conn, "b")
    assert receive(conn) == []
    value(conn, "nack", claim, [failed])
    assert outcome(conn, older) == ("replaced", newer)
    assert acked(conn, "s", "c") == [failed, other, newer]


@for_each("ordering", ["none", "key"])
def test_a_debounce_delivers_the_last_message_after_its_own_delay(
    conn: Conn, ordering: str
) -> None:
    """A message with a delay replaces one that was sent with a delay, or with none."""
    latest(conn, ordering)
    for i in range(3):
        send(conn, str(i), p_key="k", p_deliver_at=now(conn) + seconds(60 + i))
        assert receive(conn) == []
        assert list(states(conn).values()) == ["delayed"], "the others are replaced"
        clock.pass_time(conn, seconds(40))
    clock.pass_time(conn, seconds(30))
    (row,) = receive(conn)
    assert row.data == "2"
    send(conn, "now", p_key="l")
    send(conn, "later", p_key="l", p_deliver_at=now(conn) + seconds(60))
    assert receive(conn) == []
    send(conn, "at last", p_key="l")
    assert [row.data for row in receive(conn)] == ["at last"], "no delay is waited for"


def test_the_newest_of_a_key_is_the_one_with_the_highest_number(
    conn: Conn, session: Session, opened: Session
) -> None:
    """Whatever its priority, and however late an older one is committed or published."""
    stream = one(conn, "select stream_id from pgqueue.streams")
    latest(conn)
    with session() as other, other.transaction():
        blocks = [stage(other, stream, 1, data="staged")]
    late = opened()
    older = send_key(late)
    send(conn, p_key="k", p_priority=9)
    newest = send_key(conn)
    assert list(states(conn)) == [newest - 1, newest]
    late.execute("commit")
    assert seqs_of(receive(conn)) == [newest]
    assert outcome(conn, older) == outcome(conn, newest - 1) == ("replaced", newest)
    publish(conn, stream, blocks, 1)
    assert [row.data for row in receive(conn)] == ["staged"], "it has no key"


def test_what_is_rolled_back_expired_or_for_others_replaces_as_it_must(
    conn: Conn, opened: Session
) -> None:
    latest(conn, p_topic="k.#")
    consumer(conn, "other")
    seq = send_key(conn, "k")
    other = opened()
    send_key(other, "k")
    send(conn, p_key="k", p_consumers=["other"])
    other.execute("rollback")
    assert acked(conn, "s", "c") == [seq], "neither was for it"
    waits = send_key(conn, "k.x")
    send(conn, p_key="k.x", p_expires_at=now(conn) + seconds(60))
    assert receive(conn, 1, "other") != []
    clock.pass_time(conn, seconds(100))
    assert receive(conn) == [], "expired, and the one before it was replaced"
    assert (outcome(conn, waits)[0], outcome(conn, waits + 1)[0]) == ("replaced", "dead")


@for_each("ordering", ORDERINGS)
def test_what_is_sought_or_replayed_is_judged_anew(conn: Conn, ordering: str) -> None:
    latest(conn, ordering)
    seqs = [send_key(conn, key) for key in "abab"]
    assert acked(conn, "s", "c") == seqs[2:]
    value(conn, "seek", "s", "c", "earliest")
    assert acked(conn, "s", "c") == seqs[2:]
    value(conn, "replay", "s", "c", "earliest", f"seq {seqs[2]}")
    assert acked(conn, "s", "c") == seqs[:2], "the newest ones were not asked for"
    waits = send(conn, p_key="a", p_deliver_at=now(conn) + seconds(60))
    assert receive(conn) == []
    value(conn, "replay", "s", "c", "earliest", f"seq {waits}")
    assert acked(conn, "s", "c") == ([] if ordering == "stream" else seqs[3:])


@for_each("ordering", ["none", "key"])
def test_postponed_and_cancelled_messages_are_judged_like_others(conn: Conn, ordering: str) -> None:
    latest(conn, ordering)
    old = send_key(conn)
    receive(conn, p_visibility_timeout=seconds(0.001))
    newer, cancelled = send_keys(conn, "k", "k")
    assert value(conn, "cancel", "s", "c", [cancelled]) == 1
    assert value(conn, "postpone", "s", "c", [newer], now(conn) + seconds(60)) == 1
    assert receive(conn) == []
    assert outcome(conn, old) == ("replaced", newer)
    clock.pass_time(conn, seconds(100))
    assert seqs_of(receive(conn)) == [newer]


def test_what_is_postponed_may_be_behind_more_than_is_judged_at_once(conn: Conn) -> None:
    latest(conn, "key")
    for limit in ("limit_filter", "limit_take"):
        limits.set_constant(conn, limit, 2)
    seqs = send_keys(conn, "a", "b", "c", "d", "e", None, "a")
    seqs += [send_key(conn, key) for key in "ghi"]
    last = send_key(conn, "f")
    assert value(conn, "postpone", "s", "c", [last], now(conn) + seconds(60)) == 1
    assert sorted(acked(conn, "s", "c")) == seqs[1:]


@for_each("ordering", ["none", "key"])
def test_with_a_rate_of_a_key_the_newest_is_delivered_each_time(conn: Conn, ordering: str) -> None:
    """A throttle: what is replaced spends nothing of the rate, and holds nothing up."""
    latest(conn, ordering, per_key_interval="1 minute")
    sent, got = [], []
    for _ in range(3):
        sent.append([send_key(conn) for _ in range(3)])
        got += acked(conn, "s", "c", 1)
        clock.pass_time(conn, seconds(30))
    assert got == [sent[0][2], sent[2][2]]


@for_each("ordering", ORDERINGS)
def test_a_claim_that_cannot_look_at_all_that_is_published_delivers_nothing(
    conn: Conn, ordering: str
) -> None:
    """The next claims go on: no older message of a key is delivered before that."""
    latest(conn, ordering)
    sends = "select count(pgqueue.send('s', 'x', (i % 5)::text)) from generate_series(0, 2499) i"
    assert one(conn, sends) == 2500
    limits.set_constant(conn, "limit_take", 300)
    empty = 0
    while not (rows := receive(conn)):
        assert value(conn, "next_due", "s", "c") <= now(conn)
        empty += 1
    assert empty > 0
    assert seqs_of(rows) == list(range(2496, 2501))


def test_a_spark_query_and_a_condition_get_the_newest(conn: Conn) -> None:
    reader = Reader(conn, latest(conn))
    first = send_keys(conn, "a", "b", "a")
    end = reader.ask()
    assert reader.plan(end) == first[1:]
    second = send_keys(conn, "a", "b", "a")
    assert seqs_of(call(conn, "receive_where", "s", "c", '$.key == "b"')) == [second[1]]
    reader.move(end)
    assert reader.plan(reader.ask()) == [second[2]]


@for_each("ordering", ORDERINGS)
def test_a_paused_consumer_without_claims_begins_and_ceases_to_keep_the_newest(
    conn: Conn, ordering: str
) -> None:
    consumer(conn, "c", ordering, keep_history=seconds(3600))
    seqs = send_keys(conn, "a", "b", "a", None)
    claim = claim_of(receive(conn, 1))
    more = send_keys(conn, "b", "b")

    for says in ("is not paused, open claims: 1", "is paused, open claims: 1"):
        with raises("PQ003", says, column="p_settings"):
            alter(conn, per_key_latest=True)
        value(conn, "pause", "s", "c")
    value(conn, "nack", claim)
    alter(conn, per_key_latest=True)
    assert [outcome(conn, seq)[0] for seq in seqs[:2]] == ["replaced", "ready"]
    assert internals.count(conn, "newest_of_keys") == 2
    value(conn, "resume", "s", "c")
    assert acked(conn, "s", "c") == [seqs[2], seqs[3], more[1]]
    value(conn, "pause", "s", "c")
    alter(conn, per_key_latest=False)
    assert internals.count(conn, "newest_of_keys") == 0
    value(conn, "resume", "s", "c")
    again = send_keys(conn, "a", "a")
    assert acked(conn, "s", "c") == again


def test_it_begins_only_when_claims_are_over_that_nobody_sees_yet(
    conn: Conn, session: Session
) -> None:
    """A claimer that began before the pause, and goes back after the change, had the older one."""
    consumer(conn, "c")
    older = send_key(conn)
    more = send_all(conn, ["x"] * 300)
    value(conn, "defer", claim_of(receive(conn, 1000)))
    claimer, other = session(), session()
    claimer.execute("begin")
    assert seqs_of(receive(claimer, len(more) + 1)) == [older, *more]  # without the consumer's lock
    newer = send_key(conn)
    value(conn, "pause", "s", "c")
    with ThreadPoolExecutor(1) as pool:
        change = pool.submit(alter, other, per_key_latest=True)
        wait_for_a_lock(conn)
        claimer.execute("rollback")
        change.result(30)
    value(conn, "resume", "s", "c")
    assert acked(conn, "s", "c") == [*more, newer]


def test_what_is_noted_of_keys_is_forgotten_unless_their_messages_are_in_hand(conn: Conn) -> None:
    latest(conn)
    send_keys(conn, "done", "claimed", "waits")
    rows = receive(conn)
    claim = claim_of(rows)
    value(conn, "ack", claim, [rows[0].seq])
    value(conn, "nack", claim, [rows[2].seq])
    maintain(conn)
    assert internals.count(conn, "newest_of_keys") == 3
    clock.pass_time(conn, seconds(2 * 86400))
    maintain(conn)
    assert internals.count(conn, "newest_of_keys") == 2
    newer = send_keys(conn, "claimed", "waits")
    assert seqs_of(receive(conn)) == newer
    assert outcome(conn, rows[2].seq) == ("replaced", newer[1])
    value(conn, "drop_consumer", "s", "c")
    assert internals.count(conn, "newest_of_keys") == 0


@pytest.mark.small_limits
def test_nothing_is_delivered_while_a_newer_one_of_its_key_is_in_a_gap(
    conn: Conn, session: Session
) -> None:
    """A take looks at a part of a large gap, and what comes first there is not the newest."""
    latest(conn)
    late = session()
    for n in (*range(1, 10), 16, 29):
        late.execute("begin")
        newest = [send_key(late) for _ in range(n)][-1]
        other = send_key(conn, "other")
        assert acked(conn, "s", "c") == [other]
        late.execute("commit")
        internals.look_into_gaps_after(conn, -1)
        got: list[int] = []
        for _ in range(40):
            got += acked(conn, "s", "c")
        assert got == [newest], f"of a gap of {n}"


@for_each("ordering", ["key", "stream"])
@for_each("redriven", [False, True])
def test_messages_that_are_not_screened_yet_stay_first_when_the_newest_is_no_longer_kept(
    conn: Conn, ordering: str, redriven: bool
) -> None:
    """Before a message that is sent then, and before one that is redriven then."""
    latest(conn, ordering)
    dead = []
    for _ in range(2):
        dead.append(send_key(conn))
        value(conn, "dead_letter", claim_of(receive(conn)))
    assert value(conn, "redrive", "s", "c", [dead[1]]) == 1
    assert states(conn)[dead[1]] == "unfiltered"
    value(conn, "pause", "s", "c")
    alter(conn, per_key_latest=False)
    if redriven:
        assert value(conn, "redrive", "s", "c", [dead[0]]) == 1
    sent = send_key(conn)
    value(conn, "resume", "s", "c")
    assert acked(conn, "s", "c", 1) == [dead[1], *([dead[0]] if redriven else []), sent]
