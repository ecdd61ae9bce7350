"""What a query without a consumer reads, asked as Spark asks it, and without Spark."""

from __future__ import annotations

import json
import pickle
import re
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.streaming.datasource import ReadAllAvailable

from spark_pgqueue.postgres.connection import connect
from spark_pgqueue.postgres.errors import PgQueueError
from spark_pgqueue.spark.datasource import PgQueueDataSource
from spark_pgqueue.spark.stream_source.batches import even_shares
from spark_pgqueue.spark.stream_source.reader import PgQueueStreamsReader
from spark_pgqueue.spark.stream_source.streams import Streams
from tests.spark.conftest import Queue
from tests.sql import clock, limits
from tests.sql.queue import maintain
from tests.sql.test_standby import follow, pair  # noqa: F401

Rows = list[tuple[str, int]]


class Query:
    """A query: its checkpoint, and the reader of the process that runs it now."""

    def __init__(self, url: str, **options: str | int):
        given = {"url": url, "startingOffsets": "earliest", "waitTime": "10ms"} | options
        self._options = {name: str(value) for name, value in given.items() if value is not None}
        self.log: list[tuple[Any, Any]] = []
        self.is_logged = True
        self._readers: list[PgQueueStreamsReader] = []
        self.restart()

    def restart(self, **options: str | int) -> None:
        """Go on in another process, with other options."""
        self._options |= {name: str(value) for name, value in options.items()}
        source = PgQueueDataSource(self._options)
        reader = pickle.loads(pickle.dumps(source.streamReader(source.schema())))
        self._readers.append(reader)
        self.reader: PgQueueStreamsReader = reader
        self._initial = through_json(reader.initialOffset())

    @property
    def start(self) -> Any:
        return self.log[-1][1] if self.log else self._initial

    def latest(self, limit: Any = None) -> Any:
        """The end of the next micro-batch, which is not logged."""
        limit = limit or self.reader.getDefaultReadLimit()
        return through_json(self.reader.latestOffset(self.start, limit))

    def batch(self, limit: Any = None) -> Rows | None:
        """The rows of the next micro-batch: stream and data; None when there is none."""
        end = self.latest(limit)
        if json.dumps(end) == json.dumps(self.start):
            return None
        self.log.append((self.start, end))
        if len(self.log) > 1 and self.is_logged:
            self.reader.commit(self.log[-1][0])
        return self.rows(*self.log[-1])

    def rows(self, start: Any, end: Any) -> Rows:
        rows = [
            row
            for partition in self.reader.partitions(start, end)
            for batch in self.reader.read(pickle.loads(pickle.dumps(partition)))
            for row in batch.to_pylist()
        ]
        return [(row.get("stream", "s"), int(row["data"])) for row in rows]

    def rest(self) -> list[Rows]:
        """The micro-batches until there is none."""
        found = []
        while (rows := self.batch()) is not None:
            found.append(rows)
        return found

    def stop(self) -> None:
        for reader in self._readers:
            reader.stop()


def through_json(offset: Any) -> Any:
    return json.loads(json.dumps(offset))


Start = Callable[..., Query]


@pytest.fixture
def queue(url: str, tmp_path: Path) -> Queue:
    queue = Queue(url, tmp_path)
    queue.create("s")
    return queue


@pytest.fixture
def start(url: str) -> Iterator[Start]:
    """Starts queries, which end with the test."""
    queries: list[Query] = []

    def start(**options: Any) -> Query:
        several = "streams" in options or "streamPattern" in options
        query = Query(url, **({} if several else {"stream": "s"}) | options)
        queries.append(query)
        return query

    yield start
    for query in queries:
        query.stop()


def of(stream: str, first: int, last: int) -> Rows:
    return [(stream, i) for i in range(first, last + 1)]


