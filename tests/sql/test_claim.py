"""Claiming: what a claim takes, what it passes over, and whom it waits for."""

from __future__ import annotations

import time
from typing import Any

import pytest

from spark_pgqueue.postgres import connection
from tests.sql import clock, internals
from tests.sql.cases import for_each
from tests.sql.queue import *

pytestmark = pytest.mark.usefixtures("stream", "allowed_afterwards")


def test_claim_answers_what_it_took_or_no_row(conn: Conn) -> None:
    consumer(conn)
    assert call(conn, "claim", "s", "c") == []
    send_all(conn, ["x"] * 5)
    assert [r.message_count for r in call(conn, "claim", "s", "c")] == [1], "one by default"
    (row,) = call(conn, "claim", "s", "c", 10)
    assert row.message_count == 4
    assert value(conn, "ack", row.claim_id) == 4


@for_each("ordering", ORDERINGS)
def test_a_claim_acknowledges_the_one_before_it(conn: Conn, ordering: str) -> None:
    for function in ("claim", "receive"):
        consumer(conn, function, ordering)
    sent = send_all(conn, ["x"] * 5, p_keys=["k"] * 5)
    for function in ("claim", "receive"):

        def claimed(c: str = function) -> int:
            return list(states(conn, c).values()).count("claimed")

        def again(claim: int, c: str = function) -> list[Any]:
            return call(conn, c, "s", c, 2, p_ack=claim)

        claim = claim_of(receive(conn, 2, function))
        with conn.transaction(force_rollback=True):
            assert again(claim) != []
        assert claimed() == 2
        claim = claim_of(again(claim))
        assert sorted(states(conn, function)) == sent[2:], "so their key is free"
        assert claimed() == 2
        claim = claim_of(again(claim))
        assert again(claim) == []
        assert states(conn, function) == {}


def test_a_claim_goes_on_when_the_one_before_it_is_not_live_and_warns(conn: Conn) -> None:
    consumer(conn)
    send_all(conn, ["x"] * 2)
    warnings: list[str] = []
    conn.add_notice_handler(lambda notice: warnings.append(str(notice.message_primary)))
    assert len(call(conn, "claim", "s", "c", p_ack=10**15)) == 1
    (warning,) = warnings
    assert f"claim {10**15} is not live" in warning


@for_each("how", ["published late", "due"])
def test_what_comes_before_a_backlog_does_not_wait_for_its_end(
    conn: Conn, session: Session, how: str
) -> None:
    """Each claim looks for what is due; for what is late, those of each 10 ms."""
    consumer(conn)
    late = session()
    if how == "published late":
        late.execute("begin")
        urgent = send(late, p_priority=9)
    else:
        urgent = send(conn, p_priority=9, p_deliver_at=now(conn) + seconds(60))
    sent = send_all(conn, ["x"] * 5)
    assert [claim_one(conn), claim_one(conn)] == sent[:2]
    if how == "published late":
        late.execute("commit")
        time.sleep(0.02)
    else:
        clock.end_delay(conn, urgent)
    assert [claim_one(conn), claim_one(conn)] == [urgent, sent[2]]


def test_a_claim_does_not_wait_long_for_what_an_open_transaction_holds(
    conn: Conn, url: str
) -> None:
    consumer(conn)
    send(conn)
    value(conn, "nack", claim_of(receive(conn, 1)))  # a run that is ready, and taken before
    conn.execute("set statement_timeout = '10 s'")
    with connection.connect(url) as other, other.transaction():
        internals.lock_messages(other)
        began = time.monotonic()
        assert receive(conn, 1) == []
        assert time.monotonic() - began < 0.9, "less than deadlock_timeout"
    assert len(receive(conn, 1)) == 1


LEAVES = {
    "ack": lambda conn, claim, seqs: value(conn, "ack", claim, seqs),
    "dead_letter": lambda conn, claim, seqs: value(conn, "dead_letter", claim, seqs),
    "nack": lambda conn, claim, seqs: value(conn, "nack", claim, seqs),
    "cancel": lambda conn, claim, seqs: value(conn, "cancel", "s", "c", seqs),
}
"""What takes messages out of a claim for good: a nack after the last delivery, too."""


@pytest.mark.parametrize("settings", [{"ordering": "key"}, {"per_key_limit": 1}], ids=str)
@pytest.mark.parametrize("apart", [False, True], ids=["in one bundle", "in two bundles"])
@pytest.mark.parametrize("how", LEAVES)
def test_a_key_that_is_done_goes_on_while_the_claim_has_other_keys(
    conn: Conn, how: str, apart: bool, settings: dict[str, Any]
) -> None:
    """Also if the first bundle of the claim is empty: it stays until the others are done."""
    consumer(conn, max_deliver_count=1, **settings)
    first = send(conn, p_key="a")
    if apart:  # messages that were delivered before are not in a bundle with others
        value(conn, "defer", claim_of(receive(conn)))
    other = send(conn, p_key="b")
    assert seqs_of(rows := receive(conn)) == [first, other]
    later = send(conn, p_key="a")
    assert receive(conn) == []
    assert LEAVES[how](conn, claim_of(rows), [first]) == 1
    assert seqs_of(receive(conn)) == [later]
    assert value(conn, "ack", claim_of(rows)) == 1
