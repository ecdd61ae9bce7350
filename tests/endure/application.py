"""The Spark application of the long run."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame
from pyspark.sql.streaming.query import StreamingQuery

from spark_pgqueue.postgres import connection
from tests.sessions import QUICK_JAVA, session

NOTED = "noted micro-batch"  # says the query without a consumer
FAIL = "fail"  # a file beside the checkpoints: that query fails when it has noted the next


class Application:
    """Three queries in a Spark application: to a stream, to a stream by key, without a consumer.

    A query that fails is started again, in the same application. SIGTERM stops all of them.

    Args:
        url: the database.
        folder: of the checkpoints.
        checkpoint: their number.
        begin_at: the offset, as JSON, where a new checkpoint without a consumer begins.
        master: where Spark's tasks run.
    """

    def __init__(self, url: str, folder: str, checkpoint: str, begin_at: str, master: str):
        self._url, self._folder, self._begin_at = url, folder, begin_at
        self._checkpoint = int(checkpoint)
        self._stopped = threading.Event()
        signal.signal(signal.SIGTERM, lambda *_: self._stopped.set())
        settings = {
            "spark.deploy.maxExecutorRetries": "-1",
            "spark.executor.extraJavaOptions": QUICK_JAVA,
            "spark.python.authenticate.socketTimeout": "60s",  # a busy machine
            "spark.sql.shuffle.partitions": "2",
            "spark.sql.streaming.minBatchesToRetain": "5",
        }
        self.spark = session(master, settings)

    def run(self) -> None:
        queries = {"plain": self._plain, "keyed": self._keyed, "cursor": self._cursor}
        running: dict[str, StreamingQuery] = {}
        while not self._stopped.wait(0.2):
            for name, start in queries.items():
                query = running.get(name)
                if query is None or not query.isActive:
                    if query is not None:
                        print(f"{name} failed: {str(query.exception())[-2000:]}", flush=True)
                    with self._tried_again(name):
                        running[name] = start()
                        self._await_start(running[name])
        for query in running.values():
            query.stop()
        self.spark.stop()

    @contextmanager
    def _tried_again(self, name: str) -> Iterator[None]:
        """While Postgres is away, a query cannot start. An error of a dead JVM is another."""
        try:
            yield
            print(f"{name} runs", flush=True)
        except PySparkException as error:
            print(f"{name} does not start: {str(error)[-2000:]}", flush=True)
            self._stopped.wait(1)

    def _await_start(self, query: StreamingQuery) -> None:
        """One query starts at a time: Spark gives a source's process ten seconds to begin."""
        while query.isActive and query.status["message"].startswith("Initializing"):
            if self._stopped.wait(0.1):
                return

    def _source(self, **options: Any) -> DataFrame:
        reader = self.spark.readStream.format("pgqueue").options(url=self._url, stream="in")
        reader = reader.options(maxMessagesPerTrigger=200_000, minPartitions=4, **options)
        return reader.load().select("key", "data")

    def _to_stream(self, name: str, consumer: str) -> StreamingQuery:
        source = self._source(consumer=consumer, visibilityTimeout="5s")
        writer = source.writeStream.format("pgqueue").options(url=self._url, stream=name)
        return writer.option("checkpointLocation", self._place(name)).start()

    def _plain(self) -> StreamingQuery:
        return self._to_stream("plain", "c")

    def _keyed(self) -> StreamingQuery:
        return self._to_stream("keyed", "k")

    def _cursor(self) -> StreamingQuery:
        source = self._source(startingOffsets=f'{{"in": {self._begin_at}}}')
        writer = source.writeStream.foreachBatch(self._note)
        return writer.option("checkpointLocation", self._place("cursor")).start()

    def _note(self, batch: DataFrame, batch_id: int) -> None:
        numbers = sorted(map(int, batch.select("data").toArrow()["data"].to_pylist()))
        with connection.connect(self._url) as conn:
            conn.execute(
                "insert into endure.batches (checkpoint, batch, n) values (%s, %s, %s)",
                [self._checkpoint, batch_id, numbers],
            )
        print(NOTED, batch_id, flush=True)
        fail = Path(self._folder) / FAIL
        if fail.exists():
            fail.unlink()
            raise RuntimeError(f"micro-batch {batch_id} fails when its work is done")

    def _place(self, name: str) -> str:
        return str(Path(self._folder) / f"{name}-{self._checkpoint}")


def application(*arguments: str) -> None:
    Application(*arguments).run()
