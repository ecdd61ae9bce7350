"""The sink's side: messages that are staged by tasks, and published once as a batch."""

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest

from tests.sql import internals
from tests.sql.queue import *

pytestmark = pytest.mark.usefixtures("stream", "allowed_afterwards")


def test_staged_messages_are_seen_once_they_are_published_and_only_once(
    conn: Conn, stream: int
) -> None:
    consumer(conn)
    blocks = [stage(conn, stream, 2), stage(conn, stream, 3)]
    assert states(conn) == {}
    assert receive(conn) == []
    assert value(conn, "is_published", "sink", stream, 0) is False
    assert publish(conn, stream, blocks, 5) is True
    assert value(conn, "is_published", "sink", stream, 0) is True
    assert publish(conn, stream, blocks, 5) is False
    assert publish(conn, stream, [stage(conn, stream, 5)], 5) is False, "a replay with new blocks"
    assert len(acked(conn, "s", "c")) == 5
    assert value(conn, "is_published", "another", stream, 0) is False
    assert publish(conn, stream, [stage(conn, stream, 1, sink="x")], 1, sink="x") is True


def test_a_later_batch_write_says_that_the_earlier_ones_were_published(
    conn: Conn, stream: int
) -> None:
    consumer(conn)

    def write(rows: int, version: int) -> bool:
        blocks = [stage(conn, stream, rows, version, "txn:a")] if rows else []
        return publish(conn, stream, blocks, rows, version, "txn:a")

    assert write(1, 7) is True
    assert value(conn, "is_published", "txn:a", stream, 6) is True
    assert write(1, 6) is False
    assert write(2, 7) is False, "whatever it has"
    assert write(0, 8) is True, "an empty batch is a batch"
    assert write(0, 8) is False
    assert len(acked(conn, "s", "c")) == 1
    assert internals.count(conn, "publications") == 1


@pytest.mark.promise("guarantee: Repeated micro-batches")
def test_a_batch_of_a_query_that_is_no_retry_of_the_last_one_is_refused(
    conn: Conn, stream: int
) -> None:
    """From a checkpoint that was restored: dropping its rows would lose them."""
    for number in (6, 7):
        assert publish(conn, stream, [stage(conn, stream, 3, number)], 3, number)
    for batch, rows, says in (
        (6, 3, "batch 6 of query sink comes after its batch 7 was published"),
        (7, 2, "batch 7 of query sink was published with 3 messages, and has 2 now"),
        (7, 4, "batch 7 of query sink was published with 3 messages, and has 4 now"),
    ):
        with raises("PQ010", says) as caught:
            publish(conn, stream, [stage(conn, stream, rows, batch)], rows, batch)
        assert "new checkpoint" in str(caught.value.diag.message_hint).replace("new\n", "new ")
    assert publish(conn, stream, [stage(conn, stream, 3, 7)], 3, 7) is False, "a retry"
    assert publish(conn, stream, [stage(conn, stream, 1, 8)], 1, 8) is True
    assert publish(conn, None, [], 0, 9) is True, "without messages, it is of no stream"
    with raises("PQ010", "batch 8 of query sink comes after its batch 9 was published") as caught:
        publish(conn, stream, [stage(conn, stream, 2, 8)], 2, 8)
    assert "that was to" not in str(caught.value)
    assert (caught.value.diag.message_hint or "").startswith("Its checkpoint was restored")


def test_a_batch_of_a_query_to_another_stream_is_no_repetition(conn: Conn, stream: int) -> None:
    """A copied checkpoint has the query id of the first: its batch would be lost."""
    other = value(conn, "create_stream", "other")
    for batch in (6, 7):
        assert publish(conn, stream, [stage(conn, stream, 3, batch)], 3, batch)
    blocks = [stage(conn, other, 3, 7)]
    for batch, says in ((7, "batch 7 of query sink was"), (6, "batch 6 of query sink comes after")):
        with raises("PQ010", says) as caught:
            publish(conn, other, blocks, 3, batch)
        assert "that was to stream 's', and this is to stream 'other'" in str(caught.value)
        assert "--fork" in str(caught.value.diag.message_hint)
    with pytest.raises(
        psycopg.Error, match="to stream 's', and this is to the streams of"
    ) as caught:
        publish(conn, None, [stage(conn, other, 3, 7, p_routed=True)], 3, 7)  # type: ignore[arg-type]
    assert publish(conn, stream, [stage(conn, stream, 3, 7)], 3, 7) is False
    assert publish(conn, other, [stage(conn, other, 3, 8)], 3, 8) is True


