"""What the claims of a consumer without an order do not do: writes, locks and plans are counted.

Not in time, which a busy machine changes.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from spark_pgqueue.postgres import schema
from tests.sql import internals
from tests.sql.catalogue import catalogue
from tests.sql.internals import cursor_of, ids
from tests.sql.queue import (
    Conn,
    Session,
    acked,
    call,
    claim_of,
    claim_one,
    consumer,
    one,
    receive,
    seconds,
    send,
    send_all,
    seqs_of,
    value,
    wait_for_a_lock,
)

pytestmark = pytest.mark.usefixtures("stream", "allowed_afterwards")

NOTHING = (0, 0, 0)


def written(conn: Conn, act: Callable[[], object]) -> tuple[tuple[int, ...], ...]:
    """The rows of runs, claims, cursors and gaps that something inserts, updates and deletes."""
    tables = ("consumer_messages", "claims", "consumer_cursors", "consumer_gaps")
    look = (
        "select relname, n_tup_ins, n_tup_upd, n_tup_del"
        " from pg_stat_xact_user_tables where schemaname = 'pgqueue'"
    )
    with conn.transaction():
        before = {row[0]: row[1:] for row in conn.execute(look).fetchall()}
        act()
        after = {row[0]: row[1:] for row in conn.execute(look).fetchall()}
    return tuple(
        tuple(a - b for a, b in zip(after[table], before[table], strict=True)) for table in tables
    )


def locks(conn: Conn, act: Callable[[], object]) -> int:
    """How many advisory locks somebody holds when it has done something."""
    held = (
        "select count(*) from pg_locks where locktype = 'advisory' and pid = pg_backend_pid()"
        " and database = (select oid from pg_database where datname = current_database())"
    )
    with conn.transaction():
        act()
        return one(conn, held)


def plans(conn: Conn, act: Callable[[], object]) -> list[str]:
    """The plans that are made, as the server prints them."""
    made: list[str] = []

    def note(notice) -> None:
        if notice.message_primary.startswith("plan"):
            made.append(notice.message_detail)

    conn.add_notice_handler(note)
    conn.execute("set client_min_messages = log; set debug_print_plan = on")
    try:
        act()
    finally:
        conn.execute("reset debug_print_plan; reset client_min_messages")
        conn.remove_notice_handler(note)
    return made


def set_limit_behind(conn: Conn, runs: int) -> None:
    """After how many runs, about, the beginning of the line is moved."""
    conn.execute(
        "create or replace function _pgqueue.limit_behind() returns int language sql immutable"
        f" as 'select {runs}'".encode()
    )


def look_rarely(conn: Conn) -> str:
    """What claims look for each second or so is due a minute later, and nothing goes by chance.

    So a test counts the same on a machine that stands still between two claims. Returns the
    statement that makes it due in time again.
    """
    usual = one(conn, "select pg_get_functiondef('_pgqueue.need_not_look'::regproc)")
    set_limit_behind(conn, 1_000_000_000)
    conn.execute(
        "create or replace function _pgqueue.need_not_look(p_when timestamptz) returns boolean"
        " language sql volatile as $$ select p_when between clock_timestamp() - interval '1 min'"
        " and clock_timestamp() + interval '2 s' $$"
    )
    return usual


def test_what_was_just_published_is_claimed_as_it_is_taken(conn: Conn) -> None:
    """It is never stored as ready: what the claim leaves are slots."""
    look_rarely(conn)
    consumer(conn)
    send(conn)
    assert acked(conn, "s", "c") == [1]
    send(conn)
    done = written(conn, lambda: receive(conn, 10))
    assert done == (NOTHING, NOTHING, (1, 0, 1), NOTHING), "the claim is a slot"
    sent = [send(conn) for _ in range(5)]
    done = written(conn, lambda: claim_one(conn))
    assert done == (NOTHING, NOTHING, (1, 0, 1), NOTHING), "all others become slots"
    done = written(conn, lambda: claim_one(conn))
    assert done == (NOTHING, NOTHING, NOTHING, NOTHING), "a slot is claimed"
    assert acked(conn, "s", "c") == sent[2:]


def test_what_is_ready_is_claimed_without_the_lock_of_the_consumer(conn: Conn) -> None:
    look_rarely(conn)
    consumer(conn)
    sent = send_all(conn, ["x"] * 1000)
    assert claim_one(conn) == sent[0]
    assert locks(conn, lambda: claim_one(conn)) == 0
    assert locks(conn, lambda: receive(conn, 20)) == 0, "not even when slots have to be joined"
    assert locks(conn, lambda: receive(conn, 240)) == 1, "new slots have to be cut"
    assert locks(conn, lambda: receive(conn, 30)) == 0, "not even when a slot has to be divided"
    done = written(conn, lambda: receive(conn, 150))
    assert done == (NOTHING, NOTHING, NOTHING, NOTHING)


def test_beside_an_open_producer_what_is_ready_is_claimed_without_the_lock(
    conn: Conn, session: Session
) -> None:
    """It may publish before what is ready: claims look for that each 10 ms, and not each time."""
    usual = look_rarely(conn)
    consumer(conn)
    producer = session()
    producer.execute("begin")
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


def test_claims_without_the_lock_move_the_beginning_of_the_line_now_and_then(conn: Conn) -> None:
    """Or else the next ones would walk over all that was claimed. A history leaves no slots."""
    set_limit_behind(conn, 10)
    consumer(conn, keep_history=seconds(3600))
    sent = send_all(conn, ["x"] * 300)
    moved = 0
    for seq in sent[:-1]:
        claimed: list[int] = []
        done = written(conn, lambda to=claimed: to.append(claim_one(conn)))
        assert claimed == [seq]
        moved += done[2] != NOTHING
    assert 5 < moved < 100, "one in ten, by chance"


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


def test_much_that_is_new_or_more_urgent_does_not_wait(conn: Conn) -> None:
    consumer(conn)
    sent = send_all(conn, ["x"] * 5)
    assert claim_one(conn) == sent[0]
    urgent = send(conn, p_priority=1)
    assert claim_one(conn) == urgent
    sent += [send(conn) for _ in range(20)]
    assert claim_one(conn) == sent[1]
    assert cursor_of(conn).taken == ids(1, 22)
    low = [send(conn, p_priority=-5) for _ in range(2)]
    assert receive(conn, 23)[-1].seq == sent[-1], "all that was ready"
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


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_of_two_claimers_that_see_the_same_publication_one_takes_it(
    conn: Conn, session: Session, end: str
) -> None:
    """The second one waits, since all that there is may be left to it."""
    consumer(conn)
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


# Payloads


@pytest.mark.parametrize(("stream_id", "planned"), [(1, 1), (32, 1), (33, 2)])
def test_payloads_are_read_with_a_plan_that_is_kept(
    conn: Conn, stream_id: int, planned: int
) -> None:
    """Only the caller's statement is planned; of later streams the call of their function too."""
    conn.prepare_threshold = None
    value(conn, "drop_stream", "s")
    call(conn, "maintain")
    conn.execute(f"alter table pgqueue.streams alter stream_id restart with {stream_id}".encode())
    assert value(conn, "create_stream", "s") == stream_id
    consumer(conn)
    sent = send_all(conn, ["x"] * 100)
    for n in range(3):
        assert seqs_of(receive(conn, 10)) == sent[n * 10 : n * 10 + 10]
    made = plans(conn, lambda: receive(conn, 10))
    assert len(made) == planned
    assert not any("SCAN " in plan.replace("FUNCTIONSCAN ", "") for plan in made)


