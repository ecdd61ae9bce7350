"""A query without a consumer reads on in the files of an archive, with the same offsets."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame

from spark_pgqueue.archive.exporter import export
from spark_pgqueue.postgres.connection import connect
from spark_pgqueue.postgres.errors import PgQueueError
from spark_pgqueue.spark.options.stream_source import StreamSourceOptions, parse_stream_source
from spark_pgqueue.spark.partitions import ArchivedPartition
from spark_pgqueue.spark.stream_source.offsets import StreamOffsets
from spark_pgqueue.spark.stream_source.reader import read_partition
from spark_pgqueue.spark.stream_source.streams import Streams
from tests.processes import started
from tests.spark.conftest import Queue
from tests.spark.test_offset_source import load
from tests.spark.test_offset_source_reader import Query
from tests.sql import clock
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


def stream_options(queue: Queue) -> StreamSourceOptions:
    return parse_stream_source({"url": queue.url, "stream": "s"}, streaming=False)


def ends(streams: Streams) -> tuple[StreamOffsets, StreamOffsets]:
    """The offsets of the first message of the stream, and behind the last."""
    begin = streams.begin("s", "earliest")
    return StreamOffsets({"s": begin}), StreamOffsets({"s": streams.end("s", begin)})


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


@pytest.mark.promise(
    "feature: old messages in files, read on with the same offsets",
    "archive: Spark across the border",
)
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


@pytest.mark.parametrize("keeps_one", [False, True])
@pytest.mark.promise("archive: Spark across the border")
def test_available_now_reads_what_is_in_the_archive_alone(
    queue: Queue, archive: Path, keeps_one: bool
):
    """Also the publications have left Postgres, of an idle stream; or all but that of a message
    that a consumer keeps.
    """
    queue.sql("select pgqueue.set_retention('s', '1 hour')")
    queue.sql("select pgqueue.create_consumer('s', 'c', p_start => 'earliest')")
    for first, last in (1, 10), (11, 50):
        fill(queue, first, last)
        if keeps_one and first == 1:
            queue.sql("select pgqueue.dead_letter(claim_id) from pgqueue.receive('s', 'c', 1)")
        queue.sql("select count(pgqueue.ack(claim_id)) from pgqueue.receive('s', 'c', 100)")
        for _ in range(9):
            with connect(queue.url) as conn:
                clock.pass_time(conn, timedelta(minutes=20))
                maintain(conn)
            move(queue)
    assert stored(queue) == 10 * keeps_one
    query = Query(queue.url, stream="s")
    query.reader.prepareForTriggerAvailableNow()
    found = [n for batch in query.rest() for _, n in batch]
    query.stop()
    assert sorted(found) == list(range(1, 51))


def test_a_plan_made_before_archiving_is_read_after_it(queue: Queue, archive: Path):
    fill(queue, 1, 100)
    options = stream_options(queue)
    schema = load(queue, batch=True).schema
    streams = Streams(options, 0, "string")
    offsets = ends(streams)
    (partition,) = streams.partitions(*offsets)
    assert not any(isinstance(part, ArchivedPartition) for part in partition.parts)
    move(queue)

    def read(each: Any) -> list[str]:
        return [x for b in read_partition(options, each, schema) for x in b["data"].to_pylist()]

    assert read(partition) == [str(n) for n in range(1, 101)]
    (partition,) = streams.partitions(*offsets)
    assert isinstance(partition.parts[0], ArchivedPartition)
    assert read(partition) == [str(n) for n in range(1, 101)]
    file = sorted(archive.rglob("*.parquet"))[0]
    file.unlink()
    with pytest.raises(PgQueueError, match="were deleted before they could be read"):
        read(partition)
    streams.close()


def test_a_query_whose_file_is_damaged_fails_and_names_it(queue: Queue, archive: Path):
    """Also where it may lose messages: other messages are worse."""
    fill(queue, 1, 100)
    options = stream_options(queue)
    strict, lenient = (load(queue, batch=True, failOnDataLoss=loss) for loss in ("true", "false"))
    streams = Streams(options, 0, "string")
    (planned_before,) = streams.partitions(*ends(streams))
    move(queue)
    streams.close()
    (file,) = archive.glob("*/2/*.parquet")
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 3] ^= 4
    file.write_bytes(raw)
    for frame in (strict, lenient):
        with pytest.raises(PySparkException, match=f"{file} of the archive is damaged"):
            frame.collect()
    with pytest.raises(PgQueueError, match=f"{file} of the archive is damaged"):
        list(read_partition(options, planned_before, strict.schema))
    file.unlink()
    assert 0 < lenient.count() < 100


def test_max_bytes_per_trigger_holds_across_the_border(queue: Queue, archive: Path):
    fill(queue, 1000, 1039)
    for is_moved in (False, True):
        if is_moved:
            move(queue)
            assert stored(queue) < 30
        query = Query(queue.url, stream="s", maxBytesPerTrigger="40")
        batches = query.rest()
        query.stop()
        assert max(map(len, batches)) <= 10
        assert [n for rows in batches for _, n in rows] == list(range(1000, 1040))


def ask(method: str, url: str) -> str:
    """What an S3 server without passwords answers."""
    with urlopen(Request(url, method=method)) as answer:
        return answer.read().decode()


@pytest.fixture
def store() -> Iterator[dict[str, str]]:
    """An S3-compatible server, as the options of its file system; it has a bucket."""
    server = pytest.importorskip("moto.server", reason="moto[s3], flask and flask-cors")
    threaded = server.ThreadedMotoServer("127.0.0.1", port=0)
    threaded.start()
    host, port = threaded.get_host_and_port()
    given = {"access_key": "key", "secret_key": "s3cr3t", "region": "us-east-1"}
    given["endpoint_override"] = f"http://{host}:{port}"
    ask("PUT", f"{given['endpoint_override']}/bucket")
    yield given
    threaded.stop()


def run_exporter(queue: Queue, options: dict[str, Any]) -> tuple[int | None, str]:
    """`pgqueue archive run`, as a process: S3's client stays out of the process of the tests."""
    words = ("archive", "run", "--options", json.dumps(options))
    with started(*words, url=queue.url) as exporter:
        printed, errors = exporter.communicate(timeout=120)
        return exporter.returncode, printed + errors


