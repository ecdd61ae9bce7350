"""Capacity of a key: how many messages of it a consumer may be not done with."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest

from tests.sql import checker, clock, internals
from tests.sql.cases import for_each
from tests.sql.cost import cost
from tests.sql.queue import *

pytestmark = pytest.mark.usefixtures("stream", "allowed_afterwards")


def capped(conn: Conn, most: int, ordering: str = "none", name: str = "c", **options: Any) -> int:
    """A consumer that may be not done with so many messages of a key; its id."""
    return consumer(conn, name, ordering, per_key_capacity=most, **options)


def rejected(conn: Conn, *keys: str | None, **options: Any) -> psycopg.Error:
    """Sends messages of these keys together, which are rejected, and change nothing."""
    tables = ("publications", "messages", "key_backlog")
    before = [internals.count(conn, table) for table in tables]
    with raises("PQ013") as error:
        send_all(conn, ["x"] * len(keys), p_keys=list(keys), **options)
    assert [internals.count(conn, table) for table in tables] == before
    return error.value


def sent(conn: Conn, *keys: str | None, **options: Any) -> list[int] | None:
    """Sends messages of these keys together; their numbers, or None when they are rejected."""
    try:
        return send_all(conn, ["x"] * len(keys), p_keys=list(keys), **options)
    except psycopg.errors.DatabaseError as error:
        if error.sqlstate != "PQ013":
            raise
        return None


def room(conn: Conn, key: str = "k") -> int:
    """How many messages of a key can be sent, told by sending them and taking that back."""
    conn.execute("begin")
    conn.execute("savepoint one")
    count = 0
    while count < 20 and sent(conn, key):
        conn.execute("release one; savepoint one")
        count += 1
    conn.execute("rollback")
    return count


def kill(conn: Conn, other: Conn) -> None:
    """Ends another session, with what it has open."""
    one(conn, "select pg_terminate_backend(%s, 10000)", other.info.backend_pid)
    other.close()


@for_each("ordering", ORDERINGS)
@pytest.mark.promise("feature: capacity of a key")
def test_a_key_at_its_capacity_takes_no_more_until_one_is_done(conn: Conn, ordering: str) -> None:
    """However few of them are before it: what is claimed, or waits, counts as well."""
    capped(conn, 3, ordering)
    first, *_ = send_keys(conn, "a", "b", "a", None, None, None, None)
    error = rejected(conn, "b", "a", "a", None)
    assert error.diag.message_primary == (
        "cannot send 2 messages with key 'a' to stream 's': consumer 'c' has 2 unfinished,"
        f" the first with seq {first}, and per_key_capacity is 3"
    )
    assert "Nothing was sent" in str(error.diag.message_hint)
    send_keys(conn, "a", "b", "b")
    rows = receive(conn, 1)
    assert seqs_of(rows) == [first]
    for key in ("a", "b"):
        rejected(conn, key)
    value(conn, "ack", claim_of(rows))
    assert (room(conn, "a"), room(conn, "b"), room(conn, "c")) == (1, 0, 3)
    send_keys(conn, "a", None)
    rejected(conn, "a")
    assert len(acked(conn, "s", "c")) == 11
    assert room(conn, "a") == 3
    assert internals.count(conn, "key_backlog") == 0, "acknowledged, and so forgotten"


@for_each("ordering", ORDERINGS)
@pytest.mark.promise("feature: unique while another one waits or runs")
def test_with_a_capacity_of_1_a_message_is_the_only_one_while_it_waits_or_runs(
    conn: Conn, ordering: str
) -> None:
    """New, delayed, claimed, failed: another one with its key is not sent until it is done."""
    capped(conn, 1, ordering)
    due = now(conn) + seconds(3600)
    seq = send(conn, p_key="job", p_deliver_at=due)
    assert f"the first with seq {seq}," in str(rejected(conn, "job"))
    assert receive(conn) == []
    rejected(conn, "job")
    clock.pass_time(conn, seconds(3700))
    rows = receive(conn)
    rejected(conn, "job")
    value(conn, "nack", claim_of(rows), p_delay=seconds(3600))
    rejected(conn, "job")
    clock.pass_time(conn, seconds(3700))
    receive(conn, p_visibility_timeout=seconds(0.001))
    time.sleep(0.01)
    rejected(conn, "job")
    rows = receive(conn)
    assert seqs_of(rows) == [seq]
    value(conn, "ack", claim_of(rows))
    again = send(conn, p_key="job")
    assert f"first with seq {again}," in str(rejected(conn, "job"))
    with pytest.raises(psycopg.Error, match="has 0 unfinished, and per_key_capacity is 1"):
        send_keys(conn, "other", "other")


def leave(conn: Conn, how: str, stream: int, ordering: str) -> None:
    """All messages of the consumer c leave it, in one way."""
    if how == "sought":
        value(conn, "seek", "s", "c", "latest")
        return
    if how == "cancelled":
        claim = claim_of(receive(conn, 2))
        seqs = sorted(states(conn))
        assert value(conn, "cancel", "s", "c", seqs) == len(seqs)
        assert value(conn, "ack", claim) == 0
        return
    if how == "remade":
        value(conn, "drop_consumer", "s", "c")
        capped(conn, 2, ordering, p_start="latest")
        return
    if how == "trimmed":
        value(conn, "set_retention", "s", p_for=seconds(1), p_unread="drop")
        maintain(conn)
        clock.pass_time(conn, seconds(3600))
        for _ in range(3):
            send(conn)
            maintain(conn)
            clock.pass_time(conn, seconds(3600))
        return
    if how == "expired":
        clock.pass_time(conn, seconds(100))
        while receive(conn):
            pass
        return
    while rows := receive(conn, 3):
        claim = claim_of(rows)
        if how == "acked":
            value(conn, "ack", claim)
        elif how == "acked singly":
            for seq in seqs_of(rows):
                value(conn, "ack", claim, [seq])
        elif how == "dead":
            value(conn, "dead_letter", claim)
        elif how == "failed":
            value(conn, "nack", claim, seqs_of(rows))


WAYS = ["acked", "failed", "cancelled", "acked singly", "dead", "expired", "sought", "remade",
        "trimmed"]  # fmt: skip


@for_each("ordering", ["none", "key"])
@for_each("how", WAYS)
def test_however_a_message_leaves_its_key_has_room_again(
    conn: Conn, stream: int, how: str, ordering: str
) -> None:
    """And maintain() forgets what nobody asks for."""
    capped(conn, 2, ordering, max_deliver_count=1)
    send_all(
        conn, ["x"] * 6, p_keys=["k", "l", "k", "l", None, "m"],
        p_expires_at=now(conn) + seconds(50) if how == "expired" else None,
    )  # fmt: skip
    assert [room(conn, k) for k in "klm"] == [0, 0, 1]
    leave(conn, how, stream, ordering)
    left = {k: v for k, v in states(conn).items() if v != "dead"}
    assert len(left) <= 3, "what was sent so that segments are closed"
    assert [room(conn, k) for k in "klm"] == [2, 2, 2]
    maintain(conn)
    assert internals.count(conn, "key_backlog") == 0
    send_keys(conn, "k", "k")
    rejected(conn, "k")


def test_what_comes_back_counts_again(conn: Conn) -> None:
    """By redrive, seek and replay."""
    capped(conn, 3)
    seqs = send_keys(conn, "k", "k", None)
    value(conn, "dead_letter", claim_of(receive(conn)))
    assert room(conn) == 3
    assert value(conn, "redrive", "s", "c", [seqs[0]]) == 1
    assert room(conn) == 2
    value(conn, "ack", claim_of(receive(conn)))
    assert value(conn, "replay", "s", "c", "earliest") == 1
    assert room(conn) == 2
    receive(conn)
    assert room(conn) == 2
    value(conn, "purge_dead", "s", "c")
    value(conn, "seek", "s", "c", "earliest")
    assert room(conn) == 1
    assert len(acked(conn, "s", "c")) == 3
    assert room(conn) == 3
    value(conn, "seek", "s", "c", f"seq {seqs[1]}")
    assert room(conn) == 2


@for_each("ordering", ORDERINGS)
def test_what_a_consumer_has_when_it_is_limited_counts(conn: Conn, ordering: str) -> None:
    consumer(conn, ordering=ordering)
    send_keys(conn, "k", None, "l")
    claim = claim_of(receive(conn, 1))
    send_keys(conn, "k", "m", "k")
    alter(conn, per_key_capacity=4)
    assert [room(conn, k) for k in "klmn"] == [1, 3, 3, 4]
    alter(conn, per_key_capacity=2)
    rejected(conn, "k")
    assert [room(conn, k) for k in "klmn"] == [0, 1, 1, 2]
    value(conn, "ack", claim)
    rejected(conn, "k")
    alter(conn, per_key_capacity=None)
    assert internals.count(conn, "key_backlog") == 0
    assert not one(conn, "select keys_limited from pgqueue.streams")
    send_keys(conn, *"kkkkk")
    capped(conn, 2, name="late", p_start="earliest")
    rejected(conn, "k")
    rejected(conn, "m", "m", p_consumers=["late"])
    send_keys(conn, "m")
    value(conn, "drop_consumer", "s", "late")
    assert not one(conn, "select keys_limited from pgqueue.streams")
    send_keys(conn, *"kkkmmmm")


def test_each_consumer_has_its_own_capacity_of_what_it_gets(conn: Conn) -> None:
    """A message for others, or that a filter does not pass, takes no room."""
    capped(conn, 2)
    capped(conn, 1, name="urgent", p_where='$.headers.urgent == "yes"')
    consumer(conn, "other")
    send_all(conn, ["x"] * 3, p_keys=["k"] * 3, p_consumers=["other"])
    urgent = {"p_headers": ['{"urgent": "yes"}']}
    send_keys(conn, "k")
    assert "'urgent'" in str(rejected(conn, "l", "l", p_headers=['{"urgent": "yes"}'] * 2))
    send_all(conn, ["x"], p_keys=["k"], **urgent)
    assert "consumer 'c'" in str(rejected(conn, "k"))
    assert "consumer 'urgent'" in str(rejected(conn, "k", p_consumers=["urgent"], **urgent))
    send_all(conn, ["x"], p_keys=["k"], p_consumers=["urgent", "other"])
    assert len(acked(conn, "s", "urgent")) == 1
    send_all(conn, ["x"], p_keys=["k"], p_consumers=["urgent"], **urgent)


@pytest.mark.small_limits
def test_what_a_filter_has_not_judged_yet_counts_if_it_passes(conn: Conn) -> None:
    capped(conn, 2, p_where='$.key != "x"')
    *_, last = send_keys(conn, *"xaxbxcxdxd")
    receive(conn, 1)
    assert states(conn)[last] in ("unfiltered", "ready")
    rejected(conn, "d")
    assert [room(conn, k) for k in "cdx"] == [1, 0, 20]


def by_copy(conn: Conn, stream: int, keys: list[str]) -> None:
    """Publishes messages that were written with COPY."""
    with conn.transaction():
        seqs = internals.insert_messages(conn, stream, len(keys), f"(array{keys})[i]")
        value(conn, "publish_written", "s", f"{{[{seqs[0]},{seqs[-1]}]}}")


def by_sink(conn: Conn, stream: int, keys: list[str]) -> None:
    """Publishes messages as Spark's sink does: each key by a task."""
    batch = one(conn, "select count(*) from pgqueue.sink_batches")
    blocks = []
    for key in keys:
        with conn.transaction():
            (seq,) = internals.insert_messages(conn, stream, 1, f"'{key}'")
            blocks.append(value(conn, "stage", "sink", batch, stream, f"{{[{seq},{seq}]}}"))
    publish(conn, stream, blocks, len(keys), batch)


