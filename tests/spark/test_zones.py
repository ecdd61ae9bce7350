"""Times are instants, whatever the zone of the Spark session: written, read and typed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime

import pytest
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from tests.spark.conftest import Queue
from tests.spark.test_offset_source import load

pytestmark = pytest.mark.spark

HOURS = [
    "2037-11-01T05:30:00.250Z",  # 01:30 in New York, for the first time
    "2037-11-01T06:30:00Z",  # 01:30 for the second
    "2037-03-08T07:00:00Z",  # there the hour begins that is left out
    "2100-01-01T00:00:00Z",
]
MICROS = [int(datetime.fromisoformat(hour).timestamp() * 1_000_000) for hour in HOURS]
EPOCHS = "extract(epoch from deliver_at)::bigint, extract(epoch from expires_at)::bigint"


def in_zone(zone: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("zoned", [zone], indirect=True)


@pytest.fixture
def zoned(queue: Queue, request: pytest.FixtureRequest) -> Iterator[Queue]:
    """A queue whose Spark session is in a zone."""
    name = "spark.sql.session.timeZone"
    before = queue.spark.conf.get(name)
    queue.spark.conf.set(name, request.param)
    yield queue
    queue.spark.conf.set(name, str(before))


def times(queue: Queue) -> DataFrame:
    """The hours as column at, and their places as id."""
    rows = queue.spark.createDataFrame(list(enumerate(HOURS)), "id bigint, at string")
    return rows.select("id", F.col("at").cast("timestamp").alias("at")).coalesce(1)


@in_zone("America/New_York")
def test_a_message_is_delivered_and_expires_at_the_instant_that_was_given(zoned: Queue) -> None:
    zoned.create("s")
    expires = "at + interval 1 second as expires_at"
    rows = times(zoned).selectExpr("string(id) as data", "at as deliver_at", expires)
    zoned.write(rows, "s")
    found = zoned.sql(
        f"select m.data::int, {EPOCHS} from pgqueue.publications p"
        " join pgqueue.messages m on m.stream_id = p.stream_id and p.seqs @> m.seq order by 1"
    )
    seconds = [-(-at // 1_000_000) for at in MICROS]
    assert found == [(i, at, at + 1) for i, at in enumerate(seconds)]


@in_zone("UTC+01:00")
def test_all_sources_read_the_instant_at_which_a_message_was_sent(zoned: Queue) -> None:
    zoned.create("s", "c")
    zoned.send("s", 1, 3)
    sent = dict(zoned.sql("select seq, (extract(epoch from inserted_at) * 1e6)::bigint"
                          " from pgqueue.messages"))  # fmt: skip
    batch = zoned.spark.read.format("pgqueue").options(url=zoned.url, stream="s", table="messages")
    micros = F.unix_micros("inserted_at").alias("at")
    assert dict(map(tuple, batch.load().select("seq", micros).collect())) == sent
    for checkpoint, frame in {"c": zoned.load("s", "c"), "o": load(zoned)}.items():
        zoned.seen.clear()
        zoned.collect(frame.select("seq", micros), checkpoint).awaitTermination()
        assert {row["seq"]: row["at"] for row in zoned.rows()} == sent


@in_zone("America/New_York")
def test_typed_payloads_and_tables_have_the_instants(zoned: Queue) -> None:
    zoned.create("s", "c", kind="json")
    settings = json.dumps({"schema": "id bigint, at timestamp"})
    zoned.sql("select pgqueue.alter_stream('s', %s::text::jsonb)", settings)
    zoned.write(times(zoned).select(F.to_json(F.struct("id", "at")).alias("data")), "s")
    zoned.sql("create table public.t (id bigint primary key, at timestamptz)")

    def store(batch: DataFrame, _: int) -> None:
        rows = batch.select(F.struct("value.id", "value.at").alias("row"))
        writer = rows.write.format("pgqueue").mode("append").options(url=zoned.url)
        writer.options(table="public.t", mergeKeys="id").save()

    frame = zoned.load("s", "c", typed="failfast")
    zoned.collect(frame, each=store).awaitTermination()
    found = zoned.sql("select id, (extract(epoch from at) * 1e6)::bigint from public.t order by id")
    assert found == list(enumerate(MICROS))
