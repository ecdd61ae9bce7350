"""Retention: what a stream need not keep goes, whole segments at a time, and nothing else does."""

import random
import re
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from itertools import product
from typing import Any

import psycopg
import pytest
from psycopg.types.json import Jsonb

from tests.sql import clock, internals, limits
from tests.sql.queue import *

pytestmark = pytest.mark.usefixtures("stream", "allowed_afterwards")

HOUR = timedelta(hours=1)


def retention(conn: Conn, **rules: object) -> None:
    value(conn, "set_retention", "s", **rules)
    maintain(conn)


def close(conn: Conn) -> None:
    """The open segment has its share of the kept hour: the next message is of another."""
    age(conn, 1 / 7)


def age(conn: Conn, hours: float = 1) -> None:
    """What is in closed segments is so much older."""
    clock.pass_time(conn, HOUR * hours)
    maintain(conn)


def stored(conn: Conn) -> list[int]:
    """The numbers of the messages whose rows are there."""
    return one(conn, "select array(select seq from pgqueue.messages order by seq)")


def kept(conn: Conn) -> Any:
    """The row of the stream in stream_retention."""
    return internals.rows(conn, "select * from pgqueue.stream_retention where stream = 's'")[0]


@pytest.mark.parametrize("unread", ["keep", "drop"])
@pytest.mark.promise("guarantee: Retention", "feature: pruning, by whole partitions")
def test_messages_go_when_they_are_old_and_not_before(conn: Conn, unread: str) -> None:
    retention(conn, p_for=HOUR, p_unread=unread)
    old = send_all(conn, ["old"] * 3)
    close(conn)
    young = send_all(conn, ["young"] * 2)
    clock.pass_time(conn, HOUR * 0.8)
    assert maintain(conn)["trimmed messages"] == 0
    assert stored(conn) == old + young
    clock.pass_time(conn, HOUR * 0.1)
    assert maintain(conn)["trimmed messages"] == 3
    assert stored(conn) == young
    assert young[0] - old[-1] > 1_000_000, "a closed segment gives out no numbers"
    assert one(conn, "select sent from pgqueue.stream_stats") == 5
    for _ in range(2):  # their segment is closed when it is old, and later it goes
        age(conn)
    assert stored(conn) == []


def test_messages_go_when_a_reader_has_noted_that_it_has_them(conn: Conn) -> None:
    retention(conn, p_done=True)
    value(conn, "create_group", "s", "g", 1, "earliest")
    sent = send_all(conn, ["x"] * 3)
    for read in (2, 3):
        offset = value(conn, "read_to", "s", Jsonb(value(conn, "start_offset", "s")), read)
        value(conn, "note_offset", "s", "g", Jsonb(offset))
        age(conn)
        age(conn)
        assert stored(conn) == (sent if read == 2 else [])


@pytest.mark.parametrize("unread", ["keep", "drop"])
def test_what_a_group_has_processed_is_neither_kept_nor_skipped(conn: Conn, unread: str) -> None:
    """Also if no worker reads after the last commit."""
    retention(conn, p_for=HOUR, p_unread=unread)
    value(conn, "create_group", "s", "g", 1, "earliest")
    value(conn, "create_group", "s", "late", 2, "earliest")
    sent = send_all(conn, ["x"] * 3, p_keys=["a", "b", "c"])
    for group in ("g", "late"):
        leases = [r.lease_id for r in call(conn, "lease_partitions", "s", group, "w")]
        rows = call(conn, "read_partitions", "s", group, leases)
        ends = {r.lease_id: r.next_offset for r in rows if r.seq is None}
        assert len(ends) == len(leases)
        for lease_id in leases[: 1 if group == "late" else None]:
            value(conn, "commit_offset", lease_id, ends[lease_id])
    close(conn)
    young = send(conn)
    age(conn, 0.9)
    if unread == "keep":
        assert stored(conn) == [*sent, young]
        assert kept(conn).held_by == ["consumer late"]
        value(conn, "commit_offset", leases[1], ends[leases[1]])
        maintain(conn)
    assert stored(conn) == [young]
    assert stats(conn, "g").skipped == 0
    assert stats(conn, "late").skipped == (0 if unread == "keep" else 3)


def group_that_has_processed(conn: Conn, count: int) -> int:
    """A group of one partition that has processed so many messages; its id."""
    group = value(conn, "create_group", "s", "g", 1, "earliest")
    send_all(conn, ["x"] * count)
    (leased,) = call(conn, "lease_partitions", "s", "g", "w")
    found = call(conn, "read_partitions", "s", "g", [leased.lease_id])
    value(conn, "commit_offset", leased.lease_id, found[-1].next_offset)
    return group


