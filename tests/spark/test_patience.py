"""retryTimeout: for how long driver and executors try to reach a Postgres that is away."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator

import pyarrow as pa
import pytest
from pyspark.sql.types import StringType, StructField, StructType

from spark_pgqueue.postgres.errors import PgQueueError
from spark_pgqueue.spark.columns import source_schema
from spark_pgqueue.spark.consumer_source.reader import PgQueueConsumerReader
from spark_pgqueue.spark.options.sink import parse_sink
from spark_pgqueue.spark.options.source import parse_source
from spark_pgqueue.spark.partitions import Batch, ClaimedPartition, Range
from spark_pgqueue.spark.sink.writers import PgQueueBatchWriter
from tests.conftest import Server
from tests.spark.conftest import Queue, wait_until

SOURCE = {"stream": "s", "consumer": "c", "retrytimeout": "1s"}
SINK = {"stream": "s", "retrytimeout": "1s"}
BATCH = Batch("5e0e5a3f-5e0e-5e0e-5e0e-5e0e5a3f5e0e", 0, 1)
DATA = StructType([StructField("data", StringType())])


@pytest.fixture
def away() -> Iterator[str]:
    """A url where nothing listens, for as long as the port is ours."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"postgresql://me@127.0.0.1:{held.getsockname()[1]}/d"


def gives_up_in_time(work: Callable[[], object]) -> None:
    began = time.monotonic()
    with pytest.raises(PgQueueError, match="no connection to Postgres"):
        work()
    assert 1 <= time.monotonic() - began < 10


@pytest.mark.promise("kafka: writing, kafka.acks")
def test_drivers_and_executors_of_source_and_sink_give_up_in_time(conn, url, away):
    source, sink = parse_source(SOURCE | {"url": away}), SINK | {"url": url}
    reader = PgQueueConsumerReader(source, source_schema("text", True))
    gives_up_in_time(reader.initialOffset)
    partition = ClaimedPartition(0, 1, "text", "s", (Range(1, 2, 0, 1),), batch=BATCH)
    gives_up_in_time(lambda: list(reader.read(partition)))
    unreached = parse_sink(sink | {"url": away}, streaming=False)
    gives_up_in_time(lambda: PgQueueBatchWriter(unreached, DATA))
    conn.execute("select pgqueue.create_stream('s')")
    writer = PgQueueBatchWriter(parse_sink(sink, streaming=False), DATA)
    writer._writer._options = unreached
    rows = pa.record_batch({"data": ["x"]})
    gives_up_in_time(lambda: writer.write(iter([rows])))


@pytest.mark.longer
@pytest.mark.spark
@pytest.mark.slow
def test_a_query_outlives_a_postgres_that_is_away_for_long(queue: Queue, server: Server):
    """Half a minute here; driver, executors and the sink, by default, wait for minutes."""
    queue.create("in", "c")
    queue.create("out")
    queue.send("in", 1, 10)
    copied = queue.load("in", "c", visibilityTimeout="10 minutes").select("data")
    query = queue.publish(copied, "out", available_now=False)
    wait_until(lambda: len(queue.sent("out")) == 10, query)
    server.stop("immediate")
    try:
        time.sleep(33)
    finally:
        server.restart()
    queue.send("in", 11, 20)
    wait_until(lambda: len(queue.sent("out")) == 20, query)


@pytest.mark.spark
@pytest.mark.parametrize("at", ["driver", pytest.param("executor", marks=pytest.mark.longer)])
@pytest.mark.promise("operations: a restart")
def test_a_query_whose_patience_is_over_says_so_and_can_be_started_again(
    queue: Queue, server: Server, fails, at
):
    queue.create("s", "c")
    queue.send("s", 1, 10)
    away = threading.Event()

    def stop(batch, batch_id):
        if not away.is_set():
            away.set()
            server.stop()
            assert at == "driver" or batch.collect()

    frame = queue.load("s", "c", retryTimeout="2s", maxMessagesPerTrigger=5)
    try:
        message = fails(queue.collect(frame, each=stop))
    finally:
        server.restart()
    assert "no connection to Postgres" in message
    queue.collect(frame).awaitTermination()
    assert sorted(queue.data()) == list(range(1, 11))
