"""Actions: messages that are settled by their numbers, beside claims, and once per batch."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest
from psycopg.types.json import Jsonb

from tests.sql import checker, clock, internals, limits
from tests.sql.cases import for_each
from tests.sql.queue import *

pytestmark = pytest.mark.usefixtures("stream", "allowed_afterwards")

A_MINUTE = seconds(60)


def dead(conn: Conn, name: str = "c") -> dict[int, tuple[str, Any]]:
    """Reason and details of the dead letters of a consumer."""
    found = call(conn, "read_dead", "s", name, p_max=1000)
    return {row.seq: (row.reason, row.details) for row in found}


def asked(reader: Reader, size: int | None = None, query: str = "q", **options: Any) -> Any:
    """What a reader is given, which then is known to belong to this query."""
    end = reader.ask(size, **options)
    value(reader.conn, "reader_query", reader.id, query)
    return end


@pytest.mark.all_versions
@for_each("ordering", ["none", "key"])
def test_a_query_acts_on_its_batch_whose_replay_has_the_same_rows(
    conn: Conn, ordering: str
) -> None:
    """It counts as settled what was acted upon, and does it once."""
    reader = Reader(conn, consumer(conn, ordering=ordering, backoff_base="1 min"))
    sent = send_keys(conn, *"abcdefghij")
    end = asked(reader)
    assert reader.resume(end) == (10, 0, 0)
    order = reader.plan(end)
    rows = (
        action("dead_letter", [sent[1], sent[4]], reason="no number", details={"at": 3}),
        action("dead_letter", [sent[2]]),
        action("ack", [sent[5]]),
        action("nack", [sent[7]], reason="later"),
        action("nack", [sent[9]], reason="now", delay="0 s"),
    )  # fmt: skip
    assert settle(conn, *rows, p_query_id="q") == (True, 6, 0)
    letter = ("no number", {"at": 3})
    assert dead(conn) == {sent[1]: letter, sent[4]: letter, sent[2]: ("rejected", None)}
    assert reader.lost(end) == 0
    assert sorted(seq for seq, each in states(conn).items() if each == "claimed") == [
        sent[i] for i in (0, 3, 6, 8)
    ]
    checker.check(conn)
    for _ in range(2):  # as after a crash, in another process
        assert reader.resume(end) == (10, 0, 0)
        assert reader.plan(end) == order
        assert settle(conn, *rows, p_query_id="q") == (False, 0, 0)
        assert settle(conn, *rows, p_query_id="q", sink=f"write:{time.time()}") == (True, 0, 6)
    reader.move(end)
    after = reader.ask()
    assert after.lost == 0
    left = {seq: each for seq, each in states(conn).items() if each != "dead"}
    assert left == {sent[7]: "delayed", sent[9]: "claimed"}
    clock.pass_time(conn, A_MINUTE)
    reader.move(after)
    assert reader.plan(reader.ask()) == [sent[7]]
    assert stats(conn).dead == 3


def test_a_message_that_fails_too_often_by_actions_is_given_up(conn: Conn) -> None:
    reader = Reader(conn, consumer(conn, max_deliver_count=2))
    (seq,) = send_all(conn, ["x"])
    for batch in range(2):
        end = reader.ask()
        nack = action("nack", [seq], reason=f"no {batch}")
        assert settle(conn, nack, batch=batch) == (True, 1, 0)
        reader.move(end)
    assert reader.ask().claimed == 0
    (letter,) = call(conn, "read_dead", "s", "c")
    assert (letter.reason, letter.error, letter.deliver_count) == ("max deliveries", "no 1", 2)


@pytest.mark.parametrize("known", [True, False], ids=["by its query", "by somebody"])
def test_what_a_worker_holds_is_the_workers(conn: Conn, known: bool) -> None:
    """Until its lease is over: then it is released, as for a claimer in need."""
    reader = Reader(conn, consumer(conn))
    query: dict[str, Any] = {"p_query_id": "q"} if known else {}
    sent = send_all(conn, ["x"] * 4)
    claim = claim_of(receive(conn, 2))
    end = asked(reader)
    rows = action("dead_letter", sent, reason="r")
    assert settle(conn, rows, **query) == (True, 2, 2)
    assert dead(conn).keys() == set(sent[2:])
    assert value(conn, "ack", claim, [sent[0]]) == 1
    clock.pass_time(conn, A_MINUTE)
    assert settle(conn, rows, batch=1, **query) == (True, 1, 3)
    assert dead(conn).keys() == set(sent[1:])
    assert value(conn, "ack", claim) == 0
    reader.move(end)
    assert reader.ask().lost == 0


def test_what_a_query_has_lost_it_does_not_settle(conn: Conn) -> None:
    """Another claimer decides then; and what was returned goes to others, not back to the query."""
    reader = Reader(conn, consumer(conn))
    sent = send_all(conn, ["x"] * 4)
    end = asked(reader)
    assert settle(conn, action("nack", [sent[3]], delay="0 s"), p_query_id="q")[1] == 1
    clock.pass_time(conn, A_MINUTE)
    mine = receive(conn, 2)
    assert seqs_of(mine) == sent[:2]
    rows = [action("dead_letter", sent[:2]), action("ack", [sent[2]])]
    assert settle(conn, *rows, p_query_id="q", batch=1) == (True, 0, 3)
    assert dead(conn) == {}
    value(conn, "nack", claim_of(mine))
    resumed = reader.resume(end)
    assert (resumed.planned, resumed.taken_over) == (4, 0), "it has back what is free"
    assert sorted(reader.plan(end)) == sent
    assert sorted(seq for seq, each in states(conn).items() if each == "claimed") == sent[:3]
    assert seqs_of(receive(conn)) == [sent[3]]
    assert settle(conn, *rows, p_query_id="q", batch=2) == (True, 3, 0)


def test_two_queries_of_a_consumer_do_not_settle_each_others(conn: Conn) -> None:
    """But a write that is of no query does, and the batch is without it then."""
    consumer_id = consumer(conn)
    one, other = Reader(conn, consumer_id), Reader(conn, consumer_id)
    sent = send_all(conn, ["x"] * 4)
    ends = asked(one, 2, "one"), asked(other, 2, "other")
    assert settle(conn, action("ack", sent), p_query_id="one") == (True, 2, 2)
    rows = action("dead_letter", sent[2:3])
    assert settle(conn, rows, p_query_id="not here", p_replayed=False, batch=1) == (True, 1, 0)
    assert one.plan(ends[0]) == sent[:2]
    assert other.plan(ends[1]) == sent[3:]
    assert other.resume(ends[1]) == (1, 0, 0)


@pytest.mark.parametrize("what", ["ack", "dead_letter"])
def test_what_nobody_holds_may_be_settled_by_anybody(conn: Conn, what: str) -> None:
    """New, ready, delayed, waiting for its key; not what is nobody's, done, dead or filtered."""
    consumer(conn, keep_history="1 day")
    consumer(conn, "d", "key")
    consumer(conn, "f", p_topic="a")
    consumer(conn, "other")
    first = send_keys(conn, *"kkl")
    later = send(conn, p_deliver_at=now(conn) + A_MINUTE)
    for name in "cd":
        held = receive(conn, 1, name)
        value(conn, "nack", claim_of(held), p_delay=A_MINUTE)
    new = send_all(conn, ["x"] * 3)
    not_mine = send(conn, p_consumers=["other"])
    everything = [*first, later, *new]
    before = states(conn), states(conn, "d")
    assert settle(conn, action("nack", everything), batch=9, sink="txn:n") == (True, 0, 7)
    assert before == (states(conn), states(conn, "d")), "nobody holds them who could return them"
    named = [*everything, not_mine, 999]
    rows = [action(what, named, name, details={"by": "me"}) for name in "cdf"]
    assert settle(conn, *rows) == (True, 2 * 7, 3 * 9 - 2 * 7)
    for name in "cd":
        kept = dict.fromkeys(everything, "dead") if what == "dead_letter" else {}
        assert states(conn, name) == kept
    assert states(conn, "f") == {}
    done = call(conn, "outcome", "s", "c", new[0])[0]
    assert (done.state, done.result) == ("done" if what == "ack" else "dead", {"by": "me"})
    again = send_keys(conn, *"kl")
    assert acked(conn, "s", "d") == again, "no key is stuck"
    assert settle(conn, *rows, batch=1) == (True, 0, 3 * 9)


