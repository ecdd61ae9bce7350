"""A query without a consumer that is killed, beside producers and retention, over a stream and over
one with an archive, whose exporter is killed too.
"""

from __future__ import annotations

import random
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest

from spark_pgqueue.postgres.connection import connect
from tests.processes import Child
from tests.spark.conftest import Queue
from tests.sql.queue import maintain

pytestmark = [
    *(pytest.mark.spark, pytest.mark.slow, pytest.mark.longer, pytest.mark.timeout(600)),
    pytest.mark.usefixtures("spark_environment"),
]

APPLICATION = """
    import sys, time
    import psycopg
    from tests.sessions import session
    url, checkpoint, trigger = sys.argv[1:]
    spark = session()

    def note(batch, batch_id):
        rows = [f"{row.stream} {row.seq}" for row in batch.select("stream", "seq").collect()]
        with psycopg.connect(url) as conn:
            conn.execute("insert into seen values (%s, %s)", [batch_id, rows])
        print("batch", batch_id, flush=True)
        if trigger == "always":
            time.sleep(0.7)  # to be killed before Spark has noted the batch

    source = spark.readStream.format("pgqueue").options(
        url=url, streams="in, archived", startingOffsets="earliest", minPartitions=2,
        maxMessagesPerTrigger=300,
    )
    writer = source.load().writeStream.foreachBatch(note).option("checkpointLocation", checkpoint)
    query = (writer.trigger(availableNow=True) if trigger == "now" else writer).start()
    query.awaitTermination()
"""

EXPORTER = """
    import sys, time
    from spark_pgqueue.archive.exporter import export
    print("ready", flush=True)
    while True:
        export(sys.argv[1])
        time.sleep(0.1)
"""


class Producers:
    """Transactions of all kinds, that overlap, retention and exporters, until the block ends."""

    def __init__(self, queue: Queue):
        self.queue = queue
        self.sent: list[str] = []
        self._done = threading.Event()

    def _send(self, slow: bool) -> None:
        with connect(self.queue.url) as conn:
            while not self._done.wait(random.uniform(0, 0.3)):
                if len(self.sent) - len(self.seen(conn)) > 1500:
                    continue  # retention would overtake the query
                conn.execute("begin")
                count, stream = random.choice([1, 1, 50]), random.choice(["in", "archived"])
                rows = conn.execute(
                    "select * from pgqueue.send_batch(%s, array_fill('x'::text, array[%s]))",
                    [stream, count],
                ).fetchall()
                if slow:
                    self._done.wait(random.uniform(0, 2))
                if random.random() < 0.3:
                    conn.execute("rollback")
                else:
                    conn.execute("commit")
                    self.sent += [f"{stream} {seq}" for (seq,) in rows]

    def seen(self, conn: psycopg.Connection) -> set[str]:
        """What the query has read."""
        rows = conn.execute("select distinct unnest(messages) from seen").fetchall()
        return {message for (message,) in rows}

    def _trim(self) -> None:
        with connect(self.queue.url) as conn:
            while not self._done.wait(0.3):
                maintain(conn)

    def _export(self) -> None:
        while not self._done.is_set():
            with Child(EXPORTER, self.queue.url) as exporter:
                exporter.wait_for("ready")
                self._done.wait(random.uniform(1, 3))
                exporter.kill()

    @contextmanager
    def running(self) -> Iterator[None]:
        threads = [threading.Thread(target=self._send, args=[slow]) for slow in (0, 0, 1, 1)]
        threads += [threading.Thread(target=each) for each in (self._trim, self._export)]
        for each in threads:
            each.start()
        try:
            yield
        finally:
            self._done.set()
            for each in threads:
                each.join()


@pytest.mark.promise(
    "guarantee: By offset", "guarantee: Archive", "kafka: without a consumer, crashes"
)
def test_a_killed_query_reads_the_same_rows_in_each_batch_and_every_message_once(
    url: str, tmp_path: Path
):
    queue = Queue(url, tmp_path)
    queue.create("in")
    queue.create("archived")
    queue.sql("select pgqueue.set_retention('in', p_messages => 8000)")
    queue.sql("select pgqueue.set_retention('archived', p_messages => 100)")
    queue.sql("select pgqueue.set_archive('archived', %s)", str(tmp_path / "archive"))
    queue.look(maintain)
    queue.sql("create table seen (batch int, messages text[])")
    producers = Producers(queue)
    with producers.running(), Child(APPLICATION, url, queue.checkpoint(), "always") as child:
        child.wait_for("batch", 120)
        batches = child.output.count("batch")
        child.wait_until(lambda: child.output.count("batch") >= batches + 2)
        time.sleep(random.uniform(0, 0.5))
        child.kill()
    with Child(APPLICATION, url, queue.checkpoint(), "now") as child:
        assert child.wait(240) == 0, child.output[-5000:]
    seen: dict[int, list[list[str]]] = defaultdict(list)
    for batch, messages in queue.sql("select batch, messages from seen"):
        seen[batch].append(messages)
    again = {batch: times for batch, times in seen.items() if len(times) > 1}
    assert again, "no batch was replayed"
    assert all(sorted(each) == sorted(times[0]) for times in again.values() for each in times)
    assert sorted(each for times in seen.values() for each in times[0]) == sorted(producers.sent)
    trimmed = queue.sql("select stream, trimmed from pgqueue.stream_retention order by stream")
    assert trimmed[0][1], "nothing of the archive's stream was taken out of Postgres"
