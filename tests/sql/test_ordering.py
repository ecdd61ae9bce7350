"""Order by key and by stream, also where messages stand aside: retries, delays, several claims."""

import time
import uuid

import pytest

from tests.sql import checker, clock
from tests.sql.queue import *

pytestmark = [pytest.mark.small_limits, pytest.mark.usefixtures("stream", "allowed_afterwards")]


@pytest.fixture
def keyed(conn: Conn, stream: int) -> int:
    """The consumer c with ordering=key; its id."""
    return consumer(conn, ordering="key", visibility_timeout=seconds(60))


@pytest.mark.parametrize("ordering", ["key", "stream"])
@pytest.mark.promise("guarantee: Priorities")
def test_priorities_do_not_break_an_order(conn: Conn, ordering: str) -> None:
    consumer(conn, ordering=ordering)
    sent = [send(conn, p_key="k", p_priority=p) for p in (0, 5, -5)]
    got = [(row.seq, row.priority) for row in delivered(conn)]
    assert got == list(zip(sent, (0, 5, -5), strict=True))


@pytest.mark.promise("guarantee: Head-of-line blocking")
def test_ordering_stream_waits_for_a_delayed_message_and_key_for_its_key(conn: Conn) -> None:
    consumer(conn, "stream", "stream")
    consumer(conn, "key", "key")
    late = send(conn, p_key="k", p_deliver_at=now(conn) + seconds(0.5))
    behind, other = send(conn, p_key="k"), send(conn, p_key="l")
    assert receive(conn, name="stream") == []
    assert acked(conn, "s", "key") == [other]
    time.sleep(0.6)
    assert acked(conn, "s", "stream") == [late, behind, other]
    assert acked(conn, "s", "key") == [late, behind]


@pytest.mark.promise("guarantee: Assignment by key", "concepts: transitions of a message")
def test_a_key_is_with_one_claim_at_a_time(conn: Conn) -> None:
    consumer(conn, ordering="key")
    k1, l1, k2, none1 = send_all(conn, list("abcd"), p_keys=["k", "l", "k", None])
    first = receive(conn, 1)
    assert seqs_of(first) == [k1]
    second = receive(conn)
    assert seqs_of(second) == [l1, none1], "k2 waits for k1, others do not"
    none2, k3, l2 = send_all(conn, list("efg"), p_keys=[None, "k", "l"])
    third = receive(conn)
    assert seqs_of(third) == [none2], "messages without a key are in no order"
    assert states(conn)[k2] == "waiting"
    value(conn, "ack", claim_of(first))
    fourth = receive(conn)
    assert seqs_of(fourth)[:1] == [k2]
    value(conn, "ack", claim_of(fourth))
    assert seqs_of(fourth) + seqs_of(receive(conn)) == [k2, k3]
    value(conn, "ack", claim_of(second))
    assert seqs_of(receive(conn)) == [l2]


def test_a_failed_message_goes_back_with_the_later_ones_of_its_key(conn: Conn) -> None:
    consumer(conn, ordering="key")
    k1, k2, l1, k3 = send_all(conn, list("abcd"), p_keys=["k", "k", "l", "k"])
    claim = claim_of(receive(conn))
    assert value(conn, "nack", claim, [k2]) == 2
    assert states(conn)[k1] == states(conn)[l1] == "claimed"
    assert receive(conn) == [], "k1 may still fail"
    assert value(conn, "ack", claim) == 2
    got = [(row.seq, row.deliver_count) for row in delivered(conn)]
    assert got == [(k2, 2), (k3, 1)]


def test_a_stream_is_with_one_claim_at_a_time(conn: Conn) -> None:
    consumer(conn, ordering="stream")
    sent = send_all(conn, ["x"] * 4, p_keys=[*"abcd"])
    claim = claim_of(receive(conn, 2))
    assert receive(conn) == []
    assert value(conn, "nack", claim, [sent[0]]) == 2
    got = [(row.seq, row.deliver_count) for row in delivered(conn)]
    assert got == list(zip(sent, [2, 1, 1, 1], strict=True))


# Where messages of a key stand aside


@pytest.mark.parametrize("delay", ["0", "1 hour"])
def test_a_key_has_one_head(conn: Conn, keyed: int, delay: str) -> None:
    """A failed message comes back in front of a delayed one of its key, whose delay then ends."""
    first = value(conn, "send", "s", "x", p_key="k")
    later = "select clock_timestamp() + interval '1 hour'"
    deliver_at = conn.execute(later).fetchone()
    assert deliver_at is not None
    second = value(conn, "send", "s", "x", p_key="k", p_deliver_at=deliver_at[0])
    rows = call(conn, "receive", "s", "c", 10)
    assert seqs_of(rows) == [first]
    value(conn, "nack", claim_of(rows), None, delay)
    clock.end_delay(conn, second)
    conn.execute("set statement_timeout = '10 s'")
    rows = call(conn, "receive", "s", "c", 1)
    assert seqs_of(rows) == ([first] if delay == "0" else [])
    assert call(conn, "receive", "s", "c", 10) == []
    checker.check(conn)
    if rows:
        value(conn, "ack", claim_of(rows))
    else:
        clock.end_delay(conn, first)
        assert acked(conn, "s", "c", 1) == [first, second]