@pytest.mark.longer
@pytest.mark.promise("archive: S3")
def test_an_archive_may_be_in_an_object_store(queue: Queue, archive: Path, store: dict[str, str]):
    """The exporter writes and deletes files of S3, and a query reads them."""
    queue.sql("select pgqueue.set_archive('s', 's3://bucket/old/messages')")
    fill(queue, 1, 100)
    before = rows(load(queue, batch=True, archive="never"))
    wrong = {**store, "endpoint_override": "http://127.0.0.1:9"}
    code, printed = run_exporter(queue, {**wrong, "connect_timeout": 1, "request_timeout": 1})
    assert code == 1
    assert "s3://bucket/old/messages cannot be read or written" in " ".join(printed.split())
    assert "s3cr3t" not in printed
    code, printed = run_exporter(queue, store)
    assert code == 0, printed
    queue.look(maintain)
    assert stored(queue) < 40
    given = json.dumps(store)
    assert rows(load(queue, batch=True, archiveOptions=given)) == before
    queue.collect(load(queue, maxMessagesPerTrigger=30, archiveOptions=given)).awaitTermination()
    assert queue.data() == list(range(1, 101))
    with pytest.raises(PySparkException, match="cannot be read or written") as failed:
        load(queue, batch=True, archiveOptions=json.dumps({**store, "region": 5})).collect()
    assert "s3cr3t" not in str(failed.value)
    files = f"{store['endpoint_override']}/bucket?list-type=2"
    assert ".parquet</Key>" in ask("GET", files)
    queue.sql("select pgqueue.drop_archive('s')")
    queue.look(maintain)
    code, printed = run_exporter(queue, store)
    assert code == 0, printed
    assert ".parquet</Key>" not in ask("GET", files)
