"""Ageing: what waits long enough is served, whatever is more urgent."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest

from tests.sql.internals import sent_earlier
from tests.sql.queue import (
    Conn,
    Session,
    acked,
    claim_of,
    consumer,
    receive,
    seconds,
    send,
    send_all,
    seqs_of,
    value,
)

pytestmark = pytest.mark.usefixtures("stream", "allowed_afterwards")


def ageing(conn: Conn, interval: str) -> int:
    """The consumer c with this ageing; its id."""
    return consumer(conn, p_settings=json.dumps({"ageing": interval}))


def test_a_priority_is_worth_its_ageing_and_no_more(conn: Conn, stream: int) -> None:
    ageing(conn, "1 minute")
    seqs = [send(conn, p_priority=p) for p in (0, 1, 5, 0)]
    assert acked(conn, "s", "c", 1) == [seqs[2], seqs[1], seqs[0], seqs[3]]
    seqs = [send(conn, p_priority=p) for p in (0, 1, 5, 0)]
    sent_earlier(conn, stream, seqs[0], seconds(90))
    assert acked(conn, "s", "c", 1) == [seqs[2], seqs[0], seqs[1], seqs[3]]
    seqs = [send(conn, p_priority=p) for p in (0, 1, 5, -1)]
    sent_earlier(conn, stream, seqs[0], seconds(400))
    sent_earlier(conn, stream, seqs[3], seconds(390))
    assert acked(conn, "s", "c", 1) == [seqs[0], seqs[3], seqs[2], seqs[1]]


def test_a_claim_of_many_goes_on_with_the_next_priority(conn: Conn, stream: int) -> None:
    ageing(conn, "1 minute")
    low = send_all(conn, ["x"] * 3)
    high = send_all(conn, ["x"] * 3, p_priority=7)
    assert seqs_of(receive(conn, 4)) == [*high, low[0]]
    more = send_all(conn, ["x"] * 3, p_priority=7)
    sent_earlier(conn, stream, low[1], seconds(1000))
    got = receive(conn, 4)
    assert sorted(seqs_of(got)) == [*low[1:], *more[:2]]
    value(conn, "ack", claim_of(got))


def test_nothing_starves_however_much_is_urgent(conn: Conn, session: Session) -> None:
    ageing(conn, "50 ms")
    low = send(conn)
    high = send_all(conn, ["x"] * 50, p_priority=3)
    stop = time.monotonic() + 20

    def produce() -> None:
        with session() as mine:
            while time.monotonic() < stop:
                send_all(mine, ["x"] * 5, p_priority=3)

    with ThreadPoolExecutor(1) as pool:
        producer = pool.submit(produce)
        got: list[int] = []
        while low not in got:
            assert time.monotonic() < stop, "starved"
            got += seqs_of(receive(conn, 1))
        stop = 0.0
        producer.result(30)
    assert set(high) < set(got), "what is a little older than its ageing is not more urgent yet"


def test_without_ageing_what_is_urgent_comes_first_for_ever(conn: Conn, stream: int) -> None:
    consumer(conn)
    low, high = send(conn), send(conn, p_priority=1)
    sent_earlier(conn, stream, low, seconds(100_000))
    assert acked(conn, "s", "c", 1) == [high, low]


@pytest.mark.parametrize("ordering", ["key", "stream"])
def test_it_is_refused_where_priorities_mean_nothing(conn: Conn, ordering: str) -> None:
    with pytest.raises(psycopg.Error, match="priorities, which have no meaning") as error:
        consumer(conn, ordering=ordering, p_settings='{"ageing": "1 s"}')
    assert error.value.sqlstate == "PQ003"
