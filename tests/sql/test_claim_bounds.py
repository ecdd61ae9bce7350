"""Claims cost what they touch, find what is there, and wait for nobody who waits for them."""

from __future__ import annotations

import statistics
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest

from spark_pgqueue.postgres import connection
from tests.sql import checker, clock, core, internals, limits
from tests.sql.cases import for_each
from tests.sql.cost import cost
from tests.sql.queue import *

pytestmark = pytest.mark.usefixtures("stream")


def claim(conn: Conn, n: int) -> int:
    """Claim at most n messages of c; returns how many it got."""
    rows = call(conn, "claim", "s", "c", n)
    return rows[0].message_count if rows else 0


def old_snapshot(session: Session) -> None:
    """A session that sees all rows that are deleted from now on."""
    old = session()
    old.execute("begin isolation level repeatable read")
    old.execute("select 1")


def costs_of_claims(conn: Conn, count: int, times: int) -> list[int]:
    """What so many claims of one, each acknowledged, cost together, so many times."""
    conn.execute(
        "create function pg_temp.work() returns void language plpgsql as $$ begin"
        f" for i in 1..{count} loop perform pgqueue.ack(claim_id)"
        " from pgqueue.claim('s', 'c', 1); end loop; end $$".encode()
    )
    return [cost(conn, "select pg_temp.work()") for _ in range(times)]


# Order


def test_keys_that_become_free_together_cost_each_the_same(conn: Conn, stream: int) -> None:
    """Thousands of keys that were set aside: one claim of all is no more than so many times one."""
    consumer(conn, ordering="key")
    internals.publish_together(conn, stream, 3000, "'k' || i")
    first = [call(conn, "claim", "s", "c", 250)[0].claim_id for _ in range(12)]
    internals.publish_together(conn, stream, 3000, "'k' || i")
    assert claim(conn, 10_000) == 0  # all of the others wait behind these
    for claim_id in first:
        value(conn, "ack", claim_id)
    few = cost(conn, "select * from pgqueue.claim('s', 'c', 100)")
    many = cost(conn, "select * from pgqueue.claim('s', 'c', 2000)")
    assert many <= few * 20 * 2
    checker.check(conn)


def test_a_claim_behind_a_hot_key_is_bounded_and_the_next_ones_find_what_is_there(
    conn: Conn, stream: int
) -> None:
    id_ = consumer(conn, ordering="key")
    limits.set_constant(conn, "limit_inspected", 2000)
    limits.set_constant(conn, "limit_assign", 800)
    internals.publish_together(conn, stream, 13_000, "'hot'")
    free = send_key(conn, "free")
    assert claim(conn, 1) == 1
    (row,) = call(conn, "reader_claim", uuid.uuid4(), id_, 0, 0, 10)
    assert row.claimed == 0
    assert row.next_due <= one(conn, "select clock_timestamp()"), "availableNow asks again"
    asked = 1
    while not (rows := call(conn, "receive", "s", "c", 1)):
        asked += 1
        waiting = sum(r.message_count for r in internals.bundles(conn) if r.state == "waiting")
        assert 0 < waiting <= asked * 6_100, "one claim looked at too much"
        assert asked < 10
    assert asked > 1
    assert seqs_of(rows) == [free]
    checker.check(conn)


def test_a_claim_behind_a_hot_key_of_single_messages_takes_a_bounded_part_of_them(
    conn: Conn, stream: int
) -> None:
    id_ = consumer(conn, ordering="key")
    for limit in ("limit_inspected", "limit_take"):
        limits.set_constant(conn, limit, 1000)
    internals.publish_singly(conn, stream, 6_000, "'hot'")
    free = send_key(conn, "free")
    assert claim(conn, 1) == 1
    (row,) = call(conn, "reader_claim", uuid.uuid4(), id_, 0, 0, 10)
    assert row.claimed == 0
    assert row.next_due <= one(conn, "select clock_timestamp()")
    assert sum(run.message_count for run in internals.bundles(conn)) <= 4_500
    got: list[int] = []
    for _ in range(8):
        got += seqs_of(call(conn, "receive", "s", "c", 1))
    assert got == [free]


def test_a_claim_that_takes_for_long_keeps_its_keys_when_an_older_lease_ends_meanwhile(
    conn: Conn,
) -> None:
    """A backlog of more than one take, and a lease that ends between two probes for leases."""
    consumer(conn, ordering="key")
    limits.set_constant(conn, "limit_take", 1000)
    send_key(conn, "old")
    old = claim_of(call(conn, "receive", "s", "c", 1))
    conn.execute(
        "select count(pgqueue.send('s', 'x', 'k' || i % 7)) from generate_series(1, 1050) i"
    )
    send_key(conn, "old")
    core.end_lease(conn, old)
    (first,) = call(conn, "claim", "s", "c", 1040)
    held = internals.held_by(conn, first.claim_id)
    of_keys = "select array_agg(key) from pgqueue.messages where seq = any(%s)"
    keys = set(one(conn, of_keys, held))
    rows = call(conn, "receive", "s", "c", 1000)
    assert keys.isdisjoint(row.key for row in rows)
    checker.check(conn)


