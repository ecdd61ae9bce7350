"""The source's promises, each in the name of its test."""

from __future__ import annotations

import json
import time
from contextlib import nullcontext, suppress
from pathlib import Path

import psutil
import pytest
from chispa import assert_df_equality
from psycopg.conninfo import make_conninfo
from pyspark.sql import Row
from pyspark.sql import functions as F

from spark_pgqueue.postgres.connection import connect
from spark_pgqueue.postgres.errors import PgQueueError
from spark_pgqueue.spark.columns import source_schema
from spark_pgqueue.spark.consumer_source.batches import ConsumerBatches
from spark_pgqueue.spark.datasource import PgQueueDataSource
from spark_pgqueue.spark.executor.reading import read_claimed
from spark_pgqueue.spark.options.admission import Admission
from spark_pgqueue.spark.options.source import parse_source
from spark_pgqueue.spark.partitions import Batch, ClaimedPartition, Range
from tests.spark.conftest import Queue, fail, numbers, wait_until
from tests.sql import internals

pytestmark = pytest.mark.spark

BATCH = Batch("5e0e5a3f-5e0e-5e0e-5e0e-5e0e5a3f5e0e", 0, 1)


def driver_side_processes() -> list[psutil.Process]:
    """The processes that Spark runs the sources of this application in."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if "python_streaming_source_runner" in " ".join(process.cmdline()):
                found.append(process)
    return found


@pytest.mark.promise("kafka: with a consumer, key.deserializer")
def test_a_message_becomes_a_row_of_the_documented_columns(queue: Queue):
    """By priority, then by arrival; what comes again says how often it was delivered."""
    queue.create("s", "c")
    headers = '{"a": "b", "n": 1, "z": null, "quote": "\\""}'
    queue.sql("select pgqueue.send('s', 'again')")
    queue.sql("select pgqueue.nack(claim_id) from pgqueue.receive('s', 'c')")
    queue.sql("select pgqueue.send('s', 'plain')")
    queue.sql("select pgqueue.send('s', 'hello', 'k', %s, p_priority => 5)", headers)
    at = dict(queue.sql("select seq, inserted_at from pgqueue.messages"))
    queue.collect(queue.load("s", "c")).awaitTermination()
    expected = [
        (3, "k", "hello", {"a": "b", "n": "1", "z": None, "quote": '"'}, 5, 1, at[3]),
        (1, None, "again", None, 0, 2, at[1]),
        (2, None, "plain", None, 0, 1, at[2]),
    ]
    schema = source_schema("text", include_headers=True)
    as_text = F.to_json("headers")  # maps cannot be compared
    assert_df_equality(
        queue.spark.createDataFrame(queue.rows(), schema).withColumn("headers", as_text),
        queue.spark.createDataFrame(expected, schema).withColumn("headers", as_text),
    )


@pytest.mark.promise("kafka: with a consumer, includeHeaders")
def test_a_binary_stream_has_binary_data_and_headers_can_be_left_out(queue: Queue):
    queue.create("s", "c", kind="binary")
    queue.sql("select pgqueue.send('s', null, p_data_bytes => '\\x00ff'::bytea)")
    frame = queue.load("s", "c", includeHeaders="false")
    assert frame.columns == ["seq", "key", "data", "priority", "deliver_count", "inserted_at"]
    queue.collect(frame).awaitTermination()
    assert [bytes(row.data) for row in queue.rows()] == [b"\x00\xff"]


@pytest.mark.promise(
    "guarantee: The end of a query", "kafka: with a consumer, avgOffsetsBehindLatest"
)
def test_available_now_drains_in_batches_and_acknowledges_the_last_one(queue: Queue):
    """The progress shows messages done and the backlog."""
    queue.create("s", "c")
    queue.send("s", 1, 1000)
    query = queue.collect(queue.load("s", "c", maxMessagesPerTrigger=400))
    query.awaitTermination()
    assert [len(queue.seen[batch]) for batch in sorted(queue.seen)] == [400, 400, 200]
    assert sorted(queue.data()) == numbers(1, 1000)
    assert queue.backlog("s", "c") == 0
    assert queue.look(internals.claims) == []
    sources = [p.sources[0] for p in query.recentProgress if p.numInputRows]
    assert [json.loads(s.endOffset)["messages"] for s in sources] == [400, 800, 1000]
    latest = [json.loads(s.latestOffset) for s in sources]
    assert [each["messages"] for each in latest] == [1000, 1000, 1000]
    assert [each["backlog"] for each in latest] == [600, 200, 0]
    assert [each["lagSeconds"] > 0 for each in latest] == [True, True, False]
    assert {(each["stream"], each["consumer"]) for each in latest} == {("s", "c")}
    assert list(json.loads(sources[0].endOffset)) == ["reader", "claim", "messages"]


@pytest.mark.promise(
    "guarantee: Source",
    "cookbook: Exactly-once foreachBatch",
    "kafka: with a consumer, failed batches",
)
def test_a_batch_that_failed_is_replayed_with_the_same_messages(queue: Queue, fails):
    """Invariant 8: for the same offsets the same messages; also for the first batch."""
    queue.create("s", "c")
    queue.send("s", 1, 30)
    first: dict[int, list[Row]] = {}

    def fail(batch, batch_id):
        if batch_id not in first:
            first[batch_id] = batch.collect()
            raise RuntimeError("the sink fails")

    frame = queue.load("s", "c", maxMessagesPerTrigger=10)
    for _ in range(2):
        assert "the sink fails" in fails(queue.collect(frame, each=fail))
    queue.send("s", 31, 40)
    queue.collect(frame).awaitTermination()
    assert sorted(first) == [0, 1]
    for batch_id, rows in first.items():
        again = {row.seq: row for row in queue.seen[batch_id]}
        assert again == {row.seq: Row(**{**row.asDict(), "deliver_count": 2}) for row in rows}
    assert sorted(queue.data()) == numbers(1, 40)


def test_of_a_key_a_batch_has_the_newest_message_also_when_it_is_replayed(queue: Queue, fails):
    """Latest wins: what a failed batch has is not replaced before the batch succeeds."""
    queue.create("s")
    settings = json.dumps({"per_key_latest": True})
    queue.sql("select pgqueue.create_consumer('s', 'c', p_settings => %s)", settings)

    queue.send("s", 1, 30)
    frame = queue.load("s", "c")
    assert "the sink fails" in fails(queue.collect(frame, each=fail))
    queue.send("s", 31, 50)
    queue.collect(frame).awaitTermination()
    batches = [sorted(int(r.data) for r in queue.seen[batch]) for batch in sorted(queue.seen)]
    assert batches == [numbers(21, 30), numbers(41, 50)]
    assert queue.backlog("s", "c") == 0


def test_a_crash_between_claim_and_offset_log_loses_and_repeats_nothing(queue: Queue, fails):
    queue.create("s", "c")
    queue.send("s", 1, 30)
    # A directory in place of the file: the log cannot be written, after the claim was made.
    obstacle = Path(queue.checkpoint(), "offsets", "1")
    frame = queue.load("s", "c", maxMessagesPerTrigger=10)
    fails(queue.collect(frame, each=lambda batch, batch_id: obstacle.mkdir()))
    assert [row.claims_ahead for row in queue.look(internals.readers)] == [1]
    obstacle.rmdir()
    queue.collect(frame).awaitTermination()
    assert sorted(queue.data()) == numbers(1, 30)
    assert queue.backlog("s", "c") == 0


@pytest.mark.promise("guarantee: Source")
def test_a_crash_before_the_commit_log_repeats_exactly_that_batch(queue: Queue, fails):
    queue.create("s", "c")
    queue.send("s", 1, 20)
    obstacle = Path(queue.checkpoint(), "commits", "1")
    frame = queue.load("s", "c", maxMessagesPerTrigger=10)
    fails(queue.collect(frame, each=lambda b, i: obstacle.mkdir() if i == 1 else None))
    before = dict(queue.seen)
    obstacle.rmdir()
    queue.collect(frame).awaitTermination()
    assert {i: sorted(row.seq for row in rows) for i, rows in queue.seen.items()} == {
        i: sorted(row.seq for row in rows) for i, rows in before.items()
    }
    delivered = {i: {row.deliver_count for row in rows} for i, rows in queue.seen.items()}
    assert delivered == {0: {1}, 1: {2}}
    assert queue.backlog("s", "c") == 0


@pytest.mark.promise("kafka: with a consumer, order")
def test_with_ordering_key_a_key_is_in_one_partition_and_in_order(queue: Queue):
    queue.create("s", "c", ordering="key")
    for first in range(1, 301, 100):
        queue.send("s", first, first + 99, keys=7, priority=first % 3)
    frame = queue.load("s", "c", minPartitions=3).withColumn("partition", F.spark_partition_id())
    queue.collect(frame).awaitTermination()
    rows = queue.rows()
    assert sorted(queue.data()) == numbers(1, 300)
    assert len({row.partition for row in rows}) > 1
    for key in {row.key for row in rows}:
        mine = [row for row in rows if row.key == key]
        assert len({row.partition for row in mine}) == 1
        assert [row.seq for row in mine] == sorted(row.seq for row in mine)


@pytest.mark.promise("kafka: with a consumer, order")
def test_with_ordering_stream_there_is_one_partition_in_order(queue: Queue):
    queue.create("s", "c", ordering="stream")
    queue.send("s", 1, 100)
    queue.send("s", 101, 200, priority=9)
    frame = queue.load("s", "c", minPartitions=4).withColumn("partition", F.spark_partition_id())
    queue.collect(frame).awaitTermination()
    assert queue.data() == numbers(1, 200)
    assert len({row.partition for row in queue.rows()}) == 1


@pytest.mark.longer
@pytest.mark.promise("kafka: with a consumer, kafka.group.id")
def test_two_queries_on_one_consumer_share_its_messages(queue: Queue):
    queue.create("s", "c")
    seen: dict[str, list[int]] = {"a": [], "b": []}

    def into(name):
        return lambda batch, _: seen[name].extend(int(r.data) for r in batch.collect())

    queries = [
        queue.collect(
            queue.load("s", "c", maxMessagesPerTrigger=10, shareConsumer="true"),
            checkpoint=name,
            each=into(name),
            available_now=False,
        )
        for name in seen
    ]
    for first in range(1, 401, 20):
        queue.send("s", first, first + 19)
        time.sleep(0.05)
    wait_until(lambda: len(seen["a"]) + len(seen["b"]) >= 400, queries[0])
    assert sorted(seen["a"] + seen["b"]) == numbers(1, 400)
    assert seen["a"]
    assert seen["b"]


def test_the_lease_is_renewed_for_as_long_as_a_batch_takes_or_its_replay(queue: Queue, fails):
    """A replay is planned from Spark's log: Spark asks for no offset before it is done."""
    queue.create("s", "c")
    queue.send("s", 1, 10)
    tried: list[bool] = []

    def slow(batch, batch_id):
        end = time.monotonic() + 2.5
        while time.monotonic() < end:
            tried.append(queue.sql("select * from pgqueue.receive('s', 'c', 10)") == [])
            time.sleep(0.1)
        if not queue.seen:
            queue.seen[batch_id] = batch.collect()
            raise RuntimeError("the sink fails")

    frame = queue.load("s", "c", visibilityTimeout="1s")
    assert "the sink fails" in fails(queue.collect(frame, each=slow))
    queue.collect(frame, each=slow).awaitTermination()
    assert all(tried)
    assert sorted(queue.data()) == numbers(1, 10)
    assert [row.lost for row in queue.look(internals.readers)] == [0]