def test_nothing_that_a_group_has_processed_is_skipped_because_it_is_missing(conn: Conn) -> None:
    group_that_has_processed(conn, 3)
    conn.execute("delete from pgqueue.messages where seq = 2")
    call(conn, "recover")
    assert stats(conn, "g").skipped == 0


def test_what_a_group_has_processed_is_kept_while_its_lock_is_held(
    conn: Conn, session: Session
) -> None:
    """Nobody waits for it."""
    retention(conn, p_for=HOUR)
    group = group_that_has_processed(conn, 3)
    close(conn)
    conn.execute("set lock_timeout = '1 s'")
    other = session()
    with other.transaction():
        internals.lock_consumer(other, group)
        age(conn)
        assert len(stored(conn)) == 3
    maintain(conn)
    assert stored(conn) == []


def test_a_group_at_work_does_not_stop_the_steps_of_segments(conn: Conn) -> None:
    """Whatever it processes before each call is in a segment that is due, and kept for c."""
    retention(conn, p_for=HOUR)
    consumer(conn)
    value(conn, "create_group", "s", "g", 1, "earliest")
    for priority in range(12):  # a bundle each
        send(conn, p_priority=priority)
    (leased,) = call(conn, "lease_partitions", "s", "g", "w")
    found = call(conn, "read_partitions", "s", "g", [leased.lease_id])
    close(conn)
    send(conn)
    clock.pass_time(conn, HOUR)
    closed = "select count(*) from pgqueue.segments where closed_at is not null"
    assert one(conn, closed) == 1
    for row in found[:10]:
        value(conn, "commit_offset", leased.lease_id, row.next_offset)
        call(conn, "maintain")
    assert one(conn, closed) == 2
    maintain(conn)
    assert internals.count(conn, "consumer_messages") == 2, "what it has processed is deleted"


@pytest.mark.parametrize("rule", ["p_messages", "p_bytes"])
def test_messages_go_when_more_than_is_kept_came_after_them(conn: Conn, rule: str) -> None:
    limit = 100 if rule == "p_messages" else 32 * 8192
    retention(conn, **{rule: limit})
    maintain(conn)
    sent: list[int] = []
    for _ in range(12):
        sent += send_all(conn, [random.randbytes(2000).hex() for _ in range(20)])
        maintain(conn)
        assert not conn.execute("select from pgqueue.stream_retention where bytes > 3e6").fetchall()
    left = stored(conn)
    assert left == sent[-len(left) :], "the oldest go first"
    assert len(left) >= (100 if rule == "p_messages" else 30)
    assert len(left) < 300
    assert kept(conn).trimmed == len(sent) - len(left)


def test_all_that_came_after_a_message_counts_also_what_came_last(conn: Conn) -> None:
    """The open segment, too."""
    retention(conn, p_messages=24)
    old = send_all(conn, ["old"] * 3)
    maintain(conn)
    send_all(conn, ["x"] * 22)
    maintain(conn)
    assert stored(conn)[:3] == old
    send_all(conn, ["x"] * 2)  # less than an eighth: the segment stays open
    maintain(conn)
    assert len(stored(conn)) == 24


def test_messages_go_when_every_consumer_is_done(conn: Conn) -> None:
    retention(conn, p_done=True)
    send_all(conn, ["x"] * 3)
    age(conn)
    age(conn)
    assert len(stored(conn)) == 3, "without a consumer nobody is done"
    for name in "ab":
        consumer(conn, name)
    assert len(acked(conn, "s", "a")) == 3
    maintain(conn)
    assert len(stored(conn)) == 3
    assert kept(conn).held_by == ["consumer b"]
    assert len(acked(conn, "s", "b")) == 3
    assert maintain(conn)["trimmed messages"] == 3
    assert stored(conn) == []
    assert kept(conn).held_by == []


def test_a_clock_that_was_ahead_and_is_set_back_does_not_keep_a_segment_open(conn: Conn) -> None:
    retention(conn, p_for=HOUR)
    send(conn)
    clock.pass_time(conn, HOUR * -24)
    maintain(conn)
    clock.pass_time(conn, HOUR)
    maintain(conn)
    assert one(conn, "select count(*) from pgqueue.segments where closed_at is not null") == 1


