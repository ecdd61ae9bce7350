"""A call does a bounded part of what is due, and reads no more: others wait for its locks."""

from __future__ import annotations

from datetime import timedelta

import psutil
import psycopg
import pytest

from tests.sql import clock, internals, limits
from tests.sql.cases import for_each
from tests.sql.cost import cost
from tests.sql.queue import *

pytestmark = pytest.mark.usefixtures("stream")


def undone(conn: Conn, query: str) -> int:
    """The blocks that a statement reads, which is rolled back: for another one just like it."""
    found = 0
    for _ in range(2):
        with conn.transaction(force_rollback=True):
            found = cost(conn, query)
    return found


@for_each("function", ["redrive", "purge_dead"])
@pytest.mark.parametrize("analyzed", [True, False], ids=["analyzed", "new"])
def test_one_dead_letter_of_many_costs_as_one_of_few(
    conn: Conn, function: str, analyzed: bool
) -> None:
    consumer(conn)
    query = f"select pgqueue.{function}('s', 'c', p_max => 1)"
    internals.add_dead(conn, 10)
    few = undone(conn, query)
    internals.add_dead(conn, 20_000)
    if analyzed:
        conn.execute("analyze pgqueue.dead_messages")
    many = undone(conn, query)
    assert many <= few + 30, f"{few} blocks, and {many} beside 20,000 dead letters"


def test_the_first_dead_letters_are_redriven_also_where_sets_overlap(conn: Conn) -> None:
    consumer(conn)
    sent = send_all(conn, ["x"] * 9)
    rows = receive(conn)
    for seqs in ([sent[0], sent[8]], [sent[1], sent[5]], [sent[2]], sent[3:5]):
        value(conn, "dead_letter", rows[0].claim_id, seqs)
    value(conn, "ack", rows[0].claim_id)
    assert value(conn, "redrive", "s", "c", p_max=3) == 3
    assert acked(conn, "s", "c") == sent[:3]
    assert value(conn, "redrive", "s", "c", p_seqs=[sent[5], sent[8]], p_max=1) == 1
    assert acked(conn, "s", "c") == [sent[5]]


def test_a_claim_meets_a_due_schedule_among_many_for_the_cost_of_one(
    conn: Conn, stream: int
) -> None:
    consumer(conn)
    value(conn, "create_schedule", "s", "due", p_every=timedelta(hours=1), p_data="x")
    clock.pass_time(conn, timedelta(hours=2))
    claim = "select * from pgqueue.claim('s', 'c', 1)"
    few = undone(conn, claim)
    internals.add_schedules(conn, stream, 10_000)
    many = undone(conn, claim)
    assert many <= few + 30, f"{few} blocks, and {many} beside 10,000 schedules"
    assert len(call(conn, "receive", "s", "c")) == 1


@for_each("ordering", ["none", "key"])
def test_a_claim_filters_a_bounded_number_of_messages(
    conn: Conn, stream: int, ordering: str
) -> None:
    """Also where none passes; the next claims go on, and find the one at the end."""
    consumer(conn, ordering=ordering, p_topic="wanted")
    internals.publish_together(conn, stream, 100_000, "'k' || i % 7")
    last = send(conn, p_key="wanted")
    assert receive(conn, 1) == []
    left = one(conn, "select new from pgqueue.consumer_stats")
    assert left >= 40_000, f"a claim filtered {100_001 - left} messages under the consumer's lock"
    calls = 1
    while not (rows := receive(conn, 1)):
        calls += 1
        assert calls < 9
        assert value(conn, "next_due", "s", "c") is not None, "nobody asks again"
    assert [row.seq for row in rows] == [last]


def test_a_claim_by_key_deals_messages_with_times_of_their_own_in_a_moment(conn: Conn) -> None:
    """In seconds of the server's processor: a loaded machine takes longer, but not more of it."""
    consumer(conn, ordering="key")
    conn.execute(
        "select count(pgqueue.send('s', 'x', 'k' || i, p_deliver_at =>"
        " now() + make_interval(hours => 1, secs => i * 0.001))) from generate_series(1, 12500) i"
    )
    try:
        backend = psutil.Process(conn.info.backend_pid)
    except (psutil.Error, psycopg.Error):
        pytest.skip("the server is not on this machine")
    before = sum(backend.cpu_times()[:2])
    assert receive(conn, 100) == []
    assert sum(backend.cpu_times()[:2]) - before < 1.2


def test_a_pass_of_a_claim_gives_up_a_bounded_number_of_bundles(conn: Conn) -> None:
    """Each was sent alone and expires at a time of its own, so they are bundles of their own."""
    consumer(conn)
    limits.set_constant(conn, "limit_due", 3)
    expiries = [now(conn) + timedelta(minutes=i + 1) for i in range(20)]
    sent = [send(conn, p_expires_at=expiry) for expiry in expiries]
    clock.pass_time(conn, timedelta(hours=1))
    assert receive(conn, 1) == []
    assert [states(conn)[seq] for seq in sent].count("dead") == 6, "a claim has two passes"
