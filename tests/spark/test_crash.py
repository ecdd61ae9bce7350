"""What dies and comes back: the application, its JVM, its Python workers. Nothing is lost or twice.

The application copies one stream to another, in small batches, with nothing but the source and the
sink. Whatever is done to it, in the end each message is in the second stream exactly once.
"""

from __future__ import annotations

import random
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from spark_pgqueue.postgres.connection import connect
from tests.processes import Child, wait_until
from tests.spark.conftest import Queue
from tests.sql import internals
from tests.sql.table_writes import staged_tables

pytestmark = [
    *(pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(600)),
    pytest.mark.usefixtures("spark_environment"),
]

APPLICATION = """
    import sys
    from tests.sessions import session
    url, checkpoint, trigger = sys.argv[1:]
    spark = session()
    source = spark.readStream.format("pgqueue").options(
        url=url, stream="in", consumer="c", minPartitions=2, visibilityTimeout="5s",
        maxMessagesPerTrigger=100_000 if trigger == "now" else 200,
    )
    sink = source.load().select("key", "data").writeStream.format("pgqueue").options(
        url=url, stream="out", checkpointLocation=checkpoint
    )
    query = (sink.trigger(availableNow=True) if trigger == "now" else sink).start()
    print("started", flush=True)
    query.awaitTermination()
    print("done", flush=True)
"""


# The same with actions on a part of the messages, and with rows for two streams and for a table, in
# which n % 20 is the id, n the version, and each seventh a delete.
ACTING = APPLICATION.replace(
    'source.load().select("key", "data")',
    """source.load().selectExpr(
        "seq", "if(data % 5 > 0, data, null) as data",
        "case data % 10 when 0 then 'dead_letter' when 5 then 'ack' end as action",
        "case when data % 5 = 0 then 'in' when data % 2 = 0 then 'even' else 'out' end as stream",
        "if(data % 10 = 0, 'ten', null) as reason",
        "named_struct('id', bigint(data) % 20, 'version', bigint(data), 'gone', data % 7 = 0)"
        " as row",
    )""",
).replace(
    'stream="out",',
    'consumer="c", table="public.bills", mergeKeys="id", sequenceBy="version", deleteWhen="gone",',
)

# A batch whose first task stages its rows, and whose last row never comes.
STUCK = ACTING.replace(
    "'ten'", "if(data = 4000, reflect('java.lang.Thread', 'sleep', 3600000L), 'ten')"
)


class Traffic:
    """Publishes batches of messages to a stream, all the time, until the block ends."""

    every = 1.0  # seconds

    def __init__(self, queue: Queue):
        self.queue = queue
        self.sent = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._done.wait(self.every):
            self.send()

    def send(self) -> None:
        self.queue.send("in", self.sent + 1, self.sent + 100)
        self.sent += 100

    def __enter__(self) -> Traffic:
        self._thread.start()
        return self

    def stop(self) -> None:
        """Publish no more."""
        self._done.set()
        self._thread.join()

    def __exit__(self, *exception: object) -> None:
        self.stop()


def application(queue: Queue, trigger: str, text: str = APPLICATION) -> Child:
    return Child(text, queue.url, queue.checkpoint(), trigger)


def wait_for_more(queue: Queue, child: Child) -> None:
    """Wait until the application has published something that was not there before."""
    child.wait_for("started", 180)
    before = queue.look(internals.count, "sink_batches")
    child.wait_until(lambda: queue.look(internals.count, "sink_batches") != before)


def drain(queue: Queue, text: str = APPLICATION) -> None:
    """Run the application until nothing is left, also of claims whose lease has to end first."""
    with application(queue, "now", text) as child:
        assert child.wait(240) == 0, child.output[-5000:]
    assert queue.backlog("in", "c") == 0


def check(queue: Queue, traffic: Traffic) -> None:
    expected = sorted(str(i) for i in range(1, traffic.sent + 1))
    assert queue.sent("out") == expected


def wait_in_the_commit(queue: Queue, child: Child) -> None:
    """Kill the application while its commit waits for the table's lock; then unlock the table."""
    waits = (
        "select count(*) > 0 from pg_stat_activity where wait_event_type = 'Lock' and "
        "query like '%%apply_table_batch%%' and datname = current_database()"
    )
    with connect(queue.url) as conn, conn.transaction():
        conn.execute("lock table public.bills in share mode")
        child.wait_until(lambda: queue.sql(waits) == [(True,)])
        child.kill()