def test_a_replay_is_held_by_the_timeout_of_the_query_that_runs_now(queue: Queue, fails):
    """The heartbeat comes by that, and not by the one with which the messages were claimed."""
    queue.create("s", "c")
    queue.send("s", 1, 10)
    taken: list[tuple] = []

    def slow(batch, batch_id):
        time.sleep(3)
        taken.extend(queue.sql("select seq from pgqueue.receive('s', 'c', 10)"))

    fails(queue.collect(queue.load("s", "c", visibilityTimeout="1s"), each=fail))
    queue.collect(queue.load("s", "c", visibilityTimeout="60s"), each=slow).awaitTermination()
    assert taken == []
    assert sorted(queue.data()) == numbers(1, 10)


def test_claims_have_the_timeout_with_which_the_query_began(queue: Queue):
    """Not the consumer's of now: the lease is extended every third of the former."""
    queue.create("s", "c")
    queue.sql("select pgqueue.alter_consumer('s', 'c', %s)", '{"visibility_timeout": "60 s"}')
    options = parse_source({"url": queue.url, "stream": "s", "consumer": "c"})
    session = ConsumerBatches(options, source_schema("text", include_headers=True))
    queue.sql("select pgqueue.alter_consumer('s', 'c', %s)", '{"visibility_timeout": "1 s"}')
    queue.send("s", 1, 10)
    end = session.next(session.initial, Admission())
    for plan in (None, session.plan):
        if plan is not None:
            plan(session.initial, end)
        (claim,) = queue.look(internals.claims)
        assert 50 < claim.seconds_left <= 60
    session.close()


