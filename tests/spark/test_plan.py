"""Pure functions of the source and sink: cutting ranges, grouping rows, building Arrow."""

import pickle
import threading
from collections.abc import Generator, Iterator
from datetime import UTC, datetime, timedelta

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_pgqueue.postgres.errors import PgQueueError
from spark_pgqueue.postgres.payloads import numbers
from spark_pgqueue.spark.columns import Stream
from spark_pgqueue.spark.consumer_source.batches import Offset
from spark_pgqueue.spark.options.source import parse_source
from spark_pgqueue.spark.partitions import (
    Batch,
    Range,
    Ranges,
    cut_behind,
    cut_into_partitions,
    in_order,
    split,
)
from spark_pgqueue.spark.sink.rows import (
    StagedChunk,
    ahead,
    joined,
    multirange,
    to_messages,
    to_staged_chunks,
)

RANGES = st.lists(st.tuples(st.integers(1, 50), st.integers(1, 50)), min_size=1, max_size=30).map(
    lambda gaps: [
        Range(lo, lo + size, 0, 1)
        for lo, size in zip(
            [sum(g + s for g, s in gaps[:i]) + gaps[i][0] for i in range(len(gaps))],
            [size for _, size in gaps],
            strict=True,
        )
    ]
)


def seqs(ranges):
    return [seq for each in ranges for seq in range(each.lo, each.hi)]


@settings(deadline=None)  # on a machine that does other things
@given(RANGES, st.integers(1, 20))
def test_split_keeps_every_message_in_order_in_equal_shares(ranges, count):
    shares = split(ranges, count)
    assert [seq for share in shares for seq in seqs(share)] == seqs(ranges)
    sizes = [len(seqs(share)) for share in shares]
    assert len(sizes) == count
    assert max(sizes) - min(sizes) <= 1


@settings(deadline=None)
@given(RANGES, st.data())
def test_ranges_are_cut_behind_a_message(ranges, data):
    every = seqs(ranges)
    last = data.draw(st.sampled_from(every))
    place = every.index(last) + 1
    assert [seqs(part) for part in cut_behind(tuple(ranges), last)] == [
        every[:place],
        every[place:],
    ]


@settings(deadline=None)
@given(st.sets(st.integers(1, 500), min_size=1))
def test_multirange_is_exactly_the_numbers(numbers):
    text = multirange(pa.array(sorted(numbers), pa.int64()))
    found = set()
    for part in text.strip("{}").split("),"):
        lo, hi = part.strip("[)").split(",")
        found |= set(range(int(lo), int(hi)))
    assert found == numbers


def partitions(total, ordering, **options):
    given_options = {"stream": "s", "consumer": "c"} | {k: str(v) for k, v in options.items()}
    about = (Batch("r", 0, 1), Stream(1, "text"), ordering, parse_source(given_options))
    return cut_into_partitions([Range(1, total + 1, 0, 1)], *about)


@pytest.mark.promise("kafka: with a consumer, minPartitions")
def test_the_number_of_partitions_goes_by_size_and_options():
    assert len(partitions(10, "none")) == 1
    assert len(partitions(10, "none", minPartitions=4)) == 4
    assert len(partitions(3, "none", minPartitions=8)) == 3
    assert len(partitions(10, "none", maxRecordsPerPartition=3)) == 4
    assert len(partitions(1_000_000, "none")) == 8
    assert len(partitions(1_000_000, "stream", minPartitions=4)) == 1


def test_there_are_no_more_partitions_than_connections():
    assert len(partitions(1_000_000, "none", maxConnections=3)) == 3
    assert len(partitions(1_000_000, "key", maxConnections=3)) == 3
    assert len(partitions(100, "none", maxConnections=3, maxRecordsPerPartition=10)) == 3
    with pytest.raises(PgQueueError, match="minPartitions is 4, and maxConnections 3"):
        partitions(100, "none", maxConnections=3, minPartitions=4)


