"""Settling a claim or a part of it: ack, nack, dead_letter, and claims that are over."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from spark_pgqueue.postgres import connection
from tests.sql.queue import (
    ORDERINGS,
    Conn,
    acked,
    claim_of,
    consumer,
    receive,
    seconds,
    send,
    send_all,
    states,
    stats,
    value,
    wait_for_a_lock,
)

pytestmark = [pytest.mark.small_limits, pytest.mark.usefixtures("stream", "allowed_afterwards")]


def test_a_part_of_a_claim_is_settled_and_what_it_does_not_hold_is_passed_over(conn: Conn) -> None:
    consumer(conn)
    sent = send_all(conn, ["x"] * 6)
    claim = claim_of(receive(conn, 5))
    assert value(conn, "ack", claim, [sent[0], sent[0], sent[5], 10**12, -1]) == 1
    assert value(conn, "ack", claim, [sent[0]]) == 0
    assert value(conn, "ack", claim, []) == 0
    assert value(conn, "nack", claim, [sent[1], sent[5]]) == 1
    assert value(conn, "dead_letter", claim, [sent[2], sent[5]]) == 1
    assert value(conn, "extend", claim) == 2
    assert value(conn, "ack", claim) == 2
    assert list(states(conn).values()) == ["ready", "dead", "ready"]


def test_work_and_acknowledgement_commit_together(conn: Conn) -> None:
    consumer(conn)
    send(conn)
    got = receive(conn)
    with conn.transaction(force_rollback=True):
        assert value(conn, "ack", claim_of(got)) == 1
    assert stats(conn).claimed == 1
    assert value(conn, "ack", claim_of(got)) == 1


@pytest.mark.parametrize("ordering", ORDERINGS)
def test_parts_of_a_claim_that_are_settled_at_once_are_all_counted(
    conn: Conn, url: str, ordering: str
) -> None:
    consumer(conn, ordering=ordering)
    sent = send_all(conn, ["x"] * 4, p_keys=["k"] * 4)
    claim = claim_of(receive(conn))
    with connection.connect(url) as other, ThreadPoolExecutor(1) as pool:
        with conn.transaction():
            assert value(conn, "ack", claim, sent[:1]) == 1
            second = pool.submit(value, other, "ack", claim, sent[1:3])
            wait_for_a_lock(conn)
        assert second.result() == 2
    assert value(conn, "extend", claim) == 1


@pytest.mark.parametrize("ordering", ["none", "key"])
def test_who_settles_a_claim_beside_another_session_has_what_that_one_leaves(
    conn: Conn, url: str, ordering: str
) -> None:
    consumer(conn, ordering=ordering)
    with connection.connect(url) as other, ThreadPoolExecutor(1) as pool:
        for how in ("ack", "nack", "defer", "dead_letter"):
            sent = send_all(conn, ["x"] * 4, p_keys=["k"] * 4)
            claim = claim_of(receive(conn))
            assert value(conn, "dead_letter", claim, sent[:1]) == 1  # by its owner, in part
            with conn.transaction():
                assert value(conn, "ack", claim, sent[1:2]) == 1
                second = pool.submit(value, other, how, claim)
                wait_for_a_lock(conn)
            assert second.result() == 2, how
            assert acked(conn, "s", "c") == (sent[2:] if how in ("nack", "defer") else []), how
    assert stats(conn).dead == 6


@pytest.mark.parametrize("why", ["settled", "taken over", "unknown", "null", "dropped"])
@pytest.mark.parametrize("ordering", ["none", "key"])
def test_a_claim_that_is_not_live_changes_nothing_answers_0_and_warns(
    conn: Conn, why: str, ordering: str
) -> None:
    consumer(conn, ordering=ordering, visibility_timeout=seconds(0.01))
    seq = send(conn)
    (first,) = receive(conn)
    claim: int | None = first.claim_id
    if why == "settled":
        value(conn, "ack", claim)
    elif why == "taken over":
        time.sleep(0.05)
        receive(conn, p_visibility_timeout=seconds(60))
    elif why == "dropped":
        value(conn, "drop_consumer", "s", "c")
    else:
        claim = 10**15 if why == "unknown" else None
    before = states(conn)
    warnings: list[str] = []
    conn.add_notice_handler(lambda notice: warnings.append(str(notice.message_primary)))
    for settle in ("ack", "nack", "extend", "dead_letter"):
        assert value(conn, settle, claim) == 0
    for settle in ("ack", "nack", "dead_letter"):
        assert value(conn, settle, claim, [seq]) == 0
    assert len(warnings) == 7
    shown = "null" if claim is None else claim
    assert all(f"claim {shown} is not live" in text for text in warnings)
    assert states(conn) == before