def by_capture(conn: Conn, stream: int, keys: list[str]) -> None:
    """Rows that are written to a table."""
    conn.execute("insert into t select unnest(%s::text[])", [keys])


def by_copies(conn: Conn, stream: int, keys: list[str]) -> None:
    """Messages of another stream that are bound to this one."""
    call(conn, "send_batch", "source", ["x"] * len(keys), keys)


@for_each("publish_keys", [by_copy, by_sink, by_capture, by_copies])
def test_all_that_sends_is_limited(
    conn: Conn, stream: int, publish_keys: Callable[[Conn, int, list[str]], None]
) -> None:
    value(conn, "create_stream", "source")
    value(conn, "bind", "source", "#", "s")
    conn.execute("create table if not exists t (k text)")
    call(conn, "capture", "t", "s", ["k"])
    try:
        capped(conn, 2)
        publish_keys(conn, stream, ["a", "b"])
        with raises("PQ013", "has 1 unfinished"):
            publish_keys(conn, stream, ["a", "c", "a"])
        assert [room(conn, k) for k in "abc"] == [1, 1, 2]
        publish_keys(conn, stream, ["a", "c"])
        assert [room(conn, k) for k in "abc"] == [0, 1, 1]
        assert len(acked(conn, "s", "c")) == 4
        publish_keys(conn, stream, ["a", "a"])
    finally:
        value(conn, "release", "t", "s")
        conn.execute("drop table t")


