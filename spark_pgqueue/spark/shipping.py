"""Spark's other processes without this package: it travels with the query.

Spark sends a data source, its readers and its partitions pickled. By value, they bring all of this
package along that they use; what they need of others, and PySpark, must be there.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import TYPE_CHECKING

from spark_pgqueue.command_line import doctor
from spark_pgqueue.postgres import schema
from spark_pgqueue.postgres.errors import PgQueueError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PACKAGE = "spark_pgqueue"


def is_installed() -> bool:
    """Whether other processes with this Python find the package: not in a zip or a checkout."""
    try:
        distribution("spark-pgqueue")
    except PackageNotFoundError:
        return False
    return Path(__file__).is_file()  # a zip may hold the distribution, too


def ship() -> None:
    """From now on pickle what is of this package by value."""
    from pyspark import cloudpickle

    import spark_pgqueue

    schema.ship_version()  # the SQL files stay here
    cloudpickle.register_pickle_by_value(spark_pgqueue)


def check_driver(spark: SparkSession, *, ships: bool) -> None:
    """Refuse a Python of Spark's on this machine that could not run the source or the sink.

    Raises:
        PgQueueError: it lacks a module.
    """
    context = getattr(spark, "sparkContext", None)  # Spark Connect has none
    if context is None:
        return
    needed = [name for name in doctor.NEEDED if name != PACKAGE or not ships]
    if missing := doctor.missing_from(context.pythonExec, needed):
        raise PgQueueError(
            f"the Python that Spark starts, {context.pythonExec} (by spark.pyspark.python, "
            f"PYSPARK_PYTHON, or else the PATH), lacks {', '.join(missing)}",
            hint=doctor.set_pyspark_python(),
        )


def check_executor(spark: SparkSession) -> None:
    """Ask an executor for what this package needs, which does not travel with the query.

    Raises:
        PgQueueError: it lacks a module.
    """
    from pyspark.sql.functions import lit, udf

    needed = [name for name in doctor.NEEDED if name != PACKAGE]

    def missing(_: int) -> str:
        lacking = []
        for name in needed:
            try:
                import_module(name)
            except ImportError:
                lacking.append(name)
        return ", ".join(lacking)

    # Not by Arrow, which may be what is missing.
    look = udf(missing, "string", useArrow=False)
    row = spark.range(1).select(look(lit(1)).alias("missing")).first()
    if row is not None and row["missing"]:
        raise PgQueueError(
            f"the Python of Spark's executors lacks {row['missing']}: ship=True sends "
            "spark_pgqueue itself along, and not what it needs",
            hint='there: pip install "psycopg[binary]" pyarrow adbc-driver-postgresql '
            "adbc-driver-manager; or send a whole environment (spark.archives with venv-pack)",
        )
