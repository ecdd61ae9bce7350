"""Several servers with one stream in parts, in Spark: the server of each row."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spark_pgqueue.servers import check_servers

if TYPE_CHECKING:
    from pyspark.sql import Column


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
