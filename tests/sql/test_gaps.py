"""Gaps in what was taken: found whenever their producer commits, closed when it cannot any more.

Who may still fill a gap is told by the publish lock, so nothing that does not publish matters.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import psycopg
import pytest

from spark_pgqueue.postgres import connection
from tests.conftest import Server
from tests.sql import checker, clock, internals, limits
from tests.sql.cases import for_each
from tests.sql.cost import cost as buffers
from tests.sql.internals import cursor_of, ids
from tests.sql.queue import *
from tests.sql.queue import cursor_consumer as consumer

CLAIM_AND_ACK = "select pgqueue.ack(claim_id) from pgqueue.claim('s', 'c', 10)"
PUBLISHERS = "select pg_get_functiondef('_pgqueue.publishers(int)'::regprocedure)"


def idle_with_an_id(opened: Session) -> Conn:
    """A transaction that has an id, publishes nothing, and stays open."""
    conn = opened()
    conn.execute("select pg_current_xact_id()")
    return conn


@for_each("ordering", ORDERINGS)
def test_a_gap_is_closed_beside_a_transaction_that_publishes_nothing(
    conn: Conn, opened: Session, stream: int, ordering: str
) -> None:
    consumer(conn, ordering=ordering)
    idle_with_an_id(opened)
    got = []
    for _ in range(20):
        dead_publication(conn)
        send_key(conn)
        got += acked(conn, "s", "c")
    assert got == list(range(2, 41, 2))
    assert not cursor_of(conn).gaps
    assert cursor_of(conn).taken == ids(1, 40)


def test_a_claim_costs_the_same_beside_30000_rollbacks_and_an_old_transaction(
    conn: Conn, opened: Session, stream: int
) -> None:
    """6. By buffers, as nothing is left of the gaps once the rollbacks were seen."""
    consumer(conn)
    idle_with_an_id(opened)

    def cycle() -> int:
        send_key(conn)
        cost = buffers(conn, "select pgqueue.claim('s', 'c', 10)")
        acked(conn, "s", "c")
        value(conn, "ack", internals.last_claim(conn, "c"))
        return cost

    few = max(cycle() for _ in range(3))
    conn.execute(
        "do $$ begin for i in 1..30000 loop begin perform pgqueue.send('s', 'x');"
        " raise exception using errcode = 'P0009'; exception when sqlstate 'P0009' then null;"
        " end; end loop; end $$"
    )
    for _ in range(3):
        cycle()
    assert min(cycle() for _ in range(3)) <= few + 10
    assert not cursor_of(conn).gaps


@pytest.mark.parametrize("ordering", [pytest.param("none", marks=pytest.mark.longer), "key"])
def test_a_gap_of_many_pieces_beside_an_open_producer_costs_nothing_until_it_ends(
    conn: Conn, opened: Session, stream: int, ordering: str
) -> None:
    """Its ids alternate with those of others: claims neither look into it nor write it anew."""
    consumer(conn, ordering=ordering)
    late = opened()

    def cycle() -> tuple[int, int]:
        before = wal(conn)
        first = send_key(late, "late")
        sent = send_key(conn)
        cost = buffers(conn, "select pgqueue.claim('s', 'c', 10)")
        value(conn, "ack", internals.last_claim(conn, "c"))
        mine.append(first)
        assert sent
        return cost, wal(conn) - before

    mine: list[int] = []
    for _ in range(30):
        cycle()
    few = [cycle() for _ in range(20)]
    for _ in range(200):
        mine.append(send_key(late, "late"))
        send_key(conn)
        conn.execute(CLAIM_AND_ACK)
    many = [cycle() for _ in range(20)]
    assert cursor_of(conn).rows <= 40
    # the middle of each: now and then small gaps are merged
    assert sorted(m[0] for m in many)[10] <= sorted(f[0] for f in few)[10] * 1.5 + 20
    assert sorted(m[1] for m in many)[10] <= sorted(f[1] for f in few)[10] * 2 + 4000
    late.execute("commit")
    assert acked(conn, "s", "c") == mine
    assert acked(conn, "s", "c") == []
    assert not cursor_of(conn).gaps
    checker.check(conn)


def wal(conn: Conn) -> int:
    return int(one(conn, "select pg_current_wal_insert_lsn() - '0/0'"))


def test_a_transaction_of_20000_sends_is_walked_over_once(
    conn: Conn, opened: Session, stream: int
) -> None:
    """What is published and not visible yet costs a poll nothing, with nothing behind it."""
    consumer(conn)
    poll = "select pgqueue.claim('s', 'c', 10)"
    conn.execute(poll)
    few = buffers(conn, poll)
    late = opened()
    late.execute("select count(pgqueue.send('s', 'x')) from generate_series(1, 20000)")
    for _ in range(3):
        conn.execute(poll)
    assert buffers(conn, poll) <= few + 30
    after = send_key(conn)
    assert acked(conn, "s", "c") == [after]
    late.execute("commit")
    assert len(acked(conn, "s", "c", 30000)) == 20000
    assert not cursor_of(conn).gaps


@for_each("ordering", ["none", "key"])
def test_a_gap_of_two_producers_is_found_when_the_first_commits(
    conn: Conn, session: Session, stream: int, ordering: str
) -> None:
    consumer(conn, ordering=ordering)
    early, two = session(), session()
    for late in (early, two):
        late.execute("begin")
    first, second, third = send_key(early, "1"), send_key(two, "2"), send_key(early, "1")
    last = send_key(conn)
    for _ in range(3):
        assert acked(conn, "s", "c") in ([last], [])
    two.execute("commit")
    assert acked(conn, "s", "c") == [second]
    for _ in range(3):
        assert acked(conn, "s", "c") == []
    early.execute("commit")
    assert acked(conn, "s", "c") == [first, third]
    acked(conn, "s", "c")
    assert cursor_of(conn).taken == ids(1, 4)


def test_a_consumer_made_beside_an_open_producer_gets_what_it_commits(
    conn: Conn, opened: Session, stream: int
) -> None:
    """Latest: what is visible now is skipped, and nothing else."""
    late = opened()
    first = send_key(late)
    send_key(conn)
    consumer(conn, p_start="latest")
    assert acked(conn, "s", "c") == []
    late.execute("commit")
    assert acked(conn, "s", "c") == [first]


def test_a_gap_of_a_killed_producer_is_closed(conn: Conn, stream: int) -> None:
    consumer(conn)
    with connection.connect(conn.info.dsn) as late:
        late.execute("begin")
        send_key(late)
        last = send_key(conn)
        assert acked(conn, "s", "c") == [last]
        conn.execute("select pg_terminate_backend(%s)", [late.info.backend_pid])
        with pytest.raises(psycopg.Error):
            late.execute("select 1")
    end = time.monotonic() + 10
    while cursor_of(conn).gaps and time.monotonic() < end:
        assert acked(conn, "s", "c") == []
    assert cursor_of(conn).taken == ids(1, 2)


def prepare(conn: Conn, name: str) -> list[int]:
    """Two messages of a prepared transaction (notifications cannot be part of one)."""
    conn.execute("begin")
    sent = [send_key(conn), send_key(conn)]
    conn.execute(f"prepare transaction '{name}'".encode())
    return sent


@pytest.mark.parametrize("restart", ["", "immediate"])
def test_a_gap_of_a_prepared_transaction_stays_open_also_across_a_restart(
    own_server: Server, url: str, restart: str
) -> None:
    ends = ("commit", "rollback")
    names = {end: f"gap_{restart}_{end}" for end in ends}
    with connection.connect(url) as conn, connection.connect(url) as late:
        value(conn, "create_stream", "s", p_settings='{"notify": false}')
        consumer(conn)
        sent = {end: prepare(late, names[end]) for end in ends}
        last = send_key(conn)
        assert acked(conn, "s", "c") == [last]
        assert acked(conn, "s", "c") == []
        call(conn, "maintain")
        conn.execute("checkpoint")
    if restart:
        own_server.restart(restart)
    with connection.connect(url) as conn:
        call(conn, "maintain")
        if restart:
            call(conn, "recover")  # it was there before
        consumer(conn, "latest", p_start="latest")
        for _ in range(3):
            assert acked(conn, "s", "c") == []
        other = send_key(conn)
        assert acked(conn, "s", "c") == [other]
        assert cursor_of(conn).gaps == ids(1, 4)
        for end in reversed(ends):
            conn.execute(f"{end} prepared '{names[end]}'".encode())
            assert acked(conn, "s", "c") == (sent[end] if end == "commit" else [])
        assert sorted(acked(conn, "s", "latest")) == [*sent["commit"], other]
        acked(conn, "s", "c")
        assert cursor_of(conn).taken == ids(1, 6)


def test_what_a_prepared_transaction_staged_is_kept_across_a_restart(
    own_server: Server, url: str
) -> None:
    with connection.connect(url) as conn, connection.connect(url) as other:
        stream = value(conn, "create_stream", "s", p_settings='{"notify": false}')
        value(conn, "set_retention", "s", p_for=timedelta(hours=7))
        maintain(conn)
        send_key(conn)
        other.execute("begin")
        block = stage(other, stream, 2)
        other.execute("prepare transaction 'staged'")
        clock.pass_time(conn, timedelta(hours=1))
        maintain(conn)
        conn.execute("checkpoint")
    own_server.restart("fast")
    with connection.connect(url) as conn:
        clock.pass_time(conn, timedelta(hours=14))
        maintain(conn)
        conn.execute("commit prepared 'staged'")
        maintain(conn)
        publish(conn, stream, [block], 2)
        assert len([row for row in call(conn, "read", "s") if row.key is None]) == 2


def test_after_a_crash_gaps_are_closed(own_server: Server, url: str) -> None:
    """Producers died with the server; the virtual ids of theirs may be given out again."""
    late = connection.connect(url)
    with connection.connect(url) as conn:
        value(conn, "create_stream", "s")
        consumer(conn)
        late.execute("begin")
        send_key(late)
        last = send_key(conn)
        assert acked(conn, "s", "c") == [last]
        conn.execute("checkpoint")
    own_server.restart("immediate")
    late.close()
    with connection.connect(url) as conn:
        sent = send_key(conn)
        assert sent in acked(conn, "s", "c")
        acked(conn, "s", "c")
        assert not cursor_of(conn).gaps


@pytest.mark.usefixtures("allowed_afterwards")
def test_gaps_are_merged_only_when_what_was_found_has_left_them(
    conn: Conn, session: Session, stream: int
) -> None:
    """2. Two producers end right after a look: their gaps come to wait for the same ones."""
    limits.set_constant(conn, "limit_gaps", 2)
    consumer(conn)
    first, second, third, fourth = (session() for _ in range(4))
    for late in (first, second, third, fourth):
        late.execute("begin")
    got: list[int] = []
    for lates in ([first, second], [third]):
        for late in lates:
            send_key(late)
        send_key(conn)
        got += acked(conn, "s", "c")
    send_key(fourth)
    last = send_key(conn)

    # asked for the second time who publishes, which is after the look, it waits here
    conn.execute("create sequence asked; select pg_advisory_lock(1)")
    publishers = one(conn, PUBLISHERS)
    wait = "begin if nextval('public.asked') = 2 then perform pg_advisory_xact_lock(1); end if;\n"
    slow = publishers.replace("begin\n", wait, 1).replace(" STABLE", " VOLATILE", 1)
    assert slow.count(wait) == slow.count("VOLATILE") == 1
    conn.execute(slow.encode())
    with ThreadPoolExecutor(1) as pool:
        taker = session()
        taking = pool.submit(acked, taker, "s", "c", 10)
        wait_for_a_lock(conn)
        second.execute("commit")
        fourth.execute("commit")
        conn.execute("select pg_advisory_unlock(1)")
        got += taking.result()
    conn.execute(publishers.encode())
    for late in (first, third):
        got += acked(conn, "s", "c")
        late.execute("commit")
    got += acked(conn, "s", "c")
    assert sorted(got) == list(range(1, last + 1))
    acked(conn, "s", "c")
    assert not cursor_of(conn).gaps


@pytest.mark.parametrize("ordering", ["key", "stream"])
@pytest.mark.promise("guarantee: Overlapping transactions")
def test_a_producer_that_commits_and_goes_on_during_a_take_keeps_its_order(
    conn: Conn, session: Session, opened: Session, stream: int, ordering: str
) -> None:
    """Which gaps are looked into is told after the snapshot that sees what is beyond them."""
    consumer(conn, ordering=ordering)
    late = opened()
    first = send_key(late)
    other = send_key(conn, "other")
    assert acked(conn, "s", "c") == [other]
    assert acked(conn, "s", "c") == []
    # The window between asking who publishes and looking, as wide as a test needs.
    slow = one(conn, PUBLISHERS).replace("publishers", "publishers_now", 1)
    conn.execute(slow.encode())
    conn.execute(
        "create or replace function _pgqueue.publishers(p_stream_id int) returns text[]"
        " language plpgsql stable as $$ declare v text[] := _pgqueue.publishers_now(p_stream_id);"
        " begin perform pg_sleep(0.4); return v; end $$"
    )
    with ThreadPoolExecutor(1) as pool:
        taken = pool.submit(receive, session(), 10)
        time.sleep(0.2)
        late.execute("commit")
        second = send_key(late)
        assert seqs_of(taken.result()) == [first, second]


# What else a restart leaves as it was


def test_the_rate_and_the_limit_hold_over_a_restart(own_server: Server, url: str) -> None:
    with connection.connect(url) as conn:
        value(conn, "create_stream", "s")
        consumer(conn, p_settings='{"per_key_interval": "30 s", "per_key_burst": 2}')
        consumer(conn, "l", per_key_limit=2, visibility_timeout=seconds(60))
        seqs = send_keys(conn, *"aaab")
        assert sorted(acked(conn, "s", "c", 10)) == [*seqs[:2], seqs[3]]
        held = receive(conn, 10, "l")
        conn.execute("checkpoint")
    own_server.restart("immediate")
    with connection.connect(url) as conn:
        assert receive(conn, 10) == []
        assert receive(conn, 10, "l") == []
        value(conn, "ack", claim_of(held))
        assert seqs_of(receive(conn, 10, "l")) == [seqs[2]]
        checker.check(conn)
