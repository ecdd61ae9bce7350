"""`spark.read` of the tables of a queue, against the same rows of a plain table."""

from __future__ import annotations

from functools import partial

from pyspark.sql import DataFrame

from tests.benchmarks.harness import Bench, Target, run, timed
from tests.benchmarks.publish import drop_streams
from tests.benchmarks.source import fill

CLAIM = 10_000


def tables(bench: Bench) -> None:
    """A million messages (quick: 250,000), of which a consumer has all before it, or done."""
    rows = 250_000 if bench.quick else 1_000_000
    partitions = -(-rows // 125_000)

    def plain() -> DataFrame:
        options = {"url": bench.url, "rows": rows, "batch": rows, "partitions": partitions}
        return bench.spark.read.format("plain").options(**options).load()

    def queue(table: str, consumer: str | None, columns: str | None = None) -> DataFrame:
        given = {"url": bench.url, "stream": "source", "table": table}
        more = {"consumer": consumer, "columns": columns}
        given |= {name: value for name, value in more.items() if value is not None}
        return bench.spark.read.format("pgqueue").options(**given).load()

    bare = "consumer,seq,reason,deliver_count"
    sides = {
        "plain": plain,
        "messages": partial(queue, "messages", None),
        "pending": partial(queue, "pending", "all"),
        "dead": partial(queue, "dead", "dead"),
        "archived": partial(queue, "archived", "done"),
        "dead, without what messages hold": partial(queue, "dead", "dead", bare),
    }
    taken: dict[str, list[float]] = {name: [] for name in sides}
    with bench.connect() as conn:
        fill(conn, rows)
        for name, settings in (
            ("all", "{}"),
            ("dead", "{}"),
            ("done", '{"keep_history": "1 day"}'),
        ):
            sql = "select pgqueue.create_consumer('source', %s, 'earliest', p_settings => %s)"
            run(conn, sql, (name, settings))
        for _ in range(rows // CLAIM):
            for name, settle in (("dead", "dead_letter"), ("done", "ack")):
                sql = f"select pgqueue.{settle}((select claim_id from pgqueue.claim("
                run(conn, f"{sql}'source', %s, %s) limit 1))", (name, CLAIM))
        write(plain())  # warms the JVM up
        for _ in range(2 if bench.quick else 5):
            for name, side in sides.items():
                taken[name].append(timed(lambda side=side: write(side())))
        drop_streams(conn)
    for name in list(sides)[1:]:
        bench.report.ratio(
            f"spark.read of {rows:,} rows, against a plain table",
            f"table={name}",
            taken[name],
            taken["plain"],
            f"{rows}/s",
            target=Target(least=0.9) if name == "messages" else None,
        )


def write(frame: DataFrame) -> None:
    """Read all, and keep nothing."""
    frame.write.format("noop").mode("overwrite").save()