@pytest.mark.parametrize("ordering", ["none", "key", "stream"])
@pytest.mark.promise("concepts: transitions of a message")
def test_what_a_consumer_owes_is_kept_whatever_its_state(conn: Conn, ordering: str) -> None:
    """New, ready, claimed, delayed, waiting, dead: each keeps its segment; nothing else does."""
    retention(conn, p_for=HOUR)
    consumer(conn, ordering=ordering)
    every = [send_key(conn, "a"), send_key(conn, "a"), send_key(conn, "b"), send_key(conn, "c")]
    (first,) = receive(conn, 1)
    close(conn)
    clock.pass_time(conn, HOUR * 2)
    clock.set_hints(conn)

    def nothing_goes() -> None:
        assert maintain(conn)["trimmed messages"] == 0 or one(
            conn, "select count(*) from pgqueue.publications"
        )
        assert stored(conn) == every
        assert "consumer c" in kept(conn).held_by

    nothing_goes()
    value(conn, "nack", first.claim_id, p_delay=seconds(60))
    nothing_goes()
    clock.end_delays(conn)
    done: list[int] = []
    while rows := receive(conn, 1):
        nothing_goes()
        done += seqs_of(rows)
        value(conn, "ack" if len(done) < 4 else "dead_letter", claim_of(rows))
    assert sorted(done) == every
    maintain(conn)
    assert stored(conn) == every
    assert kept(conn).held_by == ["dead letters of consumer c"]
    retention(conn, p_for=HOUR, p_dead=HOUR * 24)
    clock.pass_time(conn, HOUR * 25)
    assert maintain(conn)["old dead letters"] == 1
    assert stored(conn) == []


@pytest.mark.parametrize("ordering", ["none", "key", "stream"])
@pytest.mark.promise("concepts: transitions of a message")
def test_drop_takes_what_nobody_has_claimed_and_counts_it(conn: Conn, ordering: str) -> None:
    retention(conn, p_for=HOUR, p_unread="drop")
    consumer(conn, ordering=ordering)
    send_key(conn, "a")
    sent = [send_key(conn, key) for key in "abcab"]
    (delayed,) = receive(conn, 1)
    value(conn, "nack", delayed.claim_id, p_delay=HOUR * 100)
    claimed = receive(conn, 1)
    close(conn)
    young = send_key(conn, "a")
    clock.pass_time(conn, HOUR * 0.9)
    held = []
    if claimed:  # not where a delayed message is before all others
        held = seqs_of(claimed)
        value(conn, "extend", claim_of(claimed), HOUR)
    assert maintain(conn)["trimmed messages"] == 6 - len(held)
    assert stats(conn).skipped == 6 - len(held)
    assert {s: state for s, state in states(conn).items() if s != young} == dict.fromkeys(
        held, "claimed"
    )
    if claimed:
        assert value(conn, "ack", claim_of(claimed)) == 1
    maintain(conn)
    assert stored(conn) == [young]
    assert acked(conn, "s", "c") == [young]
    assert not set(sent) & {young}


def test_a_last_delivery_whose_lease_ended_is_a_dead_letter_not_dropped(conn: Conn) -> None:
    """Any other claim whose lease ended does not keep what is dropped."""
    retention(conn, p_for=HOUR, p_unread="drop")
    consumer(conn, "d", max_deliver_count=1)
    consumer(conn)
    send_all(conn, ["x"] * 3, p_consumers=["c"])
    lost = receive(conn, 2)
    close(conn)
    last = send(conn, p_consumers=["d"])
    receive(conn, 1, "d")
    close(conn)
    age(conn)
    assert stored(conn) == [last]
    assert (stats(conn).skipped, stats(conn, "d").skipped) == (3, 0)
    assert states(conn, "d") == {last: "dead"}
    assert value(conn, "ack", claim_of(lost)) == 0


def test_a_claim_whose_lease_ended_is_dropped_beside_any_number_of_others(conn: Conn) -> None:
    limits.set_constant(conn, "limit_expired", 1)
    retention(conn, p_for=HOUR, p_unread="drop")
    consumer(conn, visibility_timeout=timedelta(hours=9))
    sent = send_all(conn, ["x"] * 30)
    claims = [claim_of(receive(conn, 1)) for _ in sent]
    close(conn)
    clock.end_lease(conn, claims[-1])
    age(conn)
    assert stats(conn).skipped == 1
    assert list(states(conn)) == sent[:-1]


def test_drop_goes_by_the_time_at_which_a_message_was_published(conn: Conn, stream: int) -> None:
    """A sink may have taken its number long before."""
    id_ = consumer(conn)
    retention(conn, p_for=HOUR, p_unread="drop")
    old = send(conn)
    block = stage(conn, stream, 2)
    close(conn)
    clock.pass_time(conn, HOUR)
    publish(conn, stream, [block], 2)
    maintain(conn)
    assert internals.skipped(conn, id_) == {old}
    age(conn)
    assert len(internals.skipped(conn, id_)) == 3
    assert stored(conn) == []


