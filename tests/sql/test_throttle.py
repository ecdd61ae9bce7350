"""Limits of a whole consumer: what may be in flight, and what is delivered within a time."""

import json
import random
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from typing import Any

import psycopg
import pytest

from spark_pgqueue.postgres import connection
from tests.sql import checker, clock, internals, limits
from tests.sql.queue import *

pytestmark = pytest.mark.usefixtures("stream", "allowed_afterwards")

IN_FLIGHT = (
    "select coalesce(sum(message_count), 0)::int from pgqueue.consumer_messages"
    " where token is not null"
)


def limited(conn: Conn, ordering: str = "none", **settings: Any) -> int:
    return consumer(conn, ordering=ordering, p_settings=json.dumps(settings))


@pytest.mark.parametrize("ordering", ORDERINGS)
def test_no_more_are_in_flight_than_the_limit_allows(conn: Conn, ordering: str) -> None:
    limited(conn, ordering, max_in_flight=5)
    send_keys(conn, *"abcdefghij")
    if ordering == "stream":
        assert len(receive(conn, 100)) == 5
        return
    first = receive(conn, 3)
    others = [rows for _ in range(2) if (rows := receive(conn, 100))]
    assert [len(rows) for rows in [first, *others]] == [3, 2]
    assert receive(conn, 1) == []
    assert value(conn, "ack", claim_of(first), seqs_of(first)[:1]) == 1
    assert len(receive(conn, 100)) == 1
    for rows in others:
        again = receive(conn, 100, p_ack=claim_of(rows))
        assert len(again) == len(rows), "what it acknowledges first"
    assert value(conn, "nack", claim_of(first)) == 2
    assert len(receive(conn, 100)) == 2


def test_long_claims_are_in_flight_too(conn: Conn) -> None:
    """A claim with the lock moves claims of more than a second to a lane of their own."""
    limited(conn, max_in_flight=2)
    send_all(conn, ["x"] * 3)
    claim = claim_of(receive(conn, 2))
    clock.pass_time(conn, seconds(5))
    for _ in range(2):
        assert receive(conn) == []
    value(conn, "ack", claim)
    assert len(receive(conn)) == 1


@pytest.mark.parametrize("others", [0, 1, 5])
def test_claims_in_more_lanes_than_have_a_hint_are_in_flight_too(conn: Conn, others: int) -> None:
    """Each priority has a lane; free bundles need the hints of lanes whose bundles are claimed."""
    limits.set_constant(conn, "limit_lanes", 2)
    limited(conn, max_in_flight=5)
    for priority in range(5 + others):
        send(conn, p_priority=-priority)
    assert [len(receive(conn, 1)) for _ in range(6)] == [1, 1, 1, 1, 1, 0]
    assert one(conn, IN_FLIGHT) == 5


def test_a_lease_that_ended_makes_room(conn: Conn) -> None:
    limited(conn, max_in_flight=2)
    send_all(conn, ["x"] * 3)
    receive(conn, 2)
    assert receive(conn) == []
    clock.end_leases(conn)
    assert len(receive(conn)) == 2


def test_a_condition_goes_by_the_limits_too(conn: Conn) -> None:
    limited(conn, max_in_flight=3, rate_limit=4, rate_interval="1 hour")
    send_keys(conn, *"aaaaaa")
    query = b"select claim_id from pgqueue.receive_where('s', 'c', '$.key == \"a\"', 10)"
    first = conn.execute(query).fetchall()
    assert len(first) == 3
    assert conn.execute(query).fetchall() == []
    value(conn, "ack", first[0][0])
    assert len(conn.execute(query).fetchall()) == 1


def test_what_a_condition_acknowledges_makes_room(conn: Conn) -> None:
    limited(conn, max_in_flight=1)
    seqs = send_keys(conn, *"aaa")
    query = b"select claim_id, seq from pgqueue.receive_where('s', 'c', '$', p_ack => %s)"
    claim, got = None, []
    for _ in seqs:
        ((claim, seq),) = conn.execute(query, [claim]).fetchall()
        got.append(seq)
    assert got == seqs
    assert one(conn, IN_FLIGHT) == 1


def test_a_query_goes_by_the_limits_too(conn: Conn, stream: int) -> None:
    reader = Reader(conn, limited(conn, max_in_flight=3, rate_limit=5, rate_interval="1 hour"))
    send_all(conn, ["x"] * 9)
    end = reader.ask()
    assert end.claimed == 3
    reader.move(end)
    end = reader.ask()
    assert end.claimed == 2
    reader.move(end)
    end = reader.ask()
    assert end.claimed == 0
    assert end.next_due > now(conn) + timedelta(minutes=59)


