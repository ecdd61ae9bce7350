"""Sources of one Spark application: two of them do not share a consumer unawares, nor wait in turn.

The messages of a consumer go to whoever asks first. So in a self-join one side would get them all
and the other none: nothing comes out, and all is acknowledged.
"""

from __future__ import annotations

import time

import pytest
from pyspark.sql import functions as F

from spark_pgqueue.spark.driver.registration import ReaderRegistration
from tests.processes import Child
from tests.spark.conftest import Queue, numbers, wait_until

pytestmark = pytest.mark.spark


@pytest.mark.promise("guarantee: Two queries on one consumer")
def test_a_query_that_reads_a_consumer_twice_is_refused_and_acknowledges_nothing(
    queue: Queue, fails
):
    queue.create("s", "c")
    queue.send("s", 1, 100)
    left, right = (queue.load("s", "c").select("key").alias(n) for n in "lr")
    message = fails(queue.collect(left.join(right, F.expr("l.key = r.key"))))
    assert "PQ009" in message
    assert "consumer 'c' of stream 's' is read twice" in message
    assert "shareConsumer" in message
    assert queue.backlog("s", "c") == 100


@pytest.mark.longer
@pytest.mark.promise("guarantee: Two queries on one consumer")
def test_a_second_query_of_an_application_is_refused_unless_both_say_so(queue: Queue, fails):
    queue.create("s", "c")
    shared = {"shareConsumer": "true"}
    for first, second in (({}, shared), (shared, {})):
        query = queue.collect(queue.load("s", "c", **first), "1", available_now=False)
        wait_until(lambda query=query: bool(query.lastProgress), query)
        assert "PQ009" in fails(queue.collect(queue.load("s", "c", **second), "2"))
        assert query.isActive
        query.stop()


def test_a_query_is_stopped_and_started_again_at_once(queue: Queue):
    queue.create("s", "c")
    frame = queue.load("s", "c")
    for run in range(2):
        query = queue.collect(frame, available_now=False)
        queue.send("s", run + 1, run + 1)
        wait_until(lambda run=run: len(queue.rows()) > run, query)
        query.stop()
    queue.collect(frame).awaitTermination()
    assert sorted(queue.data()) == numbers(1, 2)


def test_a_source_that_is_killed_leaves_its_seat():
    """With kill -9, and while another waits for the seat."""
    name = f"test-{time.time_ns()}"
    script = """
        import os, sys, time
        from spark_pgqueue.spark.driver import registration
        registration._process = lambda pid: "of a test"  # one for all of them
        reader = registration.ReaderRegistration(sys.argv[1], sys.argv[2] == "shared")
        print("taken" if reader.register(float(sys.argv[3])) else "refused", flush=True)
        time.sleep(60)
    """
    with Child(script, name, "alone", "5") as first:
        first.wait_for("taken")
        with Child(script, name, "shared", "0.1") as second:
            second.wait_for("refused")
        with Child(script, name, "alone", "30") as third:
            time.sleep(0.5)
            assert "taken" not in third.output
            first.kill()
            third.wait_for("taken")
            third.kill()
    with Child(script, name, "shared", "5") as first, Child(script, name, "shared", "5") as second:
        first.wait_for("taken")
        second.wait_for("taken")
        with Child(script, name, "alone", "0.1") as third:
            third.wait_for("refused")


def test_files_of_seats_that_were_left_are_deleted():
    old, new = (
        ReaderRegistration(f"old-{time.time_ns()}", False),
        ReaderRegistration(f"new-{time.time_ns()}", False),
    )
    assert old.register()
    assert old._path.exists()
    assert new.register()
    assert old._path.exists(), "somebody sits there"
    old.unregister()
    new.unregister()
    assert new.register()
    assert not old._path.exists()
    new.unregister()


