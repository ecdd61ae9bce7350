"""maintain(): what failed writers left is deleted, and nothing else."""

from datetime import timedelta

import psycopg
import pytest

from tests.sql import clock, internals
from tests.sql.queue import *

pytestmark = pytest.mark.usefixtures("stream", "allowed_afterwards")


def test_maintain_deletes_what_failed_writers_left_and_nothing_else(
    conn: Conn, stream: int
) -> None:
    consumer(conn)
    old = stage(conn, stream, 5, 3)
    internals.insert_messages(conn, stream, 3)  # reserved and written, and never staged
    clock.pass_time(conn, timedelta(days=2))
    won, lost_attempt = stage(conn, stream, 2, 1), stage(conn, stream, 3, 1)
    assert publish(conn, stream, [won], 2, 1)
    fresh = stage(conn, stream, 4, 2)
    done = {what: count for what, count in call(conn, "maintain") if count}
    assert done == {"staged chunks": 2, "unpublished messages": 11}
    assert internals.staged_chunks(conn) == [fresh]
    assert internals.count(conn, "messages") == 6
    assert internals.count(conn, "reservations") == 1
    assert lost_attempt != fresh
    assert publish(conn, stream, [fresh], 4, 2)
    assert len(acked(conn, "s", "c")) == 6
    with raises("PQ008"):
        publish(conn, stream, [old], 5, 3)
    assert dict(call(conn, "maintain"))["staged chunks"] == 0


def test_a_batch_that_was_empty_may_be_repeated_with_messages_beside_maintain(
    conn: Conn, stream: int
) -> None:
    """Its commit recorded it, the driver died, and the batch has rows when it is run again."""
    assert publish(conn, stream, [], 0)
    assert value(conn, "is_published", "sink", stream, 0) is False
    staged = stage(conn, stream, 3)
    maintain(conn)
    assert internals.staged_chunks(conn) == [staged]
    assert publish(conn, stream, [staged], 3) is True
    assert value(conn, "is_published", "sink", stream, 0) is True
    stage(conn, stream, 3)  # of a task that was slower
    maintain(conn)
    assert internals.staged_chunks(conn) == []


def test_maintain_forgets_all_but_the_last_batches_of_a_sink(conn: Conn, stream: int) -> None:
    for batch in range(30):
        publish(conn, stream, [], 0, batch)
    publish(conn, stream, [], 0, 0, "another")
    assert dict(call(conn, "maintain"))["old sink batches"] == 20
    assert value(conn, "is_published", "sink", stream, 0) is True, "the later ones say so"
    assert publish(conn, stream, [], 0, 29) is False
    assert publish(conn, stream, [], 0, 0, "another") is False


def test_maintain_forgets_batch_writes_whose_name_is_used_once(conn: Conn, stream: int) -> None:
    for sink in ("write:1", "txn:a", "5e0e5a3f", "write:2"):
        if sink == "write:2":
            clock.pass_time(conn, timedelta(days=2))
        publish(conn, stream, [stage(conn, stream, 1, sink=sink)], 1, sink=sink)
    assert dict(call(conn, "maintain"))["old sink batches"] == 1
    assert internals.sink_batches(conn) == ["5e0e5a3f", "txn:a", "write:2"]


def test_maintain_deletes_no_published_message_whatever_was_staged(conn: Conn, stream: int) -> None:
    """Neither messages of others, nor those that were published from the same reservation."""
    consumer(conn)
    sent = [send(conn), send(conn)]
    for block in ("{[1,3)}", "{[1,9223372036854775807)}"):
        with pytest.raises(psycopg.Error, match="reserved"), conn.transaction():
            value(conn, "stage", "x", 1, stream, block)
        with conn.transaction():
            value(conn, "reserve", stream, 1)
            with pytest.raises(psycopg.Error, match="reserved"), conn.transaction():
                value(conn, "stage", "x", 1, stream, block)
    with conn.transaction():
        seqs = internals.insert_messages(conn, stream, 3)
        all_of_it = f"{{[{seqs[0]},{seqs[-1] + 1})}}"
        first = value(conn, "stage", "a", 1, stream, f"{{[{seqs[0]},{seqs[1]}]}}")
        overlapping = value(conn, "stage", "b", 1, stream, all_of_it)
    with pytest.raises(psycopg.Error, match="reserved"):
        value(conn, "stage", "later", 1, stream, all_of_it)
    assert publish(conn, stream, [first], 2, 1, "a")
    with raises("PQ008", "published before"):
        publish(conn, stream, [overlapping], 3, 1, "b")
    clock.pass_time(conn, timedelta(days=2))
    assert dict(call(conn, "maintain"))["unpublished messages"] == 1
    assert internals.staged_chunks(conn) == []
    assert acked(conn, "s", "c") == [*sent, *seqs[:2]]