@pytest.mark.promise("guarantee: A driver that is away")
def test_what_another_claimer_took_over_is_left_to_it(queue: Queue, fails):
    """A lease that ended while the query was down: the query goes on with what is left to it."""
    queue.create("s", "c")
    queue.send("s", 1, 10)

    frame = queue.load("s", "c", visibilityTimeout="1s")
    fails(queue.collect(frame, each=fail))
    time.sleep(1.5)
    taken = {row[0] for row in queue.sql("select seq from pgqueue.receive('s', 'c', 4)")}
    assert len(taken) == 4
    queue.collect(frame).awaitTermination()
    assert {row.seq for row in queue.rows()} == set(numbers(1, 10)) - taken


@pytest.mark.promise("kafka: with a consumer, startingOffsets")
def test_a_query_whose_consumer_is_moved_goes_on_from_there(queue: Queue, fails):
    """Its batch is not its own any more: the tasks that read find so, and nothing comes twice."""
    queue.create("s", "c")
    queue.send("s", 1, 10)

    def move(batch, batch_id):
        queue.sql("select pgqueue.seek('s', 'c', 'seq 4')")

    frame = queue.load("s", "c")
    assert "PQ012" in fails(queue.collect(frame, each=move))
    assert queue.data() == []
    queue.collect(frame).awaitTermination()
    assert sorted(queue.data()) == numbers(4, 10)
    assert queue.backlog("s", "c") == 0


