"""Taking what is new: late commits, rollbacks, holes, limits, and where a consumer starts."""

from __future__ import annotations

import random
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import psycopg
import pytest
from psycopg import IsolationLevel

from spark_pgqueue.postgres import connection
from tests.sql import checker
from tests.sql.queue import acked, call, claim_of, one, seqs_of, value

ORDERINGS = ["none", "key", "stream"]
Session = Callable[[], psycopg.Connection]


@pytest.fixture
def session(url: str) -> Iterator[Session]:
    """Another session, closed at the end of the test."""
    with ExitStack() as stack:
        yield lambda: stack.enter_context(connection.connect(url))


@pytest.fixture
def stream(conn: psycopg.Connection) -> int:
    return value(conn, "create_stream", "s")


def consumer(conn: psycopg.Connection, ordering: str = "none", start: str = "earliest",
             name: str = "c") -> int:  # fmt: skip
    return value(conn, "create_consumer", "s", name, start, ordering)


def send(conn: psycopg.Connection, key: str = "k") -> int:
    return value(conn, "send", "s", "x", p_key=key)


def dead_publication(conn: psycopg.Connection) -> None:
    """What a publisher that was rolled back leaves: an id that nobody will use."""
    conn.execute("begin")
    send(conn)
    conn.execute("rollback")


def taken_beside_rollbacks(conn: psycopg.Connection, n: int) -> None:
    """A hole, and a message behind it that is taken; n times."""
    for _ in range(n):
        dead_publication(conn)
        send(conn)
        acked(conn, "s", "c")


def cursor(conn: psycopg.Connection, column: str, name: str = "c") -> str:
    query = (
        f"select {column}::text from pgqueue.consumer_cursors"
        " join pgqueue.consumers using (consumer_id) where name = %s"
    )
    return one(conn, query, name)


@pytest.mark.all_versions
@pytest.mark.parametrize("ordering", ORDERINGS)
@pytest.mark.parametrize("isolation", ["read committed", "repeatable read", "serializable"])
def test_a_late_commit_is_delivered(
    conn: psycopg.Connection, session: Session, stream: int, ordering: str, isolation: str
) -> None:
    consumer(conn, ordering)
    late = session()
    late.execute(f"begin transaction isolation level {isolation}")  # type: ignore[arg-type]
    first = send(late)
    second = send(conn)
    assert acked(conn, "s", "c") == [second]
    assert acked(conn, "s", "c") == []
    late.execute("commit")
    assert acked(conn, "s", "c") == [first]
    assert acked(conn, "s", "c") == []
    assert cursor(conn, "seen") == "{[1,3)}"


@pytest.mark.parametrize("ordering", ORDERINGS)
def test_a_late_commit_is_delivered_whatever_its_numbers(
    conn: psycopg.Connection, session: Session, stream: int, ordering: str
) -> None:
    """Numbers of messages without a gap do not say that no publication is missing."""
    consumer(conn, ordering)
    first = value(conn, "reserve", stream, 1)
    conn.execute(
        "insert into pgqueue.messages (seq, stream_id, data) values (1, %s, 'x')", [stream]
    )
    block = value(conn, "stage", "sink", 0, stream, first)
    before = send(conn)
    late = session()
    late.execute("begin")
    assert value(late, "publish_staged", "sink", 0, stream, [block], 1)
    after = send(conn)
    assert acked(conn, "s", "c") == [before, after] == [2, 3]
    late.execute("commit")
    assert acked(conn, "s", "c") == [1]


@pytest.mark.parametrize("ordering", ORDERINGS)
def test_a_publication_that_was_rolled_back_is_closed(
    conn: psycopg.Connection, stream: int, ordering: str
) -> None:
    consumer(conn, ordering)
    got = []
    for _ in range(3):
        dead_publication(conn)
        send(conn)
        got += acked(conn, "s", "c")
    assert got == [2, 4, 6]
    assert acked(conn, "s", "c") == []
    assert cursor(conn, "seen") == "{[1,7)}"
    assert cursor(conn, "watched") == "{}"