def test_a_spark_query_makes_room(conn: Conn) -> None:
    reader = Reader(conn, capped(conn, 2))
    send_keys(conn, "k", "k")
    end = reader.ask()
    rejected(conn, "k")
    reader.move(end)
    reader.ask()
    assert room(conn) == 2


def test_what_is_rolled_back_takes_no_room(conn: Conn, session: Session, opened: Session) -> None:
    """Nor what a killed session had open; and one transaction counts what it sent itself."""
    capped(conn, 2)
    with conn.transaction():
        send_keys(conn, "k")
        with conn.transaction(force_rollback=True):
            send_keys(conn, "k")
        send_keys(conn, "k")
        with pytest.raises(psycopg.Error, match="has 2 unfinished"), conn.transaction():
            send_keys(conn, "k")
    other = opened()
    value(other, "send", "s", "x", p_key="l")
    kill(conn, other)
    assert (room(conn), room(conn, "l")) == (0, 2)


def test_a_producer_with_an_old_snapshot_judges_by_it_and_forgets_nothing(
    conn: Conn, session: Session
) -> None:
    capped(conn, 1)
    send_keys(conn, "k", "l")
    other = session()
    other.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
    with other.transaction():
        one(other, "select count(*) from pgqueue.streams")
        value(conn, "dead_letter", claim_of(receive(conn)))
        with pytest.raises(psycopg.Error, match="has 1 unfinished"), other.transaction():
            value(other, "send", "s", "x", p_key="k")
    with other.transaction():
        value(other, "send", "s", "x", p_key="k")
    assert internals.count(conn, "key_backlog") == 3
    assert (room(conn), room(conn, "l")) == (0, 1)