def test_ordering_by_key_reads_all_ranges_in_every_partition():
    found = partitions(100, "key", minPartitions=3)
    assert [(each.index, each.buckets) for each in found] == [(0, 3), (1, 3), (2, 3)]
    assert all(seqs(each.ranges) == list(range(1, 101)) for each in found)


def test_what_is_looked_at_by_key_does_not_grow_with_the_partitions():
    for total in (100_000, 1_000_000, 5_000_000):
        for options in ({}, {"minPartitions": 200}, {"maxRecordsPerPartition": 1000}):
            found = partitions(total, "key", **options)
            assert sum(each.messages for each in found) <= max(8 * total, 2_000_000)
    assert len(partitions(10_000, "key", minPartitions=200)) == 200
    found = partitions(5_000_000, "key", minPartitions=200, keyOrder="column")
    assert len(found) == 200
    assert sum(each.messages for each in found) == 5_000_000


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 500), st.integers(1, 50)), max_size=30))
def test_arrival_grows_in_the_order_of_delivery(found):
    ranges = in_order((lo, lo + size, 0, 1) for lo, size in found)
    every = [seq + each.shift for each in ranges for seq in range(each.lo, each.hi)]
    assert every == sorted(set(every))


@settings(deadline=None)
@given(RANGES)
def test_ranges_travel_as_they_are(ranges):
    ranges = Ranges([Range(1, 3, -5, 7, 2**40), *ranges])
    found = pickle.loads(pickle.dumps(ranges))
    assert found == ranges
    assert type(found) is Ranges
    assert type(found[0]) is Range
    assert pickle.loads(pickle.dumps(Ranges())) == ()


def test_a_fragmented_batch_is_small_for_spark():
    """What a task is sent: Spark warns of more than 1 MB."""
    ranges = Ranges(Range(lo, lo + 1, 0, 1) for lo in range(1, 200_001, 2))
    assert len(pickle.dumps(ranges)) < 500_000


@settings(deadline=None)
@given(RANGES)
def test_numbers_of_ranges_are_all_of_them_in_order(ranges):
    assert numbers([(each.lo, each.hi) for each in ranges]).to_pylist() == seqs(ranges)


def test_rows_of_one_priority_and_second_are_a_group_and_all_stay_in_their_order():
    at = datetime(2026, 1, 1, tzinfo=UTC)
    rows = pa.table(
        {
            "data": list("abcdef"),
            "priority": pa.array([1, None, 1, 0, 1, 1], pa.int32()),
            "deliver_at": pa.array(
                [at, None, at - timedelta(milliseconds=300), None, at + timedelta(seconds=9), at],
                pa.timestamp("us", "UTC"),
            ),
        }
    )
    rows, chunks = to_staged_chunks(rows, pa.array([11, 12, 13, 21, 22, 23], pa.int64()))
    assert rows.column_names == ["data"]
    assert "".join(rows["data"].to_pylist()) == "abcdef"
    assert chunks == [
        StagedChunk("{[11,12),[13,14),[23,24)}", 1, int(at.timestamp())),
        StagedChunk("{[12,13),[21,22)}", 0, None),
        StagedChunk("{[22,23)}", 1, int(at.timestamp()) + 9),
    ]


@pytest.mark.parametrize("zone", ["America/New_York", "UTC+01:00", "GMT+2", "+05:30", "EST5EDT"])
def test_a_time_is_an_instant_in_any_zone(zone: str):
    """Also in the two hours of 2017-11-05 that have one local time in New York."""
    micros = [1509859800_000_000, 1509863400_000_001, 1489303800_500_000, -1_500_000, None]
    times = pa.array(micros, pa.timestamp("us", zone))
    rows = pa.table({"data": list("abcde"), "deliver_at": times, "expires_at": times})
    _, chunks = to_staged_chunks(rows, pa.array([1, 2, 3, 4, 5], pa.int64()))
    expected = [1509859800, 1509863401, 1489303801, -1, None]
    assert [each.deliver_at for each in chunks] == expected
    assert [each.expires_at for each in chunks] == expected