def test_drop_goes_on_beside_what_is_being_claimed_or_redriven(
    conn: Conn, session: Session
) -> None:
    retention(conn, p_for=HOUR, p_unread="drop", p_dead=HOUR)
    id_ = consumer(conn)
    dead = send_all(conn, ["x"] * 2)
    for seq in dead:
        value(conn, "dead_letter", claim_of(receive(conn, 1)), [seq])
    sent = send_all(conn, ["x"] * 4)
    value(conn, "ack", claim_of(receive(conn, 1)))
    close(conn)
    clock.pass_time(conn, HOUR)
    claimer, redriver = session(), session()
    with claimer.transaction():
        internals.lock_messages(claimer, sent[1])
        with redriver.transaction(force_rollback=True):
            assert value(redriver, "redrive", "s", "c", dead[:1]) == 1
            assert maintain(conn, 1)["old dead letters"] == 1
        maintain(conn)
        assert internals.skipped(conn, id_) == set(sent[2:])
    assert maintain(conn)["trimmed messages"] > 0
    assert internals.skipped(conn, id_) == set(sent[1:])
    assert stored(conn) == []


def test_a_new_consumer_at_earliest_starts_after_what_was_trimmed(conn: Conn) -> None:
    retention(conn, p_for=HOUR)
    send_all(conn, ["old"] * 3)
    close(conn)
    kept_ = send_all(conn, ["young"] * 2)
    age(conn, 0.9)
    consumer(conn)
    assert stats(conn).backlog == 2
    assert seqs_of(receive(conn)) == kept_


def test_a_consumer_that_is_being_created_keeps_what_it_may_start_with(
    conn: Conn, session: Session
) -> None:
    retention(conn, p_for=HOUR)
    sent = send_all(conn, ["old"] * 3)
    close(conn)
    clock.pass_time(conn, HOUR)
    other = session()
    with other.transaction():
        consumer(other)
        maintain(conn)
        assert stored(conn) == sent
    maintain(conn)
    assert stored(conn) == sent
    assert acked(conn, "s", "c") == sent
    maintain(conn)
    assert stored(conn) == []


def test_it_is_said_which_transaction_stops_trimming(conn: Conn, session: Session) -> None:
    """One that has created a consumer, and stays open; or is prepared, and forgotten."""
    retention(conn, p_for=HOUR)
    sent = send_all(conn, ["old"] * 3)
    close(conn)
    clock.pass_time(conn, HOUR)
    other = session()
    other.execute("begin")
    consumer(other)
    maintain(conn)
    why = "which created or moved a consumer or began to read"
    who = f"open transaction of process {other.info.backend_pid}, {why}"
    assert kept(conn).held_by == [who]
    assert kept(conn).advice == f"nothing is trimmed until this transaction ends: {who}"
    other.execute("prepare transaction 'forgotten'")
    maintain(conn)
    assert kept(conn).held_by == [f"prepared transaction 'forgotten', {why}"]
    assert "prepared transaction 'forgotten'" in kept(conn).advice
    assert stored(conn) == sent
    other.execute("rollback prepared 'forgotten'")
    maintain(conn)
    assert stored(conn) == []
    assert (kept(conn).held_by, kept(conn).advice) == ([], None)


def test_a_consumer_that_is_dropped_meanwhile_does_not_stop_maintain(
    conn: Conn, session: Session
) -> None:
    retention(conn, p_for=HOUR, p_unread="drop")
    for name in "cd":
        consumer(conn, name)
    send_all(conn, ["old"] * 3)
    close(conn)
    clock.pass_time(conn, HOUR)
    conn.execute(  # who skips waits
        "create function public.wait() returns trigger language plpgsql as"
        " 'begin perform pg_advisory_xact_lock(1); return null; end';"
        " create trigger wait after insert on pgqueue.skips"
        " for each row execute function public.wait()"
    )
    other, third = session(), session()
    other.execute("select pg_advisory_lock(1)")
    with ThreadPoolExecutor(1) as pool:
        maintained = pool.submit(call, conn, "maintain")
        wait_for_a_lock(third)
        value(other, "drop_consumer", "s", "d")
        other.execute("select pg_advisory_unlock(1)")
        maintained.result()
    maintain(conn)
    assert stored(conn) == []
    assert stats(conn).skipped == 3


def test_maintain_has_locks_of_one_stream_s_segments_at_a_time(conn: Conn) -> None:
    value(conn, "create_stream", "t")
    for name in "st":
        value(conn, "set_retention", name, p_for=HOUR)
        maintain(conn)
        value(conn, "send_batch", name, ["x"] * 3)
    close(conn)
    clock.pass_time(conn, HOUR)
    for _ in "st":
        done = dict(call(conn, "maintain"))
        assert (done["trimmed messages"], done["unfinished"]) == (3, 1)
    maintain(conn)
    assert stored(conn) == []


