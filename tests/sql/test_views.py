"""What the views say of a queue."""

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import psycopg
import pytest

from spark_pgqueue.postgres import connection
from tests.sql import clock
from tests.sql.queue import *

pytestmark = pytest.mark.usefixtures("stream", "allowed_afterwards")


def test_states_and_stats_agree_at_every_step(conn: Conn, stream: int) -> None:
    consumer(conn, ordering="key", visibility_timeout=seconds(0.05))
    k1, k2, a, b = send_all(conn, ["x"] * 4, p_keys=["k", "k", "l", "m"])
    assert set(states(conn).values()) == {"new"}
    assert (stats(conn).new, stats(conn).backlog, stats(conn).ready) == (4, 4, 0)
    claim = claim_of(receive(conn, p_visibility_timeout=seconds(60)))
    value(conn, "ack", claim, [b])
    value(conn, "dead_letter", claim, [a])
    value(conn, "nack", claim, None, seconds(60), "busy")
    new = send(conn)
    now_ = states(conn)
    assert (now_[k1], now_[a], now_[new]) == ("delayed", "dead", "new")
    assert now_.keys() == {k1, k2, a, new}
    s = stats(conn)
    assert (s.stream, s.consumer, s.ordering, s.new, s.dead) == ("s", "c", "key", 1, 1)
    assert s.ready + s.delayed + s.waiting == 2
    assert s.backlog == s.new + s.ready + s.delayed + s.waiting == 3
    assert (s.claimed, s.claims, s.expired, s.next_expiry) == (0, 0, 0, None)
    receive(conn, 1)
    row = state(conn, new)
    assert row.state == "claimed"
    assert row.lease_until is not None
    assert row.claim_id is not None
    assert stats(conn).next_expiry == row.lease_until
    time.sleep(0.1)
    assert (stats(conn).claimed, stats(conn).claims, stats(conn).expired) == (1, 1, 1)
    stage(conn, stream, 2)
    conn.execute("analyze pgqueue.messages")
    (row,) = rows(conn, "select * from pgqueue.stream_stats")
    assert (row.stream, row.kind, row.consumers, row.messages) == ("s", "text", 1, 7)
    assert row.last_publication == value(conn, "last_publication", stream) == 2
    assert row.staged_chunks == 1
    assert row.bytes > 0


def test_what_was_taken_and_settled_is_told_without_counting(conn: Conn) -> None:
    """Whatever becomes of a message: what is filtered out or forgotten by seek was not settled."""
    consumer(conn)
    consumer(conn, "picky", p_topic="a")
    with conn.transaction():
        send_all(conn, ["x"] * 6, p_keys=list("ababab"))
    send(conn, p_deliver_at=now(conn) + seconds(60))
    assert (stats(conn).taken, stats(conn).settled) == (0, 0)
    claim = claim_of(receive(conn, 4))
    assert (stats(conn).taken, stats(conn).settled) == (7, 0)
    value(conn, "ack", claim, [1])
    value(conn, "dead_letter", claim, [2])
    value(conn, "nack", claim, [3], seconds(60))
    assert (stats(conn).taken, stats(conn).settled) == (7, 2)
    value(conn, "seek", "s", "c", "latest")
    assert (stats(conn).taken, stats(conn).settled) == (7, 2)
    value(conn, "seek", "s", "c", "earliest")
    acked(conn, "s", "c")
    s = stats(conn)
    assert (s.taken, s.settled, s.delayed, s.dead) == (13, 7, 1, 1)
    value(conn, "redrive", "s", "c")
    assert (stats(conn).taken, stats(conn).settled) == (14, 7)
    acked(conn, "s", "c")
    assert stats(conn).settled == 8
    acked(conn, "s", "picky")
    assert stats(conn, "picky").settled == 3
    (row,) = rows(conn, "select sent, last_seq from pgqueue.stream_stats")
    assert row.sent == row.last_seq == 7


def test_the_oldest_message_is_the_one_that_could_be_delivered_now(conn: Conn) -> None:
    consumer(conn)
    consumer(conn, "d")
    assert (stats(conn).oldest_at, stats(conn).oldest_claim_at) == (None, None)
    send(conn, p_deliver_at=now(conn) + seconds(60))
    send(conn, p_consumers=["d"])
    assert stats(conn).oldest_at is None
    began = now(conn)
    send_all(conn, ["x"] * 3)
    ended = now(conn)
    assert began <= stats(conn).oldest_at <= ended
    claim = claim_of(receive(conn, 2))
    assert began <= stats(conn).oldest_at <= ended <= stats(conn).oldest_claim_at <= now(conn)
    value(conn, "ack", claim_of(receive(conn)))
    assert stats(conn).oldest_at is None
    value(conn, "nack", claim)
    assert began <= stats(conn).oldest_at <= ended


