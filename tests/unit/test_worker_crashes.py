"""What workers had when they were killed, or lost Postgres, is handled all the same."""

import random
import resource
import threading
import time
from collections import Counter
from datetime import timedelta
from operator import attrgetter

import pytest

import spark_pgqueue
from spark_pgqueue import Consumer, Message
from spark_pgqueue.postgres import connection
from spark_pgqueue.worker.attempts import Attempt
from spark_pgqueue.worker.options import Options
from spark_pgqueue.worker.processes import Child as InAProcess
from spark_pgqueue.worker.verdicts import Retry
from tests import handlers
from tests.processes import wait_until, worker
from tests.sql import clock
from tests.unit.conftest import end_session
from tests.unit.test_worker import either, result, running

MOMENT = timedelta(milliseconds=50)

pytestmark = pytest.mark.usefixtures("allowed_afterwards")
CONSUMER = None


def sessions(conn, pid):
    """Those of a worker's process, by the name that workers give themselves."""
    return conn.execute(
        "select from pg_stat_activity where datname = current_database()"
        " and application_name like '%% ' || %s::int",
        [pid],
    ).fetchall()


@pytest.mark.promise("feature: several at a time: processes")
def test_a_process_that_dies_has_failed_its_message_alone(queue, url, done):
    settings = {"max_deliver_count": 2, "backoff_base": "0 s"}
    queue.create_consumer("s", "c", start="earliest", settings=settings)
    sent = queue.send_batch("s", ["x"] * 10 + ["die", "exit", "sleep"] + ["x"] * 10)
    failed = {}
    Consumer(url, "s", "c").run(
        handlers.do_as_told,
        processes=2,
        timeout=timedelta(seconds=2),
        wait=MOMENT,
        on_failure=lambda message, error: failed.update({message.data: str(error)}),
    )
    assert failed == {
        "die": "the worker process crashed: SIGKILL",
        "exit": "the worker process crashed: exit code 3",
        "sleep": "timed out after 0:00:02",
    }
    counts = {seq: count for seq, _, count, _ in done()}
    assert len(done()) == len(sent)
    assert [counts[seq] for seq in sent] == [1] * 10 + [2] * 3 + [1] * 10


def test_a_machine_without_a_free_descriptor_fails_the_message_and_not_the_worker():
    """Else the thread that makes the calls would end, and its message be held for ever."""
    calls = InAProcess(Attempt("", attrgetter("data"), Options(processes=1), None), None)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))
    try:
        outcome, _ = calls(1, [Message.for_test("x")])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert isinstance(outcome, Retry)
    assert "could not be started: [Errno" in str(outcome)
    assert calls(1, [Message.for_test("x")])[1] == "x"
    calls.close()


MANY = 2400  # more than a worker handles before it is seen to have begun


@pytest.mark.promise("guarantee: At least once, or exactly once")
def test_a_worker_that_is_killed_repeats_only_what_it_had_just_done(queue, url, conn, done):
    """And one whose work is in the transaction of the acknowledgement repeats nothing."""
    queue.create_consumer("s", "c", start="earliest", ordering="key")
    for handler, options in [("note", {}), ("note_in_transaction", {"transactional": True})]:
        conn.execute("truncate done")
        sent = queue.send_batch("s", ["x"] * MANY, keys=[f"k{i % 50}" for i in range(MANY)])
        options |= {"concurrency": 4}
        with worker(url, handler, **options) as child:
            wait_until(lambda: len(done()) > 150)
            with conn.transaction():  # on a busy machine, it could end before it is killed
                conn.execute("lock table done in exclusive mode")
                child.kill()
            wait_until(lambda: not sessions(conn, child.pid))  # the last claim may be late
        before = done()
        assert len(before) < MANY
        clock.end_leases(conn)
        Consumer(url, "s", "c").run(
            getattr(handlers, handler), wait=timedelta(seconds=0.5), **options
        )
        got = done()
        counts = Counter(seq for seq, *_ in got)
        lost = sorted(set(sent) - set(counts))
        assert lost == [], [queue.explain("s", "c", seq) for seq in lost]
        repeated = {seq for seq, n in counts.items() if n > 1}
        assert len(repeated) == sum(counts.values()) - MANY, "none comes three times"
        if "transactional" in options:
            assert repeated == set()
        last = max(at for *_, at in before)
        for seq, _, _, at in before:
            assert seq not in repeated or at > last - timedelta(seconds=2)
        assert_in_order(got)


def assert_in_order(got):
    """By key, but for what comes again."""
    for key in {key for _, key, *_ in got}:
        firsts = list(dict.fromkeys(seq for seq, k, *_ in got if k == key))
        assert firsts == sorted(firsts)