def forget_old_messages(queue: Queue) -> None:
    """What was sent so far is taken away by retention, as soon as something else is sent."""
    hour = timedelta(hours=1)
    with connect(queue.url) as conn:
        clock.pass_time(conn, hour / 7)
        maintain(conn)
        conn.execute("select pgqueue.send('s', '0')")
        clock.pass_time(conn, hour * 0.9)
        maintain(conn)


def test_latest_is_decided_once_and_the_first_batch_says_where(queue: Queue, start: Start):
    """Spark forgets the offset before the first batch; its replay has the same rows even so."""
    queue.send("s", 1, 3)
    query = start(startingOffsets=None)
    begun = query.latest()
    queue.send("s", 4, 5)
    assert query.batch() == of("s", 4, 5), "Spark asked again, before it logged the batch"
    assert query.log[0][1]["streams"]["s"]["from"] == begun["streams"]["s"]
    queue.send("s", 6, 7)
    query.restart()
    assert query.rows(query.reader.initialOffset(), query.log[0][1]) == of("s", 4, 5)
    assert query.batch() == of("s", 6, 7)
    assert "from" not in query.start["streams"]["s"]
    assert query.batch() is None

    late = start(startingOffsets="latest")
    assert late.batch() == [], "a batch without rows notes where it begins"
    late.restart()
    queue.send("s", 8, 8)
    assert late.batch() == of("s", 8, 8), "what came while it was away"


def test_where_it_began_is_said_until_the_log_has_it(queue: Queue, start: Start):
    """With asynchronous progress tracking the first offset that is logged may be of any batch."""
    queue.send("s", 1, 9)
    query = start(maxMessagesPerTrigger=3)
    query.is_logged = False
    assert query.rest() == [of("s", 1, 3), of("s", 4, 6), of("s", 7, 9)]
    again = start()
    assert again.rows(again.reader.initialOffset(), query.start) == of("s", 1, 9)
    assert again.rows(*query.log[1]) == of("s", 4, 6)
    query.is_logged = True
    queue.send("s", 10, 15)
    assert query.rest() == [of("s", 10, 12), of("s", 13, 15)]
    assert "from" not in query.start["streams"]["s"]


def test_offsets_stay_as_they_are_while_nothing_comes_for_the_query(queue: Queue, start: Start):
    """Beside transactions that come and go, and messages for others: no empty micro-batches."""
    queue.sql("select pgqueue.create_consumer('s', 'c')")
    queue.send("s", 1, 2)
    query = start()
    assert query.batch() == of("s", 1, 2)
    for _ in range(3):
        with connect(queue.url) as other:
            other.execute("begin")
            other.execute("select pgqueue.send('s', '9', p_consumers => '{c}')")
            queue.send("s", 100, 101, consumers=["c"])
            assert query.batch() is None
            other.execute("rollback")
        assert query.batch() is None
    queue.send("s", 3, 3)
    assert query.batch() == of("s", 3, 3)
    assert query.reader.latestOffset(query.start, ReadAllAvailable()) == query.start


def test_a_batch_is_the_same_for_ever_beside_open_transactions(queue: Queue, start: Start):
    query = start(maxMessagesPerTrigger=3)
    with connect(queue.url) as one, connect(queue.url) as two:
        one.execute("begin")
        one.execute("select pgqueue.send('s', '100')")
        queue.send("s", 1, 4)
        two.execute("begin")
        two.execute("select pgqueue.send_batch('s', '{200,201}')")
        seen = [query.batch(), query.batch()]
        assert "gaps" in query.start["streams"]["s"]
        one.execute("commit")
        seen.append(query.batch())
        two.execute("rollback")
        queue.send("s", 5, 5)
        seen.append(query.batch())
    assert seen == [of("s", 1, 3), of("s", 4, 4), [("s", 100)], of("s", 5, 5)]
    query.restart(minPartitions=2)
    assert [sorted(query.rows(*each)) for each in query.log] == seen
    assert query.batch() is None