def test_a_nack_returns_what_follows_in_its_key_unless_it_is_settled_too(conn: Conn) -> None:
    reader = Reader(conn, consumer(conn, ordering="key"))
    k1, k2, k3, l1, l2 = send_keys(conn, *"kkkll")
    end = asked(reader)
    rows = [action("nack", [k1, l2], delay="1 min"), action("dead_letter", [k2])]
    assert settle(conn, *rows, p_query_id="q") == (True, 3, 0), "k3 was not named"
    assert {s: e for s, e in states(conn).items() if e == "claimed"} == {l1: "claimed"}
    assert sorted(reader.plan(end)) == [k1, k2, k3, l1, l2]
    reader.move(end)
    assert reader.ask().claimed == 0, "k1 keeps k3 back"
    clock.pass_time(conn, A_MINUTE)
    came = acked(conn, "s", "c")
    assert sorted(came) == [k1, k3, l2]
    assert came.index(k1) < came.index(k3)


def test_a_nack_returns_all_that_follows_with_one_order_for_all(conn: Conn) -> None:
    reader = Reader(conn, consumer(conn, ordering="stream"))
    sent = send_all(conn, ["x"] * 4)
    end = asked(reader)
    rows = [action("nack", [sent[1]], delay="0 s"), action("dead_letter", [sent[2]])]
    assert settle(conn, *rows, p_query_id="q") == (True, 2, 0)
    assert reader.plan(end) == sent
    reader.move(end)
    end = reader.ask()
    assert reader.plan(end) == sent[1:2]
    reader.move(end)
    assert reader.plan(reader.ask()) == sent[3:]


