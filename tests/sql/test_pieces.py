"""Ordering by key beside the model: pieces half settled, many at once, several sessions."""

from __future__ import annotations

import pytest

from tests.sql.queue import (
    Conn,
    acked,
    claim_of,
    consumer,
    receive,
    seconds,
    send_keys,
    value,
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
