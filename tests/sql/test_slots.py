"""Slots: what is cut ahead for small claims is claimed, settled, moved and counted as all else."""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from psycopg.types.json import Jsonb

from spark_pgqueue.postgres import connection, schema
from tests.sql import checker, clock, internals
from tests.sql.queue import (
    Conn,
    Reader,
    Session,
    acked,
    call,
    claim_of,
    consumer,
    now,
    one,
    receive,
    scanned,
    seconds,
    send,
    send_all,
    seqs_of,
    states,
    stats,
    value,
    wait_for_a_lock,
)

pytestmark = [pytest.mark.usefixtures("stream", "allowed_afterwards"), pytest.mark.timeout(120)]

SENT = 12


@pytest.fixture
def sent(conn: Conn) -> list[int]:
    """Messages of a consumer, of which the first is claimed, and the others are free slots."""
    consumer(conn)
    sent = send_all(conn, ["x"] * SENT)
    assert seqs_of(receive(conn, 1)) == sent[:1]
    assert slots(conn) == (SENT - 1, 1)
    return sent


def slots(conn: Conn) -> tuple[int, int]:
    """How many slots are free, and how many are claimed."""
    return (
        one(conn, "select count(*) from pgqueue.slots where token is null"),
        one(conn, "select count(*) from pgqueue.slots where token is not null"),
    )


def claims_of(rows: list[Any]) -> int:
    claim = claim_of(rows)
    assert claim is not None
    return claim


# The code


def test_who_has_a_consumers_lock_has_no_slots_or_says_why() -> None:
    """A function that locks a consumer and goes on with its runs lets the slots become runs."""
    without = {
        "_pgqueue.own_consumer": "it is the function that does that",
        "_pgqueue.lock_consumer_soon": "claim_in_turn() puts free slots back, and claims others",
        "_pgqueue.claim_unlocked": "claim_in_turn() does, or it claims what is ready",
        "_pgqueue.start_taking": "its caller has found no free slot",
        "_pgqueue.deal_ahead": "what it deals comes after the slots",
        "_pgqueue.cut_ahead": "it cuts more slots, behind those that are there",
        "_pgqueue.promote_slot": "it makes a claim of one slot",
        "_pgqueue.lock_claim": "its callers have a claim, whose runs are no slots any more",
        "_pgqueue.skip": "skip_locked() does",
        "_pgqueue.forget_readers": "it calls own_consumer(), too",
        "_pgqueue.change_limits": "it calls without_slots()",
        "_pgqueue.own_consumer_and_slots": "it calls without_slots()",
        "_pgqueue.tend_newest": "a consumer with per_key_latest is not simple",
        "_pgqueue.pass_over_missing": "skip() does",
        "_pgqueue.drop_consumer": "forget_runs() deletes them",
        "_pgqueue.move": "forget_runs() deletes them",
        "_pgqueue.take_for_group": "a group is not simple",
        "pgqueue.note_offset": "a group is not simple",
        "pgqueue.lease_partitions": "a group is not simple",
        "pgqueue.leave_group": "a group is not simple",
        "pgqueue.replay": "it looks at runs by unfinished(), which has the slots",
        "pgqueue.redrive": "it adds runs, which come after the slots, or save_cursor() notes it",
        "pgqueue.purge_dead": "it has to do with dead letters alone",
        "pgqueue.retry": "what it changes was delivered before, and slots were not",
    }
    locks = re.compile(r"_pgqueue\.(?:try_)?lock_consumer\(")
    found = set()
    for path in schema.sql_files():
        code = re.sub(r"--[^\n]*", "", path.read_text())
        for part in re.split(r"(?m)(?=^create or replace (?:function|procedure) )", code)[1:]:
            name = re.match(r"create or replace \w+ (_?pgqueue\.\w+)", part)
            assert name is not None
            if locks.search(part.partition("as $$")[2]):
                found.add(name[1])
    assert found == set(without)


# Claims of other sizes