@pytest.mark.promise("kafka: without a consumer, subscribe, minPartitions")
def test_several_streams_share_a_batch_evenly_and_keep_to_its_limit(queue: Queue, start: Start):
    queue.create("t")
    queue.create("u")
    queue.send("s", 1, 100)
    queue.send("t", 1, 2)
    queue.send("u", 1, 5)
    query = start(streams="u, s,t", maxMessagesPerTrigger=10)
    assert list(query.latest()["streams"]) == ["s", "t", "u"]
    first = query.batch()
    assert sorted(first or []) == of("s", 1, 4) + of("t", 1, 2) + of("u", 1, 4)
    second = query.batch()
    assert sorted(second or []) == of("s", 5, 13) + of("u", 5, 5)
    query.restart(minPartitions=3)
    partitions = query.reader.partitions(*query.log[0])
    assert [sum(part.messages for part in each.parts) for each in partitions] == [3, 3, 4]
    assert query.rows(*query.log[0]) == first
    queue.create("v")
    query.restart(streams="s,t,u,v")
    queue.send("v", 1, 3)
    assert [len(rows) for rows in query.rest()] == [10] * 9


@given(st.lists(st.integers(0, 20), min_size=1, max_size=8), st.integers(1, 60))
def test_shares_are_even_and_use_the_limit_up(available, limit):
    shares = even_shares(available, limit)
    assert sum(shares) == min(limit, sum(available))
    assert all(0 <= share <= has for share, has in zip(shares, available, strict=True))
    cut = [share for share, has in zip(shares, available, strict=True) if share < has]
    assert max(shares) - min(cut, default=max(shares)) <= 1


@pytest.mark.promise("kafka: without a consumer, subscribePattern, new streams")
def test_streams_of_a_pattern_are_noticed_while_it_runs_and_read_from_their_first_message(
    queue: Queue, start: Start, monkeypatch
):
    monkeypatch.setattr("spark_pgqueue.spark.stream_source.streams.DISCOVERY_SECONDS", 0)
    query = start(streamPattern="orders_.*", startingOffsets="latest")
    assert query.batch() is None, "there is no such stream"
    queue.create("orders_a")
    queue.create("my orders_b")
    queue.send("orders_a", 1, 2)
    assert query.batch() == of("orders_a", 1, 2)
    queue.create("orders_b")
    queue.send("orders_b", 1, 1)
    queue.send("orders_a", 3, 3)
    assert query.batch() == of("orders_a", 3, 3) + of("orders_b", 1, 1)
    query.restart()
    assert query.rows(*query.log[-1]) == of("orders_a", 3, 3) + of("orders_b", 1, 1)
    assert query.rows(query.reader.initialOffset(), query.log[0][1]) == of("orders_a", 1, 2)

    queue.sql("select pgqueue.drop_stream('orders_a')")
    with pytest.raises(PgQueueError, match="'orders_a', which the query has read, was dropped"):
        query.batch()
    query.restart(failOnDataLoss="false")
    queue.send("orders_b", 2, 2)
    assert query.batch() == of("orders_b", 2, 2)
    assert list(query.start["streams"]) == ["orders_b"]
    assert query.rows(*query.log[-2]) == of("orders_b", 1, 1), "what is left of it"
    query.restart(streamPattern="invoices_.*")
    with pytest.raises(PgQueueError, match="which the options no longer name") as error:
        query.batch()
    assert error.value.sqlstate == "PQ005"


@pytest.mark.parametrize("loss", ["true", "false"])
@pytest.mark.parametrize("option", ["streams", "streamPattern"])
def test_a_stream_that_the_options_no_longer_name_is_one_clear_error(
    queue: Queue, start: Start, option: str, loss: str
):
    """Also in the replay of an unfinished batch, which Spark begins without asking for its end."""
    queue.create("t")
    queue.send("s", 1, 2)
    queue.send("t", 1, 3)
    both = "s,t" if option == "streams" else "s|t"
    query = start(**{option: both, "failOnDataLoss": loss})
    query.log = [(query.start, query.latest())]
    for ask in (lambda: query.rows(*query.log[0]), query.latest):
        query.restart(**{option: "s"})
        with pytest.raises(PgQueueError, match="read stream 't', which the options no") as error:
            ask()
        assert error.value.sqlstate == "PQ005"
    query.restart(**{option: both})
    assert sorted(query.rows(*query.log[0])) == of("s", 1, 2) + of("t", 1, 3)


