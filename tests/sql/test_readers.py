"""The source's side: readers that go from batch to batch, and resume from checkpoints."""

import math
import time
import uuid
from datetime import timedelta

import pytest

from tests.sql import checker, clock, internals
from tests.sql.queue import *

pytestmark = pytest.mark.usefixtures("stream", "allowed_afterwards")


@pytest.mark.all_versions
@pytest.mark.parametrize("ordering", ORDERINGS)
def test_a_reader_goes_from_batch_to_batch(conn: Conn, ordering: str) -> None:
    reader = Reader(conn, consumer(conn, ordering=ordering))
    end = reader.ask()
    assert (end.claim_id, end.messages, end.claimed, end.lost) == (0, 0, 0, 0)
    sent = send_all(conn, ["x"] * 5, p_keys=[*"kklkl"])
    first = reader.ask(2)
    assert (first.messages, first.claimed) == (2, 2)
    assert reader.resume(first) == (2, 0, 0)
    assert reader.plan(first) == sent[:2]
    reader.move(first)
    second = reader.ask(100)
    assert (second.messages, second.claimed, second.lost) == (5, 3, 0)
    assert second.claim_id > first.claim_id
    assert reader.plan(second) == sent[2:]
    assert stats(conn).claimed == 3, "the start offset acknowledged the first batch"
    reader.move(second)
    third = reader.ask(100)
    assert (third.claim_id, third.messages, third.claimed) == (second.claim_id, 5, 0)
    assert states(conn) == {}


def test_the_plan_has_priorities_and_deliver_counts_in_the_order_of_delivery(
    conn: Conn, reader: Reader
) -> None:
    low = send(conn)
    value(conn, "nack", claim_of(receive(conn)))
    high = send(conn, p_priority=5)
    end = reader.ask()
    plan = call(conn, "reader_plan", reader.id, 0, end.claim_id)
    assert [(r.lo, r.hi, r.priority, r.deliver_count) for r in plan] == [
        (high, high + 1, 5, 1),
        (low, low + 1, 0, 2),
    ]


def test_a_resumed_batch_claims_back_what_is_free_and_tells_what_is_not(
    conn: Conn, reader: Reader
) -> None:
    sent = send_all(conn, ["x"] * 4)
    end = reader.ask()
    clock.end_leases(conn)
    worker = receive(conn, 2, p_visibility_timeout=seconds(60))
    assert [r.deliver_count for r in worker] == [2, 2]
    assert reader.resume(end) == (2, 2, 0)
    assert reader.plan(end) == sent[2:]
    assert reader.resume(end) == (2, 2, 0), "as often as it is asked"
    reader.move(end)
    assert reader.ask().lost == 2
    assert value(conn, "ack", claim_of(worker)) == 2, "its claim is its own"


def test_a_batch_that_was_taken_over_as_a_whole_is_claimed_back_once_it_is_free(
    conn: Conn, reader: Reader
) -> None:
    sent = send_all(conn, ["x"] * 3)
    end = reader.ask()
    clock.end_leases(conn)
    claim = claim_of(receive(conn))
    assert reader.resume(end) == (0, 3, 0)
    assert reader.plan(end) == []
    value(conn, "nack", claim)
    assert reader.resume(end) == (3, 0, 0)
    assert reader.plan(end) == sent
    reader.move(end)
    assert reader.ask().lost == 0
    assert states(conn) == {}


@pytest.mark.parametrize("ordering", ["key", "stream"])
def test_a_resumed_batch_leaves_what_is_behind_anothers_claim(conn: Conn, ordering: str) -> None:
    reader = Reader(conn, consumer(conn, ordering=ordering))
    sent = send_all(conn, ["x"] * 3, p_keys=["k", "k", "l"])
    end = reader.ask()
    clock.end_leases(conn)
    worker = receive(conn, 1, p_visibility_timeout=seconds(60))
    assert seqs_of(worker) == sent[:1]
    planned, taken_over, gone = reader.resume(end)
    assert (planned + taken_over, gone) == (3, 0)
    assert not set(reader.plan(end)) & set(sent[:2])
    value(conn, "ack", claim_of(worker))
    if ordering == "stream":
        assert reader.resume(end) == (2, 1, 0)
        assert reader.plan(end) == sent[1:]
    else:
        assert reader.plan(end) == sent[2:]