def test_a_claim_has_as_many_messages_as_it_wants_whatever_the_slots_have(
    conn: Conn, sent: list[int]
) -> None:
    """A claim without a look at the size delivered one of ten messages, and acknowledged ten."""
    assert seqs_of(receive(conn, 3)) == sent[1:4]
    assert seqs_of(receive(conn, 1)) == sent[4:5]
    rows = receive(conn, 2)
    assert seqs_of(rows) == sent[5:7]
    assert value(conn, "ack", claims_of(rows)) == 2
    assert seqs_of(receive(conn, 100)) == sent[7:]


def test_of_a_slot_that_is_too_large_the_rest_stays(conn: Conn) -> None:
    consumer(conn)
    sent = send_all(conn, ["x"] * 40)
    assert seqs_of(receive(conn, 10)) == sent[:10]
    rows = receive(conn, 1)
    assert seqs_of(rows) == sent[10:11]
    assert value(conn, "ack", claims_of(rows)) == 1
    assert seqs_of(receive(conn, 10)) == sent[11:21]
    assert seqs_of(receive(conn, 300)) == sent[21:]


# Settling


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("how", ["nack", "defer", "dead_letter"])
def test_some_or_all_of_a_slot_is_settled_as_of_any_claim(conn: Conn, how: str, size: int) -> None:
    """What was joined and then returned in part was lost, and came twice."""
    consumer(conn)
    sent = send_all(conn, ["x"] * SENT)
    receive(conn, 1)
    rows = receive(conn, size)
    assert seqs_of(rows) == sent[1 : 1 + size]
    assert value(conn, how, claims_of(rows), sent[1:2]) == 1
    assert value(conn, "ack", claims_of(rows)) == size - 1
    left = {seq: state for seq, state in states(conn, "c").items() if seq in sent[1 : 1 + size]}
    assert left == {sent[1]: "dead" if how == "dead_letter" else "ready"}


def test_a_slot_is_extended_in_place_and_acknowledged_in_part(conn: Conn, sent: list[int]) -> None:
    rows = receive(conn, 4)
    claim = claims_of(rows)
    assert value(conn, "extend", claim, timedelta(hours=1)) == 4
    assert slots(conn) == (SENT - 5, 2)
    assert value(conn, "ack", claim, sent[1:3]) == 2
    assert slots(conn) == (SENT - 5, 2)
    assert value(conn, "extend", claim) == 2
    (row,) = internals.rows(conn, "select * from pgqueue.open_claims where claim_id = %s", claim)
    assert row.remaining == 2
    assert row.lease_until > now(conn) + seconds(3000)
    assert value(conn, "ack", claim) == 2
    assert value(conn, "ack", claim) == 0


def test_a_slot_of_which_too_many_ranges_are_left_becomes_a_claim(conn: Conn) -> None:
    consumer(conn)
    size = 2 * one(conn, "select _pgqueue.limit_ranges()") + 2
    sent = send_all(conn, ["x"] * 4 * size)
    claims_of(receive(conn, size))
    claim = claims_of(receive(conn, size))
    held, claimed = sent[size : 2 * size], slots(conn)[1]
    assert value(conn, "ack", claim, held[:-2:2]) == size // 2 - 1
    assert slots(conn)[1] == claimed
    assert value(conn, "ack", claim, held[-2:-1]) == 1
    assert slots(conn)[1] == claimed - 1
    assert value(conn, "ack", claim, held) == size // 2


def test_the_lease_of_a_slot_ends(conn: Conn, sent: list[int]) -> None:
    """It comes again, is counted, and its owner is too late."""
    rows = receive(conn, 1)
    clock.end_lease(conn, claims_of(rows))
    again = receive(conn, 1)
    assert [(row.seq, row.deliver_count) for row in again] == [(sent[1], 2)]
    assert value(conn, "ack", claims_of(rows)) == 0


