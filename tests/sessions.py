"""The Spark sessions of the tests, and of the applications that they run in processes of their own.

An application finds this module by its PYTHONPATH, see `processes.Child`. It has to work with every
version of PySpark.
"""

from __future__ import annotations

from collections.abc import Mapping

from pyspark.sql import SparkSession

import spark_pgqueue

QUIET = {
    "spark.ui.enabled": "false",
    "spark.driver.host": "localhost",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.log.level": "ERROR",
}
"""Nothing is served, nothing is printed but errors, and no name of the machine is looked up."""


def session(master: str = "local[2,4]", settings: Mapping[str, str] | None = None) -> SparkSession:
    """A session with the data source registered.

    Args:
        master: where its tasks run; two at a time, and tried four times each, unless told.
        settings: of Spark, beside `QUIET`.
    """
    builder = SparkSession.builder.master(master)
    for name, value in {**QUIET, **(settings or {})}.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    spark_pgqueue.register(spark)
    return spark