@pytest.mark.promise("guarantee: A claim lost during a micro-batch")
def test_what_is_lost_while_a_batch_waits_to_be_read_is_not_delivered_twice(queue: Queue, fails):
    """The driver's process stands still, as on a machine that is suspended; the batch goes on."""
    queue.create("s", "c")
    queue.send("s", 1, 10)
    stolen: list[int] = []

    def steal(batch, batch_id):
        processes = driver_side_processes()
        for process in processes:  # one of another test may be about to end
            with suppress(psutil.NoSuchProcess):
                process.suspend()
        try:
            while not stolen:
                rows = queue.sql("select data from pgqueue.receive('s', 'c', 4)")
                stolen.extend(int(data) for (data,) in rows)
                time.sleep(0.1)
        finally:
            for process in processes:
                with suppress(psutil.NoSuchProcess):
                    process.resume()

    frame = queue.load("s", "c", visibilityTimeout="1s")
    message = fails(queue.collect(frame, each=steal))
    assert "PQ012" in message
    assert "messages of this batch of stream s were taken over by another claimer" in message
    assert queue.data() == []
    queue.collect(frame).awaitTermination()
    assert sorted(queue.data() + stolen) == numbers(1, 10)


@pytest.mark.parametrize("lose", [True, False])
@pytest.mark.promise("guarantee: A claim lost during a micro-batch")
def test_what_is_lost_while_a_partition_is_read_fails_its_task(queue: Queue, lose):
    queue.create("s", "c")
    queue.sql(
        "select count(*) from pgqueue.send_batch('s', "
        "array(select repeat('x', 2000) || i from generate_series(1, 9000) i))"
    )
    options = {"url": queue.url, "stream": "s", "consumer": "c", "visibilitytimeout": "1s"}
    schema = source_schema("text", include_headers=True)
    session = ConsumerBatches(parse_source(options), schema)
    end = session.next(session.initial, Admission())
    (partition,) = session.plan(session.initial, end)
    read = read_claimed(parse_source(options), partition, schema, None)
    got = next(read).num_rows
    if lose:
        session._lease.stop()
        deadline = time.monotonic() + 30
        while not queue.sql("select * from pgqueue.receive('s', 'c', 1)"):
            assert time.monotonic() < deadline
    with pytest.raises(PgQueueError, match="PQ012") if lose else nullcontext():
        got += sum(batch.num_rows for batch in read)
        assert got == 9000
    if lose:  # the task is tried again, and then the batch is planned again
        with pytest.raises(PgQueueError, match="PQ012"):
            next(read_claimed(parse_source(options), partition, schema, None))
        partitions = session.plan(session.initial, end)
        again = [read_claimed(parse_source(options), each, schema, None) for each in partitions]
        assert sum(batch.num_rows for each in again for batch in each) == 8999
    session.close()