def test_a_dropped_stream_hides_no_stream_that_is_no_longer_named(queue: Queue, start: Start):
    for stream in ("a1", "b1"):
        queue.create(stream)
        queue.send(stream, 1, 1)
    query = start(streamPattern="[abc]1", failOnDataLoss="false")
    assert sorted(query.batch() or []) == of("a1", 1, 1) + of("b1", 1, 1)
    queue.create("c1")
    queue.sql("select pgqueue.drop_stream('a1')")
    query.restart(streamPattern="[ac]1")
    with pytest.raises(PgQueueError, match="read stream 'b1', which the options no"):
        query.latest()


@pytest.mark.promise("kafka: without a consumer, a stream made again")
def test_a_stream_that_was_dropped_and_made_again_is_one_clear_error(queue: Queue, start: Start):
    queue.send("s", 1, 3)
    query = start()
    query.batch()
    queue.sql("select pgqueue.drop_stream('s')")
    with pytest.raises(PgQueueError, match="unknown stream 's'"):
        query.latest()
    queue.create("s")
    for ask in (query.latest, lambda: query.rows(*query.log[0])):
        query.restart(failOnDataLoss="false")
        with pytest.raises(PgQueueError, match="the checkpoint belongs to another stream") as error:
            ask()
        assert error.value.sqlstate == "PQ005"
        assert "checkpointLocation of its own" in (error.value.hint or "")


def test_a_checkpoint_of_a_query_with_a_consumer_is_one_clear_error(queue: Queue, start: Start):
    query = start()
    query.log.append((None, {"reader": "x", "claim": 1, "messages": 1}))
    with pytest.raises(PgQueueError, match="belongs to a query that reads a consumer") as error:
        query.latest()
    assert error.value.sqlstate == "PQ005"
    for offset in ({"streams": {}, "version": 9}, {"orders": {"0": 17}}, 17):  # Kafka's, rate's
        query.log[-1] = (None, offset)
        with pytest.raises(PgQueueError, match="not written by this version"):
            query.latest()


@pytest.mark.promise("kafka: without a consumer, failOnDataLoss")
def test_what_retention_took_fails_the_query_unless_told_otherwise(
    queue: Queue, start: Start, caplog
):
    queue.sql("select pgqueue.set_retention('s', '1 hour')")
    queue.look(maintain)
    queue.send("s", 1, 2)
    queue.send("s", 3, 4)
    query = start(maxMessagesPerTrigger=1)
    assert query.batch() == of("s", 1, 1)
    first = query.log[0]
    query.log.append((query.start, query.latest()))
    forget_old_messages(queue)
    gone = "(1 publication of stream 's' was|2 publications of stream 's' were) trimmed before"
    for ask in (query.latest, lambda: query.rows(*first), lambda: query.rows(*query.log[-1])):
        with pytest.raises(PgQueueError, match=gone) as error:
            ask()
        assert error.value.sqlstate == "PQ010"
        assert "the checkpoint" in error.value.message
        assert "failOnDataLoss" in (error.value.hint or "")
    query.restart(failOnDataLoss="false", maxMessagesPerTrigger=10)
    assert query.rows(*first) == []
    assert query.batch() == [("s", 0)], "it goes on with the first message that there is"
    assert query.batch() is None
    assert re.search(gone, caplog.text)
    queue.send("s", 5, 5)
    caplog.clear()
    assert query.batch() == of("s", 5, 5)
    assert not caplog.text
    assert start().batch() == [("s", 0), ("s", 5)], "earliest is what there is"


