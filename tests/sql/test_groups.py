"""Groups: partitions of the keys, leased by workers, and worked off once, in order."""

from __future__ import annotations

import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from psycopg.types.json import Jsonb

from tests.sql import clock, internals
from tests.sql.queue import *

pytestmark = pytest.mark.usefixtures("allowed_afterwards")


@pytest.fixture
def group(conn: Conn, stream: int) -> int:
    """The group g of the stream s, with four partitions, from the first message on."""
    return value(conn, "create_group", "s", "g", 4, "earliest")


def lease(conn: Conn, worker: str, **options: Any) -> dict[int, Any]:
    """The partitions of a worker."""
    rows = call(conn, "lease_partitions", "s", "g", worker, **options)
    return {row.partition: row for row in rows}


def ids(leases: dict[int, Any]) -> list[int]:
    return [row.lease_id for row in leases.values()]


def read(conn: Conn, leases: dict[int, Any] | list[int], size: int = 1000) -> list[Any]:
    wanted = leases if isinstance(leases, list) else ids(leases)
    return call(conn, "read_partitions", "s", "g", wanted, size)


def seqs(rows: list[Any]) -> list[int]:
    return [row.seq for row in rows if row.seq is not None]


def ends(rows: list[Any]) -> dict[int, list[int]]:
    """By lease, the offset to commit when all is done."""
    return {row.lease_id: row.next_offset for row in rows if row.seq is None}


def commit(conn: Conn, rows: list[Any]) -> None:
    for lease_id, offset in ends(rows).items():
        value(conn, "commit_offset", lease_id, offset)


def work_off(conn: Conn, leases: Any, size: int = 1000) -> list[int]:
    """Everything that there is."""
    got = []
    while rows := read(conn, leases, size):
        got += seqs(rows)
        commit(conn, rows)
    return got


def test_one_worker_gets_everything_in_order(conn: Conn, group: int) -> None:
    sent = [*send_keys(conn, "a", "b", None, "a", "c"), send_key(conn, "b")]
    assert value(conn, "create_group", "s", "g", 4, p_if_not_exists=True) == group
    leases = lease(conn, "w")
    assert list(leases) == [0, 1, 2, 3]
    assert work_off(conn, leases, 4) == sent
    assert read(conn, leases) == []
    assert stats(conn, "g").backlog == 0
    late = send(conn)
    assert work_off(conn, leases) == [late]


@pytest.mark.parametrize("partitions", [4, 8])
def test_a_group_that_another_session_is_creating_is_used(
    conn: Conn, stream: int, session: Session, opened: Session, partitions: int
) -> None:
    """If it has as many partitions: two processes of an application start at once."""
    first = opened()
    made = value(first, "create_group", "s", "g", 4)
    other = session()
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(
            value, other, "create_group", "s", "g", partitions, p_if_not_exists=True
        )
        wait_for_a_lock(conn)
        first.execute("commit")
        if partitions == 4:
            assert found.result() == made
        else:
            with raises("PQ006", "with 4 partitions, not 8", column="p_partitions"):
                found.result()


def test_a_key_is_always_in_the_same_partition(conn: Conn, group: int) -> None:
    keys = [f"key {i % 20}" for i in range(100)]
    send_keys(conn, *keys)
    leases = lease(conn, "w")
    partition: dict[str, set[int]] = defaultdict(set)
    for row in read(conn, leases):
        if row.seq is not None:
            assert row.lease_id == leases[row.partition].lease_id
            partition[row.key].add(row.partition)
    assert len(partition) == 20
    assert all(len(each) == 1 for each in partition.values())
    assert len(set.union(*partition.values())) == 4


def test_each_message_can_be_committed_by_itself(conn: Conn, group: int) -> None:
    """Its partition goes on behind it; the others are not touched, and come first."""
    sent = send_keys(conn, *"abcdefgh")
    leases = lease(conn, "w")
    rows = [row for row in read(conn, leases) if row.seq is not None]
    done = rows[3]
    value(conn, "commit_offset", done.lease_id, done.next_offset)
    before = {r.seq for r in rows[:4] if r.partition == done.partition}
    assert sorted(work_off(conn, leases)) == sorted(set(sent) - before)


