"""Where only the driver has the package, Spark pickles its modules by value."""

import importlib
import pkgutil
import sys
from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import Any
from weakref import WeakSet

import pytest
from pyspark import cloudpickle

import spark_pgqueue
from spark_pgqueue.postgres import connection, retrying
from spark_pgqueue.postgres.forks import OfThisProcess
from spark_pgqueue.spark.executor import typed

NO_OBJECT = (ModuleType, FunctionType, type)  # pickled with the objects that they name


@pytest.fixture
def in_use(url: str) -> Iterator[None]:
    """Every object that a module makes at its first use is there, and the package is by value."""
    package = sys.modules["spark_pgqueue"]
    with connection.connect(url), spark_pgqueue.connect(url) as queue:
        queue.streams()
        assert typed._loads("[1]") == [1]
        with retrying._notice_of(url, 1):
            cloudpickle.register_pickle_by_value(package)
            try:
                yield
            finally:
                cloudpickle.unregister_pickle_by_value(package)


def objects() -> Iterator[tuple[str, Any]]:
    for info in pkgutil.walk_packages(spark_pgqueue.__path__, "spark_pgqueue."):
        if info.name.split(".")[1] != "airflow":
            for name, value in vars(importlib.import_module(info.name)).items():
                yield f"{info.name}.{name}", value


@pytest.mark.usefixtures("in_use")
def test_the_source_is_pickled_by_a_process_that_uses_it():
    from spark_pgqueue.spark.datasource import PgQueueDataSource

    assert b"OfThisProcess" in cloudpickle.dumps(PgQueueDataSource), "by value"


@pytest.mark.usefixtures("in_use")
def test_each_object_of_a_module_is_pickled_by_a_process_that_uses_it():
    seen, failed = set(), []
    for name, value in objects():
        is_new = id(value) not in seen and not isinstance(value, NO_OBJECT)
        if is_new and not name.rpartition(".")[2].startswith("__"):
            seen.add(id(value))
            try:
                cloudpickle.dumps(value)
            except Exception as error:
                failed.append(f"{name}: {error}")
    assert len(seen) > 300
    assert failed == []


def test_each_set_of_a_module_is_of_its_process():
    found = [each for _, each in objects() if isinstance(each, WeakSet)]
    assert len(found) >= 2
    assert {type(each) for each in found} == {OfThisProcess}
