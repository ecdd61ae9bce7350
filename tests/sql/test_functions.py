"""What each public function and view promises, one promise a test, without races."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import datetime, timedelta
from itertools import pairwise
from typing import Any

import psycopg
import pytest
from psycopg.rows import namedtuple_row
from psycopg.types.json import Jsonb

from spark_pgqueue.postgres import connection
from tests.sql import checker
from tests.sql.queue import acked, call, claim_of, one, seqs_of, value

Conn = psycopg.Connection
ORDERINGS = ["none", "key", "stream"]
TAKEN_OVER = "the visibility timeout passed"


@pytest.fixture(autouse=True)
def stream(conn: Conn) -> int:
    """The text stream s, which most tests use."""
    return value(conn, "create_stream", "s")


@pytest.fixture(autouse=True)
def allowed_afterwards(conn: Conn, stream: int) -> Iterator[None]:
    """Every test leaves the tables in a state that the invariants allow."""
    yield
    checker.check(conn)


@pytest.fixture
def session(url: str) -> Iterator[Callable[[], Conn]]:
    """Another session, closed at the end of the test."""
    with ExitStack() as stack:
        yield lambda: stack.enter_context(connection.connect(url))


def consumer(conn: Conn, name: str = "c", ordering: str = "none", **options: Any) -> int:
    options = {"p_start": "earliest", **options}
    return value(conn, "create_consumer", "s", name, p_ordering=ordering, **options)


def send(conn: Conn, data: str = "x", **options: Any) -> int:
    return value(conn, "send", "s", data, **options)


def send_all(conn: Conn, data: list[str], **options: Any) -> list[int]:
    return [row[0] for row in call(conn, "send_batch", "s", data, **options)]


def receive(conn: Conn, size: int = 100, name: str = "c", **options: Any) -> list[Any]:
    return call(conn, "receive", "s", name, size, **options)


def rows(conn: Conn, query: str, *args: Any) -> list[Any]:
    return conn.cursor(row_factory=namedtuple_row).execute(query.encode(), args or None).fetchall()


def wait_for_a_lock(conn: Conn) -> None:
    """Until somebody waits for one."""
    end = time.monotonic() + 20
    while not one(conn, "select count(*) from pg_locks where not granted"):
        assert time.monotonic() < end, "nobody waits"
        time.sleep(0.01)


def states(conn: Conn, name: str = "c") -> dict[int, str]:
    """The states of what a consumer is not done with."""
    found = rows(
        conn, "select seq, state from pgqueue.message_states where consumer = %s order by seq", name
    )
    assert len({row.seq for row in found}) == len(found)
    return {row.seq: row.state for row in found}


def state(conn: Conn, seq: int, name: str = "c") -> Any:
    (row,) = rows(
        conn, "select * from pgqueue.message_states where consumer = %s and seq = %s", name, seq
    )
    return row


def stats(conn: Conn, name: str = "c") -> Any:
    (row,) = rows(conn, "select * from pgqueue.consumer_stats where consumer = %s", name)
    return row


def now(conn: Conn) -> datetime:
    return one(conn, "select clock_timestamp()")


def seconds(n: float) -> timedelta:
    return timedelta(seconds=n)


# From sending to acknowledging


@pytest.mark.all_versions
@pytest.mark.parametrize("ordering", ORDERINGS)
def test_messages_go_from_sending_to_acknowledging(conn: Conn, ordering: str) -> None:
    consumer(conn, ordering=ordering)
    sent = [send(conn, d, p_key="k") for d in "ab"] + send_all(conn, ["c", "d"], p_keys=["k", "l"])
    got = receive(conn)
    assert [(row.seq, row.data, row.key, row.deliver_count) for row in got] == [
        (seq, data, key, 1) for seq, data, key in zip(sent, "abcd", "kkkl", strict=True)
    ]
    assert set(states(conn).values()) == {"claimed"}
    assert receive(conn) == []
    assert value(conn, "nack", claim_of(got), sent[1:]) == 3
    assert value(conn, "ack", claim_of(got)) == 1
    again = receive(conn)
    assert [(row.data, row.deliver_count) for row in again] == [("b", 2), ("c", 2), ("d", 2)]
    assert value(conn, "ack", claim_of(again)) == 3
    assert states(conn) == {}
    assert one(conn, "select count(*) from pgqueue.claims") == 0
    assert one(conn, "select count(*) from pgqueue.messages") == 4, "messages are kept"


def test_higher_priorities_come_first_and_equal_ones_in_order_of_arrival(conn: Conn) -> None:
    consumer(conn)
    sent = {p: [send(conn, p_priority=p) for _ in range(2)] for p in (0, 32767, -32768, 5)}
    assert [(r.priority, r.seq) for r in receive(conn)] == [
        (p, seq) for p in (32767, 5, 0, -32768) for seq in sent[p]
    ]


@pytest.mark.parametrize("ordering", ["key", "stream"])
def test_priorities_do_not_break_an_order(conn: Conn, ordering: str) -> None:
    consumer(conn, ordering=ordering)
    sent = [send(conn, p_key="k", p_priority=p) for p in (0, 5, -5)]
    assert [(r.seq, r.priority) for r in receive(conn)] == list(zip(sent, (0, 5, -5), strict=True))


def test_a_message_is_not_delivered_before_its_time(conn: Conn) -> None:
    consumer(conn)
    due = now(conn) + seconds(0.5)
    late = send(conn, p_deliver_at=due)
    past = send(conn, p_deliver_at=due - seconds(9))
    assert seqs_of(receive(conn)) == [past]
    assert state(conn, late).state == "delayed"
    assert state(conn, late).not_visible_until == due
    assert receive(conn) == []
    time.sleep(0.6)
    assert seqs_of(receive(conn)) == [late]


def test_ordering_stream_waits_for_a_delayed_message_and_key_for_its_key(conn: Conn) -> None:
    consumer(conn, "stream", "stream")
    consumer(conn, "key", "key")
    late = send(conn, p_key="k", p_deliver_at=now(conn) + seconds(0.5))
    behind, other = send(conn, p_key="k"), send(conn, p_key="l")
    assert receive(conn, name="stream") == []
    assert acked(conn, "s", "key") == [other]
    time.sleep(0.6)
    assert acked(conn, "s", "stream") == [late, behind, other]
    assert acked(conn, "s", "key") == [late, behind]


@pytest.mark.parametrize(
    ("kind", "data", "data_bytes"),
    [("text", "", None), ("json", ' {"b":1, "a":[null]}', None), ("binary", None, b"\x00\xff")],
)
def test_a_payload_of_each_kind_arrives_as_it_was_sent(
    conn: Conn, kind: str, data: str | None, data_bytes: bytes | None
) -> None:
    value(conn, "create_stream", kind, kind)
    value(conn, "create_consumer", kind, "c")
    headers = {"trace": "é", "n": [1, {"deep": None}]}
    value(conn, "send", kind, data, p_key="k", p_headers=Jsonb(headers), p_data_bytes=data_bytes)
    call(
        conn,
        "send_batch",
        kind,
        None if data is None else [data, data],
        p_keys=[None, "k"],
        p_headers=[Jsonb(headers), None],
        p_data_bytes=None if data_bytes is None else [data_bytes, data_bytes],
    )
    got = call(conn, "receive", kind, "c", 10)
    assert [(r.key, r.headers, r.data, r.data_bytes) for r in got] == [
        ("k", headers, data, data_bytes),
        (None, headers, data, data_bytes),
        ("k", None, data, data_bytes),
    ]
    assert all(r.inserted_at is not None for r in got)


def test_a_batch_becomes_visible_as_one_publication_in_the_order_given(conn: Conn) -> None:
    consumer(conn)
    sent = send_all(conn, [str(i) for i in range(500)])
    assert sent == sorted(sent)
    assert one(conn, "select count(*) from pgqueue.publications") == 1
    assert [r.data for r in receive(conn, 1000)] == [str(i) for i in range(500)]
    assert send_all(conn, []) == []
    assert one(conn, "select count(*) from pgqueue.publications") == 1


@pytest.mark.parametrize("level", ["read committed", "repeatable read"])
def test_a_batch_whose_numbers_others_interrupt_knows_its_own(
    conn: Conn, url: str, level: str
) -> None:
    consumer(conn)

    def produce(name: str) -> dict[int, str]:
        """What was sent, by the numbers that were returned."""
        data = [f"{name}{i}" for i in range(3000)]
        with connection.connect(url) as own:
            own.execute(f"begin transaction isolation level {level}".encode())
            own.execute("savepoint s")
            seqs = send_all(own, data)
            own.execute("commit")
        assert seqs == sorted(seqs)
        return dict(zip(seqs, data, strict=True))

    for _ in range(50):
        with ThreadPoolExecutor(3) as pool:
            sent = list(pool.map(produce, "abc"))
        received = {row.seq: row.data for row in receive(conn, 10_000)}
        assert received == sent[0] | sent[1] | sent[2]
        if any(max(each) - min(each) >= 3000 for each in sent):
            return
    pytest.fail("the producers never got into each other's way")


def test_every_consumer_gets_every_message_unless_it_was_sent_to_others(conn: Conn) -> None:
    for name in "abc":
        consumer(conn, name)
    everyone = send(conn)
    two = send(conn, p_consumers=["a", "b", "a"])
    batch = send_all(conn, ["x", "y"], p_consumers=["b"])
    consumer(conn, "late")
    assert acked(conn, "s", "a") == [everyone, two]
    assert acked(conn, "s", "b") == [everyone, two, *batch]
    assert acked(conn, "s", "c") == acked(conn, "s", "late") == [everyone]


def test_a_consumer_starts_at_what_comes_unless_it_is_told_otherwise(conn: Conn) -> None:
    old = send(conn)
    since = now(conn)
    recent = send(conn)
    value(conn, "create_consumer", "s", "default")
    for name, start in {"latest": "latest", "all": "earliest", "since": str(since)}.items():
        consumer(conn, name, p_start=start)
    new = send(conn)
    assert acked(conn, "s", "default") == acked(conn, "s", "latest") == [new]
    assert acked(conn, "s", "all") == [old, recent, new]
    assert acked(conn, "s", "since") == [recent, new]


def test_sending_is_part_of_the_callers_transaction(conn: Conn, url: str) -> None:
    consumer(conn)
    conn.execute("create table orders (id int)")
    with connection.connect(url) as other:
        with other.transaction(force_rollback=True):
            other.execute("insert into orders values (1)")
            send(other)
            send_all(other, ["x", "y"])
        assert receive(conn) == []
        with other.transaction():
            other.execute("insert into orders values (2)")
            sent = send(other, "kept")
            with other.transaction(force_rollback=True):
                send(other, "of a savepoint that is rolled back")
            assert receive(conn) == []
    assert seqs_of(receive(conn)) == [sent]
    assert one(conn, "select array_agg(id) from orders") == [2]


@pytest.mark.parametrize("ordering", ORDERINGS)
def test_a_claim_that_is_rolled_back_never_was(conn: Conn, ordering: str) -> None:
    consumer(conn, ordering=ordering)
    send(conn)
    with conn.transaction(force_rollback=True):
        assert len(receive(conn)) == 1
    assert [r.deliver_count for r in receive(conn)] == [1]


def test_work_and_acknowledgement_commit_together(conn: Conn) -> None:
    consumer(conn)
    send(conn)
    got = receive(conn)
    with conn.transaction(force_rollback=True):
        assert value(conn, "ack", claim_of(got)) == 1
    assert stats(conn).claimed == 1
    assert value(conn, "ack", claim_of(got)) == 1


def test_claim_answers_what_it_took_or_no_row(conn: Conn) -> None:
    consumer(conn)
    assert call(conn, "claim", "s", "c") == []
    send_all(conn, ["x"] * 5)
    assert [r.n for r in call(conn, "claim", "s", "c")] == [1], "one by default"
    (row,) = call(conn, "claim", "s", "c", 10)
    assert row.n == 4
    assert value(conn, "ack", row.claim_id) == 4


@pytest.mark.parametrize("function", ["claim", "receive"])
@pytest.mark.parametrize("ordering", ORDERINGS)
def test_a_claim_acknowledges_the_one_before_it(conn: Conn, ordering: str, function: str) -> None:
    consumer(conn, ordering=ordering)
    sent = send_all(conn, ["x"] * 5, p_keys=["k"] * 5)
    claim = claim_of(receive(conn, 2))
    with conn.transaction(force_rollback=True):
        assert call(conn, function, "s", "c", 2, p_ack=claim) != []
    assert list(states(conn).values()).count("claimed") == 2
    claim = claim_of(call(conn, function, "s", "c", 2, p_ack=claim))
    assert sorted(states(conn)) == sent[2:], "the first two are done, and so their key is free"
    assert list(states(conn).values()).count("claimed") == 2
    claim = claim_of(call(conn, function, "s", "c", 2, p_ack=claim))
    assert call(conn, function, "s", "c", 2, p_ack=claim) == []
    assert states(conn) == {}


def test_a_claim_goes_on_when_the_one_before_it_is_not_live_and_warns(conn: Conn) -> None:
    consumer(conn)
    send_all(conn, ["x"] * 2)
    warnings: list[str] = []
    conn.add_notice_handler(lambda notice: warnings.append(str(notice.message_primary)))
    assert len(call(conn, "claim", "s", "c", p_ack=10**15)) == 1
    (warning,) = warnings
    assert f"claim {10**15} is not live" in warning


def claim_one(conn: Conn) -> int:
    """Claim a message, with a claim that fits the next run: the cheap way, without a lock."""
    (seq,) = seqs_of(receive(conn, 1))
    return seq


@pytest.mark.parametrize("how", ["published", "published late", "due"])
def test_what_comes_before_a_backlog_does_not_wait_for_its_end(
    conn: Conn, session: Callable[[], Conn], how: str
) -> None:
    """However cheaply the backlog is claimed, each claim looks for what is new, late or due."""
    consumer(conn)
    late = session()
    urgent = 0
    if how == "published late":
        late.execute("begin")
        urgent = send(late, p_priority=9)
    elif how == "due":
        urgent = send(conn, p_priority=9, p_deliver_at=now(conn) + seconds(1))
    sent = send_all(conn, ["x"] * 5)
    assert [claim_one(conn), claim_one(conn)] == sent[:2]
    if how == "published":
        urgent = send(conn, p_priority=9)
    elif how == "published late":
        late.execute("commit")
    else:
        time.sleep(1.05)
    assert [claim_one(conn), claim_one(conn)] == [urgent, sent[2]]


def test_a_lease_that_ends_is_noticed_while_a_backlog_is_claimed(conn: Conn) -> None:
    consumer(conn, p_visibility_timeout=seconds(1))
    sent = send_all(conn, ["x"] * 5)
    assert [claim_one(conn), claim_one(conn)] == sent[:2]
    time.sleep(1.05)
    assert claim_one(conn) == sent[0]


def test_a_claim_passes_over_what_an_open_transaction_has_claimed(conn: Conn, url: str) -> None:
    consumer(conn)
    sent = send_all(conn, ["x"] * 5)
    assert claim_one(conn) == sent[0]
    conn.execute("set statement_timeout = '5 s'")
    with connection.connect(url) as other, other.transaction():
        assert claim_one(other) == sent[1]
        assert claim_one(conn) == sent[2]


def test_a_claim_passes_over_a_lease_whose_owner_is_just_settling(conn: Conn, url: str) -> None:
    consumer(conn, p_visibility_timeout=seconds(0.05))
    sent = send_all(conn, ["x"] * 2)
    late = claim_of(receive(conn, 1))
    time.sleep(0.1)
    conn.execute("set statement_timeout = '5 s'")
    with connection.connect(url) as other, other.transaction():
        assert value(other, "ack", late) == 1
        assert claim_one(conn) == sent[1]


@pytest.mark.parametrize("ordering", ORDERINGS)
def test_a_claim_is_extended_while_another_claimer_is_at_it(
    conn: Conn, url: str, ordering: str
) -> None:
    consumer_id = consumer(conn, ordering=ordering)
    send(conn)
    claim = claim_of(receive(conn, 1))
    conn.execute("set statement_timeout = '5 s'")
    with connection.connect(url) as other, other.transaction():
        other.execute("select pgqueue._lock_consumer(%s)", [consumer_id])
        assert value(conn, "extend", claim) == 1


def test_a_claim_beside_another_claimer_has_the_lease_that_it_asks_for(
    conn: Conn, url: str
) -> None:
    consumer_id = consumer(conn)
    send_all(conn, ["x"] * 10)
    value(conn, "ack", claim_of(receive(conn, 1)))
    with connection.connect(url) as other, other.transaction():
        other.execute("select pgqueue._lock_consumer(%s)", [consumer_id])
        assert len(receive(conn, 5, p_visibility_timeout=seconds(500))) == 5
    left = "select extract(epoch from lease_until - clock_timestamp())::float from pgqueue.claims"
    assert 495 < one(conn, left) <= 500


def test_no_message_is_forgotten_when_very_many_are_due_at_once(conn: Conn) -> None:
    """One claim ends a thousand delays; the next ones the others."""
    consumer(conn)
    conn.execute(
        "select count(pgqueue.send('s', 'x', p_deliver_at => clock_timestamp() + interval '1 h'))"
        " from generate_series(1, 1100)"
    )
    assert receive(conn) == []
    conn.execute(
        "update pgqueue.consumer_messages"
        " set not_visible_until = not_visible_until - interval '1 h';"
        "update pgqueue.consumer_cursors set due_floor = '-infinity'"
    )
    assert len(acked(conn, "s", "c", 2000)) == 1100


# Settling


def test_a_part_of_a_claim_is_settled_and_what_it_does_not_hold_is_passed_over(conn: Conn) -> None:
    consumer(conn)
    sent = send_all(conn, ["x"] * 6)
    claim = claim_of(receive(conn, 5))
    assert value(conn, "ack", claim, [sent[0], sent[0], sent[5], 10**12, -1]) == 1
    assert value(conn, "ack", claim, [sent[0]]) == 0
    assert value(conn, "ack", claim, []) == 0
    assert value(conn, "nack", claim, [sent[1], sent[5]]) == 1
    assert value(conn, "dead_letter", claim, [sent[2], sent[5]]) == 1
    assert value(conn, "extend", claim) == 2
    assert value(conn, "ack", claim) == 2
    assert list(states(conn).values()) == ["ready", "dead", "ready"]


@pytest.mark.parametrize("ordering", ORDERINGS)
def test_a_failed_message_comes_back_after_its_delay_with_its_reason(
    conn: Conn, ordering: str
) -> None:
    consumer(conn, ordering=ordering)
    seq = send(conn, p_key="k")
    before = now(conn)
    assert value(conn, "nack", claim_of(receive(conn)), None, seconds(0.5), "no such user") == 1
    assert receive(conn) == []
    row = state(conn, seq)
    assert (row.state, row.last_error, row.deliver_count) == ("delayed", "no such user", 1)
    assert before + seconds(0.5) <= row.not_visible_until <= now(conn) + seconds(0.5)
    time.sleep(0.6)
    (again,) = receive(conn)
    assert (again.seq, again.deliver_count) == (seq, 2)


def test_what_failed_together_keeps_its_reason_when_it_is_claimed_in_parts(conn: Conn) -> None:
    consumer(conn)
    sent = send_all(conn, ["x"] * 5)
    value(conn, "nack", claim_of(receive(conn)), None, seconds(0), "no such user")
    assert seqs_of(receive(conn, 2)) == sent[:2]
    assert [(r.last_error, r.deliver_count) for r in (state(conn, seq) for seq in sent)] == [
        ("no such user", 2),
        ("no such user", 2),
        *[("no such user", 1)] * 3,
    ]


@pytest.mark.parametrize("ordering", ORDERINGS)
def test_parts_of_a_claim_that_are_settled_at_once_are_all_counted(
    conn: Conn, url: str, ordering: str
) -> None:
    consumer(conn, ordering=ordering)
    sent = send_all(conn, ["x"] * 4, p_keys=["k"] * 4)
    claim = claim_of(receive(conn))
    with connection.connect(url) as other, ThreadPoolExecutor(1) as pool:
        with conn.transaction():
            assert value(conn, "ack", claim, sent[:1]) == 1
            second = pool.submit(value, other, "ack", claim, sent[1:3])
            wait_for_a_lock(conn)
        assert second.result() == 2
    assert value(conn, "extend", claim) == 1


@pytest.mark.parametrize("ordering", ORDERINGS)
@pytest.mark.parametrize("how", ["nack", "expiry"])
def test_a_message_that_failed_too_often_is_dead_lettered(
    conn: Conn, ordering: str, how: str
) -> None:
    consumer(conn, ordering=ordering, p_max_deliver_count=2)
    poison = send(conn, "poison", p_key="k", p_priority=7)
    for attempt in (1, 2):
        (row,) = receive(conn, p_visibility_timeout=seconds(0.05 if how == "expiry" else 30))
        assert row.deliver_count == attempt
        if how == "nack":
            value(conn, "nack", row.claim_id, p_reason=f"failure {attempt}")
        else:
            time.sleep(0.06)
    healthy = send(conn, "healthy", p_key="k")
    assert acked(conn, "s", "c") == [healthy]
    assert states(conn) == {poison: "dead"}
    (dead,) = rows(conn, "select * from pgqueue.dead_messages")
    assert (dead.n, dead.priority, dead.deliver_count) == (1, 7, 2)
    assert dead.reason == ("failure 2" if how == "nack" else TAKEN_OVER)


@pytest.mark.parametrize("ordering", ORDERINGS)
def test_a_message_is_dead_lettered_by_hand_with_its_reason(conn: Conn, ordering: str) -> None:
    consumer(conn, ordering=ordering)
    sent = send_all(conn, ["x", "y", "z"], p_keys=["k", "k", "l"])
    claim = claim_of(receive(conn))
    details = {"line": 7}
    assert value(conn, "dead_letter", claim, [sent[0]], "not json", Jsonb(details)) == 1
    (dead,) = rows(conn, "select * from pgqueue.dead_messages")
    assert (dead.reason, dead.details, dead.claim_id) == ("not json", details, claim)
    assert state(conn, sent[0]).last_error == "not json"
    assert value(conn, "dead_letter", claim) == 2
    assert receive(conn) == []
    assert stats(conn).dead == 3
    assert stats(conn).claims == 0


def test_a_lease_is_the_consumers_visibility_timeout_or_that_of_the_claim(conn: Conn) -> None:
    consumer(conn, p_visibility_timeout=seconds(100))
    send_all(conn, ["x", "y"])
    left = "select extract(epoch from lease_until - clock_timestamp())::float from pgqueue.claims"
    claim = claim_of(receive(conn, 1))
    assert 95 < one(conn, left) <= 100
    assert value(conn, "extend", claim, seconds(1000)) == 1
    assert 995 < one(conn, left) <= 1000
    assert value(conn, "extend", claim, seconds(10)) == 1, "from now: it can be shortened"
    assert 5 < one(conn, left) <= 10
    assert value(conn, "extend", claim) == 1
    assert 95 < one(conn, left) <= 100
    value(conn, "ack", claim)
    claim = claim_of(receive(conn, 1, p_visibility_timeout=seconds(50)))
    assert 45 < one(conn, left) <= 50
    value(conn, "extend", claim)
    assert 45 < one(conn, left) <= 50


@pytest.mark.parametrize("ordering", ORDERINGS)
def test_a_claim_is_taken_over_when_its_lease_is_over(conn: Conn, ordering: str) -> None:
    consumer(conn, ordering=ordering, p_visibility_timeout=seconds(0.2))
    seq = send(conn)
    first = claim_of(receive(conn))
    assert receive(conn) == []
    value(conn, "extend", first, seconds(0.5))
    time.sleep(0.25)
    assert receive(conn) == [], "an extended claim is not taken over"
    time.sleep(0.35)
    (row,) = receive(conn)
    assert (row.seq, row.deliver_count) == (seq, 2)
    assert state(conn, seq).last_error == TAKEN_OVER
    assert value(conn, "ack", first) == 0
    assert value(conn, "ack", row.claim_id) == 1


@pytest.mark.parametrize("ordering", ORDERINGS)
@pytest.mark.parametrize("settle", ["ack", "nack", "extend", "dead_letter"])
def test_an_owner_that_comes_back_late_but_first_keeps_its_claim(
    conn: Conn, ordering: str, settle: str
) -> None:
    consumer(conn, ordering=ordering, p_visibility_timeout=seconds(0.01))
    send(conn)
    claim = claim_of(receive(conn))
    time.sleep(0.05)
    assert value(conn, settle, claim) == 1


@pytest.mark.parametrize("why", ["settled", "taken over", "unknown", "null", "dropped"])
@pytest.mark.parametrize("ordering", ["none", "key"])
def test_a_claim_that_is_not_live_changes_nothing_answers_0_and_warns(
    conn: Conn, why: str, ordering: str
) -> None:
    consumer(conn, ordering=ordering, p_visibility_timeout=seconds(0.01))
    seq = send(conn)
    (first,) = receive(conn)
    claim: int | None = first.claim_id
    if why == "settled":
        value(conn, "ack", claim)
    elif why == "taken over":
        time.sleep(0.05)
        receive(conn, p_visibility_timeout=seconds(60))
    elif why == "dropped":
        value(conn, "drop_consumer", "s", "c")
    else:
        claim = 10**15 if why == "unknown" else None
    before = states(conn)
    warnings: list[str] = []
    conn.add_notice_handler(lambda notice: warnings.append(str(notice.message_primary)))
    for settle in ("ack", "nack", "extend", "dead_letter"):
        assert value(conn, settle, claim) == 0
    for settle in ("ack", "nack", "dead_letter"):
        assert value(conn, settle, claim, [seq]) == 0
    assert len(warnings) == 7
    shown = "null" if claim is None else claim
    assert all(f"claim {shown} is not live" in text for text in warnings)
    assert states(conn) == before


# Order


def test_a_key_is_with_one_claim_at_a_time(conn: Conn) -> None:
    consumer(conn, ordering="key")
    k1, l1, k2, none1 = send_all(conn, list("abcd"), p_keys=["k", "l", "k", None])
    first = receive(conn, 1)
    assert seqs_of(first) == [k1]
    second = receive(conn)
    assert seqs_of(second) == [l1, none1], "k2 waits for k1, others do not"
    none2, k3, l2 = send_all(conn, list("efg"), p_keys=[None, "k", "l"])
    third = receive(conn)
    assert seqs_of(third) == [none2], "messages without a key are in no order"
    assert states(conn)[k2] == "waiting"
    value(conn, "ack", claim_of(first))
    assert seqs_of(receive(conn)) == [k2, k3]
    value(conn, "ack", claim_of(second))
    assert seqs_of(receive(conn)) == [l2]


def test_a_failed_message_goes_back_with_the_later_ones_of_its_key(conn: Conn) -> None:
    consumer(conn, ordering="key")
    k1, k2, l1, k3 = send_all(conn, list("abcd"), p_keys=["k", "k", "l", "k"])
    claim = claim_of(receive(conn))
    assert value(conn, "nack", claim, [k2]) == 2
    assert states(conn)[k1] == states(conn)[l1] == "claimed"
    assert receive(conn) == [], "k1 may still fail"
    assert value(conn, "ack", claim) == 2
    assert [(r.seq, r.deliver_count) for r in receive(conn)] == [(k2, 2), (k3, 1)]


def test_a_stream_is_with_one_claim_at_a_time(conn: Conn) -> None:
    consumer(conn, ordering="stream")
    sent = send_all(conn, ["x"] * 4, p_keys=[*"abcd"])
    claim = claim_of(receive(conn, 2))
    assert receive(conn) == []
    assert value(conn, "nack", claim, [sent[0]]) == 2
    got = receive(conn)
    assert [(r.seq, r.deliver_count) for r in got] == list(zip(sent, [2, 1, 1, 1], strict=True))


def test_a_dead_message_lets_those_behind_it_pass(conn: Conn) -> None:
    consumer(conn, "k", ordering="key")
    consumer(conn, "s", ordering="stream")
    sent = send_all(conn, ["x"] * 3, p_keys=["k"] * 3)
    for name in "ks":
        value(conn, "dead_letter", claim_of(receive(conn, 1, name)))
        assert acked(conn, "s", name) == sent[1:]


@pytest.mark.parametrize("ordering", ["key", "stream"])
def test_a_message_that_failed_too_often_takes_no_later_one_back(conn: Conn, ordering: str) -> None:
    consumer(conn, ordering=ordering, p_max_deliver_count=1)
    sent = send_all(conn, ["x"] * 3, p_keys=["k"] * 3)
    claim = claim_of(receive(conn))
    assert value(conn, "nack", claim, sent[:1]) == 1
    assert list(states(conn).values()) == ["dead", "claimed", "claimed"]
    assert value(conn, "ack", claim) == 2


# Streams, consumers and what is known of them


def test_creating_again_answers_the_same_id_if_asked_to(conn: Conn, stream: int) -> None:
    assert value(conn, "create_stream", "s", p_if_not_exists=True) == stream
    made = consumer(conn, ordering="key")
    assert consumer(conn, ordering="key", p_if_not_exists=True) == made
    assert consumer(conn, "new", p_if_not_exists=True) != made
    assert value(conn, "create_stream", "new", "json", p_if_not_exists=True) != stream


def test_the_same_consumer_name_is_another_consumer_in_another_stream(conn: Conn) -> None:
    value(conn, "create_stream", "other")
    mine, other = consumer(conn), value(conn, "create_consumer", "other", "c")
    assert mine != other
    seq = send(conn)
    assert call(conn, "receive", "other", "c") == []
    assert seqs_of(receive(conn)) == [seq]


def test_a_dropped_stream_leaves_nothing_and_touches_no_other(conn: Conn, stream: int) -> None:
    objects = "select count(*) from pg_class where relnamespace = 'pgqueue'::regnamespace"
    tables = [
        row[0]
        for row in conn.execute(
            "select oid::regclass::text from pg_class where relkind in ('r', 'p')"
            " and relnamespace = 'pgqueue'::regnamespace and not relispartition"
        ).fetchall()
    ]

    def sizes() -> dict[str, int]:
        return {t: one(conn, f"select count(*) from {t}") for t in tables}

    value(conn, "drop_stream", "s")
    value(conn, "create_stream", "kept")
    value(conn, "create_consumer", "kept", "c", p_start="earliest")
    value(conn, "send", "kept", "x")
    before, objects_before = sizes(), one(conn, objects)
    new = value(conn, "create_stream", "s")
    id_ = consumer(conn)
    send_all(conn, ["x"] * 4)
    receive(conn, 1)
    value(conn, "dead_letter", claim_of(receive(conn, 1)))
    call(conn, "reader_claim", uuid.uuid4(), id_, 0, 0, 1)
    stage(conn, new, 2)
    publish(conn, new, [stage(conn, new, 1)], 1)
    assert all(n > before[table] for table, n in sizes().items() if table != "pgqueue.installed")
    value(conn, "drop_stream", "s")
    assert sizes() == before
    assert one(conn, objects) == objects_before
    assert len(call(conn, "receive", "kept", "c")) == 1


def test_a_dropped_consumer_leaves_nothing_and_the_others_go_on(conn: Conn) -> None:
    for name in "ab":
        consumer(conn, name)
    sent = send_all(conn, ["x"] * 3)
    for name in "ab":
        value(conn, "dead_letter", claim_of(receive(conn, 1, name)))
    lost, kept = receive(conn, 1, "a"), receive(conn, 1, "b")
    value(conn, "drop_consumer", "s", "a")
    assert value(conn, "ack", claim_of(lost)) == 0
    assert value(conn, "ack", claim_of(kept)) == 1
    assert states(conn, "a") == {}
    assert states(conn, "b") == {sent[0]: "dead", sent[2]: "ready"}
    assert one(conn, "select count(*) from pgqueue.consumers") == 1
    consumer(conn, "a")
    assert acked(conn, "s", "a") == sent, "made again, it begins again"


def test_a_consumer_that_is_dropped_while_it_is_claimed_from_leaves_nothing(
    conn: Conn, url: str
) -> None:
    consumer(conn)
    send_all(conn, ["x"] * 50)
    value(conn, "ack", claim_of(receive(conn, 1)))  # what comes next needs no lock
    with connection.connect(url) as other, ThreadPoolExecutor(1) as pool:
        with conn.transaction():
            assert len(receive(conn, 1)) == 1
            dropped = pool.submit(value, other, "drop_consumer", "s", "c")
            wait_for_a_lock(conn)
        dropped.result()
    assert one(conn, "select count(*) from pgqueue.claims") == 0
    assert one(conn, "select count(*) from pgqueue.consumer_messages") == 0


def test_dropping_a_consumer_waits_for_the_claims_that_are_being_made(conn: Conn, url: str) -> None:
    """Longer than a single try does."""
    consumer(conn)
    send(conn)
    with connection.connect(url) as other, ThreadPoolExecutor(1) as pool:
        with conn.transaction():
            assert len(receive(conn)) == 1
            dropped = pool.submit(value, other, "drop_consumer", "s", "c")
            time.sleep(1)
            assert not dropped.done()
        dropped.result()
    assert one(conn, "select count(*) from pgqueue.claims") == 0


def test_a_consumer_that_is_dropped_while_a_run_is_cut_leaves_no_pieces(
    conn: Conn, url: str
) -> None:
    consumer_id = consumer(conn)
    send_all(conn, ["x"] * 1000)
    value(conn, "ack", claim_of(receive(conn, 300)))
    with connection.connect(url) as other, ThreadPoolExecutor(1) as pool:
        with other.transaction():
            other.execute("select pgqueue._lock_consumer(%s)", [consumer_id])
            conn.execute("begin")
            assert len(receive(conn, 10)) == 10, "without the lock: from what is ready"
        dropped = pool.submit(value, other, "drop_consumer", "s", "c")
        wait_for_a_lock(conn)
        conn.execute("commit")
        dropped.result()
    assert one(conn, "select count(*) from pgqueue.consumer_messages") == 0
    assert one(conn, "select count(*) from pgqueue.claims") == 0


def test_a_claim_does_not_wait_long_for_what_an_open_transaction_holds(
    conn: Conn, url: str
) -> None:
    consumer(conn)
    send(conn)
    value(conn, "nack", claim_of(receive(conn, 1)))  # a run that is ready, and taken before
    conn.execute("set statement_timeout = '10 s'")
    with connection.connect(url) as other, other.transaction():
        other.execute("select from pgqueue.consumer_messages for update")
        began = time.monotonic()
        assert receive(conn, 1) == []
        assert time.monotonic() - began < 0.9, "less than deadlock_timeout"
    assert len(receive(conn, 1)) == 1


def test_states_and_stats_agree_at_every_step(conn: Conn, stream: int) -> None:
    consumer(conn, ordering="key", p_visibility_timeout=seconds(0.05))
    k1, k2, a, b = send_all(conn, ["x"] * 4, p_keys=["k", "k", "l", "m"])
    assert set(states(conn).values()) == {"new"}
    assert (stats(conn).new, stats(conn).backlog, stats(conn).ready) == (4, 4, 0)
    claim = claim_of(receive(conn, p_visibility_timeout=seconds(60)))
    value(conn, "ack", claim, [b])
    value(conn, "dead_letter", claim, [a])
    value(conn, "nack", claim, None, seconds(60), "busy")
    new = send(conn)
    now_ = states(conn)
    assert (now_[k1], now_[a], now_[new]) == ("delayed", "dead", "new")
    assert now_.keys() == {k1, k2, a, new}
    s = stats(conn)
    assert (s.stream, s.consumer, s.ordering, s.new, s.dead) == ("s", "c", "key", 1, 1)
    assert s.ready + s.delayed + s.waiting == 2
    assert s.backlog == s.new + s.ready + s.delayed + s.waiting == 3
    assert (s.claimed, s.claims, s.expired, s.next_expiry) == (0, 0, 0, None)
    receive(conn, 1)
    row = state(conn, new)
    assert row.state == "claimed"
    assert row.lease_until is not None
    assert row.claim_id is not None
    assert stats(conn).next_expiry == row.lease_until
    time.sleep(0.1)
    assert (stats(conn).claimed, stats(conn).claims, stats(conn).expired) == (1, 1, 1)
    stage(conn, stream, 2)
    conn.execute("analyze pgqueue.messages")
    (row,) = rows(conn, "select * from pgqueue.stream_stats")
    assert (row.stream, row.kind, row.consumers, row.messages) == ("s", "text", 1, 7)
    assert row.last_publication == value(conn, "last_publication", stream) == 2
    assert row.staged_blocks == 1
    assert row.bytes > 0


# Staged writes


def stage(conn: Conn, stream: int, n: int, batch: int = 0, sink: str = "sink", **options: Any):
    """Write n messages and stage them, as a task does. Returns the block."""
    with conn.transaction():
        seqs = [
            row[0]
            for row in conn.execute(
                "insert into pgqueue.messages (seq, stream_id, data)"
                f" select nextval('pgqueue.seq_{stream}'), %s, 'x' from generate_series(1, %s)"
                " returning seq".encode(),
                [stream, n],
            ).fetchall()
        ]
        block = f"{{[{seqs[0]},{seqs[-1] + 1})}}"
        return value(conn, "stage", sink, batch, stream, block, **options)


def publish(
    conn: Conn, stream: int, blocks: list[int], n: int, batch: int = 0, sink: str = "sink",
    **options: Any,
) -> bool:  # fmt: skip
    return value(conn, "publish_staged", sink, batch, stream, blocks, n, **options)


def test_staged_messages_are_seen_once_they_are_published_and_only_once(
    conn: Conn, stream: int
) -> None:
    consumer(conn)
    blocks = [stage(conn, stream, 2), stage(conn, stream, 3)]
    assert states(conn) == {}
    assert receive(conn) == []
    assert value(conn, "is_published", "sink", stream, 0) is False
    assert publish(conn, stream, blocks, 5) is True
    assert value(conn, "is_published", "sink", stream, 0) is True
    assert publish(conn, stream, blocks, 5) is False
    assert publish(conn, stream, [stage(conn, stream, 4)], 4) is False, "a replay with new blocks"
    assert len(acked(conn, "s", "c")) == 5
    assert value(conn, "is_published", "another", stream, 0) is False
    assert publish(conn, stream, [stage(conn, stream, 1, sink="x")], 1, sink="x") is True


def test_a_later_batch_says_that_the_earlier_ones_were_published(conn: Conn, stream: int) -> None:
    consumer(conn)
    assert publish(conn, stream, [stage(conn, stream, 1, 7)], 1, 7) is True
    assert value(conn, "is_published", "sink", stream, 6) is True
    assert publish(conn, stream, [stage(conn, stream, 1, 6)], 1, 6) is False
    assert publish(conn, stream, [], 0, 8) is True, "an empty batch is a batch"
    assert publish(conn, stream, [], 0, 8) is False
    assert len(acked(conn, "s", "c")) == 1
    assert one(conn, "select count(*) from pgqueue.publications") == 1


def test_priority_time_and_consumers_of_staged_messages(conn: Conn, stream: int) -> None:
    for name in "cd":
        consumer(conn, name)
    due = now(conn) + seconds(60)
    blocks = [
        stage(conn, stream, 1),
        stage(conn, stream, 1, p_priority=3),
        stage(conn, stream, 2, p_deliver_at=due),
    ]
    assert publish(conn, stream, blocks, 4, p_consumers=["c"])
    assert [(r.seq, r.priority) for r in receive(conn)] == [(2, 3), (1, 0)]
    assert states(conn) == {1: "claimed", 2: "claimed", 3: "delayed", 4: "delayed"}
    assert state(conn, 3).not_visible_until == due
    assert states(conn, "d") == {}


@pytest.mark.parametrize(
    "missing", ["block", "rows", "of another batch", "of another sink", "of another stream"]
)
def test_a_batch_that_is_not_complete_is_not_published(
    conn: Conn, stream: int, missing: str
) -> None:
    consumer(conn)
    blocks, n = [stage(conn, stream, 2)], 2
    if missing == "block":
        blocks.append(10**9)
    elif missing == "rows":
        n = 3
    else:
        batch, sink = int("batch" in missing), "other" if "sink" in missing else "sink"
        to = value(conn, "create_stream", "other") if "stream" in missing else stream
        blocks, n = [*blocks, stage(conn, to, 1, batch, sink)], 3
    with pytest.raises(psycopg.Error, match="not complete") as caught:
        publish(conn, stream, blocks, n)
    assert caught.value.sqlstate == "PQ008"
    assert value(conn, "is_published", "sink", stream, 0) is False
    assert receive(conn) == []
    assert publish(conn, stream, blocks[:1], 2) is True, "nothing was used up"


@pytest.mark.parametrize("first_commits", [True, False])
def test_two_commits_of_a_batch_at_once_publish_it_once(
    conn: Conn, session: Callable[[], Conn], stream: int, first_commits: bool
) -> None:
    consumer(conn)
    blocks = [stage(conn, stream, 3)]
    first, second = session(), session()
    answers: list[bool] = []
    first.execute("begin")
    assert publish(first, stream, blocks, 3) is True
    thread = threading.Thread(target=lambda: answers.append(publish(second, stream, blocks, 3)))
    thread.start()
    time.sleep(0.2)
    assert answers == [], "the second waits for the first"
    first.execute("commit" if first_commits else "rollback")
    thread.join(30)
    assert answers == [not first_commits]
    assert len(acked(conn, "s", "c")) == 3


def test_a_staged_batch_whose_commit_takes_long_is_not_taken_for_dead(
    conn: Conn, session: Callable[[], Conn], stream: int
) -> None:
    """Its publication id is younger than its transaction id, so nobody closes the hole before."""
    consumer(conn)
    send(conn)  # the first number of a sequence would give a transaction id by itself
    acked(conn, "s", "c")
    blocks = [stage(conn, stream, 3)]
    blocker, committer = session(), session()
    with ThreadPoolExecutor(1) as pool:
        with blocker.transaction():
            blocker.execute("lock table pgqueue.sink_batches in share mode")
            published = pool.submit(publish, committer, stream, blocks, 3)
            wait_for_a_lock(conn)
            for _ in range(3):
                send(conn)
                assert len(acked(conn, "s", "c")) == 1
        assert published.result()
    assert len(acked(conn, "s", "c")) == 3


def test_reserved_numbers_are_nobody_elses(conn: Conn, url: str, stream: int) -> None:
    """Also those that others interrupt."""

    def reserve(_: int) -> list[tuple[int, int]]:
        with connection.connect(url) as own:
            reserved = value(own, "reserve", stream, 20_000)
            return [(r.lower, r.upper) for r in reserved]

    every: list[tuple[int, int]] = []
    for _ in range(50):
        with ThreadPoolExecutor(3) as pool:
            sets = list(pool.map(reserve, range(3)))
        assert [sum(hi - lo for lo, hi in each) for each in sets] == [20_000] * 3
        every = sorted([*every, *(r for each in sets for r in each)])
        assert all(a[1] <= b[0] for a, b in pairwise(every))
        if max(len(each) for each in sets) > 1:
            return
    pytest.fail("they never got into each other's way")


def test_maintain_deletes_what_failed_writers_left_and_nothing_else(
    conn: Conn, stream: int
) -> None:
    consumer(conn)
    won, lost_attempt = stage(conn, stream, 2, 1), stage(conn, stream, 3, 1)
    assert publish(conn, stream, [won], 2, 1)
    fresh = stage(conn, stream, 4, 2)
    old = stage(conn, stream, 5, 3)
    conn.execute(
        "update pgqueue.staged_writes set staged_at = staged_at - interval '2 days'"
        " where staged_id = %s",
        [old],
    )
    assert dict(call(conn, "maintain")) == {
        "staged blocks": 2,
        "unpublished messages": 8,
        "old sink batches": 0,
    }
    assert rows(conn, "select staged_id from pgqueue.staged_writes") == [(fresh,)]
    assert one(conn, "select count(*) from pgqueue.messages") == 6
    assert lost_attempt != fresh
    assert publish(conn, stream, [fresh], 4, 2)
    assert len(acked(conn, "s", "c")) == 6
    with pytest.raises(psycopg.Error) as caught:
        publish(conn, stream, [old], 5, 3)
    assert caught.value.sqlstate == "PQ008"
    assert dict(call(conn, "maintain"))["staged blocks"] == 0


def test_maintain_forgets_all_but_the_last_batches_of_a_sink(conn: Conn, stream: int) -> None:
    for batch in range(30):
        publish(conn, stream, [], 0, batch)
    publish(conn, stream, [], 0, 3, "another")
    assert dict(call(conn, "maintain"))["old sink batches"] == 19
    assert value(conn, "is_published", "sink", stream, 0) is True, "the later ones say so"
    assert publish(conn, stream, [], 0, 0) is False
    assert value(conn, "is_published", "another", stream, 3) is True


def test_maintain_forgets_batch_writes_whose_name_is_used_once(conn: Conn, stream: int) -> None:
    for sink in ("write:1", "write:2", "txn:a", "5e0e5a3f"):
        publish(conn, stream, [stage(conn, stream, 1, sink=sink)], 1, sink=sink)
    conn.execute(
        "update pgqueue.sink_batches set published_at = published_at - interval '2 days'"
        " where sink <> 'write:2'"
    )
    assert dict(call(conn, "maintain"))["old sink batches"] == 1
    left = conn.execute("select sink from pgqueue.sink_batches order by 1").fetchall()
    assert left == [("5e0e5a3f",), ("txn:a",), ("write:2",)]


def test_maintain_releases_no_claim(conn: Conn) -> None:
    consumer(conn, p_visibility_timeout=seconds(0.01))
    send(conn)
    claim = claim_of(receive(conn))
    time.sleep(0.05)
    call(conn, "maintain", seconds(0.01))
    assert value(conn, "ack", claim) == 1


# Readers


class Reader:
    """A checkpoint: what Spark's offset log and the source keep of it."""

    def __init__(self, conn: Conn, consumer_id: int):
        self.conn, self.id, self.consumer_id = conn, uuid.uuid4(), consumer_id
        self.claim_id = self.messages = 0

    def ask(self, size: int | None = None, **options: Any) -> Any:
        """latestOffset, which does not move the checkpoint."""
        (row,) = call(
            self.conn, "reader_claim", self.id, self.consumer_id, self.claim_id, self.messages,
            size, **options,
        )  # fmt: skip
        return row

    def move(self, row: Any) -> None:
        """The batch up to this end offset is done."""
        self.claim_id, self.messages = row.claim_id, row.messages

    def plan(self, end: Any) -> list[int]:
        """The messages of the batch, in order."""
        ranges = call(self.conn, "reader_plan", self.id, self.claim_id, end.claim_id)
        return [seq for r in ranges for seq in range(r.lo, r.hi)]

    def resume(self, end: Any) -> tuple[int, int, int]:
        """planned, taken_over, gone."""
        (row,) = call(
            self.conn, "reader_resume", self.id, self.consumer_id, self.claim_id, end.claim_id
        )
        return tuple(row)


