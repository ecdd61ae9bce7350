"""Why a message is where it is: `explain_message`, for each place that a message can be in.

That its state is the one of the view `message_states` is looked at after each test of the queue.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from tests.sql import clock, internals
from tests.sql.cases import for_each
from tests.sql.queue import *

pytestmark = pytest.mark.usefixtures("stream", "allowed_afterwards")


def explain(conn: Conn, seq: int, name: str = "c") -> Any:
    (row,) = call(conn, "explain_message", "s", name, seq)
    return row


def said(conn: Conn, seq: int, name: str = "c") -> tuple[str, str]:
    row = explain(conn, seq, name)
    return row.state, row.because


# In no list of the consumer


def test_a_number_that_no_message_has(conn: Conn, opened: Session) -> None:
    consumer(conn)
    assert said(conn, 1) == ("unknown", "no message has been sent yet")
    other = opened()
    seq = send(other)
    state, because = said(conn, seq)
    assert state == "unknown"
    assert "is running, or was rolled back" in because
    other.execute("rollback")
    assert said(conn, seq)[1].endswith("transaction was rolled back")
    assert said(conn, 99)[1] == "no message has this number yet: the last one is 1"


@pytest.mark.promise("concepts: transitions of a message")
def test_what_a_sink_has_staged_is_unpublished(conn: Conn, stream: int) -> None:
    consumer(conn)
    stage(conn, stream, 2, batch=7, sink="copy")
    state, because = said(conn, 2)
    assert state == "unpublished"
    assert "for batch 7 of sink copy" in because


def test_for_others_filtered_and_done(conn: Conn) -> None:
    consumer(conn)
    consumer(conn, "d", keep_history="1 hour")
    consumer(conn, "picky", p_topic="a.*")
    seq = send(conn, p_consumers=["d"])
    assert said(conn, seq) == ("not for it", "it was published to other consumers: d")
    passes, other = send_keys(conn, "a.1", "b.1")
    assert said(conn, other, "picky")[0] == "new"
    assert seqs_of(receive(conn, 10, "picky")) == [passes]
    assert said(conn, other, "picky")[0] == "filtered out"
    value(conn, "ack", claim_of(receive(conn)))
    value(conn, "ack", claim_of(receive(conn, 10, "d")))
    assert said(conn, seq, "d")[1].startswith("acknowledged at ")
    assert "by spark-pgqueue, claimed at " in said(conn, seq, "d")[1]
    ends = "acknowledged, cancelled or replaced; or the consumer was created, or moved, "
    assert said(conn, other) == ("done", ends + "to a position after it")


def test_new_says_what_is_taken_first(conn: Conn, opened: Session) -> None:
    consumer(conn)
    first, second = send(conn), send(conn)
    assert "the next claim" in said(conn, first)[1]
    assert said(conn, second) == ("new", said(conn, second)[1])
    assert said(conn, second)[1].endswith("up to 1 publication ahead of it")
    later = now(conn) + timedelta(hours=1)
    delayed = send(conn, p_deliver_at=later)
    assert explain(conn, delayed).until == later
    value(conn, "pause", "s", "c")
    assert said(conn, first)[1].startswith("the consumer is paused; ")
    value(conn, "resume", "s", "c")
    # one that commits late is in a gap
    other = opened()
    late = send(other)
    send(conn)
    receive(conn)
    other.execute("commit")
    state, because = said(conn, late)
    assert state == "new"
    assert "became visible after later publications were claimed" in because


def test_a_sinks_message_is_found_long_after_its_number(conn: Conn, stream: int) -> None:
    """Published behind thousands of messages with higher numbers."""
    consumer(conn)
    block = stage(conn, stream, 3)
    with conn.transaction():
        for _ in range(50):
            send(conn)
    value(conn, "publish_staged", "sink", 0, stream, [block], 3)
    for seq in (1, 3, 4, 53):
        assert explain(conn, seq).state == "new"


def test_trimmed_and_skipped(conn: Conn) -> None:
    consumer(conn)
    consumer(conn, "slow")
    value(conn, "set_retention", "s", p_for=timedelta(days=1), p_unread="drop")
    maintain(conn)
    seq = send(conn)
    value(conn, "ack", claim_of(receive(conn)))
    clock.pass_time(conn, timedelta(days=10))
    for _ in range(3):
        maintain(conn)
        clock.pass_time(conn, timedelta(days=1))
    assert explain(conn, seq).state == "trimmed"
    assert explain(conn, seq, "slow").state == "skipped"


# In the consumer's hands


def test_ready_says_how_many_are_before_it(conn: Conn) -> None:
    consumer(conn, notify_done=True)  # takes all that is new
    with conn.transaction():
        for _ in range(5):
            send(conn)
    claim = claim_of(receive(conn, 1))
    assert explain(conn, 2).state == "ready"
    assert said(conn, 2)[1] == "ready, with 0 messages ahead of it"
    assert said(conn, 5)[1] == "ready, with 3 messages ahead of it"
    value(conn, "nack", claim, p_reason="no paper")
    assert said(conn, 1)[1].endswith(": no paper")
    assert "delivered once" in said(conn, 1)[1]


def test_claimed_says_by_whom_and_until_when(conn: Conn, reader: Reader) -> None:
    seq = send(conn)
    claim = claim_of(receive(conn, p_visibility_timeout=seconds(60)))
    row = explain(conn, seq)
    assert row.state == "claimed"
    assert f"(claim {claim} of 1 message); delivery 1 (no limit)" in row.because
    assert row.because.startswith("held by spark-pgqueue since ")
    assert row.until == one(conn, "select lease_until from pgqueue.message_states")
    clock.end_lease(conn, claim)
    assert "the lease has expired" in explain(conn, seq).because
    reader.ask()
    value(conn, "reader_query", reader.id, "the query")
    assert "held by the Spark query the query since" in explain(conn, seq).because


@for_each("ordering", ["none", "key"])
def test_delayed_says_until_when_and_why(conn: Conn, ordering: str) -> None:
    consumer(conn, ordering=ordering)
    later = now(conn) + timedelta(hours=1)
    (failed,) = send_keys(conn, "k")
    sent = send(conn, p_deliver_at=later)
    value(conn, "nack", claim_of(receive(conn)), None, seconds(60), "busy")
    assert said(conn, sent) == ("delayed", "sent with a delay")
    assert explain(conn, sent).until == later
    row = explain(conn, failed)
    assert (row.state, row.because[-6:]) == ("delayed", ": busy")
    assert "delivered once" in row.because
    assert "last at :" not in row.because, "of what has a key, the time may not be known"
    assert row.until - now(conn) < seconds(60)
    clock.end_delay(conn, failed)
    if ordering == "none":
        assert "which has passed: the next claim" in said(conn, failed)[1]
        assert one(conn, "select oldest_at <= clock_timestamp() from pgqueue.consumer_stats")
        last = "select min(date_trunc('second', last_delivered_at))::text"
        last = one(conn, f"{last} from pgqueue.consumer_messages")
        assert f"delivered once, last at {last}" in said(conn, failed)[1]


def test_waiting_says_behind_what(conn: Conn) -> None:
    """Its key in a claim, or delayed; and then it is free."""
    consumer(conn, ordering="key")
    send_keys(conn, "k", "k", "l", "k")
    claims = [claim_of(receive(conn, 1)), claim_of(receive(conn, 1))]
    row = explain(conn, 2)
    assert row.state == "waiting"
    assert row.because.startswith("behind messages of its key, held by spark-pgqueue since ")
    assert row.because.endswith(f" (claim {claims[0]} of 1 message)")
    assert row.until == explain(conn, 1).until
    value(conn, "nack", claims[0], None, seconds(60), "busy")
    receive(conn, 1)
    row = explain(conn, 4)
    assert row.state == "waiting"
    assert "behind message 1 of its key, which is delayed: busy" in row.because
    assert row.until == explain(conn, 1).until
    # what stands in the line, and will wait
    assert explain(conn, send_keys(conn, "k")[0]).state == "new"


@for_each("ordering", ["none", "key"])
def test_a_rate_says_until_when_its_key_waits(conn: Conn, ordering: str) -> None:
    """Where a spent token is what the key waits for; it is no message."""
    consumer(conn, ordering=ordering, per_key_interval="1 hour", per_key_burst=1)
    send_keys(conn, "k", "k", "l")
    for _ in range(3):
        for row in receive(conn, 1):
            value(conn, "ack", row.claim_id)
    row = explain(conn, 2)
    assert row.state == "waiting"
    assert "the rate limit of its key: 1 delivered within 01:00:00" in row.because
    assert seconds(3500) < row.until - now(conn) < seconds(3600)
    (of_k,) = call(conn, "key_stats", "s", "c")
    assert (of_k.key, of_k.waiting, of_k.in_flight, of_k.first_seq) == ("k", 1, 0, 2)
    clock.end_delays(conn)
    assert one(conn, "select oldest_at from pgqueue.consumer_stats") is None


@for_each("ordering", ["key", "stream"])
def test_in_the_line_it_says_that_its_key_is_busy(conn: Conn, ordering: str) -> None:
    consumer(conn, ordering=ordering)
    send_keys(conn, *["k"] * 3)
    claim = claim_of(receive(conn, 1))
    row = explain(conn, 3)
    assert row.state in ("ready", "waiting")
    assert f"(claim {claim} of 1 message)" in row.because
    assert row.until == explain(conn, 1).until


def test_dead_says_of_what(conn: Conn) -> None:
    consumer(conn)
    seq = send(conn)
    value(conn, "dead_letter", claim_of(receive(conn)), None, "no such customer")
    state, because = said(conn, seq)
    assert state == "dead"
    assert because.startswith("no such customer; delivered once, last to spark-pgqueue, ")


# By key


def test_key_stats_has_what_waits_and_is_in_flight(conn: Conn) -> None:
    consumer(conn, ordering="key")
    send_keys(conn, *"aababc", None)
    first, second = claim_of(receive(conn, 2)), claim_of(receive(conn, 2))
    found = {row.key: row for row in call(conn, "key_stats", "s", "c")}
    held = one(conn, "select sum(claimed) from pgqueue.consumer_stats")
    assert sum(row.in_flight for row in found.values()) == held
    assert found["a"].in_flight + found["a"].waiting == 3
    assert found["a"].first_seq == 1
    assert next(iter(found)) == "a", "that with most first"
    assert found["a"].until > now(conn)
    value(conn, "nack", first, None, seconds(60))
    value(conn, "ack", second)
    receive(conn, 1)
    later = {row.key: row for row in call(conn, "key_stats", "s", "c")}
    assert later["a"].delayed + later["a"].waiting == 3
    assert later["a"].delayed > 0
    assert [row.key for row in call(conn, "key_stats", "s", "c", 1)] == ["a"]


def test_key_stats_of_others(conn: Conn) -> None:
    """Without ordering it says what is in flight; with ordering=stream there are no keys."""
    consumer(conn)
    consumer(conn, "all", ordering="stream")
    send_keys(conn, "a", "b", "a")
    assert call(conn, "key_stats", "s", "c") == []
    receive(conn)
    found = [tuple(row[:5]) for row in call(conn, "key_stats", "s", "c")]
    assert found == [("a", 0, 0, 2, 1), ("b", 0, 0, 1, 2)]
    with raises("PQ006"):
        call(conn, "key_stats", "s", "all")


@for_each("ordering", ["none", "key"])
@pytest.mark.promise("feature: all errors of a message")
def test_each_failure_is_listed_while_the_message_lives(conn: Conn, ordering: str) -> None:
    """The last ten, with who had it; also of a dead letter; not what was put off."""
    consumer(conn, ordering=ordering, max_deliver_count=14)
    first, second = send_keys(conn, "k", "l")
    held = receive(conn, 2)
    conn.execute("set application_name = 'somebody else'")
    value(conn, "defer", claim_of(held), [first])
    value(conn, "ack", claim_of(held), [second])
    for i in range(12):
        claim = claim_of(receive(conn, 1))
        value(conn, "nack", claim, None, timedelta(0), f"error {i}" + "!" * 600)
    receive(conn, 1)
    clock.end_leases(conn)
    receive(conn, 1)
    listed = call(conn, "failures", "s", "c", first)
    assert [row.error[:8].strip("!") for row in listed[:9]] == [f"error {i}" for i in range(3, 12)]
    assert {len(row.error) for row in listed[:9]} == {500}
    assert [row.error for row in listed[9:]] == [TAKEN_OVER]
    assert {row.owner for row in listed} == {"somebody else"}
    clock.end_leases(conn)
    assert receive(conn, 1) == []
    assert explain(conn, first).state == "dead"
    assert [row.error for row in call(conn, "failures", "s", "c", first)][-2:] == [TAKEN_OVER] * 2
    value(conn, "redrive", "s", "c")
    assert call(conn, "failures", "s", "c", first) == []


def test_what_failed_together_stays_together(conn: Conn) -> None:
    """The list costs no row: a claim that failed is one run, as before."""
    consumer(conn)
    send_all(conn, ["x"] * 100)
    value(conn, "nack", claim_of(receive(conn, 100)), None, None, "busy")
    assert internals.count(conn, "consumer_messages") == 1
