"""What dies and comes back: the application, its JVM, its Python workers. Nothing is lost or twice.

The application copies one stream to another, in small batches, with nothing but the source and the
sink. Whatever is done to it, in the end each message is in the second stream exactly once.
"""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path

import psutil
import pytest

from tests.processes import Child
from tests.spark.conftest import Queue
from tests.sql import internals

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


# The same with rows that go to two streams, and with actions on a part of the messages.
ACTING = APPLICATION.replace(
    'source.load().select("key", "data").writeStream',
    """source.load().selectExpr(
        "data", "seq",
        "case data % 10 when 0 then 'dead_letter' when 5 then 'ack' end as action",
        "case when data % 5 = 0 then 'in' when data % 2 = 0 then 'even' else 'out' end as stream",
        "if(data % 10 = 0, 'ten', null) as reason",
    ).writeStream""",
).replace('stream="out",', 'consumer="c",')


class Traffic:
    """Publishes batches of messages to a stream, all the time, until the block ends."""

    every = 0.2  # seconds

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
    end = time.monotonic() + 180
    while queue.look(internals.count, "sink_batches") == before:
        assert child.process.poll() is None, child.output[-5000:]
        assert time.monotonic() < end, child.output[-5000:]
        time.sleep(0.05)


def drain(queue: Queue, text: str = APPLICATION) -> None:
    """Run the application until nothing is left, also of claims whose lease has to end first."""
    with application(queue, "now", text) as child:
        assert child.wait(240) == 0, child.output[-5000:]
    assert queue.backlog("in", "c") == 0


def check(queue: Queue, traffic: Traffic) -> None:
    expected = sorted(str(i) for i in range(1, traffic.sent + 1))
    assert queue.sent("out") == expected


@pytest.fixture
def copying(url: str, tmp_path: Path) -> Queue:
    queue = Queue(url, tmp_path)  # the applications have sessions of their own
    queue.create("in", "c")
    queue.create("out")
    return queue


# A batch whose first task stages its rows, and whose last row never comes.
STUCK = APPLICATION.replace(
    'source.load().select("key", "data")',
    """source.load().select("key", "data").mapInPandas(
        lambda parts: (part[part.data.map(lambda d: d != "4000" or time.sleep(3600) or True)]
                       for part in parts), "key string, data string")""",
).replace("import sys", "import sys, time")


@pytest.mark.longer
def test_a_killed_application_leaves_the_rows_of_one_try(copying: Queue):
    """The next try of the batch deletes what the one before has staged."""
    assert "3600" in STUCK
    copying.send("in", 1, 4000)
    with application(copying, "now", STUCK) as child:
        end = time.monotonic() + 240
        while not copying.look(internals.staged_chunks):
            assert child.process.poll() is None, child.output[-5000:]
            assert time.monotonic() < end, child.output[-5000:]
            time.sleep(0.05)
        child.kill()
    assert copying.look(internals.count, "messages") > 4000
    drain(copying)
    assert copying.sent("out") == sorted(str(i) for i in range(1, 4001))
    assert copying.look(internals.count, "staged_chunks") == 0
    assert copying.look(internals.count, "messages") == 8000


@pytest.mark.longer
def test_an_application_killed_at_any_point_loses_and_repeats_nothing(copying: Queue):
    """Sends to two streams, acknowledgements and dead letters are of one transaction."""
    assert "dead_letter" in ACTING
    assert 'stream="out"' not in ACTING
    copying.create("even")
    with Traffic(copying) as traffic, application(copying, "always", ACTING) as child:
        wait_for_more(copying, child)
        time.sleep(random.uniform(0, 1))
        child.kill()
    drain(copying, ACTING)
    sent = [i for i in range(1, traffic.sent + 1) if i % 5]
    assert copying.sent("out") == sorted(str(i) for i in sent if i % 2)
    assert copying.sent("even") == sorted(str(i) for i in sent if i % 2 == 0)
    dead = copying.sql("select data, reason from pgqueue.read_dead('in', 'c', p_max => 1000000)")
    assert sorted(dead) == sorted((str(i), "ten") for i in range(10, traffic.sent + 1, 10))
    assert copying.sql("select lost from pgqueue.readers") == [(0,)]


@pytest.mark.longer
def test_killed_workers_and_backends_lose_and_repeat_nothing(copying: Queue):
    with Traffic(copying) as traffic, application(copying, "always") as child:
        wait_for_more(copying, child)
        for victim in ("worker", "backends", "worker"):
            time.sleep(random.uniform(0.3, 1.5))
            if victim == "backends":
                copying.terminate_backends()
            elif workers := child.descendants("pyspark.daemon"):
                # The last ones are the workers, the first their parent.
                workers[-1].kill()
            if child.process.poll() is not None:
                break
        child.kill()
    drain(copying)
    check(copying, traffic)


@pytest.mark.longer
def test_when_the_jvm_dies_its_source_claims_nothing_more_and_its_claims_become_free(
    copying: Queue,
):
    with application(copying, "always") as child:
        copying.send("in", 1, 100)
        wait_for_more(copying, child)
        jvm = child.descendants("java")[0]
        others = [process for process in jvm.children(recursive=True) if process != jvm]
        jvm.kill()
        _, alive = psutil.wait_procs(others, timeout=10)
        assert not alive
        copying.send("in", 101, 200)
        time.sleep(1)
        assert copying.backlog("in", "c") >= 100
        end = time.monotonic() + 15
        rows = 0
        while rows < 100 and time.monotonic() < end:
            rows += len(copying.sql("select * from pgqueue.receive('in', 'c', 1000)"))
            time.sleep(0.2)
        assert rows >= 100
