"""The client for asyncio does what the client does, and keeps no loop waiting."""

from __future__ import annotations

import asyncio
import inspect
import time
from contextlib import aclosing, suppress
from datetime import timedelta

import pytest

import spark_pgqueue
from spark_pgqueue.client import AsyncClient, Client
from spark_pgqueue.postgres.errors import PgQueueError

SOON = timedelta(milliseconds=50)


def methods(kind):
    return {name: each for name, each in vars(kind).items() if not name.startswith("_")}


def test_both_clients_have_the_same_methods_with_the_same_arguments():
    names = {name for name in dir(Client) if not name.startswith("_")}
    assert set(methods(AsyncClient)) == names
    for name in names:
        ours, theirs = getattr(AsyncClient, name), getattr(Client, name)
        assert inspect.signature(ours).parameters == inspect.signature(theirs).parameters, name
        assert ours.__doc__, name
        returned = str(inspect.signature(theirs).return_annotation)
        if name != "transaction":
            assert inspect.iscoroutinefunction(ours) != returned.startswith("Iterator["), name


def run(url, work):
    async def connected():
        async with await spark_pgqueue.connect_async(url) as queue:
            await queue.create_stream("s")
            await queue.create_consumer("s", "c", start="earliest")
            return await work(queue)

    return asyncio.run(connected())


def test_messages_go_and_come(url):
    async def work(queue):
        sent = [await queue.send("s", "a"), *await queue.send_batch("s", ["b", "c"])]
        claim = await queue.receive("s", "c", 2)
        assert [m.seq for m in claim.messages] == sent[:2]
        assert await claim.ack(claim.messages[:1]) == 1
        assert await claim.extend() == 1
        claim = await queue.receive("s", "c", 2, ack=claim)
        assert await claim.nack(reason="no") == 1
        got = [m.data async for m in queue.consume("s", "c")]
        assert got == ["c"]
        assert [batch.messages[0].seq async for batch in queue.read("s", max_messages=1)] == sent
        assert [each.name for each in await queue.consumers("s")] == ["c"]

    run(url, work)


def test_a_transaction_takes_effect_at_its_end_or_not_at_all(url):
    async def work(queue):
        async with await spark_pgqueue.connect_async(url) as other:
            with suppress(ZeroDivisionError):
                async with queue.transaction():
                    await queue.send("s", "a")
                    print(1 / 0)
            async with queue.transaction():
                await queue.send("s", "b")
                assert await other.receive("s", "c") is None
            claim = await other.receive("s", "c")
            assert claim is not None
            assert [m.data for m in claim.messages] == ["b"]

    run(url, work)


def test_the_loop_goes_on_while_it_waits(url):
    async def work(queue):
        async with await spark_pgqueue.connect_async(url) as other:
            waiting = asyncio.create_task(queue.receive("s", "c", wait=timedelta(seconds=20)))
            await asyncio.sleep(0.1)
            await other.send("s", "x")
            claim = await asyncio.wait_for(waiting, 10)
            assert claim.messages[0].data == "x"

    run(url, work)


def test_a_wait_that_is_cancelled_ends_at_once_and_takes_nothing_with_it(url):
    async def work(queue):
        async with await spark_pgqueue.connect_async(url) as other:
            for _ in range(3):
                began = time.monotonic()
                waiting = asyncio.create_task(queue.receive("s", "c", wait=timedelta(minutes=1)))
                await asyncio.sleep(0.1)
                waiting.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await waiting
                assert (await queue.stats("s"))[0].claims == 0
                assert time.monotonic() - began < 20
            seq = await queue.send("s", "x")
            waiting = asyncio.create_task(queue.wait_for("s", "c", seq, timedelta(minutes=1)))
            await asyncio.sleep(0.1)
            waiting.cancel()
            async with asyncio.timeout(20):
                await (await queue.receive("s", "c")).ack()
            # A message that comes at that very moment
            for delay in (0.0, 0.001, 0.003, 0.01):
                waiting = asyncio.create_task(queue.receive("s", "c", wait=timedelta(minutes=1)))
                await asyncio.sleep(0.05)
                await other.send("s", "x")
                await asyncio.sleep(delay)
                waiting.cancel()
                try:
                    await (await waiting).ack()
                except asyncio.CancelledError:
                    async with asyncio.timeout(10):
                        while (claim := await other.receive("s", "c", wait=SOON)) is None:
                            pass
                    await claim.ack()
            assert (await queue.stats("s"))[0].backlog == 0

    run(url, work)


def test_who_leaves_an_iteration_gives_back_what_is_left(url):
    async def work(queue):
        await queue.send_batch("s", ["x"] * 5)
        async with aclosing(queue.consume("s", "c")) as messages:
            async for message in messages:
                if message.seq == 3:
                    break
        stats = (await queue.stats("s"))[0]
        assert (stats.ready, stats.claimed) == (3, 0)

    run(url, work)


def test_errors_are_those_of_the_client(url):
    async def work(queue):
        with pytest.raises(PgQueueError, match="PQ001"):
            await queue.send("t", "x")
        with pytest.raises(PgQueueError, match="PQ002"):
            _ = [m async for m in queue.consume("s", "nobody")]
        await queue.close()
        await queue.close()

    run(url, work)
    with pytest.raises(PgQueueError, match="no connection"):
        asyncio.run(spark_pgqueue.connect_async("postgresql://127.0.0.1:1/x", patience=0))


def test_a_group_works_beside_the_loop(url):
    async def work(queue):
        await queue.create_group("s", "g", partitions=2, start="earliest")
        await queue.send_batch("s", ["x"] * 5)
        group = await queue.group("s", "g")
        assert await group.run(lambda messages, connection: None, wait=SOON) == 5

    run(url, work)