def test_a_claim_that_was_rolled_back_gives_its_slot_back_and_its_id_to_nobody(
    conn: Conn, session: Session, sent: list[int]
) -> None:
    """Also if the slots were put back meanwhile."""
    worker = session()
    worker.execute("begin")
    rows = receive(worker, 1)
    assert seqs_of(rows) == sent[1:2]
    assert value(conn, "cancel", "s", "c", sent[-1:]) == 1, "which puts the other slots back"
    worker.execute("rollback")
    checker.check(conn)
    assert value(conn, "ack", claims_of(rows)) == 0
    assert sorted(seqs_of(receive(conn, 3)) + acked(conn, "s", "c")) == sent[1:-1]


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_a_slot_in_a_prepared_transaction_waits_for_its_end(
    conn: Conn, session: Session, sent: list[int], end: str
) -> None:
    """Also over a move of the other slots: nobody waits for it, and nobody gets its message."""
    worker = session()
    worker.execute("begin")
    rows = receive(worker, 1)
    assert seqs_of(rows) == sent[1:2]
    worker.execute("prepare transaction 'slot'")
    assert value(conn, "cancel", "s", "c", sent[-1:]) == 1
    assert seqs_of(receive(conn, 2)) == sent[2:4]
    conn.execute(f"{end} prepared 'slot'".encode())
    checker.check(conn)
    assert value(conn, "ack", claims_of(rows)) == (end == "commit")
    left = sent[4:-1] if end == "commit" else sent[1:2] + sent[4:-1]
    assert sorted(acked(conn, "s", "c")) == left


# What comes before the slots


def test_an_urgent_message_comes_before_the_slots(conn: Conn, sent: list[int]) -> None:
    urgent = send(conn, p_priority=1)
    assert seqs_of(receive(conn, 1)) == [urgent]
    assert seqs_of(receive(conn, 1)) == sent[1:2]
    send(conn, p_priority=5, p_consumers=["other"]) if consumer(conn, "other") else None
    assert seqs_of(receive(conn, 1)) == sent[2:3]


def test_what_failed_comes_before_the_slots(conn: Conn, sent: list[int]) -> None:
    rows = receive(conn, 1)
    value(conn, "nack", claims_of(rows))
    assert seqs_of(receive(conn, 1)) == sent[1:2]
    assert seqs_of(receive(conn, 1)) == sent[2:3]


def test_what_failed_between_free_slots_comes_before_later_ones(
    conn: Conn, session: Session
) -> None:
    """The slot before it was rolled back: the line gets both sides of it as one run."""
    consumer(conn)
    sent = send_all(conn, ["x"] * 8)
    assert seqs_of(receive(conn, 1)) == sent[:1]
    claiming = session()
    claiming.execute("begin")
    assert seqs_of(receive(claiming, 1)) == sent[1:2]
    failed = receive(conn, 1)
    assert seqs_of(failed) == sent[2:3]
    claiming.execute("rollback")
    clock.end_lease(conn, claim_of(failed))
    found = seqs_of(receive(conn, 1))
    checker.check(conn)
    assert found + acked(conn, "s", "c", 1) == sent[1:]


def test_a_delay_that_ends_is_noticed_beside_slots(conn: Conn, sent: list[int]) -> None:
    rows = receive(conn, 1)
    value(conn, "nack", claims_of(rows), None, seconds(3600))
    assert seqs_of(receive(conn, 1)) == sent[2:3]
    assert slots(conn)[0] > 0
    clock.end_delay(conn, sent[1])
    assert seqs_of(receive(conn, 1)) == sent[1:2]


def test_a_late_commit_is_noticed_beside_slots(conn: Conn, session: Session) -> None:
    consumer(conn)
    late = session()
    late.execute("begin")
    first = send(late, p_priority=3)
    sent = send_all(conn, ["x"] * SENT)
    assert seqs_of(receive(conn, 1)) == sent[:1]
    late.execute("commit")
    clock.look_again(conn)
    assert seqs_of(receive(conn, 1)) == [first]


# Who looks, and who moves


def test_slots_are_counted_as_what_they_are(conn: Conn, sent: list[int]) -> None:
    found = stats(conn, "c")
    assert (found.ready, found.claimed, found.claims, found.backlog) == (SENT - 1, 1, 1, SENT - 1)
    assert set(states(conn, "c").values()) == {"ready", "claimed"}
    (row,) = internals.rows(conn, "select * from pgqueue.open_claims")
    assert (row.messages, row.remaining, row.first_seq) == (1, 1, sent[0])
    (because,) = call(conn, "explain_message", "s", "c", sent[3])
    assert (because.state, because.because) == (
        "ready",
        "to be delivered, after 2 messages before it",
    )
    (because,) = call(conn, "explain_message", "s", "c", sent[0])
    assert because.state == "claimed"
    assert [row.seq for row in call(conn, "peek", "s", "c", 3)] == sent[1:4]
    pending = scanned(conn, "pending", "c")
    assert sum(row.hi - row.lo for row in pending) == SENT
    (held,) = scanned(conn, "claimed", "c")
    assert (held.lo, held.hi) == (sent[0], sent[0] + 1)
    assert (
        value(conn, "consumer_backlog", one(conn, "select min(consumer_id) from pgqueue.consumers"))
        == SENT - 1
    )