def test_many_actions_with_reasons_of_their_own(conn: Conn) -> None:
    reader = Reader(conn, consumer(conn))
    sent = send_all(conn, ["x"] * 300)
    reader.ask()
    random.shuffle(sent)
    rows = [action("dead_letter", sent[i : i + 2], reason=f"r{i}") for i in range(0, 300, 2)]
    assert settle(conn, *rows) == (True, 300, 0)
    reasons = {seq: reason for seq, (reason, _) in dead(conn).items()}
    assert reasons == {seq: f"r{i - i % 2}" for i, seq in enumerate(sent)}


def test_messages_are_brought_back_once_per_batch(conn: Conn) -> None:
    consumer(conn, backoff_base="1 hour")
    sent = send_all(conn, ["x"] * 4)
    claim = claim_of(receive(conn))
    value(conn, "dead_letter", claim, sent[:2])
    value(conn, "nack", claim, sent[2:])
    rows = Jsonb([action("redrive", [sent[0], sent[3]]), action("retry", [sent[1], sent[2]])])
    assert tuple(call(conn, "revive_messages", "txn:a", 5, rows)[0]) == (True, 2, 2)
    assert tuple(call(conn, "revive_messages", "txn:a", 5, rows)[0]) == (False, 0, 0)
    assert sorted(seqs_of(receive(conn))) == [sent[0], sent[2]]


@for_each("sink", ["txn:a", "query"])
def test_actions_on_two_consumers_are_two_parts_of_a_batch(conn: Conn, sink: str) -> None:
    """Two writes of foreachBatch with one txnAppId: the second is no repetition."""
    for name in "cd":
        consumer(conn, name)
    sent = send_all(conn, ["x"] * 2)
    assert settle(conn, action("ack", sent), sink=sink) == (True, 2, 0)
    assert settle(conn, action("dead_letter", sent, "d"), sink=sink) == (True, 2, 0)
    assert settle(conn, action("dead_letter", sent, "d"), sink=sink) == (False, 0, 0)
    assert sorted(dead(conn, "d")) == sent
    rows = Jsonb([action("redrive", sent, "d")])
    assert tuple(call(conn, "revive_messages", sink, 0, rows)[0]) == (True, 2, 0)
    sent += send_all(conn, ["x"])
    both = [action("ack", sent[2:], name) for name in "cd"]
    assert settle(conn, both[0], batch=1, sink=sink) == (True, 1, 0)
    assert settle(conn, *both, batch=1, sink=sink) == (True, 1, 1), "c's is done already"


