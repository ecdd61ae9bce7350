"""The worker: each message is handled, and settled as its handler said."""

import asyncio
import inspect
import json
import logging
import os
import signal
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import psycopg
import pytest
from typer.testing import CliRunner

import spark_pgqueue
from spark_pgqueue import Consumer, Defer, PgQueueError, Reject, Retry
from spark_pgqueue.command_line import cli
from spark_pgqueue.postgres import connection
from spark_pgqueue.worker.handlers import Handling, handlings, run_all
from tests import handlers
from tests.processes import wait_until
from tests.sql import clock
from tests.sql.queue import ORDERINGS

MOMENT = timedelta(milliseconds=50)
SOON = timedelta(seconds=0.5)


pytestmark = pytest.mark.usefixtures("allowed_afterwards")
CONSUMER = {"settings": {"backoff_base": "0 s"}}


@pytest.fixture
def worker(url):
    return Consumer(url, "s", "c")


def left(queue, consumer="c"):
    """What a consumer has before it, in hand, and dead."""
    (stats,) = [stats for stats in queue.stats("s") if stats.consumer == consumer]
    return stats.backlog, stats.claimed, stats.dead


@contextmanager
def running(worker, handler, **options):
    """A run in another thread; stopped at the end, and what it raised is raised."""
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(worker.run, handler, **options)
        try:
            yield run
        finally:
            worker.stop()
        run.result(30)


def either(awaited, handler):
    """An async function; or one that is not, and does the same."""

    def call(*given):
        try:
            handler(*given).send(None)
        except StopIteration as end:
            return end.value
        raise AssertionError("it waits")

    return handler if awaited else call


async def result(value):
    """What a call of an asynchronous connection returns in the end, or of another one at once."""
    return await value if inspect.isawaitable(value) else value


each_way = pytest.mark.parametrize("awaited", [False, True], ids=["threads", "tasks"])


@pytest.mark.previous_version
@pytest.mark.parametrize("ordering", ORDERINGS)
@pytest.mark.promise("feature: slots of a worker")
def test_each_message_is_handled_once_in_order_of_its_key(queue, worker, ordering):
    """With four at a time; and those of a key never beside each other."""
    queue.create_consumer("s", "o", start="earliest", ordering=ordering)
    sent = queue.send_batch("s", ["x"] * 300, keys=[f"k{i % 7}" for i in range(300)])
    at_work, together, got = Counter(), [], []

    def handle(message):
        at_work[message.key] += 1
        together.append((at_work[message.key], sum(at_work.values())))
        time.sleep(0.0005)
        got.append((message.key, message.seq))
        at_work[message.key] -= 1

    assert Consumer(worker._url, "s", "o").run(handle, concurrency=4, wait=MOMENT) == 300
    assert sorted(seq for _, seq in got) == sent
    assert left(queue, "o") == (0, 0, 0)
    assert max(n for _, n in together) == (1 if ordering == "stream" else 4)
    if ordering != "none":
        assert max(n for n, _ in together) == 1
        for key in {key for key, _ in got}:
            mine = [seq for k, seq in got if k == key]
            assert mine == sorted(mine)


@pytest.mark.previous_version
@pytest.mark.promise("feature: discarded by its handler")
def test_what_a_handler_raises_says_what_becomes_of_its_message(queue, worker, url):
    seqs = dict(zip("abcd", queue.send_batch("s", list("abcd")), strict=True))
    tries = Counter()

    def handle(message):
        tries[message.data] += 1
        if message.data == "b" and tries["b"] == 1:
            raise Retry("not now")
        if message.data == "c":
            raise Reject("never", details={"id": 7})
        if message.data == "d" and tries["d"] == 1:
            raise ValueError("what is this?")

    assert worker.run(handle, wait=MOMENT) == 3
    assert tries == {"a": 1, "b": 2, "c": 1, "d": 2}
    assert left(queue) == (0, 0, 1)
    with connection.connect(url) as conn:
        dead = conn.execute("select seqs::text, reason, details from pgqueue.dead_messages")
        assert dead.fetchall() == [(f"{{[{seqs['c']},{seqs['c'] + 1})}}", "never", {"id": 7})]


@pytest.mark.previous_version
def test_a_message_that_is_put_off_has_not_failed_and_brings_its_state_back(queue, url):
    queue.create_consumer("s", "q", start="earliest", settings={"max_deliver_count": 1})
    queue.send_batch("s", ["x", "y"])
    got, failed = [], []

    def handle(message):
        got.append((message.data, message.deliver_count, message.saved))
        if message.data == "x" and len(got) < 8:
            asked = (message.saved or {"asked": 0})["asked"]
            raise Defer(timedelta(milliseconds=20), state={"asked": asked + 1})

    worker = Consumer(url, "s", "q")
    worker.run(handle, wait=SOON, on_failure=lambda *each: failed.append(each))
    mine = [(count, saved) for data, count, saved in got if data == "x"]
    assert mine == [(1, {"asked": n} if n else None) for n in range(len(mine))]
    assert len(mine) > 5
    assert failed == []
    assert left(queue, "q") == (0, 0, 0)


