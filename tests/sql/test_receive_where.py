"""Receiving with a condition: who passes it is claimed, in order, and nothing happens to others."""

import json
import random
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from psycopg.rows import namedtuple_row

from spark_pgqueue.postgres import connection
from tests.sql import checker, clock, internals, limits
from tests.sql.cost import cost
from tests.sql.queue import *

pytestmark = pytest.mark.usefixtures("stream", "allowed_afterwards")


def where(conn: Conn, condition: str, size: int = 100, **options: Any) -> list[Any]:
    """Receive messages that pass a condition."""
    name = options.pop("name", "c")
    options = {"p_max": size, **options}
    names = "".join(f", {option} => %({option})s" for option in options)
    query = f"select * from pgqueue.receive_where('s', '{name}', %(where)s{names})"
    return internals_rows(conn, query, {"where": condition, **options})


def internals_rows(conn: Conn, query: str, options: dict[str, Any]) -> list[Any]:
    cur = conn.cursor(row_factory=namedtuple_row)
    return cur.execute(query.encode(), options).fetchall()


def key_is(key: str) -> str:
    return f'$.key == "{key}"'


def test_a_condition_has_at_most_4096_bytes(conn: Conn) -> None:
    """As Postgres writes it."""
    consumer(conn)
    send(conn)

    def key_of(length: int) -> str:
        short = one(conn, "select octet_length(%s::jsonpath::text)", key_is(""))
        return key_is("k" * (length - short))

    assert where(conn, key_of(4096)) == []
    with raises("PQ003", "at most 4096 bytes, not 4097"):
        where(conn, key_of(4097))


@pytest.mark.small_limits
@pytest.mark.promise("feature: conditional reads")
def test_what_passes_is_claimed_in_order_and_the_others_stay_as_they_are(conn: Conn) -> None:
    consumer(conn)
    seqs = send_keys(conn, *"abcabcabc")
    urgent = send(conn, p_key="a", p_priority=5)
    before = receive(conn, 3)  # the urgent one, and two
    value(conn, "nack", claim_of(before))
    left = {seq: state(conn, seq) for seq in (*seqs, urgent)}
    got: list[int] = []
    for _ in range(20):  # with small limits fewer at once
        got += seqs_of(where(conn, key_is("a")))
    assert got == [urgent, seqs[0], seqs[3], seqs[6]]
    for seq in set(seqs) - set(got):
        after = state(conn, seq)
        assert after.deliver_count == left[seq].deliver_count
        assert after.state in ("ready", "new")
    assert seqs_of(delivered(conn, 4)) == [seq for seq in seqs if seq not in got]


@pytest.mark.small_limits
def test_the_first_that_passes_is_claimed_however_large_the_runs_are(conn: Conn) -> None:
    """Runs are looked at a few at a time: one that comes later is no reason to skip the first."""
    consumer(conn)
    seqs = [seq for size in (1, 3, 1, 2, 4) for seq in send_keys(conn, *"a" * size)]
    got: list[int] = []
    while rows := where(conn, key_is("a"), 1):
        got += seqs_of(rows)
    assert got == seqs


def test_what_is_ready_new_due_and_expired_is_looked_at(conn: Conn) -> None:
    consumer(conn)
    later = now(conn) + timedelta(hours=1)
    due = send(conn, p_key="a", p_deliver_at=later)
    held = send_keys(conn, "a", "a")  # a single one that expires would come alone
    ready, more, other = send_keys(conn, "a", "a", "b")
    assert seqs_of(receive(conn, 2)) == held
    assert seqs_of(where(conn, key_is("a"))) == [ready, more]
    assert where(conn, key_is("a")) == []
    clock.pass_time(conn, timedelta(hours=2))
    clock.end_leases(conn)
    new = send(conn, p_key="a")
    assert set(seqs_of(where(conn, key_is("a")))) == {*held, ready, more, due, new}
    assert {seq: s for seq, s in states(conn).items() if s != "claimed"} == {other: "ready"}


def test_the_condition_is_asked_of_key_headers_and_data(conn: Conn) -> None:
    value(conn, "create_stream", "j", "json")
    value(conn, "create_consumer", "j", "c", "earliest")
    sent = [
        value(conn, "send", "j", json.dumps({"total": i}), p_headers=json.dumps({"eu": i % 2}))
        for i in range(6)
    ]
    query = "select seq from pgqueue.receive_where('j', 'c', %s, 10)"
    for condition, expected in [
        ("$.data.total > 4", [sent[5]]),
        ("$.headers.eu == 1 && $.data.total > 0", [sent[1], sent[3]]),
        ("$.data ? (@.total == 2)", [sent[2]]),
        ("$.nothing.of.that", []),
        ("$.data.total == 0", [sent[0]]),
    ]:
        got = [row[0] for row in conn.execute(query, [condition]).fetchall()]
        assert got == expected, condition


