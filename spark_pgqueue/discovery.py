"""Installed as the top-level module `pyspark_pgqueue`, where Spark looks for data sources.

Spark imports every module of such a name, and one that fails disables all: keep it tiny.
"""

from spark_pgqueue.datasource import PgQueueDataSource as DefaultSource

__all__ = ["DefaultSource"]
