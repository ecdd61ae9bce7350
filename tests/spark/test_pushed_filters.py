"""Tables are right whatever Spark's setting for pushed filters says, because they take none."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from tests.spark.conftest import Queue

pytestmark = pytest.mark.spark


@pytest.fixture(autouse=True)
def pushing(spark: SparkSession) -> Iterator[None]:
    """Spark pushes filters into Python sources; by default it does not."""
    setting = "spark.sql.python.filterPushdown.enabled"
    if not hasattr(DataSourceReader, "pushFilters"):
        pytest.skip("PySpark 4.1 and later push filters into Python sources")
    spark.conf.set(setting, "true")
    yield
    spark.conf.unset(setting)


def numbers(frame: DataFrame) -> list[int]:
    return sorted(int(row[0]) for row in frame.collect())


def test_each_query_of_a_table_has_its_own_filter(queue: Queue) -> None:
    """One DataFrame, read whole and by filters, also twice in one query."""
    queue.create("s")
    queue.send("s", 1, 10)
    reader = queue.spark.read.format("pgqueue").options(url=queue.url, stream="s", table="messages")
    frame = reader.load().select("data", "seq")
    assert numbers(frame.where("seq = 3")) == [3]
    assert numbers(frame) == list(range(1, 11))
    assert numbers(frame.where("seq = 3").union(frame.where("data > '8'"))) == [3, 9]
    assert numbers(frame.where("seq < 3 and key is not null")) == [1, 2]


class Pushed(DataSource):
    """Has the numbers 0 to 9, or those that the filters have left."""

    def schema(self) -> str:
        return "a int"

    def reader(self, schema: StructType) -> DataSourceReader:
        from pyspark.sql.datasource import EqualTo

        class Reader(DataSourceReader):
            wanted = tuple(range(10))

            def pushFilters(self, filters: list) -> Iterable:
                for each in filters:
                    if isinstance(each, EqualTo):
                        self.wanted = (each.value,)
                    yield each

            def read(self, partition: InputPartition) -> Iterator[tuple]:
                yield from ((number,) for number in self.wanted)

        return Reader()


def test_spark_gives_a_query_what_the_filter_of_another_has_left(spark: SparkSession) -> None:
    """Why tables take no filter. When this test fails, Spark is mended, and they could.

    The source gives all filters back for Spark to apply, and the rows are lost nevertheless.
    """
    spark.dataSource.register(Pushed)
    frame = spark.read.format("Pushed").load()
    assert numbers(frame.where("a = 3")) == [3]
    assert numbers(frame) == [3]  # of 10