def test_actions_of_a_query_that_are_repeated_name_the_same_messages(conn: Conn) -> None:
    consumer(conn)
    sent = send_all(conn, ["x"] * 4)
    settle(conn, action("ack", sent[:1]), action("ack", sent[1:2], details=1))
    assert settle(conn, action("ack", sent[:2], details=2)) == (False, 0, 0)
    for other in (action("ack", sent[1:3]), action("dead_letter", sent[:2])):
        with raises("PQ010", "other messages than it has now"):
            settle(conn, other)
        assert settle(conn, other, p_compare=False) == (False, 0, 0)
    with raises("PQ010", "published with 2 messages, and has 1 now"):
        settle(conn, action("ack", sent[:1]), p_compare=False)
    settle(conn, action("dead_letter", sent[2:3]), batch=1, p_compare=False)
    assert settle(conn, action("dead_letter", sent[3:]), batch=1) == (False, 0, 0)
    for seqs in (sent[:1], sent[1:2]):
        call(conn, "revive_messages", "sink", 0, Jsonb([action("redrive", seqs)]), False)


def test_a_batch_publishes_and_acts_together_or_not_at_all(conn: Conn) -> None:
    reader = Reader(conn, consumer(conn))
    out = value(conn, "create_stream", "out")
    sent = send_all(conn, ["x"] * 3)
    asked(reader)
    rows = [action("dead_letter", sent[:1]), action("ack", sent[1:])]

    def commit(block: int, *, fail: bool = False) -> tuple[bool, bool]:
        with conn.transaction():
            published = publish(conn, out, [block], 2)
            done = settle(conn, *rows, p_query_id="q")[0]
            if fail:
                raise psycopg.Rollback
        return published, done

    commit(stage(conn, out, 2), fail=True)
    assert (internals.count(conn, "publications"), dead(conn)) == (1, {})
    assert commit(stage(conn, out, 2)) == (True, True)
    assert commit(stage(conn, out, 2)) == (False, False), "a replay"
    assert len(dead(conn)) == 1
    with raises("PQ010", "published with 3 messages, and has 1 now"):
        settle(conn, rows[0], p_query_id="q")


def test_what_retention_took_is_in_no_replay(conn: Conn, stream: int) -> None:
    reader = Reader(conn, consumer(conn))
    sent = send_all(conn, ["x"] * 3)
    end = asked(reader)
    settle(conn, action("ack", sent[:2]), p_query_id="q")
    internals.note_trim(conn, stream, sent[:1])
    assert reader.resume(end) == (2, 0, 0)
    assert reader.plan(end) == sent[1:]


@pytest.mark.parametrize("latest", [False, True])
@pytest.mark.parametrize("small", [False, True])
def test_what_no_claim_has_screened_yet_is_settled_before_what_was_sent_earlier(
    conn: Conn, latest: bool, small: bool
) -> None:
    """Where too much is new to screen all of it: the batch is applied, and never repeated."""
    options: dict[str, Any] = {"per_key_latest": True} if latest else {"p_topic": "a"}
    consumer(conn, **options)
    sent = [seq for _ in range(30) for seq in send_keys(conn, "a", "b")]
    if small:
        limits.shrink(conn)
    limits.set_constant(conn, "filter_time", "0 s")
    passing = sent[-2:] if latest else sent[-2:-1]
    changed = settle(conn, action("dead_letter", sent[-2:]))
    assert changed == (True, len(passing), 2 - len(passing))
    assert stats(conn).new > 50, "the others were screened meanwhile"
    checker.check(conn)
    assert sorted(dead(conn)) == passing
    limits.set_constant(conn, "filter_time", "2 s")
    got = [seq for _ in range(60) for seq in acked(conn, "s", "c")]
    assert got == ([] if latest else sent[:-2:2])


