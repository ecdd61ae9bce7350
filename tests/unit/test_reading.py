"""Reading without claiming, in the client and on the command line."""

import json
import signal
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from typer.testing import CliRunner

import spark_pgqueue
from spark_pgqueue.client import StoredMessage, reading
from spark_pgqueue.command_line import cli
from spark_pgqueue.postgres import connection
from spark_pgqueue.postgres.errors import PgQueueError
from tests.processes import started, wait_until
from tests.sql import limits

CONSUMER = None


def data(batches) -> list[Any]:
    return [message.data for batch in batches for message in batch.messages]


@pytest.mark.previous_version
def test_batches_go_on_after_an_offset(queue):
    queue.send_batch("s", [str(i) for i in range(7)], keys=["k"] * 7)
    sizes, offset = [], None
    for batch in queue.read("s", max_messages=3):
        sizes.append(len(batch.messages))
        offset = json.loads(json.dumps(batch.offset))
    assert sizes == [3, 3, 1]
    assert offset is not None
    queue.send("s", "later", headers={"h": [1]})
    (batch,) = queue.read("s", offset)
    (message,) = batch.messages
    assert message == StoredMessage(8, None, "later", {"h": [1]}, message.inserted_at)
    assert abs(message.inserted_at - datetime.now(UTC)) < timedelta(minutes=1)
    assert list(queue.read("s", batch.offset)) == []
    begin = queue.start_offset("s")
    before = queue.read_between("s", begin, offset)
    assert queue.read_between("s", begin, batch.offset) == [*before, message]
    assert queue.read_to("s", begin, 5)["messages"] == 5


@pytest.mark.parametrize("way", ["read", "read_between"])
def test_it_is_said_that_retention_came_between_plan_and_payloads(queue, conn, monkeypatch, way):
    """A part of the batch is deleted when its ranges are known, before its payloads are read."""
    queue.send_batch("s", ["x"] * 3)
    begin, end = queue.start_offset("s"), queue.start_offset("s", "latest")
    whole = reading.messages

    def later(*arguments):
        conn.execute("delete from pgqueue.messages where seq <= 2")
        return whole(*arguments)

    monkeypatch.setattr(reading, "messages", later)
    with pytest.raises(PgQueueError, match=r"retention deleted 2 messages of stream 's'") as caught:
        list(queue.read("s") if way == "read" else queue.read_between("s", begin, end))
    assert caught.value.sqlstate == "PQ010"


def test_reading_begins_where_it_is_told(queue):
    queue.send("s", "old")
    now = datetime.now(UTC)
    queue.send("s", "new")
    assert data(queue.read("s")) == data(queue.read("s", "earliest")) == ["old", "new"]
    assert data(queue.read("s", now)) == ["new"]
    assert data(queue.read("s", "latest")) == []


def test_a_read_that_does_not_wait_ends_beside_messages_for_others(queue, url, monkeypatch):
    """However fast they come."""
    queue.create_consumer("s", "c")
    rows, count = queue._statements.rows, 0
    with spark_pgqueue.connect(url) as producer:

        def send_and_read(*args, **named):
            nonlocal count
            count += 1
            assert count < 10
            producer.send("s", "for c", consumers=["c"])
            return rows(*args, **named)

        monkeypatch.setattr(queue._statements, "rows", send_and_read)
        assert next(queue.read("s"), None) is None


def test_a_read_that_does_not_wait_passes_all_messages_for_others(queue, conn):
    """However many publications one call passes."""
    limits.shrink(conn)
    queue.create_consumer("s", "c")
    for _ in range(20):
        queue.send("s", "for c", consumers=["c"])
    queue.send("s", "for all")
    assert data(queue.read("s")) == ["for all"]


@pytest.mark.parametrize("kind", ["json", "binary"])
def test_what_was_sent_is_what_is_read(queue, kind):
    sent = {"json": ['{"a": 1}', "[]"], "binary": [b"\0\xff", b""]}[kind]
    queue.create_stream("t", kind)
    queue.send_batch("t", sent)
    assert data(queue.read("t")) == sent


def test_what_is_no_offset_is_refused(queue):
    queue.send("s", "x")
    queue.create_stream("t")
    (batch,) = queue.read("s")
    for offset, said in [
        (7, "offset must be a str"),
        ("soon", "earliest, latest"),
        ({}, "it has no stream or incarnation"),
        (datetime(2026, 1, 1), "time zone"),
        ({**batch.offset, "next": 9}, "ahead of the database"),
    ]:
        with pytest.raises(PgQueueError, match=said):
            list(queue.read("s", offset))
    with pytest.raises(PgQueueError, match="belongs to stream 's', not to stream 't'"):
        list(queue.read("t", batch.offset))
    with pytest.raises(PgQueueError, match="unknown stream 'u'"):
        list(queue.read("u"))
    with pytest.raises(PgQueueError, match="max_messages"):
        queue.read("s", max_messages=0)
    with queue.transaction(), pytest.raises(PgQueueError, match="wait requires"):
        queue.read("s", wait=timedelta(seconds=1))


def test_tail_prints_what_there_is(queue, run):
    queue.send_batch("s", ["one", "two\n"], keys=["k", None])
    result = CliRunner().invoke(cli.app, ["tail", "s", "--from", "earliest", "--no-follow"])
    assert result.stdout == "1\tk\tone\n2\t\ttwo\\n\n"
    offset = result.stderr.removeprefix("Offset: ").strip()
    queue.send("s", "three", headers={"h": 1})
    (line,) = run("tail", "s", "--from", offset, "--no-follow", "--json").splitlines()
    assert (json.loads(line)["seq"], json.loads(line)["headers"]) == (3, {"h": 1})
    assert run("tail", "s", "--from", "earliest", "--max", 1) == "1\tk\tone\n"
    assert run("tail", "s", "--no-follow") == ""
    assert "earliest, latest" in run("tail", "s", "--from", "soon", code=2)
    assert "unknown stream 't'" in run("tail", "t", code=1)


def test_tail_follows_until_it_is_ended(queue, url, conn):
    with started("tail", "s", url=url) as process:
        assert process.stdout is not None
        waits = "select _pgqueue.is_waited_for(stream_id) from pgqueue.streams"
        wait_until(lambda: conn.execute(waits).fetchone() == (True,))
        for each in ("one", "two"):
            queue.send("s", each)
            assert process.stdout.readline().endswith(f"{each}\n")
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 130


def test_a_batch_of_many_ranges_is_read_in_order(queue, url):
    with connection.connect(url) as other, other.transaction():
        sent = []
        for i in range(20):
            if i % 2:
                sent.append(queue.send("s", str(i)))
            else:
                other.execute("select pgqueue.send('s', 'not yet')")
        (batch,) = queue.read("s")
        assert [m.seq for m in batch.messages] == sent == sorted(sent)
        assert len(queue.read_between("s", queue.start_offset("s"), batch.offset)) == 10
