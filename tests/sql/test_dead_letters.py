"""Messages that are given up: after max_deliver_count deliveries, or by hand."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from psycopg.types.json import Jsonb

from tests.sql import checker, clock, internals
from tests.sql.cases import for_each
from tests.sql.queue import *

pytestmark = [pytest.mark.small_limits, pytest.mark.usefixtures("stream", "allowed_afterwards")]


@for_each("ordering", ORDERINGS)
@pytest.mark.promise("concepts: transitions of a message")
def test_a_message_that_failed_too_often_is_dead_lettered(conn: Conn, ordering: str) -> None:
    errors = {"nack": "failure 2", "expiry": TAKEN_OVER}
    for how in errors:
        consumer(conn, how, ordering, max_deliver_count=2)
    poison = send(conn, "poison", p_key="k", p_priority=7)
    for how in errors:
        for attempt in (1, 2):
            (row,) = receive(conn, name=how)
            assert row.deliver_count == attempt
            if how == "nack":
                value(conn, "nack", row.claim_id, p_reason=f"failure {attempt}")
            else:
                clock.end_leases(conn)
    healthy = send(conn, "healthy", p_key="k")
    for how in errors:
        assert acked(conn, "s", how) == [healthy]
        assert states(conn, how) == {poison: "dead"}
    for dead, error in zip(internals.dead_letters(conn), errors.values(), strict=True):
        assert (dead.message_count, dead.priority, dead.deliver_count) == (1, 7, 2)
        assert (dead.reason, dead.note["error"]) == ("max deliveries", error)


@for_each("ordering", ORDERINGS)
@pytest.mark.promise("concepts: transitions of a message")
def test_a_message_is_dead_lettered_by_hand_with_its_reason(conn: Conn, ordering: str) -> None:
    consumer(conn, ordering=ordering)
    sent = send_all(conn, ["x", "y", "z"], p_keys=["k", "k", "l"])
    claim = claim_of(receive(conn))
    details = {"line": 7}
    assert value(conn, "dead_letter", claim, [sent[0]], "not json", Jsonb(details)) == 1
    (dead,) = internals.dead_letters(conn)
    assert (dead.reason, dead.details, dead.claim_id) == ("not json", details, claim)
    assert state(conn, sent[0]).last_error == "not json"
    assert value(conn, "dead_letter", claim) == 2
    assert receive(conn) == []
    assert stats(conn).dead == 3
    assert stats(conn).claims == 0


@pytest.mark.promise("guarantee: Head-of-line blocking")
def test_a_dead_message_lets_those_behind_it_pass(conn: Conn) -> None:
    consumer(conn, "k", ordering="key")
    consumer(conn, "s", ordering="stream")
    sent = send_all(conn, ["x"] * 3, p_keys=["k"] * 3)
    for name in "ks":
        value(conn, "dead_letter", claim_of(receive(conn, 1, name)))
        assert acked(conn, "s", name) == sent[1:]


@for_each("ordering", ["key", "stream"])
def test_a_message_that_failed_too_often_takes_no_later_one_back(conn: Conn, ordering: str) -> None:
    consumer(conn, ordering=ordering, max_deliver_count=1)
    sent = send_all(conn, ["x"] * 3, p_keys=["k"] * 3)
    claim = claim_of(receive(conn))
    assert value(conn, "nack", claim, sent[:1]) == 1
    assert list(states(conn).values()) == ["dead", "claimed", "claimed"]
    assert value(conn, "ack", claim) == 2


def bury(conn: Conn, seqs: list[int], name: str = "c", reason: str | None = None) -> None:
    """Messages of a consumer that has nothing else die."""
    while rows := receive(conn, 1000, name):
        chosen = [row.seq for row in rows if row.seq in seqs]
        value(conn, "dead_letter", claim_of(rows), chosen, reason)
        if len(chosen) < len(rows):
            value(conn, "ack", claim_of(rows))


@pytest.mark.promise("feature: dead letters")
def test_a_dead_letter_tells_why_whose_how_often_and_when_with_what_it_holds(conn: Conn) -> None:
    conn.execute("set application_name = 'worker 7'")
    consumer(conn, max_deliver_count=2)
    bad, worse = send(conn, "bad", p_key="k", p_headers=Jsonb({"a": 1})), send(conn, "worse")
    for _ in range(2):
        rows = receive(conn)
        value(conn, "nack", claim_of(rows), [bad], None, "no such user")
        if len(rows) == 2:
            value(conn, "dead_letter", claim_of(rows), [worse], None, Jsonb({"line": 7}))
    first, second = call(conn, "read_dead", "s", "c")
    assert (first.seq, first.key, first.data, first.headers) == (bad, "k", "bad", {"a": 1})
    assert (first.reason, first.error, first.details) == ("max deliveries", "no such user", None)
    assert (first.deliver_count, first.owner) == (2, "worker 7")
    assert first.inserted_at < second.died_at < first.died_at
    assert (second.data, second.reason, second.error) == ("worse", "rejected", None)
    assert (second.details, second.deliver_count) == ({"line": 7}, 1)
    view = "select reason, message_count, first_seq, owner from pgqueue.dead_letters order by 3"
    said = [("max deliveries", bad), ("rejected", worse)]
    assert conn.execute(view).fetchall() == [(why, 1, seq, "worker 7") for why, seq in said]


def test_dead_letters_are_read_page_by_page_and_by_number_reason_and_time(conn: Conn) -> None:
    consumer(conn)
    sent = send_all(conn, ["x"] * 20)
    bury(conn, sent[::2], reason="odd")
    when = one(conn, "select clock_timestamp()")
    more = send_all(conn, ["x"] * 3)
    bury(conn, more, reason="late")
    pages: list[list[int]] = []
    after = 0
    while page := seqs_of(call(conn, "read_dead", "s", "c", p_max=4, p_after=after)):
        pages.append(page)
        after = page[-1]
    assert [len(page) for page in pages] == [4, 4, 4, 1]
    assert [seq for page in pages for seq in page] == [*sent[::2], *more]
    assert seqs_of(call(conn, "read_dead", "s", "c", p_reason="late")) == more
    assert seqs_of(call(conn, "read_dead", "s", "c", p_before=when)) == sent[::2]
    wanted = [sent[4], sent[5], more[0]]
    assert seqs_of(call(conn, "read_dead", "s", "c", wanted)) == [sent[4], more[0]]


@for_each("ordering", ORDERINGS)
@pytest.mark.promise("feature: dead letters delivered again", "concepts: transitions of a message")
def test_what_is_redriven_arrives_anew_at_the_end_in_its_order(conn: Conn, ordering: str) -> None:
    """As if never delivered, for this consumer alone."""
    consumer(conn, ordering=ordering, max_deliver_count=1)
    consumer(conn, "other")
    first = send_all(conn, ["x"] * 6, p_keys=list("aabbab"))
    bury(conn, first, "other")
    bury(conn, first[1:3], reason="one")
    bury(conn, first[3:], reason="two")
    before = send_all(conn, ["x"] * 2, p_keys=list("ab"))
    assert seqs_of(receive(conn, 2)) == before  # what is there was taken
    dead = [seq for seq, each in states(conn).items() if each == "dead"]
    assert value(conn, "redrive", "s", "c", p_max=2) == 2
    assert value(conn, "redrive", "s", "c") == len(dead) - 2
    assert value(conn, "redrive", "s", "c") == 0
    clock.end_leases(conn)
    conn.execute("update pgqueue.consumers set max_deliver_count = null")
    found: list[int] = []
    while rows := receive(conn, 3):
        assert {row.deliver_count for row in rows if row.seq in dead} <= {1}
        found += seqs_of(rows)
        value(conn, "ack", claim_of(rows))
    assert sorted(found) == sorted(before + dead)
    lines = [dict(zip(first + before, "aabbabab", strict=True)).get, lambda _: "one line"]
    key_of = lines[ordering != "key"]
    for key in {key_of(seq) for seq in found}:
        line = [seq for seq in before + dead if key_of(seq) == key]
        assert [seq for seq in found if key_of(seq) == key] == line
    assert [states(conn, "other")[seq] for seq in first] == ["dead"] * 6


@for_each("settings", [{"fair": True}, {"per_key_limit": 1}])
def test_what_is_redriven_keeps_the_limits_of_its_key(
    conn: Conn, settings: dict[str, object]
) -> None:
    consumer(conn, p_settings=Jsonb(settings))
    sent = send_all(conn, ["x"] * 6, p_keys=list("aaabbb"))
    bury(conn, sent)
    assert value(conn, "redrive", "s", "c") == 6
    checker.check(conn)
    if "per_key_limit" in settings:
        keys = [row.key for row in receive(conn)]
        assert keys
        assert len(set(keys)) == len(keys)
        clock.end_leases(conn)
    assert sorted(acked(conn, "s", "c")) == sent


def test_a_redriven_message_may_keep_its_count_and_its_error(conn: Conn) -> None:
    consumer(conn, max_deliver_count=1)
    seq = send(conn)
    value(conn, "nack", claim_of(receive(conn)), None, None, "no such user")
    assert value(conn, "redrive", "s", "c", p_reset=False) == 1
    assert state(conn, seq).last_error == "no such user"
    (row,) = receive(conn)
    assert row.deliver_count == 2
    value(conn, "nack", row.claim_id)
    assert states(conn) == {seq: "dead"}
    assert value(conn, "redrive", "s", "c") == 1
    assert state(conn, seq).last_error is None
    (row,) = receive(conn)
    assert row.deliver_count == 1


def test_what_died_alone_in_its_claim_comes_in_large_claims_when_it_is_redriven(conn: Conn) -> None:
    consumer(conn, max_deliver_count=1)
    send_all(conn, ["x"] * 4)
    while rows := receive(conn):
        value(conn, "nack", claim_of(rows))
    assert stats(conn).dead == 4
    assert value(conn, "redrive", "s", "c") == 4
    assert len(receive(conn)) == 4


@for_each("function", ["redrive", "purge_dead"])
def test_dead_letters_are_chosen_by_number_reason_and_time(conn: Conn, function: str) -> None:
    consumer(conn)
    sent = send_all(conn, ["x"] * 6)
    bury(conn, sent[:4], reason="a")
    when = one(conn, "select clock_timestamp()")
    late = send_all(conn, ["x"] * 2)
    bury(conn, late, reason="b")
    assert value(conn, function, "s", "c", sent[1:2] + sent[4:]) == 1
    assert value(conn, function, "s", "c", p_reason="c") == 0
    assert value(conn, function, "s", "c", p_before=when, p_max=1) == 1
    assert {seq for seq, s in states(conn).items() if s == "dead"} == {*sent[2:4], *late}
    assert value(conn, function, "s", "c", p_reason="b") == 2
    assert value(conn, function, "s", "c", p_max=None) == 2
    assert stats(conn).dead == 0
    got = acked(conn, "s", "c")
    assert sorted(got) == (sorted(sent[:4] + late) if function == "redrive" else [])


def test_dead_letters_that_several_redrive_at_once_come_once(conn: Conn, session: Session) -> None:
    consumer(conn)
    sent = send_all(conn, ["x"] * 1000)
    bury(conn, sent)
    sessions = [session() for _ in range(6)]
    with ThreadPoolExecutor() as pool:
        counts = list(pool.map(lambda s: value(s, "redrive", "s", "c"), sessions))
    assert sorted(counts) == [0, 0, 0, 0, 0, 1000]
    assert sorted(acked(conn, "s", "c")) == sent
    assert stats(conn).dead == 0


def test_retention_keeps_what_is_dead_until_it_is_purged(conn: Conn) -> None:
    consumer(conn)
    call(conn, "set_retention", "s", p_done=True)
    call(conn, "maintain")
    sent = send_all(conn, ["x"] * 5)
    bury(conn, sent[:1])
    for _ in range(4):
        call(conn, "maintain")
    assert [row.data for row in call(conn, "read_dead", "s", "c")] == ["x"]
    assert value(conn, "redrive", "s", "c") == 1
    for _ in range(4):
        call(conn, "maintain")
    assert seqs_of(receive(conn)) == sent[:1]


def test_dead_letters_that_maintain_is_deleting_are_passed_over(
    conn: Conn, session: Session
) -> None:
    consumer(conn)
    sent = send_all(conn, ["x"] * 2)
    for seq in sent:
        value(conn, "dead_letter", claim_of(receive(conn, 1)), [seq])
    conn.execute("set lock_timeout = '10 s'")
    other = session()
    with other.transaction():
        internals.lock_dead_letter(other, sent[0])
        assert value(conn, "redrive", "s", "c") == 1
    assert states(conn) == {sent[0]: "dead", sent[1]: "ready"}


def test_a_part_of_a_dead_letter_leaves_the_rest_and_its_number(conn: Conn) -> None:
    """Messages that died together are one row."""
    consumer(conn)
    sent = send_all(conn, ["x"] * 5)
    value(conn, "dead_letter", claim_of(receive(conn)))
    assert value(conn, "redrive", "s", "c", [sent[1], sent[3]]) == 2
    left = internals.dead_letters(conn)
    assert [sum(d.message_count for d in left), stats(conn).dead] == [3, 3]
    assert value(conn, "purge_dead", "s", "c", p_max=1) == 1
    assert stats(conn).dead == 2