def test_a_rolled_back_savepoint_is_closed_and_the_rest_delivered(
    conn: psycopg.Connection, session: Session, stream: int
) -> None:
    consumer(conn)
    other = session()
    other.execute("begin")
    first = send(other)
    other.execute("savepoint one")
    send(other)
    other.execute("rollback to one")
    third = send(other)
    last = send(conn)
    assert acked(conn, "s", "c") == [last]
    other.execute("commit")
    assert acked(conn, "s", "c") == [first, third]
    acked(conn, "s", "c")
    assert cursor(conn, "seen") == "{[1,5)}"


@pytest.mark.parametrize("ordering", ORDERINGS)
@pytest.mark.parametrize("twice", [False, True])
def test_a_taker_that_has_an_id_already_does_not_close_younger_holes(
    conn: psycopg.Connection, session: Session, stream: int, ordering: str, twice: bool
) -> None:
    """The bound of a hole is an id that was assigned after the look."""
    consumer(conn, ordering)
    taker, late = session(), session()
    taker.execute("begin")
    taker.execute("select pg_current_xact_id()")
    late.execute("begin")
    first = send(late)
    second = send(conn)
    rows = call(taker, "receive", "s", "c", 10)
    assert seqs_of(rows) == [second]
    if twice:
        assert call(taker, "receive", "s", "c", 10) == []
    value(taker, "ack", claim_of(rows))
    taker.execute("commit")
    for _ in range(3):
        assert acked(conn, "s", "c") == []
    late.execute("commit")
    assert acked(conn, "s", "c") == [first]


def test_a_taker_that_rolls_back_to_a_savepoint_has_taken_nothing(
    conn: psycopg.Connection, session: Session, stream: int
) -> None:
    consumer(conn)
    late = session()
    late.execute("begin")
    first = send(late)
    second = send(conn)
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


def test_holes_of_another_cluster_are_dead(conn: psycopg.Connection, stream: int) -> None:
    """After a restore, the ids of transactions mean nothing."""
    consumer(conn)
    dead_publication(conn)
    send(conn)
    acked(conn, "s", "c")
    conn.execute(
        "update pgqueue.consumer_cursors set seen = '{[2,3)}', watched = '{[1,2)}',"
        " watched_below = '4611686018427387904'"
    )
    assert acked(conn, "s", "c") == []
    send(conn)
    assert acked(conn, "s", "c") == [3]
    assert cursor(conn, "seen") == "{[1,4)}"


def test_parked_holes_of_another_cluster_are_dead(conn: psycopg.Connection, stream: int) -> None:
    consumer(conn)
    dead_publication(conn)
    send(conn)
    acked(conn, "s", "c")
    conn.execute(
        "update pgqueue.consumer_cursors set seen = '{[2,3)}', watched = '{}', parked = '{[1,2)}',"
        " parked_below = '4611686018427387904', parked_probe = 'infinity'"
    )
    send(conn)
    assert acked(conn, "s", "c") == [3]
    assert cursor(conn, "seen") == "{[1,4)}"


def test_a_taker_that_has_written_trusts_no_id_beyond_its_snapshot(
    conn: psycopg.Connection, session: Session, stream: int
) -> None:
    """It may be its own: taken twice in one transaction, the hole of a running publisher stays."""
    consumer(conn)
    taker, late = session(), session()
    late.execute("begin")
    first = send(late)
    taker.execute("begin")
    for _ in range(3):
        seq = send(conn)
        rows = call(taker, "receive", "s", "c", 10)
        assert seqs_of(rows) == [seq]
        value(taker, "ack", claim_of(rows))
    taker.execute("commit")
    late.execute("commit")
    assert acked(conn, "s", "c") == [first]


