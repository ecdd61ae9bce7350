"""The examples in docstrings of what works in a Spark session give what they say."""

from __future__ import annotations

import doctest

import pytest
from pyspark.sql import SparkSession

import spark_pgqueue
from tests.docs.examples import run

pytestmark = pytest.mark.spark

NAMES = [
    "register",
    "in_key_order",
    "server_column",
    pytest.param("watch", marks=pytest.mark.longer),
    pytest.param("history", marks=pytest.mark.longer),
]


@pytest.mark.parametrize("name", NAMES)
def test_the_example_gives_what_it_says(name, url, conn, tmp_path, spark: SparkSession):
    """`spark` is the session; `query` has ended, and has read both messages."""
    (example,) = doctest.DocTestFinder().find(getattr(spark_pgqueue, name), name, globs={})
    assert example.examples
    query = None
    if name in ("watch", "history"):
        conn.execute("select pgqueue.create_stream('orders')")
        conn.execute("select pgqueue.create_consumer('orders', 'billing')")
        conn.execute("select pgqueue.send_batch('orders', '{order 1, order 2}'::text[])")
        read = spark.readStream.format("pgqueue").options(
            url=url, stream="orders", consumer="billing"
        )
        write = read.load().writeStream.format("noop").trigger(availableNow=True)
        query = write.option("checkpointLocation", str(tmp_path / "checkpoint")).start()
        query.awaitTermination()
    run(example, url, spark=spark, query=query)
