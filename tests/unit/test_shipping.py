"""Where only the driver has the package, Spark pickles its modules by value."""

import importlib
import pkgutil
import sys
from weakref import WeakSet

from pyspark import cloudpickle

import spark_pgqueue
from spark_pgqueue.postgres import connection
from spark_pgqueue.postgres.forks import OfThisProcess


def test_the_source_is_pickled_beside_open_connections(url):
    """A process of Spark that has connections pickles what its tasks need."""
    from spark_pgqueue.spark.datasource import PgQueueDataSource

    package = sys.modules["spark_pgqueue"]
    with connection.connect(url), spark_pgqueue.connect(url) as queue:
        queue.streams()
        cloudpickle.register_pickle_by_value(package)
        try:
            pickled = cloudpickle.dumps(PgQueueDataSource)
        finally:
            cloudpickle.unregister_pickle_by_value(package)
    assert b"OfThisProcess" in pickled, "by value"


def test_each_set_of_a_module_is_of_its_process():
    found = []
    for info in pkgutil.walk_packages(spark_pgqueue.__path__, "spark_pgqueue."):
        if not info.name.startswith("spark_pgqueue.airflow"):
            module = vars(importlib.import_module(info.name))
            found += [each for each in module.values() if isinstance(each, WeakSet)]
    assert len(found) >= 3
    assert {type(each) for each in found} == {OfThisProcess}