@pytest.mark.parametrize("function", ["payload", "payloads"])
def test_the_function_of_a_stream_is_found_by_few_comparisons(conn: Conn, function: str) -> None:
    """Each costs as much as a twentieth of a query. One after the other, there were up to 32."""
    body = one(conn, "select prosrc from pg_proc where proname = %s", function)
    pattern = r"(els)?if p_stream_id <= (\d+)|(else)\n|(end if;)\n|_pgqueue.payloads?_(\d+)\("
    ranges: list[tuple[int, int]] = []  # of each if that is open: which streams come here
    called = []
    for elsif, upto, otherwise, end, stream_id in re.findall(
        pattern, body[body.index("if p_stream_id") :]
    ):
        if elsif or otherwise:
            ranges.append((ranges.pop()[1], int(upto or 99)))
        elif upto:
            ranges.append((0, int(upto)))
        elif end:
            ranges.pop()
        else:
            assert all(low < int(stream_id) <= high for low, high in ranges)
            assert len(ranges) == 5
            called.append(int(stream_id))
    assert called == list(range(1, 33))


def test_runs_that_interleave_are_delivered_in_one_order(conn: Conn) -> None:
    consumer(conn)
    sent = send_all(conn, ["x"] * 9, p_priority=1) + send_all(conn, ["y"] * 9)
    claim = claim_of(receive(conn))
    for part in (sent[1::3], sent[2::3], sent[::3]):
        assert value(conn, "nack", claim, part) == 6
    assert len(internals.bundles(conn)) == 6
    assert seqs_of(receive(conn)) == sent
    assert acked(conn, "s", "c") == []


def test_a_stream_has_a_function_that_reads_payloads_as_long_as_it_exists(conn: Conn) -> None:
    made = "select count(*) from pg_proc where proname like 'payloads\\_%'"
    assert one(conn, made) == 1
    other = value(conn, "create_stream", "other")
    assert one(conn, made) == 2
    public = "select has_function_privilege('public', %s, 'execute')"
    assert one(conn, public, f"_pgqueue.payloads_{other}(bigint, int8multirange, int)") is False
    value(conn, "drop_stream", "other")
    call(conn, "maintain")
    assert one(conn, made) == 1


def test_installing_again_makes_the_functions_of_streams_anew(conn: Conn, stream: int) -> None:
    """Also where they are gone, or of another version."""
    consumer(conn)
    value(conn, "create_stream", "other")
    before = catalogue(conn)
    conn.execute(f"drop function _pgqueue.payloads_{stream}".encode())
    conn.execute(
        "do $do$ begin execute (select replace(pg_get_functiondef(oid), 'begin', 'begin return;')"
        " from pg_proc where proname = 'payloads_' || (select max(stream_id)"
        " from pgqueue.streams)); end $do$"
    )
    schema.install(conn)
    assert catalogue(conn) == before
    sent = send(conn)
    assert seqs_of(receive(conn)) == [sent]


def test_receiving_acknowledges_and_claims_in_one_call(conn: Conn) -> None:
    """What clients should do: one round trip, one commit."""
    consumer(conn)
    sent = send_all(conn, ["x"] * 3)
    claim, got = None, []
    while found := call(conn, "receive", "s", "c", 1, p_ack=claim):
        claim = claim_of(found)
        got += seqs_of(found)
    assert got == sent
    assert internals.count(conn, "consumer_messages") == internals.claims(conn) == []