def test_late_commits_and_messages_for_others(conn: Conn, group: int, opened: Session) -> None:
    consumer(conn)
    slow = opened()
    late = send_key(slow, "a")
    early = send_key(conn, "a")
    send(conn, p_consumers=["c"])
    mine = send(conn, p_consumers=["g"])
    leases = lease(conn, "w")
    assert work_off(conn, leases) == [early, mine]
    slow.execute("commit")
    assert work_off(conn, leases) == [late]


def test_workers_share_partitions_and_move_them_when_one_comes_or_goes(
    conn: Conn, group: int
) -> None:
    first = lease(conn, "w1")
    assert not any(row.to_release for row in first.values())
    assert lease(conn, "w2") == {}
    first = lease(conn, "w1")
    assert [row.to_release for row in first.values()] == [False, False, True, True]
    value(conn, "commit_offset", first[3].lease_id, None, True)
    assert list(lease(conn, "w2")) == [3]
    value(conn, "commit_offset", first[2].lease_id, None, True)
    assert list(lease(conn, "w2")) == [2, 3]
    assert not any(row.to_release for row in lease(conn, "w1").values())
    lease(conn, "w3")
    counts = [sum(not r.to_release for r in lease(conn, w).values()) for w in ("w1", "w2", "w3")]
    assert counts == [2, 1, 0]
    for row in lease(conn, "w2").values():
        if row.to_release:
            value(conn, "commit_offset", row.lease_id, None, True)
    assert len(lease(conn, "w3")) == 1
    value(conn, "leave_group", "s", "g", "w1")
    assert [len(lease(conn, w)) for w in ("w2", "w3")] == [2, 2]


def test_more_workers_than_partitions(conn: Conn, group: int) -> None:
    held = [lease(conn, f"w{i}") for i in range(6)]
    for row in held[0].values():
        value(conn, "commit_offset", row.lease_id, None, True)
    assert sorted(len(lease(conn, f"w{i}")) for i in range(6)) == [0, 0, 1, 1, 1, 1]


def test_a_worker_that_sleeps_too_long_is_fenced(conn: Conn, group: int) -> None:
    """Its partitions go on with another one from what it had committed."""
    sent = send_keys(conn, *"abcd")
    rows = read(conn, lease(conn, "w1"))
    clock.end_worker_lease(conn, "w1")
    second = lease(conn, "w2")
    assert len(second) == 4
    conn.execute("begin")
    with raises("PQ012", "has been lost: another worker may have its partition"):
        commit(conn, rows)
    conn.execute("rollback")
    assert read(conn, list(ends(rows))) == []
    assert work_off(conn, second) == sent


def test_partitions_that_are_taken_over_during_a_read_are_not_read_with_the_other_lease(
    conn: Conn, group: int, session: Session
) -> None:
    mine = lease(conn, "one")
    clock.end_worker_lease(conn, "one")
    sent = send_keys(conn, "a", "b", "c", "d", "e")
    locks, other = session(), session()
    with ThreadPoolExecutor(2) as pool:
        with locks.transaction():
            internals.lock_consumer(locks, group)
            read_late = pool.submit(read, conn, mine)  # it tries to take the new messages
            time.sleep(0.02)
            taken_over = pool.submit(lease, other, "two")
            wait_for_a_lock(locks)
        theirs, rows = taken_over.result(20), read_late.result(20)
    assert {row.lease_id for row in rows}.isdisjoint(ids(theirs))
    assert set(seqs(rows)).isdisjoint(seqs(read(other, theirs)))
    assert sorted([*seqs(rows), *work_off(other, theirs)]) == sent


def test_a_worker_that_is_back_before_it_was_needed_keeps_its_partitions(
    conn: Conn, group: int
) -> None:
    first = lease(conn, "w1")
    clock.end_worker_lease(conn, "w1")
    assert ids(lease(conn, "w1")) == ids(first)
    send(conn)
    rows = read(conn, first)
    clock.end_worker_lease(conn, "w1")
    commit(conn, rows)


