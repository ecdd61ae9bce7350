"""Ordering by key beside the model: pieces half settled, many at once, several sessions."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.sql.queue import (
    Conn,
    Session,
    acked,
    claim_of,
    consumer,
    receive,
    seconds,
    send_keys,
    value,
    wait_for_a_lock,
)

pytestmark = pytest.mark.usefixtures("stream", "allowed_afterwards")


@pytest.fixture
def keyed(conn: Conn, stream: int) -> int:
    """The consumer c with ordering=key; its id."""
    return consumer(conn, ordering="key", p_visibility_timeout=seconds(60))


@pytest.mark.small_limits
def test_a_key_that_left_a_piece_is_free_also_when_the_piece_is_cut_for_smaller_claims(
    conn: Conn, keyed: int
) -> None:
    a1, b1, c1 = send_keys(conn, "a", "b", "c")
    claim = claim_of(receive(conn, 3))
    a2, a3 = send_keys(conn, "a", "a")
    assert receive(conn) == [], "a2 and a3 wait for a1"
    value(conn, "ack", claim, [a1])
    value(conn, "nack", claim)
    (a4,) = send_keys(conn, "a")
    assert sorted(acked(conn, "s", "c", 1)) == [b1, c1, a2, a3, a4]


def test_a_piece_may_end_while_a_dealer_looks_at_what_it_lost(
    conn: Conn, keyed: int, session: Session
) -> None:
    a, b = send_keys(conn, "a", "b")
    claim = claim_of(receive(conn, 2))
    send_keys(conn, "c")
    other = claim_of(receive(conn, 1))
    later = send_keys(conn, "a", "b", "c")
    assert receive(conn, 1) == []
    value(conn, "ack", claim, [a])
    value(conn, "ack", other)
    with session() as holder, ThreadPoolExecutor(1) as pool:
        holder.execute("begin")
        holder.execute("select from pgqueue.pieces for update")  # the dealer waits in mid-look
        dealer = pool.submit(acked, session(), "s", "c", 1)
        wait_for_a_lock(conn)
        value(conn, "ack", claim, [b])
        holder.execute("rollback")
        assert sorted(dealer.result(20)) == later


def held(conn: Conn, keys: list[str], size: int) -> list[int]:
    """The claims of new messages of these keys."""
    send_keys(conn, *keys)
    claims = []
    while rows := receive(conn, size):
        claims.append(claim_of(rows))
    return claims


def settled(conn: Conn, sent: list[int], size: int) -> bool:
    """Receives and acknowledges these messages; a claim looks at a part, and may find nothing."""
    left = set(sent)
    for _ in range(100):
        left -= set(acked(conn, "s", "c", size))
        if not left:
            return True
    return False


@pytest.mark.small_limits
def test_many_old_pieces_that_end_together_free_their_keys(
    conn: Conn, keyed: int, has_small_limits: bool
) -> None:
    """Such as those of a Spark batch, while workers deal thousands beside it."""
    many, more, size = (8, 6, 1) if has_small_limits else (11_000, 1_300, 64)
    keys, others = [[f"{name}{i}" for i in range(n)] for name, n in (("k", many), ("o", more))]
    short = held(conn, others, size)
    claims = held(conn, keys, size)
    passing, later = send_keys(conn, *others), send_keys(conn, *keys)
    assert receive(conn) == []
    for claim in short:
        value(conn, "ack", claim)
    # more pieces at once than those that make a piece old
    assert settled(conn, passing, 1)
    for claim in claims:
        value(conn, "ack", claim)
    assert settled(conn, later, 1000)