def test_no_producer_waits_for_one_that_found_the_same_key_free(
    conn: Conn, session: Session
) -> None:
    """Both delete the entry of the message that is gone, and each would wait for the other."""
    capped(conn, 1)
    send_keys(conn, "k")
    value(conn, "dead_letter", claim_of(receive(conn)))
    other = session()
    for mine in (conn, other):
        mine.execute("begin")
        mine.execute("set local lock_timeout = '1ms'")
        value(mine, "send", "s", "x", p_key="k")
    maintain(conn, 1)
    for mine in (conn, other):
        mine.execute("commit")
    assert internals.count(conn, "key_backlog") == 2, "one more than allowed: they raced"
    rejected(conn, "k")
    value(conn, "drop_consumer", "s", "c")


@for_each("ending", ["commit", "rollback"])
def test_what_comes_back_while_a_producer_takes_it_for_gone_counts_again(
    conn: Conn, opened: Session, ending: str
) -> None:
    """The producer made room by the dead message's entry, and is open while that is redriven."""
    capped(conn, 1)
    [dead] = send_keys(conn, "k")
    value(conn, "dead_letter", claim_of(receive(conn)))
    late = opened()
    new = send_keys(late, "k")
    assert value(conn, "redrive", "s", "c") == 1
    late.execute(ending.encode())
    if ending == "commit":
        rows = receive(conn)
        assert seqs_of(rows) == [dead, *new]
        value(conn, "ack", claim_of(rows), new)
    maintain(conn)
    assert room(conn) == 0
    rejected(conn, "k")


