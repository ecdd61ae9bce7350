"""How much a micro-batch of the source may have: by bytes, and how many messages there are."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from itertools import pairwise

import pytest

from tests.sql import clock
from tests.sql.cases import for_each
from tests.sql.queue import *

pytestmark = pytest.mark.usefixtures("stream", "allowed_afterwards")


def drained(reader: Reader, max_bytes: int, size: int | None = None) -> list[list[int]]:
    """The batches of a reader that asks for so many bytes, until it finds nothing."""
    batches = []
    while (end := reader.ask(size, p_max_bytes=max_bytes)).claimed:
        batches.append(reader.plan(end))
        reader.move(end)
    return batches


@pytest.mark.all_versions
@for_each("ordering", ORDERINGS)
def test_a_batch_has_as_many_bytes_as_it_may_and_one_message_at_least(
    conn: Conn, ordering: str
) -> None:
    """Never a byte more, except of a message that is larger than the bound by itself."""
    sizes = [10, 90, 1, 100, 101, 5000, 60, 30, 11, 99, 0, 1, 400]
    reader = Reader(conn, consumer(conn, ordering=ordering))
    keys = [f"k{n % 3}" for n in range(len(sizes))]
    sent = send_all(conn, ["x" * size for size in sizes], p_keys=keys)
    size_of = dict(zip(sent, sizes, strict=True))
    batches = [[size_of[seq] for seq in batch] for batch in drained(reader, 100)]
    if ordering == "key":  # small claims are assigned, and then keys do not come in turn
        assert Counter(size for batch in batches for size in batch) == Counter(sizes)
        assert all(sum(batch) <= 100 or len(batch) == 1 for batch in batches)
    else:
        assert batches == [
            [10, 90], [1], [100], [101], [5000], [60, 30], [11], [99, 0, 1], [400],
        ]  # fmt: skip
    assert states(conn) == {}


def test_a_claim_says_how_many_bytes_it_has(conn: Conn, reader: Reader) -> None:
    send_all(conn, ["é" * 10] * 3)
    end = reader.ask(2, p_max_bytes=1000)
    assert (end.claimed, end.bytes) == (2, 40)
    again = reader.ask(2, p_max_bytes=1000)
    assert (again.claim_id, again.bytes) == (end.claim_id, None), "it was claimed before"
    reader.move(end)
    assert reader.ask().bytes is None


def test_messages_of_many_publications_and_priorities_are_measured_as_they_are_served(
    conn: Conn, reader: Reader
) -> None:
    """Also across the blocks by which sizes are summed, and beside what is for others."""
    low = [send(conn, "x" * 10) for _ in range(30)]
    value(conn, "create_consumer", "s", "other")
    send(conn, "x" * 10_000, p_consumers=["other"])
    high = send_all(conn, ["y" * (n % 7) for n in range(2500)], p_priority=1)
    size_of = {seq: n % 7 for n, seq in enumerate(high)} | dict.fromkeys(low, 10)
    batches = drained(reader, 3000)
    assert [seq for batch in batches for seq in batch] == [*high, *low]
    sums = [sum(size_of[seq] for seq in batch) for batch in batches]
    assert max(sums) <= 3000
    for batch, following in pairwise(batches):
        assert sum(size_of[seq] for seq in batch) + size_of[following[0]] > 3000


def test_what_does_not_fit_is_as_if_it_was_never_claimed(conn: Conn, reader: Reader) -> None:
    value(conn, "create_stream", "b", "binary")
    send_all(conn, ["x" * 60] * 3)
    first = reader.ask(p_max_bytes=100)
    assert first.claimed == 1
    rows = receive(conn, 10)
    assert len(rows) == 2
    assert {row.deliver_count for row in rows} == {1}
    assert call(conn, "reader_ack", reader.id, reader.consumer_id, first.claim_id)[0] == (1, 0)
    value(conn, "ack", claim_of(rows))
    assert states(conn) == {}


def test_beside_other_claimers_the_bound_holds(
    conn: Conn, session: Session, reader: Reader
) -> None:
    send_all(conn, ["x" * 60] * 4)
    other = session()
    held = receive(other, 1)
    end = reader.ask(p_max_bytes=130)
    assert (end.claimed, end.bytes) == (2, 120)
    assert set(reader.plan(end)).isdisjoint(seqs_of(held))


def test_what_a_query_has_finished_is_acknowledged_and_nothing_else(
    conn: Conn, reader: Reader
) -> None:
    sent = send_all(conn, ["x"] * 5)
    first = reader.ask(2)
    reader.move(first)
    second = reader.ask(2)
    reader.claim_id, reader.messages = 0, 0  # as in a checkpoint in which nothing is finished

    def ack(end: int) -> tuple:
        return tuple(call(conn, "reader_ack", reader.id, reader.consumer_id, end)[0])

    with pytest.raises(Exception, match="older than what its query has acknowledged"):
        ack(0)
    assert ack(first.claim_id) == (0, 0), "asking for the second batch did so"
    assert ack(second.claim_id) == (2, 0)
    assert ack(second.claim_id) == (0, 0)
    reader.move(second)
    assert reader.plan(reader.ask()) == sent[4:]


def test_an_acknowledgement_from_outside_says_what_others_have(conn: Conn, reader: Reader) -> None:
    send_all(conn, ["x"] * 3)
    end = reader.ask()
    clock.end_leases(conn)
    taken = receive(conn, 1)
    assert len(taken) == 1
    reader.resume(end)  # what is free it has back
    assert tuple(call(conn, "reader_ack", reader.id, reader.consumer_id, end.claim_id)[0]) == (2, 1)
    assert set(states(conn)) == {taken[0].seq}


def test_what_is_delayed_or_in_a_claim_is_not_available(conn: Conn) -> None:
    id_ = consumer(conn)
    assert value(conn, "consumer_available", id_) == 0
    send_all(conn, ["x"] * 5)
    assert value(conn, "consumer_available", id_) == 5
    claim = claim_of(receive(conn, 2))
    assert value(conn, "consumer_available", id_) == 3
    value(conn, "nack", claim, p_delay=timedelta(hours=1))
    assert value(conn, "consumer_available", id_) == 3
    assert value(conn, "consumer_backlog", id_) == 5


def test_the_recent_size_is_that_of_the_last_hundred(conn: Conn, stream: int) -> None:
    assert value(conn, "recent_size", stream) is None
    send_all(conn, ["x" * 1000] * 50)
    send_all(conn, ["x" * 10, "x" * 20] * 50)
    assert value(conn, "recent_size", stream) == 15