def test_dedup_keys_stay_with_their_rows():
    rows = pa.table(
        {
            "data": list("abcde"),
            "dedup_key": ["1", None, "3", None, None],
            "priority": pa.array([7, 0, 7, 0, 7], pa.int32()),
        }
    )
    seqs = pa.array([1, 2, 3, 4, 5], pa.int64())
    rest, chunks = to_staged_chunks(rows, seqs)
    assert rest.column_names == ["data"]
    assert chunks == [
        StagedChunk("{[1,2),[3,4),[5,6)}", 7, dedup_keys=["1", "3", None]),
        StagedChunk("{[2,3),[4,5)}", 0),
    ]
    keys = ["1", None, "3", None, None]
    assert to_staged_chunks(rows.drop_columns(["priority"]), seqs)[1] == [
        StagedChunk("{[1,6)}", dedup_keys=keys)
    ]


def test_without_priority_and_deliver_at_there_is_one_group():
    seqs = pa.array([5, 6], pa.int64())
    assert to_staged_chunks(pa.table({"data": ["a", "b"]}), seqs)[1] == [StagedChunk("{[5,7)}")]


def test_headers_become_jsonb_and_data_of_a_binary_stream_data_bytes():
    headers = pa.array([[("a", "1")], None, []], pa.map_(pa.string(), pa.string()))
    rows = to_messages(pa.table({"data": [b"x", b"y", b"z"], "headers": headers}), "binary")
    assert rows.column_names == ["data_bytes", "headers"]
    assert rows["headers"].to_pylist() == [b'\x01{"a": "1"}', None, b"\x01{}"]


def test_null_data_is_an_error_that_names_the_column():
    with pytest.raises(PgQueueError, match="column data is null in 1 of 2 rows"):
        to_messages(pa.table({"data": ["a", None]}), "text")


def test_chunks_join_small_batches_up_to_a_size():
    batch = pa.record_batch({"data": ["x"] * 20_000})
    assert [c.num_rows for c in joined(iter([batch] * 7))] == [60_000, 60_000, 20_000]
    large = pa.record_batch({"data": ["x" * (9 << 20)]})
    assert [c.num_rows for c in joined(iter([large] * 3))] == [2, 1]
    assert list(joined(iter([batch.slice(0, 0)]))) == []


def test_the_next_chunk_is_read_while_one_is_written():
    second = threading.Event()

    def made() -> Iterator[int]:
        yield 1
        second.set()
        yield 2
        raise ValueError("the third")

    items = ahead(made())
    assert next(items) == 1
    assert second.wait(10), "nobody asked for the second one, and it is not made"
    assert next(items) == 2
    with pytest.raises(ValueError, match="the third"):
        next(items)
    assert list(ahead(iter([]))) == []


def test_who_wants_no_more_does_not_wait_for_the_next_chunk():
    asked, never = threading.Event(), threading.Event()

    def made() -> Iterator[int]:
        yield 1
        asked.set()
        never.wait()
        yield 2

    items = ahead(made())
    assert next(items) == 1
    assert asked.wait(10)
    assert isinstance(items, Generator)
    items.close()
    never.set()


@pytest.mark.parametrize(
    "offset",
    [
        {"version": 2, "reader": "r", "claim": 1, "messages": 1},
        {"partition-0": 17},
        {"claim": 1, "messages": 1, "reader": "r"},
        17,  # of format rate
    ],
)
def test_an_offset_of_another_shape_is_refused(offset):
    with pytest.raises(PgQueueError, match=r"PQ005.*not written by this version") as error:
        Offset.parse(offset)
    assert "upgrade spark-pgqueue" in str(error.value)


def test_an_offset_of_a_query_without_a_consumer_is_refused():
    with pytest.raises(PgQueueError, match=r"PQ005.*without a consumer, but this query has one"):
        Offset.parse({"streams": {"s": {"incarnation": "5e0e", "next": 7, "messages": 12}}})