@pytest.mark.parametrize("ordering", ["none", "key"])
def test_a_query_with_a_bound_learns_what_the_limits_hold_back(
    conn: Conn, stream: int, ordering: str
) -> None:
    """Free messages, and new ones up to the bound; but not later, delayed or claimed ones."""
    reader = Reader(conn, limited(conn, ordering, max_in_flight=3))

    def ask() -> tuple[int, bool]:
        row = reader.ask(p_upto_publication=bound)
        reader.move(row)
        return row.claimed, row.limited

    send_keys(conn, *"abc")
    bound = value(conn, "last_publication", stream)
    send_keys(conn, *"def")
    held = claim_of(receive(conn, 3))
    assert ask() == (0, False), "what another claimer holds is all that there is"
    value(conn, "nack", held, p_delay=seconds(3600))
    held = claim_of(receive(conn, 3))
    assert ask() == (0, False), "delayed messages are left"
    bound = send(conn) and value(conn, "last_publication", stream)
    assert ask() == (0, True)
    assert not reader.ask().limited, "a query without a bound waits in any case"
    call(conn, "pause", "s", "c")
    assert ask() == (0, False)
    call(conn, "resume", "s", "c")
    value(conn, "ack", held)
    assert ask() == (1, False)
    assert ask() == (0, False)


@pytest.mark.parametrize("ordering", ORDERINGS)
def test_no_more_are_delivered_in_a_time_than_the_rate_says(conn: Conn, ordering: str) -> None:
    limited(conn, ordering, rate_limit=4, rate_interval="10 minutes")
    send_keys(conn, *"abcdefghij")
    claim = claim_of(receive(conn, 3))
    value(conn, "nack", claim)
    assert len(receive(conn, 3, p_visibility_timeout=timedelta(hours=2))) == 1
    assert receive(conn) == []
    due = value(conn, "next_due", "s", "c")
    assert timedelta(minutes=9) < due - now(conn) <= timedelta(minutes=10, seconds=30)
    conn.execute(
        "update pgqueue.consumer_cursors"
        " set delivered_at = array(select d - interval '11 minutes' from unnest(delivered_at) d)"
    )
    if ordering != "stream":
        assert sum(len(receive(conn, 100)) for _ in range(4)) == 4  # by key not at once
        assert one(conn, "select cardinality(delivered) from pgqueue.consumer_cursors") == 1


def test_a_consumer_that_is_moved_keeps_its_rate(conn: Conn) -> None:
    limited(conn, rate_limit=2, rate_interval="1 hour")
    send_all(conn, ["x"] * 5)
    assert len(receive(conn)) == 2
    value(conn, "seek", "s", "c", "earliest")
    assert receive(conn) == []
    value(conn, "alter_consumer", "s", "c", '{"rate_limit": 3}')
    assert len(receive(conn)) == 1


def test_what_is_too_much_is_dropped_whether_there_is_room_or_not(conn: Conn) -> None:
    limited(conn, rate_limit=1, rate_interval="1 hour", max_backlog=2, on_full="drop_oldest")
    send_all(conn, ["x"])
    receive(conn)
    sent = send_all(conn, ["x"] * 5)
    assert receive(conn) == []
    states = "select seq from pgqueue.message_states where state = 'dead' order by seq"
    assert [seq for (seq,) in conn.execute(states.encode()).fetchall()] == sent[:3]


def test_who_waits_is_told_when_to_look_again(conn: Conn) -> None:
    limited(conn, max_in_flight=1)
    send_all(conn, ["x"] * 2)
    claim = claim_of(receive(conn))
    assert receive(conn) == []
    assert timedelta() < value(conn, "next_due", "s", "c") - now(conn) < timedelta(seconds=1)
    value(conn, "ack", claim)
    claim = claim_of(receive(conn))
    value(conn, "ack", claim)
    assert value(conn, "next_due", "s", "c") is None


def test_limits_can_be_changed_in_use(conn: Conn) -> None:
    consumer(conn)
    send_all(conn, ["x"] * 9)
    assert len(receive(conn, 4)) == 4
    value(conn, "alter_consumer", "s", "c", '{"max_in_flight": 3}')
    assert receive(conn) == []
    value(conn, "alter_consumer", "s", "c", '{"max_in_flight": 6}')
    assert len(receive(conn)) == 2
    value(conn, "alter_consumer", "s", "c", '{"max_in_flight": null}')
    assert len(receive(conn)) == 3