def test_what_came_back_since_a_producer_looked_stays_entered(conn: Conn) -> None:
    """The producer finds that the message is dead; it is redriven before the entry is deleted."""
    capped(conn, 1)
    [dead] = send_keys(conn, "k")
    value(conn, "dead_letter", claim_of(receive(conn)))
    value(conn, "redrive", "s", "c")
    internals.delete_entries_of(conn, "c", "k", [dead])
    assert room(conn) == 0


def test_what_comes_back_while_its_entry_is_deleted_is_entered_again(
    conn: Conn, session: Session
) -> None:
    capped(conn, 1)
    [dead] = send_keys(conn, "k")
    value(conn, "dead_letter", claim_of(receive(conn)))
    producer = session()
    with producer.transaction():
        internals.delete_entries_of(producer, "c", "k", [dead])
        assert value(conn, "redrive", "s", "c") == 1
    assert room(conn) == 0


@for_each("created", [False, True])
def test_what_an_open_producer_sent_before_a_capacity_was_set_counts(
    conn: Conn, session: Session, created: bool
) -> None:
    if not created:
        consumer(conn)
    early, late = session(), session()
    for producer in (early, late):
        producer.execute("begin")
        send_keys(producer, "k")
    if created:
        capped(conn, 2)
    else:
        alter(conn, per_key_capacity=2)
    early.execute("commit")
    maintain(conn, 1)
    assert room(conn) == 1
    late.execute("commit")
    maintain(conn, 1)
    assert room(conn) == 0
    acked(conn, "s", "c")
    maintain(conn)
    assert room(conn) == 2
    assert internals.count(conn, "new_capacities") == 0
    assert internals.count(conn, "key_backlog") == 0


def test_what_an_old_snapshot_sends_after_a_capacity_was_set_counts(
    conn: Conn, session: Session
) -> None:
    consumer(conn)
    old = session()
    old.execute("begin transaction isolation level repeatable read")
    old.execute("select count(*) from pgqueue.consumers")
    alter(conn, per_key_capacity=1)
    for _ in range(3):
        maintain(conn, 1)
    send_keys(old, "k")
    old.execute("commit")
    maintain(conn, 1)
    assert room(conn) == 0


@for_each("how", ["seek", "replay", "redrive", "prepared replay"])
def test_what_comes_back_while_a_capacity_is_set_counts(
    conn: Conn, opened: Session, how: str
) -> None:
    """The call that brings it back began when the consumer had no capacity."""
    consumer(conn)
    send_keys(conn, "k")
    value(conn, "dead_letter" if how == "redrive" else "ack", claim_of(receive(conn)))
    operator = opened()
    value(operator, how.split()[-1], "s", "c", *[] if how == "redrive" else ["earliest"])
    alter(conn, per_key_capacity=1)
    gid, prepared = f"{conn.info.dbname} back", how.startswith("prepared")
    if prepared:
        operator.execute(f"prepare transaction '{gid}'".encode())
    try:
        for _ in range(3):
            maintain(conn, 1)
    finally:
        operator.execute(f"commit prepared '{gid}'".encode() if prepared else b"commit")
    maintain(conn, 1)
    assert room(conn) == 0
    assert internals.count(conn, "new_capacities") == 0


def test_a_transaction_that_sets_a_capacity_and_maintains_notes_later_senders_too(
    conn: Conn, opened: Session
) -> None:
    consumer(conn)
    with conn.transaction():
        alter(conn, per_key_capacity=1)
        maintain(conn, 3)
        producer = opened()
        send_keys(producer, "k")
    maintain(conn, 3)
    producer.execute("commit")
    maintain(conn, 1)
    assert room(conn) == 0


@for_each("ordering", ["none", "key"])
def test_what_a_seek_makes_new_counts_though_it_was_entered_when_it_was_in_hand(
    conn: Conn, ordering: str
) -> None:
    """It has two entries then: the one that it had in hand says nothing any more."""
    consumer(conn, ordering=ordering)
    send_keys(conn, "k")
    receive(conn)
    alter(conn, per_key_capacity=1)
    value(conn, "seek", "s", "c", "earliest")
    assert room(conn) == 0
    maintain(conn)
    assert room(conn) == 0
    acked(conn, "s", "c")
    assert room(conn) == 1


