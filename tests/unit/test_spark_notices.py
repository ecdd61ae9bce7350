"""What the source and the sink tell in small things, without a Spark session."""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from uuid import uuid4

import psycopg
import pyarrow as pa
import pytest
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StringType, StructField, StructType, TimestampType

from spark_pgqueue.postgres.connection import connect
from spark_pgqueue.postgres.errors import PgQueueError
from spark_pgqueue.postgres.statements import Statements
from spark_pgqueue.spark.columns import source_schema, stream_source_schema
from spark_pgqueue.spark.consumer_source.batches import ConsumerBatches
from spark_pgqueue.spark.consumer_source.reader import PgQueueConsumerReader
from spark_pgqueue.spark.options.admission import Admission
from spark_pgqueue.spark.options.sink import parse_sink
from spark_pgqueue.spark.options.source import parse_source
from spark_pgqueue.spark.options.stream_source import parse_stream_source
from spark_pgqueue.spark.platform.pyspark_compat import ReadAllAvailable, ReadMaxRows
from spark_pgqueue.spark.sink.stream_writer import StreamWriter
from spark_pgqueue.spark.stream_source.reader import PgQueueStreamsReader
from spark_pgqueue.spark.stream_source.streams import Streams
from tests.sql.queue import value

Conn = psycopg.Connection


@pytest.fixture(autouse=True)
def orders(conn: Conn, caplog: pytest.LogCaptureFixture) -> None:
    value(conn, "create_stream", "orders")
    caplog.set_level(logging.WARNING)


@pytest.fixture
def session(url: str) -> Iterator[Callable[..., ConsumerBatches]]:
    made: list[ConsumerBatches] = []

    def make(**options: str) -> ConsumerBatches:
        given = parse_source({"url": url, "stream": "orders", "consumer": "c", **options})
        made.append(ConsumerBatches(given, source_schema("text", True)))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.mark.parametrize("exists", [True, False])
def test_a_start_that_is_for_new_consumers_only_is_told_of(
    conn: Conn, session: Callable[..., ConsumerBatches], caplog, exists: bool
) -> None:
    if exists:
        value(conn, "create_consumer", "orders", "c")
    reader = session(createConsumer="true", startingPosition="earliest", waitTime="1ms")
    for _ in range(2):
        reader.next(reader.initial, Admission())
    assert caplog.text.count("startingPosition has no effect") == exists


def test_a_query_that_goes_on_is_told_of_no_start(
    conn: Conn, session: Callable[..., ConsumerBatches], caplog
) -> None:
    value(conn, "create_consumer", "orders", "c")
    value(conn, "send", "orders", "x")
    options = {"createConsumer": "true", "startingPosition": "earliest", "shareConsumer": "true"}
    first = session(shareConsumer="true")
    done = first.next(first.initial, Admission())
    assert done.claim > 0
    session(**options, waitTime="1ms").next(done, Admission())
    assert "startingPosition" not in caplog.text


def test_a_run_that_ends_at_once_because_its_consumer_is_paused_says_so(
    conn: Conn, session: Callable[..., ConsumerBatches], caplog
) -> None:
    value(conn, "create_consumer", "orders", "c")
    session(shareConsumer="true").stop_at_what_is_published()
    assert "is paused" not in caplog.text
    value(conn, "pause", "orders", "c")
    session(shareConsumer="true").stop_at_what_is_published()
    assert "consumer c is paused" in caplog.text


def test_a_pattern_that_matches_no_stream_is_told_of_once(url: str, caplog) -> None:
    options = parse_stream_source({"url": url, "streamPattern": "no.*"})
    with closing(Streams(options, patience=0)) as streams:
        for _ in range(2):
            assert streams.find() == {}
            streams._found_at -= 10
    assert caplog.text.count("streamPattern no.* does not match any stream yet") == 1


def test_a_place_by_a_number_needs_no_json_where_there_is_one_stream(url: str, conn: Conn) -> None:
    for _ in range(3):
        value(conn, "send", "orders", "x")
    given = {"url": url, "startingOffsets": "seq 3"}
    with closing(Streams(parse_stream_source({**given, "stream": "orders"}), 0)) as streams:
        begin = streams.begin("orders", "latest")
        assert begin == streams.position_at("orders", "seq 3")
    for several in ({"streams": "orders,other"}, {"streamPattern": "o.*"}):
        with pytest.raises(PgQueueError, match="'seq 3', which is a position in one stream"):
            parse_stream_source({**given, **several})