def test_available_now_gets_past_a_long_line_that_it_may_not_have(queue: Queue):
    """A claim by key looks at a bounded part of it, finds nothing, and says so."""
    queue.create("s", "c", ordering="key")
    queue.sql("select pgqueue.send('s', 'first', 'hot')")
    assert len(queue.sql("select * from pgqueue.receive('s', 'c', 1, '1 hour')")) == 1
    queue.sql(
        "select count(*) from pgqueue.send_batch('s', array_fill('x'::text, '{30000}'), "
        "array_fill('hot'::text, '{30000}'))"
    )
    queue.send("s", 1, 3)
    queue.collect(queue.load("s", "c")).awaitTermination()
    assert queue.data() == numbers(1, 3)


@pytest.mark.parametrize("ordering", ["none", pytest.param("key", marks=pytest.mark.longer)])
def test_a_batch_in_several_leaves_leaves_the_others_alone(queue: Queue, ordering):
    """Retention may be about to empty those, and waits for whoever touches them."""
    queue.create("s", "c", ordering=ordering)
    queue.sql("select pgqueue.set_retention('s', p_messages => 80)")

    def send(first: int, last: int) -> None:
        for each in range(first, last, 20):
            queue.send("s", each, each + 19)
            while dict(queue.sql("select * from pgqueue.maintain()"))["unfinished"]:
                pass

    frame = queue.load("s", "c", minPartitions=3)
    send(1, 100)
    queue.collect(frame).awaitTermination()
    send(101, 300)
    database = "do $$ begin execute format('alter database %%I {}', current_database()); end $$"
    queue.sql(database.format("set lock_timeout = ''2 s''"))
    with connect(queue.url) as conn, conn.transaction():
        read, others = internals.segments(conn, "s", since=101)
        assert len(read) >= 3
        assert len(others) >= 3
        conn.execute(f"lock table {', '.join(others)} in access exclusive mode".encode())
        queue.collect(frame).awaitTermination()
    assert sorted(queue.data()) == numbers(1, 300)


@pytest.mark.promise("kafka: with a consumer, failOnDataLoss")
def test_messages_deleted_under_a_claim_fail_the_query_unless_told_otherwise(queue: Queue, fails):
    queue.create("s", "c")
    queue.send("s", 1, 100)

    def delete(batch, batch_id):
        queue.sql("delete from pgqueue.messages where seq <= 30")

    message = fails(queue.collect(queue.load("s", "c"), each=delete))
    assert "PQ010" in message
    assert "30 messages of stream s were deleted before they could be read" in message
    assert "failOnDataLoss" in message
    queue.collect(queue.load("s", "c", failOnDataLoss="false")).awaitTermination()
    assert sorted(queue.data()) == numbers(31, 100)


