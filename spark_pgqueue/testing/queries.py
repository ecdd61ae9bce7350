"""A streaming query in a test: over given messages, to its end."""

from __future__ import annotations

import tempfile
import uuid
from collections.abc import Callable

from pyspark.sql import DataFrame

from spark_pgqueue.client.client import Client


def run_query(
    query: Callable[[DataFrame], DataFrame],
    messages: DataFrame,
    client: Client,
    url: str,
    kind: str,
    output_mode: str,
) -> DataFrame:
    """Run a query over messages: see `QueueTester.run_query`."""
    spark, name = messages.sparkSession, f"test_{uuid.uuid4().hex}"
    client.create_stream(name, kind)
    client.create_consumer(name, "test")
    where = {"url": url, "stream": name}
    messages.write.format("pgqueue").options(**where).mode("append").save()
    frame = spark.readStream.format("pgqueue").options(**where, consumer="test").load()
    with tempfile.TemporaryDirectory() as checkpoint:
        running = query(frame).writeStream.format("memory").queryName(name)
        running = running.outputMode(output_mode).option("checkpointLocation", checkpoint)
        running.trigger(availableNow=True).start().awaitTermination()
    return spark.table(name)