def test_a_message_of_which_the_path_fails_does_not_pass_and_is_in_nobodys_way(conn: Conn) -> None:
    value(conn, "create_stream", "j", "json")
    value(conn, "create_consumer", "j", "c", "earliest")
    at = '{"at": "%s"}'
    value(conn, "send", "j", at % "2026-01-01T00:00:00")
    good = value(conn, "send", "j", at % "2026-01-01T00:00:00+00:00")
    query = "select seq from pgqueue.receive_where('j', 'c', %s, 10)"
    path = '$.data.at.datetime() < "2027-01-01T00:00:00+00:00".datetime()'
    assert conn.execute(query, [path]).fetchall() == [(good,)]


def test_what_is_new_is_taken_when_nothing_ready_passes(conn: Conn) -> None:
    consumer(conn)
    first = send_keys(conn, *"abbb")
    assert seqs_of(where(conn, key_is("a"))) == first[:1]
    (new,) = send_keys(conn, "a")
    assert seqs_of(where(conn, key_is("b"), 1)) == first[1:2]
    assert seqs_of(where(conn, key_is("a"))) == [new]


def test_it_looks_at_so_many_and_no_more(conn: Conn) -> None:
    consumer(conn)
    seqs = send_keys(conn, *"bbbbba")
    assert where(conn, key_is("a"), p_look=5) == []
    assert seqs_of(where(conn, key_is("a"), p_look=6)) == [seqs[5]]
    assert internals.count(conn, "consumer_messages") == 2, "the others are one run, as before"


def test_what_it_claims_is_a_claim_like_any_other(conn: Conn, session: Session) -> None:
    consumer(conn, max_deliver_count=2)
    seqs = send_keys(conn, *"abab")
    claim = claim_of(where(conn, key_is("b"), p_visibility_timeout=timedelta(hours=1)))
    (opened,) = internals.rows(conn, "select * from pgqueue.open_claims")
    assert opened.messages == 2
    assert opened.lease_until > now(conn) + timedelta(minutes=59)
    assert value(conn, "nack", claim, [seqs[1]]) == 1
    again = where(conn, key_is("b"), p_ack=claim)
    assert [(row.seq, row.deliver_count) for row in again] == [(seqs[1], 2)]
    assert seqs[3] not in states(conn)
    assert value(conn, "nack", claim_of(again)) == 1
    assert state(conn, seqs[1]).state == "dead"
    claim = claim_of(where(conn, key_is("a"), 1))
    assert where(conn, "$.key == 'nobody'".replace("'", '"'), p_ack=claim) == []
    assert acked(conn, "s", "c") == [seqs[2]]


def test_suspects_come_in_claims_of_their_own(conn: Conn) -> None:
    """What may have killed its worker is in no larger claim than its note allows."""
    consumer(conn)
    seqs = send_keys(conn, *"aaaa")
    for _ in range(2):
        value(conn, "nack", claim_of(receive(conn, 4)))
    urgent = send(conn, p_key="a", p_priority=1)
    fresh = send_keys(conn, "a")
    assert seqs_of(where(conn, key_is("a"), 10)) == [urgent]
    assert seqs_of(where(conn, key_is("a"), 10)) == seqs[:2]
    assert seqs_of(where(conn, key_is("a"), 10)) == seqs[2:]
    assert seqs_of(where(conn, key_is("a"), 10)) == fresh


def test_what_expired_is_given_up(conn: Conn) -> None:
    consumer(conn)
    soon = now(conn) + timedelta(hours=1)
    old = send(conn, p_key="a", p_expires_at=soon)
    fresh = send(conn, p_key="a")
    receive(conn, 1, p_visibility_timeout=timedelta(milliseconds=1))
    clock.pass_time(conn, timedelta(hours=2))
    clock.end_leases(conn)
    assert seqs_of(where(conn, key_is("a"))) == [fresh]
    assert state(conn, old).state == "dead"


def test_one_call_gives_up_a_bounded_number_of_runs(conn: Conn) -> None:
    limits.shrink(conn)
    consumer(conn)
    for _ in range(12):
        send(conn, p_expires_at=now(conn) + timedelta(hours=1))
    for _ in range(12):
        internals.take(conn, 1)
    clock.pass_time(conn, timedelta(hours=2))
    assert where(conn, key_is("a")) == []
    assert 0 < stats(conn).dead < 12
    while stats(conn).dead < 12:
        where(conn, key_is("a"))


