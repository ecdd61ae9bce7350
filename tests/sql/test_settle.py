"""Settling a claim or a part of it: ack, nack, dead_letter."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from spark_pgqueue.postgres import connection
from tests.sql.queue import *

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


@pytest.mark.parametrize("low", [-1, 0, 1, 2])
def test_numbers_come_in_an_array_with_any_lower_bound(conn: Conn, low: int) -> None:
    """Of one number too, which is the usual part of a claim."""
    consumer(conn)
    sent = send_all(conn, ["x"] * 4)
    claim = claim_of(receive(conn))
    for settle, some in [("ack", sent[1:2]), ("dead_letter", sent[2:])]:
        array = f"[{low}:{low + len(some) - 1}]={{{','.join(map(str, some))}}}"
        assert one(conn, f"select pgqueue.{settle}(%s, %s::bigint[])", claim, array) == len(some)
    assert states(conn) == {sent[0]: "claimed", sent[2]: "dead", sent[3]: "dead"}


def test_to_extend_a_claim_counts_its_messages_in_all_bundles(conn: Conn) -> None:
    """Those that were delivered before are in a bundle of their own."""
    consumer(conn)
    sent = send_all(conn, ["x"] * 5)
    assert value(conn, "nack", claim_of(receive(conn, 2))) == 2
    claim = claim_of(rows := receive(conn))
    assert sorted(seqs_of(rows)) == sent
    assert value(conn, "extend", claim) == 5
    assert value(conn, "ack", claim, sent[1:4]) == 3
    assert value(conn, "extend", claim, seconds(5)) == 2


@pytest.mark.promise("guarantee: At least once, or exactly once")
def test_work_and_acknowledgement_commit_together(conn: Conn) -> None:
    consumer(conn)
    send(conn)
    got = receive(conn)
    with conn.transaction(force_rollback=True):
        assert value(conn, "ack", claim_of(got)) == 1
    assert stats(conn).claimed == 1
    assert value(conn, "ack", claim_of(got)) == 1


@pytest.mark.parametrize("ordering", ORDERINGS)
def test_who_settles_a_claim_beside_another_session_has_what_that_one_leaves(
    conn: Conn, url: str, ordering: str
) -> None:
    """All of it, or a part."""
    consumer(conn, ordering=ordering)
    with connection.connect(url) as other, ThreadPoolExecutor(1) as pool:
        for how, part in (
            *(("ack", True), ("ack", False), ("nack", False), ("defer", False)),
            ("dead_letter", False),
        ):
            sent = send_all(conn, ["x"] * 4, p_keys=["k"] * 4)
            claim = claim_of(receive(conn))
            assert value(conn, "dead_letter", claim, sent[:1]) == 1  # by its owner, in part
            with conn.transaction():
                assert value(conn, "ack", claim, sent[1:2]) == 1
                second = pool.submit(value, other, how, claim, sent[2:3] if part else None)
                wait_for_a_lock(conn)
            assert second.result() == (1 if part else 2), how
            assert value(conn, "ack", claim) == (1 if part else 0)
            assert acked(conn, "s", "c") == (sent[2:] if how in ("nack", "defer") else []), how
    assert stats(conn).dead == 7


SETTLING = {
    "ack": "pgqueue.ack({claim})",
    "ack of all, by number": "pgqueue.ack({claim}, '{seqs}')",
    "nack": "pgqueue.nack({claim})",
    "nack by number": "pgqueue.nack({claim}, '{seqs}')",
    "defer": "pgqueue.defer({claim})",
    "dead_letter": "pgqueue.dead_letter({claim})",
}


@pytest.mark.all_versions
@pytest.mark.parametrize("call", SETTLING)
def test_a_claim_is_settled_whole_though_a_session_writes_one_of_its_bundles(
    conn: Conn, url: str, call: str
) -> None:
    """As one does that assigns messages, and reads the keys of a bundle that has lost some. The
    bundle has another place in the table then.
    """
    consumer(conn, **AT_ONCE)
    sent = send_all(conn, ["x"] * 6)
    assert value(conn, "nack", claim_of(receive(conn, 2))) == 2
    claim = claim_of(rows := receive(conn, 6))
    assert sorted(seqs_of(rows)) == sent
    members = "bundle_no in (select unnest(members) from pgqueue.consumer_messages)"
    assert one(conn, f"select count(*) from pgqueue.consumer_messages where {members}") > 0
    statement = "select " + SETTLING[call].format(claim=claim, seqs=set(sent))
    with (
        connection.connect(url, autocommit=False) as other,
        connection.connect(url) as settler,
        ThreadPoolExecutor(1) as threads,
    ):
        other.execute(f"update pgqueue.consumer_messages set shrunk = shrunk where {members}")
        settled = threads.submit(one, settler, statement)
        wait_for_a_lock(conn)
        other.commit()
        assert settled.result(20) == 6
    held = one(conn, "select count(*) from pgqueue.consumer_messages where token is not null")
    assert held == 0