@pytest.mark.parametrize("ordering", ["key", "stream"])
@pytest.mark.parametrize("whole", [True, False])
def test_a_resumed_batch_leaves_what_is_behind_a_delayed_message(
    conn: Conn, ordering: str, whole: bool
) -> None:
    """5. Another claimer returned the first one, and it waits in the line or aside."""
    reader = Reader(conn, consumer(conn, ordering=ordering))
    sent = send_all(conn, ["x"] * 4, p_keys=["k", "k", "l", "k"])
    end = reader.ask()
    clock.end_leases(conn)
    worker = receive(conn, 1)
    assert seqs_of(worker) == sent[:1]
    value(conn, "nack", claim_of(worker), None if whole else sent[:1], seconds(60))
    free = sent[2:3] if ordering == "key" else []
    assert reader.resume(end) == (len(free), 4 - len(free), 0)
    assert reader.plan(end) == free
    reader.move(end)
    assert reader.ask().lost == 4 - len(free)
    clock.end_delay(conn, sent[0])
    assert acked(conn, "s", "c") == [seq for seq in sent if seq not in free]


@pytest.mark.parametrize("ordering", ["key", "stream"])
def test_a_resumed_batch_ends_for_a_key_at_its_delayed_message(conn: Conn, ordering: str) -> None:
    """5. What is before it is free, what is behind it is not."""
    reader = Reader(conn, consumer(conn, ordering=ordering))
    sent = send_all(conn, ["x"] * 3, p_keys=["k"] * 3)
    end = reader.ask()
    clock.end_leases(conn)
    worker = claim_of(receive(conn, 3))
    value(conn, "nack", worker, sent[1:2], seconds(60))
    value(conn, "nack", worker, sent[:1])
    assert reader.resume(end) == (1, 2, 0)
    assert reader.plan(end) == sent[:1]


@pytest.mark.parametrize("ordering", ["key", "stream"])
def test_a_resumed_batch_claims_back_a_key_from_aside_and_from_the_line(
    conn: Conn, ordering: str
) -> None:
    reader = Reader(conn, consumer(conn, ordering=ordering))
    sent = send_all(conn, ["x"] * 2, p_keys=["k"] * 2)
    end = reader.ask()
    clock.end_leases(conn)
    value(conn, "nack", claim_of(receive(conn, 1)), sent[:1])
    # what was delivered once and what was not are not in one bundle
    assert reader.resume(end) == (1, 1, 0)
    assert reader.plan(end) == sent[:1]


def test_a_resumed_batch_has_no_key_of_a_claim_beside_it(conn: Conn) -> None:
    reader = Reader(conn, consumer(conn, ordering="key"))
    sent = send_all(conn, ["x"] * 5, p_keys=["w", "k1", "k2", "y", "z"])
    first = claim_of(receive(conn, 1))
    end = reader.ask(2, p_visibility_timeout=seconds(0.05))
    assert reader.plan(end) == sent[1:3]
    send_all(conn, ["x"], p_keys=["k1"])
    time.sleep(0.1)
    clock.look_again(conn)
    value(conn, "ack", first)
    beside = receive(conn, 1)
    assert seqs_of(beside) == sent[1:2]
    planned, taken_over, *_ = reader.resume(end)
    assert (planned, taken_over) == (1, 1)
    assert reader.plan(end) == sent[2:3]
    checker.check(conn)


@pytest.fixture
def readers(conn: Conn) -> dict[str, Reader]:
    """A new checkpoint of a consumer of each ordering, whose name it is."""
    return {ordering: Reader(conn, consumer(conn, ordering, ordering)) for ordering in ORDERINGS}


