"""Spark runs nothing of a schema that another role prepared."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tests.prepared import Prepared, prepared

pytestmark = pytest.mark.spark

READERS = {
    "table": {"table": "messages", "stream": "s"},
    "table of all": {"table": "stats"},
    "source": {"stream": "s", "consumer": "c"},
    "offset source": {"stream": "s"},
}


def read(spark: SparkSession, hostile: Prepared, name: str, folder: Path) -> None:
    options = READERS[name]
    kind = spark.read if "table" in options else spark.readStream
    frame = kind.format("pgqueue").options(url=hostile.url, **options).load()
    if "table" in options:
        frame.collect()
        return
    writer = frame.writeStream.format("noop").trigger(availableNow=True)
    writer.option("checkpointLocation", str(folder / name)).start().awaitTermination(60)


def write(spark: SparkSession, hostile: Prepared) -> None:
    rows = spark.createDataFrame([("x",)], "data string")
    writer = rows.write.format("pgqueue").mode("append")
    writer.options(url=hostile.url, stream="s").save()


def test_sources_tables_and_sinks_run_nothing_that_another_role_prepared(
    spark: SparkSession, empty_url: str, tmp_path: Path
) -> None:
    with prepared(empty_url) as hostile:
        refused = f"belongs to {hostile.role}"
        for name in READERS:
            with pytest.raises(Exception, match=refused):
                read(spark, hostile, name, tmp_path)
            assert not hostile.noted, name
        with pytest.raises(Exception, match=refused):
            write(spark, hostile)
        assert not hostile.noted
