"""Sending this package along with a query, to Spark's processes that do not have it.

Spark pickles a data source, its readers and its partitions. Pickled by value, they bring the code
of this package along. PySpark, and the libraries that this package needs, must be installed there.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import TYPE_CHECKING

from spark_pgqueue.postgres import schema
from spark_pgqueue.postgres.errors import PgQueueError
from spark_pgqueue.spark.platform import worker_python

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def is_installed() -> bool:
    """Whether other processes with this Python find the package. In a zip or a checkout they do
    not.
    """
    try:
        distribution("spark-pgqueue")
    except PackageNotFoundError:
        return False
    return Path(__file__).is_file()  # a zip may hold the metadata of the distribution, too


def ship() -> None:
    """Pickle the objects of this package by value from now on."""
    from pyspark import cloudpickle

    schema.ship_version()  # the SQL files stay here
    cloudpickle.register_pickle_by_value(sys.modules[worker_python.PACKAGE])


def check_driver(spark: SparkSession, *, ships: bool) -> None:
    """Refuse a Python of Spark, on this machine, that could not run the source or the sink.

    Raises:
        PgQueueError: that Python lacks a module.
    """
    context = getattr(spark, "sparkContext", None)  # Spark Connect has none
    if context is None:
        return
    needed = [name for name in worker_python.NEEDED if name != worker_python.PACKAGE or not ships]
    if missing := worker_python.missing_from(context.pythonExec, needed):
        raise PgQueueError(
            f"the Python that Spark starts, {context.pythonExec} (by spark.pyspark.python, "
            f"PYSPARK_PYTHON, or else the PATH), lacks {', '.join(missing)}",
            hint=worker_python.set_pyspark_python(),
        )


def check_executor(spark: SparkSession) -> None:
    """Ask an executor for the modules that this package needs, which do not travel with the query.

    Raises:
        PgQueueError: the executor lacks a module.
    """
    from pyspark.sql.functions import lit, udf

    needed = [name for name in worker_python.NEEDED if name != worker_python.PACKAGE]

    def missing(_: int) -> str:
        lacking = []
        for name in needed:
            try:
                import_module(name)
            except ImportError:
                lacking.append(name)
        return ", ".join(lacking)

    # Not by Arrow, which may be missing.
    look = udf(missing, "string", useArrow=False)
    row = spark.range(1).select(look(lit(1)).alias("missing")).first()
    if row is not None and row["missing"]:
        raise PgQueueError(
            f"the Python of Spark's executors lacks {row['missing']}: ship=True sends "
            "spark_pgqueue itself along, and not what it needs",
            hint='there: pip install "psycopg[binary]" pyarrow adbc-driver-postgresql '
            "adbc-driver-manager; or send a whole environment (spark.archives with venv-pack)",
        )