@pytest.mark.previous_version
def test_what_a_handler_returns_is_kept_where_the_consumer_has_a_history(queue, url):
    sent = queue.send_batch("s", ["a", "b", "b"])

    async def handle_async(message):
        return handlers.upper(message)

    ways: dict[str, tuple[Any, dict[str, Any]]] = {
        "threads": (handlers.upper, {}),
        "tasks": (handle_async, {}),
        "processes": (handlers.upper, {"processes": 1}),
        "transactional": (handlers.upper, {"transactional": True}),
        "batch": (handlers.upper_all, {"batch": 3}),
    }
    for way, (handler, options) in ways.items():
        queue.create_consumer("s", way, start="earliest", settings={"keep_history": "1 day"})
        Consumer(url, "s", way, worker="w").run(handler, wait=MOMENT, **options)
        results = [queue.outcome("s", way, seq) for seq in sent]
        assert {(each.state, each.owner) for each in results} == {("done", "w")}, way
        assert [each.result for each in results] == (
            [["A", "B", "B"]] * 3 if way == "batch" else ["A", "B", "B"]
        )


def failing_thrice(url, consumer, error: Exception, **options):
    """The delays after three calls that fail, in seconds."""
    delays = []
    worker = Consumer(url, "s", consumer)

    def fail(messages):
        worker.stop()
        raise error

    with connection.connect(url) as conn:
        for _ in range(3):
            worker.run(fail, **options)
            (seconds,) = conn.execute(
                "select extract(epoch from max(not_visible_until) - clock_timestamp())::float8"
                " from pgqueue.message_states where consumer = %s",
                [consumer],
            ).fetchone() or (None,)
            delays.append(seconds or 0)
            clock.pass_time(conn, timedelta(hours=1))
    return delays


BACKOFFS = [
    *({"ordering": ordering} for ordering in ORDERINGS),
    {"options": {"batch": 3}},
    {"settings": {"backoff": "constant"}},
    {"error": Retry(delay=timedelta(0)), "delays": (0, 0, 0)},
    {"error": Retry(delay=timedelta(seconds=9)), "delays": (9, 9, 9)},
    {"error": Retry(delay=timedelta(days=9999))},  # which is not allowed
]
"""What is set, and the delays after three failures: without `delays`, the default's."""


def test_a_worker_backs_off_from_a_second_unless_its_handler_says_how_long(queue, url):
    """A handler that always fails is not called 60 times a second."""
    queue.send("s", "x", key="k")
    for number, case in enumerate(BACKOFFS):
        name, settings = f"c{number}", {"backoff_jitter": 0} | case.get("settings", {})
        ordering = case.get("ordering", "none")
        queue.create_consumer("s", name, start="earliest", ordering=ordering, settings=settings)
        error = case.get("error", ValueError())
        delays = failing_thrice(url, name, error, **case.get("options", {}))
        expected = [pytest.approx(n, abs=0.9) for n in case.get("delays", (1, 2, 4))]
        assert delays == expected, case


def test_a_run_that_does_not_wait_handles_all_that_is_there(queue, url):
    cases = [("none", None), ("none", 2), ("key", 2), ("stream", None)]
    for number, (ordering, _) in enumerate(cases):
        queue.create_consumer("s", f"c{number}", ordering=ordering)
    for _ in range(3):
        for key in "abcab":
            queue.send("s", "x", key=key)
        for number, (_, batch) in enumerate(cases):
            worker = Consumer(url, "s", f"c{number}")
            assert worker.run(lambda _: None, wait=timedelta(0), batch=batch) == 5, number


@pytest.mark.parametrize("ordering", ["key", "stream"])
def test_what_follows_a_message_that_failed_waits_for_it(queue, url, ordering):
    queue.create_consumer("s", "o", ordering=ordering, **CONSUMER)
    queue.send_batch("s", list("abcd"), keys=["k"] * 4)
    got = []

    def handle(message):
        got.append(message.data)
        if message.data in "bc" and got.count(message.data) == 1:
            raise Retry
        if message.data == "a":
            raise Reject

    Consumer(url, "s", "o").run(handle, concurrency=4, wait=MOMENT)
    assert got == ["a", "b", "b", "c", "c", "d"]
    assert left(queue, "o") == (0, 0, 1)


@pytest.mark.previous_version
@pytest.mark.promise("feature: several in a call")
def test_batches(queue, worker):
    queue.send_batch("s", ["x"] * 25)
    sizes = []

    def handle(messages):
        sizes.append(len(messages))
        if len(sizes) == 1:
            raise Retry("these", messages=messages[:3])

    assert worker.run(handle, batch=10, wait=MOMENT) == 25
    assert sorted(sizes) == [3, 5, 10, 10] or sum(sizes) == 28
    assert left(queue) == (0, 0, 0)