@pytest.mark.parametrize("ordering", ["none", "key"])
def test_old_transactions_park_holes_and_lose_none(
    conn: psycopg.Connection, session: Session, stream: int, ordering: str
) -> None:
    """An idle transaction keeps every rollback open: they are parked, and nothing is lost."""
    consumer(conn, ordering)
    idle = session()
    idle.execute("begin")
    first = send(idle, "old")
    got, sent = [], []
    for _ in range(150):
        dead_publication(conn)
        sent.append(send(conn))
        got += acked(conn, "s", "c")
    assert got == sent
    assert cursor(conn, "parked") != "{}"
    watched = int(cursor(conn, "(select count(*) from unnest(watched))"))
    assert watched <= 65, f"{watched} holes are looked into at every claim"
    idle.execute("commit")
    conn.execute("update pgqueue.consumer_cursors set parked_probe = '-infinity'")
    got = acked(conn, "s", "c")
    assert got == [first]
    sent = send(conn)
    assert acked(conn, "s", "c") == [sent]
    acked(conn, "s", "c")
    assert cursor(conn, "seen") == "{[1,303)}"
    assert cursor(conn, "parked") == "{}"


def test_a_parked_hole_is_found_within_about_a_second(
    conn: psycopg.Connection, session: Session, stream: int
) -> None:
    """A publisher that commits while another old transaction goes on."""
    consumer(conn)
    idle, late = session(), session()
    idle.execute("begin")
    idle.execute("select pg_current_xact_id()")
    late.execute("begin")
    first = send(late)
    taken_beside_rollbacks(conn, 80)
    assert cursor(conn, "(parked @> 1::bigint)") == "true"
    late.execute("commit")
    end = time.monotonic() + 3
    while not (got := acked(conn, "s", "c")) and time.monotonic() < end:
        time.sleep(0.05)
    assert got == [first]


def test_a_hole_that_is_parked_beside_older_ones_waits_for_its_own_publisher(
    conn: psycopg.Connection, session: Session, stream: int
) -> None:
    consumer(conn)
    old, late = session(), session()
    old.execute("begin")
    old.execute("select pg_current_xact_id()")
    taken_beside_rollbacks(conn, 70)
    assert cursor(conn, "parked") != "{}"
    late.execute("begin")
    first = send(late)
    taken_beside_rollbacks(conn, 140)
    assert cursor(conn, "(parked @> 141::bigint)") == "true"
    old.execute("commit")
    for _ in range(3):
        send(conn)
        assert len(acked(conn, "s", "c")) == 1
    late.execute("commit")
    conn.execute("update pgqueue.consumer_cursors set parked_probe = '-infinity'")
    assert acked(conn, "s", "c") == [first]


# One take of at most %s publications, as a claim does it but smaller.
TAKE = """
do $$
declare
    v_consumer pgqueue.consumers;
    v_stored   pgqueue.consumer_cursors;
begin
    select * into v_consumer from pgqueue.consumers where name = 'c';
    perform pgqueue._lock_consumer(v_consumer.consumer_id);
    v_stored := pgqueue._cursor(v_consumer.consumer_id);
    perform pgqueue._save_cursor(v_stored, pgqueue._take(v_consumer, v_stored, null, {}), true);
end $$
"""


@pytest.mark.parametrize("limit", [1, 2, 3, 7])
@pytest.mark.parametrize("ordering", ["none", "key"])
def test_a_take_cut_by_its_limit_closes_nothing_that_it_did_not_see(
    conn: psycopg.Connection, session: Session, stream: int, ordering: str, limit: int
) -> None:
    rng = random.Random(limit)
    consumer(conn, ordering)
    running: list[tuple[psycopg.Connection, list[int]]] = []
    sent: set[int] = set()
    for _ in range(60):
        what = rng.random()
        if what < 0.3:
            dead_publication(conn)
        elif what < 0.5 and len(running) < 4:
            other = session()
            other.execute("begin")
            running.append((other, [send(other) for _ in range(rng.randrange(1, 6))]))
        elif what < 0.65 and running:
            other, seqs = running.pop(rng.randrange(len(running)))
            other.execute(rng.choice(["commit", "commit", "rollback"]))
            if other.info.transaction_status == psycopg.pq.TransactionStatus.IDLE:
                done = one(conn, "select count(*) from pgqueue.messages where seq = %s", seqs[0])
                sent |= set(seqs) if done else set()
        else:
            sent.add(send(conn))
        for _ in range(rng.choice([0, 1, 3])):
            conn.execute(TAKE.format(limit))  # type: ignore[arg-type]
    for other, seqs in running:
        other.execute("commit")
        sent |= set(seqs)
    for _ in range(100):
        conn.execute(TAKE.format(limit))  # type: ignore[arg-type]
    (c,) = checker.read(conn)
    assert c.of("ready") == sent
    checker.check(conn, {c.consumer_id: set()}, [c])


