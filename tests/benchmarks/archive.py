"""Messages in the Parquet files of an archive: writing them, against COPY, and reading them,
against Spark's own reader of the same files, and against a Python source of batches in memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import psycopg
from pyspark.sql import DataFrame

from spark_pgqueue.archive.exporter import export
from tests.benchmarks.harness import Bench, Target, alternate, run, timed

BATCH = 10_000
COLUMNS = ("seq", "key", "data", "headers", "inserted_at")

SEND = """
with numbers as (select n from generate_series(%s::int, %s::int) numbers (n))
select count(*) from pgqueue.send_batch(
    'archive',
    array(select format('{"order": %%s, "text": "%%s"}', n, repeat(md5(n::text), 5)) from numbers),
    array(select 'customer ' || n %% 5000 from numbers),
    array_fill('{"source": "shop"}'::jsonb, array[(select count(*)::int from numbers)]))
"""


def archive(bench: Bench) -> None:
    """5,000,000 messages (quick: 500,000) of some 200 characters, each with a header."""
    rows = 500_000 if bench.quick else 5_000_000
    folder = bench.home / "archive"
    with bench.connect() as conn:
        run(conn, "select pgqueue.create_stream('archive')")
        run(conn, "select pgqueue.set_retention('archive', p_messages => %s)", (rows // 10,))
        run(conn, "select pgqueue.set_archive('archive', %s)", (str(folder),))
        for first in range(1, rows + 1, BATCH):
            run(conn, SEND, (first, first + BATCH - 1))
            if first % (rows // 20) == 1:
                run(conn, "select pgqueue.maintain()")
        run(conn, "select pgqueue.maintain()")
        run(conn, "vacuum analyze pgqueue.messages")
        exporting(bench, conn)
    reading(bench, [str(each) for each in sorted(folder.rglob("*.parquet"))])
    with bench.connect() as conn:
        run(conn, "select pgqueue.drop_stream('archive')")


def exporting(bench: Bench, conn: psycopg.Connection) -> None:
    """Each segment is a round; before it is written, its rows are copied."""
    ours: list[float] = []
    theirs: list[float] = []
    began = 0.0

    def note(step: str, about: Any) -> None:
        nonlocal began
        if step == "begun":
            theirs.append(timed(partial(copy, conn, about.segment)))
            began = time.perf_counter()
        elif step == "exported":
            seconds, copied = time.perf_counter() - began, theirs.pop()
            ours.append(seconds / about.messages)
            theirs.append(copied / about.messages)

    export(bench.url, on_step=note)
    bench.report.ratio(
        "archive: segments written to files",
        "against COPY of their rows, which are thrown away",
        *(ours, theirs, "1/s"),
    )


def copy(conn: psycopg.Connection, segment: int) -> None:
    sql = (
        "select stream_id, lo, hi from pgqueue.segments join pgqueue.streams using (stream_id) "
        "where name = 'archive' and segment = %s"
    )
    ((stream, lo, hi),) = run(conn, sql, (segment,))
    rows = f"select {', '.join(COLUMNS)} from pgqueue.messages_{stream}"
    rows = f"copy ({rows} where seq >= {lo} and seq < {hi}) to stdout (format binary)"
    with conn.cursor() as cursor, cursor.copy(rows.encode()) as out:
        for _ in out:
            pass


def reading(bench: Bench, files: list[str]) -> None:
    """What is in files, as a batch; both sides with the same columns, headers as a map."""

    def ours(columns: tuple[str, ...]) -> DataFrame:
        given = {"url": bench.url, "stream": "archive", "startingOffsets": "earliest"}
        given["endingOffsets"] = ending
        given["includeHeaders"] = str("headers" in columns)
        return bench.spark.read.format("pgqueue").options(**given).load().select(*columns)

    def plain(columns: tuple[str, ...]) -> DataFrame:
        return bench.spark.read.parquet(*files).select(*columns)

    def ready(columns: tuple[str, ...]) -> DataFrame:
        given = {"file": files[0], "columns": ",".join(columns), "rows": str(rows)}
        return bench.spark.read.format("ready").options(**given).load()

    ((rows, last),) = plain(("seq",)).selectExpr("count(*)", "max(seq)").collect()
    ending = f"seq {last + 1}"
    found = ours(("seq",)).count()
    assert found == rows, f"{found} messages are read, and {rows} are in files"
    for columns, name in (
        (COLUMNS, "with headers"),
        (tuple(c for c in COLUMNS if c != "headers"), "without headers"),
    ):
        sides = {
            side.__name__: partial(read_all, partial(side, columns))
            for side in (ours, plain, ready)
        }
        taken = alternate(sides, 2 if bench.quick else 4)
        for side, against, target in (
            ("plain", "spark.read.parquet", Target(least=0.8)),
            ("ready", "a Python source of batches that are in memory", None),
        ):
            bench.report.ratio(
                f"archive: {rows:,} messages in files, read by Spark",
                f"{name}, against {against}",
                *(taken["ours"], taken[side], f"{rows}/s"),
                target=target,
            )


def read_all(frame: Callable[[], DataFrame]) -> float:
    """Read all, and keep nothing."""
    return timed(lambda: frame().write.format("noop").mode("overwrite").save())
