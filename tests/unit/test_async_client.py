"""The client for asyncio does what the client does, and keeps no loop waiting."""

import asyncio
import gc
import inspect
import threading
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any, cast

import psycopg
import pytest
from psycopg.conninfo import make_conninfo
from psycopg.types.string import TextLoader

import spark_pgqueue
from spark_pgqueue.client import AsyncClient, Client
from spark_pgqueue.postgres.connection import connect
from spark_pgqueue.postgres.errors import PgQueueError
from tests.processes import wait_until
from tests.sql.queue import wait_for_a_lock

SOON = timedelta(milliseconds=50)
LONG = timedelta(minutes=2)


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


@pytest.mark.previous_version
def test_messages_go_and_come(url):
    async def work(queue):
        sent = [await queue.send("s", "a"), *await queue.send_batch("s", ["b", "c"])]
        claim = await queue.receive("s", "c", 2)
        assert [m.seq for m in claim.messages] == sent[:2]
        assert await claim.ack(claim.messages[:1]) == 1
        assert await claim.extend() == 1
        claim = await queue.receive("s", "c", 2, ack=claim)
        assert await claim.nack(delay=timedelta(0), reason="no") == 1
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


async def cancelled(task):
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def sees_only(queue, url, data):
    """What is sent now is published, and is all that is: no transaction was left open."""
    async with asyncio.timeout(60), await spark_pgqueue.connect_async(url) as other:
        await queue.send("s", data)
        claim = await other.receive("s", "c", 10)
        assert claim is not None
        assert [m.data for m in claim.messages] == [data]


def test_a_transaction_that_is_cancelled_at_its_end_leaves_nothing_open(url, conn):
    async def work(queue):
        async def sends():
            async with queue.transaction():
                await queue.send("s", "a")

        with conn.transaction():
            conn.execute("lock table pgqueue.messages_1 in share mode")
            sending = asyncio.create_task(sends())
            await asyncio.to_thread(wait_for_a_lock, conn)
            sending.cancel()  # in the body, so that it waits for the rollback, behind the send
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            await cancelled(sending)
        await sees_only(queue, url, "b")

    run(url, work)


def test_a_transaction_that_is_cancelled_at_its_begin_leaves_nothing_open(url):
    async def work(queue):
        async def nothing():
            async with queue.transaction():
                raise AssertionError("its caller was cancelled")

        with queue._client._statements.connection().lock:  # the begin waits for it
            beginning = asyncio.create_task(nothing())
            await asyncio.sleep(0.2)
            await cancelled(beginning)
        await sees_only(queue, url, "b")

    run(url, work)


def test_after_close_each_call_says_so(url):
    async def work(queue):
        await queue.send("s", "x")
        claim = await queue.receive("s", "c")
        await queue.close()
        for call in (claim.ack, queue.stats, lambda: queue.receive("s", "c", wait=SOON)):
            with pytest.raises(PgQueueError, match="the connection is closed"):
                await call()

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
                assert await queue.receive("s", "c", wait=SOON) is None  # in its place
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


def test_a_call_that_connects_while_the_client_is_closed_says_so(url):
    async def work(queue):
        waiting = asyncio.create_task(queue.receive("s", "c", wait=LONG))
        await asyncio.sleep(0)  # it begins
        await queue.close()
        with pytest.raises(PgQueueError, match="the connection is closed"):
            async with asyncio.timeout(60):
                await waiting

    run(url, work)


WAITS = {
    "receive": lambda queue: queue.receive("s", "c", wait=LONG),
    "consume": lambda queue: anext(queue.consume("s", "c", wait=LONG)),
    "read": lambda queue: anext(queue.read("s", wait=LONG)),
    "wait_for": lambda queue: queue.wait_for("t", "c", 1, LONG),
    "group": lambda queue: group_run(queue),
}


async def group_run(queue):
    return await (await queue.group("s", "g")).run(lambda messages, connection: None)


def test_the_calls_that_wait_are_known():
    waits = {
        name
        for name, method in inspect.getmembers(Client, inspect.isfunction)
        if {"wait", "timeout"} & set(inspect.signature(method).parameters)
    }
    assert waits | {"group"} == WAITS.keys()