def test_a_rewind_larger_than_the_limit_is_taken_again_whole(
    conn: psycopg.Connection, stream: int
) -> None:
    """Holes that are visible are new, however few of them one take may take."""
    consumer(conn)
    for _ in range(12):
        send(conn)
    assert len(acked(conn, "s", "c")) == 12
    conn.execute("update pgqueue.consumer_cursors set seen = seen - '{[2,11)}'::int8multirange")
    for _ in range(6):
        conn.execute(TAKE.format(3))  # type: ignore[arg-type]
    (c,) = checker.read(conn)
    assert c.of("ready") == set(range(2, 11))


def test_more_publications_than_one_take_takes(
    conn: psycopg.Connection, session: Session, stream: int
) -> None:
    consumer(conn)
    late = session()
    late.execute("begin")
    sent = {send(late)}
    for _ in range(3):
        conn.execute("select count(pgqueue.send('s', 'x')) from generate_series(1, 4000)")
        dead_publication(conn)
        sent.add(send(late))
    got = acked(conn, "s", "c", 500)
    late.execute("commit")
    got += acked(conn, "s", "c", 500)
    assert len(got) == len(set(got)) == 12004
    assert sent <= set(got)
    acked(conn, "s", "c")
    assert cursor(conn, "seen") == "{[1,12008)}"


def test_a_reader_without_a_limit_gets_all_however_many_publications_that_are(
    conn: psycopg.Connection, stream: int
) -> None:
    consumer_id = consumer(conn)
    conn.execute("select count(pgqueue.send('s', 'x')) from generate_series(1, 21000)")
    assert len(call(conn, "receive", "s", "c", 1)) == 1  # which takes a part of them
    (row,) = call(conn, "reader_claim", uuid.uuid4(), consumer_id, 0, 0)
    assert row.claimed == 20_999


@pytest.mark.parametrize("ordering", ["none", "key"])
@pytest.mark.parametrize(
    "option", ["p_consumers => '{d}'", "p_deliver_at => now() + interval '1 h'"]
)
def test_nothing_is_the_answer_only_when_there_is_nothing(
    conn: psycopg.Connection, stream: int, ordering: str, option: str
) -> None:
    """However many publications that are for others, or for later, come first."""
    consumer_id = consumer(conn, ordering)
    consumer(conn, name="d")
    for how in ("reader", "worker"):
        others = f"pgqueue.send('s', 'x', g::text, {option})"
        conn.execute(f"select count({others}) from generate_series(1, 25000) g".encode())
        mine = send(conn, how)
        if how == "reader":
            (row,) = call(conn, "reader_claim", uuid.uuid4(), consumer_id, 0, 0, 100)
            assert row.claimed == 1
        else:
            assert seqs_of(call(conn, "receive", "s", "c", 100)) == [mine]


def test_a_claim_behind_another_one_takes_no_more_than_it_must(
    conn: psycopg.Connection, stream: int
) -> None:
    """What would be taken cannot be had either."""
    consumer(conn, "stream")
    conn.execute("select count(pgqueue.send('s', 'x')) from generate_series(1, 45000)")
    assert len(call(conn, "receive", "s", "c", 1)) == 1
    assert call(conn, "receive", "s", "c", 1) == []
    assert int(cursor(conn, "upper(seen)")) <= 30_001