def test_of_a_filtered_consumer_both_hold(conn: Conn) -> None:
    consumer(conn, p_topic="a.#")
    seqs = send_keys(conn, "a.x", "b.x", "a.y")
    assert seqs_of(where(conn, '$.key like_regex "x"')) == [seqs[0]]
    assert acked(conn, "s", "c") == [seqs[2]]


def test_a_claim_with_enough_before_it_needs_no_lock(conn: Conn, session: Session) -> None:
    """While another session has the consumer's lock it goes on; others do, too."""
    consumer(conn)
    send_keys(conn, *"abababab")
    receive(conn, 1)
    holder, other = session(), session()
    holder.execute("begin")
    holder.execute("select _pgqueue.lock_consumer(consumer_id) from pgqueue.consumers")
    assert len(where(conn, key_is("b"), 2)) == 2
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(where, other, key_is("z"))
        wait_for_a_lock(conn)
        holder.execute("commit")
        assert waiting.result(10) == []


def test_what_another_claimer_has_hides_nothing_else(conn: Conn, session: Session) -> None:
    """The first that passes is somebody else's: then the next one, though it looks for one."""
    consumer(conn)
    first, *_ = send_keys(conn, "a", "b")
    where(conn, key_is("z"))  # so each is a run
    _, second, third = send_keys(conn, "b", "a", "a")
    where(conn, key_is("z"))
    other = session()
    other.execute("begin")
    other.execute(
        "select from pgqueue.consumer_messages where seqs @> %s::bigint for update", [first]
    )
    assert seqs_of(where(conn, key_is("a"), 1)) == [second]
    assert seqs_of(where(conn, key_is("a"), 5)) == [third]
    other.execute("rollback")
    assert seqs_of(where(conn, key_is("a"), 5)) == [first]


@pytest.mark.all_versions
@pytest.mark.parametrize("call", ["nack", "defer"])
def test_what_is_returned_with_a_delay_meanwhile_is_not_claimed(
    conn: Conn, session: Session, stream: int, call: str
) -> None:
    """Another session claims and returns a message between the look at it and its claim."""
    consumer(conn)
    seqs = send_keys(conn, *"aaaa")
    receive(conn, 1)  # so each is a bundle
    holder, other, asking = session(), session(), session()
    other.execute("begin")
    claim = value(other, "claim", "s", "c", 1)
    holder.execute("begin")
    holder.execute(f"lock table pgqueue.messages_{stream}".encode())
    with ThreadPoolExecutor(1) as pool:
        got = pool.submit(where, asking, key_is("a"))
        wait_for_a_lock(conn)
        other.execute("commit")
        assert value(other, call, claim, p_delay=timedelta(hours=1)) == 1
        holder.execute("rollback")
        assert seqs_of(got.result(20)) == seqs[2:]
    assert state(conn, seqs[1]).state == "delayed"
    clock.pass_time(conn, timedelta(hours=2))
    assert sorted(seqs_of(delivered(conn))) == seqs


@pytest.mark.longer
def test_who_meets_another_claimer_at_a_run_is_not_told_that_there_is_nothing(
    conn: Conn, url: str
) -> None:
    """All pass, and are one run: four who claim one by one get theirs, and seldom nothing."""
    consumer(conn)
    send_keys(conn, *"a" * 500)

    def consume(_: int) -> tuple[int, int]:
        with connection.connect(url) as mine:
            got = [bool(where(mine, key_is("a"), 1)) for _ in range(50)]
        return sum(got), got.count(False)

    with ThreadPoolExecutor(4) as pool:
        got, nothing = map(sum, zip(*pool.map(consume, range(4)), strict=True))
    assert 50 * nothing <= got


def test_what_is_due_comes_in_its_turn(conn: Conn) -> None:
    """Also where something that is ready passes, and needs no lock of the consumer."""
    consumer(conn)
    seqs = send_keys(conn, *"aaa")
    claim = claim_of(receive(conn, 1))
    value(conn, "nack", claim, p_delay=timedelta(milliseconds=10))
    while value(conn, "next_due", "s", "c") > now(conn):
        pass
    assert seqs_of(where(conn, key_is("a"), 1)) == seqs[:1]
    assert seqs_of(where(conn, key_is("a"), 5)) == seqs[1:]


def test_it_stops_when_it_has_enough(conn: Conn) -> None:
    """The first of a large run that pass: it need not judge the others."""
    consumer(conn)
    conn.execute(
        "select count(*) from pgqueue.send_batch('s', array_fill(repeat('x', 300), '{9000}'),"
        " array_fill('k'::text, '{9000}'))"
    )
    receive(conn, 1)
    query = "select * from pgqueue.receive_where('s', 'c', %s, 1)"
    costs = [cost(conn, query, key_is(key)) for key in "kzkz"]  # at first the caches are filled
    assert costs[2] + 200 < costs[3]


