"""Installed as the top-level module `pyspark_pgqueue`, where Spark looks for data sources.

Spark imports every module of such a name, and one that fails disables all: keep it tiny.
"""

import contextlib

# Where a dependency is missing or too old, only this format is not found.
with contextlib.suppress(ImportError):
    from spark_pgqueue.spark.datasource import PgQueueDataSource as DefaultSource  # noqa: F401