def test_what_is_taken_is_told_however_it_was_taken(conn: Conn) -> None:
    """At once by a claim that finds nothing else, in a plain take, or from a gap."""
    for name in ORDERINGS:
        consumer(conn, name, name)
    with connection.connect(conn.info.dsn, autocommit=False) as other:
        for name in ORDERINGS:
            assert acked(conn, "s", name) == []
        send(conn)
        for name in ORDERINGS:
            assert len(receive(conn, 1, name)) == 1
            assert (stats(conn, name).taken, stats(conn, name).settled) == (1, 0)
        send_all(conn, ["x"] * 3, p_keys=list("aab"))
        send(other)
        send_all(conn, ["x"] * 2, p_priority=3)
        other.rollback()
        send(other)
        send(conn)
        received = [receive(conn, 10, name) for name in ORDERINGS * 3]
        other.commit()
        for found in received:
            if found:
                value(conn, "ack", claim_of(found))
        clock.end_leases(conn)
    for name in ORDERINGS:
        acked(conn, "s", name)
        shown = stats(conn, name)
        assert (shown.taken, shown.settled, shown.backlog) == (8, 8, 0), name


def test_the_planner_takes_no_view_for_so_dear_that_it_has_the_query_compiled(conn: Conn) -> None:
    """Of a queue that has little: compiling (jit, on by default before 19) takes a second."""
    send_all(conn, ["x"] * 10)
    consumer(conn)
    receive(conn)
    views = "select oid::regclass::text from pg_class where relkind = 'v' and relnamespace = "
    names = conn.execute((views + "'pgqueue'::regnamespace").encode()).fetchall()
    assert len(names) > 10
    compiled = float(conn.execute("show jit_above_cost").fetchall()[0][0])
    for (name,) in names:
        (plan,) = one(conn, f"explain (format json) select * from {name}")
        assert plan["Plan"]["Total Cost"] < compiled, name


def test_what_was_sent_is_right_while_a_segment_is_closed_and_after_a_rollback(
    conn: Conn, session: Session
) -> None:
    """A jump of the numbers is seen at once; how large it was, only after the commit."""

    def sent(of: Conn) -> Any:
        return one(of, "select sent from pgqueue.stream_stats")

    value(conn, "set_retention", "s", timedelta(hours=8))
    send_all(conn, ["x"] * 5)
    maintain(conn)
    other = session()
    with ThreadPoolExecutor(1) as pool:
        for number in range(6, 20):
            send(conn)
            clock.pass_time(conn, timedelta(hours=2))
            with conn.transaction() as transaction:
                call(conn, "maintain")
                looking = pool.submit(sent, other)  # it may wait for the tables until the end
                time.sleep(0.02)
                if number % 2:
                    raise psycopg.Rollback(transaction)
            assert looking.result() in (number, None)
            maintain(conn)
            assert sent(conn) == number
    assert one(conn, "select count(*) from pgqueue.segments where closed_at is not null") >= 2


def test_numbers_that_no_message_got_are_not_counted_as_stored(conn: Conn) -> None:
    value(conn, "set_retention", "s", timedelta(days=8))
    send(conn)
    maintain(conn)
    with conn.transaction() as transaction:
        send_all(conn, ["x"] * 1000)
        raise psycopg.Rollback(transaction)
    send_all(conn, ["x"] * 6)
    for (table,) in rows(  # as autovacuum does, which leaves out what is empty
        conn, "select name::text from _pgqueue.message_tables(1) where pg_relation_size(name) > 0"
    ):
        conn.execute(f"analyze {table}".encode())
    assert one(conn, "select messages from pgqueue.stream_stats") == 7


def test_a_look_at_all_streams_keeps_few_locks(conn: Conn) -> None:
    """The server's lock table has room for some 14,000: once it is full, each send fails, too."""
    for name in "stu":
        value(conn, "create_stream", name, p_if_not_exists=True)
        value(conn, "create_consumer", name, "c")
        value(conn, "set_retention", name, timedelta(days=8))
    maintain(conn)
    for name in "stu":
        value(conn, "send", name, "x")
        (received,) = call(conn, "receive", name, "c", 1)
        value(conn, "nack", received.claim_id, p_delay=seconds(0))

    def locked(query: str) -> list[str]:
        """What belongs to a stream and is locked until the transaction ends."""
        with conn.transaction():
            conn.execute(query.encode()).fetchall()
            found = rows(
                conn,
                "select c.relname from pg_locks l join pg_class c on c.oid = l.relation"
                " where l.pid = pg_backend_pid() and c.relnamespace = 'pgqueue'::regnamespace"
                " and c.relname ~ '_[0-9]+(_|$)' order by 1",
            )
            return [name for (name,) in found]

    assert one(conn, "select sum(tables) from pgqueue.stream_retention") == 3 * 4
    assert locked("select * from pgqueue.stream_retention") == []
    assert locked("select stream, bytes from pgqueue.stream_stats") == []
    assert locked("select * from pgqueue.stream_stats") == ["seq_1", "seq_2", "seq_3"]
    assert len(locked("select * from pgqueue.consumer_stats")) <= 3 * 4
