"""What was claimed, and nobody has seen, is given back as a worker does it: not delivered."""

import asyncio
import gc
import sys
from contextlib import aclosing
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest

import spark_pgqueue
from spark_pgqueue.client import AsyncClient
from tests.processes import wait_until
from tests.sql.queue import wait_for_a_lock

PACKAGE = Path(spark_pgqueue.__file__).parent
TRACED = {*map(str, PACKAGE.glob("client/**/*.py")), str(PACKAGE / "postgres/statements.py")}
SENT = 6
AT = 2
"""The message at which a loop is left, from 0."""


pytestmark = pytest.mark.usefixtures("allowed_afterwards")
CONSUMER = None


@pytest.fixture(params=["key", pytest.param("none", marks=pytest.mark.longer)])
def queue(queue, request):
    """Its consumer's messages die when they fail once."""
    queue.create_consumer("s", "c", ordering=request.param, settings={"max_deliver_count": 1})
    queue.send_batch("s", ["x"] * SENT, keys=["a", "b"] * (SENT // 2))
    return queue


def all_are_there(queue, first=0):
    """All messages from one on are ready: for the first time, and in order."""
    (stats,) = queue.stats("s")
    assert (stats.claimed, stats.claims, stats.delayed) == (0, 0, 0)
    got = []
    while (claim := queue.receive("s", "c", 10)) is not None:
        got += [(m.seq, m.deliver_count) for m in claim.messages]
        claim.ack()
    expected = [(seq, 1) for seq in range(first + 1, SENT + 1)]
    assert sorted(got) == expected
    for key in (0, 1):
        mine = [each for each in got if each[0] % 2 == key]
        assert mine == sorted(mine)


# The loop of consume


def leave_by_break(client):
    for n, _ in enumerate(client.consume("s", "c")):
        if n == AT:
            break


def leave_by_interrupt(client):
    messages = client.consume("s", "c")
    for _ in range(AT + 1):
        next(messages)
    with pytest.raises(KeyboardInterrupt):
        messages.throw(KeyboardInterrupt())


def forget(client):
    messages = client.consume("s", "c")
    cycle: list[Any] = [messages]
    cycle.append(cycle)
    for _ in range(AT + 1):
        next(messages)
    del messages, cycle
    gc.collect()


def close_the_client(client):
    messages = client.consume("s", "c")
    for _ in range(AT + 1):
        next(messages)
    client.close()
    assert list(messages) == []


LEAVING = [leave_by_break, leave_by_interrupt, forget, close_the_client]


@pytest.mark.parametrize("leave", LEAVING)
def test_who_leaves_a_loop_has_seen_only_what_came_out_of_it(queue, url, leave):
    with spark_pgqueue.connect(url) as client:
        leave(client)
        assert queue.stats("s")[0].dead == 1, "the message at hand has failed, as by nack"
        assert queue.outcome("s", "c", AT + 1).state == "dead"
        assert queue.outcome("s", "c", AT).state == "done"
        all_are_there(queue, AT + 1)


async def leave_async_by_break(client):
    n = 0
    async for _ in client.consume("s", "c"):
        if n == AT:
            break
        n += 1
    gc.collect()
    await asyncio.sleep(0)


async def leave_async_by_aclose(client):
    async with aclosing(client.consume("s", "c")) as messages:
        for _ in range(AT + 1):
            await anext(messages)


async def cancel_the_body(client):
    arrived = asyncio.Event()

    async def work():
        n = 0
        async with aclosing(client.consume("s", "c")) as messages:
            async for _ in messages:
                if n == AT:
                    arrived.set()
                    await asyncio.sleep(60)
                n += 1

    task = asyncio.create_task(work())
    await arrived.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def close_the_async_client(client):
    messages = client.consume("s", "c")
    for _ in range(AT + 1):
        await anext(messages)
    await client.close()
    await messages.aclose()


ASYNC_LEAVING = [
    *(leave_async_by_break, leave_async_by_aclose, cancel_the_body, close_the_async_client)
]


@pytest.mark.parametrize("leave", ASYNC_LEAVING)
@pytest.mark.parametrize("whose", ["own", "caller's"])
def test_who_leaves_an_async_loop_has_seen_only_what_came_out_of_it(queue, url, leave, whose):
    async def work():
        if whose == "own":
            async with await spark_pgqueue.connect_async(url) as client:
                await leave(client)
        elif leave is not close_the_async_client:
            async with await psycopg.AsyncConnection.connect(url, autocommit=True) as conn:
                await leave(AsyncClient(conn))
                # The loop ends an iteration that was forgotten, a moment later.
                while (await AsyncClient(conn).stats("s"))[0].claims:
                    await asyncio.sleep(0.01)

    asyncio.run(work())
    if whose == "own" or leave is not close_the_async_client:
        assert queue.outcome("s", "c", AT + 1).state == "dead"
        all_are_there(queue, AT + 1)


@pytest.mark.parametrize("own", [True, False], ids=["own", "caller's"])
def test_a_message_that_a_cancelled_loop_did_not_get_was_not_delivered(queue, url, conn, own):
    """The claim waits for a lock, while its task is cancelled."""

    async def work(client):
        async def loop():
            async for _ in client.consume("s", "c"):
                raise AssertionError("it was cancelled before")

        with conn.transaction():
            conn.execute("lock table pgqueue.consumer_messages in access exclusive mode")
            task = asyncio.create_task(loop())
            await asyncio.to_thread(wait_for_a_lock, conn)
            task.cancel()
            if own:  # a statement over the caller's connection is cancelled with its task
                await asyncio.sleep(0)
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(with_client(url, own, work))
    all_are_there(queue)


@pytest.mark.parametrize("own", [True, False], ids=["own", "caller's"])
def test_who_asked_for_the_next_message_is_done_with_the_last(queue, url, conn, own):
    """Also if the question is cancelled before it is heard, because another call is under way."""

    async def work(client):
        messages = client.consume("s", "c")
        await anext(messages)
        with conn.transaction():
            conn.execute("lock table pgqueue.streams in access exclusive mode")
            other = asyncio.create_task(client.stats("s"))
            await asyncio.to_thread(wait_for_a_lock, conn)
            asking = asyncio.create_task(anext(messages))
            await asyncio.sleep(0)
            asking.cancel()
            await asyncio.sleep(0)
        with pytest.raises(asyncio.CancelledError):
            await asking
        await other

    asyncio.run(with_client(url, own, work))
    assert queue.outcome("s", "c", 1).state == "done"
    all_are_there(queue, 1)


@pytest.mark.parametrize("own", [True, False], ids=["own", "caller's"])
def test_what_a_loop_has_done_stays_done_when_the_claim_of_the_next_is_cancelled(
    queue, url, conn, own
):
    """The statement that claims acknowledges the last message; it fails, or is undone."""

    async def work(client):
        async with aclosing(client.consume("s", "c", prefetch=1)) as messages:
            await anext(messages)
            with conn.transaction():
                conn.execute("lock table pgqueue.consumer_messages in access exclusive mode")
                asking = asyncio.create_task(anext(messages))
                await asyncio.to_thread(wait_for_a_lock, conn)
                asking.cancel()
                if not own:  # the statement is cancelled, and another one settles the claim
                    await asyncio.to_thread(wait_until, lambda: not claims(url))
            with pytest.raises(asyncio.CancelledError):
                await asking

    asyncio.run(with_client(url, own, work))
    assert queue.outcome("s", "c", 1).state == "done"
    all_are_there(queue, 1)


def claims(url):
    """Whether a client waits in a call of receive. (A transaction sees only one snapshot of it.)"""
    sql = (
        "select exists (select from pg_stat_activity"
        " where wait_event_type = 'Lock' and query like '%receive(%')"
    )
    with psycopg.connect(url) as looker:
        return looker.execute(sql).fetchone() == (True,)


async def with_client(url, own, work):
    if own:
        async with await spark_pgqueue.connect_async(url) as client:
            await work(client)
    else:
        async with await psycopg.AsyncConnection.connect(url, autocommit=True) as conn:
            await work(AsyncClient(conn))


# A claim whose caller is not there any more


@pytest.mark.parametrize("own", [True, False], ids=["own", "caller's"])
def test_a_receive_that_is_cancelled_at_any_moment_has_delivered_nothing(queue, url, own):
    """Cancelled after each number of steps of the loop, until it is over before that."""

    async def work(client):
        await client.stats("s")  # connected
        for steps in range(10_000):
            task = asyncio.create_task(client.receive("s", "c", 10))
            for _ in range(steps):
                await asyncio.sleep(0)
            if task.done():
                assert await (await task).defer() == min(SENT, len((await task).messages))
                return
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            while (stats := (await client.stats("s"))[0]).claims:
                await asyncio.sleep(0)
            assert (stats.dead, stats.delayed) == (0, 0), steps

    asyncio.run(with_client(url, own, work))
    all_are_there(queue)


@pytest.mark.parametrize("wait", [None, timedelta(seconds=30)], ids=["at once", "waiting"])
def test_a_receive_that_is_interrupted_at_any_line_has_delivered_nothing(queue, url, wait):
    with spark_pgqueue.connect(url) as client:
        received(client, wait).defer()  # connected
        line = 0
        while True:
            line += 1 if wait is None else 2
            try:
                claim = interrupted(line, lambda: received(client, wait))
            except KeyboardInterrupt:
                assert queue.stats("s")[0].claims == 0, line
            else:
                claim.defer()
                break
        assert line > 30
        all_are_there(queue)


@pytest.mark.longer
def test_a_loop_that_is_interrupted_anywhere_has_delivered_only_what_it_gave(queue, url):
    with spark_pgqueue.connect(url) as client:
        received(client, None).defer()  # connected
        line = 0
        while True:
            line += 7
            seen: list[int] = []
            try:
                interrupted(line, lambda: see_five(client, seen))  # noqa: B023
            except KeyboardInterrupt:
                assert queue.stats("s")[0].claimed == 0, (line, seen)
            else:
                break
            for seq in range(1, SENT + 1):
                state = queue.outcome("s", "c", seq).state
                # The line of `yield` itself is no place where Python looks for a signal.
                if seq > max(seen, default=0) + 1:
                    assert state not in ("done", "dead"), (line, seq, seen)
                elif seq in seen:
                    assert state in ("done", "dead"), (line, seq, seen)
            queue.drop_consumer("s", "c")
            queue.create_consumer("s", "c", start="earliest", settings={"max_deliver_count": 1})
        assert line > 100


def see_five(client, seen):
    """Returns the iteration: when it is left, nobody interrupts that."""
    messages = client.consume("s", "c", prefetch=2)
    for _ in range(5):
        seen.append(next(messages).seq)
    return messages


def received(client, wait):
    claim = client.receive("s", "c", 10, wait=wait)
    assert claim is not None
    return claim


def interrupted(line, call):
    """Call, and raise KeyboardInterrupt at the n-th line of the client."""
    left = line

    def trace(frame, event, _):
        nonlocal left
        if frame.f_code.co_filename not in TRACED:
            return None
        if event == "line":
            left -= 1
            if left == 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        return call()
    finally:
        sys.settrace(before)


def test_a_wait_whose_claim_cannot_be_handed_over_gives_it_back(queue, url, conn):
    """A message comes, and the task that waits for it is cancelled at that moment."""

    async def work(client):
        while (claim := await client.receive("s", "c", 10)) is not None:
            await claim.ack()
        waiting = asyncio.create_task(client.receive("s", "c", wait=timedelta(minutes=1)))
        await asyncio.to_thread(wait_until, lambda: waits(conn))
        with conn.transaction():
            conn.execute("lock table pgqueue.consumer_messages in share mode")
            conn.execute("select pgqueue.send('s', 'late')")
            waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        while (await client.stats("s"))[0].claims:
            await asyncio.sleep(0)

    asyncio.run(with_client(url, True, work))
    claim = queue.receive("s", "c")
    assert [m.deliver_count for m in claim.messages] == [1]
    claim.ack()


def waits(conn):
    """Whether a client has the lock by which producers know that somebody waits."""
    sql = (
        "select count(*) from pg_locks where locktype = 'advisory'"
        " and database = (select oid from pg_database where datname = current_database())"
    )
    return conn.execute(sql).fetchone()[0]