def test_available_now_fails_too_when_retention_took_everything(queue: Queue, start: Start):
    queue.sql("select pgqueue.set_retention('s', '1 hour')")
    queue.look(maintain)
    queue.send("s", 1, 1)
    queue.send("s", 2, 2)
    query = start(maxMessagesPerTrigger=1)
    assert query.batch() == of("s", 1, 1)
    for _ in range(9):
        with connect(queue.url) as conn:
            clock.pass_time(conn, timedelta(minutes=20))
            maintain(conn)
    assert queue.sql("select count(*) from pgqueue.messages") == [(0,)]
    query.restart()
    query.reader.prepareForTriggerAvailableNow()
    with pytest.raises(PgQueueError, match="1 publication of stream 's' was trimmed before"):
        query.batch()


def test_messages_for_named_consumers_that_retention_took_are_no_loss(queue: Queue, start: Start):
    queue.sql("select pgqueue.create_consumer('s', 'c')")
    queue.sql("select pgqueue.set_retention('s', '1 hour')")
    queue.look(maintain)
    queue.send("s", 1, 1)
    query = start(maxMessagesPerTrigger=1)
    assert query.batch() == of("s", 1, 1)
    for i in range(3):
        queue.send("s", i, i, consumers=["c"])
    received = "(select distinct claim_id from pgqueue.receive('s', 'c', 100)) r"
    while queue.sql(f"select pgqueue.ack(claim_id) from {received}"):
        pass
    for _ in range(9):
        with connect(queue.url) as conn:
            clock.pass_time(conn, timedelta(minutes=20))
            maintain(conn)
    assert queue.sql("select count(*) from pgqueue.messages") == [(0,)]
    query.restart()
    query.reader.prepareForTriggerAvailableNow()
    assert not any(query.rest())
    query.restart()
    queue.send("s", 5, 5)
    assert [row for rows in query.rest() for row in rows] == of("s", 5, 5)


def test_messages_that_vanish_while_they_are_read_are_missed(queue: Queue, start: Start, caplog):
    queue.send("s", 1, 10)
    query = start()
    end = query.latest()
    queue.sql("delete from pgqueue.messages where seq <= 3")
    with pytest.raises(PgQueueError, match="3 messages of stream s were deleted") as error:
        query.rows(query.start, end)
    assert error.value.sqlstate == "PQ010"
    query.restart(failOnDataLoss="false")
    assert query.rows(query.start, end) == of("s", 4, 10)
    assert "3 messages of stream s were deleted" in caplog.text


def test_available_now_reads_what_is_published_then_and_nothing_later(queue: Queue, start: Start):
    queue.create("t")
    queue.send("s", 1, 25)
    queue.send("t", 1, 3)
    query = start(streams="s,t", maxMessagesPerTrigger=10, minMessagesPerTrigger=10)
    query.reader.prepareForTriggerAvailableNow()
    queue.send("s", 26, 30)
    seen = []
    while (rows := query.batch()) is not None:
        seen += rows
        queue.send("t", 4, 6)
        assert len(query.log) < 5, "it does not end"
    assert sorted(seen) == of("s", 1, 25) + of("t", 1, 3)
    assert len(query.log) == 3, "the last one has fewer than minMessagesPerTrigger"
    query.restart()
    query.reader.prepareForTriggerAvailableNow()
    assert sorted(row for rows in query.rest() for row in rows) == sorted(
        of("s", 26, 30) + of("t", 4, 6) * 3
    )


@pytest.mark.promise("kafka: without a consumer, minOffsetsPerTrigger")
def test_a_batch_waits_for_enough_messages_but_not_for_ever(queue: Queue, start: Start):
    queue.send("s", 1, 1)
    query = start(minMessagesPerTrigger=3, maxTriggerDelay="1 minute")
    assert query.batch() == of("s", 1, 1), "the first one begins at once"
    queue.send("s", 2, 3)
    assert query.batch() is None
    queue.send("s", 4, 4)
    assert query.batch() == of("s", 2, 4)
    queue.send("s", 5, 5)
    assert query.batch() is None
    query.reader.batches._had_messages -= 61
    assert query.batch() == of("s", 5, 5)


