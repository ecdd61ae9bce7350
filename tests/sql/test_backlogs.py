"""How much a consumer has before it: counted where it decides something, else told as an estimate.

All limits are small here, so that a few dozen messages are "very many".
"""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

from tests.sql import internals, limits
from tests.sql.internals import rows
from tests.sql.queue import *

MANY = 60

pytestmark = pytest.mark.usefixtures("small_limits", "stream", "allowed_afterwards")


@pytest.fixture
def small_limits(conn: Conn) -> None:
    assert limits.shrink(conn)


def rolled_back(conn: Conn) -> None:
    """A producer is rolled back after it was given very many numbers."""
    with conn.transaction(force_rollback=True):
        value(conn, "reserve", 1, 10_000)


def closed_segment(conn: Conn) -> None:
    """Retention closes a segment: its other numbers, a thousand million, are passed over."""
    before = one(conn, "select last_seq from pgqueue.stream_stats")
    value(conn, "set_retention", "s", p_messages=8)
    maintain(conn)
    value(conn, "set_retention", "s")
    assert one(conn, "select last_seq from pgqueue.stream_stats") > before + 1_000_000


NUMBERS_THAT_NOBODY_HAS = [rolled_back, closed_segment]


def test_the_oldest_are_dropped_and_no_more_than_are_too_many(conn: Conn) -> None:
    consumer(conn, max_backlog=20, on_full="drop_oldest")
    internals.publish_singly(conn, 1, MANY, "i::text")
    got = acked(conn, "s", "c")
    assert 0 < stats(conn).dead <= MANY - 20
    assert len(got) == MANY - stats(conn).dead
    assert got[-20:] == list(range(MANY - 19, MANY + 1))


@pytest.mark.parametrize("pass_over", NUMBERS_THAT_NOBODY_HAS)
def test_nothing_is_refused_because_of_an_estimate(conn: Conn, pass_over: Any) -> None:
    consumer(conn, max_backlog=MANY + 3, on_full="reject")
    internals.publish_singly(conn, 1, MANY, "i::text")
    pass_over(conn)
    sent = [send(conn) for _ in range(3)]
    with pytest.raises(psycopg.Error, match=f"has a backlog of {MANY + 3}"):
        send(conn)
    assert acked(conn, "s", "c")[-3:] == sent


@pytest.mark.parametrize("pass_over", NUMBERS_THAT_NOBODY_HAS)
def test_nothing_is_decided_by_an_estimate(conn: Conn, pass_over: Any) -> None:
    """Nothing is dropped, nobody is judged, and a move says exactly how many messages it skips."""
    id_ = consumer(conn, max_backlog=1000)
    consumer(conn, "drops", max_backlog=1000, on_full="drop_oldest")
    internals.publish_singly(conn, 1, MANY, "i::text")
    pass_over(conn)
    send(conn)
    assert len(acked(conn, "s", "drops")) == MANY + 1
    assert stats(conn, "drops").dead == 0
    health = "select status, because from pgqueue.consumer_health where consumer = 'c'"
    assert rows(conn, health)[0].status == "unattended"
    assert value(conn, "consumer_backlog", id_) == MANY + 1
    assert value(conn, "consumer_available", id_) == MANY + 1
    assert MANY + 1 > value(conn, "consumer_available", id_, 30) >= 30, "it need not count all"
    alter(conn, max_backlog=MANY + 1)
    assert rows(conn, health)[0].status == "full"
    alter(conn, max_backlog=None)
    assert value(conn, "seek", "s", "c", "latest") == MANY + 1
    assert value(conn, "replay", "s", "c", "earliest") == MANY + 1
    assert len(acked(conn, "s", "c")) == MANY + 1


def test_a_figure_that_is_an_estimate_says_so(conn: Conn) -> None:
    id_ = consumer(conn)
    value(conn, "create_group", "s", "g", 2, "earliest")
    send(conn)
    assert (stats(conn).new, stats(conn).backlog, stats(conn).estimated) == (1, 1, False)
    internals.publish_singly(conn, 1, MANY, "i::text")
    assert (stats(conn).new, stats(conn).backlog, stats(conn).estimated) == (61, 61, True)
    (lag,) = rows(conn, "select * from pgqueue.consumer_lag(%s)", id_)
    assert (lag.backlog, lag.estimated) == (61, True)
    for row in rows(conn, "select behind, estimated from pgqueue.group_stats"):
        assert (row.behind, row.estimated) == (61, True)
    for row in rows(conn, "select backlog, estimated, because from pgqueue.consumer_health"):
        assert (row.backlog, row.estimated) == (61, True)
        assert "~61 " in row.because


def test_numbers_that_were_passed_over_are_in_no_estimate(conn: Conn) -> None:
    """The segment that was closed is full of them; and so is one that is gone."""
    consumer(conn)
    internals.publish_singly(conn, 1, MANY, "i::text")
    closed_segment(conn)
    internals.publish_singly(conn, 1, MANY, "i::text")
    assert stats(conn).estimated
    assert stats(conn).new == 2 * MANY
    closed_segment(conn)
    internals.publish_singly(conn, 1, MANY, "i::text")
    assert stats(conn).new == 3 * MANY


def test_an_estimate_does_not_go_by_what_was_published_last(conn: Conn) -> None:
    """A producer that was given its numbers first may publish them last."""
    consumer(conn)
    block = stage(conn, 1, 1)
    internals.publish_singly(conn, 1, MANY, "i::text")
    publish(conn, 1, [block], 1)
    assert stats(conn).estimated
    assert MANY <= stats(conn).new <= MANY + 1