def test_the_greatest_limit_is_one(conn: Conn, readers: dict[str, Reader]) -> None:
    """Also where a claim beside it makes the keys matter."""
    send_all(conn, ["x"] * 3, p_keys=["k", "l", "m"])
    for ordering, reader in readers.items():
        worker = claim_of(receive(conn, 1, ordering))
        assert reader.ask(2**63 - 1).claimed == (0 if ordering == "stream" else 2)
        assert value(conn, "ack", worker) == 1


def test_messages_acknowledged_after_the_lease_was_lost_are_counted(
    conn: Conn, reader: Reader
) -> None:
    send_all(conn, ["x"] * 3)
    reader.move(reader.ask())
    clock.end_leases(conn)
    value(conn, "ack", claim_of(receive(conn)))
    assert reader.ask().lost == 3
    assert reader.ask().lost == 0, "told once"
    send_all(conn, ["x"] * 2)
    reader.move(reader.ask())
    clock.end_leases(conn)
    value(conn, "ack", claim_of(receive(conn)))
    assert reader.ask().lost == 2
    assert [row.lost for row in internals.readers(conn)] == [5], "of all its batches"


def test_a_claim_of_a_reader_that_was_taken_over_is_not_live(conn: Conn, reader: Reader) -> None:
    """It is kept for the reader to be told, but nobody settles it."""
    send(conn)
    end = reader.ask()
    clock.end_leases(conn)
    receive(conn)
    with warned(conn) as warnings:
        for function in ("ack", "nack", "extend", "dead_letter"):
            assert value(conn, function, end.claim_id) == 0
    assert len(warnings) == 4
    assert all(f"claim {end.claim_id} is not live" in text for text in warnings)


@pytest.mark.parametrize("again", ["asked for", "resumed"])
def test_a_batch_that_is_repeated_is_held_anew(conn: Conn, reader: Reader, again: str) -> None:
    """A query that was away for longer than its lease is safe as soon as it is back."""
    send(conn)
    end = reader.ask(p_visibility_timeout=seconds(1))
    clock.end_lease(conn, end.claim_id)
    if again == "asked for":
        assert reader.ask().claim_id == end.claim_id
    else:
        assert reader.resume(end) == (1, 0, 0)
    assert receive(conn) == []


@pytest.mark.promise("guarantee: Asynchronous commit", "operations: synchronous_commit = off")
def test_what_spark_is_told_is_on_disk_before(conn: Conn, reader: Reader, stream: int) -> None:
    """Also where synchronous_commit is off; what changes nothing waits for no disk."""
    send_all(conn, ["x"] * 2)
    for setting, durable in (("off", "local"), ("on", "on")):
        conn.execute(f"set synchronous_commit = {setting}".encode())
        with conn.transaction():
            assert one(conn, "show synchronous_commit") == setting
            end = reader.ask(1)
            assert one(conn, "show synchronous_commit") == durable
        reader.move(end)
    conn.execute("set synchronous_commit = off")
    with conn.transaction():
        assert reader.ask().claimed == 0
        assert one(conn, "show synchronous_commit") == "local", "it acknowledged"
    with conn.transaction():
        assert reader.ask().claimed == 0
        assert one(conn, "show synchronous_commit") == "off", "it changed nothing"
    with conn.transaction():
        block = stage(conn, stream, 1)
        assert one(conn, "show synchronous_commit") == "local"
    with conn.transaction():
        assert publish(conn, stream, [block], 1)
        assert one(conn, "show synchronous_commit") == "local"


def test_the_heartbeat_extends_the_live_claims_of_its_reader(conn: Conn, reader: Reader) -> None:
    send_all(conn, ["x"] * 2)
    assert value(conn, "reader_extend", reader.id) == 0
    reader.ask(1)
    receive(conn, 1, p_visibility_timeout=seconds(3600))
    for _ in range(3):
        clock.pass_time(conn, seconds(40))
        assert value(conn, "reader_extend", reader.id) == 1
        assert receive(conn) == []
    clock.pass_time(conn, seconds(80))
    assert len(receive(conn)) == 1
    assert value(conn, "reader_extend", reader.id) == 0
    assert value(conn, "reader_extend", uuid.uuid4()) == 0