def test_a_minimum_may_be_more_than_one_read_finds(queue: Queue, start: Start):
    """Also behind reads that find only messages for others."""
    queue.sql("select pgqueue.create_consumer('s', 'c')")
    queue.send("s", 1, 1)
    query = start(minMessagesPerTrigger=300, maxTriggerDelay="1 minute")
    assert query.batch() == of("s", 1, 1)
    with connect(queue.url) as conn:
        limits.set_constant(conn, "limit_read", 2)
    send = "select count(pgqueue.send('s', i::text)) from generate_series(%s::int, %s) i"
    queue.sql(send, 2, 150)
    queue.sql(
        "select count(pgqueue.send('s', 'x', p_consumers => '{c}')) from generate_series(1, 200)"
    )
    queue.sql(send, 151, 300)
    assert query.batch() is None
    queue.sql(send, 301, 301)
    rows = query.batch() or []
    assert 0 < len(rows) < 300
    assert rows == of("s", 2, 1 + len(rows))
    assert query.batch() is None


@pytest.mark.parametrize("tells_start", [True, False])
def test_a_query_of_one_batch_reads_all_that_is_published(
    queue: Queue, start: Start, monkeypatch, tells_start: bool
):
    """However many reads that takes, beside open transactions and messages for others. PySpark 4.0
    and 4.1 tell of no trigger, so each batch without a limit is such a one.
    """
    queue.create("t", "c")
    queue.send("s", 1, 1)
    limit = ReadAllAvailable() if tells_start else None
    query = start(streams="s,t")
    assert query.batch(limit) == of("s", 1, 1)
    with connect(queue.url) as conn:
        limits.set_constant(conn, "limit_read", 2)
    monkeypatch.setattr("spark_pgqueue.spark.driver.micro_batches.TELLS_START", tells_start)
    send = "select count(pgqueue.send('s', i::text)) from generate_series(%s::int, %s) i"
    for_c = "select count(pgqueue.send('t', 'x', p_consumers => '{c}')) from generate_series(1, 99)"
    with connect(queue.url) as other:
        queue.sql(send, 2, 300)
        other.execute("begin")
        other.execute("select pgqueue.send('s', '999')")
        queue.sql(send, 301, 400)
        queue.sql(for_c)
        queue.send("t", 1, 3)
        assert sorted(query.batch(limit) or []) == of("s", 2, 400) + of("t", 1, 3)
        assert query.batch(limit) is None
        other.execute("commit")
    assert query.batch(limit) == of("s", 999, 999)
    assert query.start["streams"]["s"]["messages"] == 401
    queue.sql(send, 401, 500)
    query.restart(maxMessagesPerTrigger=3)
    assert query.batch() == of("s", 401, 403)


def test_a_query_of_pyspark_4_0_passes_messages_for_others_once(
    queue: Queue, start: Start, monkeypatch
):
    """Each of its looks may be the only one, so each asks for all messages."""
    queue.create("t", "c")
    query = start(stream="t")
    assert query.batch() == [], "where it begins"
    with connect(queue.url) as conn:
        limits.set_constant(conn, "limit_read", 2)
    monkeypatch.setattr("spark_pgqueue.spark.driver.micro_batches.TELLS_START", False)
    read_to, reads = Streams.read_to, []

    def counted(*given: Any) -> Any:
        reads.append(given)
        return read_to(*given)

    monkeypatch.setattr(Streams, "read_to", counted)
    queue.sql(
        "select count(pgqueue.send('t', 'x', p_consumers => '{c}')) from generate_series(1, 640)"
    )
    assert query.batch() is None
    assert len(reads) > 9, "each passes 64"
    reads.clear()
    assert query.batch() is None
    assert len(reads) < 9
    queue.send("t", 1, 3)
    assert query.batch() == of("s", 1, 3)