def test_a_batch_that_is_cut_is_without_what_was_settled(conn: Conn) -> None:
    """quarantineAfter: its replay has other rows anyway, and what is left may be to blame."""
    reader = Reader(conn, consumer(conn))
    sent = send_all(conn, ["x"] * 5)
    end = asked(reader)
    reader.start(end, 1)
    assert settle(conn, action("ack", sent[:1]), p_query_id="q", sink="txn:a")[1] == 1
    row = reader.start(end, 1)
    assert (row.planned, row.returned, reader.plan(end)) == (2, 2, sent[1:3])
    assert reader.lost(end) == 0
    reader.move(end)
    assert reader.ask().lost == 0


def test_a_batch_of_several_streams_is_published_once(conn: Conn, stream: int) -> None:
    consumer(conn)
    other = value(conn, "create_stream", "other")
    value(conn, "create_consumer", "other", "c", "earliest")

    def write(batch: int = 0, sink: str = "sink") -> bool:
        blocks = [
            stage(conn, to, n, batch, sink, p_routed=True) for to, n in ((stream, 2), (other, 3))
        ]
        return value(conn, "publish_staged", sink, batch, None, blocks, 5)

    assert write() is True
    assert write() is False
    with pytest.raises(psycopg.Error, match="that was to the streams of column stream"):
        publish(conn, stream, [stage(conn, stream, 5)], 5)
    assert value(conn, "is_published", "sink", None, 0) is True
    assert write(3, "txn:a") is True
    assert write(2, "txn:a") is False
    assert publish(conn, stream, [stage(conn, stream, 1, 3, "txn:a")], 1, 3, "txn:a") is True
    assert len(acked(conn, "s", "c")) == 2 + 2 + 1
    assert len(acked(conn, "other", "c")) == 3 + 3
    blocks = [stage(conn, stream, 1, 1, p_routed=True), stage(conn, other, 1, 1)]
    with pytest.raises(psycopg.Error, match="1 of 2 staged chunks"):
        value(conn, "publish_staged", "sink", 1, None, blocks, 2)
    call(conn, "maintain", "1 h")
    assert internals.count(conn, "staged_chunks") == 2, "not yet published"
    assert write(1) is True
    call(conn, "maintain", "1 h")
    assert internals.count(conn, "staged_chunks") == 0


def test_blocks_of_several_streams_go_by_the_rules_of_each(conn: Conn, stream: int) -> None:
    """Dedup keys are of a stream; a full consumer counts all blocks that are for it."""
    other = value(conn, "create_stream", "other")
    for name in ("s", "other"):
        value(conn, "alter_stream", name, '{"dedup_window": "1 hour"}')
    consumer(conn, max_backlog=3)
    consumer(conn, "d")
    keys = {"p_dedup_keys": ["one", "two"], "p_routed": True}

    def write(batch: int, **options: Any) -> bool:
        blocks = [stage(conn, to, 2, batch, **keys, **options) for to in (stream, other)]
        return value(conn, "publish_staged", "sink", batch, None, blocks, 4)

    assert write(0, p_consumers=None) is True
    assert write(1, p_consumers=None) is True, "all of them duplicates"
    assert len(internals.published(conn)) == 2 + 2 - 2, "numbers of both streams"
    full = [stage(conn, stream, 1, 2, p_routed=True, p_consumers=[*to]) for to in ("c", "cd")]
    with raises("PQ013", "cannot send 2 messages to stream 's': consumer 'c'"):
        value(conn, "publish_staged", "sink", 2, None, full, 2)
    assert len(acked(conn, "s", "c")) == 2
    assert value(conn, "publish_staged", "sink", 2, None, full, 2) is True
    assert (len(acked(conn, "s", "c")), len(acked(conn, "s", "d"))) == (2, 3)