def test_a_statement_of_a_query_waits_again_for_a_lock(url: str, conn: Conn) -> None:
    """A transaction that somebody left open ends some day; retryTimeout says how long to wait."""
    value(conn, "create_consumer", "orders", "c")
    with connect(url) as other, closing(Statements(url, patience=30, repeat=True)) as query:
        other.execute("begin")
        other.execute("lock table pgqueue.consumers")
        query.connection().execute("set lock_timeout = '100 ms'")
        threading.Timer(0.5, other.rollback).start()
        assert query.row("select count(*) from pgqueue.consumers") == (1,)


SCHEMA = StructType(
    [
        StructField("data", StringType()),
        StructField("deliver_at", TimestampType()),
        StructField("dedup_key", StringType()),
    ]
)


def bad_text() -> pa.Array:
    return pa.Array.from_buffers(
        pa.string(), 1, [None, pa.py_buffer(b"\0\0\0\0\1\0\0\0"), pa.py_buffer(b"\xff")]
    )


def test_text_that_is_not_utf_8_is_an_error_that_names_the_column(url: str) -> None:
    schema = StructType([SCHEMA["data"], SCHEMA["dedup_key"]])
    target = StreamWriter(parse_sink({"url": url, "stream": "orders"}, streaming=False), schema)
    rows = pa.RecordBatch.from_arrays([pa.array(["x"]), bad_text()], names=["data", "dedup_key"])
    with pytest.raises(PgQueueError, match="column dedup_key has a value that") as caught:
        target.stage(iter([rows]), "txn:a", 0, None)
    assert caught.value.sqlstate in ("PQ004", "PQ003")


@pytest.mark.parametrize(
    ("data", "says"), [("{", "not valid JSON"), ("[" * 100_000, "nested too deeply")]
)
def test_json_that_does_not_fit_is_an_error_that_names_the_row(
    url: str, conn: Conn, data: str, says: str
) -> None:
    value(conn, "create_stream", "j", "json")
    schema = StructType([SCHEMA["data"], StructField("key", StringType())])
    target = StreamWriter(parse_sink({"url": url, "stream": "j"}, streaming=False), schema)
    rows = pa.RecordBatch.from_pydict({"data": ["1", data], "key": ["a", "b"]})
    with pytest.raises(PgQueueError, match=rf"{says} \(row 2 of 2 .* key 'b'\)"):
        target.stage(iter([rows]), "txn:a", 0, None)


LOWEST = -210_866_803_200_000_000  # of Postgres, 4714-11-24 BC, in microseconds
YEARS = [-62_167_219_200_000_000, 253_402_300_800_500_000]  # 0, and 10000
TIMES = ([LOWEST - 1, -(2**63)], [LOWEST, *YEARS, 9_223_371 * 10**12])
KINDS = {
    "at": (pa.timestamp("us", "Asia/Kolkata"), TIMES),
    "n": (pa.timestamp("us"), TIMES),
    "d": (pa.date32(), ([-(2**31), -2_440_589, 2**31 - 1], [-2_440_588, 0, 2_145_042_905])),
}
"""Columns by name: the type, and what Postgres cannot hold and can."""


def numbers(column: str, values: list[int]) -> pa.Array:
    kind, _ = KINDS[column]
    return pa.array(values, pa.int32() if kind == pa.date32() else pa.int64()).view(kind)


def write(given: dict[str, str], **columns: pa.Array) -> None:
    """Write rows as a task and the driver do."""
    batch = pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))
    schema = from_arrow_schema(batch.schema, prefer_timestamp_ntz=True)
    target = StreamWriter(parse_sink(given, streaming=False), schema)
    target.publish([target.stage(iter([batch]), f"txn:{uuid4()}", 1, None)], 1)


def test_a_time_that_postgres_cannot_hold_names_its_column(conn: Conn, url: str) -> None:
    """In messages and in tables, in lists and in structs: before anything is copied."""
    conn.execute(
        "create table public.t (at timestamptz, n timestamp, d date,"
        " ats timestamptz[], ns timestamp[], ds date[])"
    )
    table, stream = {"url": url, "table": "public.t"}, {"url": url, "stream": "orders"}
    for name, (kind, (wrong, _)) in KINDS.items():
        for each in wrong:
            array = numbers(name, [each])
            field = pa.StructArray.from_arrays([array], [name])
            items = pa.array([[None, array[0]]], pa.list_(kind))
            cases = [(name, table, {name: array}), (f"row.{name}", table, {"row": field}),
                     (f"{name}s", table, {f"{name}s": items})]  # fmt: skip
            if name == "at":
                data = {"data": pa.array(["x"])}
                cases += [(m, stream, {**data, m: array}) for m in ("deliver_at", "expires_at")]
            for column, given, columns in cases:
                with pytest.raises(
                    PgQueueError, match=rf"\] column {column} has a value that does"
                ):
                    write(given, **columns)
    nothing = pa.StructArray.from_arrays(
        [numbers("at", [TIMES[0][0]])], ["at"], mask=pa.array([True])
    )
    write(table, row=nothing, data=pa.array(["x"]), stream=pa.array(["orders"]))


