"""Messages that are given up: after max_deliver_count deliveries, or by hand."""

from __future__ import annotations

import time

import pytest
from psycopg.types.json import Jsonb

from tests.sql import internals
from tests.sql.queue import (
    ORDERINGS,
    TAKEN_OVER,
    Conn,
    acked,
    claim_of,
    consumer,
    receive,
    seconds,
    send,
    send_all,
    state,
    states,
    stats,
    value,
)

pytestmark = [
    pytest.mark.small_limits,
    pytest.mark.usefixtures("stream", "allowed_afterwards"),
]


@pytest.mark.parametrize("ordering", ORDERINGS)
@pytest.mark.parametrize("how", ["nack", "expiry"])
def test_a_message_that_failed_too_often_is_dead_lettered(
    conn: Conn, ordering: str, how: str
) -> None:
    consumer(conn, ordering=ordering, p_max_deliver_count=2)
    poison = send(conn, "poison", p_key="k", p_priority=7)
    for attempt in (1, 2):
        (row,) = receive(conn, p_visibility_timeout=seconds(0.05 if how == "expiry" else 30))
        assert row.deliver_count == attempt
        if how == "nack":
            value(conn, "nack", row.claim_id, p_reason=f"failure {attempt}")
        else:
            time.sleep(0.06)
    healthy = send(conn, "healthy", p_key="k")
    assert acked(conn, "s", "c") == [healthy]
    assert states(conn) == {poison: "dead"}
    (dead,) = internals.dead_letters(conn)
    assert (dead.message_count, dead.priority, dead.deliver_count) == (1, 7, 2)
    assert dead.reason == "max deliveries"
    assert dead.note["error"] == ("failure 2" if how == "nack" else TAKEN_OVER)


@pytest.mark.parametrize("ordering", ORDERINGS)
def test_a_message_is_dead_lettered_by_hand_with_its_reason(conn: Conn, ordering: str) -> None:
    consumer(conn, ordering=ordering)
    sent = send_all(conn, ["x", "y", "z"], p_keys=["k", "k", "l"])
    claim = claim_of(receive(conn))
    details = {"line": 7}
    assert value(conn, "dead_letter", claim, [sent[0]], "not json", Jsonb(details)) == 1
    (dead,) = internals.dead_letters(conn)
    assert (dead.reason, dead.details, dead.claim_id) == ("not json", details, claim)
    assert state(conn, sent[0]).last_error == "not json"
    assert value(conn, "dead_letter", claim) == 2
    assert receive(conn) == []
    assert stats(conn).dead == 3
    assert stats(conn).claims == 0


def test_a_dead_message_lets_those_behind_it_pass(conn: Conn) -> None:
    consumer(conn, "k", ordering="key")
    consumer(conn, "s", ordering="stream")
    sent = send_all(conn, ["x"] * 3, p_keys=["k"] * 3)
    for name in "ks":
        value(conn, "dead_letter", claim_of(receive(conn, 1, name)))
        assert acked(conn, "s", name) == sent[1:]


@pytest.mark.parametrize("ordering", ["key", "stream"])
def test_a_message_that_failed_too_often_takes_no_later_one_back(conn: Conn, ordering: str) -> None:
    consumer(conn, ordering=ordering, p_max_deliver_count=1)
    sent = send_all(conn, ["x"] * 3, p_keys=["k"] * 3)
    claim = claim_of(receive(conn))
    assert value(conn, "nack", claim, sent[:1]) == 1
    assert list(states(conn).values()) == ["dead", "claimed", "claimed"]
    assert value(conn, "ack", claim) == 2