@pytest.mark.parametrize("way", WAITS)
def test_calls_that_wait_keep_no_other_call_waiting(url, way):
    async def work(queue):
        await queue.create_group("s", "g", start="earliest")
        await queue.create_stream("t")
        await queue.create_consumer("t", "c", start="earliest")
        await queue.send("t", "x")
        tasks = [asyncio.create_task(WAITS[way](queue)) for _ in range(5)]
        await asyncio.sleep(0.5)  # all wait
        async with asyncio.timeout(30):
            claim = await queue.receive("t", "c")
            await claim.extend()
            assert not any(task.done() for task in tasks)
            await claim.ack()
            await queue.close()  # ends the waits, and does not wait for their time
            await asyncio.gather(*tasks, return_exceptions=True)

    run(url, work)


def test_waits_take_turns_on_as_many_connections_as_are_allowed(url, conn):
    async def work(queue):
        async with await spark_pgqueue.connect_async(
            make_conninfo(url, application_name="few"), connections=3
        ) as few:
            tasks = [asyncio.create_task(few.receive("s", "c", wait=LONG)) for _ in range(5)]
            for number in range(5):
                await queue.send("s", str(number))
            async with asyncio.timeout(60):
                claims = [claim for claim in await asyncio.gather(*tasks) if claim is not None]
            assert len({claim.messages[0].data for claim in claims}) == 5
            assert [await claim.ack() for claim in claims] == [1] * 5
            names = "select count(*) from pg_stat_activity where application_name = 'few'"
            assert conn.execute(names).fetchone() == (3,)

    run(url, work)
    with pytest.raises(PgQueueError, match="connections"):
        asyncio.run(spark_pgqueue.connect_async(url, connections=1))


@pytest.mark.parametrize("is_locked", [False, True], ids=["waits", "blocked"])
def test_waits_that_are_cancelled_keep_to_the_connections_that_are_allowed(url, conn, is_locked):
    """A call may last longer than its task, which does not wait for it."""

    async def times_out(few):
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(few.receive("s", "c", wait=LONG), 0.2)
        assert time.monotonic() - began < 5

    async def work(queue):
        async with await spark_pgqueue.connect_async(
            make_conninfo(url, application_name="few"), connections=2
        ) as few:
            with conn.transaction():
                if is_locked:
                    conn.execute("lock table pgqueue.consumer_cursors in access exclusive mode")
                for _ in range(8):
                    await times_out(few)
            names = "select count(*) from pg_stat_activity where application_name = 'few'"
            assert conn.execute(names).fetchone() == (2,)
            await queue.send("s", "x")
            async with asyncio.timeout(60):
                claim = await few.receive("s", "c", wait=LONG)
            assert claim is not None
            assert await claim.ack() == 1
            closing = [asyncio.create_task(few.receive("s", "c", wait=LONG)) for _ in range(3)]
            await asyncio.sleep(0.1)
        async with asyncio.timeout(60):
            ends = await asyncio.gather(*closing, return_exceptions=True)
        assert all(end is None or "the connection is closed" in str(end) for end in ends)

    run(url, work)


async def callers(url):
    """A connection as an application has it, with transactions of its own."""
    return await psycopg.AsyncConnection.connect(url)


def on_the_callers_connection(url, work):
    async def connected():
        async with await spark_pgqueue.connect_async(url) as queue, await callers(url) as conn:
            await queue.create_stream("s")
            await queue.create_consumer("s", "c", start="earliest")
            await work(AsyncClient(conn), conn, queue)

    asyncio.run(connected())


async def got(queue):
    claim = await queue.receive("s", "c", 10)
    return [] if claim is None else [m.data for m in claim.messages]


def test_a_call_that_waits_does_not_wait_for_the_handler_of_a_cancelled_task(url):
    begun, release = threading.Event(), threading.Event()

    def handle(messages, connection):
        begun.set()
        release.wait(20)

    async def work(queue):
        await queue.create_group("s", "g", start="earliest")
        await queue.send("s", "x")
        task = asyncio.create_task((await queue.group("s", "g")).run(handle))
        while not begun.is_set():
            await asyncio.sleep(0.01)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        began = time.monotonic()
        assert await queue.receive("s", "c", wait=LONG) is not None
        assert time.monotonic() - began < 10
        release.set()

    run(url, work)


