"""What is put off comes back later, with what was saved, and has not failed."""

from __future__ import annotations

import pytest

from tests.sql import clock
from tests.sql.cases import for_each
from tests.sql.queue import *

pytestmark = [pytest.mark.small_limits, pytest.mark.usefixtures("stream", "allowed_afterwards")]


@for_each("ordering", ORDERINGS)
@pytest.mark.promise("feature: snooze, with saved state", "concepts: transitions of a message")
def test_what_is_put_off_comes_back_with_its_state_and_did_not_fail(
    conn: Conn, ordering: str
) -> None:
    """However often: it is never dead-lettered for it. Without a delay it is ready at once."""
    consumer(conn, ordering=ordering, max_deliver_count=1)
    seq = send(conn, p_key="k")
    for turn in range(4):
        (message,) = receive(conn)
        saved = None if turn == 0 else {"turn": turn}
        assert (message.seq, message.deliver_count, message.saved) == (seq, 1, saved)
        chosen = [seq] if turn % 2 else None
        new = f'{{"turn": {turn + 1}}}'
        assert value(conn, "defer", message.claim_id, chosen, seconds(60), new) == 1
        assert receive(conn) == []
        assert state(conn, seq).state == "delayed"
        clock.end_delays(conn)
    value(conn, "defer", claim_of(receive(conn)))
    assert [row.seq for row in receive(conn)] == [seq]


@for_each("ordering", ["key", "stream"])
def test_later_messages_of_its_key_wait_for_it(conn: Conn, ordering: str) -> None:
    """And have no state saved."""
    consumer(conn, ordering=ordering)
    sent = send_all(conn, ["x"] * 4, p_keys=["k"] * 4)
    claim = claim_of(found := receive(conn, 4))
    assert seqs_of(found) == sent[: len(found)]
    value(conn, "ack", claim, sent[:1])
    value(conn, "defer", claim, sent[1:2], seconds(60), "7")
    assert receive(conn) == []
    assert states(conn)[sent[1]] == "delayed"
    clock.end_delays(conn)
    got: list[tuple[int, object]] = []
    while found := receive(conn, 1):
        got += [(m.seq, m.saved) for m in found]
        value(conn, "ack", claim_of(found))
    assert got == [(sent[1], 7), (sent[2], None), (sent[3], None)]


def test_what_is_saved_stays_until_something_else_is(conn: Conn) -> None:
    """Also when it fails, or its lease ends, after it."""
    consumer(conn)
    send(conn)

    def saved() -> object:
        (message,) = receive(conn)
        return message.saved

    value(conn, "defer", claim_of(receive(conn)), None, seconds(0), '{"a": 1}')
    (message,) = receive(conn)
    value(conn, "nack", message.claim_id, None, seconds(0), "no such user")
    assert saved() == {"a": 1}
    clock.end_leases(conn)
    (message,) = receive(conn)
    assert (message.saved, message.deliver_count) == ({"a": 1}, 3)
    value(conn, "defer", message.claim_id)
    (message,) = receive(conn)
    assert (message.saved, message.deliver_count) == ({"a": 1}, 3)
    value(conn, "defer", message.claim_id, None, seconds(0), "[2]")
    (message,) = receive(conn)
    assert message.saved == [2]
    value(conn, "defer", message.claim_id, None, seconds(0), "null")
    assert saved() is None


def test_messages_that_are_put_off_together_keep_their_states_apart(conn: Conn) -> None:
    consumer(conn)
    sent = send_all(conn, ["x"] * 6)
    claims = {m.seq: m.claim_id for _ in range(6) for m in receive(conn, 1)}
    for seq, claim in claims.items():
        if seq != sent[2]:
            value(conn, "defer", claim, None, seconds(60), str(seq % 2))
    clock.end_delays(conn)
    found = {}
    while got := receive(conn, 100):
        found |= {m.seq: m.saved for m in got}
    assert found == {seq: seq % 2 for seq in sent if seq != sent[2]}
