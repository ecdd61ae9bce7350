"""Looking at a query: what it did lately as a DataFrame, and live."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from pyspark.sql.streaming.query import StreamingQuery
from rich.console import Console

import spark_pgqueue
from spark_pgqueue.postgres.errors import PgQueueError
from spark_pgqueue.postgres.statements import Statements
from spark_pgqueue.spark.columns import source_schema
from spark_pgqueue.spark.consumer_source.reader import PgQueueConsumerReader
from spark_pgqueue.spark.options.source import parse_source
from spark_pgqueue.watching import notebook
from spark_pgqueue.watching.progress import ProgressHistory
from tests.spark.conftest import Queue, wait_until

pytestmark = pytest.mark.spark


def watched(query: StreamingQuery, **options) -> str:
    shown = io.StringIO()
    spark_pgqueue.watch(query, console=Console(file=shown, width=200), **options)
    return shown.getvalue()


def test_what_a_query_did_is_a_dataframe_and_can_be_watched(queue: Queue):
    queue.create("orders", "billing")
    queue.send("orders", 1, 1000)
    load = queue.load("orders", "billing", maxMessagesPerTrigger=400)
    query = queue.collect(load)
    watched(query, every=0.2)
    assert not query.isActive, "watching ends with the query"

    rows = spark_pgqueue.history(query).where("messages > 0").orderBy("batch").collect()
    assert [(row.batch, row.messages, row.backlog) for row in rows] == [
        (0, 400, 600),
        (1, 400, 200),
        (2, 200, 0),
    ]
    assert {(row.source, row.stream, row.consumer) for row in rows} == {
        ("orders / billing", "orders", "billing")
    }
    assert all(row.per_second > 0 and row.seconds > 0 for row in rows)
    assert [row.lag_seconds > 0 for row in rows] == [True, True, False]

    last = watched(query)
    assert f"query {query.id} has ended" in last
    assert "orders / billing" in last
    history = ProgressHistory(query)
    assert history.done("orders / billing") == 1
    page = notebook.page(history)
    assert "orders / billing" in page
    assert page.count("<svg") == 1, "with plots"


def test_watching_ends_when_its_time_is_over_and_the_query_goes_on(queue: Queue):
    queue.create("s", "c")
    query = queue.collect(queue.load("s", "c"), available_now=False)
    began = time.monotonic()
    assert "is running" in watched(query, seconds=1, every=0.3)
    assert time.monotonic() - began > 0.9
    assert query.isActive
    for name in ("seconds", "every"):
        with pytest.raises(PgQueueError, match=f"{name} must be greater than 0, not 0"):
            watched(query, **{name: 0})
    query.stop()


def test_a_query_that_failed_is_shown_with_its_error(queue: Queue):
    queue.create("s", "c")
    queue.send("s", 1, 1)

    def fail(batch, batch_id):
        raise ValueError("no such <account>")

    query = queue.collect(queue.load("s", "c"), each=fail)
    assert "has failed: " in watched(query, every=0.2)
    assert "<account>" not in notebook.page(ProgressHistory(query)), "it is text"


def test_other_sources_are_shown_as_far_as_spark_says_what_they_do(queue: Queue):
    rate = queue.spark.readStream.format("rate").option("rowsPerSecond", 50).load()
    query = queue.collect(rate, available_now=False)
    wait_until(lambda: any(p.numInputRows for p in query.recentProgress), query)
    query.stop()
    rows = spark_pgqueue.history(query).where("messages > 0").collect()
    assert rows
    assert {(row.stream, row.backlog) for row in rows} == {(None, None)}


SCRIPT = """
import sys, urllib.request
from pyspark.sql import SparkSession

settings = {settings!r}
spark = SparkSession.builder.master("local[1]").config(map=settings).getOrCreate()
orders = spark.readStream.format("pgqueue").option("url", {url!r})
orders = orders.option("stream", "s").option("consumer", "c").load()
query = orders.writeStream.queryName("billing").format("noop").start()
while not query.recentProgress:
    query.awaitTermination(0.2)
print(urllib.request.urlopen(spark.sparkContext.uiWebUrl + "/metrics/prometheus").read().decode())
"""


@pytest.mark.longer
def test_sparks_own_metrics_have_the_rates_of_a_query(queue: Queue):
    """With the settings that the page tells."""
    page = (Path(spark_pgqueue.__file__).parents[1] / "sql/guide/monitoring.md").read_text()
    settings = dict(
        line.split() for line in page.splitlines() if re.match(r"spark\.[\w.*]+ +\S+$", line)
    )
    assert len(settings) == 3
    queue.create("s", "c")
    queue.send("s", 1, 10)
    script = SCRIPT.format(url=queue.url, settings=settings | {"spark.driver.host": "localhost"})
    environment = os.environ | {"PYSPARK_PYTHON": sys.executable}
    environment.pop("SPARK_CONF_DIR", None)
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=150
    )
    found = re.findall(r"_streaming_billing_(\w+)_Value", done.stdout)
    assert {"inputRate_total", "processingRate_total", "latency"} <= set(found), done.stderr


def test_a_batch_that_took_all_there_was_does_not_wait_for_a_look_at_what_is_left(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    queue = Queue(url, tmp_path)
    queue.create("s", "c")
    options = {"url": url, "stream": "s", "consumer": "c", "maxmessagespertrigger": "4"}
    reader = PgQueueConsumerReader(parse_source(options), source_schema("text", True))
    asked = []
    row = Statements.row

    def spy(self, sql, *parameters, **more):
        asked.append("consumer_lag" in sql)
        return row(self, sql, *parameters, **more)

    monkeypatch.setattr(Statements, "row", spy)
    offset = reader.initialOffset()

    def batch() -> tuple[int, bool]:
        nonlocal offset
        asked.clear()
        offset = reader.latestOffset(offset, reader.getDefaultReadLimit())
        return (reader.reportLatestOffset() or {})["backlog"], any(asked)

    queue.send("s", 1, 9)
    assert [batch(), batch(), batch()] == [(5, True), (1, True), (0, False)]
    queue.send("s", 10, 12)
    assert batch() == (0, False)
    assert batch() == (0, True), "it waited for a second"
    reader.stop()
