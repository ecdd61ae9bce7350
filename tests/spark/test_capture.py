"""A query keeps a copy of a table from what is captured of it."""

from __future__ import annotations

import pytest
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.window import Window

from spark_pgqueue.postgres.connection import connect
from tests.spark.conftest import Queue

pytestmark = pytest.mark.spark

ROW = "id int, name text, price numeric"


def merge(queue: Queue, batch: DataFrame) -> None:
    """Bring the copy up to date with a micro-batch, in one transaction, and so that it can repeat.

    What came last of a key decides, and nothing from before the last truncate.
    """
    headers = batch.withColumn("operation", F.col("headers")["operation"])
    truncated = headers.where("operation = 'truncate'").agg(F.max("seq")).head()
    since = truncated[0] if truncated and truncated[0] else 0
    latest = Window.partitionBy("key").orderBy(F.desc("seq"))
    changes = (
        headers.where((F.col("seq") > since) & F.col("key").isNotNull())
        .withColumn("place", F.row_number().over(latest))
        .where("place = 1")
        .select("key", "operation", "data")
        .collect()
    )
    gone = [row.key for row in changes if row.operation == "delete"]
    kept = [(row.key, row.data) for row in changes if row.operation != "delete"]
    with connect(queue.url) as conn, conn.transaction():
        if since:
            conn.execute("truncate copy")
        conn.execute("delete from copy where key = any(%s)", [gone])
        conn.cursor().executemany(
            "insert into copy select %s, r.* from json_to_record(%s::json)"
            f" r ({ROW}) on conflict (key) do update"
            " set id = excluded.id, name = excluded.name, price = excluded.price".encode(),
            kept,
        )


def test_a_query_keeps_a_copy_of_a_table_through_a_restart(queue: Queue):
    """Inserts, updates, deletes, changed keys and truncate; and a batch that failed half way."""
    queue.create("s", "c", kind="json", ordering="stream")
    queue.sql(f"create table t ({ROW}, primary key (id))")
    queue.sql("create table copy (key text primary key, id int, name text, price numeric)")
    queue.sql("select pgqueue.capture('t', 's')")
    fails = True

    def each(batch: DataFrame, _: int) -> None:
        merge(queue, batch)
        if fails:
            raise RuntimeError("after the copy was written")

    def run(failing: bool) -> None:
        nonlocal fails
        fails = failing
        query = queue.collect(queue.load("s", "c", maxMessagesPerTrigger="700"), each=each)
        if failing:
            with pytest.raises(Exception, match="after the copy was written"):
                query.awaitTermination(60)
        else:
            assert query.awaitTermination(60)

    queue.sql("insert into t select i, 'first', i * 0.1 from generate_series(1, 1000) i")
    queue.sql("truncate t; insert into t select i, 'x' from generate_series(1, 1000) i")
    queue.sql("update t set id = id + 1000 where id <= 500; delete from t where mod(id, 7) = 0")
    run(failing=True)
    queue.sql("update t set id = id + 1 where id = 1500; delete from t where id < 600")
    queue.sql(
        "insert into t values (1501, 'x'), (2, 'y') on conflict (id) do update set name = 'z'"
    )
    run(failing=False)
    assert queue.sql("select id::text, * from t order by 1") == queue.sql(
        "select * from copy order by 1"
    )
    assert len(queue.sql("select key from copy")) > 700
    assert queue.backlog("s", "c") == 0