def test_the_claims_of_a_reader_get_the_timeout_of_its_query(conn: Conn, reader: Reader) -> None:
    """Those that it claimed with another one, and those that it claims back."""

    def left() -> list[int]:
        live = [claim for claim in internals.claims(conn) if claim.live]
        return [math.ceil(claim.seconds_left / 100) * 100 for claim in live]

    send_all(conn, ["x"] * 4)
    end = reader.ask(2, p_visibility_timeout=seconds(100))
    assert left() == [100]
    assert value(conn, "reader_extend", reader.id, seconds(200)) == 1
    assert left() == [200]
    value(conn, "reader_extend", reader.id)
    assert left() == [200], "it is theirs now"
    assert reader.ask(2, p_visibility_timeout=seconds(300)).claim_id == end.claim_id
    assert left() == [300]
    at = (reader.id, reader.consumer_id, 0, end.claim_id)
    call(conn, "reader_resume", *at, p_visibility_timeout=seconds(400))
    assert left() == [400]
    clock.end_leases(conn)
    value(conn, "nack", claim_of(receive(conn, 4)))
    assert left() == []
    (resumed,) = call(conn, "reader_resume", *at, p_visibility_timeout=seconds(500))
    assert resumed.planned == 2
    assert left() == [500]


@pytest.mark.parametrize("ordering", ORDERINGS)
def test_a_long_claim_ends_with_the_timeout_to_which_its_query_was_lowered(
    conn: Conn, ordering: str
) -> None:
    reader = Reader(conn, consumer(conn, ordering=ordering))
    sent = send_all(conn, ["x"] * 2, p_keys=["k", "l"])
    assert reader.ask(p_visibility_timeout=seconds(3600)).claimed == 2
    clock.pass_time(conn, seconds(2))
    clock.look_again(conn)
    assert receive(conn) == [], "its claim is among the long ones now"
    assert value(conn, "reader_extend", reader.id, seconds(10)) == 1
    assert receive(conn) == []
    clock.pass_time(conn, seconds(20))
    assert sorted(seqs_of(receive(conn))) == sent


def test_a_bound_leaves_later_publications_for_later(
    conn: Conn, reader: Reader, stream: int
) -> None:
    assert value(conn, "last_publication", stream) == 0
    sent = [send(conn), send(conn)]
    bound = value(conn, "last_publication", stream)
    later = send(conn)
    end = reader.ask(p_upto_publication=bound)
    assert reader.plan(end) == sent
    reader.move(end)
    assert reader.ask(p_upto_publication=bound).claimed == 0
    assert reader.plan(reader.ask()) == [later]


def test_a_checkpoint_that_does_not_fit_is_refused(conn: Conn, reader: Reader) -> None:
    send_all(conn, ["x"] * 3)
    first = reader.ask(1)
    reader.move(first)
    start, end = first.claim_id, reader.ask(1).claim_id
    fits = {"reader": reader.id, "consumer": reader.consumer_id, "start": start, "end": end}
    before = states(conn)
    for changed, sqlstate, says in (
        ({"consumer": 999}, "PQ002", "dropped"),
        ({"reader": uuid.uuid4()}, "PQ005", "does not exist in this database"),
        ({"consumer": consumer(conn, "d")}, "PQ005", "consumer 'c' of stream 's', not of .* 'd'"),
        ({"start": end + 100, "end": end + 200}, "PQ005", "ahead of the database"),
        ({"start": 0, "end": start}, "PQ010", "older"),
        ({}, "PQ002", "dropped"),
    ):
        if not changed:
            value(conn, "drop_consumer", "s", "c")
            before = {}
        for function in ("reader_claim", "reader_resume"):
            given = fits | changed
            given["end"] = 1 if function == "reader_claim" else given["end"]
            with raises(sqlstate, says) as caught:
                call(conn, function, *given.values())
            assert caught.value.diag.message_hint
        assert states(conn) == before


