"""A message queue and stream in Postgres, with a Spark structured streaming source and sink.

A stream is a sequence of messages. A consumer is a queue of its own over a stream: its workers
claim messages, and acknowledge them when they are done. The SQL in the schema pgqueue decides what
a message, a claim or a batch may do; this package calls it.

    >>> with spark_pgqueue.connect(url) as queue:
    ...     seq = queue.send("orders", "order 3", key="customer 7")
    ...     claim = queue.receive("orders", "billing", max_messages=100)
    ...     print([message.data for message in claim.messages])
    ...     count = claim.ack()
    ['order 1', 'order 2', 'order 3']

Without Spark:

    connect(url)            a client, `client.Client`, with all functions of the schema
    connect_async(url)      the same for asyncio, `client.AsyncClient`
    Consumer(url, ...)      a worker, which calls a function for each message
    handler(stream, consumer)  a decorator: `pgqueue work MODULE` runs such functions
    supervised(worker, ...) reports liveness and readiness to systemd and HTTP probes
    Retry, Reject, Defer    raised by that function for a message that is not done
    Client, AsyncClient     the types of clients, and Claim, Message of what a client receives
    server_of(key, servers) the server of a key, where a stream is on several servers
    embedded.start(folder)  a private Postgres server, from PyPI (extra `embedded`)
    PgQueueError            the only exception of this package, with a hint

With Spark (extra `spark`); the format is called pgqueue:

    register(spark)         make the format known to a session, where pip did not install it
    offsets(url, streams)   the ends of streams, where a batch ends and a query continues
    server_column(key, servers)  the server of each row's key
    in_key_order(frame)     restore the order of keys after a read in many partitions
    watch(query)            show the progress of a query live
    history(query)          the last progress of a query, as a DataFrame
    java.ensure_java_home() a Java for Spark, from PyPI (extra `java`)

In a shell: `pgqueue --help`. The examples in docstrings find a stream "orders" with a consumer
"billing" and two messages; `queue` is a client, `url` its database.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from spark_pgqueue.postgres.errors import PgQueueError
from spark_pgqueue.version import VERSION as __version__

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from spark_pgqueue.client import AsyncClient, Claim, Client, Message
    from spark_pgqueue.postgres import embedded
    from spark_pgqueue.servers import server_of
    from spark_pgqueue.spark.dataframes import in_key_order, server_column
    from spark_pgqueue.spark.platform import java
    from spark_pgqueue.spark.stream_source.streams import offsets
    from spark_pgqueue.watching import history, watch
    from spark_pgqueue.worker import Consumer, Defer, Reject, Retry, handler, supervised

__all__ = [
    "AsyncClient",
    "Claim",
    "Client",
    "Consumer",
    "Defer",
    "Message",
    "PgQueueError",
    "Reject",
    "Retry",
    "__version__",
    "connect",
    "connect_async",
    "embedded",
    "handler",
    "history",
    "in_key_order",
    "java",
    "offsets",
    "register",
    "server_column",
    "server_of",
    "supervised",
    "watch",
]

if not TYPE_CHECKING and not sys.modules.get("pyspark") and find_spec("pyspark") is None:
    __all__.remove("offsets")  # `import *` imports each name, and this one requires PySpark

# Imported on first use: Spark's processes import this package for every micro-batch, and need none
# of these modules.
_LAZY_MODULES = {
    "embedded": "spark_pgqueue.postgres.embedded",
    "java": "spark_pgqueue.spark.platform.java",
}
_LAZY_NAMES = {
    "spark_pgqueue.client": ("AsyncClient", "Claim", "Client", "Message"),
    "spark_pgqueue.worker": ("Consumer", "Defer", "Reject", "Retry", "handler", "supervised"),
    "spark_pgqueue.watching": ("history", "watch"),
    "spark_pgqueue.servers": ("server_of",),
    "spark_pgqueue.spark.dataframes": ("in_key_order", "server_column"),
    "spark_pgqueue.spark.stream_source.streams": ("offsets",),
}


def register(spark: SparkSession, *, ship: bool | None = None) -> None:
    """Make the format "pgqueue" known to a Spark session.

    Where pip has installed this package, Spark finds the format by itself, and the call is not
    needed. From a checkout, a zip or a notebook's folder, Spark's other processes cannot import the
    package; it is sent along with the query instead.

    Spark searches for formats in the active session of a thread. A new thread has none, and fails
    with DATA_SOURCE_NOT_FOUND: call this function first in each thread that reads or writes.

        >>> spark_pgqueue.register(spark)
        >>> frame = spark.read.format("pgqueue").option("url", url).option("table", "stats").load()
        >>> frame.select("consumer", "backlog").collect()
        [Row(consumer='billing', backlog=2)]

    Args:
        spark: the session, classic or Spark Connect.
        ship: whether to send the package with the query, to executors or a Connect server without
            it. They must have psycopg, pyarrow and ADBC, which it needs. None: only if the package
            is not installed here.

    Raises:
        PgQueueError: the Python that Spark starts lacks this package, or a package that it needs.
            (In a session of Spark Connect, only `ship=True` checks this, by a small job.) Or `ship`
            is true, and PySpark 4.0 has found the format by itself.
    """
    from pyspark.errors import AnalysisException

    from spark_pgqueue.spark.datasource import PgQueueDataSource
    from spark_pgqueue.spark.platform import worker_python

    spark.createDataFrame([], "a int")  # makes the session the active one of this thread
    ships = not worker_python.is_installed() if ship is None else ship
    worker_python.check_driver(spark, ships=ships)
    if ships:
        worker_python.ship()
    if ship:
        worker_python.check_executor(spark)
    try:
        spark.dataSource.register(PgQueueDataSource)
    except AnalysisException as error:
        # PySpark 4.0 refuses the name of a format that it has found by itself.
        if "DATA_SOURCE_ALREADY_EXISTS" not in str(error):
            raise
        if ship:
            raise PgQueueError(
                "PySpark 4.0 found this package installed, and cannot send another copy to the "
                "executors",
                hint="install it on the executors, use PySpark 4.1 or later, or run the driver "
                "from a checkout or a zip instead of the installed package",
            ) from None


def connect(url: str | None = None, *, patience: float = 30.0) -> Client:
    """Connect the Python client.

        >>> with spark_pgqueue.connect(url) as queue:
        ...     queue.send("orders", "order 3")
        3

    Args:
        url: a libpq URI or conninfo string; None for libpq's environment and service files.
        patience: seconds to try while Postgres may be restarting; 0 to try once.

    Returns:
        a client with a connection of its own, which it replaces when it is lost.

    Raises:
        PgQueueError: the url is not valid, Postgres refuses it, or patience is over.
    """
    from spark_pgqueue import client

    return client.connect(url, patience=patience)


async def connect_async(
    url: str | None = None, *, patience: float = 30.0, connections: int = 10
) -> AsyncClient:
    """Connect the client for asyncio. Arguments and errors as in `connect`; and `connections`.

    `connections`, at least 2, is the largest number of connections: one for calls that do not wait
    for messages, the others for calls that do. Further calls that wait are queued.

    >>> async def main():
    ...     async with await spark_pgqueue.connect_async(url) as queue:
    ...         return await queue.send("orders", "order 3")
    >>> asyncio.run(main())
    3
    """
    from spark_pgqueue import client

    return await client.connect_async(url, patience=patience, connections=connections)


# A type checker that sees `__getattr__` takes every name, also a misspelt one, for Any.
if not TYPE_CHECKING:

    def __dir__() -> list[str]:
        return sorted(__all__)

    def __getattr__(name: str) -> Any:
        if name in _LAZY_MODULES:
            return import_module(_LAZY_MODULES[name])
        for module, names in _LAZY_NAMES.items():
            if name in names:
                return getattr(import_module(module), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