def test_tokens_that_came_back_beside_an_old_snapshot_cost_nothing(
    conn: Conn, session: Session, stream: int
) -> None:
    """Each claim spends a token, and its return frees the key: rows that the snapshot sees."""
    consumer(conn, ordering="key", p_settings='{"per_key_interval": "1 us"}')
    internals.publish_together(conn, stream, 900, "'hot'")
    old_snapshot(session)
    costs = costs_of_claims(conn, 100, 8)
    assert max(costs[5:]) <= 1.15 * max(costs[3:5]), costs
    checker.check(conn)


def test_messages_that_are_gone_do_not_keep_a_claim_open(conn: Conn) -> None:
    """Assigning by key reads the messages; deleted ones have none, and are claimed too."""
    consumer(conn, ordering="key")
    send_keys(conn, "a", "b", "a", "c")
    conn.execute("delete from pgqueue.messages where seq in (2, 4)")
    rows = call(conn, "claim", "s", "c", 10)
    assert internals.held_by(conn, rows[0].claim_id) == [1, 2, 3, 4]
    last = send_key(conn, "a")
    assert call(conn, "claim", "s", "c", 10) == []  # the first claim has others of its key
    conn.execute("delete from pgqueue.messages where seq = 3")
    assert value(conn, "ack", rows[0].claim_id, [1]) == 1
    assert value(conn, "nack", rows[0].claim_id, [2]) == 1
    assert value(conn, "ack", rows[0].claim_id) == 2
    got: list[int] = []
    while other := call(conn, "claim", "s", "c", 10):
        got += internals.held_by(conn, other[0].claim_id)
        value(conn, "ack", other[0].claim_id)
    assert sorted(got) == [2, last]
    assert internals.claims(conn) == []


def test_a_key_that_waits_beside_an_old_snapshot_and_an_old_claim_costs_nothing(
    conn: Conn, session: Session, stream: int
) -> None:
    """Each claim leaves rows of assigned and waiting bundles that the snapshot sees."""
    consumer(conn, ordering="key")
    send_key(conn, "held meanwhile")
    internals.publish_together(conn, stream, 3000, "'hot'")
    old_snapshot(session)
    assert claim(conn, 1) == 1
    clock.pass_time(conn, seconds(2))
    costs = costs_of_claims(conn, 100, 8)
    assert max(costs[5:]) <= 1.15 * max(costs[3:5]), costs
    assert one(conn, "select backlog from pgqueue.consumer_stats") == 2200
    checker.check(conn)


def test_bundles_that_are_done_beside_an_old_snapshot_cost_nothing(
    conn: Conn, session: Session
) -> None:
    """Each claim is of an assigned bundle, whose rows the snapshot sees."""
    conn.execute(f"set application_name = '{'x' * 60}'".encode())  # which makes the rows longer
    consumer(conn, ordering="key")
    send_keys(conn, *map(str, range(3200)))
    old_snapshot(session)
    costs = costs_of_claims(conn, 500, 6)
    # (the median, for autovacuum may change a plan meanwhile)
    assert statistics.median(costs[2:]) <= 1.08 * costs[0], costs


# Sizes


def test_claims_of_an_odd_size_cut_runs_of_that_size(conn: Conn, stream: int) -> None:
    """What is left of a run is less than a claim wants: the next is cut by whole claims again."""
    consumer(conn)
    internals.publish_together(conn, stream, 1000)
    internals.publish_together(conn, stream, 20_000)
    for _ in range(12):
        rows = call(conn, "claim", "s", "c", 101)
        held = [run for run in internals.bundles(conn) if run.claim_id == rows[0].claim_id]
        assert sum(run.message_count for run in held) == 101
        assert len(held) <= 2
    sizes = sorted(run.message_count for run in internals.bundles(conn) if run.claim_id is None)
    assert sizes.count(101) >= len(sizes) - 4


def test_a_claim_takes_until_it_has_as_many_messages_as_it_wants(conn: Conn) -> None:
    """By messages, not by publications: ten in each."""
    consumer(conn)
    limits.set_constant(conn, "limit_take", 1000)
    conn.execute(
        "do $$ begin for i in 1..2050 loop"
        " perform pgqueue.send_batch('s', array_fill('x'::text, array[10])); end loop; end $$"
    )
    assert claim(conn, 9_000) == 9_000
    assert internals.cursor_of(conn).taken == internals.ids(1, 1_000)
    assert claim(conn, 11_000) == 11_000