@pytest.fixture
def reader(conn: Conn) -> Reader:
    return Reader(conn, consumer(conn))


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


def test_asking_again_after_a_lost_answer_gives_the_same_batch(conn: Conn, reader: Reader) -> None:
    sent = send_all(conn, ["x"] * 3)
    first = reader.ask(2)
    send(conn)
    again = reader.ask(100)
    assert (again.claim_id, again.messages, again.claimed) == (first.claim_id, 2, 2)
    assert reader.plan(again) == sent[:2]
    reader.move(first)
    second = reader.ask(1)
    assert tuple(reader.ask(1))[:4] == tuple(second)[:4]
    assert len(reader.plan(second)) == 1


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
    end = reader.ask(p_visibility_timeout=seconds(0.05))
    time.sleep(0.1)
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
    end = reader.ask(p_visibility_timeout=seconds(0.05))
    time.sleep(0.1)
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
    end = reader.ask(p_visibility_timeout=seconds(0.05))
    time.sleep(0.1)
    worker = receive(conn, 1, p_visibility_timeout=seconds(60))
    assert seqs_of(worker) == sent[:1]
    planned, taken_over, gone = reader.resume(end)
    assert (planned + taken_over, gone) == (3, 0)
    assert not set(reader.plan(end)) & set(sent[:2])
    value(conn, "ack", claim_of(worker))
    assert reader.resume(end) == (2, 1, 0)
    assert reader.plan(end) == sent[1:]


