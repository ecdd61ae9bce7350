"""Messages that are looked at: nothing is claimed, and all is there."""

import pytest

from tests.sql.queue import *

pytestmark = pytest.mark.usefixtures("allowed_afterwards")


def peek(conn: Conn, size: int = 100, name: str = "c") -> list[tuple[int, str]]:
    return [(row.seq, row.state) for row in call(conn, "peek", "s", name, size)]


@pytest.mark.small_limits
@pytest.mark.parametrize("ordering", ORDERINGS)
def test_what_is_peeked_is_what_is_delivered_next(
    conn: Conn, stream: int, session: Session, ordering: str
) -> None:
    """In its order, each once, whatever was taken; and looking changes nothing."""
    consumer(conn, ordering=ordering)
    send_keys(conn, "a", "b", "a", None)
    send(conn, p_priority=5)
    late = session()
    late.execute("begin")
    send_keys(late, "c")
    send_keys(conn, "b", "b")
    for size in (1, 3):
        told = peek(conn)
        assert peek(conn) == told
        assert [seq for seq, _ in peek(conn, 2)] == [seq for seq, _ in told][:2]
        got = receive(conn, size)
        # of an ordered consumer, what is assigned depends on who asks
        assert set(seqs_of(got)) <= {seq for seq, _ in told}
        if ordering == "none":
            assert seqs_of(got) == [seq for seq, _ in told[: len(got)]]
        value(conn, "ack", got[0].claim_id)
    late.execute("commit")
    left = [seq for seq, _ in peek(conn)]
    assert len(left) == len(set(left))
    assert sorted(left) == sorted(acked(conn, "s", "c"))
    assert peek(conn) == []


def test_peek_tells_where_each_message_is(conn: Conn, stream: int) -> None:
    """With the payload and the last error; what is claimed, dead or for others is not there."""
    consumer(conn, ordering="key")
    consumer(conn, "other")
    send_keys(conn, "a", "a", "b")
    value(conn, "nack", claim_of(receive(conn, 1)), p_delay="1 hour", p_reason="no")
    send(conn, "x", p_consumers=["other"])
    send(conn, "later", p_deliver_at="2222-01-01")
    rows = {row.seq: row for row in call(conn, "peek", "s", "c", 10)}
    assert {seq: row.state for seq, row in rows.items()} == {
        1: "delayed", 2: "waiting", 3: "ready", 5: "delayed",
    }  # fmt: skip
    assert (rows[1].error, rows[1].deliver_count, rows[1].data) == ("no", 1, "x")
    assert seqs_of(receive(conn, 5)) == [3]
    assert 3 not in {seq for seq, _ in peek(conn)}


def test_a_filtered_consumer_is_shown_what_passes(conn: Conn, stream: int) -> None:
    consumer(conn, p_topic="a.*")
    send_keys(conn, "a.1", "b.1", "a.2", "a.3")
    assert peek(conn) == [(1, "new"), (3, "new"), (4, "new")]
    assert seqs_of(receive(conn, 1)) == [1]
    assert [seq for seq, _ in peek(conn)] == [3, 4]


def test_messages_are_looked_up_by_number(conn: Conn, stream: int) -> None:
    """Also what was for others; not what is staged, or was rolled back."""
    consumer(conn, "other")
    send_all(conn, ["a", "b"], p_priority=3)
    conn.execute("begin")
    send(conn)
    conn.execute("rollback")
    send(conn, "c", p_consumers=["other"])
    stage(conn, stream, 1)
    rows = call(conn, "peek_at", "s", 2, 10)
    assert [(row.seq, row.data, row.priority, row.consumers) for row in rows] == [
        (2, "b", 3, None),
        (4, "c", 0, ["other"]),
    ]
    assert call(conn, "peek_at", "s", 6, 10) == []


def test_the_position_of_a_consumer(conn: Conn, stream: int) -> None:
    consumer(conn)
    assert call(conn, "consumer_position", "s", "c") == [(1, None, 0)]
    send_all(conn, ["a", "b"])
    send(conn, "c")
    (told,) = call(conn, "consumer_position", "s", "c")
    assert (told.next_seq, told.published_at is None) == (1, False)
    receive(conn, 1)
    assert call(conn, "consumer_position", "s", "c") == [(4, None, 0)]