def test_a_publication_wakes_a_waiting_query_and_a_delayed_message_when_it_is_due(queue: Queue):
    queue.create("s", "c")
    query = queue.collect(queue.load("s", "c", waitTime="30s"), available_now=False)
    queue.send("s", 1, 1)
    wait_until(lambda: len(queue.rows()) == 1, query)
    time.sleep(1)
    start = time.monotonic()
    queue.send("s", 2, 2)
    wait_until(lambda: len(queue.rows()) == 2, query)
    assert time.monotonic() - start < 5
    queue.sql("select pgqueue.send('s', '3', p_deliver_at => now() + interval '2 s')")
    wait_until(lambda: len(queue.rows()) == 3, query, timeout=15)
    assert time.time() >= queue.rows()[2].inserted_at.timestamp() + 2


@pytest.mark.longer
def test_an_idle_query_makes_two_transactions_a_second_at_most(queue: Queue):
    queue.create("s", "c")
    queue.send("s", 1, 10)
    query = queue.collect(queue.load("s", "c"), available_now=False)
    # It acknowledges when it asks for more: from now on it finds nothing.
    wait_until(lambda: bool(queue.rows()) and queue.backlog("s", "c") == 0, query)
    # The statistics of the database also count autovacuum and connecting, and come late. Here each
    # end of a transaction of another client is seen, unless one more ends within the next look.
    ends = (
        "select pid, state_change from pg_stat_activity where datname = current_database() "
        "and backend_type = 'client backend' and state = 'idle' and pid <> pg_backend_pid()"
    )
    with connect(queue.url) as conn:
        before, start = set(conn.execute(ends).fetchall()), time.monotonic()
        seen = set(before)
        while (passed := time.monotonic() - start) < 6:
            seen.update(conn.execute(ends).fetchall())
            time.sleep(0.02)
    assert 2 <= len(seen - before) <= 2.0 * passed


def test_a_reader_goes_on_in_the_middle_of_a_partition_when_its_backend_ends(queue: Queue):
    queue.create("s")
    queue.sql(
        "select count(*) from pgqueue.send_batch('s', "
        "array(select repeat('x', 2000) || i from generate_series(1, 30000) i))"
    )
    ranges = (Range(1, 9_001, 0, 1), Range(9_001, 30_001, 2, 3))
    partition = ClaimedPartition(0, 1, "text", "s", ranges, batch=BATCH)
    schema = source_schema("text", include_headers=True)
    options = parse_source({"url": queue.url, "stream": "s", "consumer": "c"})
    batches: list[list[int]] = []
    for batch in read_claimed(options, partition, schema, None):
        batches.append(batch["seq"].to_pylist())
        if len(batches) in (1, 3):
            queue.terminate_backends()
    assert len(batches) > 4
    assert [seq for batch in batches for seq in batch] == numbers(1, 30_000)


def test_a_reader_of_a_share_of_the_keys_takes_a_lost_connection_for_no_loss(queue: Queue):
    """The first of them counts for all; its connection ends after its last message."""
    queue.create("s")
    queue.sql(
        "select count(*) from pgqueue.send_batch('s', array_fill('x'::text, '{100}'), "
        "array(select 'k' || i from generate_series(1, 100) i))"
    )
    mine = "mod(hashtext(key)::int8 & 2147483647, 2) = 0"
    ((last, count),) = queue.sql(f"select max(seq), count(*) from pgqueue.messages where {mine}")
    for ranges, lost in (((Range(1, last + 1, 0, 1),), 0), ((Range(1, last + 1, 0, 1),), 1)):
        partition = ClaimedPartition(0, 1, "text", "s", ranges, buckets=2, batch=BATCH)
        schema, got = source_schema("text", include_headers=True), 0
        options = parse_source({"url": queue.url, "stream": "s", "consumer": "c"})
        if lost:
            queue.sql(f"delete from pgqueue.messages where seq < %s and not {mine}", last)
        with nullcontext() if not lost else pytest.raises(PgQueueError, match="were deleted"):
            for batch in read_claimed(options, partition, schema, None):
                got += batch.num_rows
                if got == count:
                    queue.terminate_backends()
        assert got == count


