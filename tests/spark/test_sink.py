"""The sink's promises, each in the name of its test."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta

import pyarrow as pa
import pytest
from chispa import assert_df_equality
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import StringType, StructField, StructType

import spark_pgqueue
from spark_pgqueue.spark.options.sink import parse_sink
from spark_pgqueue.spark.sink.stream_writer import Staged
from spark_pgqueue.spark.sink.writers import PgQueueBatchWriter, PgQueueStreamWriter
from tests.spark.conftest import Queue, no_commit_log, refusal, wait_until
from tests.sql import internals

pytestmark = pytest.mark.spark


def texts(first: int, last: int) -> list[str]:
    return sorted(str(i) for i in range(first, last + 1))


def frame(queue: Queue, first: int, last: int, partitions: int = 2) -> DataFrame:
    """The numbers first to last, as data."""
    numbers = queue.spark.range(first, last + 1, numPartitions=partitions)
    return numbers.select(F.col("id").cast("string").alias("data"))


def one(queue: Queue, data: str) -> DataFrame:
    return queue.spark.createDataFrame([(data,)], "data string")


def test_what_spark_starts_for_each_micro_batch_imports_no_arrow():
    """It would take a tenth of a second of each, twice."""
    check = (
        "import sys, spark_pgqueue.spark.datasource\n"
        "sys.exit(str({'adbc_driver_manager', 'numpy', 'pandas', 'pyarrow'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True)
    assert done.stderr.strip() == "set()"


@pytest.mark.promise("kafka: writing, value")
def test_rows_become_messages_with_key_headers_priority_and_time(queue: Queue):
    queue.create("s")
    at = datetime(2030, 1, 1, 12, 0, 0, 250_000, tzinfo=UTC)
    rows = [
        ("a", "k1", {"h": "1"}, 3, at),
        ("b", None, None, None, None),
        ("c", "k2", {"a": "ä", "quote": '"', "h": None}, 3, at + timedelta(milliseconds=500)),
        ("d", "k2", {}, 0, None),
    ]
    columns = "data string, key string, headers map<string,string>, priority int, "
    written = queue.spark.createDataFrame(rows, columns + "deliver_at timestamp").coalesce(1)
    queue.write(written, "s")
    messages = queue.sql("select data, key, headers from pgqueue.messages order by data")
    assert messages == [
        ("a", "k1", {"h": "1"}),
        ("b", None, None),
        ("c", "k2", {"a": "ä", "quote": '"', "h": None}),
        ("d", "k2", {}),
    ]
    found = queue.look(internals.publications)
    assert found == [(2, 0, None), (2, 3, "2030-01-01 12:00:01+00")]


@pytest.mark.promise("kafka: writing, other columns")
def test_rows_with_a_dedup_key_that_was_sent_are_left_out(queue: Queue):
    """Whichever task they are in; the same in the next micro-batch, and from other producers."""
    queue.create("s")
    with pytest.raises(Exception, match="has no dedup_window, and so accepts no dedup keys"):
        queue.write(frame(queue, 1, 2).withColumn("dedup_key", F.col("data")), "s")
    queue.sql("""select pgqueue.alter_stream('s', '{"dedup_window": "1 day"}')""")
    queue.sql("select pgqueue.send('s', 'first', p_dedup_key => '3')")
    numbers = queue.spark.range(1, 11, numPartitions=3).select(
        F.col("id").cast("string").alias("data"),
        F.when(F.col("id") < 9, (F.col("id") % 6).cast("string")).alias("dedup_key"),
        (F.col("id") % 2).cast("int").alias("priority"),
    )
    queue.write(numbers, "s")
    got = {row[0] for row in queue.sql("select data from pgqueue.messages")}
    assert len(got & {"1", "7"}) == len(got & {"2", "8"}) == 1
    assert got - {"1", "7", "2", "8"} == {"first", "4", "5", "6", "9", "10"}
    queue.write(numbers.where("dedup_key is not null"), "s")
    assert {row[0] for row in queue.sql("select data from pgqueue.messages")} == got


def test_times_far_away_and_many_of_them(queue: Queue):
    """Each full second is a part of the publication; Spark's times reach further than Python's."""
    queue.create("s")
    written = queue.spark.range(3000).select(
        F.col("id").cast("string").alias("data"),
        F.expr("timestamp'9999-12-31 23:59:59.5' + make_interval(0, 0, 0, 0, 0, 0, id)").alias(
            "deliver_at"
        ),
    )
    queue.write(written, "s")
    parts = queue.look(internals.publications)
    assert [part.message_count for part in parts] == [1] * 3000
    assert parts[0].deliver_at.startswith("10000-01-01 00:00:00")
    assert parts[-1].deliver_at.startswith("10000-01-01 00:49:59")


@pytest.mark.promise("moving: Kafka: the rows of a task keep their order")
def test_the_rows_of_a_task_keep_their_order_whatever_their_priorities(queue: Queue):
    """So do the messages of a key."""
    queue.create("s", "c", ordering="key")
    rows = frame(queue, 1, 3000, partitions=1).selectExpr(
        "data", "'k' || (data % 3) as key", "cast(data % 7 as int) as priority"
    )
    queue.write(rows, "s")
    assert [data for (data,) in queue.sql("select data from pgqueue.messages order by seq")] == [
        str(i) for i in range(1, 3001)
    ]
    received = queue.sql("select key, data::int from pgqueue.receive('s', 'c', 3000)")
    assert len(received) == 3000
    for key in ("k0", "k1", "k2"):
        of_key = [data for each, data in received if each == key]
        assert of_key == sorted(of_key)


@pytest.mark.promise("kafka: delta, what the log says of lower versions")
def test_a_batch_write_that_writes_nothing_says_so(queue: Queue, caplog):
    queue.create("s")
    given = {"url": queue.url, "stream": "s", "txnappid": "a", "txnversion": "1"}
    rows = pa.RecordBatch.from_pydict({"data": ["x"]})
    for told in ("", "txnVersion 1 of txn:a, or a later one, was published before"):
        schema = StructType([StructField("data", StringType())])
        writer = PgQueueBatchWriter(parse_sink(given, streaming=False), schema)
        writer.commit([writer.write(iter([rows]))])
        assert told in caplog.text
        assert bool(told) == bool(caplog.text)
    assert queue.sent("s") == ["x"]


def test_a_batch_write_that_was_overtaken_after_its_tasks_looked_says_so(queue: Queue, caplog):
    queue.create("s")
    schema = StructType([StructField("data", StringType())])
    writers = []
    for version, data in ((1, "late"), (2, "overtakes")):
        given = {"url": queue.url, "stream": "s", "txnappid": "a", "txnversion": str(version)}
        writer = PgQueueBatchWriter(parse_sink(given, streaming=False), schema)
        rows = pa.RecordBatch.from_pydict({"data": [data]})
        writers.append((writer, [writer.write(iter([rows]))]))
    for writer, messages in reversed(writers):
        writer.commit(messages)
    assert "txnVersion 1 of txn:a, or a later one, was published before" in caplog.text
    assert len(caplog.records) == 1
    assert queue.sent("s") == ["overtakes"]


def test_where_logging_is_not_set_up_the_warning_is_on_standard_error(queue: Queue):
    queue.create("s")
    write = (
        "import sys, pyarrow as pa\n"
        "from pyspark.sql.types import StringType, StructField, StructType\n"
        "from spark_pgqueue.spark.datasource import PgQueueDataSource\n"
        "given = {'url': sys.argv[1], 'stream': 's', 'txnappid': 'a\\x1b', 'txnversion': '1'}\n"
        "schema = StructType([StructField('data', StringType())])\n"
        "for _ in range(2):\n"
        "    writer = PgQueueDataSource(given).writer(schema, overwrite=False)\n"
        "    writer.commit([writer.write(iter([pa.record_batch({'data': ['x']})]))])\n"
    )
    done = subprocess.run([sys.executable, "-c", write, queue.url], capture_output=True, text=True)
    assert done.stderr.strip() == (
        "txnVersion 1 of txn:a\\x1b, or a later one, was published before: nothing was written"
    )


@pytest.mark.each_version
def test_what_the_sink_writes_the_source_reads(queue: Queue):
    queue.create("s", "c")
    written = queue.spark.range(1000).select(
        F.expr("'k' || id % 7").alias("key"),
        F.expr("to_json(struct(id))").alias("data"),
        F.expr("map('id', cast(id as string))").alias("headers"),
        F.expr("cast(id % 3 as int)").alias("priority"),
    )
    queue.write(written, "s")
    queue.collect(queue.load("s", "c")).awaitTermination()
    read = queue.spark.createDataFrame(queue.rows(), queue.load("s", "c").schema)
    as_text = F.to_json("headers")
    assert_df_equality(
        read.select(*written.columns).withColumn("headers", as_text),
        written.withColumn("headers", as_text),
        ignore_row_order=True,
        ignore_nullable=True,
    )


@pytest.mark.promise("kafka: writing, key")
def test_a_json_stream_takes_json_and_headers_may_be_a_json_string(queue: Queue):
    queue.create("s", kind="json")
    queue.write(queue.spark.sql("""select '{"a": 1}' as data, '{"h": 2}' as headers"""), "s")
    assert queue.sql("select data, headers from pgqueue.messages") == [('{"a": 1}', {"h": 2})]


def test_a_binary_stream_takes_binary(queue: Queue):
    queue.create("s", kind="binary")
    queue.write(queue.spark.sql("select x'00ff' as DATA"), "s")
    assert queue.sql("select data_bytes from pgqueue.messages") == [(b"\x00\xff",)]


def test_only_the_named_consumers_get_the_messages(queue: Queue):
    queue.create("s", "a", "b", "c")
    queue.write(frame(queue, 1, 10), "s", consumers="a, c")
    assert [queue.backlog("s", consumer) for consumer in "abc"] == [10, 0, 10]


@pytest.mark.promise("kafka: writing, visibility")
def test_nobody_sees_anything_of_a_batch_before_all_of_it_is_there(queue: Queue):
    queue.create("s", "c")
    seen = set()
    done = threading.Event()

    def watch():
        while not done.is_set():
            seen.add(queue.backlog("s", "c"))

    thread = threading.Thread(target=watch)
    thread.start()
    queue.write(frame(queue, 1, 100_000, partitions=4), "s")
    done.set()
    thread.join()
    assert seen <= {0, 100_000}
    assert [part.message_count for part in queue.look(internals.publications)] == [100_000]
    assert queue.look(internals.staged_chunks) == []


@pytest.mark.promise("guarantee: Batch writes", "kafka: writing, df.write")
def test_a_write_that_fails_publishes_nothing(queue: Queue):
    queue.create("s", "c")
    failing = frame(queue, 1, 100_000).select(
        F.expr("if(data = '99999', raise_error('halt'), data)").alias("data")
    )
    with pytest.raises(Exception, match="halt"):
        queue.write(failing, "s")
    assert queue.sent("s") == []
    assert queue.backlog("s", "c") == 0


@pytest.mark.promise("guarantee: Sink", "kafka: writing, exactly once")
def test_a_batch_is_published_once_although_it_is_run_again_after_the_commit(queue: Queue, fails):
    """Killed between the sink's commit and Spark's commit log."""
    queue.create("in", "c")
    queue.create("out")
    copied = queue.load("in", "c").select("data")
    query = queue.publish(copied, "out", available_now=False)
    with no_commit_log(query, queue.checkpoint()):
        queue.send("in", 1, 100)
        fails(query)
    assert queue.sent("out") == texts(1, 100)
    queue.send("in", 101, 200)
    queue.publish(copied, "out").awaitTermination()
    assert queue.sent("out") == texts(1, 200)
    assert queue.backlog("in", "c") == 0


@pytest.mark.promise("guarantee: Repeated micro-batches")
def test_a_restored_checkpoint_does_not_make_the_sink_drop_new_rows(queue: Queue, fails):
    """Its next batch has the number of one that was published, and other rows."""
    queue.create("out")
    files, kept = queue.folder / "files", queue.folder / "kept"
    files.mkdir()

    def copy(name: str, *rows: str):
        (files / name).write_text("\n".join(rows))
        lines = queue.spark.readStream.text(str(files)).select(F.col("value").alias("data"))
        return queue.publish(lines, "out")

    copy("a", "1", "2").awaitTermination()
    shutil.copytree(queue.checkpoint(), kept)
    copy("b", "3").awaitTermination()
    shutil.rmtree(queue.checkpoint())
    shutil.copytree(kept, queue.checkpoint())
    message = fails(copy("c", "4", "5"))
    assert "PQ010" in message
    assert "was published with 1 message, and has 3 now" in message
    assert queue.sent("out") == ["1", "2", "3"]


def test_a_query_notices_that_its_stream_was_dropped_and_made_again(queue: Queue, fails):
    queue.create("in", "c")
    queue.create("out")
    queue.send("in", 1, 10)
    query = queue.publish(queue.load("in", "c").select("data"), "out", available_now=False)
    wait_until(lambda: len(queue.sent("out")) == 10, query)
    queue.sql("select pgqueue.drop_stream('out')")
    queue.create("out")
    queue.send("in", 11, 20)
    message = fails(query)
    assert "PQ001" in message
    assert "stream 'out' was dropped and created again" in message
    assert queue.sent("out") == []
    assert queue.backlog("in", "c") == 10


@pytest.mark.promise(
    "guarantee: Batch writes",
    "kafka: delta, txnAppId, lower versions, new checkpoint, without them",
)
def test_a_write_with_txn_app_id_and_version_is_published_once(queue: Queue):
    """As with Delta: a lower version than the published one writes nothing. Without them two writes
    are two.
    """
    queue.create("s")
    for version, data in ((5, "a"), (5, "b"), (3, "c"), (6, "d")):
        queue.write(one(queue, data), "s", txnAppId="app", txnVersion=str(version))
    assert queue.sent("s") == ["a", "d"]
    queue.write(one(queue, "e"), "s", txnAppId="another", txnVersion="1")
    for _ in range(2):
        queue.write(one(queue, "f"), "s")
    assert queue.sent("s") == ["a", "d", "e", "f", "f"]


@pytest.mark.longer
@pytest.mark.promise("kafka: writing, spark.kafka.producer.cache.*")
def test_a_write_survives_terminated_backends(queue: Queue):
    queue.create("s")
    done = threading.Event()

    def terminate():
        while not done.wait(0.4):
            queue.terminate_backends()

    thread = threading.Thread(target=terminate)
    thread.start()
    try:
        queue.write(frame(queue, 1, 500_000), "s")
    finally:
        done.set()
        thread.join()
    assert [part.message_count for part in queue.look(internals.publications)] == [500_000]
    assert queue.sent("s") == texts(1, 500_000)


@pytest.mark.promise("operations: a restart")
def test_a_query_from_stream_to_stream_survives_a_restart_of_postgres(queue: Queue, server):
    queue.create("in", "c")
    queue.create("out")
    query = queue.publish(queue.load("in", "c").select("data"), "out", available_now=False)
    for first in range(1, 81, 20):
        queue.send("in", first, first + 19)
        time.sleep(1)
        if first == 41:
            server.restart("immediate")
    wait_until(lambda: len(queue.sent("out")) >= 80, query)
    assert queue.sent("out") == texts(1, 80)


BAD_FRAMES: list[tuple[str, dict[str, str | None], str]] = [
    ("'x' as data", {"stream": "nope"}, "unknown stream 'nope'"),
    ("'x' as data", {"consumers": "c,nope"}, "'nope' in option consumers"),
    ("'x' as data", {"path": "/some/where"}, "sink has no option path"),
    ("'x' as data", {"consumer": "c"}, "option consumer is for actions"),
    ("'x' as data", {"txnAppId": "a"}, "txnAppId and txnVersion must be given together"),
    (
        "'x' as value",
        {},
        "column data is missing: the DataFrame has value\nHint: select value",
    ),
    ("'x' as data, 'y' as topic", {}, "Hint: call it stream"),
    ("1 as data", {}, "column data is int, but must be string, or binary"),
    ("x'00' as data", {}, "column data is binary, but must be string for stream s"),
    ("'x' as data, 1 as key", {}, "column key is int, but must be string"),
    ("'x' as data, 1 as id", {}, "column id is not a column of a message"),
    ("'x' as data, 'y' as Data", {}, "occurs twice"),
    ("'x' as data, '1' as priority", {}, "column priority is string, but must be int"),
    (
        "'x' as data, map(1, 'x') as headers",
        {},
        "column headers is map<int,string>, but must be map<string,string>",
    ),
    (
        "'x' as data, date'2030-01-01' as deliver_at",
        {},
        "column deliver_at is date, but must be timestamp",
    ),
    ("cast(null as string) as data", {}, "column data is null in 1 of 1 rows"),
    ("'x' as data, 40000 as priority", {}, "column priority must be -32768 to 32767, not 40000"),
    ("'x' as data, 1L << 40 as priority", {}, "column priority contains a number"),
    ("'a' || char(0) as data", {}, "a row does not fit stream s of kind text"),
    (
        "'x' as data, 'no json' as headers",
        {},
        "invalid input syntax for type json (column headers)",
    ),
]


class TestBadInput:
    """Each ends in one clear error that names the thing and the way out, and publishes nothing."""

    def test_when_a_frame_is_written(self, queue: Queue):
        queue.create("s", "c")
        for select, options, expected in BAD_FRAMES:
            given = {"url": queue.url, "stream": "s", **options}
            assert expected in refusal(queue.spark.sql(f"select {select}"), **given)
        assert queue.sent("s") == []

    def test_another_version_of_the_schema(self, queue: Queue):
        queue.create("s", "c")
        queue.sql("insert into pgqueue.installed (version) values (99) returning 1")
        with pytest.raises(Exception, match="has version 99 of the schema pgqueue"):
            queue.write(frame(queue, 1, 1), "s")
        with pytest.raises(Exception, match="has version 99 of the schema pgqueue"):
            queue.load("s", "c")
        assert queue.sent("s") == []

    @pytest.mark.parametrize("data", ["no json", '{"a":', '"\\u0000'])
    def test_what_is_no_json_for_a_json_stream(self, queue: Queue, data):
        queue.create("s", kind="json")
        data += "payload"
        frame = queue.spark.createDataFrame([(data,)], "data string")
        error = refusal(frame, url=queue.url, stream="s")
        assert re.search(r"stream 's' \(json\), of \d+ bytes, is not valid", error)
        assert "payload" not in error
        assert queue.sent("s") == []

    @pytest.mark.promise("kafka: writing, output modes")
    def test_overwrite_and_complete(self, queue: Queue, fails):
        queue.create("s", "c")
        writer = frame(queue, 1, 1).write.format("pgqueue").mode("overwrite")
        with pytest.raises(Exception, match=r'use mode\("append"\)'):
            writer.options(url=queue.url, stream="s").save()
        counts = queue.load("s", "c").groupBy("key").count().select(F.col("key").alias("data"))
        writer = counts.writeStream.format("pgqueue").outputMode("complete")
        writer = writer.options(url=queue.url, stream="s", checkpointLocation=queue.checkpoint())
        assert "outputMode complete cannot be written" in fails(writer.start())
        # Spark itself refuses update, of a sink in Python.
        assert "does not support Update mode" in fails(writer.outputMode("update").start())


@pytest.mark.longer
def test_a_query_that_fails_again_and_again_leaves_no_staged_rows(queue: Queue, fails):
    """Where a task fails after it has staged some of its rows, and where the commit fails."""
    queue.create("in", "json", "full")
    queue.create("json", kind="json")
    queue.create("full")
    queue.sql("""select pgqueue.create_consumer('full', 'c', p_settings => '{"max_backlog": 3}')""")
    queue.send("in", 1, 40)
    for stream, times in (("json", 2), ("full", 1)):
        rows = queue.load("in", stream).select("data")
        if stream == "json":  # one task, which goes from stream to stream
            rows = rows.coalesce(1).selectExpr(
                "if(data = '40', '{', data) as data", "if(data = '40', 'json', 'full') as stream"
            )
        for _ in range(times):
            fails(queue.publish(rows, stream, stream, retryTimeout="1 s"))
        assert queue.look(internals.count, "staged_chunks") == 0
        assert queue.look(internals.count, "reservations") == 0
    assert queue.sent("json") == queue.sent("full") == []


@pytest.mark.promise("writing: Threads", "kafka: delta, several writes")
def test_a_thread_that_writes_registers_first(queue: Queue):
    """Spark looks for the format in the session that is active in the thread."""
    queue.create("s")
    queue.create("in", "c")
    queue.send("in", 1, 2)

    def write(batch: DataFrame) -> None:
        spark_pgqueue.register(batch.sparkSession)
        queue.write(batch.select("data"), "s")

    def each(batch: DataFrame, batch_id: int) -> None:
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(write, [batch, batch]))

    queue.collect(queue.load("in", "c"), each=each).awaitTermination()
    assert queue.sent("s") == ["1", "1", "2", "2"]


def test_a_write_without_tasks_publishes_nothing(queue: Queue):
    """A batch of a query without messages is recorded by what its tasks say."""
    queue.create("s")
    schema = StructType([StructField("data", StringType())])
    options = parse_sink({"url": queue.url, "stream": "s"}, streaming=True)
    PgQueueStreamWriter(options, schema).commit([], 0)
    PgQueueStreamWriter(options, schema).commit([None], 0)
    staged = Staged("a query", (), 0, (), "a query")
    PgQueueStreamWriter(options, schema).commit([None, staged], 1)
    batches = queue.sql("select sink, batch, message_count from pgqueue.sink_batches")
    assert batches == [("a query", 1, 0)]