@pytest.mark.previous_version
@each_way
def test_of_a_batch_whose_transaction_is_undone_nothing_is_done(queue, worker, conn, awaited):
    """Also where its error names some of its messages, of which the others did not fail."""
    queue.send_batch("s", ["good", "bad", "good"])
    conn.execute("create table done (seq bigint, deliver_count int)")
    insert = "insert into done values (%s, %s)"

    async def handle(messages, connection):
        for each in messages:
            await result(connection.execute(insert, [each.seq, each.deliver_count]))
        if bad := [each for each in messages if each.data == "bad" and each.deliver_count < 3]:
            raise Retry("bad", delay=timedelta(0), messages=bad)

    worker.run(either(awaited, handle), batch=3, transactional=True, wait=MOMENT)
    found = conn.execute("select seq, count(*) from done group by seq order by seq").fetchall()
    assert found == [(1, 1), (2, 1), (3, 1)]
    assert left(queue) == (0, 0, 0)


@pytest.mark.previous_version
@each_way
@pytest.mark.promise("feature: once, with the work's own transaction")
def test_transactional_work_happens_once(queue, worker, conn, awaited):
    """It is undone with the message, and with a claim that was lost."""
    queue.send_batch("s", list("abc"))
    conn.execute("create table done (data text)")

    async def handle(message, connection):
        await result(connection.execute("insert into done values (%s)", [message.data]))
        if message.deliver_count == 1 and message.data == "b":
            raise RuntimeError("after the insert")
        if message.deliver_count == 1 and message.data == "c":
            clock.end_leases(conn)
            # Another one gets it, or this worker itself, in another claim.
            if other := queue.receive("s", "c", 3, wait=SOON):
                other.nack()

    for _ in range(2):  # what the other one gives back may be too late for the first
        worker.run(either(awaited, handle), transactional=True, wait=MOMENT)
    assert sorted(conn.execute("select data from done").fetchall()) == [("a",), ("b",), ("c",)]
    assert left(queue) == (0, 0, 0)


@each_way
def test_a_handler_that_rolls_back_by_a_statement_has_failed(queue, worker, conn, awaited):
    """Its work is lost, so that its message is not acknowledged."""
    queue.send_batch("s", ["good", "bad", "good"])
    conn.execute("create table done (data text)")

    async def handle(message, connection):
        await result(connection.execute("insert into done values (%s)", [message.data]))
        if message.data == "bad" and message.deliver_count == 1:
            await result(connection.execute("rollback"))
            await result(connection.execute("select 1"))

    for _ in range(2):
        worker.run(either(awaited, handle), transactional=True, wait=MOMENT)
        queue.retry("s", "c")
    found = [data for (data,) in conn.execute("select data from done")]
    assert sorted(found) == ["bad", "good", "good"]
    assert left(queue) == (0, 0, 0)


@each_way
@pytest.mark.parametrize("raises", [False, True])
def test_a_handler_that_leaves_a_copy_open_stops_nothing(queue, worker, conn, awaited, raises):
    """A rollback would wait for it, without end and with the transaction's locks."""
    queue.send_batch("s", ["good", "bad", "good"])
    conn.execute("create table done (data text)")
    left_open = []

    async def handle(message, connection):
        await result(connection.execute("insert into done values (%s)", [message.data]))
        if message.data == "bad" and not left_open:
            copy = connection.cursor().copy("copy done from stdin")
            left_open.append(copy)
            await (copy.__aenter__() if awaited else result(copy.__enter__()))
            if raises:
                raise ValueError("y")

    for _ in range(2):  # after an error of the handler, the closed connection counts as lost
        wait = timedelta(seconds=2) if raises else MOMENT
        worker.run(either(awaited, handle), transactional=True, wait=wait)
        queue.retry("s", "c")
    found = [data for (data,) in conn.execute("select data from done")]
    assert sorted(found) == ["bad", "good", "good"]
    assert left(queue) == (0, 0, 0)


def test_a_statement_of_another_task_is_awaited_when_a_handler_fails(queue, worker, caplog):
    """Its connection is not lost."""
    queue.send("s", "x")
    tasks = []

    async def handle(message, connection):
        tasks.append(asyncio.ensure_future(connection.execute("select pg_sleep(0.3)")))
        await asyncio.sleep(0.1)
        raise ValueError("y")

    worker.run(handle, transactional=True, wait=MOMENT)
    assert "ValueError: y" in caplog.text
    assert "was lost" not in caplog.text


@pytest.mark.previous_version
def test_the_claim_is_extended_while_a_handler_works(queue, url):
    queue.create_consumer("s", "q", start="earliest", settings={"visibility_timeout": "400 ms"})
    queue.send_batch("s", ["x"] * 3)
    counts, taken = [], []

    def handle(message):
        counts.append(message.deliver_count)
        for _ in range(6):
            time.sleep(0.1)
            taken.append(queue.receive("s", "q"))

    assert Consumer(url, "s", "q").run(handle, concurrency=3, wait=MOMENT) == 3
    assert counts == [1, 1, 1]
    assert taken == [None] * 18


