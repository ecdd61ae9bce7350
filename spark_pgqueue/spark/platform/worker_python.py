"""The Python that Spark starts: the modules that it needs, and sending this package to it.

Spark pickles a data source, its readers and its partitions. Pickled by value, they bring the code
of this package along. PySpark, and the libraries that this package needs, must be installed there.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Iterable
from importlib import import_module
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import TYPE_CHECKING

from spark_pgqueue.postgres import schema
from spark_pgqueue.postgres.errors import PgQueueError, how_to_install

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PACKAGE = "spark_pgqueue"

NEEDED = (PACKAGE, "psycopg", "pyarrow", "adbc_driver_postgresql", "adbc_driver_manager")
"""The modules that the Python processes of Spark import, besides Spark's own."""

_FIND = """
import sys
from importlib.util import find_spec
print(*[name for name in sys.argv[1:] if find_spec(name) is None])
"""


def missing_from(python: str, needed: Iterable[str] = NEEDED) -> list[str]:
    """The modules that a Python lacks: a program that Spark starts, by its path or on the PATH."""
    try:
        found = subprocess.run(
            [python, "-c", _FIND, *needed], capture_output=True, text=True, timeout=60, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise PgQueueError(
            f"{python}, which Spark is to start, does not run: {error}", hint=set_pyspark_python()
        ) from None
    return found.stdout.split()


def set_pyspark_python() -> str:
    """The hint for a Python that lacks a module."""
    return (
        f"export PYSPARK_PYTHON={shlex.quote(sys.executable)} before the session is made, or "
        f"install there: {how_to_install()}"
    )


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
    cloudpickle.register_pickle_by_value(sys.modules[PACKAGE])


def check_driver(spark: SparkSession, *, ships: bool) -> None:
    """Refuse a Python of Spark, on this machine, that could not run the source or the sink."""
    context = getattr(spark, "sparkContext", None)  # Spark Connect has none
    if context is None:
        return
    needed = [name for name in NEEDED if name != PACKAGE or not ships]
    if missing := missing_from(context.pythonExec, needed):
        raise PgQueueError(
            f"the Python that Spark starts, {context.pythonExec} (by spark.pyspark.python, "
            f"PYSPARK_PYTHON, or else the PATH), lacks {', '.join(missing)}",
            hint=set_pyspark_python(),
        )


def check_executor(spark: SparkSession) -> None:
    """Ask an executor for the modules that this package needs, which the query does not bring."""
    from pyspark.sql.functions import lit, udf

    needed = [name for name in NEEDED if name != PACKAGE]

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
            "spark_pgqueue itself, but not its dependencies",
            hint='run there: pip install "psycopg[binary]" pyarrow adbc-driver-postgresql '
            "adbc-driver-manager; or send a whole environment (spark.archives with venv-pack)",
        )