def test_many_priorities_cost_a_claim_no_more_than_some(conn: Conn) -> None:
    consumer(conn)
    for priority in range(0, 4000, 200):
        value(conn, "send", "s", "x", p_priority=priority)
    few = cost(conn, "select * from pgqueue.claim('s', 'c', 1)")
    conn.execute(
        "select count(pgqueue.send('s', 'x', p_priority => i)) from generate_series(1, 4000) i"
    )
    call(conn, "claim", "s", "c", 1)
    written = one(conn, "select pg_column_size(k.*) from pgqueue.consumer_cursors k")
    many = cost(conn, "select * from pgqueue.claim('s', 'c', 1)")
    assert written < 6000
    assert many <= few * 1.6 + 15
    rows = call(conn, "receive", "s", "c", 5000)
    priorities = [row.priority for row in rows]
    assert priorities == sorted(priorities, reverse=True)
    checker.check(conn)


# Leases


def test_dead_claims_behind_an_old_snapshot_cost_an_empty_poll_nothing(
    conn: Conn, session: Session
) -> None:
    consumer(conn)
    poll = "select * from pgqueue.claim('s', 'c', 10)"
    conn.execute(poll)
    old_snapshot(session)
    few = cost(conn, poll)
    internals.add_ended_claims(conn, 20_000)
    end = 60 - one(conn, "select extract(second from clock_timestamp() - interval '2 s')")
    if end < 10:  # once a minute it looks from the beginning, by design
        time.sleep(float(end) + 0.1)
    conn.execute(poll)
    assert cost(conn, poll) <= few + 15
    send_key(conn)
    assert claim(conn, 1) == 1
    clock.end_leases(conn)
    assert claim(conn, 1) == 1


def test_a_lost_claim_is_claimed_back_without_reading_the_backlog(conn: Conn, stream: int) -> None:
    id_ = consumer(conn)
    internals.publish_together(conn, stream, 100)

    def resume() -> int:
        reader = uuid.uuid4()
        (row,) = call(conn, "reader_claim", reader, id_, 0, 0, 50)
        clock.end_leases(conn)
        got = call(conn, "claim", "s", "c", 1)
        value(conn, "nack", got[0].claim_id)
        blocks = cost(conn, "select * from pgqueue.reader_resume(%s, %s, 0, %s)",
                      reader, id_, row.claim_id)  # fmt: skip
        (row,) = call(conn, "reader_resume", reader, id_, 0, row.claim_id)
        assert row.planned == 50
        call(conn, "reader_claim", reader, id_, internals.last_claim(conn, "c"), 50, 1)
        return blocks

    few = resume()
    internals.add_ready(conn, 1_000_001, 1_030_000)
    assert resume() <= few * 1.6 + 30


def test_what_another_worker_returned_for_later_is_not_claimed_back(conn: Conn) -> None:
    id_, reader = consumer(conn), uuid.uuid4()
    send_keys(conn, None, None)
    (row,) = call(conn, "reader_claim", reader, id_, 0, 0)
    clock.end_leases(conn)
    rows = call(conn, "receive", "s", "c", 2)
    value(conn, "nack", claim_of(rows), [1], seconds(3600))
    value(conn, "nack", claim_of(rows), [2])
    (got,) = call(conn, "reader_resume", reader, id_, 0, row.claim_id)
    assert got.planned == 1
    assert internals.held_by(conn, row.claim_id) == [2]
    checker.check(conn)


def test_settling_a_part_reads_no_other_claims_whatever_the_statistics(conn: Conn) -> None:
    """Statistics of a small table, which has grown: the index of busy keys is not read whole."""
    consumer(conn, ordering="key")
    send_keys(conn, *(f"k{i}" for i in range(20)))
    for _ in range(2):
        call(conn, "claim", "s", "c", 2)
    conn.execute("analyze pgqueue.consumer_messages")

    def costs() -> list[int]:
        (row,) = call(conn, "claim", "s", "c", 2)
        seq = internals.held_by(conn, row.claim_id)[0]
        return [
            cost(conn, f"select pgqueue.nack({row.claim_id}, array[{seq}]::bigint[])"),
            cost(conn, f"select pgqueue.extend({row.claim_id})"),
        ]

    few = costs()
    internals.add_in_flight(conn, 30_000, keyed=True)
    conn.execute("select pg_stat_reset()")
    many = costs()
    for a, b in zip(few, many, strict=True):
        assert b <= a * 1.6 + 40, (few, many)