@pytest.mark.promise("guarantee: Repeated micro-batches")
def test_a_repeated_batch_of_a_query_has_the_same_messages(conn: Conn, stream: int) -> None:
    """In any order and in other chunks; by their number alone only if the caller says so."""
    a, b = (lambda n=1, x=x: stage(conn, stream, n, data=x) for x in "ab")
    blocks = [a(2), b()]
    assert publish(conn, stream, blocks, 3) is True
    assert publish(conn, stream, blocks, 3) is False, "the same call again: its chunks are gone"
    assert publish(conn, stream, [b(), a(), a()], 3) is False
    for others in ([a(), b(2)], [a(3)], [a(), a(), stage(conn, stream, 1, data="c")]):
        with raises("PQ010", "other messages than it has now") as caught:
            publish(conn, stream, others, 3)
        assert "compareRepeats" in str(caught.value.diag.message_hint)
    assert publish(conn, stream, [a(3)], 3, p_compare=False) is False


@pytest.mark.parametrize("rows", [3, 2])
def test_a_batch_that_is_published_beside_is_compared_too(
    conn: Conn, session: Session, stream: int, rows: int
) -> None:
    """Two drivers on one checkpoint: the slower one sees what the faster one did."""
    first, second = session(), session()
    mine, others = stage(conn, stream, 3), stage(conn, stream, rows)
    with ThreadPoolExecutor(1) as pool:
        with first.transaction():
            assert publish(first, stream, [mine], 3)
            slower = pool.submit(publish, second, stream, [others], rows)
            wait_for_a_lock(conn)
        if rows == 3:
            assert slower.result() is False
        else:
            with pytest.raises(psycopg.Error, match="with 3 messages, and has 2 now"):
                slower.result()


def test_a_query_notices_that_its_stream_was_dropped_and_made_again(
    conn: Conn, stream: int
) -> None:
    assert publish(conn, stream, [stage(conn, stream, 1, 4)], 1, 4)
    value(conn, "drop_stream", "s")
    again = value(conn, "create_stream", "s")
    with raises("PQ001", "dropped and created again") as caught:
        publish(conn, again, [stage(conn, again, 1, 5)], 1, 5)
    assert "new checkpoint" in str(caught.value.diag.message_hint)
    assert publish(conn, again, [stage(conn, again, 1, 0, "new")], 1, 0, "new")
    assert publish(conn, again, [stage(conn, again, 1, 0, "txn:a")], 1, 0, "txn:a")
    call(conn, "maintain")
    assert len(internals.published(conn)) == 2


def test_a_query_may_be_pointed_to_another_stream(conn: Conn, stream: int) -> None:
    other = value(conn, "create_stream", "other")
    for batch, to in enumerate((stream, other, stream)):
        assert publish(conn, to, [stage(conn, to, 1, batch)], 1, batch)


def test_priority_time_and_consumers_of_staged_messages(conn: Conn, stream: int) -> None:
    for name in "cd":
        consumer(conn, name)
    due = now(conn) + seconds(60)
    soon = now(conn) + seconds(0.2)
    blocks = [
        stage(conn, stream, 1, p_consumers=["c"]),
        stage(conn, stream, 1, p_priority=3, p_consumers=["c"]),
        stage(conn, stream, 2, p_deliver_at=due, p_consumers=["c"]),
        stage(conn, stream, 1, p_consumers=["d", "c"]),
        stage(conn, stream, 1, p_expires_at=soon),
    ]
    while now(conn) < soon + seconds(1):  # it expires at the end of the second
        time.sleep(0.05)
    assert publish(conn, stream, blocks, 6)
    assert [(r.seq, r.priority) for r in receive(conn)] == [(2, 3), (1, 0), (5, 0)]
    assert {seq: each for seq, each in states(conn).items() if each != "claimed"} == {
        3: "delayed",
        4: "delayed",
        6: "dead",
    }
    assert state(conn, 3).not_visible_until == due
    assert seqs_of(receive(conn, name="d")) == [5]
    assert states(conn, "d") == {5: "claimed", 6: "dead"}


