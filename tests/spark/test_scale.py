"""Fragmented streams, order of keys in many partitions, and few connections."""

from __future__ import annotations

import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import psycopg
import pyarrow as pa
import pytest
from pyspark.sql import functions as F

import spark_pgqueue
from spark_pgqueue.postgres import adbc, embedded, kept, schema
from spark_pgqueue.postgres.connection import connect
from spark_pgqueue.postgres.errors import PgQueueError
from spark_pgqueue.spark.columns import source_schema
from spark_pgqueue.spark.executor.reading import closing_after, read_rows, select_sql
from spark_pgqueue.spark.partitions import MessagePartition, Ranges, in_order
from tests.spark.conftest import Queue, numbers
from tests.sql.cost import cost
from tests.sql.queue import one

pytestmark = pytest.mark.spark

COLUMNS = ["seq", "key", "data"]


@pytest.fixture
def filled(url: str):
    """A connection to a database whose stream s has the messages 1 to 20,000."""
    with connect(url) as conn:
        conn.execute("select pgqueue.create_stream('s')")
        conn.execute(
            "select count(*) from pgqueue.send_batch('s', array_fill('x'::text, '{20000}'), "
            "array(select 'k' || i % 100 from generate_series(1, 20000) i))"
        )
        conn.execute("vacuum analyze pgqueue.messages")
        yield conn


def partition(
    ranges: list[tuple[int, int]], index: int = 0, buckets: int = 1, **same: int
) -> MessagePartition:
    told = (same.get("priority", 0), same.get("deliver_count", 1))
    return MessagePartition(
        index, 1, "text", "s", Ranges(in_order((*each, *told) for each in ranges)), buckets
    )


def blocks(conn: psycopg.Connection, of: MessagePartition) -> int:
    for name in ("enable_seqscan", "enable_bitmapscan", "enable_sort"):
        conn.execute(f"set {name} = off")
    return cost(conn, select_sql(of, of.ranges, COLUMNS))


def test_a_fragmented_stream_costs_a_walk_and_not_a_probe_for_each_message(filled):
    every_other = partition([(seq, seq + 1) for seq in range(1, 20_001, 2)])
    whole = blocks(filled, partition([(1, 20_001)]))
    assert blocks(filled, every_other) <= 1.5 * whole + 20
    assert (
        blocks(filled, partition([(seq, seq + 1) for seq in range(1, 20_001, 4)])) <= 2 * whole + 20
    )
    # What lies far apart is no reason to read all that is between.
    apart = partition([(seq, seq + 1) for seq in range(1, 20_001, 1000)])
    assert blocks(filled, apart) <= 6 * len(apart.ranges) + 20


@pytest.mark.parametrize(
    "ranges",
    [
        [(seq, seq + 1) for seq in range(1, 401, 2)],
        [(seq, seq + 3) for seq in range(1, 401, 4)],
        [(seq, seq + 1) for seq in range(1, 20_001, 1000)],
        [(seq, seq + 1) for seq in range(399, 0, -2)],  # arrived the other way round
        [(301, 401), (1, 101)],
        [*((seq, seq + 1) for seq in range(1001, 1101, 2)), (5, 6)],
    ],
    ids=["one", "three", "apart", "back", "two", "late"],
)
def test_any_ranges_are_read_in_their_order_once(filled, url, ranges):
    schema = source_schema("text", False, has_arrival=True)
    wanted = [seq for lo, hi in ranges for seq in range(lo, hi)]
    rows = pa.Table.from_batches(list(read_rows(url, 5, partition(ranges), schema)))
    assert rows["seq"].to_pylist() == wanted
    arrivals = rows["arrival"].to_pylist()
    assert arrivals == sorted(set(arrivals))
    assert set(rows["deliver_count"].to_pylist()) == {1}
    found = []
    for index in range(3):
        of = list(read_rows(url, 5, partition(ranges, index, 3), schema))
        share = pa.Table.from_batches(of, schema=of[0].schema)["seq"].to_pylist() if of else []
        assert share == [seq for seq in wanted if seq in set(share)]
        found += share
    assert sorted(found) == sorted(wanted)


@pytest.mark.longer
@pytest.mark.promise("kafka: with a consumer, keyOrder")
def test_key_order_is_the_same_by_a_column_as_by_partitions(queue: Queue):
    """Also where it is not the order of seq: what was redriven arrives anew."""
    queue.create("s", "a", "b", ordering="key")
    queue.send("s", 1, 200, keys=5)
    for consumer in ("a", "b"):
        (claim,) = {
            row[0]
            for row in queue.sql("select claim_id from pgqueue.receive('s', %s, 20)", consumer)
        }
        queue.sql("select pgqueue.dead_letter(%s)", claim)
        queue.sql("select pgqueue.redrive('s', %s)", consumer)
    queue.send("s", 201, 300, keys=5, priority=3)
    orders: list[dict[str, list[int]]] = []
    frames = [
        queue.load("s", "a", minPartitions=3),
        spark_pgqueue.in_key_order(queue.load("s", "b", minPartitions=7, keyOrder="column"), 3),
    ]
    for number, frame in enumerate(frames):
        queue.seen.clear()
        frame = frame.withColumn("partition", F.spark_partition_id())
        queue.collect(frame, checkpoint=f"checkpoint {number}").awaitTermination()
        assert sorted(queue.data()) == numbers(1, 300)
        by_key: dict[str, list[int]] = defaultdict(list)
        partitions = defaultdict(set)
        for row in queue.rows():
            by_key[row.key].append(row.seq)
            partitions[row.key].add(row.partition)
        assert {len(each) for each in partitions.values()} == {1}
        orders.append(by_key)
    assert orders[0] == orders[1]
    assert any(each != sorted(each) for each in orders[0].values()), "an order that seq is not"


