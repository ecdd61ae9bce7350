"""A query keeps a copy of a table from what is captured of it."""

from __future__ import annotations

import pytest
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from tests.spark.conftest import Queue

pytestmark = pytest.mark.spark


@pytest.mark.promise("cookbook: Change capture")
def test_a_query_keeps_a_copy_of_a_table_through_a_restart(queue: Queue, fails):
    """Inserts, updates, deletes and changed keys; and a batch that is repeated."""
    queue.create("s", "c", kind="json", ordering="stream")
    row = "id int, name text, price numeric(10, 1)"
    queue.sql(f"create table t ({row}, primary key (id))")
    queue.sql(f"create table public.copy ({row}, seq bigint, primary key (id))")
    queue.sql("select pgqueue.capture('t', 's')")
    runs: list[int] = []

    def each(batch: DataFrame, batch_id: int) -> None:
        runs.append(batch_id)
        rows = batch.select(
            F.from_json("data", "id int, name string, price decimal(10, 1)").alias("row"),
            "seq",
            (F.col("headers.operation") == "delete").alias("gone"),
        ).select("row.*", "seq", "gone")
        writer = rows.write.format("pgqueue").mode("append").options(url=queue.url)
        writer = writer.options(table="public.copy", mergeKeys="id", sequenceBy="seq")
        writer.option("deleteWhen", "gone").save()
        if len(runs) == 2:
            raise RuntimeError("after the copy was written")

    frame = queue.load("s", "c", maxMessagesPerTrigger="700")
    queue.sql("insert into t select i, 'first', i * 0.1 from generate_series(1, 1000) i")
    queue.sql("update t set id = id + 1000 where id <= 500; delete from t where mod(id, 7) = 0")
    assert "after the copy was written" in fails(queue.collect(frame, each=each))
    queue.sql("update t set id = id + 1 where id = 1500; delete from t where id < 600")
    queue.sql(
        "insert into t values (1501, 'x'), (2, 'y') on conflict (id) do update set name = 'z'"
    )
    queue.collect(frame, each=each).awaitTermination()
    assert runs[:3] == [0, 1, 1]
    copied = queue.sql("select id, name, price from public.copy order by 1")
    assert copied == queue.sql("select * from t order by 1")
    assert len(copied) > 700
    assert queue.backlog("s", "c") == 0
