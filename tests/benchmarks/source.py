"""Spark's source, against the same rows of a plain table read with little else."""

from __future__ import annotations

import itertools
from functools import partial

import psycopg

import spark_pgqueue
from tests.benchmarks.harness import Bench, Target, run
from tests.benchmarks.publish import (
    BATCH,
    PLAIN,
    PLAIN_IN_BULK,
    SEND_IN_BULK,
    create_stream,
    drop_streams,
    load_batch,
)
from tests.benchmarks.spark import batch_seconds


def source(bench: Bench) -> None:
    """Micro-batches of 250,000 and of 10,000 messages; with ordering=key, without a consumer; of
    messages that went to others in turn; and with ordering=key in many partitions.
    """
    targets = {"ordering=none": Target(least=0.85), "no consumer": Target(least=0.9)}
    compare(bench, 250_000, 6 if bench.quick else 8, targets)
    compare(bench, 10_000, 12 if bench.quick else 22, {})
    fragmented(bench, 10_000 if bench.quick else 50_000)
    by_key(bench, 250_000, 3 if bench.quick else 5)


def compare(bench: Bench, rows: int, batches: int, targets: dict[str, Target]) -> None:
    """Both sides in turn; each query is new, as is its consumer."""
    rounds = 1 if bench.quick else 2
    partitions = -(-rows // 125_000)
    number = itertools.count()

    def plain() -> list[float]:
        options = {"url": bench.url, "rows": rows * batches, "batch": rows}
        frame = bench.spark.readStream.format("plain").options(**options)
        return batch_seconds(frame.option("partitions", partitions).load(), rows)

    def queue(ordering: str) -> list[float]:
        consumer = f"reader {next(number)}"
        with bench.connect() as conn:
            sql = "select pgqueue.create_consumer('source', %s, 'earliest', %s)"
            run(conn, sql, (consumer, ordering))
        frame = bench.spark.readStream.format("pgqueue").options(
            url=bench.url,
            stream="source",
            consumer=consumer,
            maxMessagesPerTrigger=rows,
            minPartitions=partitions,
        )
        return batch_seconds(frame.load(), rows)

    def cursor() -> list[float]:
        frame = bench.spark.readStream.format("pgqueue").options(
            url=bench.url,
            stream="source",
            startingOffsets="earliest",
            maxMessagesPerTrigger=rows,
            minPartitions=partitions,
        )
        return batch_seconds(frame.load(), rows)

    sides = {
        "plain": plain,
        "ordering=none": partial(queue, "none"),
        "ordering=key": partial(queue, "key"),
        "no consumer": cursor,
    }
    taken: dict[str, list[float]] = {name: [] for name in sides}
    with bench.connect() as conn:
        fill(conn, rows * batches)
        plain()  # warms the JVM up
        for _ in range(rounds):
            for name, side in sides.items():
                taken[name] += side()
        drop_streams(conn)
    for name in [name for name in sides if name != "plain"]:
        bench.report.ratio(
            f"source, micro-batches of {rows:,}, partitions: {partitions}, against a plain table",
            name,
            taken[name],
            taken["plain"],
            f"{rows}/s",
            target=targets.get(name),
        )


EVERY_OTHER = """
do $$ begin
    for i in 1..{rows} loop
        perform pgqueue.send('fragmented', lpad(i::text, 200, '0'), p_consumers => '{{c0}}');
        perform pgqueue.send('fragmented', lpad(i::text, 200, '0'), p_consumers => '{{c1}}');
    end loop;
end $$"""


def fragmented(bench: Bench, rows: int, batches: int = 4) -> None:
    """Messages of which every other one is another consumer's, against those in one piece."""
    with bench.connect() as conn:
        load_batch(conn)
        create_stream(conn, "contiguous", 1)
        create_stream(conn, "fragmented", 2)
        for _ in range(rows * batches // BATCH):
            run(conn, SEND_IN_BULK.format(stream="contiguous"))
        for _ in range(batches):
            run(conn, EVERY_OTHER.format(rows=rows))
        run(conn, "vacuum analyze pgqueue.messages")

    def read(stream: str) -> list[float]:
        frame = bench.spark.readStream.format("pgqueue").options(
            url=bench.url, stream=stream, consumer="c0", maxMessagesPerTrigger=rows
        )
        return batch_seconds(frame.load(), rows, warm_up=1)

    taken = {stream: read(stream) for stream in ("contiguous", "fragmented")}
    with bench.connect() as conn:
        drop_streams(conn)
    bench.report.ratio(
        f"source, micro-batches of {rows:,} in as many ranges, against one range",
        "every other message another's",
        taken["fragmented"],
        taken["contiguous"],
        f"{rows}/s",
    )


def by_key(bench: Bench, rows: int, batches: int) -> None:
    """With ordering=key, many partitions against those of the default."""
    many = 40
    cores = 2

    def read(number: int, shuffled: bool, **options: int | str) -> list[float]:
        frame = bench.spark.readStream.format("pgqueue").options(
            url=bench.url,
            stream="by_key",
            consumer=f"c{number}",
            maxMessagesPerTrigger=rows,
            **options,
        )
        read = frame.load()
        return batch_seconds(
            spark_pgqueue.in_key_order(read, cores) if shuffled else read, rows, warm_up=1
        )

    with bench.connect() as conn:
        load_batch(conn)
        create_stream(conn, "by_key", 3, ordering="key")
        for _ in range(rows * batches // BATCH):
            run(conn, SEND_IN_BULK.format(stream="by_key"))
        run(conn, "vacuum analyze pgqueue.messages")
    default = read(0, False)
    asked = read(1, False, minPartitions=many)
    column = read(2, True, minPartitions=cores, keyOrder="column")
    with bench.connect() as conn:
        drop_streams(conn)
    group = f"source, ordering=key, micro-batches of {rows:,}, against the default partitions"
    for name, seconds in (
        (f"minPartitions: {many}", asked),
        (f"keyOrder=column, minPartitions: {cores}, in_key_order to {cores}", column),
    ):
        bench.report.ratio(group, name, seconds, default, f"{rows}/s")


def fill(conn: psycopg.Connection, rows: int) -> None:
    """The table plain and the stream source, with the same rows."""
    run(conn, PLAIN)
    create_stream(conn, "source", 0)
    load_batch(conn)
    for _ in range(rows // BATCH):
        run(conn, PLAIN_IN_BULK)
        run(conn, SEND_IN_BULK.format(stream="source"))
    run(conn, "vacuum analyze plain")
    run(conn, "vacuum analyze pgqueue.messages")