def test_a_batch_that_is_not_complete_is_not_published(conn: Conn, stream: int) -> None:
    consumer(conn)
    other = value(conn, "create_stream", "other")
    blocks = [stage(conn, stream, 2)]
    of_others = [
        stage(conn, stream, 1, 1),  # of another batch, sink or stream
        stage(conn, stream, 1, 0, "other"),
        stage(conn, other, 1),
    ]
    for more, n in (([10**9], 2), ([], 3), *(([block], 3) for block in of_others)):
        with raises("PQ008", "not complete"):
            publish(conn, stream, blocks + more, n)
        assert value(conn, "is_published", "sink", stream, 0) is False
        assert receive(conn) == []
    assert publish(conn, stream, blocks, 2) is True, "nothing was used up"


def test_a_commit_that_waited_for_one_that_is_rolled_back_publishes_the_batch(
    conn: Conn, session: Session, stream: int
) -> None:
    consumer(conn)
    blocks = [stage(conn, stream, 3)]
    first, second = session(), session()
    with ThreadPoolExecutor(1) as pool:
        with first.transaction(force_rollback=True):
            assert publish(first, stream, blocks, 3) is True
            slower = pool.submit(publish, second, stream, blocks, 3)
            wait_for_a_lock(conn)
        assert slower.result() is True
    assert len(acked(conn, "s", "c")) == 3


def test_a_staged_batch_whose_commit_takes_long_is_not_taken_for_dead(
    conn: Conn, session: Session, stream: int
) -> None:
    """Its publication id is younger than its transaction id, so nobody closes the hole before."""
    consumer(conn)
    send(conn)  # the first number of a sequence would give a transaction id by itself
    acked(conn, "s", "c")
    blocks = [stage(conn, stream, 3)]
    blocker, committer = session(), session()
    with ThreadPoolExecutor(1) as pool:
        with blocker.transaction():
            internals.lock_sink_batches(blocker)
            published = pool.submit(publish, committer, stream, blocks, 3)
            wait_for_a_lock(conn)
            for _ in range(3):
                send(conn)
                assert len(acked(conn, "s", "c")) == 1
        assert published.result()
    assert len(acked(conn, "s", "c")) == 3


# Publishing what one wrote oneself, without a sink


def test_who_wrote_messages_with_its_own_numbers_publishes_them_once(
    conn: Conn, stream: int
) -> None:
    """All of a reservation, a part, or what is left of it; and it leaves nothing behind."""
    consumer(conn)
    with conn.transaction():
        seqs = internals.insert_messages(conn, stream, 5)
        first, others = f"{{[{seqs[0]},{seqs[1]}]}}", f"{{[{seqs[2]},{seqs[4]}]}}"
        assert value(conn, "publish_written", "s", first, 7) == 2
        with raises("PQ003"), conn.transaction():
            value(conn, "publish_written", "s", first)
        assert value(conn, "publish_written", "s", others, p_consumers=["c"]) == 3
    assert [(r.seq, r.priority) for r in receive(conn)] == [
        *((seq, 7) for seq in seqs[:2]),
        *((seq, 0) for seq in seqs[2:]),
    ]
    assert internals.count(conn, "reservations") == 0


def test_nobody_publishes_what_another_transaction_wrote_or_what_is_staged(
    conn: Conn, session: Session, stream: int
) -> None:
    consumer(conn)
    other = session()
    with other.transaction():
        block = "{{[{0},{0}]}}".format(*internals.insert_messages(other, stream, 1))
        with raises("PQ003", "that this transaction reserved"):
            value(conn, "publish_written", "s", block)
    with pytest.raises(psycopg.Error, match="that this transaction reserved"):
        value(conn, "publish_written", "s", block)
    with conn.transaction():
        seqs = internals.insert_messages(conn, stream, 1)
        block = f"{{[{seqs[0]},{seqs[0]}]}}"
        staged = value(conn, "stage", "sink", 0, stream, block)
        value(conn, "publish_written", "s", block)
    with pytest.raises(psycopg.Error, match="were published before"):
        publish(conn, stream, [staged], 1)
    assert seqs_of(receive(conn)) == seqs


