"""Spark's sink, against COPY of the same rows into a plain table, by Spark and without it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import psycopg
import pyarrow as pa
import pyarrow.parquet as pq

from tests.benchmarks.harness import Bench, Target, alternate, run, timed
from tests.benchmarks.plain import connection
from tests.benchmarks.publish import PLAIN, create_stream, drop_streams
from tests.benchmarks.spark import batch_seconds

FILE = 125_000
"""Rows in a file; a process reads and writes one after the other."""


def sink(bench: Bench) -> None:
    """Micro-batches of 250,000 and of 1,000,000 rows from Parquet files, and a batch write."""
    files = write_files(bench.home / "files", 24)
    with bench.connect() as conn, ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        run(conn, PLAIN)
        micro_batches(bench, conn, pool, files, 2)
        micro_batches(bench, conn, pool, files, 8)
        batch_write(bench, conn, pool, files[:16])
        drop_streams(conn)
        run(conn, "drop table plain")


def micro_batches(
    bench: Bench, conn: psycopg.Connection, pool: Executor, files: list[Path], size: int
) -> None:
    """Micro-batches of `size` files: by us, by Spark with the least that a sink does, and bare."""

    def bare() -> list[float]:
        begin_anew(conn)
        groups = [files[at : at + size] for at in range(0, len(files), size)]
        return [copy_all(bench, pool, group) for group in groups][1:]

    def stream(sink: str, **options: str) -> list[float]:
        begin_anew(conn)
        frame = bench.spark.readStream.schema("key string, data string")
        frame = frame.option("maxFilesPerTrigger", size).parquet(str(files[0].parent))
        warm_up = 2 if size == 2 else 1
        return batch_seconds(frame, size * FILE, sink, warm_up, url=bench.url, **options)

    sides: dict[str, Callable[[], list[float]]] = {
        "bare": bare,
        "nothing": partial(stream, "nothing"),
        "plain": partial(stream, "plain"),
        "pgqueue": partial(stream, "pgqueue", stream="sink"),
    }
    taken: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(1 if bench.quick else 2):
        for name, side in sides.items():
            taken[name] += side()
    group, unit = f"sink, micro-batches of {size * FILE:,} rows from Parquet", f"{size * FILE}/s"
    for ours, other, name, target in (
        ("pgqueue", "plain", "against Spark with a sink that only copies", Target(least=0.85)),
        ("pgqueue", "bare", "against COPY by two processes without Spark", Target(least=0.75)),
        ("nothing", "bare", "Spark with a sink that does nothing, against that COPY", None),
    ):
        bench.report.ratio(group, name, taken[ours], taken[other], unit, target=target)


def batch_write(bench: Bench, conn: psycopg.Connection, pool: Executor, files: list[Path]) -> None:
    """All files in one DataFrame."""
    frame = bench.spark.read.schema("key string, data string").parquet(*map(str, files))

    def bare() -> float:
        begin_anew(conn)
        return copy_all(bench, pool, files)

    def write() -> float:
        begin_anew(conn)
        writer = frame.write.format("pgqueue").mode("append")
        return timed(writer.options(url=bench.url, stream="sink").save)

    sides = {"bare": bare, "pgqueue": write}
    taken = alternate(sides, 1 if bench.quick else 3)
    rows = FILE * len(files)
    bench.report.ratio(
        f"sink, a batch write of {rows:,} rows from Parquet",
        "against COPY by two processes without Spark",
        taken["pgqueue"],
        taken["bare"],
        f"{rows}/s",
        target=Target(least=0.75),
    )


def begin_anew(conn: psycopg.Connection) -> None:
    """Empty both sides, with nothing left in memory that one would have to write for the other."""
    run(conn, "truncate plain")
    drop_streams(conn)
    create_stream(conn, "sink", 3)
    run(conn, "checkpoint")


def copy_all(bench: Bench, pool: Executor, files: list[Path]) -> float:
    """Seconds for files that two processes copy into the table plain."""
    return timed(lambda: list(pool.map(partial(copy, bench.url), files)))


def write_files(folder: Path, count: int) -> list[Path]:
    """Parquet files with keys and data."""
    folder.mkdir()
    keys = [f"key {number % 5000}" for number in range(FILE)]
    table = pa.table({"key": keys, "data": [f"{number:0200}" for number in range(FILE)]})
    paths = [folder / f"{number}.parquet" for number in range(count)]
    for path in paths:
        pq.write_table(table, path)
    return paths


def copy(url: str, path: Path) -> None:
    """Copy a file into the table plain, in a transaction."""
    conn = connection(url)
    with conn.cursor() as cursor:
        cursor.adbc_ingest("plain", pq.read_table(path), mode="append")
    conn.commit()