def test_maintain_keeps_no_lock_of_a_consumer_while_it_goes_on_to_other_streams(
    conn: Conn, session: Session, stream: int
) -> None:
    """Beside a claim that keeps what is due, and a gap: it ends, or lets the lock go."""
    retention(conn, p_for=HOUR, p_unread="drop")
    consumer(conn)
    send_all(conn, ["old"] * 3)
    (claimed,) = receive(conn, 1)
    value(conn, "extend", claimed.claim_id, HOUR * 9)
    other, writer = session(), session()
    writer.execute("begin")
    value(writer, "reserve", stream, 1)  # so the segment is sealed later than the gap is there
    close(conn)
    other.execute("begin")
    send(other)
    send(conn)
    value(conn, "ack", claim_of(receive(conn)))
    assert internals.cursor_of(conn).gaps
    writer.execute("rollback")
    maintain(conn)
    clock.pass_time(conn, HOUR)
    locks = (
        "select count(*) from pg_locks where locktype = 'advisory' and pid = pg_backend_pid()"
        " and classid = _pgqueue.lock_class_consumer()::oid"
    )
    unfinished, calls = 1, 0
    while unfinished:
        calls += 1
        with conn.transaction():
            unfinished = dict(call(conn, "maintain"))["unfinished"]
            assert unfinished or not one(conn, locks)
        assert calls < 20, "it says for ever that there is more"
    other.execute("commit")
    maintain(conn)
    assert states(conn)[claimed.seq] == "claimed"


def test_a_segment_waits_for_transactions_that_may_still_publish_some_of_it(
    conn: Conn, session: Session, stream: int
) -> None:
    """Open, prepared, and written by a sink that publishes it later: nothing of it is lost."""
    value(conn, "drop_stream", "s")
    stream = value(conn, "create_stream", "s", p_settings='{"notify": false}')
    consumer(conn)
    retention(conn, p_for=HOUR)
    send(conn, "before")
    maintain(conn)
    staged = stage(conn, stream, 2)
    other, third, fourth = session(), session(), session()
    other.execute("begin")
    send(other, "open")
    third.execute("begin")
    value(third, "reserve", stream, 1)  # nothing is written yet
    fourth.execute("begin")
    send(fourth, "prepared")
    fourth.execute("prepare transaction 'p'")
    close(conn)
    clock.pass_time(conn, HOUR * 2)
    assert len(acked(conn, "s", "c")) == 1
    for end in (
        lambda: publish(conn, stream, [staged], 2),
        lambda: other.execute("commit"),
        lambda: conn.execute("commit prepared 'p'"),
        lambda: third.execute("commit"),
    ):
        maintain(conn)
        assert stored(conn), "the segment was emptied"
        end()
    maintain(conn)
    assert len(acked(conn, "s", "c")) == 4
    clock.pass_time(conn, timedelta(days=2))  # what was reserved and not written
    maintain(conn)
    maintain(conn)
    assert stored(conn) == []


def test_nothing_is_lost_by_an_emptied_segment_that_somebody_reads(
    conn: Conn, session: Session
) -> None:
    """An open transaction that read from a segment keeps its table until it is over."""
    retention(conn, p_for=HOUR)
    send_all(conn, ["old"] * 3)
    close(conn)
    clock.pass_time(conn, HOUR)
    other = session()
    with other.transaction():
        assert len(stored(other)) == 3
        maintain(conn)
        assert len(stored(other)) == 3
    maintain(conn)
    assert stored(conn) == []


def test_a_large_table_becomes_a_segment_without_being_read_under_a_lock(
    conn: Conn, session: Session, stream: int
) -> None:
    """Its bound is checked while others send; the numbers jump only afterwards."""
    limits.set_constant(conn, "segment_bytes_at_once", 0)
    sent = send_all(conn, ["x"] * 10)
    consumer(conn)
    retention(conn, p_for=HOUR)
    for _ in range(20):
        answer = dict(call(conn, "maintain"))
        sent.append(send(conn))
        if not answer["unfinished"]:
            break
    maintain(conn)
    later = send(conn)
    assert later > sent[-1]
    assert later >= 1 << 40
    assert sorted(acked(conn, "s", "c")) == [*sent, later]
    close(conn)
    age(conn, 2)
    assert stored(conn) == []


def test_consumers_are_created_while_a_large_table_is_checked(conn: Conn, session: Session) -> None:
    limits.set_constant(conn, "segment_bytes_at_once", 0)
    sent = send_all(conn, ["x"] * 3)
    value(conn, "set_retention", "s", p_for=HOUR)
    assert dict(call(conn, "maintain"))["unfinished"] == 1  # from now on it has a bound
    other = session()
    other.execute("begin")
    assert dict(call(other, "maintain"))["unfinished"] == 1  # which is checked here
    conn.execute("set statement_timeout = '5s'")
    consumer(conn)
    sent.append(send(conn))
    assert acked(conn, "s", "c") == sent
    other.execute("commit")
    maintain(conn)
    assert send(conn) > 1 << 40