def test_two_readers_of_one_consumer_in_one_query_are_refused(conn: Conn, reader: Reader) -> None:
    send_all(conn, ["x"] * 3)
    twin = Reader(conn, reader.consumer_id)
    other = Reader(conn, consumer(conn, "d"))
    for r in (reader, twin, other):
        r.ask(1)
    value(conn, "reader_query", reader.id, "q1")
    value(conn, "reader_query", reader.id, "q1")
    value(conn, "reader_query", other.id, "q1")
    with raises("PQ009", "query q1 reads consumer 'c'"):
        value(conn, "reader_query", twin.id, "q1")
    value(conn, "reader_query", twin.id, "q2")


def test_next_due_is_when_the_first_delayed_message_is_due(conn: Conn, reader: Reader) -> None:
    assert reader.ask().next_due is None
    due = now(conn) + seconds(60)
    send(conn, p_deliver_at=due + seconds(60))
    send(conn, p_deliver_at=due)
    assert reader.ask().next_due == due


def test_next_due_is_when_a_failed_message_comes_back(
    conn: Conn, readers: dict[str, Reader]
) -> None:
    seq = send(conn, p_key="k")
    for ordering, reader in readers.items():
        value(conn, "nack", claim_of(receive(conn, name=ordering)), None, seconds(60))
        assert reader.ask().next_due == state(conn, seq, ordering).not_visible_until


def test_next_due_is_when_the_next_lease_ends(conn: Conn, reader: Reader) -> None:
    seq = send(conn)
    receive(conn)
    assert reader.ask().next_due == state(conn, seq).lease_until
    send(conn)
    assert reader.ask().claimed == 1


@pytest.mark.parametrize("ordering", ORDERINGS)
@pytest.mark.promise("guarantee: Deliveries to Spark")
def test_a_batch_that_another_process_plans_again_is_delivered_again(
    conn: Conn, ordering: str
) -> None:
    """Or else a message that kills its query would be delivered once, for ever."""
    reader = Reader(conn, consumer(conn, ordering=ordering))
    send_all(conn, ["x"] * 3, p_keys=["k", "l", "k"])
    end = reader.ask()

    def counts() -> set[int]:
        plan = call(conn, "reader_plan", reader.id, 0, end.claim_id)
        return {r.deliver_count for r in plan}

    first, second = uuid.uuid4(), uuid.uuid4()
    for process, delivered in (
        *((first, 1), (first, 1), (second, 2), (None, 2), (second, 2), (first, 3)),
    ):
        assert reader.resume(end, process) == (3, 0, 0)
        assert counts() == {delivered}
    checker.check(conn)
    reader.move(end)
    send(conn)
    end = reader.ask()
    assert reader.resume(end, second) == (1, 0, 0)
    assert {r.deliver_count for r in call(conn, "reader_plan", reader.id, reader.claim_id,
                                          end.claim_id)} == {1}, "a batch of its own"  # fmt: skip


def test_a_batch_that_was_claimed_and_never_planned_was_not_delivered(
    conn: Conn, reader: Reader
) -> None:
    send(conn)
    end = reader.ask()
    assert reader.ask().claim_id == end.claim_id, "by the next process"
    reader.resume(end, uuid.uuid4())
    assert [r.deliver_count for r in call(conn, "reader_plan", reader.id, 0, end.claim_id)] == [1]


def test_what_is_claimed_back_for_a_replay_is_delivered_once_more_and_not_twice(
    conn: Conn, reader: Reader
) -> None:
    send_all(conn, ["x"] * 2)
    end = reader.ask()
    reader.resume(end, uuid.uuid4())
    clock.end_lease(conn, end.claim_id)
    receive(conn, 1)
    reader.resume(end, uuid.uuid4())
    assert [r.deliver_count for r in call(conn, "reader_plan", reader.id, 0, end.claim_id)] == [2]


