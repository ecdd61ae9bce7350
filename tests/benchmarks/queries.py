"""What a running query costs beside its rows: time per micro-batch, idle work, latency, memory."""

from __future__ import annotations

import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import psutil
import psycopg

from spark_pgqueue import connect
from tests.benchmarks.harness import Bench, Line, Target, run
from tests.benchmarks.publish import (
    BATCH,
    SEND_IN_BULK,
    create_stream,
    drop_streams,
    load_batch,
)
from tests.benchmarks.spark import batch_seconds

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.readwriter import DataStreamWriter

GROUP = "a running query"


def queries(bench: Bench) -> None:
    """The time of a micro-batch, idle transactions, latency, and the memory of the workers."""
    with bench.connect() as conn:
        micro_batches(bench, conn)
        idle(bench, conn)
        latency(bench, conn)
        exchange(bench, conn)
        memory(bench, conn)
        drop_streams(conn)


def read(bench: Bench, conn: psycopg.Connection, stream: str, **options: object) -> DataFrame:
    """A query over a stream, by a new consumer that starts at its first message."""
    consumer = f"{time.time()}"
    run(conn, "select pgqueue.create_consumer(%s, %s, 'earliest')", (stream, consumer))
    reader = bench.spark.readStream.format("pgqueue")
    reader = reader.options(url=bench.url, stream=stream, consumer=consumer)
    return reader.options(**{name: str(value) for name, value in options.items()}).load()


def micro_batches(bench: Bench, conn: psycopg.Connection) -> None:
    """Micro-batches of one message, against those of a Python source that has no rows."""
    batches = 15 if bench.quick else 30
    create_stream(conn, "tiny", 0)
    run(conn, f"select pgqueue.send('tiny', 'x') from generate_series(1, {batches})")
    ours, theirs = [], []
    for _ in range(1 if bench.quick else 2):
        frame = bench.spark.readStream.format("nothing").option("batches", batches)
        theirs += batch_seconds(frame.load(), 0)
        ours += batch_seconds(read(bench, conn, "tiny", maxMessagesPerTrigger=1), 1)
    bench.report.ratio(
        GROUP,
        "a micro-batch of one message, against one of an empty Python source",
        ours,
        theirs,
        "ms",
        target=Target(least=round(1 / 1.1, 2)),
    )


def idle(bench: Bench, conn: psycopg.Connection) -> None:
    """Transactions of a query that finds nothing, by the database's own count."""
    seconds = 10 if bench.quick else 40
    create_stream(conn, "idle", 0)
    query = read(bench, conn, "idle").writeStream.format("noop").start()

    # From another database, so that what this one does is not counted. Sessions report what they
    # did about once a second.
    with psycopg.connect(bench.url, dbname="template1", autocommit=True) as other:
        sql = "select xact_commit + xact_rollback from pg_stat_database where datname = %s"
        time.sleep(4)
        before, began = run(other, sql, (conn.info.dbname,))[0][0], time.perf_counter()
        time.sleep(seconds)
        after, ended = run(other, sql, (conn.info.dbname,))[0][0], time.perf_counter()
    query.stop()
    per_second = (after - before) / (ended - began)
    bench.report.add(Line(GROUP, "transactions while idle", per_second, "/s", Target(most=2)))


def latency(bench: Bench, conn: psycopg.Connection) -> None:
    """From the publisher's commit to the call of foreachBatch, beside what Spark takes of it."""
    create_stream(conn, "latency", 0)
    path = str(bench.home / "signals")
    signals = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    empty = bench.spark.readStream.format("signalled").option("socket", path).load()

    def signal() -> None:
        while not Path(path).exists():  # until the source has started
            time.sleep(0.1)
        signals.sendto(b"x", path)

    sides: dict[str, tuple[DataFrame, Callable[[], object]]] = {
        "pgqueue": (
            read(bench, conn, "latency"),
            lambda: run(conn, "select pgqueue.send('latency', 'x')"),
        ),
        "signalled": (empty, signal),
    }
    waited: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(1 if bench.quick else 2):
        for name, (frame, send) in sides.items():
            waited[name] += waits(frame, send, 12 if bench.quick else 22)
            Path(path).unlink(missing_ok=True)
    signals.close()
    median, least = (statistics.median(waited[name]) * 1e3 for name in sides)
    name = "commit to foreachBatch, median; from a signal to it with an empty Python source"
    bench.report.add(Line(GROUP, name, median, "ms", Target(most=60), median, least, "ms"))


EXCHANGED = 1000
"""Messages of a micro-batch that is timed from commit to commit."""