@pytest.mark.promise("feature: timeouts of a call")
def test_a_call_that_takes_too_long_has_failed(queue, worker):
    """A thread goes on, and what it says is ignored; another one works in its place."""
    queue.send_batch("s", ["slow", "x", "y"])
    release, got, failed = threading.Event(), [], []

    def handle(message):
        if message.data == "slow" and message.deliver_count == 1:
            release.wait(20)
            raise Reject("too late")
        got.append(message.data)

    worker.run(
        handle,
        timeout=timedelta(seconds=0.2),
        wait=timedelta(seconds=0.3),
        on_failure=lambda message, error: failed.append((message.data, str(error))),
    )
    release.set()
    wait_until(lambda: not any(t.name == "pgqueue worker" for t in threading.enumerate()))
    assert sorted(got) == ["slow", "x", "y"]
    assert failed == [("slow", "timed out after 0:00:00.200000")]
    assert left(queue) == (0, 0, 0)


def test_what_another_worker_took_over_is_not_begun(queue, worker, url):
    queue.create_consumer(
        "s", "q", start="earliest", settings={"visibility_timeout": timedelta(seconds=1.5)}
    )
    queue.send_batch("s", ["x"] * 4)
    queue.send_batch("s", ["x"] * 50)
    taken, got = [], []

    def handle(message):
        got.append(message.seq)
        time.sleep(0.001)
        if len(got) == 20:
            with connection.connect(url) as conn:
                clock.end_leases(conn)
            other = queue.receive(
                "s", "q", 100, visibility_timeout=timedelta(minutes=1), wait=timedelta(seconds=5)
            )
            taken.extend(m.seq for m in other.messages)
            time.sleep(0.7)

    # (With so few ahead it does not look for more meanwhile, and so does not take them back.)
    Consumer(url, "s", "q").run(handle, wait=SOON, prefetch=30)
    assert taken
    assert set(got[20:]).isdisjoint(taken)
    assert len(got) == len(set(got))


@pytest.mark.previous_version
@pytest.mark.promise("feature: graceful end")
def test_to_stop_gives_back_what_was_not_begun_and_lets_calls_end(queue, url):
    """Again and again: what was not begun has not failed, and may be delivered but once."""
    queue.create_consumer("s", "q", settings={"max_deliver_count": 1})
    sent = queue.send_batch("s", ["x"] * 100)
    worker, got = Consumer(url, "s", "q"), []

    def handle(message):
        if len(got) >= most:
            worker.stop()
            time.sleep(0.2)
        got.append((message.seq, message.deliver_count))

    for most in (30, 60):
        worker.run(handle, concurrency=2, wait=SOON)
        assert most < len(got) < most + 10
        assert left(queue, "q") == (100 - len(got), 0, 0)
    most = 100
    worker.run(handle, wait=MOMENT)
    assert sorted(got) == [(seq, 1) for seq in sent]
    assert left(queue, "q") == (0, 0, 0)


def test_what_waits_behind_slow_calls_is_left_to_others(queue, url):
    queue.create_consumer(
        "s", "q", start="earliest", settings={"visibility_timeout": timedelta(seconds=0.9)}
    )
    quick = queue.send_batch("s", ["quick"] * 20)
    queue.send("s", "slow")
    behind = queue.send_batch("s", ["behind"] * 20)
    release, got, others = threading.Event(), [], []

    def handle(message):
        got.append(message.seq)
        if message.data == "slow":
            release.wait(20)

    with running(Consumer(url, "s", "q"), handle):
        wait_until(lambda: len(got) == 21)
        while len(others) < 20:
            if claim := queue.receive("s", "q", 20, wait=SOON):
                others += [(m.seq, m.deliver_count) for m in claim.messages]
                claim.ack()
        release.set()
    assert got[:20] == quick
    assert others == [(seq, 1) for seq in behind]
    assert left(queue, "q") == (0, 0, 0)


def test_grace_is_not_exceeded(queue, worker, caplog):
    queue.send_batch("s", ["x"] * 2)
    release, begun = threading.Event(), threading.Event()

    def handle(message):
        begun.set()
        release.wait(20)

    with running(worker, handle, grace=timedelta(seconds=0.1)) as run:
        assert begun.wait(20)
        worker.stop()
        run.result(10)
    assert left(queue) == (2, 0, 0)
    assert caplog.messages == ["1 call did not finish within grace (0.1 s): the messages go back"]
    release.set()


def test_a_second_signal_stops_it_at_once(queue, worker):
    queue.send("s", "x")
    release = threading.Event()

    def handle(message):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGTERM)
        release.wait(20)

    worker.run(handle)
    assert left(queue) == (1, 0, 0)
    release.set()