MOVES: dict[str, tuple[Callable[[Conn, list[int]], object], int]] = {
    "cancel": (lambda conn, sent: value(conn, "cancel", "s", "c", [sent[0], *sent[4:6]]), SENT - 3),
    "seek": (lambda conn, sent: value(conn, "seek", "s", "c", "earliest"), SENT),
    "skip": (lambda conn, sent: value(conn, "seek", "s", "c", "latest"), 0),
    "replay": (lambda conn, sent: value(conn, "replay", "s", "c", "earliest"), SENT - 1),
    "retry": (lambda conn, sent: value(conn, "retry", "s", "c"), SENT - 1),
    "receive_where": (
        lambda conn, sent: value(
            conn, "ack", claim_of(call(conn, "receive_where", "s", "c", '$.data == "x"', 2))
        ),
        SENT - 3,
    ),
    "alter": (
        lambda conn, sent: value(conn, "alter_consumer", "s", "c", Jsonb({"max_in_flight": 99})),
        SENT - 1,
    ),
    "schedule": (
        lambda conn, sent: value(conn, "create_schedule", "s", "t", "@yearly", p_data="x"),
        SENT - 1,
    ),
    "large": (lambda conn, sent: value(conn, "ack", claim_of(receive(conn, 1000))), 0),
}  # fmt: skip
"""What moves or looks at what a consumer has, and how many messages come afterwards."""


@pytest.mark.parametrize("move", MOVES)
def test_who_moves_what_a_consumer_has_finds_slots_too(
    conn: Conn, sent: list[int], move: str
) -> None:
    """Unflushed, cancel answered 0, statistics were empty, and a message came after seek."""
    act, left = MOVES[move]
    act(conn, sent)
    checker.check(conn)
    assert len(set(acked(conn, "s", "c", 1000))) == left


def test_a_consumer_that_is_paused_keeps_its_slots(conn: Conn, sent: list[int]) -> None:
    value(conn, "pause", "s", "c")
    assert receive(conn, 1) == []
    value(conn, "resume", "s", "c")
    assert seqs_of(receive(conn, 1)) == sent[1:2]


def test_what_slots_owe_is_not_trimmed(conn: Conn, sent: list[int]) -> None:
    value(conn, "set_retention", "s", p_messages=1)
    for _ in range(3):
        send(conn)
        call(conn, "maintain")
    assert set(sent) <= internals.published(conn)
    value(conn, "set_retention", "s", p_messages=1, p_unread="drop")
    for _ in range(4):
        send(conn)
        call(conn, "maintain")
    checker.check(conn)
    assert states(conn, "c")[sent[0]] == "claimed", "its lease has not ended"
    assert set(sent[1:]).isdisjoint(states(conn, "c"))


def test_a_reader_has_what_was_in_slots(conn: Conn, reader: Reader) -> None:
    sent = send_all(conn, ["x"] * SENT)
    rows = receive(conn, 1)
    assert seqs_of(rows) == sent[:1]
    end = reader.ask()
    assert reader.plan(end) == sent[1:]
    assert value(conn, "ack", claims_of(rows)) == 1


def test_a_slot_that_outlives_its_block_becomes_a_claim(conn: Conn) -> None:
    """So few slots have to be looked at, however long a worker works on its message."""
    consumer(conn)
    size = one(conn, "select _pgqueue.limit_slots()")
    send_all(conn, ["x"] * 5 * size)
    first = receive(conn, 1)
    for _ in range(3 * size):
        assert value(conn, "ack", claims_of(receive(conn, 1))) == 1
    assert sum(slots(conn)) <= 2 * size
    assert internals.count(conn, "claims") == 1
    assert value(conn, "ack", claims_of(first)) == 1