def test_a_capacity_that_is_set_while_old_entries_are_deleted_keeps_its_own(
    conn: Conn, session: Session, opened: Session
) -> None:
    capped(conn, 1)
    late = opened()
    send_keys(late, "k")
    alter(conn, per_key_capacity=None)
    late.execute("commit")
    assert internals.count(conn, "key_backlog") == 1, "of a sender that was open"
    acked(conn, "s", "c")
    send_keys(conn, "k")
    upkeep = session()
    conn.execute("begin")
    conn.execute("lock table pgqueue.key_backlog in exclusive mode")
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(one, upkeep, "select _pgqueue.maintain_key_backlog()")
        wait_for_a_lock(session())  # it has seen that there is no capacity
        alter(conn, per_key_capacity=1)
        conn.execute("commit")
        found.result()
    assert room(conn) == 0


@for_each("how", ["alter_consumer", "drop_consumer"])
def test_nobody_waits_for_who_deletes_entries_of_a_capacity(
    conn: Conn, session: Session, how: str
) -> None:
    """Neither who tends them, nor who lifts the capacity."""
    upkeep, producer = session(), session()
    capped(conn, 1)
    [dead] = send_keys(conn, "k")
    value(conn, "dead_letter", claim_of(receive(conn)))
    conn.execute("set lock_timeout = '5 s'")
    settings = ['{"per_key_capacity": null}'] if how == "alter_consumer" else []
    with upkeep.transaction(), producer.transaction():
        upkeep.execute("select _pgqueue.enter_missed()")
        internals.delete_entries_of(producer, "c", "k", [dead])
        conn.execute("select _pgqueue.maintain_key_backlog()")
        value(conn, how, "s", "c", *settings)
    maintain(conn)
    assert internals.count(conn, "new_capacities") == internals.count(conn, "key_backlog") == 0


@pytest.mark.parametrize("ordering", ["none", "key"])
def test_producers_that_race_exceed_a_capacity_by_what_they_have_open_at_most(
    conn: Conn, session: Session, ordering: str
) -> None:
    """Beside workers that settle in all ways, and sessions that are killed; nothing leaks."""
    capped(conn, 5, ordering, max_deliver_count=2)
    done = threading.Event()
    producers = 3

    def produce(number: int) -> None:
        rng = random.Random(number)
        mine = session()
        while not done.is_set():
            try:
                sent(mine, rng.choice("abc"))
            except psycopg.OperationalError:  # killed
                mine = session()

    def work(number: int) -> int:
        rng = random.Random(number)
        mine = session()
        count = 0
        while not done.is_set():
            try:
                if rows := receive(mine, rng.choice([1, 3, 10])):
                    how = rng.choice(["ack", "ack", "ack", "nack", "dead_letter"])
                    value(mine, how, claim_of(rows), seqs_of(rows)[: rng.choice([1, 10])])
                    count += len(rows)
            except psycopg.OperationalError:
                mine = session()
        return count

    most: Counter[str] = Counter()
    with ThreadPoolExecutor(5) as pool:
        sending = [pool.submit(produce, i) for i in range(producers)]
        working = [pool.submit(work, i) for i in range(2)]
        for step in range(60):
            owed = internals.rows(
                conn,
                "select m.key, count(*) as n from pgqueue.message_states x join pgqueue.messages m"
                " using (seq) where x.state <> 'dead' group by 1",
            )
            for row in owed:
                most[row.key] = max(most[row.key], row.n)
            if step % 10 == 0:
                conn.execute(
                    "select pg_terminate_backend(pid) from pg_stat_activity"
                    " where datname = current_database() and backend_type = 'client backend'"
                    " and pid <> pg_backend_pid() order by random() limit 1"
                )
                maintain(conn, 1)
        done.set()
        for future in sending:
            future.result(20)
        assert sum(future.result(20) for future in working) > 0
    assert 4 <= max(most.values()) <= 5 + producers - 1
    clock.end_leases(conn)
    clock.pass_time(conn, seconds(100))
    acked(conn, "s", "c")
    assert [room(conn, k) for k in "abc"] == [5, 5, 5]
    maintain(conn)
    assert internals.count(conn, "key_backlog") == 0


