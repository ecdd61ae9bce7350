"""Writing tables from Spark: the promises of `spark_pgqueue/spark/sink/table_writer.py`.

What the statements do is in `tests/sql/test_table_sink.py` and the files beside it. An application
that writes a table is killed in `test_crash.py`.
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException, StreamingQueryException
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.types import LongType, StringType, StructField, StructType

from spark_pgqueue import PgQueueError
from spark_pgqueue.spark.options.sink import parse_sink
from spark_pgqueue.spark.sink.writers import PgQueueBatchWriter
from tests.spark.conftest import Queue, no_commit_log, refusal
from tests.sql.table_writes import staged_tables

pytestmark = pytest.mark.spark

MERGED: dict[str, Any] = {"mergeKeys": "id", "sequenceBy": "version", "deleteWhen": "gone"}
BILLS = "create table public.bills (id bigint primary key, amount numeric(10, 2), version bigint)"


def stream(
    queue: Queue, frame: DataFrame, available_now: bool = True, **options: Any
) -> StreamingQuery:
    """Write a frame to public.bills."""
    writer = frame.writeStream.format("pgqueue").options(url=queue.url, table="public.bills")
    writer = writer.options(**options).option("checkpointLocation", queue.checkpoint())
    return (writer.trigger(availableNow=True) if available_now else writer).start()


def write(queue: Queue, frame: DataFrame, table: str = "public.bills", **options: str) -> None:
    writer = frame.write.format("pgqueue").mode("append").options(url=queue.url, table=table)
    writer.options(**options).save()


def bills(frame: DataFrame) -> DataFrame:
    """The messages n as rows: n % 20 is the id, n the version; each fifth is a delete."""
    return frame.selectExpr(
        "cast(data as bigint) % 20 as id",
        "cast(cast(data as int) / 100 as decimal(10,2)) as amount",
        "cast(data as bigint) as version",
        "cast(data as int) % 5 = 0 as gone",
    )


def expected(last: int) -> list[tuple]:
    """The table after the messages 1 to last, in any order in which later ones are later."""
    kept = {n % 20: n for n in range(1, last + 1)}
    return sorted((k, Decimal(n) / 100, n) for k, n in kept.items() if n % 5)


def content(queue: Queue) -> list[tuple]:
    return queue.sql("select id, amount, version from public.bills order by 1, 3")


def test_a_query_merges_its_messages_and_a_batch_that_is_repeated_changes_nothing(
    queue: Queue, fails
):
    """Killed between the sink's commit and Spark's note of it."""
    queue.create("in", "c", ordering="stream")
    queue.sql(BILLS)
    frame = bills(queue.load("in", "c", minPartitions=2, visibilityTimeout="5s"))
    query = stream(queue, frame, available_now=False, **MERGED)
    with no_commit_log(query, queue.checkpoint()):
        queue.send("in", 1, 500)
        fails(query)
    assert content(queue) == expected(500)
    queue.sql("update public.bills set amount = 0, version = 0")
    assert stream(queue, frame, **MERGED).awaitTermination(120)
    assert {row[1:] for row in content(queue)} == {(0, 0)}
    assert queue.look(staged_tables) == set()


def test_values_of_each_type_arrive(queue: Queue):
    queue.sql(
        "create table public.t (a boolean, b smallint, c int, d bigint, e real, f float8,"
        " g numeric(12, 2), h text, i bytea, j date, k timestamptz, l timestamp, m interval,"
        " n int[], o uuid[], p timestamptz[], q numeric(10, 2)[], r jsonb, s uuid)"
    )
    columns = {
        "a": "true", "b": "cast(1 as tinyint)", "c": "cast(2 as smallint)", "d": "3",
        "e": "cast(1.5 as float)", "f": "cast(2.5 as double)", "g": "cast(1.25 as decimal(10,2))",
        "h": "'x'", "i": "X'0102'", "j": "date'2024-02-29'",
        "k": "timestamp'2024-01-01 00:00:00.5Z'", "l": "timestamp_ntz'2024-01-01 00:00:00'",
        "m": "interval '1 02:03:04' day to second", "n": "array(1, null)",
        "o": "array('6e0e5a3f-0000-0000-0000-000000000001')",
        "p": "array(timestamp'2024-01-01 00:00:00Z')", "q": "array(cast(1.25 as decimal(10,2)))",
        "r": "to_json(map('a', 1))", "s": "'6e0e5a3f-0000-0000-0000-000000000001'",
    }  # fmt: skip
    chosen = [f"{sql} as {name}" for name, sql in columns.items()]
    nulls = [f"if(id = 0, {sql}, null) as {name}" for name, sql in columns.items()]
    write(queue, queue.spark.range(1).selectExpr(*chosen), "public.t")
    write(queue, queue.spark.range(1, 2).selectExpr(*nulls), "public.t")
    stored, empty = queue.sql("select t::text from public.t order by 1 desc nulls last")
    assert empty[0] == "(" + "," * 18 + ")" or stored[0] == "(" + "," * 18 + ")"
    (found,) = queue.sql(
        "select (select jsonb_object_agg(key, value) from jsonb_each_text(to_jsonb(t)))"
        " from public.t where a"
    )[0]
    assert found | {"k": "", "p": ""} == {
        "a": "true", "b": "1", "c": "2", "d": "3", "e": "1.5", "f": "2.5", "g": "1.25", "h": "x",
        "i": "\\x0102", "j": "2024-02-29", "k": "", "l": "2024-01-01T00:00:00",
        "m": "26:03:04", "n": "[1, null]",
        "o": '["6e0e5a3f-0000-0000-0000-000000000001"]', "p": "", "q": "[1.25]", "r": '{"a": 1}',
        "s": "6e0e5a3f-0000-0000-0000-000000000001",
    }  # fmt: skip
    times = "k = '2024-01-01 00:00:00.5Z', p = array['2024-01-01Z'::timestamptz]"
    assert queue.sql(f"select {times} from public.t where a") == [(True, True)]


def test_numbers_are_what_spark_sent_unless_an_option_lets_the_table_round(queue: Queue):
    queue.sql("create table public.t (a numeric, b numeric, c numeric(10, 2), d varchar(2))")
    one = queue.spark.sql(
        "select 123456789012345.67D as a, cast(0.1234567 as float) as b, 2.345D as c, 'ab' as d"
    )
    write(queue, one, "public.t", allowRounding="c")
    stored = queue.sql("select * from public.t")
    assert stored == [(Decimal("123456789012345.67"), Decimal("0.1234567"), Decimal("2.35"), "ab")]
    cut = queue.spark.sql("select 'ab ' as d")
    with pytest.raises(PySparkException, match="truncate or round text of column d") as caught:
        write(queue, cut, "public.t")
    assert "make the column wider" in str(caught.value)


def test_rows_messages_and_actions_of_a_batch_are_one_commit(queue: Queue):
    """A constraint of the table that fails keeps the messages back, too."""
    queue.create("in", "c", "d")
    queue.create("out", "o")
    queue.sql(BILLS)
    queue.sql("alter table public.bills add constraint small check (amount < 3)")
    queue.send("in", 1, 400)

    def mixed() -> DataFrame:
        read = queue.load("in", "c", visibilityTimeout="5s")
        return read.selectExpr(
            "case when data % 4 < 2 then struct(cast(data as bigint) as id,"
            " cast(cast(data as int) / 100 as decimal(10,2)) as amount) end as row",
            "case when data % 4 = 2 then data end as data",
            "case when data % 4 in (1, 3) then 'ack' end as action",
            "case when data % 4 in (1, 3) then 'in' else 'out' end as stream",
            "case when data % 4 in (1, 3) then 'd' end as consumer",
            "seq",
        )

    with pytest.raises(StreamingQueryException, match=r"table public\.bills refused the batch"):
        stream(queue, mixed(), mergeKeys="id").awaitTermination(60)
    assert content(queue) == []
    assert queue.sent("out") == []
    assert queue.backlog("in", "d") == 400
    queue.sql("alter table public.bills drop constraint small")
    stream(queue, mixed(), mergeKeys="id").awaitTermination(60)
    assert [row[0] for row in content(queue)] == [n for n in range(1, 401) if n % 4 < 2]
    assert queue.sent("out") == sorted(str(n) for n in range(1, 401) if n % 4 == 2)
    assert queue.backlog("in", "d") == 200


def test_a_batch_in_foreach_batch_is_written_once(queue: Queue):
    """Aggregates, which Spark gives to no sink of Python in mode update."""
    queue.create("in", "c")
    queue.sql("create table public.sums (k text primary key, n bigint)")
    queue.send("in", 1, 100)

    def total(batch: DataFrame, batch_id: int) -> None:
        for _ in range(2):  # as a batch that is repeated
            write(
                queue,
                batch,
                "public.sums",
                mergeKeys="k",
                txnAppId="sums",
                txnVersion=str(batch_id),
            )

    counted = queue.load("in", "c").groupBy(F.col("key").alias("k")).agg(F.count("*").alias("n"))
    writer = counted.writeStream.outputMode("update").foreachBatch(total)
    writer = writer.option("checkpointLocation", queue.checkpoint())
    assert writer.trigger(availableNow=True).start().awaitTermination(120)
    assert queue.sql("select count(*), sum(n) from public.sums") == [(10, 100)]
    assert queue.look(staged_tables) == set()


def test_mistakes_are_found_before_a_task_runs(queue: Queue):
    queue.sql(BILLS)
    frame = queue.spark.range(3)
    for options, says in (
        ({"table": "bills"}, "option table must be a table with its schema"),
        (
            {"table": "public.no"},
            "option table must be a table of this database, which has no public.no",
        ),
        ({"mergeKeys": "no"}, "option mergeKeys must name a column of the DataFrame, not 'no'"),
        ({"mergeKeys": "id", "sequenceBy": "id"}, "option mergeKeys, option sequenceBy and"),
        ({"stream": "s"}, "option stream is for messages, but all columns belong to table"),
        ({"sequenceBy": "id"}, "option sequenceBy needs option mergeKeys"),
        (
            {"allowRounding": "no"},
            "option allowRounding must name a column of the DataFrame, not 'no'",
        ),
    ):
        given = {"url": queue.url, "table": "public.bills", **options}
        assert says in refusal(frame, **given)
    given = {"url": queue.url, "table": "public.bills"}
    wrong = frame.selectExpr("id", "cast(id as double) as version")
    assert "column version is double, and must fit column version" in refusal(wrong, **given)
    doubles = frame.selectExpr("id", "id / 3 as amount", "id as version")
    assert "Or add amount to option allowRounding" in refusal(doubles, **given)
    rounded = {"mergeKeys": "id", "sequenceBy": "amount", "allowRounding": "amount"}
    error = refusal(doubles, **given, **rounded)
    assert "with option sequenceBy, an older row could remain" in error
    with pytest.raises(PySparkException, match="column row is null in 1 of 3 rows"):
        write(queue, frame.selectExpr("if(id > 0, struct(id), null) as row").coalesce(1))
    with pytest.raises(PySparkException, match="nor to a table"):
        frame.write.format("pgqueue").mode("overwrite").options(url=queue.url, table="t").save()
    assert queue.look(staged_tables) == set()


def test_an_error_of_the_table_says_which_and_shows_no_row(queue: Queue):
    queue.sql(BILLS)
    secret = queue.spark.sql("select 1L as id, 123456.78BD as amount, 1L as version")
    queue.sql("alter table public.bills add check (amount < 5)")
    with pytest.raises(PySparkException, match=r"table public\.bills refused the batch") as caught:
        write(queue, secret)
    assert "123456.78" not in str(caught.value)
    nulls = queue.spark.sql("select cast(null as bigint) as id, 1L as version")
    with pytest.raises(PySparkException, match="column id is null in a row, but keys"):
        write(queue, nulls, mergeKeys="id")
    twice = queue.spark.sql("select id, 1L as version from values (1L), (1L) t (id)")
    with pytest.raises(PySparkException, match="sequenceBy says which is last"):
        write(queue, twice, mergeKeys="id")
    assert content(queue) == []
    assert queue.look(staged_tables) == set()


def test_of_two_attempts_of_a_task_the_one_that_spark_takes_counts(queue: Queue):
    """Under speculation both write, and one message reaches the driver."""
    queue.sql("create table public.bills (id bigint, note text)")
    schema = StructType([StructField("id", LongType()), StructField("note", StringType())])
    options = parse_sink({"url": queue.url, "table": "public.bills"}, streaming=False)
    writer = PgQueueBatchWriter(options, schema)
    rows = pa.RecordBatch.from_pydict({"id": [1, 2], "note": ["a", None]})
    writer.write(iter([rows]))
    writer.commit([writer.write(iter([rows])), writer.write(iter([])), None])
    assert queue.sql("select * from public.bills order by 1") == [(1, "a"), (2, None)]
    nul = pa.RecordBatch.from_pydict({"id": [1], "note": ["a\0b"]})
    with pytest.raises(PgQueueError, match=r"does not fit table public.bills.*column note"):
        PgQueueBatchWriter(options, schema).write(iter([nul]))
    failed = PgQueueBatchWriter(options, schema)
    failed.write(iter([rows]))
    failed.abort([None, None])
    numbers = {int(re.sub(r"\D", "", name)) >> 24 for name in queue.look(staged_tables)}
    assert numbers <= {2}, "of a driver that died"


def test_a_deadlock_with_another_program_is_tried_again(queue: Queue):
    queue.sql(
        "create table public.bills (id bigint primary key);"
        "create table public.tries (n int);"
        "create function public.collide() returns trigger language plpgsql as $$ begin"
        " if nextval('public.tried') = 1 then raise exception using errcode = '40P01'; end if;"
        " return new; end $$;"
        "create sequence public.tried;"
        "create trigger collide before insert on public.bills for each row"
        " execute function public.collide()"
    )
    write(queue, queue.spark.range(3), mergeKeys="id")
    assert queue.sql("select count(*) from public.bills") == [(3,)]
