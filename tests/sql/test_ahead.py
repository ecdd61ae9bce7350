"""Claims of new messages ahead of the cursor: nobody waits for another one's commit."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest
from psycopg import errors

from spark_pgqueue.postgres import connection
from tests.sql import checker, clock, internals
from tests.sql.cases import for_each
from tests.sql.cost import cost as buffers
from tests.sql.queue import *

pytestmark = pytest.mark.usefixtures("stream")

AHEAD = "select count(*) from pgqueue.taken_ahead"
CLAIM = "select pgqueue.claim('s', 'c', 1)"


@pytest.fixture
def begun(conn: Conn, stream: int) -> int:
    """What `begin` makes."""
    return begin(conn)


def begin(conn: Conn) -> int:
    """A consumer that has claimed before, and looks for leases later; returns its id."""
    id_ = consumer(conn)
    send(conn)
    assert acked(conn, "s", "c") == [1]
    clock.stop_looking(conn)
    conn.execute("set lock_timeout = '2 s'")
    return id_


@pytest.fixture
def opened(conn: Conn, session: Session) -> Callable[[], Conn]:
    """Begins transactions."""

    def begin() -> Conn:
        one_more = session()
        one_more.execute("begin")
        one_more.execute("set local lock_timeout = '1 ms'")
        return one_more

    return begin


def cycle(conn: Conn) -> int:
    """Send a message, claim it, and acknowledge it; returns how many pages the claim reads."""
    send(conn)
    spent = buffers(conn, CLAIM)
    value(conn, "ack", internals.last_claim(conn, "c"))
    return spent


def cycles(conn: Conn, count: int) -> None:
    """So many of these, in transactions of their own and without a way through Python."""
    conn.execute(
        "do $$ declare acked bigint; begin"
        f" for i in 1..{count} loop perform pgqueue.send('s', 'x');"
        " select sum(pgqueue.ack(claim_id)) into acked from pgqueue.claim('s', 'c', 1);"
        " if acked is distinct from 1 then raise 'round %: % messages', i, acked; end if;"
        " commit; end loop; end $$".encode()
    )


# What others have


@pytest.mark.usefixtures("begun")
def test_claims_in_open_transactions_get_different_messages_and_wait_for_nobody(
    conn: Conn, opened: Callable[[], Conn]
) -> None:
    sent = [send(conn) for _ in range(4)]
    workers = [opened() for _ in range(3)]
    assert [seqs_of(receive(worker, 1)) for worker in workers] == [[seq] for seq in sent[:3]]
    workers[1].execute("rollback")
    assert seqs_of(receive(conn, 1)) == sent[1:2]
    assert seqs_of(receive(conn, 1)) == sent[3:]
    assert receive(conn, 1) == []
    workers[0].execute("commit")
    workers[2].execute("commit")
    assert receive(conn, 1) == []
    assert set(states(conn).values()) == {"claimed"}
    checker.check(conn)


@for_each("end", ["commit", "rollback"])
def test_a_transaction_that_stays_open_holds_back_only_what_it_claimed(
    conn: Conn, opened: Callable[[], Conn], end: str
) -> None:
    begin(conn)
    worker = opened()
    first = send(conn)
    assert seqs_of(receive(worker, 1)) == [first]
    cycles(conn, 400)
    checker.check(conn)
    worker.execute(end.encode())
    assert seqs_of(receive(conn, 1)) == [first] * (end == "rollback")
    assert receive(conn, 1) == []
    clock.set_hints(conn, "'-infinity'")
    assert receive(conn, 1) == []
    assert one(conn, AHEAD) == 0
    checker.check(conn)


@pytest.mark.usefixtures("begun")
def test_what_a_claim_beside_many_others_costs_does_not_grow(
    conn: Conn, opened: Callable[[], Conn]
) -> None:
    worker = opened()
    send(conn)
    receive(worker, 1)

    few = sorted(cycle(conn) for _ in range(60))[30]
    cycles(conn, 600)
    assert sorted(cycle(conn) for _ in range(60))[30] <= 1.5 * few + 20
    assert buffers(conn, CLAIM) <= 1.5 * few + 20
    send(conn)
    with conn.transaction():  # in which statistics are not sent, and so not reset
        before = one(conn, ROWS_READ)
        assert len(receive(conn, 1)) == 1
        assert one(conn, ROWS_READ) - before <= 400


ROWS_READ = """
select coalesce(sum(idx_tup_fetch), 0) from pg_stat_xact_user_tables
where schemaname = 'pgqueue' and relname in ('publications', 'taken_ahead')
"""


@pytest.mark.usefixtures("begun")
def test_a_poll_beside_what_was_taken_ahead_needs_no_lock(conn: Conn) -> None:
    """But for one in a second, which looks at the leases."""
    in_turn = (
        "select coalesce(sum(calls), 0) from pg_stat_xact_user_functions"
        " where funcname = 'claim_locked'"
    )
    found = []
    for _ in range(5):
        send(conn)
        assert len(receive(conn, 1)) == 1
        with conn.transaction():
            conn.execute("set local track_functions = 'all'")
            before = one(conn, in_turn)
            assert receive(conn, 1) == []
            found.append(one(conn, in_turn) - before)
    assert sum(found) <= 1


@pytest.mark.usefixtures("begun")
def test_a_claim_beside_an_old_snapshot_costs_the_same(conn: Conn, session: Session) -> None:
    old = session()
    old.execute("begin isolation level repeatable read")
    old.execute("select 1")

    few = sorted(cycle(conn) for _ in range(40))[20]
    cycles(conn, 1500)
    assert sorted(cycle(conn) for _ in range(40))[20] <= few + 10
    clock.set_hints(conn, "'-infinity'")
    assert receive(conn, 1) == []
    assert one(conn, AHEAD) == 0
    assert cycle(conn) <= few + 10


@pytest.mark.usefixtures("begun")
def test_what_is_claimed_ahead_counts_as_taken(conn: Conn) -> None:
    before = stats(conn)
    sent = [send(conn) for _ in range(3)]
    claim = claim_of(receive(conn, 1))
    assert one(conn, AHEAD) == 1
    assert states(conn) == {sent[0]: "claimed", sent[1]: "new", sent[2]: "new"}
    after = stats(conn)
    assert (after.new, after.taken, after.settled) == (2, before.taken + 1, before.settled)
    (position,) = call(conn, "consumer_position", "s", "c")
    assert position.next_seq == sent[1]
    value(conn, "ack", claim)
    assert stats(conn).settled == before.settled + 1
    checker.check(conn)


def test_a_lease_that_ends_is_seen_though_the_cursor_did_not_know_of_the_claim(
    conn: Conn, stream: int
) -> None:
    consumer(conn)
    send(conn)
    assert acked(conn, "s", "c") == [1]
    sent = send(conn)
    claim = claim_of(receive(conn, 1))
    assert one(conn, AHEAD) == 1
    clock.end_lease(conn, claim)
    until = time.monotonic() + 5
    while not (rows := receive(conn, 1)):
        assert time.monotonic() < until
    assert seqs_of(rows) == [sent]


@for_each("urgent", [1, -1])
def test_the_most_urgent_comes_first(conn: Conn, urgent: int) -> None:
    begin(conn)
    usual, other = send(conn), send(conn, p_priority=urgent)
    assert [claim for _ in range(2) for claim in seqs_of(receive(conn, 1))] == (
        [other, usual] if urgent > 0 else [usual, other]
    )
    sent = [send(conn, p_priority=p) for p in (0, 1, 0)]
    assert seqs_of(receive(conn, 3)) == [sent[1], sent[0], sent[2]]


@pytest.mark.usefixtures("begun")
def test_of_a_publication_in_parts_a_claim_gets_the_most_urgent_part(
    conn: Conn, stream: int
) -> None:
    """A sink publishes rows of several priorities at once."""
    blocks = [stage(conn, stream, 2, p_priority=priority) for priority in (0, 5)]
    assert publish(conn, stream, blocks, 4)
    rows = receive(conn, 2)
    assert [row.priority for row in rows] == [5, 5]
    assert [row.priority for row in receive(conn, 2)] == [0, 0]
    checker.check(conn)


STALE = """
select (_pgqueue.claim_new_ahead(c, _pgqueue.cursor(c.consumer_id), 1, array(
            select p from pgqueue.publications p where publication_id between %s and %s
            order by publication_id))).message_count