def exchange(bench: Bench, conn: psycopg.Connection) -> None:
    """From the commit of messages to the commit of what a query writes for them."""
    for stream in ("received", "written"):
        create_stream(conn, stream, 0)
    run(conn, "select pgqueue.create_consumer('written', 'watch')")
    signal, done = str(bench.home / "exchange"), str(bench.home / "exchanged")
    count = 12 if bench.quick else 32
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as signals, connect(bench.url) as client:
        signals.bind(done)
        signals.settimeout(120)

        def send() -> None:
            client.send_batch("received", ["x" * 500] * EXCHANGED)

        def written() -> None:
            claim = client.receive("written", "watch", EXCHANGED, wait=timedelta(minutes=2))
            if claim is None or len(claim.messages) != EXCHANGED:
                raise RuntimeError(f"no micro-batch of {EXCHANGED}: {claim}")
            claim.ack()

        def signalled() -> None:
            while not Path(signal).exists():  # until the source has started
                time.sleep(0.1)
            signals.sendto(b"x", signal)

        frame = read(bench, conn, "received").select("key", "data")
        sink = frame.writeStream.format("pgqueue").options(url=bench.url, stream="written")
        ours = spans(sink, send, written, count)
        empty = bench.spark.readStream.format("signalled").option("socket", signal).load()
        least = empty.writeStream.format("nothing").options(batches=0, done=done)
        theirs = spans(least, signalled, lambda: signals.recv(1), count)
    name = f"{EXCHANGED:,} messages, commit to commit, beyond a query of no rows"
    median, own = statistics.median(ours) * 1e3, statistics.median(theirs) * 1e3
    bench.report.add(Line(GROUP, name, median - own, "ms", Target(most=250), median, own, "ms"))


def spans(
    writer: DataStreamWriter, begin: Callable[[], object], end: Callable[[], object], count: int
) -> list[float]:
    """How long it takes a query from `begin` to the return of `end`, time and again."""
    query, taken = writer.start(), []
    for _ in range(count):
        begin()
        began = time.perf_counter()
        end()
        taken.append(time.perf_counter() - began)
        time.sleep(0.3)
    query.stop()
    return taken[2:]


def waits(frame: DataFrame, send: Callable[[], object], count: int) -> list[float]:
    """How long it takes from `send` to the call of foreachBatch, time and again."""
    called = threading.Event()
    times: list[float] = []

    def each_batch(batch: DataFrame, batch_id: int) -> None:
        times.append(time.perf_counter())
        called.set()
        batch.collect()

    query = frame.writeStream.foreachBatch(each_batch).start()
    random, waited = Random(1), []
    for _ in range(count):
        called.clear()
        send()
        sent = time.perf_counter()
        if not called.wait(120):
            raise RuntimeError(f"no batch within two minutes: {query.exception()}")
        waited.append(times[-1] - sent)
        time.sleep(random.uniform(0.3, 0.8))
    query.stop()
    return waited[2:]


def memory(bench: Bench, conn: psycopg.Connection) -> None:
    """Peak memory of Python processes when one task reads, or writes, ten times as much."""
    small, large = 100_000, 400_000 if bench.quick else 1_000_000
    create_stream(conn, "memory", 0)
    create_stream(conn, "copy", 0)
    load_batch(conn)
    for _ in range(large // BATCH):
        run(conn, SEND_IN_BULK.format(stream="memory"))
    for way, sink in (("reads", "noop"), ("reads and writes", "pgqueue")):
        peaks = []
        for rows in (small, large):
            with peak_memory() as peak:
                frame = read(
                    bench, conn, "memory", maxMessagesPerTrigger=rows, minPartitions=1
                ).select("key", "data")
                options = {"url": bench.url, "stream": "copy"} if sink == "pgqueue" else {}
                query = frame.writeStream.format(sink).options(**options).start()
                while not query.lastProgress or query.lastProgress.numInputRows == 0:
                    time.sleep(0.1)
                query.stop()
            peaks.append(peak[0] / 1e6)
        name = f"memory of the worker that {way} {large:,} messages of 200 bytes, above {small:,}"
        grown = peaks[1] - peaks[0]
        bench.report.add(
            Line(GROUP, name, grown, "MB", Target(most=64), peaks[1], peaks[0], measure="MB")
        )


@contextmanager
def peak_memory() -> Iterator[list[int]]:
    """The most resident bytes that any Python process of Spark had, in the yielded list."""
    peak, over = [0], threading.Event()
    (jvm,) = [p for p in psutil.Process().children() if "java" in p.name()]

    def watch() -> None:
        while not over.wait(0.02):
            for process in jvm.children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    # A child that the JVM has just forked still is a JVM.
                    if process.name().startswith("python"):
                        peak[0] = max(peak[0], process.memory_info().rss)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    yield peak
    over.set()
    watcher.join()