@pytest.mark.longer
@pytest.mark.promise(
    "guarantee: Stream to stream",
    "guarantee: Tables",
    "feature: rows merged into a table, once for each batch, with its messages",
    "into-tables: kill -9 in and around the commit",
    "kafka: writing, exactly once",
)
def test_an_application_killed_at_any_point_loses_and_repeats_nothing(url: str, tmp_path: Path):
    """While it stages rows, in the commit, and at random: sends to two streams, acknowledgements,
    dead letters and rows of a table are of one transaction. What a killed try has staged, also
    its tasks that outlive the application, does not stay.
    """
    assert "3600" in STUCK
    assert "dead_letter" in ACTING
    assert 'stream="out"' not in ACTING
    queue = Queue(url, tmp_path)  # the applications have sessions of their own
    queue.create("in", "c", ordering="key")
    for stream in ("out", "even"):
        queue.create(stream)
    queue.sql("create table public.bills (id bigint primary key, version bigint)")
    queue.send("in", 1, 4000)
    with application(queue, "now", STUCK) as child:
        child.wait_until(lambda: queue.look(internals.staged_chunks))
        child.kill()
    assert queue.look(internals.count, "messages") > 4000
    traffic = Traffic(queue)
    traffic.sent = 4000
    with traffic:
        with application(queue, "always", ACTING) as child:
            wait_in_the_commit(queue, child)
        with application(queue, "always", ACTING) as child:
            wait_for_more(queue, child)
            time.sleep(random.uniform(0, 1))
            child.kill()
    drain(queue, ACTING)
    all_sent = range(1, traffic.sent + 1)
    sent = [i for i in all_sent if i % 5]
    assert queue.sent("out") == sorted(str(i) for i in sent if i % 2)
    assert queue.sent("even") == sorted(str(i) for i in sent if i % 2 == 0)
    dead = queue.sql("select data, reason from pgqueue.read_dead('in', 'c', p_max => 1000000)")
    assert sorted(dead) == sorted((str(i), "ten") for i in all_sent if i % 10 == 0)
    last = {i % 20: i for i in all_sent}
    rows = queue.sql("select id, version from public.bills")
    assert sorted(rows) == sorted((key, i) for key, i in last.items() if i % 7)
    assert queue.sql("select lost from pgqueue.readers") == [(0,)]
    queue.sql("select * from pgqueue.maintain()")  # a task may stage after its batch was published
    assert queue.look(internals.count, "staged_chunks") == 0
    assert queue.look(internals.count, "messages") == len(all_sent) + len(sent)
    assert queue.look(staged_tables) == set()


def all_is_free(queue: Queue) -> bool:
    """Whether another claimer would get all that is left; it gets nothing."""
    with connect(queue.url) as conn:
        conn.execute("begin")
        count, left = 0, queue.backlog("in", "c")
        while rows := conn.execute("select * from pgqueue.receive('in', 'c', 10000)").fetchall():
            count += len(rows)
        conn.execute("rollback")
        return count == left


@pytest.mark.longer
@pytest.mark.promise(
    "guarantee: Killed before the first micro-batch",
    "fault: Spark's application, JVM or Python workers are killed",
    "fault: Spark's processes hang",
)
def test_processes_that_are_stopped_or_killed_lose_and_repeat_nothing(url: str, tmp_path: Path):
    """The source's process, the workers of tasks, the JVM and the whole application stand still
    for longer than a lease; workers and backends are killed: the application goes on. At last the
    JVM is killed: its source claims nothing more, and its claims become free.
    """
    queue = Queue(url, tmp_path)
    queue.create("in", "c")
    queue.create("out")
    with Traffic(queue) as traffic, application(queue, "always") as child:
        wait_for_more(queue, child)
        for name in ("streaming", "pyspark.daemon", "java", ""):
            victims = child.descendants(name)
            assert victims, name
            for each in victims:
                with suppress(psutil.NoSuchProcess):
                    each.suspend()
            time.sleep(6)  # a lease is 5 s
            for each in victims:
                with suppress(psutil.NoSuchProcess):
                    each.resume()
            wait_for_more(queue, child)
        for _ in range(3):  # a task is tried four times
            time.sleep(random.uniform(0.3, 1))
            for each in child.descendants("pyspark.daemon pyspark.worker")[1:]:  # not their parent
                with suppress(psutil.NoSuchProcess):
                    each.kill()
        wait_for_more(queue, child)
        queue.terminate_backends()
        wait_for_more(queue, child)
        jvm = child.descendants("java")[0]
        others = jvm.children(recursive=True)
        jvm.kill()
        _, alive = psutil.wait_procs(others, timeout=10)
        assert not alive
        traffic.stop()
        traffic.send()
    wait_until(lambda: all_is_free(queue))
    assert queue.backlog("in", "c") >= 100
    drain(queue)
    check(queue, traffic)