@pytest.mark.parametrize("how", ["sleeps", "leaves"])
def test_a_partition_that_is_being_committed_stays_with_its_worker(
    conn: Conn, group: int, session: Session, how: str
) -> None:
    """Nobody waits for the commit."""
    conn.execute("set lock_timeout = '5 s'")
    sent = send_keys(conn, *"abcdefgh")
    one_ = session()
    rows = read(one_, lease(one_, "w1"))
    one_.execute("begin")
    (first, *_) = ends(rows).items()
    value(one_, "commit_offset", *first)
    if how == "sleeps":
        clock.end_worker_lease(conn, "w1")
    else:
        value(conn, "leave_group", "s", "g", "w1")
    second = lease(conn, "w2")
    assert len(second) == 3
    one_.execute("commit")
    second = lease(conn, "w2")
    assert len(second) == 4
    done = {r.seq for r in rows if r.lease_id == first[0] and r.seq is not None}
    assert sorted(work_off(conn, second)) == sorted(set(sent) - done)


def test_a_commit_waits_for_a_worker_that_takes_over_and_then_fails(
    conn: Conn, group: int, session: Session, opened: Session
) -> None:
    send(conn)
    rows = read(conn, lease(conn, "w1"))
    clock.end_worker_lease(conn, "w1")
    other = opened()
    lease(other, "w2")
    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(commit, conn, rows)
        wait_for_a_lock(session())
        other.execute("commit")
        with raises("PQ012"):
            late.result()


def test_what_all_partitions_have_passed_is_deleted(conn: Conn, group: int) -> None:
    leases = lease(conn, "w1")
    for _ in range(5):
        send_keys(conn, *"abcdefgh")
        work_off(conn, leases)
    assert internals.count(conn, "consumer_messages") <= 1
    assert internals.count(conn, "group_partitions") == 4
    send(conn)
    read(conn, leases)
    assert internals.count(conn, "consumer_messages") == 1


def test_workers_that_are_woken_up_together_all_find_what_one_of_them_takes(
    conn: Conn, group: int, session: Session
) -> None:
    """Nobody notifies them of it: who found nothing would wait for a second."""
    leases = lease(conn, "w1")
    mine, others = ids(leases)[:2], ids(leases)[2:]
    sent = send_keys(conn, *"abcdefgh")
    conn.execute("begin")
    first = read(conn, mine)
    other, watch = session(), session()
    sleeping = "select count(*) from pg_stat_activity where wait_event = 'PgSleep'"
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(read, other, others)
        while one(watch, sleeping) == 0:
            assert not found.done()
        conn.execute("commit")
        assert sorted(seqs(first) + seqs(found.result())) == sent


def test_no_number_that_was_not_assigned_is_stored(conn: Conn, group: int, stream: int) -> None:
    """recover() moves the sequences beyond those that it finds."""
    send_keys(conn, "a")
    leases = lease(conn, "w")
    read(conn, leases)
    for number in (2, 2**63 - 1):
        with raises("PQ003", "which read_partitions has not returned"):
            value(conn, "commit_offset", ids(leases)[0], [1, number])
    with raises("PQ003", "must be a number of begin_write()"):
        stage(conn, stream, 1, p_write_no=2**62)
    given = value(conn, "begin_write")
    with raises("PQ003", "must be a number of begin_write()"):
        stage(conn, stream, 1, p_write_no=given + 1)
    stage(conn, stream, 1, p_write_no=given)


def test_what_is_no_offset_of_a_partition_is_refused(conn: Conn, group: int) -> None:
    leases = lease(conn, "w")
    for offset, said in [
        ([1], "pair of numbers"),
        ([1, None], "pair of numbers"),
        ([0, 0], "already committed up to"),
        ([99, 1], "has not returned"),
    ]:
        with raises("PQ003", said, column="p_offset"):
            call(conn, "commit_offset", leases[0].lease_id, offset)


def test_two_processes_with_the_same_lease_do_not_both_commit(conn: Conn, group: int) -> None:
    send_keys(conn, *"abcd")
    leases = lease(conn, "w")
    both = read(conn, leases), read(conn, leases)
    commit(conn, both[0])
    with pytest.raises(psycopg.DatabaseError, match="is already committed up to"):
        commit(conn, both[1])


