"""Rows that say where they go: to which streams, to whom, until when; and tables of Spark's own."""

from __future__ import annotations

import time
from collections import Counter

import pytest
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from tests.spark.conftest import Queue, refusal
from tests.sql import internals

pytestmark = pytest.mark.spark


def seen_by(queue: Queue, stream: str, consumer: str) -> list[str]:
    """What a consumer gets and has not got before."""
    found = queue.sql("select data from pgqueue.receive(%s, %s, 1000)", stream, consumer)
    return sorted(data for (data,) in found)


@pytest.mark.promise("writing: Several streams", "kafka: writing, topic", "kafka: delta, by stream")
def test_rows_go_to_the_streams_that_they_name_together_or_not_at_all(queue: Queue):
    """In the order of a task for each key; once per version. Option stream is above the column."""
    for stream in ("a", "b", "rest"):
        queue.create(stream, "c", kind="json" if stream == "b" else "text", ordering="key")
    rows = queue.spark.range(1, 301, numPartitions=2).selectExpr(
        "cast(id as string) as data",
        "'k' as key",
        "case id % 3 when 0 then 'a' when 1 then 'b' else 'rest' end as stream",
        "cast(id % 2 as int) as priority",
    )

    def route(rows: DataFrame, **options: str) -> None:
        writer = rows.write.format("pgqueue").mode("append").option("url", queue.url)
        writer.options(**options).save()

    def write(**options: str) -> None:
        route(rows, txnAppId="app", **options)

    def sent() -> dict[str, list[str]]:
        return {stream: queue.sent(stream) for stream in ("a", "b", "rest")}

    wrong = rows.withColumn("stream", F.when(F.col("data") < "300", "a").otherwise("nope"))
    with pytest.raises(Exception, match="unknown stream 'nope' in column stream"):
        route(wrong)
    assert sent() == {"a": [], "b": [], "rest": []}
    write(txnVersion="1")
    expected = {
        stream: sorted(str(i) for i in range(1, 301) if i % 3 == rest)
        for stream, rest in (("a", 0), ("b", 1), ("rest", 2))
    }
    assert sent() == expected
    write(txnVersion="1")
    write(txnVersion="0")
    assert sent() == expected
    order = [
        int(data)
        for (data,) in queue.sql(
            "select data from pgqueue.messages m join pgqueue.streams s using (stream_id) "
            "where s.name = 'a' order by seq"
        )
    ]
    for first in (1, 151):  # a task each
        some = range(first, first + 150)
        assert [i for i in order if i in some] == [i for i in some if i % 3 == 0]
    write(txnVersion="2")
    assert len(queue.sent("b")) == 200
    assert queue.look(internals.count, "staged_chunks") == 0
    queue.write(wrong, "rest")
    assert len(queue.sent("rest")) == 500


def test_rows_of_binary_data_go_to_binary_streams_alone(queue: Queue):
    queue.create("bytes", "c", kind="binary")
    queue.create("text", "c")
    rows = queue.spark.sql("select binary('x') as data, 'bytes' as stream")
    writer = rows.write.format("pgqueue").mode("append").option("url", queue.url)
    writer.save()  # the option stream is not needed
    assert queue.sent("bytes") == ["x"]
    for select, says in (
        ("binary('x') as data, 'text' as stream", "is binary, but must be string for stream text"),
        ("'x' as data, 'bytes' as stream", "is string, but must be binary for stream bytes"),
        ("'x' as data, cast(null as string) as stream", "column stream is null in 1 of 1 rows"),
        ("'x' as data", "option stream is missing, and column stream is missing"),
    ):
        assert says in refusal(queue.spark.sql(f"select {select}"), url=queue.url)
    assert len(queue.sent("bytes")) == 1
    assert queue.sent("text") == []