@pytest.mark.longer
@pytest.mark.promise("kafka: with a consumer, subscribe")
def test_a_source_without_messages_does_not_delay_the_others_of_its_query(queue: Queue):
    """Spark asks one after the other, and each would wait for messages as long as it may."""
    queue.create("busy", "c")
    queue.create("idle", "c")
    queue.send("busy", 1, 200)
    frame = queue.load("idle", "c", waitTime="5s").union(
        queue.load("busy", "c", waitTime="5s", maxMessagesPerTrigger=20)
    )
    query = queue.collect(frame, available_now=False)
    wait_until(lambda: len(queue.rows()) == 200, query)
    waits = [
        sum(progress.durationMs.get(step, 0) for step in ("latestOffset", "getBatch"))
        for progress in query.recentProgress
        if progress.numInputRows
    ]
    assert max(waits[1:]) < 1000


# Queries one after the other, each with a checkpoint of its own; `send` sends before the next one.
APPLICATION = """
    import sys
    import spark_pgqueue
    from tests.sessions import session
    url, checkpoint, *hows = sys.argv[1:]
    spark = session("local[2]")

    def load(**options):
        source = spark.readStream.format("pgqueue").options(url=url, stream="s", **options)
        return source.load()

    def run(how, consumer):
        def each(batch, batch_id):
            if how == "fail":
                raise RuntimeError("the sink fails")
            print(f"rows of {consumer}:", batch.count(), flush=True)

        most = 5 if how == "asynchronously" else 100
        frame = load(consumer=consumer, visibilityTimeout="5 minutes", maxMessagesPerTrigger=most)
        if how == "beside rate":  # which has no availableNow
            frame = frame.select("data").union(
                spark.readStream.format("rate").load().where("value < 0").selectExpr(
                    "string(value)"))
        if how == "asynchronously":
            writer = frame.writeStream.format("noop")
            writer = writer.option("asyncProgressTrackingEnabled", "true")
        else:
            writer = frame.writeStream.foreachBatch(each)
            trigger = {"once": True} if how == "once" else {"availableNow": True}
            writer = writer.trigger(**trigger)
        writer.option("checkpointLocation", f"{checkpoint} {how} {consumer}").start(
            ).awaitTermination()

    for how in hows:
        if how == "send":
            with spark_pgqueue.connect(url) as client:
                client.send_batch("s", ["x"] * 10)
            continue
        try:
            run(*how.split("/"))
            print("done", how, flush=True)
        except Exception as error:
            print("failed", how, error, flush=True)
"""


@pytest.mark.longer
@pytest.mark.promise("guarantee: The end of a query", "guarantee: Asynchronous progress")
def test_queries_are_told_what_they_leave_claimed_and_asynchronous_progress_is_refused(
    queue: Queue, spark_environment
):
    """A new checkpoint beside a failed one is told why it finds nothing. A query that runs once is
    told that its batch stays claimed; its next run acknowledges that batch. With asynchronous
    progress a checkpoint would fall behind what the query acknowledged.
    """
    queue.create("s", "held", "once", "c")
    queue.send("s", 1, 10)
    hows = ["fail/held", "new/held", "once/once", "send", "once/once", "send", "beside rate/once"]
    hows += ["send", "now/once", "asynchronously/c"]
    with Child(APPLICATION, queue.url, queue.checkpoint(), *hows) as child:
        assert child.wait() == 0, child.output
        output = child.output
    assert "failed fail" in output
    assert "done new" in output
    told = "10 messages of consumer held are held by a query with another checkpoint, until 20"
    assert output.count(told) == 1
    assert output.count("rows of once: 10") == 4
    assert output.count("and ends without acknowledging it") == 3
    assert queue.backlog("s", "once") == 20
    (_, said) = output.split("failed asynchronously")
    assert "remove the option asyncProgressTrackingEnabled" in said
    assert queue.backlog("s", "c") == 35
    queue.collect(queue.load("s", "c"), "checkpoint asynchronously c").awaitTermination()
    assert len(queue.rows()) == 35
    assert queue.backlog("s", "c") == 0