def test_a_query_notices_a_stream_of_several_that_was_made_again(conn: Conn, stream: int) -> None:
    def write(to: int, batch: int) -> bool:
        blocks = [stage(conn, each, 1, batch, p_routed=True) for each in (stream, to)]
        return value(conn, "publish_staged", "sink", batch, None, blocks, 2)

    assert write(value(conn, "create_stream", "other"), 0)
    value(conn, "drop_stream", "other")
    again = value(conn, "create_stream", "other")
    with raises("PQ001", "stream 'other' was dropped and created again"):
        write(again, 1)


# Races


def claimer_ahead(conn: Conn, session: Session) -> Conn:
    """A session that claims ahead of the cursor, of a new consumer that has taken a message."""
    consumer(conn)
    send(conn)
    assert len(acked(conn, "s", "c")) == 1
    clock.stop_looking(conn)
    conn.execute("set lock_timeout = '2 s'")
    return session()


def test_what_is_new_is_settled_beside_a_claim_that_stays_open(
    conn: Conn, session: Session
) -> None:
    """Of another new message: that one alone is passed over. Many others are in between."""
    other = claimer_ahead(conn, session)
    held = send(conn)
    with other.transaction():
        found = receive(other, 1)
        assert seqs_of(found) == [held]
        sent = [send(conn) for _ in range(90)]
        done = [sent[1], sent[70], sent[89]]
        assert settle(conn, action("ack", [held, *done])) == (True, 3, 1)
        value(other, "ack", claim_of(found))
    checker.check(conn)
    assert acked(conn, "s", "c") == [seq for seq in sent if seq not in done]
    assert stats(conn).backlog == 0


def test_many_new_messages_beside_a_claim_that_stays_open_are_settled_by_a_repetition(
    conn: Conn, session: Session
) -> None:
    """Their locks would fill the lock table of the server."""
    other = claimer_ahead(conn, session)
    send(conn)
    with other.transaction():
        assert receive(other, 1)
        sent = [send(conn) for _ in range(one(conn, "select _pgqueue.far_ahead()") + 1)]
        with raises("55P03", "a claim of another new message stays open"):
            settle(conn, action("ack", sent))
    assert settle(conn, action("ack", sent)) == (True, len(sent), 0)


def test_an_action_waits_for_who_settles_and_passes_over_what_that_one_did(
    conn: Conn, session: Session
) -> None:
    reader = Reader(conn, consumer(conn))
    sent = send_all(conn, ["x"] * 3)
    asked(reader)
    first, second = session(), session()
    with ThreadPoolExecutor(1) as pool:
        with first.transaction():
            done = settle(first, action("ack", sent[:1]), p_query_id="q", sink="write:first")
            assert done == (True, 1, 0)
            slower = pool.submit(settle, second, action("dead_letter", sent[:2]), p_query_id="q")
            wait_for_a_lock(conn)
        assert slower.result() == (True, 1, 1)
    assert dead(conn).keys() == {sent[1]}


def test_who_settles_and_who_brings_back_take_consumers_in_one_order(
    conn: Conn, session: Session
) -> None:
    """Whatever these are named: neither ends as a deadlock."""
    first = consumer(conn, "z")
    consumer(conn, "a")
    (seq,) = send_all(conn, ["x"])
    holder, settler, reviver = session(), session(), session()
    revived = Jsonb([action("redrive", [seq], name) for name in ("z", "a")])
    with ThreadPoolExecutor(2) as pool:
        with holder.transaction():
            holder.execute("select _pgqueue.lock_consumer(%s)", [first])
            done = pool.submit(settle, settler, *(action("ack", [seq], n) for n in ("z", "a")))
            wait_for_a_lock(conn)
            back = pool.submit(call, reviver, "revive_messages", "txn:a", 5, revived)
            wait_for_a_lock(conn, 2)
        assert done.result(20) == (True, 2, 0)
        assert tuple(back.result(20)[0]) == (True, 0, 2)