def is_quiet(got):
    """Whether a worker handles nothing for a second."""
    before = len(got)
    time.sleep(1)
    return len(got) == before


@pytest.mark.promise("fault: Postgres crashes", "operations: a restart")
def test_postgres_restarts_under_a_worker(queue, url, conn, server):
    """What was handled is settled when it is back, and not handled again."""
    conn.execute(f"alter database {conn.info.dbname} set synchronous_commit = on".encode())
    with spark_pgqueue.connect(url) as client:
        client.create_consumer("s", "c", start="earliest")
        sent = client.send_batch("s", ["x"] * 300)
    got, enough = [], threading.Event()

    def handle(message):
        got.append(message.seq)
        time.sleep(0.005)
        if len(got) == 60:
            enough.set()

    with running(Consumer(url, "s", "c"), handle, concurrency=4):
        assert enough.wait(30)
        server.restart("immediate")
        with connection.connect(url) as again:
            wait_until(lambda: len(got) > 100)
            wait_until(lambda: is_quiet(got))  # else the lease of an open claim ends, too
            clock.end_leases(again)  # a claim whose answer was lost comes back by that
            wait_until(lambda: len(set(got)) == 300)
    assert sorted(got) == sent
    with spark_pgqueue.connect(url) as client:
        assert client.stats("s")[0].claims == 0


@pytest.mark.parametrize(
    ("ordering", "awaited"),
    [("key", False), pytest.param("none", True, marks=pytest.mark.longer)],
    ids=["key-threads", "none-tasks"],
)
def test_a_lost_connection_is_no_failure_of_a_message(queue, url, conn, done, awaited, ordering):
    """Each transactional call loses its connection once: nothing dies, nothing happens twice. Only
    a message whose calls lose all their connections has failed.
    """
    settings = {"max_deliver_count": 1}
    queue.create_consumer("s", "c", start="earliest", ordering=ordering, settings=settings)
    sent = queue.send_batch("s", ["x"] * 5 + ["bad"], keys=[*"aabbcd"])
    insert = "insert into done (seq, key) values (%s, %s)"
    seen: Counter[int] = Counter()

    async def handle(message, connection):
        await result(connection.execute(insert, [message.seq, message.key]))
        seen[message.seq] += 1
        if seen[message.seq] == 1 or message.data == "bad":
            end_session(conn, connection)

    wait = timedelta(seconds=3)
    Consumer(url, "s", "c").run(either(awaited, handle), transactional=True, wait=wait)
    got = [(key, seq) for seq, key, *_ in done()]
    assert sorted(seq for _, seq in got) == sent[:5]
    if ordering == "key":
        assert [pair for pair in got if pair[0] == "a"] == [("a", 1), ("a", 2)]
    (stats,) = queue.stats("s")
    assert (stats.dead, stats.backlog, stats.claimed) == (1, 0, 0)
    assert seen[sent[5]] == 4


@pytest.mark.longer
@pytest.mark.parametrize(
    ("how", "ordering"),
    [
        *(("threads", "none"), ("threads", "key"), ("processes", "none")),
        *(("tasks", "key"), ("transactional", "key")),
    ],
)
@pytest.mark.promise("fault: a worker is killed")
def test_workers_that_are_killed_again_and_again(queue, url, conn, done, ordering, how):
    """kill -9 and lost connections beside a producer: nothing is lost, order is kept."""
    queue.create_consumer("s", "c", start="earliest", ordering=ordering)
    handler = {"tasks": "note_async", "transactional": "note_in_transaction"}.get(how, "note")
    options = {"concurrency": 4} if how != "processes" else {"processes": 2}
    options |= {"transactional": True} if how == "transactional" else {}
    chance = random.Random(7)
    children = [worker(url, handler, **options) for _ in range(3)]
    sent = []
    try:
        for _ in range(6):
            for _ in range(30):
                sent += queue.send_batch(
                    "s", ["x"] * 10, keys=[f"k{chance.randrange(30)}" for _ in range(10)]
                )
                time.sleep(0.02)
            children.pop(0).kill()
            children.append(worker(url, handler, **options))
            conn.execute(
                "select pg_terminate_backend(pid) from pg_stat_activity where pid <>"
                " pg_backend_pid() and datname = current_database()"
                " and query like '%%receive%%' and random() < 0.5"
            )
        wait_until(lambda: len({seq for seq, *_ in done()}) >= len(sent), 90)
        wait_until(lambda: queue.stats("s")[0].claims == 0)
    finally:
        for each in children:
            each.kill()
    got = done()
    counts = Counter(seq for seq, *_ in got)
    assert sorted(counts) == sent
    if how == "transactional":
        assert max(counts.values()) == 1
    else:
        assert sum(counts.values()) < 1.5 * len(sent)
    if ordering == "key":
        assert_in_order(got)
