"""Sending once: of the messages with one dedup key, the first of a window is published."""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from random import Random
from typing import Any

import psycopg
import pytest

from spark_pgqueue.postgres import connection
from tests.sql import clock, internals, limits
from tests.sql.cost import GROWTH, cost
from tests.sql.queue import *

pytestmark = pytest.mark.usefixtures("once", "allowed_afterwards")


@pytest.fixture
def once(conn: Conn, stream: int) -> None:
    """The stream s remembers dedup keys for a day, and has a consumer c."""
    call(conn, "alter_stream", "s", '{"dedup_window": "1 day"}')
    consumer(conn)


def data(conn: Conn) -> list[str]:
    """The payloads that the consumer has before it, in order."""
    return [row.data for row in receive(conn, 10_000)]


@pytest.mark.all_versions
@pytest.mark.promise("feature: idempotent, unique", "moving: SQS: a duplicate is published once")
def test_a_duplicate_is_not_published_and_answers_the_first_number(conn: Conn) -> None:
    first = send(conn, "a", p_dedup_key="k")
    assert send(conn, "b", p_dedup_key="k") == first
    other, without = send(conn, "c", p_dedup_key="l"), send(conn, "d")
    assert send_all(conn, ["e", "f", "g"], p_dedup_keys=["k", None, "l"])[::2] == [first, other]
    assert len({first, other, without}) == 3
    assert data(conn) == ["a", "c", "d", "f"]
    assert internals.count(conn, "publications") == 4


@pytest.mark.all_versions
def test_of_two_messages_of_one_batch_the_first_is_published(conn: Conn) -> None:
    keys = ["b", "a", None, "b", "a", None, "c"]
    seqs = send_all(conn, list("1234567"), p_dedup_keys=keys)
    assert (seqs[3], seqs[4]) == (seqs[0], seqs[1])
    assert data(conn) == list("12367")
    assert send_all(conn, ["x"] * 7, p_dedup_keys=keys)[::3] == [seqs[0], seqs[0], seqs[6]]
    assert data(conn) == ["x", "x"], "those without a key"
    assert send_all(conn, ["x"], p_dedup_keys=["c"]) == [seqs[6]]
    assert internals.count(conn, "publications") == 2, "none for a batch of duplicates"
    assert internals.count(conn, "messages") == 7, "nothing of a duplicate is left"


def test_a_key_whose_window_passed_is_taken_over_and_forgotten_by_maintain(conn: Conn) -> None:
    first = send_all(conn, ["a", "b", "m"], p_dedup_keys=["k", "l", "m"])
    clock.pass_time(conn, timedelta(hours=23))
    assert send(conn, "c", p_dedup_key="k") == first[0]
    clock.pass_time(conn, timedelta(hours=2))
    again = send(conn, "d", p_dedup_key="k")
    (batch,) = send_all(conn, ["m2"], p_dedup_keys=["m"])
    assert again not in first
    assert batch not in first
    assert send_all(conn, ["e", "e"], p_dedup_keys=["k", "m"]) == [again, batch]
    assert dict(call(conn, "maintain"))["old dedup keys"] == 1
    assert send(conn, "f", p_dedup_key="l") not in first
    assert data(conn) == ["a", "b", "m", "d", "m2", "f"]
    call(conn, "alter_stream", "s", '{"dedup_window": "3 days"}')
    assert send(conn, "g", p_dedup_key="k") == again
    call(conn, "alter_stream", "s", '{"dedup_window": null}')
    assert dict(call(conn, "maintain"))["old dedup keys"] == 3
    with pytest.raises(psycopg.Error, match="has no dedup_window") as caught:
        send(conn, "h", p_dedup_key="k")
    assert """alter_stream('s', '{"dedup_window": "1 day"}')""" in str(
        caught.value.diag.message_hint
    )


def test_old_keys_are_forgotten_some_at_a_time_until_nothing_is_unfinished(conn: Conn) -> None:
    limits.set_constant(conn, "limit_deleted", 2)
    send_all(conn, ["x"] * 5, p_dedup_keys=list("abcde"))
    clock.pass_time(conn, timedelta(days=2))
    send(conn, p_dedup_key="f")
    first = dict(call(conn, "maintain"))
    assert (first["old dedup keys"], first["unfinished"]) == (2, 1)
    assert maintain(conn)["old dedup keys"] == 3
    assert internals.count(conn, "dedup_keys") == 1


@pytest.mark.parametrize("batch", [False, True], ids=["send", "send_batch"])
def test_who_sends_a_key_of_an_open_transaction_waits_for_its_end(
    conn: Conn, session: Session, batch: bool
) -> None:
    """The one case in which a producer waits for another; all other producers go on."""
    conn.execute("update pgqueue.streams set notify = false")  # or it could not be prepared

    def second(other: Conn, key: str) -> int:
        if batch:
            return send_all(other, ["x", "second"], p_dedup_keys=[f"a {key}", key])[1]
        return send(other, "second", p_dedup_key=key)

    for how in ("commit", "rollback", "terminate", "prepare"):
        open_, other = session(), session()
        open_.execute("begin")
        first = send(open_, "first", p_dedup_key=how)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(second, other, how)
            wait_for_a_lock(conn)
            send(conn, "y", p_dedup_key=f"l {how}")
            if how == "terminate":
                pid = open_.info.backend_pid
                conn.execute("select pg_terminate_backend(%s, 5000)", [pid])
                open_.close()
            elif how == "prepare":
                open_.execute("prepare transaction 'p'")
                assert not waiting.done()
                conn.execute("commit prepared 'p'")
            else:
                open_.execute(how.encode())
            answered = waiting.result(timeout=20)
        lives = how in ("commit", "prepare")
        assert (answered == first) is lives, how
        assert sorted(set(data(conn)) - {"x", "y"}) == ["first" if lives else "second"], how