def test_a_message_that_is_sent_while_it_waits_comes_at_once(queue, worker):
    came = threading.Event()
    waited = []
    with running(worker, lambda m: came.set()):
        for _ in range(3):
            time.sleep(0.1)
            came.clear()
            began = time.monotonic()
            queue.send("s", "x")
            assert came.wait(10)
            waited.append(time.monotonic() - began)
    assert min(waited) < 0.3


@pytest.mark.promise("feature: who has what")
def test_who_looks_at_claims_is_told_which_worker_has_them(queue, url, conn):
    queue.send_batch("s", ["x", "y"])
    owners = []

    def handle(message):
        owners.extend(conn.execute("select owner from pgqueue.open_claims").fetchone() or ())

    Consumer(url, "s", "c", worker="billing 1").run(handle, wait=MOMENT, prefetch=0)
    assert owners == ["billing 1"] * 2
    queue.send("s", "z")
    Consumer(url, "s", "c").run(handle, wait=MOMENT)
    assert owners[-1].endswith(f" {os.getpid()}")


@pytest.mark.promise("feature: hooks, telemetry")
def test_hooks(queue, worker):
    queue.send_batch("s", list("ab"))
    said = []

    @contextmanager
    def wrap(message):
        said.append(("enter", message.data))
        yield
        said.append(("leave", message.data))

    def handle(message):
        said.append(("handle", message.data))
        if message.data == "b":
            raise Reject("no")
        return message.data.upper()

    worker.run(
        handle,
        wait=MOMENT,
        on_start=lambda: said.append(("start",)),
        on_stop=lambda: said.append(("stop",)),
        on_success=lambda message, result: said.append(("done", message.data, result)),
        on_failure=lambda message, error: said.append(("failed", message.data, str(error))),
        wrap=wrap,
    )
    assert said == [
        ("start",),
        ("enter", "a"), ("handle", "a"), ("leave", "a"), ("done", "a", "A"),
        ("enter", "b"), ("handle", "b"), ("failed", "b", "no"),
        ("stop",),
    ]  # fmt: skip


@pytest.mark.previous_version
def test_listening(queue, worker):
    """Who leaves the loop gives back the message at hand."""
    sent = queue.send_batch("s", ["x"] * 20)
    assert [m.seq for m in worker.listen(wait=MOMENT)] == sent
    assert left(queue) == (0, 0, 0)
    sent = queue.send_batch("s", ["x"] * 20)
    with closing(worker.listen()) as messages:
        assert [next(messages).seq for _ in range(3)] == sent[:3]
    assert left(queue) == (18, 0, 0)
    with pytest.raises(PgQueueError, match="unknown option 'batch'"):
        worker.listen(batch=3)


@pytest.mark.previous_version
@pytest.mark.promise("feature: several at a time: threads, asyncio")
def test_tasks(queue, worker):
    """Many at a time in one loop; one that takes too long is cancelled."""
    queue.send_batch("s", ["x"] * 200 + ["slow", "bad"])
    got, most, now = [], 0, 0

    async def handle(message):
        nonlocal most, now
        now += 1
        most = max(most, now)
        try:
            await asyncio.sleep(30 if message.data == "slow" else 0.01)
            if message.data == "bad" and message.deliver_count == 1:
                raise Retry("once more")
        finally:
            now -= 1
            got.append(message.data)
        if message.data == "slow":
            raise AssertionError

    failed = []

    async def work():
        return await worker.run_async(
            handle,
            concurrency=50,
            timeout=timedelta(seconds=0.5),
            wait=MOMENT,
            on_failure=lambda m, e: (failed.append(m.data), m.data == "slow" and worker.stop()),
        )

    assert asyncio.run(work()) == 201
    assert most == 50
    assert Counter(got) == {"x": 200, "slow": 1, "bad": 2}
    assert left(queue) == (1, 0, 0)


def test_a_task_that_is_cancelled_gives_back_what_it_had(queue, worker):
    queue.send_batch("s", ["x"] * 5)
    begun, ended = [], []

    async def handle(message):
        begun.append(message.seq)
        try:
            await asyncio.sleep(30)
        finally:
            ended.append(message.seq)

    async def work():
        task = asyncio.create_task(worker.run_async(handle, concurrency=3))
        while len(begun) < 3:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(work())
    assert len(ended) == 3
    assert left(queue) == (5, 0, 0)


def test_options_that_make_no_sense(queue, worker):
    cases: list[tuple[dict[str, Any], str]] = [
        ({"concurrency": 0}, "concurrency must be from 1"),
        ({"processes": 2, "concurrency": 2}, "a process runs one call at a time"),
        ({"timeout": timedelta()}, "timeout must be longer than 0"),
        ({"wait": 3}, "wait must be a timedelta"),
        ({"workers": 3}, "unknown option 'workers'"),
        ({"on_start": 3}, "on_start must be a function"),
        ({"processes": 2}, "cannot be sent to another process"),
    ]
    queue.send("s", "x")
    for options, said in cases:
        with pytest.raises(PgQueueError, match=said):
            worker.run(lambda m: None, **options)
    assert left(queue) == (1, 0, 0)