@pytest.mark.promise("kafka: writing, other columns")
def test_rows_say_to_whom_they_go_and_until_when(queue: Queue):
    queue.create("s", "c", "d", "e")
    rows = queue.spark.sql(
        "select * from values ('all', null, null), ('c', array('c'), null), "
        "('cd', array('d', 'c', 'c'), null), ('old', null, now() + interval 1 second), "
        "('later', array('d'), now() + interval 1 hour) as (data, consumers, expires_at)"
    )
    queue.write(rows, "s")
    queue.write(rows.where("data = 'all'"), "s", consumers="e")
    queue.write(rows.where("data = 'c'"), "s", consumers="e")
    assert len(queue.sent("s")) == 7
    time.sleep(2.1)  # it expires at the end of the second
    got = {name: Counter(seen_by(queue, "s", name)) for name in "cde"}
    assert got == {
        "c": {"all": 1, "c": 2, "cd": 1},
        "d": {"all": 1, "cd": 1, "later": 1},
        "e": {"all": 2},
    }
    dead = queue.sql("select reason from pgqueue.read_dead('s', 'c')")
    assert dead == [("expired",)]
    for select, says in (
        ("array('nope') as consumers", "unknown consumer 'nope' in column consumers"),
        ("array() as consumers", "column consumers is array<void>, but must be array<string>"),
        ("cast(array() as array<string>) as consumers", "column consumers is empty in 1"),
        ("array('c', null) as consumers", "has a null name in 1 of 1 rows"),
        ("'c' as consumers", "column consumers is string, but must be array<string>"),
        ("current_date() as expires_at", "column expires_at is date, but must be timestamp"),
        (
            "now() as expires_at, now() + interval 1 day as deliver_at",
            "column expires_at must be a finite time after column deliver_at",
        ),
    ):
        wrong = queue.spark.sql(f"select 'x' as data, {select}")
        assert says in refusal(wrong, url=queue.url, stream="s")
    assert len(queue.sent("s")) == 7


@pytest.mark.longer
@pytest.mark.promise("writing: Spark's tables", "kafka: writing, saveAsTable")
def test_what_sparks_tables_and_paths_mean(queue: Queue):
    """saveAsTable and toTable write the option stream; a table of the catalog keeps no option."""
    queue.create("s", "c")
    queue.create("t")
    one = queue.spark.sql("select 'x' as data")
    options = {"url": queue.url, "stream": "t"}
    name = f"queue_{time.time_ns()}"

    def writer(**more: str):
        return one.write.format("pgqueue").options(**options, **more).mode("append")

    writer().saveAsTable(name)
    assert queue.sent("t") == ["x"]
    for again in (lambda: one.write.insertInto(name), lambda: one.writeTo(name).append()):
        with pytest.raises(Exception, match=r"(?s)option stream is missing.*keeps no options"):
            again()
    with pytest.raises(Exception, match=r"no option path\nHint: use stream: .* take no path"):
        writer().save("s")
    with pytest.raises(Exception, match="Append"):
        writer().mode("errorifexists").save()
    with pytest.raises(Exception, match=r'use mode\("append"\)'):
        writer().mode("overwrite").saveAsTable(name + "_2")
    assert queue.sent("t") == ["x"]
    queue.send("s", 1, 3)
    source = queue.load("s", "c").select("data").writeStream.format("pgqueue").options(**options)
    source = source.option("checkpointLocation", queue.checkpoint()).trigger(availableNow=True)
    source.toTable(name + "_3").awaitTermination(60)
    assert queue.sent("t") == ["1", "2", "3", "x"]
    with pytest.raises(Exception, match=r"option stream is missing(?s:.*)keeps no options"):
        queue.spark.table(name).count()
    given = f"using pgqueue options (url \"{queue.url}\", stream 't')"
    with pytest.raises(Exception, match="keeps no options: in its place, create temporary view"):
        queue.spark.sql(f"create table {name}_4 {given}")
    queue.spark.sql(f"create temporary view {name}_5 {given}")
    assert queue.spark.sql(f"select data from {name}_5 where seq > 3").count() == 1
    for made in (name, name + "_3"):
        queue.spark.sql(f"drop table {made}")
    queue.spark.catalog.dropTempView(f"{name}_5")


@pytest.mark.promise("kafka: writing, headers")
def test_headers_as_kafkas_source_has_them_are_refused_with_what_converts_them(queue: Queue):
    queue.create("s", "c")
    rows = queue.spark.sql(
        "select 'x' as data, array(named_struct('key', 'a', 'value', binary('1'))) as headers"
    )
    hint = (
        refusal(rows, url=queue.url, stream="s").split("Hint: select ")[1].split(" as headers")[0]
    )
    queue.write(rows.withColumn("headers", F.expr(hint)), "s")
    assert queue.sql("select headers from pgqueue.receive('s', 'c')") == [({"a": "1"},)]