# Waiting


@for_each("ordering", ["none", "key", "stream"])
def test_who_acknowledges_and_waits_for_the_lock_holds_no_run_meanwhile(
    conn: Conn, session: Session, ordering: str
) -> None:
    """Or else who has the lock, and comes upon that run, would wait for one who waits for it."""
    id_ = consumer(conn, ordering=ordering, notify_done=True)  # takes with the lock
    send_key(conn)
    claim = claim_of(call(conn, "receive", "s", "c"))
    second = send_key(conn)
    holder, worker = session(), session()
    holder.execute("begin")
    internals.lock_consumer(holder, id_)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(call, worker, "receive", "s", "c", 1, None, claim)
        wait_for_a_lock(conn)
        with conn.transaction():
            conn.execute("set local lock_timeout = '1s'")
            internals.lock_messages(conn)
        assert internals.held_by(conn, claim), "nor is anything acknowledged yet"
        holder.execute("commit")
        assert seqs_of(waiting.result()) == [second]
    assert internals.held_by(conn, claim) == []
    assert one(conn, "select count(*) from pgqueue.open_claims") == 1


def test_pollers_do_not_queue_up_for_a_run_that_a_long_transaction_holds(
    url: str, conn: Conn, opened: Session
) -> None:
    consumer(conn)
    send_key(conn)
    send_key(conn)
    assert claim(conn, 1) == 1
    owner = opened()  # which needs no lock of the consumer
    assert len(call(owner, "receive", "s", "c", 1)) == 1

    def poll(_: int) -> int:
        with connection.connect(url) as mine:
            return len(call(mine, "receive", "s", "c", 1))

    began = time.monotonic()
    with ThreadPoolExecutor(20) as pool:
        assert sum(pool.map(poll, range(20))) == 0
    assert time.monotonic() - began < 3
    owner.execute("commit")


@for_each("ordering", ORDERINGS)
def test_two_who_settle_one_claim_beside_a_claimer_do_not_deadlock(
    conn: Conn, session: Session, ordering: str
) -> None:
    """The claim's lock comes before the consumer's for everybody."""
    first: dict[str, Callable[[Conn, int], object]] = {
        "ack": lambda mine, claim_id: value(mine, "ack", claim_id, [1]),
        "claim": lambda mine, claim_id: call(mine, "claim", "s", "claim", 1, None, claim_id),
        "nack": lambda mine, claim_id: value(mine, "nack", claim_id),
    }
    for _ in range(4):
        send_key(conn, "k")
    sessions = session(), session()
    for mine in sessions:
        mine.execute("set deadlock_timeout = '50ms'")
    for name, settle in first.items():
        id_ = consumer(conn, name, ordering)
        claim_id = claim_of(call(conn, "receive", "s", name, 2))
        with ThreadPoolExecutor(2) as pool, conn.transaction():
            internals.lock_consumer(conn, id_)
            settling = []
            for act, mine in zip((settle, first["nack"]), sessions, strict=True):
                settling.append(pool.submit(act, mine, claim_id))
                time.sleep(0.1)
        for each in settling:
            each.result(10)
        checker.check(conn)


@pytest.mark.promise("guarantee: A held consumer")
def test_who_holds_a_consumer_is_said_when_waiting_for_it_ends(
    conn: Conn, session: Session
) -> None:
    """Anybody who may connect can hold an advisory lock; nobody waits for it for ever."""
    consumer(conn, ordering="key")
    send_key(conn)
    conn.execute("alter function _pgqueue.await_lock(int, int, boolean) set lock_timeout = '100ms'")
    holder = session()
    holder.execute("set application_name = 'the one'")
    holder.execute("begin")
    internals.lock_consumer(holder, 1)
    with pytest.raises(psycopg.errors.LockNotAvailable, match=r"consumer 'c'.*the one"):
        internals.lock_consumer(conn, 1)
    assert call(conn, "claim", "s", "c", 1) == [], "a claim gets nothing"


# Statistics


def test_the_backlog_is_exact_where_sizes_of_publications_mix_and_within_1_percent_beyond(
    conn: Conn, stream: int
) -> None:
    consumer(conn)
    internals.publish_singly(conn, stream, 700)
    internals.publish_together(conn, stream, 30_000)
    internals.publish_singly(conn, stream, 700)
    backlog = "select backlog from pgqueue.consumer_stats"
    assert one(conn, backlog) == 31_400
    limits.set_constant(conn, "limit_shown", 500)
    assert abs(one(conn, backlog) - 31_400) < 314
    call(conn, "claim", "s", "c", 1)
    limits.set_constant(conn, "limit_shown", 3000)
    assert one(conn, backlog) == 31_399
