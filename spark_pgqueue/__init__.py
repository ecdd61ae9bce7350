"""A message queue and stream in Postgres, with a Spark structured streaming source and sink.

`postgres` connects, retries, runs statements and installs the SQL; `client` is the Python client;
`worker` calls handlers for messages; `spark` has the source and the sink, `watching` looks at
queries, `command_line` is the program pgqueue. `client` and `spark` need `postgres` and not each
other, `worker` needs the client; `command_line` needs all, and nothing needs it.
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


def connect(url: str | None = None, **options: Any) -> Client:
    """Connect the Python client. See `spark_pgqueue.client.connect`."""
    from spark_pgqueue import client

    return client.connect(url, **options)


async def connect_async(url: str | None = None, **options: Any) -> AsyncClient:
    """Connect the client for asyncio. See `spark_pgqueue.client.connect_async`."""
    from spark_pgqueue import client

    return await client.connect_async(url, **options)


def __getattr__(name: str) -> Any:
    if name in _LAZY_MODULES:
        return import_module(_LAZY_MODULES[name])
    for module, names in _LAZY_NAMES.items():
        if name in names:
            return getattr(import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