def test_a_resumed_batch_makes_the_claim_beside_it_keep_its_keys_too(conn: Conn) -> None:
    """One that was alone until then, and did not need to know them."""
    reader = Reader(conn, consumer(conn, ordering="key"))
    sent = send_all(conn, ["x"] * 6, p_keys=["w", "k1", "k2", "x", "y", "z"])
    first = claim_of(receive(conn, 1))
    end = reader.ask(2, p_visibility_timeout=seconds(0.05))
    time.sleep(0.1)
    conn.execute("update pgqueue.consumer_cursors set lease_probe = '-infinity'")
    for claim in (claim_of(receive(conn, 1)), first):  # takes over one key; the other stands aside
        value(conn, "ack", claim)
    (alone,) = receive(conn, 1)
    assert alone.seq in sent[3:]
    assert one(conn, "select mixed_claim from pgqueue.consumer_cursors") == alone.claim_id
    assert reader.resume(end) == (1, 1, 0)
    checker.check(conn)


@pytest.mark.parametrize("ordering", ORDERINGS)
def test_the_greatest_limit_is_one(conn: Conn, ordering: str) -> None:
    """Also where a claim beside it makes the keys matter."""
    reader = Reader(conn, consumer(conn, ordering=ordering))
    send_all(conn, ["x"] * 3, p_keys=["k", "l", "l"])
    worker = claim_of(receive(conn, 1))
    got = reader.ask(2**63 - 1).claimed
    assert got == (0 if ordering == "stream" else 2)
    assert value(conn, "ack", worker) == 1