@pytest.mark.previous_version
def test_calls_on_the_callers_connection_are_part_of_its_transaction(url):
    async def work(client, conn, queue):
        await conn.execute("create table bills (total int)")
        await client.send("s", "a")
        await client.send_batch("s", ["b" * (3 << 20)])  # by COPY, on a connection of one's own
        assert await got(queue) == []
        await conn.rollback()
        assert await got(queue) == []
        with suppress(ZeroDivisionError):
            async with client.transaction():
                await client.send("s", "c")
                print(1 / 0)
        async with client.transaction():
            await client.send("s", "d", headers={"a": 1})
        await client.close()
        await conn.commit()
        assert not conn.closed
        claim = await client.receive("s", "c")
        assert (claim.messages[0].data, claim.messages[0].headers) == ("d", {"a": 1})
        assert await claim.ack() == 1
        await conn.commit()
        assert await got(queue) == []

    on_the_callers_connection(url, work)


def test_loaders_of_the_callers_connection_change_nothing(url):
    async def work(client, conn, queue):
        for kind in ("int4", "jsonb", "timestamptz"):
            conn.adapters.register_loader(kind, TextLoader)
        await queue.send("s", "a")
        assert await client.streams() == await queue.streams()
        batches = [batch async for batch in client.read("s")]
        assert batches == [batch async for batch in queue.read("s")]
        assert len(batches) == 1

    on_the_callers_connection(url, work)


def test_tasks_share_the_callers_connection_and_one_that_is_cancelled_sends_nothing_later(url):
    async def work(client, conn, queue):
        async with await callers(url) as other:
            await other.execute("lock table pgqueue.messages_1 in share mode")
            sending = asyncio.create_task(client.send("s", "a"))
            with connect(url) as looker:
                await asyncio.to_thread(wait_for_a_lock, looker)
            sending.cancel()
            sending.cancel()
            await cancelled(sending)
        await conn.rollback()
        sent = await asyncio.gather(*(client.send("s", str(i)) for i in range(20)))
        assert len(set(sent)) == 20
        await conn.commit()
        assert len(await got(queue)) == 10

    on_the_callers_connection(url, work)


def test_a_cancelled_call_begins_no_statement_outside_of_the_transaction(url):
    """The first call asks for the schema's version before it sends."""

    async def work(client, conn, queue):
        for pause in range(12):  # at each step of the loop on its way
            with suppress(asyncio.CancelledError):
                async with conn.transaction():
                    sending = asyncio.create_task(AsyncClient(conn).send("s", "a"))
                    for _ in range(pause):
                        await asyncio.sleep(0.0002)
                    sending.cancel()
                    await sending
                    raise asyncio.CancelledError
        await conn.commit()
        assert await got(queue) == []

    on_the_callers_connection(url, work)


def test_a_client_of_a_callers_connection_ends_with_its_last_reference(url):
    """And its thread: a handler may make a client for each message."""

    async def work(client, conn, queue):
        gc.collect()
        gc.disable()
        try:
            before = threading.active_count()
            for _ in range(20):
                await AsyncClient(conn).send("s", "a")
            await asyncio.to_thread(wait_until, lambda: threading.active_count() <= before + 2, 10)
        finally:
            gc.enable()

    on_the_callers_connection(url, work)


def test_what_the_callers_connection_cannot_do_is_refused_and_says_why(url):
    async def work(client, conn, queue):
        for call in (client.receive("s", "c", wait=SOON), client.group("s", "g"), client.install()):
            with pytest.raises(PgQueueError, match="a connection that the client opened"):
                await call
        with pytest.raises(PgQueueError, match="unknown stream 'none'") as failed:
            await client.send("none", "a")
        assert failed.value.sqlstate == "PQ001"
        await conn.close()
        with pytest.raises(PgQueueError, match="connection"):
            await client.send("s", "a")
        with connect(url) as sync, pytest.raises(PgQueueError, match="AsyncConnection, not Conn"):
            AsyncClient(cast("Any", sync))

    on_the_callers_connection(url, work)
