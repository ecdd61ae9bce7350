"""A query without a consumer reads on in the files of an archive, with the same offsets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame

from spark_pgqueue.archive.exporter import export
from spark_pgqueue.postgres.connection import connect
from spark_pgqueue.postgres.errors import PgQueueError
from spark_pgqueue.spark.offset_source import read_partition
from spark_pgqueue.spark.offset_source_offset import StreamOffsets
from spark_pgqueue.spark.offset_source_streams import Streams
from spark_pgqueue.spark.options import parse_offset_source
from spark_pgqueue.spark.partitions import ArchivedPartition
from tests.spark.conftest import Queue
from tests.spark.test_offset_source import load
from tests.sql.queue import maintain

pytestmark = pytest.mark.spark


@pytest.fixture
def archive(queue: Queue, tmp_path: Path) -> Path:
    """Stream s, of which Postgres stores few messages, and whose archive has the others."""
    queue.create("s")
    queue.sql("select pgqueue.set_retention('s', p_messages => 16)")
    queue.sql("select pgqueue.set_archive('s', %s)", str(tmp_path / "archive"))
    return tmp_path / "archive"


def fill(queue: Queue, first: int, last: int) -> None:
    """Messages in segments of ten."""
    with connect(queue.url) as conn:
        for begin in range(first, last + 1, 10):
            queue.send("s", begin, min(begin + 9, last))
            maintain(conn)


def move(queue: Queue) -> None:
    """Write what is closed to files, and trim it."""
    export(queue.url)
    with connect(queue.url) as conn:
        maintain(conn)


def stored(queue: Queue) -> int:
    return queue.sql("select count(*) from pgqueue.messages")[0][0]


def rows(frame: DataFrame) -> list[Any]:
    return sorted(frame.collect(), key=lambda row: row.seq)


def test_a_batch_reads_the_same_rows_before_and_after_archiving(queue: Queue, archive: Path):
    headers = '{"a": "b", "n": 1}'
    queue.sql("select pgqueue.send('s', '0', null, %s)", headers)
    fill(queue, 1, 100)
    before = rows(load(queue, batch=True))
    move(queue)
    assert stored(queue) < 40
    after = rows(load(queue, batch=True))
    assert after == before
    assert after[0].headers == {"a": "b", "n": "1"}
    plain = rows(load(queue, batch=True, includeHeaders="false", minPartitions=7))
    assert [(row.seq, row.data) for row in plain] == [(row.seq, row.data) for row in before]
    assert len(rows(load(queue, batch=True, archive="never"))) == stored(queue)


def test_a_streaming_query_crosses_the_border(queue: Queue, archive: Path):
    fill(queue, 1, 100)

    def each(_: DataFrame, batch_id: int) -> None:
        if batch_id == 2:
            move(queue)

    frame = load(queue, maxMessagesPerTrigger=17, minPartitions=2)
    queue.collect(frame, each=each).awaitTermination()
    assert queue.data() == list(range(1, 101))
    fill(queue, 101, 150)
    move(queue)
    queue.collect(load(queue, maxMessagesPerTrigger=17)).awaitTermination()
    assert queue.data() == list(range(1, 151))


def test_a_plan_made_before_archiving_is_read_after_it(queue: Queue, archive: Path):
    fill(queue, 1, 100)
    options = parse_offset_source(
        {"url": queue.url, "stream": "s", "startingOffsets": "earliest"}, streaming=False
    )
    schema = load(queue, batch=True).schema
    streams = Streams(options, 0, "string")
    begin = StreamOffsets({"s": streams.begin("s", "earliest")})
    end = StreamOffsets({"s": streams.end("s", begin.positions["s"])})
    (partition,) = streams.partitions(begin, end)
    assert not any(isinstance(part, ArchivedPartition) for part in partition.parts)
    move(queue)

    def read(each: Any) -> list[str]:
        return [x for b in read_partition(options, each, schema) for x in b["data"].to_pylist()]

    assert read(partition) == [str(n) for n in range(1, 101)]
    (partition,) = streams.partitions(begin, end)
    assert isinstance(partition.parts[0], ArchivedPartition)
    assert read(partition) == [str(n) for n in range(1, 101)]
    file = sorted(archive.rglob("*.parquet"))[0]
    file.unlink()
    with pytest.raises(PgQueueError, match="were deleted before they could be read"):
        read(partition)
    streams.close()


def test_max_bytes_per_trigger_holds_across_the_border(queue: Queue, archive: Path):
    fill(queue, 1000, 1099)
    queue.collect(load(queue, maxBytesPerTrigger="40"), "before").awaitTermination()
    assert max(len(each) for each in queue.seen.values()) <= 10
    queue.seen.clear()
    move(queue)
    queue.collect(load(queue, maxBytesPerTrigger="40"), "after").awaitTermination()
    assert max(len(each) for each in queue.seen.values()) <= 10
    assert queue.data() == list(range(1000, 1100))