def test_what_a_reader_loses_while_it_reads_can_be_asked(conn: Conn, reader: Reader) -> None:
    send_all(conn, ["x"] * 5)
    assert reader.lost(reader.ask(1)) == 0
    end = reader.ask(1)
    reader.move(end)
    end = reader.ask()
    assert reader.resume(end) == (4, 0, 0)
    settle(conn, action("ack", [2]), p_replayed=False)
    assert reader.lost(end) == 0, "what its owner settles is not lost"
    clock.end_lease(conn, end.claim_id)
    worker = receive(conn, 1)
    assert reader.lost(end) == 3, "also what nobody else has yet"
    planned, *rest = reader.resume(end)
    assert (planned, *rest) == (2, 1, 0)
    assert reader.lost(end) == sum(rest)
    value(conn, "nack", claim_of(worker))
    assert reader.lost(end) == 1
    assert value(conn, "reader_lost", uuid.uuid4(), 0, end.claim_id) == 0


def test_taken_over_and_deleted_messages_are_told_apart(conn: Conn, stream: int) -> None:
    """One message settled by hand, one taken over, one deleted, one left.

    One that failed too often is not given up with a reader's claim: it says nothing of each.
    """
    reader = Reader(conn, consumer(conn, max_deliver_count=3))
    dying = send(conn)
    for _ in range(2):
        value(conn, "nack", claim_of(receive(conn)))
    settled, taken, deleted, left = send_all(conn, ["x"] * 4, p_priority=-1)
    value(conn, "retry", "s", "c")
    end = reader.ask()
    assert reader.plan(end) == [dying, settled, taken, deleted, left]
    settle(conn, action("ack", [settled]), p_replayed=False)
    clock.end_lease(conn, end.claim_id)
    worker = receive(conn)
    assert seqs_of(worker) == [dying, taken, deleted, left]
    value(conn, "ack", claim_of(worker), [dying, deleted])
    conn.execute("delete from pgqueue.messages where seq = %s", [deleted])
    value(conn, "nack", claim_of(worker), [left])
    assert reader.resume(end) == (1, 2, 1)
    assert reader.plan(end) == [left]
    assert reader.lost(end) == 3
    reader.move(end)
    assert reader.ask().lost == 3, "those that others have or had"


def test_what_was_settled_here_and_deleted_then_is_not_gone(conn: Conn, reader: Reader) -> None:
    sent = send_all(conn, ["x"] * 3)
    end = reader.ask()
    settle(conn, action("ack", sent[:2]), p_replayed=False)
    conn.execute("delete from pgqueue.messages where seq = any(%s)", [sent[:2]])
    clock.end_lease(conn, end.claim_id)
    value(conn, "nack", claim_of(receive(conn)))
    assert reader.resume(end) == (1, 0, 0)


def test_a_new_reader_is_told_what_others_hold(conn: Conn, reader: Reader) -> None:
    send_all(conn, ["x"] * 3)

    def others(reader_id: uuid.UUID) -> tuple:
        (row,) = call(conn, "reader_others", reader_id, reader.consumer_id)
        return tuple(row)

    receive(conn, 1)
    assert others(uuid.uuid4()) == (0, None), "a worker is no reader"
    end = reader.ask()
    (claim,) = [c for c in internals.claims(conn) if c.claim_id == end.claim_id]
    messages, until = others(uuid.uuid4())
    assert messages == 2
    assert abs((until - now(conn)).total_seconds() - claim.seconds_left) < 1
    assert others(reader.id) == (0, None)
    clock.end_lease(conn, end.claim_id)
    assert others(uuid.uuid4()) == (0, None)