@pytest.mark.parametrize("lasts", [2.0, pytest.param(15.0, marks=pytest.mark.longer)])
def test_a_race_gives_each_message_to_one(conn: Conn, url: str, lasts: float) -> None:
    """Claimers with conditions beside others without, which return, lose and cancel some."""
    settings = json.dumps({"keep_history": "1 day", "visibility_timeout": "50 ms"})
    consumer(conn, p_settings=settings)
    until = time.monotonic() + lasts
    sent: list[int] = []

    def produce(rng: random.Random) -> int:
        with connection.connect(url) as mine:
            while time.monotonic() < until:
                keys = [rng.choice("abcd") for _ in range(rng.choice([1, 3, 30, 300]))]
                sent.extend(send_all(mine, ["x"] * len(keys), p_keys=keys,
                                     p_priority=rng.choice([0, 0, 1])))  # fmt: skip
                time.sleep(rng.choice([0, 0.002, 0.02]))
        return 0

    def consume(rng: random.Random, key: str | None) -> int:
        wrong = 0
        with connection.connect(url) as mine:
            mine.execute("set client_min_messages = error")
            while time.monotonic() < until:
                size = rng.choice([1, 7, 100])
                rows = receive(mine, size) if key is None else where(mine, key_is(key), size)
                if not rows:
                    continue
                wrong += sum(key not in (None, row.key) for row in rows)
                claim, what = claim_of(rows), rng.random()
                part = [row.seq for row in rows if rng.random() < 0.5]
                if what < 0.6:
                    value(mine, "ack", claim, part if what < 0.3 else None)
                elif what < 0.8:
                    value(mine, "nack", claim, part)
                elif what < 0.9:
                    value(mine, "cancel", "s", "c", part)
                else:
                    time.sleep(0.06)
        return wrong

    with ThreadPoolExecutor(6) as pool:
        running = [pool.submit(produce, random.Random(1))]
        for i, key in enumerate(["a", "b", "b", None, None]):
            running.append(pool.submit(consume, random.Random(i), key))
        while not all(job.done() for job in running):
            checker.check(conn)
            time.sleep(0.2)
        assert [job.result() for job in running] == [0] * 6
    clock.end_leases(conn)
    while acked(conn, "s", "c"):
        pass
    kept = internals.rows(conn, "select seqs from pgqueue.message_history")
    ends = Counter(seq for row in kept for seq in checker.numbers(row.seqs))
    assert max(ends.values()) == 1
    assert ends.keys() == set(sent)
    assert one(conn, "select count(*) from pgqueue.consumer_messages") == 0


def test_a_history_of_it_follows_a_model(conn: Conn) -> None:
    """Whatever was sent and settled: the first that pass, by priority and arrival."""
    consumer(conn)
    rng = random.Random(7)
    line: dict[int, tuple[int, int, str]] = {}  # what is not claimed: its place, and key
    held: dict[int, dict[int, tuple[int, int, str]]] = {}
    for step in range(250):
        what = rng.random()
        if what < 0.3:
            keys = [rng.choice("abc") for _ in range(rng.choice([1, 2, 9]))]
            priority = rng.choice([0, 0, 1, 2])
            for seq, key in zip(send_all(conn, ["x"] * len(keys), p_keys=keys,
                                         p_priority=priority), keys, strict=True):  # fmt: skip
                line[seq] = (-priority, seq, key)
        elif what < 0.75:
            key, size = rng.choice(["a", "b", None]), rng.choice([1, 2, 5])
            rows = receive(conn, size) if key is None else where(conn, key_is(key), size)
            passing = sorted(place for place in line.values() if key in (None, place[2]))
            expected = [seq for _, seq, _ in passing[:size]]
            if key is not None:
                assert seqs_of(rows) == expected, f"step {step}"
            got = seqs_of(rows)
            assert set(got) <= line.keys()
            if got:
                held[claim_of(rows)] = {seq: line.pop(seq) for seq in got}
        elif held:
            claim = rng.choice(list(held))
            part = [seq for seq in held[claim] if rng.random() < 0.6]
            what = rng.choice(["ack", "nack", "defer"])
            assert value(conn, what, claim, part) == len(part)
            for seq in part:
                place = held[claim].pop(seq)
                if what != "ack":
                    line[seq] = place
            if not held[claim]:
                del held[claim]
        if step % 25 == 0:
            checker.check(conn)
    call(conn, "maintain")
