"""Free bundles of a consumer without an order: claims take them one by one, without its lock.

Bundles of the size of a claim are cut ahead. What that saves is counted in writes and locks, not in
time, which a busy machine changes. `test_assigning` has what is the same by key.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.sql import checker, clock, internals
from tests.sql.cases import for_each
from tests.sql.internals import cursor_of, ids
from tests.sql.queue import *

pytestmark = [pytest.mark.usefixtures("stream", "allowed_afterwards"), pytest.mark.timeout(120)]

SENT = 12
NOTHING = (0, 0, 0)


@pytest.fixture
def sent(conn: Conn) -> list[int]:
    """What `send_singly` sends."""
    return send_singly(conn)


def send_singly(conn: Conn) -> list[int]:
    """Messages of a consumer, of which the first is claimed, and each other is a free bundle."""
    consumer(conn)
    sent = send_all(conn, ["x"] * SENT)
    assert claim_one(conn) == sent[0]
    assert counted(conn) == (SENT - 1, 1)
    return sent


def counted(conn: Conn) -> tuple[int, int]:
    """How many bundles are free, and how many are claimed."""
    tokens = [bundle.token for bundle in internals.bundles(conn)]
    return tokens.count(None), len(tokens) - tokens.count(None)


def written(conn: Conn, act: Callable[[], object]) -> tuple[tuple[int, ...], ...]:
    """The bundles, cursors and gaps that something inserts, updates and deletes."""
    look = (
        "select relname, n_tup_ins, n_tup_upd, n_tup_del"
        " from pg_stat_xact_user_tables where schemaname = 'pgqueue'"
    )
    with conn.transaction():
        before = {row[0]: row[1:] for row in conn.execute(look).fetchall()}
        act()
        after = {row[0]: row[1:] for row in conn.execute(look).fetchall()}
    return tuple(
        tuple(a - b for a, b in zip(after[table], before[table], strict=True))
        for table in ("consumer_messages", "consumer_cursors", "consumer_gaps")
    )


def locks(conn: Conn, act: Callable[[], object]) -> int:
    """How many locks of consumers somebody holds when it has done something."""
    held = (
        "select count(*) from pg_locks where locktype = 'advisory' and pid = pg_backend_pid()"
        " and classid = _pgqueue.lock_class_consumer()::oid"
        " and database = (select oid from pg_database where datname = current_database())"
    )
    with conn.transaction():
        act()
        return one(conn, held)


def look_rarely(conn: Conn) -> str:
    """What claims look for each second or so is due a minute later.

    So a test counts the same on a machine that pauses between two claims. Returns the
    statement that makes it due in time again.
    """
    usual = one(conn, "select pg_get_functiondef('_pgqueue.not_yet'::regproc)")
    conn.execute(
        "create or replace function _pgqueue.not_yet(p_when timestamptz) returns boolean"
        " language sql volatile as $$ select p_when between clock_timestamp() - interval '1 min'"
        " and clock_timestamp() + interval '2 s' $$"
    )
    return usual


def lock_the_consumer(opened: Session) -> Conn:
    """Another session has the lock of the only consumer until its transaction ends."""
    holder = opened()
    internals.lock_consumer(holder, one(holder, "select consumer_id from pgqueue.consumers"))
    return holder


# What a claim writes and locks


def test_what_was_just_published_is_claimed_as_it_is_taken(conn: Conn) -> None:
    """It is never stored as ready: its bundle is written once, with the claim."""
    look_rarely(conn)
    consumer(conn, notify_done=True)  # which takes with the lock
    assert [send(conn)] == acked(conn, "s", "c")
    send(conn)
    done = written(conn, lambda: receive(conn, 10))
    assert done == ((1, 0, 0), (1, 0, 1), NOTHING)
    sent = [send(conn) for _ in range(5)]
    assert claim_one(conn) == sent[0]
    claim: list[int] = []
    done = written(conn, lambda: claim.append(claim_of(receive(conn, 1))))
    assert done == ((0, 1, 0), NOTHING, NOTHING)
    done = written(conn, lambda: value(conn, "ack", claim[0]))
    assert done == ((0, 0, 1), NOTHING, NOTHING)
    assert acked(conn, "s", "c") == sent[2:]


def test_free_bundles_are_claimed_without_the_lock_of_the_consumer(conn: Conn) -> None:
    look_rarely(conn)
    consumer(conn)
    sent = send_all(conn, ["x"] * 1000)
    assert claim_one(conn) == sent[0]
    assert locks(conn, lambda: claim_one(conn)) == 0
    assert seqs_of(receive(conn, 300)) == sent[2:302]
    assert seqs_of(receive(conn, 20)) == sent[302:322]
    assert locks(conn, lambda: receive(conn, 20)) == 0


@for_each("urgent", [1, 0])
def test_claims_of_others_need_no_lock_while_urgent_ones_are_claimed(
    conn: Conn, urgent: int
) -> None:
    look_rarely(conn)
    consumer(conn)
    first = send(conn, p_priority=urgent)
    assert claim_one(conn) == first
    sent = send_all(conn, ["x"] * 100, p_priority=urgent - 1)
    assert claim_one(conn) == sent[0]
    assert locks(conn, lambda: claim_one(conn)) == 0
    assert locks(conn, lambda: claim_one(conn)) == 0


def test_beside_an_open_producer_free_bundles_are_claimed_without_the_lock(
    conn: Conn, opened: Session
) -> None:
    """It may publish before what is ready: claims look for that each 10 ms, and not each time."""
    usual = look_rarely(conn)
    consumer(conn, notify_done=True)  # which takes with the lock
    producer = opened()
    late = send(producer, p_priority=9)
    sent = send_all(conn, ["x"] * 500)
    assert claim_one(conn) == sent[0]
    assert cursor_of(conn).rows == 1
    for after, held in ((1, 0), (-3600, 1)):
        internals.look_into_gaps_after(conn, after)
        assert locks(conn, lambda: claim_one(conn)) == held
    producer.execute("commit")
    conn.execute(usual.encode())
    time.sleep(0.02)
    assert claim_one(conn) == late


def test_a_poll_of_an_empty_queue_locks_nobody(conn: Conn) -> None:
    look_rarely(conn)
    consumer(conn)
    send(conn)
    assert acked(conn, "s", "c") == [1]
    assert receive(conn) == []
    assert locks(conn, lambda: receive(conn)) == 0


def test_little_that_is_new_waits_while_something_as_urgent_is_ready(conn: Conn) -> None:
    """So that a claim for each message that is sent does not take each by itself."""
    look_rarely(conn)
    consumer(conn)
    sent = send_all(conn, ["x"] * 5)
    assert claim_one(conn) == sent[0]
    sent += [send(conn), send(conn, p_priority=-1)]
    assert locks(conn, lambda: claim_one(conn)) == 0
    assert cursor_of(conn).taken == ids(1, 1)
    assert [row.priority for row in receive(conn)] == [0, 0, 0, 0, -1], "what is new comes too"
    assert cursor_of(conn).taken == ids(1, 3)


# Sizes


@for_each("sizes", [(1, 3, 1, 2, 100), (10, 1, 10, 300), (256, 1, 257)])
def test_a_claim_has_as_many_messages_as_it_wants_whatever_was_cut(
    conn: Conn, sizes: tuple[int, ...]
) -> None:
    """A claim without a look at the size delivered one of ten messages, and acknowledged ten."""
    consumer(conn)
    sent = send_all(conn, ["x"] * (sum(sizes) - 1))
    got: list[int] = []
    for size in sizes:
        rows = receive(conn, size)
        assert len(rows) == min(size, len(sent) - len(got))
        assert value(conn, "ack", claim_of(rows)) == len(rows)
        got += seqs_of(rows)
    assert got == sent


def test_a_bundle_that_a_rollback_left_is_not_too_large_for_a_claim(
    conn: Conn, session: Session
) -> None:
    """It stands before the bundles of the size that others claim by now."""
    consumer(conn)
    sent = send_all(conn, ["x"] * 90)
    other = session()
    got = [receive(conn, 8)]
    other.execute("begin")
    assert len(receive(other, 8)) == 8
    got += [receive(conn, 8), receive(conn, 6)]
    other.execute("rollback")
    while rows := receive(conn, 6):
        got.append(rows)
    assert [len(rows) for rows in got] == [8, 8, *[6] * 12, 2]
    assert sorted(row.seq for rows in got for row in rows) == sent


@for_each("size", [1, 4])
@for_each("how", ["nack", "defer", "dead_letter"])
def test_some_of_bundles_that_became_one_claim_are_settled(conn: Conn, how: str, size: int) -> None:
    """What was joined and then returned in part was lost, and came twice."""
    sent = send_singly(conn)
    rows = receive(conn, size)
    assert seqs_of(rows) == sent[1 : 1 + size]
    assert value(conn, how, claim_of(rows), sent[1:2]) == 1
    assert value(conn, "ack", claim_of(rows)) == size - 1
    left = {seq: state for seq, state in states(conn).items() if seq in sent[1 : 1 + size]}
    assert left == {sent[1]: "dead" if how == "dead_letter" else "ready"}


@for_each("how", ["nack", "expire"])
def test_what_comes_back_in_many_ranges_is_bundles_of_few(conn: Conn, how: str) -> None:
    """To take messages out of a bundle costs in proportion to its ranges."""
    consumer(conn)
    sent = send_all(conn, ["x"] * 400)
    claim = claim_of(receive(conn, 400))
    assert value(conn, "ack", claim, sent[::2]) == 200
    if how == "nack":
        assert value(conn, "nack", claim) == 200
    else:
        clock.end_lease(conn, claim)
        assert claim_one(conn) == sent[1]
    checker.check(conn)
    assert {*acked(conn, "s", "c")} | {sent[1]} == set(sent[1::2])


def test_bundles_that_interleave_are_delivered_in_one_order(conn: Conn) -> None:
    """Of the same priority the first that arrived comes first."""
    consumer(conn)
    sent = send_all(conn, ["x"] * 9, p_priority=1) + send_all(conn, ["y"] * 9)
    claim = claim_of(receive(conn))
    for part in (sent[1::3], sent[2::3], sent[::3]):
        assert value(conn, "nack", claim, part) == 6
    assert len(internals.bundles(conn)) == 6
    assert seqs_of(receive(conn)) == sent


def test_bundles_whose_numbers_go_back_are_claimed_together(conn: Conn) -> None:
    """What a replay brings has arrived later; each hint holds for the claim all the same."""
    consumer(conn, notify_done=True)
    again = send_all(conn, ["x"] * 3)
    assert acked(conn, "s", "c") == again
    sent = send_all(conn, ["x"] * 3)
    assert claim_one(conn) == sent[0]
    value(conn, "replay", "s", "c", "earliest")
    assert sorted(seqs_of(receive(conn, 10))) == again + sent[1:]
    checker.check(conn)


# What comes before the free bundles


def urgent(conn: Conn, sent: list[int]) -> int:
    return send(conn, p_priority=1)


def failed(conn: Conn, sent: list[int]) -> int:
    value(conn, "nack", claim_of(receive(conn, 1)))
    return sent[1]


def expired(conn: Conn, sent: list[int]) -> int:
    clock.end_lease(conn, claim_of(receive(conn, 1)))
    return sent[1]


def delayed(conn: Conn, sent: list[int]) -> int:
    value(conn, "nack", claim_of(receive(conn, 1)), None, seconds(0.5))
    assert claim_one(conn) == sent[2]
    clock.pass_time(conn, seconds(0.5))  # not when claims look for ended leases, once a second
    return sent[1]


@for_each("what", [urgent, failed, expired, delayed])
def test_what_comes_first_comes_before_free_bundles(
    conn: Conn, what: Callable[[Conn, list[int]], int]
) -> None:
    sent = send_singly(conn)
    first = what(conn, sent)
    assert claim_one(conn) == first
    second = next(seq for seq in sent if states(conn)[seq] == "ready")
    assert claim_one(conn) == second


def test_what_failed_between_free_bundles_comes_before_later_ones(
    conn: Conn, opened: Session, sent: list[int]
) -> None:
    """Also when the bundle before it was claimed, and rolled back."""
    claiming = opened()
    assert claim_one(claiming) == sent[1]
    rows = receive(conn, 1)
    assert seqs_of(rows) == sent[2:3]
    claiming.execute("rollback")
    clock.end_lease(conn, claim_of(rows))
    assert acked(conn, "s", "c", 1) == sent[1:]


def test_much_that_is_new_or_more_urgent_does_not_wait(conn: Conn) -> None:
    consumer(conn)
    sent = send_all(conn, ["x"] * 5)
    assert claim_one(conn) == sent[0]
    first = send(conn, p_priority=1)
    assert claim_one(conn) == first
    sent += [send(conn) for _ in range(20)]
    assert claim_one(conn) == sent[1]
    low = [send(conn, p_priority=-5) for _ in range(2)]
    assert receive(conn, 23)[-1].seq == sent[-1], "all but the low ones"
    assert cursor_of(conn).taken == ids(1, 24)
    more = send(conn, p_priority=-1)
    assert seqs_of(receive(conn)) == [more, *low]


def test_what_is_ready_in_several_lanes_comes_with_what_is_new_between_them(conn: Conn) -> None:
    consumer(conn)
    send_all(conn, ["x"] * 3, p_priority=5)
    send_all(conn, ["x"] * 3)
    assert len(receive(conn, 1)) == 1
    between = send(conn, p_priority=3)
    got = receive(conn, 4)
    assert [row.priority for row in got] == [5, 5, 3, 0]
    assert got[2].seq == between


# What was done to the consumer a moment ago


DONE: dict[str, tuple[Callable[[Conn, str, list[int]], object], slice, slice]] = {
    "pause": (lambda conn, c, sent: value(conn, "pause", "s", c), slice(0), slice(1, None)),
    "throttle": (lambda conn, c, sent: alter(conn, c, max_in_flight=1), slice(0), slice(1, None)),
    "cancel": (
        lambda conn, c, sent: value(conn, "cancel", "s", c, [sent[0], *sent[2:4]]),
        slice(1, 2), slice(4, None),
    ),
    "postpone": (
        lambda conn, c, sent: value(conn, "postpone", "s", c, sent[1:4], now(conn) + seconds(60)),
        slice(4, 5), slice(5, None),
    ),
    "earliest": (lambda conn, c, sent: value(conn, "seek", "s", c, "earliest"),
                 slice(1), slice(1, None)),
    "latest": (lambda conn, c, sent: value(conn, "seek", "s", c, "latest"), slice(0), slice(0)),
    "replay": (lambda conn, c, sent: value(conn, "replay", "s", c, "earliest"),
               slice(1, 2), slice(2, None)),
    "retry": (lambda conn, c, sent: value(conn, "retry", "s", c), slice(1, 2), slice(2, None)),
    "receive_where": (
        lambda conn, c, sent: call(conn, "receive_where", "s", c, '$.data == "x"', 2),
        slice(3, 4), slice(4, None),
    ),
    "schedule": (
        lambda conn, c, sent: value(conn, "create_schedule", "s", "t", "@yearly", p_data="x"),
        slice(1, 2), slice(2, None),
    ),
}  # fmt: skip
"""What the next claim of one gets then, and what comes when nothing holds the consumer up."""


def test_the_next_claim_knows_what_was_done_to_its_consumer(conn: Conn) -> None:
    for what in DONE:
        consumer(conn, what)
    sent = send_all(conn, ["x"] * SENT)
    for what, (act, next_, left) in DONE.items():
        assert seqs_of(receive(conn, 1, what)) == sent[:1]
        act(conn, what, sent)
        checker.check(conn)
        assert seqs_of(receive(conn, 1, what)) == sent[next_], what
        value(conn, "resume", "s", what)
        alter(conn, what, max_in_flight=None)
        assert acked(conn, "s", what) == sent[left], what


def test_what_is_noted_of_an_end_is_asked_at_the_claim(conn: Conn, sent: list[int]) -> None:
    alter(conn, keep_history="1 hour")
    assert value(conn, "ack", claim_of(receive(conn, 1))) == 1
    assert internals.count(conn, "completed_messages") == 1


# Cutting ahead


def test_who_claims_one_of_the_last_bundles_cuts_more_unless_another_does(
    conn: Conn, opened: Session
) -> None:
    """So nobody waits for a cutter, and messages come in their order."""
    look_rarely(conn)
    consumer(conn)
    size = one(conn, "select _pgqueue.limit_cut()")
    sent = send_all(conn, ["x"] * 3 * size)
    got = [claim_one(conn), *seqs_of(receive(conn, size - size // 4))]
    left = counted(conn)[0]
    assert 2 < left <= size // 4
    holder = lock_the_consumer(opened)
    got.append(claim_one(conn))
    assert counted(conn)[0] == left - 1
    holder.execute("commit")
    got += [claim_one(conn) for _ in range(min(4, left - 1))]  # each fourth claim looks for more
    assert counted(conn)[0] == left - 1 - min(4, left - 1) + size
    while rows := receive(conn, 1):
        got += seqs_of(rows)
    assert got == sent


def test_what_is_cut_ahead_keeps_urgent_messages_first(conn: Conn) -> None:
    look_rarely(conn)
    consumer(conn)
    size = one(conn, "select _pgqueue.limit_cut()")
    sent = send_all(conn, ["x"] * 8)
    first = send_all(conn, ["x"] * (size + 40), p_priority=5)
    got = [claim_one(conn), *seqs_of(receive(conn, size - size // 4)), claim_one(conn)]
    first.append(send(conn, p_priority=3))
    most = send(conn, p_priority=9)
    while rows := receive(conn, 1):
        got += seqs_of(rows)
    first.insert(size - size // 4 + 2, most)
    assert got == first + sent


@for_each("ordering", ["none", "key"])
def test_a_claim_that_comes_too_late_to_prefetch_keeps_no_lock(
    conn: Conn, opened: Session, ordering: str
) -> None:
    """It read the cursor, and waited for its old claim, while another claim did that."""
    consumer(conn, ordering=ordering)
    clock.stop_looking(conn)
    send_all(conn, ["x"] * 2000, p_keys=[str(i) for i in range(2000)])
    old = claim_of(receive(conn, 1))
    ahead = "select (hints).prefetch_at from pgqueue.consumer_cursors order by version desc limit 1"
    free = "select min(bundle_no) from pgqueue.consumer_messages where token is null and lane = 0"
    free += " and message_count = 1"
    while one(conn, free) < one(conn, ahead):
        receive(conn, 1)
    late, holder = opened(), opened()
    value(holder, "extend", old)
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(receive, late, 1, p_ack=old)
        wait_for_a_lock(conn)
        before = one(conn, ahead)
        receive(conn, 1)
        after = one(conn, ahead)
        holder.execute("commit")  # before any check: the pool ends only with the claim
        assert len(waits.result(30)) == 1
    assert after > before
    held = "select count(*) from pg_locks where locktype = 'advisory' and objsubid = 2 and pid = %s"
    assert one(conn, held, late.info.backend_pid) == 0
    late.execute("commit")


# Beside other sessions


@for_each("end", ["rollback", "commit prepared 'p'", "rollback prepared 'p'"])
def test_what_an_open_transaction_claims_is_nobodys_until_its_end(
    conn: Conn, opened: Session, end: str
) -> None:
    """Nobody waits for it; and when it is rolled back, nobody has the id of the claim."""
    sent = send_singly(conn)
    worker = opened()
    rows = receive(worker, 1)
    assert seqs_of(rows) == sent[1:2]
    if "prepared" in end:
        worker.execute("prepare transaction 'p'")
    assert value(conn, "cancel", "s", "c", sent[-1:]) == 1
    assert seqs_of(receive(conn, 2)) == sent[2:4]
    (conn if "prepared" in end else worker).execute(end.encode())
    checker.check(conn)
    committed = end.startswith("commit")
    assert value(conn, "ack", claim_of(rows)) == committed
    assert acked(conn, "s", "c", 1) == sent[1:2] * (not committed) + sent[4:-1]


@for_each("end", ["commit", "rollback"])
def test_of_two_claimers_that_see_the_same_publication_one_takes_it(
    conn: Conn, session: Session, end: str
) -> None:
    """The second one waits, since all that there is may be left to it."""
    consumer(conn, notify_done=True)  # which takes with the lock
    sent = send(conn)
    assert acked(conn, "s", "c") == [sent]
    sent = send(conn)
    first, second = session(), session()
    first.execute("begin")
    assert seqs_of(receive(first)) == [sent]
    with ThreadPoolExecutor(1) as pool:
        got = pool.submit(receive, second)
        wait_for_a_lock(conn)
        first.execute(end.encode())
        assert seqs_of(got.result()) == ([sent] if end == "rollback" else [])


def test_a_claim_of_any_size_takes_what_is_free_beside_who_has_the_lock(
    conn: Conn, session: Session, opened: Session
) -> None:
    """Only where nothing is free it waits, and holds nothing then that the other may wait for."""
    consumer(conn)
    sent = send_all(conn, ["x"] * 1000)
    assert claim_one(conn) == sent[0]
    holder, claimer = lock_the_consumer(opened), session()
    conn.execute("set lock_timeout = '100 ms'")
    got = [seq for size in (3, 1, 300, 7, 1000) for seq in seqs_of(receive(conn, size))]
    assert got == sent[1:]
    last = send(conn)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(receive, claimer, 3)
        wait_for_a_lock(conn)
        holder.execute("select from pgqueue.consumer_messages for update nowait")
        holder.execute("commit")
        assert seqs_of(waiting.result()) == [last]


def test_a_nack_that_waits_for_an_acknowledgement_lets_others_claim(
    conn: Conn, session: Session, sent: list[int]
) -> None:
    """It needs the consumer's lock, too, and lets go of that between its tries."""
    claim = claim_of(receive(conn, 1))
    acking, returning = session(), session()
    acking.execute("begin")
    assert value(acking, "ack", claim) == 1
    returning.execute("set lock_timeout = '10 s'")
    new = send(conn)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(value, returning, "nack", claim)
        wait_for_a_lock(conn)
        got = [*seqs_of(receive(conn, 300)), *seqs_of(receive(conn, 300))]
        assert got == [*sent[2:], new], "which needs the lock"
        acking.execute("commit")
        assert waiting.result() == 0
