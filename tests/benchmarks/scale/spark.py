"""Spark with many tasks: its connections, its COPYs, and what the driver does for each batch."""

from __future__ import annotations

import shutil
import statistics
import tempfile
import threading
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg

from tests.benchmarks.scale.figures import Figures
from tests.benchmarks.scale.gauge import Gauge, send_batch
from tests.benchmarks.spark import session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TASKS = [1, 8, 64]
QUICK = [1, 8]
MANY, FEW = 10_000, 1
"""Messages of a task, of batches that work, and of batches that show what the driver costs."""

BATCHES = 4
SMALL_BATCHES = 16
WATCH = """
select count(*), count(*) filter (where query ilike '%%copy%%' and state = 'active')
from pg_stat_activity
where backend_type = 'client backend' and datname = current_database() and pid <> all (%s)
"""


class Watch:
    """Counts the connections of a database while it runs: the most at once."""

    def __init__(self, url: str, but: list[int]):
        self._url = url
        self._but = but
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.most: Counter[str] = Counter()
        self.looks = 0

    def _run(self) -> None:
        with psycopg.connect(self._url, autocommit=True) as conn:
            mine = [*self._but, conn.info.backend_pid]
            while not self._over.wait(0.01):
                self.looks += 1
                row = conn.execute(WATCH, (mine,)).fetchone() or (0, 0)
                for name, now in zip(("connections", "COPYs"), row, strict=True):
                    self.most[name] = max(self.most[name], now)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def spark(url: str, figures: Figures) -> None:
    """One session of 64 cores by name: as many tasks run at once, on what cores there are."""
    gauge = Gauge(url)
    sizes = QUICK if figures.quick else TASKS
    home = Path(tempfile.mkdtemp(prefix="pgqueue-scale-spark-"))
    started = session(home, cores=sizes[-1])  # which has the checkpoints in that folder
    gauge.ask("select pgqueue.create_stream('s')")
    gauge.ask("select pgqueue.create_stream('out')")
    for n in [1, *sizes]:  # the first one warms the JVM up
        for size, batches in ((FEW, SMALL_BATCHES), (MANY, BATCHES)):
            _run(started, gauge, figures, n, n * size, batches)
    started.stop()
    shutil.rmtree(home, ignore_errors=True)
    gauge.conn.close()


def _run(
    spark: SparkSession, gauge: Gauge, figures: Figures, n: int, rows: int, batches: int
) -> None:
    """A query from a stream to another one, whose batches have n tasks."""
    gauge.ask("select pgqueue.drop_consumer(stream, consumer) from pgqueue.consumer_stats")
    gauge.ask("select pgqueue.create_consumer('s', 'c')")
    for _ in range(-(-rows * batches // 10_000)):
        gauge.ask(send_batch(min(10_000, rows * batches)))
    transactions = "select xact_commit from pg_stat_database where datname = current_database()"
    gauge.ask("select pg_stat_force_next_flush()")
    before = gauge.value(transactions)
    with Watch(gauge.url, [gauge.conn.info.backend_pid]) as watch:
        frame = spark.readStream.format("pgqueue").options(
            url=gauge.url, stream="s", consumer="c", maxMessagesPerTrigger=rows, minPartitions=n
        )
        query = (
            frame.load()
            .select("data")
            .writeStream.format("pgqueue")
            .options(url=gauge.url, stream="out")
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
    committed = gauge.value(transactions) - before - watch.looks
    progress: list[Any] = [each for each in query.recentProgress if each.numInputRows == rows]
    kind = "a message" if rows == n * FEW else f"{MANY:,} messages"
    name = f"tasks of {kind} each"
    for what, most in watch.most.items():
        figures.note("spark", f"{n} {name}: {what} at once", most)
    figures.note("spark", f"{n} {name}: transactions a batch", committed / max(len(progress), 1))
    parts: dict[str, list[float]] = {}
    for each in progress[1:]:
        for part, took in each.durationMs.items():
            parts.setdefault(part, []).append(took)
    for part, took in parts.items():
        figures.note("spark", f"{n} {name}: {part}, ms", statistics.median(took))
