"""Taking what is new: late commits, rollbacks, holes and limits."""

import random
import uuid

import psycopg
import pytest

from spark_pgqueue.postgres import connection
from tests.sql import checker, internals
from tests.sql.internals import cursor_of, ids
from tests.sql.limits import limit, set_constant
from tests.sql.queue import *
from tests.sql.queue import cursor_consumer as consumer


@pytest.fixture
def consumers(conn: Conn, stream: int) -> list[str]:
    """A consumer for each ordering, which is its name."""
    for ordering in ORDERINGS:
        consumer(conn, ordering, ordering=ordering)
    return ORDERINGS


@pytest.mark.all_versions
def test_a_late_commit_is_delivered(conn: Conn, session: Session, consumers: list[str]) -> None:
    for n, isolation in enumerate(("read committed", "repeatable read", "serializable"), 1):
        late = session()
        late.execute(f"begin transaction isolation level {isolation}")  # type: ignore[arg-type]
        first, second = send_key(late), send_key(conn)
        for name in consumers:
            assert acked(conn, "s", name) == [second]
            assert acked(conn, "s", name) == []
        late.execute("commit")
        for name in consumers:
            assert acked(conn, "s", name) == [first], (isolation, name)
            assert acked(conn, "s", name) == []
            assert cursor_of(conn, name).taken == ids(1, 2 * n)


def test_a_late_commit_is_delivered_whatever_its_numbers(
    conn: Conn, session: Session, stream: int, consumers: list[str]
) -> None:
    """Numbers of messages without a gap do not say that no publication is missing."""
    block = stage(conn, stream, 1)
    before = send_key(conn)
    late = session()
    late.execute("begin")
    assert publish(late, stream, [block], 1)
    after = send_key(conn)
    for name in consumers:
        assert acked(conn, "s", name) == [before, after] == [2, 3]
    late.execute("commit")
    for name in consumers:
        assert acked(conn, "s", name) == [1]


def test_a_publication_that_was_rolled_back_is_closed(conn: Conn, consumers: list[str]) -> None:
    for n in (2, 4, 6):
        dead_publication(conn)
        send_key(conn)
        for name in consumers:
            assert acked(conn, "s", name) == [n]
    for name in consumers:
        assert acked(conn, "s", name) == []
        assert cursor_of(conn, name).taken == ids(1, 6)
        assert not cursor_of(conn, name).gaps


def test_a_rolled_back_savepoint_is_closed_and_the_rest_delivered(
    conn: Conn, session: Session, stream: int
) -> None:
    consumer(conn)
    other = session()
    other.execute("begin")
    first = send_key(other)
    other.execute("savepoint one")
    send_key(other)
    other.execute("rollback to one")
    third = send_key(other)
    last = send_key(conn)
    assert acked(conn, "s", "c") == [last]
    other.execute("commit")
    assert acked(conn, "s", "c") == [first, third]
    acked(conn, "s", "c")
    assert cursor_of(conn).taken == ids(1, 4)


@pytest.mark.parametrize("twice", [False, True])
def test_a_taker_that_has_an_id_already_does_not_close_younger_holes(
    conn: Conn, session: Session, consumers: list[str], twice: bool
) -> None:
    """Who may fill it is asked after the look."""
    taker, late = session(), session()
    taker.execute("begin")
    taker.execute("select pg_current_xact_id()")
    late.execute("begin")
    first = send_key(late)
    second = send_key(conn)
    for name in consumers:
        rows = receive(taker, 10, name)
        assert seqs_of(rows) == [second]
        if twice:
            assert receive(taker, 10, name) == []
        value(taker, "ack", claim_of(rows))
    taker.execute("commit")
    for name in consumers * 3:
        assert acked(conn, "s", name) == []
    late.execute("commit")
    for name in consumers:
        assert acked(conn, "s", name) == [first]