def test_a_failed_message_waits_for_what_its_claim_still_has_of_its_key(
    conn: Conn, keyed: int, has_small_limits: bool
) -> None:
    k1, k2, other, k3 = send_keys(conn, "k", "k", "other", "k")
    rows = call(conn, "receive", "s", "c", 10)
    assert value(conn, "nack", claim_of(rows), [k3]) == 1
    assert value(conn, "nack", claim_of(rows), [k2]) == 1
    later = send_keys(conn, "k", "other")
    checker.check(conn)
    assert call(conn, "receive", "s", "c", 10) == []
    assert value(conn, "ack", claim_of(rows), [other]) == 1
    got = acked(conn, "s", "c")
    # with small limits the claim is a large one, which has all keys
    assert got == ([] if has_small_limits else later[1:])
    assert value(conn, "ack", claim_of(rows), [k1]) == 1
    got += acked(conn, "s", "c")
    assert [seq for seq in got if seq != later[1]] == [k2, k3, later[0]]
    assert later[1] in got


@pytest.mark.promise("guarantee: Assignment by key")
def test_what_failed_or_became_free_comes_before_most_of_the_line(conn: Conn, keyed: int) -> None:
    sent = send_keys(conn, *(f"k{i % 500}" for i in range(1000)))
    rows = call(conn, "receive", "s", "c", 1)
    value(conn, "nack", claim_of(rows), sent[:1])
    first = call(conn, "receive", "s", "c", 1)
    value(conn, "ack", claim_of(first))
    got = [seq for _ in range(200) for seq in one_acked(conn)]
    assert sent[0] in got


def one_acked(conn: Conn) -> list[int]:
    """Receive one message and acknowledge it."""
    rows = call(conn, "receive", "s", "c", 1)
    value(conn, "ack", claim_of(rows))
    return seqs_of(rows)


def test_when_the_oldest_of_several_claims_ends_the_others_keep_their_keys(
    conn: Conn, keyed: int
) -> None:
    send_keys(conn, "a", "b", "c")
    oldest, *_ = [claim_of(call(conn, "receive", "s", "c", 1)) for _ in range(3)]
    value(conn, "ack", oldest)
    free = send_keys(conn, "a", "b", "c", "d")[0::3]
    got = []
    while rows := call(conn, "receive", "s", "c", 10):
        got += seqs_of(rows)
    assert got == free
    checker.check(conn, {keyed: {1}})


@pytest.mark.parametrize("size", [None, 1000])
def test_a_reader_beside_other_claims_gets_all_that_is_free(
    conn: Conn, keyed: int, size: int | None
) -> None:
    send_keys(conn, "a", "b", "a", None)
    assert seqs_of(call(conn, "receive", "s", "c", 1)) == [1]
    (row,) = call(conn, "reader_claim", uuid.uuid4(), keyed, 0, 0, size)
    assert row.claimed == 2
    checker.check(conn, {keyed: set()})


def test_runs_of_many_ranges_are_counted_exactly(conn: Conn, keyed: int) -> None:
    """Keys that alternate make sets of hundreds of ranges; runs keep to 64."""
    sent = send_keys(conn, *(f"k{i % 2}" for i in range(400)))
    first = claim_of(call(conn, "receive", "s", "c", 240))
    assert call(conn, "receive", "s", "c", 400) == []
    checker.check(conn, {keyed: set()})
    value(conn, "nack", first, sent[1:240:7])
    checker.check(conn, {keyed: set()})
    value(conn, "ack", first)
    got = acked(conn, "s", "c", 10)
    checker.check(conn, {keyed: set(sent)})
    for k in (0, 1):
        mine = [s for s in got if s % 2 == k]
        assert mine == sorted(mine)


def test_a_key_that_failed_goes_on_while_the_claim_has_other_keys(conn: Conn) -> None:
    """A claim of several keys withholds only messages of the keys that it still has."""
    consumer(conn, ordering="key")
    first, other = (send(conn, p_key=key) for key in ("a", "b"))
    claim = claim_of(receive(conn, 2))
    value(conn, "nack", claim, [first], p_delay=seconds(0))
    assert seqs_of(receive(conn, 2)) == [first]
    assert value(conn, "ack", claim, [other]) == 1
