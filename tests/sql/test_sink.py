"""The sink's side: messages that are staged by tasks, and published once as a batch."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import psycopg
import pytest

from spark_pgqueue.postgres import connection
from tests.sql import internals
from tests.sql.queue import (
    Conn,
    Session,
    acked,
    consumer,
    now,
    publish,
    receive,
    seconds,
    send,
    stage,
    state,
    states,
    value,
    wait_for_a_lock,
)

pytestmark = pytest.mark.usefixtures("stream", "allowed_afterwards")


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
    assert internals.count(conn, "publications") == 1


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
    conn: Conn, session: Session, stream: int, first_commits: bool
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
    conn: Conn, session: Session, stream: int
) -> None:
    """Its publication id is younger than its transaction id, so nobody closes the hole before."""
    consumer(conn)
    send(conn)  # the first number of a sequence would give a transaction id by itself
    acked(conn, "s", "c")
    blocks = [stage(conn, stream, 3)]
    blocker, committer = session(), session()
    with ThreadPoolExecutor(1) as pool:
        with blocker.transaction():
            internals.lock_sink_batches(blocker)
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