@pytest.mark.parametrize("ordering", ORDERINGS)
def test_a_reader_that_was_not_used_for_long_is_forgotten_and_its_messages_come_back(
    conn: Conn, ordering: str
) -> None:
    reader = Reader(conn, consumer(conn, ordering=ordering))
    other = Reader(conn, consumer(conn, "d"))
    sent = send_all(conn, ["x"] * 3, p_keys=["k", "l", "k"])
    end = reader.ask(2)
    other.move(other.ask())
    other.ask()
    clock.pass_time(conn, timedelta(days=30))
    send(conn)
    other.ask()
    assert value(conn, "_pgqueue.delete_readers", timedelta(days=31)) == 0
    assert value(conn, "_pgqueue.delete_readers", timedelta(days=7)) == 1
    assert internals.count(conn, "readers") == 1
    checker.check(conn)
    assert set(acked(conn, "s", "c")) >= set(sent)
    for again in (reader.resume, lambda end: reader.move(end) or reader.ask()):
        with raises("PQ005", "does not exist in this database") as caught:
            again(end)
        assert "not used for so long" in str(caught.value.diag.message_hint)


def test_nobody_is_waited_for_to_forget_a_reader(
    conn: Conn, reader: Reader, session: Session
) -> None:
    send_all(conn, ["x"] * 3)
    reader.move(reader.ask(2))
    clock.pass_time(conn, timedelta(days=31))
    worker = session()
    worker.execute("begin")
    value(worker, "nack", claim_of(receive(worker, 1)))
    conn.execute("set statement_timeout = '5s'")
    assert dict(call(conn, "maintain"))["abandoned readers"] == 0
    worker.execute("commit")
    assert dict(call(conn, "maintain"))["abandoned readers"] == 1
    assert len(receive(conn)) == 3


def test_a_reader_that_lives_is_not_forgotten(conn: Conn, reader: Reader) -> None:
    """One that finds nothing, and one whose batch takes very long."""
    send(conn)
    end = reader.ask()
    clock.pass_time(conn, timedelta(days=30))
    value(conn, "reader_extend", reader.id)
    assert value(conn, "_pgqueue.delete_readers", timedelta(days=7)) == 0
    reader.move(end)
    reader.ask()
    for _ in range(10):
        clock.pass_time(conn, timedelta(days=1))
        assert reader.ask().claimed == 0
    assert value(conn, "_pgqueue.delete_readers", timedelta(days=7)) == 0
    assert internals.count(conn, "readers") == 1


def test_the_backlog_is_what_nobody_has_claimed(conn: Conn, reader: Reader) -> None:
    assert value(conn, "consumer_backlog", reader.consumer_id) == 0
    send_all(conn, ["x"] * 5)
    send(conn)
    assert value(conn, "consumer_backlog", reader.consumer_id) == 6
    reader.ask(2)
    assert value(conn, "consumer_backlog", reader.consumer_id) == 4 == stats(conn).backlog


def test_the_lag_is_that_of_what_could_be_delivered(conn: Conn, reader: Reader) -> None:
    def lag() -> tuple:
        [row] = conn.execute(
            "select backlog, oldest_at from pgqueue.consumer_lag(%s)", [reader.consumer_id]
        )
        return row

    assert lag() == (0, None)
    send(conn, p_deliver_at=now(conn) + timedelta(hours=1))
    assert lag() == (1, None), "nobody could have it"
    began = now(conn)
    send_all(conn, ["x"] * 5)
    ended = now(conn)
    assert (lag()[0], began <= lag()[1] <= ended) == (6, True)
    reader.ask(2)
    assert (lag()[0], began <= lag()[1] <= ended) == (4, True)


def test_deliveries_to_several_queries_count_as_no_failure(conn: Conn, stream: int) -> None:
    """However many there were: then a worker may fail as often as the setting says."""
    consumer_id = consumer(conn, max_deliver_count=2)
    sent = send(conn)
    for _ in range(4):
        assert Reader(conn, consumer_id).ask().claimed == 1
        clock.end_leases(conn)
    for found in ("ready", "dead"):
        assert value(conn, "nack", claim_of(receive(conn))) == 1
        assert states(conn) == {sent: found}