def test_other_consumers_messages_are_walked_over(conn: psycopg.Connection, stream: int) -> None:
    consumer(conn, name="c")
    consumer(conn, name="d")
    value(conn, "send", "s", "x", p_consumers=["d"])
    second = value(conn, "send", "s", "x", p_consumers=["c", "d", "c"])
    third = send(conn)
    value(conn, "send", "s", "x", p_consumers=["d"])
    assert acked(conn, "s", "c") == [second, third]
    assert acked(conn, "s", "d") == [1, 2, 3, 4]
    assert cursor(conn, "seen") == "{[1,5)}"


@pytest.mark.parametrize("start", ["latest", "earliest", "timestamp"])
@pytest.mark.parametrize("others", [False, True])
def test_a_new_consumer_starts_exactly(
    conn: psycopg.Connection, session: Session, stream: int, start: str, others: bool
) -> None:
    """What runs while it is made counts as later, what was committed as before."""
    before = [send(conn), send(conn)]
    early, late = session(), session()
    early.execute("begin")
    running = [send(early)]
    dead_publication(conn)
    before.append(send(conn))
    if others:
        consumer(conn, name="other")
        acked(conn, "s", "other")
        before.append(send(conn))
    if start == "timestamp":
        start = str(one(conn, "select clock_timestamp()"))
    consumer(conn, start=start)
    late.execute("begin")
    running.append(send(late))
    after = [send(conn)]
    early.execute("commit")
    late.execute("commit")
    after.append(send(conn))
    expected = {*after, *running, *(before if start == "earliest" else [])}
    got = acked(conn, "s", "c")
    assert sorted(got) == sorted(expected)
    assert acked(conn, "s", "c") == []


def test_a_consumer_can_start_at_a_time(conn: psycopg.Connection, stream: int) -> None:
    first = send(conn)
    time.sleep(0.01)
    since = one(conn, "select clock_timestamp()")
    second = send(conn)
    consumer(conn, start=str(since), name="c")
    consumer(conn, start="-infinity", name="all")
    consumer(conn, start="infinity", name="latest")
    assert acked(conn, "s", "c") == [second]
    assert acked(conn, "s", "all") == [first, second]
    assert acked(conn, "s", "latest") == []


