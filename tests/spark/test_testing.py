"""A streaming query in a user's test: over given messages, to its end."""

from __future__ import annotations

import doctest

import pytest
from chispa import assert_df_equality
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import count, sum

from spark_pgqueue.testing import QueueTester
from tests.docs.examples import run

pytestmark = pytest.mark.spark


def test_a_query_runs_over_given_messages_to_its_end(spark: SparkSession, url: str) -> None:
    def totals(frame: DataFrame) -> DataFrame:
        return frame.groupBy("key").agg(count("*").alias("orders"), sum("data").alias("total"))

    rows = [("customer 7", "10"), ("customer 8", "20"), ("customer 7", "30")]
    messages = spark.createDataFrame(rows, "key string, data string")
    with QueueTester(url) as pgqueue:
        result = pgqueue.run_query(totals, messages, output_mode="complete")
        expected = spark.createDataFrame(
            [("customer 7", 2, 40.0), ("customer 8", 1, 20.0)],
            "key string, orders bigint, total double",
        )
        assert_df_equality(
            result, expected, ignore_row_order=True, ignore_nullable=True, ignore_metadata=True
        )
        again = pgqueue.run_query(lambda frame: frame.select("data"), messages)
        assert again.count() == 3


def test_its_example_gives_what_it_says(spark: SparkSession, url: str) -> None:
    (example,) = doctest.DocTestFinder().find(QueueTester.run_query, "run_query", globs={})
    run(example, url, spark=spark)