def test_in_foreach_batch_spark_sorts(queue: Queue):
    rows = [(seq, f"k{seq % 3}" if seq % 2 else None, 100 - seq) for seq in range(1, 100)]
    frame = queue.spark.createDataFrame(rows, "seq long, key string, arrival long")
    found = spark_pgqueue.in_key_order(frame, 2).withColumn("p", F.spark_partition_id()).collect()
    assert sorted(row.seq for row in found) == numbers(1, 99)
    for key in ("k0", "k1", "k2"):
        mine = [row for row in found if row.key == key]
        assert [row.arrival for row in mine] == sorted(row.arrival for row in mine)
        assert len({row.p for row in mine}) == 1
    with pytest.raises(PgQueueError, match="there is no arrival") as error:
        spark_pgqueue.in_key_order(frame.drop("arrival"))
    assert "keyOrder" in str(error.value)
    for wrong in (0, "3", True):
        with pytest.raises(PgQueueError, match=f"partitions must be .*, not {wrong!r}$"):
            spark_pgqueue.in_key_order(frame, wrong)  # type: ignore[arg-type]


def connections(conn: psycopg.Connection) -> int:
    """All but this one."""
    return one(
        conn,
        "select count(*) from pg_stat_activity where datname = current_database() "
        "and pid <> pg_backend_pid() and backend_type = 'client backend'",
    )


def wait_for(conn: psycopg.Connection, count: int) -> None:
    end = time.monotonic() + 10
    while connections(conn) != count:
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_connection_that_nobody_asks_for_is_closed(url, monkeypatch):
    monkeypatch.setattr(kept, "IDLE_SECONDS", 0.3)
    kept._shared("closers", set()).clear()
    with connect(url) as conn:
        before = connections(conn)
        for _ in range(2):
            with adbc.kept_connection(url) as mine, mine.cursor() as cursor:
                adbc.call(cursor, "select 1")
        assert connections(conn) == before + 1
        wait_for(conn, before)
        with adbc.kept_connection(url) as mine, mine.cursor() as cursor:
            assert adbc.call(cursor, "select 2") == [(2,)]


@pytest.mark.longer
def test_the_driver_of_a_sink_keeps_its_connections_from_batch_to_batch(queue: Queue):
    """It has two, because Spark begins and commits a batch in two processes."""
    queue.create("s", "c")
    queue.create("out")
    queue.send("s", 1, 100)

    def sessions() -> int:
        """How many have begun."""
        sql = "select sessions from pg_stat_database where datname = current_database()"
        return queue.sql(sql)[0][0]

    before = sessions()
    frame = queue.load("s", "c", maxMessagesPerTrigger=10, minPartitions=1).select("key", "data")
    assert queue.publish(frame, "out").awaitTermination(120)
    assert len(queue.sent("out")) == 100
    assert sessions() - before < 2 * 10, "each of ten batches made connections of its own"


def test_max_connections_bounds_the_tasks_and_keeps_no_connection(queue: Queue, monkeypatch):
    """Also of a message of 100 MB."""
    monkeypatch.setattr(kept, "IDLE_SECONDS", 60.0)
    queue.create("s", "c")
    queue.send("s", 1, 1000)
    queue.sql("select pgqueue.alter_stream('s', '{\"max_bytes\": 200000000}')")
    queue.sql("select pgqueue.send('s', repeat('0123456789', 10000000))")
    frame = queue.load("s", "c", maxConnections=2, maxRecordsPerPartition=10)
    frame = frame.selectExpr("seq", "length(data) as size", "spark_partition_id() as partition")
    queue.collect(frame).awaitTermination()
    assert sorted(row.seq for row in queue.rows()) == numbers(1, 1001)
    assert max(row.size for row in queue.rows()) == 100_000_000
    assert {row.partition for row in queue.rows()} == {0, 1}
    with connect(queue.url) as conn:
        for bound in (None, 2):
            wait_for(conn, 0)
            rows = read_rows(queue.url, 5, partition([(1, 1001)]), source_schema("text", False))
            assert sum(map(len, closing_after(rows, queue.url, bound))) == 1000
            if bound is None:
                assert connections(conn) == 1
                adbc.let_go(queue.url)
        wait_for(conn, 0)


def test_tasks_that_find_no_connection_wait_and_all_is_read_once(tmp_path: Path):
    """200 partitions, and a server with 20 connections, of which others have 13."""
    settings = {"max_connections": 20, "fsync": "off"}
    with embedded.start(tmp_path / "data", settings=settings) as server, ExitStack() as others:
        with connect(server.url) as conn:
            schema.install(conn)
        queue = Queue(server.url, tmp_path)
        queue.create("s")
        queue.send("s", 1, 2000)
        for _ in range(13):
            others.enter_context(connect(server.url))

        def read(first: int) -> list[int]:
            rows = read_rows(
                server.url, 30, partition([(first, first + 10)]), source_schema("text", False)
            )
            return [seq for batch in rows for seq in batch["seq"].to_pylist()]

        with ThreadPoolExecutor(8) as pool:
            found = [seq for seqs in pool.map(read, range(1, 2001, 10)) for seq in seqs]
    assert found == numbers(1, 2000)
