"""A queue to read and write, and queries over it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from psycopg.types.json import Jsonb
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from spark_pgqueue.postgres.connection import connect
from spark_pgqueue.postgres.errors import PgQueueError
from spark_pgqueue.spark.datasource import PgQueueDataSource
from tests.sql import internals
from tests.sql.queue import AT_ONCE


class Queue:
    """A database with the schema, seen from Spark and, past it, from SQL.

    Attributes:
        url: the database.
        seen: the rows of every batch that `collect` saw, by batch id; of a repeated one the last.
    """

    def __init__(self, url: str, folder: Path, spark: SparkSession | None = None):
        self.url = url
        self._spark = spark
        self.folder = folder
        self.seen: dict[int, list[Row]] = {}

    @property
    def spark(self) -> SparkSession:
        assert self._spark is not None
        return self._spark

    def sql(self, statement: str, *parameters) -> list[tuple]:
        """The rows of a statement, on a connection of its own."""
        with connect(self.url) as conn:
            cursor = conn.execute(statement.encode(), parameters)
            return cursor.fetchall() if cursor.description else []

    def look(self, at: Callable[..., Any], *arguments: Any) -> Any:
        """What a function of `tests.sql.internals` returns, on a connection of its own."""
        with connect(self.url) as conn:
            return at(conn, *arguments)

    def create(self, stream: str, *consumers: str, kind: str = "text", ordering: str = "none"):
        self.sql("select pgqueue.create_stream(%s, %s)", stream, kind)
        for consumer in consumers:
            self.sql(
                "select pgqueue.create_consumer(%s, %s, p_ordering => %s, p_settings => %s)",
                *(stream, consumer, ordering, Jsonb(AT_ONCE)),
            )

    def send(self, stream: str, first: int, last: int, keys: int = 10, **more):
        """Publish messages with the data first to last, together, with keys k0, k1, ... in turn."""
        extra = "".join(f", p_{name} => %s" for name in more)
        self.sql(
            "select pgqueue.send_batch(%s, "
            "array(select i::text from generate_series(%s::int, %s) i), "
            f"array(select 'k' || i %% %s from generate_series(%s::int, %s) i){extra})",
            *(stream, first, last, keys, first, last, *more.values()),
        )

    def sent(self, stream: str) -> list[str]:
        """The data of every message that was published, sorted; a message published twice twice."""
        return self.look(internals.data_published, stream)

    def backlog(self, stream: str, consumer: str) -> int:
        """Messages that the consumer has not acknowledged: new, ready, claimed and so on."""
        return self.sql(
            "select count(*) from pgqueue.message_states where stream = %s and consumer = %s "
            "and state <> 'dead'",
            *(stream, consumer),
        )[0][0]

    def terminate_backends(self) -> int:
        """End every connection to the database but our own."""
        return len(
            self.sql(
                "select pg_terminate_backend(pid) from pg_stat_activity "
                "where datname = current_database() and pid <> pg_backend_pid()"
            )
        )

    def load(self, stream: str, consumer: str, **options) -> DataFrame:
        reader = self.spark.readStream.format("pgqueue").option("url", self.url)
        reader = reader.option("stream", stream).option("consumer", consumer)
        return reader.options(**options).load()

    def checkpoint(self, name: str = "checkpoint") -> str:
        return str(self.folder / name)

    def collect(
        self,
        frame: DataFrame,
        checkpoint: str = "checkpoint",
        each: Callable[[DataFrame, int], None] | None = None,
        available_now: bool = True,
    ) -> StreamingQuery:
        """Start a query that puts what it reads into `seen`, after calling `each`."""

        def remember(batch: DataFrame, batch_id: int) -> None:
            if each is not None:
                each(batch, batch_id)
            self.seen[batch_id] = batch.collect()

        writer = frame.writeStream.foreachBatch(remember)
        writer = writer.option("checkpointLocation", self.checkpoint(checkpoint))
        return (writer.trigger(availableNow=True) if available_now else writer).start()

    def publish(
        self,
        frame: DataFrame,
        stream: str,
        checkpoint: str = "checkpoint",
        available_now: bool = True,
        **options,
    ) -> StreamingQuery:
        """Start a query that writes a frame to a stream."""
        writer = frame.writeStream.format("pgqueue").option("url", self.url)
        writer = writer.option("stream", stream).options(**options)
        writer = writer.option("checkpointLocation", self.checkpoint(checkpoint))
        return (writer.trigger(availableNow=True) if available_now else writer).start()

    def write(self, frame: DataFrame, stream: str, **options) -> None:
        """A batch write."""
        writer = frame.write.format("pgqueue").mode("append").option("url", self.url)
        writer.option("stream", stream).options(**options).save()

    def rows(self) -> list[Row]:
        """All rows seen, in the order of the batches."""
        return [row for batch_id in sorted(self.seen) for row in self.seen[batch_id]]

    def data(self) -> list[int]:
        """The data of all rows seen, as numbers."""
        return [int(row.data) for row in self.rows()]


def numbers(first: int, last: int) -> list[int]:
    return list(range(first, last + 1))


def fail(batch: DataFrame, batch_id: int) -> None:
    """A function for `collect` that stands for a sink."""
    raise RuntimeError("the sink fails")


def refusal(frame: DataFrame, **options: str) -> str:
    """The error of a batch write, in the calls that Spark makes, without its processes.

    `test_plain_errors.py` says that an error comes through Spark from each of these calls.
    """
    source = PgQueueDataSource({name.lower(): value for name, value in options.items()})

    def write() -> None:
        writer = source.writer(frame.schema, overwrite=False)
        try:
            writer.commit([writer.write(iter(frame.toArrow().to_batches()))])
        except PgQueueError:
            writer.abort([None])
            raise

    with pytest.raises(PgQueueError) as error:
        write()
    return str(error.value)


def wait_until(condition: Callable[[], bool], query: StreamingQuery, timeout: float = 60) -> None:
    """Wait for a condition while a query runs; raise the query's error if it fails."""
    end = time.monotonic() + timeout
    while not condition():
        if error := query.exception():
            raise error
        assert query.isActive, "the query stopped"
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.05)


@contextmanager
def no_commit_log(query: StreamingQuery, checkpoint: str) -> Iterator[None]:
    """In the block a query that found no messages so far cannot note that a batch of them is done.

    It is left as one that was killed between the commit of the sink and Spark's.
    """
    commits = Path(checkpoint, "commits")
    wait_until(lambda: (commits / "0").exists(), query)  # a first batch, which is empty
    obstacle = commits / "1"
    obstacle.mkdir()
    yield
    obstacle.rmdir()


@pytest.fixture
def queue(url: str, spark: SparkSession, tmp_path: Path) -> Iterator[Queue]:
    """A fresh database with the schema; the queries of a test end with it."""
    yield Queue(url, tmp_path, spark)
    for query in spark.streams.active:
        query.stop()


@pytest.fixture
def fails() -> Callable[[StreamingQuery], str]:
    """Waits for a query to fail, and returns the message."""

    def wait(query: StreamingQuery) -> str:
        with pytest.raises(StreamingQueryException) as error:
            query.awaitTermination(60)
        return str(error.value)

    return wait
