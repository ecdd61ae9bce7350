"""A message queue and stream in Postgres, with a Spark structured streaming source and sink.

A stream is a sequence of messages. A consumer is a queue of its own over a stream: its workers
claim messages, and acknowledge them when they are done. What a message, a claim or a batch may do
is decided in SQL, in the schema pgqueue; this package calls it.

    >>> with spark_pgqueue.connect(url) as queue:
    ...     seq = queue.send("orders", "order 3", key="customer 7")
    ...     claim = queue.receive("orders", "billing", max_messages=100)
    ...     print([message.data for message in claim.messages])
    ...     count = claim.ack()
    ['order 1', 'order 2', 'order 3']

Without Spark:

    connect(url)            a client, `client.Client`, with all that the schema can
    connect_async(url)      the same for asyncio, `client.AsyncClient`
    Consumer(url, ...)      a worker, which calls a function for each message
    Retry, Reject, Defer    what that function raises for a message that is not done
    embedded.start(folder)  a Postgres server of one's own, from PyPI (extra `embedded`)
    PgQueueError            the only exception of this package, with a hint

With Spark (extra `spark`), whose format is called pgqueue:

    register(spark)         make the format known to a session, where pip did not install it
    in_key_order(frame)     the order of keys, for a source that is read in many partitions
    watch(query)            show live what a query does
    history(query)          what it did lately, as a DataFrame
    java.ensure_java_home() a Java for Spark, from PyPI (extra `java`)

In a shell: `pgqueue --help`. The examples in docstrings find a stream "orders" with a consumer
"billing" and two messages; `queue` is a client, `url` its database.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from spark_pgqueue.postgres.errors import PgQueueError
from spark_pgqueue.version import VERSION as __version__

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from spark_pgqueue.client import AsyncClient, Client
    from spark_pgqueue.postgres import embedded
    from spark_pgqueue.spark import java
    from spark_pgqueue.spark.key_order import in_key_order
    from spark_pgqueue.watching import history, watch
    from spark_pgqueue.worker import Consumer, Defer, Reject, Retry

__all__ = [
    "Consumer",
    "Defer",
    "PgQueueError",
    "Reject",
    "Retry",
    "__version__",
    "connect",
    "connect_async",
    "embedded",
    "history",
    "in_key_order",
    "java",
    "register",
    "watch",
]

# Imported when they are first asked for: Spark's processes import this package for every
# micro-batch, and need none of them.
_LAZY_MODULES = {"embedded": "spark_pgqueue.postgres.embedded", "java": "spark_pgqueue.spark.java"}
_LAZY_NAMES = {
    "spark_pgqueue.worker": ("Consumer", "Defer", "Reject", "Retry"),
    "spark_pgqueue.watching": ("history", "watch"),
    "spark_pgqueue.spark.key_order": ("in_key_order",),
}


def register(spark: SparkSession, *, ship: bool | None = None) -> None:
    """Make the format "pgqueue" known to a Spark session.

    Not needed where this package is installed by pip: Spark finds the format by itself. Where it is
    not (a checkout, a zip, a notebook's folder), Spark's other processes cannot import it, and it
    travels with the query instead.

        >>> spark_pgqueue.register(spark)
        >>> frame = spark.read.format("pgqueue").option("url", url).option("table", "stats").load()
        >>> frame.select("consumer", "backlog").collect()
        [Row(consumer='billing', backlog=2)]

    Args:
        spark: the session, classic or Spark Connect.
        ship: whether it travels with the query, for executors, or a Connect server, without this
            package. What it needs itself they must have: psycopg, pyarrow and ADBC. None: where it
            is not installed here.

    Raises:
        PgQueueError: the Python that Spark starts lacks this package, or one that it needs. (Seen
            in a session of Spark Connect only with `ship` true, which runs a small job to see it.)
            Or `ship` is true, and PySpark 4.0 has found the format by itself.
    """
    from pyspark.errors import AnalysisException

    from spark_pgqueue.postgres.errors import PgQueueError
    from spark_pgqueue.spark import shipping
    from spark_pgqueue.spark.datasource import PgQueueDataSource

    ships = not shipping.is_installed() if ship is None else ship
    shipping.check_driver(spark, ships=ships)
    if ships:
        shipping.ship()
    if ship:
        shipping.check_executor(spark)
    try:
        spark.dataSource.register(PgQueueDataSource)
    except AnalysisException as error:
        # PySpark 4.0 refuses the name of a format that it has found by itself.
        if "DATA_SOURCE_ALREADY_EXISTS" not in str(error):
            raise
        if ship:
            raise PgQueueError(
                "PySpark 4.0 has found this package installed, and does not take another one for "
                "the executors",
                hint="install it there too, or use PySpark 4.1 or later; or give the driver a "
                "checkout or a zip in place of the installed one",
            ) from None


def connect(url: str | None = None, *, patience: float = 30.0) -> Client:
    """Connect the Python client.

        >>> with spark_pgqueue.connect(url) as queue:
        ...     queue.send("orders", "order 3")
        3

    Args:
        url: a libpq URI or conninfo string; None for libpq's environment and service files.
        patience: seconds to go on trying for while Postgres may be restarting; 0 to try once.

    Returns:
        a client with a connection of its own, which it replaces when it is lost.

    Raises:
        PgQueueError: the url is not valid, Postgres refuses it, or patience is over.
    """
    from spark_pgqueue import client

    return client.connect(url, patience=patience)


async def connect_async(url: str | None = None, *, patience: float = 30.0) -> AsyncClient:
    """Connect the client for asyncio. Arguments and errors as in `connect`.

    >>> async def main():
    ...     async with await spark_pgqueue.connect_async(url) as queue:
    ...         return await queue.send("orders", "order 3")
    >>> asyncio.run(main())
    3
    """
    from spark_pgqueue import client

    return await client.connect_async(url, patience=patience)


def __getattr__(name: str) -> Any:
    if name in _LAZY_MODULES:
        return import_module(_LAZY_MODULES[name])
    for module, names in _LAZY_NAMES.items():
        if name in names:
            return getattr(import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