def test_each_time_that_postgres_can_hold_arrives(conn: Conn, url: str) -> None:
    conn.execute("create table public.t (at timestamptz, n timestamp, d date)")
    for name, (_, (_, held)) in KINDS.items():
        write({"url": url, "table": "public.t"}, **{name: numbers(name, held)})
        number = f"({name} - date '1970-01-01')::bigint"
        if name != "d":
            number = f"(extract(epoch from {name} at time zone 'UTC') * 1000000)::bigint"
        sql = f"select {number} from public.t where {name} is not null order by 1"
        assert conn.execute(sql.encode()).fetchall() == [(each,) for each in held]
    held = [*TIMES[1], 2**63 - 1]  # of the last, `extract` knows the seconds alone
    times = numbers("at", held)
    data = pa.array(["x"] * len(times))
    write({"url": url, "stream": "orders"}, data=data, deliver_at=times)
    sql = "select extract(epoch from deliver_at)::bigint from pgqueue.publications order by 1"
    full = [-(-each // 1_000_000) for each in held]
    assert conn.execute(sql).fetchall() == [(each,) for each in full]


def test_a_row_that_expires_in_the_second_of_its_delivery_is_sent(conn: Conn, url: str) -> None:
    """As `send` does; rounded up, its times are still one after the other."""
    day = 86_400_000_000
    rows = {
        # deliver_at, expires_at: those of its publication, in seconds
        (day + 200_000, day + 800_000): (86_401, 86_402),
        (day + 200_000, day + 1_000_000): (86_401, 86_402),
        (day, day + 1): (86_400, 86_401),
        (day + 1, day + 2_000_000): (86_401, 86_402),
        (None, day + 800_000): (None, 86_401),
        (day + 200_000, None): (86_401, None),
    }
    deliver_at, expires_at = (numbers("at", list(each)) for each in zip(*rows, strict=True))
    data = pa.array(["x"] * len(rows))
    stream = {"url": url, "stream": "orders"}
    write(stream, data=data, deliver_at=deliver_at, expires_at=expires_at)
    found = conn.execute(
        "select extract(epoch from deliver_at)::int, extract(epoch from expires_at)::int"
        " from pgqueue.publications p, unnest(p.seqs) r, generate_series(lower(r), upper(r) - 1) i"
        " order by i"
    ).fetchall()
    assert found == list(rows.values())
    for late, early in ((800_000, 200_000), (800_000, 800_000), (1_000_000, 200_000)):
        with pytest.raises(PgQueueError, match="expires_at must be a finite time after"):
            write(
                stream,
                data=pa.array(["x"]),
                deliver_at=numbers("at", [late]),
                expires_at=numbers("at", [early]),
            )


@pytest.mark.parametrize("how", ["consumer", "group"])
def test_a_run_of_one_micro_batch_is_warned_of_once(
    conn: Conn, url: str, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    """By once, or by availableNow beside a source that has it not."""
    value(conn, "create_consumer", "orders", "c")
    value(conn, "send", "orders", "x")
    value(conn, "create_group", "orders", "g", 1)
    given = {"url": url, "stream": "orders", how: "c" if how == "consumer" else "g"}
    if how == "consumer":
        options = parse_source(given)
        reader = PgQueueConsumerReader(options, source_schema("text", True))
    else:
        options = parse_stream_source(given, streaming=True)
        reader = PgQueueStreamsReader(options, stream_source_schema("text", True, False))
    with ExitStack() as stack:
        stack.callback(reader.stop)
        start = reader.initialOffset()
        assert reader.latestOffset(start, ReadMaxRows(10)) != start
        assert "one micro-batch" not in caplog.text
        for _ in range(2):
            reader.latestOffset(start, ReadAllAvailable())
    (warning,) = [each.getMessage() for each in caplog.records if "one micro" in each.getMessage()]
    assert "trigger(once=True), or because another source of the query, such as rate" in warning
    assert "next run with the same checkpoint" in warning
    assert ("option checkpointLocation" in warning) == (how == "consumer")
