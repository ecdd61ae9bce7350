"""The pages of spark_pgqueue/guide do what they say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from tests.pages import environment_of, type_all

PAGES = sorted((Path(__file__).parents[2] / "spark_pgqueue" / "guide").glob("*.md"))

# What they say is promised has a test of its own.
pytestmark = [pytest.mark.spark, pytest.mark.longer]


@pytest.mark.parametrize("page", PAGES, ids=[page.stem for page in PAGES])
def test_a_reader_can_type_all_of_it(page, url, tmp_path, monkeypatch, spark: SparkSession):
    """From an empty queue, in a Spark session, which is `spark`."""
    for name, value in environment_of(url).items():
        monkeypatch.setenv(name, value)
    before = str(Path.cwd())
    monkeypatch.chdir(tmp_path)
    # Of the reader, Spark was started in that folder: a relative path is one in it.
    jvm: Any = spark.sparkContext._jvm
    system = jvm.java.lang.System
    system.setProperty("user.dir", str(tmp_path))
    try:
        type_all(page, url, tmp_path, {"__name__": "__main__", "spark": spark})
    finally:
        system.setProperty("user.dir", before)
    assert not spark.streams.active, "a page ends the queries that it starts"