def test_a_message_staged_twice_is_not_published_twice(conn: Conn, stream: int) -> None:
    consumer(conn)
    with conn.transaction():
        (seq,) = internals.insert_messages(conn, stream, 1)
        twice = [value(conn, "stage", "a", 1, stream, f"{{[{seq},{seq + 1})}}") for _ in range(2)]
    with pytest.raises(psycopg.Error, match="staged twice"):
        publish(conn, stream, twice, 2, 1, "a")
    assert publish(conn, stream, twice[:1], 1, 1, "a")
    assert acked(conn, "s", "c") == [seq]


def test_nothing_is_left_of_a_batch_that_was_published(conn: Conn, stream: int) -> None:
    """A thousand groups of one chunk, as with a time for each message."""
    with conn.transaction():
        seqs = internals.insert_messages(conn, stream, 1000)
        staged = conn.execute(
            "select pgqueue.stage('a', 1, %s, int8multirange(int8range(s, s, '[]')))"
            " from unnest(%s::bigint[]) s",
            [stream, seqs],
        ).fetchall()
    assert publish(conn, stream, [block for (block,) in staged], 1000, 1, "a")
    assert internals.count(conn, "reservations") == 0


def test_a_failed_write_deletes_what_it_staged_and_nothing_else(conn: Conn, stream: int) -> None:
    """Neither chunks of another attempt, nor published ones, nor those of another batch."""
    consumer(conn)
    failed, alive, published = (stage(conn, stream, n) for n in (5, 2, 1))
    other = stage(conn, stream, 3, batch=1)
    with conn.transaction():
        seqs = internals.insert_messages(conn, stream, 4)
        shared = [
            value(conn, "stage", "x", 1, stream, f"{{[{a},{b + 1})}}")
            for a, b in ((seqs[0], seqs[1]), (seqs[2], seqs[3]))
        ]
    assert publish(conn, stream, [published], 1)
    assert publish(conn, stream, shared[:1], 2, 1, "x")
    assert value(conn, "unstage", "sink", 0, [failed, other, published, *shared, 99]) == 5
    assert value(conn, "unstage", "x", 1, shared) == 2
    assert internals.staged_chunks(conn) == [alive, other]
    assert internals.count(conn, "messages") == 2 + 1 + 3 + 2
    assert internals.count(conn, "reservations") == 2
    assert len(acked(conn, "s", "c")) == 3


def test_what_is_being_published_is_not_deleted(conn: Conn, stream: int, session: Session) -> None:
    consumer(conn)
    staged = stage(conn, stream, 5)
    other = session()
    with other.transaction():
        assert publish(other, stream, [staged], 5)
        assert value(conn, "unstage", "sink", 0, [staged]) == 0
    assert value(conn, "unstage", "sink", 0, [staged]) == 0
    assert len(acked(conn, "s", "c")) == 5


@pytest.mark.small_limits
def test_one_call_holds_the_locks_of_some_streams_and_all_have_their_turn(
    conn: Conn, has_small_limits: bool
) -> None:
    """Locks of all streams at once would need more memory than the server has for locks."""
    names = {f"t{i}" for i in range(7)}
    for name in names:
        value(conn, "create_stream", name)
        value(conn, "set_retention", name, p_for=timedelta(days=1))
    for _ in range(3):  # who begins in the middle goes on from there
        maintain(conn)
    seen = conn.execute(
        "select stream from pgqueue.stream_retention where maintained_at is not null"
    ).fetchall()
    assert {name for (name,) in seen} == names
    held = []
    for _ in range(4):
        with conn.transaction():
            call(conn, "maintain")
            held.append(internals.streams_maintained(conn))
    assert max(held) <= 3 if has_small_limits else held == [7] * 4, held


def test_maintain_in_the_transaction_of_a_drop_leaves_the_tables_to_the_next_one(
    conn: Conn, session: Session
) -> None:
    """Behind the lock for that the senders of all streams would wait."""
    value(conn, "create_stream", "other")
    sender = session()
    sender.execute("set lock_timeout = '10 s'")
    with conn.transaction():
        value(conn, "drop_stream", "s")
        maintain(conn)
        assert value(sender, "send", "other", "x") == 1
    maintain(conn)
    assert internals.count(conn, "dropped_streams") == 0