def test_numbers_that_get_past_all_leaves_lose_nothing(conn: Conn, stream: int) -> None:
    """They are in the table _rest, which becomes a segment itself."""
    limits.set_constant(conn, "segment_size", 1024)
    consumer(conn)
    retention(conn, p_for=HOUR)
    maintain(conn)
    sent = [seq for _ in range(5) for seq in send_all(conn, ["x"] * 1024)]
    assert one(conn, f"select count(*) from pgqueue.messages_{stream}_rest") > 0
    maintain(conn)
    assert one(conn, f"select count(*) from pgqueue.messages_{stream}_rest") == 0
    sent.append(send(conn))
    assert stored(conn) == sent
    assert sorted(acked(conn, "s", "c", 100_000)) == sent
    close(conn)
    close(conn)
    age(conn, 2)
    assert stored(conn) == []


def test_a_reader_goes_on_after_its_batch_was_settled_and_trimmed(
    conn: Conn, reader: Reader
) -> None:
    """What another claimer took over and acknowledged is not taken for gone."""
    retention(conn, p_for=HOUR)
    send_all(conn, ["x"] * 4)
    end = reader.ask(4)
    clock.end_leases(conn)
    assert len(acked(conn, "s", "c")) == 4
    close(conn)
    age(conn)
    assert stored(conn) == []
    resumed = reader.resume(end)
    assert (resumed.planned, resumed.taken_over, resumed.gone) == (0, 4, 0)


def test_a_reader_is_told_what_retention_took_from_it(conn: Conn, reader: Reader) -> None:
    retention(conn, p_for=HOUR, p_unread="drop")
    send_all(conn, ["x"] * 4)
    end = reader.ask(4)
    close(conn)
    age(conn)
    resumed = reader.resume(end)
    assert (resumed.planned, resumed.taken_over, resumed.gone) == (0, 0, 4)


def test_an_old_snapshot_does_not_read_past_an_emptied_table(conn: Conn, session: Session) -> None:
    """TRUNCATE empties it for old snapshots too, which still have what was published of it."""
    retention(conn, p_for=HOUR)
    send_all(conn, ["old"] * 3)
    close(conn)
    other = session()
    with other.transaction():
        other.execute("set transaction isolation level repeatable read")
        other.execute("select count(*) from pgqueue.publications")
        age(conn)
        assert stored(conn) == []
        young = send(conn, "young")
        with (
            pytest.raises(psycopg.Error, match="3 of 3 messages are not stored") as caught,
            other.transaction(),
        ):
            call(other, "read", "s")
        assert caught.value.sqlstate == "PQ010"
    assert seqs_of(call(other, "read", "s")) == [young]


def test_who_reads_without_claiming_is_told_when_retention_was_faster(conn: Conn) -> None:
    retention(conn, p_for=HOUR)
    before = value(conn, "start_offset", "s")
    first, *_ = send_all(conn, ["old"] * 3)
    (row,) = call(conn, "read", "s", None, 1)
    assert row.seq == first
    begun, end = row.next_offset, value(conn, "read_to", "s", Jsonb(row.next_offset))
    close(conn)
    young = send(conn, "young")
    assert len(call(conn, "read", "s", Jsonb(begun))) == 3
    age(conn, 0.9)
    for ask in (
        lambda: call(conn, "read", "s", Jsonb(begun)),
        lambda: value(conn, "read_to", "s", Jsonb(begun)),
        lambda: call(conn, "read_plan", "s", Jsonb(begun), Jsonb(end)),
        lambda: call(conn, "read_plan", "s", Jsonb(before), Jsonb(begun)),  # a part of one
    ):
        with raises("PQ010") as caught:
            ask()
        assert "of stream 's'" in str(caught.value)
    # who says so goes on with what is left, and reads nothing twice
    after = value(conn, "read_to", "s", Jsonb(begun), None, None, True)
    assert after["messages"] == begun["messages"] + 1
    rows = call(conn, "read_plan", "s", Jsonb(begun), Jsonb(after), True)
    assert [(row.lo, row.hi) for row in rows] == [(young, young + 1)]
    assert value(conn, "read_to", "s", Jsonb(after)) == after
    for offset in (end, "earliest", None):
        assert seqs_of(call(conn, "read", "s", Jsonb(offset))) == [young]


def forget(conn: Conn) -> None:
    """Consumer c has done all, and all goes."""
    while rows := receive(conn, 100):
        value(conn, "ack", claim_of(rows))
    for _ in range(9):
        age(conn)
    assert stored(conn) == []