def test_a_batch_that_was_acknowledged_by_hand_is_done(conn: Conn, reader: Reader) -> None:
    """Also for its checkpoint, which cannot go back before it."""
    send_all(conn, ["x"] * 3)
    start, end = reader.claim_id, reader.ask()
    assert value(conn, "ack", end.claim_id) == 3
    assert reader.resume(end) == (0, 0, 0)
    reader.move(end)
    assert (reader.ask().claimed, reader.ask().lost) == (0, 0)
    reader.claim_id = start
    with pytest.raises(psycopg.Error, match="older") as caught:
        reader.ask()
    assert caught.value.sqlstate == "PQ010"


def test_messages_that_were_deleted_meanwhile_are_gone(conn: Conn, reader: Reader) -> None:
    sent = send_all(conn, ["x"] * 3)
    end = reader.ask(p_visibility_timeout=seconds(0.05))
    time.sleep(0.1)
    value(conn, "ack", claim_of(receive(conn)), sent[:2])
    conn.execute("delete from pgqueue.messages where seq = %s", [sent[0]])
    planned, taken_over, gone = reader.resume(end)
    assert (planned, taken_over, gone) == (0, 2, 1)


def test_messages_acknowledged_after_the_lease_was_lost_are_counted(
    conn: Conn, reader: Reader
) -> None:
    send_all(conn, ["x"] * 3)
    reader.move(reader.ask(p_visibility_timeout=seconds(0.05)))
    time.sleep(0.1)
    value(conn, "ack", claim_of(receive(conn)))
    assert reader.ask().lost == 3
    assert reader.ask().lost == 0, "told once"
    send_all(conn, ["x"] * 2)
    reader.move(reader.ask(p_visibility_timeout=seconds(0.05)))
    time.sleep(0.1)
    value(conn, "ack", claim_of(receive(conn)))
    assert reader.ask().lost == 2
    assert one(conn, "select lost from pgqueue.readers") == 5, "of all its batches"