@pytest.mark.promise("kafka: with a consumer, spark.kafka.consumer.cache.*")
def test_a_running_query_survives_terminated_backends(queue: Queue):
    queue.create("s", "c")
    query = queue.collect(queue.load("s", "c"), available_now=False)
    wait_until(lambda: bool(queue.seen), query)
    terminated = 0
    for first in range(1, 101, 20):
        queue.send("s", first, first + 19)
        time.sleep(0.3)
        terminated += queue.terminate_backends()
    assert terminated > 1
    wait_until(lambda: len(queue.data()) >= 100, query)
    assert sorted(queue.data()) == numbers(1, 100)


@pytest.mark.longer
def test_a_query_whose_source_is_killed_fails_and_repeats_nothing_when_it_is_started_again(
    queue: Queue, fails
):
    queue.create("in", "c")
    queue.create("out")
    queue.send("in", 1, 10)
    copied = queue.load("in", "c").select("data")
    query = queue.publish(copied, "out", available_now=False)
    wait_until(lambda: len(queue.sent("out")) == 10, query)
    for process in driver_side_processes():
        with suppress(psutil.NoSuchProcess):
            process.kill()
    queue.send("in", 11, 20)
    fails(query)
    queue.publish(copied, "out").awaitTermination()
    assert sorted(map(int, queue.sent("out"))) == numbers(1, 20)


def test_create_consumer_starts_where_it_is_told_and_only_once(queue: Queue):
    queue.create("s")
    queue.send("s", 1, 10)
    options = {"createConsumer": "true", "startingPosition": "earliest", "ordering": "key"}
    queue.collect(queue.load("s", "new", **options)).awaitTermination()
    assert sorted(queue.data()) == numbers(1, 10)
    assert queue.sql("select name, ordering from pgqueue.consumers") == [("new", "key")]
    queue.send("s", 11, 20)
    queue.collect(queue.load("s", "new", **options)).awaitTermination()
    assert sorted(queue.data()) == numbers(1, 20)


class TestBadInput:
    """Each ends in one clear error that names the thing and the way out."""

    @pytest.mark.parametrize(
        ("options", "expected"),
        [
            ({"stream": "nope"}, "unknown stream 'nope'"),
            ({"consumer": "nope"}, "unknown consumer 'nope' of stream 's'"),
            ({"consumers": "c"}, "source has no option consumers"),
            ({"waitTime": "1"}, "option waitTime is '1'"),
            ({"visibilityTimeout": "8000 days"}, "option visibilityTimeout must be an interval"),
            ({"url": "host=/nowhere dbname=x"}, "no connection to Postgres (host=/nowhere"),
        ],
    )
    def test_when_the_source_is_loaded(self, conn, url, options, expected):
        conn.execute("select pgqueue.create_stream('s')")
        conn.execute("select pgqueue.create_consumer('s', 'c')")
        given = {"url": url, "stream": "s", "consumer": "c", **options}
        source = PgQueueDataSource({name.lower(): value for name, value in given.items()})
        with pytest.raises(PgQueueError) as error:
            source.streamReader(source.schema()).initialOffset()
        assert expected in str(error.value)

    def test_a_database_without_the_schema(self, queue: Queue, empty_url):
        with pytest.raises(Exception, match="pgqueue install"):
            queue.load("s", "c", url=empty_url)

    def test_a_role_without_permission(self, queue: Queue, server):
        queue.create("s", "c")
        queue.sql("drop role if exists pgqueue_nobody")
        queue.sql("create role pgqueue_nobody login")
        try:
            with pytest.raises(Exception, match="permission denied") as error:
                queue.load("s", "c", url=make_conninfo(queue.url, user="pgqueue_nobody"))
            assert "Hint:" in str(error.value)
        finally:
            queue.sql("drop role pgqueue_nobody")
