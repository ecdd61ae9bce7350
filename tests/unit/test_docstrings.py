"""The examples in docstrings give what they say, against a real queue."""

import doctest
import inspect
from collections.abc import Iterator
from importlib import import_module
from pkgutil import walk_packages
from typing import Any

import pytest

import spark_pgqueue
import spark_pgqueue.client
from spark_pgqueue.client import Client
from spark_pgqueue.client.messages import Claim
from tests.docs.examples import run, run_all

# What these packages say is typed in a Spark session: tests/spark/test_docstrings.py.
SPARK = ("spark_pgqueue.spark", "spark_pgqueue.watching")
OF_SPARK = ("spark_pgqueue.register", ".run_query")
AIRFLOW = "spark_pgqueue.airflow."  # tests/test_wheel.py has an Airflow


def modules() -> Iterator[Any]:
    yield spark_pgqueue
    for found in walk_packages(spark_pgqueue.__path__, "spark_pgqueue."):
        if not found.name.startswith((*SPARK, AIRFLOW)) and not found.name.endswith("__main__"):
            yield import_module(found.name)


def examples() -> list[doctest.DocTest]:
    finder = doctest.DocTestFinder(exclude_empty=True)
    found = [test for module in modules() for test in finder.find(module)]
    chosen = [test for test in found if test.examples and not test.name.endswith(OF_SPARK)]
    return sorted(chosen, key=lambda test: test.name)


def test_the_examples_of_the_client_and_the_worker_give_what_they_say(url, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = examples()
    assert len(found) > 60
    failed = [failure for failure in run_all(found, url) if failure]
    assert not failed, "\n".join(failed)


def test_an_example_that_says_something_else_is_found(url):
    wrong = doctest.DocTestParser().get_doctest(
        '>>> queue.send("orders", "order 3")\n4\n', {}, "wrong", None, 0
    )
    with pytest.raises(AssertionError, match=r"Expected:\n +4\nGot:\n +3"):
        run(wrong, url)


def test_every_public_method_has_an_example():
    """But for those that do what their class says: closing, entering."""
    plain = {"close", "stop"}
    for kind in (Client, spark_pgqueue.Consumer):
        for name, method in inspect.getmembers(kind, inspect.isfunction):
            if not name.startswith("_") and name not in plain:
                assert ">>> " in (inspect.getdoc(method) or ""), f"{kind.__name__}.{name}"
    others = {"PgQueueError", "Client", "AsyncClient", "Message"}  # their makers have examples
    for name in spark_pgqueue.__all__:
        thing = getattr(spark_pgqueue, name)
        if inspect.isfunction(thing) or (inspect.isclass(thing) and name not in others):
            assert ">>> " in (inspect.getdoc(thing) or ""), name


def test_help_names_all_that_the_package_has():
    text = inspect.getdoc(spark_pgqueue) or ""
    for name in spark_pgqueue.__all__:
        assert name in text or name == "__version__", name


def test_the_package_connects_as_its_client_does():
    for name in ("connect", "connect_async"):
        public = inspect.signature(getattr(spark_pgqueue, name)).parameters.values()
        behind = inspect.signature(getattr(spark_pgqueue.client, name)).parameters.values()
        given = [(each.name, each.default) for each in behind if not each.name.startswith("_")]
        assert [(each.name, each.default) for each in public] == given, name
    assert issubclass(spark_pgqueue.client.AsyncClaim, Claim)