def test_a_taker_that_rolls_back_to_a_savepoint_has_taken_nothing(
    conn: Conn, session: Session, stream: int
) -> None:
    consumer(conn)
    late = session()
    late.execute("begin")
    first = send_key(late)
    second = send_key(conn)
    with connection.connect(conn.info.dsn) as taker:
        taker.execute("begin")
        taker.execute("savepoint one")
        assert seqs_of(call(taker, "receive", "s", "c", 10)) == [second]
        taker.execute("rollback to one")
        late.execute("commit")
        rows = call(taker, "receive", "s", "c", 10)
        assert seqs_of(rows) == [first, second]
        value(taker, "ack", claim_of(rows))
        taker.execute("commit")
    assert acked(conn, "s", "c") == []
    checker.check(conn, {1: {first, second}})


@pytest.mark.parametrize(("ordering", "limit"), [("none", 1), ("key", 3)])
def test_a_take_cut_by_its_limit_closes_nothing_that_it_did_not_see(
    conn: Conn, session: Session, stream: int, ordering: str, limit: int
) -> None:
    rng = random.Random(limit)
    consumer(conn, ordering=ordering)
    running: list[tuple[Conn, list[int]]] = []
    sent: set[int] = set()
    for _ in range(60):
        what = rng.random()
        if what < 0.3:
            dead_publication(conn)
        elif what < 0.5 and len(running) < 4:
            other = session()
            other.execute("begin")
            running.append((other, [send_key(other) for _ in range(rng.randrange(1, 6))]))
        elif what < 0.65 and running:
            other, seqs = running.pop(rng.randrange(len(running)))
            other.execute(rng.choice(["commit", "commit", "rollback"]))
            if other.info.transaction_status == psycopg.pq.TransactionStatus.IDLE:
                done = one(conn, "select count(*) from pgqueue.messages where seq = %s", seqs[0])
                sent |= set(seqs) if done else set()
        else:
            sent.add(send_key(conn))
        for _ in range(rng.choice([0, 1, 3])):
            internals.take(conn, limit)
    for other, seqs in running:
        other.execute("commit")
        sent |= set(seqs)
    for _ in range(60 if limit > 1 else 100):
        internals.take(conn, limit)
    (c,) = checker.read(conn)
    assert c.of("ready") == sent
    checker.check(conn, {c.consumer_id: set()}, [c])


def test_a_rewind_larger_than_the_limit_is_taken_again_whole(conn: Conn, stream: int) -> None:
    """Holes that are visible are new, however few of them one take may take."""
    consumer(conn)
    for _ in range(12):
        send_key(conn)
    assert len(acked(conn, "s", "c")) == 12
    internals.leave_gap(conn, 2, 10)
    for _ in range(6):
        internals.take(conn, 3)
    (c,) = checker.read(conn)
    assert c.of("ready") == set(range(2, 11))


@pytest.mark.promise("guarantee: Priorities")
def test_more_publications_than_one_take_takes(conn: Conn, session: Session, stream: int) -> None:
    consumer(conn)
    late = session()
    late.execute("begin")
    sent = {send_key(late)}
    set_constant(conn, "limit_take", 100)
    for _ in range(3):
        conn.execute("select count(pgqueue.send('s', 'x')) from generate_series(1, 40)")
        dead_publication(conn)
        sent.add(send_key(late))
    got = acked(conn, "s", "c", 5)
    late.execute("commit")
    got += acked(conn, "s", "c", 5)
    assert len(got) == len(set(got)) == 124
    assert sent <= set(got)
    acked(conn, "s", "c")
    assert cursor_of(conn).taken == ids(1, 127)


def test_a_reader_without_a_limit_gets_all_however_many_publications_that_are(
    conn: Conn, stream: int
) -> None:
    consumer_id = consumer(conn)
    set_constant(conn, "limit_take", 100)
    conn.execute("select count(pgqueue.send('s', 'x')) from generate_series(1, 210)")
    assert len(call(conn, "receive", "s", "c", 1)) == 1  # which takes a part of them
    (row,) = call(conn, "reader_claim", uuid.uuid4(), consumer_id, 0, 0)
    assert row.claimed == 209


CONSUMERS = "select name, consumer_id from pgqueue.consumers"