def test_a_claim_of_a_reader_that_was_taken_over_is_not_live(conn: Conn, reader: Reader) -> None:
    """It is kept for the reader to be told, but nobody settles it."""
    send(conn)
    end = reader.ask(p_visibility_timeout=seconds(0.05))
    time.sleep(0.1)
    receive(conn)
    warnings: list[str] = []
    conn.add_notice_handler(lambda notice: warnings.append(str(notice.message_primary)))
    for settle in ("ack", "nack", "extend", "dead_letter"):
        assert value(conn, settle, end.claim_id) == 0
    assert len(warnings) == 4
    assert all(f"claim {end.claim_id} is not live" in text for text in warnings)


@pytest.mark.parametrize("again", ["asked for", "resumed"])
def test_a_batch_that_is_repeated_is_held_anew(conn: Conn, reader: Reader, again: str) -> None:
    """A query that was away for longer than its lease is safe as soon as it is back."""
    send(conn)
    end = reader.ask(p_visibility_timeout=seconds(1))
    conn.execute("update pgqueue.claims set lease_until = clock_timestamp() - interval '1 s'")
    if again == "asked for":
        assert reader.ask().claim_id == end.claim_id
    else:
        assert reader.resume(end) == (1, 0, 0)
    assert receive(conn) == []


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
    reader.ask(1, p_visibility_timeout=seconds(0.4))
    receive(conn, 1)
    for _ in range(3):
        time.sleep(0.2)
        assert value(conn, "reader_extend", reader.id) == 1
        assert receive(conn) == []
    time.sleep(0.5)
    assert len(receive(conn)) == 1
    assert value(conn, "reader_extend", reader.id) == 0
    assert value(conn, "reader_extend", uuid.uuid4()) == 0


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