def test_consumers_made_while_producers_run_get_each_message_once(
    conn: psycopg.Connection, url: str, stream: int
) -> None:
    """Each published message was visible when the consumer was made, or is delivered once."""
    stop = threading.Event()

    def produce(seed: int) -> None:
        rng = random.Random(seed)
        with connection.connect(url) as other:
            while not stop.is_set():
                other.execute("begin")
                send(other)
                time.sleep(rng.choice([0, 0, 0.002]))
                send(other)
                other.execute(rng.choice(["commit", "commit", "rollback"]))

    threads = [threading.Thread(target=produce, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    skipped: dict[str, set[int]] = {}
    delivered: dict[str, list[int]] = {}
    visible = "select seq from pgqueue.messages"
    try:
        with connection.connect(url) as maker:
            maker.autocommit = False
            maker.isolation_level = IsolationLevel.REPEATABLE_READ
            for i in range(20):
                seen = {row[0] for row in maker.execute(visible).fetchall()}
                consumer(maker, ["none", "key"][i % 2], "latest", f"c{i}")
                maker.commit()
                skipped[f"c{i}"], delivered[f"c{i}"] = seen, []
                for name, got in delivered.items():
                    if rows := call(conn, "receive", "s", name, 7):
                        value(conn, "ack", claim_of(rows))
                        got += seqs_of(rows)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    published = {row[0] for row in conn.execute(visible).fetchall()}
    for name, got in delivered.items():
        got += acked(conn, "s", name)
        assert len(got) == len(set(got)), f"{name}: delivered twice"
        assert set(got) == published - skipped[name], name


def test_messages_of_a_statement_are_taken_together(conn: psycopg.Connection, stream: int) -> None:
    """A publication is seen whole or not at all, whatever its groups of priority and time."""
    consumer(conn)
    staged = []
    for priority in (0, 3, 5):
        with conn.transaction():
            row = conn.execute(
                "insert into pgqueue.messages (seq, stream_id, data)"
                " select nextval('pgqueue.seq_1'), 1, 'x' from generate_series(1, 10) returning seq"
            ).fetchall()
            seqs = f"{{[{row[0][0]},{row[-1][0] + 1})}}"
            staged.append(value(conn, "stage", "sink", 0, stream, seqs, priority))
    assert value(conn, "publish_staged", "sink", 0, stream, staged, 30)
    send(conn)
    conn.execute(TAKE.format(1))  # type: ignore[arg-type]
    (c,) = checker.read(conn)
    assert c.of("ready") == set(range(1, 31))
    rows = call(conn, "receive", "s", "c", 100)
    assert seqs_of(rows) == [*range(21, 31), *range(11, 21), *range(1, 11), 31]


@pytest.mark.parametrize("ordering", ORDERINGS)
@pytest.mark.parametrize("how", ["returned", "one publication", "several"])
def test_a_delay_ends_also_when_the_clock_was_set_back(
    conn: psycopg.Connection, stream: int, ordering: str, how: str
) -> None:
    """What was looked at until then is later than the time that it is due."""
    consumer(conn, ordering)
    conn.execute(
        "update pgqueue.consumer_cursors set due_floor = clock_timestamp() + interval '1 h'"
    )
    query = "select pgqueue.send('s', 'x', %s, p_deliver_at => clock_timestamp() + %s::interval)"
    if how == "returned":
        send(conn)
        rows = call(conn, "receive", "s", "c")
        value(conn, "nack", claim_of(rows), p_delay="0.3 s")
    else:
        for key, delay in [("k", "0.3 s"), (None, "0.4 s")][: 1 if how == "one publication" else 2]:
            conn.execute(query, [key, delay])
    assert call(conn, "receive", "s", "c") == []
    wanted, got, end = (2 if how == "several" else 1), 0, time.monotonic() + 10
    while got < wanted and time.monotonic() < end:
        got += len(acked(conn, "s", "c"))
        time.sleep(0.05)
    assert got == wanted
    checker.check(conn)


@pytest.mark.parametrize("ordering", ORDERINGS)
def test_what_fills_holes_comes_before_what_is_beyond_also_past_the_limit(
    conn: psycopg.Connection, stream: int, session: Session, ordering: str
) -> None:
    """A transaction of more publications than one take takes is overtaken, and goes on."""
    consumer(conn, ordering)
    producer = session()
    producer.execute("begin")
    producer.execute(
        "do $$ begin for i in 1..10500 loop perform pgqueue.send('s', 'x', 'k'); end loop; end $$"
    )
    other = send(conn, "other")
    assert acked(conn, "s", "c") == [other]
    producer.execute("commit")
    second = send(producer)
    got = acked(conn, "s", "c", 5000)
    assert len(got) == 10501
    assert got[-1] == second


@pytest.mark.parametrize("ordering", ["key", "stream"])
def test_for_order_many_old_holes_come_before_what_is_beyond(
    conn: psycopg.Connection, stream: int, session: Session, ordering: str
) -> None:
    """Without order, more than 64 beside an old transaction are looked into once a second."""
    consumer(conn, ordering)
    producer, old = session(), session()
    old.execute("begin")
    old.execute("select pg_current_xact_id()")
    producer.execute("begin")
    for _ in range(70):
        send(producer)
        send(conn, "other")
        acked(conn, "s", "c")
    assert cursor(conn, "parked") != "{}"
    producer.execute("commit")
    second = send(producer)
    got = acked(conn, "s", "c")
    assert (len(got), got[-1]) == (71, second)