def test_who_cannot_begin_says_so(queue, url):
    with pytest.raises(PgQueueError, match="PQ002"):
        Consumer(url, "s", "nobody").run(print)
    with pytest.raises(PgQueueError, match="PQ001"):
        next(Consumer(url, "nothing", "c").listen())
    with pytest.raises(PgQueueError, match="no connection"):
        Consumer("postgresql://127.0.0.1:1/x", "s", "c", patience=0).run(print)
    with pytest.raises(PgQueueError, match="handler must be a function"):
        Consumer(url, "s", "c").run(3)  # type: ignore[arg-type]
    with pytest.raises(PgQueueError, match="must be an async function"):
        asyncio.run(Consumer(url, "s", "c").run_async(print))


def test_a_consumer_that_is_dropped_ends_its_worker(queue, worker):
    queue.create_consumer("s", "q", start="earliest")
    other = Consumer(worker._url, "s", "q")
    dropped = threading.Timer(0.3, queue.drop_consumer, ("s", "q"))
    dropped.start()
    with pytest.raises(PgQueueError, match="PQ002"):
        other.run(lambda m: None)
    dropped.join()


@pytest.fixture
def run(url, monkeypatch, tmp_path):
    """Run `pgqueue` with arguments, in a folder with a module of handlers."""
    monkeypatch.setenv("PGQUEUE_URL", url)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "given_handlers.py").write_text(
        "got = []\nnumber = 3\ndef note(message): got.append(message.data)\n"
        "def note_all(messages, connection): connection.execute('select 1')\n"
        "def judge(message): assert message.data == 'good'\n"
        "def nothing(): pass\n"
        "def swapped(connection, message): pass\n"
        "def held(message):\n    import os, spark_pgqueue\n"
        "    with spark_pgqueue.connect(os.environ['PGQUEUE_URL']) as queue:\n"
        "        (claim,) = queue.open_claims('s')\n"
        "    assert 3500 < (claim.lease_until - claim.claimed_at).total_seconds() < 3700\n"
        "class Inner:\n    handle = staticmethod(note)\n"
        "from textwrap import dedent\nfrom spark_pgqueue import handler\n"
    )
    (tmp_path / "given_broken.py").write_text("import nothing_like_this\n")
    (tmp_path / "given_unfit.py").write_text(
        "import spark_pgqueue\n@spark_pgqueue.handler('s', 'c')\ndef bill(): pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    return lambda *arguments: CliRunner().invoke(cli.app, ["work", *map(str, arguments)])


def test_work_on_the_command_line(queue, run, caplog):
    queue.send_batch("s", ["x"] * 5)
    done = run("given_handlers:note", "s", "c", "--concurrency", 2, "--wait", "50ms")
    assert (done.exit_code, done.stderr.splitlines()[-1]) == (0, "5 messages handled")
    queue.send_batch("s", ["x"] * 5)
    more = ["--batch", 3, "--transactional", "--wait", "50ms", "--timeout", "1 minute"]
    assert run("given_handlers:note_all", "s", "c", *more).exit_code == 0
    assert run("given_handlers:Inner.handle", "s", "c", "--wait", "50ms").exit_code == 0
    queue.alter_consumer("s", "c", {"max_deliver_count": 3})
    queue.send("s", "x")
    done = run("given_handlers:held", "s", "c", "--wait", "50ms", "--visibility-timeout", "1h")
    assert done.stderr.splitlines()[-1] == "1 message handled"
    queue.send_batch("s", ["good", "bad"])
    with caplog.at_level(logging.INFO):
        done = run("given_handlers:judge", "s", "c", "--wait", "50ms", "--json")
    assert caplog.messages[0] == "'s', 'c': judge handles the messages"
    for delivery in (1, 2, 3):
        assert f"'s', 'c': message 13 (delivery {delivery}): AssertionError" in caplog.text
    assert "'s', 'c': message 13 dead-lettered after 3 deliveries" in caplog.text
    assert done.stderr.splitlines()[-1] == "1 message handled; 3 calls failed"
    assert json.loads(done.stdout) == {"stream": "s", "consumer": "c", "handled": 1, "failed": 3}
    queue.purge_dead("s", "c")
    assert left(queue) == (0, 0, 0)


def test_work_keeps_nothing_of_the_messages_that_failed(queue, run, tmp_path):
    (tmp_path / "forgotten.py").write_text(FORGOTTEN)
    queue.alter_consumer("s", "c", {"max_deliver_count": 1})
    queue.send_batch("s", ["x"] * 50)
    done = run("forgotten:fail", "s", "c", "--wait", "50ms")
    assert done.stderr.splitlines()[-1] == "0 messages handled; 50 calls failed"
    assert sys.modules["forgotten"].most < 10, "errors keep their calls, and these the messages"


FORGOTTEN = """
import gc, weakref

most, errors = 0, weakref.WeakSet()

class No(Exception): pass

def fail(message):
    global most
    gc.collect()
    most = max(most, len(errors))
    error = No()
    errors.add(error)
    raise error
"""

DECORATED = """
from datetime import timedelta
from spark_pgqueue import handler

@handler("s", "c", batch=2)
@handler("new", "d", batch=3)
def note(messages): print(sorted(message.data for message in messages))

@handler("s", "e", wait=timedelta(0), on_failure=lambda m, error: print("failed", m.seq))
async def fail(message): raise ValueError

def plain(message): pass
"""

BY_NAME = """
from spark_pgqueue import handler

@handler("s", "c", keywords=True, processes=1)
def bill(order: int, shop: str = "here"): return {"order": order, "shop": shop}

@handler("s", "d", keywords=True, transactional=True)
async def note(connection, *, order, **others):
    await connection.execute("insert into noted values (%s)", [order])
"""


def test_a_function_takes_the_fields_of_a_message_as_its_arguments(queue, run, tmp_path, url):
    """In processes, awaited, and with a connection; what does not fit is a failure as others."""
    (tmp_path / "by_name.py").write_text(BY_NAME)
    with psycopg.connect(url, autocommit=True) as conn:
        conn.execute("create table noted (n int)")
        for name in "cd":
            settings = {"max_deliver_count": 1, "keep_history": timedelta(hours=1)}
            queue.create_consumer("s", name, start="earliest", if_not_exists=True)
            queue.alter_consumer("s", name, settings)
        sent = ['{"order": 7}', '{"order": 8, "shop": "there"}', "[1]", '{"no": 1}']
        queue.send_batch("s", sent)
        done = run("by_name", "--wait", "100ms")
        assert done.exit_code == 0, done.stderr
        assert conn.execute("select * from noted order by n").fetchall() == [(7,), (8,)]
    results = [queue.outcome("s", "c", seq).result for seq in (1, 2)]
    assert results == [{"order": 7, "shop": "here"}, {"order": 8, "shop": "there"}]
    reasons = [dead.error or "" for dead in queue.read_dead("s", "c")]
    assert "bill takes the fields of a JSON object" in reasons[0]
    assert "missing a required argument: 'order'; given: no" in reasons[1]


def test_work_runs_all_functions_of_a_module_with_the_decorator(queue, run, tmp_path):
    """With their own options, those of the command line, and what is missing."""
    (tmp_path / "decorated.py").write_text(DECORATED)
    queue.send_batch("s", ["a", "b"])
    done = run("decorated", "--create", "--wait", "50ms", "--json")
    assert done.exit_code == 0, done.stderr
    assert done.stderr.splitlines()[-1] == "2 messages handled; 2 calls failed"
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    names = [(each["stream"], each["consumer"], each["handled"], each["failed"])
             for each in map(json.loads, lines)]  # fmt: skip
    assert names == [("new", "d", 0, 0), ("s", "c", 2, 0), ("s", "e", 0, 2)]
    assert "['a', 'b']" in done.stdout
    assert "failed 1" in done.stdout
    queue.send_batch("new", ["x"] * 3)
    done = run("decorated:note", "--wait", "50ms", "--batch", 1)
    assert done.stdout.splitlines() == ["['x']"] * 3


def test_a_signal_stops_all_workers_of_a_module_and_so_does_the_failure_of_one(queue, run, url):
    queue.create_consumer("s", "d", start="earliest")
    queue.send("s", "a")

    def both(function):
        return [Handling(function, "s", name, {}) for name in ("c", "d")]

    # the signal of one may stop the other before it has a message
    done = run_all(url, both(lambda _: os.kill(os.getpid(), signal.SIGTERM)))
    assert sorted(done) in ([0, 1], [1, 1])
    missing = Handling(print, "s", "missing", {})
    with pytest.raises(PgQueueError, match="PQ002"):
        run_all(url, [*both(print), missing])


def test_the_decorator_refuses_what_no_run_would_take():
    cases: list[tuple[tuple[Any, dict[str, Any]], str]] = [
        ((lambda: None, {}), "must accept one argument, the message: too many"),
        ((print, {"batc": 3}), "unknown option 'batc'"),
        ((print, {"batch": 0}), "batch must be from 1"),
        ((3, {}), "handler must be a function"),
        ((print, {}), "handler must be a function in Python"),
        ((lambda: None, {"keywords": True}), "takes no arguments by name"),
        ((lambda a, /: None, {"keywords": True}), "takes no arguments by name"),
        (
            (lambda a: None, {"keywords": True, "batch": 3}),
            "keyword arguments require single messages",
        ),
        ((lambda a: None, {"keywords": 3}), "keywords must be"),
        ((max, {}), "handler must be a function in Python"),
        ((partial(max), {"keywords": True}), "max takes no arguments by name"),
        (
            (lambda order, connection: None, {"keywords": True, "transactional": True}),
            "must take the connection as its first argument",
        ),
        (
            (lambda order, conn: None, {"keywords": True, "transactional": True}),
            "must take the connection as its first argument",
        ),
    ]
    for (function, options), said in cases:
        with pytest.raises(PgQueueError, match=said):
            spark_pgqueue.handler("s", "c", **options)(function)
    with pytest.raises(PgQueueError, match="stream must be a str"):
        spark_pgqueue.handler(3, "c")  # type: ignore[arg-type]


def test_a_decorated_handler_keeps_its_options_when_stream_and_consumer_are_given(
    queue, run, tmp_path, monkeypatch
):
    """Also those of another stream; without that, it would be called with a message."""
    (tmp_path / "given_by_name.py").write_text(
        "import spark_pgqueue\n@spark_pgqueue.handler('s', 'c', keywords=True)\n"
        "def note(order: int, total: int):\n    print('order', order, total)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    queue.create_stream("t")
    queue.create_consumer("t", "c")
    for stream in ("s", "t"):
        queue.send(stream, '{"order": 7, "total": 12}')
        done = run("given_by_name:note", stream, "c", "--wait", "0")
        assert (done.exit_code, done.stderr.splitlines()[-1]) == (0, "1 message handled"), done


def test_a_class_is_a_handler(queue, url):
    class Bill:
        def __init__(self, message):
            got.append(message.data)

    got = []
    queue.send("s", "x")
    mark = spark_pgqueue.handler("s", "c", wait=timedelta(0))
    assert run_all(url, handlings(mark(Bill))) == [1]
    assert got == ["x"]


def test_a_handler_that_cannot_be_had_is_one_clear_error(queue, run, caplog):
    caplog.set_level(logging.INFO)
    queue.send("s", "x")
    for arguments, said in (
        ("given_handlers s c", "the handler 'given_handlers' is not MODULE:NAME"),
        ("no_such_module:note s c", "cannot be imported: ModuleNotFoundError"),
        ("no_such_module", "cannot be imported: ModuleNotFoundError"),
        ("given_broken:note s c", "No module named 'nothing_like_this'"),
        ("given_unfit", "pgqueue: the handler bill() must accept one argument, the message: too"),
        (
            "given_handlers:absent s c",
            "the module given_handlers has no absent hint: available: note, note_all, judge,"
            " nothing, swapped, held",
        ),
        ("given_handlers:note s absent", "unknown consumer 'absent' of stream 's'"),
        ("given_handlers:number s c", "given_handlers:number must be a function, not int"),
        (
            "given_handlers:nothing s c",
            "the handler nothing() must accept one argument, the message: too many positional",
        ),
        ("given_handlers:note_all s c", "one argument, the message: missing a required argument"),
        (
            "given_handlers:swapped s c --transactional",
            "the handler swapped(connection, message) must accept the message as its first argument"
            " and the connection as its second hint: define it as swapped(message, connection)",
        ),
        ("given_handlers", "given_handlers does not name a stream and consumer"),
        ("given_handlers:note", "note does not name a stream and consumer"),
        ("given_handlers:note s", "STREAM is given without CONSUMER"),
    ):
        done = run(*arguments.split())
        assert done.exit_code == 1 or (done.exit_code == 2 and " s c" not in arguments), arguments
        assert "handles the messages" not in caplog.text
        assert said in " ".join(done.stderr.replace("│", " ").split())
        assert done.stderr.lower().count("hint:") < 2
    assert left(queue) == (1, 0, 0)


def test_a_handler_that_takes_something_else_is_refused_before_any_message(queue, url):
    queue.send("s", "x")
    worker = Consumer(url, "s", "c")

    async def awaited(): ...

    cases: tuple[tuple[Any, dict[str, Any], str], ...] = (
        (lambda: None, {}, "one argument, the message: "),
        (
            lambda message: None,
            {"transactional": True},
            "two arguments, the message and the connection: ",
        ),
        (lambda message, connection: None, {"batch": 2}, "one argument, the list of messages: "),
        (lambda message, *, extra: None, {}, "one argument, the message: "),
        (awaited, {}, "one argument, the message: "),
        (lambda conn, message: None, {"transactional": True}, "the message as its first argument"),
        (
            lambda connection, messages: None,
            {"transactional": True, "batch": 2},
            "the list of messages as its first argument and the connection as its second",
        ),
    )
    for handler, options, accepted in cases:
        with pytest.raises(PgQueueError, match=f" must accept {accepted}"):
            worker.run(handler, **options, wait=timedelta(0))
    assert left(queue) == (1, 0, 0)
    for handler in (lambda *all: None, lambda message, more=1: None, print):
        queue.send("s", "x")
        assert worker.run(handler, wait=timedelta(0)) >= 1
