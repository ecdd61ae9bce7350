"""What becomes of a query's last micro-batch when it ends, and what is done with its checkpoint."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from pyspark.sql.streaming.query import StreamingQuery
from typer.testing import CliRunner

from spark_pgqueue.command_line import cli
from tests.spark.conftest import Queue, fail, wait_until
from tests.spark.test_source import driver_side_processes
from tests.sql import clock, internals

pytestmark = pytest.mark.spark

Run = Callable[..., Any]


@pytest.fixture
def run(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run `pgqueue checkpoint` of the test's checkpoint; the JSON it printed, or its error."""
    monkeypatch.setenv("PGQUEUE_URL", queue.url)

    def run(*arguments: str, code: int = 0) -> Any:
        words = ["checkpoint", queue.checkpoint(), "--json", *arguments]
        result = CliRunner().invoke(cli.app, words)
        assert result.exit_code == code, result.output
        return result.stderr if code else json.loads(result.stdout)

    return run


def once(queue: Queue, **options: Any) -> None:
    """Run the query that collects with trigger once."""
    frame = queue.load("s", "c", **options)
    writer = frame.writeStream.foreachBatch(lambda batch, _: None).trigger(once=True)
    writer.option("checkpointLocation", queue.checkpoint()).start().awaitTermination()


def await_backlog(queue: Queue, messages: int, stream: str = "s") -> None:
    end = time.monotonic() + 60
    while (backlog := queue.backlog(stream, "c")) != messages:
        assert time.monotonic() < end, backlog
        time.sleep(0.05)


@pytest.mark.promise("guarantee: The end of a query")
def test_trigger_once_acknowledges_where_it_is_told_its_checkpoint(queue: Queue, run: Run):
    """Or by the command line."""
    queue.create("s", "c")
    queue.send("s", 1, 10)
    once(queue)
    assert queue.backlog("s", "c") == 10
    (source,) = run()["sources"]
    assert (source["consumer"], source["finished"], source["unfinished"]) == ("c", 10, 0)
    assert run("--ack")["acknowledged"] == 10
    assert run("--ack")["acknowledged"] == 0
    assert queue.backlog("s", "c") == 0
    queue.send("s", 11, 20)
    once(queue, checkpointLocation=Path(queue.checkpoint()).as_uri())
    await_backlog(queue, 0)


@pytest.mark.longer
def test_a_query_that_ends_acknowledges_what_it_had_finished_and_nothing_else(queue: Queue, fails):
    queue.create("s", "c")
    queue.send("s", 1, 10)
    frame = queue.load("s", "c", maxMessagesPerTrigger=6, checkpointLocation=queue.checkpoint())

    def start(each: Callable[..., None], pause: str) -> StreamingQuery:
        writer = frame.writeStream.foreachBatch(each).trigger(processingTime=pause)
        return writer.option("checkpointLocation", queue.checkpoint()).start()

    query = start(lambda batch, _: None, "1 hour")
    wait_until(Path(queue.checkpoint(), "commits", "0").exists, query)
    assert queue.backlog("s", "c") == 10
    query.stop()
    await_backlog(queue, 4)
    fails(start(fail, "1 second"))
    psutil.wait_procs(driver_side_processes(), timeout=20)
    assert queue.backlog("s", "c") == 4
    assert len(queue.look(internals.claims)) == 1


def test_what_an_unfinished_checkpoint_holds_is_released(queue: Queue, run: Run, fails):
    queue.create("s", "c")
    queue.send("s", 1, 10)

    def fail(batch, batch_id):
        if batch_id == 1:
            raise RuntimeError("the sink fails")

    frame = queue.load("s", "c", maxMessagesPerTrigger=6)
    fails(queue.collect(frame, each=fail))
    found = run()
    (source,) = found["sources"]
    assert (found["batch"], found["finished_batch"], found["is_finished"]) == (1, 0, False)
    assert (source["finished"], source["unfinished"], source["backlog"]) == (0, 4, 0)
    assert run("--ack")["acknowledged"] == 0
    assert "micro-batch 1" in run("--fork", queue.checkpoint("copy"), code=1)
    assert not Path(queue.checkpoint("copy")).exists()
    assert "is running, or stopped recently" in run("--release", "--yes", code=1)
    queue.look(clock.end_leases)
    done = run("--release", "--yes")
    assert (done["acknowledged"], done["released"]) == (0, 4)
    (source,) = done["sources"]
    assert source["known"] is False
    rows = queue.sql("select data, deliver_count from pgqueue.receive('s', 'c', 10)")
    assert sorted(rows) == [(str(n), 1) for n in (10, 7, 8, 9)]
    assert "PQ005" in fails(queue.collect(frame))
    assert "does not exist in this database" in run("--release", "--yes", code=1)


@pytest.mark.longer
def test_a_fork_and_its_origin_go_on_beside_each_other(queue: Queue, run: Run):
    queue.create("s", "c")
    queue.create("out")

    def publish(checkpoint: str) -> None:
        frame = queue.load("s", "c").select("key", "data")
        queue.publish(frame, "out", checkpoint).awaitTermination()

    queue.send("s", 1, 10)
    publish("checkpoint")
    forked = run("--fork", queue.checkpoint("copy"))
    assert forked["fork_query_id"] != forked["query_id"]
    queue.send("s", 11, 20)
    publish("copy")
    queue.send("s", 21, 30)
    publish("checkpoint")
    queue.send("s", 31, 40)
    publish("copy")
    assert sorted(map(int, queue.sent("out"))) == list(range(1, 41))
    assert queue.backlog("s", "c") == 0
