"""Functions on DataFrames of users: the order of keys, and the server of a key."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from spark_pgqueue.postgres.errors import PgQueueError
from spark_pgqueue.servers import check_servers

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import Column, DataFrame

_NEEDED = ("seq", "key", "arrival")


def in_key_order(frame: DataFrame, partitions: int | None = None) -> DataFrame:
    """Bring the messages of a key into one partition, in order: for option("keyOrder", "column").

    In a streaming query a Python worker holds a partition in memory to sort it. In foreachBatch
    Spark sorts, and can spill to disk.

        >>> reader = spark.readStream.format("pgqueue").option("url", url)
        >>> reader = reader.option("stream", "orders").option("consumer", "billing")
        >>> frame = reader.option("keyOrder", "column").load()
        >>> ordered = spark_pgqueue.in_key_order(frame, 4)

    Args:
        frame: read with keyOrder column, with the columns seq, key and arrival.
        partitions: how many partitions; None for spark.sql.shuffle.partitions.

    Returns:
        the same rows and columns. Messages without a key have no order.

    Raises:
        PgQueueError: a column is missing, or `partitions` is less than 1.
    """
    from pyspark.sql import functions as F

    if partitions is not None and (type(partitions) is not int or partitions < 1):
        raise PgQueueError(f"partitions must be None or an int of at least 1, not {partitions!r}")
    missing = [name for name in _NEEDED if name not in frame.columns]
    if missing:
        raise PgQueueError(
            f"in_key_order requires the columns {', '.join(_NEEDED)}, but there is no "
            f"{' and no '.join(missing)}",
            hint='read with option("keyOrder", "column"), and call it before columns are dropped',
        )
    share = F.coalesce("key", F.col("seq").cast("string"))
    shuffled = (
        frame.repartition(share) if partitions is None else frame.repartition(partitions, share)
    )
    if not frame.isStreaming:
        return shuffled.sortWithinPartitions("arrival")

    # Spark does not sort a streaming frame. The inner function is pickled with the query.
    def by_arrival(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import pyarrow

        held = list(batches)
        if held:
            table = pyarrow.Table.from_batches(held).combine_chunks()
            place = table.select(["arrival"]).append_column(
                "row", pyarrow.array(range(table.num_rows), pyarrow.int64())
            )
            rows = place.sort_by("arrival")["row"]
            for first in range(0, table.num_rows, 10_000):
                yield from table.take(rows.slice(first, 10_000)).to_batches()

    return shuffled.mapInArrow(by_arrival, shuffled.schema)


def server_column(key: Column | str, servers: int) -> Column:
    """The server of each row's key, where a stream is on several servers; see `server_of`.

        >>> frame = spark.createDataFrame([("customer 0",), (None,)], "key string")
        >>> frame.select(spark_pgqueue.server_column("key", 3).alias("server")).collect()
        [Row(server=0), Row(server=None)]

    Args:
        key: a column of texts, or its name.
        servers: how many servers there are.

    Returns:
        a column of integers from 0 to below `servers`; null where the key is null.

    Raises:
        PgQueueError: `servers` is less than 1.
    """
    from pyspark.sql import functions as F

    check_servers(servers)
    first = F.substring(F.sha2(F.col(key) if isinstance(key, str) else key, 256), 1, 8)
    return (F.conv(first, 16, 10).cast("bigint") % servers).cast("int")
