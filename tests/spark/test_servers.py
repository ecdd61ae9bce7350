"""Several servers: each key has one, and a query over all of them is exact through kills."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import spark_pgqueue
from spark_pgqueue.postgres import embedded
from spark_pgqueue.postgres.errors import PgQueueError
from tests.conftest import SETTINGS
from tests.processes import Child
from tests.spark.conftest import Queue

ODD = ["", " ", "k", "'", "\\", "ä", "a\u0308", "é", "e\u0301", "😀", "👩‍👩‍👧", "\u200d", "ﬀ", "İ",
       "ß", "\x01", "\n", "日本語", "\U0010ffff", "x" * 1024, "key 7", "KEY 7"]  # fmt: skip


@pytest.mark.spark
@pytest.mark.promise("scale: The same hash everywhere")
def test_the_server_of_a_key_is_the_same_in_sql_in_python_and_in_spark(queue: Queue) -> None:
    keys = [*ODD, *(f"customer {n}" for n in range(2000)), None]
    frame = queue.spark.createDataFrame([(key,) for key in keys], "key string").coalesce(1)
    for servers in (1, 2, 3, 7, 2**31 - 1):
        column = spark_pgqueue.server_column("key", servers).alias("server")
        python = [key if key is None else spark_pgqueue.server_of(key, servers) for key in keys]
        sql = queue.sql(
            "select pgqueue.server_of(key, %s) from unnest(%s::text[]) with ordinality k (key, no)"
            " order by no", servers, keys,
        )  # fmt: skip
        assert [row.server for row in frame.select(column).collect()] == python, servers
        assert [server for (server,) in sql] == python, servers
        if servers < 10:
            assert {*python} == {*range(servers), None}


def test_what_is_no_number_of_servers_and_no_key_is_refused() -> None:
    for servers in (0, -1, True, 1.5, None, "2", 2**31):
        for ask in (spark_pgqueue.server_of, spark_pgqueue.server_column):
            with pytest.raises(PgQueueError, match="servers must be an int of at least 1"):
                ask("k", servers)  # type: ignore[arg-type]
    for key in (b"k", 5, "\ud800"):
        with pytest.raises(PgQueueError, match="key must be text that UTF-8 can encode"):
            spark_pgqueue.server_of(key, 2)  # type: ignore[call-overload]
    assert spark_pgqueue.server_of(None, 2) is None


# Two queries over both servers: one claims from consumers, the other reads by offsets.
APPLICATION = """
    import sys, time
    from functools import reduce
    import spark_pgqueue
    from pyspark.sql import DataFrame, functions as F
    from tests.sessions import session
    checkpoint, trigger, *urls = sys.argv[1:]
    spark = session()

    def start(name, **options):
        def load(url):
            reader = spark.readStream.format("pgqueue").options(url=url, stream="in", **options)
            most = 100 if trigger == "always" else 2000
            return reader.option("maxMessagesPerTrigger", most).load().select("key", "data")

        def write(batch, batch_id):
            key = F.coalesce("key", "data")
            batch = batch.withColumn("server", spark_pgqueue.server_column(key, 2)).persist()
            for number, url in enumerate(urls):
                part = batch.where(F.col("server") == number).drop("server")
                part.write.format("pgqueue").mode("append").options(
                    url=url, stream=name, txnAppId=name, txnVersion=batch_id
                ).save()
                print(f"wrote {name} to {number}", flush=True)
                time.sleep(0.3 if trigger == "always" else 0)
            batch.unpersist()

        writer = reduce(DataFrame.union, map(load, urls)).writeStream.foreachBatch(write)
        writer = writer.option("checkpointLocation", f"{checkpoint}/{name}")
        return (writer.trigger(availableNow=True) if trigger == "now" else writer).start()

    queries = [
        start("claimed", consumer="c", visibilityTimeout="5s"),
        start("read", startingOffsets="earliest"),
    ]
    for query in queries:
        query.awaitTermination()
"""


@pytest.fixture
def both(
    url: str, servers_home: Path, tmp_path: Path
) -> Iterator[tuple[list[Queue], embedded.Server]]:
    """The queue of the tests' server, that of another server, and this other server."""
    with embedded.start(servers_home / "second", settings=dict(SETTINGS)) as second:
        with spark_pgqueue.connect(second.url) as other:
            other.install()
        queues = [Queue(url, tmp_path), Queue(second.url, tmp_path)]
        for queue in queues:
            queue.create("in", "c")
            queue.create("claimed")
            queue.create("read")
        yield queues, second


@pytest.mark.longer
@pytest.mark.spark
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("spark_environment")
@pytest.mark.promise(
    "guarantee: Several servers",
    "feature: a stream on several servers",
    "scale: Kills between two writes, with consumers and without",
)
def test_queries_over_two_servers_that_are_killed_write_each_message_once(
    both: tuple[list[Queue], embedded.Server],
) -> None:
    """... between two writes, with keys and without, while a server crashes: each on its server."""
    queues, second = both
    sent: list[tuple[str | None, str]] = []

    def send() -> None:
        numbers = range(len(sent), len(sent) + 900)
        sent.extend((f"k{i % 30}" if i % 10 else None, str(i)) for i in numbers)
        for server, queue in enumerate(queues):
            mine = [sent[i] for i in numbers if server_of(*sent[i]) == server]
            keys, data = zip(*mine, strict=True)
            queue.sql("select pgqueue.send_batch('in', %s, %s)", list(data), list(keys))

    def server_of(key: str | None, data: str) -> int:
        return spark_pgqueue.server_of(data if key is None else key, 2)

    def application(trigger: str) -> Child:
        return Child(APPLICATION, queues[0].checkpoint(), trigger, *(each.url for each in queues))

    send()
    with application("always") as child:
        for name in ("claimed", "read"):
            child.wait_for(f"wrote {name} to 1", 180)
        second.restart("immediate")
        since = len(child.output)

        def are_between_writes() -> bool:
            """The first server has the batch of either query, and the second has not."""
            if queues[0].backlog("in", "c") == 0:
                send()
            said = child.output[since:]
            return all(
                said.rfind(f"wrote {name} to 0") > said.rfind(f"wrote {name} to 1")
                for name in ("claimed", "read")
            )

        child.wait_until(are_between_writes)
        child.kill()
    send()
    with application("now") as child:
        assert child.wait(240) == 0, child.output[-5000:]
    for name in ("claimed", "read"):
        found = [
            (server, *row)
            for server, queue in enumerate(queues)
            for row in queue.sql(f"select key, data from pgqueue.peek_at('{name}', 1, 100000)")
        ]
        assert Counter(found) == Counter((server_of(*each), *each) for each in sent), name
    assert [queue.backlog("in", "c") for queue in queues] == [0, 0]
