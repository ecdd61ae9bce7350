"""Spark's sink into a table, against a sink that only copies, one SQL statement, and Spark's JDBC.

JDBC is measured where Debian's package libpostgresql-jdbc-java is installed, or its jar is named by
PGQUEUE_BENCH_JDBC.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import psycopg
import pyarrow as pa
import pyarrow.parquet as pq
from psycopg.conninfo import conninfo_to_dict
from pyspark.sql import DataFrame

from tests.benchmarks.harness import Bench, Line, Target, alternate, low, run, timed
from tests.benchmarks.spark import JDBC, batch_seconds
from tests.sql.table_writes import Write, target

ROWS, FILES = 1_000_000, 8
COLUMNS = "id bigint, customer text, amount numeric(10, 2), version int"
SCHEMA = "id bigint, customer string, amount decimal(10, 2), version int"
MERGED = {"mergeKeys": "id", "sequenceBy": "version"}


def into_tables(bench: Bench) -> None:
    """Appends and merges of 1,000,000 rows of four columns, and small batches in the server."""
    folder = write_files(bench.home / "rows")
    with bench.connect() as conn:
        run(conn, f"create table plain ({COLUMNS}); create table public.bills ({COLUMNS})")
        appends(bench, conn, folder)
        run(conn, "alter table public.bills add primary key (id)")
        merges(bench, conn, folder)
        small_batches(bench, conn)
        run(conn, "drop table plain, public.bills")


def write_files(folder: Path) -> Path:
    """Three micro-batches of Parquet files; the first one's ids are 1 to 1,000,000."""
    folder.mkdir()
    size = ROWS // FILES
    for number in range(3 * FILES):
        ids = pa.array(range(number * size + 1, (number + 1) * size + 1), pa.int64())
        rows = {
            "id": ids,
            "customer": pa.array([f"customer {n % 5000}" for n in range(size)]),
            "amount": pa.array([n % 10_000 for n in range(size)]).cast(pa.decimal128(21, 2)),
            "version": pa.array([2] * size, pa.int32()),
        }
        rows["amount"] = rows["amount"].cast(pa.decimal128(10, 2))
        pq.write_table(pa.table(rows), folder / f"{number:02}.parquet")
    return folder


def appends(bench: Bench, conn: psycopg.Connection, folder: Path) -> None:
    """Micro-batches, beside a sink that copies and has no commit; then beside JDBC, as batches."""

    def stream(sink: str, **options: str) -> list[float]:
        run(conn, "truncate plain, public.bills; checkpoint")
        frame = bench.spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", FILES)
        return batch_seconds(frame.parquet(str(folder)), ROWS, sink, 1, url=bench.url, **options)

    ours, copied = [], []
    for _ in range(1 if bench.quick else 3):
        copied += stream("plain")
        ours += stream("pgqueue", table="public.bills")
    group, unit = f"into a table, micro-batches of {ROWS:,} rows, appended", f"{ROWS}/s"
    against = "against Spark with a sink that only copies"
    bench.report.ratio(group, against, ours, copied, unit, target=Target(least=0.65))
    if not JDBC.exists():
        return
    let_tcp_in(bench, conn)
    first = first_batch(bench, folder)

    def batch(write: Callable[[], None]) -> float:
        run(conn, "truncate plain, public.bills; checkpoint")
        return timed(write)

    sides = {
        "ours": partial(batch, partial(save, bench, first)),
        "jdbc": partial(batch, partial(by_jdbc, bench, first, "")),
        "rewritten": partial(batch, partial(by_jdbc, bench, first, "?reWriteBatchedInserts=true")),
    }
    taken = alternate(sides, 1 if bench.quick else 3)
    group = f"into a table, a batch write of {ROWS:,} rows, appended"
    for side, name in (("jdbc", ""), ("rewritten", ", reWriteBatchedInserts")):
        bench.report.ratio(
            group, f"against Spark's JDBC append{name}", taken["ours"], taken[side], unit
        )


def let_tcp_in(bench: Bench, conn: psycopg.Connection) -> None:
    """JDBC knows no Unix sockets, and an embedded server rejects what comes by TCP."""
    rules = next(bench.home.rglob("pg_hba.conf"))
    rules.write_text("host all all 127.0.0.1/32 trust\n" + rules.read_text())
    run(conn, "select pg_reload_conf()")


def first_batch(bench: Bench, folder: Path) -> DataFrame:
    paths = [str(folder / f"{number:02}.parquet") for number in range(FILES)]
    return bench.spark.read.schema(SCHEMA).parquet(*paths).coalesce(2)


def save(bench: Bench, frame: DataFrame, **options: str) -> None:
    writer = frame.write.format("pgqueue").mode("append")
    writer.options(url=bench.url, table="public.bills", **options).save()


def by_jdbc(bench: Bench, frame: DataFrame, more: str) -> None:
    given = conninfo_to_dict(bench.url)
    url = f"jdbc:postgresql://127.0.0.1:{given['port']}/{given['dbname']}{more}"
    writer = frame.write.format("jdbc").mode("append").option("driver", "org.postgresql.Driver")
    writer.options(url=url, user=given["user"], dbtable="plain").option(
        "password", given.get("password", "")
    ).save()


def merges(bench: Bench, conn: psycopg.Connection, folder: Path) -> None:
    """Half of the rows are new. The statement merges rows that are loaded already."""
    first = first_batch(bench, folder)
    run(conn, "truncate plain")
    save(bench, first)
    run(conn, "insert into plain select * from public.bills")

    def begin_anew() -> None:
        run(conn, "truncate public.bills")
        run(conn, "insert into public.bills select id, customer, 0, 1 from plain where id % 2 = 0")
        run(conn, "vacuum analyze public.bills")
        run(conn, "checkpoint")

    def statement() -> float:
        begin_anew()
        sql = (
            "insert into public.bills select * from plain on conflict (id) do update set "
            "customer = excluded.customer, amount = excluded.amount, version = excluded.version"
        )
        return timed(lambda: run(conn, sql))

    def write(**options: str) -> float:
        begin_anew()
        return timed(lambda: save(bench, first, **options))

    sides = {
        "sql": statement,
        "merge": partial(write, mergeKeys="id"),
        "sequence": partial(write, **MERGED),
    }
    taken = alternate(sides, 1 if bench.quick else 3)
    group = f"into a table, a merge of {ROWS:,} rows, half of them new"
    for side, name in (("merge", "against"), ("sequence", "with sequenceBy, against")):
        bench.report.ratio(
            group,
            f"{name} one SQL statement over rows that are there",
            *(taken[side], taken["sql"], f"{ROWS}/s"),
            target=Target(least=0.65),
        )


def small_batches(bench: Bench, conn: psycopg.Connection) -> None:
    """What a batch of 100 rows costs in Postgres: open, stage, commit and drop."""
    columns = {"id": "bigint", "customer": "string", "amount": "decimal(10,2)", "version": "int"}
    given = target("public.bills", columns, ["id"], sequence_by="version")

    def one(number: int) -> float:
        rows = [(n, "a", 1, number) for n in range(100)]

        def work() -> None:
            began = Write(conn, given, "bench", number).stage(*rows)
            began.apply()
            began.drop()

        return timed(work)

    taken = [one(number) for number in range(60)][10:]
    bench.report.add(
        Line(
            "into a table, a batch of 100 rows, merged",
            "in Postgres, without Spark",
            low(taken) * 1e3,
            "ms",
            Target(most=8),
        )
    )