def test_a_group_that_cannot_be_moved_is_one_clear_error(queue: Queue, start: Start):
    queue.sql("select pgqueue.create_consumer('s', 'c', p_start => 'earliest')")
    queue.sql("select pgqueue.create_group('s', 'wide', 2)")
    queue.sql("select pgqueue.create_group('s', 'worked', 1)")
    queue.sql("select pgqueue.lease_partitions('s', 'worked', 'somebody', '1 hour')")
    queue.send("s", 1, 5)
    for group, code, says in (
        ("nobody", "PQ002", "unknown group 'nobody' of stream 's'"),
        ("c", "PQ006", "consumer 'c' of stream 's' is not a group"),
        ("wide", "PQ006", "it has 2 partitions"),
        ("worked", "PQ006", "it has a worker, 'somebody'"),
    ):
        with pytest.raises(PgQueueError, match=says) as error:
            start(group=group).batch()
        assert error.value.sqlstate == code
    assert queue.backlog("s", "c") == 5


@pytest.mark.promise("guarantee: Asynchronous progress")
def test_a_query_whose_log_falls_behind_is_refused_where_it_notes_how_far_it_is(
    queue: Queue, start: Start
):
    """As with asynchronous progress: retention would take what it has to read again."""
    queue.sql("select pgqueue.create_group('s', 'g', 1, 'earliest')")
    queue.send("s", 1, 9)
    query = start(group="g", maxMessagesPerTrigger=3)
    query.is_logged = False
    assert query.batch() == of("s", 1, 3)
    with pytest.raises(PgQueueError, match="asyncProgressTrackingEnabled"):
        query.batch()
    assert queue.sql("select behind from pgqueue.group_stats") == [(6,)]
    without = start(maxMessagesPerTrigger=3)
    without.is_logged = False
    assert len([without.batch() for _ in range(3)]) == 3


@pytest.mark.promise("kafka: without a consumer, maxOffsetsPerTrigger")
def test_a_batch_keeps_to_a_size(queue: Queue, start: Start):
    queue.send("s", 1000, 1999)
    query = start(maxBytesPerTrigger="1k")
    seen = query.rest()
    assert [row for rows in seen for row in rows] == of("s", 1000, 1999)
    assert all(len(rows) <= 256 for rows in seen), "each has four bytes"
    assert len(seen) <= 5
    queue.sql("select pgqueue.send('s', repeat('0', 4000) || '1')")
    queue.sql("select pgqueue.send('s', '2')")
    assert query.rest() == [of("s", 1, 1), of("s", 2, 2)], "one message at least"


def test_a_size_leaves_the_minimum_of_messages_as_it_is(queue: Queue, start: Start):
    """The minimum counts what is there, and not what fits into the size."""
    queue.sql(
        "select count(*) from pgqueue.send_batch('s', "
        "array(select repeat('0', 97) || i from generate_series(100, 149) i))"
    )
    query = start(maxBytesPerTrigger="1k", minMessagesPerTrigger=20, maxTriggerDelay="1 minute")
    batches = query.rest()
    read = [row for rows in batches for row in rows]
    assert all(8 <= len(rows) <= 10 for rows in batches)
    assert 30 < len(read) <= 40, "fewer than 20 are left"
    query.reader.batches._had_messages -= 61
    read += query.batch() or []
    assert len(read) > 40
    assert read == of("s", 100, 99 + len(read))


def test_a_limit_holds_after_a_long_stretch_of_messages_for_others(queue: Queue, start: Start):
    queue.create("t")
    for stream in "st":
        queue.sql("select pgqueue.create_consumer(%s, 'c')", stream)
    query = start(streams="s,t", maxMessagesPerTrigger=4)
    with connect(queue.url) as conn:
        limits.set_constant(conn, "limit_read", 2)
    for stream in "st":
        queue.sql(
            "select count(pgqueue.send(%s, 'x', p_consumers => '{c}')) "
            "from generate_series(1, 200)",
            stream,
        )
        queue.send(stream, 10, 14)
    batches = [sorted(rows) for rows in query.rest()]
    assert [len(rows) for rows in batches] == [4, 4, 2]
    assert sorted(row for rows in batches for row in rows) == of("s", 10, 14) + of("t", 10, 14)