@pytest.mark.parametrize(
    ("case", "sqlstate", "says"),
    [
        ("dropped", "PQ002", "dropped"),
        ("never made", "PQ002", "dropped"),
        ("unknown reader", "PQ005", "does not know"),
        ("other consumer", "PQ005", "consumer 'c' of stream 's', not of consumer 'd'"),
        ("ahead", "PQ005", "ahead of the database"),
        ("older", "PQ010", "older"),
    ],
)
@pytest.mark.parametrize("function", ["reader_claim", "reader_resume"])
def test_a_checkpoint_that_does_not_fit_is_refused(
    conn: Conn, reader: Reader, function: str, case: str, sqlstate: str, says: str
) -> None:
    send_all(conn, ["x"] * 3)
    first = reader.ask(1)
    reader.move(first)
    second = reader.ask(1)
    start, end = first.claim_id, second.claim_id
    if case == "dropped":
        value(conn, "drop_consumer", "s", "c")
    elif case == "never made":
        reader.consumer_id = 999
    elif case == "unknown reader":
        reader.id = uuid.uuid4()
    elif case == "other consumer":
        reader.consumer_id = consumer(conn, "d")
    elif case == "ahead":
        start, end = second.claim_id + 100, second.claim_id + 200
    else:
        start, end = 0, first.claim_id
    before = states(conn)
    with pytest.raises(psycopg.Error, match=says) as caught:
        call(
            conn, function, reader.id, reader.consumer_id, start,
            1 if function == "reader_claim" else end,
        )  # fmt: skip
    assert caught.value.sqlstate == sqlstate
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
    with pytest.raises(psycopg.Error, match="query q1 reads consumer 'c'") as caught:
        value(conn, "reader_query", twin.id, "q1")
    assert caught.value.sqlstate == "PQ009"
    value(conn, "reader_query", twin.id, "q2")