@pytest.mark.parametrize("ordering", ["none", "key"])
@pytest.mark.parametrize("lasts", [2.0, pytest.param(5.0, marks=pytest.mark.longer)])
@pytest.mark.promise("feature: in flight, or rate, of a whole queue")
def test_a_race_stays_within_the_limits(conn: Conn, url: str, ordering: str, lasts: float) -> None:
    """Claimers that settle in every way, or die; at each moment, and within each interval."""
    rate, interval = 60, 0.4
    limited(
        conn, ordering, max_in_flight=20, rate_limit=rate, rate_interval=f"{interval} s",
        visibility_timeout="50 ms", keep_history="1 day",
    )  # fmt: skip
    sent = [seq for _ in range(20) for seq in send_keys(conn, *"abcdefghijklmnopqrstuvwxyz" * 4)]
    until = time.monotonic() + lasts
    delivered: list[tuple[float, float, int]] = []  # by the server's clock: no later, no earlier
    now_there = "select extract(epoch from clock_timestamp())::float8"

    def consume(rng: random.Random) -> None:
        with connection.connect(url) as mine:
            mine.execute("set client_min_messages = error")
            while time.monotonic() < until:
                before = one(mine, now_there)
                rows = receive(mine, rng.choice([1, 5, 50]))
                if not rows:
                    time.sleep(0.005)
                    continue
                claim, what = claim_of(rows), rng.random()
                delivered.append((before, one(mine, now_there), len(rows)))
                part = [row.seq for row in rows if rng.random() < 0.5]
                if what < 0.6:
                    value(mine, "ack", claim, part if what < 0.3 else None)
                elif what < 0.8:
                    value(mine, "nack", claim, part)
                else:
                    time.sleep(0.06)

    def be_killed(rng: random.Random) -> None:
        while time.monotonic() < until:
            with suppress(psycopg.OperationalError), connection.connect(url) as mine:
                mine.execute("set application_name = 'victim'")
                while time.monotonic() < until:
                    mine.execute("begin")
                    receive(mine, rng.choice([1, 20]))
                    time.sleep(rng.choice([0, 0.01]))
                    mine.execute(rng.choice([b"commit", b"rollback"]))

    def kill() -> None:
        with connection.connect(url) as mine:
            while time.monotonic() < until:
                time.sleep(0.1)
                mine.execute(
                    "select pg_terminate_backend(pid) from pg_stat_activity"
                    " where datname = current_database() and application_name = 'victim'"
                )

    most = 0
    with ThreadPoolExecutor(6) as pool:
        jobs = [pool.submit(consume, random.Random(i)) for i in range(4)]
        jobs += [pool.submit(be_killed, random.Random(9)), pool.submit(kill)]
        while not all(job.done() for job in jobs):
            most = max(most, one(conn, IN_FLIGHT))
            checker.check(conn)
        for job in jobs:
            job.result()
    assert most <= 20
    for at, _, _ in delivered:
        within = sum(n for begun, end, n in delivered if begun >= at and end < at + interval)
        assert within <= rate, f"{within} within {interval} s"
    value(conn, "alter_consumer", "s", "c",
          '{"rate_limit": null, "rate_interval": null, "max_in_flight": null}')  # fmt: skip
    clock.end_leases(conn)
    for _ in range(5):
        acked(conn, "s", "c")
    kept = internals.rows(conn, "select seqs from pgqueue.message_history")
    ends = Counter(seq for row in kept for seq in checker.numbers(row.seqs))
    assert ends == Counter(sent), "each once"


def test_a_claim_that_is_rolled_back_counts_for_nothing(conn: Conn, session: Session) -> None:
    limited(conn, max_in_flight=2, rate_limit=2, rate_interval="1 hour")
    send_all(conn, ["x"] * 3)
    other = session()
    other.execute("begin")
    assert len(receive(other)) == 2
    other.execute("rollback")
    assert len(receive(conn)) == 2


def test_a_consumer_that_waits_for_its_rate_is_not_unattended(conn: Conn) -> None:
    """Its workers ask, and get nothing, for most of each hour."""
    consumer_id = limited(conn, rate_limit=2, rate_interval="1 hour")
    send_all(conn, ["x"] * 5)
    value(conn, "ack", claim_of(receive(conn)))
    internals.forget_claimers(conn, consumer_id)
    assert receive(conn) == []
    assert stats(conn).status == "ok"
    clock.pass_time(conn, timedelta(hours=2))
    assert stats(conn).status == "unattended"
