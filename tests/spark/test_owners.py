"""Spark runs nothing of a schema that another role prepared."""

from __future__ import annotations

import pytest
from pyspark.sql import SparkSession

from tests.prepared import prepared
from tests.spark.conftest import Queue

pytestmark = pytest.mark.spark

READERS = {
    "table": {"table": "messages", "stream": "s"},
    "table of all": {"table": "stream_stats"},
    "source": {"stream": "s", "consumer": "c"},
    "offset source": {"stream": "s", "group": "g"},
}


def test_sources_tables_and_sinks_run_nothing_that_another_role_prepared(
    spark: SparkSession, empty_url: str, tmp_path
) -> None:
    with prepared(empty_url) as hostile:
        refused = f"belongs to {hostile.role}"
        for name, options in READERS.items():
            kind = spark.read if "table" in options else spark.readStream
            with pytest.raises(Exception, match=refused):
                frame = kind.format("pgqueue").options(url=hostile.url, **options).load()
                if "table" in options:
                    frame.collect()
                else:
                    writer = frame.writeStream.format("noop").trigger(availableNow=True)
                    place = str(tmp_path / name)
                    writer.option("checkpointLocation", place).start().awaitTermination(60)
            assert not hostile.noted, name
        rows = spark.createDataFrame([("x",)], "data string")
        queue = Queue(hostile.url, tmp_path, spark)
        with pytest.raises(Exception, match=refused):
            writer = rows.write.format("pgqueue").mode("append")
            writer.options(url=queue.url, stream="s").save()
        assert not hostile.noted