def test_who_takes_one_of_the_last_slots_cuts_more_unless_another_does(
    conn: Conn, session: Session
) -> None:
    """So claimers wait for nobody at the end of a block, and messages come in their order."""
    consumer(conn)
    size = one(conn, "select _pgqueue.limit_slots()")
    sent = send_all(conn, ["x"] * 3 * size)
    got = seqs_of(receive(conn, 1)) + seqs_of(receive(conn, size - size // 4))
    left = slots(conn)[0]
    assert 2 < left <= size // 4
    holder = session()
    holder.execute("begin")
    internals.lock_consumer(holder, one(conn, "select max(consumer_id) from pgqueue.consumers"))
    got += seqs_of(receive(conn, 1))
    assert slots(conn)[0] == left - 1
    holder.execute("commit")
    got += seqs_of(receive(conn, 1))
    assert slots(conn)[0] == left - 2 + size
    while rows := receive(conn, 1):
        got += seqs_of(rows)
    assert got == sent


def test_what_is_cut_behind_the_last_slots_keeps_urgent_messages_first(conn: Conn) -> None:
    consumer(conn)
    size = one(conn, "select _pgqueue.limit_slots()")
    sent = send_all(conn, ["x"] * 8)
    first = send_all(conn, ["x"] * (size + 40), p_priority=5)
    got = seqs_of(receive(conn, 1)) + seqs_of(receive(conn, size - size // 4))
    got += seqs_of(receive(conn, 1))
    assert slots(conn)[0] > size // 4
    first.append(send(conn, p_priority=3))
    most = send(conn, p_priority=9)
    while rows := receive(conn, 1):
        got += seqs_of(rows)
    first.insert(size - size // 4 + 2, most)
    assert got == first + sent


# Waiting


def test_a_claim_that_waits_for_its_consumer_holds_no_slot(
    conn: Conn, session: Session, sent: list[int]
) -> None:
    """The session with the consumer's lock may wait for the slot: then both would wait."""
    assert seqs_of(receive(conn, SENT - 2)) == sent[1:-1]
    assert slots(conn) == (1, 2)
    holder, claimer = session(), session()
    holder.execute("begin")
    internals.lock_consumer(holder, one(conn, "select max(consumer_id) from pgqueue.consumers"))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(receive, claimer, 3)
        wait_for_a_lock(conn)
        holder.execute("select from pgqueue.slots where token is null for update nowait")
        holder.execute("commit")
        assert seqs_of(waiting.result()) == sent[-1:]


def test_a_nack_that_waits_for_an_acknowledgement_lets_others_claim(
    conn: Conn, session: Session, sent: list[int]
) -> None:
    """It needs the consumer's lock, too, and lets go of that between its tries."""
    claim = claims_of(receive(conn, 1))
    acking, returning = session(), session()
    acking.execute("begin")
    assert value(acking, "ack", claim) == 1
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(value, returning, "nack", claim)
        wait_for_a_lock(conn)
        conn.execute("set statement_timeout = '20 s'")
        assert seqs_of(receive(conn, 300)) == sent[2:], "which needs the consumer's lock"
        acking.execute("commit")
        assert waiting.result() == 0


# At the same time


def test_claims_of_all_sizes_that_acknowledge_lose_and_double_nothing(url: str, conn: Conn) -> None:
    """A claim that acknowledged and then waited for the lock deadlocked with a flush."""
    consumer(conn)
    sent = send_all(conn, ["x"] * 1200)

    def work(number: int) -> list[int]:
        got: list[int] = []
        with connection.connect(url) as mine:
            claim = None
            for turn in range(100_000):
                size = (1, 3, 10, 1, 300)[(number + turn) % 5] if turn % 7 else 2
                rows = call(mine, "receive", "s", "c", size, p_ack=claim)
                if not rows:
                    return got
                claim = claim_of(rows)
                if turn % 11 == 5:
                    value(mine, "nack", claim, seqs_of(rows)[:1])
                    value(mine, "ack", claim)
                    got += seqs_of(rows)[1:]
                    claim = None
                else:
                    got += seqs_of(rows)
        raise AssertionError("there is no end")

    with ThreadPoolExecutor(8) as pool:
        found = [seq for part in pool.map(work, range(8)) for seq in part]
    found += acked(conn, "s", "c", 5000)
    assert sorted(found) == sent


def test_killed_and_rolled_back_claimers_lose_and_double_nothing(url: str, conn: Conn) -> None:
    """Each notes what it has done in the transaction that acknowledges it."""
    consumer(conn, visibility_timeout=seconds(0.3))
    conn.execute("create table public.done (seq bigint primary key)")
    sent = send_all(conn, ["x"] * 400)

    def work(number: int) -> None:
        turn = number
        while one_of(url, "select count(*) from public.done") < len(sent):
            turn += 1
            try:
                with connection.connect(url) as mine:
                    for _ in range(turn % 5 + 1):
                        one_turn(mine, turn)
                    mine.execute("begin")
                    call(mine, "receive", "s", "c", turn % 3 + 1)
                    mine.execute("select pg_terminate_backend(pg_backend_pid())")
            except psycopg.OperationalError:
                continue

    def one_turn(mine: Conn, turn: int) -> None:
        rows = call(mine, "receive", "s", "c", (1, 1, 2, 5)[turn % 4])
        if not rows or turn % 6 == 0:
            return  # the lease will end
        with mine.transaction(force_rollback=turn % 4 == 1):
            if value(mine, "ack", claim_of(rows)):
                for seq in seqs_of(rows):
                    mine.execute("insert into public.done values (%s)", [seq])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    done = [seq for (seq,) in conn.execute("select seq from public.done order by 1").fetchall()]
    assert done == sent


def one_of(url: str, query: str) -> Any:
    with connection.connect(url) as conn:
        return one(conn, query)


@pytest.mark.parametrize("ordering", ["none", "key"])
def test_a_slot_that_a_rollback_left_is_not_too_large_for_a_claim(
    conn: Conn, session: Session, ordering: str
) -> None:
    """It stands before the slots of the size that others claim by now."""
    consumer(conn, ordering=ordering)
    sent = send_all(conn, ["x"] * 32, p_keys=[str(i) for i in range(32)])
    other = session()
    got = [receive(conn, 8)]
    other.execute("begin")
    assert len(receive(other, 8)) == 8
    got += [receive(conn, 8), receive(conn, 8)]
    sent += send_all(conn, ["x"] * 60, p_keys=[str(i) for i in range(32, 92)])
    got.append(receive(conn, 6))
    other.execute("rollback")
    while rows := receive(conn, 6):
        got.append(rows)
    assert max(map(len, got[3:])) == 6
    assert sorted(row.seq for rows in got for row in rows) == sent


@pytest.mark.parametrize("ordering", ["none", "key"])
def test_a_claim_that_comes_too_late_to_make_slots_ahead_keeps_no_lock(
    conn: Conn, session: Session, ordering: str
) -> None:
    """It read the cursor, and waited for its old claim, while another claim made the slots."""
    consumer(conn, ordering=ordering)
    clock.stop_looking(conn)
    send_all(conn, ["x"] * 2000, p_keys=[str(i) for i in range(2000)])
    old = claim_of(receive(conn, 1))
    ahead = "select slots_more from pgqueue.consumer_cursors order by version desc limit 1"
    free = "select min(slot) from pgqueue.slots where token is null"
    while one(conn, free) < one(conn, ahead):
        receive(conn, 1)
    late, holder = session(), session()
    holder.execute("begin")
    value(holder, "extend", old)
    late.execute("begin")
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


def test_a_message_whose_delay_ends_comes_before_slots_at_once(conn: Conn) -> None:
    """Not when claims look for ended leases next, once a second."""
    consumer(conn)
    first = send(conn, p_key="first")
    value(conn, "nack", claim_of(receive(conn)), p_delay=seconds(0.5))
    send_all(conn, ["x"] * 20, p_keys=[str(i) for i in range(20)])
    got = seqs_of(receive(conn, 1))
    clock.pass_time(conn, seconds(0.5))
    assert first in got + seqs_of(receive(conn, 1))
