"""Messages that expire: from their time on nobody gets them."""

from __future__ import annotations

import json
from datetime import datetime, timedelta

import pytest

from tests.sql import clock
from tests.sql.cases import for_each
from tests.sql.cost import cost
from tests.sql.queue import *

pytestmark = [pytest.mark.small_limits, pytest.mark.usefixtures("stream", "allowed_afterwards")]

HOUR = timedelta(hours=1)


def soon(conn: Conn) -> datetime:
    """In half an hour: an hour later it is over."""
    return now(conn) + HOUR / 2


def drained(conn: Conn, name: str = "c", size: int = 100) -> list[int]:
    """All that can be had; with small limits one empty claim or another comes in between."""
    got: list[int] = []
    empty = 0
    while empty < 12:
        found = receive(conn, size, name)
        empty = 0 if found else empty + 1
        got += seqs_of(found)
        if found:
            value(conn, "ack", claim_of(found))
    return got


@for_each("ordering", ORDERINGS)
@pytest.mark.promise("feature: time to live", "concepts: transitions of a message")
def test_who_comes_upon_a_message_that_expired_gives_it_up(conn: Conn, ordering: str) -> None:
    """And goes on with the others, also those of its key; in claims of any size."""
    sizes = {"c": 100, "one": 1}
    for name in sizes:
        consumer(conn, name, ordering)
    expires, kept = {"p_expires_at": soon(conn)}, {"p_expires_at": now(conn) + 10 * HOUR}
    gone, left = [], []
    for alone in (True, False):
        for options, seqs in [(expires, gone), ({}, left), (expires, gone), (kept, left)]:
            if alone:
                seqs += [send(conn, p_key="k", **options) for _ in range(3)]
            else:
                seqs += send_all(conn, ["x"] * 3, p_keys=["k", "l", "k"], **options)
    clock.pass_time(conn, HOUR)
    for name, size in sizes.items():
        assert sorted(drained(conn, name, size)) == left
        assert states(conn, name) == dict.fromkeys(gone, "dead")
        dead = state(conn, gone[0], name)
        assert (dead.last_error, dead.deliver_count) == ("expired", 0)


@for_each("ordering", ORDERINGS)
def test_until_its_time_it_is_delivered_as_any_other(conn: Conn, ordering: str) -> None:
    """What was delivered in time stays with its claim, and is not delivered again after it."""
    consumer(conn, ordering=ordering)
    seq = send(conn, p_key="k", p_expires_at=soon(conn))
    claim = claim_of(receive(conn))
    clock.pass_time(conn, HOUR)
    assert value(conn, "extend", claim) == 1
    value(conn, "nack", claim, [seq], seconds(0))
    assert drained(conn) == []
    assert (state(conn, seq).state, state(conn, seq).deliver_count) == ("dead", 1)
    # a delay beyond its time ends it, too
    seq = send(conn, p_key="k", p_deliver_at=now(conn) + HOUR / 4, p_expires_at=soon(conn))
    assert drained(conn) == []
    clock.pass_time(conn, HOUR)
    later = send(conn, p_key="k")
    assert drained(conn) == [later]
    assert state(conn, seq).state == "dead"


def test_spark_and_a_filter_leave_out_what_expired(conn: Conn, reader: Reader) -> None:
    consumer(conn, "f", p_topic="k")
    gone = send_all(conn, ["x"] * 4, p_keys=["k"] * 4, p_expires_at=soon(conn))
    left = send_all(conn, ["x"] * 2, p_keys=["k"] * 2)
    clock.pass_time(conn, HOUR)
    assert sorted(drained(conn, "f")) == left
    planned: list[int] = []
    for _ in range(30):
        end = reader.ask()
        planned += reader.plan(end)
        reader.move(end)
    assert planned == left
    assert set(states(conn, "f")) == set(states(conn)) == set(gone)


def test_copies_and_replays_expire_too(conn: Conn) -> None:
    value(conn, "create_stream", "t")
    value(conn, "bind", "s", "#", "t")
    value(conn, "create_consumer", "t", "c", "earliest")
    consumer(conn)
    send(conn, p_key="k", p_expires_at=soon(conn))
    assert len(drained(conn)) == 1
    clock.pass_time(conn, HOUR)
    value(conn, "replay", "s", "c", "earliest", "latest")
    assert drained(conn) == []
    assert call(conn, "receive", "t", "c") == []
    assert one(conn, "select count(*) from pgqueue.dead_messages where reason = 'expired'") == 2


def test_who_waits_hears_that_it_expired(conn: Conn) -> None:
    consumer(conn, p_settings=json.dumps({"notify_done": True}))
    seq = send(conn, p_expires_at=soon(conn))
    channel = value(conn, "listen_done", "s", "c")
    clock.pass_time(conn, HOUR)
    assert drained(conn) == []
    assert [n.channel for n in conn.notifies(timeout=10, stop_after=1)] == [channel]
    (told,) = call(conn, "outcome", "s", "c", seq)
    assert (told.state, told.reason) == ("dead", "expired")


def test_times_are_rounded_up_so_that_a_burst_stays_a_run(conn: Conn) -> None:
    """Messages that are sent within a second, and for as long, are one row of the consumer."""
    consumer(conn)
    at = datetime.fromisoformat("2100-01-01T00:00:00.000001+00:00")
    for i in range(20):
        send(conn, p_expires_at=at + timedelta(milliseconds=i))
    assert receive(conn, 1)
    kept = one(conn, "select array_agg(distinct expires_at) from pgqueue.publications")
    assert kept == [datetime.fromisoformat("2100-01-01T00:00:01+00:00")]


def test_a_claim_that_expires_much_is_bounded(conn: Conn, has_small_limits: bool) -> None:
    consumer(conn)
    n = 30 if has_small_limits else 3000
    for i in range(n // 10):
        send_all(conn, ["x"] * 10, p_expires_at=now(conn) + timedelta(seconds=i % 2 * 2 + 1))
    clock.pass_time(conn, HOUR)
    left = send(conn)
    before = cost(conn, "select * from pgqueue.claim('s', 'c')")
    assert before < 200_000
    assert left in drained(conn) or states(conn)[left] == "claimed"
    assert one(conn, "select sum(message_count) from pgqueue.dead_messages") == n
