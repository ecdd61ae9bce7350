"""Spark's sink, against COPY of the same rows by as many processes into a plain table."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from adbc_driver_manager import dbapi as adbc
from adbc_driver_postgresql import dbapi

from tests.benchmarks.harness import Bench, Target, run, timed
from tests.benchmarks.publish import PLAIN, create_stream, drop_streams
from tests.benchmarks.spark import batch_seconds

FILE = 125_000
"""Rows in a file; a micro-batch is two files, read and written by two processes."""


def sink(bench: Bench) -> None:
    """Micro-batches of 250,000 rows from Parquet files, and all files in one batch write."""
    files = write_files(bench.home / "files", 12 if bench.quick else 16)
    rounds = 1 if bench.quick else 2
    with bench.connect() as conn, ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        run(conn, PLAIN)
        create_stream(conn, "sink", 3)

        def copy_all() -> list[float]:
            """Seconds for two files at a time."""
            return [
                timed(lambda two=files[at : at + 2]: list(pool.map(partial(copy, bench.url), two)))
                for at in range(0, len(files), 2)
            ]

        def stream() -> list[float]:
            frame = bench.spark.readStream.schema("key string, data string")
            frame = frame.option("maxFilesPerTrigger", 2).parquet(str(files[0].parent))
            return batch_seconds(frame, 2 * FILE, "pgqueue", url=bench.url, stream="sink")

        def write() -> None:
            frame = bench.spark.read.schema("key string, data string").parquet(str(files[0].parent))
            frame.write.format("pgqueue").mode("append").options(
                url=bench.url, stream="sink"
            ).save()

        copies: list[list[float]] = []
        streamed: list[float] = []
        written: list[float] = []
        for _ in range(rounds):
            copies.append(copy_all())
            streamed += stream()
            written.append(timed(write))
        drop_streams(conn)
        run(conn, "drop table plain")
    group = "sink, against COPY of the same Parquet files into a plain table by two processes"
    target = Target(least=0.75)
    pairs = [seconds for each in copies for seconds in each[2:]]
    name = f"micro-batches of {2 * FILE:,}"
    bench.report.ratio(group, name, streamed, pairs, f"{2 * FILE}/s", target=target)
    rows = FILE * len(files)
    name = f"a batch write of {rows:,}"
    sums = [sum(each) for each in copies]
    bench.report.ratio(group, name, written, sums, f"{rows}/s", target=target)


def write_files(folder: Path, count: int) -> list[Path]:
    """Parquet files with keys and data."""
    folder.mkdir()
    keys = [f"key {number % 5000}" for number in range(FILE)]
    table = pa.table({"key": keys, "data": [f"{number:0200}" for number in range(FILE)]})
    paths = [folder / f"{number}.parquet" for number in range(count)]
    for path in paths:
        pq.write_table(table, path)
    return paths


_connections: dict[str, adbc.Connection] = {}


def copy(url: str, path: Path) -> None:
    """Copy a file into the table plain, in a transaction."""
    if url not in _connections:
        _connections[url] = dbapi.connect(url)
    conn = _connections[url]
    with conn.cursor() as cursor:
        cursor.adbc_ingest("plain", pq.read_table(path), mode="append")
    conn.commit()
