"""A query from source to sink, each side with a role that may do just that."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from pyspark.sql import DataFrame

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


ACTIONS = {
    "ack": ("consumer", "ready", "done"),
    "nack": ("consumer", "ready", "delayed"),
    "dead_letter": ("consumer", "ready", "dead"),
    "redrive": ("admin", "dead", "delivered"),
    "retry": ("admin", "delayed", "delivered"),
}
"""The role of each action, the state of its message before, and what is true afterwards."""


@pytest.mark.parametrize("by", ["column", pytest.param("option", marks=pytest.mark.longer)])
def test_each_action_needs_one_role_and_no_other(
    queue: Queue, new_role: Callable[..., str], by: str
) -> None:
    """In foreachBatch, where the write names its query, and says its version."""
    queue.create("from", "reads", *ACTIONS)
    queue.send("from", 1, 1)
    for action, (_, before, _) in ACTIONS.items():
        if before != "ready":
            call = "dead_letter(claim_id)" if before == "dead" else "nack(claim_id, null, '1 hour')"
            queue.sql(f"select pgqueue.{call} from pgqueue.receive('from', '{action}')")
    roles = {role: new_role(role) for role in ("consumer", "admin")}

    def act(batch: DataFrame, batch_id: int) -> None:
        for action, (role, _, _) in ACTIONS.items():
            rows = batch.selectExpr("seq", "interval 1 hour as delay")
            options = {"consumer": action, "action": action}
            if action == "nack":  # of a message that the query holds
                options["consumer"] = "reads"
            if by == "column":
                rows = rows.selectExpr("*", f"'{options.pop('action')}' as action")
            queue.write(
                rows, "from", url=roles[role], txnAppId=action, txnVersion=str(batch_id), **options
            )

    frame = queue.load("from", "reads", url=roles["consumer"])
    queue.collect(frame, each=act).awaitTermination()
    states = dict(queue.sql("select consumer, state from pgqueue.message_states"))
    for action, (_, _, after) in ACTIONS.items():
        consumer = "reads" if action == "nack" else action
        if queue.sql(f"select seq from pgqueue.receive('from', '{consumer}')"):
            states[consumer] = "delivered"
        assert states.get(consumer, "done") == after, action


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