def test_a_publication_to_any_of_its_streams_wakes_a_query_up(queue: Queue, start: Start):
    queue.create("t")
    query = start(streams="s,t", waitTime="30s", startingOffsets="latest")
    query.batch()
    for stream in ("t", "s"):
        producer = threading.Timer(0.5, queue.send, [stream, 1, 1])
        producer.start()
        before = time.monotonic()
        assert query.batch() == of(stream, 1, 1)
        assert time.monotonic() - before < 10
        producer.join()


@pytest.mark.promise("kafka: without a consumer, startingOffsets, startingTimestamp")
def test_a_query_begins_where_it_is_told(queue: Queue, start: Start):
    queue.send("s", 1, 3)
    at = time.time()
    time.sleep(0.005)
    queue.send("s", 4, 6)
    offset = start(maxMessagesPerTrigger=3).latest()
    for name, value in (
        ("startingOffsets", json.dumps(offset["streams"]["s"] | {"stream": "s"})),
        ("startingOffsets", json.dumps(offset)),
        ("startingOffsets", '{"s": "seq 4"}'),
        ("startingOffsets", json.dumps({"s": str(int(at * 1000) + 1)})),
        ("startingTimestamp", str(int(at * 1000) + 1)),
    ):
        query = start(**{"startingOffsets": None, name: value})
        assert query.batch() == of("s", 4, 6), value


def test_a_place_that_is_none_is_refused_by_the_name_of_the_option(queue: Queue, start: Start):
    queue.create("t")
    queue.send("s", 1, 1)
    foreign = start(stream="t").latest()["streams"]["t"]
    for place, says in (
        (foreign, "option startingOffsets belongs to another stream"),
        (foreign | {"next": 0}, "option startingOffsets is not an offset"),
        ("seq 7", "option startingOffsets, as a number, must be seq 1 to seq 2"),
    ):
        query = start(startingOffsets=json.dumps({"s": place}))
        with pytest.raises(PgQueueError, match=says):
            query.latest()
    query = start(streamPattern="[st]", startingOffsets='{"s": "latest"}')
    with pytest.raises(PgQueueError, match="startingOffsets has no position for stream 't'"):
        query.latest()


def test_data_of_two_kinds_are_not_one_column(queue: Queue, start: Start, monkeypatch):
    monkeypatch.setattr("spark_pgqueue.spark.stream_source.streams.DISCOVERY_SECONDS", 0)
    queue.create("j", kind="json")
    queue.send("j", 1, 1)
    queue.send("s", 1, 1)
    query = start(streamPattern=".")
    assert query.batch() == of("j", 1, 1) + of("s", 1, 1)
    queue.create("b", kind="binary")
    for ask in (query.latest, lambda: start(streams="s,b")):
        with pytest.raises(PgQueueError, match="column data cannot be both"):
            ask()
    with pytest.raises(PgQueueError, match="unknown stream 'nowhere'"):
        start(stream="nowhere")


@pytest.mark.longer
def test_a_standby_is_read_from(pair):  # noqa: F811
    primary, standby = pair
    queue = Queue(primary.url, Path())
    queue.sql("set synchronous_commit = on; select pgqueue.send('s', '1')")
    query = Query(standby.url, streams="s")
    with connect(primary.url) as conn, connect(standby.url) as there:
        follow(conn, there)
        assert query.batch() == of("s", 1, 1)
        conn.execute("set synchronous_commit = on")
        conn.execute("select pgqueue.send('s', '2')")
        follow(conn, there)
        assert query.rest() == [of("s", 2, 2)]
    assert (query.reader.reportLatestOffset() or {})["backlog"] == 0
    query.restart(startingOffsets="latest")
    assert query.rows(*query.log[0]) == of("s", 1, 1)
    query.stop()
