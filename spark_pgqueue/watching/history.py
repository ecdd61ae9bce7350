"""The last progress events of a query, as a DataFrame."""

from __future__ import annotations

from dataclasses import astuple, fields
from typing import TYPE_CHECKING

from spark_pgqueue.watching.progress import Query, Sample, samples

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_TYPES = {
    "at": "timestamp",
    "batch": "long",
    "messages": "long",
    "per_second": "double",
    "seconds": "double",
    "backlog": "long",
    "is_estimate": "boolean",
    "lag_seconds": "double",
}


def history(query: Query) -> DataFrame:
    """A row for each source and each of the query's last progress events, the oldest first.

    Spark keeps the last 100 of a query (`spark.sql.streaming.numRecentProgressUpdates`), also when
    it has ended.

        >>> done = spark_pgqueue.history(query)
        >>> done.groupBy("source").sum("messages").collect()
        [Row(source='orders / billing', sum(messages)=2)]

    Args:
        query: a `StreamingQuery`.

    Returns:
        columns at, batch, source, stream, consumer, messages, per_second, seconds, backlog,
        is_estimate and lag_seconds, as in `spark_pgqueue.watching.progress.Sample`.
    """
    from pyspark.sql import SparkSession

    names = [field.name for field in fields(Sample)]
    schema = ", ".join(f"{name} {_TYPES.get(name, 'string')}" for name in names)
    rows = [astuple(sample) for sample in samples(query.recentProgress)]
    return SparkSession.active().createDataFrame(rows, schema)
