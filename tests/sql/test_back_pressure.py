"""Back pressure: a consumer that has max_backlog before it, and how consumers fare."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import psycopg
import pytest

from tests.sql import clock, internals
from tests.sql.cases import for_each
from tests.sql.queue import *

pytestmark = pytest.mark.usefixtures("stream", "allowed_afterwards")


def limited(conn: Conn, most: int, on_full: str = "reject", ordering: str = "none") -> int:
    """The consumer c, which may have so many messages before it; its id."""
    return consumer(conn, ordering=ordering, max_backlog=most, on_full=on_full)


def rejected(conn: Conn, n: int = 1, **options: Any) -> psycopg.Error:
    """Sends so many messages together, which are rejected, and change nothing."""
    before = internals.publications(conn), one(conn, "select count(*) from pgqueue.messages")
    with raises("PQ013") as error:
        send_all(conn, ["x"] * n, **options)
    after = internals.publications(conn), one(conn, "select count(*) from pgqueue.messages")
    assert after == before
    return error.value


@for_each("ordering", ORDERINGS)
@pytest.mark.promise("feature: back pressure")
def test_a_full_consumer_makes_sends_fail_and_takes_more_when_some_are_claimed(
    conn: Conn, ordering: str
) -> None:
    id_ = limited(conn, 5, ordering=ordering)
    send_keys(conn, "a", "b", "c", "d")
    assert "has a backlog of 4" in str(rejected(conn, 2)), "all or nothing"
    send(conn, p_key="e")
    assert not internals.noted_full(conn, id_)
    error = rejected(conn)
    assert internals.noted_full(conn, id_)
    assert error.diag.message_primary == (
        "cannot send a message to stream 's': consumer 'c' has a backlog of 5, and max_backlog is 5"
    )
    assert "Nothing was sent" in str(error.diag.message_hint)
    got = receive(conn, 3)
    internals.wait_until_counted_again(conn)
    assert len(send_all(conn, ["x"] * 3)) == 3
    rejected(conn)
    value(conn, "ack", claim_of(got))
    assert len(acked(conn, "s", "c", 3)) == 5
    assert stats(conn).backlog == 0


def test_what_was_noted_before_the_clock_was_set_back_is_counted_again(conn: Conn) -> None:
    id_ = limited(conn, 2)
    send_all(conn, ["x", "x"])
    rejected(conn)
    receive(conn)
    internals.note_full(conn, id_, "1 hour")
    send(conn)


def test_what_goes_back_counts_again(conn: Conn) -> None:
    limited(conn, 2)
    send_all(conn, ["x", "x"])
    claim = claim_of(receive(conn, 2))
    send_all(conn, ["x", "x"])
    value(conn, "nack", claim)
    assert stats(conn).backlog == 4, "a nack never fails"
    assert "'c' has a backlog of 2 or more" in str(rejected(conn))


def test_only_consumers_that_are_to_get_a_message_count(conn: Conn) -> None:
    limited(conn, 1)
    consumer(conn, "other")
    send(conn)
    rejected(conn)
    send(conn, p_consumers=["other"])
    internals.wait_until_counted_again(conn)
    rejected(conn, p_consumers=["c"])


def test_the_limit_can_be_changed_and_taken_back(conn: Conn) -> None:
    limited(conn, 1)
    send(conn)
    rejected(conn)
    alter(conn, max_backlog=2)
    internals.wait_until_counted_again(conn)
    send(conn)
    rejected(conn)
    alter(conn, max_backlog=None)
    send_all(conn, ["x"] * 10)
    assert not one(conn, "select limited from pgqueue.streams")
    alter(conn, max_backlog=3)
    rejected(conn)
    value(conn, "drop_consumer", "s", "c")
    assert not one(conn, "select limited from pgqueue.streams")
    send(conn)
    call(conn, "maintain")
    assert not one(conn, "select count(*) from pg_class where relname like 'backlog%%'")


def test_a_batch_of_a_sink_is_rejected_whole(conn: Conn, stream: int) -> None:
    limited(conn, 3)
    block = stage(conn, stream, 2)
    send_all(conn, ["x", "x"])
    with raises("PQ013", "has a backlog of 2"):
        publish(conn, stream, [block], 2)
    value(conn, "ack", claim_of(receive(conn, 1)))
    assert publish(conn, stream, [block], 2), "the same batch, later"
    assert stats(conn).backlog == 3


def test_numbers_that_were_reserved_long_ago_count_when_they_are_published(
    conn: Conn, stream: int
) -> None:
    limited(conn, 5)
    block = stage(conn, stream, 4)
    send(conn)
    assert publish(conn, stream, [block], 4)
    rejected(conn)


def test_a_copy_that_is_rejected_rejects_the_message(conn: Conn) -> None:
    value(conn, "create_stream", "copies")
    value(conn, "bind", "s", "#", "copies")
    value(conn, "create_consumer", "copies", "c", p_settings='{"max_backlog": 1}')
    send(conn)
    assert "stream 'copies'" in str(rejected(conn))


def test_producers_that_race_exceed_the_limit_by_what_they_have_open_at_most(
    conn: Conn, session: Session
) -> None:
    limited(conn, 50)
    done = threading.Event()

    def produce() -> int:
        sent = 0
        with session() as mine:
            while not done.is_set():
                try:
                    send_all(mine, ["x", "x"])
                    sent += 2
                except psycopg.Error as error:
                    assert error.sqlstate == "PQ013"  # noqa: PT017
        return sent

    with ThreadPoolExecutor(4) as pool:
        producers = [pool.submit(produce) for _ in range(4)]
        got = []
        most = 0
        for _ in range(60):
            got += acked_once(conn)
            most = max(most, stats(conn).backlog)
        done.set()
        sent = sum(producer.result(20) for producer in producers)
    assert 40 <= most <= 50 + 3 * 2
    got += acked(conn, "s", "c")
    assert len(got) == len(set(got)) == sent > 50


@for_each("on_full", ["reject", "drop_oldest"])
def test_a_consumer_that_is_dropped_at_that_moment_is_gone_for_a_send_and_a_claim(
    conn: Conn, session: Session, on_full: str
) -> None:
    """Both have seen the consumer when maintain() drops its sequence."""
    limited(conn, 1, on_full)
    calls: dict[str, Callable[..., Any]] = {"reject": send, "drop_oldest": receive}
    operator, other = session(), session()
    with ThreadPoolExecutor(1) as pool:
        with operator.transaction():
            value(operator, "drop_consumer", "s", "c")
            call(operator, "maintain")
            called = pool.submit(calls[on_full], other)
            wait_for_a_lock(conn)
        if on_full == "reject":
            assert called.result() == 1
        else:
            assert getattr(called.exception(), "sqlstate", None) == "PQ002"


def acked_once(conn: Conn) -> list[int]:
    """Receives and acknowledges a few."""
    got = receive(conn, 7)
    if got:
        value(conn, "ack", claim_of(got))
    return seqs_of(got)


def test_far_from_full_nobody_counts(conn: Conn) -> None:
    """The cheap bound suffices: with a counting that fails, messages are sent all the same."""
    limited(conn, 1000)
    send(conn)
    conn.execute(
        "create or replace function _pgqueue.backlog_of(p_consumer_id int, p_enough bigint)"
        " returns bigint"
        " language plpgsql as 'begin raise exception $$counted$$; end'"
    )
    for _ in range(8):
        send_all(conn, ["x"] * 99)
    with pytest.raises(psycopg.Error, match="counted"):
        send_all(conn, ["x"] * 200)


def test_a_transaction_counts_what_it_sent_itself(conn: Conn) -> None:
    limited(conn, 2)
    conn.execute("begin")
    send(conn)
    send(conn)
    with pytest.raises(psycopg.Error, match="cannot send a message"):
        send(conn)
    conn.execute("rollback")
    assert stats(conn).backlog == 0
    internals.wait_until_counted_again(conn)
    send_all(conn, ["x", "x"])


@pytest.mark.small_limits
@for_each("ordering", ORDERINGS)
@pytest.mark.promise("concepts: transitions of a message")
def test_the_oldest_are_dropped_at_the_claim(conn: Conn, ordering: str) -> None:
    limited(conn, 3, "drop_oldest", ordering)
    seqs = send_keys(conn, *"aabbccdd")
    seqs.append(send(conn, p_key="a"))
    assert sorted(acked(conn, "s", "c", 1)) == seqs[-3:]
    dead = internals.dead_letters(conn)
    assert {row.reason for row in dead} == {"dropped"}
    assert sum(row.message_count for row in dead) == 6
    assert set(states(conn).values()) == {"dead"}


@for_each("ordering", ORDERINGS)
def test_the_oldest_are_those_that_arrived_first_whatever_their_numbers(
    conn: Conn, ordering: str, opened: Session
) -> None:
    limited(conn, 4, "drop_oldest", ordering)
    late = opened()
    first = send_keys(late, "late", "late")
    sent = send_keys(conn, *"abc")
    internals.take(conn, 10)
    late.execute("commit")
    internals.look_into_gaps_after(conn, -1)
    internals.take(conn, 10)
    sent += send_keys(conn, "d")
    internals.wait_until_counted_again(conn)
    receive(conn, 1)
    dropped = [seq for seq, state in states(conn).items() if state == "dead"]
    assert first[0] < sent[0]
    assert dropped == sent[:2]


@for_each("ordering", ORDERINGS)
def test_what_waits_is_dropped_and_what_is_claimed_is_not(conn: Conn, ordering: str) -> None:
    limited(conn, 4, "drop_oldest", ordering)
    first = send_keys(conn, "a", "b")
    claim = claim_of(receive(conn, 2))
    delayed = send(conn, p_key="c", p_deliver_at="2100-01-01")
    later = send_keys(conn, *"aabbab")
    internals.wait_until_counted_again(conn)
    assert receive(conn, 1) == [] or ordering == "none"
    found = states(conn)
    assert found[delayed] == "dead"
    assert {found[s] for s in later[:2]} == {"dead"}
    assert {found[s] for s in first} == {"claimed"}
    value(conn, "ack", claim)
    acked(conn, "s", "c", 1)
    dead = sorted(s for s, state in states(conn).items() if state == "dead")
    assert dead == [delayed, *later[:2]]


def test_a_claim_that_finds_enough_ready_drops_too(conn: Conn) -> None:
    limited(conn, 10, "drop_oldest")
    send_all(conn, ["x"] * 10)
    first = claim_of(receive(conn, 1))
    *_, newest = [send(conn) for _ in range(12)]
    assert seqs_of(receive(conn, 1)) == [newest - 9]
    value(conn, "ack", first)


def test_a_reader_drops_too_and_sends_never_fail(conn: Conn) -> None:
    reader = Reader(conn, limited(conn, 5, "drop_oldest"))
    seqs = [send_all(conn, ["x"] * 20) for _ in range(5)][-1]
    end = reader.ask()
    assert reader.plan(end) == seqs[-5:]


def test_a_filtered_consumer_drops_only_what_passes(conn: Conn) -> None:
    consumer(conn, p_topic="a", max_backlog=2, on_full="drop_oldest")
    seqs = send_keys(conn, *"abababab")
    assert acked(conn, "s", "c", 1) == [seqs[4], seqs[6]]
    assert sum(row.message_count for row in internals.dead_letters(conn)) == 2


def health(conn: Conn) -> Any:
    """How the consumer c fares."""
    (row,) = internals.rows(conn, "select * from pgqueue.consumer_health where consumer = 'c'")
    return row


def fares(conn: Conn) -> tuple[str, str]:
    """That, and why."""
    return health(conn).status, health(conn).because


def test_nobody_is_missed_for_what_is_to_come_later(conn: Conn) -> None:
    """A message of tomorrow needs no worker today: not before it is taken, and not after."""
    consumer_id = limited(conn, 100)
    send(conn, p_deliver_at=now(conn) + timedelta(days=1))
    assert health(conn).status == "ok"
    assert receive(conn) == []
    internals.forget_claimers(conn, consumer_id)
    assert health(conn).status == "ok"
    clock.pass_time(conn, timedelta(days=2))
    assert health(conn).status == "unattended"


@pytest.mark.promise("feature: alert when nobody works")
def test_health_says_who_needs_somebody_and_why(conn: Conn) -> None:
    consumer_id = limited(conn, 3)
    assert fares(conn) == ("ok", "0 waiting, 0 claimed")
    send(conn)
    why = "1 new or ready, no expired claims, no claim yet"
    assert fares(conn) == ("unattended", why)
    claim = claim_of(receive(conn))
    assert health(conn).status == "ok"
    assert abs(one(conn, "select clock_timestamp()") - health(conn).attended_at) < seconds(3)
    value(conn, "dead_letter", claim, None, "no such customer")
    assert fares(conn) == (
        "failing",
        "1 dead-lettered in the last hour, the last: no such customer",
    )
    value(conn, "pause", "s", "c")
    send(conn)
    assert fares(conn) == ("paused", "paused, with 1 message waiting")
    send(conn)
    assert fares(conn) == ("paused", "paused, with 2 messages waiting")
    send(conn)
    assert fares(conn) == (
        "full", "3 messages waiting, and max_backlog is 3: sends are rejected",
    )  # fmt: skip
    value(conn, "resume", "s", "c")
    call(conn, "receive", "s", "c", 1, p_visibility_timeout=seconds(0.001))
    internals.forget_claimers(conn, consumer_id)
    assert health(conn).status == "unattended"
    why = "2 new or ready, expired claims: 1, last claim at"
    assert why in health(conn).because


def test_health_says_failing_of_a_message_that_was_delivered_ten_times_without_a_limit(
    conn: Conn,
) -> None:
    consumer(conn)
    send(conn)
    for _ in range(9):
        value(conn, "nack", claim_of(receive(conn)), None, None, "no answer")
    claim = claim_of(receive(conn))
    assert health(conn).status == "failing"
    value(conn, "nack", claim, None, None, "no answer")
    claim = claim_of(receive(conn))
    assert fares(conn) == ("failing", "1 delivered ten times or more: no answer")
    value(conn, "ack", claim)
    assert health(conn).status == "ok"
