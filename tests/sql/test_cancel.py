"""Cancelling: messages are taken from a consumer, wherever it has them, and no other is."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

from tests.sql import checker, clock, internals
from tests.sql.cases import for_each
from tests.sql.cost import GROWTH, cost
from tests.sql.queue import *

pytestmark = pytest.mark.usefixtures("stream", "allowed_afterwards")


def cancel(conn: Conn, *seqs: int, name: str = "c") -> int:
    """Cancel messages of a consumer; how many that were."""
    return value(conn, "cancel", "s", name, list(seqs))


@pytest.mark.small_limits
@for_each("ordering", ORDERINGS)
@pytest.mark.promise(
    "feature: cancelled by others, waiting or running", "concepts: transitions of a message"
)
def test_messages_are_taken_wherever_the_consumer_has_them(conn: Conn, ordering: str) -> None:
    """New, ready, delayed, waiting, claimed and dead; others of the same runs stay."""
    consumer(conn, ordering=ordering)
    dead = send_keys(conn, "dead")
    value(conn, "dead_letter", claim_of(receive(conn)))
    held = send_keys(conn, "a", "b", "c", "d")
    claim = claim_of(receive(conn, 4))
    ready = send_keys(conn, *"aabbefghij")
    receive(conn, 1)
    later = now(conn) + timedelta(hours=1)
    delayed = send_all(conn, ["x"] * 3, p_keys=["k", "l", "m"], p_deliver_at=later)
    receive(conn, 1)
    before = states(conn)
    kept = set(before) - {held[1], ready[0], ready[5], delayed[1], dead[0]}
    new = send_all(conn, ["x"] * 3, p_keys=["n", "o", "p"])
    claimed = {seq for seq, state in before.items() if state == "claimed"}

    assert cancel(conn, held[1], ready[0], ready[5], delayed[1], new[1], dead[0], 10**9) == 5
    assert set(states(conn)) == kept | {new[0], new[2], dead[0]}
    assert cancel(conn, held[1], ready[0], delayed[1], new[1]) == 0, "once"
    checker.check(conn)
    left = {seq for seq, state in states(conn).items() if state == "claimed"}
    assert left == claimed - {held[1], ready[0], ready[5]}
    if ordering != "stream" or held[0] in left:
        assert value(conn, "ack", claim) == len(left & set(held))
    clock.pass_time(conn, timedelta(hours=2))
    clock.end_leases(conn)
    got = acked_all(conn)
    assert set(got) == kept - (left & set(held)) - set(dead) | {new[0], new[2]}
    assert len(got) == len(set(got))


def acked_all(conn: Conn) -> list[int]:
    """Everything, also where a claim with small limits finds nothing at first."""
    got: list[int] = []
    for _ in range(30):
        got += acked(conn, "s", "c", 7)
    return got


@for_each("ordering", ORDERINGS)
def test_a_worker_is_told_by_smaller_numbers(conn: Conn, ordering: str) -> None:
    consumer(conn, ordering=ordering)
    a, b, c = send_keys(conn, "a", "a", "b")
    claim = claim_of(receive(conn, 3))
    assert value(conn, "extend", claim) == 3
    assert cancel(conn, b) == 1
    assert value(conn, "extend", claim) == 2
    assert value(conn, "ack", claim, [b]) == 0
    assert value(conn, "nack", claim, [b]) == 0
    assert value(conn, "ack", claim, [a, b]) == 1
    assert cancel(conn, c) == 1
    assert value(conn, "ack", claim) == 0, "it has nothing left"
    assert internals.claims(conn) == []
    assert receive(conn) == []
    assert (stats(conn).backlog, stats(conn).settled) == (0, 1)


@for_each("state", ["claimed", "delayed"])
def test_what_follows_of_the_key_goes_on(conn: Conn, session: Session, state: str) -> None:
    """And a session that waits is notified."""
    consumer(conn, ordering="key")
    first, second = send_keys(conn, "k", "k")
    claim = claim_of(receive(conn, 1))
    if state == "delayed":
        value(conn, "nack", claim, None, timedelta(hours=1))
    assert receive(conn) == []
    other = session()
    (waiting,) = call(other, "start_waiting", "s")
    assert cancel(conn, first) == 1
    (heard,) = list(other.notifies(timeout=5, stop_after=1))
    assert heard.channel == waiting.channel
    assert acked(other, "s", "c") == [second]


def test_limits_of_a_key_leave_room_again(conn: Conn) -> None:
    consumer(conn, per_key_limit=2)
    seqs = send_keys(conn, *"kkkkk")
    assert len(receive(conn)) == 2
    assert receive(conn) == []
    assert cancel(conn, seqs[0], seqs[3]) == 2
    assert len(receive(conn)) == 1
    clock.end_leases(conn)
    assert set(acked_all(conn)) == {seqs[1], seqs[2], seqs[4]}


@pytest.mark.small_limits
def test_what_is_new_is_found_far_behind_and_late(conn: Conn, stream: int) -> None:
    """In publications that are far ahead, in gaps, and written long before."""
    consumer(conn)
    block = stage(conn, stream, 3)  # numbers 1 to 3, published at last
    first = send(conn)
    receive(conn, 1)
    many = [send(conn) for _ in range(20)]
    publish(conn, stream, [block], 3)
    assert cancel(conn, many[17], many[3], 2) == 3
    assert cancel(conn, many[18], many[3], many[4]) == 2
    checker.check(conn)
    left = {*many, 1, 3} - {many[17], many[3], many[18], many[4]}
    assert {seq for seq, state in states(conn).items() if state == "new"} == left
    clock.end_leases(conn)
    assert set(acked_all(conn)) == left | {first}
    assert stats(conn).settled == len(left) + 1


def test_what_commits_later_between_is_not_lost(conn: Conn, opened: Session) -> None:
    consumer(conn)
    slow = opened()
    late = send(slow)
    before, cancelled = send(conn), send(conn)
    assert cancel(conn, cancelled, late) == 1, "what is not committed is not there"
    assert acked(conn, "s", "c") == [before]
    slow.execute("commit")
    assert acked(conn, "s", "c") == [late]
    assert acked(conn, "s", "c") == []


def test_only_what_the_consumer_gets_is_cancelled(conn: Conn) -> None:
    consumer(conn, p_topic="a")
    consumer(conn, "other")
    assert cancel(conn) == cancel(conn, 0, -5, 2**62) == 0, "numbers of no message"
    a, b, more = send_keys(conn, "a", "b", "a")
    named = send(conn, p_key="a", p_consumers=["other"])
    assert cancel(conn, a, b, named) == 1
    assert acked(conn, "s", "c") == [more]
    assert acked(conn, "s", "other") == [a, b, more, named]
    a, b, more = send_keys(conn, "a", "b", "a")
    receive(conn, 1)
    assert cancel(conn, more, b) == 1
    assert stats(conn).claimed == 1


def test_a_query_keeps_what_it_has_in_hand(conn: Conn, reader: Reader) -> None:
    seqs = send_all(conn, ["x"] * 3)
    end = reader.ask()
    assert cancel(conn, seqs[1]) == 0
    assert reader.plan(end) == seqs
    reader.move(end)
    reader.ask()


def test_what_it_passes_over_is_not_taken_before_its_time(
    conn: Conn, stream: int, reader: Reader
) -> None:
    """A query takes nothing that was published after its bound: cancelled is a later one."""
    first = send(conn)
    bound = value(conn, "last_publication", stream)
    later, last = send(conn), send(conn)
    assert cancel(conn, last) == 1
    end = reader.ask(p_upto_publication=bound)
    assert reader.plan(end) == [first]
    reader.move(end)
    assert reader.ask(p_upto_publication=bound).claimed == 0
    assert reader.plan(reader.ask()) == [later]


@pytest.mark.promise("concepts: transitions of a message")
def test_seek_and_replay_bring_it_back(conn: Conn) -> None:
    consumer(conn)
    first, second = send_all(conn, ["x", "x"])
    assert cancel(conn, second) == 1
    value(conn, "replay", "s", "c", "earliest")
    assert set(acked(conn, "s", "c")) == {first, second}
    third = send(conn)
    assert cancel(conn, third) == 1
    value(conn, "seek", "s", "c", f"seq {third}")
    assert acked(conn, "s", "c") == [third]


def test_history_and_explanations_say_so(conn: Conn, session: Session) -> None:
    conn.execute("set application_name = 'clerk'")
    consumer(conn, keep_history="1 day", notify_done=True)
    consumer(conn, "plain")
    a, b = send_all(conn, ["x", "x"])
    receive(conn, 1)
    other = session()
    value(other, "listen_done", "s", "c")
    assert cancel(conn, a, b) == 2
    assert len(list(other.notifies(timeout=5, stop_after=1))) == 1
    for seq in (a, b):
        (row,) = call(conn, "outcome", "s", "c", seq)
        assert (row.state, row.owner, row.result) == ("cancelled", "clerk", None)
        assert row.ended_at is not None
        (row,) = call(conn, "explain_message", "s", "c", seq)
        assert row.state == "cancelled"
        assert "by clerk" in row.because
    assert cancel(conn, a, name="plain") == 1
    (row,) = call(conn, "outcome", "s", "plain", a)
    assert row.state == "done"


def test_a_claim_that_is_under_way_is_waited_for(conn: Conn, session: Session) -> None:
    """Its messages are cancelled when it is committed; and its nack, made meanwhile, is not kept
    waiting."""
    consumer(conn)
    (seq,) = send_all(conn, ["x"])
    receive(conn, 1)
    clock.end_leases(conn)
    other, third = session(), session()
    other.execute("begin")
    claim = claim_of(receive(other, 1))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(cancel, third, seq)
        wait_for_a_lock(conn)
        assert value(other, "extend", claim) == 1
        other.execute("commit")
        assert waiting.result(10) == 1
    assert value(other, "ack", claim) == 0


def test_it_reads_no_more_than_it_must(conn: Conn) -> None:
    """Far behind what is new: a look for its publication, and not a take of all before it."""
    consumer(conn)
    conn.execute("select pgqueue.send('s', 'x') from generate_series(1, 3000)")
    assert cancel(conn, 2999) == 1
    assert internals.count(conn, "consumer_messages") == 0
    assert stats(conn).backlog == 2999
    query = "select pgqueue.cancel('s', 'c', %s)"
    few, many = (cost(conn, query, [*range(1000, 1000 + n)]) for n in (2, 200))
    assert many <= few * GROWTH, "messages that follow each other are found by one search"


def test_what_is_left_between_cancelled_messages_of_a_bundle_is_delivered(conn: Conn) -> None:
    """Also if these are more ranges than a bundle has."""
    consumer(conn)
    sent = send_all(conn, ["x"] * 200)
    value(conn, "nack", claim_of(receive(conn, 200)))
    assert value(conn, "cancel", "s", "c", sent[::2]) == 100
    assert sorted(seqs_of(delivered(conn))) == sent[1::2]