@pytest.mark.small_limits
def test_who_reads_without_claiming_misses_nothing_that_was_for_others(
    conn: Conn, session: Session
) -> None:
    """Messages for named consumers, and what was rolled back."""
    consumer(conn)
    retention(conn, p_for=HOUR)
    other = session()
    other.execute("begin")
    send(other)
    before = value(conn, "start_offset", "s")
    send(conn)
    offset = value(conn, "read_to", "s", Jsonb(before))
    assert "gaps" in offset
    other.execute("rollback")
    for _ in range(2):
        send(conn, p_consumers=["c"])
    with conn.transaction(force_rollback=True):
        send(conn)
    send(conn, p_consumers=["c"])
    forget(conn)
    (row,) = call(conn, "read", "s", Jsonb(offset))
    assert row.seq is None
    assert value(conn, "read_to", "s", Jsonb(offset)) == row.next_offset
    assert call(conn, "read_plan", "s", Jsonb(offset), Jsonb(row.next_offset)) == []
    with raises("PQ010", "1 publication of stream 's' was trimmed"):
        value(conn, "read_to", "s", Jsonb(before))
    send(conn)
    forget(conn)
    send(conn, p_consumers=["c"])
    forget(conn)
    for lost in (offset, row.next_offset):
        with raises("PQ010", "of stream 's'"):
            value(conn, "read_to", "s", Jsonb(lost))


def test_what_is_noted_of_messages_for_others_is_bounded(conn: Conn) -> None:
    limits.set_constant(conn, "limit_hidden", 1)
    consumer(conn)
    retention(conn, p_for=HOUR)
    begun = value(conn, "start_offset", "s")
    send(conn, p_consumers=["c"])
    first = value(conn, "read_to", "s", Jsonb(begun))
    send(conn)
    second = value(conn, "read_to", "s", Jsonb(first))
    send(conn, p_consumers=["c"])
    forget(conn)
    assert one(conn, "select count(*) from pgqueue.trims cross join unnest(hidden_ids)") == 1
    value(conn, "read_to", "s", Jsonb(second))
    with raises("PQ010"):
        call(conn, "read_plan", "s", Jsonb(begun), Jsonb(first))


@pytest.mark.promise("guarantee: Retention")
def test_without_a_rule_nothing_goes_and_a_large_stream_says_so(conn: Conn, stream: int) -> None:
    assert kept(conn).advice is None
    send_all(conn, ["x"] * 3)
    assert "no consumer receives its messages" in kept(conn).advice
    consumer(conn)
    clock.pass_time(conn, HOUR * 10_000)
    maintain(conn)
    assert len(stored(conn)) == 3
    assert kept(conn).advice is None
    limits.set_constant(conn, "large_stream", 1)
    assert "set_retention" in kept(conn).advice
    value(conn, "set_retention", "s", HOUR)
    assert "maintain()" in kept(conn).advice
    maintain(conn)
    assert kept(conn).advice is None
    retention(conn)
    close(conn)
    clock.pass_time(conn, HOUR * 10)
    maintain(conn)
    assert len(stored(conn)) == 3, "a rule that was taken back"


@pytest.mark.parametrize("consumers", [0, 1])
def test_what_was_rolled_back_is_forgotten_with_what_was_trimmed_around_it(
    conn: Conn, session: Session, stream: int, consumers: int
) -> None:
    """What is noted of the past does not grow with it; and what is under way is never of it."""
    retention(conn, p_messages=8)
    slow = session()
    sent: list[int] = []
    if consumers:
        consumer(conn)
    late = stage(conn, stream, 2)
    maintain(conn)  # the next numbers are of another segment
    for _ in range(3):
        sent.append(send(conn))
        dead_publication(conn)
    slow.execute("begin")
    publish(slow, stream, [late], 2)
    for _ in range(3):
        sent.append(send(conn))
        dead_publication(conn)
    maintain(conn)
    young = send_all(conn, ["x"] * 8)
    if consumers:
        assert acked(conn, "s", "c") == sent + young
    assert maintain(conn)["trimmed messages"] == 6
    assert internals.ranges_trimmed(conn) == 6, "who publishes may have any of them"
    slow.execute("commit")
    if not consumers:
        consumer(conn)
    assert sorted(acked(conn, "s", "c")) == [1, 2] + young * (not consumers)
    send_all(conn, ["x"] * 8)
    assert maintain(conn)["trimmed messages"] == 10
    assert internals.ranges_trimmed(conn) == 1


def test_a_number_that_nobody_reserved_is_in_nobodys_way(conn: Conn) -> None:
    """The owner of the schema may write any number: no stream is kept from being maintained."""
    for number, first in product((2**45, 2**62, 2**63 - 1), (True, False)):
        value(conn, "drop_stream", "s")
        streams = [value(conn, "create_stream", name) for name in ("s", f"t{number}{first}")]
        if not first:
            retention(conn, p_for=HOUR)
        written = f"insert into pgqueue.messages_{streams[0]} (seq, data) values ({number}, 'x')"
        conn.execute(written.encode())
        value(conn, "set_retention", f"t{number}{first}", p_for=HOUR)
        retention(conn, p_for=HOUR)
        segments = (
            "select count(distinct stream_id) from pgqueue.segments where stream_id = any(%s)"
        )
        assert one(conn, segments, streams) == (1 if first and number >= 2**62 else 2)
        sent = send_all(conn, ["x"] * 3)
        consumer(conn)
        assert acked(conn, "s", "c") == sent
        if number < 2**62:
            for _ in range(2):
                close(conn)
                send(conn)
            age(conn)
            assert set(stored(conn)).isdisjoint(sent)