def test_a_group_is_moved_while_it_works(conn: Conn, group: int) -> None:
    """Workers go on from there; what they read before they may still commit."""
    sent = send_keys(conn, *"abcdefgh")
    leases = lease(conn, "w")
    rows = read(conn, leases, 3)
    value(conn, "seek", "s", "g", f"seq {sent[5]}")
    commit(conn, rows)
    assert work_off(conn, leases) == sent[5:]
    value(conn, "seek", "s", "g", "earliest")
    assert work_off(conn, leases, 3) == sent
    send(conn)
    value(conn, "seek", "s", "g", "latest")
    assert work_off(conn, leases) == []
    with pytest.raises(psycopg.DatabaseError, match="cannot replay messages"):
        value(conn, "replay", "s", "g", "earliest")


def test_how_far_behind_each_partition_is(conn: Conn, group: int) -> None:
    def behind() -> list[tuple[str, int]]:
        stats = b"select worker, behind from pgqueue.group_stats order by partition"
        return conn.execute(stats).fetchall()

    send_keys(conn, *"abcdefgh")
    assert behind() == [(None, 8)] * 4
    leases = lease(conn, "w")
    commit(conn, read(conn, leases, 5))
    assert behind() == [("w", 3)] * 4
    send(conn)
    assert behind() == [("w", 4)] * 4
    work_off(conn, leases)
    assert behind() == [("w", 0)] * 4


def test_dropping_leaves_nothing(conn: Conn, group: int) -> None:
    send(conn)
    rows = read(conn, lease(conn, "w"))
    value(conn, "drop_consumer", "s", "g")
    assert internals.count(conn, "group_partitions") == 0
    assert internals.count(conn, "group_workers") == 0
    with pytest.raises(psycopg.DatabaseError, match="another worker"):
        commit(conn, rows)
    with pytest.raises(psycopg.DatabaseError, match="unknown group 'g'"):
        lease(conn, "w")


def test_a_reader_that_keeps_its_offset_is_seen_as_a_group(conn: Conn, stream: int) -> None:
    """It is counted on for ten minutes after it has noted its offset."""

    def behind() -> int:
        return one(conn, "select behind from pgqueue.group_stats where \"group\" = 'reader'")

    def health() -> tuple[str, bool]:
        """Its status, and whether it is known since when it is attended."""
        sql = "select status, attended_at is not null from pgqueue.consumer_health"
        return internals.rows(conn, sql)[0]

    value(conn, "create_group", "s", "reader", 1, "earliest")
    send_all(conn, list("abcde"))
    assert behind() == 5
    assert health() == ("unattended", False)
    offset = Jsonb(value(conn, "start_offset", "s"))
    for read, left in ((3, 2), (5, 0), (5, 0), (1, 4)):
        value(conn, "note_offset", "s", "reader", Jsonb(value(conn, "read_to", "s", offset, read)))
        assert behind() == left
        assert health() == ("ok", True)
    clock.pass_time(conn, timedelta(minutes=12))
    assert health() == ("unattended", True)


def test_a_group_with_workers_is_not_moved_by_a_reader(conn: Conn, stream: int) -> None:
    value(conn, "create_group", "s", "one", 1, "earliest")
    value(conn, "create_group", "s", "two", 2, "earliest")
    sent = send_all(conn, list("abcde"))
    offset = Jsonb(value(conn, "start_offset", "s", "latest"))

    def refused(group: str, said: str) -> None:
        with raises("PQ006", said):
            value(conn, "note_offset", "s", group, offset)

    refused("two", "it has 2 partitions")
    (leased,) = call(conn, "lease_partitions", "s", "one", "somebody", p_lease="1 s")
    clock.pass_time(conn, timedelta(minutes=1))
    refused("one", "it has a worker, 'somebody'")
    rows = call(conn, "read_partitions", "s", "one", [leased.lease_id], 2)
    value(conn, "commit_offset", leased.lease_id, rows[-1].next_offset)
    value(conn, "leave_group", "s", "one", "somebody")
    refused("one", "it has had workers")
    (leased,) = call(conn, "lease_partitions", "s", "one", "another")
    assert seqs(call(conn, "read_partitions", "s", "one", [leased.lease_id])) == sent[2:]
