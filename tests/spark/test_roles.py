"""A query from source to sink, each side with a role that may do just that."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from spark_pgqueue.postgres import schema
from spark_pgqueue.postgres.connection import connect
from tests.spark.conftest import Queue
from tests.sql import internals

pytestmark = pytest.mark.spark


@pytest.fixture
def members(queue: Queue) -> Iterator[dict[str, str]]:
    """The url of a role that is a consumer, and of one that is a producer."""
    roles = {group: f"pgqueue_test_{uuid.uuid4().hex[:12]}" for group in ("consumer", "producer")}
    with connect(queue.url) as conn:
        for group, role in roles.items():
            conn.execute(f"create role {role} login".encode())
            schema.grant(conn, group, role)
    yield {group: make_conninfo(queue.url, user=role) for group, role in roles.items()}
    for role in roles.values():
        queue.sql(f"drop owned by {role}")
        queue.sql(f"drop role {role}")


def test_a_consumer_reads_and_a_producer_writes_without_further_grants(
    queue: Queue, members: dict[str, str]
) -> None:
    for kind, columns in (("text", "key"), ("binary", "key, headers")):
        queue.create(f"{kind}_from", "c", kind=kind, ordering="key")
        queue.create(f"{kind}_to", kind=kind)
        payload = "p_data" if kind == "text" else "p_data_bytes"
        for i in range(20):
            queue.sql(
                f"select pgqueue.send(%s, p_key => 'k', p_headers => '{{\"h\": \"1\"}}',"
                f" {'p_data => null, ' * (kind == 'binary')}{payload} => %s)",
                *(f"{kind}_from", str(i) if kind == "text" else str(i).encode()),
            )
        queue.sql("select pgqueue.create_consumer(%s, 'e', 'earliest')", f"{kind}_from")
        source = queue.load(f"{kind}_from", "e", url=members["consumer"], visibilityTimeout="1 min")
        frame = source.selectExpr("data", *columns.split(", "))
        query = queue.publish(frame, f"{kind}_to", kind, url=members["producer"])
        query.awaitTermination(60)
        assert query.exception() is None
        assert queue.backlog(f"{kind}_from", "e") == 0
        expected = sorted(str(i) for i in range(20))
        assert queue.look(internals.data_published, f"{kind}_to") == expected


def test_a_consumer_that_may_not_create_consumers_is_told_so(
    queue: Queue, members: dict[str, str], fails
) -> None:
    queue.create("s")
    options = {"url": members["consumer"], "createConsumer": "true"}
    message = fails(queue.collect(queue.load("s", "my own", **options)))
    assert "option createConsumer is true and stream 's' has no consumer 'my own'" in message
    assert "permission denied for function create_consumer" in message
    assert "pgqueue consumer create s 'my own'" in message
    assert "pgqueue grant admin ROLE" in message
    with connect(queue.url) as conn:
        schema.grant(conn, "admin", str(conninfo_to_dict(members["consumer"])["user"]))
    queue.collect(queue.load("s", "my own", **options), "again").awaitTermination()
    assert queue.backlog("s", "my own") == 0