def test_numbers_rise_when_a_segment_is_closed_at_its_end(conn: Conn) -> None:
    """Though they are given out while it is found out that it is to be closed."""
    limits.set_constant(conn, "segment_size", 1024)
    retention(conn, p_for=HOUR)
    hi = one(conn, "select min(hi) from pgqueue.segments")
    first = send(conn)
    conn.execute("select nextval('pgqueue.seq_1') from generate_series(1, %s)", [hi - first - 10])
    conn.execute(  # others take numbers while maintain() looks at how much there is
        "create or replace function _pgqueue.segment_count() returns int language plpgsql as"
        " $$ begin perform nextval('pgqueue.seq_1') from generate_series(1, 20); return 8; end $$"
    )
    clock.pass_time(conn, HOUR / 7)
    seqs = []
    for _ in range(3):
        call(conn, "maintain")
        seqs.append(send(conn))
    assert seqs == sorted(set(seqs))
    assert seqs[0] >= hi + 10


def test_a_segment_says_who_keeps_it_also_when_it_is_the_only_one(
    conn: Conn, session: Session
) -> None:
    """Not a consumer that has finished all that is published, and waits for a transaction."""
    retention(conn, p_for=HOUR)
    value(conn, "create_consumer", "s", "c")
    other = session()
    other.execute("begin")
    send(other)
    for _ in range(3):
        send(conn)
        assert value(conn, "ack", claim_of(receive(conn))) == 1
        value(conn, "seek", "s", "c", "latest")
        close(conn)
    age(conn)
    assert kept(conn).held_by == ["transactions or sinks that have not yet published"]
    other.execute("commit")
    age(conn)
    assert kept(conn).held_by == ["consumer c"]
    assert value(conn, "ack", claim_of(receive(conn))) == 1
    age(conn)
    assert kept(conn).held_by == []


@pytest.mark.promise("operations: maintain: two at once, maintain_all, nobody")
def test_maintain_all_commits_as_it_goes(conn: Conn) -> None:
    limits.set_constant(conn, "trim_at_once", 2)
    retention(conn, p_for=HOUR)
    for _ in range(9):
        send(conn)
    close(conn)
    clock.pass_time(conn, HOUR)
    before = one(conn, "select pg_snapshot_xmax(pg_current_snapshot())::text::bigint")
    conn.execute("call pgqueue.maintain_all()")
    assert stored(conn) == []
    assert one(conn, "select pg_snapshot_xmax(pg_current_snapshot())::text::bigint") > before + 5


def test_no_function_keeps_a_plan_over_all_segments_of_a_stream(conn: Conn, stream: int) -> None:
    """Postgres may keep a plan without a segment that was attached while the plan was made.

    The functions of a stream may: each new segment replaces them.
    """
    retention(conn, p_for=HOUR)
    texts = dict(
        conn.execute(
            "select proname, prosrc from pg_proc"
            " where pronamespace = any ('{pgqueue, _pgqueue}'::regnamespace[])"
        ).fetchall()
    )
    kept = r"\b(from|join|using|only)\s+pgqueue\.messages(_\d+)?(?![\w%])"
    names = one(conn, "select _pgqueue.functions_of(%s)", stream)
    own = {name.removeprefix("_pgqueue.") for name in names}
    assert {name for name, text in texts.items() if re.search(kept, text)} == own
    send(conn, "a")
    close(conn)
    maintain(conn)
    for name in own:
        text = one(conn, "select prosrc from pg_proc where proname = %s", name)
        assert len(re.findall("messages_", text)) > len(re.findall("messages_", texts[name]))


def test_a_publication_stays_as_long_as_one_of_its_parts_is_needed(conn: Conn, stream: int) -> None:
    """Its messages are of two segments, because one task wrote long before the other."""
    consumer(conn)
    retention(conn, p_for=HOUR)
    blocks = [stage(conn, stream, 2, p_priority=1)]
    done = stored(conn)
    close(conn)
    blocks.append(stage(conn, stream, 2))
    publish(conn, stream, blocks, 4)
    owed = [seq for seq in stored(conn) if seq not in done]
    rows = receive(conn, 2)
    assert seqs_of(rows) == done
    value(conn, "ack", claim_of(rows))
    for _ in range(3):
        clock.pass_time(conn, HOUR)
        send(conn)
        maintain(conn)
    assert set(owed) <= {row.seq for row in call(conn, "read", "s")}
    assert seqs_of(receive(conn, 2)) == owed