def test_next_due_is_when_the_first_delayed_message_is_due(conn: Conn, reader: Reader) -> None:
    assert reader.ask().next_due is None
    due = now(conn) + seconds(60)
    send(conn, p_deliver_at=due + seconds(60))
    send(conn, p_deliver_at=due)
    assert reader.ask().next_due == due


@pytest.mark.parametrize("ordering", ORDERINGS)
def test_next_due_is_when_a_failed_message_comes_back(conn: Conn, ordering: str) -> None:
    reader = Reader(conn, consumer(conn, ordering=ordering))
    seq = send(conn, p_key="k")
    value(conn, "nack", claim_of(receive(conn)), None, seconds(60))
    assert reader.ask().next_due == state(conn, seq).not_visible_until


def test_next_due_is_when_the_next_lease_ends(conn: Conn, reader: Reader) -> None:
    seq = send(conn)
    receive(conn)
    assert reader.ask().next_due == state(conn, seq).lease_until
    send(conn)
    assert reader.ask().claimed == 1


def test_the_backlog_is_what_nobody_has_claimed(conn: Conn, reader: Reader) -> None:
    assert value(conn, "reader_backlog", reader.consumer_id) == 0
    send_all(conn, ["x"] * 5)
    send(conn)
    assert value(conn, "reader_backlog", reader.consumer_id) == 6
    reader.ask(2)
    assert value(conn, "reader_backlog", reader.consumer_id) == 4 == stats(conn).backlog