from pgqueue.consumers c where consumer_id = %s
"""


@for_each("more", [False, True])
def test_a_claim_that_comes_late_goes_on_if_more_is_new(conn: Conn, more: bool) -> None:
    """What it has read was taken before it had the lock."""
    begun = begin(conn)
    send(conn)
    if more:
        send(conn)
    last = one(conn, "select max(publication_id) from pgqueue.publications")
    assert len(receive(conn, 1)) == 1
    assert one(conn, STALE, last - more, last, begun) == more


# What only the cursor takes


NOT_PLAIN = {
    "several messages": lambda conn: send_all(conn, ["x"] * 3)[0],
    "delayed": lambda conn: send(conn, p_deliver_at=now(conn) + seconds(60)) and None,
    "expires": lambda conn: send(conn, p_expires_at=now(conn) + seconds(60)),
    "for others": lambda conn: send(conn, p_consumers=["other"]) and None,
}


@for_each("kind", NOT_PLAIN)
def test_what_cannot_be_taken_ahead_is_taken_beside_a_claim_that_stays_open(
    conn: Conn, opened: Callable[[], Conn], kind: str
) -> None:
    begin(conn)
    consumer(conn, "other")
    worker = opened()
    first = send(conn)
    assert seqs_of(receive(worker, 1)) == [first]
    special = NOT_PLAIN[kind](conn)
    assert seqs_of(receive(conn, 1)) == ([special] if special else [])
    checker.check(conn)
    worker.execute("commit")
    last = send(conn)
    assert acked(conn, "s", "c", 1)[-1] == last
    checker.check(conn)


@for_each("committed", [True, False])
def test_a_publication_that_becomes_visible_late_is_found(
    conn: Conn, opened: Callable[[], Conn], committed: bool
) -> None:
    begin(conn)
    producer = opened()
    late = send(producer)
    sent = [send(conn) for _ in range(20)]
    assert [seq for _ in sent for seq in seqs_of(receive(conn, 1))] == sent
    dead_publication(conn)
    producer.execute("commit" if committed else "rollback")
    assert seqs_of(receive(conn, 1)) == [late] * committed
    clock.look_again(conn)
    assert receive(conn, 1) == []
    assert receive(conn, 1) == []
    assert one(conn, AHEAD) == 0
    assert not internals.cursor_of(conn).gaps
    checker.check(conn)


# Who moves the cursor, or changes the consumer


def to_keys(conn: Conn) -> None:
    call(conn, "pause", "s", "c")
    alter(conn, per_key_limit=1)
    call(conn, "resume", "s", "c")


MOVES: dict[str, tuple[Callable[[Conn], object], bool]] = {
    "seek to the beginning": (lambda conn: call(conn, "seek", "s", "c", "earliest"), True),
    "seek to the end": (lambda conn: call(conn, "seek", "s", "c", "latest"), False),
    "replay": (lambda conn: call(conn, "replay", "s", "c", "earliest"), False),
    "cancel": (lambda conn: call(conn, "cancel", "s", "c", [2, 3]), False),
    "postpone": (
        lambda conn: call(conn, "postpone", "s", "c", [3], now(conn) + seconds(3600)), False,
    ),
}  # fmt: skip


@for_each("move", MOVES)
@for_each("end", ["commit", "rollback"])
def test_a_move_waits_for_claims_that_are_being_made(
    conn: Conn, session: Session, opened: Callable[[], Conn], move: str, end: str
) -> None:
    begin(conn)
    sent = [send(conn) for _ in range(3)]
    worker = opened()
    assert seqs_of(receive(worker, 1)) == sent[:1]
    act, again = MOVES[move]
    impatient = session()
    impatient.execute("set lock_timeout = '50 ms'")
    with pytest.raises(errors.LockNotAvailable):
        act(impatient)
    with ThreadPoolExecutor(1) as pool:
        moved = pool.submit(act, conn)
        wait_for_a_lock(worker)
        assert not moved.done()
        worker.execute(end.encode())
        moved.result()
    checker.check(conn)
    left = acked(conn, "s", "c", 1)
    if again:
        assert left == [1, *sent]
    elif move == "seek to the end":
        assert left == []
    elif move == "replay":
        # what the worker holds is not delivered to others; the first one was done before
        assert sorted(left) == [1, *sent[(end == "commit") :]]
    elif move == "postpone":
        assert left == [*sent[(end == "commit") : 1], *sent[2:]]
    else:
        assert left == sent[2:]
    checker.check(conn)


@for_each("end", ["commit", "rollback"])
def test_a_consumer_is_dropped_after_claims_that_are_being_made(
    conn: Conn, opened: Callable[[], Conn], end: str
) -> None:
    begin(conn)
    send(conn)
    worker = opened()
    assert receive(worker, 1)
    with ThreadPoolExecutor(1) as pool:
        dropped = pool.submit(call, conn, "drop_consumer", "s", "c")
        wait_for_a_lock(worker)
        assert not dropped.done()
        worker.execute(end.encode())
        dropped.result()
    for table in ("consumer_messages", "taken_ahead", "consumer_cursors"):
        assert one(conn, f"select count(*) from pgqueue.{table}") == 0


@pytest.mark.usefixtures("begun")
def test_a_consumer_begins_to_go_by_key_only_without_open_claims(
    conn: Conn, opened: Callable[[], Conn]
) -> None:
    send(conn, p_key="a")
    worker = opened()
    claim = claim_of(receive(worker, 1))
    with ThreadPoolExecutor(1) as pool:
        changed = pool.submit(to_keys, conn)
        wait_for_a_lock(worker)
        assert not changed.done()
        worker.execute("commit")
        with pytest.raises(psycopg.Error, match="open claims: 1"):
            changed.result()
    value(conn, "ack", claim)
    to_keys(conn)
    sent = send(conn, p_key="a")
    assert acked(conn, "s", "c") == [sent]
    checker.check(conn)


def let_it_pause(worker: Conn) -> None:
    """A claim of this session, ahead of the cursor, pauses when it has read the cursor."""
    text = one(worker, "select pg_get_functiondef('_pgqueue.claim_when_idle'::regproc)")
    pause = "perform pg_sleep(0.7) where current_setting('test.pauses', true) = 'yes';"
    assert "\nbegin\n" in text
    worker.execute(text.replace("\nbegin\n", f"\nbegin {pause}\n", 1).encode())
    worker.execute("set test.pauses = 'yes'")


@pytest.mark.usefixtures("begun")
def test_a_claim_that_began_before_the_consumer_was_changed_takes_nothing_ahead(
    conn: Conn, session: Session
) -> None:
    worker = session()
    let_it_pause(worker)
    send(conn, p_key="a")
    with ThreadPoolExecutor(1) as pool:
        claimed = pool.submit(receive, worker, 1)
        time.sleep(0.1)
        to_keys(conn)
        assert not claimed.done()
        got = seqs_of(claimed.result())
    send(conn, p_key="a")
    assert len(got + seqs_of(receive(conn, 2))) == 1
    assert one(conn, AHEAD) == 0
    checker.check(conn)


@pytest.mark.usefixtures("begun")
def test_who_cuts_for_later_claims_leaves_what_another_one_claims_ahead(
    conn: Conn, session: Session
) -> None:
    worker = session()
    let_it_pause(worker)
    worker.execute("begin")
    with ThreadPoolExecutor(1) as pool:
        later = send(conn, p_priority=-2)
        claimed = pool.submit(receive, worker, 1)
        time.sleep(0.1)
        sent = send_all(conn, ["x"] * 600, p_priority=-1)
        assert seqs_of(receive(conn, 1)) == sent[:1]
        urgent = send(conn)
        assert not claimed.done()
        assert seqs_of(claimed.result()) == [urgent]
    for seq in sent[1:300]:
        assert seqs_of(receive(conn, 1)) == [seq]
    worker.execute("commit")
    assert acked(conn, "s", "c", 1) == [*sent[300:], later]
    checker.check(conn)


@pytest.mark.usefixtures("begun")
def test_retention_keeps_what_is_claimed_ahead(conn: Conn, opened: Callable[[], Conn]) -> None:
    sent = [send(conn) for _ in range(3)]
    worker = opened()
    assert seqs_of(receive(worker, 1)) == sent[:1]
    assert seqs_of(receive(conn, 1)) == sent[1:2]
    call(conn, "set_retention", "s", seconds(0.001))
    time.sleep(0.01)
    maintain(conn)
    assert seqs_of(receive(conn, 1)) == sent[2:]
    worker.execute("commit")
    checker.check(conn)


# Many at once


def test_many_claimers_get_each_message_once(conn: Conn, stream: int, url: str) -> None:
    """Beside rollbacks of producers and claimers, moves of the cursor, and what is not plain."""
    consumer(conn)
    until = time.monotonic() + 3

    def produce(seed: int) -> list[int]:
        rng, sent = random.Random(seed), []
        with connection.connect(url) as own:
            while time.monotonic() < until:
                time.sleep(rng.expovariate(150))
                with own.transaction(force_rollback=rng.random() < 0.1) as t:
                    urgent = rng.choice([0] * 9 + [1])
                    seqs = (
                        send_all(own, ["x"] * rng.choice([2, 5]))
                        if rng.random() < 0.1
                        else [send(own, p_priority=urgent) for _ in range(rng.choice([1, 1, 1, 2]))]
                    )
                    if rng.random() < 0.1:
                        time.sleep(0.02)
                if not t.force_rollback:
                    sent += seqs
        return sent

    def work(seed: int) -> list[int]:
        rng, got = random.Random(seed), []
        with connection.connect(url) as own:
            idle = 0
            while idle < 150:
                rolled_back = rng.random() < 0.1
                with own.transaction(force_rollback=rolled_back):
                    rows = receive(own, rng.choice([1, 1, 1, 3]))
                    if rng.random() < 0.05:
                        time.sleep(0.03)
                    acks = bool(rows) and rng.random() < 0.5 and value(own, "ack", rows[0].claim_id)
                if rows and not rolled_back:
                    if not acks and rng.random() < 0.1:
                        value(own, "nack", rows[0].claim_id)
                        continue
                    if not acks:
                        assert value(own, "ack", rows[0].claim_id) == len(rows)
                    got += seqs_of(rows)
                idle = 0 if rows or time.monotonic() < until else idle + 1
                if not rows:
                    time.sleep(0.001)
        return got

    with ThreadPoolExecutor(8) as pool:
        producers = [pool.submit(produce, seed) for seed in range(2)]
        workers = [pool.submit(work, seed) for seed in range(10, 15)]
        while time.monotonic() < until:
            time.sleep(0.2)
            checker.check(conn)
        sent = [seq for p in producers for seq in p.result()]
        got = Counter(seq for w in workers for seq in w.result())
    assert [seq for seq, n in got.items() if n > 1] == []
    assert got.keys() == set(sent)
    checker.check(conn)


@pytest.mark.parametrize(("size", "expiry"), [(1, None), (3, "2100-01-01")])
def test_a_claim_that_gets_nothing_keeps_nobody_from_what_is_new(
    conn: Conn, begun: int, opened: Callable[[], Conn], size: int, expiry: str | None
) -> None:
    """It cannot have what is new ahead of the cursor, and another session has the other lock."""
    holder, poller = opened(), opened()
    holder.execute("select _pgqueue.lock_consumer(%s)", [begun])
    send_all(conn, ["x"] * 3, p_expires_at=expiry)
    assert receive(poller, size) == []
    assert one(conn, "select _pgqueue.try_lock_new(%s)", begun)
