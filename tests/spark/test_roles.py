"""A query from source to sink, each side with a role that may do just that."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from spark_pgqueue.postgres import schema
from spark_pgqueue.postgres.connection import connect
from tests.conftest import user_of
from tests.spark.conftest import Queue

pytestmark = pytest.mark.spark


def test_a_consumer_reads_and_a_producer_writes_without_further_grants(
    queue: Queue, new_role: Callable[..., str]
) -> None:
    for stream in ("from", "to"):
        queue.create(stream, "c", kind="binary", ordering="key")
    queue.sql(
        "select pgqueue.send('from', null, 'k', '{\"h\": \"1\"}', p_data_bytes => i::text::bytea)"
        " from generate_series(1, 20) i"
    )
    source = queue.load("from", "c", url=new_role("consumer"), visibilityTimeout="1 min")
    frame = source.select("data", "key", "headers")
    query = queue.publish(frame, "to", url=new_role("producer"))
    query.awaitTermination(60)
    assert query.exception() is None
    assert queue.backlog("from", "c") == 0
    assert queue.sent("to") == sorted(str(i) for i in range(1, 21))


def test_a_consumer_that_may_not_create_consumers_is_told_so(
    queue: Queue, new_role: Callable[..., str], fails
) -> None:
    queue.create("s")
    options = {"url": new_role("consumer"), "createConsumer": "true"}
    message = fails(queue.collect(queue.load("s", "my own", **options)))
    assert "option createConsumer is true and stream 's' has no consumer 'my own'" in message
    assert "permission denied for function create_consumer" in message
    assert "pgqueue consumer create s 'my own'" in message
    assert "pgqueue grant admin ROLE" in message
    with connect(queue.url) as conn:
        schema.grant(conn, "admin", user_of(options["url"]))
    queue.collect(queue.load("s", "my own", **options), "again").awaitTermination()
    assert queue.backlog("s", "my own") == 0