def test_a_later_write_of_a_batch_deletes_what_earlier_ones_staged(
    conn: Conn, session: Session, stream: int
) -> None:
    """Of the same sink, batch and stream alone; and a write without a number is of nobody."""
    consumer(conn)
    other_stream = value(conn, "create_stream", "other")
    earlier, later = value(conn, "begin_write"), value(conn, "begin_write")
    assert earlier < later

    def staged(n: int, to: int = stream, batch: int = 1, sink: str = "txn:a", **more: Any) -> int:
        return stage(conn, to, n, batch, sink, p_write_no=earlier, **more)

    for _ in range(12):
        staged(2)
    kept = [
        staged(3, batch=2),
        staged(3, sink="txn:b"),
        staged(3, other_stream),
        staged(3, p_routed=True),
        stage(conn, stream, 3, 1, "txn:a"),
    ]
    mine = [stage(conn, stream, 5, 1, "txn:a", p_write_no=later) for _ in range(2)]
    assert internals.staged_chunks(conn) == kept + mine
    assert internals.count(conn, "reservations") == len(kept + mine)
    assert internals.count(conn, "messages") == 3 * len(kept) + 10
    assert publish(conn, stream, mine, 10, 1, "txn:a")
    assert len(acked(conn, "s", "c")) == 10


def test_a_query_writes_a_batch_once_in_all(conn: Conn, stream: int) -> None:
    """Also where its earlier write was to another stream, or to several."""
    other_stream = value(conn, "create_stream", "other")
    for to, routed in ((stream, False), (other_stream, False), (other_stream, True)):
        chunk = stage(conn, to, 2, p_write_no=value(conn, "begin_write"), p_routed=routed)
        assert internals.staged_chunks(conn) == [chunk]


def test_what_outlived_its_application_stages_nothing_that_stays(conn: Conn, stream: int) -> None:
    """A task that is late; and a driver whose batch another one does now."""
    consumer(conn)
    earlier, later = value(conn, "begin_write"), value(conn, "begin_write")
    old = [stage(conn, stream, 2, p_write_no=earlier)]
    mine = [stage(conn, stream, 2, p_write_no=later)]
    with raises("PQ008", "a later write"):
        stage(conn, stream, 2, p_write_no=earlier)
    with raises("PQ008", "0 of 1 staged chunks"):
        publish(conn, stream, old, 2)
    assert publish(conn, stream, mine, 2)
    late = stage(conn, stream, 2, p_write_no=earlier)  # nothing of the later one is left
    assert publish(conn, stream, [late], 2) is False
    maintain(conn)
    assert internals.staged_chunks(conn) == []
    assert len(acked(conn, "s", "c")) == 2


def test_what_an_earlier_write_publishes_just_now_is_not_deleted(
    conn: Conn, session: Session, stream: int
) -> None:
    consumer(conn)
    earlier, later = value(conn, "begin_write"), value(conn, "begin_write")
    old = stage(conn, stream, 2, p_write_no=earlier)
    other = session()
    with other.transaction():
        assert publish(other, stream, [old], 2)
        mine = stage(conn, stream, 2, p_write_no=later)
    assert publish(conn, stream, [mine], 2) is False, "a replay"
    assert len(acked(conn, "s", "c")) == 2


@pytest.mark.promise("restore: a Spark sink to streams that is ahead")
def test_after_a_restore_a_query_that_is_ahead_is_refused(conn: Conn, stream: int) -> None:
    """The batches that were lost with the last commits are named, and not passed over."""
    consumer(conn)

    def write(batch: int, rows: int = 2, sink: str = "sink") -> bool:
        blocks = [stage(conn, stream, rows, batch, sink)] if rows else []
        return publish(conn, stream if rows else None, blocks, rows, batch, sink)

    assert [write(0), write(1, rows=0), write(2), write(5)] == [True] * 4
    call(conn, "recover")
    assert [write(5), write(6, rows=0), write(7)] == [False, True, True]
    assert write(7, sink="other"), "of which nothing is known"
    call(conn, "recover")
    for rows in (2, 0):
        with raises("PQ010", "batch 9 of query sink does not follow its batch 7"):
            write(9, rows)
    assert write(9, sink="txn:a")
    assert [write(8), write(9), write(12)] == [True] * 3
    assert len(acked(conn, "s", "c")) == 9 * 2


def test_a_batch_without_messages_prevents_no_repetition_with_some(conn: Conn, stream: int) -> None:
    """Of a query that is not deterministic: nothing of the batch was published."""
    consumer(conn)
    for to in (None, stream):
        assert publish(conn, to, [], 0, 3) is (to is None)
    assert publish(conn, stream, [stage(conn, stream, 2, 3)], 2, 3) is True
    assert publish(conn, None, [], 0, 3) is False
    assert publish(conn, None, [], 0, 2) is False, "and it is no error, since nothing is lost"
    assert publish(conn, stream, [stage(conn, stream, 2, 3)], 2, 3) is False
    assert len(acked(conn, "s", "c")) == 2