def test_after_a_savepoint_is_rolled_back_its_keys_are_free(conn: Conn) -> None:
    with conn.transaction():
        with conn.transaction(force_rollback=True):
            send(conn, "never", p_dedup_key="k")
        send(conn, "a", p_dedup_key="k")
    assert data(conn) == ["a"]


def test_where_a_snapshot_cannot_know_the_first_it_says_so(conn: Conn, session: Session) -> None:
    old = session()
    old.execute("begin isolation level repeatable read")
    old.execute("select 1 from pgqueue.installed")
    send(conn, "a", p_dedup_key="k")
    with pytest.raises(psycopg.errors.SerializationFailure):
        send(old, "b", p_dedup_key="k")
    old.execute("rollback")
    assert data(conn) == ["a"]


def test_producers_that_race_publish_each_key_once_and_never_wait_in_a_circle(
    conn: Conn, url: str
) -> None:
    """Batches of any order, some with keys whose window passed, rolled back or left."""
    keys = [f"k{i}" for i in range(120)]
    send_all(conn, keys[:40], p_dedup_keys=keys[:40])
    clock.pass_time(conn, timedelta(days=2))
    acked(conn, "s", "c")

    def produce(number: int) -> list[tuple[str, int]]:
        """What was committed: key and the number that it was answered with."""
        chance, told = Random(number), []
        own = connection.connect(url)
        for _ in range(25):
            mine = chance.sample(keys, chance.choice([1, 10]))
            own.execute("begin")
            if len(mine) == 1:
                seqs = [send(own, mine[0], p_dedup_key=mine[0])]
            else:
                seqs = send_all(own, mine, p_dedup_keys=mine)
            fate = chance.random()
            if fate < 0.1:
                own.close()
                own = connection.connect(url)
            elif fate < 0.3:
                own.execute("rollback")
            else:
                own.execute("commit")
                told += zip(mine, seqs, strict=True)
        own.close()
        return told

    with ThreadPoolExecutor(4) as pool:
        told = [pair for pairs in pool.map(produce, range(4)) for pair in pairs]
    found = receive(conn, 10_000)
    assert max(Counter(row.data for row in found).values()) == 1
    assert {row.data for row in found} == {key for key, _ in told}
    by_key = {row.data: row.seq for row in found}
    assert all(by_key[key] == seq for key, seq in told)


def test_what_is_written_by_copy_is_published_once(conn: Conn, stream: int) -> None:
    first = send(conn, "a", p_dedup_key="k")
    with conn.transaction():
        seqs = internals.insert_messages(conn, stream, 4)
        block = f"{{[{seqs[0]},{seqs[-1] + 1})}}"
        (row,) = call(conn, "publish_written", "s", block, p_dedup_keys=["x", "k", None, "x"])
    assert row.published == 2
    assert row.first_seqs == [seqs[0], first, seqs[2], seqs[0]]
    assert len(data(conn)) == 3
    assert internals.count(conn, "messages") == 3
    assert internals.count(conn, "reservations") == 0


def test_a_batch_of_a_sink_leaves_out_what_was_sent(conn: Conn, stream: int) -> None:
    """By the driver's commit: the blocks of several tasks, of several parts."""
    send(conn, "a", p_dedup_key="k")

    def staged(keys: list[str | None] | None, n: int, batch: int, **options: Any) -> int:
        return stage(conn, stream, n, batch, p_dedup_keys=keys, **options)

    blocks = [
        staged(["x", "k", None], 3, 0),
        staged(["y", "x"], 2, 0, p_priority=5),
        staged(["k"], 1, 0, p_priority=7),
        staged(None, 2, 0),
    ]
    assert publish(conn, stream, blocks, 8) is True
    assert publish(conn, stream, blocks, 8) is False, "a repetition has as many rows"
    assert len(acked(conn, "s", "c")) == 1 + 5
    parts = internals.rows(conn, "select priority, message_count from pgqueue.publications")
    assert sorted(tuple(p) for p in parts) == [(0, 1), (0, 4), (5, 1)]
    assert publish(conn, stream, [staged(["x", "k"], 2, 1)], 2, 1) is True
    assert acked(conn, "s", "c") == []
    assert internals.count(conn, "messages") == 6


def test_a_task_cannot_stage_what_cannot_be_published(conn: Conn, stream: int) -> None:
    for keys in (["x"], ["x", ""], ["x", "y" * 1025], [["x", "y"]]):
        with raises("PQ003", r"dedup_key"), conn.transaction():
            stage(conn, stream, 2, p_dedup_keys=keys)


def test_a_key_costs_the_same_however_many_there_are(conn: Conn) -> None:
    def of_one(name: str) -> int:
        return min(
            cost(conn, "select pgqueue.send('s', 'x', p_dedup_key => %s)", f"{name}{i}")
            for i in range(5)
        )

    few = of_one("few")
    keys = [f"key {i}" for i in range(20_000)]
    send_all(conn, keys, p_dedup_keys=keys)
    assert of_one("many") <= few * GROWTH + 4
