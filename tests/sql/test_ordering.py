"""ordering=key and stream where messages of a key stand aside: retries, delays, several claims."""

from __future__ import annotations

import uuid

import psycopg
import pytest

from tests.sql import checker, clock
from tests.sql.queue import acked, call, claim_of, seqs_of, value


@pytest.fixture
def consumer(conn: psycopg.Connection) -> int:
    """A consumer c with ordering=key of a stream s."""
    value(conn, "create_stream", "s")
    return value(conn, "create_consumer", "s", "c", "earliest", "key", None, "1 minute")


def send(conn: psycopg.Connection, *keys: str | None) -> list[int]:
    return [row[0] for row in call(conn, "send_batch", "s", ["x"] * len(keys), list(keys))]


@pytest.mark.parametrize("delay", ["0", "1 hour"])
def test_a_key_has_one_head(conn: psycopg.Connection, consumer: int, delay: str) -> None:
    """A failed message comes back in front of a delayed one of its key, whose delay then ends."""
    first = value(conn, "send", "s", "x", p_key="k")
    later = "select clock_timestamp() + interval '1 hour'"
    deliver_at = conn.execute(later).fetchone()
    assert deliver_at is not None
    second = value(conn, "send", "s", "x", p_key="k", p_deliver_at=deliver_at[0])
    rows = call(conn, "receive", "s", "c", 10)
    assert seqs_of(rows) == [first]
    value(conn, "nack", claim_of(rows), None, delay)
    clock.end_delay(conn, second)
    conn.execute("set statement_timeout = '10 s'")
    rows = call(conn, "receive", "s", "c", 1)
    assert seqs_of(rows) == ([first] if delay == "0" else [])
    assert call(conn, "receive", "s", "c", 10) == []
    checker.check(conn)
    if rows:
        value(conn, "ack", claim_of(rows))
    else:
        clock.end_delay(conn, first)
        assert acked(conn, "s", "c", 1) == [first, second]


@pytest.mark.parametrize("claims_before", [0, 1])
def test_a_failed_message_takes_back_what_came_from_the_line(
    conn: psycopg.Connection, consumer: int, claims_before: int
) -> None:
    """Of a key that stood aside, a claim has that run and, from the line, later messages."""
    # Claims serve the keys aside first and the line first in turn.
    for _ in range(claims_before):
        send(conn, "before")
        value(conn, "ack", claim_of(call(conn, "receive", "s", "c", 1)))
    (first,) = send(conn, "k")
    claim = claim_of(call(conn, "receive", "s", "c", 1))
    value(conn, "nack", claim, [first])
    later = send(conn, "k", "other", "k")
    for _ in range(2):
        rows = call(conn, "receive", "s", "c", 10)
        assert sorted(seqs_of(rows)) == sorted([first, *later])
        assert value(conn, "nack", claim_of(rows), [first]) == 3
        checker.check(conn)
        other = claim_of(rows)
        rows = call(conn, "receive", "s", "c", 10)
        assert seqs_of(rows) == [first, later[0], later[2]]
        assert value(conn, "ack", other) == 1
        assert value(conn, "nack", claim_of(rows), [first]) == 3
        later[1] = send(conn, "other")[0]


def test_neither_the_line_nor_the_keys_aside_starve(
    conn: psycopg.Connection, consumer: int
) -> None:
    sent = send(conn, *(f"k{i}" for i in range(100)))
    rows = call(conn, "receive", "s", "c", 10)
    value(conn, "nack", claim_of(rows), sent[:10])
    got = []
    for _ in range(30):
        rows = call(conn, "receive", "s", "c", 1)
        got += seqs_of(rows)
        value(conn, "ack", claim_of(rows))
    assert 8 <= len(set(got) & set(sent[:10])) <= 22, got


def test_when_the_oldest_of_several_claims_ends_the_others_keep_their_keys(
    conn: psycopg.Connection, consumer: int
) -> None:
    send(conn, "a", "b", "c")
    oldest, *_ = [claim_of(call(conn, "receive", "s", "c", 1)) for _ in range(3)]
    value(conn, "ack", oldest)
    free = send(conn, "a", "b", "c", "d")[0::3]
    assert seqs_of(call(conn, "receive", "s", "c", 10)) == free
    checker.check(conn, {consumer: {1}})


@pytest.mark.parametrize("size", [None, 1000])
def test_a_reader_beside_other_claims_gets_all_that_is_free(
    conn: psycopg.Connection, consumer: int, size: int | None
) -> None:
    send(conn, "a", "b", "a", None)
    assert seqs_of(call(conn, "receive", "s", "c", 1)) == [1]
    (row,) = call(conn, "reader_claim", uuid.uuid4(), consumer, 0, 0, size)
    assert row.claimed == 2
    checker.check(conn, {consumer: set()})


def test_runs_of_many_ranges_are_counted_exactly(conn: psycopg.Connection, consumer: int) -> None:
    """Keys that alternate make sets of hundreds of ranges; runs keep to 64."""
    sent = send(conn, *(f"k{i % 2}" for i in range(1000)))
    first = claim_of(call(conn, "receive", "s", "c", 600))
    assert call(conn, "receive", "s", "c", 1000) == []
    checker.check(conn, {consumer: set()})
    value(conn, "nack", first, sent[1:600:7])
    checker.check(conn, {consumer: set()})
    value(conn, "ack", first)
    got = acked(conn, "s", "c", 10)
    checker.check(conn, {consumer: set(sent)})
    for k in (0, 1):
        mine = [s for s in got if s % 2 == k]
        assert mine == sorted(mine)
