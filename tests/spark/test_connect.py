"""Queries over Spark Connect: a function of `foreachBatch` runs on the server."""

from __future__ import annotations

from pathlib import Path

import pyspark
import pytest

from tests.pages import ROOT, environment_of
from tests.processes import Child, connect_port
from tests.spark.conftest import Queue

pytest.importorskip("grpc", reason="Spark Connect needs grpc")
pytestmark = [
    pytest.mark.longer,
    pytest.mark.spark,
    pytest.mark.timeout(1800),  # another test may have the port of Spark Connect for minutes
]

SESSION = """
import os, sys
from pathlib import Path
from pyspark.sql import SparkSession
import spark_pgqueue
from tests.pages import type_all

url, folder, *pages = sys.argv[1:]
os.chdir(folder)
builder = SparkSession.builder.remote("local[2]").config("spark.ui.enabled", "false")
spark = builder.config("spark.sql.shuffle.partitions", 2).getOrCreate()
spark_pgqueue.register(spark)
"""
COPY = """
def load(reader, **options):
    return reader.format("pgqueue").options(url=url, stream="s", **options).load()

def start(function, name):
    query = load(spark.readStream, consumer="c", maxMessagesPerTrigger=40).writeStream
    query = query.foreachBatch(function).option("checkpointLocation", f"{folder}/{name}")
    return query.trigger(availableNow=True).start()

def copy(batch, batch_id):
    session = batch.sparkSession
    published = load(session.read, table="messages", columns="seq")
    rows = batch.join(published, "seq").selectExpr(f"'{session.session_id}' as key", "data")
    for stream in ("first", "second"):
        rows.write.format("pgqueue").mode("append").options(
            url=url, stream=stream, txnAppId="copy", txnVersion=batch_id
        ).save()

start(copy, "copy").awaitTermination()
print("session", spark.session_id)
outside = load(spark.read, table="messages", columns="seq")
query = load(spark.readStream, startingOffsets="earliest").writeStream.trigger(availableNow=True)
query = query.option("checkpointLocation", f"{folder}/outside")
query = query.foreachBatch(lambda batch, batch_id: batch.join(outside, "seq").count())
try:
    query.start().awaitTermination()
except Exception as error:
    print("refused:", error)
"""
PAGES = """
for page in pages:
    type_all(Path(page), url, Path(folder), {"__name__": "__main__", "spark": spark})
"""


def test_a_function_of_foreach_batch_reads_and_writes_in_the_session_of_its_batch(
    url: str, tmp_path: Path, spark_environment: None
) -> None:
    """Which is a clone of the query's, with the source. Frames of another are refused."""
    queue = Queue(url, tmp_path)
    queue.create("s", "c")
    queue.create("first")
    queue.create("second")
    queue.send("s", 1, 100)
    with connect_port(), Child(SESSION + COPY, url, str(tmp_path)) as child:
        assert child.wait(600) == 0, child.output[-5000:]
    for stream in ("first", "second"):
        assert queue.sent(stream) == sorted(str(i) for i in range(1, 101))
    assert queue.backlog("s", "c") == 0
    ((session,),) = queue.sql("select distinct key from pgqueue.peek_at('first', 1, 100)")
    is_cloned = pyspark.__version__ >= "4.3"
    assert (f"session {session}" not in child.output) == is_cloned
    assert ("[SESSION_NOT_SAME]" in child.output) == is_cloned


def test_pages_with_foreach_batch_can_be_typed_over_connect(
    url: str, tmp_path: Path, spark_environment: None
) -> None:
    guide = (ROOT / "spark_pgqueue" / "guide").glob("*.md")
    pages = [str(page) for page in sorted(guide) if "foreachBatch(" in page.read_text()]
    assert len(pages) > 4
    script = (SESSION + PAGES, url, str(tmp_path), *pages)
    with connect_port(), Child(*script, environment=environment_of(url)) as child:
        assert child.wait(1000) == 0, child.output[-5000:]