@pytest.mark.small_limits
@for_each("ordering", ORDERINGS)
def test_in_any_history_a_send_fails_if_and_only_if_its_key_is_at_its_capacity(
    conn: Conn, session: Session, ordering: str
) -> None:
    """Of one producer, exactly: beside a small model of what the consumer owes."""
    most = 3
    limits = {"per_key_limit": 2} if ordering == "key" else {}
    filtered = {"p_where": '$.key != "c"'} if ordering == "stream" else {}
    capped(conn, most, ordering, max_deliver_count=3, **limits, **filtered)
    counted = ["a", "b"] if filtered else ["a", "b", "c"]
    rng = random.Random(ordering)
    owed: dict[int, str | None] = {}
    dead: dict[int, str | None] = {}
    claims: dict[int, list[int]] = {}
    outcomes: Counter[str] = Counter()

    def settled(claim: int, seqs: list[int]) -> None:
        for seq in seqs:
            del owed[seq]
        claims[claim] = [s for s in claims[claim] if s not in seqs]
        if not claims[claim]:
            del claims[claim]

    for step in range(120):
        what = rng.choice(
            ["send"] * 5 + ["receive"] * 3 + ["ack", "ack", "part", "dead", "nack", "lose"]
            + ["cancel", "redrive", "seek", "killed", "expiring", "maintain"]
        )  # fmt: skip
        claim = rng.choice(list(claims)) if claims else None
        if what in ("send", "killed", "expiring"):
            keys = [rng.choice(["a", "a", "b", "c", None]) for _ in range(rng.choice([1, 1, 2, 4]))]
            had = Counter(owed.values())
            fits = all(had[k] + n <= most for k, n in Counter(keys).items() if k in counted)
            mine = session() if what == "killed" else conn
            if what == "killed":
                mine.execute("begin")
            options = {}
            if what == "expiring":
                options["p_expires_at"] = now(conn) + seconds(1000)
            elif rng.random() < 0.3:
                options["p_deliver_at"] = now(conn) + seconds(rng.choice([0.001, 0.02]))
            seqs = sent(mine, *keys, **options)
            assert (seqs is not None) == fits, f"step {step}: {keys} beside {had}"
            outcomes["sent" if fits else "rejected"] += 1
            if what == "killed":
                kill(conn, mine)
            elif seqs:
                new = zip(seqs, keys, strict=True)
                owed.update({s: k for s, k in new if k is None or k in counted})
        elif what == "receive":
            if rows := receive(conn, rng.choice([1, 2, 5])):
                claims[claim_of(rows)] = seqs_of(rows)
        elif what == "lose":
            receive(conn, 2, p_visibility_timeout=seconds(0.001))
        elif what == "cancel" and owed:
            seqs = rng.sample(sorted(owed), 1)
            assert value(conn, "cancel", "s", "c", seqs) == 1
            del owed[seqs[0]]
        elif what == "redrive" and dead:
            seqs = rng.sample(sorted(dead), 1)
            value(conn, "redrive", "s", "c", seqs)
            owed.update({s: dead.pop(s) for s in seqs})
        elif what == "seek" and rng.random() < 0.2:
            value(conn, "seek", "s", "c", "latest")
            owed.clear()
            claims.clear()
        elif what == "maintain":
            maintain(conn, 1)
        elif claim is None:
            continue
        elif what in ("ack", "part"):
            seqs = claims[claim] if what == "ack" else rng.sample(claims[claim], 1)
            value(conn, "ack", claim, seqs if what == "part" else None)
            settled(claim, list(seqs))
        elif what == "dead":
            seqs = rng.sample(claims[claim], 1)
            dead.update({s: owed[s] for s in seqs})
            value(conn, "dead_letter", claim, seqs)
            settled(claim, seqs)
        elif what == "nack":
            value(conn, "nack", claim, rng.sample(claims[claim], 1), p_delay=seconds(0.01))
            claims = {c: held for c in claims if (held := internals.held_by(conn, c))}
        # what failed too often, or lost its lease too often, died
        gone = {s for s, state in states(conn).items() if state == "dead"} - dead.keys()
        dead.update({s: owed.pop(s) for s in gone})
        claims = {c: held for c in claims if (held := internals.held_by(conn, c))}
        if step % 20 == 0:
            checker.check(conn)
    assert outcomes["sent"] > 10
    assert outcomes["rejected"] > 5
    had = Counter(owed.values())
    assert [room(conn, k) for k in counted] == [max(0, most - had[k]) for k in counted]
    value(conn, "seek", "s", "c", "latest")
    for _ in range(300):  # with small limits it looks at a few, from a place by chance on
        maintain(conn, 1)
        if not internals.count(conn, "key_backlog"):
            break
    else:
        pytest.fail("entries are left")