@pytest.mark.parametrize("ordering", ["none", "key"])
def test_beside_workers_that_take_over_each_message_ends_once(
    conn: Conn, session: Session, ordering: str
) -> None:
    """Leases end all the time; a query acts and goes on, and workers claim what it loses."""
    consumer_id = consumer(conn, ordering=ordering)
    reader = Reader(session(), consumer_id)
    ended: dict[int, int] = {}
    stop = threading.Event()
    lock = threading.Lock()

    def end(seqs: list[int]) -> None:
        with lock:
            for seq in seqs:
                ended[seq] = ended.get(seq, 0) + 1

    def work(own: Conn) -> None:
        while not stop.is_set():
            if got := receive(own, 5, p_visibility_timeout=seconds(0.02)):
                kept = seqs_of(got)[:3]
                if value(own, "ack", claim_of(got), kept) == len(kept):
                    end(kept)
                value(own, "nack", claim_of(got))

    sent: list[int] = []
    with ThreadPoolExecutor(1) as pool:
        worker = pool.submit(work, session())
        try:
            for batch in range(12):
                sent += send_keys(conn, *random.choices("abcdef", k=12))
                offset = asked(reader, 10, p_visibility_timeout=seconds(0.02))
                if not offset.claimed:
                    continue
                reader.resume(offset)
                plan = reader.plan(offset)
                some = random.sample(plan, len(plan) // 2)
                time.sleep(random.choice((0, 0.03)))
                before = dead(conn).keys()
                settle(
                    reader.conn,
                    action("dead_letter", some[::3] or [10**9]),
                    action("nack", some[1::3] or [10**9 + 1], delay="0 s"),
                    batch=batch, p_query_id="q",
                )  # fmt: skip
                end(list(dead(conn).keys() - before))
                checker.check(conn)
                with reader.conn.transaction():
                    internals.lock_claim(reader.conn, offset.claim_id)
                    held = internals.held_by(reader.conn, offset.claim_id)
                    reader.move(offset)
                    reader.ask(1)  # acknowledges
                end(held)
        finally:
            stop.set()
        worker.result()
    clock.pass_time(conn, A_MINUTE)
    end(acked(conn, "s", "c"))
    assert all(n == 1 for seq, n in ended.items()), {s: n for s, n in ended.items() if n > 1}


@pytest.mark.parametrize("settled", [150, 1])
def test_a_write_settles_what_any_number_of_claims_had_whose_leases_ended(
    conn: Conn, settled: int
) -> None:
    """However many claims hold the others, and whether or not their leases ended."""
    if settled == 1:
        limits.set_constant(conn, "limit_expired", 1)
    consumer(conn)
    sent = send_all(conn, ["x"] * 150)
    claims = [claim_of(receive(conn, 1)) for _ in sent]
    clock.end_lease(conn, *claims[-settled:])
    assert settle(conn, action("ack", sent)) == (True, settled, 150 - settled)
    checker.check(conn)
    assert list(states(conn)) == sent[: 150 - settled]


def test_a_write_settles_a_message_of_a_claim_whose_lease_is_that_of_others(conn: Conn) -> None:
    """A claim of unlike messages has one lease."""
    consumer(conn)
    sent = send_all(conn, ["x"] * 2)
    value(conn, "nack", claim_of(receive(conn, 1)))
    receive(conn, 2)
    assert settle(conn, action("ack", sent[1:])) == (True, 0, 1)
    clock.end_leases(conn)
    assert settle(conn, action("ack", sent[1:]), batch=1) == (True, 1, 0)
    assert states(conn) == {sent[0]: "ready"}


def test_a_write_passes_over_a_claim_whose_owner_is_just_settling(
    conn: Conn, session: Session
) -> None:
    """Though its lease has ended; and it settles what the others had."""
    consumer(conn)
    sent = send_all(conn, ["x"] * 3)
    claims = [claim_of(receive(conn, 1)) for _ in sent]
    clock.end_leases(conn)
    conn.execute("set statement_timeout = '5 s'")
    other = session()
    other.execute("begin")
    assert value(other, "ack", claims[0]) == 1
    assert settle(conn, action("ack", sent)) == (True, 2, 1)
    other.execute("rollback")
    assert list(states(conn)) == sent[:1]
