"""Installed as the top-level module `pyspark_pgqueue`, where Spark searches for data sources.

Spark imports every module with such a name, and one that fails disables all: keep it small.
"""

import contextlib

# If a dependency is missing or too old, only this format is not found.
with contextlib.suppress(ImportError):
    from spark_pgqueue.spark.datasource import PgQueueDataSource as DefaultSource  # noqa: F401
