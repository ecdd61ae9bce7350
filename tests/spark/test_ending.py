"""A query that is stopped in the middle of its function, with the stack that the guide advises."""

from __future__ import annotations

import pytest

from tests.processes import Child

pytestmark = [
    *(pytest.mark.spark, pytest.mark.slow, pytest.mark.longer, pytest.mark.timeout(600)),
    pytest.mark.usefixtures("spark_environment"),
]

APPLICATION = """
    import sys, threading
    from pyspark.sql import SparkSession
    folder, stack = sys.argv[1:]
    spark = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.host", "localhost")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.extraJavaOptions", stack)
        .config("spark.log.level", "ERROR")
        .getOrCreate()
    )
    began = threading.Event()

    def in_python(batch, batch_id):
        began.set()
        threading.Event().wait(1)

    def in_spark(batch, batch_id):
        began.set()
        while True:
            batch.count()

    for each in (in_python, in_spark, in_python, in_spark):
        began.clear()
        query = spark.readStream.format("rate").load().writeStream.foreachBatch(each)
        query = query.option("checkpointLocation", f"{folder}/{id(query)}").start()
        began.wait()
        query.stop()
        assert not query.isActive and query.exception() is None
    print("all stopped", flush=True)
"""


def test_with_a_large_stack_who_stops_a_query_sees_no_java(tmp_path):
    # Without the settings of the tests, which have a larger stack than Spark's users.
    options = {"SPARK_SUBMIT_OPTS": ""}
    with Child(APPLICATION, str(tmp_path), "-Xss16m", environment=options) as child:
        child.wait_for("all stopped", timeout=300)
        child.wait()
        output = child.output
    assert "Exception" not in output, output[:4_000]
    assert "StackOverflowError" not in output
    assert "\tat " not in output