def test_what_a_send_costs_does_not_depend_on_the_backlog(conn: Conn) -> None:
    """By blocks: before 30,000 messages of other keys, new and taken; with room, and without."""
    capped(conn, 2)

    def costs(name: str) -> list[int]:
        """Of a send, and of the looks at a key that is full: a short one, and a thorough one."""
        sends = [cost(conn, "select pgqueue.send('s', 'x', %s)", f"{name} {i}") for i in range(6)]
        rejected(conn, "full")
        return [min(sends), cost_of_a_look(conn, "full", True), cost_of_a_look(conn, "full")]

    send_keys(conn, "full", "full")
    few = [costs("few")]
    assert len(receive(conn, 2)) == 2
    few.append(costs("claimed"))
    conn.execute(
        "select count(*) from generate_series(1, 30) b cross join lateral pgqueue.send_batch("
        "'s', array_fill('x'::text, array[1000]),"
        " array(select 'k' || b || ' ' || i from generate_series(1, 1000) i)) s"
    )
    many = [costs("many")]
    for _ in range(12):
        value(conn, "ack", claim_of(receive(conn, 10)))
    many.append(costs("many taken"))
    for which, blocks in enumerate(max(few, key=sum)):
        assert max(m[which] for m in many) <= 1.6 * blocks + 15, (few, many)
    value(conn, "drop_stream", "s")


def cost_of_a_look(conn: Conn, key: str, quick: bool = False) -> int:
    """The blocks that are read to find which messages of a key are owed."""
    return min(
        cost(
            conn,
            "select j.* from pgqueue.consumers c cross join lateral"
            " _pgqueue.unfinished_by_key(c, array[hashtextextended(%s, 0)], %s) j",
            key, quick,
        )
        for _ in range(3)
    )  # fmt: skip


def test_of_many_delayed_messages_each_is_found_by_its_time(conn: Conn) -> None:
    """A duplicate of one of many scheduled jobs is rejected without looking at all of them."""
    capped(conn, 1)
    conn.execute(
        "select pgqueue.send('s', 'x', 'job ' || i, p_deliver_at => now() + i * interval '1 s')"
        " from generate_series(100, 2100) i"
    )
    assert receive(conn) == []
    assert set(states(conn).values()) == {"delayed"}
    assert cost_of_a_look(conn, "job 1500", True) < 30
    assert one(
        conn,
        "select unfinished <> '{}' from pgqueue.consumers c cross join lateral"
        " _pgqueue.unfinished_by_key(c, array[hashtextextended('job 1500', 0)], true)",
    )
    rejected(conn, "job 1500")


@for_each("ordering", ["none", "key"])
def test_key_stats_says_what_a_key_has_also_new(conn: Conn, ordering: str) -> None:
    capped(conn, 3, ordering)
    consumer(conn, "other", ordering)
    send_keys(conn, "b", "a", "a", "a", None)
    first = receive(conn, 1)
    value(conn, "dead_letter", claim_of(first))
    held = receive(conn, 1)
    found = {row.key: row for row in call(conn, "key_stats", "s", "c")}
    assert next(iter(found)) == "a"
    assert (found["a"].in_flight, found["a"].unfinished, found["a"].first_seq) == (1, 3, 2)
    assert "b" not in found
    receive(conn, 1, "other")
    assert {row.unfinished for row in call(conn, "key_stats", "s", "other")} == {None}
    value(conn, "ack", claim_of(held))
