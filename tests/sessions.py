"""The Spark sessions of the tests, and of the applications that they run in processes of their own.

An application finds this module by its PYTHONPATH, see `processes.Child`. It has to work with every
version of PySpark.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pyspark
from pyspark.sql import SparkSession

import spark_pgqueue

QUIET = {
    "spark.ui.enabled": "false",
    "spark.driver.host": "localhost",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.log.level": "ERROR",
}
"""Nothing is served, nothing is printed but errors, and no name of the machine is looked up."""

QUICK_JAVA = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Xss4m"
"""The quick compiler alone, whose code needs more stack, and one thread that collects garbage."""


def quick_start(home: Path) -> dict[str, str]:
    """Variables that save half of Spark's time where each session is short.

    Spark's Python processes import PySpark from a zip in SPARK_HOME, and compile it whenever they
    start: in a home without that zip they import the PySpark that is installed.

    Args:
        home: a folder, which gets links to the parts of PySpark.
    """
    home.mkdir(exist_ok=True)
    for part in Path(pyspark.__path__[0]).iterdir():
        link = home / part.name
        if part.name != "python" and not link.is_symlink():
            link.symlink_to(part)
    return {"SPARK_HOME": str(home), "SPARK_SUBMIT_OPTS": QUICK_JAVA}


def session(master: str = "local[2,4]", settings: Mapping[str, str] | None = None) -> SparkSession:
    """A session with the data source registered.

    Args:
        master: where its tasks run; two at a time, and tried four times each, unless told.
        settings: of Spark, beside `QUIET`.
    """
    builder = SparkSession.builder.master(master)
    for name, value in {**QUIET, **(settings or {})}.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    spark_pgqueue.register(spark)
    return spark