def test_names_are_looked_up_with_what_the_source_and_sink_need(conn: Conn, stream: int) -> None:
    id_ = consumer(conn, ordering="key", p_visibility_timeout=seconds(7))
    assert call(conn, "open_stream", "s") == [(stream, "text")]
    assert call(conn, "open_consumer", "s", "c") == [(stream, "text", id_, "key", seconds(7))]
    assert call(conn, "open_sink", "s") == [(stream, "text")]
    assert call(conn, "open_sink", "s", ["c"]) == [(stream, "text")]


# Notifications


def test_each_publication_notifies_once_and_none_when_the_stream_says_so(
    conn: Conn, stream: int
) -> None:
    quiet = value(conn, "create_stream", "quiet", p_notify=False)
    heard: list[str] = []
    conn.add_notify_handler(lambda notify: heard.append(notify.channel))
    for id_ in (stream, quiet):
        conn.execute(f"listen pgqueue_{id_}".encode())
    channel = f"pgqueue_{stream}"
    publications: list[Callable[[], Any]] = [
        lambda: send(conn),
        lambda: send_all(conn, ["x"] * 10),
        lambda: publish(conn, stream, [stage(conn, stream, 2), stage(conn, stream, 2)], 4),
    ]
    for publication in publications:
        publication()
        conn.execute("select 1")
        assert heard == [channel]
        heard.clear()
    with conn.transaction(force_rollback=True):
        send(conn)
    send_all(conn, [])
    stage(conn, stream, 1, 1)
    publish(conn, stream, [], 0, 2)
    value(conn, "send", "quiet", "x")
    call(conn, "send_batch", "quiet", ["x", "y"])
    publish(conn, quiet, [stage(conn, quiet, 1)], 1)
    conn.execute("select 1")
    assert heard == []
