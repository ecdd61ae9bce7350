"""What is done with a checkpoint from outside of its query: looked at, released, forked."""

from __future__ import annotations

import uuid

import psycopg
import pytest

from tests.sql import clock
from tests.sql.cases import for_each
from tests.sql.queue import *

pytestmark = pytest.mark.usefixtures("stream", "allowed_afterwards")


def reader_state(conn: Conn, reader: Reader, last: int) -> tuple[int, int, int]:
    """Messages held: finished, unfinished, in no log."""
    (row,) = call(conn, "reader_state", reader.id, reader.claim_id, last)
    assert (row.stream, row.consumer, row.consumer_id) == ("s", "c", reader.consumer_id)
    return row.finished, row.unfinished, row.unlogged


@for_each("ordering", ORDERINGS)
def test_what_is_released_was_not_delivered_and_is_there_at_once_in_its_order(
    conn: Conn, ordering: str
) -> None:
    """What was finished is acknowledged; and the reader is not known any more."""
    reader = Reader(conn, consumer(conn, ordering=ordering, max_deliver_count=1))
    sent = send_all(conn, ["x"] * 9, p_keys=["a", "b", "c"] * 3)
    first = reader.ask(2)
    reader.move(first)
    second = reader.ask(3)
    reader.resume(second, uuid.uuid4())
    done = reader.plan(second)
    assert reader_state(conn, reader, second.claim_id) == (0, len(done), 0)
    assert reader_state(conn, reader, first.claim_id) == (0, 0, len(done))
    release = (reader.id, reader.consumer_id, reader.claim_id)
    with raises("55006", "is running, or stopped recently"):
        call(conn, "reader_release", *release)
    clock.end_leases(conn)
    assert tuple(call(conn, "reader_release", *release)[0]) == (0, len(done))
    assert call(conn, "reader_state", reader.id, 0, 0) == []
    rows = receive(conn, 100)
    assert set(done) <= set(seqs_of(rows)) <= set(sent)
    assert {row.deliver_count for row in rows} == {1}
    if ordering == "stream":
        assert seqs_of(rows) == sent[2:]
    with pytest.raises(psycopg.Error, match="does not exist in this database"):
        reader.resume(second)


def test_a_release_acknowledges_what_was_finished_first(conn: Conn, reader: Reader) -> None:
    sent = send_all(conn, ["x"] * 3)
    end = reader.ask(2)
    reader.move(end)
    assert reader_state(conn, reader, end.claim_id) == (2, 0, 0)
    clock.end_leases(conn)
    (released,) = call(conn, "reader_release", reader.id, reader.consumer_id, end.claim_id)
    assert tuple(released) == (2, 0)
    assert states(conn) == {sent[2]: "ready"}


def test_a_reader_that_beats_is_told_from_one_whose_lease_merely_has_time_left(
    conn: Conn, reader: Reader
) -> None:
    send_all(conn, ["x"])
    reader.ask()
    conn.execute(
        "update pgqueue.consumer_messages set visibility_timeout = '1 hour',"
        " lease_until = clock_timestamp() + interval '39 min'"
    )
    assert tuple(call(conn, "reader_release", reader.id, reader.consumer_id, 0)[0]) == (0, 1)


def test_a_fork_goes_on_beside_its_origin(conn: Conn, reader: Reader) -> None:
    """Each message goes to one of them, and each acknowledges its own."""
    sent = send_all(conn, ["x"] * 10)
    reader.move(reader.ask(2))
    fork = Reader(conn, reader.consumer_id)
    fork.id = value(
        conn, "reader_fork", reader.id, reader.consumer_id, reader.claim_id, reader.messages
    )
    fork.claim_id, fork.messages = reader.claim_id, reader.messages
    mine, its = reader.ask(3), fork.ask(2)
    assert (reader.plan(mine), fork.plan(its)) == (sent[2:5], sent[5:7])
    assert (mine.messages, its.messages) == (5, 4)
    fork.move(its)
    fork.move(fork.ask())
    assert fork.ask().claimed == 0
    assert sorted(states(conn)) == sent[2:5]
    reader.move(mine)
    assert reader.ask().claimed == 0
    assert states(conn) == {}
    assert one(conn, "select count(*) from pgqueue.readers") == 2