@pytest.mark.parametrize(
    "option", ["p_consumers => '{d}'", "p_deliver_at => now() + interval '1 h'"]
)
def test_nothing_is_the_answer_only_when_there_is_nothing(
    conn: Conn, consumers: list[str], option: str
) -> None:
    """However many publications that are for others, or for later, come first."""
    ids_ = {row.name: row.consumer_id for row in internals.rows(conn, CONSUMERS)}
    consumer(conn, "d")
    set_constant(conn, "limit_take", 100)
    for how in ("reader", "worker"):
        others = f"pgqueue.send('s', 'x', g::text, {option})"
        conn.execute(f"select count({others}) from generate_series(1, 250) g".encode())
        mine = send_key(conn, how)
        for name in consumers[:2]:
            if how == "reader":
                (row,) = call(conn, "reader_claim", uuid.uuid4(), ids_[name], 0, 0, 100)
                assert row.claimed == 1
            else:
                assert seqs_of(receive(conn, name=name)) == [mine]


def test_a_claim_behind_another_one_takes_no_more_than_it_must(conn: Conn, stream: int) -> None:
    """What would be taken cannot be had either."""
    consumer(conn, ordering="stream")
    set_constant(conn, "limit_take", 100)
    conn.execute("select count(pgqueue.send('s', 'x')) from generate_series(1, 450)")
    assert len(call(conn, "receive", "s", "c", 1)) == 1
    assert call(conn, "receive", "s", "c", 1) == []
    assert max(checker.numbers(cursor_of(conn).taken)) <= 300


@pytest.mark.promise("concepts: transitions of a message")
def test_messages_of_a_statement_are_taken_together(conn: Conn, stream: int) -> None:
    """A publication is seen whole or not at all, whatever its groups of priority and time."""
    consumer(conn)
    staged = [stage(conn, stream, 10, p_priority=priority) for priority in (0, 3, 5)]
    assert publish(conn, stream, staged, 30)
    send_key(conn)
    internals.take(conn, 1)
    (c,) = checker.read(conn)
    assert c.of("ready") == set(range(1, 31))
    rows = call(conn, "receive", "s", "c", 100)
    assert seqs_of(rows) == [*range(21, 31), *range(11, 21), *range(1, 11), 31]


def test_what_fills_holes_comes_before_what_is_beyond_also_past_the_limit(
    conn: Conn, session: Session, consumers: list[str]
) -> None:
    """A transaction of more publications than one take takes is overtaken, and goes on."""
    set_constant(conn, "limit_take", 100)
    producer = session()
    producer.execute("begin")
    for _ in range(105):
        send_key(producer)
    other = send_key(conn, "other")
    for name in consumers:
        assert acked(conn, "s", name) == [other]
    producer.execute("commit")
    second = send_key(producer)
    for name in consumers:
        got = acked(conn, "s", name, 50)
        assert len(got) == 106
        assert got[-1] == second


def test_a_run_has_no_more_ranges_than_the_limit(conn: Conn, stream: int) -> None:
    """What is taken at once for one of two consumers has a hole at every other message."""
    set_constant(conn, "limit_ranges", 2)
    consumer(conn)
    consumer(conn, "other")
    sent = [send(conn, p_consumers=[["c", "other"][i % 2]]) for i in range(14)]
    assert seqs_of(receive(conn, 3)) == sent[:6:2]
    checker.check(conn)
    assert acked(conn, "s", "other") == sent[1::2]


def test_what_a_take_did_not_reach_is_no_gap(conn: Conn, stream: int) -> None:
    """6. A backlog is walked over as it is taken, and not looked for one by one."""
    consumer(conn)
    dead_publication(conn)
    internals.publish_singly(conn, stream, 1200)
    internals.take(conn, 10)
    assert cursor_of(conn).gaps == ids(1, 1)
    assert cursor_of(conn).taken == ids(2, 11)


@pytest.mark.small_limits
def test_rolled_back_publications_behind_a_take_that_was_cut(
    conn: Conn, consumers: list[str]
) -> None:
    """Nothing is visible where the next take begins, and what is comes only far behind."""
    many, unseen = limit(conn, "take", 0), limit(conn, "unseen", 0)
    send_many = "select pgqueue.send('s', 'x') from generate_series(1, %s)"
    conn.execute(send_many, [many])
    conn.execute("begin")
    conn.execute(send_many, [unseen])
    conn.execute("rollback")
    send(conn)
    for name in consumers:
        assert len(acked(conn, "s", name, many)) == many + 1
